// Cards' blocks on the host: the source as a card's compiler sees it, with a thread for each of a block's. What a card
// would be asked to run, with the memory it would be given, has the host's bits.
#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstddef>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/kernels/entries.h>

namespace {

struct Index {
  unsigned x;
};
thread_local Index threadIdx, blockIdx;
std::barrier block_barrier(roundpipe::kernels::kBlockThreads);

}  // namespace

#define ROUNDPIPE_ON_CARD
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __syncthreads() block_barrier.arrive_and_wait()
#define __float_as_uint(x) std::bit_cast<unsigned>(x)
#define __uint_as_float(x) std::bit_cast<float>(x)
#define kernels card_kernels  // the host's form has the same names

#include <roundpipe/kernels/numbers.inl>

#include <roundpipe/kernels/teams.inl>

#include <roundpipe/kernels/cross_entropy.inl>
#include <roundpipe/kernels/encodings.inl>
#include <roundpipe/kernels/gates.inl>
#include <roundpipe/kernels/rms_norm.inl>
#include <roundpipe/kernels/rotary.inl>

#include <roundpipe/kernels/entries.inl>

#include <roundpipe/kernels/list.inl>

#undef kernels

namespace roundpipe::card_kernels {

float shared[12000];  // what the blocks see as theirs

namespace {

using kernels::Entry;

const Entry& entry_named(const std::string& name) {
  const auto& all = kernels::entries();
  return **std::find_if(all.begin(), all.end(), [&](const Entry* entry) { return name == entry->name; });
}

// Runs the blocks that the entry asks for. Memory beyond what it asks for must stay as it was.
template <typename Kernel>
void run_blocks(const Entry& entry, void (*program)(Kernel), const Kernel& kernel) {
  const kernels::Grid grid = entry.grid(&kernel);
  const auto floats = static_cast<std::size_t>(grid.shared_bytes) / sizeof(float);
  REQUIRE(floats + 1000 <= std::size(shared));
  std::fill(std::begin(shared), std::end(shared), 77.0f);
  for (unsigned block = 0; block < grid.blocks; ++block) {
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < kernels::kBlockThreads; ++i) {
      threads.emplace_back([&, i] {
        threadIdx.x = i;
        blockIdx.x = block;
        program(kernel);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(std::all_of(shared + floats, std::end(shared), [](float number) { return number == 77.0f; }));
}

int lanes_for(int width) {
  const auto vectors = static_cast<unsigned>((width + kVector - 1) / kVector);
  return static_cast<int>(std::min(static_cast<unsigned>(kMostLanes), std::bit_ceil(vectors)));
}

// A kernel with all that its addresses lead to.
template <typename Kernel>
class Case {
 public:
  Case(Int64 items, int width) {
    kernel.items = items;
    kernel.width = width;
    kernel.lanes = lanes_for(width);
    if constexpr (requires { kernel.aligned; }) kernel.aligned = width % kVector == 0;
  }

  // Random numbers, which an output has before it is written.
  template <typename T>
  T* numbers(Int64 count) {
    T* const first = reinterpret_cast<T*>(memory_.data() + used_);
    for (Int64 i = 0; i < count; ++i) round_to(first[i], static_cast<float>(random_() % 2001) / 500.0f - 2.0f);
    take(count * static_cast<Int64>(sizeof(T)));
    return first;
  }
  unsigned char* bytes(Int64 count) {
    auto* const first = reinterpret_cast<unsigned char*>(memory_.data() + used_);
    for (Int64 i = 0; i < count; ++i) first[i] = static_cast<unsigned char>(random_());
    take(count);
    return first;
  }
  Int64* labels(Int64 count, Int64 end) {
    auto* const first = reinterpret_cast<Int64*>(memory_.data() + used_);
    for (Int64 i = 0; i < count; ++i) first[i] = static_cast<Int64>(random_() % static_cast<unsigned>(end));
    take(count * static_cast<Int64>(sizeof(Int64)));
    return first;
  }

  // All of the memory is the same after the host has run the kernel, and after blocks have.
  void compare(const std::string& name, void (*program)(Kernel)) {
    const Entry& entry = entry_named(name);
    CHECK(entry.bytes == sizeof(Kernel));
    const auto before = memory_;
    entry.run_on_host(&kernel);
    const auto expected = memory_;
    CHECK((expected != before));
    std::copy(before.begin(), before.end(), memory_.begin());
    run_blocks(entry, program, kernel);
    CHECK((memory_ == expected));
  }

  Kernel kernel{};

 private:
  void take(Int64 bytes) {
    constexpr Int64 kAlignment = 16;
    used_ += static_cast<std::size_t>((bytes + kAlignment - 1) / kAlignment * kAlignment);
    REQUIRE(used_ <= memory_.size());
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(1 << 20);
  std::size_t used_ = 0;
  std::mt19937 random_{1};
};

// Many teams in a block, of which the last one has rows for some; one team; rows of several sweeps and of odd lengths.
struct Rows {
  Int64 items;
  int width;
};
constexpr Rows kRows[] = {{300, 8}, {40, 72}, {3, 1000}, {2, 4100}, {5, 13}};

}  // namespace

TEST_CASE("blocks: norms") {
  for (const auto [items, width] : kRows) {
    for (const bool adds : {false, true}) {
      Case<RmsNorm<BFloat16, float>> norm(items, width);
      norm.kernel.eps = 1e-6f;
      norm.kernel.input = norm.numbers<BFloat16>(items * width);
      norm.kernel.weight = norm.numbers<float>(width);
      norm.kernel.normed = norm.numbers<BFloat16>(items * width);
      norm.kernel.scales = norm.numbers<float>(items);
      if (adds) norm.kernel.residual = norm.numbers<BFloat16>(items * width);
      if (adds) norm.kernel.sum = norm.numbers<BFloat16>(items * width);
      norm.compare("rms_norm_bf16_fp32", rms_norm_bf16_fp32);
    }
  }
}

TEST_CASE("blocks: gradients of norms, with sums over an item's rows") {
  constexpr int kRowsOfItem = 3;
  for (const auto [items, width] : kRows) {
    for (const bool trains : {false, true}) {
      const Int64 rows = kRowsOfItem * items - 1;
      Case<RmsNormBackward<float, float>> norm(items, width);
      norm.kernel.rows_of_item = kRowsOfItem;
      norm.kernel.all_rows = rows;
      norm.kernel.normed_gradient = norm.numbers<float>(rows * width);
      norm.kernel.input = norm.numbers<float>(rows * width);
      norm.kernel.weight = norm.numbers<float>(width);
      norm.kernel.scales = norm.numbers<float>(rows);
      norm.kernel.gradient = norm.numbers<float>(rows * width);
      if (trains) norm.kernel.weight_parts = norm.numbers<float>(items * width);
      norm.compare("rms_norm_backward_fp32", rms_norm_backward_fp32);
    }
  }
  Case<ColumnSum<Float16>> sum(2, kMostLanes * kVector);
  sum.kernel.all = 2100;
  sum.kernel.all_rows = 7;
  sum.kernel.parts = sum.numbers<float>(7 * 2100);
  sum.kernel.sums = sum.numbers<Float16>(2100);
  sum.compare("column_sum_fp16", column_sum_fp16);
}

TEST_CASE("blocks: the cross-entropy") {
  for (const auto [items, width] : kRows) {
    Case<CrossEntropy<Float16>> loss(items, width);
    loss.kernel.writes = true;
    loss.kernel.ignored = 1;
    loss.kernel.logits = loss.numbers<Float16>(items * width);
    loss.kernel.labels = loss.labels(items, width);
    loss.kernel.losses = loss.numbers<float>(items);
    loss.compare("cross_entropy_fp16", cross_entropy_fp16);
  }
}

TEST_CASE("blocks: rotary positions, gates and sums in fp32") {
  for (const int half : {8, 9}) {
    Case<Rotary<BFloat16>> rotary(11, 3 * half);
    rotary.kernel.aligned = half % kVector == 0;
    rotary.kernel.half = half;
    rotary.kernel.table_tokens = 11;
    rotary.kernel.states = rotary.numbers<BFloat16>(11 * 6 * half);
    rotary.kernel.cos = rotary.numbers<BFloat16>(11 * half);
    rotary.kernel.sin = rotary.numbers<BFloat16>(11 * half);
    rotary.kernel.turned = rotary.numbers<BFloat16>(11 * 6 * half);
    rotary.compare("rotary_bf16", rotary_bf16);
  }
  constexpr int kPiece = kMostLanes * kVector, kAll = kPiece + 100;
  Case<GateBackward<float>> gate(2, kPiece);
  gate.kernel.all = kAll;
  gate.kernel.step = 2;
  gate.kernel.form = {true, 1.7f, 1.0f};
  gate.kernel.gradient = gate.numbers<float>(kAll);
  gate.kernel.gate = gate.numbers<float>(2 * kAll);
  gate.kernel.up = gate.kernel.gate + 1;
  gate.kernel.gate_gradient = gate.numbers<float>(2 * kAll);
  gate.kernel.up_gradient = gate.kernel.gate_gradient + 1;
  gate.compare("gate_backward_fp32", gate_backward_fp32);
  Case<WideSum<BFloat16>> sum(2, kPiece);
  sum.kernel.all = kAll;
  sum.kernel.sums = sum.numbers<float>(kAll);
  sum.kernel.addends = sum.numbers<BFloat16>(kAll);
  sum.compare("add_wide_bf16", add_wide_bf16);
}

TEST_CASE("blocks: encoded numbers") {
  constexpr int kBlock = 64, kBlocks = 41, kAll = kBlock * kBlocks - 20;
  Case<Encode<Nf4, BFloat16>> encode(kBlocks, kBlock);
  encode.kernel.all = kAll;
  encode.kernel.values = encode.numbers<BFloat16>(kAll);
  encode.kernel.codes = encode.bytes(kAll / 2);
  encode.kernel.scales = encode.numbers<float>(kBlocks);
  encode.compare("encode_nf4_bf16", encode_nf4_bf16);
  Case<Decode<Mxfp4, Float16>> decode(2, kMostLanes * kVector);
  decode.kernel.all = kAll;
  decode.kernel.scales_of_item = kMostLanes * kVector / kBlock;
  decode.kernel.shift = 6;
  decode.kernel.codes = decode.bytes(kAll / 2);
  decode.kernel.scales = decode.bytes(kBlocks);
  decode.kernel.values = decode.numbers<Float16>(kAll);
  decode.compare("decode_mxfp4_fp16", decode_mxfp4_fp16);
  for (const auto [items, width] : kRows) {
    Case<Encode<Int8, float>> to_bytes(items, width);
    to_bytes.kernel.values = to_bytes.numbers<float>(items * width);
    to_bytes.kernel.codes = to_bytes.bytes(items * width);
    to_bytes.kernel.scales = to_bytes.numbers<float>(items);
    to_bytes.compare("encode_int8_fp32", encode_int8_fp32);
    Case<Decode<Int8, BFloat16>> back(items, width);
    back.kernel.scales_of_item = 1;
    back.kernel.shift = 31;
    back.kernel.codes = back.bytes(items * width);
    back.kernel.scales = back.numbers<float>(items);
    back.kernel.values = back.numbers<BFloat16>(items * width);
    back.compare("decode_int8_bf16", decode_int8_bf16);
  }
}

}  // namespace roundpipe::card_kernels
