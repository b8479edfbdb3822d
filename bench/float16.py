"""Does the demo's model survive float16? Its losses in float32, bfloat16 and float16, and how many steps are skipped.

Each row trains the demo's model from the same weights on the same batches, with synchronous steps. In float16, losses
are scaled by `roundpipe.GradScaler` as torch makes it. The program fails if float16 ends further from float32 than
stated. On the host, products of float16 matrices are added up in fp32; `ROUNDPIPE_FP16_ACCUMULATION=1` and
`--devices cuda:0` show what a card makes of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from support.demo_runs import DemoRuns, Losses
from support.report import Report, parser

import roundpipe
from roundpipe.demo.model import as_layers, build_llama
from roundpipe.demo.options import VIRTUAL_DEVICES, DemoOptions
from roundpipe.demo.training import FusedSteps, RandomBatches, held_out_batches, token_tables, train

STEPS = 60  # a host computes in float16 ten times slower
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALLOWED = 0.005  # how much further the held-out loss of float16 may be


class Unscaled:
    """A batch whose losses are multiplied by a scale."""

    def __init__(self, pending: roundpipe.Pending, scale: float) -> None:
        self._pending, self._scale = pending, scale

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self._pending.loss() / self._scale
        return loss


class ScaledModel:
    """A model whose losses a scaler scales, for the demo's loop."""

    def __init__(self, model: roundpipe.RoundPipe, scaler: roundpipe.GradScaler) -> None:
        self._model, self._scaler = model, scaler

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model(tokens)  # type: ignore[no-any-return]

    def submit(self, *, input_args: tuple[Any, ...], label: Any, loss_fn: Callable[[Any, Any], Any]) -> Unscaled:
        def scaled(outputs: Any, label: Any) -> Any:
            return self._scaler.scale(loss_fn(outputs, label))

        pending = self._model.submit(input_args=input_args, label=label, loss_fn=scaled)
        return Unscaled(pending, self._scaler.get_scale())

    def synchronize(self) -> None:
        self._model.synchronize()


class ScaledSteps(FusedSteps):
    """Steps with a scaler; counts those that it skips."""

    def __init__(
        self, model: roundpipe.RoundPipe, tables: list[str], options: DemoOptions, scaler: roundpipe.GradScaler
    ) -> None:
        super().__init__(model, tables, options, is_async=False)
        self._scaler, self._norm = scaler, options.clip_norm
        self.skipped = 0

    def __call__(self) -> None:
        step = self.model.step(
            self.optimizer, False, scaler=self._scaler, max_grad_norm=self._norm, lr_scheduler=self.scheduler
        )
        self.skipped += step.skipped


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--devices", default=VIRTUAL_DEVICES)
    chosen = arguments.parse_args()
    report = Report("The demo's model in float16", chosen.out)
    pool = roundpipe.devices(chosen.devices)
    runs = DemoRuns.prepare(DemoOptions(steps=chosen.steps, evaluations=0), chosen.quick)
    options = runs.options
    report(f"{runs}, {pool.description}{', fp16 accumulation' if pool.fp16_accumulation else ''}.")
    report("")
    report.header(["weights", "training loss", "held-out loss", "against float32", "skipped", "last scale", "seconds"])
    first = math.nan
    for dtype in DTYPES:
        layers = as_layers(build_llama(runs.vocabulary, options.sequence_length, options.seed, dtype))
        model = roundpipe.RoundPipe(layers, name="demo")
        scaler = roundpipe.GradScaler(enabled=dtype == torch.float16)
        steps = ScaledSteps(model, token_tables(layers), options, scaler)
        seen = Losses()
        batches, kept_out = RandomBatches(runs.training, options), held_out_batches(runs.held_out, options)
        train(ScaledModel(model, scaler), steps, batches, kept_out, options, seen)
        first = seen.held_out if dtype == torch.float32 else first
        off = seen.held_out / first - 1
        scaling = [str(steps.skipped), f"{scaler.get_scale():g}"] if scaler.is_enabled() else ["", ""]
        name = str(dtype).removeprefix("torch.")
        losses = [f"{seen.training:.4f}", f"{seen.held_out:.4f}", f"{100 * off:+.2f} %"]
        report.row([name, *losses, *scaling, f"{seen.seconds:.0f}"])
        if dtype == torch.float16 and not off <= ALLOWED and not chosen.quick:
            report.close()
            sys.exit(f"float16 ends {100 * off:.2f} % above float32, expected at most {100 * ALLOWED:g} %")
    report("")
    report.close()


if __name__ == "__main__":
    main()
