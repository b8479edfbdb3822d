"""One call of a model: its options, its stages and its loss."""
