"""What a model's loss averages over is tried, whatever its class: the plain model's numbers, or one microbatch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

import roundpipe
from causal_models import VOCABULARY, build, tokens
from gradients import trained_beside_plain
from odd_models import OddForCausalLM, odd
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.model.losses.reduction import LossForm, Reduction
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("two_devices")

_BERT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_BERT |= {"num_attention_heads": 4, "max_position_embeddings": 64, "is_decoder": True}
_BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def bert_with_a_causal_head() -> Any:
    torch.manual_seed(0)
    return transformers.BertLMHeadModel(transformers.BertConfig(**_BERT)).train()


def qwen2_audio() -> Any:
    """Its loss ignores `num_items_in_batch`, and counts labels that are attended to."""
    torch.manual_seed(0)
    audio = {"num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**_TEXT).to_dict(),
        audio_config={**audio, "d_model": 32, "max_source_positions": 20},
        audio_token_index=VOCABULARY - 1,
    )
    config.pad_token_id = 0
    return transformers.Qwen2AudioForConditionalGeneration(config).train()


def chameleon() -> Any:
    """Writes into its logits."""
    torch.manual_seed(0)
    vq = {"embed_dim": 8, "num_embeddings": 8, "double_latent": False, "latent_channels": 8, "resolution": 16}
    vq |= {"in_channels": 3, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
    names = {f"IMGIMG{letter}Z": 4 + i for i, letter in enumerate("ABCDEFGH")}
    config = transformers.ChameleonConfig(
        **{**_TEXT, "num_key_value_heads": 4},
        vq_config={**vq, "attn_type": "none"},
        vocabulary_map={"<image>": 60, **names},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.ChameleonForConditionalGeneration(config).train()


MODELS: dict[str, Callable[[], Any]] = {
    "bert": bert_with_a_causal_head,
    "qwen2_audio": qwen2_audio,
    "chameleon": chameleon,
    **{name: functools.partial(build, name) for name in ("llama", "bart", "qwen3_moe", "gemma3n")},
}


def uneven(rows: int = 6, length: int = 9) -> dict[str, Any]:
    """Labels in the first places, padding that has labels, and numbers of labels that differ from row to row."""
    ids = tokens(rows, length).clamp(20, 59)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row, (kept, used) in enumerate(zip((9, 2, 9, 3, 8, 2), (9, 5, 6, 9, 7, 8), strict=True)):
        labels[row, kept:] = -100
        mask[row, used:] = 0
    labels[3, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def check(make: Callable[[], Any], batch: dict[str, Any], microbatches: int, **options: Any) -> None:
    wrapped, loss, expected = trained_beside_plain(make(), batch, microbatches, **options)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(wrapped(**batch).loss.detach(), expected, rtol=0, atol=1e-5)


@sweep("name, microbatches, given", MODELS, [1, 2, 3], ["all", "no mask", "items", "items, no mask"], together=1)
def test_uneven_labels(name: str, microbatches: int, given: str) -> None:
    batch = uneven()
    if "no mask" in given:
        del batch["attention_mask"]
    if "items" in given:
        batch["num_items_in_batch"] = torch.tensor(40)
    check(MODELS[name], batch, microbatches)


@pytest.mark.parametrize("name", ["chameleon", "llama", "bart"])
def test_uneven_labels_in_chunks(name: str) -> None:
    check(MODELS[name], uneven(), 3, loss_chunk_tokens=4)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_labels_that_are_shifted_by_the_caller(microbatches: int) -> None:
    batch = uneven()
    batch["shift_labels"] = torch.roll(batch["labels"], -1, 1)
    batch["labels"] = torch.zeros_like(batch["labels"])
    check(MODELS["llama"], batch, microbatches)


Loss = Callable[..., torch.Tensor]


class WithOwnLoss(OddForCausalLM):
    """Its loss is the test's."""

    loss: Loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids)
        loss = None if labels is None else self.loss(outputs.logits, labels, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=outputs.logits)


def own_loss(loss: Loss) -> WithOwnLoss:
    model: Any = odd()
    model.__class__ = WithOwnLoss
    model.loss = loss
    return model


def by_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def mean_of_rows(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    counted = (labels != -100).sum(1)
    return (by_token(logits, labels).sum(1) / counted).mean()


def sum_of_all(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return by_token(logits, labels).sum()


def mean_of_all_places(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return by_token(logits, labels).mean()


def sum_by_items(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any) -> torch.Tensor:
    total = by_token(logits, labels).sum()
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


UNDERSTOOD = [mean_of_rows, sum_of_all, mean_of_all_places, sum_by_items]


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("loss", UNDERSTOOD, ids=lambda loss: loss.__name__)
def test_losses_of_the_users_model(loss: Loss, items: int | None) -> None:
    batch = {name: value for name, value in uneven().items() if name != "attention_mask"}
    check(lambda: own_loss(loss), batch | ({} if items is None else {"num_items_in_batch": items}), 3)


def mean_and_largest(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    each = by_token(logits, labels)
    return each.sum() / (labels != -100).sum() + each.max()


def root(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return by_token(logits, labels).square().mean().sqrt()


def squared_by_items(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return sum_by_items(logits, labels) / (1 if num_items_in_batch is None else num_items_in_batch**2)


@pytest.mark.parametrize(
    ("loss", "items", "reason"),
    [
        (mean_and_largest, None, "what its loss is the mean of is not known"),
        (root, None, "what its loss is the mean of is not known"),
        (squared_by_items, 40, "what its loss does with num_items_in_batch is not known"),
    ],
    ids=["largest", "root", "items"],
)
def test_losses_that_do_not_add_up_run_whole(loss: Loss, items: int | None, reason: str) -> None:
    batch = {name: value for name, value in uneven().items() if name != "attention_mask"}
    if items is not None:
        batch["num_items_in_batch"] = items
    plain = own_loss(loss)
    expected = plain(**batch).loss
    wrapped = wrap_model_to_roundpipe(own_loss(loss))
    assert torch.equal(wrapped.forward_backward(input_kwargs=batch), expected.detach())
    wrapped.synchronize()
    with pytest.raises(ValueError, match=rf"cannot be cut into 3 microbatches: {reason}; set num_microbatch=1"):
        wrapped.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_zeros_hides_nothing(dtype: torch.dtype) -> None:
    """All labels are equally likely, so that the losses of all parts are the same."""
    model = build("bart").to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    wrapped = wrap_model_to_roundpipe(model)
    found = wrapped._language_model._found.losses
    assert found[LossForm.of(uneven())].reduction is Reduction.LABELS
    assert not model.get_output_embeddings().weight.any()


@pytest.mark.parametrize("change", ["an option of the loss", "another loss function", "further labels"])
def test_what_was_not_tried_runs_whole(change: str) -> None:
    batch, model = uneven(), build("llama")
    if change == "an option of the loss":
        batch["labels"] = batch["input_ids"]
        batch["ignore_index"] = int(batch["labels"][0, 4])
    elif change == "further labels":
        batch["other_labels"] = batch["labels"]
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model)
    if change == "another loss function":
        for each in (plain, model):
            each.loss_function = lambda logits, labels, vocab_size, **_: by_token(logits, labels).square().mean()
    expected = plain(**batch, use_cache=False).loss
    torch.testing.assert_close(wrapped.forward_backward(input_kwargs=batch), expected.detach())
    wrapped.synchronize()
    with pytest.raises(ValueError, match="what its loss is the mean of is not known"):
        wrapped.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=2))


def test_a_loss_without_labels_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, encoder_stride=4)
    torch.manual_seed(0)
    model = transformers.ViTForMaskedImageModeling(config).train()
    plain = copy.deepcopy(model)
    masked = torch.rand(4, 16) > torch.tensor([[0.9], [0.5], [0.2], [0.1]])
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "bool_masked_pos": masked}
    wrapped = wrap_model_to_roundpipe(model)
    with pytest.raises(ValueError, match=r"ViTForMaskedImageModeling returned a loss .*set num_microbatch=1"):
        wrapped.forward_backward(input_kwargs=batch)
    expected = plain(**batch).loss
    one = RoundPipeRunConfig(num_microbatch=1)
    assert torch.equal(wrapped.forward_backward(input_kwargs=batch, run_config=one), expected.detach())
    wrapped.synchronize()


def test_wrapping_reads_the_weights_of_the_layers_no_more_often_than_before() -> None:
    """The trials run the part after the layers alone."""
    model = build("llama")
    calls = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    roundpipe.devices("virtual:1")
    wrap_model_to_roundpipe(model, native=False)
    assert len(calls) == 3  # the plain model, the chain, and all rows but one
