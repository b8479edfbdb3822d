"""Draws the pictures of docs/evidence/gallery.md: make gallery

python tools/gallery.py [--out docs/images] [--only NAME] [--run FOLDER] [--quick]

Each is made from what the repository can compute again: the real engine on virtual devices, the planner, a report in
bench/results, and a run of the demo, which --run takes the folder of. --quick shows only that the program works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from roundpipe.plan.costs import load

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {
    "weights": "#3b6fb6",
    "gradients": "#e08a2e",
    "kept for the backward": "#c9b458",
    "values between layers": "#5aa469",
    "masters and moments": "#a05195",
}
MODEL, DEVICES, MICROBATCHES, CARD_GB = "llama3.1-8b", 8, 16, 24
SCALING = ROOT / "bench" / "results" / "2026-11-27-link-scaling.md"
NAMES = {
    "qwen3-1.7b": "Qwen3-1.7B",
    "llama3.1-8b": "Llama-3.1-8B",
    "gpt-oss-20b": "GPT-OSS-20B",
    "qwen3-32b": "Qwen3-32B",
    "qwen3-235b-lora": "Qwen3-235B, LoRA",
}


def save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    # Without dates and versions, the same figures have the same bytes.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def timeline(path: Path, options: argparse.Namespace) -> None:
    """One synchronous step on eight devices: 1F1B above, ours below, both run by the real engine."""
    command = [sys.executable, "bench/emulate.py", "--picture", str(path.resolve())]
    subprocess.run(command + ["--quick"] * options.quick, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def memory(path: Path, options: argparse.Namespace) -> None:
    """What one device holds in each stage of a plan, beside the whole training."""
    arguments = [
        "plan",
        MODEL,
        "--devices",
        str(DEVICES),
        "--mode",
        "sync",
        "--microbatches",
        str(MICROBATCHES),
        "--json",
    ]
    arguments += ["--search-seconds", "0"] * options.quick
    said = subprocess.run([sys.executable, "-m", "roundpipe", *arguments], check=True, capture_output=True, text=True)
    plan = json.loads(said.stdout)
    layers = load(MODEL).layers
    weights = sum(layer.weight_bytes for layer in layers)
    stages = [("forward", each["layers"]) for each in plan["forward"]]
    stages += [("backward" if number else "loss", each["layers"]) for number, each in enumerate(plan["backward"])]
    bars: list[tuple[str, dict[str, float]]] = []
    for phase, (first, end) in stages:
        own = layers[first:end]
        held: dict[str, float] = {"weights": sum(layer.weight_bytes for layer in own)}
        if phase != "forward":
            held["gradients"] = 2 * sum(layer.gradient_bytes for layer in own)  # sums in fp32
            held["kept for the backward"] = sum(layer.saved_bytes for layer in own)
        held["values between layers"] = 2 * max(layer.activation_bytes for layer in own)
        bars.append((phase, held))
    # 16-bit weights and gradients, what is left of the fp32 masters, and two fp32 moments: 14 bytes a parameter.
    whole: dict[str, float] = {"weights": weights, "gradients": weights, "masters and moments": 5 * weights}
    places = [*range(len(bars)), len(bars) + 3]
    widths = [0.8] * len(bars) + [4.0]
    bottoms = [0.0] * len(places)
    figure, axes = plt.subplots(figsize=(11, 5))
    for name, colour in COLOURS.items():
        heights = [held.get(name, 0) / 1e9 for _, held in [*bars, ("", whole)]]
        axes.bar(places, heights, bottom=bottoms, color=colour, label=name, width=widths)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.axhline(CARD_GB, color="#b03a2e", linewidth=1, linestyle="--")
    axes.text(0, CARD_GB, "a card of 24 GB", color="#b03a2e", ha="left", va="bottom")
    phases = [phase for phase, _ in bars]
    middles = [
        (phases.index(phase) + len(phases) - 1 - phases[::-1].index(phase)) / 2 for phase in dict.fromkeys(phases)
    ]
    axes.set_xticks([*middles, places[-1]], [*dict.fromkeys(phases), "the whole training,\non the host"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("GB")
    axes.legend(frameon=False, loc="upper left")
    axes.set_title(f"{NAMES[MODEL]}, all weights: what a device holds, stage by stage (predicted)", loc="left")
    save(figure, path)


def scaling(path: Path, options: argparse.Namespace) -> None:
    """Throughput of 1 to 16 devices, from the table of a report."""
    lines = [line.split("|")[1:-1] for line in SCALING.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines if len(line) == 8]
    counts = [int(cell.split()[0]) for cell in rows[0][1:6]]
    figure, sides = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    for axes, machine in zip(sides, ("server", "desktop"), strict=True):
        for case, *figures in rows[2:]:
            name, tokens, kind = case.split(", ")
            if kind == machine and tokens == "8,192 tokens":
                ours = [float(figure) for figure in figures[:5]]
                axes.plot(counts, ours, marker="o", markersize=4, label=f"{NAMES[name]}: {ours[-1]:.1f}")
        axes.plot(counts, counts, color="#888888", linewidth=1, linestyle="--", label="devices that never wait: 16")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_yticks(counts, [str(count) for count in counts])
        axes.set_xlabel("devices")
        axes.set_title(f"a {machine}", loc="left")
        axes.legend(frameon=False)
    sides[0].set_ylabel("throughput of how many devices (predicted)")
    save(figure, path)


def training(path: Path, options: argparse.Namespace) -> None:
    """The curves of a run's report: the demo's training on two cores."""
    folder = options.run
    if folder is None:
        folder = ROOT / "build" / "gallery" / "run"
        if not (folder / "metrics.jsonl").exists():
            command = [sys.executable, "-m", "roundpipe", "demo", "--out", str(folder)]
            subprocess.run(command + ["--steps", "4"] * options.quick, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    figure, axes = plt.subplots(2, 2, figsize=(11, 6), sharex=True)
    at = [line["step"] for line in steps]

    def curve(place: Any, title: str, value: Callable[[dict[str, Any]], float]) -> None:
        """Each step thin, and the mean of the last ten."""
        values = [value(line) for line in steps]
        means = [sum(part) / len(part) for part in (values[max(0, n - 9) : n + 1] for n in range(len(values)))]
        place.plot(at, values, color="#3b6fb6", linewidth=0.7, alpha=0.4)
        place.plot(at, means, color="#3b6fb6", linewidth=2)
        place.set_title(title, loc="left")

    curve(axes[0, 0], "loss; held out: dots", lambda line: line["loss"])
    held_out = [(line["step"], line["evaluation_loss"]) for line in lines if "evaluation_loss" in line]
    axes[0, 0].plot(*zip(*held_out, strict=True), "o", color="#b03a2e")
    curve(axes[0, 1], "norm of the gradients", lambda line: line["grad_norm"])
    axes[1, 0].plot(at, [line["learning_rate"] for line in steps], color="#3b6fb6", linewidth=2)
    axes[1, 0].set_title("learning rate", loc="left")
    axes[1, 1].plot(at, [line["device_bytes"] / 2**20 for line in steps], color="#3b6fb6", linewidth=2)
    axes[1, 1].set_title("memory of the fullest device, MiB", loc="left")
    for place in (axes[0, 1], axes[1, 1]):
        place.set_ylim(bottom=0)
    for place in axes[1]:
        place.set_xlabel("step")
    save(figure, path)


PICTURES = {"timeline": timeline, "memory": memory, "scaling": scaling, "training": training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument(
        "--run", type=Path, help="folder of a run of `roundpipe train`; by default, the demo trains one"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        PICTURES[name](options.out / f"{name}.png", options)
        print(f"wrote {options.out / name}.png")


if __name__ == "__main__":
    main()
