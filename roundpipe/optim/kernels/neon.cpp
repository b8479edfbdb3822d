#ifdef __aarch64__
#define ROUNDPIPE_KERNELS neon
#include <roundpipe/optim/kernels/kernels.inl>
#endif
