"""From text to batches: plain functions over token lists and tensors, without a data loader of their own.

A sample is a mapping with `input_ids` and, if they differ, `labels`; -100 marks tokens that are not learned. `chat`
makes samples from conversations, `packing` and `collate` make batches of them, `balance` and `microbatch` cut batches
into microbatches.
"""
