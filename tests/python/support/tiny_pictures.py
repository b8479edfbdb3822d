"""Tiny models that take pictures or sounds, with their processors, and shapes and tones to learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw

from roundpipe.data.pictures.sounds import write_sound
from tiny_chat import byte_tokenizer

SHAPES = ("square", "circle", "triangle")
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (40, 60, 220)}
SIZE = 56
RATE = 16000  # of sounds


def drawn(shape: str, colour: str, number: int) -> Image.Image:
    """A shape at a place that follows from the number."""
    picture = Image.new("RGB", (SIZE, SIZE), (240, 240, 240))
    draw = ImageDraw.Draw(picture)
    left, top, width = 2 + (number * 7) % 20, 2 + (number * 5) % 20, 26 + number % 8
    box = (left, top, left + width, top + width)
    fill = COLOURS[colour]
    if shape == "square":
        draw.rectangle(box, fill=fill)
    elif shape == "circle":
        draw.ellipse(box, fill=fill)
    else:
        draw.polygon([(left, top + width), (left + width, top + width), (left + width // 2, top)], fill=fill)
    return picture


def shape_file(folder: Path, count: int, uneven: bool = False) -> Path:
    """Conversations about pictures beside them, in LLaMA-Factory's form; uneven: about none, one or two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        pairs = [
            (SHAPES[(number + more) % 3], list(COLOURS)[(number // 3 + more) % 3])
            for more in range((1, 2, 0)[number % 3] if uneven else 1)
        ]
        names = []
        for more, (shape, colour) in enumerate(pairs):
            names.append(f"{number}-{more}.png")
            drawn(shape, colour, number + 31 * more).save(folder / names[-1])
        question = "<image>" * len(pairs) + ("What is it?" if pairs else "Is there a picture?")
        answer = " and ".join(f"{colour} {shape}" for shape, colour in pairs) or "no"
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": said, **({"images": names} if names else {})}))
    (folder / "shapes.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "shapes.jsonl"


def _template(picture: str) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}" + picture + "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _tokenizer(template: str, *tokens: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
    tokenizer.chat_template = template
    return tokenizer


def _text(tokenizer: Any, **more: Any) -> transformers.LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"), "pad_token_id": tokenizer.pad_token_id}
    return transformers.LlamaConfig(
        **{
            **sizes,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "vocab_size": len(tokenizer),
            **ends,
            **more,
        }
    )


def _at_random(kind: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config)


def llava() -> tuple[Any, Any]:
    """A LLaVA and its processor: each picture becomes 16 tokens."""
    template = _template("<image>\n")
    tokenizer = _tokenizer(template, "<image>")
    pixels = {"shortest_edge": SIZE}
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size=pixels, crop_size={"height": SIZE, "width": SIZE}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**tower, image_size=SIZE, patch_size=14),
        text_config=_text(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    return _at_random(transformers.LlavaForConditionalGeneration, config), processor


def gemma() -> tuple[Any, Any]:
    """A Gemma 3 and its processor: each picture becomes 4 tokens between two, and empty lines around them."""
    names = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    template = _template(names[0])
    named = dict(zip(("boi_token", "eoi_token", "image_token"), names, strict=True))
    tokenizer = byte_tokenizer(extra_special_tokens=named)
    tokenizer.chat_template = template
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=template,
    )
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**_text(tokenizer).to_dict(), "head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16}
    for name in ("model_type", "rope_parameters", "architectures", "transformers_version", "dtype"):
        text.pop(name, None)
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config=transformers.SiglipVisionConfig(**tower, image_size=SIZE, patch_size=14, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_id=tokenizer.convert_tokens_to_ids(names[2]),
        boi_token_id=tokenizer.convert_tokens_to_ids(names[0]),
        eoi_token_id=tokenizer.convert_tokens_to_ids(names[1]),
    )
    return _at_random(transformers.Gemma3ForConditionalGeneration, config), processor


def qwen2_audio() -> tuple[Any, Any]:
    """A Qwen2-Audio and its processor, which hears two seconds."""
    template = _template("Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>").replace("'image'", "'audio'")
    tokenizer = _tokenizer(template, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2),
        tokenizer=tokenizer,
        chat_template=template,
    )
    audio = {"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(
            **sizes, num_key_value_heads=2, max_position_embeddings=512, vocab_size=len(tokenizer)
        ).to_dict(),
        audio_config={**audio, "d_model": 32, "max_source_positions": 100},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    config.pad_token_id = tokenizer.pad_token_id
    return _at_random(transformers.Qwen2AudioForConditionalGeneration, config), processor


def sound_file(folder: Path, count: int) -> Path:
    """Conversations about high and low tones beside them, of uneven lengths, each third about none."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        high = number % 2 == 0
        times = torch.arange(6000 + 1700 * (number % 4)) / RATE
        write_sound(folder / f"{number}.wav", torch.sin(times * (4400 if high else 1100)).numpy() * 0.5, RATE)
        has = number % 3 != 2
        said = [
            {"role": "user", "content": "<audio>Which?" if has else "Is there a sound?"},
            {"role": "assistant", "content": ("high" if high else "low") if has else "no"},
        ]
        lines.append(json.dumps({"messages": said, **({"audios": [f"{number}.wav"]} if has else {})}))
    (folder / "sounds.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "sounds.jsonl"


def picture_model_folder(folder: Path, made: tuple[Any, Any]) -> Path:
    """A folder as `save_pretrained` of a model and its processor writes it."""
    model, processor = made
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
