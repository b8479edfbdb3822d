"""One model that several nodes train together: what they agree on, for the model and for each optimizer and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from roundpipe import _core
from roundpipe.distributed.description import of_late_frozen, of_model, of_optimizer
from roundpipe.distributed.loss_counts import LossCounts
from roundpipe.distributed.nodes import Nodes
from roundpipe.distributed.values import SharedValues, checksum

_WRAPS, _MAKES_OPTIMIZER = "wraps", "makes an optimizer for"


class JointTraining:
    """One model that several nodes train together. Collective, like all of its methods that say so.

    Args:
        nodes: the nodes.
        kind: the name of the model's class.
        layers: how many layers it has; None if it has none of its own.
        module: the model, with the parameters and buffers that count.

    Raises:
        ValueError: the ranks have different models.
        RoundPipeError: a rank does not answer.
    """

    def __init__(self, nodes: Nodes, kind: str, layers: int | None, module: nn.Module) -> None:
        named: list[tuple[str, Tensor]] = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        nodes.agree(_WRAPS, of_model(kind, layers, named), "the same program on every rank")
        nodes.groups()
        self.nodes = nodes
        self.counts = LossCounts(nodes)
        self._values = SharedValues(nodes)
        self._named: list[tuple[str, nn.Parameter]] = []  # every name of every parameter, once there is an optimizer
        self._values.share(_WRAPS, named)
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
        told = of_model(self.nodes.model, None, named) | of_optimizer(optimizer, named)
        told |= {name: repr(value) for name, value in options.items()}
        self.nodes.agree(_MAKES_OPTIMIZER, told, "the same parameters and optimizer on every rank")
        self._values.share(_MAKES_OPTIMIZER, named)
        self._named = named
        return self.nodes.for_optimizer()

    def step(self, options: Mapping[str, Any], optimizer: torch.optim.Optimizer, shows_weights: bool) -> float:
        """See `LossCounts.step`. Collective.

        Args:
            options: of the step, by name.
            optimizer: that was made for the models.
            shows_weights: whether the models' parameters show the weights that the step starts from.

        Raises:
            ValueError: the nodes differ, or a layer keeps statistics of its own node's rows alone.
        """
        for name, part in self._statistics:
            if part.training:
                raise ValueError(
                    f"[distributed] {name} is a {type(part).__name__} that keeps running statistics, which would be of "
                    f"this node's rows alone, expected none over {self.nodes.size} nodes (DistributedDataParallel "
                    "overwrites them with those of rank 0); put it in eval mode, give it track_running_stats=False, or "
                    "use another norm"
                )
        told = {name: repr(value) for name, value in options.items()} | of_late_frozen(optimizer, self._named)
        written = self._values.written(self._named) if shows_weights else {}
        told |= {f"what was written to {name}": f"{checksum(tensor):08x}" for name, tensor in written.items()}
        factor = self.counts.step(told, optimizer.param_groups)
        self._values.note_alike(written.values())
        return factor

    def refuse(self, what: str) -> NoReturn:
        """Raises ValueError: the weights of `what` would not stay the same on all nodes."""
        raise ValueError(
            f"[distributed] {what} would use the gradients of this node alone, and {self.nodes.size} nodes train "
            "the model; expected a roundpipe.optim optimizer made for it: optimizer = roundpipe.optim.AdamW(model, "
            "...), model.step(optimizer); or give process_group=False where the model is wrapped, to train it alone"
        )


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
