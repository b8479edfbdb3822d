"""Checkpoints of several nodes, made from one of a single process by cutting its optimizer's state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from handmade import make_step

BLOCK = 256
"""The elements that 8-bit moments have in common."""

Cuts = Mapping[str, Sequence[int]]
"""For each parameter, where each rank's elements end."""

_OWN = ("pipelines", "random", "state", "counters")


def memory_order(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The elements of a tensor in the order in which memory with these strides has them."""
    made = torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype).copy_(tensor)
    return made.as_strided((tensor.numel(),), (1,))


def own_part(key: str, tensor: torch.Tensor, stride: Sequence[int] | None, first: int, last: int) -> torch.Tensor:
    """What a rank that has the elements `first` to `last` of a parameter has of one of its states."""
    if key.endswith("_scale"):
        return tensor[first // BLOCK : -(-last // BLOCK)].clone()
    if tensor.dtype == torch.uint8:
        return tensor[first : -(-last // BLOCK) * BLOCK].clone()
    flat = tensor.reshape(-1) if stride is None else memory_order(tensor, stride)
    return flat[first:last].clone()


def cut_checkpoint(source: Path, run: Path, cuts: Cuts, strides: Mapping[str, Sequence[int]]) -> Path:
    """Writes a checkpoint of several nodes into the folder `run`.

    Args:
        source: a checkpoint of one process.
        run: a run's folder.
        cuts: of every trained parameter.
        strides: of those that are not contiguous.
    """
    size = len(next(iter(cuts.values())))
    state = json.loads((source / "state.json").read_text())
    own = {name: state.pop(name) for name in _OWN}
    optimizer = load_file(source / "optimizer.safetensors")
    left_out = ("manifest.json", "state.json", "optimizer.safetensors", "gradients.safetensors")
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.name not in left_out}
    files["state.json"] = json.dumps(state).encode()
    for rank in range(size):
        ranges = {name: (0 if rank == 0 else ends[rank - 1], ends[rank]) for name, ends in cuts.items()}
        values = {
            key: own_part(key, tensor, strides.get(key.rsplit("/", 1)[0]), *ranges[key.rsplit("/", 1)[0]])
            for key, tensor in optimizer.items()
        }
        counters = {name: entry for name, entry in own["counters"].items() if ranges[name][0] < ranges[name][1]}
        text = json.dumps({**own, "counters": counters, "ranges": ranges, "strides": dict(strides)})
        files[f"rank-{rank:05d}-optimizer.safetensors"] = save(values)
        files[f"rank-{rank:05d}-state.json"] = text.encode()
        files[f"rank-{rank:05d}-state.safetensors"] = files["state.safetensors"]
    return make_step(run, 7, files, size)
