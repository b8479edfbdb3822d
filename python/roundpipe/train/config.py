"""Every choice of a run of `roundpipe train`, with its default, its range and its help. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from roundpipe.planning.options import WITH_8BIT, Optimizer
from roundpipe.records.options import Documents, Format, OnBad, Overlong, TrainOn

# What only some update rules have: the optimizers that take each option.
OF_SOME_RULES: dict[str, tuple[str, ...]] = {
    "beta1": ("adam", "adamw", "lion"),
    "beta2": ("adam", "adamw", "lion"),
    "eps": ("adam", "adamw", "rmsprop"),
    "momentum": ("sgd", "rmsprop"),
}
_OF_LORA = ("lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "lora_rslora")
_FULL_RATE, _ADAPTER_RATE = 2e-5, 2e-4
_ROWS_OF_A_STEP = 8
# Without effect on the bits of a training. Evaluations have one only in asynchronous runs, see `fixed`.
_FREE = (
    *("model", "data", "out", "devices", "host_memory", "device_memory", "recompute_by_layer", "fault_tolerant"),
    *("save_every", "keep", "evaluate_every", "samples", "sample_prompts", "sample_tokens"),
    *("log_every", "tensorboard", "wandb"),
)
# May differ between the nodes of a run.
_OF_A_MACHINE = ("model", "adapter", "data", "out", "devices", "host_memory", "device_memory")


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


_RUN, _ADAPTERS, _DATA, _RULE = "Run", "Adapters", "Data and steps", "Optimizer"
_WATCH, _SAVING, _MACHINE = "Evaluation and logs", "Saving", "Devices and memory"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. The fields are the keys of a configuration file and, with dashes, the options of the command.

    Raises:
        ValueError: a value is out of its range, or two values do not fit each other.
    """

    model: Annotated[
        str,
        _option(
            _RUN, "A model's folder with its tokenizer, or its name on the Hub.", metavar="DIR|ID", show_default=False
        ),
    ] = ""
    data: Annotated[
        list[str] | None,
        _option(
            _RUN,
            "A file or folder of texts or conversations, or a data set; give it again for more.",
            metavar="FILE|DIR|DATASET",
            show_default=False,
        ),
    ] = None
    out: Annotated[
        str,
        _option(_RUN, "Folder of the run: result, checkpoints, metrics, report.", metavar="DIR", show_default=False),
    ] = ""
    seed: Annotated[int, _option(_RUN, "Of new adapters, dropout, the order of rows, and what is held out.")] = 0
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        _option(
            _RUN,
            "Of the weights (default: that of the model's files). With float16, losses are scaled.",
            show_default=False,
        ),
    ] = None

    arithmetic: Annotated[
        Literal["exact", "fast"],
        _option(_RUN, "exact: with torch's bits. fast: with fused kernels, and other last bits."),
    ] = "exact"

    lora: Annotated[bool, _option(_ADAPTERS, "Train LoRA adapters, and freeze the model.")] = False
    dora: Annotated[bool, _option(_ADAPTERS, "Train DoRA adapters: LoRA with a magnitude of each weight's rows.")] = (
        False
    )
    lora_rank: Annotated[int, _option(_ADAPTERS, "Rank of an adapter.")] = 8
    lora_alpha: Annotated[float, _option(_ADAPTERS, "What an adapter adds is scaled by alpha / rank.")] = 8.0
    lora_targets: Annotated[
        list[str] | None,
        _option(
            _ADAPTERS, "A linear layer with an adapter, such as q_proj; again for more (default: all).", metavar="NAME"
        ),
    ] = None
    lora_dropout: Annotated[float, _option(_ADAPTERS, "Dropout before an adapter.")] = 0.0
    lora_rslora: Annotated[bool, _option(_ADAPTERS, "Scale by alpha / sqrt(rank).")] = False
    adapter: Annotated[
        str,
        _option(
            _ADAPTERS, "Folder of a PEFT adapter to go on from; it names its base.", metavar="DIR", show_default=False
        ),
    ] = ""

    rows: Annotated[
        Literal["packed", "padded"],
        _option(_DATA, "packed: short samples share a row, without seeing each other. padded: a row for each."),
    ] = "packed"
    length: Annotated[int, _option(_DATA, "Tokens of a row, at most.")] = 2048
    batch_tokens: Annotated[
        int | None,
        _option(_DATA, f"Tokens of a step, at most (default: {_ROWS_OF_A_STEP} rows).", show_default=False),
    ] = None
    in_order: Annotated[bool, _option(_DATA, "Use samples in the order of the data, not shuffled.")] = False
    epochs: Annotated[int, _option(_DATA, "How often all samples are used.")] = 1
    steps: Annotated[
        int | None, _option(_DATA, "How many steps are made, instead of --epochs.", show_default=False)
    ] = None
    held_out: Annotated[
        float, _option(_DATA, "Records that are held out to be evaluated on: a share below 1, or a number.")
    ] = 0.05
    format: Annotated[
        Format, _option(_DATA, "What the records of the data are; auto takes what most of the first ones are.")
    ] = "auto"
    fields: Annotated[
        list[str] | None,
        _option(
            _DATA,
            "Another name of a member, such as prompt=question; again for more.",
            metavar="NAME=MEMBER",
            show_default=False,
        ),
    ] = None
    documents: Annotated[Documents, _option(_DATA, "Whether a text file is one document, or each line.")] = "file"
    ends: Annotated[bool, _option(_DATA, "End each text with the end-of-text token.")] = True
    train_on: Annotated[TrainOn, _option(_DATA, "Which tokens of a conversation are learnt.")] = "assistant"
    overlong: Annotated[
        Overlong,
        _option(_DATA, "Records longer than a row: cut (a text becomes several samples), drop, or an error."),
    ] = "cut"
    on_bad: Annotated[OnBad, _option(_DATA, "Broken and empty records: leave out and count, or an error.")] = "count"

    optimizer: Annotated[Optimizer, _option(_RULE, "Update rule.")] = "adamw"
    moments: Annotated[Literal["fp32", "8bit"], _option(_RULE, "Of adam and adamw.")] = "fp32"
    learning_rate: Annotated[
        float | None,
        _option(
            _RULE,
            f"Highest learning rate (default: {_FULL_RATE:g}, for adapters {_ADAPTER_RATE:g}).",
            show_default=False,
        ),
    ] = None
    weight_decay: Annotated[float, _option(_RULE, "Of all but norms and biases.")] = 0.0
    beta1: Annotated[float | None, _option(_RULE, "Of adam, adamw and lion.", show_default=False)] = None
    beta2: Annotated[float | None, _option(_RULE, "Of adam, adamw and lion.", show_default=False)] = None
    eps: Annotated[float | None, _option(_RULE, "Of adam, adamw and rmsprop.", show_default=False)] = None
    momentum: Annotated[float | None, _option(_RULE, "Of sgd and rmsprop.", show_default=False)] = None
    clip: Annotated[float, _option(_RULE, "Largest norm of the gradients; 0: as they are.")] = 1.0
    schedule: Annotated[Literal["constant", "linear", "cosine"], _option(_RULE, "Of the learning rate.")] = "cosine"
    warmup_steps: Annotated[int, _option(_RULE, "Steps in which the learning rate rises.")] = 0
    floor: Annotated[float, _option(_RULE, "Where a schedule ends, as a part of the learning rate.")] = 0.0
    asynchronous: Annotated[
        bool, _option(_RULE, "Update weights beside the next step, which reads those of one step ago.")
    ] = False

    evaluate_every: Annotated[
        int | None,
        _option(_WATCH, "Steps between evaluations (default: before and after training).", show_default=False),
    ] = None
    samples: Annotated[
        int, _option(_WATCH, "How many held-out samples the model goes on from at each evaluation, to be read.")
    ] = 3
    sample_prompts: Annotated[
        list[str] | None,
        _option(_WATCH, "A prompt to go on from instead; again for more.", metavar="TEXT", show_default=False),
    ] = None
    sample_tokens: Annotated[int, _option(_WATCH, "Tokens of a sample, at most.")] = 32
    tensorboard: Annotated[bool, _option(_WATCH, "Write events for TensorBoard into OUT/tensorboard.")] = False
    wandb: Annotated[
        str | None,
        _option(_WATCH, "Log to this project of Weights & Biases.", metavar="PROJECT", show_default=False),
    ] = None
    log_every: Annotated[int, _option(_WATCH, "Steps between lines on the screen, where it is no terminal.")] = 1

    save_every: Annotated[
        int | None, _option(_SAVING, "Steps between checkpoints (default: only when stopped).", show_default=False)
    ] = None
    keep: Annotated[int, _option(_SAVING, "How many checkpoints stay.")] = 1

    devices: Annotated[
        str | None,
        _option(
            _MACHINE,
            "Such as cuda:0,cuda:1 or virtual:4,memory=2GiB (default: ROUNDPIPE_DEVICES, else all cards).",
            show_default=False,
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        _option(_MACHINE, "Limit of a step on each device, such as 20GB; plans keep to it.", show_default=False),
    ] = None
    host_memory: Annotated[
        str | None,
        _option(_MACHINE, "Refuse to train if the host needs more, such as 200GB.", show_default=False),
    ] = None
    microbatches: Annotated[
        int | None,
        _option(_MACHINE, "Parts of a step (default: one more than devices).", show_default=False),
    ] = None
    recompute_by_layer: Annotated[bool, _option(_MACHINE, "Keep less for the backward.")] = False
    fault_tolerant: Annotated[bool, _option(_MACHINE, "Go on when a device fails.")] = False

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_together()

    @property
    def trains_adapters(self) -> bool:
        """Whether the model itself is frozen."""
        return self.lora or self.dora or bool(self.adapter)

    @property
    def packed(self) -> bool:
        """Whether samples share rows."""
        return self.rows == "packed"

    @property
    def highest_rate(self) -> float:
        """The learning rate after the warm-up."""
        if self.learning_rate is not None:
            return self.learning_rate
        return _ADAPTER_RATE if self.trains_adapters else _FULL_RATE

    @property
    def tokens_of_step(self) -> int:
        """The most tokens of a step."""
        return _ROWS_OF_A_STEP * self.length if self.batch_tokens is None else self.batch_tokens

    def fixed(self) -> dict[str, Any]:
        """The values that belong to the bits of a training: a run that resumes has to have the same."""
        values = dataclasses.asdict(self)
        fixed = {name: value for name, value in values.items() if name not in _FREE}
        if self.asynchronous:  # an evaluation lets the next step read the newest weights
            fixed["evaluate_every"] = self.evaluate_every
        return fixed

    def of_all_nodes(self) -> dict[str, Any]:
        """The values that are the same on every node of a run; the others are about one machine."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _OF_A_MACHINE}

    def require_run(self) -> None:
        """Raises ValueError unless the model, the data and the folder of the run are known."""
        for name in ("model", "data", "out"):
            if not getattr(self, name) and not (name == "model" and self.adapter):
                raise ValueError(f"[train] --{name} is not given, expected it, or `{name}` in a file for --config")

    def _check_ranges(self) -> None:
        def check(name: str, least: float, most: float = math.inf, above: bool = False) -> None:
            value = getattr(self, name)
            if value is None:
                return
            if not least <= value <= most or (above and value == least) or value == math.inf:
                range_ = f"above {least:g}" if above else f"at least {least:g}"
                range_ += f" and at most {most:g}" if most < math.inf else ""
                raise refused(name, value, range_)

        for name in ("epochs", "steps", "evaluate_every", "log_every", "save_every", "keep", "microbatches"):
            check(name, 1)
        check("lora_rank", 1)
        check("samples", 0)
        check("sample_tokens", 1)
        check("length", 2)
        check("warmup_steps", 0)
        check("seed", 0, 2**32 - 1)
        check("lora_alpha", 0, above=True)
        check("learning_rate", 0, above=True)
        check("eps", 0, above=True)
        check("weight_decay", 0)
        check("clip", 0)
        check("floor", 0, 1)
        check("held_out", 0)
        if self.held_out >= 1 and self.held_out != int(self.held_out):
            raise refused("held_out", self.held_out, "a share below 1, or a whole number of records")
        for name in ("beta1", "beta2", "momentum", "lora_dropout"):
            check(name, 0, 1)
            if getattr(self, name) == 1:
                raise refused(name, 1, "less than 1")

    def _check_together(self) -> None:
        if self.lora + self.dora + bool(self.adapter) > 1:
            raise ValueError("[train] --lora, --dora and --adapter are for different runs, expected one of them")
        if self.model and self.adapter:
            raise ValueError(
                "[train] --model and --adapter are given, expected one of them, as an adapter names its base; to use "
                "another base, change base_model_name_or_path in its adapter_config.json"
            )
        if not (self.lora or self.dora):
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for name in _OF_LORA:
                if getattr(self, name) != defaults[name]:
                    raise refused(name, getattr(self, name), "it only with --lora or --dora")
        if self.tokens_of_step < self.length:
            raise refused("batch_tokens", self.batch_tokens, f"at least --length, which is {self.length}")
        if self.moments == "8bit" and self.optimizer not in WITH_8BIT:
            raise refused("moments", "8bit", f"fp32 for {self.optimizer}")
        for name, rules in OF_SOME_RULES.items():
            if getattr(self, name) is not None and self.optimizer not in rules:
                raise refused(name, getattr(self, name), f"it only for {', '.join(rules)}, not for {self.optimizer}")
        if self.format == "preference":
            raise refused("format", self.format, "texts or conversations; RoundPipeDPOTrainer trains on pairs")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise refused("warmup_steps", self.warmup_steps, f"at most --steps, which is {self.steps}")
        if self.steps is not None and self.epochs != 1:
            raise ValueError("[train] --steps and --epochs are given, expected one of them")
        for name in ("evaluate_every", "sample_prompts"):
            if getattr(self, name) is not None and not self.held_out:
                raise refused(name, getattr(self, name), "it only with --held-out above 0")


def refused(name: str, value: object, expected: str) -> ValueError:
    """The error for a value that cannot be used."""
    return ValueError(f"[train] --{name.replace('_', '-')} is {value}, expected {expected}")
