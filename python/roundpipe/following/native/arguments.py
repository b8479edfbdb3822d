"""The arguments of a causal language model's call that its native parts read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe.following.program import Ref

# Arguments that change nothing with these values.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "cache": (None,),
    "past_key_values": (None,),
    "cache_position": (None,),
    "inputs_embeds": (None,),
    "use_cache": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_router_logits": (None, False),
    "return_dict": (None, True),
    "logits_to_keep": (0,),
    "shift_labels": (None,),
}


@dataclass(frozen=True)
class TokenArguments:
    """Where the tensors are that a call is made with; None for one that is not given.

    Attributes:
        ids: of the tokens.
        attention_mask: which tokens are no padding.
        positions: of the tokens.
        labels: of the loss.
        items: `num_items_in_batch`, which divides the sum of the losses.
    """

    ids: int
    attention_mask: int | None
    positions: int | None
    labels: int | None
    items: int | None


_NAMES = ("input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch")


def token_arguments(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TokenArguments | None:
    """Reads the arguments of a forward, in which a `Ref` stands for each tensor; None if a native part would not know
    one of them."""
    given = {**dict(zip(inspect.signature(forward).parameters, args, strict=False)), **kwargs}
    found: dict[str, int | None] = {}
    for name in _NAMES:
        value = given.pop(name, None)
        if value is not None and not isinstance(value, Ref):
            return None
        found[name] = None if value is None else value.number
    for name, value in given.items():
        if isinstance(value, Ref) or name not in _WITHOUT_EFFECT:
            return None
        if not any(value is each or (type(value) is type(each) and value == each) for each in _WITHOUT_EFFECT[name]):
            return None
    ids, mask, positions, labels, items = (found[name] for name in _NAMES)
    return None if ids is None else TokenArguments(ids, mask, positions, labels, items)
