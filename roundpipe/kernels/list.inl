// Every kernel, as ROUNDPIPE_KERNEL(name, type), for each dtype.
#define ROUNDPIPE_ENCODINGS_OF(suffix, T, name, Form)                             \
  ROUNDPIPE_KERNEL(decode_##name##_##suffix, roundpipe::kernels::Decode<Form, T>) \
  ROUNDPIPE_KERNEL(encode_##name##_##suffix, roundpipe::kernels::Encode<Form, T>)
#define ROUNDPIPE_KERNELS_OF(suffix, T)                                                   \
  ROUNDPIPE_KERNEL(rms_norm_##suffix, roundpipe::kernels::RmsNorm<T, T>)                  \
  ROUNDPIPE_KERNEL(rms_norm_backward_##suffix, roundpipe::kernels::RmsNormBackward<T, T>) \
  ROUNDPIPE_KERNEL(column_sum_##suffix, roundpipe::kernels::ColumnSum<T>)                 \
  ROUNDPIPE_KERNEL(rotary_##suffix, roundpipe::kernels::Rotary<T>)                        \
  ROUNDPIPE_KERNEL(gate_##suffix, roundpipe::kernels::Gate<T>)                            \
  ROUNDPIPE_KERNEL(gate_backward_##suffix, roundpipe::kernels::GateBackward<T>)           \
  ROUNDPIPE_KERNEL(cross_entropy_##suffix, roundpipe::kernels::CrossEntropy<T>)           \
  ROUNDPIPE_KERNEL(add_wide_##suffix, roundpipe::kernels::WideSum<T>)                     \
  ROUNDPIPE_ENCODINGS_OF(suffix, T, nf4, roundpipe::kernels::Nf4)                         \
  ROUNDPIPE_ENCODINGS_OF(suffix, T, mxfp4, roundpipe::kernels::Mxfp4)                     \
  ROUNDPIPE_ENCODINGS_OF(suffix, T, int4, roundpipe::kernels::Int4)                       \
  ROUNDPIPE_ENCODINGS_OF(suffix, T, int8, roundpipe::kernels::Int8)                       \
  ROUNDPIPE_ENCODINGS_OF(suffix, T, fp8, roundpipe::kernels::Fp8)
// Norms whose weight is fp32 beside 16-bit rows.
#define ROUNDPIPE_WIDE_KERNELS_OF(suffix, T)                                        \
  ROUNDPIPE_KERNEL(rms_norm_##suffix##_fp32, roundpipe::kernels::RmsNorm<T, float>) \
  ROUNDPIPE_KERNEL(rms_norm_backward_##suffix##_fp32, roundpipe::kernels::RmsNormBackward<T, float>)

ROUNDPIPE_KERNELS_OF(bf16, roundpipe::kernels::BFloat16)
ROUNDPIPE_KERNELS_OF(fp16, roundpipe::kernels::Float16)
ROUNDPIPE_KERNELS_OF(fp32, float)
ROUNDPIPE_WIDE_KERNELS_OF(bf16, roundpipe::kernels::BFloat16)
ROUNDPIPE_WIDE_KERNELS_OF(fp16, roundpipe::kernels::Float16)
