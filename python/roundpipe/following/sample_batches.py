"""Small batches that any transformers model can run: their contents follow from its signature and its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.data.samples import IGNORED

Batch = dict[str, Any]

ROWS = 3
_LENGTHS = (13, 17, 19, 23, 29, 11, 7, 31, 37)
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "image_token_id")
_OF_CLASSES = (
    *("SequenceClassification", "ImageClassification", "AudioClassification", "VideoClassification"),
    *("NextSentencePrediction", "MultipleChoice"),
)
_CHOICES = 2


def sample_batches(model: nn.Module) -> Iterator[Batch]:
    """Yields batches of `ROWS` rows that the model may accept, the most revealing ones first.

    Rows differ in how many tokens are attended to and in how many labels count, which shows what a loss averages over.

    Args:
        model: of transformers.
    """
    maker = _Maker(model)
    inputs = maker.inputs()
    if inputs is None:
        return
    for labels in maker.labels(inputs):
        yield {**inputs, **labels}
    if maker.takes("decoder_input_ids") and "input_ids" in inputs:
        yield {**inputs, "decoder_input_ids": maker.tokens(maker.target_length, shift=1)}
    yield inputs


def vocabulary_of(model: nn.Module) -> int:
    """The number of tokens that a model has a vector for, and a logit if it has a head for tokens: some models have
    vectors for further tokens, which are no labels.

    Raises:
        NotImplementedError: it has no tokens, as far as it says; or AttributeError.
    """
    like: Any = model  # its accessors have no types
    embedding, head = like.get_input_embeddings(), like.get_output_embeddings()
    vectors = int(embedding.weight.shape[0])  # peft's embeddings have no num_embeddings
    return min(vectors, int(head.weight.shape[0])) if isinstance(head, nn.Linear) else vectors


class _Maker:
    """Makes the contents of a batch, with lengths that differ from all sizes of the model."""

    def __init__(self, model: nn.Module) -> None:
        like: Any = model  # its accessors have no types
        self._model = like
        self._config = like.config
        self._parameters = inspect.signature(model.forward).parameters
        self._name = type(model).__name__
        sizes = {size for parameter in model.parameters() for size in parameter.shape}
        sizes |= set(_numbers(self._config))
        free = [length for length in _LENGTHS if length not in sizes and ROWS * length not in sizes]
        most = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        if isinstance(most, int) and most > 3:
            free = [length for length in free if length < most - 2] or [most - 3]
        self.length = free[0] if free else _LENGTHS[0]
        self.target_length = free[1] if len(free) > 1 else self.length
        self._generator = torch.Generator().manual_seed(0)

    def takes(self, name: str) -> bool:
        return name in self._parameters

    def _random(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(min(low, high - 1), high, shape, generator=self._generator)

    def _normal(self, *shape: int) -> torch.Tensor:
        dtype = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), torch.float32)
        return torch.randn(*shape, generator=self._generator).to(dtype)

    def _vocabulary(self) -> int:
        try:
            return vocabulary_of(self._model)
        except (AttributeError, NotImplementedError):
            return int(getattr(self._config.get_text_config(), "vocab_size", 2))

    def tokens(self, length: int, *, shift: int = 0) -> torch.Tensor:
        """Token ids [rows, length] without special tokens."""
        vocabulary = self._vocabulary()
        ids = self._random(1, vocabulary, ROWS, length)
        special = {getattr(config, name, None) for name in _SPECIAL for config in _configs(self._config)}
        ordinary = next((token for token in range(vocabulary - 1, 0, -1) if token not in special), 0)
        for token in special:
            if isinstance(token, int):
                ids[ids == token] = ordinary
        return ids.roll(shift, 1)

    def inputs(self) -> Batch | None:
        """The model's arguments besides labels; None if they are unknown."""
        made: Batch = {}
        main = getattr(self._model, "main_input_name", "input_ids")
        for name in dict.fromkeys((main, "input_ids", "pixel_values", "input_features", "input_values")):
            required = name in self._parameters and self._parameters[name].default is inspect.Parameter.empty
            both = name == "pixel_values" and self.takes("return_loss")
            if self.takes(name) and (name == main or required or both):
                value = self._input(name)
                if value is None:
                    return None
                made.update(value)
        if self.takes("return_loss"):
            made["return_loss"] = True
        return made or None

    def _input(self, name: str) -> Batch | None:
        if name == "input_ids":
            return self._text()
        if name == "pixel_values":
            return self._pictures()
        if name == "input_features":
            frames = getattr(self._config, "max_source_positions", None)
            bins = getattr(self._config, "num_mel_bins", None)
            return None if frames is None or bins is None else {name: self._normal(ROWS, int(bins), 2 * int(frames))}
        if name == "input_values":
            return {name: self._normal(ROWS, 4001)}
        return None

    def _text(self) -> Batch:
        ids = self.tokens(self.length)
        attended = torch.ones_like(ids)
        end, padding = (getattr(self._config, name, None) for name in ("eos_token_id", "pad_token_id"))
        for row in range(ROWS):
            used = self.length - 2 * row
            attended[row, used:] = 0
            if isinstance(padding, int):
                ids[row, used:] = padding
            if isinstance(end, int) and end < self._vocabulary() and end != padding:
                ids[row, used - 1] = end
        made = {"input_ids": ids}
        if self.takes("attention_mask"):
            made["attention_mask"] = attended
        if self._name.endswith("MultipleChoice"):
            made = {name: value[:, None].repeat(1, _CHOICES, 1) for name, value in made.items()}
            made["input_ids"][:, 1] = made["input_ids"][:, 1].roll(1, 0)
        return made

    def _pictures(self) -> Batch | None:
        config = getattr(self._config, "vision_config", self._config)
        size = getattr(config, "image_size", None)
        channels = getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size or (64, 64)
        return {"pixel_values": self._normal(ROWS, int(channels), int(height), int(width))}

    def labels(self, inputs: Batch) -> Iterator[Batch]:
        """Yields labels that the model may accept, the likely ones first."""
        if self.takes("start_positions") and self.takes("end_positions"):
            yield {name: self._random(1, 5, ROWS) for name in ("start_positions", "end_positions")}
        if not self.takes("labels"):
            return
        more: Batch = {}
        for name in ("next_sentence_label", "sentence_order_label"):
            if self.takes(name):
                more[name] = self._random(0, 2, ROWS)
        classes = int(getattr(self._config, "num_labels", 2) or 1)
        rows, tokens = self._of_rows(classes), self._of_tokens(inputs, classes)
        of_rows = self._name.endswith(_OF_CLASSES)
        for labels in (rows, tokens) if of_rows else (tokens, rows):
            for value in labels:
                yield {"labels": value, **more}

    def _of_rows(self, classes: int) -> Iterator[torch.Tensor]:
        if self._name.endswith("MultipleChoice"):
            yield self._random(0, _CHOICES, ROWS)
        elif classes == 1:
            yield self._normal(ROWS)
        else:
            problem = getattr(self._config, "problem_type", None)
            labels = self._random(0, classes, ROWS)
            yield self._normal(ROWS, classes).abs().clamp(max=1) if problem in _OF_FLOATS else labels

    def _of_tokens(self, inputs: Batch, classes: int) -> Iterator[torch.Tensor]:
        if "input_ids" not in inputs and not self.takes("decoder_input_ids") and not self._name.endswith("CTC"):
            return
        if self._name.endswith("CTC"):
            yield self._random(1, int(self._config.vocab_size), ROWS, 5)
            return
        of_tokens = self._name.endswith("TokenClassification")
        length = self.target_length if self.takes("decoder_input_ids") else self.length
        labels = self._random(0, classes, ROWS, length) if of_tokens else self.tokens(length, shift=1)
        marked = labels.clone()
        for row in range(ROWS):
            marked[row, : 2 * row + 1] = IGNORED
        if self.takes("decoder_input_ids"):
            marked = labels.clone()
            for row in range(ROWS):
                marked[row, length - 2 * row - 1 :] = IGNORED
        yield marked
        # For models that do not use ignored labels, such as whether a token was replaced.
        yield self._random(0, 2, ROWS, length)


_OF_FLOATS = ("regression", "multi_label_classification")


def _configs(config: Any) -> list[Any]:
    inner = [value for value in vars(config).values() if hasattr(value, "to_diff_dict")]
    return [config, *inner]


def _numbers(config: Any) -> Iterator[int]:
    for each in _configs(config):
        for value in vars(each).values():
            if type(value) is int:
                yield value
