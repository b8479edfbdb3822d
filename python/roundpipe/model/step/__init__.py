"""Updates of the weights: the optimizer's side of a model, plain steps, fused steps and loss scaling."""
