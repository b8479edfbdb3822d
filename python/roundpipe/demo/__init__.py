"""`roundpipe demo`: proves what RoundPipe claims, then trains a small Llama on Python's own sources."""
