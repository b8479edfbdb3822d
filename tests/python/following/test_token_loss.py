"""The loss of a followed model: every token counts the same, however the batch is cut; and without all logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import roundpipe
from causal_models import VOCABULARY, build, padded_batch, tokens
from gradients import check_gradients, gradients, trained_beside_plain
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import sweep

CHUNKED = {"loss_chunk_tokens": 4, "mlp_chunk_tokens": 3}


pytestmark = pytest.mark.usefixtures("two_devices")


def check_batch(name: str, batch: dict[str, Any], microbatches: int, **options: Any) -> None:
    _, loss, expected = trained_beside_plain(build(name), batch, microbatches, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


uneven = st.lists(st.integers(0, 8), min_size=2, max_size=6).filter(any)


@sweep("name, options", ["llama", "bart"], [{}, CHUNKED], ids=str, together=1)
@settings(max_examples=settings.default.max_examples // 5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=uneven, data=st.data())
def test_rows_with_very_uneven_label_counts(name: str, options: Any, counts: list[int], data: Any) -> None:
    batch = {"input_ids": tokens(len(counts))}
    labels = batch["input_ids"].clone()
    for row, count in enumerate(counts):
        labels[row, 1 + count :] = -100
    batch["labels"] = labels
    if name == "bart":  # its first labels count: let nobody have some
        labels[:, 0] = -100
    check_batch(name, batch, data.draw(st.integers(1, len(counts))), **options)


@sweep(
    "name, microbatches",
    ["llama", "gpt2", "gemma2", "cohere2", "granite", "qwen2_moe", "phi", "opt"],
    [1, 3],
    together=1,
)
def test_in_chunks(name: str, microbatches: int) -> None:
    check_batch(name, padded_batch(rows=5), microbatches, **CHUNKED)


def test_merged_loss_of_the_outputs() -> None:
    model = build("llama")
    batch = padded_batch(rows=5)
    expected = copy.deepcopy(model)(**batch)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    outputs = wrapped(**batch)
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.logits, expected.logits)


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["plain", "chunked"])
def test_a_step_of_several_batches(options: Any) -> None:
    """`num_items_in_batch`, as transformers' Trainer gives it."""
    batches = [padded_batch(rows=3), padded_batch(rows=2, length=7)]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    model = build("llama")
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=2), **options)
    for batch in batches:
        expected = plain(**batch, num_items_in_batch=total).loss
        expected.backward()
        loss = wrapped.forward_backward(input_kwargs={**batch, "num_items_in_batch": total})
        torch.testing.assert_close(loss, expected.detach())
    wrapped.synchronize()
    check_gradients(gradients(model), gradients(plain), exact=False)
    # How the forward is called is looked at once, not for each number of tokens.
    wrapped.forward_backward(input_kwargs={**batches[0], "num_items_in_batch": total + 1})
    wrapped.synchronize()
    assert len(wrapped._language_model.chain[0].followed.carried) == 2


def test_logits_are_computed_for_whoever_looks_at_them() -> None:
    model = build("llama")
    wrapped = wrap_model_to_roundpipe(model, **CHUNKED)
    batch = padded_batch()
    expected = copy.deepcopy(model)(**batch)
    loss, outputs = wrapped.forward_backward(input_kwargs=batch, return_outputs=True)
    torch.testing.assert_close(outputs.logits, expected.logits)
    seen: list[torch.Size] = []

    def my_loss(outputs: Any, _: Any) -> torch.Tensor:
        seen.append(outputs.logits.shape)
        return outputs.loss

    wrapped.forward_backward(input_kwargs=batch, loss_fn=my_loss)
    wrapped.synchronize()
    assert seen and all(shape[-1] == VOCABULARY for shape in seen)
    assert wrapped(**batch).logits is not None and loss > 0


def test_automatic_chunks_save_memory_where_logits_are_large() -> None:
    peaks = {}
    for chunk in (None, "auto"):
        torch.manual_seed(0)
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=2048,
        )
        pool = roundpipe.devices("virtual:1")
        wrapped = wrap_model_to_roundpipe(LlamaForCausalLM(config), loss_chunk_tokens=chunk)
        ids = torch.randint(0, 32000, (1, 1024))
        wrapped.forward_backward(
            input_kwargs={"input_ids": ids, "labels": ids}, run_config=RoundPipeRunConfig(num_microbatch=1)
        )
        wrapped.synchronize()
        peaks[chunk] = pool.memory_report()[0]["peak_bytes"]
    assert peaks["auto"] < peaks[None] / 2, peaks


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["plain", "chunked"])
def test_a_forward_for_the_loss_alone(options: Any) -> None:
    model = build("llama").eval()
    batch = padded_batch(rows=5)
    expected = copy.deepcopy(model)(**batch).loss
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=3), **options)
    with torch.no_grad():
        outputs = wrapped(**batch, roundpipe_loss_only=True)
    torch.testing.assert_close(outputs.loss, expected.detach())
    assert outputs.logits is None
    # Without labels there is no loss, so the outputs stay.
    assert wrapped(input_ids=batch["input_ids"], roundpipe_loss_only=True).logits is not None


def test_a_row_that_is_too_long_leaves_nothing_on_the_device() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    pool = roundpipe.devices("virtual:1,memory=64MiB")
    wrapped = wrap_model_to_roundpipe(
        LlamaForCausalLM(config), loss_chunk_tokens=None, model_run_config=RoundPipeRunConfig(num_microbatch=1)
    )

    def train(length: int) -> torch.Tensor:
        ids = torch.arange(length).remainder(4000).unsqueeze(0)
        loss: torch.Tensor = wrapped.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
        wrapped.synchronize()
        return loss

    first = train(64)
    wrapped.zero_grad()
    used = pool.memory_report()[0]["current_bytes"]
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            train(2000)
    assert torch.equal(train(64), first)
    wrapped.zero_grad()
    assert pool.memory_report()[0]["current_bytes"] < used + 2**18


def test_logits_are_there_again_after_a_loss_in_chunks_has_failed() -> None:
    roundpipe.devices("virtual:1,debug")
    model = build("llama")
    wrapped = wrap_model_to_roundpipe(model, loss_chunk_tokens=4)
    batch = padded_batch()
    expected = copy.deepcopy(model)(**batch)
    wrong = batch["labels"].clone()
    wrong[1, 2] = VOCABULARY + 3
    with pytest.raises(ValueError, match="labels"):
        wrapped.forward_backward(input_kwargs={**batch, "labels": wrong})
    outputs = wrapped(**batch)
    assert type(outputs.logits) is torch.Tensor
    torch.testing.assert_close(outputs.logits, expected.logits)
    torch.testing.assert_close(outputs.loss, expected.loss)


@sweep("devices, options", [1, 2, 4], [{}, CHUNKED], ids=str, together=1)
def test_losses_with_a_number_of_items_are_parts_of_a_sum(devices: int, options: Any) -> None:
    """`loss_fn` sees its part, `forward_backward` adds the parts, and so do the merged outputs."""
    roundpipe.devices(f"virtual:{devices}")
    batch = padded_batch(rows=5)
    batch["num_items_in_batch"] = int((batch["labels"][:, 1:] != -100).sum()) + 7
    model = build("llama")
    plain = copy.deepcopy(model)
    expected = plain(**batch).loss
    expected.backward()
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=3), **options)
    parts: list[float] = []

    def loss(outputs: Any, _: Any) -> torch.Tensor:
        parts.append(outputs.loss.item())
        return outputs.loss

    value, outputs = wrapped.forward_backward(input_kwargs=batch, loss_fn=loss, return_outputs=True)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(outputs.loss, expected.detach())
    assert sum(parts) == pytest.approx(expected.item(), rel=1e-5)
    wrapped.synchronize()
    check_gradients(gradients(model), gradients(plain), exact=False)
    torch.testing.assert_close(wrapped(**batch).loss, expected)
    unmerged = wrapped(**batch, roundpipe_run_config=RoundPipeRunConfig(merge_output=False)).loss
    assert len(unmerged) == 3
    torch.testing.assert_close(sum(unmerged), expected)


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["plain", "chunked"])
def test_return_logits(options: Any) -> None:
    batch = padded_batch(rows=5)
    model = build("llama")
    expected = copy.deepcopy(model)(**batch)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=3), **options)
    outputs = wrapped(**batch, return_logits=False)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(wrapped(**batch, return_logits=True).logits, expected.logits)
    loss = wrapped.forward_backward(
        input_kwargs={**batch, "return_logits": False}, loss_fn=lambda outputs, _: outputs.loss / 3
    )
    torch.testing.assert_close(loss, expected.loss.detach())
    with pytest.raises(ValueError, match="return_logits is False and there are no labels"):
        wrapped(input_ids=batch["input_ids"], return_logits=False)


@sweep("name, microbatches, items", ["qwen3_moe", "gpt_oss"], [1, 3], [None, 50], together=1)
def test_routers_without_logits(name: str, microbatches: int, items: int | None) -> None:
    """The balancing loss and what it is made from are there, as in the published package."""
    batch: dict[str, Any] = {**padded_batch(), "output_router_logits": True}
    if items is not None:
        batch["num_items_in_batch"] = items
    wrapped = wrap_model_to_roundpipe(build(name), model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))
    whole, without = wrapped(**batch), wrapped(**batch, return_logits=False)
    assert without.logits is None and whole.logits is not None
    for outputs in (whole, without):
        assert len(outputs.router_logits) == 3
        assert all(logits.shape == (batch["input_ids"].numel(), 4) for logits in outputs.router_logits)
    torch.testing.assert_close((without.loss, without.aux_loss), (whole.loss, whole.aux_loss))
    if microbatches == 1:
        plain = build(name)(**batch, use_cache=False)
        torch.testing.assert_close((without.loss, without.aux_loss), (plain.loss, plain.aux_loss))
        torch.testing.assert_close(without.router_logits, plain.router_logits)


@pytest.mark.parametrize("asked", ["by the call", "by the model"])
def test_a_routers_loss_counts_once_in_a_sum(asked: str) -> None:
    plain, model = build("qwen3_moe"), build("qwen3_moe")
    for each in (plain, model):
        each.router_aux_loss_coef = 0.5
        each.config.output_router_logits = asked == "by the model"
    batch = {**padded_batch(), "num_items_in_batch": torch.tensor(50)}
    if asked == "by the call":
        batch["output_router_logits"] = True
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    rows = len(batch["input_ids"])
    total = int((batch["labels"][:, 1:] != -100).sum())
    expected: Any = 0
    for part in (slice((rows + 1) // 2), slice((rows + 1) // 2, rows)):
        cut = {name: value[part] if getattr(value, "ndim", 0) else value for name, value in batch.items()}
        outputs = plain(**cut, use_cache=False)
        share = int((cut["labels"][:, 1:] != -100).sum()) / total
        expected = expected + outputs.loss + (share - 1) * 0.5 * outputs.aux_loss
    expected.backward()
    loss = wrapped.forward_backward(input_kwargs=batch)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(wrapped(**batch).loss.detach(), loss)
    check_gradients(gradients(wrapped), gradients(plain), exact=False)
    # A model that weights it elsewhere is not cut.
    del model.router_aux_loss_coef
    with pytest.raises(ValueError, match=r"cannot be cut into 2 microbatches: its router's loss counts once"):
        wrapped(**batch)
