"""Text that the model writes at evaluations, so that a reader sees what it has learnt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import roundpipe
from roundpipe.checkpoints.runs.lines import Lines
from roundpipe.data.pictures.processor import PictureProcessor
from roundpipe.data.samples import IGNORED
from roundpipe.following.layers.evaluation_mode import evaluation_mode
from roundpipe.train.config import TrainConfig
from roundpipe.train.loop import EvaluationRecord, StepRecord

_FROM_TEXT = 16  # tokens of a held-out text that begin a sample


@dataclass(frozen=True)
class Prompt:
    """What the model goes on from.

    Attributes:
        tokens: of the prompt.
        expected: how held-out data goes on, or "" for a prompt of the user's.
        more: the model's arguments for the prompt's pictures.
    """

    tokens: list[int]
    expected: str
    more: Mapping[str, Any] = field(default_factory=dict)


def make_prompts(
    config: TrainConfig, tokenizer: Any, held_out: Any, pictures: PictureProcessor | None = None
) -> list[Prompt]:
    """The configuration's prompts, as turns of a user if the tokenizer has a chat template; without any, the beginnings
    of held-out samples: up to the first token that is learnt or, of a text, a few tokens. A reward model writes
    nothing."""
    if config.task == "reward":
        return []
    if config.sample_prompts:
        return [Prompt(_encoded(text, tokenizer), "") for text in config.sample_prompts]
    prompts: list[Prompt] = []
    for index in range(len(held_out)):
        if len(prompts) >= config.samples:
            break
        sample = held_out[index]
        sample = sample.get("chosen", sample)  # of a pair
        tokens, labels = (torch.as_tensor(sample[name]).tolist() for name in ("input_ids", "labels"))
        learnt = next((place for place, label in enumerate(labels) if label != IGNORED), len(labels))
        begin = learnt if learnt > 1 else min(_FROM_TEXT, len(tokens) // 2)
        more: dict[str, Any] = {}
        if pictures is not None and sample.get("pictures"):
            made = pictures.batch([sample["text"]], [sample["pictures"]])
            more = {name: _first_tokens(value, len(tokens), begin) for name, value in made.items()}
            more = {name: value for name, value in more.items() if name not in ("input_ids", "attention_mask")}
        if begin and (more or all(prompt.tokens != tokens[:begin] for prompt in prompts)):
            expected = tokenizer.decode(tokens[begin : begin + config.sample_tokens])
            prompts.append(Prompt(tokens[:begin], expected, more))
    return prompts


def _first_tokens(value: torch.Tensor, tokens: int, begin: int) -> torch.Tensor:
    """A tensor of a row's tokens with the first of them only; another one as it is."""
    return value[:, :begin] if value.shape == (1, tokens) else value


def _encoded(text: str, tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(text)["input_ids"])
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


class Samples:
    """Writes `samples.jsonl`, and shows a sample at each evaluation. Decoding is greedy, so it draws nothing."""

    def __init__(
        self,
        model: roundpipe.RoundPipe,
        tokenizer: Any,
        prompts: list[Prompt],
        most_tokens: int,
        lines: Lines,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._tokenizer, self._prompts = model, tokenizer, prompts
        self._most_tokens, self._lines, self._say = most_tokens, lines, say

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_evaluation(self, record: EvaluationRecord) -> None:
        with evaluation_mode(self._model):
            for index, prompt in enumerate(self._prompts):
                text = self._written(prompt)
                asked = self._tokenizer.decode(prompt.tokens)
                line = {"step": record.step, "prompt": asked, "text": text, "expected": prompt.expected}
                self._lines.add(json.dumps(line))
                if index == 0:
                    self._say(f"  it writes: {_shortened(asked, end=True)!r} -> {_shortened(text)!r}")

    def _written(self, prompt: Prompt) -> str:
        from transformers import GenerationConfig

        ends = self._model.generation_config.eos_token_id
        made: Any = GenerationConfig
        config = made(
            max_new_tokens=self._most_tokens,
            do_sample=False,
            eos_token_id=self._tokenizer.eos_token_id if ends is None else ends,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        tokens = torch.tensor([prompt.tokens])
        with torch.no_grad():
            mask = torch.ones_like(tokens)
            out = self._model.generate(tokens, attention_mask=mask, generation_config=config, **prompt.more)
        return str(self._tokenizer.decode(out[0, len(prompt.tokens) :]))


def _shortened(text: str, most: int = 60, end: bool = False) -> str:
    if len(text) <= most:
        return text
    return f"...{text[-most:]}" if end else f"{text[:most]}..."
