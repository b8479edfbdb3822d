"""A model's processor: what pictures become among tokens, and the tensors of a batch with pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from roundpipe.data.pictures.content import KIND_OF, Medium
from roundpipe.data.pictures.files import read_picture
from roundpipe.data.pictures.sounds import read_sound
from roundpipe.data.pictures.videos import read_video
from roundpipe.data.unusable import UnusableError

Spans = Sequence[tuple[int, int]]
OF_TOKENS = ("input_ids", "attention_mask", "offset_mapping")
"""What a processor makes of the text."""


# The part of a processor that makes each kind's tensors, and the argument by which it is given them.
_MAKERS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_NAMES = {"image": "images", "video": "videos", "audio": "audio"}


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
    """Encodes texts with pictures, videos and sounds as the processor of a model of transformers does.

    Args:
        processor: with a tokenizer, an image processor, a video processor or a feature extractor, and a chat template.

    Raises:
        ValueError: its chat template writes nothing for any of them.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        if not getattr(self.tokenizer, "chat_template", None):
            self.tokenizer.chat_template = getattr(processor, "chat_template", None)
        failed: ValueError | None = None
        written: dict[str, str] = {}
        for kind, part in _MAKERS.items():
            if getattr(processor, part, None) is not None:
                try:
                    written[kind] = self._placeholder(kind)
                except ValueError as error:
                    failed = failed or error
        if not written:
            raise failed or ValueError("[data] the processor takes text alone, expected one that takes pictures")
        self._written = written
        longest = sorted(written.values(), key=len, reverse=True)
        self._between = re.compile("|".join(map(re.escape, longest)))

    def _placeholder(self, kind: str) -> str:
        """What the chat template writes for a picture, a video or a sound: its token or, without one, all of it."""
        said = {"type": "text", "text": "x"}
        try:
            texts = [
                self.tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
                for parts in ([said], [{"type": kind}, said])
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
        whole = after[begin : begin + added]
        # Around it may be a number: "Audio 1: <|AUDIO|>".
        return next((token for token in self._tokens_of(kind) if whole.count(token) == 1), str(whole))

    def _tokens_of(self, kind: str) -> list[str]:
        names = {"image": ("image_token", "boi_token"), "video": ("video_token",), "audio": ("audio_token",)}[kind]
        found = (getattr(self.processor, name, None) for name in names)
        return [token for token in found if isinstance(token, str) and token]

    def refuse_tokens(self, text: str) -> None:
        """Raises UnusableError for a text without pictures that has the tokens which the processor replaces by them."""
        for kind, written in self._written.items():
            own = [written.strip(), *self._tokens_of(kind)]
            if found := next((token for token in own if token in text), None):
                what = KIND_OF[kind].what
                detail = f"its text has {found}, and it has no {what}"
                raise UnusableError("broken", f"the model's token for a {what} in a text", detail)

    def encode(self, text: str, spans: Spans, pictures: Sequence[Medium]) -> tuple[list[int], list[bool], int]:
        """The tokens of a text with pictures, which of them are learnt, and the bytes of what the model gets of the
        pictures.

        Args:
            text: as the chat template writes it.
            spans: of the text that is learnt.
            pictures: with the files of all, in their order.

        Raises:
            UnusableError: the text has more or fewer pictures, or the processor cannot encode it.
        """
        for medium in pictures:
            if medium.kind not in self._written:
                reason = f"{KIND_OF[medium.kind].what}s, which the model does not take"
                raise UnusableError("broken", reason, f"expected {', '.join(self._written)}")
        found = list(self._between.finditer(text))
        if [each[0] for each in found] != [self._written[medium.kind] for medium in pictures]:
            detail = f"the chat template writes {len(found)} of {len(pictures)} pictures"
            raise UnusableError("broken", "pictures that the chat template does not write", detail)
        begins = [0, *(each.end() for each in found)]
        pieces = [text[begin:end] for begin, end in zip(begins, [*(e.start() for e in found), len(text)], strict=True)]
        recorder = _Recorder(self.tokenizer)
        try:
            self.processor.tokenizer = recorder
            made = self._called([text], [pictures], return_offsets_mapping=True)
        finally:
            self.processor.tokenizer = self.tokenizer
        tokens, offsets = list(made["input_ids"][0]), made["offset_mapping"][0]
        places = _places(recorder.texts[0], pieces)
        learnt = [False] * len(tokens)
        for first, last in spans:
            for place, begin, piece in zip(places, begins, pieces, strict=False):
                left, right = max(first - begin, 0), min(last - begin, len(piece))
                if left < right:
                    for number, (start, _) in enumerate(offsets):
                        learnt[number] = learnt[number] or place + left <= start < place + right
        return tokens, learnt, sum(_bytes_of(value) for name, value in made.items() if name not in OF_TOKENS)

    def batch(self, texts: Sequence[str], pictures: Sequence[Sequence[Medium]]) -> dict[str, Any]:
        """The processor's tensors for rows, padded on the right: `input_ids`, `attention_mask`, pixels and what else
        the model takes.

        Args:
            texts: of the rows, as the chat template writes them.
            pictures: those of each row.
        """
        made = self._called(list(texts), pictures, padding=True, padding_side="right", return_tensors="pt")
        return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}

    def _called(self, texts: list[str], media: Sequence[Sequence[Medium]], **options: Any) -> Any:
        """Some processors take the pictures of each row, others those of all rows, if some have none."""
        rows = {
            kind: [[self._read(medium) for medium in row if medium.kind == kind] for row in media]
            for kind in self._written
            if any(medium.kind == kind for row in media for medium in row)
        }
        if "audio" in rows:
            options["sampling_rate"] = self.processor.feature_extractor.sampling_rate
        if "video" in rows:
            read = [each for row in rows["video"] for each in row]
            maker = self.processor.video_processor
            chooses = any(getattr(maker, name, None) for name in ("fps", "num_frames"))
            options |= {"video_metadata": [when for _, when in read], "do_sample_frames": chooses}
            rows["video"] = [[frames for frames, _ in row] for row in rows["video"]]
        failed: Exception | None = None
        flat = {_NAMES[kind]: [each for row in found for each in row] for kind, found in rows.items()}
        nested = {_NAMES[kind]: found for kind, found in rows.items() if kind == "image"}
        forms = [{**flat, **nested}] if all(all(found) for found in nested.values()) else [{**flat, **nested}, flat]
        for form in forms:
            try:
                # The chat template writes special tokens.
                return self.processor(text=texts, **form, add_special_tokens=False, **options)
            except Exception as error:  # whatever a processor raises
                failed = failed or error
        raise UnusableError("broken", f"the processor failed: {str(failed)[:120]}", "expected pictures that it takes")

    def _read(self, medium: Medium) -> Any:
        if medium.kind == "audio":
            return read_sound(medium.place, self.processor.feature_extractor.sampling_rate)
        return read_picture(medium.place) if medium.kind == "image" else read_video(medium.place)


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
