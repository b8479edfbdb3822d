"""Which parameters of a model are encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from roundpipe import _core
from roundpipe.quantise.modules import encodings_of

_EXPERTS = "experts"
_MATRICES_IN_A_STACK = 3  # dimensions


@dataclass(frozen=True)
class Choice:
    """What becomes of the parameters of a model.

    Attributes:
        format: of the encoded ones.
        encoded: their names: weights of linear layers, and stacked matrices of experts.
        kept: by name of every other parameter, why it stays as it is.
    """

    format: str
    encoded: frozenset[str]
    kept: dict[str, str]


def choose(model: nn.Module, format: str, keep: Iterable[str] = ()) -> Choice:
    """Chooses the weights of linear layers but the head, and experts' matrices; all else stays.

    Args:
        model: may be on the meta device.
        format: see `roundpipe.from_pretrained`.
        keep: paths of modules, or last parts of them, whose parameters stay.

    Raises:
        ValueError: the format is unknown, a name in `keep` is that of no module, or nothing is left to be encoded.
    """
    if before := next(iter(encodings_of(model)), None):
        raise ValueError(f"[quantise] {before} is encoded already, expected a model of plain weights")
    modules = dict(model.named_modules())
    names = list(keep)
    _core.check_format(format)
    _core.require_modules(names, list(modules))
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    base = getattr(model, "base_model", model)
    inside = {id(module) for module in base.modules()}  # what scores rows is outside
    places = Counter(id(parameter) for module in modules.values() for parameter in module._parameters.values())
    encoded: set[str] = set()
    kept: dict[str, str] = {}
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            is_weight = type(module) is nn.Linear and name == "weight"
            is_stack = path.rpartition(".")[2] == _EXPERTS and parameter.dim() == _MATRICES_IN_A_STACK
            full = f"{path}.{name}" if path else name
            if not (is_weight or is_stack):
                kept[full] = "no matrix of a linear layer or of experts"
            elif module is head or id(module) not in inside:
                kept[full] = "the head"
            elif any(_core.is_name_of(each, path) for each in names):
                kept[full] = "in keep"
            elif places[id(parameter)] > 1:
                kept[full] = "used in several places"
            elif reason := _core.reason_against_format(format, list(parameter.shape)):
                kept[full] = reason
            else:
                encoded.add(full)
    if not encoded:
        kinds = sorted({type(module).__name__ for module in modules.values() if module._parameters})
        raise ValueError(
            f"[quantise] nothing can be encoded in modules of {', '.join(kinds)}, expected linear layers (nn.Linear) "
            "or stacked experts beside the head"
        )
    return Choice(format, frozenset(encoded), kept)
