"""Which pictures a row has, found from its tokens and from the arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roundpipe.following.pictures.splitting import picture_splitting

IMAGE, VIDEO, SOUND = 96, 95, 94
CONFIG = SimpleNamespace(image_token_id=IMAGE, video_token_id=VIDEO, audio_token_index=SOUND, pad_token_id=0, layer=[1])


def ids(*rows: list[int]) -> torch.Tensor:
    """Rows, padded to the longest one."""
    length = max(map(len, rows)) + 5
    return torch.tensor([row + [1] * (length - len(row)) for row in rows])


def cut(tokens: torch.Tensor, microbatches: int = 0, **arguments: Any) -> list[dict[str, Any]]:
    """The arguments of each microbatch, of one row each unless a number is given, but for the tokens."""
    named = {"input_ids": tokens, **arguments}
    split = picture_splitting(CONFIG, named, lambda args, kwargs: kwargs)
    assert split is not None
    parts = split((), named, microbatches or len(tokens))[1]
    assert torch.equal(torch.cat([part.pop("input_ids") for part in parts]), tokens)
    return parts


def entries(parts: list[dict[str, Any]], name: str) -> list[Any]:
    """Of arguments whose entries are numbered; None: a microbatch has none."""
    return [
        None if name not in part else [int(np.ravel(np.asarray(entry))[0]) for entry in part[name]] for part in parts
    ]


def numbered(number: int, *shape: int) -> torch.Tensor:
    return torch.arange(1, number + 1).view(-1, *[1] * len(shape)).expand(number, *shape).float()


I, J, V, S = [IMAGE], [IMAGE] * 4, [VIDEO], [SOUND]  # noqa: E741


def test_pictures_side_by_side_are_told_apart_by_a_table_of_sizes() -> None:
    tokens = ids([1, *I * 4, *I * 8, 1], [1], [1, *I * 2, 1])
    grid = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 2, 4]])
    parts = cut(tokens, image_grid_thw=grid, pixel_values=numbered(16 + 32 + 8, 3), image_sizes=[1, 2, 3])
    assert [part.get("image_grid_thw", grid[:0]).tolist() for part in parts] == [
        grid[:2].tolist(),
        [],
        grid[2:].tolist(),
    ]
    assert [len(part.get("pixel_values", ())) for part in parts] == [48, 0, 8]
    assert entries(parts, "image_sizes") == [[1, 2], None, [3]]


def test_pictures_side_by_side_are_told_apart_by_masks() -> None:
    tokens = ids([1, *S * 4, *S * 2, 1], [1], [1, *S * 3, 1])
    mask = (torch.arange(16) < torch.tensor([[16], [7], [11]])).int()
    parts = cut(tokens, input_features=numbered(3, 8, 16), feature_attention_mask=mask)
    assert entries(parts, "input_features") == [[1, 2], None, [3]]
    assert [part["feature_attention_mask"].sum(1).tolist() for part in (parts[0], parts[2])] == [[16, 7], [11]]


def test_pictures_side_by_side_of_one_size() -> None:
    parts = cut(ids([1, *J, *J, 1], [1, 1], [1, *J]), pixel_values=numbered(3, 3, 8, 8))
    assert entries(parts, "pixel_values") == [[1, 2], None, [3]]


def test_pictures_and_videos_in_one_batch() -> None:
    tokens = ids([1, *V * 2, 1, *V * 2, 1, *I], [1, *I, 1, *I, 1], [1, *V * 3, 1, *V * 3])
    parts = cut(
        tokens,
        pixel_values=numbered(3, 5),
        pixel_values_videos=numbered(4, 5),
        num_frames_per_video=torch.tensor([2, 2]),
        video_seconds=np.array([1.0, 2.0]),
        layer=[1],
    )
    assert entries(parts, "pixel_values") == [[1], [2, 3], None]
    assert entries(parts, "pixel_values_videos") == [[1, 2], None, [3, 4]]
    assert entries(parts, "num_frames_per_video") == [[2], None, [2]]
    assert entries(parts, "video_seconds") == [[1], None, [2]]
    assert [part["layer"] for part in parts] == [[1]] * 3


def test_frames_of_videos_side_by_side() -> None:
    tokens = ids([1, *V * 8, 1, *V * 12, 1], [1], [1, *V * 12, 1])
    parts = cut(tokens, pixel_values_videos=numbered(8, 5), num_frames_per_video=[2, 3, 3])
    assert entries(parts, "pixel_values_videos") == [[1, 2, 3, 4, 5], None, [6, 7, 8]]
    assert entries(parts, "num_frames_per_video") == [[2, 3], None, [3]]


def test_rows_padded_to_the_most_pictures() -> None:
    values = torch.ones(3, 2, 3, 4, 4)
    values[1] = values[2, 1] = 0
    parts = cut(ids([1, *J, 1, *J], [1], [1, *J]), pixel_values=values, pixel_attention_mask=values[:, :, 0])
    assert ["pixel_values" in part for part in parts] == [True, False, True]
    assert all(torch.equal(parts[row]["pixel_values"], values[row : row + 1]) for row in (0, 2))
    assert all(torch.equal(parts[row]["pixel_attention_mask"], values[row : row + 1, :, 0]) for row in (0, 2))


@pytest.mark.parametrize("inner", [torch.tensor, np.array, list])
def test_a_list_of_pictures_for_each_row(inner: Any) -> None:
    pictures = [[inner([1.0]), inner([2.0])], [], [inner([3.0])]]
    parts = cut(ids([1, *I, 1, *I], [1], [1, *I]), pixel_values=pictures)
    assert [part.get("pixel_values") for part in parts] == [[pictures[0]], None, [pictures[2]]]


def test_a_list_of_pictures_of_their_own_sizes() -> None:
    pictures = [torch.ones(3, 4, 4), torch.ones(3, 8, 4) * 2, torch.ones(3, 4, 8) * 3]
    parts = cut(ids([1, *I * 2, 1, *I * 4], [1], [1, *I * 4]), pixel_values=pictures)
    assert entries(parts, "pixel_values") == [[1, 2], None, [3]]


def test_as_many_pictures_as_rows_and_tokens() -> None:
    """A mask of as many places as a row has tokens is the pictures', by its name."""
    tokens = ids([1, *I * 2, 1, *I * 2], [1], [1, *I * 2])
    places = tokens.shape[1]
    parts = cut(tokens, pixel_values=numbered(3, places, 4), pixel_attention_mask=torch.ones(3, places))
    assert [len(part.get("pixel_attention_mask", ())) for part in parts] == [2, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pixel_values": numbered(2, 5)}, "the pictures of 'pixel_values' cannot be told apart by rows: it has 2"),
        ({"pixel_values": numbered(1, 5)}, "the pictures of 'pixel_values' cannot be told apart by rows: it has 1"),
        ({"pixel_values": numbered(3, 5), "seen": [1, 2, 3]}, "'seen' has 3 entries, which may belong to the 3 rows"),
        ({"pixel_values": numbered(3, 5), "seen": numbered(7)}, "'seen' has 7 entries, which are neither the 3 rows"),
        ({"pixel_values": numbered(3, 5), "image_seen": numbered(7)}, "'image_seen' has 7 entries, which are neither"),
    ],
)
def test_what_cannot_be_assigned_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*num_microbatch=1"):
        cut(ids([1, *I * 3, 1, *I * 5, 1], [1], [1, *I * 7]), **arguments)


def test_pictures_beside_embedded_text_are_refused() -> None:
    named = {"inputs_embeds": numbered(3, 7, 4), "pixel_values": numbered(3, 5), "second_per_grid_ts": [1.0, 2.0, 3.0]}
    split = picture_splitting(CONFIG, named, lambda args, kwargs: kwargs)
    assert split is not None and split((), named, 1) == ([()], [named])
    with pytest.raises(ValueError, match=r"'second_per_grid_ts' cannot be told apart by rows without input_ids"):
        split((), named, 3)


def test_frames_of_a_video_may_have_the_token_of_pictures() -> None:
    """As many videos as rows: the name tells that the table is not one of rows."""
    tokens = ids([1, *I * 8, 1, *I * 4], [1], [1, *I * 4, 1])
    grid = torch.tensor([[2, 4, 4], [1, 4, 4], [1, 4, 4]])
    parts = cut(tokens, video_grid_thw=grid, pixel_values_videos=numbered(64, 3))
    assert [len(part.get("video_grid_thw", ())) for part in parts] == [2, 0, 1]
    assert [len(part.get("pixel_values_videos", ())) for part in parts] == [48, 0, 16]


def test_tokens_in_the_config_of_a_tower() -> None:
    tower = SimpleNamespace(image_token_id=IMAGE, pad_token_id=0)
    named = {"input_ids": ids([1, *J, 1, *J], [1], [1, *J]), "image_pixels": numbered(3, 3, 8, 8)}
    split = picture_splitting(SimpleNamespace(vision_config=tower), named, lambda args, kwargs: kwargs)
    assert split is not None
    assert entries(split((), named, 3)[1], "image_pixels") == [[1, 2], None, [3]]
