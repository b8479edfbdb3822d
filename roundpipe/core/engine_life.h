#pragma once

namespace roundpipe {

// The engine's life in this process. Its threads begin with its first use and end with the process.
//
// A child that fork() makes after that has none of these threads, and a lock that one of them held at that moment stays
// locked there for ever. In such a child, which is called left behind, nothing of the engine waits, takes a lock that
// its threads take, or ends a thread: uses throw, and what is dropped there keeps its memory.
// Thread safety: any thread. Nothing blocks.

// Before the first thread of the engine begins: children made by fork() from now on are left behind.
void engine_begins() noexcept;

// No thread of the engine runs any more, nor will one.
void engine_ends() noexcept;

bool is_left_behind() noexcept;
bool engine_has_ended() noexcept;

// Throws Error in a process that is left behind.
void require_own_process();
// The same, and once the engine has ended.
void require_engine();

// The calling thread runs layers and losses from now on.
void become_device_thread() noexcept;
// Throws Error on such a thread: what waits for the devices would wait for itself there.
void require_callers_thread();

}  // namespace roundpipe
