"""The published package's path to the printing of layers' times; see `roundpipe.model.timer`."""

from roundpipe.model.timer import ModelTimer as ModelTimer
