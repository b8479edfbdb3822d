"""The parts of a layer that treat each token independently and hold much memory meanwhile: its feed-forward blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from roundpipe.ops.functional import Activation, chunked_mlp, gated_mlp

# "auto": rows of more tokens than this are computed in chunks of half as many.
LONG_ROW_TOKENS = 16384

ChunkTokens = Literal["auto"] | int | None
"""The number of tokens at a time: "auto" if it saves much memory, None never."""

_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
}


@dataclass(frozen=True)
class TokenWise:
    """A feed-forward block inside a layer.

    Attributes:
        path: its name in the layer.
        activation: activation of the native block that computes the same; None if there is no such block.
    """

    path: str
    activation: Activation | None


class Candidates:
    """Watches a running layer for modules that map hidden states to hidden states.

    Args:
        layer: watched until `end`.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._handles = [
            module.register_forward_hook(functools.partial(self._note, path), with_kwargs=True)
            for path, module in layer.named_modules()
            if path and next(module.parameters(), None) is not None
        ]

    def _note(self, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or not isinstance(output, torch.Tensor):
            return
        if args[0].dim() == 3 and args[0].shape == output.shape and args[0].is_floating_point():
            self._seen[path] = (args[0], output)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def blocks(self) -> list[TokenWise]:
        """The modules that treat each token independently and have more inner features than the hidden states."""
        found: list[TokenWise] = []
        for path, (states, output) in sorted(self._seen.items()):
            module = self._layer.get_submodule(path)
            if any(path.startswith(f"{block.path}.") for block in found) or not _widens(module, states.shape[-1]):
                continue
            if any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules()):
                continue
            middle = states.shape[1] // 2
            try:
                parts = [module(part.contiguous()) for part in (states[:, :middle], states[:, middle:])]
            except (RuntimeError, ValueError):  # its second dimension is not the tokens
                continue
            if all(isinstance(part, torch.Tensor) for part in parts) and _close(torch.cat(parts, 1), output):
                found.append(TokenWise(path, _native_activation(module, states, output)))
        return found


def _widens(module: nn.Module, width: int) -> bool:
    return any(max(parameter.shape) > width for parameter in module.parameters() if parameter.dim() > 1)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Without values only shapes can be compared.
    return a.shape == b.shape and (a.is_meta or torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-5))


def _native_activation(module: nn.Module, states: torch.Tensor, output: torch.Tensor) -> Activation | None:
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
    if activation is None or not _is_plain(module):
        return None
    return activation if _close(_gated(module, activation, 0, states), output) else None


def _is_plain(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(type(part) is nn.Linear for part in parts) and len(list(module.parameters())) == sum(
        1 + (part.bias is not None) for part in parts if isinstance(part, nn.Linear)
    )


def _gated(module: Any, activation: Activation, chunk_tokens: int, states: torch.Tensor) -> torch.Tensor:
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    return gated_mlp(
        states,
        gate.weight,
        up.weight,
        down.weight,
        gate_bias=gate.bias,
        up_bias=up.bias,
        down_bias=down.bias,
        activation=activation,
        chunk_tokens=chunk_tokens,
    )


def _on_whole_rows(forward: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Makes a chunk contiguous: a chunk of several rows is not, and code written for whole batches may rely on it."""
    return forward(tokens.contiguous())


def chunk_of(option: ChunkTokens, tokens: int) -> int | None:
    """The number of tokens of a row that are computed at a time; None: all."""
    if option == "auto":
        return LONG_ROW_TOKENS // 2 if tokens > LONG_ROW_TOKENS else None
    return option if option is not None and tokens > option else None


@contextmanager
def in_chunks(layer: nn.Module, blocks: tuple[TokenWise, ...], chunk_tokens: int) -> Iterator[None]:
    """Within the block, these parts of `layer` compute `chunk_tokens` tokens of a row at a time.

    Between forward and backward they hold only their input; the backward computes each chunk again.
    """
    changed: list[nn.Module] = []
    try:
        for block in blocks:
            module = layer.get_submodule(block.path)
            forward: Callable[[torch.Tensor], torch.Tensor]
            if block.activation is not None and _is_plain(module):
                forward = functools.partial(_gated, module, block.activation, chunk_tokens)
            else:
                forward = functools.partial(
                    chunked_mlp,
                    functools.partial(_on_whole_rows, module.forward),
                    chunk_tokens=chunk_tokens,
                    parameters=list(module.parameters()),
                )
            if "forward" not in module.__dict__:
                module.__dict__["forward"] = forward
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]
