"""Gradients of a followed model beside those of the plain one."""

from __future__ import annotations

import copy
from typing import Any

import torch

from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe


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


def trained_beside_plain(
    model: Any, batch: dict[str, Any], microbatches: int, **options: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Runs a batch through `model` in the pipeline and through a plain copy, and checks the gradients.

    Returns:
        The model in the pipeline, its loss and the plain one.
    """
    plain = copy.deepcopy(model)
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=config, **options)
    loss = wrapped.forward_backward(input_kwargs=batch)
    wrapped.synchronize()
    check_gradients(gradients(model), gradients(plain), exact=False)
    return wrapped, loss, expected.detach()
