"""Loads a causal language model from a folder or the Hub into the pipeline."""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from roundpipe import _core
from roundpipe.command_options import EncodedFormat
from roundpipe.files import first_lines, refuse_missing_folder
from roundpipe.huggingface.weights.files import Checkpoint, adapter_file
from roundpipe.huggingface.weights.safetensors_header import CheckpointError, refuse_pointer
from roundpipe.model.memory.budget import HOST_VARIABLE, BudgetError, budget_of, predict_unloaded, refuse_host
from roundpipe.model.pipe import RoundPipe
from roundpipe.model.wrap import wrap_model_to_roundpipe
from roundpipe.ops.packed_attention import register
from roundpipe.quantise.adapters import add_adapters

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedModel

    from roundpipe.huggingface.weights.direct_loading import Kind, Quantise

ADAPTER_CONFIG = "adapter_config.json"
_REPLACES_FILES = (0, 8)


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    peft_config: PeftConfig | None = None,
    extra_tensors: Literal["refuse", "ignore"] = "refuse",
    frozen_weights: Literal["memory", "mmap"] = "memory",
    quantise: EncodedFormat | None = None,
    keep: Sequence[str] = (),
    num_labels: int | None = None,
    freeze: Sequence[str] = (),
    **options: Any,
) -> RoundPipe:
    """Loads a language model on the host and wraps it: a causal one, or one that takes pictures beside text.

    Args:
        name_or_path: a folder written by `save_pretrained`, or a model on the Hub. A folder with a PEFT adapter is
            loaded with its base, and training of the adapter continues.
        peft_config: adapters to add to the model, such as a `peft.LoraConfig`; all other parameters are frozen.
        extra_tensors: "refuse" or "ignore" tensors in the files that the model has no place for.
        frozen_weights: the place of weights that are not trained, such as the base under adapters. "mmap" leaves them
            in their files, mapped, so that the system's file cache holds as many as it has room for. Uploads from
            there are slower than from page-locked memory. Weights that are stored in another dtype, or made of several
            tensors, are loaded into memory all the same.
        quantise: encodes the base's weights while they are read, for training of adapters: those of linear layers and
            of experts, in 4.5 bits each ("nf4": blocks of 64, as in QLoRA), 4.13 ("nf4-double": with scales of 8 bits),
            4.25 ("mxfp4") or 8 ("int8": rows). Embeddings, norms, routers and the head stay as they are.
        keep: modules whose weights stay as they are, by path or last part of it, such as "down_proj".
        num_labels: loads the model as `AutoModelForSequenceClassification` with so many numbers for each row, such as 1
            for a reward model. Files of a causal model have no such head: it then starts at random, as torch's seed
            says, and the head over the vocabulary is left out. With `pad_token_id`, the numbers of a row are those of
            its last token that is another.
        freeze: modules whose weights are not trained, by path or last part of it, such as "visual" or "embed_tokens".
        **options: options of `wrap_model_to_roundpipe` and `RoundPipe`; all others go to
            `from_pretrained` of transformers' class. Its `dtype` is "auto" here: the dtype in the files. Training in
            torch.float16 needs a `GradScaler` (docs/training-loop.md).

    Returns:
        The model, in eval mode as from transformers: call `train()` before training. `save_pretrained` writes a folder
        that transformers and PEFT load.

    Raises:
        ValueError: the model does not exist or its kind is unknown to transformers, a file is missing or damaged,
            weights are missing, of another shape or left over, or the model cannot be followed.
    """
    folder = Path(name_or_path)
    adapter = folder if (folder / ADAPTER_CONFIG).exists() else None
    if adapter is not None and peft_config is not None:
        raise ValueError(
            f"[from_pretrained] {adapter} is a PEFT adapter and peft_config was given too, expected one of them; leave "
            "peft_config out to continue with the adapter"
        )
    if extra_tensors not in ("refuse", "ignore"):
        raise ValueError(f"[from_pretrained] extra_tensors is {extra_tensors!r}, expected 'refuse' or 'ignore'")
    if frozen_weights not in ("memory", "mmap"):
        raise ValueError(f"[from_pretrained] frozen_weights is {frozen_weights!r}, expected 'memory' or 'mmap'")
    if frozen_weights == "mmap":
        _refuse_overwriting()
    encodes = _encoding(quantise, keep, frozen_weights, trains=adapter is None and peft_config is None)
    wrapping = _wrap_options()
    mine = {name: options.pop(name) for name in list(options) if name in wrapping}
    base = name_or_path if adapter is None else _base_of(adapter)
    if adapter is not None:
        adapter_file(adapter)  # before the base is read
    register()  # attn_implementation="packed"
    admit = _host_check(base, mine.get("host_memory"), trains=adapter is None and peft_config is None)
    loading = _Loading(extra_tensors, frozen_weights == "mmap", admit, encodes, adapter is None and peft_config is None)
    model: Any = _load(base, {"dtype": "auto", **options}, loading, num_labels)
    if adapter is not None:
        model = _peft().PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    elif peft_config is not None:
        _peft()
        model = add_adapters(model, peft_config)
    freeze_modules(model, freeze)
    model.eval()  # PEFT's own modules start in training mode
    wrapped: RoundPipe = wrap_model_to_roundpipe(model, **mine)
    return wrapped


def check_files(folder: Path, trains: bool, num_labels: int | None = None) -> None:
    """Compares a folder's config with the names, shapes and dtypes of its tensors; reads no weights.

    Args:
        folder: as of `from_pretrained`, without an adapter.
        trains: whether all weights will be trained.
        num_labels: as of `from_pretrained`.

    Raises:
        ValueError: as `from_pretrained` does for them.
    """
    from roundpipe.huggingface.weights.direct_loading import CheckedError

    with suppress(CheckedError):
        _load(folder, {"dtype": "auto"}, _Loading("refuse", False, None, None, trains), num_labels, only_checks=True)


def freeze_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Freezes the parameters of modules, by path or last part of it.

    Raises:
        ValueError: no module has such a name, or nothing is left to train.
    """
    if isinstance(names, str):
        raise ValueError(f"[from_pretrained] freeze is {names!r}, expected a list of names, such as [{names!r}]")
    for name in names:
        found = [
            module for path, module in model.named_modules() if path and (path == name or path.endswith(f".{name}"))
        ]
        if not found:
            raise ValueError(f"[from_pretrained] freeze has {name!r}, expected the name of one of the model's modules")
        for module in found:
            module.requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"[from_pretrained] freeze is {', '.join(names)}, expected that something is left to train")


def takes_pictures(config: Any) -> bool:
    """Whether a config of transformers is that of a model that takes pictures, videos or sounds beside text."""
    return kind_with_pictures(config) is not None


def kind_with_pictures(config: Any) -> Kind | None:
    """How a model with this config that takes pictures, videos or sounds is loaded; None: it takes text alone."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    kind = next(iter(getattr(config, "architectures", None) or ()), "")
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        return "pictures"
    return "sounds" if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values() else None


def kind_of(config: Any, num_labels: int | None) -> Kind:
    """How a model with this config is loaded; `num_labels` as of `from_pretrained`."""
    if num_labels is not None:
        return "scores"
    return kind_with_pictures(config) or "causal"


def _encoding(quantise: str | None, keep: Sequence[str], frozen_weights: str, trains: bool) -> Quantise | None:
    if quantise is None:
        if keep:
            raise ValueError("[from_pretrained] keep is given without quantise, expected both; nothing is encoded")
        return None
    if isinstance(keep, str):
        raise ValueError(f"[from_pretrained] keep is {keep!r}, expected a list of names, such as [{keep!r}]")
    if quantise not in _core.format_names():
        raise ValueError(
            f"[from_pretrained] quantise is {quantise!r}, expected one of {', '.join(_core.format_names())}"
        )
    if trains:
        raise ValueError(
            "[from_pretrained] quantise is for frozen weights, and no adapter is given, expected peft_config or a "
            "folder with an adapter; for full training leave quantise out"
        )
    if frozen_weights == "mmap":
        raise ValueError(
            "[from_pretrained] quantise encodes into memory, and frozen_weights='mmap' leaves weights in their files, "
            "expected one of them"
        )
    from roundpipe.huggingface.weights.direct_loading import Quantise

    return Quantise(quantise, tuple(keep))


def _wrap_options() -> set[str]:
    taken = {*inspect.signature(wrap_model_to_roundpipe).parameters, *inspect.signature(RoundPipe).parameters}
    return taken - {"model", "roundpipe_kwargs"}


def _refuse_overwriting() -> None:
    """Raises ValueError if saving writes into existing files in place, which would change weights mapped from them."""
    installed = metadata.version("safetensors")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < _REPLACES_FILES:
        raise ValueError(
            f"[from_pretrained] frozen_weights='mmap' with safetensors {installed}, expected "
            f"{'.'.join(map(str, _REPLACES_FILES))} or newer, as older ones write into files that may be mapped; "
            "pip install --upgrade safetensors, or leave frozen_weights out"
        )


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ValueError(
            "[from_pretrained] adapters need peft, which is not installed; pip install 'roundpipe-engine[lora]'"
        ) from None
    return peft


def _base_of(adapter: Path) -> str:
    base = _peft().PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    if not base:
        raise ValueError(
            f"[from_pretrained] {adapter / ADAPTER_CONFIG} names no base model, expected its folder or name"
        )
    return str(base)


def _host_check(
    base: str | os.PathLike[str], host_memory: str | int | None, trains: bool
) -> Callable[[nn.Module], None] | None:
    """Returns a check, by shapes alone, that refuses a model too large for the host budget; None without a budget."""
    budget = budget_of(host_memory, "host_memory", HOST_VARIABLE)
    if budget is None:
        return None

    def check(model: nn.Module) -> None:
        refuse_host("from_pretrained", str(base), budget, lambda rule: predict_unloaded(model, rule, trains))

    return check


def refuse_other_kinds(base: str | os.PathLike[str], config: Any, scores: bool = False) -> None:
    """Refuses files of another kind of model than a causal one.

    Args:
        base: for the message.
        config: that of transformers.
        scores: whether files of a model that gives numbers for each row will do, too.

    Raises:
        CheckpointError: they are of a model that transformers knows, of another kind.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = next(iter(getattr(config, "architectures", None) or ()), "")
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or kind.endswith(("ForCausalLM", "Model"))
    causal = causal or takes_pictures(config) or (scores and kind.endswith("ForSequenceClassification"))
    if kind and not causal and hasattr(transformers, kind):
        raise CheckpointError(
            f"[from_pretrained] {base} holds a {kind}, expected a causal language model; load it with "
            f"transformers.{kind}.from_pretrained(...) and give it to roundpipe.wrap_model_to_roundpipe"
        )


class _Loading(NamedTuple):
    extra_tensors: str
    mapped: bool
    admit: Callable[[nn.Module], None] | None
    quantise: Quantise | None
    trains: bool  # all weights


def _take_stored(base: object, config: Any, loading: _Loading) -> Any:
    """The quantization_config of files whose weights stay encoded, or None; the config loses it."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    stored = dict(stored if isinstance(stored, dict) else stored.to_dict())
    method = stored.get("quant_method")
    if loading.quantise is not None:
        raise CheckpointError(
            f"[from_pretrained] {base} is quantised already ({method}) and quantise is given, expected one of them; "
            "leave quantise out to train on it as it is"
        )
    if loading.trains:
        raise CheckpointError(
            f"[from_pretrained] {base} holds quantised weights ({method}), which are frozen, and no adapter is given, "
            "expected peft_config or a folder with an adapter; for full training load the model that was quantised, or "
            "let transformers dequantise it: quantization_config=Mxfp4Config(dequantize=True) for MXFP4"
        )
    del config.quantization_config
    return stored


def _load(
    base: str | os.PathLike[str],
    options: dict[str, Any],
    loading: _Loading,
    num_labels: int | None,
    only_checks: bool = False,
) -> PreTrainedModel:
    from transformers import AutoConfig

    from roundpipe.huggingface.weights.direct_loading import load_language_model

    refuse_missing_folder(base, "from_pretrained")
    folder = Path(base)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ValueError(
                f"[from_pretrained] {folder} has no config.json, expected a folder that save_pretrained wrote"
            )
        refuse_pointer(folder / "config.json")
        Checkpoint(folder)
    try:
        config = copy.deepcopy(options.pop("config", None)) or AutoConfig.from_pretrained(base)
        if loading.extra_tensors == "refuse":
            refuse_other_kinds(base, config, scores=num_labels is not None)
        if num_labels is not None:
            if takes_pictures(config):
                raise CheckpointError(
                    f"[from_pretrained] {base} takes pictures and num_labels is given, expected a model of text alone"
                )
            if num_labels < 1:
                raise CheckpointError(f"[from_pretrained] num_labels is {num_labels}, expected at least 1")
            config.num_labels = num_labels
            config.pad_token_id = options.pop("pad_token_id", config.pad_token_id)
        # Who gives one decides what transformers does with the files.
        stored = None if "quantization_config" in options else _take_stored(base, config, loading)
        options = {"config": config, **options}
        return load_language_model(
            base,
            loading.extra_tensors,
            loading.mapped,
            options,
            loading.admit,
            loading.quantise,
            stored,
            kind=kind_of(config, num_labels),
            only_checks=only_checks,
        )
    except (BudgetError, CheckpointError):
        raise
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"[from_pretrained] {base} cannot be loaded: {first_lines(error)}") from error
