// All kernels of one instruction set, in the namespace ROUNDPIPE_KERNELS. The processor may lack this instruction set,
// so use no inline function or template of another library here: the linker keeps one copy, perhaps this file's.

#include <roundpipe/optim/kernels/kernels.h>

namespace roundpipe::optim::kernels::ROUNDPIPE_KERNELS {
namespace {

#include <roundpipe/optim/kernels/chunk.inl>

#include <roundpipe/optim/kernels/rules.inl>

#include <roundpipe/optim/kernels/adam_8bit.inl>

#include <roundpipe/optim/kernels/adafactor.inl>

#include <roundpipe/optim/kernels/muon.inl>

// The gradient and the weights of a chunk, ready for the rule.
inline void load_chunk(const Coefficients& k, const Memory& memory, int64_t begin, int64_t count, Chunk g, Chunk p) {
  load_gradient(memory, begin, count, g);
  load_weights(memory, begin, count, p);
  if (k.maximize) multiply(-1, count, g);
  if (k.weight_decay != 0) {
    for (int64_t i = 0; i < count; ++i) g[i] = fused(k.weight_decay, p[i], g[i]);
  }
  if (k.decay != 1) multiply(k.decay, count, p);
}

void update(const Coefficients& k, const Memory& memory, int64_t begin, int64_t end) {
  alignas(64) float g[kChunk];
  alignas(64) float p[kChunk];
  const Rule rule = rule_of(k);
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t count = end - at < kChunk ? end - at : kChunk;
    load_chunk(k, memory, at, count, g, p);
    float* states[3];
    for (int i = 0; i < 3; ++i) {
      states[i] = memory.states[i] == nullptr ? nullptr : static_cast<float*>(memory.states[i]) + at;
    }
    rule(k, g, p, states[0], states[1], states[2], count);
    store_weights(memory, at, count, p);
  }
}

void update_8bit(const Coefficients& k, const Memory& memory, int64_t begin, int64_t end) {
  alignas(64) float g[kChunk];
  alignas(64) float p[kChunk];
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t count = end - at < kChunk ? end - at : kChunk;
    load_chunk(k, memory, at, count, g, p);
    for (int64_t i = count; i < kChunk; ++i) g[i] = p[i] = 0;
    adam_8bit(k, memory, g, p, at);
    store_weights(memory, at, count, p);
  }
}

}  // namespace

const Kernels table = {update,         update_8bit,   sum_of_squares, split_range, join_range,
                       load_gradient,  load_weights,  store_weights,  add_squares, interpolate_squares,
                       divide_by_root, decay_and_add, muon_direction};

}  // namespace roundpipe::optim::kernels::ROUNDPIPE_KERNELS
