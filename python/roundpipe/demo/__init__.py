"""`roundpipe demo`: trains a small Llama on Python's own sources, through the whole pipeline."""
