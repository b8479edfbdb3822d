#ifdef __x86_64__
#define ROUNDPIPE_KERNELS avx2
#include <roundpipe/optim/kernels/kernels.inl>
#endif
