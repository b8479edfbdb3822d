"""A run on disk: its journal, its checkpoints as a command, and the signals that end it."""
