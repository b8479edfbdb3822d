"""Costs, predicted schedules and their pictures: the parts of `roundpipe simulate`, `plan` and `emulate`."""

# Kinds of matrix products that a card may have a rate of. Here, since commands name them before torch is imported.
PRODUCTS = ("bf16", "fp16", "fp16-accumulate", "fp32")
