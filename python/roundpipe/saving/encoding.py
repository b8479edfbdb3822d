"""Values as JSON and tensors, without pickle: what a checkpoint's `state.json` and `state.safetensors` hold.

`docs/checkpoint-format.md` documents the encoding. Values that it cannot express are refused, with their path.
"""

from __future__ import annotations

import base64
import collections
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_DEEPEST = 64
_PLAIN_INTS = range(-(2**63), 2**63)
_DICTS: tuple[type, ...] = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Encoder:
    """Encodes values; gathers their tensors.

    Attributes:
        tensors: the tensors of all values so far, by the names that the JSON has for them.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._copies = True

    def encode(self, value: Any, path: str, copies: bool = True) -> Any:
        """Returns `value` as JSON can hold it.

        Args:
            value: None, bool, int, float, str, bytes, tensors, NumPy arrays and numbers, and lists, tuples and dicts
                of these.
            path: names the value in messages, and its tensors.
            copies: whether tensors are copied; else those in use are kept.

        Raises:
            ValueError: the value, or one in it, is of another type; the message has its path.
        """
        self._copies = copies
        return self._encode(value, path, [])

    def _encode(self, value: Any, path: str, outer: list[int]) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _text(value, path)
        if kind is int:
            return value if value in _PLAIN_INTS else {"int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if kind in _TENSORS:
            return {"tensor": self._keep(value.detach(), path)}
        if id(value) in outer or len(outer) > _DEEPEST:
            raise ValueError(
                f"[save_checkpoint] {path} contains itself, or is nested more than {_DEEPEST} deep, expected plain "
                "values; leave it out of the state"
            )
        outer.append(id(value))
        try:
            return self._encode_group(value, path, outer)
        finally:
            outer.pop()

    def _encode_group(self, value: Any, path: str, outer: list[int]) -> Any:
        kind = type(value)
        if kind is list:
            return [self._encode(item, f"{path}[{index}]", outer) for index, item in enumerate(value)]
        if kind in (tuple, torch.Size):
            return {"tuple": [self._encode(item, f"{path}[{index}]", outer) for index, item in enumerate(value)]}
        if kind in _DICTS:
            return {
                "dict": [
                    [self._key(key, path, outer), self._encode(item, f"{path}.{key}", outer)]
                    for key, item in value.items()
                ]
            }
        return self._encode_numpy(value, path)

    def _key(self, key: Any, path: str, outer: list[int]) -> Any:
        if type(key) not in (str, int, float, bool, tuple, type(None)):
            raise ValueError(
                f"[save_checkpoint] {path} has a key of type {type(key).__name__}, expected str, int, float, bool, "
                "None or a tuple of these; change the key"
            )
        return self._encode(key, f"{path}'s key {key!r}", outer)

    def _encode_numpy(self, value: Any, path: str) -> Any:
        numpy = sys.modules.get("numpy")
        known = numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
        if numpy is not None and known and value.dtype.kind in "biufc":
            name = self._keep(
                torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)[: value.nbytes], path
            )
            form = "array" if type(value) is numpy.ndarray else "number"
            return {form: name, "dtype": value.dtype.str, "shape": list(value.shape)}
        raise ValueError(
            f"[save_checkpoint] {path} is a {type(value).__module__}.{type(value).__qualname__}, expected a tensor, an "
            "array, a number, a string, bytes, None, or a list, tuple or dict of these; leave it out, or give an "
            "object whose state_dict() returns such values"
        )

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ValueError(
                f"[save_checkpoint] {path} is a {tensor.layout} tensor on {tensor.device}, expected a dense one with "
                "values; convert it with to_dense(), or leave it out"
            )
        name, count = path, 1
        while name in self.tensors:
            name, count = f"{path}#{count}", count + 1
        kept = tensor.cpu().resolve_conj().resolve_neg()
        self.tensors[name] = kept.clone() if self._copies and kept.data_ptr() == tensor.data_ptr() else kept
        return name


def _text(value: str, path: str) -> str:
    """The text itself. Lone surrogates, as names of files that are not UTF-8 have, are no text in JSON."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"[save_checkpoint] {path} is no text in UTF-8, expected one; give it as bytes, such as os.fsencode(name)"
        ) from None
    return value


def decode(value: Any, tensors: Mapping[str, torch.Tensor], path: str = "state") -> Any:
    """Returns the value that `Encoder.encode` was given. REQUIRES: it made this JSON, as the engine has checked."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [decode(item, tensors, f"{path}[{index}]") for index, item in enumerate(value)]
    return _decode_tagged(value, tensors, path)


def tensor_names(encoded: Any) -> Iterator[str]:
    """The names of the tensors of an encoded value, in its order."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from tensor_names(item)
    elif isinstance(encoded, dict):
        tag, content = next(iter(encoded.items()))
        if tag in ("tensor", "array", "number"):
            yield content
        else:
            yield from tensor_names(content)


def _decode_tagged(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], path: str) -> Any:
    tag = next(iter(value))
    content = value[tag]
    if tag == "int":
        return int(content)
    if tag == "float":
        return float(content)
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "tuple":
        return tuple(decode(item, tensors, f"{path}[{index}]") for index, item in enumerate(content))
    if tag == "dict":
        pairs = ((decode(key, tensors, f"{path}'s key"), item) for key, item in content)
        return {key: decode(item, tensors, f"{path}.{key}") for key, item in pairs}
    if tag == "tensor":
        return tensors[content]
    if tag in ("array", "number"):
        import numpy

        array = numpy.frombuffer(tensors[content].numpy().tobytes(), dtype=numpy.dtype(value["dtype"]))
        array = array.reshape(value["shape"])
        return array.copy() if tag == "array" else array[()]
    raise ValueError(f"unknown tag {tag!r}")
