"""Costs, predicted schedules and their pictures: what `roundpipe simulate`, `plan` and `emulate` are made of."""
