"""RoundPipeSeq2SeqTrainer against transformers' Seq2SeqTrainer, also where it generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DataCollatorForSeq2Seq,
    LogitsProcessor,
    LogitsProcessorList,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from roundpipe.huggingface import RoundPipeSeq2SeqTrainer
from tiny_chat import byte_tokenizer
from trainer_runs import SGD, agree, arguments, curve, losses, some_in_short

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_torch_thread")

KINDS = (Seq2SeqTrainer, RoundPipeSeq2SeqTrainer)


def small_t5() -> Any:
    """The same weights each time."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    tokens = {"vocab_size": 260, "decoder_start_token_id": 256, "pad_token_id": 256, "eos_token_id": 257}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.T5ForConditionalGeneration(transformers.T5Config(dropout_rate=0.0, **sizes, **tokens))


def small_bart() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    tokens = {"bos_token_id": 258, "pad_token_id": 256, "eos_token_id": 257, "decoder_start_token_id": 257}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.BartConfig(
            vocab_size=260, dropout=0.0, forced_eos_token_id=None, **sizes, **heads, **tokens
        )
        return transformers.BartForConditionalGeneration(config)


def with_lora() -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    model = small_t5()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)


def rows() -> list[dict[str, Any]]:
    using = byte_tokenizer()
    return [
        {
            **using(f"{'abcdefgh'[index % 8]} {index % 7}:"[: 3 + index % 3]),
            "labels": using("abcdefgh"[index % 8] * (2 + index % 5)).input_ids,
        }
        for index in range(12)
    ]


def exact(prediction: Any) -> dict[str, float]:
    """The metric of transformers' guide to summaries, in short: of what was generated, and of the labels."""
    generated, labels = prediction
    return {"sum": float(generated.sum()), "length": float((generated != 256).sum()), "labels": float(labels.sum())}


def make(kind: Any, folder: Path, model: Any, **options: Any) -> Any:
    using = byte_tokenizer()
    settings = {**SGD, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, **options}
    args = arguments(folder, Seq2SeqTrainingArguments, **settings)
    return kind(
        model=model,
        args=args,
        train_dataset=rows(),
        eval_dataset=rows()[:5],
        processing_class=using,
        data_collator=DataCollatorForSeq2Seq(tokenizer=using, model=model),
        compute_metrics=exact if args.predict_with_generate else None,
    )


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "generated": (small_t5, {"predict_with_generate": True, "generation_max_length": 8}),
    "beams": (small_bart, {"predict_with_generate": True, "generation_max_length": 8, "generation_num_beams": 2}),
    "LoRA": (
        with_lora,
        {"predict_with_generate": True, "generation_max_length": 8, "gradient_accumulation_steps": 2},
    ),
    "configured": (
        small_t5,
        {
            "predict_with_generate": True,
            "generation_config": transformers.GenerationConfig(max_new_tokens=4, decoder_start_token_id=256),
        },
    ),
    "losses": (small_bart, {"gradient_accumulation_steps": 2}),
    "smoothed": (small_t5, {"label_smoothing_factor": 0.1}),
    "smoothed, generated": (
        small_t5,
        {"label_smoothing_factor": 0.1, "predict_with_generate": True, "generation_max_length": 8},
    ),
}


@pytest.mark.parametrize("case", some_in_short(CASES, {"LoRA"}))
def test_same_curve_and_predictions(case: str, tmp_path: Path) -> None:
    model, options = CASES[case]
    trainers = []
    for kind in KINDS:
        trainer = make(kind, tmp_path / kind.__name__, model(), **options)
        trainer.train()
        trainers.append(trainer)
    assert trainers[1].model.calls > 0
    agree(trainers)
    if "predict_with_generate" in options:
        plain, ours = (trainer.predict(rows()[5:9]) for trainer in trainers)
        assert plain.predictions.tolist() == ours.predictions.tolist()
        assert curve(trainers[0])[2]["eval_sum"] == curve(trainers[1])[2]["eval_sum"]


@pytest.mark.long
@pytest.mark.parametrize("model", [small_t5, with_lora])
def test_an_interrupted_training_goes_on(model: Any, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    wholes = []
    for kind in KINDS:
        wholes.append(make(kind, tmp_path / kind.__name__, model(), **saving))
        wholes[-1].train()
    agree(wholes)
    for whole in wholes:
        again = make(RoundPipeSeq2SeqTrainer, tmp_path / "again", model(), **saving)
        again.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
        assert losses(again) == (losses(whole) if whole is wholes[1] else pytest.approx(losses(whole), rel=1e-5))


class Scores(LogitsProcessor):
    """Notes whether the scores that it sees were computed in bf16."""

    def __init__(self) -> None:
        self.in_short: list[bool] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.in_short.append(bool((scores.bfloat16().float() == scores).all()))
        return scores


@pytest.mark.parametrize("bf16", some_in_short([True, False], {True}))
def test_generation_has_the_precision_of_the_arguments(bf16: bool, tmp_path: Path) -> None:
    results = []
    for kind in KINDS:
        trainer = make(kind, tmp_path, small_t5(), predict_with_generate=True, bf16=bf16)
        scores = Scores()
        given = {"max_length": 6, "logits_processor": LogitsProcessorList([scores])}
        found = trainer.predict(rows()[:4], **given)
        results.append((found.predictions.tolist(), scores.in_short))
    assert results[0] == results[1]
    assert set(scores.in_short) == {bf16}
    assert "generate" not in vars(trainer.model._original_model)
