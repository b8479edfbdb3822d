"""Where the published package has its plans; they live in `roundpipe.call.execute_plan`."""

from roundpipe.call.execute_plan import ModelExecutePlan as ModelExecutePlan
