"""RoundPipe's optimizers do what torch's of the same name do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from roundpipe import _core, optim
from sweeps import sweep

CLASSES = [name for name in optim.__all__ if name != "set_threads"]
NAMES = [name for name in CLASSES if name not in ("Lion", "Muon")]  # Muon: test_muon.py
Flags = dict[str, Any]

CASES: list[tuple[str, Flags]] = [
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    ("Adam", {"betas": (0.3, 0.4), "eps": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("Adam", {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.8), torch.tensor(0.9))}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1, "maximize": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "lr": torch.tensor([0.1])}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "maximize": True}),
    ("Adadelta", {}),
    ("Adadelta", {"lr": 0.5, "rho": 0.7, "weight_decay": 0.1, "maximize": True}),
    ("Adamax", {}),
    ("Adamax", {"weight_decay": 0.1, "maximize": True}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.1, "maximize": True, "momentum_decay": 0.01}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RAdam", {"weight_decay": 0.1, "maximize": True}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RMSprop", {}),
    ("RMSprop", {"weight_decay": 0.1, "maximize": True, "momentum": 0.9}),
    ("RMSprop", {"centered": True, "alpha": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Rprop", {}),
    ("Rprop", {"etas": (0.3, 1.5), "step_sizes": (1e-3, 0.02), "maximize": True}),
    ("ASGD", {}),
    ("ASGD", {"lambd": 0.01, "t0": 3, "alpha": 0.5, "weight_decay": 0.1, "maximize": True}),
    ("Adafactor", {}),
    ("Adafactor", {"eps": (1e-4, 1e-2), "d": 2.0, "beta2_decay": -0.5, "weight_decay": 0.1, "maximize": True}),
]
CASE_IDS = [f"{name}-{'-'.join(flags)}" for name, flags in CASES]


def make(name: str, params: Any, flags: Flags, ours: bool = True) -> torch.optim.Optimizer:
    return getattr(optim if ours else torch.optim, name)(params, **flags)


def some_parameters(complex_too: bool) -> list[torch.nn.Parameter]:
    values = [
        torch.randn(37),
        torch.randn(6, 11).t(),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(2, 5, 4, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(300, 301),
    ]
    if complex_too:
        values += [torch.randn(5, 7, dtype=torch.complex64), torch.randn(4, 6, dtype=torch.complex64).t()]
    return [torch.nn.Parameter(value) for value in values]


def twins(name: str, flags: Flags) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    params = some_parameters(complex_too=name != "Adafactor")
    if flags.get("fused"):  # torch's wants real parameters in the order of their gradients
        params = [p for p in params if p.is_contiguous() and not p.is_complex()]
    if name == "Adafactor":
        params = [p for p in params if p.numel() > 0]  # torch's divides by the number of elements
    return params, copy.deepcopy(params)


def set_gradients(*lists: list[torch.nn.Parameter]) -> None:
    for params in zip(*lists, strict=True):
        gradient = torch.randn_like(params[0], memory_format=torch.contiguous_format) * 3
        for parameter in params:
            parameter.grad = gradient.clone()


def check_close(ours: Any, theirs: Any) -> None:
    """But for last bits: of each value, and of the largest one, as steps of its size may add up to a small value."""
    for a, b in zip(ours, theirs, strict=True):
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=3e-6, atol=max(1e-6, 2 * torch.finfo(torch.float32).eps * largest))


def check_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for key, state in other["state"].items():
        assert set(mine["state"][key]) == set(state)
        for name, tensor in state.items():
            assert mine["state"][key][name].dtype == tensor.dtype
            torch.testing.assert_close(mine["state"][key][name], tensor, rtol=1e-5, atol=1e-5)


@pytest.fixture
def used_instruction_set(instruction_set: str) -> Iterator[None]:
    before = _core.instruction_set()
    _core.set_instruction_set(instruction_set)
    yield
    _core.set_instruction_set(before)


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_torchs(name: str) -> None:
    ours = inspect.signature(getattr(optim, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    added = {"groups", "decay_norms_and_biases", "moments", "masters", "gradients", "disk", "disk_memory", "disk_holds"}
    assert [p for p in ours.values() if p.name not in added] == list(theirs.values())
    assert all(ours[extra].kind is inspect.Parameter.KEYWORD_ONLY for extra in added)
    assert issubclass(getattr(optim, name), getattr(torch.optim, name))


@sweep("case, instruction_set", CASE_IDS, _core.instruction_sets(), together=1)
@pytest.mark.usefixtures("used_instruction_set")
def test_like_torch(case: str) -> None:
    name, flags = CASES[CASE_IDS.index(case)]
    torch.manual_seed(1)
    mine, other = twins(name, flags)
    ours, theirs = make(name, mine, flags), make(name, other, flags, ours=False)
    for step in range(25):
        set_gradients(mine, other)
        if step % 5 == 2:
            mine[0].grad = other[0].grad = None
        ours.step()
        theirs.step()
    check_close(mine, other)
    check_same_state(ours, theirs)


# torch takes roots with a math library whose last bit depends on the processor; ours are correctly rounded.
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("AdamW", {"weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("Adadelta", {"weight_decay": 0.1}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Adamax", {}),
        ("NAdam", {"weight_decay": 0.1}),
        ("RAdam", {"weight_decay": 0.1}),
        ("Rprop", {}),
        ("ASGD", {"t0": 5, "weight_decay": 0.1}),
    ],
)
def test_the_bits_of_torch_but_for_roots(name: str, flags: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch fuses multiplication and addition only with these")
    root = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda self: root(self.double()).to(self.dtype))
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda self: self.copy_(root(self.double())))
    torch.manual_seed(2)
    for size in (1, 13, 1037):
        mine, other = torch.nn.Parameter(torch.randn(size)), torch.nn.Parameter(torch.empty(size))
        other.data.copy_(mine)
        ours, theirs = make(name, [mine], flags), make(name, [other], flags | {"foreach": False}, ours=False)
        for _ in range(300):
            mine.grad = torch.randn(size) * torch.randn(size).exp()
            other.grad = mine.grad.clone()
            ours.step()
            theirs.step()
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32))


@sweep("case, to_ours", CASE_IDS[::2], [True, False], together=1)
def test_state_dicts_go_both_ways(case: str, to_ours: bool) -> None:
    name, flags = CASES[CASE_IDS.index(case)]
    torch.manual_seed(3)
    first, second = twins(name, flags)
    before, whole = make(name, first, flags, ours=not to_ours), make(name, second, flags, ours=False)
    for _ in range(4):
        set_gradients(first, second)
        before.step()
        whole.step()
    after = make(name, first, flags, ours=to_ours)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for _ in range(4):
        set_gradients(first, second)
        after.step()
        whole.step()
    check_close(first, second)
    check_same_state(after, whole)


def lion_step(weight: torch.Tensor, average: torch.Tensor, gradient: torch.Tensor, flags: Flags) -> None:
    beta1, beta2 = flags.get("betas", (0.9, 0.99))
    lr = flags.get("lr", 1e-4)
    if flags.get("maximize"):
        gradient = -gradient
    weight.mul_(1 - lr * flags.get("weight_decay", 0.0))
    weight.sub_(lr * (beta1 * average + (1 - beta1) * gradient).sign())
    average.mul_(beta2).add_((1 - beta2) * gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("flags", [{}, {"lr": 0.01, "weight_decay": 0.3, "betas": (0.5, 0.6), "maximize": True}])
def test_lion(flags: Flags, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    mine = torch.nn.Parameter(torch.randn(33, dtype=dtype))
    weight, average = mine.detach().clone(), torch.zeros(33, dtype=dtype)
    ours = optim.Lion([mine], **flags)
    for _ in range(25):
        mine.grad = torch.randn(33, dtype=dtype)
        lion_step(weight, average, mine.grad, flags)
        ours.step()
    torch.testing.assert_close(mine.detach(), weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.state[mine]["exp_avg"], average, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("flags", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}])
def test_lion_refuses_nonsense(flags: Flags) -> None:
    with pytest.raises(ValueError, match=r"\[Lion\]"):
        optim.Lion([torch.nn.Parameter(torch.zeros(2))], **flags)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_kernels_do_not_do_goes_to_torch(name: str) -> None:
    torch.manual_seed(6)
    values = [torch.randn(5), torch.randn(4, 3).double(), torch.randn(7).bfloat16(), torch.randn(6, 8)[:, ::2]]
    mine = [torch.nn.Parameter(v.clone() if v.is_contiguous() else v) for v in values]
    other = [torch.nn.Parameter(v.clone()) for v in values]
    mine[3].data = values[3].clone().repeat_interleave(2, 1)[:, ::2]
    ours, theirs = make(name, mine, {}), make(name, other, {"foreach": False}, ours=False)
    for _ in range(5):
        set_gradients(mine, other)
        gradients = [p.grad for p in mine]
        ours.step()
        theirs.step()
        assert all(p.grad is gradient for p, gradient in zip(mine, gradients, strict=True))
    check_close(mine, other)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Adafactor"])
def test_differentiable_goes_to_torch(name: str) -> None:
    results = []
    for module in (optim, torch.optim):
        leaf = torch.ones(3, requires_grad=True)
        p = leaf * 2
        p.retain_grad()
        p.grad = torch.tensor([1.0, -2.0, 3.0])
        getattr(module, name)([p], differentiable=True).step()
        p.sum().backward()
        results += [p.detach(), leaf.grad]
    check_close(results[:2], results[2:])


@pytest.mark.parametrize("name", CLASSES)
def test_sparse_gradients_as_torch(name: str) -> None:
    def run(cls: type[torch.optim.Optimizer]) -> Any:
        dense, p = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(4, 2))
        dense.grad = torch.ones(3, 3)
        p.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (4, 2))
        optimizer = cls([dense, p])
        try:
            optimizer.step()
        except RuntimeError as error:
            assert torch.equal(dense, torch.ones(3, 3))
            return str(error)
        return [dense.detach(), p.detach()]

    mine = run(getattr(optim, name))
    if name == "Lion":
        assert "sparse" in mine
        return
    other = run(getattr(torch.optim, name))
    if isinstance(other, str):
        assert mine == other
    else:
        check_close(mine, other)


def test_closure_and_hooks() -> None:
    p = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = optim.SGD([p], lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        seen.append("closure")
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert seen == ["before", "closure", "after"]
    assert p.item() == pytest.approx(1.6)


def test_hooks_run_once_when_torch_takes_part() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # torch's class has its hooks from now on
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).double())]
    set_gradients(params)
    optimizer = optim.SGD(params)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]
    assert all((p != 1).all() for p in params)


def test_autograd_sees_that_weights_changed() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p**2).sum()
    p.grad = torch.ones(3)
    optim.SGD([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("layout", ["expanded", "strided", "transposed", "conjugate"])
def test_gradients_in_any_layout(layout: str) -> None:
    torch.manual_seed(9)
    gradient: torch.Tensor = {
        "expanded": lambda: torch.randn(4, 1).expand(4, 6),
        "strided": lambda: torch.randn(8, 12)[::2, ::2],
        "transposed": lambda: torch.randn(6, 4).t(),
        "conjugate": lambda: torch.randn(4, 6, dtype=torch.complex64).conj(),
    }[layout]()
    results = []
    for module in (optim, torch.optim):
        p = torch.nn.Parameter(torch.ones(4, 6, dtype=gradient.dtype))
        p.grad = gradient if module is optim else gradient.resolve_conj()
        module.AdamW([p], lr=0.1).step()
        results.append(p.detach())
    check_close(results[:1], results[1:])


def test_a_scaler_works_with_ours() -> None:
    for flags in ({}, {"fused": True}):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = optim.AdamW([p], lr=0.1, **flags)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale((p * torch.tensor([1.0, 2.0, 3.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.allclose(p, torch.full((3,), 0.899), atol=1e-4)
        optimizer.zero_grad()
        scaler.scale((p * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.allclose(p, torch.full((3,), 0.899), atol=1e-4)


def test_constructors_refuse_what_torchs_refuse() -> None:
    build: Callable[..., Any] = optim.Adam
    with pytest.raises(ValueError, match="Invalid learning rate"):
        build([torch.nn.Parameter(torch.ones(1))], lr=-1.0)
    with pytest.raises(ValueError, match="empty parameter list"):
        build([])
