"""The pipeline against a plain loop on the same device, fp32, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from reference_loops import TiedGradients
from robustness import squared_error
from roundpipe import RoundPipe, RoundPipeRunConfig, _core


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.ReLU(inplace=True), nn.LayerNorm(128), nn.Linear(128, 16)
    )


def convnet() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 64, 16),
    )


def dropout_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 16))


class Tied(nn.Module):
    """An output projection that shares the embedding's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight)


def tied_net() -> nn.Sequential:
    torch.manual_seed(1)
    embedding = nn.Embedding(50, 32)
    return nn.Sequential(embedding, nn.Linear(32, 32), nn.Tanh(), Tied(embedding))


CASES = {
    "mlp": (mlp, lambda: torch.randn(12, 64), lambda: torch.randn(12, 16)),
    "conv": (convnet, lambda: torch.randn(12, 3, 8, 8), lambda: torch.randn(12, 16)),
    "tied": (tied_net, lambda: torch.randint(0, 50, (12, 7)), lambda: torch.randn(12, 7, 50)),
    "dropout": (dropout_net, lambda: torch.randn(12, 64), lambda: torch.randn(12, 16)),
}


@pytest.mark.kit
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_bits_of_a_plain_loop(pool, accelerator, case, microbatches, grain):
    build, make_input, make_target = CASES[case]
    torch.manual_seed(2)
    inputs, target = make_input(), make_target()
    torch.manual_seed(3)
    model = RoundPipe(build(), model_run_config=RoundPipeRunConfig(num_microbatch=microbatches, recompute_grain=grain))
    torch.manual_seed(3)
    plain = build().to(accelerator)
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-2)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    # The optimizer of the pipeline runs on the host; so does the reference's.
    host = {name: nn.Parameter(p.detach().cpu().clone()) for name, p in plain.named_parameters()}
    host_optimizer = torch.optim.AdamW(host.values(), lr=1e-2)

    for call in range(3):
        loss = model.forward_backward((inputs,), label=target, loss_fn=squared_error)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        model.step(update, is_async=False)

        plain_optimizer.zero_grad()
        tied = TiedGradients(plain)
        total = torch.zeros(())
        parts = zip(inputs.tensor_split(microbatches), target.tensor_split(microbatches), strict=True)
        for microbatch, (x, y) in enumerate(parts):
            hidden = x.to(accelerator)
            for index, layer in enumerate(plain):
                torch.manual_seed(model.layer_seed(call, microbatch, index))
                hidden = tied.run(index, layer, hidden)
            part = squared_error(hidden, y.to(accelerator))
            part.backward()
            tied.collect()
            total = part.detach().cpu() if microbatch == 0 else total + part.detach().cpu()
        tied.add()
        torch.manual_seed(3)
        for name, parameter in plain.named_parameters():
            host[name].grad = parameter.grad.cpu()
        host_optimizer.step()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(host[name])
        assert torch.equal(loss, total), (loss, total)
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs.cpu()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_devices_that_share_layers_by_groups_give_the_same_bits(pool, dtype):
    """A job for each group, on the devices in turn, and one job for all: the same sums."""
    _, make_input, make_target = CASES["mlp"]
    torch.manual_seed(2)
    inputs, target = make_input().to(dtype), make_target()
    groups = [(0, 2), (2, 4), (4, 6)]
    jobs, whole = [], []
    for phase, first, last in (("forward", 0, 3), ("fused", 3, 6), ("backward", 0, 3)):
        for index, (begin, end) in enumerate(groups):
            jobs.append((phase, first, last, begin, end, index % len(pool), len(jobs) / 100))
        whole.append((phase, first, last, 0, 6, len(whole) % len(pool), len(whole) / 100))
    ends = []
    for each in (jobs, whole):
        torch.manual_seed(1)
        widths = [64, 128, 96, 128, 64, 32, 16]
        model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)]).to(dtype)
        plan = _core.Plan(6, 6, len(pool), 0, each)
        config = RoundPipeRunConfig(num_microbatch=6, gradient_groups=3, execute_plan=plan)
        pipe = RoundPipe(model, name="shared", model_run_config=config)
        for _ in range(2):
            pipe.forward_backward((inputs,), label=target, loss_fn=lambda out, label: squared_error(out.float(), label))
        pipe.synchronize()
        ends.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in ends[0])


@pytest.mark.kit
def test_forward_carries_a_graph(pool, accelerator):
    torch.manual_seed(2)
    inputs = torch.randn(6, 64, requires_grad=True)
    model = RoundPipe(mlp(), model_run_config=RoundPipeRunConfig(num_microbatch=1))
    outputs = model(inputs)
    outputs.square().sum().backward()
    model.synchronize()
    plain = mlp().to(accelerator)
    same = inputs.detach().to(accelerator).requires_grad_()
    theirs = plain(same)
    theirs.cpu().square().sum().backward()
    assert torch.equal(outputs, theirs.cpu())
    assert torch.equal(inputs.grad, same.grad.cpu())
    for ours, reference in zip(model._original_model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, reference.grad.cpu())


@pytest.mark.kit
def test_random_batches_on_many_workers_give_one_worker_s_bits(target):
    torch.manual_seed(2)
    inputs, label = torch.randn(16, 64), torch.randn(16, 16)
    results = []
    for workers in (1, 2, 3, 4):
        target.pool(workers)
        model = RoundPipe(mlp(), model_run_config=RoundPipeRunConfig(num_microbatch=4))
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-2)
        for _ in range(10):
            model.forward_backward((inputs,), label=label, loss_fn=squared_error)
            model.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()))
        results.append([value.clone() for value in model.state_dict().values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
