"""Pictures of a conversation as records name them, in the forms of TRL and of LLaMA-Factory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roundpipe.data.unusable import UnusableError

PICTURE = "\U000f5049"
"""Stands for a picture in a message's text; of Unicode's private characters, so that no text has it."""
_WRITTEN = "<image>"
_LISTS = ("images", "image")
_PARTS = ("image", "image_url")
_OTHERS = {"video": "a video", "video_url": "a video", "audio": "a sound", "input_audio": "a sound"}
_PLACES = ("image", "url", "path", "image_url")


def mark_pictures(messages: Any, record: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Puts `PICTURE` into the messages where a picture is.

    A picture is a part of a message's content (`{"type": "image"}`), with its place or in the order of the record's
    `images`; or it is written as `<image>` in the text of a record with `images`. If a record has images and says
    nowhere where they are, they are before its first question.

    Returns:
        The messages, whose contents are texts where they were parts with pictures, and the pictures in their order:
        each a path, bytes, or a picture of PIL.

    Raises:
        UnusableError: there are more places than pictures or fewer, pictures in answers, or videos or sounds.
    """
    for name, what in (("videos", "a video"), ("audios", "a sound")):
        if record.get(name):
            raise UnusableError("broken", f"{what} in a conversation", f"it has {name}, expected pictures")
    given, has_list = _listed(record), any(name in record for name in _LISTS)
    if not isinstance(messages, list) or not (has_list or any(_has_parts(message) for message in messages)):
        return messages, []
    left, found, marked = list(given), [], []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            marked.append(message)
            continue
        content = message.get("content")
        if isinstance(content, str):
            _refuse_mark(content)
            count = content.count(_WRITTEN) if has_list else 0
            found += _taken(left, count, index)
            content = content.replace(_WRITTEN, PICTURE) if count else content
        elif isinstance(content, list):
            texts = []
            for part in content:
                text, picture = _of_part(part, left, index)
                texts.append(text)
                found += picture
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
        if isinstance(content, str) and PICTURE in content and message.get("role") == "assistant":
            raise UnusableError("broken", "a picture in an answer", f"message {index} has one, expected text")
        marked.append(message if content is message.get("content") else {**message, "content": content})
    if given and not found:
        return _before_question(marked, left), given
    if left:
        detail = f"has {len(given)} images and places for {len(given) - len(left)}, expected as many"
        raise UnusableError("broken", "pictures without a place", detail)
    return marked, found


def has_pictures(record: Mapping[str, Any]) -> bool:
    """Whether a record has pictures beside its text."""
    return bool(_listed(record))


def _has_parts(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in (*_PARTS, *_OTHERS) for part in content
    )


def _listed(record: Mapping[str, Any]) -> list[Any]:
    """The pictures of the record beside its messages."""
    values = [record[name] for name in _LISTS if record.get(name) is not None]
    if len(values) > 1:
        raise UnusableError("broken", "images and image", "expected one of them")
    if not values:
        return []
    found = _parsed(values[0]) if isinstance(values[0], str) else values[0]
    return list(found) if isinstance(found, list | tuple) else [found]


def _parsed(text: str) -> Any:
    """The list that a cell of CSV holds as JSON; another text as it is."""
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, list) else text


def _taken(left: list[Any], count: int, index: int) -> list[Any]:
    if count > len(left):
        raise UnusableError("broken", "places without pictures", f"message {index} has more than the record has images")
    taken, left[:count] = left[:count], []
    return taken


def _of_part(part: Any, left: list[Any], index: int) -> tuple[Any, list[Any]]:
    """The text of a part of a content, None for a part that no text can stand for, and its picture."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _refuse_mark(part["text"])
        return part["text"], []
    if kind in _OTHERS:
        raise UnusableError(
            "broken", f"{_OTHERS[kind]} in a conversation", f"message {index} has it, expected pictures"
        )
    if kind not in _PARTS:
        return None, []
    places = [part[name] for name in _PLACES if part.get(name) is not None]
    place = places[0] if places else None
    place = place.get("url") if isinstance(place, Mapping) and kind == "image_url" else place
    return PICTURE, _taken(left, 1, index) if place is None else [place]


def _before_question(messages: list[Any], pictures: list[Any]) -> list[Any]:
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user" and isinstance(message.get("content"), str):
            asked = {**message, "content": PICTURE * len(pictures) + message["content"]}
            return [*messages[:index], asked, *messages[index + 1 :]]
    raise UnusableError("broken", "pictures without a place", "expected a question before which they are")


def _refuse_mark(text: str) -> None:
    if PICTURE in text:
        raise UnusableError("broken", "a private character of Unicode", f"its text has {PICTURE!r}, expected none")


def parts_of(content: str) -> list[dict[str, str]]:
    """A content with `PICTURE` as a chat template takes it."""
    if PICTURE not in content:
        return [{"type": "text", "text": content}]
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(PICTURE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
