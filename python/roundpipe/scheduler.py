"""The published package's path to its plans; see `roundpipe.model.call.execute_plan`."""

from roundpipe.model.call.execute_plan import ModelExecutePlan as ModelExecutePlan
