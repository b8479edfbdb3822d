"""Tiny models of text with pictures, videos or sounds, and batches whose rows have any numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

Batch = dict[str, Any]
Sizes = Sequence[Sequence[int]]
"""For each row, a number for each of its pictures, videos or sounds, which decides its size."""

MIXED = "pictures and videos"
"""The name of the case of a batch with both."""

IMAGE, VIDEO, SOUND, START, END, BREAK = 96, 95, 94, 93, 92, 91
_ORDINARY = 90  # tokens below are text
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@dataclass(frozen=True)
class Multimodal:
    """A model and its batches.

    Attributes:
        make: the model with random weights.
        images: a batch with images of these sizes; None if it takes none.
        videos: likewise, for videos.
        sounds: likewise, for sounds.
        tower: a part of the names of parameters that are the tower's.
        one_each: whether each row is one sound, and nothing else.
        without: names of cases that the model does not take.
    """

    make: Callable[[], nn.Module]
    images: Callable[[Sizes], Batch] | None = None
    videos: Callable[[Sizes], Batch] | None = None
    sounds: Callable[[Sizes], Batch] | None = None
    tower: str = "vision"
    one_each: bool = False
    without: tuple[str, ...] = ()


def written(rows: Sequence[Sequence[list[int]]]) -> Batch:
    """Rows of random text in which the given tokens stand, of uneven lengths, padded on the right."""
    generator = _generator()
    texts = []
    for number, row in enumerate(rows):
        tokens = torch.randint(4, _ORDINARY, (3 + number % 3,), generator=generator).tolist()
        for inserted in row:
            tokens += [*inserted, *torch.randint(4, _ORDINARY, (4,), generator=generator).tolist()]
        texts.append([*tokens, 5, 6, 7])
    length = max(map(len, texts))
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    attended = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    labels = ids.masked_fill((ids > _ORDINARY) | (attended == 0), -100)
    return {"input_ids": ids, "attention_mask": attended, "labels": labels}


def flat(sizes: Sizes) -> list[int]:
    return [size for row in sizes for size in row]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator())


# Qwen: packed patches, and a grid of them for each picture.

QWEN_VISION = {"in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def grid_of(size: int, frames: int = 1) -> tuple[int, int, int]:
    return frames, 2 + 2 * (size % 2), 2 + 2 * (size // 2 % 3)


def qwen_images(sizes: Sizes) -> Batch:
    rows = [[[START, *[IMAGE] * (h * w // 4), END] for _, h, w in map(grid_of, row)] for row in sizes]
    return qwen_patches(rows, [grid_of(size) for size in flat(sizes)], "pixel_values", "image_grid_thw")


def qwen_videos(sizes: Sizes, by_frames: bool) -> Batch:
    def tokens(size: int) -> list[int]:
        frames, height, width = grid_of(size, 2 + size % 2)
        each = [VIDEO] * (height * width // 4)
        return [token for _ in range(frames) for token in (7, START, *each, END)] if by_frames else each * frames

    grids = [grid_of(size, 2 + size % 2) for size in flat(sizes)]
    rows = [[tokens(size) if by_frames else [START, *tokens(size), END] for size in row] for row in sizes]
    return qwen_patches(rows, grids, "pixel_values_videos", "video_grid_thw")


def qwen_patches(rows: Any, grids: list[tuple[int, int, int]], values: str, grid: str) -> Batch:
    batch = written(rows)
    ids = batch["input_ids"]
    batch["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if grids:
        batch[grid] = torch.tensor(grids)
        batch[values] = normal(sum(t * h * w for t, h, w in grids), 96)
    return batch


def _seconds(sizes: Sizes) -> Batch:
    batch = qwen_videos(sizes, by_frames=False)
    if flat(sizes):
        batch["second_per_grid_ts"] = [1.0 + number for number, _ in enumerate(flat(sizes))]
    return batch


def _qwen25_vl() -> nn.Module:
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rotary},
        vision_config={
            **QWEN_VISION,
            **vision,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        **QWEN_TOKENS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


QWEN3_VISION = {
    **QWEN_VISION,
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_position_embeddings": 16,
}


def _qwen3_vl() -> nn.Module:
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rotary},
        vision_config={**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        **QWEN_TOKENS,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


_QWEN35_TEXT: dict[str, Any] = {
    **{name: value for name, value in TEXT.items() if name != "intermediate_size"},
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
    },
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _qwen35() -> nn.Module:
    config = transformers.Qwen3_5Config(
        text_config={**_QWEN35_TEXT, "intermediate_size": 48}, vision_config=QWEN3_VISION, **QWEN_TOKENS
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _qwen35_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    config = transformers.Qwen3_5MoeConfig(
        text_config={**_QWEN35_TEXT, **experts}, vision_config=QWEN3_VISION, **QWEN_TOKENS
    )
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


# Gemma


def _gemma3() -> nn.Module:
    text = {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
    text["layer_types"] = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**TOWER, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma3_images(sizes: Sizes) -> Batch:
    batch = written([[[START, *[IMAGE] * 4, END] for _ in row] for row in sizes])
    batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    if flat(sizes):
        batch["pixel_values"] = normal(len(flat(sizes)), 3, 16, 16)
    return batch


def _gemma4() -> nn.Module:
    text = {**TEXT, "head_dim": 8, "global_head_dim": 16, "sliding_window": 16, "hidden_size_per_layer_input": 8}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 97}
    text |= {"num_kv_shared_layers": 2, "use_bidirectional_attention": "vision"}
    vision = {**TOWER, "head_dim": 8, "num_key_value_heads": 4, "patch_size": 4, "pooling_kernel_size": 2}
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config={**vision, "position_embedding_size": 16},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=SOUND,
        boi_token_id=START,
        eoi_token_id=END,
        boa_token_id=BREAK,
        eoa_token_index=BREAK,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


_GEMMA4_PATCHES = 24


def _gemma4_places(size: int) -> torch.Tensor:
    _, height, width = grid_of(size)
    places = torch.full((_GEMMA4_PATCHES, 2), -1)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places[: height * width] = torch.stack([x.flatten(), y.flatten()], 1)
    return places


def _gemma4_patches(batch: Batch, values: str, positions: str, sizes: list[int]) -> Batch:
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int() + 2 * (batch["input_ids"] == VIDEO).int()
    if sizes:
        batch[positions] = torch.stack([_gemma4_places(size) for size in sizes])
        batch[values] = normal(len(sizes), _GEMMA4_PATCHES, 48).masked_fill(
            (batch[positions] < 0).any(-1)[..., None], 0
        )
    return batch


def _gemma4_images(sizes: Sizes) -> Batch:
    rows = [[[START, *[IMAGE] * (h * w // 4), END] for _, h, w in map(grid_of, row)] for row in sizes]
    return _gemma4_patches(written(rows), "pixel_values", "image_position_ids", flat(sizes))


def _gemma4_videos(sizes: Sizes) -> Batch:
    def tokens(size: int) -> list[int]:
        frames, height, width = grid_of(size, 2 + size % 2)
        return [t for _ in range(frames) for t in (7, START, *[VIDEO] * (height * width // 4), END)]

    frames = [size for size in flat(sizes) for _ in range(2 + size % 2)]
    batch = _gemma4_patches(
        written([[tokens(size) for size in row] for row in sizes]), "pixel_values_videos", "video_position_ids", frames
    )
    if frames:
        batch["num_frames_per_video"] = torch.tensor([2 + size % 2 for size in flat(sizes)])
    return batch


# Pictures of their own sizes, padded to the largest one


def _mistral3() -> nn.Module:
    config = transformers.Mistral3Config(
        text_config={**TEXT, "head_dim": 8, "model_type": "mistral"},
        vision_config={**TOWER, "head_dim": 8, "patch_size": 4, "image_size": 32, "model_type": "pixtral"},
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def mistral3_images(sizes: Sizes) -> Batch:
    """The model's code fails for a picture that is alone and takes a single token."""

    def grid(size: int) -> tuple[int, int]:
        return 2 + 2 * (size % 2), 4 + 2 * (size // 2 % 3)

    def tokens(size: int) -> list[int]:
        height, width = grid(size)
        return [token for _ in range(height // 2) for token in (*[IMAGE] * (width // 2), BREAK)]

    batch = written([[tokens(size) for size in row] for row in sizes])
    if flat(sizes):
        batch["image_sizes"] = torch.tensor([[4 * h, 4 * w] for h, w in map(grid, flat(sizes))])
        height, width = batch["image_sizes"].amax(0).tolist()
        batch["pixel_values"] = normal(len(flat(sizes)), 3, height, width)
    return batch


def _llava_next() -> nn.Module:
    config = transformers.LlavaNextConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**TOWER, image_size=16, patch_size=8),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        vision_feature_layer=-1,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


_LLAVA_SIZES = ((16, 32), (32, 16), (32, 32))


def llava_next_images(sizes: Sizes) -> Batch:
    def tokens(size: int) -> list[int]:
        height, width = (side // 8 for side in _LLAVA_SIZES[size % 3])
        return [IMAGE] * (4 + height * (width + 1))

    batch = written([[tokens(size) for size in row] for row in sizes])
    chosen = [_LLAVA_SIZES[size % 3] for size in flat(sizes)]
    if chosen:
        patches = [1 + h * w // 256 for h, w in chosen]
        batch["image_sizes"] = torch.tensor(chosen)
        batch["pixel_values"] = normal(len(chosen), max(patches), 3, 16, 16)
        for number, used in enumerate(patches):
            batch["pixel_values"][number, used:] = 0
    return batch


def _smolvlm() -> nn.Module:
    config = transformers.SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**TOWER, "image_size": 16, "patch_size": 4},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def smolvlm_images(sizes: Sizes) -> Batch:
    """Each row has places for as many pictures as the row with the most of them."""
    batch = written([[[START, *[IMAGE] * 4, END] for _ in row] for row in sizes])
    most = max(map(len, sizes))
    if most:
        batch["pixel_values"] = normal(len(sizes), most, 3, 16, 16)
        batch["pixel_attention_mask"] = torch.ones(len(sizes), most, 16, 16, dtype=torch.int64)
        for number, row in enumerate(sizes):
            batch["pixel_values"][number, len(row) :] = 0
            batch["pixel_attention_mask"][number, len(row) :] = 0
    return batch


def _lfm2_vl() -> nn.Module:
    config = transformers.Lfm2VlConfig(
        text_config={
            **TEXT,
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
        vision_config={**TOWER, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 16},
        image_token_id=IMAGE,
        projector_hidden_size=32,
        downsample_factor=2,
    )
    return transformers.Lfm2VlForConditionalGeneration(config)


def _lfm2_images(sizes: Sizes) -> Batch:
    rows = [[[START, *[IMAGE] * (h * w // 4), END] for _, h, w in map(grid_of, row)] for row in sizes]
    batch = written(rows)
    grids = [grid_of(size)[1:] for size in flat(sizes)]
    if grids:
        most = 24
        batch["spatial_shapes"] = torch.tensor(grids)
        batch["pixel_attention_mask"] = torch.tensor([[1] * h * w + [0] * (most - h * w) for h, w in grids])
        batch["pixel_values"] = normal(len(grids), most, 48) * batch["pixel_attention_mask"][..., None]
    return batch


# Sounds


def _qwen2_audio() -> nn.Module:
    audio = {"num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**TEXT).to_dict(),
        audio_config={**audio, "d_model": 32, "max_source_positions": 16},
        audio_token_index=SOUND,
    )
    config.pad_token_id = 0
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _qwen2_audio_sounds(sizes: Sizes) -> Batch:
    frames = [32 - 8 * (size % 3) for size in flat(sizes)]

    def tokens(size: int) -> list[int]:
        return [START, *[SOUND] * ((((32 - 8 * (size % 3)) - 1) // 2 + 1 - 2) // 2 + 1), END]

    batch = written([[tokens(size) for size in row] for row in sizes])
    if frames:
        batch["input_features"] = normal(len(frames), 8, 32)
        batch["feature_attention_mask"] = torch.tensor([[1] * used + [0] * (32 - used) for used in frames])
    return batch


def _whisper() -> nn.Module:
    sizes = {
        f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 3), ("ffn_dim", 48))
    }
    config = transformers.WhisperConfig(
        **sizes,
        vocab_size=97,
        d_model=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=40,
    )
    return transformers.WhisperForConditionalGeneration(config)


def _whisper_sounds(sizes: Sizes) -> Batch:
    """One sound for each row, as long as its text is uneven."""
    labels = written([[[9] * size for size in row] for row in sizes])["labels"]
    return {"input_features": normal(len(sizes), 8, 40), "labels": labels}


MODELS: dict[str, Multimodal] = {
    "Qwen2.5-VL": Multimodal(_qwen25_vl, qwen_images, _seconds, tower="visual"),
    "Qwen3-VL": Multimodal(_qwen3_vl, qwen_images, lambda s: qwen_videos(s, by_frames=True), tower="visual"),
    "Qwen3.5": Multimodal(_qwen35, qwen_images, lambda s: qwen_videos(s, by_frames=True), tower="visual"),
    "Qwen3.5 MoE": Multimodal(_qwen35_moe, qwen_images, lambda s: qwen_videos(s, by_frames=True), tower="visual"),
    "Gemma 3": Multimodal(_gemma3, _gemma3_images),
    "Gemma 4": Multimodal(_gemma4, _gemma4_images, _gemma4_videos),
    "Mistral 3": Multimodal(_mistral3, mistral3_images),
    "LLaVA-NeXT": Multimodal(_llava_next, llava_next_images),
    "SmolVLM": Multimodal(_smolvlm, smolvlm_images),
    "LFM2-VL": Multimodal(_lfm2_vl, _lfm2_images),
    "Qwen2-Audio": Multimodal(_qwen2_audio, sounds=_qwen2_audio_sounds, tower="audio"),
    "Whisper": Multimodal(_whisper, sounds=_whisper_sounds, tower="encoder", one_each=True),
}


def build(model: Multimodal) -> nn.Module:
    """The model with random weights, biases and norms, in training mode."""
    torch.manual_seed(0)
    made = model.make()
    with torch.no_grad():
        for parameter in made.parameters():
            # Places of patches that are all the same would hide which patch is which.
            if parameter.dim() == 1 or bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.train()


def together(first: Batch, second: Batch) -> Batch:
    """The rows of one batch after those of another, whose pictures are of another kind."""
    length = max(first["input_ids"].shape[1], second["input_ids"].shape[1])
    made = {**first, **second}
    for name in {"input_ids", "attention_mask", "labels", "mm_token_type_ids"} & first.keys():
        padding = -100 if name == "labels" else 0
        both = [nn.functional.pad(of[name], (0, length - of[name].shape[1]), value=padding) for of in (first, second)]
        made[name] = torch.cat(both)
    return made
