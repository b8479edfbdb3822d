"""Layers of transformers' models that the engine computes itself, without Python."""
