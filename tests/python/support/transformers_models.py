"""Tiny models of transformers that are no causal language models, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97
CLASSES = 3

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA = {**_TEXT, "num_key_value_heads": 2}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
_T5 |= {"dropout_rate": 0.0, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0}
_BART = {"vocab_size": VOCABULARY, "d_model": 32, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1}
_BART |= {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 3), ("ffn_dim", 48))}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2, "eos_token_id": 2}
_PICTURE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_PICTURE |= {"image_size": 16, "patch_size": 4}

Batch = dict[str, Any]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def text(rows: int, length: int = 9) -> Batch:
    """Rows of uneven lengths, padded on the right, the last token of each the end of a sentence."""
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=_generator())
    attended = torch.ones_like(ids)
    for row in range(rows):
        used = length - (2 * row) % (length - 3)
        attended[row, used:] = ids[row, used:] = 0
        ids[row, used - 1] = 2
    return {"input_ids": ids, "attention_mask": attended}


def token_labels(rows: int, length: int = 9, classes: int = VOCABULARY) -> torch.Tensor:
    """Another number of ignored labels in each row."""
    labels = torch.randint(0, classes, (rows, length), generator=_generator())
    for row in range(rows):
        labels[row, : (3 * row + 1) % length] = -100
    return labels


def _masked(rows: int) -> Batch:
    return {**text(rows), "labels": token_labels(rows)}


def _translated(rows: int) -> Batch:
    return {**text(rows), "labels": token_labels(rows, 7)}


def _heard(rows: int) -> Batch:
    return {"input_features": torch.randn(rows, 8, 40, generator=_generator()), "labels": token_labels(rows, 7)}


def _classes(rows: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (rows,), generator=_generator())


def _classified(rows: int) -> Batch:
    return {**text(rows), "labels": _classes(rows)}


def _multi_label(rows: int) -> Batch:
    return {**text(rows), "labels": torch.rand(rows, CLASSES, generator=_generator()).round()}


def _rewarded(rows: int) -> Batch:
    return {**text(rows), "labels": torch.randn(rows, generator=_generator())}


def _tagged(rows: int) -> Batch:
    return {**text(rows), "labels": token_labels(rows, classes=CLASSES)}


def _answered(rows: int) -> Batch:
    places = {name: torch.randint(0, 4, (rows,), generator=_generator()) for name in ("start", "end")}
    return {**text(rows), **{f"{name}_positions": place for name, place in places.items()}}


def pictures(rows: int) -> torch.Tensor:
    """Random numbers [rows, 3, 16, 16]."""
    return torch.randn(rows, 3, 16, 16, generator=_generator())


def _pictured(rows: int) -> Batch:
    return {"pixel_values": pictures(rows), "labels": _classes(rows)}


def _captioned(rows: int) -> Batch:
    return {**text(rows), "pixel_values": pictures(rows), "return_loss": True}


def _model(name: str, family: str, batch: Callable[[int], Batch], **options: Any) -> tuple[Any, Any]:
    def make() -> PreTrainedModel:
        config = getattr(transformers, f"{family}Config")(**options)
        model: PreTrainedModel = getattr(transformers, name)(config)
        return model

    return make, batch


_LABELS = {"num_labels": CLASSES}
WITH_LOSS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[int], Batch]]] = {
    # shared embeddings, position biases that layers hand on
    "t5": _model("T5ForConditionalGeneration", "T5", _translated, **_T5),
    "bart": _model("BartForConditionalGeneration", "Bart", _translated, **_BART),
    "whisper": _model(
        "WhisperForConditionalGeneration",
        "Whisper",
        _heard,
        **_BART,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=40,
    ),
    "bert_masked": _model("BertForMaskedLM", "Bert", _masked, **_BERT),
    "bert_classifier": _model("BertForSequenceClassification", "Bert", _classified, **_BERT, **_LABELS),
    "bert_multi_label": _model("BertForSequenceClassification", "Bert", _multi_label, **_BERT, **_LABELS),
    "bert_tagger": _model("BertForTokenClassification", "Bert", _tagged, **_BERT, **_LABELS),
    "bert_answers": _model("BertForQuestionAnswering", "Bert", _answered, **_BERT),
    "roberta_masked": _model("RobertaForMaskedLM", "Roberta", _masked, **_BERT),
    # the loss counts what is attended to
    "electra_detector": _model(
        "ElectraForPreTraining",
        "Electra",
        lambda rows: {**text(rows), "labels": token_labels(rows).clamp(0, 1)},
        **_BERT,
    ),
    # layers that are the same module
    "albert_masked": _model("AlbertForMaskedLM", "Albert", _masked, **_BERT, embedding_size=16),
    "llama_classifier": _model("LlamaForSequenceClassification", "Llama", _classified, **_LLAMA, **_LABELS),
    "llama_reward": _model("LlamaForSequenceClassification", "Llama", _rewarded, **_LLAMA, num_labels=1),
    "vit": _model("ViTForImageClassification", "ViT", _pictured, **_PICTURE, **_LABELS),
}
CONTRASTIVE = _model("CLIPModel", "CLIP", _captioned, text_config=_TEXT, vision_config=_PICTURE, projection_dim=16)
WITHOUT_LOSS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[int], Batch]]] = {
    "bert": _model("BertModel", "Bert", text, **_BERT),
    "llama": _model("LlamaModel", "Llama", text, **_LLAMA),
    "bart": _model("BartModel", "Bart", text, **_BART),
    "vit": _model("ViTModel", "ViT", lambda rows: {"pixel_values": pictures(rows)}, **_PICTURE),
}


def build(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model with random weights; biases and norms random, too, so that none hides a mistake."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()
