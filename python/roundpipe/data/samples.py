"""Defines a sample: token numbers, and which of them are to be predicted."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np
import torch

from roundpipe import _core
from roundpipe.data.order import InOrder, Numbers

IGNORED = -100  # the label of a token that is not learned, as in torch's cross entropy

Sample = Mapping[str, Any]  # input_ids and perhaps labels, each a list of numbers or a tensor of one dimension


class Order(Protocol):
    """The numbers of an epoch's samples, of which any part can be asked for."""

    def __len__(self) -> int: ...

    def at(self, positions: Numbers) -> Numbers:
        """The numbers at these positions."""
        ...


class SampleStore(Sequence[Sample]):
    """Samples that say what batches depend on without being read, so that they can stay on disk.

    Each has a label that counts.
    """

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"[data] sample {index} of {len(self)}")
        return self.sample(index % len(self))

    @abstractmethod
    def sample(self, number: int) -> Sample:
        """The sample with this number, from 0."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest sample."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that differs if any sample does."""

    @abstractmethod
    def lengths(self, numbers: Numbers) -> Numbers:
        """Tokens of these samples."""

    @abstractmethod
    def order(self, epoch: int, seed: int | None) -> Order:
        """Which samples an epoch has, and in which order; None leaves them in the order that they were read in."""


class SamplesInMemory(SampleStore):
    """Samples that are held. Each epoch has each of them once, and a seed shuffles each epoch differently.

    Args:
        samples: tensors `input_ids` and `labels`.
    """

    def __init__(self, samples: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._samples = samples
        self._lengths = np.array([len(sample["input_ids"]) for sample in samples], dtype=np.int64)
        self._checksum: int | None = None  # once it is asked for

    @property
    def longest(self) -> int:
        return int(self._lengths.max())

    @property
    def identity(self) -> str:
        if self._checksum is None:
            self._checksum = 0
            for sample in self._samples:
                for tensor in (sample["input_ids"], sample["labels"]):
                    self._checksum = zlib.crc32(tensor.contiguous().numpy().tobytes(), self._checksum)
        return f"{self._checksum:08x}"

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, number: int) -> Sample:
        return self._samples[number]

    def lengths(self, numbers: Numbers) -> Numbers:
        lengths: Numbers = self._lengths[numbers]
        return lengths

    def order(self, epoch: int, seed: int | None) -> Order:
        return InOrder(len(self)) if seed is None else _core.epoch_order(len(self), repr(seed), epoch)


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
