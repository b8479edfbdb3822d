"""The presets at other lengths, and at sizes that two cores can emulate."""

from __future__ import annotations

import copy
from typing import Any

from roundpipe.plan.costs import PRESETS, CostSet, parse

PRESET_TOKENS = 8192
# Of the bytes a second, so that two cores can move them all beside running the engine.
TRAFFIC = 1 / 500
# Time scales where every byte moves; the shortest layer takes 5 ms or more.
LINK_SCALES = {
    "qwen3-1.7b": 1.0,
    "llama3.1-8b": 0.3,
    "gpt-oss-20b": 0.25,
    "qwen3-32b": 0.15,
    "qwen3-235b-lora": 0.15,
}


def at_length(preset: str, tokens: int, **machine: float) -> CostSet:
    """The costs of a preset with times and values in proportion to the tokens of a microbatch.

    Args:
        machine: fields of a cost file to replace, such as `host_gb_per_s`.
    """
    document: dict[str, Any] = copy.deepcopy(PRESETS[preset])
    share = tokens / PRESET_TOKENS
    for layer in [*document["layers"], document["head"]]:
        for name in ("forward_ms", "backward_ms"):
            layer[name] *= share
        for name in ("activation_bytes", "saved_bytes"):
            layer[name] = int(share * layer[name])
    document["hop_latency_ms"] *= share
    del document["baseline_stages"]
    return parse(document | machine, preset)
