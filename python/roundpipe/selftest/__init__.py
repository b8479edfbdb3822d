"""Checks that this machine's devices compute and move the right bits."""
