"""The cut of one model's layers into stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, overload

from torch import nn

from roundpipe.device.pool import devices
from roundpipe.files import read_document, write_text
from roundpipe.model.call.joint_plan import RunType, plan_together

# Largest time of a stage, as a factor of the longest layer's time.
DEFAULT_THRESHOLD = 1.1

_SCHEMA = "roundpipe-stages"
_VERSION = 1


class ModelExecutePlan:
    """The stages of one model, each a `range` of layer numbers with step 1.

    Attributes:
        fwd_plan: forward stages, first layers first.
        bwd_plan: backward stages, last layers first. In `forward_backward`, the first of them runs its
            forward, the loss and its backward in one visit, so `fwd_plan` ends where that stage begins.
    """

    def __init__(self) -> None:
        self.fwd_plan: list[range] = []
        self.bwd_plan: list[range] = []

    def __repr__(self) -> str:
        return f"ModelExecutePlan(fwd_plan={self.fwd_plan}, bwd_plan={self.bwd_plan})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelExecutePlan):
            return NotImplemented
        return self.fwd_plan == other.fwd_plan and self.bwd_plan == other.bwd_plan

    __hash__ = None  # type: ignore[assignment]  # the lists may change

    def copied(self) -> ModelExecutePlan:
        """Returns a copy with its own lists of stages."""
        return plan_of(list(self.fwd_plan), list(self.bwd_plan))

    def save(self, path: str | Path) -> None:
        """Writes the stages to a JSON file, atomically.

        Raises:
            ValueError: the file cannot be written.
        """
        document = {
            "schema": _SCHEMA,
            "version": _VERSION,
            "forward": [[stage.start, stage.stop] for stage in self.fwd_plan],
            "backward": [[stage.start, stage.stop] for stage in self.bwd_plan],
        }
        write_text(Path(path), json.dumps(document) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ModelExecutePlan:
        """Reads a file written by `save`. Whether the stages fit a model is checked when they are used.

        Raises:
            ValueError: the file does not exist or does not hold stages.
        """
        where = "ModelExecutePlan.load"
        document = read_document(path, where, "a file of stages", _SCHEMA, _VERSION)
        plan = cls()
        plan.fwd_plan = _ranges(document.get("forward"), "forward", where)
        plan.bwd_plan = _ranges(document.get("backward"), "backward", where)
        return plan

    def check_valid(self, num_layers: int, run_type: RunType) -> None:
        """Checks that every layer runs exactly once in each direction that `run_type` needs.

        Args:
            num_layers: how many layers the model has.
            run_type: "infer" reads only `fwd_plan`; "train" is a forward and a later backward over all layers;
                "fused" is `forward_backward`.

        Raises:
            ValueError: the run type is unknown, the number of layers is invalid, or a stage is empty, has a step other
                than 1, leaves a gap, overlaps its neighbour, or is in the wrong place.
        """
        where = "ModelExecutePlan.check_valid"
        if not isinstance(num_layers, int):
            raise ValueError(f"[{where}] num_layers is {num_layers!r}, expected a number: check_valid(4, 'fused')")
        _check_run_type(where, run_type)
        forward_layers = num_layers
        if run_type != "infer":
            _check_stages("bwd_plan", list(reversed(self.bwd_plan)), num_layers, "from the last layers to the first")
        if run_type == "fused" and self.bwd_plan:
            forward_layers = self.bwd_plan[0].start
        _check_stages("fwd_plan", self.fwd_plan, forward_layers, "from the first layers to the last")

    @overload
    @classmethod
    def auto(
        cls,
        run_type: RunType,
        model: nn.Module,
        /,
        *,
        min_stages: int | None = None,
        upper_threshold: float = DEFAULT_THRESHOLD,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan: ...

    @overload
    @classmethod
    def auto(
        cls,
        run_type: RunType,
        /,
        *models: nn.Module,
        min_stages: int | None = None,
        upper_threshold: float = DEFAULT_THRESHOLD,
        model_memory_limit: float | None = None,
    ) -> list[ModelExecutePlan]: ...

    @classmethod
    def auto(
        cls,
        run_type: RunType,
        /,
        *models: Any,
        min_stages: int | None = None,
        upper_threshold: float = DEFAULT_THRESHOLD,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | list[ModelExecutePlan]:
        """Lets the planner cut the models, from measured layer times if there are any.

        For one model without the last three arguments, the planner searches for the shortest step. Otherwise the
        published package's rule balances the stages: none takes longer than `upper_threshold` times the longest layer
        of all the models, which are cut together, for a step that runs them one after the other. For "fused",
        `forward_backward` runs the last model and its plan is for that; the models before it are called, and their
        plans are for "train".

        Args:
            run_type: the plan's purpose, see `check_valid`.
            *models: `RoundPipe` models.
            min_stages: at least 1; fewer stages count as this many where the cut with the least (number of stages) x
                (longest stage) is chosen; by default the number of devices.
            upper_threshold: largest time of a stage, as a factor >= 1 of the longest layer's time.
            model_memory_limit: largest size of a stage's weights, in GB (1e9 bytes).

        Returns:
            One plan for each model: the plan itself for a single model, else a list in the models' order.

        Raises:
            ValueError: a model is not a `RoundPipe`, or an argument is out of range.
        """
        where = "ModelExecutePlan.auto"
        _check_run_type(where, run_type)
        if min_stages is not None and min_stages < 1:
            raise ValueError(f"[{where}] min_stages is {min_stages}, expected at least 1")
        if not upper_threshold >= 1:
            raise ValueError(f"[{where}] upper_threshold is {upper_threshold}, expected a factor of at least 1")
        if model_memory_limit is not None and not model_memory_limit > 0:
            raise ValueError(f"[{where}] model_memory_limit is {model_memory_limit}, expected a number of GB above 0")
        for position, model in enumerate(models):
            _check_model(where, position, model)
        if not models:
            return []
        limit_bytes = 0 if model_memory_limit is None else int(model_memory_limit * 1e9)
        is_open = min_stages is None and upper_threshold == DEFAULT_THRESHOLD and not limit_bytes
        if len(models) == 1 and is_open:
            searched: ModelExecutePlan = models[0]._searched_plan(run_type)
            return searched
        costs = [model.costs() for model in models]
        limits = [model._pipeline.stage_limit_bytes(limit_bytes) for model in models]
        together = plan_together(run_type, costs, min_stages or len(devices()), upper_threshold, limits)
        plans = [plan_of(stages.forward, stages.backward) for stages in together]
        return plans[0] if len(models) == 1 else plans


def plan_of(forward: list[range], backward: list[range]) -> ModelExecutePlan:
    """The plan of these stages, in running order."""
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = forward, backward
    return plan


def _ranges(value: Any, field: str, where: str) -> list[range]:
    def is_stage(entry: Any) -> bool:
        return isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)

    if not isinstance(value, list) or not all(is_stage(entry) for entry in value):
        raise ValueError(f"[{where}] {field} is {value!r}, expected a list of [first layer, last layer + 1]")
    return [range(first, last) for first, last in value]


def _check_run_type(where: str, run_type: str) -> None:
    if run_type not in get_args(RunType):
        raise ValueError(f"[{where}] run_type is {run_type!r}, expected one of {', '.join(get_args(RunType))}")


def _check_model(where: str, position: int, model: object) -> None:
    refusal = getattr(type(model), "_why_not_cut", None)
    if refusal is not None:
        raise ValueError(f"[{where}] model {position} is {refusal}")
    if not callable(getattr(model, "_searched_plan", None)):
        raise ValueError(f"[{where}] model {position} is a {type(model).__name__}, expected a RoundPipe: wrap it first")


def _check_stages(name: str, stages: list[range], num_layers: int, order: str) -> None:
    """Checks that `stages`, first layers first, tile [0, num_layers)."""

    def fail(problem: str) -> ValueError:
        return ValueError(
            f"[ModelExecutePlan.check_valid] {name}: {problem}; expected ranges of step 1, {order}, that together "
            f"hold each of the layers [0, {num_layers}) once"
        )

    end = 0
    for stage in stages:
        if not isinstance(stage, range):
            raise fail(f"{stage!r} is a {type(stage).__name__}, not a range")
        if stage.step != 1:
            raise fail(f"{stage} has step {stage.step}")
        if len(stage) == 0:
            raise fail(f"{stage} is empty")
        if stage.start > end:
            raise fail(f"layers [{end}, {stage.start}) are missing, or the stages are in the wrong order")
        if stage.start < end:
            raise fail(f"{stage} overlaps a neighbour that ends at layer {end}, or the stages are in the wrong order")
        end = stage.stop
    if end < num_layers:
        raise fail(f"layers [{end}, {num_layers}) are missing")
    if end > num_layers:
        raise fail(f"{stages[-1]} goes beyond layer {num_layers}")
