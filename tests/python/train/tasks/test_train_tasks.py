"""Runs that learn from comparing answers, beside plain loops with the formulas of the papers, and TRL's losses."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from interrupted_output import InterruptedAt
from roundpipe.data.records.store import SampleFiles
from roundpipe.data.samples import IGNORED
from roundpipe.train.config import TrainConfig
from roundpipe.train.model import load_model
from roundpipe.train.session import run
from tiny_chat import byte_tokenizer, model_folder, tiny_llama
from trl_runs import offline as offline
from trl_runs import preferences

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS, ROWS = 4, 10
RATE = 0.05
BETA, GOOD, BAD = 0.3, 1.5, 0.5
# Losses and weights of fp32, whose sums are made in another order over microbatches.
BOUND = 1e-5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    model_folder(folder / "model", num_hidden_layers=2)
    with (folder / "pairs.jsonl").open("w") as pairs, (folder / "rated.jsonl").open("w") as rated:
        for index in range(ROWS):
            letter, times = "abcdefgh"[index % 8], 3 + index % 5
            asked, right, wrong = f"{letter} {times}", letter * times, letter * (times + 1 + index % 3)
            pairs.write(json.dumps({"prompt": asked, "chosen": right, "rejected": wrong}) + "\n")
            is_good = index % 3 != 0
            rated.write(
                json.dumps({"prompt": asked, "completion": right if is_good else wrong, "label": is_good}) + "\n"
            )
    return folder


@pytest.fixture
def config(place: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def made(task: Any, **values: Any) -> TrainConfig:
        usual: dict[str, Any] = {
            "task": task,
            "model": str(place / "model"),
            "data": [str(place / ("rated.jsonl" if task == "kto" else "pairs.jsonl"))],
            "out": str(tmp_path / "run"),
            "length": 64,
            "batch_tokens": 2048,  # a step has all samples, so that their order does not matter
            "steps": STEPS,
            "schedule": "constant",
            "optimizer": "sgd",  # which does not magnify what is next to nothing
            "learning_rate": RATE,
            "weight_decay": 0.0,
            "held_out": 0,
            "devices": "virtual:2",
        }
        own: dict[str, dict[str, float]] = {
            "sft": {},
            "dpo": {"beta": BETA},
            "kto": {"beta": BETA, "good_weight": GOOD, "bad_weight": BAD},
            "reward": {},
        }
        return TrainConfig(**{**usual, **own[task], **values})

    return made


def lines_of(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]


def logps(model: Any, rows: list[Any]) -> torch.Tensor:
    """One row after the other: the log-probability of its labelled tokens."""
    found = []
    for row in rows:
        logits = model(input_ids=row["input_ids"][None]).logits[0, :-1].float()
        of_labels = logits.log_softmax(-1).gather(1, row["input_ids"][1:, None])[:, 0]
        found.append(of_labels[row["labels"][1:] != IGNORED].sum())
    return torch.stack(found)


def dpo_loss(model: Any, reference: Any, samples: list[Any]) -> torch.Tensor:
    gained = []
    for name in ("chosen", "rejected"):
        rows = [sample[name] for sample in samples]
        with torch.no_grad():
            before = logps(reference, rows)
        gained.append(logps(model, rows) - before)
    return -F.logsigmoid(BETA * (gained[0] - gained[1])).mean()


def unmatched(samples: list[Any]) -> list[Any]:
    """Each question with the answer of the sample after the next."""
    rows = []
    for index, sample in enumerate(samples):
        other = samples[(index + 2) % len(samples)]
        asked, answer = sample["labels"] == IGNORED, other["labels"] != IGNORED
        ids = torch.cat([sample["input_ids"][asked], other["input_ids"][answer]])
        labels = torch.cat([torch.full((int(asked.sum()),), IGNORED), other["input_ids"][answer]])
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def kto_loss(model: Any, reference: Any, samples: list[Any]) -> torch.Tensor:
    others = unmatched(samples)
    with torch.no_grad():
        before = logps(reference, samples)
        moved = (logps(model, others) - logps(reference, others)).mean().clamp(min=0)
    gained = logps(model, samples) - before
    good = torch.tensor([sample["is_good"] for sample in samples])
    of_good = GOOD * (1 - torch.sigmoid(BETA * (gained - moved)))
    of_bad = BAD * (1 - torch.sigmoid(BETA * (moved - gained)))
    return torch.where(good, of_good, of_bad).mean()


def scores(model: Any, rows: list[Any]) -> torch.Tensor:
    return torch.stack([model(input_ids=row["input_ids"][None]).logits[0, 0] for row in rows])


def reward_loss(model: Any, reference: Any, samples: list[Any]) -> torch.Tensor:
    chosen, rejected = (scores(model, [sample[name] for sample in samples]) for name in ("chosen", "rejected"))
    return -F.logsigmoid(chosen - rejected).mean()


LOSSES = {"dpo": dpo_loss, "kto": kto_loss, "reward": reward_loss}


def plain_model(config: TrainConfig) -> Any:
    if config.task != "reward":
        return tiny_llama(num_hidden_layers=2)
    torch.manual_seed(config.seed)  # at which the head starts
    start = load_model(config, pad_token_id=256).state_dict()
    shape = tiny_llama(num_hidden_layers=2).config
    shape.num_labels = 1
    plain = AutoModelForSequenceClassification.from_config(shape)
    plain.load_state_dict(start)
    return plain


@pytest.mark.parametrize("task", list(LOSSES))
def test_a_task_is_the_plain_loop_with_its_formula(task: str, config: Callable[..., TrainConfig]) -> None:
    ours = config(task)
    assert run(ours, resume=False) == 0
    files = SampleFiles(Path(ours.out) / "data", pairs=task != "kto")
    samples = [files.sample(number) for number in range(len(files))]
    plain, reference, expected = plain_model(ours), tiny_llama(num_hidden_layers=2), []
    optimizer = torch.optim.SGD(plain.parameters(), RATE)
    for _ in range(STEPS):
        loss = LOSSES[task](plain, reference, samples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = [line["loss"] for line in lines_of(ours)]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < BOUND
    assert expected[-1] < expected[0] - 0.01
    kind: Any = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    result = kind.from_pretrained(Path(ours.out) / "model").state_dict()
    for name, weight in plain.state_dict().items():
        assert (result[name] - weight).abs().max() < BOUND, name


def with_other_weights(model: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def as_trl(row: Any, name: str = "completion_ids") -> dict[str, list[int]]:
    learnt = row["labels"] != IGNORED
    return {"prompt_ids": row["input_ids"][~learnt].tolist(), name: row["input_ids"][learnt].tolist()}


def loss_of_trl(trainer: Any, examples: list[dict[str, Any]]) -> float:
    return float(trainer.compute_loss(trainer.model, trainer.data_collator(examples)))


@pytest.mark.usefixtures("offline")
def test_the_plain_formulas_are_those_of_trl(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    settings = {"report_to": [], "use_cpu": True, "bf16": False, "max_length": 64}
    for task in ("dpo", "kto", "reward"):
        ours = config(task, out=str(tmp_path / task), steps=1)
        assert run(ours, resume=False) == 0
        files = SampleFiles(Path(ours.out) / "data", pairs=task != "kto")
        samples = [files.sample(number) for number in range(len(files))]
        reference = tiny_llama(num_hidden_layers=2)
        model = with_other_weights(plain_model(ours)).eval()
        given = {"model": model, "train_dataset": datasets.Dataset.from_list(preferences())}
        given["processing_class"] = byte_tokenizer()
        if task == "dpo":
            arguments = trl.DPOConfig(str(tmp_path), beta=BETA, **settings)
            trainer: Any = trl.DPOTrainer(**given, ref_model=reference, args=arguments)
            examples = [as_trl(s["chosen"], "chosen_ids") | as_trl(s["rejected"], "rejected_ids") for s in samples]
        elif task == "kto":
            arguments = trl.KTOConfig(
                str(tmp_path), beta=BETA, desirable_weight=GOOD, undesirable_weight=BAD, **settings
            )
            trainer = trl.KTOTrainer(**given, ref_model=reference, args=arguments)
            examples = [
                as_trl(sample) | as_trl(other, "KL_completion_ids") | {"label": sample["is_good"]}
                for sample, other in zip(samples, unmatched(samples), strict=True)
            ]
        else:
            trainer = trl.RewardTrainer(**given, args=trl.RewardConfig(str(tmp_path), **settings))
            examples = [{f"{n}_ids": s[n]["input_ids"].tolist() for n in ("chosen", "rejected")} for s in samples]
        with torch.no_grad():
            expected = float(LOSSES[task](model, reference, samples))
            assert abs(loss_of_trl(trainer, examples) - expected) < BOUND, task
            assert abs(expected - (0.5 if task == "kto" else 0.693)) > 1e-4  # the models differ


STRETCHED = {"steps": 5, "batch_tokens": 256, "held_out": 4.0, "evaluate_every": 2, "samples": 1, "sample_tokens": 4}


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("dpo", {"lora": True, "lora_dropout": 0.1}),
        ("kto", {"asynchronous": True, "optimizer": "adamw"}),
        ("reward", {"lora": True, "devices": "virtual:3"}),
        pytest.param("dpo", {"dtype": "float16", "microbatches": 1}, marks=pytest.mark.long),
        pytest.param("kto", {"lora": True, "quantise": "nf4"}, marks=pytest.mark.long),
        pytest.param("reward", {"dtype": "bfloat16", "optimizer": "adamw"}, marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(
    task: str,
    more: dict[str, Any],
    config: Callable[..., TrainConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, ours = (config(task, **{**STRETCHED, **more}, out=str(tmp_path / name)) for name in ("whole", "ours"))
    assert run(whole, resume=False) == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptedAt("step 2/"))
        assert run(ours, resume=False) == 130
    assert run(ours, resume=True) == 0
    kept = ("step", "loss", "accuracy", "grad_norm", "evaluation_loss", "evaluation_accuracy", "evaluation_answers")
    both = [[{k: v for k, v in line.items() if k in kept} for line in lines_of(each)] for each in (whole, ours)]
    assert both[0] == both[1]
    assert both[0][-1]["evaluation_answers"] == 4
    report = (Path(ours.out) / "report.html").read_text()
    assert "answers right, %" in report and "held-out answers right" in report
    folder = "adapter" if more.get("lora") else "model"
    weights = [load_file(next((Path(each.out) / folder).glob("*model.safetensors"))) for each in (whole, ours)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    if task == "reward" and more.get("lora"):
        assert any("score" in name for name in weights[0])


def test_two_passes_of_a_batch_that_asks_the_model_before(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    drawing = {"lora": True, "lora_dropout": 0.3, "clip": 0.01, "steps": 2}
    passes = {"clip_by": "two_passes", "gradients_at_once": True}
    both = [config("kto", **drawing, **more, out=str(tmp_path / str(len(more)))) for more in ({}, passes)]
    assert [run(each, resume=False) for each in both] == [0, 0]
    told = [[(line["loss"], line["grad_norm"]) for line in lines_of(each)] for each in both]
    assert told[0] == told[1] and told[0][0][1] > 0.01


def test_a_reference_of_another_run_is_refused(
    config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = config("dpo", **STRETCHED)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptedAt("step 2/"))
        assert run(ours, resume=False) == 130
    path = Path(ours.out) / "reference.safetensors"
    save_file({"train": torch.zeros(6, 2, dtype=torch.float64)}, path, {"train": "others"})
    with pytest.raises(
        ValueError, match=r"reference\.safetensors is damaged or was written for other samples, .* another --out"
    ):
        run(ours, resume=True)
    path.unlink()
    with pytest.raises(ValueError, match=r"reference\.safetensors cannot be read: .* begin anew with another --out"):
        run(ours, resume=True)


def test_pairs_are_one_good_and_one_bad_answer(config: Callable[..., TrainConfig], place: Path) -> None:
    ours = config("kto", data=[str(place / "pairs.jsonl")], steps=1)
    assert run(ours, resume=False) == 0
    files = SampleFiles(Path(ours.out) / "data", pairs=False)
    assert [files.sample(number)["is_good"] for number in range(len(files))] == [True, False] * ROWS
    assert TrainConfig(task="dpo", lora=True).rule_options["lr"] == 1e-5
    assert TrainConfig(task="kto").rule_options["lr"] == 1e-6


def test_what_does_not_fit_a_task_is_refused(config: Callable[..., TrainConfig], place: Path) -> None:
    for values, message in (
        ({"task": "ppo"}, r"--task is ppo, expected one of sft, dpo, kto, reward"),
        ({"task": "sft", "beta": 0.1}, r"--beta is 0.1, expected it only with --task dpo or kto"),
        ({"task": "reward", "good_weight": 2.0}, r"--good-weight is 2.0, expected it only with --task kto"),
        ({"task": "dpo", "beta": 0.0}, r"--beta is 0.0, expected a number above 0"),
        ({"task": "sft", "format": "preference"}, r"--format is preference, .* only with --task dpo or reward"),
        ({"task": "kto", "format": "messages"}, r"--format is messages, expected rated or auto, with --task kto"),
        ({"task": "reward", "sample_prompts": ["x"]}, r"--sample-prompts is .* a reward model does not write"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(**values)
    pairs, rated = str(place / "pairs.jsonl"), str(place / "rated.jsonl")
    for task, data, message in (
        ("sft", pairs, "expected texts or conversations, .* --task dpo or --task reward"),
        ("dpo", rated, "nothing usable is left.*\n.*\n.*\n.*a record without chosen and rejected"),
    ):
        with pytest.raises(ValueError, match=message):
            run(config(task, data=[data]), resume=False)


def test_what_an_adapter_was_trained_for_is_known(
    config: Callable[..., TrainConfig], place: Path, tmp_path: Path, capsys: Any
) -> None:
    scores, writes = (config(task, lora=True, steps=1, out=str(tmp_path / task)) for task in ("reward", "dpo"))
    assert run(scores, resume=False) == run(writes, resume=False) == 0
    said = capsys.readouterr().out
    assert "its base needs num_labels=1 and pad_token_id=256, see its README.md" in said
    assert "num_labels=1, pad_token_id=256" in (tmp_path / "reward" / "adapter" / "README.md").read_text()
    assert "AutoModelForCausalLM.from_pretrained(" in (tmp_path / "dpo" / "adapter" / "README.md").read_text()
    for task, adapter, message in (
        ("dpo", scores, "was trained as SEQ_CLS, expected CAUSAL_LM, which writes, for --task dpo; .* export --merge"),
        ("reward", writes, "was trained as CAUSAL_LM, expected SEQ_CLS, which scores rows, for --task reward"),
    ):
        with pytest.raises(ValueError, match=message):
            again = config(task, adapter=str(Path(adapter.out) / "adapter"), model="", out=str(tmp_path / "again"))
            run(again, resume=False)
    assert run(config("reward", steps=1, out=str(tmp_path / "whole")), resume=False) == 0
    with pytest.raises(
        ValueError, match=r"holds a LlamaForSequenceClassification, which scores rows, .* --task reward"
    ):
        run(config("dpo", model=str(tmp_path / "whole" / "model"), out=str(tmp_path / "more")), resume=False)


def test_answers_that_only_differ_behind_their_end_are_left_out(
    config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    pairs = [{"prompt": "q", "chosen": "a" * 80 + end, "rejected": "a" * 80 + "z"} for end in "bc"]
    pairs.append({"prompt": "q", "chosen": "a", "rejected": "b"})
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    ours = config("dpo", data=[str(tmp_path / "long.jsonl")], steps=1)
    assert run(ours, resume=False) == 0
    assert len(SampleFiles(Path(ours.out) / "data", pairs=True)) == 1
    assert "left out: chosen and rejected are equal before their end" in (Path(ours.out) / "report.html").read_text()


def test_a_reward_model_keeps_its_head_beside_an_encoded_base(config: Callable[..., TrainConfig]) -> None:
    ours = config("reward", lora=True, quantise="int8", steps=1)
    assert run(ours, resume=False) == 0
    assert lines_of(ours)[0]["accuracy"] >= 0


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_run_goes_on_with_its_microbatches_on_more_devices(
    task: str, config: Callable[..., TrainConfig], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"batch_tokens": 256, "data": [str(place / ("pairs.jsonl" if task == "dpo" else "rated.jsonl"))]}
    whole, ours = (config(task, **more, out=str(tmp_path / name)) for name in ("whole", "ours"))
    assert run(whole, resume=False) == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptedAt("step 2/"))
        assert run(ours, resume=False) == 130
    assert run(dataclasses.replace(ours, devices="virtual:3"), resume=True) == 0
    assert [line["loss"] for line in lines_of(ours)] == [line["loss"] for line in lines_of(whole)]


def test_a_model_with_a_loss_of_its_own_is_refused(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape = MixtralConfig(
        **sizes, num_key_value_heads=2, vocab_size=260, num_local_experts=4, output_router_logits=True
    )
    MixtralForCausalLM(shape).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(
        ValueError, match="with output_router_logits, whose loss is no sum over tokens; set it to False"
    ):
        run(config("dpo", model=str(tmp_path / "model")), resume=False)
