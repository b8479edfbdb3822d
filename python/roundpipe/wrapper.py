"""Where the published package wraps models; that is in `roundpipe.model.wrap`."""

from roundpipe.model.wrap import wrap_model_to_roundpipe as wrap_model_to_roundpipe
