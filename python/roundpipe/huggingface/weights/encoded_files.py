"""Weights that a model's files hold encoded already, as other programs store them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.conversion_mapping import get_model_conversion_mapping

from roundpipe import _core
from roundpipe.huggingface.weights.files import Checkpoint
from roundpipe.huggingface.weights.names import Names, Source
from roundpipe.huggingface.weights.safetensors_header import DTYPES, CheckpointError
from roundpipe.quantise.place import place_encoded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Encoded(NamedTuple):
    """An encoded weight: what `roundpipe.quantise.place.place_encoded` takes."""

    encoding: _core.Encoding
    parts: list[torch.Tensor]


class EncodedFiles:
    """The encoded weights of a checkpoint.

    Args:
        checkpoint: its files.
        config: the `quantization_config` of its config.json.

    Attributes:
        plain: the checkpoint as it would be without an encoding: each encoded weight is one tensor, whose values nobody
            may read.
        weights: by the name of that tensor.

    Raises:
        CheckpointError: the encoding is unknown, or a tensor of it is missing or damaged.
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        stored = checkpoint.tensors
        tensors = [(name, each.dtype, list(each.shape), each.end - each.start) for name, each in stored.items()]
        try:
            self.weights = _core.find_stored_weights(json.dumps(config), tensors, checkpoint.read)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(str(error)) from error
        parts = {tensor: name for name, weight in self.weights.items() for tensor in weight.tensors}
        codes = {weight.stored_parts[0]: name for name, weight in self.weights.items()}
        self.plain = copy.copy(checkpoint)
        self.plain.tensors = {
            codes.get(name, name): replace(each, dtype="BF16", shape=tuple(self.weights[codes[name]].sizes))
            if name in codes
            else each
            for name, each in stored.items()
            if name in codes or name not in parts
        }

    def keys(self, source: Source) -> list[str]:
        """The tensors of a source, if they are encoded; none otherwise. Raises CheckpointError if some are."""
        keys = [key for key, _ in source.keys]
        encoded = [key for key in keys if key in self.weights]
        if encoded and len(encoded) < len(keys):
            other = next(key for key in keys if key not in self.weights)
            raise CheckpointError(
                f"[from_pretrained] {encoded[0]} is encoded and {other} is not, and both become "
                f"{source.parameters[0]}, expected all or none of its parts; quantise the plain model again"
            )
        return encoded

    def load(
        self, names: Names, source: Source, dtype: torch.dtype, read: Callable[[str], list[torch.Tensor]]
    ) -> dict[str, Encoded]:
        """Makes a source's parameters.

        Args:
            names: of the model.
            source: with encoded tensors.
            dtype: to which the parameters decode.
            read: returns the parts of an encoded weight, in their order.

        Raises:
            CheckpointError: the files mean another dtype, or a parameter cannot be made of the codes of several.
        """
        found: dict[str, Encoded] = {}
        for key in self.keys(source):
            try:
                found[key] = Encoded(self.weights[key].encoding(dtype), read(key))
            except ValueError as error:
                raise CheckpointError(f"[from_pretrained] {key} {error}") from error
        if source.converter is None:
            return {source.parameters[0]: found[source.keys[0][0]]}
        return merge_encoded(names, source, found)

    def empty(self, key: str) -> list[torch.Tensor]:
        """The parts of a weight on the meta device."""
        shapes = self.weights[key].part_shapes
        return [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in shapes]


def merge_encoded(names: Names, source: Source, found: Mapping[str, Encoded]) -> dict[str, Encoded]:
    """What transformers makes of several weights, such as a stack of experts, made of their codes and scales.

    Raises:
        CheckpointError: that cannot be.
    """
    flat: dict[str, Encoded] = {}
    for key, (encoding, parts) in found.items():
        try:
            flat[key] = Encoded(encoding.of_stack(encoding.sizes(parts)[-1]), encoding.flat(parts))
        except ValueError as error:
            raise CheckpointError(f"[from_pretrained] {key} {error}") from error
    encoding = flat[source.keys[0][0]].encoding
    for key, each in flat.items():
        if each.encoding != encoding:
            raise CheckpointError(
                f"[from_pretrained] {key} is {each.encoding} and others of {source.parameters[0]} are {encoding}, "
                "expected one format; quantise the plain model again"
            )

    def rows(key: str) -> torch.Tensor:
        codes, scales = flat[key].parts
        return scales.view(*codes.shape[:-1], -1)

    codes = names.load(source, lambda key: flat[key].parts[0])
    scales = names.load(source, rows)
    return {
        name: Encoded(encoding, [codes[name].contiguous(), scales[name].contiguous().view(-1)])
        for name in source.parameters
    }


def encoded_in(files: EncodedFiles, model: Any, names: Names, dtypes: Mapping[str, torch.dtype]) -> dict[str, Encoded]:
    """The parameters of a model that the files hold encoded, empty.

    Args:
        names: of the plain files, see `EncodedFiles.plain`.
        dtypes: of the model's parameters.

    Raises:
        CheckpointError: the model has no place for one.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    found: dict[str, Encoded] = {}
    for source in dict.fromkeys(names.sources.values()):
        if files.keys(source):
            found |= files.load(names, source, dtypes[source.parameters[0]], files.empty)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    plain = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    for name, (encoding, parts) in found.items():
        is_end = id(model.get_parameter(name)) in plain if name in shapes else False
        if is_end or name in tied or name in tied.values():
            raise CheckpointError(
                f"[from_pretrained] {name} is encoded in the files, expected a plain weight for the embedding and the "
                "head; load the plain model with quantise=, which keeps them"
            )
        if encoding.sizes(parts) != shapes.get(name):
            raise CheckpointError(
                f"[from_pretrained] {name} would have the shape {encoding.sizes(parts)} of the codes in the files, "
                f"expected {shapes.get(name, 'a parameter')}; quantise the plain model again"
            )
    return found


class DecodedCheckpoint(Checkpoint):
    """A folder of encoded weights that is read as plain weights.

    Args:
        folder: of the files.
        config: the `quantization_config` of its config.json.
        dtype: of the model, in which encoded weights are read.

    Attributes:
        encoded: their names.

    Raises:
        CheckpointError: as `EncodedFiles` does, or the files mean another dtype.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._stored = Checkpoint(folder)
        self.__dict__.update(self._stored.__dict__)  # whose headers are read once
        self._files = EncodedFiles(self._stored, config)
        self._dtype = dtype
        self.encoded = frozenset(self._files.weights)
        kind = next(name for name, each in DTYPES.items() if each == dtype)
        self.tensors = {
            name: replace(each, dtype=kind, start=0, end=math.prod(each.shape) * dtype.itemsize)
            if name in self.encoded
            else each
            for name, each in self._files.plain.tensors.items()
        }
        for name in self.encoded:
            self._encoding(name)

    def _encoding(self, name: str) -> _core.Encoding:
        try:
            return self._files.weights[name].encoding(self._dtype)
        except ValueError as error:
            raise CheckpointError(f"[checkpoint] {name} {error}") from error

    def read(self, name: str) -> torch.Tensor:
        """Reads or decodes the tensor into new memory."""
        if name not in self.encoded:
            return super().read(name)
        weight = self._files.weights[name]
        read = [self._stored.read(part) if part else torch.empty(0) for part in weight.stored_parts]
        return self._encoding(name).values([weight.part(index, part) for index, part in enumerate(read)])

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of the tensor, decoded ones at once."""
        if name not in self.encoded:
            yield from super().chunks(name)
        else:
            whole: Any = self.read(name).view(-1).view(torch.uint8).numpy()
            yield memoryview(whole)


def place_stored(model: PreTrainedModel, folder: Path, config: Mapping[str, Any]) -> None:
    """Puts the encoded weights of a folder into a model on the meta device, in place, and freezes all others.

    Args:
        model: of the folder's config, with plain parameters.
        folder: whose files' headers are read, and small tensors of them.
        config: the `quantization_config` of its config.json.

    Raises:
        CheckpointError: as `EncodedFiles` and `encoded_in` do.
    """
    files = EncodedFiles(Checkpoint(folder), config)
    names = Names(model, files.plain, get_model_conversion_mapping(model))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for name, value in encoded_in(files, model, names, dtypes).items():
        place_encoded(model, name, *value)
    model.requires_grad_(False)
