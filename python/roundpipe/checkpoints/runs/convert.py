"""Checkpoints as plain Hugging Face folders, and as those of torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from roundpipe import _core
from roundpipe.checkpoints.saving.stored import StoredCheckpoint
from roundpipe.files import new_folder

_HUGGING_FACE = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")


def _newest(source: Path) -> StoredCheckpoint:
    paths = [Path(path) for path in _core.checkpoints_in(str(source))]
    if not paths:
        raise ValueError(f"[checkpoint] {source} has no complete checkpoint, expected a run's folder or step-N")
    problems = _core.verify_step(str(paths[0]))
    if problems:
        raise ValueError(
            f"[checkpoint] {paths[0] / problems[0].file}: {problems[0].problem}; expected a whole checkpoint, convert "
            "another one"
        )
    return StoredCheckpoint(paths[0])


def to_hugging_face(source: Path, out: Path) -> None:
    """Copies weights and configuration into a folder that transformers (for adapters: peft) loads."""
    stored = _newest(source)
    with new_folder(out, "checkpoint") as folder:
        for record in stored.manifest.files:
            is_weights = record.name.endswith(".safetensors") and record.name.startswith(("model", "adapter_model"))
            if is_weights or record.name in _HUGGING_FACE:
                shutil.copyfile(stored.folder / record.name, folder / record.name)


def to_dcp(source: Path, out: Path) -> None:
    """Writes a folder of torch.distributed.checkpoint: `{"model": ..., "optim": ...}` under the names of torch's
    `get_state_dict`. Weights are fp32 masters where the checkpoint has them. Needs memory for the whole state."""
    from torch.distributed.checkpoint.state_dict_saver import save

    stored = _newest(source)
    values: dict[str, dict[str, torch.Tensor]] = {}
    for section in ("model", "buffers"):
        entries = stored.tensors.get(section, {})
        values[section] = {name: torch.empty(entry.shape, dtype=entry.torch_dtype) for name, entry in entries.items()}
    model = {**values["buffers"], **values["model"]}
    reads = _core.StateReads(stored.core)
    kept: dict[tuple[str, str], torch.Tensor] = {}
    for key in stored.core.optimizer_keys:
        name, kind = key.rsplit("/", 1)
        kept[name, kind] = reads.whole(name, kind, stored.core.shape(name))
    wanted = {section: list(tensors.items()) for section, tensors in values.items()}
    stored.core.read({**wanted, "optimizer": reads.whole_tensors})
    reads.read()
    state: dict[str, dict[str, Any]] = {}
    for (name, kind), value in kept.items():
        if kind == "master_remainder":
            master = torch.empty(value.shape)
            rest = torch.empty(value.shape, dtype=torch.int16)
            _core.convert_remainder(value, rest)
            _core.join(model[name], rest, master)
            model[name] = master
        elif kind in ("master", "copy"):
            model[name] = value
        elif kind != "copy_grad":
            state.setdefault(name, {})[kind] = value
    for name, counters in stored.counters.items():
        state.setdefault(name, {})["step"] = torch.tensor(float(counters["step"]))
    whole: dict[str, Any] = {"model": model}
    optimizer = stored.state.get("optimizer")
    if optimizer is not None:
        if "state_dict" in optimizer:
            names = [name for group in optimizer["param_groups"] for name in group["params"]]
            saved = stored.value("optimizer", "state_dict", path="optimizer")
            state = {names[index]: entry for index, entry in saved.items()}
        groups = [
            {
                **stored.value("optimizer", "param_groups", index, "options", path="optimizer"),
                "params": group["params"],
            }
            for index, group in enumerate(optimizer["param_groups"])
        ]
        whole["optim"] = {"state": state, "param_groups": groups}
    with new_folder(out, "checkpoint") as folder:
        save(whole, checkpoint_id=folder, no_dist=True)


def from_dcp(source: Path, out: Path, trust: bool) -> None:
    """Writes the weights of a torch.distributed.checkpoint as a folder of safetensors.

    Raises:
        ValueError: `trust` is False, since the format's metadata is a pickle; or there are no tensors.
    """
    if not trust:
        raise ValueError(
            f"[checkpoint] the metadata of {source} is a pickle, which can run any code when it is read; expected "
            "--trust, if you know where it comes from"
        )
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(source).read_metadata()
    found = {
        key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    # By each tensor's flat name, its path in the state dict that was saved: ("model", "layer.weight").
    paths: dict[str, Any] = metadata.planner_data or {}
    nested = {key for key in found if len(paths.get(key, ())) > 1 and paths[key][0] == "model"}
    chosen = {key: entry for key, entry in found.items() if key in nested} if nested else found
    if not chosen:
        raise ValueError(f"[checkpoint] {source} has no tensors of a model, expected a state dict of weights")
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in chosen.items()}
    load(tensors, checkpoint_id=source, no_dist=True)
    named = {key.removeprefix("model.") if key in nested else key: value for key, value in tensors.items()}
    with new_folder(out, "checkpoint") as folder:
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
