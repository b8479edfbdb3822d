"""A model's processor: what pictures become among tokens, and the tensors of a batch with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from roundpipe.data.pictures.files import read_picture
from roundpipe.data.unusable import UnusableError

Spans = Sequence[tuple[int, int]]
OF_TOKENS = ("input_ids", "attention_mask", "offset_mapping")
"""What a processor makes of the text."""


class _Recorder:
    """A tokenizer that remembers what it was called with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.texts = [text] if isinstance(text, str) else list(text)
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class PictureProcessor:
    """Encodes texts with pictures as the processor of a model of transformers does.

    Args:
        processor: with a tokenizer, an image processor and a chat template.

    Raises:
        ValueError: its chat template writes nothing for a picture.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        if not getattr(self.tokenizer, "chat_template", None):
            self.tokenizer.chat_template = getattr(processor, "chat_template", None)
        self._written = self._placeholder()

    def _placeholder(self) -> str:
        """What the chat template writes for a picture."""
        said = {"type": "text", "text": "x"}
        try:
            texts = [
                self.tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
                for parts in ([said], [{"type": "image"}, said])
            ]
        except Exception as error:  # whatever a template raises
            raise ValueError(f"[data] the chat template does not take pictures: {str(error)[:160]}") from error
        before, after = texts
        begin = next((place for place, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), 0)
        added = len(after) - len(before)
        # What surrounds it may begin as it does: "<" of "<image>" and of "<|end|>".
        while begin > 0 and after[begin - 1] == after[begin + added - 1] and after[begin - 1] == "<":
            begin -= 1
        if added <= 0 or after[:begin] + after[begin + added :] != before:
            raise ValueError(
                "[data] the chat template writes nothing for a picture, expected the token that the processor replaces"
            )
        return str(after[begin : begin + added])

    def refuse_tokens(self, text: str) -> None:
        """Raises UnusableError for a text without pictures that has the tokens which the processor replaces by them."""
        names = ("image_token", "boi_token")
        own = [self._written.strip(), *(getattr(self.processor, name, None) for name in names)]
        if found := next((token for token in own if isinstance(token, str) and token and token in text), None):
            detail = f"its text has {found}, and it has no picture"
            raise UnusableError("broken", "the model's token for a picture in a text", detail)

    def encode(self, text: str, spans: Spans, pictures: Sequence[str]) -> tuple[list[int], list[bool], int]:
        """The tokens of a text with pictures, which of them are learnt, and the bytes of what the model gets of the
        pictures.

        Args:
            text: as the chat template writes it.
            spans: of the text that is learnt.
            pictures: the files of all pictures, in their order.

        Raises:
            UnusableError: the text has more or fewer pictures, or the processor cannot encode it.
        """
        pieces = text.split(self._written)
        if len(pieces) != len(pictures) + 1:
            detail = f"the chat template writes {len(pieces) - 1} of {len(pictures)} pictures"
            raise UnusableError("broken", "pictures that the chat template does not write", detail)
        recorder = _Recorder(self.tokenizer)
        try:
            self.processor.tokenizer = recorder
            made = self._called([text], [[read_picture(path) for path in pictures]], return_offsets_mapping=True)
        finally:
            self.processor.tokenizer = self.tokenizer
        tokens, offsets = list(made["input_ids"][0]), made["offset_mapping"][0]
        places = _places(recorder.texts[0], pieces)
        begins = [0]
        for piece in pieces:
            begins.append(begins[-1] + len(piece) + len(self._written))
        learnt = [False] * len(tokens)
        for first, last in spans:
            for place, begin, piece in zip(places, begins, pieces, strict=False):
                left, right = max(first - begin, 0), min(last - begin, len(piece))
                if left < right:
                    for number, (start, _) in enumerate(offsets):
                        learnt[number] = learnt[number] or place + left <= start < place + right
        return tokens, learnt, sum(_bytes_of(value) for name, value in made.items() if name not in OF_TOKENS)

    def batch(self, texts: Sequence[str], pictures: Sequence[Sequence[str]]) -> dict[str, Any]:
        """The processor's tensors for rows, padded on the right: `input_ids`, `attention_mask`, pixels and what else
        the model takes.

        Args:
            texts: of the rows, as the chat template writes them.
            pictures: the files of each row.
        """
        read = [[read_picture(path) for path in row] for row in pictures]
        made = self._called(list(texts), read, padding=True, padding_side="right", return_tensors="pt")
        return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}

    def _called(self, texts: list[str], pictures: list[list[Any]], **options: Any) -> Any:
        """Some processors take the pictures of each row, others those of all rows, if some have none."""
        flat = [picture for row in pictures for picture in row]
        failed: Exception | None = None
        for form in ([pictures] if all(pictures) else [pictures, flat]) if flat else [None]:
            try:
                # The chat template writes special tokens.
                return self.processor(text=texts, images=form, add_special_tokens=False, **options)
            except Exception as error:  # whatever a processor raises
                failed = failed or error
        raise UnusableError("broken", f"the processor failed: {str(failed)[:120]}", "expected pictures that it takes")


def _bytes_of(value: Any) -> int:
    """Of an array, or of lists of them; numbers in lists count little."""
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return int(getattr(value, "nbytes", 0))


def _places(text: str, pieces: Sequence[str]) -> list[int]:
    """Where the pieces of a text are in one that has more between each two."""
    places = [0]
    for before, piece in pairwise(pieces):
        behind = places[-1] + len(before) + 1
        places.append(text.find(piece, behind) if len(places) + 1 < len(pieces) else len(text) - len(piece))
    ends = [place + len(piece) for place, piece in zip(places, pieces, strict=True)]
    in_order = all(end <= place for end, place in zip(ends, places[1:], strict=False))
    if not in_order or any(text[place:end] != piece for place, end, piece in zip(places, ends, pieces, strict=True)):
        raise UnusableError(
            "broken", "a text that the processor changes", "expected that it only puts pictures into it"
        )
    return places
