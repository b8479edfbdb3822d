"""RoundPipeAccelerator against accelerate's Accelerator in its documentation's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

from roundpipe import wrap_model_to_roundpipe
from roundpipe.huggingface import RoundPipeAccelerator
from trainer_runs import accelerate_epoch, padded, rows_of_text, small_llama

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def tied_llama() -> Any:
    model = small_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


@pytest.fixture(autouse=True)
def no_accelerator_yet() -> None:
    """accelerate keeps one setting a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def loop(accelerator: Any, folder: Path, resume: bool = False, model: Any = None, returned: int = 0) -> list[float]:
    """Trains two epochs, saves after the first, and evaluates; `resume` goes on from there.

    Returns losses, norms and the evaluation, from epoch `returned` on.
    """
    model = model or small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows_of_text(16), 4, collate_fn=padded)
    schedule = get_scheduler("linear", optimizer, 0, 8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume:
        accelerator.load_state(str(folder / "state"))
    found: list[float] = []
    first = 0
    model.train()
    for epoch in range(1 if resume else 0, 2):
        found += accelerate_epoch(accelerator, model, optimizer, schedule, loader)
        if epoch == 0:
            accelerator.save_state(str(folder / "state"))
            first = returned * len(found)
    model.eval()
    with torch.no_grad():
        found += [float(model(**batch).loss) for batch in loader]
    accelerator.unwrap_model(model).save_pretrained(folder / "model")
    return found[first:]


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.long)])
def test_the_documented_loop(precision: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "mixed_precision": precision}
    expected = loop(accelerate.Accelerator(cpu=True, **options), tmp_path / "plain")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = RoundPipeAccelerator(**options)
    found = loop(accelerator, tmp_path / "ours")
    assert found == pytest.approx(expected, rel=1e-5 if precision == "no" else 1e-2)
    assert accelerator._models[0].calls > 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "model")
    for name, value in accelerator._models[0].state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def with_dropout() -> Any:
    model = small_llama()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


def test_a_saved_state_goes_on(tmp_path: Path) -> None:
    whole = loop(RoundPipeAccelerator(), tmp_path, model=with_dropout(), returned=1)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert loop(RoundPipeAccelerator(), tmp_path, resume=True, model=with_dropout()) == whole


def test_what_is_not_trained_stays_as_it_is() -> None:
    teacher = small_llama().requires_grad_(False)
    assert RoundPipeAccelerator().prepare(teacher) is teacher


@pytest.mark.parametrize("options", [{"mixed_precision": "fp16"}, {"dynamo_backend": "inductor"}])
def test_what_has_no_meaning_is_refused_by_name(options: dict[str, str]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name if name != "mixed_precision" else "fp16"):
        RoundPipeAccelerator(**options)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", [accelerate.Accelerator, RoundPipeAccelerator])
def test_whole_models_are_saved_and_loaded(kind: Any, safe: bool, tmp_path: Path) -> None:
    accelerator = kind(cpu=True)
    model = accelerator.prepare(wrap_model_to_roundpipe(tied_llama()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator.save_model(model, tmp_path / "model", safe_serialization=safe)
    if safe:
        loaded = AutoModelForCausalLM.from_config(model.config)
        load_model(loaded, tmp_path / "model" / "model.safetensors")
        assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
