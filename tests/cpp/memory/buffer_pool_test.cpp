#include <roundpipe/memory/buffer_pool.h>

#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using roundpipe::memory::BufferPool;

TEST_CASE("buffer pool: a piece comes back when the last tensor in it is gone") {
  const BufferPool pool(64, /*pinned=*/false);
  at::Tensor first = pool.take();
  CHECK(first.numel() == 64);
  const bool is_bytes = first.scalar_type() == at::kByte;
  CHECK(is_bytes);
  const uint8_t* const place = first.const_data_ptr<uint8_t>();
  at::Tensor view = first.narrow(0, 8, 4);
  first.reset();
  at::Tensor second = pool.take();
  CHECK(second.const_data_ptr<uint8_t>() != place);  // a view still holds the first
  view.reset();
  const at::Tensor third = pool.take();
  CHECK(third.const_data_ptr<uint8_t>() == place);
  CHECK(pool.host_bytes() == 2 * 64);
}

TEST_CASE("buffer pool: keeps one piece, gives the others back to the system") {
  const BufferPool pool(32, false);
  std::vector<at::Tensor> pieces;
  for (int i = 0; i < 4; ++i) pieces.push_back(pool.take());
  CHECK(pool.host_bytes() == 4 * 32);
  pieces.clear();
  CHECK(pool.host_bytes() == 32);
  CHECK(pool.peak_bytes() == 4 * 32);
}

TEST_CASE("buffer pool: keeps as many pieces as it is asked to") {
  BufferPool pool(32, false);
  pool.keep(3);
  std::vector<at::Tensor> pieces;
  for (int i = 0; i < 4; ++i) pieces.push_back(pool.take());
  pieces.clear();
  CHECK(pool.host_bytes() == 3 * 32);
  for (int i = 0; i < 4; ++i) pieces.push_back(pool.take());
  CHECK(pool.peak_bytes() == 4 * 32);
}

TEST_CASE("buffer pool: takes over the pieces of others, used and unused") {
  BufferPool pool(32, false);
  pool.keep(2);
  BufferPool first(32, false), second(32, false);
  second.take();  // comes back, and stays unused
  at::Tensor used = first.take();
  const uint8_t* const place = used.const_data_ptr<uint8_t>();
  first.take_over(second);
  pool.take_over(first);
  CHECK(first.host_bytes() == 0);
  CHECK(pool.host_bytes() == 2 * 32);
  used.reset();
  CHECK(pool.take().const_data_ptr<uint8_t>() == place);
  const std::vector<at::Tensor> both{pool.take(), pool.take()};
  CHECK(pool.host_bytes() == 2 * 32);
}

TEST_CASE("buffer pool: pieces may outlive it, and no bytes are no trouble") {
  at::Tensor left;
  {
    const BufferPool pool(1 << 21, false);
    left = pool.take();
  }
  left.fill_(7);
  const int last = left[(1 << 21) - 1].item<int>();
  CHECK(last == 7);
  const BufferPool empty(0, false);
  CHECK(empty.take().numel() == 0);
}

TEST_CASE("buffer pool: many threads never get the same piece") {
  const BufferPool pool(256, false);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 300; ++i) {
        at::Tensor piece = pool.take();
        auto* const bytes = piece.mutable_data_ptr<uint8_t>();
        for (int b = 0; b < 256; ++b) bytes[b] = static_cast<uint8_t>(t);
        bool mine = true;
        for (int b = 0; b < 256; ++b) mine &= bytes[b] == t;
        CHECK(mine);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.host_bytes() <= 256);
}
