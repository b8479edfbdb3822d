"""The published package's path to wrapping by preset, beside the operations of `roundpipe.ops`."""

from roundpipe.model.wrap import wrap_model as wrap_model
from roundpipe.ops import LogitStep as LogitStep
from roundpipe.ops import chunked_mlp as chunked_mlp
from roundpipe.ops import gated_mlp as gated_mlp
from roundpipe.ops import linear_cross_entropy as linear_cross_entropy
from roundpipe.ops import two_layer_mlp as two_layer_mlp
