"""Vision-language models: rows with several pictures, one or none, cut into microbatches with their rows."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import roundpipe
from gradients import check_gradients, gradients
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import mostly_long, sweep

PICTURE, START, END, VIDEO = 96, 95, 94, 93
TOKENS = 16
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llava() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8),
        image_token_id=PICTURE,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "in_channels": 3}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1}
    tokens = {"image_token_id": PICTURE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rotary}, vision_config=vision, video_token_id=VIDEO, **tokens
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def batch(pictures: list[int], patches: bool) -> dict[str, Any]:
    """A row for each number of pictures, of four tokens each; `patches`: pictures come as rows of patches."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 90, (len(pictures), TOKENS), generator=generator)
    for row, number in enumerate(pictures):
        for start in range(1, 1 + 6 * number, 6):
            ids[row, start : start + 4] = PICTURE
            if patches:
                ids[row, start - 1] = START
    labels = ids.masked_fill(ids >= 90, -100)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    total = sum(pictures)
    if total and patches:
        arguments["pixel_values"] = torch.randn(total * 16, 48, generator=generator)
        arguments["image_grid_thw"] = torch.tensor([[1, 4, 4]] * total)
        arguments["mm_token_type_ids"] = (ids == PICTURE).int()
    elif total:
        arguments["pixel_values"] = torch.randn(total, 3, 16, 16, generator=generator)
    return arguments


def qwen25_vl() -> nn.Module:
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    vision |= {"in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 16}
    tokens = {"image_token_id": PICTURE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rotary},
        vision_config={**vision, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        video_token_id=VIDEO,
        **tokens,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen2_audio() -> nn.Module:
    audio = {"num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**TEXT).to_dict(),
        audio_config={**audio, "d_model": 32, "max_source_positions": 8},
        audio_token_index=PICTURE,
    )
    config.pad_token_id = 0
    return transformers.Qwen2AudioForConditionalGeneration(config)


MODELS = {"llava": llava, "qwen2_vl": qwen2_vl}
LAYERS = {"llava": 1 + 3 + 1 + 3 + 1, "qwen2_vl": 1 + 2 + 1 + 3 + 1}  # with the tower's, and the parts around them
PICTURES = [[1, 1, 1, 1], [2, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1, 2]]


@sweep("name, pictures, microbatches", MODELS, PICTURES, [1, 2, 4], ids=str, together=1)
def test_mixed_batches(name: str, pictures: list[int], microbatches: int, one_torch_thread: None) -> None:
    make: Any = MODELS[name]
    roundpipe.devices("virtual:2,debug")
    torch.manual_seed(0)
    model = make().train()
    plain = copy.deepcopy(model)
    arguments = batch(pictures, patches=make is qwen2_vl)
    expected = plain(**arguments).loss
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = wrap_model_to_roundpipe(model)
    assert wrapped.num_layers == LAYERS[name]
    run = RoundPipeRunConfig(num_microbatch=microbatches)
    loss = wrapped.forward_backward(input_kwargs=arguments, run_config=run)
    wrapped.synchronize()
    exact = microbatches == 1
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=0 if exact else 1e-5)
    theirs = {name: gradient for name, gradient in gradients(plain).items() if gradient.any()}
    mine = gradients(model)
    check_gradients({name: mine[name] for name in theirs}, theirs, exact=exact)


def check(make: Any, arguments: dict[str, Any], microbatches: int) -> None:
    """The plain model's loss and gradients."""
    roundpipe.devices("virtual:2,debug")
    torch.manual_seed(0)
    model = make().train()
    plain = copy.deepcopy(model)
    expected = plain(**arguments).loss
    expected.backward()
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))
    loss = wrapped.forward_backward(input_kwargs=arguments)
    wrapped.synchronize()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)
    theirs = {name: gradient for name, gradient in gradients(plain).items() if gradient.any()}
    mine = gradients(model)
    check_gradients({name: mine[name] for name in theirs}, theirs, exact=False)


def videos(numbers: list[int], seconds: Any) -> dict[str, Any]:
    """A row for each number of videos, of three frames of four tokens each."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 90, (len(numbers), 45), generator=generator)
    for row, number in enumerate(numbers):
        for start in range(1, 1 + 14 * number, 14):
            ids[row, start - 1] = START
            ids[row, start : start + 12] = VIDEO
    total = sum(numbers)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids >= 90, -100),
        "mm_token_type_ids": (ids == VIDEO).int() * 2,
        "pixel_values_videos": torch.randn(total * 48, 48, generator=generator),
        "video_grid_thw": torch.tensor([[3, 4, 4]] * total),
        "second_per_grid_ts": seconds,
    }


SECONDS = {"list": [1.0, 2.0, 5.0], "tuple": (1.0, 2.0, 5.0), "tensor": torch.tensor([1.0, 2.0, 5.0])}


@sweep("numbers, kind, microbatches", [[1, 1, 1], [2, 0, 1], [0, 3, 0]], SECONDS, [2, 3], ids=str, together=1)
def test_the_seconds_of_videos(numbers: list[int], kind: str, microbatches: int, one_torch_thread: None) -> None:
    check(qwen25_vl, videos(numbers, SECONDS[kind]), microbatches)


def test_positions_in_three_directions(one_torch_thread: None) -> None:
    """As many rows as directions."""
    arguments = batch([1, 0, 2], patches=True)
    positions = torch.randint(0, TOKENS, (3, 3, TOKENS), generator=torch.Generator().manual_seed(0))
    check(qwen2_vl, arguments | {"position_ids": positions}, 3)
    text = {name: arguments[name] for name in ("input_ids", "attention_mask", "labels")}
    text["input_ids"] = text["input_ids"].clamp(max=89)
    check(qwen2_vl, text | {"position_ids": positions}, 3)


@pytest.mark.parametrize("sounds", mostly_long([[1, 1, 1], [2, 0, 1]], [2, 0, 1]))
def test_sounds(sounds: list[int], one_torch_thread: None) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 90, (3, 16), generator=generator)
    for row, number in enumerate(sounds):
        for start in range(1, 1 + 6 * number, 6):
            ids[row, start : start + 4] = PICTURE
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids >= 90, -100),
        "input_features": torch.randn(3, 8, 16, generator=generator),
        "feature_attention_mask": torch.ones(3, 16, dtype=torch.int64),
    }
    check(qwen2_audio, arguments, 3)


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"seen": [1, 2, 3]}, "'seen' has 3 entries, which may belong to the 3 rows of the batch or to their pictures"),
        ({"seen": torch.ones(5)}, "'seen' has 5 entries, which are neither the 3 rows of the batch nor their pictures"),
        ({"labels": torch.ones(2, TOKENS, dtype=torch.int64)}, "'labels' has 2 entries, which are neither"),
    ],
)
def test_what_may_belong_to_anything_is_refused(further: dict[str, Any], message: str) -> None:
    wrapped = wrap_model_to_roundpipe(llava(), model_run_config=RoundPipeRunConfig(num_microbatch=3))
    with pytest.raises(ValueError, match=message):
        wrapped(**(batch([2, 0, 1], patches=False) | further))


@sweep("name, pictures, tower", MODELS, [[1, 0, 2, 0], [0, 0, 1, 1], [1, 0, 0, 0]], [True, False], ids=str, together=1)
def test_rows_without_what_is_trained_add_their_loss_alone(
    name: str, pictures: list[int], tower: bool, one_torch_thread: None
) -> None:
    """Only the vision tower is trained, or only its last part."""
    make: Any = MODELS[name]
    roundpipe.devices("virtual:2,debug")
    torch.manual_seed(0)
    model = make().train().requires_grad_(False)
    arguments = batch(pictures, patches=make is qwen2_vl)
    whole = copy.deepcopy(model).requires_grad_()
    whole(**arguments).loss.backward()
    used = gradients(whole)  # not a last norm of which nothing is read
    of_tower = [p for name, p in model.named_parameters() if "vis" in name and name in used]
    for parameter in of_tower if tower else of_tower[-2:]:
        parameter.requires_grad_()
    plain = copy.deepcopy(model)
    expected = plain(**arguments).loss
    expected.backward()
    theirs = {name: gradient for name, gradient in gradients(plain).items() if gradient.any()}
    assert theirs
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=4))
    loss = wrapped.forward_backward(input_kwargs=arguments)
    wrapped.synchronize()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-5)
    mine = gradients(model)
    check_gradients({name: mine[name] for name in theirs}, theirs, exact=False)
    wrapped.zero_grad()
    wrapped(**arguments).loss.backward()
    wrapped.synchronize()
    mine = gradients(model)
    check_gradients({name: mine[name] for name in theirs}, theirs, exact=False)
    with pytest.raises(ValueError, match="the loss does not require grad"):
        wrapped.forward_backward(input_kwargs=batch([0, 0, 0, 0], patches=False))
    torch.testing.assert_close(wrapped.forward_backward(input_kwargs=arguments), loss)
