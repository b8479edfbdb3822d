"""Trainers of transformers and TRL whose models run in the pipeline. `roundpipe.huggingface` hands them on."""
