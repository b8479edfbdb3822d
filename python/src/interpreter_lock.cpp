#include "interpreter_lock.h"

#include <pthread.h>

#include <roundpipe/core/mutex.h>

namespace roundpipe::python {
namespace {

// CPython links a new state into its list under a lock that, up to Python 3.11, a child made by fork takes without
// making it anew: a fork meanwhile, which needs only the interpreter lock, would hang its child for ever. No code waits
// for the interpreter lock with this one held.
Mutex& making_states() {
  static auto* const mutex = new Mutex;
  return *mutex;
}

[[maybe_unused]] const int registered = pthread_atfork([]() ROUNDPIPE_NOT_ANALYZED { making_states().lock(); },
                                                       []() ROUNDPIPE_NOT_ANALYZED { making_states().unlock(); },
                                                       []() ROUNDPIPE_NOT_ANALYZED { making_states().unlock(); });

}  // namespace

bool InterpreterLock::make_state() {
  if (PyGILState_GetThisThreadState() != nullptr) return false;
  const MutexLock lock(making_states());
  return PyThreadState_New(PyInterpreterState_Main()) != nullptr;
}

}  // namespace roundpipe::python
