"""What a person meets of the training command: names of options, help, the line of a step, charts."""
