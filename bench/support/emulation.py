"""Runs a schedule through the real engine, with layers that take time instead of computing."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

import roundpipe
from roundpipe import _core
from roundpipe.plan.schedules import Prediction, Request

Progress = Callable[[int, int], None]
# Who waits for an update in a synchronous step: the layer itself, the next step, or also the update for all gradients.
Gate = Literal["layer", "step", "model"]


@dataclasses.dataclass
class Emulation:
    """The engine's measurements.

    Attributes:
        step_ms: time of one synchronous step (median), or from step to step in the steady state.
        records: what each step executed, see `_core.Record`.
        warm_up: number of first steps that are not measured.
    """

    step_ms: float
    records: list[list[_core.Record]]
    warm_up: int


@dataclasses.dataclass
class Links:
    """Real bytes over throttled links, instead of the hop latency.

    Attributes:
        gb_per_s: in each direction, for each device.
        host_gb_per_s: of all links together; 0 = no limit.
        priorities: whether the most urgent transfer goes first, instead of the earliest request.
        chunk_bytes: largest amount that moves before a more urgent transfer may go; 0 = transfers move whole.
    """

    gb_per_s: float
    host_gb_per_s: float
    priorities: bool = True
    chunk_bytes: int = 64_000_000

    def scaled(self, time_factor: float, size_factor: float) -> Links:
        """The links for costs `scaled` by the same factors: every transfer keeps its share of a step."""
        return dataclasses.replace(
            self,
            gb_per_s=self.gb_per_s * size_factor / time_factor,
            host_gb_per_s=self.host_gb_per_s * size_factor / time_factor,
            chunk_bytes=round(self.chunk_bytes * size_factor),
        )

    @property
    def options(self) -> str:
        """The options of a virtual device."""
        host = f"host={self.host_gb_per_s:.9f}GB/s," if self.host_gb_per_s else ""
        options = f"link={self.gb_per_s:.9f}GB/s,{host}chunk={self.chunk_bytes}B"
        return options if self.priorities else options + ",fifo"


def scaled(request: Request, factor: float, size_factor: float = 1.0) -> Request:
    """Multiplies every time, and sets the engine's own rules: all values hop, the head is recomputed.

    `size_factor` multiplies all bytes of the layers.
    """
    costs = dataclasses.replace(
        request.costs,
        layers=[
            # Emulated layers all train.
            _core.LayerCost(
                forward_ms=cost.forward_ms * factor,
                backward_ms=cost.backward_ms * factor,
                weight_bytes=round(cost.weight_bytes * size_factor),
                gradient_bytes=round(cost.gradient_bytes * size_factor),
                activation_bytes=round(cost.activation_bytes * size_factor),
                saved_bytes=round(cost.saved_bytes * size_factor),
            )
            for cost in request.costs.layers
        ],
        hop_latency_ms=request.costs.hop_latency_ms * factor,
    )
    return dataclasses.replace(
        request,
        costs=costs,
        cluster=costs.cluster(request.devices),
        through_engine=True,
        interleave=False,
    )


def _groups(prediction: Prediction) -> int:
    """The fewest gradient groups that the plans may have: other systems' schedules divide a backward anywhere."""
    microbatches = prediction.plans[0].microbatches
    jobs = [job for plan in prediction.plans for job in plan.jobs if job.phase != "forward"]
    ends = {job.microbatches.last for job in jobs}

    def suits(groups: int) -> bool:
        parts = torch.arange(microbatches).tensor_split(groups)
        return ends <= {int(part[-1]) + 1 for part in parts}

    least = min(prediction.gradient_groups or 1, microbatches)
    return next(groups for groups in range(least, microbatches + 1) if suits(groups))


def emulated(
    request: Request, update_ms: Sequence[float] | None = None, links: Links | None = None
) -> roundpipe.RoundPipe:
    """Starts the requested machine's virtual devices, and makes the model for them. Arguments as for `emulate`."""
    way = links.options if links is not None else f"latency={request.costs.hop_latency_ms / 2:.6f}ms"
    roundpipe.devices(f"virtual:{request.devices},threads=1,{way}")
    layers = [
        _layer(cost, ms, links is not None)
        for cost, ms in zip(request.costs.layers, update_ms or [0.0] * len(request.costs.layers), strict=True)
    ]
    return roundpipe.RoundPipe(nn.Sequential(*layers), name="emulated")


def emulate(
    prediction: Prediction,
    request: Request,
    steps: int,
    progress: Progress,
    update_ms: Sequence[float] | None = None,
    gate: Gate = "layer",
    links: Links | None = None,
    warm_up: int = 2,
) -> Emulation:
    """Runs `steps` steps of `prediction`'s plans after the warm-up, in real time.

    Args:
        request: the request that was predicted, see `scaled`.
        progress: called with the number of finished steps and of all steps.
        update_ms: time of the host's update of each layer; None = no time. With updates, `step_ms` of a synchronous run
            is also its pace, because steps overlap.
        gate: with `update_ms`, the work that waits for updates.
        links: moves weights, gradients and values of the sizes in the costs; None = only the hop latency.
        warm_up: number of steps until the pipeline runs at its pace; not measured.

    Raises:
        ValueError: the schedule cannot run asynchronously, or the requested machine's devices differ, which virtual
            devices cannot, or layers do not train.
    """
    speeds = {speed for speed, _ in request.costs.devices}
    if len(speeds) > 1:
        raise ValueError("[emulate] the devices differ in speed, expected equal ones: virtual devices cannot be slower")
    if request.costs.first_backward_layer > 0:
        raise ValueError(
            f"[emulate] the first {request.costs.first_backward_layer} layers do not train, expected costs whose "
            "layers all do: emulated layers always train"
        )
    recipe = prediction.plans[0]
    splits_head = any(job.phase == "backward" and job.layers.last == recipe.layers for job in recipe.jobs)
    if splits_head and request.mode == "async":
        raise ValueError(f"[emulate] {prediction.name} takes its loss between the phases, expected synchronous steps")
    model = emulated(request, update_ms, links)
    update = _updater(model, update_ms, gate)
    value_bytes = max(cost.activation_bytes for cost in request.costs.layers) if links is not None else 0
    batch = torch.ones(request.microbatches, max(1, value_bytes // 4))
    target = torch.ones(request.microbatches, 1)
    count = warm_up + steps
    # A layer runs alone until the engine knows that it draws no random numbers: let the engine find out beforehand.
    single = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    options = roundpipe.RoundPipeRunConfig(num_microbatch=request.microbatches, gradient_groups=_groups(prediction))
    model.forward_backward((batch[:1],), label=target[:1], loss_fn=_loss, run_config=single)
    update(False)
    records: list[list[_core.Record]] = []
    pending: list[_core.ExecutionLog] = []
    plans = [prediction.plans[step % len(prediction.plans)] for step in range(count)]
    try:
        if request.mode == "async":
            submitted: list[roundpipe.Pending] = []
            for step, plan in enumerate(plans):
                config = dataclasses.replace(options, execute_plan=plan)
                submitted.append(model.submit((batch,), label=target, loss_fn=_loss, run_config=config))
                update(True)
                if step > 0:
                    _check(submitted[step - 1].loss(), batch)
                    progress(step, count)
            _check(submitted[-1].loss(), batch)
            model.synchronize()
            records = [pending._submitted.records() for pending in submitted]
        else:
            for step, plan in enumerate(plans):
                config = dataclasses.replace(options, execute_plan=plan)
                if splits_head:
                    loss = _loss(model(batch.clone().requires_grad_(False), roundpipe_run_config=config), target)
                    torch.autograd.backward(loss)
                else:
                    loss = model.forward_backward((batch,), label=target, loss_fn=_loss, run_config=config)
                _check(loss, batch)
                update(False)
                if update_ms is None:
                    records.append(model._pipeline.last_records())
                else:
                    pending.append(model._pipeline.last_log())
                progress(step + 1, count)
            model.synchronize()
            records += [log.records() for log in pending]
    finally:
        model.synchronize()
    progress(count, count)
    overlap = request.mode == "async" or update_ms is not None
    return Emulation(
        step_ms=_pace(records, warm_up) if overlap else _median(records[warm_up:]), records=records, warm_up=warm_up
    )


def _updater(model: roundpipe.RoundPipe, update_ms: Sequence[float] | None, gate: Gate) -> Callable[[bool], None]:
    """Returns a function that makes a step, asynchronous or not."""
    if update_ms is not None and gate != "model":
        fused = roundpipe.optim.SGD(model, lr=0.0)

        def streamed(is_async: bool) -> None:
            step = model.step(fused, is_async)
            if gate == "step":
                step.wait()

        return streamed
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.0)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(sum(update_ms or [0.0]) / 1000)

    return lambda is_async: model.step(update, is_async)


def _loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs * target).sum()


def _layer(cost: _core.LayerCost, update_ms: float, moves: bool) -> roundpipe.EmulatedLayer:
    if not moves:
        return roundpipe.EmulatedLayer(cost.forward_ms, cost.backward_ms, update_ms=update_ms)
    # A layer whose weights are all frozen still has something to train, or nothing would go backward.
    trained_bytes = max(4, cost.gradient_bytes)
    weight_bytes = max(trained_bytes, cost.weight_bytes)
    return roundpipe.EmulatedLayer(cost.forward_ms, cost.backward_ms, weight_bytes, update_ms, trained_bytes)


def _check(loss: torch.Tensor, batch: torch.Tensor) -> None:
    # Emulated layers return their input, so any other result means that a value was lost or came twice.
    if loss.item() != batch.numel():
        raise _core.RoundPipeError(f"[emulate] the loss is {loss.item()}, expected {batch.numel()}")


def _median(records: Sequence[Sequence[_core.Record]]) -> float:
    return statistics.median(max(r.end_ms for r in step) - min(r.start_ms for r in step) for step in records)


def _pace(records: Sequence[Sequence[_core.Record]], warm_up: int) -> float:
    ends: list[float] = []
    for step in records:
        ends.append(max([*ends[-1:], *(record.end_ms for record in step)]))
    # From where the warm-up ends, so that one step is enough.
    measured = ends[max(0, warm_up - 1) :]
    pace = statistics.linear_regression(range(len(measured)), measured).slope
    if pace > 0:
        return pace
    # On a busy machine, the last of steps without work may end with the first one.
    return (ends[-1] - min(record.start_ms for step in records for record in step)) / len(records)
