"""What the steps of a run learn: calls of the model on a batch, and what they tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.data.balance import balanced_config, microbatch_count
from roundpipe.data.collate import count_label_tokens
from roundpipe.data.pictures.batches import PICTURED
from roundpipe.huggingface.evaluation import held_out_sum
from roundpipe.model.call.loss_function import ScaledOutputs
from roundpipe.model.memory.prediction import DeviceMemory

T = TypeVar("T")


class Told(NamedTuple):
    """What one node knows of a batch.

    Attributes:
        loss: the mean over what counts of its rows: labels, pairs or answers.
        counted: how many these are.
        right: how many of them the model gets right, a half for one that it cannot tell; None: that is not asked.
    """

    loss: float
    counted: int
    right: float | None = None

    @property
    def accuracy(self) -> float | None:
        """The share that is right."""
        return self.right / self.counted if self.right is not None and self.counted else None


class Nodes(Protocol):
    """The processes that make a run together, as `roundpipe.train.nodes.RunNodes` knows them."""

    size: int

    def rows_of(self, batch: Mapping[str, Any], group: int = 1) -> dict[str, Any] | None: ...

    def places_of(self, attention_mask: Any) -> list[int]: ...

    def each(self, work: Callable[[], T]) -> list[T]: ...


class Begun(Protocol):
    """A call that was submitted."""

    @property
    def pending(self) -> Any:
        """The call."""

    def told(self, scale: float) -> Told:
        """Waits for it. `scale` is what its loss was multiplied by."""


class Objective(Protocol):
    """Makes the calls of a run on this node's rows of a batch. All methods are collective."""

    def begin(self, batch: dict[str, Any], scaler: roundpipe.GradScaler | None) -> Begun | None:
        """Submits a training call; None: the node has no rows."""

    def evaluate(self, batches: Iterable[dict[str, Any]]) -> Told:
        """What this node's rows of held-out batches give, in evaluation mode."""


@dataclass(frozen=True)
class _BegunTokens:
    pending: Any
    labels: int

    def told(self, scale: float) -> Told:
        return Told(float(self.pending.loss()) / scale, self.labels)


class NextTokens:
    """The next token of each labelled one: the model's own loss.

    Args:
        model: in training mode.
        nodes: which share each batch's rows.
        microbatches: of a step; None: one more than devices.
    """

    _any_rows = False  # of `ScaledOutputs`

    def __init__(self, model: roundpipe.RoundPipe, nodes: Nodes, microbatches: int | None) -> None:
        self._model, self._nodes, self._microbatches = model, nodes, microbatches

    def begin(self, batch: dict[str, Any], scaler: roundpipe.GradScaler | None) -> Begun | None:
        rows = self._rows(batch)
        if rows is None:
            return None
        loss = ScaledOutputs(scaler, self._any_rows)
        pending = self._model.submit(input_kwargs=rows, loss_fn=loss, run_config=self._cut(rows))
        return _BegunTokens(pending, count_label_tokens(rows["labels"]))

    def evaluate(self, batches: Iterable[dict[str, Any]]) -> Told:
        parts = (self._rows(batch) for batch in batches)
        rows = (part for part in parts if part is not None)
        total, tokens = held_out_sum(self._model, rows, self._cut_held_out)
        return Told(total / tokens if tokens else 0.0, tokens)

    def _rows(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        return self._nodes.rows_of(batch)

    def _cut(self, rows: Mapping[str, Any]) -> RoundPipeRunConfig:
        return balanced_config(rows, self._microbatches)

    def _cut_held_out(self, rows: Mapping[str, Any]) -> RoundPipeRunConfig:
        return balanced_config(rows)


class TokensOfPictures(NextTokens):
    """The same of batches with pictures, which the model cuts itself, as it knows whose they are. A node reads the
    pictures of its rows alone, and may have none; so may a batch, also where only what sees them is trained."""

    _any_rows = True

    def predict(self, batch: dict[str, Any]) -> DeviceMemory | None:
        """The memory that `begin` of this batch takes on a device, layer by layer if need be; None: this node has no
        rows of it."""
        rows = self._rows(batch)
        if rows is None:
            return None
        loss, cut = ScaledOutputs(None, self._any_rows), dataclasses.replace(self._cut(rows), recompute_grain="layer")
        return self._model.predict_memory(input_kwargs=rows, loss_fn=loss, run_config=cut).device

    def _rows(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        places = self._nodes.places_of(batch["attention_mask"])
        return batch[PICTURED](places) if places else None

    def _cut(self, rows: Mapping[str, Any]) -> RoundPipeRunConfig:
        return RoundPipeRunConfig(num_microbatch=microbatch_count(len(rows["input_ids"]), self._microbatches))

    _cut_held_out = _cut


def of_all(parts: Iterable[Sequence[Any]]) -> Told:
    """What several parts of the rows tell together, in the form of `Told`."""
    told = [Told(*each) for each in parts]
    counted = [each for each in told if each.counted]
    if len(counted) == 1:
        return counted[0]
    total = sum(each.counted for each in counted)
    right = [each.right for each in counted if each.right is not None]
    return Told(sum(each.loss * each.counted for each in counted) / total, total, sum(right) if right else None)
