"""Information about the calls of a model in the pipeline."""

from __future__ import annotations

from roundpipe import _core
from roundpipe.model.pending import record_fields
from roundpipe.plan.performance.step_report import StepReport, report
from roundpipe.plan.performance.timeline import Timeline, timeline_of


class RunRecords:
    """The calls, costs and records of a model with one pipeline."""

    _pipeline: _core.Pipeline
    _name: str
    _layer_count: int
    _auto_microbatches: int | None

    @property
    def auto_microbatches(self) -> int | None:
        """The number of microbatches that `num_microbatch="auto"` stands for; None until the first training call has
        chosen it. It does not change in a run. Set it when resuming a run, like `calls`."""
        return self._auto_microbatches

    @auto_microbatches.setter
    def auto_microbatches(self, count: int | None) -> None:
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"[RoundPipe] auto_microbatches is {count!r}, expected an integer of at least 1 or None")
        object.__getattribute__(self, "__dict__")["_auto_microbatches"] = count

    @property
    def num_layers(self) -> int:
        """How many layers the pipeline has."""
        return self._layer_count

    @property
    def calls(self) -> int:
        """Number of pipelined calls so far; keys the random state of the next one. Set it when resuming a run."""
        return self._pipeline.calls

    @calls.setter
    def calls(self, calls: int) -> None:
        self._pipeline.calls = calls

    @property
    def random_seed(self) -> int:
        """`torch.initial_seed()` when the model was wrapped; the base of `layer_seed`. Set it when resuming a run."""
        return self._pipeline.random_seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        self._pipeline.random_seed = seed

    def layer_seed(self, call: int, microbatch: int, layer: int, backward: bool = False) -> int:
        """The seed with which `layer` runs `microbatch` of pipelined call number `call` (0, 1, ...).

        A loop that calls `torch.manual_seed(model.layer_seed(call, microbatch, layer))` before each layer draws the
        same numbers as the pipeline. The loss function counts as layer `num_layers`. `backward=True` gives the seed for
        draws in the layer's backward, when its gradient arrives (in a custom autograd function or a hook).
        """
        seed = _core.layer_seed(self.random_seed, self._name, call, microbatch, layer)
        return _core.backward_seed(seed) if backward else seed

    def costs(self) -> list[_core.LayerCost]:
        """The estimated costs of each layer for one microbatch; measured once calls have run."""
        return self._pipeline.costs()

    @property
    def costs_are_measured(self) -> bool:
        """Whether `costs` holds measured times only."""
        return self._pipeline.knows_costs()

    def machine(self) -> _core.MeasuredMachine:
        """The devices, links and optimizer as this model's calls have measured them; a rate of 0 is not known, or no
        limit. `roundpipe.plan.machine.measured` makes a machine file of it."""
        return self._pipeline.machine()

    def step_report(self) -> StepReport:
        """A training step as it is predicted and as it was measured, and what limits it; `print` shows it as a table.

        Measured are the latest steps with the number of microbatches of the last one. Predicted is the last step's
        plan, in the simulator, with the costs and rates that were measured. Takes about a second.

        Raises:
            ValueError: too few training steps have been made and measured.
            Exception: whatever a layer raised in work still running.
        """
        return report(self._pipeline, self._name)

    def busy_share(self) -> float | None:
        """Which share of the latest training steps' time the devices computed, from 0 to 1; None until steps have been
        measured. Takes next to no time.

        Raises:
            Exception: whatever a layer raised in work still running.
        """
        return self._pipeline.busy_share()

    def host_bytes(self) -> int:
        """Host memory of weights and gradients, in bytes."""
        return self._pipeline.host_bytes()

    @property
    def verified_jobs(self) -> int:
        """How many jobs have had the same bits on another device, see `RoundPipeRunConfig.verify_every`."""
        return self._pipeline.verified_jobs()

    def last_plan(self) -> _core.Plan | None:
        """The jobs of the last call."""
        return self._pipeline.last_plan()

    def timeline(self, calls: int = 1) -> Timeline:
        """What the devices did in the latest calls, forward-only ones included, and when.

            model.timeline(calls=3).save("steps.json")  # for ui.perfetto.dev; .png and .html as well

        Args:
            calls: how many; at most eight are kept. Work that a call has not finished is not part of it, so call
                `synchronize` before.

        Raises:
            ValueError: `calls` is out of range, or no device has finished any work yet.
        """
        logs = self._pipeline.recent_logs()
        kept = self._pipeline.kept_calls
        if not isinstance(calls, int) or isinstance(calls, bool) or not 1 <= calls <= kept:
            raise ValueError(f"[timeline] calls is {calls!r}, expected an integer from 1 to {kept}")
        return timeline_of([log.records() for log in logs[-calls:]], self._pipeline.last_plan(), self._name)

    def last_records(self) -> list[tuple[str, int, int, int, int, float, float]]:
        """The last call's executed stages: (phase, first layer, last layer, microbatch, device, start ms, end ms)."""
        return [record_fields(record)[:7] for record in self._pipeline.last_records()]
