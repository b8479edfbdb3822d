"""One demo run from text to verdict: what `roundpipe demo` does, in order."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import roundpipe
from roundpipe.demo.corpus import load_corpus
from roundpipe.demo.model import as_layers, build_llama, continue_text, parameter_count, training_bytes
from roundpipe.demo.options import VIRTUAL_DEVICES, DemoOptions
from roundpipe.demo.precision import choose_precision
from roundpipe.demo.report import (
    CURVE_FILE,
    METRICS_FILE,
    MetricsWriter,
    RunReporter,
    draw_curve,
    prepare_folder,
)
from roundpipe.demo.tokenizer import encode_files, train_tokenizer
from roundpipe.demo.training import FusedSteps, check_length, held_out_batches, random_batches, token_tables, train

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

EXIT_OK, EXIT_NOT_LEARNED, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED = 0, 1, 1, 130

PROMPT = "def read_lines(path):\n"
PROMPT_NEW_TOKENS = 64


def _say(console: Console, line: str) -> None:
    """Prints one line as it is, never folded, so that it can be searched in a log."""
    console.print(line, markup=False, soft_wrap=True)


def _complain(error: str) -> None:
    Console(stderr=True, highlight=False).print(f"roundpipe: {error}", style="bold red", markup=False, soft_wrap=True)


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _default_folder() -> Path:
    return Path("runs") / datetime.now().strftime("demo-%Y%m%d-%H%M%S")


def _open_devices(spec: str | None) -> torch.device:
    """Sets the device pool; returns the kind of device that will compute."""
    if spec is None and torch.accelerator.is_available():
        return torch.device(torch.accelerator.current_accelerator() or "cpu")
    chosen = VIRTUAL_DEVICES if spec is None else spec
    roundpipe.devices(chosen)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None or chosen.startswith("virtual") else accelerator


def _print_memory(console: Console, llama: LlamaForCausalLM) -> None:
    """Says how the model's training state compares with what one device may hold."""
    parts = training_bytes(llama)
    needed = sum(parts.values())
    dtype = str(llama.dtype).removeprefix("torch.")
    _say(
        console,
        f"model: Llama, {parameter_count(llama) / 1e6:.2f} M parameters in {dtype}; "
        + " + ".join(f"{name} {_mebibytes(size)}" for name, size in parts.items())
        + f" = {_mebibytes(needed)}",
    )
    limits = [device["limit_bytes"] for device in roundpipe.devices().memory_report()]
    capped = [limit for limit in limits if limit > 0]
    if not capped:
        _say(console, "memory: the devices have no limit of their own")
    elif max(capped) < needed:
        _say(
            console,
            f"memory: each device may hold {_mebibytes(max(capped))}, {max(capped) / needed:.0%} of that; "
            "the weights stay in host memory and the layers visit the devices",
        )
    else:
        _say(console, f"memory: each device may hold {_mebibytes(max(capped))}, enough for all of it")


def _print_peaks(console: Console) -> None:
    for device in roundpipe.devices().memory_report():
        limit = f" of {_mebibytes(device['limit_bytes'])}" if device["limit_bytes"] > 0 else ""
        _say(console, f"  {device['name']}: most memory in use {_mebibytes(device['peak_bytes'])}{limit}")


def _print_continuation(
    console: Console, title: str, llama: LlamaForCausalLM, tokenizer: Tokenizer, options: DemoOptions
) -> None:
    prompt = torch.tensor(tokenizer.encode(PROMPT).ids)
    produced = continue_text(llama, prompt, PROMPT_NEW_TOKENS, options.seed)
    text = Text(PROMPT, style="bold") + Text(tokenizer.decode(produced.tolist()))
    console.print(Panel(text, title=title, title_align="left"))


@contextlib.contextmanager
def _stop_on_interrupt(reporter: RunReporter, console: Console) -> Iterator[None]:
    """The first Ctrl+C lets the current step finish; the second one interrupts at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if reporter.stop_requested:
            raise KeyboardInterrupt
        reporter.stop_requested = True
        _say(console, "stopping after this step; press Ctrl+C again to stop at once")

    try:
        previous = signal.signal(signal.SIGINT, on_signal)
    except ValueError:  # Not the main thread: signals are the caller's business.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _verdict(console: Console, before: float, after: float, uniform_loss: float, options: DemoOptions) -> int:
    required = uniform_loss * (1 - options.required_fall)
    _say(
        console,
        f"held-out loss: {before:.3f} before, {after:.3f} after; "
        f"{1 - after / uniform_loss:.0%} below ln(vocabulary) = {uniform_loss:.3f}",
    )
    if after <= required:
        return EXIT_OK
    if not options.is_default_length:
        _say(console, f"(a run of the default length is required to reach {required:.3f})")
        return EXIT_OK
    _complain(
        f"[demo] the held-out loss ended at {after:.3f}; expected at most {required:.3f}; "
        "the pipeline or the settings are at fault, please report this run"
    )
    return EXIT_NOT_LEARNED


def run_demo(options: DemoOptions, device_spec: str | None, out: Path | None) -> int:
    """Runs the demo and returns the exit code. Raises ValueError for a caller's mistake, before any training."""
    console = Console(highlight=False)
    folder = prepare_folder(out if out is not None else _default_folder())
    compute_device = _open_devices(device_spec)
    pool = roundpipe.devices()
    _say(console, f"devices: {pool.description} ({len(pool)})")

    corpus = load_corpus()
    tokenizer = train_tokenizer(file.text for file in corpus.training)
    training_text = encode_files(tokenizer, corpus.training)
    held_out_text = encode_files(tokenizer, corpus.held_out)
    check_length(training_text, options.sequence_length, "training")
    check_length(held_out_text, options.sequence_length, "held-out")
    vocabulary = tokenizer.get_vocab_size()
    _say(
        console,
        f"text: Python's standard library, {len(corpus.training)} files to train on ({len(training_text):,} tokens), "
        f"{len(corpus.held_out)} held out ({len(held_out_text):,} tokens), vocabulary {vocabulary}",
    )

    precision = choose_precision(options.dtype, compute_device)
    if not math.isnan(precision.float32_gflops):
        _say(
            console,
            f"precision: {str(precision.dtype).removeprefix('torch.')} (matmul GFLOP/s on {compute_device.type}: "
            f"float32 {precision.float32_gflops:,.0f}, bfloat16 {precision.bfloat16_gflops:,.0f})",
        )
    longest = max(options.sequence_length, len(tokenizer.encode(PROMPT).ids) + PROMPT_NEW_TOKENS)
    llama = build_llama(vocabulary, longest, options.seed, precision.dtype)
    _print_memory(console, llama)
    _print_continuation(console, "continuation before training", llama, tokenizer, options)

    layers = as_layers(llama)
    model = roundpipe.RoundPipe(layers)
    steps = FusedSteps(model, token_tables(layers), options)
    uniform_loss = math.log(vocabulary)
    required_loss = uniform_loss * (1 - options.required_fall)
    interrupted = False
    with MetricsWriter(folder / METRICS_FILE) as metrics:
        metrics.write(
            "run",
            {
                **asdict(options),
                "dtype": str(precision.dtype).removeprefix("torch."),
                "devices": pool.description,
                "vocabulary": vocabulary,
                "parameters": parameter_count(llama),
            },
        )
        reporter = RunReporter(metrics, console, options.steps)
        try:
            with _stop_on_interrupt(reporter, console), reporter:
                train(
                    model,
                    steps,
                    random_batches(training_text, options),
                    held_out_batches(held_out_text, options),
                    options,
                    reporter,
                )
            interrupted = reporter.stop_requested
        except KeyboardInterrupt:
            interrupted = True
        except torch.OutOfMemoryError as error:
            _complain(
                f"[demo] a device ran out of memory: {error}; expected the layers to fit one by one; "
                "give the devices more memory, or lower --batch-size or --sequence-length"
            )
            return EXIT_OUT_OF_MEMORY
        finally:
            draw_curve(
                folder / CURVE_FILE,
                reporter.step_records,
                reporter.evaluation_records,
                uniform_loss,
                required_loss,
            )
    if interrupted:
        _say(console, f"stopped after {len(reporter.step_records)} steps; what is there: {folder}")
        return EXIT_INTERRUPTED

    _print_continuation(console, "continuation after training", llama, tokenizer, options)
    _print_peaks(console)
    _say(console, str(steps.optimizer.host_memory()))
    first, last = reporter.evaluation_records[0], reporter.evaluation_records[-1]
    code = _verdict(console, first.held_out_loss, last.held_out_loss, uniform_loss, options)
    _say(console, f"run folder: {folder} ({METRICS_FILE}, {CURVE_FILE})")
    return code
