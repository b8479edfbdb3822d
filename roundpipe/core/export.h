#pragma once

// On a class that programs derive from, throw or catch: its type is one and the same in the library and in a program
// that hides its symbols (-fvisibility=hidden). Functions need no mark, since all of the engine's are exported: see
// cmake/exports.map.
#define ROUNDPIPE_API __attribute__((visibility("default")))
