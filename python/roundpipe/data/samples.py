"""Defines a sample: token numbers, and which of them are to be predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

IGNORED = -100  # the label of a token that is not learned, as in torch's cross entropy

Sample = Mapping[str, Any]  # input_ids and perhaps labels, each a list of numbers or a tensor of one dimension


def tokens_and_labels(sample: Sample, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sample as two int64 tensors of one length; missing labels are the tokens.

    Args:
        sample: see above.
        where: names the sample in errors, for example "[pack] sample 3".

    Raises:
        ValueError: no tokens, labels of another length, or other shapes.
    """
    if "input_ids" not in sample:
        raise ValueError(f"{where} has the keys {sorted(sample)}, expected input_ids and perhaps labels")
    tokens = _numbers(sample["input_ids"], f"{where}: input_ids")
    labels = _numbers(sample["labels"], f"{where}: labels") if sample.get("labels") is not None else tokens
    if not len(tokens):
        raise ValueError(f"{where} has no tokens, expected at least one; leave it out")
    if len(labels) != len(tokens):
        raise ValueError(f"{where} has {len(tokens)} tokens and {len(labels)} labels, expected one label a token")
    return tokens, labels


def _numbers(values: Sequence[int] | torch.Tensor, where: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} is not a list of numbers ({error}), expected whole numbers") from None
    if tensor.dim() != 1 or (tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool)):
        raise ValueError(
            f"{where} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected whole numbers in one dimension"
        )
    return tensor.to(device="cpu", dtype=torch.int64)
