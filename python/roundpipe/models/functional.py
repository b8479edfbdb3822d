"""The documented import path of native operations; see `roundpipe.ops.functional`."""

from roundpipe.ops.functional import LogitStep as LogitStep
from roundpipe.ops.functional import chunked_mlp as chunked_mlp
from roundpipe.ops.functional import gated_mlp as gated_mlp
from roundpipe.ops.functional import linear_cross_entropy as linear_cross_entropy
from roundpipe.ops.functional import two_layer_mlp as two_layer_mlp
