"""Checkpoints of several nodes, made from one of a single process by cutting its optimizer's state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from roundpipe import _core

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
    writer = _core.RunFolder(str(run)).begin(7, total_bytes=0, replace=False)
    for path in source.iterdir():
        if path.name not in ("manifest.json", "state.json", "optimizer.safetensors", "gradients.safetensors"):
            writer.add_small(path.name, path.read_bytes())
    writer.add_small("state.json", json.dumps(state))
    for rank in range(size):
        ranges = {name: (0 if rank == 0 else ends[rank - 1], ends[rank]) for name, ends in cuts.items()}
        files = _core.StepFiles(writer.folder)
        values = {
            key: own_part(key, tensor, strides.get(key.rsplit("/", 1)[0]), *ranges[key.rsplit("/", 1)[0]])
            for key, tensor in optimizer.items()
        }
        layout = _core.lay_out_safetensors(
            [(key, tensor.dtype, list(tensor.shape)) for key, tensor in values.items()], {"format": "pt"}
        )
        output = files.create(f"rank-{rank:05d}-optimizer.safetensors", layout.file_bytes)
        output.write_at(0, layout.header)
        for offset, tensor in zip(layout.offsets, values.values(), strict=True):
            _core.write_tensor(output, offset, tensor)
        counters = {name: entry for name, entry in own["counters"].items() if ranges[name][0] < ranges[name][1]}
        text = json.dumps({**own, "counters": counters, "ranges": ranges, "strides": dict(strides)})
        files.add_small(f"rank-{rank:05d}-state.json", text)
        files.add_small(f"rank-{rank:05d}-state.safetensors", (source / "state.safetensors").read_bytes())
        writer.adopt([(record.name, record.bytes, record.crc32c) for record in files.finish()], f"rank {rank}")
    writer.commit({"test": "1"}, size)
    return run / "step-7"
