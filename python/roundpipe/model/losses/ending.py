"""What becomes of the outputs of one microbatch: the weight of its loss, and what of them is kept."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.model.losses.lazy_logits import LazyLogits


class Kept(enum.Enum):
    """The part of a model's outputs that anybody will read."""

    ALL = "all outputs"
    ALL_BUT_LOGITS = "all outputs but the logits"
    LOSS = "the loss"
    TOKEN_LOSSES = "the loss of each token"


@dataclass(frozen=True)
class Ending:
    """What is done with a microbatch's outputs.

    Attributes:
        share: factor of the microbatch's loss; None: the loss is not scaled.
        router_share: factor of the router's loss in it; None: that loss is not scaled.
        kept: what of the outputs is kept; without the logits, the loss may be computed in chunks.
        towers: whether what towers return, such as the features of pictures, is kept among the outputs; microbatches
            have other numbers of these, so that they do not make a whole.
        refuses_loss: there are other microbatches, and nobody knows how a loss of the model would add up over them.
    """

    share: float | None = None
    router_share: float | None = None
    kept: Kept = Kept.ALL
    towers: bool = True
    refuses_loss: bool = False

    def of(self, outputs: Any, model: str) -> Any:
        """The outputs of a microbatch of the model with this name, weighted, and without what is not kept.

        Raises:
            ValueError: the outputs have a loss, which the microbatches' losses would not make.
        """
        if self.refuses_loss and _has_loss(outputs):
            raise ValueError(
                f"[forward] {model} returned a loss for arguments without labels, so what it is the mean of is not "
                "known, expected one microbatch then; set num_microbatch=1"
            )
        if self.share is not None:
            outputs = weighed(outputs, self.share)
        if self.kept in (Kept.LOSS, Kept.TOKEN_LOSSES):
            return _only_the_loss(outputs)
        return _without_logits(outputs) if self.kept is Kept.ALL_BUT_LOGITS else outputs


def loss_in(outputs: Any) -> Any:
    """The loss among a model's outputs, a ModelOutput or a tuple that begins with it; None if there is none."""
    return outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", None)


def _has_loss(outputs: Any) -> bool:
    loss = loss_in(outputs)
    return isinstance(loss, torch.Tensor) and (loss.dim() == 0 or not isinstance(outputs, tuple))


def _only_the_loss(outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return outputs[:1]
    for name in outputs:
        if name != "loss":
            outputs[name] = None
    return outputs


def _without_logits(outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return (outputs[0], *outputs[2:])
    for name in outputs:
        if name == "logits":
            outputs[name] = None
    return outputs


def weighed(outputs: Any, share: float) -> Any:
    """The model's outputs with its loss times `share`; if no token counts, the loss is 0 instead of 0 / 0."""
    loss = loss_in(outputs)
    if loss is None:
        return outputs
    if share == 0:
        others = [leaf for leaf in pytree.tree_leaves(outputs) if leaf is not loss and isinstance(leaf, torch.Tensor)]
        # One element of each is enough: only its dependencies matter.
        ends = [end for leaf in others for end in (leaf.sources() if isinstance(leaf, LazyLogits) else (leaf,))]
        parts = [end.flatten()[:1].sum() * 0 for end in ends if end.requires_grad]
        weighed = torch.stack([part.to(loss.dtype) for part in parts]).sum() if parts else torch.zeros_like(loss)
    else:
        weighed = loss * share
    if isinstance(outputs, tuple):
        return (weighed, *outputs[1:])
    outputs["loss"] = weighed
    return outputs
