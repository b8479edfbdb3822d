"""Where the published package has its plans; they live in `roundpipe.execute_plan`."""

from roundpipe.execute_plan import ModelExecutePlan as ModelExecutePlan
