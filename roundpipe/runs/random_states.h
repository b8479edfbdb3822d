#pragma once

#include <roundpipe/saving/state_value.h>

namespace roundpipe {

// The states of torch's default generators: of the host, and of the accelerator's devices if there are any. `others`:
// those of the program's language.
StateValue random_states(StateValue::Dict others = {});
// Throws Error unless they are such.
void check_random_states(const StateValue& states);
// Sets torch's generators. Devices that are not there now are left out.
void restore_random_states(const StateValue& states);

}  // namespace roundpipe
