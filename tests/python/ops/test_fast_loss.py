"""The loss of a head in fast arithmetic: as near to fp64 as the exact one, for any shapes, chunks and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import roundpipe
from roundpipe.ops.functional import linear_cross_entropy

STEPS: list[tuple[Any, ...]] = [
    (),
    ("float32",),
    (("divide", 4.0), "tanh", ("multiply", 4.0), "float32"),
    ("float32", ("multiply", 0.5)),
]


def results(
    arithmetic: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: Any, **options: Any
) -> list[torch.Tensor]:
    leaves = [each.detach().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    loss = linear_cross_entropy(
        leaves[0], leaves[1], labels, leaves[2] if bias is not None else None, arithmetic=arithmetic, **options
    )
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([(1, 1, 2), (3, 5, 7), (40, 16, 64), (9, 24, 513), (33, 8, 2048)]),
    st.sampled_from([0, 1, 4, 1000]),
    st.sampled_from(STEPS),
    st.booleans(),
    st.sampled_from(["sum", "mean"]),
    st.integers(0, 2**31),
)
def test_as_near_to_fp64_as_the_exact_form(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    chunk: int,
    steps: tuple[Any, ...],
    has_bias: bool,
    reduction: str,
    seed: int,
) -> None:
    tokens, width, vocabulary = shape
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(size, generator=generator).to(dtype) for size in ((tokens, width), (vocabulary, width), vocabulary)
    )
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    inputs = hidden, weight, labels, bias if has_bias else None
    options: dict[str, Any] = {"chunk_tokens": chunk, "steps": steps, "reduction": reduction}
    fast, exact = (results(form, *inputs, **options) for form in ("fast", "exact"))
    true = results(
        "exact", *(None if x is None else x.double() if x.is_floating_point() else x for x in inputs), **options
    )
    rounding = torch.finfo(dtype).eps
    for mine, other, expected in zip(fast, exact, true, strict=True):
        assert mine.dtype == other.dtype
        distance, allowed = (torch.linalg.vector_norm(each.double() - expected) for each in (mine, other))
        assert distance <= 1.5 * allowed + 2 * rounding * torch.linalg.vector_norm(expected) + 1e-6


def test_hidden_states_of_ignored_tokens_count_as_in_torch() -> None:
    """Theirs are no numbers: the exact form leaves them out, torch and the fast form do not."""
    hidden, weight = torch.randn(3, 4), torch.randn(6, 4)
    hidden[1] = float("nan")
    labels = torch.tensor([1, -100, 2])
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    F.cross_entropy(F.linear(*leaves), labels, reduction="sum").backward()
    loss, *found = results("fast", hidden, weight, labels, None)
    assert loss.isfinite()
    for mine, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None and torch.equal(mine.isnan(), leaf.grad.isnan())


def test_no_gradients_and_fp64() -> None:
    hidden, weight, labels = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([1, -100, 2])
    with torch.no_grad():
        fast, exact = (linear_cross_entropy(hidden, weight, labels, arithmetic=form) for form in ("fast", "exact"))
    assert torch.allclose(fast, exact)
    wide = (hidden.double(), weight.double(), labels, None)
    assert all(map(torch.equal, results("fast", *wide), results("exact", *wide)))


def test_the_memory_of_a_chunk_is_its_logits_once() -> None:
    """In bf16 the exact form holds logits in fp32 as well."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Allocated(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function._schema.name == "aten::empty":
                self.most = max(self.most, result.nbytes)
            return result

    tokens, width, vocabulary, chunk = 64, 8, 1000, 16
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
    taken = []
    for form in ("fast", "exact"):
        with Allocated() as allocated:
            linear_cross_entropy(
                hidden, weight, torch.zeros(tokens, dtype=torch.int64), chunk_tokens=chunk, arithmetic=form
            )
        taken.append(allocated.most)
    assert taken == [2 * chunk * vocabulary, 4 * chunk * vocabulary]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="the arithmetic is 'half', expected exact or fast"):
        linear_cross_entropy(torch.ones(1, 2), torch.ones(3, 2), torch.tensor([0]), arithmetic="half")  # type: ignore[arg-type]


class PenalisedHead(nn.Module):
    """A loss that grows with its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(31, 16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(hidden.shape[0]) % 31
        with torch.enable_grad():
            once = linear_cross_entropy(hidden.detach(), self.weight, labels, arithmetic="fast")
            (slope,) = torch.autograd.grad(once, self.weight)
        return linear_cross_entropy(hidden, self.weight, labels, arithmetic="fast") * (1 + slope.float().norm())


def test_a_layer_may_take_the_gradient_of_its_own_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), PenalisedHead()).bfloat16()
    rows = torch.randn(8, 8).bfloat16()
    model(rows).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    roundpipe.devices("virtual:1")
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    pipe = roundpipe.RoundPipe(model, model_run_config=config)
    pipe.forward_backward((rows,), loss_fn=lambda loss, _: loss)
    pipe.synchronize()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
