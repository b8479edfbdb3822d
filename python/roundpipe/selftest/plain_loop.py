"""Training as one writes it by hand on one device: what RoundPipe has to equal bit for bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roundpipe.selftest.models import token_loss

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Trained:
    """`losses`: one for each step. `weights`: by name, on the host."""

    losses: list[Tensor]
    weights: dict[str, Tensor]


def optimizer_of(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of both sides. Its parameters are fp32 on the host, so devices have no part in it."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1)


def train_plainly(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    microbatches: int,
    device: torch.device,
    is_async: bool,
) -> Trained:
    """One step for each batch; `model` stays unchanged.

    Gradients are summed over the microbatches on the device, those of 16-bit weights in fp32 and then rounded once. An
    asynchronous step is read one step late.
    """
    model = copy.deepcopy(model).to(device)
    parameters = list(model.parameters())
    newest = [parameter.detach().cpu().float().clone().requires_grad_() for parameter in parameters]
    optimizer = optimizer_of(newest)
    sums: dict[int, Tensor] = {}

    def add_up(place: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if place in sums:
            sums[place] += gradient
        else:
            sums[place] = gradient.float()

    for place, parameter in enumerate(parameters):
        hook = functools.partial(add_up, place)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    losses = []
    for tokens, labels in batches:
        loss = torch.zeros(())
        for part, targets in zip(tokens.tensor_split(microbatches), labels.tensor_split(microbatches), strict=True):
            own = token_loss(model(part.to(device)), targets.to(device))
            own.backward()  # type: ignore[no-untyped-call]
            loss = loss + own.detach().cpu()
        losses.append(loss)
        before = [weight.detach().clone() for weight in newest]
        for place, parameter in enumerate(parameters):
            newest[place].grad = sums.pop(place).to(parameter.dtype).cpu().float()
        optimizer.step()
        _read(parameters, before if is_async else newest)
    _read(parameters, newest)
    return Trained(losses, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()})


@torch.no_grad()
def _read(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
