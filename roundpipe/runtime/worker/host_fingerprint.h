#pragma once

#include <cstddef>

#include <roundpipe/runtime/call/call.h>
#include <roundpipe/runtime/call/resident_block.h>

namespace roundpipe::runtime {

// The fingerprint of the weights of `block` that the jobs of the call's current submission read (Call::fingerprints):
// asked for once, and computed by the thread of updates, behind all updates that are ready. All bytes are read, since a
// write through `.data` or another view leaves no other trace. Caller's thread, while it submits.
HostFingerprintPtr host_fingerprint(Call& call, size_t block);

}  // namespace roundpipe::runtime
