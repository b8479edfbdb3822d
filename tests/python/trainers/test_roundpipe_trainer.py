"""RoundPipeTrainer against transformers' Trainer: curves, events, checkpoints, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback

import moe_models
import roundpipe
from roundpipe import wrap_model_to_roundpipe
from roundpipe.huggingface import RoundPipeTrainer
from trainer_runs import (
    ROUNDING,
    EventLog,
    arguments,
    curve,
    difference,
    losses,
    make_trainer,
    rows_of_text,
    small_llama,
    some_in_short,
)

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.:FutureWarning"),
]


def with_lora(dropout: float = 0.0) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(small_llama(), config)


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as documented": ({}, {}),
    "accumulated": ({"gradient_accumulation_steps": 3}, {}),
    "checkpointed activations": ({"gradient_checkpointing": True}, {}),
    "not clipped": ({"max_grad_norm": 0.0}, {}),
    "cosine": ({"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1}, {}),
    "label smoothing": ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, {}),
    "own loss function": ({"gradient_accumulation_steps": 2}, {"compute_loss_func": summed_loss}),
    "metrics": ({}, {"compute_metrics": accuracy}),
    "sgd": ({"optim": "sgd"}, {}),
    "adafactor": ({"optim": "adafactor"}, {}),
    "limited steps": ({"max_steps": 3, "logging_first_step": True, "eval_on_start": True}, {}),
}


@pytest.mark.parametrize("setting", some_in_short(SETTINGS, {"as documented"}))
def test_same_curve_and_events(setting: str, tmp_path: Path) -> None:
    options, given = SETTINGS[setting]
    results = []
    for kind in (Trainer, RoundPipeTrainer):
        log = EventLog()
        trainer = make_trainer(
            kind, tmp_path, small_llama(), {**given, "callbacks": [log]}, eval_strategy="epoch", **options
        )
        trainer.train()
        results.append((curve(trainer), log.events))
    assert trainer.model.calls > 0
    assert difference(results[0][0], results[1][0]) < ROUNDING
    assert results[0][1] == results[1][1]


def test_weight_decay_is_of_the_parameters_that_transformers_chooses(tmp_path: Path) -> None:
    """Each group has the same names: by names and modules of the original model, not of what wraps it."""
    found = []
    for kind in (Trainer, RoundPipeTrainer):
        model = moe_models.make("gpt_oss")
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        trainer = make_trainer(kind, tmp_path, model, {}, weight_decay=0.1)
        groups = trainer.create_optimizer().param_groups
        found.append([(group["weight_decay"], [names[id(p)] for p in group["params"]]) for group in groups])
    assert found[0] == found[1]
    assert all(names for _, names in found[0])


@pytest.mark.long
def test_mixed_precision_has_the_bits_of_one_microbatch(tmp_path: Path) -> None:
    results = []
    for model in (small_llama(), wrapped()):
        kind = Trainer if type(model) is not roundpipe.RoundPipe else RoundPipeTrainer
        trainer = make_trainer(kind, tmp_path, model, {}, bf16=True, max_steps=3)
        trainer.train()
        results.append((curve(trainer), trainer.evaluate()["eval_loss"]))
    assert results[0] == results[1]


def wrapped() -> Any:
    one = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    return wrap_model_to_roundpipe(small_llama(), model_run_config=one)


class WeightedLoss:
    """The custom loss of transformers' documentation."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


class PlainWeighted(WeightedLoss, Trainer):
    pass


class OurWeighted(WeightedLoss, RoundPipeTrainer):
    pass


def small_bert(head: Any, labels: int) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.BertConfig(
        vocab_size=64, num_labels=labels, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
    )
    torch.manual_seed(0)
    return head(config)


@pytest.mark.long
def test_an_overridden_loss_sees_the_whole_batch(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(8) + 3 * i, "labels": i % 3} for i in range(16)]
    compare_accumulated((PlainWeighted, OurWeighted), transformers.BertForSequenceClassification, 3, rows, tmp_path)


@pytest.mark.long
def test_a_mean_is_divided_by_the_accumulated_batches(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(8) + i, "start_positions": i % 8, "end_positions": 7 - i % 4} for i in range(16)]
    compare_accumulated((Trainer, RoundPipeTrainer), transformers.BertForQuestionAnswering, 2, rows, tmp_path)


def compare_accumulated(kinds: Any, head: Any, labels: int, rows: list[dict[str, Any]], folder: Path) -> None:
    given = {"train_dataset": rows, "eval_dataset": rows[:5], "data_collator": None}
    options = {"learning_rate": 1e-3, "eval_strategy": "epoch", "gradient_accumulation_steps": 3}
    curves = []
    for kind in kinds:
        trainer = make_trainer(kind, folder, small_bert(head, labels), given, **options)
        trainer.train()
        curves.append(curve(trainer))
    assert difference(*curves) < ROUNDING


def small_mixtral() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64, num_local_experts=4, num_key_value_heads=2, output_router_logits=True,
            router_aux_loss_coef=0.1, **sizes
        )
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*adds a router loss")
def test_a_router_loss_is_one_of_the_whole_batch(tmp_path: Path) -> None:
    curves = []
    for kind in (Trainer, RoundPipeTrainer):
        trainer = make_trainer(kind, tmp_path, small_mixtral(), {}, max_steps=2)
        trainer.train()
        curves.append(curve(trainer))
    assert difference(*curves) < 1e-5


@pytest.mark.long
def test_a_batch_without_labels_adds_nothing(tmp_path: Path) -> None:
    rows = rows_of_text(8)
    for row in rows[2:]:
        row["labels"] = [-100] * len(row["labels"])
    curves = []
    for kind in (Trainer, RoundPipeTrainer):
        trainer = make_trainer(
            kind, tmp_path, small_llama(), {"train_dataset": rows}, gradient_accumulation_steps=2, max_steps=2
        )
        trainer.train()
        curves.append(curve(trainer))
    assert difference(*curves) < ROUNDING


def test_noise_on_embeddings_is_drawn_on_the_device(tmp_path: Path) -> None:
    trainer = make_trainer(RoundPipeTrainer, tmp_path, wrapped(), {}, neftune_noise_alpha=5.0, max_steps=1)
    first = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    plain = small_llama().train()
    plain.get_input_embeddings().neftune_noise_alpha = 5.0
    plain.get_input_embeddings().register_forward_hook(transformers.integrations.neftune.neftune_post_forward_hook)
    torch.manual_seed(trainer.model.layer_seed(0, 0, 0))
    assert losses(trainer) == [plain(**first).loss.item()]
    assert not trainer.model.get_input_embeddings()._forward_hooks


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Interruption(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 6:
            raise KeyboardInterrupt


MODELS = {"full": small_llama, "LoRA": with_lora, "dropout": lambda: with_lora(0.5)}


@pytest.mark.parametrize("model", some_in_short(MODELS, {"dropout"}))
def test_an_interrupted_training_goes_on(model: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    whole = make_trainer(RoundPipeTrainer, tmp_path / "whole", MODELS[model](), {}, **saving)
    whole.train()
    broken = make_trainer(RoundPipeTrainer, tmp_path, MODELS[model](), {"callbacks": [Interruption()]}, **saving)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = make_trainer(RoundPipeTrainer, tmp_path, MODELS[model](), {}, **saving)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)
    state = json.loads((tmp_path / "checkpoint-4" / "roundpipe_state.json").read_text())
    assert state["calls"] == 4


@pytest.mark.parametrize("model", some_in_short(["full", "LoRA"], set()))
def test_checkpoints_go_on_in_the_other_trainer(model: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    curves = {}
    for kind in (Trainer, RoundPipeTrainer):
        trainer = make_trainer(kind, tmp_path / kind.__name__, MODELS[model](), {}, **saving)
        trainer.train()
        curves[kind] = losses(trainer)
    for kind, other in ((Trainer, RoundPipeTrainer), (RoundPipeTrainer, Trainer)):
        trainer = make_trainer(other, tmp_path / "again", MODELS[model](), {}, max_steps=5)
        trainer.train(resume_from_checkpoint=str(tmp_path / kind.__name__ / "checkpoint-3"))
        assert losses(trainer) == pytest.approx(curves[kind], rel=1e-5)


@pytest.mark.long
def test_the_best_model_is_loaded_and_saved(tmp_path: Path) -> None:
    results = []
    for kind in (Trainer, RoundPipeTrainer):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        trainer = make_trainer(
            kind, tmp_path / "run", small_llama(), {}, eval_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
            max_steps=6, save_total_limit=1
        )  # fmt: skip
        trainer.train()
        trainer.save_model(str(tmp_path / kind.__name__))
        results.append((trainer.state.best_global_step, trainer.predict(rows_of_text()[:6])))
    assert results[0][0] == results[1][0] == 2
    assert results[1][1].predictions == pytest.approx(results[0][1].predictions, abs=1e-5)
    assert results[1][1].metrics["test_loss"] == pytest.approx(results[0][1].metrics["test_loss"], rel=1e-5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "RoundPipeTrainer")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


# -- what it takes -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_optimizers_and_models_are_taken_as_they_come(tmp_path: Path) -> None:
    def run(kind: type[Trainer], model: Any, **given: Any) -> list[float]:
        trainer = make_trainer(kind, tmp_path, model, given, max_steps=3)
        trainer.train()
        return losses(trainer)

    plain, ours = small_llama(), small_llama()
    expected = run(Trainer, plain, optimizers=(torch.optim.SGD(plain.parameters(), lr=0.5), None))
    found = run(RoundPipeTrainer, ours, optimizers=(torch.optim.SGD(ours.parameters(), lr=0.5), None))
    assert found == pytest.approx(expected, rel=1e-5)

    expected = run(Trainer, None, model_init=small_llama)
    assert run(RoundPipeTrainer, None, model_init=small_llama) == pytest.approx(expected, rel=1e-5)

    model = wrap_model_to_roundpipe(small_llama())
    fused = roundpipe.optim.AdamW(model, lr=1e-2)
    plain = small_llama()
    expected = run(Trainer, plain, optimizers=(torch.optim.AdamW(plain.parameters(), lr=1e-2), None))
    assert run(RoundPipeTrainer, model, optimizers=(fused, None)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_other_trainers_take_it_as_a_base(tmp_path: Path) -> None:
    class Ours(RoundPipeTrainer, transformers.Seq2SeqTrainer):
        pass

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=64, dropout_rate=0.0, **sizes)
    weights = transformers.T5ForConditionalGeneration(config).state_dict()
    rows = [{"input_ids": torch.arange(8) + i + 1, "labels": torch.arange(5) + i + 1} for i in range(8)]
    results = []
    for kind in (transformers.Seq2SeqTrainer, Ours):
        model = transformers.T5ForConditionalGeneration(config)
        model.load_state_dict(weights)
        args = arguments(tmp_path, transformers.Seq2SeqTrainingArguments, predict_with_generate=True, max_steps=2)
        given = {"train_dataset": rows, "data_collator": transformers.default_data_collator, "args": args}
        trainer = make_trainer(kind, tmp_path, model, given)
        trainer.train()
        results.append((losses(trainer), trainer.predict(rows[:3]).predictions.tolist()))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert results[1][1] == results[0][1]


REFUSED: dict[str, Any] = {
    "torch_compile": True,
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
    "bf16_full_eval": True,
    "debug": "underflow_overflow",
    "optim": "adamw_bnb_8bit",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, **{name: REFUSED[name]})
    with pytest.raises(ValueError, match=rf"^\[RoundPipeTrainer\] {name}"):
        RoundPipeTrainer(model=small_llama(), args=args)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_other_checkpointing_of_activations_is_refused(tmp_path: Path) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    with pytest.raises(ValueError, match=r"\['offload'\] in activation_checkpointing_kwargs is refused"):
        RoundPipeTrainer(model=small_llama(), args=arguments(tmp_path, **options))


@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "fp16", "parallelism_config"])
def test_other_ways_to_run_are_refused_by_name(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, True)  # to give it at once needs a card, several processes or a package
    with pytest.raises(ValueError, match=rf"^\[RoundPipeTrainer\] {name}=True is refused"):
        RoundPipeTrainer(model=small_llama(), args=args)


def test_models_elsewhere_and_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama()
    model.hf_device_map = {"": "cuda:0"}
    with pytest.raises(ValueError, match=r"^\[RoundPipeTrainer\] the model was loaded with a device_map"):
        make_trainer(RoundPipeTrainer, tmp_path, model, {"eval_dataset": None}, max_steps=1)
    args = arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^\[RoundPipeTrainer\] the script was launched with"):
        RoundPipeTrainer(model=small_llama(), args=args)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*(single layer|one layer)")
def test_models_that_are_not_followed_are_saved_and_not_cut(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(vocab_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    weights = transformers.GPT2LMHeadModel(config).state_dict()

    def model(microbatches: int | None) -> Any:
        plain = transformers.GPT2LMHeadModel(config)
        plain.load_state_dict(weights)
        one = roundpipe.RoundPipeRunConfig(num_microbatch=microbatches)
        return wrap_model_to_roundpipe(plain, use_sequential_preset=False, model_run_config=one)

    with pytest.raises(ValueError, match="without being followed"):
        make_trainer(RoundPipeTrainer, tmp_path, model(None), {}, max_steps=2)
    trainer = make_trainer(RoundPipeTrainer, tmp_path, model(1), {}, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    plain = transformers.GPT2LMHeadModel(config)
    plain.load_state_dict(weights)
    expected = make_trainer(Trainer, tmp_path, plain, {}, max_steps=2)
    expected.train()
    assert difference(curve(expected), curve(trainer)) < ROUNDING
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_all_but_the_layers_stays_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A device that is there but not to be used: whatever goes to it has no values.
    monkeypatch.setattr(accelerate.state.PartialState, "default_device", torch.device("meta"))
    args = arguments(tmp_path, use_cpu=False, max_steps=2)
    assert args.distributed_state.device.type == "meta"
    trainer = make_trainer(RoundPipeTrainer, tmp_path, small_llama(), {"args": args})
    trainer.train()
    assert trainer.accelerator.device.type == args.device.type == "cpu"
    assert all(loss > 0 for loss in losses(trainer))

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    with pytest.raises(ValueError, match="unset the environment variable ACCELERATE_TORCH_DEVICE"):
        make_trainer(RoundPipeTrainer, tmp_path, small_llama(), {}, max_steps=2)


def test_importing_the_package_does_not_import_the_trainer() -> None:
    program = "import roundpipe.huggingface, sys; assert not {'transformers', 'accelerate', 'trl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("RoundPipeGRPOTrainer", "it generates during training.*RoundPipeDPOTrainer"),
        ("RoundPipePPOTrainer", "it generates during training"),
        ("RoundPipeORPOTrainer", r"class Mine\(RoundPipeTrainerMixin"),
    ],
)
def test_importing_a_trainer_that_is_not_there_says_what_is(name: str, why: str) -> None:
    known = "expected one of RoundPipeAccelerator, RoundPipeDPOTrainer, RoundPipeKTOTrainer, RoundPipeRewardTrainer"
    with pytest.raises(ImportError, match=rf"^\[roundpipe.huggingface\] there is no {name}, {known}.*{why}"):
        exec(f"from roundpipe.huggingface import {name}")
    with pytest.raises(AttributeError, match="has no attribute 'Trainers'"):
        _ = roundpipe.huggingface.Trainers


def test_every_name_is_there() -> None:
    pytest.importorskip("trl")
    assert {getattr(roundpipe.huggingface, name).__name__ for name in roundpipe.huggingface.__all__} == set(
        roundpipe.huggingface._TRAINERS
    )
