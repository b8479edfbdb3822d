"""Ways to train that users mix with the pipeline: every one against a plain loop on the same device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def squared_error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - target).square().sum()


class Attention(nn.Module):
    """Causal self-attention by scaled_dot_product_attention, and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, length, width = value.shape
        parts = self.inner(self.norm(value)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, given = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, given, is_causal=True)
        return value + self.outer(mixed.transpose(1, 2).reshape(batch, length, width))


def transformer() -> nn.Sequential:
    torch.manual_seed(1)
    blocks: list[nn.Module] = []
    for _ in range(3):
        blocks += [Attention(32, 4), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]
    return nn.Sequential(*blocks)


def recurrent() -> nn.Sequential:
    class Last(nn.Module):
        def forward(self, value: tuple[torch.Tensor, Any]) -> torch.Tensor:
            return value[0]

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 32), nn.GRU(32, 32, batch_first=True), Last(), nn.Linear(32, 32))


def compiled() -> nn.Sequential:
    model = transformer()
    for index in (1, 3):
        # Without code generation, which is not what is tried here: shells, guards and graphs are the same.
        model[index] = torch.compile(model[index], backend="aot_eager")
    return model


MODELS = {"attention": transformer, "recurrent": recurrent, "compiled": compiled}


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(6, 8, 32, generator=generator), torch.randn(6, 8, 32, generator=generator)) for _ in range(count)
    ]


def plain_gradients(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], device: str, microbatches: int, loss: Loss
) -> list[torch.Tensor]:
    model.to(device).zero_grad()
    for inputs, target in zip(*(part.tensor_split(microbatches) for part in batch), strict=True):
        loss(model(inputs.to(device)), target.to(device)).backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "grain"), [("attention", "layer"), ("attention", "stage"), ("recurrent", "stage"), ("compiled", "layer")]
)
def test_gradients_are_those_of_the_plain_model(pool, accelerator, name, grain):
    config = RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain)
    model = RoundPipe(MODELS[name](), model_run_config=config)
    plain = MODELS[name]()
    for inputs, target in batches(2):
        model.zero_grad()
        model.forward_backward((inputs,), label=target, loss_fn=squared_error)
        model.synchronize()
        expected = plain_gradients(plain, (inputs, target), accelerator, 2, squared_error)
        for ours, theirs in zip(model._original_model.parameters(), expected, strict=True):
            torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.kit
def test_autocast_of_the_caller_holds_on_the_devices(pool, accelerator):
    seen: list[torch.dtype] = []

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return squared_error(outputs, target)

    inputs, target = batches(1)[0]
    chain = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)]
    plain = nn.Sequential(*copy.deepcopy(chain))
    model = RoundPipe(nn.Sequential(*chain), model_run_config=RoundPipeRunConfig(num_microbatch=2))
    with torch.autocast(accelerator, dtype=torch.bfloat16):
        model.forward_backward((inputs,), label=target, loss_fn=loss)
        model.synchronize()
        expected = plain_gradients(plain, (inputs, target), accelerator, 2, loss)
    assert set(seen) == {torch.bfloat16}
    for ours, theirs in zip(model._original_model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.kit
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Lion"])
def test_fused_steps_are_those_of_the_host_s_optimizer(pool, accelerator, kind, is_async):
    options: dict[str, Any] = {"lr": 1e-3} | ({"momentum": 0.9} if kind == "SGD" else {"weight_decay": 0.1})
    torch.manual_seed(1)
    chain = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 32))
    plain = copy.deepcopy(chain)
    newest = [nn.Parameter(parameter.detach().clone()) for parameter in plain.parameters()]
    reference = getattr(roundpipe.optim, kind)(newest, **options)
    model = RoundPipe(chain, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    optimizer = getattr(roundpipe.optim, kind)(model, **options)
    shown = [parameter.detach().clone() for parameter in newest]
    for batch in batches(4):
        model.forward_backward((batch[0],), label=batch[1], loss_fn=squared_error)
        model.step(optimizer, is_async=is_async)
        with torch.no_grad():
            for parameter, value in zip(plain.parameters(), shown if is_async else newest, strict=True):
                parameter.copy_(value)
        gradients = plain_gradients(plain, batch, accelerator, 2, squared_error)
        shown = [parameter.detach().clone() for parameter in newest]
        for parameter, gradient in zip(newest, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
    model.synchronize()
    for ours, theirs in zip(model.state_dict().values(), newest, strict=True):
        assert torch.equal(ours, theirs)


def test_models_take_turns_and_one_reads_the_other_s_outputs(pool, accelerator):
    inputs, target = batches(1)[0]
    torch.manual_seed(1)
    first, second = nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    plain = nn.Sequential(*copy.deepcopy(first), *copy.deepcopy(second))
    config = RoundPipeRunConfig(num_microbatch=1)
    models = [RoundPipe(part, model_run_config=config) for part in (first, second)]
    for _ in range(3):
        for model in models:
            model.zero_grad()
        squared_error(models[1](models[0](inputs)), target).backward()
        for model in models:
            model.synchronize()
        expected = plain_gradients(plain, (inputs, target), accelerator, 1, squared_error)
        ours = [p.grad for model in models for p in model._original_model.parameters()]
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def replayable(function: Callable[[], None], device: str) -> Callable[[], None]:
    """A captured graph of `function` where the device has such; elsewhere the function itself."""
    if device != "cuda":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what `function` changes may be on its way there
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def test_a_graph_that_the_user_has_captured_replays_between_steps(pool, accelerator):
    inputs, target = batches(1)[0]

    def train(between: Callable[[], None]) -> list[torch.Tensor]:
        model = RoundPipe(transformer(), model_run_config=RoundPipeRunConfig(num_microbatch=2))
        optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
        for _ in range(4):
            model.forward_backward((inputs,), label=target, loss_fn=squared_error)
            between()  # while the backward may still run
            model.step(optimizer)
        model.synchronize()
        return [value.clone() for value in model.state_dict().values()]

    expected = train(lambda: None)
    count = torch.zeros(256, 256, device=accelerator)

    def add() -> None:
        count.add_(1)

    replay = replayable(add, accelerator)
    before = float(count[0, 0])
    got = train(replay)
    assert bool((count == before + 4).all())
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
def test_weights_and_gradients_are_page_locked_where_a_card_reads_them(target, pin_model):
    target.pool(1)
    before = roundpipe.host_arena()
    chain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)], nn.Linear(64, 8192))
    model = RoundPipe(chain, pin_model=pin_model)
    model.forward_backward((torch.randn(4, 64),), loss_fn=lambda outputs, _: outputs.sum())
    model.synchronize()
    now = roundpipe.host_arena()
    reserved, locked = now.reserved_bytes - before.reserved_bytes, now.locked_bytes - before.locked_bytes
    is_locked = target.is_card and pin_model != "off"
    # What the step has handed over is page-locked for a card in any case, and kept.
    values = 1 << 20
    if is_locked:
        assert locked == reserved
    else:
        assert locked <= (values if target.is_card else 0)
    # Where the runtime cannot lock what is mapped, torch's allocator gives powers of two.
    most = 1.03 if target.device.partition(":")[0] in ("cpu", "cuda") else 2
    assert reserved < most * (now.asked_bytes - before.asked_bytes) + (1 << 18) + values
    for parameter in model._original_model.parameters():
        assert parameter.is_pinned() == is_locked and parameter.grad.is_pinned() == is_locked
