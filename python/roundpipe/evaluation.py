"""Where documented programs import the held-out loss from; see `roundpipe.huggingface.evaluation`."""

from roundpipe.huggingface.evaluation import held_out_loss as held_out_loss
