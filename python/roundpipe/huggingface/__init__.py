"""Models from transformers: loading pretrained models, and evaluating them on held-out batches."""
