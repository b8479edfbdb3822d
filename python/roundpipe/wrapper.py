"""The published package's path to the wrapping of models; see `roundpipe.model.wrap`."""

from roundpipe.model.wrap import wrap_model_to_roundpipe as wrap_model_to_roundpipe
