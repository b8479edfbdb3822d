"""Vision-language models: rows with several pictures, one or none, cut into microbatches with their rows."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import transformers
from torch import nn

import roundpipe
from gradients import check_gradients, gradients
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import sweep

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


MODELS = {"llava": llava, "qwen2_vl": qwen2_vl}
PICTURES = [[1, 1, 1, 1], [2, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1, 2]]


@sweep("name, pictures, microbatches", MODELS, PICTURES, [1, 2, 4], ids=str)
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
    assert wrapped.num_layers == 5
    run = RoundPipeRunConfig(num_microbatch=microbatches)
    loss = wrapped.forward_backward(input_kwargs=arguments, run_config=run)
    wrapped.synchronize()
    exact = microbatches == 1
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=0 if exact else 1e-5)
    theirs = {name: gradient for name, gradient in gradients(plain).items() if gradient.any()}
    mine = gradients(model)
    check_gradients({name: mine[name] for name in theirs}, theirs, exact=exact)
