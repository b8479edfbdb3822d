"""Modules that a forward calls before its first layer, such as a tower for pictures: run once, and not a second time.

The forward runs again at the end of the pipeline, without the values of what was computed before the layers. A tower
reads such values: how many patches are no padding, how large a picture is. So the second run does not enter these
modules. It gets what they returned: the shapes, and the values of what the forward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from roundpipe.following.placeholder import Made, Placeholder


def towers_of(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules beside the layers of the model, but for tables of embeddings, which read no values."""
    return [module for module in modules_beside(model, layers) if not isinstance(module, nn.Embedding)]


def modules_beside(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost modules with parameters that hold none of these layers and are in none, in the model's order."""
    own = {id(layer) for layer in layers}
    found: dict[int, nn.Module] = {}

    def look(module: nn.Module) -> None:
        for child in module.children():
            if id(child) in own:
                continue
            if any(id(inner) in own for inner in child.modules()):
                look(child)
            elif next(child.parameters(), None) is not None:
                found[id(child)] = child

    look(model)
    return list(found.values())


@dataclass(frozen=True)
class Shape:
    """Stands for a tensor whose values are left behind."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        return Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def meta(self) -> torch.Tensor:
        """A tensor like it on the meta device."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="meta")


@dataclass
class Returned:
    """What a call of a tower returned.

    Attributes:
        tower: the number of the tower.
        leaves: of its output; a tensor, or its shape.
        spec: of its output.
    """

    tower: int
    leaves: list[Any]
    spec: pytree.TreeSpec

    @staticmethod
    def of(tower: int, output: Any) -> Returned:
        leaves, spec = pytree.tree_flatten(output)
        return Returned(tower, leaves, spec)

    def without_values(self) -> Returned:
        """The same with a shape in place of each tensor."""
        shapes = [Shape.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return Returned(self.tower, shapes, self.spec)

    def again(
        self,
        call: int,
        values: Mapping[Made, torch.Tensor],
        placeholder: Callable[[torch.Tensor, Made], Placeholder],
    ) -> Any:
        """The output with values where they are known, and placeholders elsewhere.

        Args:
            call: the number of this call among those of all towers.
            values: by `("tower", call, leaf)`.
            placeholder: makes one like a tensor on the meta device.
        """
        leaves = []
        for index, leaf in enumerate(self.leaves):
            made: Made = ("tower", call, index)
            if isinstance(leaf, Shape):
                known = values.get(made)
                leaf = placeholder(leaf.meta(), made) if known is None else known
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self.spec)


def tower_values(calls: list[Returned], chooses: bool = False) -> dict[Made, torch.Tensor]:
    """The tensors among what towers returned.

    Args:
        calls: of towers, with values.
        chooses: only those that are no numbers to compute with: masks, places, lengths. The forward may choose by them.
    """
    return {
        ("tower", call, index): leaf
        for call, returned in enumerate(calls)
        for index, leaf in enumerate(returned.leaves)
        if isinstance(leaf, torch.Tensor) and not (chooses and (leaf.is_floating_point() or leaf.is_complex()))
    }


def numbers_given(arguments: Any) -> dict[Made, torch.Tensor]:
    """The tensors of numbers to compute with among a model's arguments, such as pixels, by `("input", path)`. Where
    towers have used them, the forward's end seldom needs more than their shapes."""
    named = pytree.tree_flatten_with_path(arguments)[0]
    return {
        ("input", pytree.keystr(path)): leaf
        for path, leaf in named
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }
