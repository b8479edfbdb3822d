"""What benchmarks that train the demo's model share: its text, and a loop that they give models and steps to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import roundpipe
from roundpipe.huggingface.evaluation import held_out_loss
from roundpipe.model.call.loss_function import ScaledOutputs, outputs_as_loss
from roundpipe.model.step.fused_optimizer import Masters, Moments
from roundpipe.train.demo.corpus import load_corpus
from roundpipe.train.demo.preset import LENGTH, TEXT_BYTES
from roundpipe.train.demo.untrained import build_llama, train_tokenizer

ROWS = 10
# Factors of the learning rate of the embedding and the head: each of their rows sees few of the tokens. The demo's
# last norm makes each update of the head count five times.
TABLES = {"model.embed_tokens.weight": 30.0, "lm_head.weight": 6.0}
CLIP_NORM = 1.0
WARMUP_SHARE = 0.1
_HELD_OUT_ONE_IN = 16
_HELD_OUT_BATCHES = 16


@dataclass(frozen=True)
class Losses:
    """Of the last step, of the held-out text after it, and the seconds of the steps."""

    training: float
    held_out: float
    seconds: float


class _Linear(torch.nn.Linear):
    """Multiplies in the type of its input, whatever that of its weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input, self.weight.to(input.dtype))


class _Embedding(torch.nn.Embedding):
    """Gives float32, in which all that follows computes then."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).float()


@dataclass(frozen=True)
class DemoRuns:
    """What all rows of a table have in common.

    Attributes:
        steps: of a run.
        rate: highest learning rate of the inner layers.
        rows: of a batch.
        length: tokens of a row.
        training: tokens to cut batches from.
        held_out: batches, int64 [rows, length] each.
        vocabulary: size.
        in_float32: layers compute in float32, whatever the type of their weights.
    """

    steps: int
    rate: float
    rows: int
    length: int
    training: torch.Tensor
    held_out: tuple[torch.Tensor, ...]
    vocabulary: int
    in_float32: bool = False

    @classmethod
    def prepare(cls, steps: int, rate: float, quick: bool, in_float32: bool = False) -> DemoRuns:
        """Reads the text and learns its vocabulary; `quick` makes all of it as small as a test needs."""
        steps, rows, length = (3, 2, 16) if quick else (steps, ROWS, LENGTH)
        files = [file.text for file in load_corpus(1_200_000 if quick else TEXT_BYTES)]
        kept_out, texts = files[::_HELD_OUT_ONE_IN], [t for n, t in enumerate(files) if n % _HELD_OUT_ONE_IN]
        tokenizer = train_tokenizer(texts, 512 if quick else 2048)
        training, rest = (
            torch.tensor([token for encoded in tokenizer.encode_batch(part) for token in encoded.ids])
            for part in (texts, kept_out)
        )
        batches = rest[: len(rest) // length * length].view(-1, length).split(rows)[: 1 if quick else _HELD_OUT_BATCHES]
        return cls(steps, rate, rows, length, training, tuple(batches), tokenizer.get_vocab_size(), in_float32)

    def __str__(self) -> str:
        arithmetic = ", arithmetic in float32" if self.in_float32 else ""
        return f"{self.steps} steps of {self.rows} x {self.length} tokens, vocabulary {self.vocabulary}{arithmetic}"

    def model(self, dtype: torch.dtype) -> roundpipe.RoundPipe:
        """The demo's model, with the same weights each time."""
        llama = build_llama(self.vocabulary, self.length, seed=0, dtype=dtype)
        if self.in_float32:
            for module in llama.modules():
                module.__class__ = {torch.nn.Linear: _Linear, torch.nn.Embedding: _Embedding}.get(
                    type(module), type(module)
                )
        wrapped: roundpipe.RoundPipe = roundpipe.wrap_model_to_roundpipe(llama.train(), name="demo")
        return wrapped

    def adamw(
        self, model: roundpipe.RoundPipe, moments: Moments = "float32", masters: Masters = "float32"
    ) -> roundpipe.optim.AdamW:
        """The engine's AdamW for a model."""
        groups = [{"params": name, "lr": self.rate * factor} for name, factor in TABLES.items()]
        return roundpipe.optim.AdamW(model, groups=groups, moments=moments, masters=masters, **self.rule)

    @property
    def rule(self) -> dict[str, Any]:
        """Options of AdamW."""
        return {"lr": self.rate, "betas": (0.8, 0.95), "weight_decay": 0.1}

    def schedule(self, optimizer: Any) -> Any:
        """Linear warm-up, then a cosine down to a tenth."""
        warmup = max(1, round(self.steps * WARMUP_SHARE))

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            share = (step - warmup) / max(1, self.steps - warmup)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, share)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def batches(self) -> Iterator[torch.Tensor]:
        """Rows from random places of the text, the same each time: int64 [rows, length]."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.steps):
            starts = torch.randint(len(self.training) - self.length, (self.rows, 1), generator=generator)
            yield self.training[starts + torch.arange(self.length)]

    def train(
        self,
        model: roundpipe.RoundPipe,
        make_step: Callable[[int], None],
        scaler: roundpipe.GradScaler | None = None,
    ) -> Losses:
        """Trains a model. `make_step` makes the step of this number, from 0, of the batch that was submitted last.

        Raises:
            SystemExit: a loss is NaN.
        """
        began, loss = time.perf_counter(), math.nan
        for step, tokens in enumerate(self.batches()):
            scale = 1.0 if scaler is None else scaler.get_scale()
            loss_fn = outputs_as_loss if scaler is None else ScaledOutputs(scaler)
            pending = model.submit(input_kwargs={"input_ids": tokens, "labels": tokens}, loss_fn=loss_fn)
            make_step(step)
            loss = float(pending.loss()) / scale
            if math.isnan(loss):
                raise SystemExit(f"the loss of step {step + 1} is NaN")
        model.synchronize()
        seconds = time.perf_counter() - began
        kept_out = ({"input_ids": tokens, "labels": tokens} for tokens in self.held_out)
        return Losses(loss, held_out_loss(model, kept_out), seconds)
