"""See `roundpipe.data.records.prepare`."""

from roundpipe.data.records.prepare import DataOptions as DataOptions
from roundpipe.data.records.prepare import PreparedData as PreparedData
from roundpipe.data.records.prepare import prepare as prepare
