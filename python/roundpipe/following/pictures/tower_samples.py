"""Small inputs for a tower of pictures, videos or sounds: they follow from its signature and its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Sample = dict[str, Any]


def tower_samples(tower: nn.Module) -> Iterator[Sample]:
    """Yields arguments that the tower may accept, some of the same names with other sizes: for a picture or a few, or
    for a sound.

    Args:
        tower: of transformers.
    """
    like: Any = tower  # its config has no type
    takes = inspect.signature(tower.forward).parameters
    sizes = _Sizes(like.config, next((p.dtype for p in tower.parameters() if p.is_floating_point()), torch.float32))
    make = next((make for names, make in _FORMS if all(name in takes for name in names)), None)
    for times in (1, 2):
        sample = None if make is None else make(sizes, times)
        if sample is not None:
            yield {name: value for name, value in sample.items() if name in takes}


class _Sizes:
    """What a tower's config says of its inputs, and numbers of these sizes."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._generator = torch.Generator().manual_seed(0)
        self.channels = self.number("in_channels", "in_chans", "num_channels") or 3
        self.patch = self.number("patch_size")
        self.image = self.number("image_size")

    def number(self, *names: str) -> int:
        """The first of these that the config has, the larger one of two sides; 0 without any."""
        for name in names:
            value = getattr(self._config, name, None)
            if isinstance(value, (list, tuple)) and value:
                value = max(value)
            if isinstance(value, int):
                return value
        return 0

    def values(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._dtype)


def _grids(sizes: _Sizes, times: int) -> Sample | None:
    """Patches of all pictures one after the other, and for each picture its times, rows and columns of patches."""
    side = 2 * (sizes.number("spatial_merge_size") or 1)
    grid = torch.tensor([[1, side, side], [times, side, 2 * side]])
    width = sizes.channels * (sizes.number("temporal_patch_size") or 1) * sizes.patch**2
    patches = sizes.values(int(grid.prod(1).sum()), width)
    return {"hidden_states": patches, "pixel_values": patches, "grid_thw": grid} if width else None


def _positions(sizes: _Sizes, times: int) -> Sample | None:
    """Patches [pictures, patches, values] with the column and the row of each."""
    side = 2 * times * (sizes.number("pooling_kernel_size") or 1)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
    patches = sizes.values(2, side * side, sizes.channels * sizes.patch**2)
    return {"pixel_values": patches, "pixel_position_ids": torch.stack([places, places])}


def _shapes(sizes: _Sizes, times: int) -> Sample | None:
    """Patches [pictures, patches, values], of which the last ones of a smaller picture are padding."""
    patches = sizes.values(2, 16 * times, sizes.channels * sizes.patch**2)
    shapes = torch.tensor([[4, 4 * times], [4, 2]])
    attended = torch.arange(16 * times) < shapes.prod(1, keepdim=True)
    return {"pixel_values": patches, "pixel_attention_mask": attended.long(), "spatial_shapes": shapes}


def _sized(sizes: _Sizes, times: int) -> Sample | None:
    """Pictures [pictures, channels, height, width] with the height and the width of each."""
    side = 4 * times * sizes.patch
    return {
        "pixel_values": sizes.values(2, sizes.channels, side, side),
        "image_sizes": torch.tensor([[side, side], [side, side // 2]]),
    }


def _pictures(sizes: _Sizes, times: int) -> Sample | None:
    """Pictures [pictures, channels, height, width] of the size that the tower was trained on."""
    if not sizes.image:
        return None
    return {"pixel_values": sizes.values(times, sizes.channels, sizes.image, sizes.image)}


def _sounds(sizes: _Sizes, times: int) -> Sample | None:
    """Spectra [sounds, bins, frames]."""
    bins, frames = sizes.number("num_mel_bins"), sizes.number("max_source_positions")
    return {"input_features": sizes.values(times, bins, 2 * frames)} if bins and frames else None


_FORMS: list[tuple[tuple[str, ...], Callable[[_Sizes, int], Sample | None]]] = [
    (("grid_thw",), _grids),
    (("pixel_values", "pixel_position_ids"), _positions),
    (("pixel_values", "spatial_shapes"), _shapes),
    (("pixel_values", "image_sizes"), _sized),
    (("pixel_values",), _pictures),
    (("input_features",), _sounds),
]
