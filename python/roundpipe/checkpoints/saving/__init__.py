"""The complete state of a training, saved while it goes on, and loaded again."""
