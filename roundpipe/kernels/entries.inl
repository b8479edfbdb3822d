// What a card's program has: each kernel for each dtype, in blocks of kMostLanes threads.
#define ROUNDPIPE_ENTRY(name, ...)                                                                           \
  extern "C" __global__ void __launch_bounds__(roundpipe::kernels::kMostLanes, 2) name(__VA_ARGS__ kernel) { \
    roundpipe::kernels::run(kernel);                                                                         \
  }
#define ROUNDPIPE_ENTRIES(suffix, T)                                                     \
  ROUNDPIPE_ENTRY(rms_norm_##suffix, roundpipe::kernels::RmsNorm<T, T>)                  \
  ROUNDPIPE_ENTRY(rms_norm_backward_##suffix, roundpipe::kernels::RmsNormBackward<T, T>) \
  ROUNDPIPE_ENTRY(column_sum_##suffix, roundpipe::kernels::ColumnSum<T>)                 \
  ROUNDPIPE_ENTRY(rotary_##suffix, roundpipe::kernels::Rotary<T>)                        \
  ROUNDPIPE_ENTRY(gate_##suffix, roundpipe::kernels::Gate<T>)                            \
  ROUNDPIPE_ENTRY(gate_backward_##suffix, roundpipe::kernels::GateBackward<T>)           \
  ROUNDPIPE_ENTRY(cross_entropy_##suffix, roundpipe::kernels::CrossEntropy<T>)           \
  ROUNDPIPE_ENTRY(add_wide_##suffix, roundpipe::kernels::WideSum<T>)
// Norms whose weight is fp32 beside 16-bit rows.
#define ROUNDPIPE_WIDE_ENTRIES(suffix, T)                                          \
  ROUNDPIPE_ENTRY(rms_norm_##suffix##_fp32, roundpipe::kernels::RmsNorm<T, float>) \
  ROUNDPIPE_ENTRY(rms_norm_backward_##suffix##_fp32, roundpipe::kernels::RmsNormBackward<T, float>)

ROUNDPIPE_ENTRIES(bf16, roundpipe::kernels::BFloat16)
ROUNDPIPE_ENTRIES(fp16, roundpipe::kernels::Float16)
ROUNDPIPE_ENTRIES(fp32, float)
ROUNDPIPE_WIDE_ENTRIES(bf16, roundpipe::kernels::BFloat16)
ROUNDPIPE_WIDE_ENTRIES(fp16, roundpipe::kernels::Float16)
