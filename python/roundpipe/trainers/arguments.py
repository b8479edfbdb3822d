"""Which training arguments of transformers and TRL mean the same in the pipeline, and which are refused by name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers.training_args import OptimizerNames

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Optimizers that only read and write parameters and their gradients, on the host.
OPTIMIZERS = frozenset(
    {
        OptimizerNames.ADAMW_TORCH,
        OptimizerNames.ADAMW_TORCH_FUSED,
        OptimizerNames.ADAFACTOR,
        OptimizerNames.ADAGRAD,
        OptimizerNames.GROKADAMW,
        OptimizerNames.RMSPROP,
        OptimizerNames.SCHEDULE_FREE_ADAMW,
        OptimizerNames.SCHEDULE_FREE_RADAM,
        OptimizerNames.SCHEDULE_FREE_SGD,
        OptimizerNames.SGD,
        OptimizerNames.STABLE_ADAMW,
    }
)


_ONE_PROCESS = "one process drives all devices and holds the weights on the host"
_RECOMPUTED = "layers are always recomputed in the backward pass, and only what lies between stages is kept"

# Of each argument that may not be set: why, and what to do instead. Arguments that a version of transformers or TRL
# does not have are not looked at.
_REFUSED: dict[str, tuple[str, str]] = {
    "fsdp": (_ONE_PROCESS, "leave it out"),
    "deepspeed": (_ONE_PROCESS, "leave it out"),
    "parallelism_config": (_ONE_PROCESS, "leave it out"),
    "fp16": (
        "the Trainer's loss scaler is not the pipeline's",
        "set bf16=True, or write your own loop with roundpipe.GradScaler",
    ),
    "fp16_full_eval": ("weights stay in the dtype that they were wrapped in", "leave it out"),
    "bf16_full_eval": (
        "weights stay in the dtype that they were wrapped in",
        "leave it out; bf16=True computes in bf16",
    ),
    "torch_compile": (
        "the layers run one by one, and a compiled whole would never run",
        "leave it out, or call layer.compile() for each layer before",
    ),
    "use_liger_kernel": (
        "it replaces the forward that the pipeline follows, and the pipeline computes losses in chunks by itself",
        "leave it out",
    ),
    "activation_offloading": (_RECOMPUTED, "leave it out"),
    "auto_find_batch_size": (
        "a batch is cut into microbatches, so its size is not what fills a device",
        "leave it out, and see device_memory of wrap_model_to_roundpipe",
    ),
    "debug": ("its hooks look at modules of a model that runs as a whole", "leave it out"),
    "sync_ref_model": ("it writes to weights that the pipeline holds", "leave it out"),
    "precompute_ref_log_probs": (
        "they would be computed on the host before the model is in the pipeline",
        "leave it out",
    ),
}


def check_arguments(where: str, args: TrainingArguments) -> None:
    """Refuses what has no meaning in the pipeline, and turns off the checkpointing of activations, which the pipeline
    does anyway.

    Raises:
        ValueError: an argument has no meaning here; the message names it.
    """
    for name, (why, instead) in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise ValueError(f"[{where}] {name}={_shown(value)} is refused: {why}; {instead}")
    if args.optim not in OPTIMIZERS:
        raise ValueError(
            f"[{where}] optim={_name(args.optim)!r} is refused: it needs weights on a device, or hooks on a model that "
            f"runs as a whole, expected one of {sorted(map(_name, OPTIMIZERS))}; for 8-bit moments, wrap the model and "
            "give optimizers=(roundpipe.optim.AdamW(model, moments='8bit'), None)"
        )
    _take_over_checkpointing(where, args)
    if args.world_size > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"[{where}] the script was launched with {args.world_size} processes, expected one, which drives all "
            "devices; start it with `python`, and choose devices with roundpipe.devices()"
        )


def _name(optimizer: OptimizerNames | str) -> str:
    return str(getattr(optimizer, "value", optimizer))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _take_over_checkpointing(where: str, args: TrainingArguments) -> None:
    """Turns off the model's own checkpointing of activations, which would recompute what the pipeline recomputes."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # the second is the older name
        options = getattr(args, f"{name}_kwargs", None) or {}
        unknown = sorted(set(options) - {"use_reentrant", "preserve_rng_state", "determinism_check"})
        if unknown and getattr(args, name, False):
            raise ValueError(f"[{where}] {unknown} in {name}_kwargs is refused: {_RECOMPUTED}; leave it out")
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, False)


def stay_on_host(where: str, args: TrainingArguments) -> None:
    """Makes the host the Trainer's device, where batches, losses and the optimizer are.

    Raises:
        ValueError: accelerate was configured for another device by the script.
    """
    if _is_on_host(args):
        return
    if getattr(args.accelerator_config, "use_configured_state", False):
        raise ValueError(
            f"[{where}] accelerator_config has use_configured_state, and the state is for {args.device}, expected the "
            "CPU, since the pipeline moves layers to devices by itself; leave it out, or make the state with cpu=True"
        )
    args.use_cpu = True
    vars(args).pop("_setup_devices", None)  # a cached property
    if not _is_on_host(args):
        raise ValueError(
            f"[{where}] accelerate uses {args.distributed_state.device} though use_cpu is on, expected the CPU; unset "
            "the environment variable ACCELERATE_TORCH_DEVICE"
        )


def _is_on_host(args: TrainingArguments) -> bool:
    return {args.device.type, args.distributed_state.device.type} == {"cpu"}
