"""The count of how often the engine takes the interpreter lock."""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import nn

import roundpipe
from reference_loops import plan_of
from roundpipe import RoundPipe, RoundPipeRunConfig, _core

LAYERS, MICROBATCHES = 6, 4


def taken_by_a_forward(layer: nn.Module, layers: int = LAYERS) -> int:
    """Of a chain of it in one stage, after a call that has made all there is to make."""
    chain = nn.Sequential(*[layer for _ in range(layers)])
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan_of(layers, [], [], fused=False))
    model = RoundPipe(chain, model_run_config=config)
    inputs = torch.ones(MICROBATCHES, 4)
    roundpipe.devices("virtual:1")
    taken = []
    for _ in range(5):
        before = _core.interpreter_lock_acquisitions()
        with torch.no_grad():
            model(inputs)
        model.synchronize()
        taken.append(_core.interpreter_lock_acquisitions() - before)
    return min(taken[1:])  # a value of one call may be dropped in the next


def test_python_layers_take_it_and_native_layers_do_not() -> None:
    native = taken_by_a_forward(roundpipe.EmulatedLayer(0.01, 0.01))
    python = taken_by_a_forward(nn.Identity())
    # Every job runs its microbatches under it, and drops what came before them.
    assert python >= native + MICROBATCHES, (python, native)


def test_layers_that_follow_each_other_run_under_one_taking() -> None:
    # What a thread of the engine drops may be dropped by another, outside of the layers, once for each microbatch.
    assert taken_by_a_forward(nn.Identity(), 8 * LAYERS) <= taken_by_a_forward(nn.Identity()) + MICROBATCHES


def test_every_taking_counts_once_and_what_is_held_already_does_not() -> None:
    chunks = 5
    body_calls = []

    def body(tokens: torch.Tensor) -> torch.Tensor:
        body_calls.append(len(tokens))
        return tokens

    options = _core.ChunkedMapOptions()
    options.chunk_tokens = 3
    before = _core.interpreter_lock_acquisitions()
    with torch.no_grad():
        _core.chunked_map(body, torch.ones(3 * chunks, 2), [], options)
    assert body_calls == [3] * chunks
    # The callable itself was dropped here, under the lock that this thread holds.
    assert _core.interpreter_lock_acquisitions() - before == chunks


def thread_states_so_far() -> int:
    """How many interpreter states this process has made for threads: CPython numbers them, this one included."""
    number = []

    def read() -> None:
        ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
        ctypes.pythonapi.PyThreadState_GetID.restype = ctypes.c_uint64
        state = ctypes.c_void_p(ctypes.pythonapi.PyThreadState_Get())
        number.append(ctypes.pythonapi.PyThreadState_GetID(state))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return number[0]


def test_threads_keep_their_interpreter_states() -> None:
    """A state is linked under a lock of CPython's that a child made by fork meanwhile would find locked for ever."""
    roundpipe.devices("virtual:2")
    model = RoundPipe(nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)]))
    optimizer = roundpipe.optim.AdamW(model)

    def step() -> None:
        waiting = [model.submit((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.sum()) for _ in range(2)]
        model.step(optimizer)
        assert all(pending.loss().isfinite() for pending in waiting)
        model.synchronize()

    step()
    before = thread_states_so_far()
    for _ in range(10):
        step()
    assert thread_states_so_far() == before + 1
