"""Which layers of a model run natively."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from roundpipe import _core

if TYPE_CHECKING:
    from roundpipe.following.layers.shell import NativeForm
    from roundpipe.following.native.decoder import NativeDecoder
    from roundpipe.following.native.passages import Passages
    from roundpipe.ops.functional import Arithmetic

NativeOption = Literal["exact"] | bool | None
"""None: where it is possible. True: required. "exact": required, with the bits of the Python layers. False: never."""


class NativeLayers:
    """Says which decoder layers of a model the engine runs natively, without Python.

    Its truth value is whether all of them are native, and its text says how many are, and why the others are not. If
    all are, it also says which parts around them run in Python.

    Args:
        arithmetic: of what is native.

    Attributes:
        option: the user's option.
    """

    def __init__(
        self,
        option: NativeOption,
        total: int = 0,
        decoders: Mapping[int, NativeDecoder] | None = None,
        reasons: Mapping[int, str] | None = None,
        passages: Passages | None = None,
        whole: str | None = None,
        modules: Mapping[int, NativeForm] | None = None,
        before: nn.Module | None = None,
        arithmetic: Arithmetic = "exact",
    ) -> None:
        self.option, self._arithmetic = option, arithmetic
        self._total = total
        self._decoders = decoders or {}
        self._reasons = reasons or {}
        self._passages = passages
        self._whole = whole
        self._modules = modules or {}
        self._before = before

    def of(self, part: nn.Module) -> NativeForm | None:
        """The native form of a layer of the chain; None if Python runs it."""
        return self._modules.get(id(part))

    def enter(self, batch: Sequence[tuple[list[Any], Any]]) -> list[_core.Passage | None]:
        """The passages of microbatches that enter the model now; None for one that begins in Python."""
        return self._passages.enter(batch) if self._passages else [None] * len(batch)

    @property
    def reasons_around(self) -> dict[str, str]:
        """Why the parts before and after the decoder layers run in Python at this moment, by part."""
        return self._passages.reasons_around() if self._passages else {}

    def passages(self, part: nn.Module) -> Callable[[Any], Any] | None:
        """For the part before the layers, the function that makes the passage of its result; else None."""
        return self._passages if part is self._before else None

    @property
    def reasons(self) -> dict[str, str]:
        """Why layers are not native at this moment, by the layer's number in the model; "model" for all of them."""
        whole = self._whole or (self._passages.reason_against() if self._passages else None)
        if whole is not None:
            return {"model": whole}
        found = dict(self._reasons)
        for number, decoder in self._decoders.items():
            if decoder.config() is None:
                found[number] = str(decoder.reason)
        return {f"layer {number}": found[number] for number in sorted(found)}

    def __bool__(self) -> bool:
        return not self.reasons and self._total > 0

    def __str__(self) -> str:
        reasons = self.reasons
        if "model" in reasons:
            exact = "" if self._arithmetic == "exact" else "; they compute exactly, and only losses in chunks do not"
            return f"no layer runs natively: {reasons['model']}{exact}"
        fast = self._in_fast()
        if not reasons:
            around = "".join(f"; {part} runs in Python: {reason}" for part, reason in self.reasons_around.items())
            return f"all {self._total} decoder layers run natively{fast}{around}"
        first = next(iter(reasons))
        native = self._total - len(reasons)
        return f"{native} of {self._total} decoder layers run natively{fast}; {first}: {reasons[first]}"

    def _in_fast(self) -> str:
        """What the text says about the arithmetic of native layers; nothing if it is exact."""
        if self._arithmetic == "exact":
            return ""
        exact = {decoder.exact_parts() for decoder in self._decoders.values()} - {""}
        return ", in fast arithmetic" + "".join(f" (exact: {each})" for each in sorted(exact))

    __repr__ = __str__


def check_option(option: Any, arithmetic: Any) -> None:
    """Raises ValueError for a value that `native` or `arithmetic` does not take."""
    _core.check_arithmetic(str(arithmetic))
    if option == "exact" and arithmetic != "exact":
        raise ValueError(
            f"[wrap_model_to_roundpipe] native='exact' asks for the bits of the Python layers, which {arithmetic} "
            "arithmetic has not; expected native=True, or arithmetic='exact'"
        )
    if option is not None and option is not True and option is not False and option != "exact":
        raise ValueError(f"[wrap_model_to_roundpipe] native is {option!r}, expected None, True, False or 'exact'")


def without_native_layers(option: NativeOption, reason: str, arithmetic: Arithmetic = "exact") -> NativeLayers:
    """Says that no layer is native.

    Raises:
        ValueError: native layers are required.
    """
    whole = "native=False" if option is False else reason
    return required(NativeLayers(option, whole=whole, arithmetic=arithmetic))


def required(layers: NativeLayers) -> NativeLayers:
    """Returns `layers`.

    Raises:
        ValueError: native layers are required, and not all are.
    """
    if layers.option and not layers:
        raise ValueError(
            f"[wrap_model_to_roundpipe] native={layers.option!r}, but {layers}; expected a model whose decoder layers "
            "all have a native form; leave native out to run the others in Python"
        )
    return layers
