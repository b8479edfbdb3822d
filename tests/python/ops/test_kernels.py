"""The fused operators against the same formulas in fp64, for any shapes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from roundpipe import _core  # makes the operators known

ops: Any = torch.ops.roundpipe
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Half a unit in the last place, beside what fp32 inside loses.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0.0}
INSIDE = 3e-6

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)
widths = st.sampled_from([1, 2, 7, 8, 9, 31, 64, 100, 257, 2048, 2056, 4100])


def numbers(generator: torch.Generator, dtype: torch.dtype, *shape: int, strided: bool = False) -> torch.Tensor:
    """Random numbers; `strided`: every second one of a larger tensor's last dimension."""
    if strided:
        return torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype)[..., ::2]
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(found: torch.Tensor, exact: torch.Tensor, terms: int = 1, scale: torch.Tensor | None = None) -> None:
    """`terms`: of sums, whose errors in fp32 are those of `scale`, or else of the largest result."""
    assert found.shape == exact.shape
    largest = exact.abs().max() if scale is None else scale
    bound = ROUNDING[found.dtype] * 1.01 * exact.abs() + INSIDE * max(1, terms) ** 0.5 * largest
    bound = bound + {torch.float16: 2**-25, torch.bfloat16: 0.0, torch.float32: 0.0}[found.dtype]
    assert ((found.double() - exact).abs() <= bound).all()


def gradients(function: Callable[..., Any], inputs: list[torch.Tensor], seed: int) -> tuple[list[Any], list[Any]]:
    """Results, and gradients for random gradients of the results."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    results = function(*leaves)
    results = list(results) if isinstance(results, tuple | list) else [results]
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(r.shape, generator=generator).to(leaves[0].dtype).to(r.dtype) for r in results]
    return [r.detach() for r in results], list(torch.autograd.grad(results, leaves, given))


def compare(
    fused: Callable[..., Any],
    formula: Callable[..., Any],
    inputs: list[torch.Tensor],
    seed: int = 0,
    scale: float | None = None,
) -> None:
    """`scale`: of the gradients' terms, which may cancel each other; None: that of the gradients."""
    found, found_gradients = gradients(fused, inputs, seed)
    leaves = [tensor.double() for tensor in inputs]
    # The random gradients are those of the fused dtype.
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(r.shape, generator=generator).to(inputs[0].dtype).double() for r in found]
    exact_leaves = [leaf.requires_grad_() for leaf in leaves]
    exact = formula(*exact_leaves)
    exact = list(exact) if isinstance(exact, tuple | list) else [exact]
    exact_gradients = torch.autograd.grad(exact, exact_leaves, given)
    for one, other in zip(found, exact, strict=True):
        assert_close(one, other.detach(), one.shape[-1])
    of_terms = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    for one, other in zip(found_gradients, exact_gradients, strict=True):
        assert_close(one, other, inputs[0].numel(), of_terms)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def of_norm(x: torch.Tensor, weight: torch.Tensor) -> float:
    """The size of the terms of a norm's gradients."""
    smallest = x.double().square().mean(-1).min().sqrt() + 1e-3
    return float(5 * (weight.double().abs().max() + x.double().abs().max()) / smallest)


@given(dtypes, widths, st.integers(1, 5), st.booleans(), st.booleans(), seeds)
def test_norms(dtype: torch.dtype, width: int, rows: int, strided: bool, wide: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = numbers(generator, dtype, rows, width, strided=strided)
    weight = numbers(generator, torch.float32 if wide else dtype, width, strided=strided)
    compare(lambda x, w: ops.rms_norm(x, w, 1e-6), norm, [x, weight], seed, of_norm(x, weight))


@given(dtypes, widths, st.integers(1, 5), st.booleans(), seeds)
def test_norms_after_a_sum(dtype: torch.dtype, width: int, rows: int, strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (numbers(generator, dtype, 2, rows, width, strided=strided) for _ in range(2))
    weight = numbers(generator, dtype, width)

    def formula(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        total = total + (total.detach().to(dtype).double() - total).detach()  # the norm reads the rounded sum
        return total, norm(total, w)

    scale = of_norm((x + residual), weight)
    compare(lambda x, y, w: ops.add_rms_norm(x, y, w, 1e-6), formula, [x, residual, weight], seed, scale)


def test_many_rows_of_a_norm_are_summed_in_parts() -> None:
    generator = torch.Generator().manual_seed(1)
    x = numbers(generator, torch.bfloat16, 2500, 24)
    compare(lambda x, w: ops.rms_norm(x, w, 1e-6), norm, [x, numbers(generator, torch.bfloat16, 24)])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = (torch.cat([table, table], -1) for table in (cos, sin))
    other = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos.unsqueeze(2) + other * sin.unsqueeze(2)


@given(
    dtypes,
    st.sampled_from([2, 6, 16, 18, 64, 128]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_rotary(
    dtype: torch.dtype, width: int, heads: int, halves: bool, shared: bool, strided: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = 2, 3
    x = numbers(generator, dtype, rows, tokens, heads, width, strided=strided)
    table = 1 if shared else rows, tokens, width // 2 if halves else width
    cos, sin = (numbers(generator, dtype, *table, strided=strided) for _ in range(2))
    compare(lambda x: ops.rotary(x, cos, sin), lambda x: turned(x, cos.double(), sin.double()), [x], seed)


@given(dtypes, st.lists(st.integers(1, 70), min_size=1, max_size=3), st.booleans(), seeds)
def test_silu_gate(dtype: torch.dtype, shape: list[int], strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate, up = (numbers(generator, dtype, *shape, strided=strided) * 3 for _ in range(2))
    compare(ops.silu_gate, lambda gate, up: F.silu(gate) * up, [gate, up], seed)


@given(dtypes, st.integers(1, 3), st.sampled_from([1, 5, 8, 24, 100, 2048, 3001]), st.booleans(), seeds)
def test_silu_gate_of_halves(dtype: torch.dtype, rows: int, width: int, strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = numbers(generator, dtype, 2, rows, 2 * width, strided=strided) * 3
    compare(ops.silu_gate, lambda x: F.silu(x[..., :width]) * x[..., width:], [x], seed)
    gate, up = x.chunk(2, -1)
    assert torch.equal(ops.silu_gate(x), ops.silu_gate(gate, up))


def clamped(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@given(dtypes, st.integers(1, 3), st.integers(1, 1500), st.booleans(), seeds)
def test_clamped_gate(dtype: torch.dtype, rows: int, width: int, strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = numbers(generator, dtype, rows, 2 * width, strided=strided) * 4
    compare(lambda x: ops.clamped_gate(x, 1.702, 7.0), lambda x: clamped(x, 1.702, 7.0), [x], seed)


@given(dtypes, st.sampled_from([2, 7, 8, 300, 2048, 5001]), st.integers(1, 6), seeds)
def test_cross_entropy(dtype: torch.dtype, vocabulary: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = numbers(generator, dtype, tokens, vocabulary) * 5
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, ignore_index=-100, reduction="none")
    losses.sum().backward()
    before = logits.clone()
    only = ops.cross_entropy_(before, labels, -100, False)
    assert torch.equal(before, logits)
    found = ops.cross_entropy_(before, labels, -100, True)
    assert torch.equal(only, found)
    assert_close(found, losses.detach(), scale=logits.double().abs().max())
    assert exact.grad is not None
    assert_close(before, exact.grad, vocabulary, scale=torch.tensor(1.0))


def test_ignored_rows_without_a_number() -> None:
    logits = torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0], [1.0, 0.0]])
    exact = logits.double().requires_grad_()
    labels = torch.full((3,), -100)
    F.cross_entropy(exact, labels, reduction="sum").backward()
    assert exact.grad is not None
    assert torch.equal(ops.cross_entropy_(logits, labels, -100, True), torch.zeros(3))
    assert torch.equal(torch.isnan(logits), torch.isnan(exact.grad)) and logits[2].eq(0).all()


def test_logits_without_a_number() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf, 0.0, 1.0], [-inf, -inf, -inf], [inf, 0.0, 1.0], [nan, 0.0, 1.0], [0.0, nan, -inf], [0.0, 1.0, 2.0]]
    logits = torch.tensor(rows)
    labels = torch.tensor([1, 0, 1, 1, 0, 3])
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact[:5], labels[:5], reduction="none")
    losses.sum().backward()
    assert exact.grad is not None
    found = ops.cross_entropy_(logits, labels, -100, True)
    assert torch.allclose(found[:5].double(), losses.detach(), equal_nan=True)
    assert torch.isnan(found[5])  # a label out of range
    assert torch.equal(torch.isnan(logits[:5]), torch.isnan(exact.grad[:5]))
    assert torch.allclose(logits[0].double(), exact.grad[0])


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 1e30, 3e-39])
def test_numbers_at_the_ends_go_where_torchs_go(special: float) -> None:
    x = torch.ones(3, 16)
    x[1, 5] = special
    up = torch.full_like(x, 2.0)
    for fused, plain in (
        (lambda x: ops.rms_norm(x, up[0], 1e-6), lambda x: F.rms_norm(x, (16,), up[0], 1e-6)),
        (lambda x: ops.silu_gate(x, up), lambda x: F.silu(x) * up),
        (lambda x: ops.silu_gate(up, x), lambda x: F.silu(up) * x),
        (lambda x: ops.clamped_gate(x, 1.0, 7.0), lambda x: clamped(x, 1.0, 7.0)),
    ):
        both = [[*values, *given] for values, given in (gradients(function, [x], 0) for function in (fused, plain))]
        for found, expected in zip(*both, strict=True):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_sums_of_16_bits_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for shape in ((5,), (3, 1000), (2049,), (0,)):
            sums, addends = numbers(generator, torch.float32, *shape), numbers(generator, dtype, *shape)
            expected = sums + addends.float()
            ops.add_wide_(sums, addends)
            assert torch.equal(sums, expected)


def test_empty_tensors_have_empty_results() -> None:
    for shape in ((0, 8), (2, 0)):
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(shape[-1], dtype=torch.bfloat16, requires_grad=True)
        ops.rms_norm(x, weight, 1e-6).sum().backward()
        assert weight.grad is not None and weight.grad.eq(0).all()
        ops.silu_gate(x, x).sum().backward()
        ops.silu_gate(x).sum().backward()
    assert ops.rotary(torch.empty(0, 3, 2, 4), torch.empty(1, 3, 4), torch.empty(1, 3, 4)).shape == (0, 3, 2, 4)
    assert ops.cross_entropy_(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), -100, True).shape == (0,)


def test_bits_do_not_depend_on_threads_or_on_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = numbers(generator, torch.bfloat16, 64, 2048), numbers(generator, torch.bfloat16, 2048)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            values, given = gradients(lambda x, w: ops.rms_norm(x, w, 1e-6), [x, weight], 0)
            results.append([*values, *given])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))
    assert torch.equal(ops.rms_norm(x[5:6], weight, 1e-6), results[0][0][5:6])


def test_frozen_weights_get_no_gradient_and_unused_results_none() -> None:
    x, weight = torch.randn(2, 8, requires_grad=True), torch.ones(8)
    total, normed = ops.add_rms_norm(x, x, weight, 1e-6)
    total.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert not weight.requires_grad and normed.requires_grad


def test_the_dispatcher_knows_them() -> None:
    """Shapes without values, and what compilers ask of operators."""
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    cos, sin = torch.randn(2, 1, 3, 4)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (ops._rms_norm.default, (x.detach(), None, weight.detach(), 1e-6)),
        (ops._rms_norm.default, (x.detach(), x.detach(), weight.detach(), 1e-6)),
        (ops._rms_norm_backward.default, (x.detach(), None, x.detach(), weight.detach(), torch.ones(6), True)),
        (ops._rotary.default, (torch.randn(2, 3, 5, 8), cos, sin, True)),
        (ops._gate.default, (x.detach(), x.detach(), None, 0.0)),
        (ops._gate.default, (x.detach(), None, None, 0.0)),
        (ops._gate_backward.default, (x.detach(), x.detach(), x.detach(), None, 0.0)),
        (ops.cross_entropy_.default, (torch.randn(3, 5), torch.tensor([0, 4, -100]), -100, True)),
        (ops.add_wide_.default, (torch.zeros(5), torch.ones(5, dtype=torch.bfloat16))),
    ]
    for op, arguments in cases:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    on_meta = ops.add_rms_norm(x.to("meta"), x.to("meta"), weight.to("meta"), 1e-6)
    assert [each.shape for each in on_meta] == [x.shape, x.shape]


def test_writes_in_place_are_noticed() -> None:
    logits = torch.randn(2, 5, requires_grad=True) * 2
    kept = logits.exp()
    with torch.no_grad():
        ops.cross_entropy_(kept, torch.tensor([1, 2]), -100, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    sums = torch.zeros(3)
    ops.add_wide_(sums, torch.ones(3))
    assert sums._version == 1


def test_what_has_no_gradient_refuses_tensors_that_require_one() -> None:
    logits, labels = torch.randn(2, 5, requires_grad=True), torch.tensor([1, 2])
    for needing in (logits, logits * 2):
        with pytest.raises(ValueError, match=r"\[cross_entropy_\] the operator has no gradient"):
            ops.cross_entropy_(needing, labels, -100, True)
    for sums, addends in ((logits, torch.ones(2, 5)), (torch.ones(2, 5), logits)):
        with pytest.raises(ValueError, match=r"\[add_wide_\] the operator has no gradient"):
            ops.add_wide_(sums, addends)
    before = logits.detach().clone()
    with torch.no_grad():
        ops.cross_entropy_(logits, labels, -100, True)
    assert not torch.equal(logits, before)


def test_second_derivatives_are_refused() -> None:
    x, table = torch.randn(1, 2, 1, 8, requires_grad=True), torch.ones(1, 2, 8)
    for function in (
        lambda x: ops.rms_norm(x, torch.ones(8), 1e-6),
        lambda x: ops.silu_gate(x, x),
        lambda x: ops.clamped_gate(x, 1.0, 7.0),
        lambda x: ops.rotary(x, table, table),
    ):
        with pytest.raises(RuntimeError, match="leave create_graph out"):
            torch.autograd.grad(function(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(torch.ones(2, 8, dtype=torch.float64), torch.ones(8), 1e-6), "the dtype is Double"),
        (lambda: ops.rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6), r"expected \[..., width\] and \[width\]"),
        (
            lambda: ops.rms_norm(torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16), 1e-6),
            "expected the same or fp32",
        ),
        (lambda: ops.rms_norm(torch.ones(1, 8193), torch.ones(8193), 1e-6), "expected at most 8192"),
        (lambda: ops.add_rms_norm(torch.ones(2, 8), torch.ones(8), torch.ones(8), 1e-6), "one dtype and shape"),
        (lambda: ops.rotary(torch.ones(2, 3, 8), torch.ones(1, 3, 8), torch.ones(1, 3, 8)), "an even width"),
        (lambda: ops.rotary(torch.ones(2, 3, 1, 8), torch.ones(1, 4, 8), torch.ones(1, 4, 8)), "the tables are"),
        (lambda: ops.silu_gate(torch.ones(2, 8), torch.ones(2, 4)), "one dtype and shape"),
        (lambda: ops.clamped_gate(torch.ones(2, 7), 1.0, 7.0), "an even last dimension"),
        (lambda: ops.silu_gate(torch.ones(2, 7)), "an even last dimension"),
        (lambda: ops.cross_entropy_(torch.ones(2, 7), torch.ones(3, dtype=torch.int64), 0, True), "int64 .tokens."),
        (lambda: ops.add_wide_(torch.ones(2, 7), torch.ones(7)), "of one shape"),
        (lambda: ops.cross_entropy_(torch.ones(2, 0), torch.zeros(2, dtype=torch.int64), 0, True), "of one at least"),
        (lambda: ops._gate_backward(torch.ones(2), torch.ones(4), torch.ones(4), None, 0.0), "that of the result"),
        (
            lambda: ops._rms_norm_backward(
                torch.ones(2, 8), None, torch.ones(2, 8), torch.ones(8), torch.ones(3), True
            ),
            r"expected fp32 \[2\]",
        ),
    ],
)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_every_instruction_set_has_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    before = _core.instruction_set()
    found = []
    try:
        for name in _core.instruction_sets():
            _core.set_instruction_set(name)
            generator.manual_seed(3)
            results: list[torch.Tensor] = []
            for dtype in DTYPES:
                x, y, weight = (numbers(generator, dtype, *shape) for shape in ((7, 300), (7, 300), (300,)))
                table = numbers(generator, dtype, 1, 7, 50)
                for function, inputs in (
                    (lambda x, y, w: ops.add_rms_norm(x, y, w, 1e-6), [x, y, weight]),
                    (ops.silu_gate, [x, y]),
                    (ops.silu_gate, [x]),
                    (lambda x: ops.clamped_gate(x, 1.7, 1.0), [x]),
                    (lambda x, table=table: ops.rotary(x.view(1, 7, 6, 50), table, table), [x]),
                ):
                    for some in gradients(function, inputs, 1):
                        results.extend(some)
                logits = 9 * x
                results.append(ops.cross_entropy_(logits, torch.arange(7), 2, True))
                results.append(logits)
                results.append(ops.add_wide_(torch.ones(7, 300), y))
            found.append(results)
    finally:
        _core.set_instruction_set(before)
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))
