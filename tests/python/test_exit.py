"""A script ends cleanly whatever is still running, alive or pending: exit code 0 and not a word on stderr."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from robustness import script_environment

# What a script does last -> its last lines.
ENDINGS = {
    "after an asynchronous step": "call(); model.step(update)",
    "after a call whose backward runs": "call()",
    "in the middle of many steps": "for _ in range(5): call(); model.step(update)",
    "with outputs alive": "outputs = model(value); loss = outputs.sum(); keep = [outputs, loss]; keep.append(keep)",
    "with a graph half-way": "outputs = model(value); outputs.sum().backward(retain_graph=True)",
    "without any call": "pass",
    "with the model deleted": "call(); model.step(update); del model",
    "with the model in a cycle": "call(); model.me = model",
    "with an error not looked at": "layer.fail = True\ntry: call()\nexcept ValueError: pass",
    "with an error in a variable": "layer.fail = True\ntry: call()\nexcept ValueError as error: kept = error",
    "with an error pending in step_fn": "call(); model.step(lambda: 1 / 0)",
    "with an error pending in the backward": "layer.fail_backward = True; call()",
    "with several pools": "call(); roundpipe.devices('virtual:3'); call(); old = roundpipe.devices('virtual:1')",
    "with a pool that replaces one at work": "call(); roundpipe.devices('virtual:3')",
    "by sys.exit": "call(); model.step(update); sys.exit(0)",
    "after an interrupt": """
try:
    threading.Timer(0.01, _thread.interrupt_main).start()
    while True: call(); model.step(update)
except KeyboardInterrupt: pass
""",
    "after calls from a thread": """
thread = threading.Thread(target=lambda: (call(), model.step(update)))
thread.start(); thread.join()
""",
}

SETUP = """
roundpipe.devices("virtual:2")
class Layer(nn.Linear):
    fail = fail_backward = False
    def forward(self, value):
        if self.fail:
            raise ValueError("failing")
        value = super().forward(value)
        if self.fail_backward:
            def hook(gradient):
                time.sleep(0.02)
                raise ValueError("failing")
            value.register_hook(hook)
        return value
torch.manual_seed(0)
layer = Layer(8, 8)
model = roundpipe.RoundPipe(nn.Sequential(layer, *[nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(4)]))
value = torch.randn(6, 8)
def loss(outputs, label): return outputs.square().sum() * 1e-3
def call(): model.forward_backward((value,), loss_fn=loss)
def update():
    for parameter in model.parameters():
        with torch.no_grad(): parameter.sub_(parameter.grad, alpha=1e-3)
        parameter.grad = None
"""

# Whether a device's thread drops the model last depends on chance, so this is tried some times.
HELD_BY_ITS_LOSS = """
def train():
    own = roundpipe.RoundPipe(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]))
    def loss(outputs, label): return outputs.square().sum() * len(own)
    own.forward_backward((value,), loss_fn=loss)
    own.synchronize()
train()
"""
ENDINGS |= {f"with a model that its loss function holds, {time} of 4": HELD_BY_ITS_LOSS for time in range(1, 5)}

# Imports once, then forks a process for each ending, which goes all the way through its interpreter's finalization.
FORKING = """
import _thread, json, os, sys, tempfile, threading, time, torch, roundpipe
from torch import nn
roundpipe.RoundPipe, roundpipe.devices
torch.set_num_threads(1)
setup, endings, results = *json.loads(sys.stdin.read()), {}
for name, ending in endings.items():
    output = tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        os.dup2(output.fileno(), 2)
        exec(setup + ending)
        break
    deadline = time.monotonic() + 300
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


@pytest.fixture(scope="module")
def results() -> dict[str, list[object]]:
    process = subprocess.run(
        [sys.executable, "-c", FORKING],
        input=json.dumps([SETUP, ENDINGS]),
        env=script_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(process.stdout))


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_a_process_ends_cleanly(ending: str, results: dict[str, list[object]]) -> None:
    assert results[ending] == [0, ""]
