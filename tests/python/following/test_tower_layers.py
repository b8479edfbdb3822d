"""Towers as layers of the pipeline: which are cut, how often their layers run, and what they keep."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Model, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.siglip.modeling_siglip import SiglipEncoder

import roundpipe
from multimodal_models import MODELS
from multimodal_trials import ALL, MIXED, batch_of, prepared, trial, tried
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.following import tower_layers
from roundpipe.following.parts import OwnLayer
from roundpipe.following.pictures.tower_samples import tower_samples
from roundpipe.following.tower_layers import TowerLayer
from roundpipe.plan.shapes import measure

TOWERS = [name for name, model in MODELS.items() if not model.one_each]  # Whisper's encoder is no tower


def _wrapped(model: nn.Module, microbatches: int = 1) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))


def _tower(model: nn.Module) -> Any:
    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return next(each for each in inside if any(kind in type(each).__name__ for kind in ("Vision", "AudioEncoder")))


def _layers_of_tower(model: nn.Module) -> list[nn.Module]:
    chain = _wrapped(model)._language_model.chain
    return [part.layer.layer for part in chain if isinstance(part, TowerLayer)]


@pytest.mark.parametrize("name", [*TOWERS, "Qwen3-Omni"])
def test_each_layer_of_a_tower_is_a_layer_of_the_pipeline(name: str, two_devices: None) -> None:
    model = prepared(ALL[name], "all")
    found = _layers_of_tower(model)
    lists = [list(each) for each in model.modules() if isinstance(each, nn.ModuleList)]
    assert len(found) > 1 and found in lists
    # Not, say, the linear layers and activations of what merges its features.
    assert len({type(layer) for layer in found}) == 1 and isinstance(found[0], GradientCheckpointingLayer)


@pytest.mark.parametrize("name", TOWERS)
def test_samples_of_two_sizes_run(name: str) -> None:
    model = prepared(MODELS[name], "all")
    tower = _tower(model)
    shapes = []
    for sample in tower_samples(tower):
        with torch.no_grad():
            tower(**sample)
        shapes.append({key: value.shape for key, value in sample.items()})
    assert len(shapes) == 2 and shapes[0] != shapes[1]


@pytest.mark.parametrize("name", ["Qwen3-VL", "LLaVA-NeXT"])
@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_a_frozen_tower_runs_once_a_microbatch_and_keeps_nothing(
    name: str, trained: str, two_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is trained is computed once more for the backward, where it has a picture."""
    runs: collections.Counter[int] = collections.Counter()
    kept = []
    forward = OwnLayer.forward

    def counted(self: OwnLayer, state: Any) -> Any:
        in_tower = isinstance(self.followed.model, type(tower))
        if not in_tower or not torch.is_grad_enabled():  # another run: the first batch's cut is confirmed
            return forward(self, state)
        runs[self.index] += 1
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
            return forward(self, state)

    model = prepared(MODELS[name], trained)
    tower = _tower(model)
    wrapped = _wrapped(model, 3)
    monkeypatch.setattr(OwnLayer, "forward", counted)
    wrapped.forward_backward(input_kwargs=batch_of(MODELS[name], "uneven pictures"))
    wrapped.synchronize()
    with_pictures = 2
    if trained == "adapters":
        assert set(runs.values()) == {with_pictures} and not kept
    else:
        assert min(runs.values()) >= with_pictures and kept


def test_microbatches_without_pictures_pass_its_layers(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(MODELS["Gemma 3"], "all")
    wrapped = _wrapped(model, 3)
    runs: list[int] = []
    forward = OwnLayer.forward
    monkeypatch.setattr(
        OwnLayer, "forward", lambda self, state: (runs.append(id(self.followed.model)), forward(self, state))[1]
    )
    wrapped.forward_backward(input_kwargs=batch_of(MODELS["Gemma 3"], "text"))
    wrapped.synchronize()
    assert set(runs) == {id(model)}


def test_a_tower_of_unknown_form_stays_whole(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_layers, "tower_samples", lambda tower: iter(()))
    assert _layers_of_tower(prepared(MODELS["Gemma 3"], "all")) == []
    assert tried("Gemma 3", "uneven pictures", "all", 3, 2).holds(3)


class _Backwards(SiglipEncoder):
    """Calls its last layer first."""

    def forward(self, inputs_embeds: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> BaseModelOutput:
        for layer in reversed(self.layers):
            inputs_embeds = layer(inputs_embeds, attention_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def test_layers_that_are_called_in_another_order_stay_whole(two_devices: None) -> None:
    model = prepared(MODELS["Gemma 3"], "all")
    model.model.vision_tower.encoder.__class__ = _Backwards
    assert trial(model, batch_of(MODELS["Gemma 3"], "uneven pictures"), 3, 2).holds(3)
    assert _layers_of_tower(model) == []


@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_two_calls_of_a_tower(trained: str) -> None:
    """Pictures and videos: each layer runs both calls."""
    assert tried("Gemma 4", MIXED, trained, 1, 2).holds(1)


@pytest.mark.parametrize("name", ["Qwen3-VL", "LFM2-VL"])
def test_pixels_do_not_travel_with_the_text(name: str, two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(MODELS[name], "all")
    batch = batch_of(MODELS[name], "uneven pictures")
    wrapped = _wrapped(model)
    seen: set[tuple[int, ...]] = set()
    forward = OwnLayer.forward

    def looked(self: OwnLayer, state: Any) -> Any:
        if self.followed.model is model:
            seen.update(tuple(value.shape) for value in state[1].values())
        return forward(self, state)

    monkeypatch.setattr(OwnLayer, "forward", looked)
    wrapped.forward_backward(input_kwargs=batch)
    wrapped.synchronize()
    assert tuple(batch["input_ids"].shape) in seen and tuple(batch["pixel_values"].shape) not in seen


class _Twice(Gemma3Model):
    """Calls its tower with what another call of it returned."""

    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        first = super().get_image_features(pixel_values, **kwargs)
        return super().get_image_features(pixel_values + first.pooler_output.mean(), **kwargs)


def test_a_call_with_what_a_tower_returned_is_refused(two_devices: None) -> None:
    model = prepared(MODELS["Gemma 3"], "all")
    model.model.__class__ = _Twice
    wrapped = _wrapped(model)
    with pytest.raises(ValueError, match="with what another call of a tower returned"):
        wrapped.forward_backward(input_kwargs=batch_of(MODELS["Gemma 3"], "one picture a row"))


def _with_a_large_tower() -> Any:
    """Its tower has more than eight times the parameters of the text's layers."""
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    tower = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config=text,
        vision_config={**tower, "image_size": 64, "patch_size": 4},
        mm_tokens_per_image=16,
        image_token_index=96,
    )
    torch.manual_seed(5)
    return Gemma3ForConditionalGeneration(config).train()


def _pictures(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 90, (rows, 24), generator=torch.Generator().manual_seed(6))
    ids[:, 2:18] = 96
    pixels = torch.randn(rows, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    labels = ids.masked_fill(ids == 96, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "token_type_ids": (ids == 96).long()}


def test_a_tower_that_is_much_larger_than_the_text(one_torch_thread: None) -> None:
    assert trial(_with_a_large_tower(), _pictures(3), 1, 2).holds(1)
    assert len(_layers_of_tower(_with_a_large_tower())) == 12


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_tower_is_trained_where_its_layers_fit_one_by_one(is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole it takes more than twice the memory, for the activations of all of its layers."""
    if not is_cut:
        monkeypatch.setattr(tower_layers, "tower_samples", lambda tower: iter(()))
    roundpipe.devices("virtual:1,memory=10MiB")
    wrapped = _wrapped(_with_a_large_tower(), 2)
    if is_cut:
        wrapped.forward_backward(input_kwargs=_pictures(2))
        wrapped.synchronize()
        return
    with pytest.raises(torch.OutOfMemoryError):
        wrapped.forward_backward(input_kwargs=_pictures(2))


@pytest.mark.parametrize("name", ["Gemma 3", "Qwen2.5-VL", "Qwen3-VL", "LLaVA-NeXT"])
def test_a_plan_from_shapes_has_the_same_layers(name: str, two_devices: None) -> None:
    model = prepared(MODELS[name], "all")
    wrapped = _wrapped(model)
    chain = wrapped._language_model.chain
    batch = batch_of(MODELS[name], "one picture a row")
    shapes = measure(model.to("meta"), batch["input_ids"].shape[1], rows=3, pictured=batch).layers
    expected = [sum(p.numel() * 4 for p in part.parameters()) for part in chain]
    assert len(shapes) == wrapped.num_layers == len(expected)
    found = [shape.size.weights for shape in shapes]
    if name == "Qwen3-VL":  # a plan counts what merges its features before the text, not between its tower's layers
        found, expected = [sum(found)], [sum(expected)]
    assert found == pytest.approx(expected, rel=0.02)
