"""Sounds as files: read at the rate that a model hears, and written."""

from __future__ import annotations

import wave
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from roundpipe.data.unusable import UnusableError

_WIDTH, _LARGEST = 2, 32768  # of a sample of WAV


def read_sound(path: str, rate: int) -> Any:
    """The sound of a file as numbers from -1 to 1, of one channel. WAV of 16 bits at this rate is read as it is, and
    everything else by transformers.

    Raises:
        UnusableError: it cannot be read.
        ValueError: what reads it is not installed.
    """
    found = _plain(path, rate)
    if found is not None:
        return found
    from transformers.audio_utils import load_audio

    if find_spec("torchcodec") is None and (find_spec("soundfile") is None or find_spec("soxr") is None):
        raise ValueError(
            f"[data] {path} is no WAV of 16 bits at {rate} Hz, and soundfile, which reads others, is not installed; "
            "pip install soundfile soxr"
        )
    try:
        return load_audio(path, sampling_rate=rate)
    except Exception as error:  # whatever a decoder raises
        raise UnusableError("broken", "a sound that cannot be read", f"{path}: {str(error)[:120]}") from None


def _plain(path: str, rate: int) -> Any:
    try:
        with wave.open(path, "rb") as file:
            if file.getsampwidth() != _WIDTH or file.getframerate() != rate:
                return None
            channels, content = file.getnchannels(), file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError):
        return None
    whole = np.frombuffer(content, dtype="<i2")
    if not len(whole):
        return None
    return whole.reshape(-1, channels).mean(1, dtype=np.float32) / np.float32(_LARGEST)


def write_sound(path: Path, sound: Any, rate: int) -> None:
    """Writes numbers from -1 to 1, of one channel or [channels, numbers], as WAV of 16 bits."""
    numbers = np.asarray(sound, dtype=np.float32)
    numbers = numbers.mean(0) if numbers.ndim > 1 else numbers
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(_WIDTH)
        file.setframerate(rate)
        file.writeframes(np.clip(np.round(numbers * _LARGEST), -_LARGEST, _LARGEST - 1).astype("<i2").tobytes())
