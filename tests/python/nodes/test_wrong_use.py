"""Ranks that do not fit together are refused by name, on every rank, and none waits for another."""

from __future__ import annotations

import pytest

from node_processes import NodeProcesses


def test_messages_of_any_length_arrive_in_order(nodes: NodeProcesses) -> None:
    messages = [[b"", b"a", b"bc"], [b"x" * 508, b"y" * 509, b"z" * 3], [b"", bytes(range(256)) * 40, b"q" * 5000]]
    for got in nodes.results(3, "exchange", messages):
        assert got == messages


SAME = "; expected the same program on every rank"
ALIKE = "; expected the same parameters and optimizer on every rank"
STEP = "; expected the same step on every rank"
IN_MODEL = "[distributed] the ranks differ in model 1 (Sequential): "


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "layers",
            f"{IN_MODEL}the number of layers: rank 0 has 2, rank 1 has 3; 2.weight: rank 0 has none, rank 1 has 4x4 "
            f"float32; 2.bias: rank 0 has none, rank 1 has 4 float32{SAME}",
        ),
        (
            "dtypes",
            f"{IN_MODEL}0.weight: rank 0 has 4x4 float32, rank 1 has 4x4 bfloat16; 0.bias: rank 0 has 4 float32, rank "
            "1 has 4 bfloat16; 1.weight: rank 0 has 4x4 float32, rank 1 has 4x4 bfloat16; 1.bias: rank 0 has 4 "
            f"float32, rank 1 has 4 bfloat16{SAME}",
        ),
        (
            "frozen",
            f"{IN_MODEL}1.weight: rank 0 has 4x4 float32, rank 1 has 4x4 float32, frozen; 1.bias: rank 0 has 4 "
            f"float32, rank 1 has 4 float32, frozen{SAME}",
        ),
        ("tied", f"{IN_MODEL}1.weight: rank 0 has 4x4 float32, rank 1 has the values of 0.weight{SAME}"),
        (
            "strides",
            f"{IN_MODEL}1.weight: rank 0 has 4x4 float32, rank 1 has 4x4 float32, strides 1x4{SAME}",
        ),
        ("version", f"{IN_MODEL}the version of roundpipe: rank 0 has "),
        (
            "order",
            "[distributed] the ranks do not do the same: rank 0 wraps model 1 (first), rank 1 wraps model 1 (second); "
            "expected each to wrap the same models, make the same optimizers and make the same steps in the same order",
        ),
        (
            "number",
            "[distributed] the ranks do not do the same: rank 0 wraps model 2 (Sequential), rank 1 makes an optimizer "
            "for model 1 (Sequential); expected ",
        ),
        ("torch optimizer", "[distributed] SGD.step() would use the gradients of this node alone, and 2 nodes train "),
        ("step function", "[distributed] a step function would use the gradients of this node alone"),
        ("optim_parameters", "[distributed] an optimizer over optim_parameters() would use the gradients of this node"),
        ("wrong group", "[distributed] process_group is a str, expected a group of torch.distributed, None for the"),
        ("destroyed group", "[distributed] the process group was destroyed, expected one that is in use; "),
        ("mapped file", "[distributed] the ranks differ in the values of 0.weight, which lies in a mapped file "),
        ("lame backend", "[distributed] the backend lame cannot exchange tensors on the host ("),
    ],
)
def test_refused_when_wrapped(nodes: NodeProcesses, name: str, message: str) -> None:
    for error in nodes.results(2, "error_of", name):
        assert error.startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lr", f"{IN_MODEL}lr of group 0: rank 0 has 0.1, rank 1 has 0.2{ALIKE}"),
        ("kind", f"{IN_MODEL}the optimizer: rank 0 has AdamW, rank 1 has Adam"),
        ("moments", f"{IN_MODEL}moments: rank 0 has 'float32', rank 1 has '8bit'{ALIKE}"),
        ("masters", f"{IN_MODEL}masters: rank 0 has 'float32', rank 1 has '24bit'{ALIKE}"),
        ("gradients", f"{IN_MODEL}gradients: rank 0 has 'weights', rank 1 has 'at_once'{ALIKE}"),
        ("clip_by", f"{IN_MODEL}clip_by: rank 0 has 'last_norm', rank 1 has 'norm'{STEP}"),
        ("two passes", "[step] two passes over a batch measure the gradients of one process, and several train"),
        ("measure_gradients", "[measure_gradients] two passes over a batch measure the gradients of one process"),
        ("late lr", f"{IN_MODEL}lr of group 0: rank 0 has 0.1, rank 1 has 0.2{STEP}"),
        (
            "frozen late",
            f"{IN_MODEL}frozen since the optimizer was made: rank 0 has none, rank 1 has 1.weight, 1.bias{STEP}",
        ),
        ("written late", f"{IN_MODEL}what was written to 1.weight: rank 0 has none, rank 1 has "),
        ("is_async", f"{IN_MODEL}is_async: rank 0 has True, rank 1 has False{STEP}"),
        ("max_grad_norm", f"{IN_MODEL}max_grad_norm: rank 0 has None, rank 1 has 1.0{STEP}"),
        (
            "state_dict",
            "[optim] state_dict() of an optimizer of 2 nodes, each of which has a part of the state, expected",
        ),
        ("load_state_dict", "[optim] load_state_dict() of an optimizer of 2 nodes, each of which has a part"),
        *(
            (
                f"{kind} norm",
                f"[distributed] 1 is a {kind.title()}Norm1d that keeps running statistics, which would be ",
            )
            for kind in ("batch", "instance")
        ),
    ],
)
def test_refused_in_a_step(nodes: NodeProcesses, name: str, message: str) -> None:
    for error in nodes.results(2, "error_of", name):
        assert error.startswith(message)


def test_a_group_that_a_rank_is_not_in(nodes: NodeProcesses) -> None:
    _, error = nodes.results(2, "error_of", "foreign group")
    assert error.startswith("[distributed] process_group is one that this process is not in, expected one that has it")
