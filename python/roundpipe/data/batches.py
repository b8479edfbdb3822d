"""Batches with about equal numbers of tokens, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from roundpipe.data.collate import collate
from roundpipe.data.packing import pack
from roundpipe.data.samples import IGNORED, Sample, SamplesInMemory, SampleStore, tokens_and_labels

_AT_A_TIME = 1 << 14  # numbers of samples that are looked at together


class Batches:
    """Cuts samples into batches of at most `batch_tokens` tokens.

    Batches are made during iteration, and a `SampleStore`, such as the samples of `roundpipe.data.records.prepare`,
    stays on disk. The same arguments give the same batches.

    An iteration knows its position: `state_dict()` is the number of batches that it has given, and after
    `load_state_dict()` the next iteration begins behind them. So a checkpoint that saves the batches continues with the
    batch after the last one.

        for batch in Batches(samples, batch_tokens=16384, max_length=2048, pad_token_id=0, epochs=3, seed=0):
            model.forward_backward(input_kwargs=batch, run_config=balanced_config(batch))

    Args:
        samples: each with `input_ids`, and with `labels` if they differ. A sample without a label that counts among
            its first `max_length` tokens is left out. A `SampleStore` says itself what an epoch has of its samples.
        batch_tokens: largest number of tokens in a batch, without padding.
        max_length: largest number of tokens in a row. Longer samples lose their end; those of a `SampleStore` are
            refused.
        pad_token_id: fills shorter rows.
        packed: True: several samples share a row, see `pack`; batches have `input_ids`, `position_ids` and `labels`,
            and the model's attention must keep samples apart, see `check_packing`. False: one sample per row, with an
            `attention_mask`.
        epochs: how often each sample appears.
        seed: shuffles each epoch differently; None keeps the samples' order.

    Attributes:
        truncated: number of samples that lost their end.
        left_out: number of samples without a label that counts.

    Raises:
        ValueError: sizes that do not fit, malformed samples, or no sample that the model could learn from.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        batch_tokens: int,
        max_length: int,
        pad_token_id: int,
        packed: bool = True,
        epochs: int = 1,
        seed: int | None = None,
    ) -> None:
        if max_length < 2:
            raise ValueError(f"[Batches] max_length is {max_length}, expected at least 2: one token predicts the next")
        if batch_tokens < max_length:
            raise ValueError(
                f"[Batches] batch_tokens is {batch_tokens}, expected at least max_length = {max_length}, so that every "
                "sample fits into a batch; raise it, or lower max_length"
            )
        if epochs < 1:
            raise ValueError(f"[Batches] epochs is {epochs}, expected at least 1")
        if not samples:
            raise ValueError("[Batches] there are no samples, expected at least one")
        self.truncated = self.left_out = 0
        self._samples = samples if isinstance(samples, SampleStore) else self._prepared(samples, max_length)
        if self._samples.longest > max_length:
            raise ValueError(
                f"[Batches] the samples have up to {self._samples.longest} tokens, expected at most max_length = "
                f"{max_length}; prepare them with this max_length, or raise it"
            )
        self._batch_tokens, self._max_length, self._packed = batch_tokens, max_length, packed
        self._pad_token_id, self._epochs, self._seed = pad_token_id, epochs, seed
        self._given = 0  # batches of the iteration under way
        self._number: int | None = None  # of all batches, once it is asked for

    def _prepared(self, samples: Sequence[Sample], max_length: int) -> SampleStore:
        kept = []
        for index, sample in enumerate(samples):
            tokens, labels = tokens_and_labels(sample, f"[Batches] sample {index}")
            if not bool((labels[1:max_length] != IGNORED).any()):
                self.left_out += 1
                continue
            self.truncated += len(tokens) > max_length
            kept.append({"input_ids": tokens[:max_length], "labels": labels[:max_length]})
        if not kept:
            raise ValueError(
                f"[Batches] none of {len(samples)} samples has a label that counts (not -100, and not of the first "
                f"token) among its first {max_length} tokens, expected at least one; raise max_length, or look at how "
                "the labels are made"
            )
        return SamplesInMemory(kept)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, after truncation."""
        return self._samples.longest

    def __len__(self) -> int:
        """Number of batches in all epochs together."""
        if self._number is None:
            self._number = sum(1 for _ in self._groups())
        return self._number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(self._groups()):
            if number < self._given:
                continue
            self._given = number + 1
            samples = [self._samples[index] for index in group]
            yield self._pack(samples) if self._packed else self._padded(samples)
        self._given = 0

    def state_dict(self) -> dict[str, Any]:
        """The position of the iteration under way, and what it depends on."""
        return {"given": self._given, "batches": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration begin at a position.

        Raises:
            ValueError: the position is one in other batches: the samples, sizes, epochs or the seed differ.
        """
        if state["batches"] != self._fingerprint():
            raise ValueError(
                "[Batches] the position was saved for other batches, expected the same samples, batch_tokens, "
                "max_length, packed, epochs and seed; make the batches as they were, or start the data anew"
            )
        self._given = state["given"]

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "samples": len(self._samples),
            "identity": self._samples.identity,
            "batch_tokens": self._batch_tokens,
            "max_length": self._max_length,
            "packed": self._packed,
            "epochs": self._epochs,
            "seed": self._seed,
        }

    def _groups(self) -> Iterator[list[int]]:
        """The numbers of each batch's samples."""
        for epoch in range(self._epochs):
            yield from self._groups_of(epoch)

    def _groups_of(self, epoch: int) -> Iterator[list[int]]:
        order = self._samples.order(epoch, self._seed)
        group: list[int] = []
        tokens = 0
        for begin in range(0, len(order), _AT_A_TIME):
            numbers = order.at(np.arange(begin, min(begin + _AT_A_TIME, len(order))))
            for number, length in zip(numbers.tolist(), self._samples.lengths(numbers).tolist(), strict=True):
                if group and tokens + length > self._batch_tokens:
                    yield group
                    group, tokens = [], 0
                group.append(number)
                tokens += length
        if group:
            yield group

    def _padded(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return collate(samples, self._pad_token_id)

    def _pack(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        rows = pack(samples, self._max_length)
        longest = max(row["input_ids"].shape[1] for row in rows)
        rows = pack(samples, longest, pad_token_id=self._pad_token_id)  # the same rows, padded to one length
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def check_positions(model: Any, *batches: Batches | Sequence[Any]) -> None:
    """Checks before a run that a transformers model has positions for the longest samples.

    Args:
        model: plain or wrapped.
        *batches: the model's future batches; empty sequences count as none.

    Raises:
        ValueError: the model has fewer positions.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max((each.longest for each in batches if isinstance(each, Batches)), default=0)
    if isinstance(most, int) and 0 < most < longest:
        raise ValueError(
            f"[check_positions] a sample has {longest} tokens, and the model has max_position_embeddings = {most}; "
            f"lower max_length (--max-length) to {most} or less, or, if positions are rotary, raise "
            "config.max_position_embeddings before wrapping"
        )
