"""What `roundpipe demo` asks `roundpipe train` for. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roundpipe.train.config import TrainConfig

# The device pool if no accelerator is found.
VIRTUAL_DEVICES = "virtual:4,memory=48MiB"

# In the run's folder, beside what `roundpipe train` writes there.
UNTRAINED_FOLDER, TEXT_FILE, CHAT_FILE = "untrained", "text.jsonl", "chat.jsonl"

# At most this much text is read, held-out files included; with --full, more.
TEXT_BYTES, FULL_TEXT_BYTES = 2_500_000, 6_000_000

LENGTH = 128
STEPS, FULL_STEPS = 360, 900


def demo_config(out: Path, full: bool = False, **values: Any) -> TrainConfig:
    """The run: about two minutes on two CPU cores or, if it is `full`, four to five.

    Args:
        out: its folder.
        values: that differ from those of the demo.
    """
    steps = values.get("steps") or (FULL_STEPS if full else STEPS)
    preset: dict[str, Any] = {
        "model": str(out / UNTRAINED_FOLDER),
        "data": [str(out / TEXT_FILE)],
        "out": str(out),
        "length": LENGTH,
        "batch_tokens": 5 * LENGTH,
        "held_out": 4.0,
        "steps": steps,
        "learning_rate": 1e-3,
        "warmup_steps": round(0.1 * steps),
        "floor": 0.1,
        "beta1": 0.8,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "save_every": 100,
        "samples": 1,
        "log_every": 20,
    }
    return TrainConfig(**(preset | values))


def is_judged(config: TrainConfig) -> bool:
    """Whether the demo knows what such a run must learn: only the seed, the type and the devices may be others."""
    free = {"seed": config.seed, "dtype": config.dtype, "devices": config.devices}
    return any(config == demo_config(Path(config.out), full, **free) for full in (False, True))
