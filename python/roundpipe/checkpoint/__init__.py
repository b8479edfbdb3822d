"""Folders of safetensors files: what is in them, under which names, and how it is read straight into a model."""
