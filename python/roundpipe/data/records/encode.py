"""Items become samples: tokens, and which of them count."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from roundpipe.data.conversations.conversation import Conversation
from roundpipe.data.conversations.encoder import ChatEncoder, EncodedChat
from roundpipe.data.records.formats import Graded, Item, Pair, Text, Tokens
from roundpipe.data.records.options import DataOptions
from roundpipe.data.records.store import Encoded, of_labels
from roundpipe.data.unusable import UnusableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roundpipe.data.pictures.processor import PictureProcessor

_CUT_TEXT = "cut into several samples"
_CUT = "lost its end"
_NOTHING_LEFT = "left out: nothing that counts is left before its end"
_LEFT_OUT = "left out"
_EQUAL_CUT = "left out: chosen and rejected are equal before their end"


@dataclass
class Samples:
    """What an item became.

    Attributes:
        rows: of at most `max_length` tokens; of a pair, two.
        overlong: "" or what became of an item of too many tokens.
        notes: what else is to be said of it.
    """

    rows: list[Encoded]
    overlong: str = ""
    notes: list[str] = field(default_factory=list)


class Encoder:
    """Makes samples of items.

    Args:
        tokenizer: of the model.
        options: say how.
        pictures: of a model that takes pictures.

    Raises:
        ValueError: the tokenizer lacks a required feature.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: DataOptions, pictures: PictureProcessor | None = None
    ) -> None:
        self._tokenizer, self._options, self._pictures = tokenizer, options, pictures
        self._chat: ChatEncoder | None = None

    def encode(self, items: Sequence[Item]) -> list[Samples | UnusableError]:
        """What each of the items became, or what is wrong with it. The tokenizer sees all of them at once, and uses all
        of its threads."""
        texts = iter(self._texts([item for item in items if isinstance(item, Text)]))
        talks = [talk for item in items for talk in _talks(item)]
        chats = iter(self._encoder().encode(talks) if talks else [])
        found: list[Samples | UnusableError] = []
        for item in items:
            try:
                if isinstance(item, Text):
                    found.append(self._of_text(item, next(texts)))
                elif isinstance(item, Tokens):
                    found.append(self._fitted([self._of_tokens(item)]))
                elif isinstance(item, Conversation):
                    found.append(self._of_chat(next(chats)))
                elif isinstance(item, Graded):
                    found.append(self._of_rated(item, [next(chats) for _ in item.answers]))
                else:
                    found.append(self._of_pair(next(chats), next(chats)))
            except UnusableError as error:
                found.append(error)
        return found

    def _encoder(self) -> ChatEncoder:
        if self._chat is None:
            everything = self._options.train_on == "all"
            self._chat = ChatEncoder(self._tokenizer, everything=everything, pictures=self._pictures)
        return self._chat

    def _texts(self, texts: Sequence[Text]) -> list[list[int]]:
        """A text begins and ends with the tokens that the tokenizer adds by itself, and ends as the options say."""
        found: list[list[int]] = []
        # Pieces between the first and the last of a long text get no tokens but their own.
        for whole, group in itertools.groupby(texts, lambda text: text.begins):
            part = list(group)
            encoded = self._tokenizer(
                [text.text for text in part], add_special_tokens=whole, return_attention_mask=False, verbose=False
            )
            for text, tokens in zip(part, encoded["input_ids"], strict=True):
                found.append(self._ended(list(tokens), text))
        return found

    def _ended(self, tokens: list[int], text: Text) -> list[int]:
        end = self._tokenizer.eos_token_id
        if not text.ends:
            return tokens[:-1] if text.begins and tokens and tokens[-1] == end else tokens
        if not self._options.ends or (tokens and tokens[-1] == end):
            return tokens
        if not isinstance(end, int):
            raise ValueError(
                "[data] the tokenizer has no end-of-text token, expected one to end texts with; set it, or turn the "
                "ends off"
            )
        return [*tokens, end]

    def _of_text(self, text: Text, tokens: list[int]) -> Samples:
        longest, whole = self._options.max_length, text.begins and text.ends
        if whole and len(tokens) < 2:
            raise UnusableError("empty", "fewer than two tokens", "one token predicts the next")
        if self._options.overlong == "cut":
            # Nothing predicts the first token of a row, so it is the last one of the row before.
            begins = range(0, len(tokens) - 1, longest - 1)
            rows = [tokens[begin : begin + longest] for begin in begins]
            cut = _CUT_TEXT if text.begins and (len(rows) > 1 or not whole) else ""
            return Samples([Encoded(row, [0, len(row)]) for row in rows], cut)
        if not whole:
            return Samples([], _LEFT_OUT if text.begins else "")
        return self._fitted([Encoded(tokens, [0, len(tokens)])])

    def _of_chat(self, encoded: EncodedChat | UnusableError) -> Samples:
        if isinstance(encoded, UnusableError):
            raise encoded
        rows = [of_labels(each["input_ids"], each["labels"]) for each in encoded.samples]
        if self._pictures is not None and encoded.rendered:
            rows = [replace(row, rendered=each) for row, each in zip(rows, encoded.rendered, strict=True)]
        return self._fitted(rows, encoded.notes)

    def _of_pair(self, chosen: EncodedChat | UnusableError, rejected: EncodedChat | UnusableError) -> Samples:
        rows, notes = [], []
        for encoded in (chosen, rejected):
            if isinstance(encoded, UnusableError):
                raise encoded
            if len(encoded.samples) != 1:
                raise UnusableError(
                    "broken", "a pair whose answers the chat template rewrites", "expected pairs of one last answer"
                )
            rows.append(of_labels(encoded.samples[0]["input_ids"], encoded.samples[0]["labels"]))
            notes += [note for note in encoded.notes if note not in notes]
        fitted = self._fitted(rows, notes)
        if len(fitted.rows) == 2 and fitted.rows[0].tokens == fitted.rows[1].tokens:
            return Samples([], _EQUAL_CUT)
        return fitted if len(fitted.rows) == 2 else Samples([], fitted.overlong)

    def _of_rated(self, item: Graded, answers: Sequence[EncodedChat | UnusableError]) -> Samples:
        rows: list[Encoded] = []
        overlong, notes = "", []
        for (_, is_good), encoded in zip(item.answers, answers, strict=True):
            if isinstance(encoded, UnusableError):
                raise encoded
            if len(encoded.samples) != 1:
                raise UnusableError(
                    "broken", "a rated answer that the chat template rewrites", "expected one last answer"
                )
            made = self._of_chat(encoded)
            rows += [replace(row, is_good=is_good) for row in made.rows]
            overlong = made.overlong or overlong
            notes += [note for note in made.notes if note not in notes]
        return Samples(rows, overlong, notes)

    def _fitted(self, rows: Sequence[Encoded], notes: Sequence[str] = ()) -> Samples:
        """The rows that have something to learn from within the longest length."""
        longest = self._options.max_length
        if any(row.counted < 1 for row in rows):
            raise UnusableError("empty", "no token that counts", "expected a label other than -100 behind the first")
        if all(len(row.tokens) <= longest for row in rows):
            return Samples(list(rows), "", list(notes))
        if self._options.overlong == "cut" and not any(row.rendered and row.rendered.pictures for row in rows):
            cut = [row.cut(longest) for row in rows]
            left = [row for row in cut if row.counted >= 1]
            return Samples(left, _CUT if len(left) == len(rows) else _NOTHING_LEFT, list(notes))
        return Samples([row for row in rows if len(row.tokens) <= longest], _LEFT_OUT, list(notes))

    def _of_tokens(self, item: Tokens) -> Encoded:
        least, most = min(item.tokens), max(item.tokens)
        if least < 0 or most >= len(self._tokenizer):
            raise UnusableError(
                "broken",
                "tokens outside of the vocabulary",
                f"{least} to {most}, expected 0 to {len(self._tokenizer) - 1}",
            )
        return of_labels(item.tokens, item.labels)


def _talks(item: Item) -> list[Conversation]:
    if isinstance(item, Pair):
        return [item.chosen, item.rejected]
    if isinstance(item, Graded):
        return [talk for talk, _ in item.answers]
    return [item] if isinstance(item, Conversation) else []
