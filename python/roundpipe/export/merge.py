"""Merges a LoRA adapter into the weights of its base model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from roundpipe.export.adapter import read_adapter
from roundpipe.export.output import Entry, Progress, bytes_of_tensor, write_folder
from roundpipe.export.placement import Placement
from roundpipe.files import check_free, read_json
from roundpipe.huggingface.weights.encoded_files import DecodedCheckpoint
from roundpipe.huggingface.weights.files import Checkpoint

_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


def merge_adapter(base: str | Path, adapter: str | Path, out: str | Path, *, progress: Progress | None = None) -> Path:
    """Writes the base model with the adapter merged in, as a folder that `from_pretrained` loads.

    The values are those of `PeftModel.from_pretrained(base, adapter).merge_and_unload()` in the dtype of the base's
    files. Names, files and everything else in the folder stay the same. Memory holds the adapter and the weights of one
    layer's module at a time. `out` appears once it is completely written; if the call ends earlier, nothing is left.

    Weights of a base that is quantised are decoded first: the folder holds plain weights, those that the adapter was
    trained beside. `roundpipe quantise` encodes them again, and says the error of that.

    The tokenizer comes from the adapter's folder if it has one, because training may have changed the chat template.

    Args:
        base: folder of the base model, or the id of a model in the local Hugging Face cache.
        adapter: folder of the adapter, as saved by peft.
        out: a folder that does not exist or is empty.
        progress: called with the bytes written so far and the total.

    Returns:
        `out`.

    Raises:
        ValueError: the merge is impossible or its result doubtful; raised before the first byte is written.
    """
    adapter, out = Path(adapter), Path(out)
    check_free(out, "export")
    loaded = read_adapter(adapter)
    checkpoint = _open(find_base(base))
    placement = Placement(checkpoint, loaded)
    copies = other_files(checkpoint.folder, adapter)
    entries = _entries(checkpoint, placement)
    ready: dict[str, torch.Tensor] = {}  # merged, not yet written

    def chunks(name: str) -> Iterator[memoryview]:
        key = placement.untied.get(name, name)
        if key not in placement.groups:
            return checkpoint.chunks(name)
        if name not in ready:
            merged, split = placement.merge(placement.groups[key])
            ready.update(merged | split)
        return bytes_of_tensor(ready.pop(name))

    def config(fields: dict[str, Any]) -> dict[str, Any]:
        fields.pop("quantization_config", None)  # the weights are plain now
        return {**fields, "tie_word_embeddings": False} if placement.untied else fields

    write_folder(out, "export", checkpoint, entries, chunks, copies, config, progress)
    return out


def _open(folder: Path) -> Checkpoint:
    quantization = quantization_of(folder, "export")
    if quantization is None:
        return Checkpoint(folder)
    dtype: torch.dtype = AutoConfig.from_pretrained(folder, local_files_only=True).dtype or torch.float32
    return DecodedCheckpoint(folder, quantization, dtype)


def quantization_of(folder: Path, where: str) -> Any:
    """The `quantization_config` in a folder's config.json, or None."""
    path = folder / "config.json"
    config = read_json(path, where, "the config of a model") if path.is_file() else {}
    return config.get("quantization_config") if isinstance(config, dict) else None


def find_base(
    base: str | Path, where: str = "export", what: str = "base", give: str = "--base with its folder"
) -> Path:
    """Finds the folder of a model: the given folder, or its place in the local Hugging Face cache.

    Args:
        where: tags the message, in which it is `what`; the advice is to give `give`.

    Raises:
        ValueError: there is no such folder, and no such model in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if Path(base).is_dir():
        return Path(base)
    try:
        return Path(snapshot_download(str(base), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        raise ValueError(
            f"[{where}] the {what} {str(base)!r} is neither a folder nor a model in the local Hugging Face cache; give "
            f"{give}, or fetch it with `hf download`"
        ) from None


def _entries(checkpoint: Checkpoint, placement: Placement) -> dict[str, list[Entry]]:
    """The contents of each file. A tensor that is no longer tied follows the one that it shared."""
    entries: dict[str, list[Entry]] = {file: [] for file in checkpoint.files}
    for name, tensor in checkpoint.tensors.items():
        followers = [other for other, key in placement.untied.items() if key == name]
        for each in (name, *followers):
            entries[tensor.file].append(Entry(each, tensor.dtype, tensor.shape, tensor.end - tensor.start))
    return entries


def other_files(base: Path, adapter: Path | None = None) -> dict[str, Path]:
    """Every file of the base without weights, and the adapter's tokenizer if it has one."""
    files = {
        path.name: path
        for path in sorted(base.iterdir())
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_ENDINGS)
    }
    if adapter is not None and (adapter / "tokenizer_config.json").is_file():
        files = {name: path for name, path in files.items() if name not in _TOKENIZER_FILES}
        files |= {name: adapter / name for name in _TOKENIZER_FILES if (adapter / name).is_file()}
    return files
