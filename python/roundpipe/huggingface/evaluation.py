"""The loss of a language model in the pipeline on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from roundpipe.data.balance import balanced_config
from roundpipe.data.collate import count_label_tokens
from roundpipe.following.layers.evaluation_mode import evaluation_mode
from roundpipe.model.call.run_config import RoundPipeRunConfig
from roundpipe.model.losses.ending import loss_in
from roundpipe.model.pipe import RoundPipe


def held_out_loss(model: RoundPipe, batches: Iterable[Mapping[str, Any]]) -> float:
    """The model's loss in evaluation mode, as the mean over all predicted tokens of all batches.

    Waits for the steps made so far, so that the newest weights are evaluated. Restores the modes afterwards.

    Args:
        model: from `from_pretrained` or `wrap_model_to_roundpipe`.
        batches: keyword arguments of the model, with `labels`.

    Raises:
        ValueError: the model returns no loss, what it is the mean of is not known, or no token counts.
    """
    total, tokens = held_out_sum(model, batches)
    if not tokens:
        raise ValueError(
            "[held_out_loss] no token of the batches has a label that counts, expected at least one; give batches with "
            "labels"
        )
    return total / tokens


def held_out_sum(
    model: RoundPipe,
    batches: Iterable[Mapping[str, Any]],
    cut: Callable[[Mapping[str, Any]], RoundPipeRunConfig] = balanced_config,
) -> tuple[float, int]:
    """`held_out_loss` as the sum over the predicted tokens, and their number, which may be 0.

    Args:
        cut: says how a batch is cut into microbatches.

    Raises:
        ValueError: the model returns no loss, or what it is the mean of is not known.
    """
    model.synchronize()
    total, tokens = 0.0, 0
    with evaluation_mode(model):
        for batch in batches:
            count = _counted(model, batch)
            if not count:
                continue
            config = replace(cut(batch), merge_output=_mean_loss)
            with torch.no_grad():
                total += count * float(model(**batch, roundpipe_run_config=config, roundpipe_loss_only=True))
            tokens += count
    return total, tokens


def _counted(model: RoundPipe, batch: Mapping[str, Any]) -> int:
    """How many labels of a batch count in the model's loss."""
    if not isinstance(batch.get("labels"), torch.Tensor):
        return 0
    followed = model._language_model
    if followed is None:
        return count_label_tokens(batch["labels"])
    count = followed.counted(dict(batch))
    if count is None:
        raise ValueError(
            f"[held_out_loss] what the loss of {followed.name} is the mean of is not known, expected a mean over "
            "labels; compute the loss of each batch with model(...) and weigh it yourself"
        )
    return count


def _mean_loss(outputs: list[Any]) -> torch.Tensor:
    """The batch's loss from the microbatches' losses, which are weighted so that their mean is the batch's."""
    losses = []
    for output in outputs:
        loss = loss_in(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError("[held_out_loss] the model returned no loss, expected one; give batches with labels")
        losses.append(loss.float())
    return torch.stack(losses).mean()
