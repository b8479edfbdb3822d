"""Batches, loss, learning rate and the training loop, which is written as a user of RoundPipe would write it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import roundpipe
from roundpipe.demo.options import DemoOptions
from roundpipe.step.binding import Moments


class Submitted(Protocol):
    """The part of `roundpipe.Pending` that the loop uses."""

    def loss(self) -> Tensor: ...


class Pipeline(Protocol):
    """The part of `roundpipe.RoundPipe` that the loop uses."""

    def __call__(self, tokens: Tensor) -> Tensor: ...

    def submit(
        self, *, input_args: tuple[Tensor, ...], label: Any, loss_fn: Callable[[Tensor, Any], Tensor]
    ) -> Submitted: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class Batch:
    """`tokens` and `labels`: int64 [batch, sequence]; a label is the token that follows."""

    tokens: Tensor
    labels: Tensor

    @property
    def token_count(self) -> int:
        """Number of tokens that count in the loss."""
        return int((self.labels != IGNORED).sum())


# A label that does not count in the loss.
IGNORED = -100


def cut_batch(text: Tensor, starts: Tensor, sequence_length: int) -> Batch:
    """Cuts the rows of `text` [tokens] that begin at `starts` [batch]."""
    rows = text[starts.unsqueeze(1) + torch.arange(sequence_length + 1)]
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def check_length(text: Tensor, sequence_length: int, what: str) -> None:
    """Raises ValueError if `text` [tokens] has no room for one sequence and its last label."""
    if len(text) < sequence_length + 1:
        raise ValueError(
            f"[demo] --sequence-length is {sequence_length}; the {what} text has {len(text)} tokens; "
            "choose a shorter sequence"
        )


class RandomBatches:
    """Endless batches from random places of `text` [tokens]; the same seed gives the same batches."""

    def __init__(self, text: Tensor, options: DemoOptions) -> None:
        self._text, self._options = text, options
        self._generator = torch.Generator().manual_seed(options.seed)
        self._given = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return cut_batch(self._text, self._starts(), self._options.sequence_length)

    def _starts(self) -> Tensor:
        self._given += 1
        places = len(self._text) - self._options.sequence_length
        return torch.randint(places, (self._options.batch_size,), generator=self._generator)

    def state_dict(self) -> dict[str, int]:
        """The position: how many batches were given."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a position."""
        self._generator.manual_seed(self._options.seed)
        self._given = 0
        while self._given < state["given"]:
            self._starts()


def held_out_batches(text: Tensor, options: DemoOptions) -> list[Batch]:
    """Up to `evaluation_batches` batches spread evenly over `text` [tokens], without overlap."""
    rows_there = (len(text) - 1) // options.sequence_length
    wanted = options.batch_size * options.evaluation_batches
    rows = torch.arange(min(wanted, rows_there)) * rows_there // min(wanted, rows_there)
    return [
        cut_batch(text, starts, options.sequence_length)
        for starts in torch.split(rows * options.sequence_length, options.batch_size)
    ]


def next_token_loss(logits: Tensor, label: tuple[Tensor, int]) -> Tensor:
    """Cross-entropy of one microbatch in nats, divided by the token count of the whole batch.

    `logits` [rows, sequence, vocabulary]; `label` = (labels [rows, sequence], tokens in the batch). The sum over the
    microbatches is the mean over the batch's tokens, however the batch was cut.
    """
    labels, token_count = label
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / token_count


def held_out_scores(model: Pipeline, batches: Iterable[Batch]) -> tuple[float, float]:
    """Mean loss per token in nats, and the share of tokens to which the model gives the highest probability.

    Computed in the pipeline with the weights of the last finished step.
    """
    model.synchronize()
    total, right, tokens = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches:
            logits, count = model(batch.tokens).cpu(), batch.token_count
            total += float(next_token_loss(logits, (batch.labels, count))) * count
            right += int((logits.argmax(-1) == batch.labels).sum())  # never IGNORED, which is negative
            tokens += count
    return total / tokens, right / tokens


def learning_rate_factor(step: int, options: DemoOptions) -> float:
    """Linear warmup, then a cosine down to a tenth; `step` counts from 0."""
    warmup = max(1, round(options.steps * options.warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, options.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class StepRecord:
    """One training step. `step` counts from 1, `tokens` from the beginning of the run; `loss` in nats per token."""

    step: int
    loss: float
    lr: float
    tokens: int
    tokens_per_s: float
    elapsed_s: float


@dataclass(frozen=True)
class EvaluationRecord:
    """An evaluation after `step` steps: held-out loss in nats per token, and the share of tokens predicted right."""

    step: int
    held_out_loss: float
    held_out_accuracy: float
    tokens: int
    elapsed_s: float


@dataclass(frozen=True)
class Progress:
    """How far a run has come: steps made, tokens seen, and seconds of training."""

    step: int = 0
    tokens: int = 0
    training_s: float = 0.0


class Saver(Protocol):
    """Saves the training now and then; `progress` is where it begins."""

    progress: Progress

    def on_step(self, record: StepRecord) -> None: ...

    def is_due(self, step: int, is_last: bool) -> bool: ...

    def save(self, progress: Progress) -> None: ...


class Observer(Protocol):
    """Is notified after each step and evaluation, and may ask the loop to stop after the current step."""

    stop_requested: bool

    def on_step(self, record: StepRecord) -> None: ...

    def on_evaluation(self, record: EvaluationRecord) -> None: ...


class FusedSteps:
    """AdamW that updates each layer as soon as its gradient has landed; called once in each step.

    Args:
        model: the trained model.
        tables: the names of its token tables, see `token_tables`.
        is_async: whether, after the first `synchronous_share` of the steps, the next batch may still read the weights
            from before the step.
        moments: the format of the moments, see `roundpipe.optim.AdamW`.
    """

    def __init__(
        self,
        model: roundpipe.RoundPipe,
        tables: list[str],
        options: DemoOptions,
        is_async: bool = True,
        moments: Moments = "float32",
    ) -> None:
        self.model, self._clip_norm = model, options.clip_norm
        self._synchronous_steps = round(options.steps * options.synchronous_share) if is_async else options.steps
        self._steps = 0
        self.optimizer = roundpipe.optim.AdamW(
            model,
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            groups=[
                {"params": tables, "lr": options.learning_rate * options.token_table_factor},
            ],
            moments=moments,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, options)
        )

    def __call__(self) -> None:
        is_async = self._steps >= self._synchronous_steps
        self._steps += 1
        self.model.step(self.optimizer, is_async, max_grad_norm=self._clip_norm, lr_scheduler=self.scheduler)

    def go_on_after(self, step: int) -> None:
        """The next call is that of the step after this one. Weights, optimizer and scheduler are loaded by others."""
        self._steps = step


def token_tables(layers: torch.nn.Module) -> list[str]:
    """The names of the parameters with one row per token: the first and the last of a chain of layers."""
    names = [name for name, _ in layers.named_parameters()]
    return [names[0], names[-1]]


def train(
    model: Pipeline,
    make_step: Callable[[], None],
    batches: Iterator[Batch],
    held_out: list[Batch],
    options: DemoOptions,
    observer: Observer,
    saver: Saver | None = None,
) -> None:
    """Runs `options.steps` steps, with held-out evaluations before, during and after.

    `make_step` starts the step of the batch that was submitted last, for example `FusedSteps`. Each step's batch is
    submitted before the last step's loss is read, so the devices never wait for this loop. If the observer asks, the
    loop returns early, with all steps applied, including the one already submitted, but without the last evaluation.
    `elapsed_s` and `tokens_per_s` count only training, without evaluations.

    Before a save, the last loss is read, and the evaluation of that step is over: what the run has said so far is in
    the checkpoint.
    """
    progress = Progress() if saver is None else saver.progress
    tokens, training_s = progress.tokens, progress.training_s
    since = time.perf_counter()  # time of the last report or evaluation

    def report(step: int, count: int, submitted: Submitted) -> None:
        nonlocal tokens, training_s, since
        loss = float(submitted.loss())
        now = time.perf_counter()
        step_s, since = now - since, now
        tokens += count
        training_s += step_s
        lr = options.learning_rate * learning_rate_factor(step - 1, options)
        record = StepRecord(step, loss, lr, tokens, count / step_s, training_s)
        observer.on_step(record)
        if saver is not None:
            saver.on_step(record)

    def evaluate(step: int) -> None:
        nonlocal since
        observer.on_evaluation(EvaluationRecord(step, *held_out_scores(model, held_out), tokens, training_s))
        since = time.perf_counter()

    evaluation_steps = {round(options.steps * k / (options.evaluations + 1)) for k in range(1, options.evaluations + 1)}
    if progress.step == 0:
        evaluate(0)
    unread: tuple[int, int, Submitted] | None = None
    for step in range(progress.step + 1, options.steps + 1):
        batch = next(batches)
        count = batch.token_count
        submitted = model.submit(input_args=(batch.tokens,), label=(batch.labels, count), loss_fn=next_token_loss)
        make_step()
        if unread is not None:
            report(*unread)
        unread = (step, count, submitted)
        is_stopped = observer.stop_requested
        is_due = saver is not None and saver.is_due(step, is_stopped)
        is_evaluated = not is_stopped and step in evaluation_steps and 0 < step < options.steps
        if is_evaluated or is_due:
            report(*unread)
            unread = None
        if is_evaluated:
            evaluate(step)
        if saver is not None and is_due:
            saver.save(Progress(step, tokens, training_s))
        if is_stopped:
            break
    if unread is not None:
        report(*unread)
    model.synchronize()
    if not observer.stop_requested:
        evaluate(options.steps)
