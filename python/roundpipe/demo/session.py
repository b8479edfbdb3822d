"""One demo run from text to verdict: the steps of `roundpipe demo`, in order."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaForCausalLM

import roundpipe
from roundpipe.demo import proof
from roundpipe.demo.checkpoints import CHECKPOINTS_FOLDER, Checkpoints
from roundpipe.demo.conversations import write_conversations
from roundpipe.demo.corpus import SourceFile, load_corpus
from roundpipe.demo.guessing import guess
from roundpipe.demo.model import as_layers, build_llama, parameter_count, save_model, training_bytes
from roundpipe.demo.next_steps import going_on
from roundpipe.demo.options import VIRTUAL_DEVICES, DemoOptions
from roundpipe.demo.precision import choose_precision
from roundpipe.demo.report import (
    CURVE_FILE,
    METRICS_FILE,
    MetricsWriter,
    RunReporter,
    draw_curve,
    prepare_folder,
    read_run,
)
from roundpipe.demo.tokenizer import encode_files, train_tokenizer
from roundpipe.demo.training import FusedSteps, RandomBatches, check_length, held_out_batches, token_tables, train
from roundpipe.demo.verdict import exact, fits, learns, mebibytes, required_loss

MODEL_FOLDER, CHAT_FILE = "model", "chat.jsonl"
EXIT_OK, EXIT_NOT_TRUE, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED = 0, 1, 1, 130


def _say(console: Console, line: str) -> None:
    """Prints one line unfolded, so that it can be searched in a log."""
    console.print(line, markup=False, soft_wrap=True)


def _complain(error: str) -> None:
    Console(stderr=True, highlight=False).print(f"roundpipe: {error}", style="bold red", markup=False, soft_wrap=True)


def _default_folder() -> Path:
    return Path("runs") / datetime.now().strftime("demo-%Y%m%d-%H%M%S")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_spec(requested: str | None) -> str:
    """The requested devices, else ROUNDPIPE_DEVICES, else all accelerators, else the demo's virtual devices."""
    given = requested if requested is not None else os.environ.get("ROUNDPIPE_DEVICES") or None
    if given is not None:
        return given
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return VIRTUAL_DEVICES
    return ",".join(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count()))


@dataclass(frozen=True)
class _Text:
    """Training and held-out tokens, int64 [tokens], the size of the vocabulary, and the files that are trained on."""

    training: Tensor
    held_out: Tensor
    vocabulary: int
    tokenizer: Tokenizer
    files: tuple[SourceFile, ...]


def _prepare_text(console: Console, options: DemoOptions) -> _Text:
    _say(console, "text: reading Python's standard library, and learning a vocabulary from it")
    corpus = load_corpus(limit_bytes=options.corpus_bytes)
    tokenizer = train_tokenizer(file.text for file in corpus.training)
    text = _Text(
        encode_files(tokenizer, corpus.training),
        encode_files(tokenizer, corpus.held_out),
        tokenizer.get_vocab_size(),
        tokenizer,
        corpus.training,
    )
    check_length(text.training, options.sequence_length, "training")
    check_length(text.held_out, options.sequence_length, "held-out")
    _say(
        console,
        f"text: {len(corpus.training)} files to train on ({len(text.training):,} tokens), "
        f"{len(corpus.held_out)} held out ({len(text.held_out):,} tokens), vocabulary {text.vocabulary}",
    )
    return text


def _prepare_model(console: Console, options: DemoOptions, vocabulary: int, device: torch.device) -> LlamaForCausalLM:
    precision = choose_precision(options.dtype, device)
    if not math.isnan(precision.float32_gflops):
        _say(
            console,
            f"precision: {_name(precision.dtype)} (matmul GFLOP/s on {device.type}: "
            f"float32 {precision.float32_gflops:,.0f}, bfloat16 {precision.bfloat16_gflops:,.0f})",
        )
    llama = build_llama(vocabulary, options.sequence_length, options.seed, precision.dtype)
    parts = training_bytes(llama)
    _say(
        console,
        f"model: Llama, {parameter_count(llama) / 1e6:.2f} M parameters in {_name(llama.dtype)}; "
        + " + ".join(f"{name} {mebibytes(size)}" for name, size in parts.items())
        + f" = {mebibytes(sum(parts.values()))}",
    )
    return llama


def _prove(
    console: Console, metrics: MetricsWriter, layers: nn.Sequential, text: _Text, options: DemoOptions, device_spec: str
) -> tuple[proof.Room, list[proof.Comparison]]:
    """Runs, prints and records both proofs. Replaces the device pool."""
    pool = roundpipe.devices(device_spec)
    device = torch.device(pool.torch_devices[0])
    batches = proof.proof_batches(list(itertools.islice(RandomBatches(text.training, options), proof.STEPS)))
    _say(console, "proof: three steps of a plain PyTorch loop, written by hand")
    expected, needed_bytes = proof.measured_plain_steps(layers, batches, options, device)
    losses = " ".join(f"{float(loss):.4f}" for loss in expected.losses)
    if device.type == "cpu":
        _say(console, f"  on the host, without a limit: losses {losses}; it held {mebibytes(needed_bytes)} at its peak")
    else:
        _say(console, f"  on {device}: losses {losses}; weights, gradients and AdamW: {mebibytes(needed_bytes)}")
    room = proof.try_on_one_device(layers, batches, options, pool, needed_bytes)
    limit = f"on one device that may hold {mebibytes(room.limit_bytes)}"
    if not room.limit_bytes:
        _say(console, "  these devices have no limit of their own, so there is none to show")
    elif room.is_refused:
        _say(console, f"  {limit}: refused in {room.stage}\n    {room.message}")
    else:
        _say(console, f"  {limit}: it fits, so this device is no limit for it")
    metrics.write("room", {**asdict(room), "refused": room.is_refused})

    comparisons = []
    masters = ", their fp32 masters" if expected.masters else ""
    _say(console, "proof: the same steps with RoundPipe, compared bit for bit")
    for count in proof.DEVICE_COUNTS:
        found = proof.compare_with_ours(layers, batches, options, pool, count, expected)
        if found.is_exact:
            _say(
                console, f"  on {found.devices}: equal, all {parameter_count(layers):,} weights{masters} and the losses"
            )
        else:
            _say(
                console,
                f"  on {found.devices}: NOT equal: {found.differing:,} of {found.numbers:,} numbers differ, by "
                f"{found.largest:.3g} at most, in {found.where}",
            )
        metrics.write("comparison", {**asdict(found), "exact": found.is_exact})
        comparisons.append(found)
    return room, comparisons


@contextlib.contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Disables attention kernels whose backward adds up in an order that varies between runs."""
    with contextlib.nullcontext() if device.type == "cpu" else sdpa_kernel(SDPBackend.MATH):
        yield


def _print_peaks(console: Console) -> int:
    """Prints each device's peak; returns the largest one, in bytes."""
    report = roundpipe.devices().memory_report()
    peaks = ", ".join(f"{device['name']} {mebibytes(device['peak_bytes'])}" for device in report)
    _say(console, f"most memory in use: {peaks}")
    return max(int(device["peak_bytes"]) for device in report)


@contextlib.contextmanager
def _stop_on_interrupt(reporter: RunReporter, console: Console) -> Iterator[None]:
    """Makes the first Ctrl+C ask the loop to stop after its step; the second one interrupts at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if reporter.stop_requested:
            raise KeyboardInterrupt
        reporter.stop_requested = True
        _say(console, "stopping after this step; press Ctrl+C again to stop at once")

    try:
        previous = signal.signal(signal.SIGINT, on_signal)
    except ValueError:  # Not the main thread: the caller handles signals.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _as_before(options: DemoOptions, folder: Path) -> DemoOptions:
    """The options of the run in `folder`, which must be these; only the type of the weights may be left to it."""
    run = read_run(folder)
    if run is None:
        return options
    options = replace(options, dtype=run["dtype"]) if options.dtype == "auto" else options
    for name, value in json.loads(json.dumps(asdict(options))).items():
        before = run.get(name)
        if before != value:
            raise ValueError(
                f"[demo] {name} is {value}, and {before} in the run in {folder}; expected the same, since --resume "
                "goes on with that run; give its options, or another --out"
            )
    return options


def run_demo(
    options: DemoOptions,
    devices: str | None,
    out: Path | None,
    save_every: int | None = None,
    resume: bool = False,
) -> int:
    """Runs the demo and returns the exit code.

    Args:
        options: of the run.
        devices: the pool; None for the default.
        out: the run's folder; None for a new one.
        save_every: a checkpoint after this many steps, in `checkpoints/` of the run's folder; None for none.
        resume: go on from the newest checkpoint in `out`, if there is one.

    Raises:
        ValueError: for a caller's mistake, before any training.
    """
    if save_every is not None and save_every < 1:
        raise ValueError(f"[demo] --save-every is {save_every}; expected at least 1; give a positive number")
    if resume and out is None:
        raise ValueError("[demo] --resume is given without --out; expected the run's folder; give --out FOLDER")
    console = Console(highlight=False)
    # cuBLAS gives the same bits on every stream only with fixed workspaces; read when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    folder = prepare_folder(out if out is not None else _default_folder(), resume)
    if resume:
        options = _as_before(options, folder)
    device_spec = _device_spec(devices)
    pool = roundpipe.devices(device_spec)
    _say(console, f"devices: {pool.description} ({len(pool)})")
    text = _prepare_text(console, options)
    llama = _prepare_model(console, options, text.vocabulary, torch.device(pool.torch_devices[0]))
    layers = as_layers(llama)
    with MetricsWriter(folder / METRICS_FILE, resume) as metrics:
        metrics.write(
            "run",
            {
                **asdict(options),
                "dtype": _name(next(layers.parameters()).dtype),
                "devices": pool.description,
                "vocabulary": text.vocabulary,
                "parameters": parameter_count(layers),
            },
        )
        try:
            code = _prove_and_train(console, metrics, folder, layers, text, options, device_spec, save_every, resume)
        except torch.OutOfMemoryError as error:
            _complain(
                f"[demo] a device ran out of memory: {error}; expected the layers to fit one by one; "
                "give the devices more memory, or lower --batch-size or --sequence-length"
            )
            return EXIT_OUT_OF_MEMORY
    if code != EXIT_INTERRUPTED:
        save_model(folder / MODEL_FOLDER, llama, text.tokenizer)
        write_conversations(folder / CHAT_FILE, text.files)
        _say(console, f"run folder: {folder} ({METRICS_FILE}, {CURVE_FILE}, {MODEL_FOLDER}, {CHAT_FILE})")
        _say(console, "")
        _say(console, going_on(Path.cwd(), folder / MODEL_FOLDER, folder / CHAT_FILE, options.sequence_length))
    return code


def _prove_and_train(
    console: Console,
    metrics: MetricsWriter,
    folder: Path,
    layers: nn.Sequential,
    text: _Text,
    options: DemoOptions,
    device_spec: str,
    save_every: int | None,
    resume: bool,
) -> int:
    with _repeatable(torch.device(roundpipe.devices().torch_devices[0])):
        room, comparisons = _prove(console, metrics, layers, text, options, device_spec)

    # A new pool, so that peaks cover only the training.
    roundpipe.devices(device_spec)
    held_out = held_out_batches(text.held_out, options)
    guessing = guess(text.training, held_out, text.vocabulary)
    metrics.write("guessing", asdict(guessing))
    _say(
        console,
        f"training: {options.steps} steps of {options.batch_size} x {options.sequence_length} tokens; guessing has a "
        f"held-out loss of {guessing.uniform_loss:.3f}, or {guessing.frequency_loss:.3f} by frequency, and "
        f"{guessing.most_frequent_accuracy:.1%} right with the most frequent token",
    )
    model = roundpipe.RoundPipe(layers)
    steps = FusedSteps(model, token_tables(layers), options)
    reporter = RunReporter(metrics, console, options.steps)
    batches = RandomBatches(text.training, options)
    checkpoints = Checkpoints(folder / CHECKPOINTS_FOLDER, save_every, steps, batches, reporter)
    checkpoints.begin(resume)
    if resume:
        _say(console, f"resumed: {checkpoints.progress.step} steps were made before")
    interrupted = False
    try:
        with _stop_on_interrupt(reporter, console), reporter:
            train(model, steps, batches, held_out, options, reporter, checkpoints)
        interrupted = reporter.stop_requested
    except KeyboardInterrupt:
        interrupted = True
    finally:
        draw_curve(
            folder / CURVE_FILE,
            reporter.step_records,
            reporter.evaluation_records,
            guessing,
            required_loss(guessing, options),
        )
    if interrupted:
        _say(console, f"stopped after {len(reporter.step_records)} steps; what is there: {folder}")
        return EXIT_INTERRUPTED

    peak_bytes = _print_peaks(console)
    _say(console, str(steps.optimizer.host_memory()))
    first, last = reporter.evaluation_records[0], reporter.evaluation_records[-1]
    verdicts = (fits(room, peak_bytes), exact(comparisons), learns(first, last, guessing, options))
    _say(console, "")
    for verdict in verdicts:
        _say(console, verdict.line)
    _say(console, "")
    complaints = [verdict.complaint for verdict in verdicts if verdict.complaint]
    for complaint in complaints:
        _complain(complaint)
    return EXIT_NOT_TRUE if complaints else EXIT_OK
