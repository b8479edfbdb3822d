"""Models in the pipeline: `RoundPipe`, `AutoRoundPipe`, how a model is wrapped, and what stands for the original."""
