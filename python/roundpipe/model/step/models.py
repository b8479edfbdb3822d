"""The models and host parameters that one optimizer steps together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import nn

from roundpipe import _core


class PipedModel(Protocol):
    """A model in the pipeline, as the optimizer's side sees it."""

    _pipeline: _core.Pipeline
    _host_budget: int | None
    _model_core: _core.ModelCore

    def _all_named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Every parameter under every name that counts."""


class SteppedModels:
    """The models and host parameters that one optimizer steps together.

    Args:
        pipes: the models in the pipeline, by the names of their modules in the whole model ("" for the root).
        host_parameters: parameters that stay and are used on the host, by name.

    Attributes:
        pipelines: the models' pipelines.
        parameters: the parameters in these pipelines.
        host_parameters: see above.
        fused: the engine's part of steps by a fused optimizer.
        host_pipeline: holds the host parameters once a fused optimizer updates them; None before that, or if there are
            none.
    """

    def __init__(self, pipes: Mapping[str, PipedModel], host_parameters: dict[str, nn.Parameter]) -> None:
        # Weak references: a model holds this object, and a cycle would keep its memory until a garbage collection.
        self._pipes = {path: weakref.ref(pipe) for path, pipe in pipes.items()}
        self.pipelines = [pipe._pipeline for pipe in pipes.values()]
        blocks = [block for pipeline in self.pipelines for block in pipeline.block_parameters()]
        self.parameters = [parameter for block in blocks for parameter in block]
        self.host_parameters = host_parameters
        self.fused = _core.FusedSteps([pipe._model_core for pipe in pipes.values()], list(host_parameters.items()))
        self.host_pipeline: _core.Pipeline | None = None
        self._ids = {id(parameter) for parameter in (*self.parameters, *host_parameters.values())}

    def owns_any(self, ids: set[int]) -> bool:
        """Whether one of these ids belongs to a parameter of the models."""
        return not self._ids.isdisjoint(ids)

    def pipes(self) -> list[tuple[str, PipedModel]]:
        """The models in the pipeline with the names of their modules."""
        found = ((path, reference()) for path, reference in self._pipes.items())
        return [(path, pipe) for path, pipe in found if pipe is not None]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every name of every parameter."""
        names: list[tuple[str, nn.Parameter]] = []
        for path, reference in self._pipes.items():
            pipe = reference()
            if pipe is None:
                raise ReferenceError("[RoundPipe] the model is gone, expected it to live as long as its optimizer")
            for name, parameter in pipe._all_named_parameters():
                names.append((f"{path}.{name}" if path else name, parameter))
        return [*names, *self.host_parameters.items()]

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The models' own parameters that require grad, each once, under its first name."""
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                first.setdefault(id(parameter), (name, parameter))
        return list(first.values())

    def all_pipelines(self) -> list[_core.Pipeline]:
        """All pipelines that hold parameters; the host's comes last."""
        return [*self.pipelines, *([self.host_pipeline] if self.host_pipeline is not None else [])]

    def expose_gradients_of_backwards(self) -> None:
        """From now on, the `.grad` of the models' own parameters is filled when a backward returns."""
        for pipeline in self.pipelines:
            pipeline.exposes_gradients = True

    def has_gradients(self) -> bool:
        """Whether a pipeline has gradients that no step has consumed."""
        return any(pipeline.has_gradients for pipeline in self.pipelines)

    def drain(self) -> None:
        """Waits for all calls."""
        for pipeline in self.pipelines:
            pipeline.drain()

    def show_gradients(self) -> None:
        """Fills the `.grad` of the models' own parameters with gradients that no step has consumed."""
        for pipeline in self.pipelines:
            pipeline.show_gradients()
