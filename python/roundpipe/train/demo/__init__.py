"""`roundpipe demo`: proves RoundPipe's claims, then trains a small Llama on Python's own sources."""
