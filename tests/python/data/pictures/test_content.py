"""Where records say that pictures are."""

from __future__ import annotations

from typing import Any

import pytest

from roundpipe.data.pictures.content import PICTURE, SOUND, VIDEO, mark_pictures, parts_of
from roundpipe.data.unusable import UnusableError

P = PICTURE


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def image(**more: Any) -> dict[str, Any]:
    return {"type": "image", **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


ANSWER = said("yes", "assistant")


@pytest.mark.parametrize(
    ("contents", "record", "marked", "pictures"),
    [
        (["<image>a<image>"], {"images": ["1", "2"]}, [f"{P}a{P}"], ["1", "2"]),
        (["<image>a"], {"image": "1"}, [f"{P}a"], ["1"]),
        (["<image> is a tag"], {}, ["<image> is a tag"], []),
        (["a"], {"images": None}, ["a"], []),
        (["<image>a"], {"images": '["1"]'}, [f"{P}a"], ["1"]),  # a cell of CSV
        (["a", "b"], {"images": ["1", "2"]}, [f"{P}{P}a", "b"], ["1", "2"]),
        ([[image(), text("a")]], {"images": ["1"]}, [f"{P}a"], ["1"]),
        ([[image(image="x.png"), text("a")]], {}, [f"{P}a"], ["x.png"]),
        ([[image(path="x.png"), image(url="y.png")]], {}, [f"{P}{P}"], ["x.png", "y.png"]),
        ([[{"type": "image_url", "image_url": {"url": "x.png"}}, text("a")]], {}, [f"{P}a"], ["x.png"]),
        ([[text("a"), image()], "<image>b"], {"images": ["1", "2"]}, [f"a{P}", f"{P}b"], ["1", "2"]),
        (["<video>a<audio>"], {"videos": ["1"], "audios": ["2"]}, [f"{VIDEO}a{SOUND}"], ["1", "2"]),
        (["<image><video>"], {"images": ["1"], "videos": "2"}, [f"{P}{VIDEO}"], ["1", "2"]),
        (["<image> <video>"], {"videos": ["2"]}, [f"<image> {VIDEO}"], ["2"]),
        (["a"], {"images": ["1"], "audios": ["2"]}, [f"{P}{SOUND}a"], ["1", "2"]),
        (
            [[{"type": "video", "video": "x.mp4"}, {"type": "audio", "path": "y.wav"}]],
            {},
            [f"{VIDEO}{SOUND}"],
            ["x.mp4", "y.wav"],
        ),
        (
            [[{"type": "input_audio", "input_audio": {"data": "YQ==", "format": "wav"}}]],
            {},
            [SOUND],
            ["data:audio/wav;base64,YQ=="],
        ),
        ([[text("a"), text("b")]], {}, [[text("a"), text("b")]], []),
    ],
)
def test_places_of_pictures(contents: list[Any], record: Any, marked: list[Any], pictures: list[Any]) -> None:
    messages = [message for content in contents for message in (said(content), ANSWER)]
    found, taken = mark_pictures(messages, record)
    assert [message["content"] for message in found[::2]] == marked
    assert [medium.place for medium in taken] == pictures
    assert found[1::2] == [ANSWER] * len(contents)


@pytest.mark.parametrize(
    ("messages", "record", "reason"),
    [
        ([said("<image><image>a")], {"images": ["1"]}, "places without pictures"),
        ([said([image(), text("a")])], {}, "places without pictures"),
        ([said("<image>a")], {"images": ["1", "2"]}, "pictures without a place"),
        ([said("<image>a")], {"images": []}, "places without pictures"),
        ([said("<image>a")], {"images": None}, "places without pictures"),
        ([said("<video>a")], {"videos": ["1", "2"]}, "videos without a place"),
        ([said("a"), said("<audio>", "assistant")], {"audios": ["1"]}, "a sound in an answer"),
        ([said("a", "system")], {"images": ["1"]}, "pictures without a place"),
        ([said("a"), said("<image>", "assistant")], {"images": ["1"]}, "a picture in an answer"),
        ([said([{"type": "video"}])], {}, "places without videos"),
        ([said([{"type": "audio"}, image()])], {"images": ["1"]}, "places without sounds"),
        ([said("a")], {"images": ["1"], "image": "2"}, "images and image"),
        ([said(f"a{P}")], {"images": ["1"]}, "a private character of Unicode"),
    ],
)
def test_what_does_not_fit_is_broken(messages: Any, record: Any, reason: str) -> None:
    with pytest.raises(UnusableError) as found:
        mark_pictures(messages, record)
    assert (found.value.kind, found.value.reason) == ("broken", reason)


def test_parts_of_a_content() -> None:
    assert parts_of("a") == [text("a")]
    assert parts_of(f"{P}a{P}{P}b") == [image(), text("a"), image(), image(), text("b")]
    assert parts_of(f"{VIDEO}a{SOUND}") == [{"type": "video"}, text("a"), {"type": "audio"}]
    assert parts_of("") == [text("")]
