"""Packs short samples into rows of one length, so that no computation is spent on padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from roundpipe import _core
from roundpipe.data.samples import IGNORED, Sample, tokens_and_labels


def pack(
    samples: Sequence[Sample],
    length: int,
    *,
    pad_token_id: int | None = None,
    too_long: Literal["error", "truncate"] = "error",
) -> list[dict[str, torch.Tensor]]:
    """Packs samples into rows of at most `length` tokens, in as few rows as best fit decreasing finds.

    Positions restart at 0 with each sample, and the first label of each sample is -100. With an attention that keeps
    samples apart (`attn_implementation="sdpa_packed"`), a row is therefore equivalent to its samples one by one.

    The result depends only on the samples and their order: rows are ordered by their first sample, and samples keep
    their given order within a row.

    Args:
        samples: each with `input_ids`, and with `labels` if they differ.
        length: largest number of tokens in a row.
        pad_token_id: fills rows up to `length` behind their samples. Padding looks like more samples, each at most as
            long as the longest given sample, with all labels -100. None leaves rows as long as they are.
        too_long: for samples with more than `length` tokens: "error", or "truncate" to keep the first tokens.

    Returns:
        One batch for each row, with `input_ids`, `position_ids` and `labels`, int64 of shape [1, tokens].

    Raises:
        ValueError: a sample is too long, empty or malformed.
    """
    if length < 1:
        raise ValueError(f"[pack] length is {length}, expected at least 1")
    if too_long not in ("error", "truncate"):
        raise ValueError(f"[pack] too_long is {too_long!r}, expected 'error' or 'truncate'")
    pairs = []
    for index, sample in enumerate(samples):
        tokens, labels = tokens_and_labels(sample, f"[pack] sample {index}")
        if len(tokens) > length and too_long == "error":
            raise ValueError(
                f"[pack] sample {index} has {len(tokens)} tokens, expected at most {length}; raise length, split the "
                'sample, or give too_long="truncate" to keep its first tokens'
            )
        pairs.append((tokens[:length], labels[:length]))
    rows = _core.assign_rows([len(tokens) for tokens, _ in pairs], length)
    longest = max((len(tokens) for tokens, _ in pairs), default=length)
    return [_row([pairs[index] for index in row], length, pad_token_id, longest) for row in rows]


def _row(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], length: int, pad_token_id: int | None, longest: int
) -> dict[str, torch.Tensor]:
    tokens = [tokens for tokens, _ in pairs]
    labels = [labels.clone() for _, labels in pairs]
    for each in labels:
        each[0] = IGNORED  # otherwise the last token of the previous sample would predict it
    room = length - sum(map(len, tokens))
    if pad_token_id is not None and room:
        # In pieces, so that padding uses only positions that samples use: the model may have no more.
        for piece in torch.split(torch.full((room,), pad_token_id), longest):
            tokens.append(piece)
            labels.append(torch.full((len(piece),), IGNORED))
    return {
        "input_ids": torch.cat(tokens)[None],
        "position_ids": torch.cat([torch.arange(len(each)) for each in tokens])[None],
        "labels": torch.cat(labels)[None],
    }
