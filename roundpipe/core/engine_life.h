#pragma once

namespace roundpipe {

// The engine's life in this process. Its threads start with its first use and end with the process.
//
// A child that fork() makes after the start is called left behind: it has none of the engine's threads, and a lock that
// one of them held during the fork stays locked for ever. In such a child, the engine never waits, never takes a lock
// that its threads take, and never ends a thread. Uses throw, and dropped objects keep their memory.
// Thread safety: any thread. Nothing blocks.

// Called before the first thread of the engine starts: children made by fork() from now on are left behind.
void engine_begins() noexcept;

// Called when the engine has no running threads left and will start no more.
void engine_ends() noexcept;

bool is_left_behind() noexcept;
bool engine_has_ended() noexcept;

// Throws Error in a process that was left behind.
void require_own_process();
// Throws Error in a process that was left behind, and after the engine has ended.
void require_engine();

// Marks the calling thread as one of the engine's, which ends with a pool of devices or with the process.
void become_engine_thread() noexcept;
// Whether it is: then it must not end the engine's threads, since it would wait for itself.
bool is_engine_thread() noexcept;

// Marks the calling thread as one that runs layers and losses.
void become_device_thread() noexcept;
// Throws Error on such a thread: if it waited for the devices, it would wait for itself.
void require_callers_thread();

}  // namespace roundpipe
