"""Follows the forward of a model from elsewhere, so that its layers become layers of the pipeline."""
