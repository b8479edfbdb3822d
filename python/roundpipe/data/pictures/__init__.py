"""Pictures in conversations: where they are, what they become among tokens, and batches with them."""
