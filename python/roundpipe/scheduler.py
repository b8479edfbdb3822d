"""The published package's path to its plans; see `roundpipe.call.execute_plan`."""

from roundpipe.call.execute_plan import ModelExecutePlan as ModelExecutePlan
