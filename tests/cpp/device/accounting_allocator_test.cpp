#include <roundpipe/device/virtual/accounting_allocator.h>

#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using namespace roundpipe::device;

namespace {

constexpr int64_t kMiB_bytes = 1 << 20;

at::Tensor bytes(int64_t size_bytes) { return at::empty({size_bytes}, at::kByte); }

MemoryAccount* new_account(int64_t limit_bytes = 0, bool poison = false) {
  install_accounting_allocator();
  return make_account("virtual:7", limit_bytes, poison);
}

}  // namespace

TEST_CASE("account: counts what is allocated in its scope, on this thread only, until it is freed") {
  MemoryAccount* account = new_account();
  const at::Tensor before = bytes(kMiB_bytes);
  {
    const AccountScope scope(account);
    const at::Tensor a = bytes(kMiB_bytes);
    CHECK(account->current_bytes == kMiB_bytes);
    {
      const at::Tensor b = bytes(2 * kMiB_bytes);
      CHECK(account->current_bytes == 3 * kMiB_bytes);
    }
    CHECK(account->current_bytes == kMiB_bytes);
    std::thread([&] { CHECK(bytes(kMiB_bytes).defined()); }).join();
    CHECK(account->peak_bytes == 3 * kMiB_bytes);
  }
  CHECK(account->current_bytes == 0);
  const at::Tensor after = bytes(kMiB_bytes);
  CHECK(account->current_bytes == 0);
}

TEST_CASE("account: a tensor belongs to its account after the scope, and whoever frees it") {
  MemoryAccount* account = new_account();
  MemoryAccount* other = new_account();
  at::Tensor tensor;
  {
    const AccountScope scope(account);
    tensor = bytes(kMiB_bytes);
  }
  CHECK(account->current_bytes == kMiB_bytes);
  std::thread([moved = std::move(tensor), other]() mutable {
    const AccountScope scope(other);
    moved.reset();
  }).join();
  CHECK(account->current_bytes == 0);
  CHECK(other->current_bytes == 0);
}

TEST_CASE("account: scopes nest, and a null one counts nobody") {
  MemoryAccount* outer = new_account();
  MemoryAccount* inner = new_account();
  const AccountScope outer_scope(outer);
  const at::Tensor a = bytes(100);
  at::Tensor b;
  at::Tensor c;
  {
    const AccountScope inner_scope(inner);
    b = bytes(200);
    const AccountScope nobody(nullptr);
    c = bytes(400);
  }
  const at::Tensor d = bytes(800);
  CHECK(outer->current_bytes == 900);
  CHECK(inner->current_bytes == 200);
}

TEST_CASE("account: the cap holds to the byte, the error names device, sizes and remedy, and nothing leaks") {
  MemoryAccount* account = new_account(kMiB_bytes);
  const AccountScope scope(account);
  const at::Tensor half = bytes(kMiB_bytes / 2);
  const at::Tensor rest = bytes(kMiB_bytes / 2);
  CHECK(account->current_bytes == kMiB_bytes);
  try {
    bytes(1);
    FAIL("one byte over the cap was granted");
  } catch (const c10::OutOfMemoryError& error) {
    const std::string message = error.what_without_backtrace();
    INFO(message);
    CHECK(message.starts_with("[virtual:7] out of memory: 1 B were asked for, 1.00 MiB of 1.00 MiB"));
    CHECK(message.find("memory=") != std::string::npos);
  }
  CHECK(account->current_bytes == kMiB_bytes);
  CHECK(account->peak_bytes == kMiB_bytes);
}

TEST_CASE("account: computing works as ever inside a scope, and intermediate results count") {
  MemoryAccount* account = new_account();
  const at::Tensor a = at::randn({64, 64});
  const at::Tensor b = at::randn({64, 64});
  const at::Tensor expected = at::matmul(a, b).relu();
  at::Tensor result;
  {
    const AccountScope scope(account);
    result = at::matmul(a, b).relu();
  }
  CHECK(at::equal(result, expected));
  CHECK(account->current_bytes == 64 * 64 * 4);
  CHECK(account->peak_bytes >= 2 * 64 * 64 * 4);
  CHECK(reinterpret_cast<uintptr_t>(result.data_ptr()) % 64 == 0);
}

TEST_CASE("account: an empty tensor costs nothing") {
  MemoryAccount* account = new_account(1);
  const AccountScope scope(account);
  const at::Tensor empty = at::empty({0, 5});
  CHECK(account->current_bytes == 0);
  CHECK(empty.numel() == 0);
}

TEST_CASE("account: resizing a storage keeps the count right") {
  MemoryAccount* account = new_account();
  const AccountScope scope(account);
  at::Tensor tensor = bytes(100);
  tensor.resize_({1000});
  CHECK(account->current_bytes == 1000);
  tensor.reset();
  CHECK(account->current_bytes == 0);
}

#if !defined(__SANITIZE_ADDRESS__)  // reads freed memory on purpose
TEST_CASE("account: in debug mode freed memory is not the number it was") {
  MemoryAccount* account = new_account(0, /*poison=*/true);
  const AccountScope scope(account);
  // Beyond the first words, which the host's allocator may use for itself; small enough to stay mapped.
  constexpr int64_t kCount = 4096;
  at::Tensor tensor = at::ones({kCount});
  const volatile float* data = tensor.data_ptr<float>();
  CHECK(data[kCount / 2] == 1.0f);
  tensor.reset();
  CHECK(std::isnan(data[kCount / 2]));
}
#endif

TEST_CASE("account: threads that allocate, hand over and free concurrently leave an exact count") {
  MemoryAccount* account = new_account();
  constexpr int kThreads = 4;
  constexpr int kRounds = 300;
  std::vector<std::vector<at::Tensor>> kept(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const AccountScope scope(account);
      for (int round = 0; round < kRounds; ++round) {
        at::Tensor tensor = bytes(1 + (round * 37 + t) % 5000);
        if (round % 3 == 0) kept[t].push_back(std::move(tensor));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t kept_bytes = 0;
  for (const auto& tensors : kept) {
    for (const at::Tensor& tensor : tensors) kept_bytes += tensor.numel();
  }
  CHECK(account->current_bytes == kept_bytes);
  CHECK(account->peak_bytes >= kept_bytes);
  threads.clear();
  for (int t = 0; t < kThreads; ++t) threads.emplace_back([&, t] { kept[(t + 1) % kThreads].clear(); });
  for (std::thread& thread : threads) thread.join();
  CHECK(account->current_bytes == 0);
}

TEST_CASE("account: threads that race for a cap never pass it, and refused bytes are not counted") {
  constexpr int64_t kLimit_bytes = 10'000;
  MemoryAccount* account = new_account(kLimit_bytes);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      const AccountScope scope(account);
      for (int round = 0; round < 300; ++round) {
        try {
          const at::Tensor a = bytes(4000);
          const at::Tensor b = bytes(3000);
        } catch (const c10::OutOfMemoryError&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(account->current_bytes == 0);
  CHECK(account->peak_bytes <= kLimit_bytes);
}
