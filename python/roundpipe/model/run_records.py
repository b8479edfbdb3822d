"""Information about the calls of a model in the pipeline."""

from __future__ import annotations

from roundpipe import _core
from roundpipe.model.pending import record_fields


class RunRecords:
    """The calls, costs and records of a model with one pipeline."""

    _pipeline: _core.Pipeline
    _name: str
    _layer_count: int

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

    def host_bytes(self) -> int:
        """Host memory of weights and gradients, in bytes."""
        return self._pipeline.host_bytes()

    def last_plan(self) -> _core.Plan | None:
        """The jobs of the last call."""
        return self._pipeline.last_plan()

    def last_records(self) -> list[tuple[str, int, int, int, int, float, float]]:
        """The last call's executed stages: (phase, first layer, last layer, microbatch, device, start ms, end ms)."""
        return [record_fields(record)[:7] for record in self._pipeline.last_records()]
