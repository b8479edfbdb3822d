"""Learns from comparing answers: DPO, KTO and reward models, with the losses of their papers and of TRL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import roundpipe
from roundpipe.data.balance import BalancedSplit, microbatch_count
from roundpipe.following.layers.evaluation_mode import evaluation_mode
from roundpipe.model.losses.loss_arguments import TOKEN_LOSSES
from roundpipe.train.tasks.objective import Begun, Nodes, Told, of_all
from roundpipe.train.tasks.samples import PAIR

Label = dict[str, torch.Tensor]


@dataclass(frozen=True)
class AnswerOptions:
    """Of a run that compares answers.

    Attributes:
        microbatches: of a step; None: one more than devices.
        beta: the factor of log-probabilities.
        good_weight: of a good answer's loss.
        bad_weight: of a bad answer's loss.
    """

    microbatches: int | None
    beta: float
    good_weight: float
    bad_weight: float


Losses = tuple[torch.Tensor, torch.Tensor]  # of each pair or answer, and how right the model is about it, up to 1


@dataclass(frozen=True)
class _BegunAnswers:
    pending: Any
    counted: int

    def told(self, scale: float) -> Told:
        _, total, right = self.pending.loss()
        return Told(float(total) / self.counted, self.counted, float(right))


class Answers:
    """What the objectives over answers have in common.

    Args:
        model: in training mode.
        nodes: which share each batch's rows.
        options: of the run.
    """

    group = 1  # rows that are one pair or answer
    names: tuple[str, ...] = ("input_ids", "attention_mask")  # of the model's arguments

    def __init__(self, model: roundpipe.RoundPipe, nodes: Nodes, options: AnswerOptions) -> None:
        self._model, self._nodes, self._options = model, nodes, options

    @abstractmethod
    def losses(self, values: torch.Tensor, label: Label) -> Losses:
        """The losses of a microbatch.

        Args:
            values: [rows] in fp32, what `value_of_rows` gives.
            label: the batch's tensors beside the model's arguments, of the same rows.
        """

    def value_of_rows(self, outputs: Any) -> torch.Tensor:
        """The log-probability of each row's answer, [rows] in fp32.

        Raises:
            ValueError: the model's loss is no sum over tokens.
        """
        losses = outputs.loss
        if losses is None or losses.dim() != 2:
            raise ValueError(
                "[train] the model's loss is not made of the losses of tokens, expected a causal language model of "
                "transformers whose forward calls its loss_function; train it with --task sft"
            )
        total: torch.Tensor = losses.float().sum(dim=1)
        return -total

    def begin(self, batch: dict[str, Any], scaler: roundpipe.GradScaler | None) -> Begun | None:
        """As of `Objective`."""
        of_batch = len(batch["input_ids"]) // self.group
        measured = self.measured(batch)
        rows = self._nodes.rows_of(_tensors(batch), self.group)
        if rows is None:
            return None
        kwargs, label = self._parted(rows)
        cut = self._split(kwargs).config(self._options.microbatches)
        # The gradients of nodes are averaged.
        share = self._nodes.size / of_batch

        def loss_fn(outputs: Any, label: Label) -> list[torch.Tensor]:
            losses, right = self.losses(self.value_of_rows(outputs), {**label, **measured})
            part = losses.sum() * share
            total = losses.detach().sum()
            return [part if scaler is None else scaler.scale(part), total, right.sum().to(total.dtype)]

        pending = self._model.submit(input_kwargs=kwargs, label=label, loss_fn=loss_fn, run_config=cut)
        return _BegunAnswers(pending, len(kwargs["input_ids"]) // self.group)

    def evaluate(self, batches: Iterable[dict[str, Any]]) -> Told:
        """As of `Objective`."""
        self._model.synchronize()
        found = []
        for batch in batches:
            measured = self.measured(batch)
            rows = self._nodes.rows_of(_tensors(batch), self.group)
            if rows is None:
                continue
            _, label = self._parted(rows)
            losses, right = self.losses(self.values(rows), {**label, **measured})
            found.append(Told(float(losses.double().mean()), len(losses), float(right.sum())))
        return of_all(found) if found else Told(0.0, 0, 0)

    def measured(self, batch: dict[str, Any]) -> Label:
        """What all microbatches of a batch need to know of the whole. Collective."""
        return {}

    def values(self, rows: dict[str, Any]) -> torch.Tensor:
        """`value_of_rows` of a batch's rows, in evaluation mode and without gradients, on the host."""
        kwargs, _ = self._parted(rows)
        split = self._split(kwargs)

        def merged(outputs: list[Any]) -> torch.Tensor:
            return torch.cat([self.value_of_rows(output) for output in outputs])

        calls = self._model.calls  # which key the random numbers of steps; these do not count
        with evaluation_mode(self._model), torch.no_grad():
            config = split.config(merge_output=merged)
            found = self._model(**kwargs, roundpipe_run_config=config, roundpipe_loss_only=True).cpu()
        self._model.calls = calls
        order = torch.tensor([row for part in split.parts(microbatch_count(split.most)) for row in part])
        return torch.empty_like(found).index_copy_(0, order, found)

    def _split(self, kwargs: dict[str, Any]) -> BalancedSplit:
        return BalancedSplit(kwargs["attention_mask"], group=self.group)

    def _parted(self, rows: dict[str, Any]) -> tuple[dict[str, Any], Label]:
        kwargs = {name: rows[name] for name in self.names}
        if "labels" in self.names:
            kwargs[TOKEN_LOSSES] = True
        return kwargs, {name: rows[name] for name in ("reference", "is_good") if name in rows}


class DirectPreference(Answers):
    """DPO: Rafailov et al., "Direct Preference Optimization" (arXiv:2305.18290), equation 7."""

    group = PAIR
    names = ("input_ids", "attention_mask", "labels")

    def losses(self, values: torch.Tensor, label: Label) -> Losses:
        gained = (values - label["reference"].to(values)).view(-1, PAIR)
        margin = self._options.beta * (gained[:, 0] - gained[:, 1])
        return -F.logsigmoid(margin), _right(margin)


class Reward(Answers):
    """The reward model of pairs of Bradley and Terry: Ouyang et al. (arXiv:2203.02155), equation 1."""

    group = PAIR

    def value_of_rows(self, outputs: Any) -> torch.Tensor:
        scores: torch.Tensor = outputs.logits.float().squeeze(-1)
        return scores

    def losses(self, values: torch.Tensor, label: Label) -> Losses:
        rewards = values.view(-1, PAIR)
        margin = rewards[:, 0] - rewards[:, 1]
        return -F.logsigmoid(margin), _right(margin)


class RatedAnswers(Answers):
    """KTO: Ethayarajh et al., "Model Alignment as Prospect Theoretic Optimization" (arXiv:2402.01306), equation 7. What
    the model has moved away from its reference is measured on questions with answers of other samples."""

    names = ("input_ids", "attention_mask", "labels")

    def measured(self, batch: dict[str, Any]) -> Label:
        def moved() -> tuple[float, int]:
            rows = self._nodes.rows_of(batch["others"])
            if rows is None:
                return 0.0, 0
            gained = self.values(rows).double() - rows["reference"]
            return float(gained.sum()), len(gained)

        told = self._nodes.each(moved)
        mean = sum(total for total, _ in told) / sum(count for _, count in told)
        return {"moved": torch.tensor(max(0.0, mean))}

    def losses(self, values: torch.Tensor, label: Label) -> Losses:
        options, is_good = self._options, label["is_good"].to(values.device)
        gained = values - label["reference"].to(values)
        ahead = options.beta * (gained - float(label["moved"]))
        good = options.good_weight * (1 - torch.sigmoid(ahead))
        bad = options.bad_weight * (1 - torch.sigmoid(-ahead))
        return torch.where(is_good, good, bad), _right(torch.where(is_good, gained, -gained))


def _right(margin: torch.Tensor) -> torch.Tensor:
    """1 where the model is right, and 1/2 where it makes no difference, as before the first step."""
    return (margin > 0) + 0.5 * (margin == 0)


def _tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


OBJECTIVES: dict[str, Callable[[roundpipe.RoundPipe, Nodes, AnswerOptions], Answers]] = {
    "dpo": DirectPreference,
    "kto": RatedAnswers,
    "reward": Reward,
}
