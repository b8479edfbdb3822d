#define ROUNDPIPE_SET baseline
#include <roundpipe/kernels/host_set.inl>
