"""Batches of rows with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from roundpipe.data.batches import Batches
from roundpipe.data.collate import collate
from roundpipe.data.pictures.processor import OF_TOKENS, PictureProcessor
from roundpipe.data.samples import Sample, SampleStore
from roundpipe.data.unusable import UnusableError

PICTURED = "pictured"
"""Names, among a batch's tensors of all rows, the function that makes the model's arguments of some rows."""


class Largest(NamedTuple):
    """A batch, and the one of its microbatches that has the most of pictures.

    Attributes:
        batch: as `PictureBatches` has it.
        places: of the microbatch's rows in it.
        pictures: in the microbatch.
    """

    batch: dict[str, Any]
    places: list[int]
    pictures: int


class PictureBatches(Batches):
    """Padded batches whose pictures a processor reads when rows are used: a batch has the tensors of `collate` and, as
    `PICTURED`, a function that takes the places of rows and gives their arguments, pixels and what else the model
    takes.

    Args:
        samples: each with `text` and `pictures` beside its tokens, as `prepare` writes them.
        pictures: the processor.
        **sizes: of `Batches`.
    """

    def __init__(self, samples: SampleStore, *, pictures: PictureProcessor, **sizes: Any) -> None:
        super().__init__(samples, packed=False, **sizes)
        self._pictures = pictures

    def largest(self, microbatches: int) -> Largest:
        """Of the first epoch's batches the one whose largest microbatch has the most of pictures. A batch is cut into
        so many microbatches, of consecutive rows, or into its rows."""
        most, found = -1, ([0], [0])
        for group in self._groups_of(0):
            sizes = [self._samples[index].get("picture_bytes", 0) for index in group]
            for part in np.array_split(np.arange(len(group)), min(microbatches, len(group))):
                size = sum(sizes[place] for place in part)
                if size > most:
                    most, found = size, (group, part.tolist())
        group, places = found
        samples = [self._samples[index] for index in group]
        return Largest(self._padded(samples), places, sum(len(samples[place].get("pictures", ())) for place in places))

    def _padded(self, samples: Sequence[Sample]) -> dict[str, Any]:
        rows: dict[str, Any] = dict(collate(samples, self._pad_token_id))
        return rows | {PICTURED: lambda places: self._made([samples[place] for place in places])}

    def _made(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The model's arguments of some rows.

        Raises:
            ValueError: a picture cannot be read any more, is another one, or belongs to a text.
        """
        rows = collate(samples, self._pad_token_id)
        if not all("text" in sample for sample in samples):
            if any(sample.get("pictures") for sample in samples):
                raise ValueError(
                    "[data] a batch has pictures and samples that are no conversations, expected conversations alone; "
                    "leave texts and tokens out, or train on them apart"
                )
            return rows
        try:
            made = self._pictures.batch(
                [sample["text"] for sample in samples], [sample["pictures"] for sample in samples]
            )
        except UnusableError as error:
            raise ValueError(
                f"[data] a batch cannot be made: {error.reason}: {error}; expected the pictures where they were when "
                "the data was prepared, unchanged; put them back, then go on with --resume"
            ) from error
        if not torch.equal(made["input_ids"].where(rows["attention_mask"] == 1, self._pad_token_id), rows["input_ids"]):
            files = sorted({medium.place for sample in samples for medium in sample["pictures"]})
            raise ValueError(
                "[data] the processor makes other tokens of a batch than when its data was prepared, expected the same "
                f"pictures: {', '.join(files[:3])}; prepare the data again, with another --out"
            )
        return rows | {name: value for name, value in made.items() if name not in OF_TOKENS}
