#pragma once

#include <cstdlib>

// How many random cases a test tries: `few`, or `all` of them where `make test-all` sets ROUNDPIPE_LONG_TESTS.
inline int rounds(int few, int all) { return std::getenv("ROUNDPIPE_LONG_TESTS") != nullptr ? all : few; }
