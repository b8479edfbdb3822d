"""Is the longest row that trains under a memory cap the same on 1, 2, 4 and 8 devices?

A small Llama trains on virtual devices, each with the same cap, with one row a microbatch and one layer a stage. For
each number of devices the longest row is searched: forward and backward really run, and a row that does not fit raises
torch.OutOfMemoryError. The batch has the same number of rows everywhere, so at each length the losses have to be the
same bits on any number of devices.
"""

from __future__ import annotations

import sys

import torch
from support.report import Report, parser
from transformers import LlamaConfig, LlamaForCausalLM

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipeRunConfig, wrap_model_to_roundpipe

ROWS = 9  # microbatches
# Lengths are multiples of it, in tokens. Closer to the edge it depends on what is on its way when memory runs out.
STEP = 64
LAYERS = 6
VOCABULARY = 512


def wrapped_model(limit: int) -> roundpipe.RoundPipe:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=limit,
    )
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(layer, layer + 1) for layer in range(LAYERS + 1)]
    plan.bwd_plan = [range(layer, layer + 1) for layer in reversed(range(LAYERS + 2))]
    run_config = RoundPipeRunConfig(num_microbatch=ROWS, recompute_grain="layer", execute_plan=plan)
    model: roundpipe.RoundPipe = wrap_model_to_roundpipe(LlamaForCausalLM(config), model_run_config=run_config)
    return model


def train(spec: str, tokens: int, limit: int) -> tuple[float, int] | None:
    """The loss and the peak of the fullest device; None: out of memory."""
    pool = roundpipe.devices(spec)
    model = wrapped_model(limit)
    ids = torch.randint(VOCABULARY, (ROWS, tokens), generator=torch.Generator().manual_seed(tokens))
    try:
        loss = float(model.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}))
        model.synchronize()
    except torch.OutOfMemoryError:
        return None
    return loss, max(int(entry["peak_bytes"]) for entry in pool.memory_report())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--memory-mib", type=int, default=8, help="the cap of each device")
    arguments.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    options = arguments.parse_args()
    limit = 4096
    if options.quick:
        options.devices, options.memory_mib, limit = [1, 2], 2, 512
    report = Report("The longest row by the number of devices, under the same cap for each", options.out)
    report(
        f"A Llama of {LAYERS} layers, hidden size 64, MLPs of 192, fp32, {ROWS} microbatches of one row, one layer a "
        f"stage, recomputed by layer. Each virtual device has {options.memory_mib} MiB. Lengths are multiples of "
        f"{STEP}; closer to the edge it depends on what is on its way when memory runs out:"
    )
    report("")
    losses: dict[int, set[float]] = {}
    rows = []
    for count in options.devices:
        spec = f"virtual:{count},memory={options.memory_mib}MiB,threads=1"
        low, high, peak = 0, limit, 0
        while high - low > STEP:
            tokens = (low + high) // 2 // STEP * STEP
            found = train(spec, tokens, limit)
            print(f"{count} devices, {tokens} tokens: {found}", file=sys.stderr, flush=True)
            if found is None:
                high = tokens
            else:
                low, peak = tokens, found[1]
                losses.setdefault(tokens, set()).add(found[0])
        if not low:
            raise SystemExit(f"{count} devices: not even {STEP} tokens fit; raise --memory-mib")
        rows.append([str(count), f"{low:,}", f"{high:,}", f"{peak / 2**20:.2f}"])
    report.table(["devices", "longest row that trained", "does not fit", "peak of the fullest device, MiB"], rows)
    several = {tokens: found for tokens, found in losses.items() if len(found) > 1}
    report(
        f"Losses at {len(losses)} lengths, the same bits on every number of devices that trained them: {not several}."
    )
    report("")
    report.close()
    if several:
        raise SystemExit(f"the losses depend on the number of devices: {several}")
    if not options.quick and len({row[1] for row in rows}) > 1:
        raise SystemExit("the longest row depends on the number of devices")


if __name__ == "__main__":
    main()
