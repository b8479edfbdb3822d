"""See `roundpipe.data.records`."""

from roundpipe.data.records.prepare import prepare as prepare
