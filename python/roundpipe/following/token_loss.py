"""The loss of a causal language model over microbatches: every token of the batch has the same weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.data.collate import count_label_tokens
from roundpipe.data.samples import IGNORED
from roundpipe.following.lazy_logits import LazyLogits
from roundpipe.ops.functional import linear_cross_entropy


def loss_in(outputs: Any) -> Any:
    """The loss among a model's outputs, a ModelOutput or a tuple that begins with it; None if there is none."""
    return outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", None)


def count_tokens(kwargs: dict[str, Any], shifts: bool) -> int | None:
    """Counts the labels of a batch that are not ignored. None if there are no labels.

    Args:
        kwargs: the model's arguments.
        shifts: whether the model shifts labels, so that nothing predicts the first token of a row.
    """
    shifted, labels = kwargs.get("shift_labels"), kwargs.get("labels")
    if isinstance(shifted, torch.Tensor):
        return int((shifted != IGNORED).sum())
    if isinstance(labels, torch.Tensor):
        return count_label_tokens(labels) if shifts else int((labels != IGNORED).sum())
    return None


def shares(counts: list[int | None], summed: bool, total: float | None = None) -> list[float] | None:
    """The weight of each microbatch's mean loss, such that the mean of the products is the mean over all tokens.

    None: no labels, one microbatch that is the whole, or losses that need no weights.

    Args:
        counts: number of labels in each microbatch.
        summed: whether the losses are sums divided by a number for the whole step, and are added.
        total: the number of labels of which these are a part, on several nodes; None: these are all.
    """
    n = len(counts)
    if summed or (n == 1 and total is None):
        return None
    if total is None:
        total = sum(count for count in counts if count is not None)
    if any(count is None for count in counts) or total == 0:
        return None
    return [n * count / total for count in counts if count is not None]


def only_the_loss(outputs: Any) -> Any:
    """The model's outputs without all but the loss."""
    if isinstance(outputs, tuple):
        return outputs[:1]
    for name in outputs:
        if name != "loss":
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
        ends = [leaf.hidden if isinstance(leaf, LazyLogits) else leaf for leaf in others]
        ends += [leaf.weight for leaf in others if isinstance(leaf, LazyLogits)]
        parts = [end.flatten()[:1].sum() * 0 for end in ends if end.requires_grad]
        weighed = torch.stack([part.to(loss.dtype) for part in parts]).sum() if parts else torch.zeros_like(loss)
    else:
        weighed = loss * share
    if isinstance(outputs, tuple):
        return (weighed, *outputs[1:])
    outputs["loss"] = weighed
    return outputs


class TokenLoss:
    """Replaces a model's loss function: accepts logits that have not been computed, and rows without labels.

    Args:
        original: the model's own.
        chunk_tokens: number of tokens whose logits are held at a time; 0 chooses.
    """

    def __init__(self, original: Callable[..., Any], chunk_tokens: int) -> None:
        self._original = original
        self._chunk_tokens = chunk_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        logits = given.get("logits")
        if not isinstance(logits, LazyLogits):
            return self._original(*args, **kwargs)
        if self._original.__name__ != "ForCausalLMLoss" or given.get("vocab_size") != logits.shape[-1]:
            return self._original(**{**given, "logits": logits.compute()})
        return self._chunked(logits, given)

    def _chunked(self, logits: LazyLogits, given: dict[str, Any]) -> torch.Tensor:
        ignored = given.get("ignore_index", IGNORED)
        labels = given.get("shift_labels")
        if labels is None:
            labels = torch.nn.functional.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
        items = given.get("num_items_in_batch")
        loss: torch.Tensor = linear_cross_entropy(
            logits.hidden.reshape(-1, logits.hidden.shape[-1]),
            logits.weight,
            labels.reshape(-1).to(logits.hidden.device),
            logits.bias,
            ignore_index=ignored,
            steps=logits.steps,
            reduction="mean" if items is None else "sum",
            chunk_tokens=self._chunk_tokens,
        )
        return loss if items is None else loss / items
