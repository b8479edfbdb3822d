"""Several nodes against a loop written by hand, which adds their gradients in the documented order, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import node_programs
from fused_reference import PlainTraining
from node_processes import NodeProcesses
from node_programs import RATES, Training
from reference_loops import assert_same
from roundpipe.train.demo.plain_loop import fused_adamw
from sweeps import covering


def adamw(masters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return fused_adamw([m for _, m in masters], **RATES)


def compare(training: Training, said: list[dict]) -> None:
    """Losses, norms, skipped steps and weights of every node with those of the loop."""
    plain = PlainTraining(training.model(), adamw, training.microbatches, training.size)
    seeds = [[0] * (len(plain.model) + 1)] * training.microbatches
    losses: list[list[float]] = [[] for _ in said]
    steps = []
    for step in range(training.steps):
        scales = {each["scales"][step] for each in said} if training.scaled else {1.0}
        assert len(scales) == 1, f"step {step}: the scale is {scales}"
        (scale,) = scales
        for node in range(training.size):
            for call in range(training.calls[node]):
                inputs, label = training.batch(step, node, call)
                loss = plain.call(inputs, label, seeds, training.factor(step, node), scale, node)
                losses[node].append(float(loss))
        steps.append(
            plain.step(
                training.is_async,
                training.max_grad_norm,
                scale if training.scaled else None,
                1 / training.size,
                by_last_norm=training.clip_by == "last_norm",
            )
        )
    for node, each in enumerate(said):
        assert repr(each["losses"]) == repr(losses[node]), f"losses of node {node}"
        for name, weight in plain.weights().items():
            assert_same(each["weights"][name], weight, f"node {node}: {name}")
        if each["skipped"]:
            assert each["skipped"] == [skipped for _, skipped in steps], f"node {node}"
            made = [norm for norm, skipped in steps if not skipped]
            assert [n for n, s in zip(each["norms"], each["skipped"], strict=True) if not s] == made, f"node {node}"


def run(nodes: NodeProcesses, trainings: list[Training]) -> None:
    """Makes the trainings, of one number of nodes, and compares each."""
    (size,) = {training.size for training in trainings}
    results = nodes.results(size, "train_all", trainings)
    for index, training in enumerate(trainings):
        compare(training, [each[index] for each in results])


BF16, FP16 = torch.bfloat16, torch.float16


def test_two_nodes(nodes: NodeProcesses) -> None:
    run(
        nodes,
        [
            Training(2),
            Training(2, devices=2, is_async=False),
            Training(2, dtype=BF16, devices=2, tied=True),
            Training(2, dtype=BF16, frozen=True, rows=(6, 3), max_grad_norm=0.02),
            Training(2, rows=(4, 8), calls=(2, 1), max_grad_norm=math.inf, is_async=False),
            Training(2, calls=(1, 0), tied=True),
            Training(2, dtype=FP16, scaled=True, infinite=((2, 1),), steps=5),
            Training(2, other_weights=True, steps=1),
            Training(2, width=512, dtype=BF16, max_grad_norm=0.02, steps=2),  # parameters that are cut
        ],
    )


AT_ONCE = {"is_async": False, "layers": 8, "options": (("gradients", "at_once"),)}  # with room for three of them


def test_gradients_at_once(nodes: NodeProcesses) -> None:
    by_last = {"max_grad_norm": 0.02, "clip_by": "last_norm"}
    run(
        nodes,
        [
            Training(2, **AT_ONCE),
            Training(2, **AT_ONCE, **by_last, dtype=BF16, devices=2, steps=4),
            Training(2, **AT_ONCE, **by_last, tied=True, rows=(6, 3)),
            Training(2, **AT_ONCE, dtype=BF16, frozen=True, tied=True, max_grad_norm=math.inf, clip_by="last_norm"),
            Training(2, **AT_ONCE, **by_last, calls=(0, 1), frozen=True),
            Training(2, **AT_ONCE, **by_last, calls=(0, 0), steps=1),
            Training(2, **AT_ONCE, **by_last, width=512, dtype=BF16),
        ],
    )
    run(nodes, [Training(3, **AT_ONCE, **by_last, calls=(0, 1, 1), dtype=BF16)])


def test_gradients_at_once_have_room_for_three_layers(nodes: NodeProcesses) -> None:
    for parameters, told, _ in nodes.results(2, "held_bytes_at_once", 1024, 12):
        layer = parameters / 12
        least = parameters * (2 + 10 / 2)
        assert 0.99 * least + 2 * layer <= told <= (least + 3 * 2 * layer) * 1.001


def test_three_nodes_one_of_them_without_rows(nodes: NodeProcesses) -> None:
    run(
        nodes,
        [
            Training(3, calls=(0, 1, 2), max_grad_norm=0.02),
            Training(3, dtype=FP16, scaled=True, calls=(1, 0, 1), infinite=((1, 2),), is_async=False),
            Training(3, width=512, steps=1),
        ],
    )


def test_four_nodes(nodes: NodeProcesses) -> None:
    run(nodes, [Training(4, dtype=BF16, frozen=True, tied=True, rows=(2, 5, 3, 4))])


def test_a_group_of_one_rank_is_one_machine(nodes: NodeProcesses) -> None:
    run(nodes, [Training(1), Training(1, dtype=BF16, max_grad_norm=0.02)])


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_state_is_divided(nodes: NodeProcesses, size: int) -> None:
    """14 bytes a parameter become 4 + 10 / nodes, in what the optimizer tells and in the process."""
    for parameters, told, grown in nodes.results(size, "held_bytes", 4096, 4):
        expected = parameters * (4 + 10 / size)
        assert told == pytest.approx(expected, rel=0.03)
        # Beside it: what is in flight on the device, and two blocks of the exchange.
        assert grown <= 1.03 * expected + 200e6


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_three_options_together(nodes: NodeProcesses, size: int) -> None:
    names = ("dtype", "devices", "is_async", "frozen", "tied", "max_grad_norm")
    values = ((torch.float32, BF16), (1, 2), (True, False), (False, True), (False, True), (None, 0.02))
    cases = sorted(covering([2] * len(names), 3))
    options = [dict(zip(names, (axis[i] for axis, i in zip(values, case, strict=True)), strict=True)) for case in cases]
    run(nodes, [Training(size, steps=2, **each) for each in options])


OPTIMIZERS = [
    ("AdamW", (("moments", "8bit"), ("masters", "24bit"))),
    ("AdamW", (("moments", "8bit"),)),
    ("Adam", (("amsgrad", True),)),
    ("SGD", (("momentum", 0.9),)),
    ("Adagrad", ()),
    ("Lion", ()),
    ("RMSprop", (("centered", True),)),
]


@pytest.mark.parametrize(
    "kind", [OPTIMIZERS[0], *(pytest.param(each, marks=pytest.mark.long) for each in OPTIMIZERS[1:])], ids=str
)
def test_every_optimizer_cut_over_nodes_is_the_whole_one(
    nodes: NodeProcesses, kind: tuple[str, tuple[tuple[str, object], ...]]
) -> None:
    # Only the first of two nodes has rows: half of its gradients, which is exact, is what one machine has of half the
    # loss.
    cut = Training(2, width=512, dtype=BF16, calls=(1, 0), optimizer=kind[0], options=kind[1])
    (whole,) = nodes.results(1, "train", replace(cut, size=1, calls=(1,), loss_factor=0.5))
    for each in nodes.results(2, "train", cut):
        for name, weight in whole["weights"].items():
            assert_same(each["weights"][name], weight, name)


def test_a_loop_that_adds_in_another_order_is_told_apart() -> None:
    training = Training(3)
    plain = [PlainTraining(training.model(), adamw, nodes=3) for _ in range(2)]
    for node in range(3):
        inputs, label = training.batch(0, node, 0)
        for other, loop in enumerate(plain):
            loop.call(inputs, label, [[0] * 4] * 2, node=(node + other) % 3)
    one, other = (loop.landed(1 / 3) for loop in plain)
    assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None)
    assert training.width == node_programs.WIDTH
