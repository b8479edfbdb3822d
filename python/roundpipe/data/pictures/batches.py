"""Batches of rows with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.data.batches import Batches
from roundpipe.data.collate import collate
from roundpipe.data.pictures.processor import PictureProcessor
from roundpipe.data.samples import Sample, SampleStore
from roundpipe.data.unusable import UnusableError

_OF_TOKENS = ("input_ids", "attention_mask")


class PictureBatches(Batches):
    """Padded batches with the tensors that a processor makes of the pictures when a batch is made.

    Args:
        samples: each with `text` and `pictures` beside its tokens, as `prepare` writes them.
        pictures: the processor.
        **sizes: of `Batches`.
    """

    def __init__(self, samples: SampleStore, *, pictures: PictureProcessor, **sizes: Any) -> None:
        super().__init__(samples, packed=False, **sizes)
        self._pictures = pictures

    def _padded(self, samples: Sequence[Sample]) -> dict[str, Any]:
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
            files = sorted({file for sample in samples for file in sample["pictures"]})
            raise ValueError(
                "[data] the processor makes other tokens of a batch than when its data was prepared, expected the same "
                f"pictures: {', '.join(files[:3])}; prepare the data again, with another --out"
            )
        return rows | {name: value for name, value in made.items() if name not in _OF_TOKENS}
