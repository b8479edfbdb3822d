"""What a run learns: the next tokens of its samples, or which of two answers is better."""
