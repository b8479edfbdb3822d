"""From files and datasets of records to samples on disk: what a training reads."""
