"""A small model learns to name shapes in pictures that this program draws, by `roundpipe train`."""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

from roundpipe.data.records.store import SampleFiles
from roundpipe.data.records.views import held_out_samples

SHAPES = ("square", "circle", "triangle")
COLOURS = {"red": (220, 30, 30), "green": (30, 170, 30), "blue": (40, 60, 220)}
QUESTION = "What is it ?"
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>", "<image>")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIDE, PATCH = 48, 12
HELD_OUT = 0.02


def drawn(shape: str, colour: str) -> Image.Image:
    """A shape of some size at some place."""
    picture = Image.new("RGB", (SIDE, SIDE), (240, 240, 240))
    left, top, width = random.randint(1, 9), random.randint(1, 9), random.randint(30, 38)
    right, bottom, brush, fill = left + width, top + width, ImageDraw.Draw(picture), COLOURS[colour]
    if shape == "square":
        brush.rectangle((left, top, right, bottom), fill=fill)
    elif shape == "circle":
        brush.ellipse((left, top, right, bottom), fill=fill)
    else:
        brush.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=fill)
    return picture


def write_records(file: Path, count: int) -> None:
    """Questions about pictures, which lie beside the file."""
    file.parent.mkdir(parents=True)
    with file.open("w") as lines:
        for number in range(count):
            shape, colour = random.choice(SHAPES), random.choice(list(COLOURS))
            drawn(shape, colour).save(file.parent / f"{number}.png")
            question = {"role": "user", "content": f"<image>{QUESTION}"}
            answer = {"role": "assistant", "content": f"a {colour} {shape}"}
            lines.write(json.dumps({"messages": [question, answer], "images": [f"{number}.png"]}) + "\n")


def write_model(folder: Path) -> None:
    """A LLaVA without knowledge, and its processor: each picture becomes 16 tokens."""
    words = [*SPECIAL, "a", *QUESTION.split(), *SHAPES, *COLOURS]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH),
        text_config=transformers.LlamaConfig(
            **sizes, vocab_size=len(tokenizer), max_position_embeddings=64, eos_token_id=1, pad_token_id=0
        ),
        image_token_id=SPECIAL.index("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)


def rows_of(file: Path, processor) -> tuple[dict, list[str]]:
    """The model's arguments for the questions of a file, and the answers."""
    records = [json.loads(line) for line in file.open()]
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    pictures = [Image.open(file.parent / record["images"][0]) for record in records]
    inputs = processor(text=[text] * len(records), images=pictures, add_special_tokens=False, return_tensors="pt")
    return inputs, [record["messages"][1]["content"] for record in records]


def accuracy(folder: Path, file: Path) -> float:
    """How many answers of a trained model are right, word for word."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    inputs, answers = rows_of(file, processor)
    written = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    texts = processor.tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)


def plain_loss(folder: Path, file: Path) -> float:
    """What transformers alone gives as the loss of a file's answers."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    inputs, answers = rows_of(file, processor)
    ends = processor.tokenizer([f"{answer} <end>" for answer in answers], return_tensors="pt")["input_ids"]
    asked = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], ends], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    labels = inputs["input_ids"].clone()
    labels[:, :asked] = -100
    with torch.no_grad():
        return float(model(**inputs, labels=labels).loss)


def held_out_file(out: Path) -> Path:
    """The records that the run held out, as a file beside their pictures."""
    prompts = [json.loads(line) for line in (out / "train" / "shapes.jsonl").open()]
    files = SampleFiles(out / "run" / "data", pairs=False)
    held = held_out_samples(files, files.records, HELD_OUT, seed=0)[1]
    file = out / "train" / "held-out.jsonl"
    file.write_text("".join(json.dumps(prompts[number]) + "\n" for number in held.tolist()))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--pictures", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    random.seed(0)
    write_records(options.out / "train" / "shapes.jsonl", options.pictures)
    write_records(options.out / "test" / "shapes.jsonl", 180)
    write_model(options.out / "start")
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "roundpipe",
        "train",
        "--model",
        options.out / "start",
        "--out",
        options.out / "run",
    ]
    command += [
        "--data",
        options.out / "train" / "shapes.jsonl",
        "--epochs",
        str(options.epochs),
        "--held-out",
        str(HELD_OUT),
    ]
    command += ["--length", "64", "--batch-tokens", "1536", "--learning-rate", "3e-3"]
    subprocess.run([*map(str, command), "--log-every", "100"], check=True)
    minutes = (time.monotonic() - begin) / 60
    expected = plain_loss(options.out / "start", held_out_file(options.out))
    first = json.loads((options.out / "run" / "metrics.jsonl").open().readline())["evaluation_loss"]
    print(f"the held-out loss before training was {first:.6f}, by transformers alone {expected:.6f}")
    right = accuracy(options.out / "run" / "model", options.out / "test" / "shapes.jsonl")
    print(f"{right:.1%} of 180 new pictures are named right, after {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
