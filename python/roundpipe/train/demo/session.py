"""One demo run from text to verdict: the steps of `roundpipe demo`, in order."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

import roundpipe
from roundpipe.checkpoints.runs.lines import read_lines
from roundpipe.data.records.views import held_out_records
from roundpipe.huggingface.quiet import without_progress_bars
from roundpipe.train.config import TrainConfig
from roundpipe.train.config_file import read_config
from roundpipe.train.data import RunData, read_data
from roundpipe.train.demo import proof
from roundpipe.train.demo.corpus import load_corpus, write_conversations, write_texts
from roundpipe.train.demo.next_steps import going_on
from roundpipe.train.demo.preset import (
    CHAT_FILE,
    FULL_TEXT_BYTES,
    LENGTH,
    TEXT_BYTES,
    TEXT_FILE,
    UNTRAINED_FOLDER,
    VIRTUAL_DEVICES,
    demo_config,
    is_judged,
)
from roundpipe.train.demo.untrained import build_llama, fast_dtype, save_model, train_tokenizer
from roundpipe.train.demo.verdict import exact, fits, guess, learns, mebibytes, right_share
from roundpipe.train.model import tokenizer_of
from roundpipe.train.nodes import RunNodes
from roundpipe.train.run_folder import CONFIG_FILE, DATA_FOLDER, METRICS_FILE, RunFolder
from roundpipe.train.session import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, run


def _say(line: str) -> None:
    print(line, flush=True)


def _complain(error: object) -> None:
    print(f"roundpipe: {error}", file=sys.stderr, flush=True)


def _device_spec() -> str:
    """ROUNDPIPE_DEVICES, else all accelerators, else the demo's virtual devices."""
    if given := os.environ.get("ROUNDPIPE_DEVICES"):
        return given
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return VIRTUAL_DEVICES
    return ",".join(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count()))


def _configured(out: Path, full: bool, resume: bool, values: dict[str, Any]) -> TrainConfig:
    """The run's configuration: that of the run in the folder, if it goes on, else the demo's; with other values."""
    config = demo_config(out, full, **values)
    if not (resume and (out / CONFIG_FILE).exists()):
        return config
    given = {"model", "data", "out", *values, *(["steps"] if full else [])}
    return TrainConfig(**{**read_config(out / CONFIG_FILE), **{name: getattr(config, name) for name in given}})


def _write_what_a_user_has(config: TrainConfig, full: bool) -> None:
    """Writes texts, conversations and an untrained model, as far as they are not there: a run may have been stopped."""
    out = Path(config.out)
    if (out / UNTRAINED_FOLDER).exists():
        return
    _say("text: reading Python's standard library, and learning a vocabulary from it")
    files = load_corpus(FULL_TEXT_BYTES if full else TEXT_BYTES)
    out.mkdir(parents=True, exist_ok=True)
    write_texts(out / TEXT_FILE, files)
    held_out = set(held_out_records(len(files), config.held_out, config.seed).tolist())
    learnt = [file for number, file in enumerate(files) if number not in held_out]
    write_conversations(out / CHAT_FILE, learnt)
    tokenizer = train_tokenizer(file.text for file in learnt)
    dtype = getattr(torch, config.dtype or "float32")
    save_model(out / UNTRAINED_FOLDER, build_llama(tokenizer.get_vocab_size(), LENGTH, config.seed, dtype), tokenizer)


def _read(config: TrainConfig, resume: bool) -> RunData:
    """The data of the run as padded rows, of one epoch in the order of the training."""
    padded = replace(config, rows="padded", steps=None)
    return read_data(padded, tokenizer_of(config), Path(config.out) / DATA_FOLDER, RunNodes.alone(), resume)


def _loaded(folder: Path) -> Any:
    loading: Any = AutoModelForCausalLM
    with without_progress_bars():
        return loading.from_pretrained(folder, dtype="auto")


def run_demo(out: Path | None, full: bool, resume: bool, values: dict[str, Any]) -> int:
    """Runs the demo and returns the exit code.

    Args:
        out: the run's folder; None for a new one.
        full: train for longer, on more text.
        resume: go on from the newest checkpoint in `out`, if there is one.
        values: of the configuration, other than the demo's.

    Raises:
        ValueError: for a caller's mistake, before any training.
    """
    if resume and out is None:
        raise ValueError("[demo] --resume is given without --out; expected the run's folder; give --out FOLDER")
    # cuBLAS gives the same bits on every stream only with fixed workspaces; read when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    out = out if out is not None else Path("runs") / datetime.now().strftime("demo-%Y%m%d-%H%M%S")
    config = _configured(out, full, resume, values)
    folder = RunFolder(config, resume, RunNodes.alone())  # refuses what the training would, before the proof
    config = replace(config, devices=config.devices or _device_spec())
    assert config.devices is not None
    pool = roundpipe.devices(config.devices)
    _say(f"devices: {pool.description} ({len(pool)})")
    if config.dtype is None:
        dtype, measured = fast_dtype(torch.device(pool.torch_devices[0]))
        config = replace(config, dtype="bfloat16" if dtype == torch.bfloat16 else "float32")
        _say(f"precision: {config.dtype} ({measured})")
    _write_what_a_user_has(config, full)
    data = _read(config, resume)
    try:
        room, comparisons = _prove(config, _full_rows(data))
    except (roundpipe.RoundPipeError, torch.OutOfMemoryError) as error:
        _complain(error)
        return EXIT_ERROR
    _say(f"training: roundpipe train --config {out / CONFIG_FILE}")
    code = run(config, resume=True)  # also a first time, as the folder holds what was written above
    if code == EXIT_INTERRUPTED:
        _say(f"or, to see the verdict as well:\n  roundpipe demo --resume --out {out}")
    if code != EXIT_OK or not folder.result.exists():
        return code

    metrics = read_lines(out / METRICS_FILE)
    data = _read(config, resume=True)
    model = _loaded(folder.result)
    guessing = guess(data.train, data.held_out, model.config.vocab_size)
    share = right_share(model, data.held_out)
    verdicts = (fits(room, metrics), exact(comparisons), learns(metrics, share, guessing, is_judged(config)))
    _say("")
    for verdict in verdicts:
        _say(verdict.line)
    _say("")
    for verdict in verdicts:
        if verdict.complaint:
            _complain(verdict.complaint)
    _say(going_on(Path.cwd(), folder.result, out / CHAT_FILE, LENGTH))
    return EXIT_ERROR if any(verdict.complaint for verdict in verdicts) else EXIT_OK


def _full_rows(data: RunData) -> list[Tensor]:
    """The first rows without padding, as batches of the proof: int64 [rows, tokens]."""
    rows: list[Tensor] = []
    for batch in data.train:
        rows += batch["input_ids"][batch["attention_mask"].all(1)].unsqueeze(1)
        if len(rows) >= proof.STEPS * proof.ROWS:
            break
    return list(torch.split(torch.cat(rows)[: proof.STEPS * proof.ROWS], proof.ROWS))


def _prove(config: TrainConfig, batches: list[Tensor]) -> tuple[proof.Room, list[proof.Comparison]]:
    """Runs and prints both proofs. Replaces the device pool."""
    pool = roundpipe.devices()
    device = torch.device(pool.torch_devices[0])
    llama = _loaded(Path(config.out) / UNTRAINED_FOLDER).train()
    rule = {
        "lr": config.rule_options["lr"],
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
    }
    parts, numbers = proof.training_bytes(llama), sum(parameter.numel() for parameter in llama.parameters())
    _say(
        f"model: Llama, {numbers / 1e6:.2f} M parameters in {config.dtype}; "
        + " + ".join(f"{name} {mebibytes(size)}" for name, size in parts.items())
        + f" = {mebibytes(sum(parts.values()))}"
    )
    with _repeatable(device):
        _say("proof: three steps of a plain PyTorch loop, written by hand")
        expected, needed_bytes = proof.measured_plain_steps(llama, batches, rule, device)
        losses = " ".join(f"{float(loss):.4f}" for loss in expected.losses)
        if device.type == "cpu":
            _say(f"  on the host, without a limit: losses {losses}; it held {mebibytes(needed_bytes)} at its peak")
        else:
            _say(f"  on {device}: losses {losses}; weights, gradients and AdamW: {mebibytes(needed_bytes)}")
        room = proof.try_on_one_device(llama, batches, rule, pool, needed_bytes)
        limit = f"on one device that may hold {mebibytes(room.limit_bytes)}"
        if not room.limit_bytes:
            _say("  these devices have no limit of their own, so there is none to show")
        elif room.is_refused:
            _say(f"  {limit}: refused in {room.stage}\n    {room.message}")
        else:
            _say(f"  {limit}: it fits, so this device is no limit for it")

        comparisons = []
        masters = ", their fp32 masters" if expected.masters else ""
        _say("proof: the same steps with RoundPipe, compared bit for bit")
        for count in proof.DEVICE_COUNTS:
            found = proof.compare_with_ours(llama, batches, rule, pool, count, expected)
            if found.is_exact:
                _say(f"  on {found.devices}: equal, all {numbers:,} weights{masters} and the losses")
            else:
                _say(
                    f"  on {found.devices}: NOT equal: {found.differing:,} of {found.numbers:,} numbers differ, by "
                    f"{found.largest:.3g} at most, in {found.where}"
                )
            comparisons.append(found)
    return room, comparisons


@contextlib.contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Disables attention kernels whose backward adds up in an order that varies between runs."""
    with contextlib.nullcontext() if device.type == "cpu" else sdpa_kernel(SDPBackend.MATH):
        yield
