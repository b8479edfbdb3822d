"""Where the published package has the options of a call; they live in `roundpipe.call.run_config`."""

from roundpipe.call.run_config import FullRoundPipeRunConfig as FullRoundPipeRunConfig
from roundpipe.call.run_config import RoundPipeRunConfig as RoundPipeRunConfig
