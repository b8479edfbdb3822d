"""What benchmarks that train the demo's model share: its corpus, and the losses that are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from roundpipe.demo.corpus import load_corpus
from roundpipe.demo.options import DemoOptions
from roundpipe.demo.tokenizer import encode_files, train_tokenizer
from roundpipe.demo.training import EvaluationRecord, StepRecord


@dataclass(frozen=True)
class DemoRuns:
    """The options and the tokens of all rows of a table."""

    options: DemoOptions
    training: torch.Tensor
    held_out: torch.Tensor
    vocabulary: int

    @classmethod
    def prepare(cls, options: DemoOptions, quick: bool) -> DemoRuns:
        """Loads the corpus and trains its tokenizer; `quick` makes all of it as small as a test needs."""
        limit = {}
        if quick:
            options = replace(options, steps=3, batch_size=2, sequence_length=16, evaluation_batches=1)
            limit = {"limit_bytes": 1_200_000}
        corpus = load_corpus(**limit)
        tokenizer = train_tokenizer((file.text for file in corpus.training), 512 if quick else 2048)
        training, held_out = (encode_files(tokenizer, files) for files in (corpus.training, corpus.held_out))
        return cls(options, training, held_out, tokenizer.get_vocab_size())

    def __str__(self) -> str:
        rows = f"{self.options.batch_size} x {self.options.sequence_length} tokens"
        return f"{self.options.steps} steps of {rows}, vocabulary {self.vocabulary}"


class Losses:
    """Keeps what is compared."""

    stop_requested = False

    def __init__(self) -> None:
        self.training = self.held_out = self.seconds = math.nan

    def on_step(self, record: StepRecord) -> None:
        self.training = record.loss

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self.held_out, self.seconds = record.held_out_loss, record.elapsed_s
