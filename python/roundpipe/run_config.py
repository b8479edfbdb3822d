"""The published package's path to the options of a call; see `roundpipe.model.call.run_config`."""

from roundpipe.model.call.run_config import FullRoundPipeRunConfig as FullRoundPipeRunConfig
from roundpipe.model.call.run_config import RoundPipeRunConfig as RoundPipeRunConfig
