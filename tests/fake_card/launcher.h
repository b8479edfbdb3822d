#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace fake_card {

// The engine's fused kernels, on cards: a launch is a task of its stream, which runs the host's form of the kernel over
// the card's memory. Thread safety of both: any thread.

// Cards run no kernels, for this reason; empty: they do.
void set_kernels_missing(const std::string& why);

// How often each kernel was launched, by its name.
std::map<std::string, int64_t> launched();

}  // namespace fake_card
