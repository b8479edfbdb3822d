"""Reads a folder with a LoRA adapter saved by peft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roundpipe.huggingface.weights.files import adapter_file
from roundpipe.huggingface.weights.safetensors_header import refuse_pointer

CONFIG_FILE = "adapter_config.json"

# Settings under which the adapter does not add to the base's weights, or needs a base that only its training had.
_REFUSED = {
    "layer_replication": "it repeats layers of the base, so the merged model would be another architecture",
    "alora_invocation_tokens": "it is active from certain tokens on only, which no weights can express",
    "arrow_config": "it chooses among several adapters for each token, which no weights can express",
    "megatron_config": "it was made for Megatron's layers",
    "velora_config": "its weights cannot be added to the base's",
    "monteclora_config": "its weights are sampled",
    "use_qalora": "it belongs to a base with quantised weights",
}
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass
class Adapter:
    """A LoRA adapter.

    Attributes:
        folder: the adapter's folder.
        config: peft's `LoraConfig`.
        tensors: its weights, on the host, under their names in the file.
    """

    folder: Path
    config: Any
    tensors: dict[str, torch.Tensor]


def read_adapter(folder: Path) -> Adapter:
    """Reads an adapter and checks that its weights can be merged.

    Raises:
        ValueError: a file is missing, damaged or a pickle, the adapter's type is not LoRA, or its settings rule out
            merging.
    """
    settings = _settings(folder)
    try:
        from peft import PeftConfig
        from peft.utils.save_and_load import load_peft_weights
    except ImportError as error:
        raise ValueError(
            f"[export] merging needs peft, which cannot be imported ({error}); pip install 'roundpipe-engine[lora]'"
        ) from None
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"[export] the adapter in {folder} has peft_type {kind!r}, expected 'LORA'; merge other types with peft"
        )
    task = settings.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise ValueError(f"[export] the adapter in {folder} has task_type {task!r}, expected 'CAUSAL_LM'")
    for field, reason in _REFUSED.items():
        if settings.get(field):
            raise ValueError(f"[export] the adapter in {folder} sets {field}: {reason}; expected LoRA without it")
    start = settings.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise ValueError(
            f"[export] the adapter in {folder} was started with init_lora_weights={start!r}, which changes the base's "
            "weights as well; expected an adapter of the unchanged base; save it again with peft's "
            "path_initial_model_for_weight_conversion"
        )
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"[export] peft cannot read {folder / CONFIG_FILE}: {error}; expected a file of a version that it knows"
        ) from None
    config.init_lora_weights = False  # they are loaded
    path = adapter_file(folder)
    try:
        tensors = load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # safetensors raises several types for a damaged file
        raise ValueError(f"[export] {path} cannot be read: {error}; expected a complete file; fetch it again") from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(
                f"[export] {name} in {path} holds NaN or infinity; expected finite numbers; its training has failed"
            )
    return Adapter(folder, config, tensors)


def base_named_by(folder: Path) -> str:
    """The base model named in the adapter's config.

    Raises:
        ValueError: the config does not name a base, or does not exist.
    """
    name = _settings(folder).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"[export] {folder / CONFIG_FILE} names no base model; give --base")
    return str(name)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"[export] {folder} holds no {CONFIG_FILE}, expected the folder of an adapter saved by peft")
    refuse_pointer(path)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"[export] {path} is not JSON: {error}; expected the config of an adapter") from None
    if not isinstance(settings, dict):
        raise ValueError(f"[export] {path} is not a JSON object, expected the config of an adapter")
    return settings
