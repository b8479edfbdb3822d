// A card's program has each kernel of list.inl, in blocks of kMostLanes threads.
#define ROUNDPIPE_KERNEL(name, ...)                                                                          \
  extern "C" __global__ void __launch_bounds__(roundpipe::kernels::kMostLanes, 2) name(__VA_ARGS__ kernel) { \
    roundpipe::kernels::run(kernel);                                                                         \
  }
