"""Tries what a followed model's loss averages over: the part after its layers alone, on random hidden states.

A batch is run whole and in two parts, whose rows differ in how many labels count, also in their first places, and in
how many tokens are attended to: every `Reduction` would weigh the parts otherwise.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from roundpipe.data.labels import names_label
from roundpipe.data.samples import IGNORED
from roundpipe.following.layers.shadow import ShadowTree
from roundpipe.following.parts import COEFFICIENT
from roundpipe.following.program import Tree
from roundpipe.following.skeleton import FollowedModel, PartState
from roundpipe.following.survey import evaluating
from roundpipe.model.losses.ending import Ending, loss_in
from roundpipe.model.losses.reduction import OF_MASK, FoundLoss, LossForm, Reduction, asks_for_loss, count, weights

_DRAWS = 4
_MASKED = ("input_ids", "input_values", "input_features")
_ERRORS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def try_losses(
    followed: FollowedModel, after: nn.Module, state: PartState, batch: dict[str, Any]
) -> dict[LossForm, FoundLoss]:
    """What was found about the losses of calls, by their form; forms whose losses nobody understands are missing.

    Args:
        followed: the model.
        after: the part after its layers, as the host runs it.
        state: what the last layer has handed on for `batch`.
        batch: arguments of a call; its tensors have as many rows as its labels.
    """
    labels = {name: value for name, value in batch.items() if names_label(name) and isinstance(value, torch.Tensor)}
    if not asks_for_loss(batch) or not labels:
        return {}
    trial = _Trial(followed, after, state, batch, labels, 0)
    found = trial.forms()
    for draw in range(_DRAWS):
        if not trial.is_ambiguous:
            break
        # All labels are about as likely, as for a head of zeros or a new one in 16 bits, or weights are not numbers.
        replaced = {id(each): _random_like(each, draw) for each in after.parameters()}
        trial = _Trial(followed, ShadowTree(after, replaced).root, state, batch, labels, draw)
        found |= trial.forms()
    return found


@dataclasses.dataclass(frozen=True)
class _Tried:
    """What was found about calls of one form.

    Attributes:
        form: of the calls.
        found: what was found.
        changed: the arguments that they were tried with, where they differ from the batch's.
        whole: the loss of the whole batch.
    """

    form: LossForm
    found: FoundLoss
    changed: dict[str, Any]
    whole: float


class _Trial:
    """The trials of one model.

    Attributes:
        is_ambiguous: whether some losses were no numbers, or so much alike that several reductions explain them.
    """

    def __init__(
        self,
        followed: FollowedModel,
        after: nn.Module,
        state: PartState,
        batch: dict[str, Any],
        labels: dict[str, torch.Tensor],
        seed: int,
    ) -> None:
        self.is_ambiguous = False
        self._followed, self._after, self._batch, self._labels = followed, after, batch, labels
        self._rows = next(iter(labels.values())).shape[0]
        self._slices = slice(self._rows - 1), slice(self._rows - 1, self._rows)
        self._halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in followed.model.parameters())
        self._generator = torch.Generator().manual_seed(seed)
        # What wraps a model may pass on arguments that it does not name.
        forwards = followed.model.forward, followed.language_model.forward
        self._parameters = {name: p for each in forwards for name, p in inspect.signature(each).parameters.items()}
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self._state = self._with_random_states(state)

    def forms(self) -> dict[LossForm, FoundLoss]:
        """What could be found, by form."""
        found: dict[LossForm, FoundLoss] = {}
        mask = self._mask_shape() if self._takes("attention_mask") else None
        for labels in (self._labels, self._labels_of_other_kind()):
            if labels is not None:
                with evaluating(self._followed.model):
                    found |= self._forms_of(labels, mask)
        return found

    def _forms_of(self, labels: dict[str, torch.Tensor], mask: torch.Size | None) -> dict[LossForm, FoundLoss]:
        """What could be found of calls with labels of this kind; `mask` is the shape of an attention mask."""
        changed = self._arguments(labels, mask)
        first = self._tried(changed)
        unmasked = {**changed, "attention_mask": None}
        if mask is None or first is None:
            first = first if mask is None else self._tried(unmasked)
            return {} if first is None else {first.form: first.found}
        found = {first.form: first.found}
        without = LossForm.of({**self._batch, **first.changed, "attention_mask": None})
        if first.found.reduction in OF_MASK:
            second = self._tried(unmasked)
            found |= {} if second is None else {second.form: second.found}
        elif self._gives(first, {"attention_mask": None}):
            honours = self._honours_items(first.changed | {"attention_mask": None}, first.whole, first.found.reduction)
            found[without] = dataclasses.replace(first.found, honours_items=honours)
        return found | self._shifted(first)

    def _takes(self, name: str) -> bool:
        return name in self._parameters

    # -- one form -----------------------------------------------------------------------------------------------------

    def _tried(self, changed: dict[str, Any]) -> _Tried | None:
        """What is found about calls of the form of these arguments; None if nothing."""
        whole, parts = self._losses(changed)
        if whole is None and self._ignores(changed):
            # Classes may not be ignored. Other values stay: if these are what fails, nothing is found.
            counted = {n: torch.where(changed[n] == IGNORED, value, changed[n]) for n, value in self._labels.items()}
            changed = {**changed, **counted}
            whole, parts = self._losses(changed)
        if whole is None or None in parts:
            return None
        arguments = {**self._batch, **changed}
        reduction = self._fitting(whole, parts, arguments)
        if reduction is None:
            return None
        found = FoundLoss(reduction, self._honours_items(changed, whole, reduction))
        return _Tried(LossForm.of(arguments), found, changed, whole)

    def _gives(self, tried: _Tried, other: dict[str, Any]) -> bool:
        """Whether the loss is the same with some other arguments, as far as this shows."""
        loss = self._loss({**tried.changed, **other})
        return loss is not None and self._close(loss, tried.whole)

    def _losses(self, changed: dict[str, Any]) -> tuple[float | None, list[float | None]]:
        whole = self._loss(changed)
        return whole, [] if whole is None else [self._loss(changed, part) for part in self._slices]

    def _fitting(self, whole: float, parts: list[Any], arguments: dict[str, Any]) -> Reduction | None:
        """The reduction that makes the loss of the whole from those of its parts; None if none or several do."""
        fitting: list[tuple[Reduction, list[float]]] = []
        for reduction in Reduction:
            by = self._weights(reduction, arguments)
            if by is not None and self._close(sum(a * b for a, b in zip(by, parts, strict=True)), whole):
                fitting.append((reduction, by))
        if not fitting:
            return None
        first, by = fitting[0]
        if any(abs(other[0] - by[0]) > 1e-6 for _, other in fitting):
            self.is_ambiguous = True
            return None
        return first

    def _weights(self, reduction: Reduction, arguments: dict[str, Any]) -> list[float] | None:
        counts = [count(reduction, self._of_part(arguments, part)) for part in self._slices]
        known = [each for each in counts if each is not None]
        return weights(reduction, known) if len(known) == len(counts) else None

    def _honours_items(self, changed: dict[str, Any], whole: float, reduction: Reduction) -> bool | None:
        """See `FoundLoss.honours_items`."""
        if not self._takes("num_items_in_batch") and not self._takes_any:
            return None
        counted = count(reduction, {**self._batch, **changed})
        items = 2 * (counted or 0) + 1
        given = self._loss({**changed, "num_items_in_batch": torch.tensor(items)})
        if given is None or not counted:
            return None
        if self._close(given, whole):
            return False
        return True if self._close(given, whole * counted / items) else None

    def _shifted(self, tried: _Tried) -> dict[LossForm, FoundLoss]:
        """The same for calls with `shift_labels`, if these are read instead of the labels."""
        labels = tried.changed.get("labels")
        if labels is None or labels.dim() != 2 or not (self._takes("shift_labels") or self._takes_any):
            return {}
        other = {"labels": self._values_like(labels)}
        other["shift_labels"] = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
        if tried.found.reduction is not Reduction.LABELS_BUT_FIRST or not self._gives(tried, other):
            return {}
        found = dataclasses.replace(tried.found, reduction=Reduction.LABELS)
        masked = LossForm.of({**self._batch, **tried.changed, **other})
        return dict.fromkeys((masked, dataclasses.replace(masked, is_masked=False)), found)

    def _close(self, value: float, expected: float) -> bool:
        # All of these start from the same hidden states, so that only the end rounds.
        return abs(value - expected) <= (2e-3 if self._halves else 1e-5) * max(1.0, abs(expected))

    # -- running the end ----------------------------------------------------------------------------------------------

    def _loss(self, changed: dict[str, Any], part: slice | None = None) -> float | None:
        """The model's loss as if it had been called with other arguments; None if it gives no number."""
        state = self._state if part is None else _part_of(self._state, self._rows, part)
        changed = changed if part is None else self._of_part(changed, part)
        if self._takes("output_router_logits"):
            changed = {**changed, "output_router_logits": False}
        try:
            with _LossesInFloat():
                loss = loss_in(self._after(_called_with(state, changed)))
        except _ERRORS:
            return None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return None
        if not bool(loss.isfinite()):
            self.is_ambiguous = True
            return None
        return float(loss)

    def _of_part(self, arguments: dict[str, Any], part: slice) -> dict[str, Any]:
        return {name: rows_of_part(value, self._rows, part) for name, value in arguments.items()}

    def _with_random_states(self, state: PartState) -> PartState:
        program, values, shared, collected = state
        has_router = COEFFICIENT in vars(self._followed.language_model)
        # A router's loss is no sum over tokens, so it is left out.
        collected = () if self._takes("output_router_logits") else collected
        ending = Ending(router_share=0.0 if has_router else None)
        # The parts of the batch have fewer rows than what was returned before the layers.
        program = dataclasses.replace(program, ending=ending, returned=None)
        random = {
            number: torch.randn(values[number].shape, generator=self._generator).to(values[number].dtype)
            for number in program.calls[-1].outputs
            if number is not None and values[number].is_floating_point()
        }
        return program, {**values, **random}, shared, collected

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _mask_shape(self) -> torch.Size | None:
        """The shape of an attention mask; None if it is unknown."""
        if isinstance(mask := self._batch.get("attention_mask"), torch.Tensor):
            return mask.shape
        inputs = next((self._batch[name] for name in _MASKED if name in self._batch), None)
        return None if inputs is None else inputs.shape[:2]

    def _arguments(self, labels: dict[str, torch.Tensor], mask: torch.Size | None) -> dict[str, Any]:
        """Labels of the same kind, and a mask, for which no two reductions weigh the two parts alike.

        The rows of the first part are attended to, and two of their labels count, the first one too. The row of the
        second part is padded, and all its labels count but the first one, also those of the padding.
        """
        made: dict[str, Any] = {}
        if mask is not None:
            made["attention_mask"] = torch.ones(mask, dtype=torch.int64)
            made["attention_mask"][-1, ..., -2:] = 0
        for name, value in labels.items():
            made[name] = value if value.is_floating_point() else self._values_like(value)
            if value.dim() > 1 and not value.is_floating_point():
                made[name][:-1, 2:] = IGNORED
                made[name][-1, 0] = IGNORED
            elif not value.is_floating_point():
                made[name][0] = IGNORED
        return made

    def _values_like(self, labels: torch.Tensor) -> torch.Tensor:
        values = labels[labels != IGNORED]
        chosen: torch.Tensor = values[self._random(0, len(values), *labels.shape)]
        return chosen

    def _random(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self._generator)

    def _ignores(self, changed: dict[str, Any]) -> bool:
        return any(bool((changed[name] == IGNORED).any()) for name in self._labels)

    def _labels_of_other_kind(self) -> dict[str, torch.Tensor] | None:
        """A number for each class, for a model that finds by the type of its labels what they are."""
        config = self._followed.language_model.config
        classes, labels = getattr(config, "num_labels", None), self._labels.get("labels")
        if labels is None or labels.dim() != 1 or labels.is_floating_point() or not isinstance(classes, int):
            return None
        if getattr(config, "problem_type", "") is not None or classes < 2:
            return None
        return {"labels": torch.rand(self._rows, classes, generator=self._generator).round()}


def _random_like(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1.0
    return (torch.randn(parameter.shape, generator=generator) * spread).to(parameter.dtype)


class _LossesInFloat(TorchFunctionMode):
    """Computes losses of 16-bit numbers in fp32: rounded to 8 bits, a mean over labels looks like one over rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "loss" in func.__name__ or "entropy" in func.__name__:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _in_float, (args, kwargs))
        return func(*args, **kwargs)


def _in_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def rows_of_part(value: Any, rows: int, part: slice) -> Any:
    """Some of the rows of a value that has `rows` of them; any other value as it is."""
    return value[part] if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows else value


def _part_of(state: PartState, rows: int, part: slice) -> PartState:
    """Some rows of the values that reach the end of the forward."""
    program, values, *others = state

    def cut(value: torch.Tensor) -> torch.Tensor:
        if not value.dim() or value.shape[0] % rows:
            # Some models have several hidden states, in a dimension before the rows.
            return value[:, part] if value.dim() > 1 and value.shape[1] == rows else value
        return value.reshape(rows, -1, *value.shape[1:])[part].flatten(0, 1)

    return (program, {number: cut(value) for number, value in values.items()}, *others)  # type: ignore[return-value]


def _called_with(state: PartState, changed: dict[str, Any]) -> PartState:
    """The state after a call, as if some of its arguments had been different."""
    program, values, *others = state
    args, kwargs = program.inputs.join(values, {})
    inputs = Tree(*pytree.tree_flatten((args, {**kwargs, **changed})))
    own = {number: value.clone() for number, value in values.items()}  # the forward may write into them
    return (dataclasses.replace(program, inputs=inputs), own, *others)  # type: ignore[return-value]
