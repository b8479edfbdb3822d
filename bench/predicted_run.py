"""Does `roundpipe train` take the time and the memory that its dry run predicts?

A Llama of random weights learns Python's own sources in rows of one length: fp32 weights, 8-bit moments, gradients that
are used at once, one virtual device with less memory than the model's weights. The first step sets everything up and
measures its layers, the second is the first one with a plan from measured times: the median is of those after them. The
process also holds the virtual device's memory, torch and transformers. Large blocks of the virtual device are mapped
anew each time, which a card's are not: torch is told to ask for huge pages (THP_MEM_ALLOC_ENABLE), so that this takes
little of the step. The program fails where more than the bounds are between predicted and measured.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from support.report import Report, parser
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe import _core
from roundpipe.train.demo.corpus import load_corpus
from roundpipe.train.demo.untrained import save_model, train_tokenizer

TIME_BOUND, HOST_BOUND, HOST_BOUND_BYTES = 0.10, 0.02, 200e6
LEAST_STEPS = 3
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


def prepare(folder: Path, layers: int, width: int, text_bytes: int) -> int:
    """Writes a model's folder and a file of texts; the number of parameters."""
    texts = [file.text for file in load_corpus(text_bytes)]
    tokenizer = train_tokenizer(texts, 16_000 if width > 1000 else 512)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 128 or 1,
        num_key_value_heads=width // 256 or 1,
        vocab_size=tokenizer.get_vocab_size(),
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # half the file; trained in fp32
    save_model(folder / "model", model, tokenizer)
    (folder / "texts.jsonl").write_text(json.dumps({"text": "\n".join(texts)}) + "\n")  # cut into rows, each full
    return sum(parameter.numel() for parameter in model.parameters())


def run(folder: Path, options: list[str], *more: str) -> str:
    """What `roundpipe train` prints."""
    command = [sys.executable, "-m", "roundpipe", "train", "--model", str(folder / "model")]
    command += ["--data", str(folder / "texts.jsonl"), "--out", str(folder / "run"), *options, *more]
    environment = os.environ | HUGE_PAGES
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode != 0:
        raise SystemExit(ended.stdout + ended.stderr)
    return ended.stdout


def predicted_bytes(text: str, line: str) -> int:
    found = re.search(rf"^{line} +([\d.]+ \w+) of ", text, re.MULTILINE)
    assert found is not None, text
    return int(_core.parse_bytes(found[1]))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=22)
    arguments.add_argument("--width", type=int, default=2048)
    arguments.add_argument("--length", type=int, default=320, help="tokens of a row; two of them are a batch")
    arguments.add_argument("--steps", type=int, default=7)
    arguments.add_argument("--device-memory", default="1.62GB")
    arguments.add_argument("--host-memory", default="8GB")
    chosen = arguments.parse_args()
    if chosen.quick:
        chosen.layers, chosen.width, chosen.length, chosen.steps = 2, 64, 32, LEAST_STEPS
    report = Report("A run of `roundpipe train` beside its dry run", chosen.out)
    base = _core.resident_bytes()  # of a process that has imported what a run imports
    options = ["--dtype", "float32", "--moments", "8bit", "--gradients-at-once", "--clip-by", "last_norm"]
    options += ["--length", str(chosen.length), "--batch-tokens", str(2 * chosen.length), "--microbatches", "2"]
    options += ["--device-memory", chosen.device_memory, "--host-memory", chosen.host_memory, "--devices", "virtual:1"]
    options += ["--steps", str(chosen.steps), "--held-out", "0", "--samples", "0", "--log-every", "1"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = prepare(folder, chosen.layers, chosen.width, 1_200_000 if chosen.quick else 2_000_000)
        report(f"{parameters / 1e6:,.1f} million parameters; `roundpipe train` with `{' '.join(options)}`.")
        report("")
        said = run(folder, options, "--dry-run")
        step = re.search(r"^step +([\d,.]+) ms", said, re.MULTILINE)
        assert step is not None, said
        predicted_s = float(step[1].replace(",", "")) / 1000
        run(folder, options)
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        steps = [line for line in lines if "loss" in line]
    seconds = [line["seconds"] for line in steps]
    measured_s = statistics.median(seconds[2:])
    device = predicted_bytes(said, "device"), max(line["device_bytes"] for line in steps)
    host = predicted_bytes(said, "host"), max(line["host_bytes"] for line in steps) - device[1] - base
    apart = {"seconds of a step": measured_s / predicted_s - 1, "host memory": host[1] / host[0] - 1}
    rows = [
        ["seconds of a step", f"{predicted_s:.1f}", f"{measured_s:.1f}", f"{100 * apart['seconds of a step']:+.1f} %"],
        ["device memory, GB", *(f"{size / 1e9:.3f}" for size in device), f"{100 * (device[1] / device[0] - 1):+.1f} %"],
        ["host memory, GB", *(f"{size / 1e9:.3f}" for size in host), f"{100 * apart['host memory']:+.1f} %"],
    ]
    report.table(["", "predicted", "measured", "apart"], rows)
    report(f"Seconds of each step: {', '.join(f'{each:.1f}' for each in seconds)}.")
    report(f"Host memory without {(device[1] + base) / 1e9:.2f} GB of the virtual device, torch and transformers.")
    report(f"Device memory: within {chosen.device_memory}, the run keeps the activations of as many of the last layers")
    report("as fit, where the dry run's plan may recompute them.")
    report("")
    report.close()
    if chosen.quick:
        return
    slack = HOST_BOUND * host[0] + HOST_BOUND_BYTES
    if abs(apart["seconds of a step"]) > TIME_BOUND or host[1] - host[0] > slack:
        raise SystemExit("further apart than allowed")


if __name__ == "__main__":
    main()
