"""Trains a chat model in fp16, with fp32 masters, a loss scale and shuffled batches, in a loop written out by hand.

    python examples/language_model.py
    ROUNDPIPE_DEVICES=virtual:4 python examples/language_model.py --epochs 20 --out FOLDER

The program downloads nothing: it makes a tiny Qwen3 with random weights, a tokenizer whose tokens are words, and the
conversations. For a real model, load `AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float16)` and its
tokenizer; the loop stays the same. `finetune.py` beside it is a complete fine-tuning run.
"""

from __future__ import annotations

import argparse
import random
import re
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

from roundpipe import GradScaler, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import AdamW

MICROBATCHES = 3
COLOURS = {"grass": "green", "snow": "white", "coal": "black", "blood": "red", "the sky": "blue", "a lemon": "yellow"}
FORMS = ("What colour is {}?", "Tell me the colour of {}.", "Which colour has {}?", "{}: which colour is it?")


def conversations() -> list[tuple[str, str]]:
    """Questions and what is to be answered."""
    return [(form.format(thing), f"It is {COLOURS[thing]}.") for thing in COLOURS for form in FORMS]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


PADDING, QUESTION, ANSWER, END = range(4)
VOCABULARY = ["", "", "", "", *sorted({word for pair in conversations() for word in words_of(" ".join(pair))})]


def tokens_of(question: str, answer: str | None = None) -> torch.Tensor:
    tokens = [QUESTION, *map(VOCABULARY.index, words_of(question)), ANSWER]
    return torch.tensor(tokens if answer is None else [*tokens, *map(VOCABULARY.index, words_of(answer)), END])


def collate(samples: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """A batch of rows as long as the longest. Labels are the answers' tokens; -100 elsewhere, which does not count."""
    rows = [tokens_of(*sample) for sample in samples]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=PADDING)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = input_ids.masked_fill(mask == 0, -100)
    for row, (question, _) in zip(labels, samples, strict=True):
        row[: len(tokens_of(question))] = -100
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def answer(model: Any, question: str, longest: int = 8) -> str:
    """What the model says, the likeliest token at a time."""
    tokens = tokens_of(question)[None]
    start = tokens.shape[1]
    one = RoundPipeRunConfig(num_microbatch=1)
    model.synchronize()  # waits for steps that still run
    model.eval()
    with torch.no_grad():
        while tokens.shape[1] < start + longest and tokens[0, -1] != END:
            logits = model(input_ids=tokens, roundpipe_run_config=one).logits
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    model.train()
    return " ".join(VOCABULARY[token] for token in tokens[0, start:] if token > END)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", help="folder to save the model in")
    arguments = parser.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        head_dim=16,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
        **sizes,
    )
    model = wrap_model_to_roundpipe(
        Qwen3ForCausalLM(config).half(),
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES),
    )
    optimizer = AdamW(model.optim_parameters(), lr=2e-3)
    scaler = GradScaler(2.0**12)
    data = conversations()
    batches = DataLoader(data, batch_size=6, shuffle=True, collate_fn=collate)

    def update() -> None:
        scaler.step(optimizer)
        optimizer.zero_grad()

    model.train()
    for epoch in range(1, arguments.epochs + 1):
        losses = []
        for batch in batches:
            # With the count of the batch, each microbatch's loss is its part of the batch's loss; the parts are added.
            count = int((batch["labels"][:, 1:] != -100).sum())
            scale = scaler.get_scale()
            loss = model.forward_backward(
                input_kwargs={**batch, "num_items_in_batch": count},
                loss_fn=lambda outputs, _: scaler.scale(outputs.loss),
            )
            model.step(update)  # returns at once and overlaps with the next batch
            scaler.update()
            losses.append(loss.item() / scale)
        if epoch % 10 == 0 or epoch == arguments.epochs:
            print(f"epoch {epoch}  loss {sum(losses) / len(losses):.3f}", flush=True)

    right = 0
    for question, expected in random.sample(data, 6):
        said = answer(model, question)
        right += said == " ".join(words_of(expected))
        print(f"{question}  {said}")
    print(f"{right} of 6 answers are right")
    if arguments.out:
        model.synchronize()
        model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
