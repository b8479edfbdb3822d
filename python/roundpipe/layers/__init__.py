"""The layers of a model, as the engine runs them: shells, shadows, values between layers, and recomputation."""
