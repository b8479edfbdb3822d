"""Videos as files: read by what is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from roundpipe.data.unusable import UnusableError

_READERS = {"torchcodec": "torchcodec", "av": "pyav", "decord": "decord", "cv2": "opencv"}
"""By the module, what transformers calls it."""


def read_video(path: str) -> tuple[Any, Any]:
    """The frames of a video, and when they are, as transformers loads it.

    Raises:
        UnusableError: it cannot be read.
        ValueError: nothing that reads videos is installed.
    """
    from transformers.video_utils import load_video

    reader = next((reader for module, reader in _READERS.items() if find_spec(module) is not None), None)
    if reader is None:
        raise ValueError(f"[data] {path} is a video, and nothing that reads one is installed; pip install av")
    try:
        like: Any = load_video  # has other types than it takes
        frames, when = like(path, backend=reader)
    except Exception as error:  # whatever a decoder raises
        raise UnusableError("broken", "a video that cannot be read", f"{path}: {str(error)[:120]}") from None
    return frames, when
