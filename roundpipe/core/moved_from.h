#pragma once

#include <memory>
#include <stdexcept>
#include <utility>

#include <roundpipe/core/error.h>

namespace roundpipe {

// For handles, where they read what they refer to: throws std::invalid_argument if they refer to nothing any more.
// `what`: the kind of handle, for the message. Destroying such an object and assigning to it are no use of it.
inline void require_not_moved_from(bool refers, const char* what) {
  if (refers) return;
  throw std::invalid_argument(concat("[", what, "] this ", what,
                                     " was moved from, expected one that was not; use the object that it was moved "
                                     "into, or assign another one to it first"));
}

// The move assignment of a handle that nothing derives from: moving an object into itself changes nothing.
template <typename Handle>
Handle& move_into(Handle& to, Handle&& from) noexcept {
  if (&to == &from) return to;
  std::destroy_at(&to);
  return *std::construct_at(&to, std::move(from));
}

}  // namespace roundpipe
