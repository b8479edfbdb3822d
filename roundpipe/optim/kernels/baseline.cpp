#define ROUNDPIPE_KERNELS baseline
#include <roundpipe/optim/kernels/kernels.inl>
