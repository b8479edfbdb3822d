"""Costs, predicted schedules and their pictures: the parts of `roundpipe simulate`, `plan` and `emulate`."""
