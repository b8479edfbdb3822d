"""Runs of TRL's trainers on tiny models and data made here, beside those of the same trainers in the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers

from tiny_chat import byte_tokenizer, tiny_llama
from trainer_runs import ROUNDING, SGD, EventLog, arguments, curve, difference, losses


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports nothing, and prints no bars."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("CI", "true")
    datasets.disable_progress_bars()


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


def lora(task: str = "CAUSAL_LM") -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)


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


def judged() -> list[dict[str, Any]]:
    """Completions that are good or bad."""
    return [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in preferences()[:8]
        for kind in ("chosen", "rejected")
    ]


def small_scorer(kind: str = "Llama") -> Any:
    """A reward model with the same weights each time."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # A Bert's rewards would otherwise be nearly the same for any row, and their differences mostly rounding.
        more = {"initializer_range": 0.3} if kind == "Bert" else {"num_key_value_heads": 2}
        config = getattr(transformers, f"{kind}Config")(vocab_size=260, num_labels=1, pad_token_id=256, **more, **sizes)
        return getattr(transformers, f"{kind}ForSequenceClassification")(config)


def trained(
    kinds: Any, config: Any, folder: Path, model: Callable[[], Any], rows: Any, given: Any, **options: Any
) -> list[Any]:
    """A trainer of each kind after `train` and `evaluate`."""
    trainers = []
    for kind in kinds:
        trainer = make(kind, config, folder / kind.__name__, model(), rows, given(), **options)
        trainer.train()
        trainer.evaluate()
        trainers.append(trainer)
    assert trainers[-1].model.calls > 0
    return trainers


def goes_on(kinds: Any, config: Any, folder: Path, model: Any, rows: Any, given: Any, **options: Any) -> None:
    """A run from a checkpoint has the bits of one that was not interrupted; one of the plain trainer's goes on, too."""
    options = {**SGD, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **options}
    plain, ours = trained(kinds, config, folder, model, rows, given, **options)
    for whole in (plain, ours):
        again = make(kinds[1], config, folder / "again", model(), rows, given(), **options)
        again.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
        assert losses(again) == (losses(ours) if whole is ours else pytest.approx(losses(plain), rel=1e-5))
        assert len(losses(again)) == 4
        if whole is ours:
            state = again.model.state_dict()
            assert all(torch.equal(state[name], value) for name, value in ours.model.state_dict().items())
