"""One model that several nodes train together, as Python has its parts: see `_core.JointTraining`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from roundpipe import _core
from roundpipe.compatibility import package_version
from roundpipe.distributed.nodes import Nodes


class JointTraining:
    """One model that several nodes train together. Collective, like all of its methods that say so.

    Args:
        nodes: the nodes.
        kind: the name of the model's class.
        layers: how many layers it has; None if it has none of its own.
        module: the model, with the parameters and buffers that count.

    Attributes:
        nodes: the nodes.
        counts: what the calls since the last step have used as their losses.

    Raises:
        ValueError: the ranks have different models.
        RoundPipeError: a rank does not answer.
    """

    def __init__(self, nodes: Nodes, kind: str, layers: int | None, module: nn.Module) -> None:
        parameters: list[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
        buffers = list(module.named_buffers(remove_duplicate=False))
        self.nodes = nodes
        self._core = _core.JointTraining(nodes.agreement, package_version(), torch.__version__, kind, layers)
        self.counts = self._core.counts
        self._core.agree_on_model(parameters, buffers)
        self._core.share_model(parameters + buffers, nodes.weights_name())
        self._statistics = [
            (name, part)
            for name, part in module.named_modules()
            if isinstance(part, _NormBase) and part.running_mean is not None
        ]

    def make_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        options: Mapping[str, Any],
        named: list[tuple[str, nn.Parameter]],
    ) -> _core.Nodes:
        """Agrees on an optimizer, and gives the parameters the values of rank 0 again, as there may be new ones.
        Collective.

        Args:
            optimizer: has trained parameters in its groups.
            options: those that are not in its groups.
            named: every name of every parameter.

        Returns:
            What the engine's optimizer needs.
        """
        parameters = [list(group["params"]) for group in optimizer.param_groups]
        traits = _core.OptimizerTraits(type(optimizer).__name__, _options_of(optimizer), parameters, _in_words(options))
        self._core.agree_on_optimizer(traits, [*named])
        self._core.share_parameters(self.nodes.weights_name())
        return self.nodes.for_optimizer()

    def step(self, options: Mapping[str, Any], optimizer: torch.optim.Optimizer, shows_weights: bool) -> float:
        """Ends the step's calls, and returns the factor of its gradients' sum. Collective.

        Args:
            options: of the step, by name.
            optimizer: that was made for the models.
            shows_weights: whether the models' parameters show the weights that the step starts from.

        Raises:
            ValueError: the nodes differ in what they step with, or a layer keeps statistics of its own node's rows
                alone.
            RoundPipeError: a call has failed on a node.
        """
        for name, part in self._statistics:
            if part.training:
                raise ValueError(
                    f"[distributed] {name} is a {type(part).__name__} that keeps running statistics, which would be of "
                    f"this node's rows alone, expected none over {self.nodes.size} nodes (DistributedDataParallel "
                    "overwrites them with those of rank 0); put it in eval mode, give it track_running_stats=False, or "
                    "use another norm"
                )
        return self._core.step(_in_words(options), _options_of(optimizer), shows_weights)

    def refuse(self, what: str) -> NoReturn:
        """Raises ValueError: the weights of `what` would not stay the same on all nodes."""
        raise ValueError(
            f"[distributed] {what} would use the gradients of this node alone, and {self.nodes.size} nodes train "
            "the model; expected a roundpipe.optim optimizer made for it: optimizer = roundpipe.optim.AdamW(model, "
            "...), model.step(optimizer); or give process_group=False where the model is wrapped, to train it alone"
        )


def _options_of(optimizer: torch.optim.Optimizer) -> list[list[tuple[str, str]]]:
    """The options of each group, in words."""
    return [
        _in_words({name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]


def _in_words(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, repr(value.tolist() if isinstance(value, Tensor) else value)) for name, value in options.items()]


def join(process_group: Any, name: str, kind: str, layers: int | None, module: nn.Module) -> JointTraining | None:
    """Joins the nodes of a process group for a model that is being wrapped; None if it is trained alone. Collective.

    Args:
        process_group: see `chosen_group`.
        name: the model's, in messages.
        kind: see `JointTraining`.
        layers: see `JointTraining`.
        module: see `JointTraining`.
    """
    nodes = Nodes.of(process_group, name)
    return None if nodes is None else JointTraining(nodes, kind, layers, module)
