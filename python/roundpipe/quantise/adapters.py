"""PEFT's adapters on models some of whose weights may be encoded."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from roundpipe.quantise.modules import encodings_of
from roundpipe.quantise.stacked import EncodedStacks

if TYPE_CHECKING:
    from peft import PeftConfig


def add_adapters(model: Any, config: PeftConfig, **options: Any) -> Any:
    """`peft.get_peft_model`, with a warning where "all-linear" leaves out encoded experts.

    Args:
        options: further ones of `get_peft_model`.
    """
    from peft import get_peft_model

    takes_all = getattr(config, "target_modules", None) == "all-linear"
    adapted: Any = get_peft_model(model, config, **options)
    if takes_all and any(isinstance(module, EncodedStacks) for module in adapted.modules()):
        for each in adapted.peft_config.values():
            each.target_parameters = None  # PEFT has named the experts there, and adapted none
        warnings.warn(
            "[peft] 'all-linear' leaves out the experts, whose matrices are encoded; name the layers in "
            "target_modules, or keep=['experts'] adapts them as well",
            stacklevel=2,
        )
    return adapted


def refuse_adapters(model: nn.Module) -> None:
    """Raises ValueError if PEFT was told to adapt parameters (not layers) that are encoded, which it would not do."""
    encoded = encodings_of(model)
    for config in getattr(model, "peft_config", {}).values():
        for target in getattr(config, "target_parameters", None) or ():
            name = next((name for name in encoded if f".{name}".endswith(f".{target}")), None)
            if name is not None:
                raise ValueError(
                    f"[RoundPipe] target_parameters of PEFT names {target!r} (as 'all-linear' makes it), and {name} is "
                    "encoded, expected adapters on linear layers, named in target_modules, or the parameter kept as it "
                    "is: keep=['experts'] beside quantise"
                )
