"""Whether a device computes the same bits each time, those of devices of its kind, and about the host's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from roundpipe.selftest.checksum import crc32c
from roundpipe.selftest.finding import Finding, minority
from roundpipe.selftest.kinds import by_kind

DTYPES = (torch.float32, torch.bfloat16)
# Largest |card - host| / |host| of each result, as norms. Cards may multiply fp32 in TF32, if the program allows it.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2}
_HOST = torch.device("cpu")

_Draw = Callable[..., Tensor]  # of a shape
_Layer = Callable[[_Draw], list[Tensor]]  # the output and the gradients of what was drawn


def _matmul(draw: _Draw) -> list[Tensor]:
    left, right = draw(320, 256), draw(256, 288)
    return _with_gradients(left @ right, left, right)


def _attention(draw: _Draw) -> list[Tensor]:
    query, key, value = (draw(2, 4, 96, 64) for _ in range(3))
    return _with_gradients(F.scaled_dot_product_attention(query, key, value, is_causal=True), query, key, value)


def _norm(draw: _Draw) -> list[Tensor]:
    value, weight, bias = draw(256, 384), draw(384), draw(384)
    # In fp32, as models do where values are bf16.
    normed = F.layer_norm(F.gelu(value).float(), (384,), weight.float(), bias.float())
    return _with_gradients(normed.to(value.dtype), value, weight, bias)


def _embedding(draw: _Draw) -> list[Tensor]:
    table = draw(500, 96)
    tokens = (torch.arange(384, device=table.device) * 7) % 500
    return _with_gradients(F.embedding(tokens, table), table)


def _cross_entropy(draw: _Draw) -> list[Tensor]:
    logits = draw(256, 500)
    labels = (torch.arange(256, device=logits.device) * 11) % 500
    return _with_gradients(F.cross_entropy(logits, labels), logits)


_LAYERS: dict[str, _Layer] = {
    "matmul": _matmul,
    "attention": _attention,
    "norm": _norm,
    "embedding": _embedding,
    "cross entropy": _cross_entropy,
}


def _with_gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    # Unlike factors, so that no gradient is a constant.
    factors = torch.linspace(0.5, 1.5, max(1, output.numel()), device=output.device).to(output.dtype)
    (output * factors.view(output.shape)).sum().backward()  # type: ignore[no-untyped-call]
    return [output.detach(), *(value.grad for value in inputs if value.grad is not None)]


def _run(layer: _Layer, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """The layer's output and gradients, on the host, where its inputs are drawn for any device."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()

    return [result.cpu() for result in layer(draw)]


@dataclass(frozen=True)
class _Answer:
    """Of one device to one layer: the results of its first round, and the checksum of each round's."""

    first: list[Tensor]
    rounds: list[int]


def check_compute(devices: Sequence[torch.device], rounds: int) -> Iterator[Finding]:
    """Runs small layers, forward and backward, as plain PyTorch on each device, once and `rounds` times again.

    A device that returns an error is a finding, and is left out of what follows.
    """
    left = list(devices)
    for dtype, (what, layer) in product(DTYPES, _LAYERS.items()):
        named = f"{what} {str(dtype).removeprefix('torch.')}"
        answers = {}
        for device in tuple(left):
            try:
                answers[device] = _ask(layer, device, dtype, rounds)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                left.remove(device)
                yield Finding(str(device), "compute", named, False, str(error).splitlines()[0], (str(device),))
        expected = _run(layer, _HOST, dtype)
        for device, answer in answers.items():
            yield _repeats(str(device), named, answer.rounds)
        yield from _alike(named, answers)
        for device, answer in answers.items():
            if device != _HOST:
                yield _near_host(str(device), named, answer.first, expected, _TOLERANCE[dtype])


def _ask(layer: _Layer, device: torch.device, dtype: torch.dtype, rounds: int) -> _Answer:
    first = _run(layer, device, dtype)
    return _Answer(first, [crc32c(first), *(crc32c(_run(layer, device, dtype)) for _ in range(rounds))])


def _repeats(device: str, what: str, rounds: list[int]) -> Finding:
    others = len(rounds) - max(rounds.count(checksum) for checksum in rounds)
    if not others:
        return Finding(device, "compute", what, True, f"the same bits {len(rounds)} times")
    return Finding(device, "compute", what, False, f"other bits in {others} of {len(rounds)} rounds", (device,))


def _alike(what: str, answers: dict[torch.device, _Answer]) -> list[Finding]:
    """Compares the devices of each kind."""
    findings = []
    for kind, alike in by_kind(answers).items():
        if len(alike) == 1:
            continue
        odd = minority([max(answers[device].rounds, key=answers[device].rounds.count) for device in alike])
        for place, device in enumerate(alike):
            is_odd = place in odd
            # Without a majority, any of them may be right.
            suspects = alike if len(odd) == len(alike) else [device]
            names = tuple(map(str, suspects)) if is_odd else ()
            detail = f"{'other bits than' if is_odd else 'the bits of'} most of {len(alike)} of {kind}"
            findings.append(Finding(str(device), "compute", f"{what}, alike", not is_odd, detail, names))
    return findings


def _near_host(device: str, what: str, results: list[Tensor], expected: list[Tensor], tolerance: float) -> Finding:
    distance = max(
        float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        for ours, theirs in zip(results, expected, strict=True)
    )
    ok = distance <= tolerance  # False for NaN
    detail = f"{distance:.1e} from the host's, at most {tolerance:.0e}"
    return Finding(device, "compute", f"{what}, near the host", ok, detail, () if ok else (device,))
