"""Where the published package has its models; they live in `roundpipe.pipe` and `roundpipe.wrap`."""

from roundpipe.pipe import RoundPipe as RoundPipe
from roundpipe.wrap import AutoRoundPipe as AutoRoundPipe
