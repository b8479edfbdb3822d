"""Puts samples into one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundpipe.data.samples import IGNORED, Sample, tokens_and_labels


def collate(samples: Sequence[Sample], pad_token_id: int, *, multiple_of: int = 1) -> dict[str, torch.Tensor]:
    """Makes a batch with one row for each sample, padded on the right to the longest.

    Args:
        samples: each with `input_ids`, and with `labels` if they differ.
        pad_token_id: the token of the padding, where the mask is 0 and the label -100.
        multiple_of: rounds the rows' length up to a multiple of this.

    Returns:
        `input_ids`, `attention_mask` and `labels`, int64 of shape [samples, tokens].

    Raises:
        ValueError: there are no samples, or one is empty or malformed.
    """
    if not samples:
        raise ValueError("[collate] there are no samples, expected at least one")
    if multiple_of < 1:
        raise ValueError(f"[collate] multiple_of is {multiple_of}, expected at least 1")
    pairs = [tokens_and_labels(sample, f"[collate] sample {index}") for index, sample in enumerate(samples)]
    longest = max(len(tokens) for tokens, _ in pairs)
    width = -(-longest // multiple_of) * multiple_of
    batch = {
        "input_ids": torch.full((len(pairs), width), pad_token_id),
        "attention_mask": torch.zeros((len(pairs), width), dtype=torch.int64),
        "labels": torch.full((len(pairs), width), IGNORED),
    }
    for row, (tokens, labels) in enumerate(pairs):
        batch["input_ids"][row, : len(tokens)] = tokens
        batch["attention_mask"][row, : len(tokens)] = 1
        batch["labels"][row, : len(tokens)] = labels
    return batch


def count_label_tokens(labels: torch.Tensor) -> int:
    """Counts the predicted tokens of a batch: a row's first token has no predecessor, and -100 is not learned."""
    return int((labels[..., 1:] != IGNORED).sum())
