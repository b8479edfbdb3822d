"""Gradients of a followed model beside those of the plain one."""

from __future__ import annotations

import torch


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By every name."""
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def check_gradients(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], exact: bool) -> None:
    """The same gradients: the same bits, or close to them in proportion to the largest."""
    for name in mine.keys() | theirs.keys():
        # An expert that no token went to has no gradient, or one of zeros, depending on how it is called.
        one, other = (of.get(name, torch.zeros(())) for of in (mine, theirs))
        if name not in mine or name not in theirs or exact:
            assert torch.equal(*torch.broadcast_tensors(one, other)), name
        else:
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=1e-5, msg=name)
