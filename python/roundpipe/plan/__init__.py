"""Plans before anything runs: costs, machines, schedules, memory, and the command `roundpipe plan`."""

# Named by the command's help, before torch is imported. Kinds of matrix products that a card may have a rate of:
PRODUCTS = ("bf16", "fp16", "fp16-accumulate", "fp32")
# Schedules of other systems; the weights of the first one travel, as ours do.
BASELINES = ("published", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
