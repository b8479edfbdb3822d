"""The model of a run: loaded with its adapters, and saved as a folder that transformers and PEFT load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

import roundpipe
from roundpipe import RoundPipeRunConfig, _core
from roundpipe.data.pictures.processor import PictureProcessor
from roundpipe.data.tokenizer import load_tokenizer
from roundpipe.files import first_lines, new_folder, refuse_missing_folder
from roundpipe.huggingface.pretrained import (
    check_files,
    freeze_modules,
    kind_of,
    kind_with_pictures,
    refuse_other_kinds,
    takes_pictures,
)
from roundpipe.huggingface.quiet import without_progress_bars
from roundpipe.huggingface.weights.direct_loading import AUTO_CLASSES
from roundpipe.huggingface.weights.files import ADAPTER_FILE, Checkpoint, adapter_file
from roundpipe.model.memory.budget import HOST_VARIABLE, UpdateRule, budget_of, predict_unloaded, refuse_host
from roundpipe.ops.packed_attention import check_packing
from roundpipe.plan.shapes import make_model
from roundpipe.train.config import TrainConfig

_NAME = "roundpipe-train"
_OF_AN_ADAPTER = "adapter_config.json"
_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_SCORES = 1  # of a row, for a reward model


def base_of(config: TrainConfig) -> str:
    """Where the model's folder or name on the Hub is: an adapter names its base.

    Raises:
        ValueError: the folder is not there, or one that is given as an adapter holds none, or no weights that can be
            read.
    """
    refuse_missing_folder(config.adapter or config.model, "train")
    if config.adapter and Path(config.adapter).is_dir() and not (Path(config.adapter) / _OF_AN_ADAPTER).exists():
        raise ValueError(
            f"[train] --adapter is {config.adapter}, which has no {_OF_AN_ADAPTER}, expected a folder that PEFT wrote; "
            "a whole model is given as --model"
        )
    if config.adapter and Path(config.adapter).is_dir():
        adapter_file(Path(config.adapter))
        Checkpoint(Path(config.adapter), [ADAPTER_FILE])  # its header is whole
    return config.adapter or config.model


def tokenizer_of(config: TrainConfig) -> Any:
    """The tokenizer of a run. PEFT saves adapters without one; then it is that of their base.

    Raises:
        ValueError: there is none that can be loaded.
    """
    place = base_of(config)
    if (
        config.adapter
        and Path(config.adapter).is_dir()
        and not (Path(config.adapter) / "tokenizer_config.json").exists()
    ):
        place = base_of_adapter(config.adapter)
    with _told(f"the tokenizer of {place} cannot be read", "the files that its save_pretrained writes"):
        return load_tokenizer(place)


def base_of_adapter(folder: str) -> str:
    """The folder or name of the model that an adapter was trained for.

    Raises:
        ValueError: its config cannot be read, or names none.
    """
    base = _config_of_adapter(folder).base_model_name_or_path
    if not base:
        raise ValueError(
            f"[train] {folder}/{_OF_AN_ADAPTER} has no base_model_name_or_path, expected the folder or name of the "
            "model that the adapter is for; write it there"
        )
    return str(base)


def weights_of(config: TrainConfig) -> str:
    """Where the weights of the whole model are; see `base_of_adapter`."""
    return base_of_adapter(config.adapter) if config.adapter else config.model


def _config_of_adapter(folder: str) -> Any:
    peft = _peft("adapters")
    with _told(f"the {_OF_AN_ADAPTER} of {folder} cannot be read", "one that PEFT wrote"):
        return peft.PeftConfig.from_pretrained(folder)


@contextmanager
def _told(what: str, expected: str) -> Iterator[None]:
    """Turns whatever transformers, tokenizers or PEFT raise for a broken file into one line."""
    try:
        yield
    except (_core.RoundPipeError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("["):
            raise
        raise ValueError(f"[train] {what}: {first_lines(error)}; expected {expected}") from error


def load_model(config: TrainConfig, pad_token_id: int | None = None) -> roundpipe.RoundPipe:
    """Loads the model in training mode.

    Args:
        pad_token_id: of the batches; a reward model finds the end of a row by it.

    Raises:
        ValueError: it cannot be loaded or followed, does not fit the budget of the host, or is to read packed rows and
            mixes their samples.
    """
    options: dict[str, Any] = {}
    packed = config.packed and not has_pictures(config)
    if packed:
        options["attn_implementation"] = "packed"
    if config.dtype is not None:
        options["dtype"] = getattr(torch, config.dtype)
    if config.lora or config.dora:
        options["peft_config"] = lora_of(config)
    if config.task == "reward":
        options |= {"num_labels": _SCORES, "pad_token_id": pad_token_id}
    run_config = RoundPipeRunConfig(
        num_microbatch=config.microbatches,
        recompute_grain="layer" if config.recompute_by_layer else None,
        fault_tolerant=config.fault_tolerant or None,
    )
    with _told(f"{base_of(config)} cannot be loaded", "a model, or an adapter of its base, that transformers loads"):
        model = roundpipe.from_pretrained(
            base_of(config),
            name=_NAME,
            model_run_config=run_config,
            arithmetic=config.arithmetic,
            host_memory=config.host_memory,
            device_memory=config.device_memory,
            quantise=config.quantise,
            keep=config.quantise_keep or (),
            freeze=config.freeze or (),
            **options,
        )
    if packed:
        check_packing(model)
    model.train()
    return model


def check_run(config: TrainConfig) -> tuple[int, int]:
    """Refuses what the options, the model's config and the headers of its files tell: before any data is read.

    Returns:
        The bytes of the result, and of a checkpoint, that are predicted for this node.

    Raises:
        ValueError: `meta_model` does, a file of the weights is missing or damaged, or a budget of the host has no room
            for the model and its optimizer.
    """
    model = meta_model(config)
    base = Path(weights_of(config))
    if base.is_dir():
        check_files(base, not config.trains_adapters, _SCORES if config.task == "reward" else None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rule = rule_of(config)
    budget = budget_of(config.host_memory, "host_memory", HOST_VARIABLE)
    if budget is not None:
        refuse_host("train", base_of(config), budget, lambda rule: predict_unloaded(model, rule), rule)
    host, weights = predict_unloaded(model, rule), sum(parameter.nbytes for parameter in trained)
    return weights, weights + host.masters + host.moments + host.on_disk


def rule_of(config: TrainConfig) -> UpdateRule:
    """The optimizer of a run, as far as its memory depends on it."""
    disk_memory = budget_of(config.disk_memory, "disk_memory") or 0
    return UpdateRule(
        config.optimizer,
        config.moments,
        config.momentum or 0.0,
        config.masters,
        config.disk or "",
        disk_memory,
        config.disk_holds,
        config.gradients_at_once,
    )


def meta_model(config: TrainConfig, causal: bool = False) -> nn.Module:
    """The model of a run with its adapters, without values.

    Args:
        causal: with a head over the vocabulary for every task.

    Raises:
        ValueError: `base_of` does, the model cannot be made or adapted so, or its weights are encoded and are to be
            trained.
    """
    base_of(config)  # names what is not there before transformers does
    base, adapters = weights_of(config), lora_of(config) if config.trains_adapters and not config.adapter else None
    if config.adapter:
        adapters = _config_of_adapter(config.adapter)
        adapters.inference_mode = False  # a saved adapter is frozen
        kind_of_task = str(getattr(adapters.task_type, "value", adapters.task_type))
        if kind_of_task in ("CAUSAL_LM", "SEQ_CLS") and (kind_of_task == "SEQ_CLS") != (config.task == "reward"):
            raise ValueError(
                f"[train] --adapter {config.adapter} was trained as {kind_of_task}, expected "
                f"{'SEQ_CLS, which scores rows' if config.task == 'reward' else 'CAUSAL_LM, which writes'}, for --task "
                f"{config.task}; put an adapter into its base first, with roundpipe export --merge, and give the "
                "result as --model"
            )
    with _told(f"the config of {base} cannot be read", "the config.json of a causal language model of transformers"):
        model_config: Any = AutoConfig.from_pretrained(base)
        scores = config.task == "reward"
        stored_kind = next(iter(model_config.architectures or ()), "")
        if stored_kind.endswith("ForSequenceClassification") and not scores:
            raise ValueError(
                f"[train] {base} holds a {stored_kind}, which scores rows, expected a model that writes for --task "
                f"{config.task}; a reward model goes on with --task reward"
            )
        if scores and takes_pictures(model_config):
            raise ValueError(f"[train] {base} takes pictures, expected a model of text alone for --task reward")
        refuse_other_kinds(base, model_config, scores)
        kind = kind_of(model_config, _SCORES if scores else None)
        if scores:
            model_config.num_labels = _SCORES
        name = config.dtype or model_config.dtype or "float32"
        dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."))
    with _told(f"the model of {base} cannot be made", "sizes in its config that fit, and adapters for its layers"):
        model = make_model(
            model_config,
            dtype=dtype,
            adapters=adapters,
            quantise=config.quantise,
            keep=config.quantise_keep or (),
            folder=Path(base) if Path(base).is_dir() else None,
            kind="causal" if scores and causal else kind,
        )
        freeze_modules(model, config.freeze or ())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"[train] {base} holds quantised weights, which are frozen, expected adapters to train: --lora, --dora or "
            "--adapter; for all weights give the model that was quantised"
        )
    return model


def has_pictures(config: TrainConfig) -> bool:
    """Whether the model of a run takes pictures beside text, and its folder has a processor for them.

    Raises:
        ValueError: its config cannot be read.
    """
    base = weights_of(config)
    with _told(f"the config of {base} cannot be read", "the config.json of a language model of transformers"):
        takes = takes_pictures(AutoConfig.from_pretrained(base))
    return takes and (not Path(base).is_dir() or any((Path(base) / name).exists() for name in _OF_PROCESSORS))


def pictures_of(config: TrainConfig, tokenizer: Any) -> PictureProcessor | None:
    """The processor of a model that takes pictures, with this tokenizer; None for another model.

    Raises:
        ValueError: the processor cannot be loaded.
    """
    if not has_pictures(config):
        return None
    base = weights_of(config)
    with _told(f"the processor of {base} cannot be read", "the files that its save_pretrained writes"):
        from transformers import AutoProcessor

        like: Any = AutoProcessor  # has no types
        processor = like.from_pretrained(base)
    processor.tokenizer = tokenizer
    return PictureProcessor(processor)


def lora_of(config: TrainConfig) -> Any:
    """PEFT's configuration of the adapters of a run with `lora` or `dora`.

    Raises:
        ValueError: peft is not installed.
    """
    return _peft("--lora and --dora").LoraConfig(
        task_type="SEQ_CLS" if config.task == "reward" else "CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.lora_targets or "all-linear",
        use_rslora=config.lora_rslora,
        use_dora=config.dora,
    )


def _peft(options: str) -> Any:
    try:
        import peft
    except ImportError:
        raise ValueError(
            f"[train] {options} need peft, which is not installed; pip install 'roundpipe-engine[lora]'"
        ) from None
    return peft


def save_result(model: roundpipe.RoundPipe, tokenizer: Any, folder: Path) -> None:
    """Writes a folder that transformers or, for adapters, PEFT loads; it is complete or not there.

    Raises:
        ValueError: it cannot be written, for example because the disk is full.
    """
    try:
        with new_folder(folder, "train") as written, without_progress_bars():
            model.save_pretrained(written)
            tokenizer.save_pretrained(written)
            if (written / _OF_AN_ADAPTER).exists():
                (written / "README.md").write_text(_about_adapter(model), encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"[train] cannot write {folder}: {first_lines(error)}; make room, then go on with --resume"
        ) from error


def _about_adapter(model: Any) -> str:
    """How the adapter is loaded, in place of PEFT's form to be filled in."""
    config = model.peft_config["default"]
    base, task = config.base_model_name_or_path, getattr(config.task_type, "value", config.task_type)
    kind, more = "AutoModelForCausalLM", ""
    if task == "SEQ_CLS":
        kind, more = "AutoModelForSequenceClassification", f", num_labels=1, pad_token_id={model.config.pad_token_id}"
    elif (taken := kind_with_pictures(model.config)) is not None:
        kind = AUTO_CLASSES[taken].__name__
    return (
        f"---\nbase_model: {base}\nlibrary_name: peft\n---\n\nAn adapter that RoundPipe has trained.\n\n```python\n"
        f"from peft import PeftModel\nfrom transformers import {kind}\n\n"
        f"base = {kind}.from_pretrained({str(base)!r}{more})\n"
        'model = PeftModel.from_pretrained(base, "this folder")\n```\n'
    )
