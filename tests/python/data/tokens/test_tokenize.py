"""From texts to token files: the bytes on disk, and what is left out."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from roundpipe import _core
from roundpipe.cli import app
from roundpipe.data.tokens.tokenize import tokenize_files
from roundpipe.data.tokens.writer import token_file
from tiny_chat import byte_tokenizer


def documents_of(path: Path) -> list[list[int]]:
    """Reads a token file by the letter of its page, and checks all of it."""
    data = path.read_bytes()
    magic, version, size, tokens, documents, vocabulary, crc, crc_of_ends, zeros, own = struct.unpack(
        "<8sIIQQQII12sI", data[:64]
    )
    assert (magic, version, zeros) == (b"RPTOKENS", 1, bytes(12))
    assert own == _core.crc32c(data[:60])
    values = data[64 : 64 + tokens * size]
    ends = data[-8 * documents :]
    assert len(data) == 64 + -(-len(values) // 8) * 8 + 8 * documents
    assert crc == _core.crc32c(values) and crc_of_ends == _core.crc32c(ends)
    read = np.frombuffer(values, dtype={2: "<u2", 4: "<u4"}[size])
    assert read.max() < vocabulary
    return [part.tolist() for part in np.split(read, np.frombuffer(ends, dtype="<u8")[:-1].astype(int))]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer(unk_token="<pad>")


@pytest.mark.parametrize("vocabulary", [20, 65536, 65537, 100_000])
def test_the_writer_writes_the_page_s_format(vocabulary: int, tmp_path: Path) -> None:
    documents = [[1, 2, 3], [vocabulary - 1], [7] * 5]
    with token_file(tmp_path / "x.tokens", vocabulary) as writer:
        for document in documents:
            writer.append(document)
    assert documents_of(tmp_path / "x.tokens") == documents
    file = _core.TokenFile(str(tmp_path / "x.tokens"))
    assert [file.document(number).tolist() for number in range(file.documents)] == documents
    assert file.lengths(np.array([2, 0, 1])).tolist() == [5, 3, 1]
    with pytest.raises(ValueError, match="there is no document 3"):
        file.lengths(np.array([0, 3]))


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), token_file(tmp_path / "x.tokens", 10) as writer:
        writer.append([1])
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_texts_and_records(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").write_text("hidden")
    (folder / "a.txt").write_text("one\ntwo\r\n")
    (folder / "deep" / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "f\\u00fcr"}\n')
    out = tmp_path / "out.tokens"
    done = tokenize_files([folder], out, tokenizer)
    texts = ["one\ntwo\r\n", "three", "für"]
    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert documents_of(out) == expected
    assert (done.documents, done.tokens, done.longest) == (3, sum(map(len, expected)), max(map(len, expected)))
    assert not done.dropped.reasons
    done = tokenize_files([folder / "a.txt"], out, tokenizer, split="line", ends=False)
    assert documents_of(out) == [tokenizer(text)["input_ids"] for text in ("one", "two")]


def test_what_is_dropped_is_counted_and_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    records = tmp_path / "r.jsonl"
    records.write_bytes(
        b'\xef\xbb\xbf{"text": "good"}\n{"text": 3}\n{"other": "x"}\n[1]\n{"text": "cut\n{"text": "  "}\n\xff\xfe\n'
        + b'{"text": "last"}'
    )
    (tmp_path / "bad.txt").write_bytes(b"\xff\xff")
    done = tokenize_files([records, tmp_path / "bad.txt"], tmp_path / "out.tokens", tokenizer)
    assert done.documents == 2
    assert done.dropped.reasons == {
        "'text' is no text": 1,
        "a record without 'text'": 2,
        "not JSON": 1,
        "empty": 1,
        "not UTF-8": 2,
    }
    assert f"dropped 2: a record without 'text' ({records}:3, {records}:4)" in str(done.dropped)
    assert f"not UTF-8 ({records}:7, {tmp_path / 'bad.txt'})" in str(done.dropped)


def test_ends_are_not_added_twice(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x{end}"}}\n{{"text": "y"}}\n')
    tokenize_files([tmp_path / "a.jsonl"], tmp_path / "out.tokens", tokenizer)
    assert [len(document) for document in documents_of(tmp_path / "out.tokens")] == [2, 2]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token"):
        tokenize_files([tmp_path / "a.jsonl"], tmp_path / "out.tokens", tokenizer)


def test_bad_inputs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for inputs, message in (
        ([tmp_path / "none.txt"], "is not there"),
        ([tmp_path / "folder"], "has no files"),
        ([tmp_path / "empty.txt"], "no text is left"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenize_files(inputs, tmp_path / "out.tokens", tokenizer)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ValueError, match="is one of the inputs"):
        tokenize_files([tmp_path / "text.txt"], tmp_path / "text.txt", tokenizer)
    assert (tmp_path / "text.txt").read_text() == "text" and not (tmp_path / "out.tokens").exists()


def test_the_command(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text('{"body": "hello"}\n{"text": "no body"}\n')
    out = tmp_path / "out.tokens"
    command = ["tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "model"), "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--field", "body"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "1 documents, 6 tokens" in result.stdout.replace("\n", " ")
    assert "a record without 'body'" in result.stdout
    assert [len(document) for document in documents_of(out)] == [6]
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, ValueError) and "--overwrite" in str(again.exception)
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0
    command[command.index("--out") + 1] = str(tmp_path / "none" / "out.tokens")
    nowhere = CliRunner().invoke(app, command)
    assert nowhere.exit_code == 1 and "out.tokens" in nowhere.output
