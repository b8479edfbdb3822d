"""Token files: tokens of texts on disk, for programs in C++ and Python."""
