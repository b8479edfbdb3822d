"""Where the published package has its models; they live in `roundpipe.model.pipe` and `roundpipe.model.wrap`."""

from roundpipe.model.pipe import RoundPipe as RoundPipe
from roundpipe.model.wrap import AutoRoundPipe as AutoRoundPipe
