"""The losses of transformers models over microbatches: what they add up to, and without all logits."""
