"""How weights are updated: the optimizer's side of a model, plain steps, fused steps and loss scaling."""
