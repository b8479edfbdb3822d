"""What a preparation of data is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Format = Literal["auto", "text", "messages", "sharegpt", "prompt", "instruction", "preference", "rated", "tokens"]
Overlong = Literal["cut", "drop", "error"]
TrainOn = Literal["assistant", "all"]
Documents = Literal["file", "line"]
OnBad = Literal["count", "error"]


@dataclass(frozen=True)
class DataOptions:
    """How records become samples. `docs/data.md` describes each option.

    Attributes:
        max_length: tokens of the longest sample, at least 2. A row of a batch holds at least one sample.
        format: what the records are; "auto" takes what most of the first records of each source are.
        fields: renames members before a record is looked at, each as "name=member": "prompt=question" takes the
            record's `question` as its `prompt`, "text=body" its `body` as its `text`.
        held_out: records to hold out for evaluation, chosen from all over: a share below 1, or a number of records
            from 1. 0 holds nothing out. Any share holds out at least one record; of a single text, its last samples.
        overlong: what becomes of a record of more than `max_length` tokens. "cut": a text becomes several samples,
            anything else loses its end; "drop" leaves it out; "error" ends the preparation.
        train_on: which tokens of a conversation have labels: the assistant's, or "all".
        documents: whether a text file is one document ("file"), or each of its lines is ("line").
        ends: end each text with the tokenizer's end-of-text token, unless it ends so already.
        on_bad: what becomes of a broken or an empty record: "count" leaves it out, "error" ends the preparation.
        seed: chooses the records that are held out.

    Raises:
        ValueError: a value that an option cannot have.
    """

    max_length: int
    format: Format = "auto"
    fields: tuple[str, ...] = ()
    held_out: float = 0.0
    overlong: Overlong = "cut"
    train_on: TrainOn = "assistant"
    documents: Documents = "file"
    ends: bool = True
    on_bad: OnBad = "count"
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"format": Format, "overlong": Overlong, "train_on": TrainOn, "documents": Documents, "on_bad": OnBad}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"[data] {name} is {getattr(self, name)!r}, expected {', '.join(get_args(allowed))}")
        if self.max_length < 2:
            raise ValueError(
                f"[data] max_length is {self.max_length}, expected at least 2: one token predicts the next"
            )
        if self.held_out < 0 or (self.held_out >= 1 and self.held_out != int(self.held_out)):
            raise ValueError(
                f"[data] held_out is {self.held_out}, expected a share from 0 to below 1, or a whole number of records"
            )
        for field in self.fields:
            name, equals, member = field.partition("=")
            if not (name and equals and member):
                raise ValueError(f"[data] fields has {field!r}, expected NAME=MEMBER, such as prompt=question")

    @property
    def renamed(self) -> dict[str, str]:
        """The member that each renamed name stands for."""
        return dict(field.split("=", 1) for field in self.fields)
