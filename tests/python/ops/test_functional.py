"""Chunked loss and chunked feed-forward blocks: what plain PyTorch computes, with bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.ops import LogitStep, chunked_mlp, gated_mlp, linear_cross_entropy, two_layer_mlp

GEMMA2: tuple[LogitStep, ...] = (("divide", 30.0), "tanh", ("multiply", 30.0), "float32")
COHERE: tuple[LogitStep, ...] = (("multiply", 0.0625), "float32")
GRANITE: tuple[LogitStep, ...] = (("divide", 8.0), "float32")
STEPS: dict[str, tuple[LogitStep, ...]] = {"none": (), "gemma2": GEMMA2, "cohere": COHERE, "granite": GRANITE}


def apply_step(logits: torch.Tensor, step: LogitStep) -> torch.Tensor:
    if step == "tanh":
        return logits.tanh()
    if step == "float32":
        return logits if logits.dtype == torch.float64 else logits.float()
    assert isinstance(step, tuple)
    return logits * step[1] if step[0] == "multiply" else logits / step[1]


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    steps: Sequence[LogitStep] = (),
    ignore_index: int = -100,
    reduction: str = "sum",
) -> torch.Tensor:
    logits = functools.reduce(apply_step, steps, F.linear(hidden, weight, bias))
    logits = apply_step(logits, "float32").flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=ignore_index, reduction=reduction)


def inputs(
    tokens: int | tuple[int, ...], width: int, vocabulary: int, dtype: torch.dtype, ignored: float = 0.3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight, labels, bias; logits of about unit size."""
    shape = (tokens,) if isinstance(tokens, int) else tokens
    labels = torch.randint(vocabulary, shape)
    labels[torch.rand(shape) < ignored] = -100
    hidden = torch.randn(*shape, width, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, dtype=torch.float64) * 2 / width**0.5
    bias = torch.randn(vocabulary, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), labels, bias.to(dtype)


def with_gradients(
    loss: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], trained: Sequence[bool] | None = None
) -> list[torch.Tensor]:
    """The loss of `tensors` and its gradients, of those that are `trained`."""
    trained = [True] * len(tensors) if trained is None else trained
    leaves = [tensor.detach().clone().requires_grad_(each) for tensor, each in zip(tensors, trained, strict=True)]
    value = loss(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(value, wanted) if wanted else ()
    return [value.detach(), *gradients]


def weighed(loss: torch.Tensor) -> torch.Tensor:
    """A scalar; of the losses of tokens, a sum in which each has another weight."""
    if not loss.dim():
        return loss
    return (loss.flatten() * torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype)).sum()


def distance(some: torch.Tensor, others: torch.Tensor) -> float:
    assert some.shape == others.shape
    if others.numel() == 0:
        return 0.0
    apart = (some.double() - others.double()).abs().max().item()
    return apart / max(others.double().abs().max().item(), 1e-30) if apart else 0.0


# --- linear_cross_entropy: values ---


@given(
    tokens=st.integers(0, 40),
    width=st.integers(1, 9),
    vocabulary=st.integers(1, 70),
    chunk=st.integers(0, 50),
    steps=st.sampled_from(sorted(STEPS)),
    biased=st.booleans(),
    reduction=st.sampled_from(["sum", "mean", "none"]),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_it_is_the_plain_head(
    tokens: int,
    width: int,
    vocabulary: int,
    chunk: int,
    steps: str,
    biased: bool,
    reduction: Any,
    trained: tuple[bool, bool, bool],
    ignored: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    hidden, weight, labels, bias = inputs(tokens, width, vocabulary, dtype, ignored)
    tensors = [hidden, weight, bias] if biased else [hidden, weight]
    ours = with_gradients(
        lambda h, w, *b: weighed(
            linear_cross_entropy(h, w, labels, *b, steps=STEPS[steps], chunk_tokens=chunk, reduction=reduction)
        ),
        tensors,
        trained[: len(tensors)],
    )
    expected = with_gradients(
        lambda h, w, *b: weighed(plain(h, w, labels, *b, steps=STEPS[steps], reduction=reduction)),
        tensors,
        trained[: len(tensors)],
    )
    nothing = reduction == "mean" and bool((labels == -100).all())  # where the plain mean is NaN
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for some, others in zip(ours, expected, strict=True):
        assert some.dtype == others.dtype
        if nothing:
            assert torch.equal(some, torch.zeros_like(some))
        else:
            # A gradient that cancels to next to nothing is compared with one of the size of the tokens' own.
            assert distance(some, others) <= bound or (some - others).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("steps", sorted(STEPS))
def test_16_bits_are_no_worse_than_the_plain_head(dtype: torch.dtype, chunk: int, steps: str) -> None:
    torch.manual_seed(1)
    hidden, weight, labels, bias = inputs(150, 64, 501, dtype)
    tensors = [hidden, weight, bias]
    ours = with_gradients(
        lambda h, w, b: linear_cross_entropy(h, w, labels, b, steps=STEPS[steps], chunk_tokens=chunk), tensors
    )
    same = with_gradients(lambda h, w, b: plain(h, w, labels, b, steps=STEPS[steps]), tensors)
    exact = with_gradients(
        lambda h, w, b: plain(h, w, labels, b, steps=STEPS[steps]), [tensor.float() for tensor in tensors]
    )
    stated = 0.02 if dtype == torch.bfloat16 else 0.0025
    for some, others, truth in zip(ours, same, exact, strict=True):
        assert some.dtype == others.dtype
        assert distance(some, truth) <= stated
        # Where there are several chunks, rounding their parts of the weight's gradient comes on top of two roundings
        # of about the same effect, that of the logits' gradient and that of the sum.
        several = some.shape == weight.shape and 0 < chunk < 150
        root = (some.float() - truth).square().mean().sqrt()
        bound = 1.4 if several else 1.1
        assert root <= bound * (others.float() - truth).square().mean().sqrt() + 1e-7 * truth.abs().max()


def test_the_loss_in_16_bits_rounds_as_the_models_own_steps_do() -> None:
    torch.manual_seed(2)
    hidden, weight, labels, _ = inputs(64, 32, 300, torch.bfloat16)
    for steps in STEPS.values():
        ours = linear_cross_entropy(hidden, weight, labels, steps=steps)
        assert distance(ours, plain(hidden, weight, labels, steps=steps)) < 1e-6


def test_softcap_and_scale_are_steps() -> None:
    hidden, weight, labels, _ = inputs(20, 4, 11, torch.float64)
    both = linear_cross_entropy(hidden, weight, labels, softcap=2.0, scale=3.0)
    written: list[LogitStep] = [("multiply", 3.0), ("divide", 2.0), "tanh", ("multiply", 2.0)]
    assert torch.equal(both, linear_cross_entropy(hidden, weight, labels, steps=written))
    assert distance(both, plain(hidden, weight, labels, steps=written)) < 1e-12


# --- linear_cross_entropy: errors ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.full((6,), 9)}, "a label is 9, expected 0 to 8"),
        ({"reduction": "median"}, "expected 'sum', 'mean' or 'none'"),
        ({"softcap": 0.0}, "expected a positive number"),
        ({"steps": ["tanhh"]}, "a step is 'tanhh'"),
        ({"steps": ["tanh"], "scale": 2.0}, "together with softcap or scale"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, labels, _ = inputs(6, 4, 9, torch.float32)
    arguments: dict[str, Any] = {"hidden": hidden, "weight": weight, "labels": labels} | change
    with pytest.raises(ValueError, match=rf"\[linear_cross_entropy\].*{message}"):
        linear_cross_entropy(**arguments)


# --- chunked_mlp ---


class Block(nn.Module):
    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(self.dropout(F.silu(self.gate(hidden)) * self.up(hidden)))
        return down


def block_gradients(
    block: Block, hidden: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    output = run(hidden)
    wanted = [tensor for tensor in (hidden, *block.parameters()) if tensor.requires_grad]
    weights = torch.arange(output.numel(), dtype=output.dtype).sin().view_as(output)
    return [output.detach(), *torch.autograd.grad(output, wanted, weights)]


@pytest.mark.parametrize("frozen", ["", "hidden", "weights", "gate"])
def test_a_chunked_module_is_the_module(frozen: str) -> None:
    torch.manual_seed(7)
    block = Block(5, 11).double()
    hidden = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=frozen != "hidden")
    if frozen == "weights":
        block.requires_grad_(False)
    if frozen == "gate":
        block.gate.requires_grad_(False)
    expected = block_gradients(block, hidden, block)
    ours = block_gradients(block, hidden, lambda h: chunked_mlp(block, h, 4))
    assert all(distance(some, others) < 1e-12 for some, others in zip(ours, expected, strict=True))


def test_native_blocks() -> None:
    torch.manual_seed(11)
    shapes = [(2, 7, 5), (8, 5), (8, 5), (5, 8), (8,), (8,), (5,)]
    x, gate, up, down, gate_bias, up_bias, down_bias = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    gated = gated_mlp(
        *(x, gate, up, down),
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
        activation="gelu_tanh",
        chunk_tokens=4,
    )
    inner = F.gelu(F.linear(x, gate, gate_bias), approximate="tanh") * F.linear(x, up, up_bias)
    assert distance(gated, F.linear(inner, down, down_bias)) < 1e-12
    two = two_layer_mlp(x, up, down, up_bias=up_bias, down_bias=down_bias, activation="relu")
    assert distance(two, F.linear(F.relu(F.linear(x, up, up_bias)), down, down_bias)) < 1e-12


class BodyError(Exception):
    pass


def test_errors_of_the_body_keep_their_type() -> None:
    hidden = torch.ones(6, 2, requires_grad=True)
    calls = 0

    def fails_at(call: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def body(tokens: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == call:
                raise BodyError(f"call {call}")
            return tokens * 2

        return body

    with pytest.raises(BodyError, match="call 2"):
        chunked_mlp(fails_at(2), hidden, 2, parameters=[])
    calls = 0
    output = chunked_mlp(fails_at(5), hidden, 2, parameters=[])
    with pytest.raises(BodyError, match="call 5"):
        output.sum().backward()


def test_bad_calls_of_chunked_mlp() -> None:
    hidden = torch.ones(6, 2, requires_grad=True)
    with pytest.raises(ValueError, match="pass parameters="):
        chunked_mlp(torch.relu, hidden, 2)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        chunked_mlp(torch.relu, hidden, 0, parameters=[])
    with pytest.raises(ValueError, match="map each token by itself"):
        chunked_mlp(torch.sum, hidden, 2, parameters=[])
    with pytest.raises(ValueError, match="did not return a tensor"):
        chunked_mlp(lambda tokens: 5, hidden, 2, parameters=[])  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="expected one of silu"):
        gated_mlp(hidden, *[torch.ones(2, 2)] * 3, activation="swish")  # type: ignore[arg-type, misc]
    output = chunked_mlp(torch.relu, hidden, 2, parameters=[])
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(output.sum(), hidden, create_graph=True)


def test_a_parameter_changed_before_the_backward_is_noticed() -> None:
    block = Block(4, 8)
    output = chunked_mlp(block, torch.randn(6, 4), 2)
    with torch.no_grad():
        block.down.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# --- memory ---


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_no_tensor_is_larger_than_a_chunk() -> None:
    hidden, weight, labels, _ = inputs(256, 8, 1000, torch.float32)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    for loss, largest in ((functools.partial(linear_cross_entropy, chunk_tokens=16), 16_000), (plain, 256_000)):
        with LargestTensor() as seen:
            loss(*leaves, labels).backward()
        assert seen.elements == largest
    block, rows = Block(8, 500), torch.randn(256, 8, requires_grad=True)
    for run, largest in ((lambda h: chunked_mlp(block, h, 16), 8_000), (block, 128_000)):
        with LargestTensor() as seen:
            run(rows).sum().backward()
        assert seen.elements == largest


class Products(TorchDispatchMode):
    """The rows of products with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.out:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("vocabulary", "device", "rows"),
    [
        (151_936, "meta", [1500, 1500, 1500, 1500]),  # as on a card: 1 GiB is 1,766 tokens
        (32_000, "meta", [3000, 3000]),  # 4,096 at most
        (16_384, "cpu", [1000, 1000, 1000]),  # 64 MiB is 1,024 tokens
        (151_936, "cpu", [100, 100, 100]),  # 128 at least
    ],
)
def test_chunks_are_large_on_cards(vocabulary: int, device: str, rows: list[int]) -> None:
    hidden, weight = torch.zeros(sum(rows), 4, device=device), torch.zeros(vocabulary, 4, device=device)
    labels = torch.zeros(sum(rows), dtype=torch.int64, device=device)
    with Products() as products:
        linear_cross_entropy(hidden, weight, labels)
    assert products.rows == rows


def test_a_given_size_of_chunks_holds_on_any_device() -> None:
    hidden, weight = torch.zeros(3000, 4, device="meta"), torch.zeros(32_000, 4, device="meta")
    labels = torch.zeros(3000, dtype=torch.int64, device="meta")
    with Products() as products:
        linear_cross_entropy(hidden, weight, labels, chunk_logit_bytes=64 << 20)
    assert products.rows == [500] * 6
    with pytest.raises(ValueError, match="chunk_logit_bytes is -1"):
        linear_cross_entropy(hidden, weight, labels, chunk_logit_bytes=-1)
