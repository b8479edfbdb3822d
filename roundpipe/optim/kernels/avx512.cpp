#ifdef __x86_64__
#define ROUNDPIPE_KERNELS avx512
#include <roundpipe/optim/kernels/kernels.inl>
#endif
