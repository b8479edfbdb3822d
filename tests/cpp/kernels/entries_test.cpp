#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/kernels/kernels.h>
#include <roundpipe/kernels/launcher.h>
#include <roundpipe/kernels/host_sets.inl>

namespace roundpipe::kernels {

TEST_CASE("entries: every kernel of the source, once") {
  std::set<std::string> names;
  for (const Entry* entry : entries()) CHECK(names.insert(entry->name).second);
  CHECK(names.size() == (8 + 2 * 5) * 3 + 2 * 2);
  CHECK(names.count("rms_norm_backward_bf16_fp32") == 1);
}

TEST_CASE("entries: as many blocks as the items' teams take, with memory for all of them") {
  RmsNormBackward<float, float> norm{};
  norm.items = 100;
  norm.width = 60;
  norm.lanes = 8;  // 32 teams in a block
  const Entry& entry = entry_of<RmsNormBackward<float, float>>();
  CHECK(entry.grid(&norm).blocks == 4);
  CHECK(entry.grid(&norm).shared_bytes == kBlockThreads * 4);
  float parts = 0;
  norm.weight_parts = &parts;  // each team keeps a row of sums
  CHECK(entry.grid(&norm).shared_bytes == (kBlockThreads + 32 * 60) * 4);

  CrossEntropy<BFloat16> loss{};
  loss.items = 5;
  loss.lanes = kBlockThreads;
  CHECK(entry_of<CrossEntropy<BFloat16>>().grid(&loss).blocks == 5);
  CHECK(entry_of<CrossEntropy<BFloat16>>().grid(&loss).shared_bytes == 2 * kBlockThreads * 4);

  WideSum<Float16> sum{};
  sum.items = 1;
  sum.lanes = kBlockThreads;
  CHECK(entry_of<WideSum<Float16>>().grid(&sum).blocks == 1);
  CHECK(entry_of<WideSum<Float16>>().grid(&sum).shared_bytes == 0);
}

TEST_CASE("entries: addresses are translated, and a kernel runs by its name alone") {
  std::vector<float> sums(2100, 1.0f), addends(2100, 2.0f);
  WideSum<float> kernel{};
  kernel.all = 2100;
  kernel.items = 2;
  kernel.width = kMostLanes * kVector;
  kernel.lanes = kMostLanes;
  kernel.sums = reinterpret_cast<float*>(8);
  kernel.addends = reinterpret_cast<const float*>(16);
  for (const Entry* entry : entries()) {
    if (std::string(entry->name) != "add_wide_fp32") continue;
    CHECK(entry->bytes == sizeof(kernel));
    entry->translate(&kernel, [&](const void* address) -> void* {
      return reinterpret_cast<std::uintptr_t>(address) == 8 ? sums.data() : addends.data();
    });
    entry->run_on_host(&kernel);
  }
  CHECK(sums == std::vector<float>(2100, 3.0f));
}

TEST_CASE("entries: where nothing starts kernels, the reason names the kind of device") {
  CHECK(why_no_kernels(at::kCPU).empty());
  CHECK(why_no_kernels(at::kMeta).empty());
  CHECK(why_no_kernels(c10::Device(at::kXPU, 0)) == "nothing starts kernels on devices of type xpu");
}

}  // namespace roundpipe::kernels
