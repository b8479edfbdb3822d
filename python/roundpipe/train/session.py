"""One run of `roundpipe train`, from its configuration to its result."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import roundpipe
from roundpipe import _core
from roundpipe.checkpoints.runs.lines import Lines
from roundpipe.data.batches import check_positions
from roundpipe.data.pictures.processor import PictureProcessor
from roundpipe.data.tokenizer import padding_token_id
from roundpipe.train.config import TrainConfig
from roundpipe.train.config_file import read_config
from roundpipe.train.data import RunData, check_vocabulary, read_data
from roundpipe.train.interface.progress import Screen
from roundpipe.train.loop import Observer, Training
from roundpipe.train.model import check_run, load_model, pictures_of, save_result, tokenizer_of
from roundpipe.train.nodes import RunNodes, joined_nodes
from roundpipe.train.objectives import objective_of, require_room
from roundpipe.train.optimizer import make_optimizer, make_schedule
from roundpipe.train.report import RunReport, write_report
from roundpipe.train.run_folder import (
    CONFIG_FILE,
    DATA_FOLDER,
    METRICS_FILE,
    REPORT_FILE,
    SAMPLES_FILE,
    TENSORBOARD_FOLDER,
    RunFolder,
)
from roundpipe.train.samples import Samples, make_prompts
from roundpipe.train.shown import marked
from roundpipe.train.trackers import All, Metrics, TensorBoard, WeightsAndBiases, imported_tensorboard, imported_wandb

EXIT_OK, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 130


def run(config: TrainConfig, resume: bool) -> int:
    """Trains, with the other nodes if torchrun has started several, and returns the exit code.

    Raises:
        ValueError: a value, the data or the model do not fit; nothing has been trained.
    """
    # About kernels that are not used, and what PEFT asks transformers for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    if sys.stderr.isatty():
        print(f"roundpipe: reading {config.model or config.adapter}", file=sys.stderr)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits on every stream
    with joined_nodes() as nodes:
        try:
            return _run(config, resume, nodes)
        except (roundpipe.RoundPipeError, torch.OutOfMemoryError) as error:
            print(f"roundpipe{f' (rank {nodes.rank})' if nodes.size > 1 else ''}: {_by_option(error)}", file=sys.stderr)
            _core.wait_for_saves(config.out)
            if nodes.is_first and _core.latest_step(config.out) is not None:
                print(f"a checkpoint is there; go on with\n  {resume_command(config, nodes)}", file=sys.stderr)
            return EXIT_ERROR


def _run(config: TrainConfig, resume: bool, nodes: RunNodes) -> int:
    nodes.require_same(config)
    config.check_for(nodes.size)
    if config.devices is not None:
        roundpipe.devices(config.devices)
    config = _with_microbatches(config, resume, nodes)
    folder = RunFolder(config, resume, nodes)
    if config.tensorboard and nodes.is_first:
        imported_tensorboard()
    if config.wandb is not None and nodes.is_first:
        imported_wandb()
    nodes.require_own_devices()
    predicted = check_run(config)
    tokenizer = tokenizer_of(config)
    nodes.first(folder.begin)
    nodes.first(lambda: folder.require_space(*predicted))
    pictures = pictures_of(config, tokenizer)
    data = read_data(config, tokenizer, folder.path / DATA_FOLDER, nodes, folder.goes_on, pictures)
    if nodes.is_first:
        print(data.summary, flush=True)
        if note := config.note_of_few_steps(data.steps):
            print(note, flush=True)
        names = ["chosen, ", "rejected, "] if data.summary.pairs else [""]
        for which, example in zip(names, data.summary.examples[: len(names)], strict=True):
            print(f"a sample ({which}{example.where}), what is learnt is marked:\n{marked(example.pieces)}", flush=True)
    if data.outdated:
        print(
            f"[train] the data or the tokenizer has changed since the run began: it goes on with the samples in "
            f"{folder.path / DATA_FOLDER}, which were made then",
            file=sys.stderr,
        )
    config.rate_factor(data.steps)
    transformers.set_seed(config.seed)  # adapters and dropout begin at random
    if config.task == "reward" and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_token_id(tokenizer))  # as it is trained and saved
    model = load_model(config, padding_token_id(tokenizer))
    model.random_seed += nodes.rank  # nodes drop other values of their rows
    check_positions(model, data.train, data.held_out)
    nodes.first(lambda: check_vocabulary(model, folder.path / DATA_FOLDER))
    optimizer = make_optimizer(model, config)
    schedule = make_schedule(optimizer, config, data.steps)
    checkpoint_bytes = sum(nodes.each(lambda: _state_bytes(optimizer))) + _weights_bytes(optimizer)
    nodes.first(lambda: folder.require_space(_result_bytes(model), checkpoint_bytes))
    with folder.reserved(_result_bytes(model)) if nodes.is_first else contextlib.nullcontext():
        return _train(config, folder, model, optimizer, schedule, data, tokenizer, pictures, nodes)


def _by_option(error: Exception) -> str:
    """The error with the options of the command where it names those of the package."""
    text = str(error).replace("recompute_grain='layer'", "--recompute-by-layer")
    return re.sub(r"\bnum_microbatch=(\d+)", r"--microbatches \1", text)


def _with_microbatches(config: TrainConfig, resume: bool, nodes: RunNodes) -> TrainConfig:
    """A run that goes on, perhaps on more devices, has the microbatches that it began with, and so the same bits."""
    if config.microbatches is not None or nodes.size > 1:
        return config
    stored = Path(config.out) / CONFIG_FILE
    known = read_config(stored).get("microbatches") if resume and stored.is_file() else len(roundpipe.devices()) + 1
    return dataclasses.replace(config, microbatches=known)


def _train(
    config: TrainConfig,
    folder: RunFolder,
    model: Any,
    optimizer: Any,
    schedule: Any,
    data: RunData,
    tokenizer: Any,
    pictures: PictureProcessor | None,
    nodes: RunNodes,
) -> int:
    objective = objective_of(config, model, data, folder, nodes)
    require_room(config, objective, data, nodes)
    training = Training(config, model, optimizer, schedule, data, folder.path, nodes, objective)
    step = training.load() if folder.goes_on else 0
    with contextlib.ExitStack() as open_files:
        stop = open_files.enter_context(roundpipe.StopSignal())
        if not nodes.is_first:
            complete = training.run(All([]), lambda: stop.requested)
        else:
            screen = Screen(data.steps, step, config.log_every)
            if step:
                screen.say(f"going on after step {step} of {data.steps}")
            metrics = Lines(folder.path / METRICS_FILE, step)
            samples = Lines(folder.path / SAMPLES_FILE, step)
            observers: list[Observer] = [Metrics(metrics), screen]
            observers += _trackers(config, folder, open_files, step)
            prompts = make_prompts(config, tokenizer, data.held_out_samples, pictures)
            observers.append(Samples(model, tokenizer, prompts, config.sample_tokens, samples, screen.say))
            open_files.enter_context(screen)
            complete = training.run(All(observers), lambda: stop.requested)
    if not complete:
        _core.wait_for_saves(str(folder.path))
        if nodes.is_first:
            screen.say(
                f"stopped after {training.step} steps, which are saved; go on with\n  {resume_command(config, nodes)}"
            )
        first = next(number for number in nodes.each(lambda: stop.number) if number is not None)
        return EXIT_OK if first == signal.SIGTERM.value else EXIT_INTERRUPTED

    def finish() -> None:
        folder.release()
        save_result(model, tokenizer if pictures is None else pictures.processor, folder.result)
        screen.say(f"the trained {'adapter' if config.trains_adapters else 'model'} is in {folder.result}")
        if config.task == "reward" and config.trains_adapters:
            screen.say(f"  its base needs num_labels=1 and pad_token_id={model.config.pad_token_id}, see its README.md")
        pool = roundpipe.devices()
        of_nodes = f"{nodes.size} nodes; on rank 0: " if nodes.size > 1 else ""
        report = RunReport(
            config=config,
            metrics=metrics.lines,
            samples=samples.lines,
            timeline=[] if training.last_call is None else training.last_call.timeline().spans,
            step=_step_report(model),
            host=str(optimizer.host_memory()),
            data=str(data.summary),
            devices=of_nodes + pool.description + (", fp16 accumulation" if pool.fp16_accumulation else ""),
        )
        write_report(folder.path / REPORT_FILE, report)
        screen.say(f"the report is {folder.path / REPORT_FILE}")

    nodes.first(finish)
    return EXIT_OK


def _trackers(config: TrainConfig, folder: RunFolder, open_files: contextlib.ExitStack, step: int) -> list[Observer]:
    trackers: list[Observer] = []
    if config.tensorboard:
        board = TensorBoard(folder.path / TENSORBOARD_FOLDER, step)
        open_files.callback(board.close)
        trackers.append(board)
    if config.wandb is not None:
        run = WeightsAndBiases(config.wandb, config)
        open_files.callback(run.close)
        trackers.append(run)
    return trackers


def _step_report(model: Any) -> str:
    try:
        return str(model.step_report())
    except ValueError:  # too few steps have been measured
        return ""


def resume_command(config: TrainConfig, nodes: RunNodes) -> str:
    """The command that goes on with the run, for a shell."""
    command = shlex.join(["train", "--resume", "--out", config.out])
    return f"roundpipe {command}" if nodes.size == 1 else f"torchrun ... -m roundpipe {command}"


def _result_bytes(model: roundpipe.RoundPipe) -> int:
    """What the result takes on disk."""
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = len(trained) == sum(1 for _ in model.parameters())
    return sum(p.numel() * p.element_size() for p in (model.parameters() if whole else trained))


def _weights_bytes(optimizer: Any) -> int:
    """What the weights that are trained take in a checkpoint."""
    return sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])


def _state_bytes(optimizer: Any) -> int:
    """What this node's masters and moments take in a checkpoint."""
    memory = optimizer.host_memory()
    return int(memory.masters + memory.moments + memory.on_disk)
