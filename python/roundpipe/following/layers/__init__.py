"""A model's layers in the engine: shells, shadows, values between layers, and recomputation."""
