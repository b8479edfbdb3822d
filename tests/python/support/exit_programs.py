"""Programs for test_exit.py: how a process ends. Each is the last lines of a script that begins with SETUP."""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """The last lines of a script, its exit code, and what its last line on stderr says (nothing: not a word there)."""

    lines: str
    code: int = 0
    says: str = ""


# What a script does last.
ENDINGS = {
    "after an asynchronous step": Program("call(); model.step(update)"),
    "after a fused step": Program("call(other); other.step(optimizer)"),
    "after a fused step, with an exit handler that takes a while": Program(
        """
def busy():
    until = time.monotonic() + 0.2
    while time.monotonic() < until: [bytearray(1000) for _ in range(1000)]
early.append(busy)
atexit.register(busy)
for _ in range(3): call(other); other.step(optimizer, max_grad_norm=1.0)
"""
    ),
    "after a call whose backward runs": Program("call()"),
    "with a batch submitted": Program("pending = [submit() for _ in range(3)]"),
    "with a batch submitted and dropped": Program("submit()"),
    "in the middle of many steps": Program("for _ in range(5): call(); model.step(update)"),
    "with outputs alive": Program(
        "outputs = model(value); loss = outputs.sum(); keep = [outputs, loss]; keep.append(keep)"
    ),
    "with a graph half-way": Program("outputs = model(value); outputs.sum().backward(retain_graph=True)"),
    "without any call": Program("pass"),
    "with the model deleted": Program("call(); model.step(update); del model"),
    "with the model in a cycle": Program("call(); model.me = model"),
    "with an error not looked at": Program("layer.fail = True\ntry: call()\nexcept ValueError: pass"),
    "with an error in a variable": Program("layer.fail = True\ntry: call()\nexcept ValueError as error: kept = error"),
    "with an error pending in step_fn": Program("call(); model.step(lambda: 1 / 0)"),
    "with an error pending in the backward": Program(
        # One device may find it while the losses of later microbatches are awaited.
        "layer.fail_backward = True\ntry: call()\nexcept ValueError: pass"
    ),
    "with several pools": Program(
        "call(); roundpipe.devices('virtual:3'); call(); old = roundpipe.devices('virtual:1')"
    ),
    "with a pool that replaces one at work": Program("call(); roundpipe.devices('virtual:3')"),
    "by sys.exit": Program("call(); model.step(update); sys.exit(3)", 3),
    "by os._exit": Program("call(); submit(); model.step(update); os._exit(4)", 4),
    "by sys.exit in a thread": Program(
        "call(); thread = threading.Thread(target=sys.exit, args=(5,)); thread.start(); thread.join()"
    ),
    "by an exception": Program("call(); submit(); model.step(update); raise KeyError('wrong')", 1, "KeyError: 'wrong'"),
    "by an exception in a layer": Program("layer.fail = True; call()", 1, "ValueError: failing"),
    "by an exit in the loss": Program("call(loss_fn=lambda outputs, label: sys.exit(6))", 6),
    "by an exit in a submitted loss": Program("submit(loss_fn=lambda outputs, label: sys.exit(6)).loss()", 6),
    "by an exit in a layer": Program("layer.leave = 7; call()", 7),
    "by an exit in step_fn": Program("call(); model.step(lambda: sys.exit(8), is_async=False)", 8),
    "by an exit in a handler of SIGTERM": Program(
        """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
while True: call(); model.step(update); call(other); other.step(optimizer)
""",
        9,
    ),
    "after an interrupt": Program(
        """
try:
    threading.Timer(0.01, _thread.interrupt_main).start()
    while True: call(); model.step(update)
except KeyboardInterrupt: pass
"""
    ),
    "after calls from a thread": Program(
        """
thread = threading.Thread(target=lambda: (call(), model.step(update)))
thread.start(); thread.join()
"""
    ),
    "with work in an exit handler": Program(
        """
@atexit.register
def work():
    before = float(model.state_dict()["0.weight"].sum())
    call(); model.step(update); call(); model.step(update, is_async=False); call(other); other.step(optimizer)
    other.synchronize()
    expect(before != float(model.state_dict()["0.weight"].sum()))
call()
"""
    ),
    "with a thread that goes on calling": Program(
        """
def forever():
    while True:
        try: call(); model.step(update); model(value); call(other); other.step(optimizer); other.synchronize()
        except roundpipe.RoundPipeError as error:
            message = str(error)
            return expect("the engine has ended" in message or "thread" in message, message)
def pause():
    thread.join(60)
    expect(not thread.is_alive(), "hangs")
early.append(pause)
thread = threading.Thread(target=forever, daemon=True)
thread.start()
time.sleep(0.05)
"""
    ),
    "when everything is tried after the end": Program(
        """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    def forward(self, value): return self.chain(value)
parts = roundpipe.wrap_model_to_roundpipe(Part(), override_config={}, lower_threshold=1, upper_threshold=300)
pool = roundpipe.devices()
call(); model.step(update); call(other); step = other.step(optimizer, max_grad_norm=1.0)
graph = model(value)
pending = submit(); done = submit(); done.loss()
@early.append
def after():
    refused("the engine has ended", {
        **uses(),
        "len": lambda: len(pool), "iter": lambda: list(pool), "repr": lambda: repr(pool),
        "description": lambda: pool.description, "torch_devices": lambda: pool.torch_devices,
        "memory_report": pool.memory_report, "reset_peak_memory": pool.reset_peak_memory,
        "transfer_report": pool.transfer_report,
        "parts": lambda: parts(value), "parts forward_backward": lambda: parts.forward_backward((value,), loss_fn=loss),
        "parts step": lambda: parts.step(update), "parts synchronize": parts.synchronize,
    })
    for of in (model, other, parts):
        state = of.state_dict()
        expect(all(tensor.isfinite().all() for tensor in state.values()))
        of.load_state_dict(state)
        of.zero_grad()
    expect(all(parameter.isfinite().all() for parameter in other.parameters()))
    optimizer.state_dict()
    expect(step.grad_norm > 0 and not step.skipped and step.updated_blocks > 0)
    expect(len(model.costs()) == 5 and model.host_bytes() > 0 and model.last_plan() is not None)
    expect(len(model.last_records()) > 0 and len(pending.records()) > 0)
"""
    ),
}

# What a process does around a fork; `child` ends the child by sys.exit, and gives its exit code to expect().
FORKS = {
    "a child that does nothing": Program("call(); expect_child(lambda: None)"),
    "a child that tries everything": Program(
        """
pool = roundpipe.devices()
call(); model.step(update); call(other); step = other.step(optimizer, max_grad_norm=1.0)
graph = model(value)
pending = submit()
def tries():
    refused("made by fork", {
        **uses(),
        "len": lambda: len(pool), "memory_report": pool.memory_report, "transfer_report": pool.transfer_report,
        "state_dict": model.state_dict, "fused state_dict": other.state_dict, "host_bytes": model.host_bytes,
        "records": pending.records, "last_records": model.last_records, "host_memory": optimizer.host_memory,
    })
expect_child(tries)
pending.loss(); graph.sum().backward(); model.step(update); model.synchronize()
"""
    ),
    "a child that drops everything": Program(
        """
def drops():
    global model, other, optimizer, keep
    del model, other, optimizer
    keep = None
    gc.collect()
for _ in range(3):
    call(); model.step(update); call(other); other.step(optimizer)
    keep = [model(value), submit(), roundpipe.devices(), other(value)]
    keep.append(keep)
    expect_child(drops)
"""
    ),
    "children all the time": Program(
        """
layer.slow = 0.002
def drops():
    keep.clear()
    gc.collect()
thread = threading.Thread(target=lambda: [(call(), model.step(update)) for _ in range(40)])
thread.start()
while thread.is_alive():
    keep = [submit(other), other(value)]
    expect_child(drops)
    other.step(optimizer)
"""
    ),
    "a child of a child": Program(
        "call(); expect_child(lambda: (expect_child(lambda: call_is_refused()), call_is_refused()))"
    ),
    "a child that was made before": Program("expect_child(lambda: (call(), model.step(update), model.synchronize()))"),
    "a child that ends by os._exit": Program("call(); submit(); expect_child(lambda: os._exit(11), 11)"),
    "a child that ends by an exception": Program(
        "call(); submit(); expect_child(lambda: 1 / 0, 1)", 0, "ZeroDivisionError: division by zero"
    ),
    "a child made in a layer": Program(
        "layer.fork = True; call(); expect(layer.codes and not any(layer.codes), layer.codes)"
    ),
    "a process of multiprocessing": Program(
        """
call(); submit()
process = multiprocessing.get_context("fork").Process(target=call_is_refused)
process.start(); process.join(60)
expect(process.exitcode == 0, process.exitcode)
call(); model.step(update)
"""
    ),
    "a process of multiprocessing that fails": Program(
        """
call(); submit()
process = multiprocessing.get_context("fork").Process(target=call)
process.start(); process.join(60)
expect(process.exitcode == 1, process.exitcode)
""",
        0,
        "'spawn', or fork before the first model is made",
    ),
    "workers of a DataLoader in the middle of calls": Program(
        """
layer.slow = 0.005
rows = [torch.full((8,), float(row)) for row in range(24)]
loader = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
for _ in range(2):
    waiting = [submit()]
    for batch in loader:
        waiting.append(model.submit((batch,), loss_fn=loss))
        model.step(update)
    expect(len([pending.loss() for pending in waiting]) == 7)
"""
    ),
    "a child that steps plain parameters": Program(
        """
roundpipe.optim.set_threads(3)
plain = nn.Linear(64, 64)
own = roundpipe.optim.AdamW(plain.parameters())
def steps():
    for _ in range(3): own.zero_grad(); plain(torch.ones(2, 64)).sum().backward(); own.step()
steps(); call()
expect_child(steps)
"""
    ),
}

SETUP = """
class Layer(nn.Linear):
    fail = fail_backward = fork = False
    leave = slow = 0
    def forward(self, value):
        time.sleep(self.slow)
        if self.leave: sys.exit(self.leave)
        if self.fail: raise ValueError("failing")
        if self.fork and threading.current_thread() is not threading.main_thread():
            made = os.fork()
            if made == 0: sys.exit(0)
            self.codes.append(end_of(made))
        value = super().forward(value)
        if self.fail_backward:
            def hook(gradient):
                time.sleep(0.02)
                raise ValueError("failing")
            value.register_hook(hook)
        return value
def chain(layer): return nn.Sequential(layer, *[nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(4)])
def loss(outputs, label): return outputs.square().sum() * 1e-3
torch.manual_seed(0)
layer = Layer(8, 8)
layer.codes = []
value = torch.randn(6, 8)
def call(of=None, loss_fn=loss): (of or model).forward_backward((value,), loss_fn=loss_fn)
def submit(of=None, loss_fn=loss): return (of or model).submit((value,), loss_fn=loss_fn)
def update():
    for parameter in model.parameters():
        with torch.no_grad(): parameter.sub_(parameter.grad, alpha=1e-3)
        parameter.grad = None
def expect(holds, *what):
    if not holds: print("not as expected:", *what, file=sys.stderr); traceback.print_stack()
def refused(why, uses):
    for name, use in uses.items():
        try: use()
        except roundpipe.RoundPipeError as error: expect(why in str(error), name, error)
        except BaseException as error: expect(False, name, repr(error))
        else: expect(False, name, "went through")
def call_is_refused(): refused("made by fork", {"call": call})
def uses():
    return {
        "devices": roundpipe.devices, "set devices": lambda: roundpipe.devices("virtual:1"),
        "a new model": lambda: roundpipe.RoundPipe(nn.Linear(2, 2)),
        "forward": lambda: model(value), "forward_backward": call, "submit": submit, "loss": pending.loss,
        "step": lambda: model.step(update), "fused step": lambda: other.step(optimizer),
        "synchronize": model.synchronize, "fused synchronize": other.synchronize,
        "predict_memory": lambda: model.predict_memory((value,), loss_fn=loss),
        "backward": lambda: graph.sum().backward(),
        "a new optimizer": lambda: roundpipe.optim.SGD(other, lr=1.0),
    }
def end_of(child):
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "hangs"
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1])
def expect_child(work, code=0):
    made = os.fork()
    if made == 0:
        early.clear()
        work()
        sys.exit(0)
    got = end_of(made)
    expect(got == code, "the child ended with", got)
"""

# Not before a program that forks first: that child is to have an engine of its own.
MODELS = """
model = roundpipe.RoundPipe(chain(layer))
other = roundpipe.RoundPipe(chain(nn.Linear(8, 8)))
optimizer = roundpipe.optim.AdamW(other)
"""
