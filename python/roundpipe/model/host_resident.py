"""The `nn.Module` methods that move, convert and copy a model whose weights the engine keeps on the host."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import nn

"""The methods of `HostResident` that users call."""

_NO_COPY = (
    "[RoundPipe] a model in the pipeline is neither copied nor pickled, as its weights lie in the engine's memory; "
    "copy or save model.state_dict() instead, and load that into a new model"
)


class HostResident(nn.Module):
    """Stays on the host in its wrapped dtypes: requests for that do nothing, and all other requests are refused.

    A subclass has `_original_model` and `synchronize`.
    """

    _original_model: nn.Module

    def synchronize(self) -> None:
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the model itself. A device other than the CPU gives a warning, because the engine moves the layers.

        Raises:
            ValueError: a dtype that the parameters do not have, a memory format, or the meta device.
        """
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if memory_format is not None:
            _refuse(f"to(memory_format={memory_format})", "wrap_model_to_roundpipe(model.to(memory_format=...))")
        if device is not None and device.type == "meta":
            _refuse("to('meta')", "make the model on the meta device, and wrap one that has values")
        if dtype is not None:
            self._check_dtype(f"to({dtype})", dtype)
        if device is not None:
            self._stay(device.type)
        return self

    def cpu(self) -> Self:
        """Returns the model itself: its weights are on the CPU already."""
        return self

    def cuda(self, device: Any = None) -> Self:
        """Returns the model itself, with a warning, see `to`."""
        return self._stay("cuda")

    def xpu(self, device: Any = None) -> Self:
        """Returns the model itself, with a warning, see `to`."""
        return self._stay("xpu")

    def ipu(self, device: Any = None) -> Self:
        """Returns the model itself, with a warning, see `to`."""
        return self._stay("ipu")

    def mtia(self, device: Any = None) -> Self:
        """Returns the model itself, with a warning, see `to`."""
        return self._stay("mtia")

    def float(self) -> Self:
        """Returns the model itself if its floating-point parameters are already in float32; see `to`."""
        return self._check_dtype("float()", torch.float32)

    def double(self) -> Self:
        """Returns the model itself if its floating-point parameters are already in float64; see `to`."""
        return self._check_dtype("double()", torch.float64)

    def half(self) -> Self:
        """Returns the model itself if its floating-point parameters are already in float16; see `to`."""
        return self._check_dtype("half()", torch.float16)

    def bfloat16(self) -> Self:
        """Returns the model itself if its floating-point parameters are already in bfloat16; see `to`."""
        return self._check_dtype("bfloat16()", torch.bfloat16)

    def type(self, dst_type: torch.dtype | str) -> Self:
        """Returns the model itself if its floating-point parameters already have this type; see `to`."""
        dtype = torch.empty(0).type(dst_type).dtype if isinstance(dst_type, str) else dst_type
        return self._check_dtype(f"type({dst_type})", dtype)

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Refused: the weights have values."""
        _refuse("to_empty()", "fill the model with values first, then wrap it")

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Calls `fn` with every module of the original model, after all running work has finished.

        `fn` may write values in place, as initialization does. If it replaces parameters, the next call is refused.
        """
        self.synchronize()
        self._original_model.apply(fn)
        return self

    def share_memory(self) -> NoReturn:
        """Refused: the weights lie in the engine's memory."""
        _refuse("share_memory()", "give other processes model.state_dict()")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError(_NO_COPY)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ValueError(_NO_COPY)

    def _stay(self, kind: str) -> Self:
        if kind != "cpu":
            warnings.warn(
                f"[RoundPipe] moving the model to {kind!r} is not needed and does nothing: its weights stay on the "
                "host, and every device takes the layers that it runs; roundpipe.devices() says which there are",
                stacklevel=3,
            )
        return self

    def _check_dtype(self, what: str, dtype: torch.dtype) -> Self:
        tensors = itertools.chain(self._original_model.parameters(), self._original_model.buffers())
        other = next((t for t in tensors if t.is_floating_point() and t.dtype != dtype), None)
        if other is not None:
            _refuse(
                f"{what}, with parameters or buffers in {other.dtype},",
                "convert the model first, then wrap it; optim_dtype= gives the optimizer another dtype, "
                "torch.autocast the layers",
            )
        return self


def _refuse(what: str, instead: str) -> NoReturn:
    raise ValueError(
        f"[RoundPipe] {what} would replace parameters that the engine holds, expected them to stay as they were "
        f"wrapped; {instead}"
    )
