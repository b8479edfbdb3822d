"""The slow and obvious training loop that one writes by hand without a pipeline: everything on one device.

The demo compares the pipeline with it. The loop does not fit a device that the pipeline trains on; where it fits, it
gives the same bits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import roundpipe

# The loop's activity when a device runs out of memory.
WEIGHTS, GRADIENTS, OPTIMIZER = "moving the weights", "the forward and backward pass", "making AdamW's state"


@dataclass(frozen=True)
class Outcome:
    """The results of a few steps, on the host.

    `losses`: one for each step, fp32 [steps]. `weights`: by name, in the model's type. `masters`: by name, the fp32
    values that 16-bit weights are rounded from; float32 weights have none.
    """

    losses: Tensor
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]


def nearest(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of fp32 masters: in bfloat16 the nearest values, with ties away from zero."""
    if dtype == torch.float32:
        return master
    bits = master.contiguous().view(torch.int32) + 0x8000
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


# The only one of torch's loops over the elements whose square roots are exact.
torch_adamw: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.AdamW, fused=True)


def torch_fuses() -> bool:
    """Whether torch's kernels on the host round a multiplication and the addition after it once."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def fused_adamw(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """`torch_adamw`; on a host for which torch does not fuse, RoundPipe's AdamW over plain tensors, which always does.

    Args:
        parameters: on one device; or groups of them, as torch's optimizers take.
    """
    given = list(parameters)
    first = given[0]["params"][0] if isinstance(given[0], dict) else given[0]
    if first.device.type == "cpu" and not torch_fuses():
        return roundpipe.optim.AdamW(given, **options)
    return torch_adamw(given, **options)


def next_token_loss(logits: Tensor, tokens: Tensor, token_count: int) -> Tensor:
    """Cross-entropy of one microbatch in nats, divided by the number of tokens that the whole batch predicts.

    `logits` [rows, sequence, vocabulary], `tokens` [rows, sequence]. The sum over the microbatches is the mean over the
    batch's tokens, however the batch was cut.
    """
    predictions, labels = logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
    return F.cross_entropy(predictions, labels, reduction="sum") / token_count


def plain_steps(
    llama: PreTrainedModel,
    batches: Sequence[Tensor],
    rule: Mapping[str, Any],
    device: torch.device,
    state_device: torch.device | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    adamw: Callable[..., torch.optim.Optimizer] = fused_adamw,
) -> Outcome:
    """Runs one AdamW step for each of `batches`, with each row as a microbatch; `llama` stays unchanged.

    Weights in float32 are updated directly. Weights in bfloat16 are rounded from fp32 masters; the gradients of a
    step are summed in fp32 and then rounded once to bfloat16, like gradients on their way to an optimizer on the host.

    Args:
        llama: a causal language model of transformers.
        batches: tokens, int64 [rows, sequence].
        rule: options of AdamW: lr, betas, weight_decay.
        device: holds weights and gradients, and computes.
        state_device: holds the optimizer's state and computes its step; None = `device`.
        on_stage: called when an activity begins: WEIGHTS, GRADIENTS or OPTIMIZER.
        adamw: makes the optimizer, like `torch.optim.AdamW`.

    Raises:
        torch.OutOfMemoryError: the loop does not fit `device`.
    """
    on_stage(WEIGHTS)
    state_device = device if state_device is None else state_device
    model: Any = copy.deepcopy(llama).to(device)  # type: ignore[arg-type]
    named = dict(model.named_parameters())
    masters = {name: _master(parameter, state_device) for name, parameter in named.items()}
    optimizer = adamw(masters.values(), **rule)
    sums: dict[str, Tensor] = {}

    def add_up(name: str, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if name in sums:
            sums[name] += gradient
        else:
            sums[name] = gradient.float()

    for name, parameter in named.items():
        hook = functools.partial(add_up, name)
        parameter.register_post_accumulate_grad_hook(hook)
    losses = []
    for batch in batches:
        on_stage(GRADIENTS)
        count, loss = batch[:, 1:].numel(), torch.zeros(())
        for row in torch.split(batch.to(device), 1):
            part = next_token_loss(model(input_ids=row, use_cache=False).logits, row, count)
            part.backward()  # type: ignore[no-untyped-call]
            loss = loss + part.detach().cpu()
        losses.append(loss)
        on_stage(OPTIMIZER)
        for name, parameter in named.items():
            masters[name].grad = sums.pop(name).to(parameter.dtype).to(state_device).float()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in named.items():
                if parameter is not masters[name]:
                    parameter.copy_(nearest(masters[name], parameter.dtype))
    kept = {name: master for name, master in masters.items() if named[name].dtype != torch.float32}
    return Outcome(torch.stack(losses), _on_host(named), _on_host(kept))


def _master(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.dtype == torch.float32 and parameter.device == device:
        return parameter
    return nn.Parameter(parameter.detach().to(device, torch.float32, copy=True))


def _on_host(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in named.items()}
