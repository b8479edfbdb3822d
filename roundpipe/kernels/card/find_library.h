#pragma once

#include <limits>
#include <string>

namespace roundpipe::kernels::card {

// Opens a library of a vendor, such as "libnvrtc.so", in its newest version up to `newest_major`: the one that the
// process has loaded, else one beside torch, in the packages that torch's own package asks for, else the system's. It
// stays open. Null: there is none. Thread safety: any thread.
void* find_library(const std::string& name, int newest_major = std::numeric_limits<int>::max());

// The version of a library by the name of its file: 13 for "libnvrtc.so.13", 0 without a number, -1 for other files.
int major_of(const std::string& file, const std::string& name);

// Looks up a function of such a library. Throws Error if it has none of that name.
void* find_function(void* library, const std::string& name);

// Sets a pointer to that function.
template <typename Function>
void find_function(Function*& to, void* library, const std::string& name) {
  to = reinterpret_cast<Function*>(find_function(library, name));
}

}  // namespace roundpipe::kernels::card
