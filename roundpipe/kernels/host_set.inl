// What a source for an instruction set includes, with its name as ROUNDPIPE_SET. Everything that is called is inlined:
// the linker may keep the copy of another processor.
#include <roundpipe/kernels/host_sets.inl>

namespace roundpipe::kernels::ROUNDPIPE_SET {

template <typename Kernel>
void run_items(const Kernel& kernel, Int64 begin, Int64 end, float* shared) {
  for (Int64 item = begin; item < end; ++item) run(kernel, item, shared);
}

#define ROUNDPIPE_KERNEL(name, ...) template void run_items(const __VA_ARGS__&, Int64, Int64, float*);
#include <roundpipe/kernels/list.inl>

}  // namespace roundpipe::kernels::ROUNDPIPE_SET
