"""A process ends cleanly whatever is running, alive or pending: its exit code, no signal, no hang, no stray word on
stderr. So does a child that it makes by fork, whatever it does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from exit_programs import ENDINGS, FORKS, MODELS, SETUP, Program
from robustness import script_environment
from sweeps import mostly_long

# Whether a device's thread drops the model last depends on chance, so this is tried some times.
HELD_BY_ITS_LOSS = """
def train():
    own = roundpipe.RoundPipe(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]))
    def loss(outputs, label): return outputs.square().sum() * len(own)
    own.forward_backward((value,), loss_fn=loss)
    own.synchronize()
train()
"""
PROGRAMS = {**ENDINGS, **FORKS}
PROGRAMS |= {f"with a model that its loss function holds, {time} of 4": Program(HELD_BY_ITS_LOSS) for time in range(4)}
FORKS_FIRST = "a child that was made before"
# What takes longest, times beyond the first, and other ways into a state that is among the rest.
LONG = {
    *("a child that drops everything", "children all the time", "a child of a child", FORKS_FIRST),
    *("a child made in a layer", "workers of a DataLoader in the middle of calls"),
    *("after a fused step", "with a batch submitted", "with a graph half-way", "without any call"),
    *("with the model deleted", "with an error in a variable", "with several pools", "by an exit in the loss"),
    *("by an exit in a layer", "by an exception in a layer", "a child that ends by os._exit"),
    "a process of multiprocessing that fails",
    *(name for name in PROGRAMS if name.endswith(("1 of 4", "2 of 4", "3 of 4"))),
}

DEVICES = (2, *(pytest.param(devices, marks=pytest.mark.long) for devices in (1, 4)))

# Imports once, then forks a process for each program, which goes all the way through its interpreter's finalization.
# `early` holds what runs at the end after roundpipe's own exit handler.
FORKING = """
import _thread, atexit, gc, json, multiprocessing, os, signal, sys, tempfile, threading, time, traceback
early = []
atexit.register(lambda: [work() for work in early])
import torch, torch._dynamo, roundpipe  # making an optimizer would import dynamo each time
from torch import nn
roundpipe.RoundPipe, roundpipe.devices, roundpipe.optim
torch.set_num_threads(1)
gc.freeze()  # what the imports made: a child that goes through all of it as it ends copies the memory that it is in
programs, results = json.loads(sys.stdin.read()), {}
for name, program in programs.items():
    output = tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        os.dup2(output.fileno(), 2)
        exec(program)
        break
    deadline = time.monotonic() + 120
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.005)
    if not ended[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    output.seek(0)
    results[name] = [os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", output.read().decode()]
else:
    print(json.dumps(results))
"""


def script(name: str, devices: int) -> str:
    setup, models = SETUP, f"roundpipe.devices('virtual:{devices}')" + MODELS
    if name == FORKS_FIRST:
        # The parent has not used the engine; the child makes all that it uses.
        return (
            setup
            + f"def call_all():\n    exec({models + 'call(); model.step(update); model.synchronize()'!r}, globals())\n"
            + "for _ in range(5): expect_child(call_all)\n"
            + models
            + "call()\nmodel.step(update)\n"
        )
    return setup + models + PROGRAMS[name].lines


@pytest.fixture(scope="module", params=DEVICES, ids=lambda devices: f"{devices} devices")
def results(request: pytest.FixtureRequest) -> dict[str, list[object]]:
    """Of the programs whose tests run."""
    wanted = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    names = [item.callspec.params["name"] for item in wanted if item.callspec.params["results"] == request.param]
    process = subprocess.run(
        [sys.executable, "-c", FORKING],
        input=json.dumps({name: script(name, request.param) for name in names}),
        env=script_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(process.stdout))


@pytest.mark.parametrize("name", mostly_long(PROGRAMS, *(PROGRAMS.keys() - LONG)))
def test_a_process_ends_cleanly(name: str, results: dict[str, list[object]]) -> None:
    code, errors = results[name]
    assert isinstance(errors, str)
    assert code == PROGRAMS[name].code, errors
    if PROGRAMS[name].says:
        assert errors.rstrip().endswith(PROGRAMS[name].says), errors
        assert errors.count("Traceback") == 1 and "not as expected" not in errors, errors
    else:
        assert errors == ""
