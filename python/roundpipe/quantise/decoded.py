"""Decoded numbers for readers outside of a layer's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class DecodedTensor(torch.Tensor):
    """A copy of an encoded tensor's numbers, to which writes are errors: they would change nothing in the model, as
    where PEFT merges an adapter into a base. Results of operations are plain tensors; its `.data` is one of these."""

    @staticmethod
    def of(numbers: torch.Tensor) -> DecodedTensor:
        """The same memory."""
        return numbers.as_subclass(DecodedTensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuses writes."""
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        is_write = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name in _IN_PLACE)
        if (
            args
            and isinstance(args[0], DecodedTensor)
            and (is_write or name == "__setitem__" or (owner == "data" and name == "__set__"))
        ):
            raise RuntimeError(
                "[quantise] a weight that is encoded was to be written to, expected reads only, since the decoded "
                "numbers are a copy; merge an adapter into the plain base (roundpipe export), and quantise that"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if owner == "data":
            return DecodedTensor.of(result)
        return result.as_subclass(torch.Tensor) if isinstance(result, DecodedTensor) else result


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor", "mod", "pow")}
