"""Models in the pipeline: `RoundPipe`, `AutoRoundPipe`, wrapping, and access to the original model."""
