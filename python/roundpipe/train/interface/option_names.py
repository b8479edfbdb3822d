"""Which options are shown first, and what options are called elsewhere. For the command line and for files."""

from __future__ import annotations

NEEDED = ("model", "data", "out")
"""Without these there is no run."""

FIRST = (
    "task",
    "lora",
    "quantise",
    "epochs",
    "learning_rate",
    "length",
    "batch_tokens",
    "devices",
    "save_every",
    "dry_run",
    "resume",
)
"""What people set next."""

ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("model_name_or_path", "base_model"),
    "data": ("train_file", "dataset_name"),
    "out": ("output_dir",),
    "dtype": ("torch_dtype",),
    "dora": ("use_dora",),
    "lora_rank": ("lora_r",),
    "lora_targets": ("target_modules", "lora_target_modules"),
    "lora_rslora": ("use_rslora",),
    "quantise": ("quantize",),
    "length": ("max_length", "max_seq_length"),
    "epochs": ("num_epochs", "num_train_epochs"),
    "steps": ("max_steps",),
    "learning_rate": ("lr",),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "eps": ("adam_epsilon",),
    "clip": ("max_grad_norm",),
    "beta": ("pref_beta",),
    "good_weight": ("desirable_weight", "kto_chosen_weight"),
    "bad_weight": ("undesirable_weight", "kto_rejected_weight"),
    "evaluate_every": ("eval_steps",),
    "log_every": ("logging_steps",),
    "save_every": ("save_steps",),
    "keep": ("save_total_limit",),
}
"""Other names of an option: only where exactly the same is meant."""

_BATCH = ("batch_tokens", "the tokens of a step on all devices together, sequences x their length")
_CAST = ("dtype", "such as bfloat16, of the weights; the optimizer's values are float32 all the same")
_HELD_OUT = ("held_out", "a share below 1 or a number of records")
_DEVICES = ("devices", "or nothing: all that are found are used")

_INSTEAD: dict[str, tuple[str, str]] = {
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "micro_batch_size": ("microbatches", "the number of parts of a step, or nothing: it is chosen"),
    "gradient_accumulation_steps": ("batch_tokens", "the tokens of a step, which runs in --microbatches parts"),
    "warmup_ratio": ("warmup_steps", "a number of steps"),
    "lr_scheduler_type": ("schedule", "constant, linear or cosine, each after --warmup-steps"),
    "optim": ("optimizer", "such as adamw, with --moments 8bit for moments in 8 bits"),
    "bf16": _CAST,
    "fp16": _CAST,
    "load_in_4bit": ("quantise", "such as nf4"),
    "load_in_8bit": ("quantise", "such as int8"),
    "use_lora": ("lora", "which needs no value on the command line"),
    "packing": ("rows", "packed or padded"),
    "gradient_checkpointing": ("recompute_by_layer", "or nothing: activations are computed again anyway"),
    "dataset": ("data", "a file, a folder, or the name of a data set"),
    "train_data": ("data", "a file, a folder, or the name of a data set"),
    "dataset_text_field": ("fields", "such as text=NAME"),
    "validation_split_percentage": _HELD_OUT,
    "val_size": _HELD_OUT,
    "completion_only_loss": ("train_on", "assistant or all"),
    "assistant_only_loss": ("train_on", "assistant or all"),
    "resume_from_checkpoint": ("out", "the folder of the run, and --resume on the command line"),
    "report_to": ("tensorboard", "or --wandb with the name of a project"),
    "stage": ("task", "sft, reward, dpo or kto"),
    "num_gpus": _DEVICES,
    "deepspeed": _DEVICES,
    "fsdp": _DEVICES,
}


def instead_of(name: str) -> tuple[str, str] | None:
    """The option to use instead of one that people know from elsewhere and that means something else, and what to give
    it; None: unknown.

    Args:
        name: with underscores.
    """
    return _INSTEAD.get(name)


def option_of(name: str) -> str:
    """The option that a name stands for; itself, if it is no alias."""
    return next((option for option, others in ALIASES.items() if name in others), name)
