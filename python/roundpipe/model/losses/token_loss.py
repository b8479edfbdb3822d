"""The loss of a causal language model over microbatches: every token of the batch has the same weight."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

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
    """

    def __init__(
        self, original: Callable[..., Any], chunk_tokens: int, chunk_logit_bytes: int, arithmetic: Arithmetic
    ) -> None:
        self._original, self._arithmetic = original, arithmetic
        self._chunk_tokens, self._chunk_logit_bytes = chunk_tokens, chunk_logit_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        logits = given.get("logits")
        if not isinstance(logits, LazyLogits):
            return self._original(*args, **kwargs)
        if logits.computed is not None:  # somebody may have written into them
            return self._original(**{**given, "logits": logits.computed})
        own = self._original is sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
        if not own or given.get("vocab_size") != logits.shape[-1]:
            return self._original(**{**given, "logits": logits.compute()})
        return self._chunked(logits, given)

    def _chunked(self, logits: LazyLogits, given: dict[str, Any]) -> torch.Tensor:
        ignored = given.get("ignore_index", IGNORED)
        labels = given.get("shift_labels")
        if labels is None:
            labels = torch.nn.functional.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
        items = given.get("num_items_in_batch")
        logits.check_sources()
        loss: torch.Tensor = linear_cross_entropy(
            logits.hidden.reshape(-1, logits.hidden.shape[-1]),
            logits.weight,
            labels.reshape(-1).to(logits.hidden.device),
            logits.bias,
            ignore_index=ignored,
            steps=logits.steps,
            reduction="mean" if items is None else "sum",
            chunk_tokens=self._chunk_tokens,
            chunk_logit_bytes=self._chunk_logit_bytes,
            arithmetic=self._arithmetic,
        )
        return loss if items is None else loss / items
