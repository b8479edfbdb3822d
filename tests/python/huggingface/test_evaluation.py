"""The held-out loss, and that rows of several samples are refused where samples would see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from roundpipe import optim, wrap_model_to_roundpipe
from roundpipe.data.batches import Batches
from roundpipe.data.samples import IGNORED
from roundpipe.huggingface.evaluation import held_out_loss
from roundpipe.ops.packed_attention import check_packing
from tiny_chat import tiny_llama


def samples(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    made: list[dict[str, Any]] = []
    for length in lengths:
        ids = torch.randint(1, 260, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 2] = IGNORED
        made.append({"input_ids": ids, "labels": labels})
    return made


def llama(attention: str = "packed") -> Any:
    model = tiny_llama(num_hidden_layers=2)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("packed", [True, False])
def test_held_out_loss_is_the_mean_over_tokens(packed: bool) -> None:
    data = samples((30, 4, 17, 9, 2, 22, 5))
    plain = tiny_llama(num_hidden_layers=2, attention_dropout=0.5).eval()
    total = tokens = 0.0
    for sample in data:
        count = float((sample["labels"][1:] != IGNORED).sum())
        with torch.no_grad():
            total += count * float(plain(sample["input_ids"][None], labels=sample["labels"][None]).loss)
        tokens += count
    plain.set_attn_implementation("packed")
    model = wrap_model_to_roundpipe(plain.train())
    batches = Batches(data, batch_tokens=48, max_length=32, pad_token_id=0, packed=packed)
    assert len(batches) > 1
    assert held_out_loss(model, batches) == pytest.approx(total / tokens, rel=1e-5)
    assert all(module.training for module in model.modules())


def test_held_out_loss_is_that_of_the_newest_weights() -> None:
    model = wrap_model_to_roundpipe(llama())
    batches = Batches(samples((20, 20)), batch_tokens=40, max_length=20, pad_token_id=0)
    before = held_out_loss(model, batches)
    optimizer = optim.AdamW(model, lr=1e-2)
    for batch in batches:
        model.forward_backward(input_kwargs=batch)
        model.step(optimizer)
    after = held_out_loss(model, batches)
    assert after < before - 0.1
    model.synchronize()
    assert held_out_loss(model, batches) == after


def test_held_out_loss_needs_labels() -> None:
    model = wrap_model_to_roundpipe(llama())
    ids = torch.ones(2, 4, dtype=torch.int64)
    for batches in ([], [{"input_ids": ids}], [{"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}]):
        with pytest.raises(ValueError, match=r"^\[held_out_loss\] no token of the batches"):
            held_out_loss(model, batches)


def test_packing_is_checked() -> None:
    check_packing(llama())
    model = wrap_model_to_roundpipe(llama().train())
    check_packing(model)
    assert all(module.training for module in model.modules())
    check_packing(llama("eager"))  # transformers sees by the positions where samples begin


def test_a_model_that_carries_a_state_along_the_row_is_refused() -> None:
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(ValueError, match=r"^\[check_packing\] two samples in one row of mamba change each other"):
        check_packing(model)
