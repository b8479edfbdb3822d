"""The documented import path of the held-out loss; see `roundpipe.huggingface.evaluation`."""

from roundpipe.huggingface.evaluation import held_out_loss as held_out_loss
