"""Equality as a table: every kind of model, under every kind of plan and option, has the bits of a plain loop.

The rows are `CASES`, the columns `SETTINGS`; `make test` takes a few columns of each row, in turn, and `make test-all`
every one. What neither lists is in the plans, devices and options that `test_any_plan` draws for the same rows.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference_loops import BASE_SEED, Pair, fused_loop, plan_of, shared_plan, use_devices
from roundpipe import RoundPipeRunConfig


@dataclass
class Case:
    build: Callable[[], nn.Sequential]
    args: Callable[[], tuple[Any, ...]]
    loss: Callable[[Any, Any], Tensor]
    label: Callable[[], Any] = lambda: None
    kwargs: Callable[[], dict[str, Any]] = dict
    mergeable: bool = True  # the loss draws no random numbers


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def rows(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape, generator=torch.Generator().manual_seed(5)),)


def tokens(*shape: int, high: int = 11) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(high, shape, generator=torch.Generator().manual_seed(6)),)


def label(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def mean_square(output: Any, _: Any) -> Tensor:
    return output.square().mean()


def noisy_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(F.dropout(output, 0.3), target)


# --- models ---


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)
    )


def with_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 9), nn.Dropout(0.4), nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.2), nn.ReLU()), nn.Linear(9, 3)
    )


def conv(norm: Callable[[int], nn.Module], momentum: float | None = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        norm(4),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), norm(6), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def tied() -> nn.Sequential:
    embedding = nn.Embedding(11, 6)
    return nn.Sequential(embedding, nn.Linear(6, 6), nn.Tanh(), Tied(embedding.weight))


class TiedWithOwn(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.weight = weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.own(x) * self.scale, self.weight)


def tied_three_times() -> nn.Sequential:
    embedding = nn.Embedding(11, 6)
    return nn.Sequential(
        embedding,
        nn.Linear(6, 6),
        Lambda(lambda x: x * 2),
        TiedWithOwn(embedding.weight),
        nn.Linear(11, 6),
        Tied(embedding.weight),
    )


def same_module_twice() -> nn.Sequential:
    shared = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    return nn.Sequential(nn.Linear(5, 5), shared, nn.ReLU(), shared, shared, nn.Linear(5, 3))


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(3, 6)

    def forward(self, x: Tensor, y: Tensor, *, mask: Tensor, scale: float, extra: dict[str, Any]) -> dict[str, Any]:
        return {
            "pair": (self.a(x) * scale, self.b(y)),
            "mask": mask,
            "kept": [extra["z"], extra["word"]],
            "nothing": None,
        }


class ManyBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6)

    def forward(self, value: dict[str, Any]) -> tuple[Any, ...]:
        first, second = value["pair"]
        assert value["kept"][1] == "word" and value["nothing"] is None
        hidden = self.c(first).masked_fill(value["mask"].unsqueeze(1), 0.0)
        return hidden, second, value["kept"][0], {"same": hidden, "count": 3}


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(6, 2)

    def forward(self, value: tuple[Any, ...]) -> dict[str, Tensor]:
        hidden, second, z, rest = value
        return {"out": self.d(hidden + rest["same"] * rest["count"]), "second": second.sigmoid(), "z": z * 2}


def many_kwargs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    return {
        "mask": torch.rand(8, generator=generator) < 0.3,
        "scale": 0.5,
        "extra": {"z": torch.randn(8, 2, generator=generator), "word": "word"},
    }


def many_loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output["out"], target["a"]) + (output["second"] * target["b"]).mean() + output["z"].mean()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x.pow(3) * factor, mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.square() * ctx.factor + 0.001, None


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


def custom_functions() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 6),
        Lambda(lambda x: Cube.apply(x, 0.5)),
        Lambda(lambda pair: pair[0] * pair[1]),
        nn.Linear(6, 6),
        Lambda(lambda x: InPlaceFunction.apply(x)),
        nn.Linear(6, 3),
    )


def in_place() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        Lambda(lambda x: x.mul_(2).add_(1)),
        Lambda(lambda x: x.sin_()),
        nn.Linear(6, 6),
        Lambda(lambda x: (x.exp_(), x)[1]),
        nn.Linear(6, 3),
        Lambda(lambda x: x.tanh_()),
    )


def writes_batch() -> nn.Sequential:
    return nn.Sequential(Lambda(lambda x: x.clone()), Lambda(lambda x: x.mul_(0.5)), nn.Linear(5, 3))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Sometimes(nn.Module):
    """Uses its parameter for some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if bool(x[0, 0] > 0) else x * 2


class OwnParameterOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


class UsesGiven(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].sin() @ pair[1] + pair[1].sum()


def odd_returns() -> nn.Sequential:
    return nn.Sequential(
        Lambda(lambda x: x),
        nn.Identity(),
        Unused(),
        Lambda(lambda x: x),
        OwnParameterOut(),
        Lambda(lambda pair: pair),
        UsesGiven(),
        Lambda(lambda x: (x, x)),
        Lambda(lambda pair: pair[0] * 2 + pair[1]),
    )


def strides() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 4),
        Lambda(lambda x: x.t()),
        Lambda(lambda x: x.unsqueeze(0).expand(3, *x.shape)),
        Lambda(lambda x: x * 1.5),
        Lambda(lambda x: x[:, ::2]),
        Lambda(lambda x: x.transpose(0, 2)),
        nn.Linear(3, 5),
        Lambda(lambda x: x.sum(0, keepdim=True).expand(2, -1, -1)),
        Lambda(lambda x: x.mean(dim=0).t().reshape(-1)),
    )


def expanded_straight() -> nn.Sequential:
    """Broadcast outputs that leave a layer as they are and get gradients back in full size."""
    return nn.Sequential(
        nn.Linear(5, 4),
        Lambda(lambda x: x.mean(1, keepdim=True).expand(-1, 6)),
        nn.Linear(6, 3),
        Lambda(lambda x: x.sum(1, keepdim=True).expand(-1, 3)),
    )


def channels_last() -> nn.Sequential:
    return nn.Sequential(
        Lambda(lambda x: x.contiguous(memory_format=torch.channels_last)),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.MaxPool2d(2),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 5))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


def checkpointed(reentrant: bool, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 5), Checkpointed(reentrant, dropout), nn.ReLU(), Checkpointed(reentrant), nn.Linear(5, 3)
    )


def parametrized() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
        nn.Tanh(),
        torch.nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.Linear(6, 3),
    )


def old_weight_norm() -> nn.Sequential:
    """The functions that set a plain tensor as attribute before each forward."""
    with pytest.warns(FutureWarning):
        normed = torch.nn.utils.weight_norm(nn.Linear(5, 6))
    normed.weight = None  # a tensor with history, which deepcopy refuses; made anew by each forward
    return nn.Sequential(normed, nn.Tanh(), torch.nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 3))


def lstm() -> nn.Sequential:
    return nn.Sequential(
        nn.LSTM(4, 5, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True),
        Lambda(lambda out: out[0]),
        nn.GRU(10, 4, batch_first=True),
        Lambda(lambda out: out[0][:, -1]),
        nn.Linear(4, 3),
    )


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, need_weights=True)
        return out + weights.mean()


def attention() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8),
        SelfAttention(),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"),
        nn.Linear(8, 3),
    )


def attention_eval() -> nn.Sequential:
    return attention().eval()


def batch_norm_eval() -> nn.Sequential:
    model = conv(nn.BatchNorm2d)
    with torch.no_grad():
        model[1].running_mean.normal_()
    return model.eval()


def mixed_modes() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(), Residual(6), nn.BatchNorm1d(6))
    model[1].eval()
    return model


class Positions(nn.Module):
    """Buffers that are read only, one not persistent, and an attribute that refers to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.register_buffer("scale", torch.arange(6.0))
        self.register_buffer("shift", torch.randn(6), persistent=False)
        self.weights_by_name = {"w": [self.weight]}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights_by_name["w"][0] + self.scale * 0.1 + self.shift


class Counting(nn.Module):
    """Replaces its buffers by new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + 1
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x * self.total + self.mean


def buffers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), Positions(), Counting(), nn.Linear(6, 6), Counting(), nn.Linear(6, 3))


class NoGradInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(x)
        return self.linear(x), target


def partly_detached() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 6),
        NoGradInside(),
        Lambda(lambda pair: (pair[0].tanh(), pair[1].detach(), pair[0].detach() * 2)),
        Lambda(lambda three: three[0] * three[1] + three[2]),
        nn.Linear(6, 3),
    )


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.5)
        return out


def hooked() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 5), Hooked(), nn.Tanh(), nn.Linear(5, 3))
    model[2].register_forward_hook(lambda module, args, output: output * 1.25)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    model[3].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 3,))
    return model


class BufferOut(nn.Module):
    """Hands out the buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(500, 100))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.count.add_(1)


class Containers(nn.Module):
    """Parameters in lists and dicts, one with strides of its own and one broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(5)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(5))})
        self.modules_by_name = nn.ModuleDict({"linear": nn.Linear(5, 5)})
        self.transposed = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.modules_by_name["linear"](x * self.several[0] + self.several[1] * self.named["a"])
        return hidden + x @ self.transposed @ self.transposed.t()


def patched_forwards() -> nn.Sequential:
    """Forwards replaced on the instance, as libraries that wrap modules do."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].forward = functools.partial(lambda module, x: nn.Linear.forward(module, x) * 2, model[1])
    model[2].old_forward = model[2].forward
    model[2].forward = types.MethodType(lambda module, x: module.old_forward(x) + 1, model[2])
    return model


class Complexes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.weight).flatten(1)


def scalars() -> nn.Sequential:
    """0-dimensional and empty tensors on the way, and parameters with no and with zero elements."""

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.7))
            self.empty = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * self.temperature, self.temperature.exp(), x[:, :0]

    return nn.Sequential(
        nn.Linear(5, 3), Scalar(), Lambda(lambda t: (t[0] * t[1], t[2])), Lambda(lambda t: torch.cat(t, 1))
    )


def mixed_dtypes() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 6),
        Lambda(lambda x: x.double()),
        nn.Linear(6, 6).double(),
        Lambda(lambda x: (x.float(), (x > 0), x.argmax(1))),
        Lambda(lambda t: t[0] * t[1] + t[2].unsqueeze(1)),
        nn.Linear(6, 3),
    )


class Adds(nn.Module):
    """Adds to its input in place, and hands the input's mean on beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.add_(self.bias), x.mean(1, keepdim=True).expand_as(x)


def everything() -> nn.Sequential:
    """Ten layers with what depends on order: tied weights, dropout, batch norm, in-place writes, frozen parts."""
    embedding = nn.Embedding(11, 6)
    shared = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))
    model = nn.Sequential(
        embedding,
        shared,
        nn.BatchNorm1d(6),
        Adds(6),
        Lambda(lambda pair: pair[0] - pair[1]),
        nn.Linear(6, 6).requires_grad_(False),
        shared,
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
        nn.LayerNorm(6),
        nn.Linear(6, 11, bias=False),
    )
    model[9].weight = embedding.weight
    return model


def three_sharers() -> nn.Sequential:
    """Of one weight, of which two stand side by side, so that most plans have them in one job."""
    embedding = nn.Embedding(11, 8)
    embedding.weight.data = embedding.weight.clone()
    back = nn.Sequential(nn.Softmax(dim=-1), nn.Linear(11, 8))
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), Tied(embedding.weight), back, Tied(embedding.weight))


class LowRank(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, linear.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(linear.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def adapters() -> nn.Sequential:
    embedding = nn.Embedding(11, 6).requires_grad_(False)
    model = nn.Sequential(
        embedding,
        LowRank(nn.Linear(6, 6)),
        nn.LayerNorm(6).requires_grad_(False),
        LowRank(nn.Linear(6, 6)),
        nn.Linear(6, 11, bias=False).requires_grad_(False),
    )
    model[4].weight = embedding.weight
    return model


def frozen(*layers: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    for layer in layers:
        model[layer].requires_grad_(False)
    return model


def typed(dtype: torch.dtype) -> Case:
    """Of several sharers of a weight, a dropout, and a layer that only some microbatches use."""

    def build() -> nn.Sequential:
        noisy = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3))
        ends = Tied(noisy[0].weight), nn.LayerNorm(5), nn.Linear(5, 3)
        return nn.Sequential(nn.Linear(5, 5), noisy, Sometimes(), *ends).to(dtype)

    def distance(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).float().square().sum()

    return Case(build, lambda: (rows(9, 5)()[0].to(dtype),), distance, lambda: label(9, 3)().to(dtype))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def llama() -> nn.Sequential:
    from transformers import LlamaConfig, LlamaForCausalLM

    from llama_layers import as_layers

    config = LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return as_layers(LlamaForCausalLM(config))


CASES = {
    "mlp": Case(mlp, rows(7, 5), square, label(7, 3)),
    "dropout": Case(with_dropout, rows(7, 5), noisy_square, label(7, 3), mergeable=False),
    "conv": Case(lambda: conv(nn.Identity), rows(6, 2, 8, 8), square, label(6, 3)),
    "conv_batch_norm": Case(lambda: conv(nn.BatchNorm2d), rows(9, 2, 8, 8), square, label(9, 3)),
    "batch_norm_eval": Case(batch_norm_eval, rows(5, 2, 8, 8), square, label(5, 3)),
    "mixed_modes": Case(mixed_modes, rows(9, 5), square, label(9, 6)),
    "llama": Case(llama, tokens(6, 8, high=19), cross_entropy, lambda: tokens(6, 8, high=19)()[0]),
    "tied": Case(tied, tokens(7, 4), cross_entropy, lambda: tokens(7, 4)()[0]),
    "tied_three_times": Case(tied_three_times, tokens(7, 4), cross_entropy, lambda: tokens(7, 4)()[0]),
    "same_module_twice": Case(same_module_twice, rows(7, 5), square, label(7, 3)),
    "many_values": Case(
        lambda: nn.Sequential(ManyInputs(), ManyBetween(), ManyOutputs()),
        lambda: (rows(8, 4)()[0], rows(8, 3)()[0]),
        many_loss,
        lambda: {"a": label(8, 2)(), "b": label(8, 6)()},
        many_kwargs,
    ),
    "custom_functions": Case(custom_functions, rows(7, 5), square, label(7, 3)),
    "in_place": Case(in_place, rows(7, 5), square, label(7, 3)),
    "writes_batch": Case(writes_batch, rows(7, 5), square, label(7, 3)),
    "sometimes": Case(
        lambda: nn.Sequential(nn.Linear(5, 5), Sometimes(), Unused(), Sometimes()), rows(7, 5), square, label(7, 5)
    ),
    "odd_returns": Case(odd_returns, rows(7, 5), square, label(7, 5)),
    "strides": Case(strides, rows(8, 6), mean_square),
    "expanded": Case(expanded_straight, rows(7, 5), square, label(7, 3)),
    "channels_last": Case(channels_last, rows(6, 3, 6, 6), mean_square),
    "checkpoint": Case(lambda: checkpointed(False, 0.3), rows(7, 5), square, label(7, 3)),
    "checkpoint_reentrant": Case(lambda: checkpointed(True, 0.3), rows(7, 5), square, label(7, 3)),
    "parametrized": Case(parametrized, rows(7, 5), square, label(7, 3)),
    "old_weight_norm": Case(old_weight_norm, rows(7, 5), square, label(7, 3)),
    "lstm": Case(lstm, rows(7, 3, 4), square, label(7, 3)),
    "attention": Case(attention, rows(7, 3, 4), square, label(7, 3, 3)),
    "attention_eval": Case(attention_eval, rows(7, 3, 4), square, label(7, 3, 3)),
    "buffers": Case(buffers, rows(7, 5), square, label(7, 3)),
    "partly_detached": Case(partly_detached, rows(7, 5), square, label(7, 3)),
    "hooked": Case(hooked, rows(7, 5), square, label(7, 3)),
    "complex": Case(
        lambda: nn.Sequential(nn.Linear(5, 5), Complexes(), nn.Linear(10, 3)), rows(7, 5), square, label(7, 3)
    ),
    "scalars": Case(scalars, rows(7, 5), square, label(7, 3)),
    "mixed_dtypes": Case(mixed_dtypes, rows(7, 5), square, label(7, 3)),
    "one_layer": Case(lambda: nn.Sequential(nn.Linear(5, 3)), rows(7, 5), square, label(7, 3)),
    "buffer_out": Case(
        lambda: nn.Sequential(nn.Linear(5, 5), BufferOut(), Lambda(lambda p: p[0] * p[1].mean()), nn.Linear(5, 3)),
        rows(12, 5),
        square,
        label(12, 3),
    ),
    "containers": Case(
        lambda: nn.Sequential(nn.Linear(5, 5), Containers(), nn.Linear(5, 3)), rows(7, 5), square, label(7, 3)
    ),
    "patched_forwards": Case(patched_forwards, rows(7, 5), square, label(7, 5)),
    "no_parameters_around": Case(
        lambda: nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Tanh()),
        rows(7, 5),
        square,
        label(7, 3),
    ),
    "everything": Case(everything, tokens(22), F.cross_entropy, lambda: tokens(22)()[0]),
    "three_sharers": Case(three_sharers, tokens(24), F.cross_entropy, lambda: tokens(24)()[0]),
    "adapters": Case(adapters, tokens(7, 4), cross_entropy, lambda: tokens(7, 4)()[0]),
    "frozen_first": Case(lambda: frozen(0), rows(7, 5), square, label(7, 3)),
    "frozen_last": Case(lambda: frozen(2, 4), rows(7, 5), square, label(7, 3)),
    "frozen_below": Case(lambda: frozen(0, 1, 2), rows(7, 5), square, label(7, 3)),
    "double": typed(torch.float64),
    "bfloat16": typed(torch.bfloat16),
    "float16": typed(torch.float16),
}


# Models without a plan of shared stages: their first layer does not train, or is alone.
UNSHARED = {"writes_batch", "odd_returns", "channels_last", "no_parameters_around", "one_layer"}
UNSHARED |= {"adapters", "frozen_first", "frozen_below"}


@dataclass(frozen=True)
class Setting:
    devices: int
    microbatches: int
    fused: bool
    grain: Literal["stage", "layer"]
    # Where stages are cut: as the planner does, nowhere, everywhere; "forward": finely forward, coarsely backward;
    # "backward": the opposite; "shared": somewhere, and devices share the microbatches of each stage.
    cuts: str
    groups: int = 1
    order: Literal["layer", "microbatch"] = "layer"

    def __str__(self) -> str:
        kind = "fused" if self.fused else "split"
        return f"{self.devices}x{self.microbatches}-{kind}-{self.grain}-{self.cuts}-{self.groups}-{self.order}"


SETTINGS = [
    Setting(1, 1, True, "stage", "planner"),
    Setting(1, 1, False, "layer", "one"),
    Setting(1, 3, True, "layer", "backward"),
    Setting(2, 3, True, "stage", "forward", order="microbatch"),
    Setting(2, 1, False, "stage", "backward"),
    Setting(3, 2, False, "layer", "forward"),
    Setting(4, 3, True, "layer", "one", groups=2),
    Setting(8, 3, True, "stage", "every"),
    Setting(8, 2, False, "stage", "every", groups=2),
    Setting(3, 3, True, "layer", "planner", groups=3),
    Setting(4, 4, True, "stage", "shared", groups=3),
    Setting(3, 4, False, "stage", "shared", groups=2, order="microbatch"),
]


def plan_for(setting: Setting, layers: int) -> Any:
    every, halves, fused = range(1, layers), [math.ceil(layers / 2)], setting.fused
    match setting.cuts:
        case "planner":
            return None
        case "one":
            return plan_of(layers, [], [], fused)
        case "every":
            return plan_of(layers, every, every, fused)
        case "forward":
            return plan_of(layers, every, halves, fused)
        case "backward":
            return plan_of(layers, halves, every, fused)
        case _:
            return shared_plan(layers, setting.microbatches, setting.groups, setting.devices, fused=fused)


def pairs() -> Iterator[Any]:
    for row, (name, case) in enumerate(CASES.items()):
        for column, setting in enumerate(SETTINGS):
            # Outside of the pipeline a loss draws from the caller's own generator.
            if (setting.fused or case.mergeable) and (setting.cuts != "shared" or name not in UNSHARED):
                # These have both grains, fused and split, several devices and several microbatches, in any row.
                quick = (column - row) % len(SETTINGS) in (0, 3, 6, 10)
                marks = () if quick else pytest.mark.long
                yield pytest.param(name, setting, id=f"{name}-{setting}", marks=marks)


def train(name: str, setting: Setting, plan: Callable[[int], Any], calls: int = 1) -> None:
    case = CASES[name]
    use_devices(setting.devices)
    torch.manual_seed(BASE_SEED)
    model = case.build()
    torch.manual_seed(BASE_SEED)
    config = RoundPipeRunConfig(
        recompute_grain=setting.grain,
        execute_plan=plan(len(model)),
        gradient_groups=setting.groups,
        tied_grad_accumulation=setting.order,
    )
    arguments = case.args(), case.kwargs(), case.label()
    options = {"microbatches": setting.microbatches, "fused": setting.fused, "calls": calls}
    Pair(model, case.loss).train(*arguments, config=config, **options)


@pytest.mark.parametrize(("name", "setting"), list(pairs()))
def test_trains_like_the_loop(name: str, setting: Setting) -> None:
    train(name, setting, lambda layers: plan_for(setting, layers))


cuts = st.sets(st.integers(1, 9))
settings_of_calls = st.builds(
    Setting,
    devices=st.sampled_from([1, 2, 3, 4, 8]),
    microbatches=st.integers(1, 4),
    fused=st.booleans(),
    grain=st.sampled_from(["stage", "layer"]),
    cuts=st.just("random"),
    groups=st.integers(1, 3),
    order=st.sampled_from(["layer", "microbatch"]),
)


@given(st.sampled_from(sorted(CASES)), settings_of_calls, cuts, cuts, st.integers(1, 2))
def test_any_plan(name: str, setting: Setting, forward: set[int], backward: set[int], calls: int) -> None:
    fused = setting.fused or not CASES[name].mergeable
    setting = replace(setting, fused=fused)
    train(name, setting, lambda layers: plan_of(layers, sorted(forward), sorted(backward), fused), calls)


def test_the_rules_of_sums_differ() -> None:
    """Otherwise the table would say nothing of groups and orders."""
    case, ends = CASES["three_sharers"], []
    for by_microbatch, groups in ((False, 1), (True, 1), (False, 3)):
        torch.manual_seed(BASE_SEED)
        model = case.build()
        fused_loop(list(model), case.args(), {}, case.label(), case.loss, [[0] * 7] * 6, by_microbatch, groups)
        ends.append(model[0].weight.grad)
    for one, other in itertools.combinations(ends, 2):
        torch.testing.assert_close(one, other)
        assert not torch.equal(one, other)
