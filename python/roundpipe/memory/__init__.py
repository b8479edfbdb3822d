"""What a model and a step take, on the host and on devices: budgets, predictions, and errors when it is too much."""
