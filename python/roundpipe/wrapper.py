"""Where the published package wraps models; that is in `roundpipe.wrap`."""

from roundpipe.wrap import wrap_model_to_roundpipe as wrap_model_to_roundpipe
