"""The command that trains a language model, from its configuration to a folder that transformers loads."""
