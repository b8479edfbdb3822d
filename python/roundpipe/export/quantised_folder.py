"""Writes a model's folder with its weights encoded, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping

from roundpipe import _core
from roundpipe.export.merge import find_base, other_files, quantization_of
from roundpipe.export.output import Entry, Progress, bytes_of_tensor, write_folder
from roundpipe.export.placement import build_model
from roundpipe.files import check_free
from roundpipe.huggingface.weights.encoded_files import Encoded, merge_encoded
from roundpipe.huggingface.weights.files import Checkpoint
from roundpipe.huggingface.weights.names import Names, Source
from roundpipe.huggingface.weights.safetensors_header import DTYPES, CheckpointError
from roundpipe.quantise.choice import choose

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class QuantisedFolder:
    """What a folder of encoded weights holds.

    Attributes:
        folder: where it is.
        encoded: bytes of the encoded weights, and `plain` what they took before.
        error: of the encoded weights, the root of their squared differences' sum over that of their squares.
        kept: by name of every other tensor of the files, why it stays, and its bytes.
    """

    folder: Path
    encoded: int
    plain: int
    error: float
    kept: dict[str, tuple[str, int]]


def quantise_folder(
    model: str | Path, out: str | Path, format: str, keep: Iterable[str] = (), *, progress: Progress | None = None
) -> QuantisedFolder:
    """Writes a model with its weights encoded, as a folder that `roundpipe.from_pretrained` loads as it is.

    "nf4" and "nf4-double" are stored as transformers stores weights of bitsandbytes, which it loads as well; "mxfp4" as
    GPT-OSS, and "int8" as compressed-tensors ("int-quantized"). The encoded weights are those of
    `from_pretrained(model, quantise=format, keep=keep)`, except that scales of "nf4-double" belong to each tensor of
    the files. Memory holds one tensor at a time. `out` appears once it is completely written.

    Args:
        model: folder of a causal language model of transformers, or the id of one in the local Hugging Face cache.
        out: a folder that does not exist or is empty.
        format: see `roundpipe.from_pretrained`.
        keep: modules whose weights stay as they are.
        progress: called with the bytes written so far and the total.

    Raises:
        ValueError: the model cannot be loaded or encoded; raised before the first byte is written, but for weights that
            are not finite, which leave nothing behind.
    """
    out = Path(out)
    check_free(out, "quantise")
    checkpoint = Checkpoint(find_base(model, "quantise", "model", "its folder"))
    if quantization_of(checkpoint.folder, "quantise") is not None:
        raise ValueError(
            f"[quantise] {checkpoint.folder}: its weights are quantised, expected plain ones; give the model that was "
            "quantised, or merge and decode it with roundpipe export"
        )
    plan = _Plan(checkpoint, format, keep)
    entries = plan.entries()
    ready: dict[str, torch.Tensor] = {}  # encoded, not yet written

    def chunks(name: str) -> Iterator[memoryview]:
        if name not in plan.weight_of:
            return checkpoint.chunks(name)
        if name not in ready:
            ready.update(plan.encode(plan.weight_of[name]))
        return bytes_of_tensor(ready.pop(name))

    write_folder(out, "quantise", checkpoint, entries, chunks, other_files(checkpoint.folder), plan.described, progress)
    sizes = {entry.name: entry.size_bytes for held in entries.values() for entry in held}
    return QuantisedFolder(
        out,
        encoded=sum(size for name, size in sizes.items() if name in plan.weight_of),
        error=plan.error(),
        plain=sum(checkpoint.tensors[name].end - checkpoint.tensors[name].start for name in plan.encoded),
        kept={name: (reason, sizes[name]) for name, reason in plan.kept.items()},
    )


class _Plan:
    """What becomes of each tensor of the files."""

    def __init__(self, checkpoint: Checkpoint, format: str, keep: Iterable[str]) -> None:
        self._checkpoint = checkpoint
        self._model = build_model(checkpoint.folder, "quantise")
        self.format = format
        choice = choose(self._model, format, keep)
        self._names = Names(self._model, checkpoint, get_model_conversion_mapping(self._model))
        self.dtype = _dtype_of(self._model.config, checkpoint)
        self._errors = self._squares = 0.0
        self.encoded: dict[str, Encoded] = {}  # on the meta device
        self.kept = {key: choice.kept.get(name, "no parameter") for name, key in self._keys()}
        for source in dict.fromkeys(self._names.sources.values()):
            if choice.encoded.issuperset(source.parameters):
                self._encode_source(source)
        for name in self._names.unplaced.values():
            self.kept[name] = "not in the model"
        if not self.encoded:
            raise ValueError(
                f"[quantise] nothing in {checkpoint.folder} can be stored as {format}: "
                f"{next(iter(self.kept.values()), 'it is empty')}"
            )
        self.weight_of = {
            part: name
            for name, (encoding, parts) in self.encoded.items()
            for part, _ in _core.stored_tensors(name, encoding, parts)
        }

    def _keys(self) -> Iterator[tuple[str, str]]:
        for name, source in self._names.sources.items():
            for key, _ in source.keys:
                yield name, key

    def _encode_source(self, source: Source) -> None:
        made: dict[str, Encoded] = {}
        for key, _ in source.keys:
            shape = self._checkpoint.tensors[key].shape
            if reason := _core.reason_against_format(self.format, list(shape)):
                self.kept |= dict.fromkeys((each for each, _ in source.keys), reason)
                return
            made[key] = self._encoded(torch.empty(shape, dtype=self.dtype, device="meta"))
        if source.converter is not None:
            try:
                merge_encoded(self._names, source, made)
            except CheckpointError:
                self.kept |= dict.fromkeys(made, "blocks of it do not end with its rows, and it is one of a stack")
                return
        self.encoded |= made
        for key in made:
            del self.kept[key]

    def _encoded(self, numbers: torch.Tensor) -> Encoded:
        transposed = self.format == "mxfp4" and numbers.dim() > 2
        own = numbers.transpose(-2, -1).contiguous() if transposed else numbers
        encoding = _core.Encoding(self.format, self.dtype, transposed)
        return Encoded(encoding, _core.encode(self.format, own))

    def encode(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors that hold a weight, by name."""
        numbers = self._checkpoint.read(name).to(self.dtype)
        try:
            encoding, parts = self._encoded(numbers)
        except ValueError as error:
            raise ValueError(f"[quantise] {name}: {error}") from error
        self._squares += _sum_of_squares(numbers)
        self._errors += _sum_of_squares(encoding.values(parts).sub_(numbers))
        return dict(_core.stored_tensors(name, encoding, parts))

    def error(self) -> float:
        """Of what was encoded; see `QuantisedFolder`."""
        return math.sqrt(self._errors / self._squares) if self._squares else 0.0

    def entries(self) -> dict[str, list[Entry]]:
        """The contents of each file."""
        found: dict[str, list[Entry]] = {file: [] for file in self._checkpoint.files}
        for name, stored in self._checkpoint.tensors.items():
            if name in self.encoded:
                for part, tensor in _core.stored_tensors(name, *self.encoded[name]):
                    entry = Entry(part, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
                    found[stored.file].append(entry)
            else:
                found[stored.file].append(Entry(name, stored.dtype, stored.shape, stored.end - stored.start))
        # Wider elements first: each tensor is aligned to its elements then, so that it can be mapped.
        return {file: sorted(held, key=lambda entry: -DTYPES[entry.dtype].itemsize) for file, held in found.items()}

    def described(self, config: dict[str, Any]) -> dict[str, Any]:
        """The config of the folder. It says the dtype, which files of scales do not tell."""
        linear = [path for path, module in self._model.named_modules() if isinstance(module, nn.Linear)]
        kept = [path for path in linear if f"{path}.weight" in self.kept]
        config |= {"quantization_config": json.loads(_core.stored_config(self.format, self.dtype, kept))}
        if config.get("dtype") is None and config.get("torch_dtype") is None:
            config["dtype"] = str(self.dtype).removeprefix("torch.")
        return config


def _dtype_of(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """The config's, or that of the first tensor of plain numbers, which transformers takes then."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    dtypes = (tensor.torch_dtype for tensor in checkpoint.tensors.values())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _sum_of_squares(numbers: torch.Tensor) -> float:
    parts = torch.split(numbers.flatten(0, -2), 1024)  # whose fp32 copies take little memory
    return sum((float(part.float().square().sum()) for part in parts), start=0.0)
