"""The published package's path to its models; see `roundpipe.model.pipe` and `roundpipe.model.wrap`."""

from roundpipe.model.pipe import RoundPipe as RoundPipe
from roundpipe.model.wrap import AutoRoundPipe as AutoRoundPipe
