"""One run of `roundpipe train`, from its configuration to its result."""

from __future__ import annotations

import os
import shlex
import signal
from typing import Any

import transformers

import roundpipe
from roundpipe.data.batches import check_positions
from roundpipe.data.chat import load_tokenizer
from roundpipe.ops.packed_attention import check_packing
from roundpipe.saving.folders import wait_for_saves
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import RunData, read_data
from roundpipe.train.loop import EvaluationRecord, StepRecord, Training
from roundpipe.train.metrics import Metrics
from roundpipe.train.model import base_of, load_model, save_result
from roundpipe.train.optimizer import make_optimizer, make_schedule
from roundpipe.train.run_folder import DATA_FOLDER, METRICS_FILE, RunFolder

EXIT_OK, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 130


def say(text: str) -> None:
    """Prints a line at once, also into a pipe."""
    print(text, flush=True)


class Screen:
    """Prints what happens, and writes it to the metrics."""

    def __init__(self, config: TrainConfig, metrics: Metrics, steps: int) -> None:
        self._config, self._metrics, self._steps = config, metrics, steps

    def on_step(self, record: StepRecord) -> None:
        self._metrics.write(record.step, record.metrics())
        if record.step % self._config.log_every == 0 or record.step == self._steps:
            say(
                f"step {record.step}/{self._steps}  loss {record.loss:.4f}  norm {record.grad_norm:.3g}  "
                f"rate {record.learning_rate:.3g}  {record.tokens / record.seconds:,.0f} tokens/s"
            )

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._metrics.write(record.step, record.metrics())
        say(f"after {record.step} steps: held-out loss {record.loss:.4f}")


def run(config: TrainConfig, resume: bool) -> int:
    """Trains, and returns the exit code.

    Raises:
        ValueError: a value, the data or the model do not fit; nothing has been trained.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits on every stream
    folder = RunFolder(config, resume)
    if config.devices is not None:
        roundpipe.devices(config.devices)
    tokenizer = load_tokenizer(base_of(config))
    folder.begin()
    data = read_data(config, tokenizer, folder.path / DATA_FOLDER)
    transformers.set_seed(config.seed)  # adapters and dropout begin at random
    model = load_model(config)
    check_positions(model, data.train, data.held_out)
    if config.packed:
        check_packing(model)
    optimizer = make_optimizer(model, config)
    schedule = make_schedule(optimizer, config, data.steps)
    folder.require_space(_result_bytes(model), _checkpoint_bytes(optimizer))
    with folder.reserved(_result_bytes(model)):
        return _train(config, folder, model, optimizer, schedule, data, tokenizer)


def _train(
    config: TrainConfig, folder: RunFolder, model: Any, optimizer: Any, schedule: Any, data: RunData, tokenizer: Any
) -> int:
    training = Training(config, model, optimizer, schedule, data, folder.path)
    step = training.load() if folder.goes_on else 0
    if step:
        say(f"going on after step {step} of {data.steps}")
    with Metrics(folder.path / METRICS_FILE, step) as metrics, roundpipe.StopSignal() as stop:
        complete = training.run(Screen(config, metrics, data.steps), lambda: stop.requested)
    if not complete:
        wait_for_saves(folder.path)
        say(f"stopped after {training.step} steps, which are saved; go on with\n  {resume_command(config)}")
        return EXIT_OK if stop.number == signal.SIGTERM.value else EXIT_INTERRUPTED
    folder.release()
    save_result(model, tokenizer, folder.result)
    say(f"the trained {'adapter' if config.trains_adapters else 'model'} is in {folder.result}")
    return EXIT_OK


def resume_command(config: TrainConfig) -> str:
    """The command that goes on with the run, for a shell."""
    return shlex.join(["roundpipe", "train", "--resume", "--out", config.out])


def _result_bytes(model: roundpipe.RoundPipe) -> int:
    """What the result takes on disk."""
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = len(trained) == sum(1 for _ in model.parameters())
    return sum(p.numel() * p.element_size() for p in (model.parameters() if whole else trained))


def _checkpoint_bytes(optimizer: Any) -> int:
    """What a checkpoint takes on disk: what is trained, with masters and moments."""
    memory = optimizer.host_memory()
    weights = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
    return int(weights + memory.masters + memory.moments)
