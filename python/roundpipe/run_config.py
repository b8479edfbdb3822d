"""The published package's path to the options of a call; see `roundpipe.call.run_config`."""

from roundpipe.call.run_config import FullRoundPipeRunConfig as FullRoundPipeRunConfig
from roundpipe.call.run_config import RoundPipeRunConfig as RoundPipeRunConfig
