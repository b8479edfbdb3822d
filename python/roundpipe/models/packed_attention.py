"""The documented import path of the attention for packed rows; see `roundpipe.ops.packed_attention`."""

from roundpipe.ops.packed_attention import check_packing as check_packing
from roundpipe.ops.packed_attention import document_lengths as document_lengths
from roundpipe.ops.packed_attention import packed_attention as packed_attention
from roundpipe.ops.packed_attention import register as register
