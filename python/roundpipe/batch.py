"""The published package's path to a call's microbatches as an object; see `roundpipe.data.batch`."""

from roundpipe.data.batch import Batch as Batch
from roundpipe.data.packed import RoundPipePackedData as RoundPipePackedData
