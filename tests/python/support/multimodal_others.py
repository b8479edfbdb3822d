"""Further tiny models of text with pictures, videos or sounds: those that docs/reference/models.md lists as others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from multimodal_models import (
    END,
    IMAGE,
    MIXED,
    QWEN3_VISION,
    QWEN_TOKENS,
    QWEN_VISION,
    SOUND,
    START,
    TEXT,
    TOWER,
    VIDEO,
    Batch,
    Multimodal,
    Sizes,
    flat,
    grid_of,
    llava_next_images,
    mistral3_images,
    normal,
    qwen_images,
    qwen_patches,
    qwen_videos,
    smolvlm_images,
    written,
)

Make = Callable[[Sizes], Batch]

_LLAMA = {**TEXT, "model_type": "llama"}
_QWEN2 = {**TEXT, "model_type": "qwen2"}
_COHERE2 = {**TEXT, "model_type": "cohere2", "head_dim": 8, "sliding_window": 16}
_COHERE2["layer_types"] = ["sliding_attention", "full_attention"] * 2
_OPT: dict[str, Any] = {"model_type": "opt", "vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4}
_OPT |= {"num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 512, "dropout": 0.0}
_OPT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PATCHES = {**TOWER, "image_size": 16, "patch_size": 4}
_CLIP = {**_PATCHES, "num_hidden_layers": 3, "model_type": "clip_vision_model"}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
_ROTARY = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QFORMER = {**TOWER, "encoder_hidden_size": 32, "vocab_size": 97}
_QFORMER |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _model(name: str, **config: Any) -> Callable[[], nn.Module]:
    """Makes the transformers model of this class."""

    def make() -> nn.Module:
        of_class = getattr(transformers, name)
        made: nn.Module = of_class(of_class.config_class(**config))
        return made

    return make


# Pictures of one size, which all take the same number of tokens


def _pictures(tokens: int, *shape: int, name: str = "pixel_values", token: int = IMAGE) -> Make:
    """Pictures (or videos, sounds) of a shape, each of so many tokens."""

    def make(sizes: Sizes) -> Batch:
        batch = written([[[START, *[token] * tokens, END] for _ in row] for row in sizes])
        if flat(sizes):
            batch[name] = normal(len(flat(sizes)), *(shape or (3, 16, 16)))
        return batch

    return make


def _with(make: Make, more: Callable[[Batch, int], Batch]) -> Make:
    """Batches with further arguments, given their number of pictures."""

    def made(sizes: Sizes) -> Batch:
        batch = make(sizes)
        return {**batch, **more(batch, len(flat(sizes)))}

    return made


def _prefix(batch: Batch, _: int) -> Batch:
    """What comes after the prompt, for PaliGemma."""
    return {"token_type_ids": ((batch["input_ids"] == 5).cumsum(1) > 0).long()}


def _questions(_: Batch, pictures: int) -> Batch:
    ids = 4 + torch.arange(5).repeat(pictures, 1) * (1 + torch.arange(pictures)[:, None])
    return {"qformer_input_ids": ids, "qformer_attention_mask": torch.ones_like(ids)} if pictures else {}


def _videos(tokens: int) -> Make:
    """Videos of two frames."""
    return _pictures(tokens, 2, 3, 16, 16, name="pixel_values_videos", token=VIDEO)


# Qwen and GLM: packed patches


def _untyped(make: Make) -> Make:
    return lambda sizes: {name: value for name, value in make(sizes).items() if name != "mm_token_type_ids"}


def _omni_videos(sizes: Sizes) -> Batch:
    batch = _untyped(lambda of: qwen_videos(of, by_frames=False))(sizes)
    if flat(sizes):
        batch["video_second_per_grid"] = 1.0 + torch.arange(len(flat(sizes)))
    return batch


def _glm_videos(sizes: Sizes) -> Batch:
    """Frames have the token of pictures."""

    def tokens(size: int) -> list[int]:
        frames, height, width = grid_of(size, 2 + size % 2)
        return [token for _ in range(frames) for token in (7, START, *[IMAGE] * (height * width // 4), END)]

    rows = [[tokens(size) for size in row] for row in sizes]
    grids = [grid_of(size, 2 + size % 2) for size in flat(sizes)]
    batch = qwen_patches(rows, grids, "pixel_values_videos", "video_grid_thw")
    return {**batch, "mm_token_type_ids": 2 * batch["mm_token_type_ids"]}


def _paddle_images(sizes: Sizes) -> Batch:
    batch = qwen_images(sizes)
    if flat(sizes):
        batch["pixel_values"] = normal(len(batch["pixel_values"]), 3, 4, 4)
    return batch


def _qwen(name: str, text: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    return _model(name, text_config={**TEXT, "rope_parameters": _ROTARY, **text}, **more)


_QWEN2_VISION = {**QWEN_VISION, "depth": 2, "hidden_size": 32, "num_heads": 4}
_GLM_VISION = {**_QWEN2_VISION, "intermediate_size": 48, "out_hidden_size": 32, "image_size": 16}
_GLM_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_GLM_TOKENS |= {"image_start_token_id": START, "image_end_token_id": END}
_GLM_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
_GLM_MOE |= {"topk_group": 1, "first_k_dense_replace": 1}
_WHOLE = {**_ROTARY, "partial_rotary_factor": 1.0}
_OMNI_TOKENS = {"audio_start_token_id": 91, "audio_end_token_id": 90, "user_token_id": 3}
_OMNI_TOKENS |= {"vision_start_token_id": START, "vision_end_token_id": END, "position_id_per_seconds": 25}
_OMNI_AUDIO: dict[str, Any] = {"num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4}
_OMNI_AUDIO |= {"encoder_ffn_dim": 48, "max_source_positions": 32, "output_dim": 32}


# Sounds of their own lengths, padded to the longest one


def _sounds(
    tokens_of: Callable[[int], int],
    mask: str = "input_features_mask",
    longest: int = 32,
    around: tuple[int, int] = (START, END),
) -> Make:
    """Sounds of up to `longest` frames, which take so many tokens."""

    def frames(size: int) -> int:
        return longest - longest // 4 * (size % 3)

    def make(sizes: Sizes) -> Batch:
        rows = [[[around[0], *[SOUND] * tokens_of(frames(size)), around[1]] for size in row] for row in sizes]
        batch = written(rows)
        if flat(sizes):
            batch["input_features"] = normal(len(flat(sizes)), 8, longest)
            used = torch.tensor([frames(size) for size in flat(sizes)])
            batch[mask] = (torch.arange(longest) < used[:, None]).long()
        return batch

    return make


def _pooled(frames: int) -> int:
    """Tokens after a convolution of stride 2 and a mean of two."""
    return ((frames - 1) // 2 - 1) // 2 + 1


_AUDIO = {**TOWER, "intermediate_size": 128, "num_mel_bins": 8, "max_source_positions": 16}


def _phi4_sounds(sizes: Sizes) -> Batch:
    batch = _sounds(lambda frames: frames // 8)(sizes)
    if flat(sizes):
        used = batch.pop("input_features_mask")
        batch["audio_input_features"] = batch.pop("input_features").transpose(1, 2)
        batch["audio_attention_mask"] = used.bool()
        batch["audio_embed_sizes"] = used.sum(1) // 8
    return batch


def _phi4_parts(_: Batch, pictures: int) -> Batch:
    if not pictures:
        return {}
    return {"image_sizes": torch.full((pictures, 2), 16), "image_attention_mask": torch.ones(pictures, 2, 4, 4)}


# Pictures that layers of their own attend to


def _mllama_images(sizes: Sizes) -> Batch:
    """Each row has places for as many pictures as the row with the most of them, and each picture for two tiles."""
    batch = written([[[IMAGE] for _ in row] for row in sizes])
    rows, tokens = batch["input_ids"].shape
    most = max(map(len, sizes))
    if not most:
        return batch
    batch["pixel_values"] = normal(rows, most, 2, 3, 16, 16)
    batch["aspect_ratio_ids"] = torch.zeros(rows, most, dtype=torch.int64)
    batch["aspect_ratio_mask"] = torch.tensor([1, 0]).repeat(rows, most, 1)
    batch["cross_attention_mask"] = torch.zeros(rows, tokens, most, 2, dtype=torch.int64)
    for number, row in enumerate(sizes):
        batch["pixel_values"][number, len(row) :] = 0
        for place, token in enumerate((batch["input_ids"][number] == IMAGE).nonzero()[:, 0].tolist()):
            batch["aspect_ratio_ids"][number, place] = 1
            batch["cross_attention_mask"][number, token:, place, 0] = 1
    return batch


_MLLAMA_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_global_layers": 2}
_MLLAMA_VISION |= {"attention_heads": 4, "image_size": 16, "patch_size": 8, "vision_output_dim": 96}
_MLLAMA_VISION |= {"max_num_tiles": 2}
_FLORENCE_TEXT = {"model_type": "bart", "vocab_size": 97, "d_model": 32, "dropout": 0.0, "max_position_embeddings": 256}
_FLORENCE_TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
for _part in ("encoder", "decoder"):
    _FLORENCE_TEXT |= {f"{_part}_layers": 2, f"{_part}_ffn_dim": 48, f"{_part}_attention_heads": 4}
_FLORENCE_VISION = {"depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 4], "patch_padding": [3, 1]}
_FLORENCE_VISION |= {"patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4]}
_FLORENCE_VISION |= {"window_size": 2, "projection_dim": 32, "drop_path_rate": 0.0}
_KOSMOS_TEXT = {"vocab_size": 97, "embed_dim": 32, "ffn_dim": 48, "layers": 4, "attention_heads": 4, "dropout": 0.0}
_JANUS_CODES = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32, "num_res_blocks": 1}
_JANUS_CODES |= {"channel_multiplier": [1, 1], "num_patches": 4, "projection_dim": 32, "image_token_embed_dim": 32}
_GOT_VISION = {**TOWER, "output_channels": 16, "image_size": 32, "patch_size": 2, "mlp_dim": 48, "window_size": 4}
_GRANITE_ENCODER = {"input_dim": 8, "hidden_dim": 32, "num_layers": 2, "num_heads": 4, "output_dim": 8, "dropout": 0.0}
_GRANITE_ENCODER |= {"context_size": 8, "max_pos_emb": 16, "feedforward_mult": 2, "conv_kernel_size": 3}
_PHI4_AUDIO = {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 4, "input_size": 8}
_PHI4_AUDIO |= {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}


def _tokens(image: str = "image_token_id", **more: Any) -> dict[str, Any]:
    return {image: IMAGE, **more}


_INDEX = _tokens("image_token_index")
_BOTH = {**_INDEX, "video_token_index": VIDEO}


def _in_tiles(name: str, text: dict[str, Any], tower: dict[str, Any], tokens_of_a_frame: int) -> Multimodal:
    """A model that cuts pictures into tiles, and takes videos."""
    vision = {**tower, "patch_size": 8}
    made = _model(name, text_config=text, vision_config=vision, image_grid_pinpoints=_PINPOINTS, **_BOTH)
    return Multimodal(made, llava_next_images, _videos(tokens_of_a_frame))


OTHERS: dict[str, Multimodal] = {
    "LLaVA": Multimodal(
        _model("LlavaForConditionalGeneration", text_config=_LLAMA, vision_config=_CLIP, **_INDEX), _pictures(16)
    ),
    "VipLLaVA": Multimodal(
        _model(
            "VipLlavaForConditionalGeneration",
            text_config=_LLAMA,
            vision_config=_CLIP,
            vision_feature_layer=[-1, -2],
            **_INDEX,
        ),
        _pictures(16),
    ),
    "LLaVA-NeXT-Video": _in_tiles("LlavaNextVideoForConditionalGeneration", _LLAMA, _CLIP, 2),
    "LLaVA-OneVision": _in_tiles("LlavaOnevisionForConditionalGeneration", _QWEN2, _SIGLIP, 3),
    "Video-LLaVA": Multimodal(
        _model("VideoLlavaForConditionalGeneration", text_config=_LLAMA, vision_config=_CLIP, **_BOTH),
        _pictures(16),
        _videos(34),
    ),
    "Aya Vision": Multimodal(
        _model("AyaVisionForConditionalGeneration", text_config=_COHERE2, vision_config=_SIGLIP, **_INDEX),
        _pictures(4),
    ),
    "Cohere2 Vision": Multimodal(
        _model(
            "Cohere2VisionForConditionalGeneration",
            text_config=_COHERE2,
            vision_config=_SIGLIP,
            alignment_intermediate_size=64,
            **_tokens(),
        ),
        _pictures(4),
    ),
    "InternVL": Multimodal(
        _model(
            "InternVLForConditionalGeneration",
            text_config=_QWEN2,
            vision_config={**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
            **_tokens(),
        ),
        _pictures(4),
    ),
    "PaliGemma": Multimodal(
        _model(
            "PaliGemmaForConditionalGeneration",
            text_config={**TEXT, "head_dim": 8, "model_type": "gemma2", "query_pre_attn_scalar": 8},
            vision_config={**_SIGLIP, "projection_dim": 32},
            projection_dim=32,
            **_INDEX,
        ),
        _with(_pictures(16), _prefix),
    ),
    "DeepSeek-VL": Multimodal(
        _model("DeepseekVLForConditionalGeneration", text_config=_LLAMA, vision_config=_SIGLIP, **_tokens()),
        _pictures(16),
    ),
    "Janus": Multimodal(
        _model(
            "JanusForConditionalGeneration",
            text_config=_LLAMA,
            vision_config={**_PATCHES, "projection_dim": 32, "mlp_ratio": 2.0, "num_image_tokens": 16},
            vq_config=_JANUS_CODES,
            **_tokens(),
        ),
        _pictures(16),
    ),
    "Idefics2": Multimodal(
        _model(
            "Idefics2ForConditionalGeneration",
            text_config={**TEXT, "model_type": "mistral"},
            vision_config=_PATCHES,
            perceiver_config={
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 2,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
            pad_token_id=0,
            **_tokens(),
        ),
        smolvlm_images,
    ),
    "Idefics3": Multimodal(
        _model(
            "Idefics3ForConditionalGeneration",
            text_config=_LLAMA,
            vision_config=_PATCHES,
            scale_factor=2,
            pad_token_id=0,
            **_tokens(),
        ),
        smolvlm_images,
    ),
    "LightOnOCR": Multimodal(
        _model(
            "LightOnOcrForConditionalGeneration",
            text_config={**TEXT, "head_dim": 8, "model_type": "qwen3"},
            vision_config={**_PATCHES, "head_dim": 8, "image_size": 32, "model_type": "pixtral"},
            **_tokens(),
        ),
        mistral3_images,
    ),
    "GOT-OCR 2": Multimodal(
        _model(
            "GotOcr2ForConditionalGeneration",
            text_config=_QWEN2,
            vision_config={**_GOT_VISION, "global_attn_indexes": [1]},
            **_INDEX,
        ),
        _pictures(16, 3, 32, 32),
    ),
    "PaddleOCR-VL": Multimodal(
        _qwen(
            "PaddleOCRVLForConditionalGeneration",
            {"head_dim": 8},
            vision_config={**_PATCHES, "spatial_merge_size": 2},
            **QWEN_TOKENS,
        ),
        _paddle_images,
        tower="visual",
    ),
    "Ovis2": Multimodal(
        _model(
            "Ovis2ForConditionalGeneration",
            text_config=_QWEN2,
            vision_config={**_PATCHES, "vocab_size": 20, "hidden_stride": 2},
            visual_indicator_token_ids=[85, 86, 87, 88, 89],
            vocab_size=97,
            hidden_size=32,
            **_tokens(),
        ),
        _pictures(4),
    ),
    "Aria": Multimodal(
        _model(
            "AriaForConditionalGeneration",
            text_config={**TEXT, "model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
            vision_config={**_PATCHES, "model_type": "idefics3_vision"},
            projector_patch_to_query_dict={16: 4},
            **_INDEX,
        ),
        _pictures(4),
    ),
    "Fuyu": Multimodal(
        _model(
            "FuyuForCausalLM",
            text_config={**TEXT, "model_type": "persimmon"},
            patch_size=4,
            hidden_size=32,
            vocab_size=97,
            **_tokens(),
        ),
        _pictures(4, 4, 48),
    ),
    "Qwen2-VL": Multimodal(
        _qwen(
            "Qwen2VLForConditionalGeneration",
            {},
            vision_config={**_QWEN2_VISION, "embed_dim": 32, "mlp_ratio": 2},
            **QWEN_TOKENS,
        ),
        qwen_images,
        lambda sizes: qwen_videos(sizes, by_frames=False),
        tower="visual",
    ),
    "Qwen3-VL MoE": Multimodal(
        _qwen(
            "Qwen3VLMoeForConditionalGeneration",
            {**_MOE, "head_dim": 8},
            vision_config={**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
            **QWEN_TOKENS,
        ),
        qwen_images,
        lambda sizes: qwen_videos(sizes, by_frames=True),
        tower="visual",
    ),
    "Qwen2.5-Omni": Multimodal(
        _qwen(
            "Qwen2_5OmniThinkerForConditionalGeneration",
            {},
            audio_config={**_OMNI_AUDIO, "n_window": 4},
            vision_config={**_GLM_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
            audio_token_index=SOUND,
            **_OMNI_TOKENS,
            **_BOTH,
        ),
        _untyped(qwen_images),
        _omni_videos,
        _sounds(_pooled, "feature_attention_mask", 16, (91, 90)),
        tower="(visual|audio)",
    ),
    "Qwen3-Omni": Multimodal(
        _qwen(
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            {**_MOE, "head_dim": 8, "rope_parameters": {**_ROTARY, "mrope_interleaved": True}},
            audio_config={**_OMNI_AUDIO, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 8},
            vision_config={**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
            audio_token_id=SOUND,
            video_token_id=VIDEO,
            **_OMNI_TOKENS,
            **_tokens(),
        ),
        _untyped(qwen_images),
        _omni_videos,
        _sounds(lambda frames: -(-frames // 8), "feature_attention_mask", 16, (91, 90)),
        tower="(visual|audio)",
    ),
    "GLM-4.1V": Multimodal(
        _qwen("Glm4vForConditionalGeneration", {}, vision_config=_GLM_VISION, **_GLM_TOKENS),
        qwen_images,
        _glm_videos,
        tower="visual",
        without=(MIXED,),
    ),
    "GLM-4.5V": Multimodal(
        _qwen(
            "Glm4vMoeForConditionalGeneration",
            {**_GLM_MOE, "head_dim": 8, "rope_parameters": _WHOLE},
            vision_config=_GLM_VISION,
            **_GLM_TOKENS,
        ),
        qwen_images,
        _glm_videos,
        tower="visual",
        without=(MIXED,),
    ),
    "GLM-OCR": Multimodal(
        _qwen(
            "GlmOcrForConditionalGeneration",
            {"head_dim": 8, "rope_parameters": _WHOLE},
            vision_config=_GLM_VISION,
            **_GLM_TOKENS,
        ),
        qwen_images,
        _glm_videos,
        tower="visual",
        without=(MIXED,),
    ),
    "Phi-4 multimodal": Multimodal(
        _model(
            "Phi4MultimodalForCausalLM",
            **TEXT,
            vision_config={**_PATCHES, "crop_size": 16, **_tokens()},
            audio_config={**_PHI4_AUDIO, "audio_token_id": SOUND},
        ),
        _with(_pictures(13, 2, 3, 16, 16, name="image_pixel_values"), _phi4_parts),
        sounds=_phi4_sounds,
        tower="embed_tokens_extend",
    ),
    "Voxtral": Multimodal(
        _model(
            "VoxtralForConditionalGeneration",
            text_config={**_LLAMA, "head_dim": 8},
            audio_config=_AUDIO,
            audio_token_id=SOUND,
        ),
        sounds=_pictures(4, 8, 32, name="input_features", token=SOUND),
        tower="audio",
    ),
    "Audio Flamingo 3": Multimodal(
        _model("AudioFlamingo3ForConditionalGeneration", text_config=_QWEN2, audio_config=_AUDIO, audio_token_id=SOUND),
        sounds=_sounds(_pooled),
        tower="audio",
    ),
    "GLM-ASR": Multimodal(
        _model(
            "GlmAsrForConditionalGeneration",
            text_config=_LLAMA,
            audio_config={**_AUDIO, "num_key_value_heads": 4, "max_position_embeddings": 16},
            audio_token_id=SOUND,
        ),
        sounds=_sounds(lambda frames: ((frames - 1) // 2 - 3) // 4 + 1),
        tower="audio",
    ),
    "Granite Speech": Multimodal(
        _model(
            "GraniteSpeechForConditionalGeneration",
            text_config={**TEXT, "model_type": "granite"},
            encoder_config=_GRANITE_ENCODER,
            projector_config={**_QFORMER, "model_type": "blip_2_qformer"},
            audio_token_index=SOUND,
            has_lora_adapter=False,
            window_size=4,
            downsample_rate=2,
        ),
        sounds=_pictures(6, 10, 8, name="input_features", token=SOUND),
        tower="(encoder|projector)",
    ),
    "Florence-2": Multimodal(
        _model(
            "Florence2ForConditionalGeneration",
            text_config=_FLORENCE_TEXT,
            vision_config={**_FLORENCE_VISION, "max_position_embeddings": 8, "max_temporal_embeddings": 4},
            **_tokens(),
        ),
        _pictures(5, 3, 32, 32),
    ),
    "BLIP-2": Multimodal(
        _model(
            "Blip2ForConditionalGeneration",
            text_config=_OPT,
            vision_config=_PATCHES,
            qformer_config=_QFORMER,
            num_query_tokens=4,
            **_INDEX,
        ),
        _pictures(4),
        tower="(vision|qformer)",
        without=("text",),
    ),
    "InstructBLIP": Multimodal(
        _model(
            "InstructBlipForConditionalGeneration",
            text_config=_OPT,
            vision_config=_PATCHES,
            qformer_config=_QFORMER,
            num_query_tokens=4,
            **_INDEX,
        ),
        _with(_pictures(4), _questions),
        tower="(vision|qformer)",
        without=("text",),
    ),
    "Kosmos-2": Multimodal(
        _model("Kosmos2ForConditionalGeneration", text_config=_KOSMOS_TEXT, vision_config=_PATCHES, latent_query_num=4),
        _with(_pictures(4), lambda batch, _: {"image_embeds_position_mask": (batch["input_ids"] == IMAGE).long()}),
        without=("text",),
    ),
    "Llama 3.2 Vision": Multimodal(
        _model(
            "MllamaForConditionalGeneration",
            text_config={**TEXT, "cross_attention_layers": [1, 3]},
            vision_config={
                **_MLLAMA_VISION,
                "intermediate_layers_indices": [0, 1],
                "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
            **_INDEX,
        ),
        _mllama_images,
    ),
}
