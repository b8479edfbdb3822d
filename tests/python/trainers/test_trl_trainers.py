"""TRL's trainers in the pipeline against TRL's own: curves, metrics, events, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from roundpipe import wrap_model_to_roundpipe
from roundpipe.huggingface import RoundPipeTrainer
from tiny_chat import byte_tokenizer, model_folder, tiny_llama
from trainer_runs import ROUNDING, EventLog, arguments, curve, difference, losses, some_in_short

datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

from roundpipe.huggingface import RoundPipeDPOTrainer, RoundPipeSFTTrainer  # noqa: E402  needs trl

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(deprecated|packing|adds a router loss)"),
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("CI", "true")
    datasets.disable_progress_bars()


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


def preferences() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{'abcdefgh'[index % 8]} {index % 7}:",
            "chosen": "abcdefgh"[index % 8] * (3 + index % 7),
            "rejected": "zyxw"[index % 4] * (2 + index % 5),
        }
        for index in range(16)
    ]


def rewards() -> list[dict[str, Any]]:
    return [
        {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in preferences()
    ]


def lora() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def with_trained_adapter() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = peft.get_peft_model(tiny_llama(), lora())
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.05)
        return model


def make(kind: Any, config: Any, folder: Path, model: Any, rows: Any, given: dict[str, Any], **options: Any) -> Any:
    settings = {"bf16": False, "max_length": 64, "learning_rate": 1e-3, **options}
    return kind(
        model=model,
        args=arguments(folder, config, **settings),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:4]),
        processing_class=byte_tokenizer(),
        **given,
    )


def compared(kinds: Any, config: Any, folder: Path, model: Any, rows: Any, given: Any, **options: Any) -> Any:
    """Trains and evaluates in both trainers; their curves, metrics and events are equal. Returns ours."""
    results = []
    for kind in kinds:
        log = EventLog()
        trainer = make(kind, config, folder, model(), rows, {**given(), "callbacks": [log]}, **options)
        trainer.train()
        trainer.evaluate()
        results.append((curve(trainer), log.events))
    assert trainer.model.calls > 0
    assert difference(results[0][0], results[1][0]) < ROUNDING
    assert results[0][1] == results[1][1]
    return trainer


def small_mixtral() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=260, **experts, **sizes))


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
@pytest.mark.parametrize("base", ["SFTTrainer", "RewardTrainer"])
def test_a_trainer_of_trl_takes_ours_as_a_base(base: str, tmp_path: Path) -> None:
    theirs = getattr(trl, base)
    mine = type("Mine", (RoundPipeTrainer, theirs), {})
    if base == "SFTTrainer":
        compared((theirs, mine), trl.SFTConfig, tmp_path, tiny_llama, chats(), dict, max_steps=3)
        return

    def scorer() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=260, num_labels=1, pad_token_id=256, **sizes)
        return transformers.LlamaForSequenceClassification(config)

    compared((theirs, mine), trl.RewardConfig, tmp_path, scorer, rewards(), dict, max_steps=3)


@pytest.mark.long
def test_supervised_training_goes_on(tmp_path: Path) -> None:
    given = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    kind = RoundPipeSFTTrainer
    whole = make(kind, trl.SFTConfig, tmp_path / "whole", tiny_llama(), chats(), {"peft_config": lora()}, **given)
    whole.train()
    again = make(kind, trl.SFTConfig, tmp_path / "again", tiny_llama(), chats(), {"peft_config": lora()}, **given)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(again) == losses(whole)


def test_other_trainers_and_wrapped_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TRL's KTOTrainer is not supported"):
        type("Mine", (RoundPipeTrainer, trl.KTOTrainer), {})(model=tiny_llama(), args=None)
    with pytest.raises(ValueError, match=r"the model is in the pipeline already"):
        make(RoundPipeSFTTrainer, trl.SFTConfig, tmp_path, wrap_model_to_roundpipe(tiny_llama()), texts(), {})
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


def test_preferences_need_our_trainer_of_preferences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Mine is a DPOTrainer, expected a RoundPipeDPOTrainer"):
        type("Mine", (RoundPipeTrainer, trl.DPOTrainer), {})(model=tiny_llama(), args=None)
