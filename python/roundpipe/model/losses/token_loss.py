"""The loss of a causal language model over microbatches: every token of the batch has the same weight."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from roundpipe.data.samples import IGNORED
from roundpipe.model.losses.lazy_logits import LazyLogits
from roundpipe.ops.functional import Arithmetic, linear_cross_entropy


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


class TokenLoss:
    """Replaces a model's loss function: accepts logits that have not been computed, and rows without labels.

    Args:
        original: the model's own.
        chunk_tokens: number of tokens whose logits are held at a time; 0 chooses.
        chunk_logit_bytes: see `linear_cross_entropy`.
        arithmetic: of such a loss.
        of_tokens: gives the loss of each token instead, [rows, tokens], 0 where the label behind it is ignored.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        chunk_tokens: int,
        chunk_logit_bytes: int,
        arithmetic: Arithmetic,
        of_tokens: bool = False,
    ) -> None:
        self._original, self._arithmetic, self._of_tokens = original, arithmetic, of_tokens
        self._chunk_tokens, self._chunk_logit_bytes = chunk_tokens, chunk_logit_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        logits = given.get("logits")
        own = self._original is sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
        own = own and isinstance(logits, torch.Tensor) and given.get("vocab_size") == logits.shape[-1]
        if self._of_tokens:
            return self._loss_of_each(logits, given, own)
        if not isinstance(logits, LazyLogits):
            return self._original(*args, **kwargs)
        if logits.computed is not None:  # somebody may have written into them
            return self._original(**{**given, "logits": logits.computed})
        if not own:
            return self._original(**{**given, "logits": logits.compute()})
        items = given.get("num_items_in_batch")
        loss = self._chunked(logits, given, "mean" if items is None else "sum")
        return loss if items is None else loss / items

    def _loss_of_each(self, logits: Any, given: dict[str, Any], own: bool) -> torch.Tensor:
        if not own:
            raise ValueError(
                "[forward] the model has a loss function of its own, expected the cross-entropy of transformers' "
                "causal language models, whose loss of each token is known"
            )
        if isinstance(logits, LazyLogits) and logits.computed is None:
            return self._chunked(logits, given, "none")
        whole = logits.compute() if isinstance(logits, LazyLogits) else logits
        labels = _next_labels(given).to(whole.device)
        losses = torch.nn.functional.cross_entropy(
            whole.float().flatten(0, -2),
            labels.flatten(),
            ignore_index=given.get("ignore_index", IGNORED),
            reduction="none",
        )
        return losses.view(labels.shape)

    def _chunked(
        self, logits: LazyLogits, given: dict[str, Any], reduction: Literal["mean", "sum", "none"]
    ) -> torch.Tensor:
        labels = _next_labels(given).to(logits.hidden.device)
        logits.check_sources()
        return linear_cross_entropy(
            logits.hidden if reduction == "none" else logits.hidden.reshape(-1, logits.hidden.shape[-1]),
            logits.weight,
            labels if reduction == "none" else labels.reshape(-1),
            logits.bias,
            ignore_index=given.get("ignore_index", IGNORED),
            steps=logits.steps,
            reduction=reduction,
            chunk_tokens=self._chunk_tokens,
            chunk_logit_bytes=self._chunk_logit_bytes,
            arithmetic=self._arithmetic,
        )


def _next_labels(given: dict[str, Any]) -> torch.Tensor:
    """The label that each token predicts."""
    shifted = given.get("shift_labels")
    if isinstance(shifted, torch.Tensor):
        return shifted
    return torch.nn.functional.pad(given["labels"], (0, 1), value=given.get("ignore_index", IGNORED))[..., 1:]
