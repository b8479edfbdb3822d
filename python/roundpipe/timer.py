"""Where the published package prints layers' times; see `roundpipe.model.timer`."""

from roundpipe.model.timer import ModelTimer as ModelTimer
