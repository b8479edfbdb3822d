"""Folders of safetensors files: their contents and tensor names, and reading them straight into a model."""
