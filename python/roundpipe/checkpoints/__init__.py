"""A training on disk: its complete state, saved and loaded, and the folder of its run."""
