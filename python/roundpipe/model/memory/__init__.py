"""Memory of a model and its steps, on the host and on devices: budgets, predictions, and errors when it runs out."""
