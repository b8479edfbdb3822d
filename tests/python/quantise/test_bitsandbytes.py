"""NF4 decodes to the numbers of bitsandbytes, and is encoded as there. `make test-all` installs it."""

from __future__ import annotations

import pytest
import torch

from roundpipe import _core
from sweeps import sweep

functional = pytest.importorskip("bitsandbytes.functional")
pytestmark = pytest.mark.long


@sweep("dtype, shape", [torch.float32, torch.bfloat16, torch.float16], [(64, 128), (3, 50), (5, 2)], ids=str)
def test_the_same_codes_scales_and_numbers(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    their_codes, state = functional.quantize_4bit(numbers.float(), blocksize=64, quant_type="nf4")
    codes, scales = _core.encode("nf4", numbers)
    assert torch.equal(scales, state.absmax)
    assert torch.equal(codes.flatten(), their_codes.flatten()[: codes.numel()])
    values = _core.Encoding("nf4", torch.float32).values([codes, scales])
    assert torch.equal(values, functional.dequantize_4bit(their_codes, state))


def test_scales_of_8_bits() -> None:
    numbers = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    their_codes, state = functional.quantize_4bit(numbers, blocksize=64, quant_type="nf4", compress_statistics=True)
    codes, scales, scale_scales, offset, scale_map = _core.encode("nf4-double", numbers)
    assert torch.equal(scale_map, state.state2.code)
    assert torch.allclose(scale_scales, state.state2.absmax)
    assert torch.allclose(offset, state.offset)
    parts = [codes, state.absmax.view(torch.uint8), state.state2.absmax, state.offset.view(1), state.state2.code]
    values = _core.Encoding("nf4-double", torch.float32).values(parts)
    assert torch.equal(values, functional.dequantize_4bit(their_codes, state))
    assert (scales.int() - state.absmax.int()).abs().max() <= 1
