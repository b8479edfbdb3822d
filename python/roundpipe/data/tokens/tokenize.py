"""Makes token files from texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe.data.tokens.texts import Dropped, Split, Text, files_of, texts_of
from roundpipe.data.tokens.writer import token_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_A_TIME = 256


@dataclass
class Tokenized:
    """What a token file was made of.

    Attributes:
        documents: in the file.
        tokens: of all documents.
        longest: the number of tokens of the longest document.
        unknown: how many of the tokens are the tokenizer's unknown token.
        dropped: what was left out, and why.
    """

    documents: int = 0
    tokens: int = 0
    longest: int = 0
    unknown: int = 0
    dropped: Dropped = field(default_factory=Dropped)


def tokenize_files(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "text",
    split: Split = "file",
    ends: bool = True,
    progress: Callable[[Tokenized], None] = lambda _: None,
) -> Tokenized:
    """Writes the tokens of texts to a token file. Texts are read one after the other, in little memory.

    Args:
        inputs: text files, JSONL files, and folders of them.
        out: the file to write, which is replaced at the end.
        tokenizer: adds the special tokens that it adds by itself, such as the beginning of a text.
        name: of the records' member with the text, in JSONL files.
        split: whether a text file is one document, or each of its lines is.
        ends: end each document with the tokenizer's end-of-text token, unless it has done that by itself.
        progress: called now and then with what has been done.

    Returns:
        What the file was made of.

    Raises:
        ValueError: an input cannot be read, nothing is left to write, or `ends` is asked for and the tokenizer has no
            end-of-text token.
    """
    if ends and tokenizer.eos_token_id is None:
        raise ValueError(
            "[tokenize] the tokenizer has no end-of-text token, expected one to end documents with; set it, or turn "
            "the ends off"
        )
    done = Tokenized()
    files = files_of(inputs)
    if out.exists() and any(file.samefile(out) for file in files):
        raise ValueError(f"[tokenize] {out} is one of the inputs, expected another file to write to")
    with token_file(out, len(tokenizer)) as writer:
        for texts in _batches(texts_of(files, name, split, done.dropped)):
            for text, tokens in zip(texts, _encoded(texts, tokenizer), strict=True):
                if ends and (not tokens or tokens[-1] != tokenizer.eos_token_id):
                    tokens.append(tokenizer.eos_token_id)
                if not tokens:
                    done.dropped.note("no tokens", text.where)
                    continue
                writer.append(tokens)
                done.longest = max(done.longest, len(tokens))
                if tokenizer.unk_token_id is not None and tokenizer.unk_token_id != tokenizer.eos_token_id:
                    done.unknown += tokens.count(tokenizer.unk_token_id)
            done.documents, done.tokens = writer.documents, writer.tokens
            progress(done)
        if not done.documents:
            raise ValueError(f"[tokenize] no text is left in {len(files)} files, expected one at least\n{done.dropped}")
    return done


def _batches(texts: Iterator[Text]) -> Iterator[list[Text]]:
    while batch := list(itertools.islice(texts, _AT_A_TIME)):
        yield batch


def _encoded(texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # verbose=False: documents may be longer than the model's context, since they are cut into rows.
    encoded = tokenizer([text.text for text in texts], return_attention_mask=False, verbose=False)
    return [list(tokens) for tokens in encoded["input_ids"]]
