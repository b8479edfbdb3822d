"""Towers whose layers are layers of the pipeline: parts that run before those of the model around them.

A tower, such as one for pictures, is followed as a model of its own. The first part of the chain runs the model's
forward as far as it calls its towers, and begins these calls. Then come the towers' layers. The part before the model's
own layers runs the forward again, ends the calls, and answers with what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from roundpipe.following.call_shapes import Arguments
from roundpipe.following.layers.shadow import ShadowTree
from roundpipe.following.parts import ENDING, FREQUENCIES, Before, Part, buffers_around
from roundpipe.following.pictures.tower_samples import tower_samples
from roundpipe.following.placeholder import WITHOUT_VALUES, CannotFollow, Placeholder, Recorder
from roundpipe.following.skeleton import FollowedModel, Over, Run, TowerCall
from roundpipe.following.survey import Uses, evaluating, find_early_ends, find_stacks, parts_of, watch
from roundpipe.following.verification import same_outputs, try_training

_FAILURES = (*WITHOUT_VALUES, AttributeError, ValueError)


@dataclass
class CutTower:
    """A tower that is cut into layers.

    Attributes:
        number: see `FollowedModel.towers`.
        before: everything until its first layer is called.
        layers: its layers.
        after: everything after them.
    """

    number: int
    before: Before
    layers: list[nn.Module]
    after: Part


def cut_towers(followed: FollowedModel) -> list[CutTower]:
    """The model's towers, as far as layers, one after the other, compute the bits of the whole. A tower whose layers
    are not called in order, or for which no sample is known, stays a piece of the part before the model's layers."""
    found = []
    for number, tower in enumerate(followed.towers()):
        parts = _parts_of(tower) if isinstance(tower, PreTrainedModel) else None
        if parts is not None:
            found.append(CutTower(number, parts[0], parts[1:-1], parts[-1]))
    return found


def _parts_of(tower: PreTrainedModel) -> list[Any] | None:
    """The parts of a tower; None if it cannot be cut."""
    samples = list(tower_samples(tower))
    lists = _lists(tower)
    if not samples or not lists:
        return None
    # Some towers have several lists of layers, and some have lists of other modules beside their layers.
    for layers in (find_stacks(tower), *map(list, lists)):
        with suppress(*_FAILURES):  # CannotFollow is among them
            return _cut_at(tower, layers, samples)
    return None


def _lists(tower: nn.Module) -> list[nn.ModuleList]:
    """The lists of modules of one class in a tower, the longest one first, and of these the largest one. Others are not
    its layers, such as the linear layers and activations of what merges its features."""
    lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    lists = [each for each in lists if len(set(map(type, each))) == 1]
    return sorted(lists, key=lambda each: (-len(each), -sum(parameter.numel() for parameter in each.parameters())))


def likely_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a tower that `cut_towers` would most likely cut, without a look at its values; none of another
    module."""
    is_tower = isinstance(module, PreTrainedModel) and next(tower_samples(module), None) is not None
    return list(next(iter(_lists(module)), ())) if is_tower else []


def _cut_at(tower: PreTrainedModel, layers: list[nn.Module], samples: list[dict[str, Any]]) -> list[Any]:
    """The parts of a tower with these layers.

    Raises:
        CannotFollow: they would not compute the same for each of the samples.
    """
    names: dict[int, str] = {}
    for name, tensor in [*tower.named_parameters(), *tower.named_buffers()]:
        names.setdefault(id(tensor), name)
    followed = FollowedModel(tower, tower, layers, names, {})
    expected = watch(followed, samples[0])
    if followed.order != list(range(len(followed.layers))):
        raise CannotFollow("its layers are not called one after the other")
    # The model may ask its tower for hidden states, whose shapes are then part of what the tower will return.
    asked = FollowedModel(tower, tower, layers, names, {})
    with suppress(*_FAILURES):
        watch(asked, {**samples[0], "output_hidden_states": True})
        followed.collected = asked.collected
    uses = Uses(followed, samples[0])
    if uses.ends.drawn is not None:
        raise CannotFollow("its end reads random numbers")
    find_early_ends(followed, uses)
    parts = [part for _, part in parts_of(followed, uses, {})]
    try_training(followed, samples[0])
    for index, sample in enumerate(samples):
        with evaluating(tower):
            state: Any = ShadowTree(parts[0], {}).root(**sample)
            for part in parts[1:]:
                state = ShadowTree(part, {}).root(state)
            if not same_outputs(state, tower(**sample) if index else expected):
                raise CannotFollow("part by part it does not compute the same as whole")
    return parts


class _Calls(Run):
    """Begins the calls of towers that are cut, as long as they depend on no tower.

    Args:
        towers: the parts before their layers, by number.
    """

    def __init__(self, towers: dict[int, Before]) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.begun: list[TowerCall] = []
        self._towers = towers

    def called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise Over

    def tower(self, number: int, forward: Callable[[], Any], arguments: Arguments, device: torch.device) -> Any:
        if number not in self._towers:
            return forward()
        if any(isinstance(leaf, Placeholder) for leaf in pytree.tree_leaves(arguments)):
            raise Over
        args, kwargs = arguments
        state = self._towers[number](*args, **kwargs)
        self.begun.append((number, state))
        output = self._towers[number].shown_output(args, kwargs, state)
        if output is None:
            raise Over
        return output


class TowersBegin(Part):
    """The first part: everything until the first layers of the towers are called.

    Args:
        followed: the model around them.
        towers: those that are cut.
    """

    def __init__(self, followed: FollowedModel, towers: list[CutTower]) -> None:
        super().__init__(followed, set(), buffers_around(followed))
        self.towers = nn.ModuleDict({str(tower.number): tower.before for tower in towers})

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Arguments, list[TowerCall]]:
        run = _Calls({int(number): tower for number, tower in self.towers.items()})  # type: ignore[misc]
        given = {n: value for n, value in kwargs.items() if n not in (ENDING, FREQUENCIES)} | self.followed.forced
        try:
            self.skeleton().run(run, args, given)
        except torch.OutOfMemoryError:
            raise
        except (Over, *_FAILURES):
            # Code behind a tower may need what the tower returns. The part before the model's layers runs it, reports
            # what fails there too, and refuses a call that is missing here.
            pass
        return (args, kwargs), run.begun


class TowerLayer(nn.Module):
    """A layer of a tower, for all calls of the tower."""

    def __init__(self, number: int, layer: nn.Module) -> None:
        super().__init__()
        self.number = number
        self.layer = layer

    def forward(self, state: tuple[Arguments, list[TowerCall]]) -> tuple[Arguments, list[TowerCall]]:
        arguments, calls = state
        return arguments, [
            (number, self.layer(under_way) if number == self.number else under_way) for number, under_way in calls
        ]


def tower_parts(followed: FollowedModel, towers: list[CutTower]) -> Iterator[tuple[str, nn.Module]]:
    """The pipeline's layers up to the part before the model's own layers, with their names."""
    if towers:
        yield "towers", TowersBegin(followed, towers)
    for tower in towers:
        for index, layer in enumerate(tower.layers):
            yield f"tower{tower.number}_layer{index}", TowerLayer(tower.number, layer)
