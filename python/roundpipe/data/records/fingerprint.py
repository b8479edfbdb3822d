"""Whether data that is prepared already is what would be prepared again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roundpipe.data.records.options import DataOptions
from roundpipe.data.records.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roundpipe.data.pictures.processor import PictureProcessor

_VERSION = 3  # goes up when the same input is prepared to something else


def fingerprint_of(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    pictures: PictureProcessor | None = None,
) -> str | None:
    """A text that differs if the sources (their names, sizes and times), the tokenizer, the options or what becomes of
    pictures do. Pictures beside the records are not looked at: a batch says if one has changed.

    None: a source cannot tell whether it has changed, such as a stream.
    """
    states = [source.state() for source in sources]
    if any(state is None for state in states):
        return None
    weights = [str(source.weight) for source in sources]
    document = [_VERSION, states, weights, _tokenizer(tokenizer), dataclasses.asdict(options)]
    if pictures is not None:
        document.append(pictures.processor.to_json_string())
    return _digest(json.dumps(document, sort_keys=True))


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if tokenizer.is_fast:
        inner = tokenizer.backend_tokenizer.to_str()
    else:
        inner = json.dumps(sorted(tokenizer.get_vocab().items())) + json.dumps(tokenizer.init_kwargs, default=str)
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    template = json.dumps(getattr(tokenizer, "chat_template", None))
    return [type(tokenizer).__name__, _digest(inner), special, template]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
