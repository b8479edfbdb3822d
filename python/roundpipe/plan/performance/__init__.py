"""A step's time, predicted beside measured, and its pictures. Imports nothing heavy."""

# Of the planner's summary of its stages.
STAGES_LEGEND = (
    "5x3*2 = 5 stages of 3 layers, 2 devices share each; interleave 1.5 = a step's jobs spread over 1.5 steps"
)
