"""Frozen weights in fewer bits."""
