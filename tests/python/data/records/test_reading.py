"""Files of records: what each kind holds, and what cannot be read, by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.data.records import json_values as json_values_module
from roundpipe.data.records import reading
from roundpipe.data.records.json_values import json_values
from roundpipe.data.records.reading import is_data, kind_of, records_of


def read(path: Path, lines: bool = False) -> tuple[list[tuple[Any, str]], list[tuple[str, str]]]:
    """The records and their lines, and what could not be read."""
    bad: list[tuple[str, str]] = []

    def note(reason: str, where: str) -> None:
        assert where.startswith(str(path))
        bad.append((reason, where.removeprefix(str(path))))

    found = [(record.value, record.where.removeprefix(str(path))) for record in records_of(path, lines, note)]
    return found, bad


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n{"a": "\xe2\x80\xa8"}\n{"a"\n\xff\n[[' + b"[" * 9999 + b'\n{"a": 2}')
    found, bad = read(path)
    assert found == [({"a": 1}, ":1"), ({"a": "\u2028"}, ":3"), ({"a": 2}, ":7")]
    assert bad == [("not JSON", ":4"), ("not UTF-8", ":5"), ("not JSON", ":6")]


def test_lists_in_files_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    said = [{"role": "user", "content": "q"}]
    path.write_text("\n".join(json.dumps(each) for each in ([{"a": 1}, {"a": 2}], said, {"a": 3}, [], [4])))
    found = [
        ({"a": 1}, ":1[0]"),
        ({"a": 2}, ":1[1]"),
        ({"messages": said}, ":2"),
        ({"a": 3}, ":3"),
        ([], ":4"),
        ([4], ":5"),
    ]
    assert read(path) == (found, [])
    path.write_text("\n" + json.dumps([{"a": 1}, {"a": 2}], indent=1))
    assert read(path) == ([({"a": 1}, ":3"), ({"a": 2}, ":6")], [])


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-be", "utf-16-le"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
def test_utf_16(coding: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    text = "a,b\né,🌍\n" if "csv" in name else "é 🌍\n" if "txt" in name else '{"a": "é 🌍"}\n'
    data = ("" if coding == "utf-16" else "\ufeff").encode(coding) + text.encode(coding)
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    expected: Any = {"a": "é", "b": "🌍"} if "csv" in name else text if "txt" in name else {"a": "é 🌍"}
    found, bad = read(path)
    assert [value for value, _ in found] == [expected] and bad == [] and reading.is_utf16(path)


@pytest.mark.parametrize(
    ("text", "values", "bad"),
    [
        ("[]", [], []),
        ('[{"a": 1},\n\n {"a": 2}]\n', [({"a": 1}, ":1"), ({"a": 2}, ":3")], []),
        ('{"a": 1}\n{"a": 2}', [({"a": 1}, ":1"), ({"a": 2}, ":2")], []),
        ('{"version": 1,\n "data": [{"a": 1}, {"a": 2}]}', [({"a": 1}, ":1"), ({"a": 2}, ":1")], []),
        ('{"version": "2",\n "data": [{"a": "x"}]}', [({"a": "x"}, ":1")], []),
        ('{"text": "2", "data": [{"a": "x"}]}', [({"text": "2", "data": [{"a": "x"}]}, ":1")], []),
        ('{"messages": [{"role": "user"}]}', [({"messages": [{"role": "user"}]}, ":1")], []),
        (
            '[{"a": 1},\n{"a" 2},\n{"a": 3}]',
            [({"a": 1}, ":1")],
            [":2 (Expecting ':' delimiter)"],
        ),
        ('[{"a": 1}', [({"a": 1}, ":1")], [":1 (expected ']', found 'the end')"]),
        ('[{"a": 1}]\n7', [({"a": 1}, ":1")], [":2 (something follows the list)"]),
    ],
)
def test_json(text: str, values: list[Any], bad: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    expected = [("not JSON: the rest of the file is not read", where) for where in bad]
    assert read(tmp_path / "a.json") == (values, expected)


@given(values=st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5)), max_size=6))
def test_json_in_pieces(values: list[Any]) -> None:
    import io

    text = json.dumps(values, indent=1, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values_module, "_PIECE_CHARACTERS", 3)
        assert [value for value, _ in json_values(io.StringIO(text))] == values
        apart = " ".join(map(json.dumps, [12345678, *values]))
        assert [value for value, _ in json_values(io.StringIO(apart))] == [12345678, *values]


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfa,b\r\n1,"x\ny"\r\n\r\n2\r\n3,z,4\n5,"q" w\n\xff,7\n6,\xc3\xa9\n')
    found, bad = read(path)
    assert found == [({"a": "1", "b": "x\ny"}, ":2"), ({"a": "6", "b": "é"}, ":9")]
    cells = "another number of cells than the first line"
    assert bad[:2] == [(cells, ":5 (1, expected 2)"), (cells, ":6 (3, expected 2)")]
    assert [reason for reason, _ in bad[2:]] == ["not CSV", "not UTF-8"] and bad[2][1].startswith(":7 (")
    (tmp_path / "a.tsv").write_text("a\tb\n1,2\t3\n")
    assert read(tmp_path / "a.tsv") == ([({"a": "1,2", "b": "3"}, ":2")], [])
    path.write_text('a,b\n1,"x\n2,y\n')  # a quote that nothing ends
    assert read(path)[0] == [] and [reason for reason, _ in read(path)[1]] == ["not CSV"]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"a": "x", "b": [{"c": 1, "d": None}]}, {"a": None, "b": [{"c": None, "d": "y"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read(path) == ([({"a": "x", "b": [{"c": 1}]}, ":1"), ({"b": [{"d": "y"}]}, ":2")], [])
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"m": [message]}, {"m": [{"role": "tool"}]}]), path)
    assert [value["m"] for value, _ in read(path)[0]] == [[message], [{"role": "tool", "content": None}]]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    found, ((reason, _),) = read(path)
    assert found == [] and reason == "not Parquet: the rest of the file is not read"


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\ntwo\n\nthré".encode())
    assert read(path) == ([("one\r\ntwo\n\nthré", "")], [])
    assert read(path, lines=True)[0] == [("one", ":1"), ("two", ":2"), ("", ":3"), ("thré", ":4")]
    path.write_bytes(b"\xff")
    assert read(path) == ([], [("not UTF-8", "")])
    assert read(path, lines=True) == ([], [("not UTF-8", ":1")])


def test_a_long_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE_CHARACTERS", 10)
    text = "".join(f"line {number}\n" for number in range(20))
    (tmp_path / "a.txt").write_text(text)
    pieces = list(records_of(tmp_path / "a.txt", False, lambda *_: None))
    assert "".join(piece.value for piece in pieces) == text and len(pieces) > 5
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.value.endswith("\n") for piece in pieces)


def test_compressed_files(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert read(path) == ([({"a": 1}, ":1"), ({"a": 2}, ":2")], [])
    path.write_bytes(b"no gzip")
    assert [reason for reason, _ in read(path)[1]] == ["a damaged gzip file"]
    header = gzip.compress(b"")[:10]
    path.write_bytes(header + b"\xff" * 20)  # no deflated data
    assert [reason for reason, _ in read(path)[1]] == ["a damaged gzip file"]
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-9])
    assert [reason for reason, _ in read(path)[1]][-1] == "a damaged gzip file"


def test_kinds() -> None:
    names = {
        "a.JSONL": "lines",
        "b.json.gz": "json",
        "c.tsv": "csv",
        "d": "text",
        "e.md": "text",
        "f.parquet": "parquet",
    }
    assert {name: kind_of(Path(name)) for name in names} == names
    assert [is_data(Path(name)) for name in ("a.txt", "b.txt.gz", "c.ndjson", "d.md", "e")] == [True] * 3 + [False] * 2


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[data\] cannot read .*a\.jsonl: No such file"):
        read(tmp_path / "a.jsonl")
