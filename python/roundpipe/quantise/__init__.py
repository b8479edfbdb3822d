"""Frozen weights in fewer bits, decoded while they are used."""

from roundpipe.quantise.place import encode_weights
from roundpipe.quantise.report import EncodedBytes, encoded_bytes

__all__ = ["EncodedBytes", "encode_weights", "encoded_bytes"]
