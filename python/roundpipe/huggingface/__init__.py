"""Models from transformers: loading a pretrained one, and evaluating it on held-out batches."""
