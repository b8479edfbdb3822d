"""Pictures, videos and sounds of a conversation as records name them, in the forms of TRL and of LLaMA-Factory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from roundpipe.data.unusable import UnusableError

PICTURE, VIDEO, SOUND = "\U000f5049", "\U000f5056", "\U000f5053"
"""Stand for a picture, a video and a sound in a message's text; of Unicode's private characters, so that no text has
them."""


class Medium(NamedTuple):
    """A picture, a video or a sound.

    Attributes:
        kind: the name of its `Kind`.
        place: as a record names it: a path, bytes, a picture of PIL, a mapping; or, once it is found, its file.
    """

    kind: str
    place: Any


@dataclass(frozen=True)
class Kind:
    """What records call one kind of media.

    Attributes:
        name: the type of a content's part.
        mark: stands for one in a text.
        what: in words.
        lists: the members of a record that have them.
        parts: the types of parts that are one.
        places: the members of a part that say where it is.
    """

    name: str
    mark: str
    what: str
    lists: tuple[str, ...]
    parts: tuple[str, ...]
    places: tuple[str, ...]

    @property
    def written(self) -> str:
        """How it is written in a text beside its list."""
        return f"<{self.name}>"


KINDS = (
    Kind(
        "image", PICTURE, "picture", ("images", "image"), ("image", "image_url"), ("image", "url", "path", "image_url")
    ),
    Kind("video", VIDEO, "video", ("videos",), ("video", "video_url"), ("video", "url", "path", "video_url")),
    Kind(
        "audio",
        SOUND,
        "sound",
        ("audios",),
        ("audio", "audio_url", "input_audio"),
        ("audio", "url", "path", "audio_url", "input_audio"),
    ),
)
KIND_OF = {kind.name: kind for kind in KINDS}
_OF_MARKS = {kind.mark: kind for kind in KINDS}


def mark_pictures(messages: Any, record: Mapping[str, Any]) -> tuple[Any, list[Medium]]:
    """Puts a kind's mark into the messages where a picture, a video or a sound is.

    A picture is a part of a message's content (`{"type": "image"}`), with its place or in the order of the record's
    `images`; or it is written as `<image>` in the text of a record with `images`. If a record has images and says
    nowhere where they are, they are before its first question. So it is with videos and sounds.

    Returns:
        The messages, whose contents are texts where they were parts with pictures, and the pictures, videos and sounds
        in their order.

    Raises:
        UnusableError: there are more places than pictures or fewer, or pictures in answers.
    """
    given = {kind.name: listed for kind in KINDS if (listed := _listed(record, kind)) is not None}
    if not isinstance(messages, list) or not (given or any(_has_parts(message) for message in messages)):
        return messages, []
    left = {name: list(places) for name, places in given.items()}
    found: list[Medium] = []
    marked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            marked.append(message)
            continue
        content = message.get("content")
        if isinstance(content, str):
            content = _of_text(content, left, found, index)
        elif isinstance(content, list):
            texts = [_of_part(part, left, found, index) for part in content]
            whole = [text for text in texts if text is not None]
            content = "".join(whole) if len(whole) == len(texts) else content
        if isinstance(content, str) and message.get("role") == "assistant" and _first_mark(content):
            spoken = _OF_MARKS[_first_mark(content)].what
            raise UnusableError("broken", f"a {spoken} in an answer", f"message {index} has one, expected text")
        marked.append(message if content is message.get("content") else {**message, "content": content})
    without = [
        Medium(name, place)
        for name, places in given.items()
        for place in places
        if not any(each.kind == name for each in found)
    ]
    if without:
        left |= {each.kind: [] for each in without}
        marked, found = _before_question(marked, without), [*without, *found]
    for name, places in left.items():
        if places:
            what, count = KIND_OF[name], len(given[name])
            detail = f"has {count} {what.lists[0]} and places for {count - len(places)}, expected as many"
            raise UnusableError("broken", f"{what.what}s without a place", detail)
    return marked, found


def has_pictures(record: Mapping[str, Any]) -> bool:
    """Whether a record has pictures, videos or sounds beside its text."""
    return any(_listed(record, kind) for kind in KINDS)


def _has_parts(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and any(part.get("type") in kind.parts for kind in KINDS) for part in content
    )


def _listed(record: Mapping[str, Any], kind: Kind) -> list[Any] | None:
    """The record's list of them beside its messages; None: it has none."""
    values = [record[name] for name in kind.lists if record.get(name) is not None]
    if len(values) > 1:
        raise UnusableError("broken", " and ".join(kind.lists), "expected one of them")
    if not values:
        return [] if any(name in record for name in kind.lists) else None
    found = _parsed(values[0]) if isinstance(values[0], str) else values[0]
    return list(found) if isinstance(found, list | tuple) else [found]


def _parsed(text: str) -> Any:
    """The list that a cell of CSV holds as JSON; another text as it is."""
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, list) else text


def _of_text(text: str, left: dict[str, list[Any]], found: list[Medium], index: int) -> str:
    """A text with marks where something of the record's lists is written."""
    _refuse_marks(text)
    for kind in KINDS:
        text = text.replace(kind.written, kind.mark) if kind.name in left else text
    found += [_taken(left, _OF_MARKS[letter], index) for letter in text if letter in _OF_MARKS]
    return text


def _taken(left: dict[str, list[Any]], kind: Kind, index: int) -> Medium:
    places = left.get(kind.name)
    if not places:
        detail = f"message {index} has more than the record has {kind.lists[0]}"
        raise UnusableError("broken", f"places without {kind.what}s", detail)
    return Medium(kind.name, places.pop(0))


def _of_part(part: Any, left: dict[str, list[Any]], found: list[Medium], index: int) -> str | None:
    """The text of a part of a content; None for a part that no text can stand for."""
    form = part.get("type") if isinstance(part, Mapping) else None
    if form == "text" and isinstance(part.get("text"), str):
        _refuse_marks(part["text"])
        return str(part["text"])
    kind = next((kind for kind in KINDS if form in kind.parts), None)
    if kind is None:
        return None
    places = [part[name] for name in kind.places if part.get(name) is not None]
    place = places[0] if places else None
    if isinstance(place, Mapping) and str(form).endswith("_url"):
        place = place.get("url")
    elif isinstance(place, Mapping) and form == "input_audio":
        place = f"data:audio/{place.get('format', '')};base64,{place.get('data', '')}"
    found.append(_taken(left, kind, index) if place is None else Medium(kind.name, place))
    return kind.mark


def _before_question(messages: list[Any], media: list[Medium]) -> list[Any]:
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user" and isinstance(message.get("content"), str):
            marks = "".join(KIND_OF[each.kind].mark for each in media)
            asked = {**message, "content": marks + message["content"]}
            return [*messages[:index], asked, *messages[index + 1 :]]
    what = KIND_OF[media[0].kind].what
    raise UnusableError("broken", f"{what}s without a place", "expected a question before which they are")


def _first_mark(text: str) -> str:
    return next((letter for letter in text if letter in _OF_MARKS), "")


def _refuse_marks(text: str) -> None:
    if mark := _first_mark(text):
        raise UnusableError("broken", "a private character of Unicode", f"its text has {mark!r}, expected none")


def marks_in(text: str) -> int:
    """How many pictures, videos and sounds a text has."""
    return sum(letter in _OF_MARKS for letter in text)


def split_at_marks(text: str) -> list[str]:
    """The texts between pictures, videos and sounds."""
    for mark in _OF_MARKS:
        text = text.replace(mark, PICTURE)
    return text.split(PICTURE)


def parts_of(content: str) -> list[dict[str, str]]:
    """A content with marks as a chat template takes it."""
    texts = split_at_marks(content)
    kinds = [_OF_MARKS[letter].name for letter in content if letter in _OF_MARKS]
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        parts += [{"type": kinds[number - 1]}] if number else []
        parts += [{"type": "text", "text": text}] if text or not kinds else []
    return parts
