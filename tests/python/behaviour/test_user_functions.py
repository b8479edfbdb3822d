"""A user's function runs with none of the engine's locks held, wherever it is called from."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig

pytestmark = pytest.mark.usefixtures("two_devices")
LONG_S = 60.0  # a thread that waits for a lock of ours never ends


class Elsewhere:
    """Uses the package on another thread, and waits for that thread: whoever holds what it needs waits for ever."""

    def __init__(self, scaler: roundpipe.GradScaler) -> None:
        self.scaler = scaler
        self.asked: set[str] = set()

    def ask(self, name: str) -> None:
        thread = threading.Thread(target=self._use, args=(name,), daemon=True)
        thread.start()
        thread.join(LONG_S)
        assert not thread.is_alive(), f"{name} was called under a lock"
        self.asked.add(name)

    def _use(self, name: str) -> None:
        self.scaler.get_scale()
        if name not in ("a layer", "a loss"):  # it waits for the steps so far, which wait for these
            self.scaler.state_dict()
        roundpipe.host_arena()
        RoundPipe(nn.Sequential(nn.Linear(2, 2)), name="elsewhere")


class Asking(nn.Module):
    def __init__(self, elsewhere: Elsewhere) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self._elsewhere = [elsewhere]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._elsewhere[0].ask("a layer")
        return x * self.weight

    def extra_repr(self) -> str:
        self._elsewhere[0].ask("the printing of a layer")
        return "asks"


@pytest.mark.parametrize("fused", [False, True])
def test_it_may_wait_for_a_thread_that_uses_the_package(fused: bool) -> None:
    scaler = roundpipe.GradScaler("cpu", init_scale=8.0)
    elsewhere = Elsewhere(scaler)

    def split_input(args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> Any:
        elsewhere.ask("split_input")
        return [(part,) for part in args[0].tensor_split(n)], [{} for _ in range(n)]

    def split_label(label: torch.Tensor, n: int) -> list[torch.Tensor]:
        elsewhere.ask("split_label")
        return list(label.tensor_split(n))

    def merge(outputs: list[torch.Tensor]) -> torch.Tensor:
        elsewhere.ask("merge_output")
        return torch.cat(outputs)

    def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        elsewhere.ask("a loss")
        return scaler.scale((outputs - label).square().sum())

    def factor(step: int) -> float:
        elsewhere.ask("a schedule")
        return 1.0

    config = RoundPipeRunConfig(num_microbatch=2, split_input=split_input, split_label=split_label, merge_output=merge)
    model = RoundPipe(nn.Sequential(Asking(elsewhere), nn.Linear(3, 3)), model_run_config=config)
    optimizer: Any = roundpipe.optim.SGD(model, lr=0.1) if fused else torch.optim.SGD(model.optim_parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def update() -> None:
        elsewhere.ask("a step function")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for is_async in (True, False):
        batch, label = torch.ones(4, 3), torch.zeros(4, 3)
        model.forward_backward((batch,), label=label, loss_fn=loss, return_outputs=True)
        if fused:
            model.step(optimizer, is_async, scaler=scaler, lr_scheduler=schedule)
        else:
            model.step(update, is_async)
    model.synchronize()
    repr(model)
    functions = {"a layer", "the printing of a layer", "split_input", "split_label", "merge_output", "a loss"}
    assert elsewhere.asked == functions | {"a schedule"} | (set() if fused else {"a step function"})


class BrokenError(Exception):
    pass


def test_what_it_raises_keeps_type_and_traceback() -> None:
    def raise_here(*_: Any) -> Any:
        raise BrokenError("as it was")

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return raise_here(x)

    batch = torch.ones(4, 3)

    def call(model: nn.Module, loss: Any = lambda outputs, _: outputs.sum(), **options: Any) -> Any:
        config = RoundPipeRunConfig(num_microbatch=2, **options)
        piped = RoundPipe(model, model_run_config=config)
        piped.forward_backward((batch,), label=batch, loss_fn=loss, return_outputs=True)
        return piped

    def step(is_async: bool) -> None:
        piped = call(nn.Sequential(nn.Linear(3, 3)))
        piped.step(raise_here, is_async)
        piped.synchronize()

    linear = nn.Sequential(nn.Linear(3, 3))
    for run in (
        lambda: call(nn.Sequential(Failing())),
        lambda: call(linear, raise_here),
        lambda: call(nn.Sequential(nn.Linear(3, 3)), split_input=raise_here),
        lambda: call(nn.Sequential(nn.Linear(3, 3)), split_label=raise_here),
        lambda: call(nn.Sequential(nn.Linear(3, 3)), merge_output=raise_here),
        lambda: step(True),
        lambda: step(False),
    ):
        with pytest.raises(BrokenError, match="as it was") as caught:
            run()
        assert caught.traceback[-1].name == "raise_here"
