#ifdef __x86_64__
#define ROUNDPIPE_SET avx512
#include <roundpipe/kernels/host_set.inl>
#endif
