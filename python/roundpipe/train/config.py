"""Every choice of a run of `roundpipe train`, with its default, its range and its help. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from roundpipe.command_options import EncodedFormat
from roundpipe.data.records.options import Documents, Format, OnBad, Overlong, TrainOn
from roundpipe.plan.options import Optimizer

# The engine's table of options; tools/training_options.py writes it.
_OPTIONS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "option_table.json").read_text("utf-8"))

_MOST = 2**63 - 1  # of the engine's numbers

# Of those that `roundpipe train` alone has: without effect on the bits of a training.
_FREE = ("data", "samples", "sample_prompts", "sample_tokens", "tensorboard", "wandb")
# May differ between the nodes of a run.
_OF_A_MACHINE = ("data", *(name for name, option in _OPTIONS.items() if option["of_a_machine"]))


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **more)


def _shared(panel: str, name: str, **more: Any) -> Any:
    return _option(panel, _OPTIONS[name]["help"], **more)


Task = Literal["sft", "dpo", "kto", "reward"]
_FORMATS: dict[Task, Format] = {"dpo": "preference", "reward": "preference", "kto": "rated"}
_OPTIONS_OF_TASKS: dict[str, tuple[Task, ...]] = {
    "beta": ("dpo", "kto"),
    "good_weight": ("kto",),
    "bad_weight": ("kto",),
}
_BETA = 0.1
_RATES = {False: 1e-6, True: 1e-5}  # of dpo and kto, without and with adapters; TRL's for a whole model

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
    task: Annotated[
        Task,
        _option(
            _RUN,
            "What is learnt. sft: answers and texts. dpo: which answer of a pair is better. kto: good and bad answers. "
            "reward: to score answers.",
        ),
    ] = "sft"
    seed: Annotated[int, _shared(_RUN, "seed")] = _OPTIONS["seed"]["default"]
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, _shared(_RUN, "dtype", show_default=False)] = (
        None
    )

    arithmetic: Annotated[Literal["exact", "fast"], _shared(_RUN, "arithmetic")] = _OPTIONS["arithmetic"]["default"]

    lora: Annotated[bool, _shared(_ADAPTERS, "lora")] = _OPTIONS["lora"]["default"]
    dora: Annotated[bool, _shared(_ADAPTERS, "dora")] = _OPTIONS["dora"]["default"]
    lora_rank: Annotated[int, _shared(_ADAPTERS, "lora_rank")] = _OPTIONS["lora_rank"]["default"]
    lora_alpha: Annotated[float, _shared(_ADAPTERS, "lora_alpha")] = _OPTIONS["lora_alpha"]["default"]
    lora_targets: Annotated[list[str] | None, _shared(_ADAPTERS, "lora_targets", metavar="NAME")] = None
    lora_dropout: Annotated[float, _shared(_ADAPTERS, "lora_dropout")] = _OPTIONS["lora_dropout"]["default"]
    lora_rslora: Annotated[bool, _shared(_ADAPTERS, "lora_rslora")] = _OPTIONS["lora_rslora"]["default"]
    adapter: Annotated[
        str,
        _option(
            _ADAPTERS, "Folder of a PEFT adapter to go on from; it names its base.", metavar="DIR", show_default=False
        ),
    ] = ""

    freeze: Annotated[
        list[str] | None,
        _option(
            _ADAPTERS,
            "A module whose weights are not trained, such as visual or embed_tokens; again for more.",
            metavar="MODULE",
            show_default=False,
        ),
    ] = None
    quantise: Annotated[EncodedFormat | None, _shared(_ADAPTERS, "quantise", show_default=False)] = None
    quantise_keep: Annotated[list[str] | None, _shared(_ADAPTERS, "quantise_keep", metavar="MODULE")] = None

    rows: Annotated[
        Literal["packed", "padded"],
        _option(_DATA, "packed: short samples share a row, without seeing each other. padded: a row for each."),
    ] = _OPTIONS["rows"]["default"]
    length: Annotated[int, _shared(_DATA, "length")] = _OPTIONS["length"]["default"]
    batch_tokens: Annotated[int | None, _shared(_DATA, "batch_tokens", show_default=False)] = None
    in_order: Annotated[bool, _shared(_DATA, "in_order")] = _OPTIONS["in_order"]["default"]
    epochs: Annotated[int, _shared(_DATA, "epochs")] = _OPTIONS["epochs"]["default"]
    steps: Annotated[int | None, _shared(_DATA, "steps", show_default=False)] = None
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

    optimizer: Annotated[Optimizer, _shared(_RULE, "optimizer")] = _OPTIONS["optimizer"]["default"]
    moments: Annotated[Literal["fp32", "8bit"], _shared(_RULE, "moments")] = _OPTIONS["moments"]["default"]
    masters: Annotated[Literal["fp32", "24bit"], _shared(_RULE, "masters")] = _OPTIONS["masters"]["default"]
    learning_rate: Annotated[float | None, _shared(_RULE, "learning_rate", show_default=False)] = None
    weight_decay: Annotated[float, _shared(_RULE, "weight_decay")] = _OPTIONS["weight_decay"]["default"]
    beta1: Annotated[float | None, _shared(_RULE, "beta1", show_default=False)] = None
    beta2: Annotated[float | None, _shared(_RULE, "beta2", show_default=False)] = None
    eps: Annotated[float | None, _shared(_RULE, "eps", show_default=False)] = None
    momentum: Annotated[float | None, _shared(_RULE, "momentum", show_default=False)] = None
    clip: Annotated[float, _shared(_RULE, "clip")] = _OPTIONS["clip"]["default"]
    schedule: Annotated[Literal["constant", "linear", "cosine"], _shared(_RULE, "schedule")] = _OPTIONS["schedule"][
        "default"
    ]
    warmup_steps: Annotated[int, _shared(_RULE, "warmup_steps")] = _OPTIONS["warmup_steps"]["default"]
    floor: Annotated[float, _shared(_RULE, "floor")] = _OPTIONS["floor"]["default"]
    beta: Annotated[
        float | None,
        _option(
            _RULE,
            f"Of dpo and kto: how close to the model at the start (default: {_BETA}). Their learning rate is "
            f"{_RATES[False]:g} by default, for adapters {_RATES[True]:g}.",
            show_default=False,
        ),
    ] = None
    good_weight: Annotated[
        float | None, _option(_RULE, "Of kto: what a good answer counts (default: 1).", show_default=False)
    ] = None
    bad_weight: Annotated[
        float | None, _option(_RULE, "Of kto: what a bad answer counts (default: 1).", show_default=False)
    ] = None
    clip_by: Annotated[Literal["norm", "last_norm", "two_passes"], _shared(_RULE, "clip_by")] = _OPTIONS["clip_by"][
        "default"
    ]
    gradients_at_once: Annotated[bool, _shared(_RULE, "gradients_at_once")] = _OPTIONS["gradients_at_once"]["default"]
    asynchronous: Annotated[bool, _shared(_RULE, "asynchronous")] = _OPTIONS["asynchronous"]["default"]

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
    log_every: Annotated[int, _option(_WATCH, "Steps between lines on the screen, where it is no terminal.")] = (
        _OPTIONS["log_every"]["default"]
    )

    save_every: Annotated[int | None, _shared(_SAVING, "save_every", show_default=False)] = None
    keep: Annotated[int, _shared(_SAVING, "keep")] = _OPTIONS["keep"]["default"]

    devices: Annotated[str | None, _shared(_MACHINE, "devices", show_default=False)] = None
    device_memory: Annotated[str | None, _shared(_MACHINE, "device_memory", show_default=False)] = None
    host_memory: Annotated[str | None, _shared(_MACHINE, "host_memory", show_default=False)] = None
    disk: Annotated[str | None, _shared(_MACHINE, "disk", show_default=False)] = None
    disk_memory: Annotated[str | None, _shared(_MACHINE, "disk_memory", show_default=False)] = None
    disk_holds: Annotated[Literal["moments", "masters"], _shared(_MACHINE, "disk_holds")] = _OPTIONS["disk_holds"][
        "default"
    ]
    microbatches: Annotated[int | None, _shared(_MACHINE, "microbatches", show_default=False)] = None
    recompute_by_layer: Annotated[bool, _shared(_MACHINE, "recompute_by_layer")] = _OPTIONS["recompute_by_layer"][
        "default"
    ]
    fault_tolerant: Annotated[bool, _shared(_MACHINE, "fault_tolerant")] = _OPTIONS["fault_tolerant"]["default"]

    def __post_init__(self) -> None:
        from roundpipe import _core

        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int) and abs(value) > _MOST:
                raise refused(name, value, f"a whole number up to {_MOST}")
        _core.check_training_options(self._shared_values())
        if self.rows not in ("packed", "padded"):
            raise refused("rows", self.rows, "packed or padded; roundpipe-train has streams")
        if self.model and self.adapter:
            raise ValueError(
                "[train] --model and --adapter are given, expected one of them, as an adapter names its base; to use "
                "another base, change base_model_name_or_path in its adapter_config.json"
            )
        for name, least in (("samples", 0), ("sample_tokens", 1)):
            if getattr(self, name) < least:
                raise refused(name, getattr(self, name), f"at least {least}")
        if not 0 <= self.held_out < math.inf or (self.held_out >= 1 and self.held_out != int(self.held_out)):
            raise refused("held_out", self.held_out, "a share below 1, or a whole number of records")
        self._check_task()
        for name in ("evaluate_every", "sample_prompts"):
            if getattr(self, name) is not None and not self.held_out:
                raise refused(name, getattr(self, name), "it only with --held-out above 0")

    def _check_task(self) -> None:
        if self.task not in get_args(Task):
            raise refused("task", self.task, f"one of {', '.join(get_args(Task))}")
        if self.task == "sft" and self.format in _FORMATS.values():
            tasks = [task for task, form in _FORMATS.items() if form == self.format]
            raise refused("format", self.format, f"it only with --task {' or '.join(tasks)}")
        if self.task != "sft" and self.format not in ("auto", _FORMATS[self.task]):
            raise refused("format", self.format, f"{_FORMATS[self.task]} or auto, with --task {self.task}")
        for name, tasks_with in _OPTIONS_OF_TASKS.items():
            value = getattr(self, name)
            if value is not None and self.task not in tasks_with:
                raise refused(name, value, f"it only with --task {' or '.join(tasks_with)}")
            if value is not None and not 0 < value < math.inf:
                raise refused(name, value, "a number above 0")
        if self.task == "reward" and self.sample_prompts:
            raise refused("sample_prompts", self.sample_prompts, "none: a reward model does not write")
        if self.task == "kto" and self.train_on == "all":
            raise refused("train_on", self.train_on, "assistant, with --task kto: answers are compared, not questions")

    @property
    def record_format(self) -> Format:
        """What the records of the data have to be."""
        return self.format if self.task == "sft" else _FORMATS[self.task]

    @property
    def preference_beta(self) -> float:
        """The factor of log-probabilities in the losses of dpo and kto."""
        return _BETA if self.beta is None else self.beta

    @property
    def rating_weights(self) -> tuple[float, float]:
        """What a good answer counts in the loss of kto, and a bad one."""
        good, bad = (1.0 if weight is None else weight for weight in (self.good_weight, self.bad_weight))
        return good, bad

    @property
    def trains_adapters(self) -> bool:
        """Whether the model itself is frozen."""
        from roundpipe import _core

        return _core.trains_adapters(self._shared_values())

    def check_for(self, nodes: int) -> None:
        """Raises ValueError: so many nodes cannot train with an option."""
        from roundpipe import _core

        _core.check_options_of_nodes(self._shared_values(), nodes)

    @property
    def packed(self) -> bool:
        """Whether samples share rows."""
        return self.rows == "packed" and self.task == "sft"

    @property
    def rule_options(self) -> dict[str, float]:
        """The hyperparameters of the update rule; what is not set is its own default."""
        from roundpipe import _core

        return _core.rule_options(self._shared_values())

    @property
    def beside_muon(self) -> dict[str, float]:
        """Of the AdamW that steps what Muon is not for, the same; empty for other rules."""
        from roundpipe import _core

        return _core.beside_muon(self._shared_values())

    def rate_factor(self, steps: int) -> Callable[[int], float]:
        """Maps a step of a run of so many, counted from 0, to its part of the highest learning rate.

        Raises:
            ValueError: the warm-up is longer than the run.
        """
        from roundpipe import _core

        return _core.learning_rate(self._shared_values(), steps)

    @property
    def tokens_of_step(self) -> int:
        """The most tokens of a step."""
        from roundpipe import _core

        return _core.tokens_of_step(self._shared_values())

    def note_of_few_steps(self, steps: int) -> str:
        """What to tell of a run of so few steps that it hardly learns; empty if there are enough."""
        from roundpipe import _core

        return _core.note_of_few_steps(self._shared_values(), steps)

    def fixed(self) -> dict[str, Any]:
        """The values that belong to the bits of a training: a run that resumes has to have the same."""
        from roundpipe import _core

        own = {name: value for name, value in self.in_effect().items() if name not in (*_OPTIONS, *_FREE)}
        return own | _core.fixed_training_options(self._shared_values())

    def in_effect(self) -> dict[str, Any]:
        """All values, with those that the task has by default."""
        own = {
            "beta": self.preference_beta,
            "good_weight": self.rating_weights[0],
            "bad_weight": self.rating_weights[1],
        }
        values = dataclasses.asdict(self) | {
            name: value for name, value in own.items() if self.task in _OPTIONS_OF_TASKS[name]
        }
        if self.task != "sft":
            values |= {"rows": "padded", "learning_rate": self._shared_values()["learning_rate"]}
        return values

    def of_all_nodes(self) -> dict[str, Any]:
        """The values that are the same on every node of a run; the others are about one machine."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _OF_A_MACHINE}

    def require_run(self, *, to_train: bool = True) -> None:
        """Raises ValueError unless the model, the data and, to train, the folder of the run are known."""
        for name in ("model", "data", "out") if to_train else ("model", "data"):
            if not getattr(self, name) and not (name == "model" and self.adapter):
                raise ValueError(f"[train] --{name} is not given, expected it, or `{name}` in a file for --config")

    def _shared_values(self) -> dict[str, Any]:
        """The options that `roundpipe-train` has as well; those that are not given are None."""
        from roundpipe import _core

        values = {name: None if getattr(self, name) == "" else getattr(self, name) for name in _OPTIONS}
        if self.task in ("dpo", "kto") and self.learning_rate is None:
            values["learning_rate"] = _RATES[_core.trains_adapters(values)]
        return values


def refused(name: str, value: object, expected: str) -> ValueError:
    """The error for a value that cannot be used."""
    return ValueError(f"[train] --{name.replace('_', '-')} is {value}, expected {expected}")
