"""The command that simulates steps, on one node and on several."""
