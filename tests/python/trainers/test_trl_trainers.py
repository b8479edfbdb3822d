"""TRL's trainers in the pipeline against TRL's own: curves, metrics, events, checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from roundpipe import wrap_model_to_roundpipe
from roundpipe.huggingface import RoundPipeTrainer, RoundPipeTrainerMixin
from tiny_chat import model_folder, tiny_llama
from trainer_runs import SGD, agree, arguments, losses, some_in_short

trl = pytest.importorskip("trl")

from roundpipe.huggingface import RoundPipeDPOTrainer, RoundPipeSFTTrainer  # noqa: E402  needs trl
from trl_runs import (  # noqa: E402
    compared,
    lora,
    make,
    offline,  # noqa: F401  a fixture
    preferences,
    small_mixtral,
    trained,
    with_trained_adapter,
)

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread", "offline"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(deprecated|packing|adds a router loss)"),
]


def chats() -> list[dict[str, Any]]:
    rows = []
    for index in range(16):
        letter, times = "abcdefgh"[index % 8], 3 + index % 7
        question = {"role": "user", "content": f"{letter} {times}"}
        rows.append({"messages": [question, {"role": "assistant", "content": letter * times}]})
    return rows


def texts() -> list[dict[str, Any]]:
    return [{"text": "abcdefgh"[index % 8] * (4 + 3 * (index % 5))} for index in range(16)]


def completions() -> list[dict[str, Any]]:
    """Every fourth prompt leaves no room for its completion."""
    rows = []
    for index in range(16):
        letter, repeated = "abcdefgh"[index % 8], 9 if index % 4 == 3 else 1
        rows.append({"prompt": f"{letter} {index}:" * repeated, "completion": letter * (3 + index % 7)})
    return rows


SFT: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "chats": (tiny_llama, chats, {}, {}),
    "texts": (tiny_llama, texts, {}, {}),
    "completions": (
        tiny_llama, completions, {"max_length": 32, "per_device_train_batch_size": 1, "max_steps": 4}, {}
    ),
    "accumulated": (tiny_llama, completions, {"gradient_accumulation_steps": 2, "max_length": 32}, {}),
    "LoRA": (tiny_llama, chats, {}, {"peft_config": lora()}),
    "packed": (tiny_llama, texts, {"packing": True, "max_length": 32, "per_device_train_batch_size": 2}, {}),
    "padding-free": (tiny_llama, texts, {"padding_free": True, "max_length": None}, {}),
    "dft": (tiny_llama, completions, {"loss_type": "dft"}, {}),
    "label smoothing": (tiny_llama, chats, {"label_smoothing_factor": 0.1}, {}),
    "router loss": (small_mixtral, texts, {"router_aux_loss_coef": 0.1, "max_steps": 3}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", some_in_short(SFT, {"completions"}))
def test_supervised(case: str, tmp_path: Path) -> None:
    model, rows, options, given = SFT[case]
    kinds = (trl.SFTTrainer, RoundPipeSFTTrainer)
    compared(kinds, trl.SFTConfig, tmp_path, model, rows(), lambda: dict(given), **options)


@pytest.mark.long
def test_a_model_by_its_name(tmp_path: Path) -> None:
    name = str(model_folder(tmp_path / "model"))
    kinds = (trl.SFTTrainer, RoundPipeSFTTrainer)
    compared(kinds, trl.SFTConfig, tmp_path, lambda: name, chats(), dict, max_steps=3)


@pytest.mark.long
def test_a_trainer_of_trl_takes_the_mixin(tmp_path: Path) -> None:
    mine = type("Mine", (RoundPipeTrainerMixin, trl.SFTTrainer), {})
    compared((trl.SFTTrainer, mine), trl.SFTConfig, tmp_path, tiny_llama, chats(), dict, max_steps=3)


@pytest.mark.long
def test_supervised_training_goes_on(tmp_path: Path) -> None:
    given = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    kind = RoundPipeSFTTrainer
    whole = make(kind, trl.SFTConfig, tmp_path / "whole", tiny_llama(), chats(), {"peft_config": lora()}, **given)
    whole.train()
    again = make(kind, trl.SFTConfig, tmp_path / "again", tiny_llama(), chats(), {"peft_config": lora()}, **given)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(again) == losses(whole)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("trl.GRPOTrainer", r"it generates during training.*RoundPipeDPOTrainer"),
        ("trl.experimental.gkd.GKDTrainer", "it generates during training"),
        ("trl.experimental.orpo.ORPOTrainer", r"is not supported; expected one of DPOTrainer, KTOTrainer"),
        ("trl.experimental.bema_for_ref_model.DPOTrainer", "is not supported"),
    ],
)
def test_other_trainers_are_refused(name: str, why: str) -> None:
    module, _, kind = name.rpartition(".")
    theirs = getattr(importlib.import_module(module), kind)
    with pytest.raises(ValueError, match=rf"^\[RoundPipeTrainerMixin\] trl\..*{kind} .*{why}"):
        type("Mine", (RoundPipeTrainerMixin, theirs), {})(model=tiny_llama(), args=None)


def test_wrapped_models_are_refused(tmp_path: Path) -> None:
    wrapped = wrap_model_to_roundpipe(tiny_llama())
    with pytest.raises(ValueError, match=r"in the pipeline already"):
        make(RoundPipeSFTTrainer, trl.SFTConfig, tmp_path, wrapped, texts(), {})
    with pytest.raises(ValueError, match=r"in the pipeline already"):
        make(RoundPipeDPOTrainer, trl.DPOConfig, tmp_path, tiny_llama(), preferences(), {"ref_model": wrapped})
    model = tiny_llama()
    model.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=r"^\[RoundPipeTrainer\] the forward of a LlamaForCausalLM was assigned"):
        RoundPipeTrainer(model=model, args=arguments(tmp_path))


PREFERENCES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "LoRA": (tiny_llama, lambda: {"peft_config": lora()}, {}),
    "accumulated": (
        tiny_llama,
        lambda: {"peft_config": lora()},
        {"gradient_accumulation_steps": 2, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "trained adapter": (with_trained_adapter, dict, {}),
    "no adapters": (tiny_llama, lambda: {"ref_model": tiny_llama()}, {}),
}


@pytest.mark.parametrize("case", some_in_short(PREFERENCES, {"LoRA"}))
def test_preferences(case: str, tmp_path: Path) -> None:
    model, given, options = PREFERENCES[case]
    kinds = (trl.DPOTrainer, RoundPipeDPOTrainer)
    settings = {"learning_rate": 1e-2, "max_steps": 4, **options}
    trainer = compared(kinds, trl.DPOConfig, tmp_path, model, preferences(), given, **settings)
    assert losses(trainer)[0] > losses(trainer)[-1]


@pytest.mark.long
@pytest.mark.parametrize("case", ["LoRA", "trained adapter"])
def test_training_on_preferences_goes_on(case: str, tmp_path: Path) -> None:
    model, given, _ = PREFERENCES[case]
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2}
    trained = []
    for folder, checkpoint in (("whole", None), ("again", str(tmp_path / "whole" / "checkpoint-3"))):
        trainer = make(
            RoundPipeDPOTrainer, trl.DPOConfig, tmp_path / folder, model(), preferences(), given(), **options
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        trained.append(losses(trainer))
    assert trained[0] == trained[1]


@pytest.mark.parametrize("name", ["sync_ref_model", "precompute_ref_log_probs", "activation_offloading"])
def test_what_has_no_meaning_for_preferences_is_refused(name: str, tmp_path: Path) -> None:
    given = {"peft_config": lora()}
    with pytest.raises(ValueError, match=rf"^\[RoundPipeDPOTrainer\] {name}=True is refused"):
        make(RoundPipeDPOTrainer, trl.DPOConfig, tmp_path, tiny_llama(), preferences(), given, **{name: True})


@pytest.mark.long
@pytest.mark.parametrize("case", ["LoRA", "no adapters"])
def test_the_mixin_takes_care_of_the_reference(case: str, tmp_path: Path) -> None:
    model, given, _ = PREFERENCES[case]
    kinds = (trl.DPOTrainer, type("Mine", (RoundPipeTrainerMixin, trl.DPOTrainer), {}))
    agree(trained(kinds, trl.DPOConfig, tmp_path, model, preferences(), given, **SGD, max_steps=3))


@pytest.mark.long
def test_a_router_loss_that_only_the_trainer_asks_for(tmp_path: Path) -> None:
    """It is one of the whole batch, though the model's config leaves it out."""
    options = {**SGD, "router_aux_loss_coef": 0.1, "max_steps": 3}
    kinds = (trl.DPOTrainer, RoundPipeDPOTrainer)
    given = lambda: {"ref_model": small_mixtral()}  # noqa: E731  one for each trainer
    agree(trained(kinds, trl.DPOConfig, tmp_path, small_mixtral, preferences(), given, **options))
