"""Programs of a user, made of random statements, beside the plain loop that they have to equal.

Run by test_random_programs.py in a process of their own, with the programs as JSON. One after the other they print
"equal" when all was as in the plain loop; the process ends as the last one says, and never by a signal.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundpipe
from reference_loops import assert_same, run_layers, seeds_of
from roundpipe import RoundPipe, RoundPipeRunConfig

WIDTH = 4
IN_FORWARD, IN_BACKWARD, IN_RECOMPUTE, IN_LOSS = 1e9, 2e9, 3e9, 4e9
EXIT_STATUS = 3
LONGEST_S = 120  # then the process is ended by a signal: it hung


class BatchFailedError(Exception):
    """Raised where a batch says so."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise BatchFailedError


class Trap(nn.Module):
    """Passes its input on, and fails when there is a value in it that says where."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        most = float(value.max())
        if most == IN_FORWARD or (most == IN_RECOMPUTE and roundpipe.doing_recompute()):
            raise BatchFailedError
        kept = value.clamp(-10, 10) * self.scale
        if most == IN_BACKWARD:
            kept = FailingBackward.apply(kept)  # type: ignore[assignment]
        return kept


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(value)))


def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    if float(label.max()) == IN_LOSS:
        raise BatchFailedError
    return (nn.functional.dropout(outputs, 0.1) - label).square().sum()


class Program:
    """Both sides, and the statements as methods."""

    def __init__(self, devices: int, layers: int, microbatches: int) -> None:
        roundpipe.devices(f"virtual:{devices}")
        torch.manual_seed(1)
        self.plain = nn.Sequential(Trap(), *[Block() for _ in range(layers)])
        self.mine = copy.deepcopy(self.plain)
        config = RoundPipeRunConfig(num_microbatch=microbatches)
        self.model = RoundPipe(self.mine, name="random", model_run_config=config, check_loss=False)
        self.microbatches = microbatches
        self.optimizer = roundpipe.optim.AdamW(self.model, lr=0.05)
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.plain.parameters()]
        self.plain_optimizer = roundpipe.optim.AdamW(self.masters, lr=0.05)
        self.read = [m.detach().clone() for m in self.masters]
        self.batch, self.label = torch.zeros(2 * microbatches, WIDTH), torch.zeros(2 * microbatches, WIDTH)
        self.fillings = 0
        self.pending: list[tuple[Any, torch.Tensor]] = []
        self.fill()
        torch.manual_seed(77)
        self.stream = torch.Generator().manual_seed(77)

    # -- statements -------------------------------------------------------------------------------------------------

    def draw(self) -> None:
        assert_same(torch.randn(3), torch.randn(3, generator=self.stream), "the user's stream")

    def fill(self) -> None:
        """The next batch, into the same buffers."""
        self.fillings += 1
        generator = torch.Generator().manual_seed(self.fillings)
        self.batch.copy_(torch.randn(self.batch.shape, generator=generator))
        self.label.copy_(torch.randn(self.label.shape, generator=generator))

    def submit(self) -> None:
        expected = self.expect_gradients()
        pending = self.model.submit((self.batch,), label=self.label, loss_fn=loss_fn)
        self.spoil()
        self.pending.append((pending, expected))

    def loss(self) -> None:
        if self.pending:
            pending, expected = self.pending.pop(0)
            assert_same(pending.loss(), expected, "loss")

    def forget(self) -> None:
        """Drops batches whose losses were never read."""
        self.pending.clear()
        gc.collect()

    def forward_backward(self) -> None:
        expected = self.expect_gradients()
        loss = self.model.forward_backward((self.batch,), label=self.label, loss_fn=loss_fn)
        self.spoil()
        assert_same(loss, expected, "loss")

    def forward(self) -> None:
        with torch.no_grad():
            expected = self.plain_call(lambda outputs, _: outputs.detach().clone(), backward=False)
            outputs = self.model(self.batch)
        self.spoil()
        assert_same(outputs, torch.cat(expected), "outputs")

    def loss_outside(self) -> None:
        """A loss that the pipeline does not see."""
        self.plain_call(lambda outputs, label: (outputs * label).sum(), backward=True)
        weight = self.label.clone()
        self.model(self.batch).backward(weight)
        weight.fill_(1e6)
        self.spoil()

    def step(self) -> None:
        self.make_step(is_async=False)

    def step_asynchronously(self) -> None:
        self.make_step(is_async=True)

    def step_clipped(self) -> None:
        self.make_step(is_async=True, max_grad_norm=0.5)

    def synchronize(self) -> None:
        self.model.synchronize()
        self.read = [m.detach().clone() for m in self.masters]
        for mine, master in zip(self.mine.parameters(), self.masters, strict=True):
            assert_same(mine.detach(), master.detach(), "weights")
            if mine.grad is None or master.grad is None:
                assert mine.grad is master.grad
            else:
                assert_same(mine.grad, master.grad, "gradients")

    def evaluate(self) -> None:
        self.model.eval()
        self.plain.eval()

    def train(self) -> None:
        self.model.train()
        self.plain.train()

    def change(self) -> None:
        for layers in (self.mine, self.plain):
            layers[1].dropout.p = 0.8 - layers[1].dropout.p

    def collect(self) -> None:
        gc.collect()

    def wrong_label(self) -> None:
        calls = self.model.calls
        try:
            self.model.forward_backward((self.batch,), label=self.label[:, 1:], loss_fn=loss_fn)
        except (ValueError, RuntimeError):
            assert self.model.calls == calls
        else:
            raise AssertionError("a label of another width was taken")

    def fail_in_forward(self) -> None:
        self.fail(self.batch, IN_FORWARD)

    def fail_in_backward(self) -> None:
        self.fail(self.batch, IN_BACKWARD)

    def fail_in_recompute(self) -> None:
        self.fail(self.batch, IN_RECOMPUTE)

    def fail_in_loss(self) -> None:
        self.fail(self.label, IN_LOSS)

    def fork(self) -> None:
        """A child that ends by sys.exit, as those of other libraries do."""
        child = os.fork()
        if child == 0:
            signal.alarm(LONGEST_S // 2)
            sys.exit(EXIT_STATUS)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_STATUS, "the forked child's end"

    # -- endings ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        while self.pending:
            self.loss()
        self.synchronize()
        self.draw()
        print("equal", flush=True)  # a fork would print it again

    def exit(self) -> None:
        sys.exit(EXIT_STATUS)

    def exit_in_thread(self) -> None:
        threading.Thread(target=sys.exit).start()
        self.end()

    def leave(self) -> None:
        """Ends as it is."""

    def raise_(self) -> None:
        raise BatchFailedError

    def end_hard(self) -> None:
        os._exit(EXIT_STATUS)

    # -- the plain loop ---------------------------------------------------------------------------------------------

    def plain_call(
        self, after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], backward: bool, with_loss: bool = False
    ) -> list[torch.Tensor]:
        """`after` of each microbatch's outputs; its gradients go to the masters."""
        seeds = seeds_of(self.model, self.model.calls, self.microbatches)
        results = []
        with torch.no_grad():
            for parameter, read in zip(self.plain.parameters(), self.read, strict=True):
                parameter.copy_(read)
        for parameter, master in zip(self.plain.parameters(), self.masters, strict=True):
            parameter.grad = None if master.grad is None else master.grad.clone()
        parts = zip(self.batch.chunk(self.microbatches), self.label.chunk(self.microbatches), seeds, strict=True)
        with torch.random.fork_rng(devices=[]):
            for value, label, seed in parts:
                outputs = run_layers(list(self.plain), (value,), {}, seed)
                if with_loss:
                    torch.manual_seed(seed[-1])
                result = after(outputs, label)
                if backward:
                    result.backward()
                results.append(result.detach())
        for parameter, master in zip(self.plain.parameters(), self.masters, strict=True):
            master.grad = parameter.grad if backward else master.grad
        return results

    def expect_gradients(self) -> torch.Tensor:
        losses = self.plain_call(loss_fn, backward=True, with_loss=True)
        return sum(losses[1:], losses[0])

    def make_step(self, is_async: bool, **options: Any) -> None:
        made = [m.detach().clone() for m in self.masters]
        self.model.step(self.optimizer, is_async, **options)
        if "max_grad_norm" in options:
            gradients = [m.grad for m in self.masters if m.grad is not None]
            if gradients:
                norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().float()
                factor = (options["max_grad_norm"] / (norm + 1e-6)).clamp(max=1.0)
                for master in self.masters:
                    if master.grad is not None:
                        master.grad = master.grad * factor
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad(set_to_none=True)
        self.read = made if is_async else [m.detach().clone() for m in self.masters]

    def spoil(self) -> None:
        """What was handed in is the user's again."""
        self.batch.fill_(1e5)
        self.label.fill_(-1e5)
        self.fillings += 1
        self.fill()

    def fail(self, where: torch.Tensor, value: float) -> None:
        kept = where.clone()
        where[-1, -1] = value
        calls, gradients = self.model.calls, [m.grad for m in self.masters]
        try:
            self.model.submit((self.batch,), label=self.label, loss_fn=loss_fn)
            where.copy_(kept)
            self.model.synchronize()
        except BatchFailedError:
            assert self.model.calls == calls
            where.copy_(kept)
            # Waiting has shown the newest weights.
            self.after_failure(gradients)
            return
        assert value == IN_RECOMPUTE, "an error was lost"
        # Nothing was recomputed, so nothing failed.
        self.model.calls = calls
        where[-1, -1] = value
        self.expect_gradients()
        self.model.calls = calls + 1
        where.copy_(kept)
        self.synchronize()

    def after_failure(self, gradients: list[Any]) -> None:
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.synchronize()


def main() -> None:
    signal.alarm(LONGEST_S)
    given = json.loads(sys.argv[1])
    for program in given["programs"]:
        made = Program(**program["model"])
        for statement in program["statements"]:
            getattr(made, statement)()
        if program is not given["programs"][-1]:
            made.end()
    getattr(made, given["ending"])()


if __name__ == "__main__":
    main()
