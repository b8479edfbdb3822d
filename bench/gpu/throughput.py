"""How many tokens a second do cards train, against the published package on the same cards?

A model of the published sizes with random weights in bf16 (235B: adapters alone are trained): the same batch, sequence
length, microbatches and recompute grain, in processes of their own that run one after the other. "ours" is the model as
transformers has it, followed, with our fused AdamW. The published package trains a chain of the same model's parts with
its own chunked loss and Adam (its preset for this class needs an older transformers). "ours, same script" trains such a
chain by the same script, with a plain loss. Each runs with asynchronous and with synchronous steps, without a cap and
with the first card capped.

The losses are compared step by step. They start from the same weights, but kernels of the losses differ in rounding, so
the bound is that of bf16. Host bytes a parameter: what the machine's free memory sank by, page-locked memory included;
the peak of resident memory; and what our own account says.

    python bench/gpu/throughput.py --peer DIR [--model 1.7B|4B|8B|20B|32B|235B] [--devices cuda:0,cuda:1]

DIR holds the published package: pip install --target DIR --no-deps roundpipe==0.1.1. It takes every card that it sees:
hide the others from it with CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.accelerator import default_device, describe, has_cuda
from support.language_models import SHAPES, TINY_OF
from support.processes import RunError, train
from support.report import Report, parser
from support.training_request import Request, Result

# Relative distance of two losses of about 12 that were summed in bf16 by different kernels.
BOUND = 2**-8
RANK = 16  # of adapters


def cells(name: str, cap: str, result: Result) -> list[str]:
    count = result.parameters
    own = f"{result.host_memory_bytes / count:.2f}" if result.host_memory_bytes else "-"
    return [
        name,
        cap,
        *(f"{result.tokens_per_s[mode]:,.0f}" for mode in ("async", "sync")),
        f"{result.losses[-1]:.4f}",
        f"{result.device_peak_bytes / 1e9:.2f}",
        f"{result.machine_bytes / count:.1f}",
        f"{result.resident_bytes / count:.1f}",
        own,
    ]


def main() -> None:
    arguments = parser(__doc__, needs=("psutil",))
    arguments.add_argument("--peer", type=Path, help="folder of the published package; without it, ours alone")
    arguments.add_argument("--model", choices=[*TINY_OF], default="1.7B")
    arguments.add_argument("--devices", help="such as cuda:0,cuda:1. [default: the first accelerator]")
    arguments.add_argument("--tokens", type=int, default=4096, help="of a row")
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--microbatches", type=int, default=4)
    arguments.add_argument("--grain", choices=["stage", "layer"], default="stage")
    arguments.add_argument("--memory-gb", type=float, default=24, help="the cap of the capped runs")
    arguments.add_argument("--same-script", action="store_true", help="ours also by the script of the peer")
    options = arguments.parse_args()

    device = options.devices or default_device("virtual:2")
    request = Request(
        way="followed",
        peer=False,
        shape=options.model,
        device=device,
        tokens=options.tokens,
        rows=options.rows,
        microbatches=options.microbatches,
        grain=options.grain,
        lora_rank=RANK if SHAPES[options.model].lora else 0,
    )
    caps = {"none": 0, f"{options.memory_gb:g} GB": int(options.memory_gb * 1e9)}
    if options.quick:
        request = replace(request, shape=TINY_OF[options.model], tokens=32, rows=4, microbatches=2, steps=1, warm_up=1)
        caps = {"none": 0}
    chain = replace(request, way="chain")
    runs = {"ours": (request, None)}
    if options.same_script:
        runs["ours, same script"] = (chain, None)
    peer_note = ""
    if options.peer is None:
        peer_note = "The published package was not run: no --peer was given."
    elif not has_cuda():
        peer_note = "The published package was not run: it needs CUDA."
    elif options.model not in ("1.7B", "4B"):
        peer_note = "The published package was not run: its chain of this model's parts is not here."
    else:
        runs["published"] = (replace(chain, peer=True), options.peer)

    report = Report("Throughput: tokens a second, against the published package", options.out)
    report(f"- {describe(device)}")
    report("")
    report(
        f"Model {request.shape}, {request.rows} rows of {request.tokens:,} tokens in {request.microbatches} "
        f"microbatches, recompute by {request.grain}, Adam; {request.steps} steps after {request.warm_up} others. "
        + peer_note
    )
    report("")
    rows, notes = [], []
    for cap, cap_bytes in caps.items():
        results: dict[str, Result] = {}
        for name, (wanted, package) in runs.items():
            print(f"{name}, cap {cap}", file=sys.stderr, flush=True)
            capped = replace(wanted, memory_bytes=cap_bytes)
            if cap_bytes and not wanted.peer:
                capped = replace(capped, device=f"{device},memory={cap_bytes}B")
            try:
                results[name] = train(capped, package)
            except RunError as error:
                notes.append(f"{name}, cap {cap}: {error}")
                continue
            rows.append(cells(name, cap, results[name]))
        for name, result in results.items():
            reference = results.get("ours", result)
            for step, (loss, expected) in enumerate(zip(result.losses, reference.losses, strict=True)):
                if abs(loss - expected) > BOUND * expected:
                    raise SystemExit(f"{name}, step {step}: the loss is {loss!r}, ours is {expected!r}")
    header = ["", "cap", "async tokens/s", "sync tokens/s", "last loss", "device peak GB"]
    report.table([*header, "host B/parameter", "resident B/parameter", "by our account"], rows)
    for note in notes:
        report(f"- no figures of {note}")
    report(f"Losses of all runs agree step by step within {BOUND:.1e} of their value.")
    report.close()
    if notes and len(rows) == 0:
        raise SystemExit("no run came to an end")


if __name__ == "__main__":
    main()
