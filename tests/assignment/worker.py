"""worker.py: calls the functions of a solution file on request, in a process of its own. Started by
kit.Worker, never by hand.

It knows no answers: a request holds a function's name and its arguments, the reply what came back,
the gradients and the cost. One JSON object a line, on the pipes this process was started with; the
solution itself finds /dev/null as stdin and a log file as stdout, so that what it prints cannot be
taken for a reply.
"""

import contextlib
import functools
import json
import os
import resource
import signal
import sys
import traceback
import types
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Matrix products: name -> position of the first factor.
GEMMS = {"mm": 0, "bmm": 0, "mv": 0}
GEMMS |= {name: 1 for name in "addmm addmm_ baddbmm baddbmm_ addmv addmv_".split()}
# In one reply.
MOST_NUMBERS = 200_000


def unpack(x):
    """A tensor from its JSON form; lists and dicts element by element; everything else as it is."""
    if isinstance(x, dict) and "tensor" in x:
        dtype = getattr(torch, x["dtype"])
        return (
            torch.tensor(x["tensor"], dtype=torch.float64)
            .to(dtype)
            .reshape(x["shape"])
            .requires_grad_(x.get("grad", False))
        )
    return [unpack(item) for item in x] if isinstance(x, list) else x


def pack(x):
    """The JSON form of what a solution returned; an unknown type becomes its name, so that the
    grader can say so."""
    if isinstance(x, torch.Tensor):
        if x.numel() > MOST_NUMBERS:
            return {"type": f"tensor with {x.numel()} elements"}
        return {
            "tensor": x.detach().double().flatten().tolist(),
            "dtype": str(x.dtype)[6:],
            "shape": list(x.shape),
            "grad": x.requires_grad,
        }
    if isinstance(x, (list, tuple)):
        return [pack(item) for item in x[:MOST_NUMBERS]]
    return x if x is None or isinstance(x, (bool, int, float, str)) else {"type": type(x).__name__}


class CountGemms(TorchDispatchMode):
    """Adds up 2 m k n over every matrix product, forward and backward."""

    flop = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in GEMMS:
            a, b = args[GEMMS[name]], args[GEMMS[name] + 1]
            self.flop += 2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1)
        return func(*args, **(kwargs or {}))


def peak_bytes(run) -> int:
    """Most bytes of tensors alive at once while run() runs, beyond those before: from the
    allocator's own records."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    now = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def load(path: str):
    """The solution file as a module, executed anew, so that no call leaves anything behind for the
    next one; compiled once."""
    source = Path(path).read_text(encoding="utf-8")
    module = sys.modules["my_solution"] = types.ModuleType("my_solution")
    module.__file__ = path
    exec(compiled(source, path), module.__dict__)
    return module


compiled = functools.lru_cache(2)(lambda source, path: compile(source, path, "exec"))


def call(module, request: dict) -> dict:
    """Call one function: its value; gradients of sum(value * weight) for the arguments that ask for
    one; cost, if asked."""
    function = getattr(module, request["call"], None)
    if function is None:
        return {"error": "missing", "text": f"there is no function {request['call']} in it"}
    args = [unpack(a) for a in request["args"]]
    before = [unpack(a) for a in request["args"]]
    weight = unpack(request["weight"]) if request.get("weight") else None

    def run():
        value = function(*args, **request["kwargs"])
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        if not leaves or not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value, [None] * len(leaves)
        weighted = weight is not None and weight.shape == value.shape
        loss = (value * weight.to(value.dtype)).sum() if weighted else value.sum()
        return value, list(torch.autograd.grad(loss, leaves, allow_unused=True))

    value, grads = run()
    reply = {
        "value": pack(value),
        "grads": pack(grads),
        "changed": [i for i, (a, b) in enumerate(zip(args, before)) if differ(a, b)],
    }
    if request.get("cost"):
        with CountGemms() as count:
            run()
        reply |= {"flop": count.flop, "peak": peak_bytes(run)}
    return reply


def differ(a, b) -> bool:
    """Whether an argument is not what it was."""
    if not isinstance(a, torch.Tensor):
        return a != b
    return not torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


def answer(request: dict, say) -> dict:
    """One request -> one reply; what the solution raises becomes a reply too, with the line in the
    student's file."""
    try:
        module = load(request["file"])
    # SystemExit and the like too: nothing a submission does may end the grading.
    except BaseException as error:
        return {"error": "load", "text": describe(error, request["file"])}
    say("loaded")
    try:
        if request["call"] == "train":
            sys.path.insert(0, request["modules"])
            import training

            return {"value": training.train(module, **request["kwargs"])}
        return call(module, request)
    except NotImplementedError:
        return {"error": "missing", "text": "it still raises NotImplementedError"}
    except BaseException as error:
        return {"error": type(error).__name__, "text": describe(error, request["file"])}


def describe(error: BaseException, path: str) -> str:
    """Type, message and the last line of the student's file that was involved."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f" (line {lines[-1]} of {Path(path).name})" if lines else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


def main() -> None:
    """Answer requests until stdin ends."""
    torch.set_num_threads(1)
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    limits = {
        resource.RLIMIT_FSIZE: 1 << 25,
        resource.RLIMIT_DATA: 8 << 30,
        resource.RLIMIT_CORE: 0,
    }
    for what, most in limits.items():
        # Some systems cannot limit this.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (most, resource.getrlimit(what)[1]))

    def say(line):
        print(line, file=replies, flush=True)

    say("ready")
    for line in requests:
        request = json.loads(line)
        os.lseek(2, 0, os.SEEK_SET)
        # The log holds what this call prints.
        os.ftruncate(2, 0)
        # CPU seconds; then SIGPROF ends this process.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        reply = json.dumps(answer(request, say))
        signal.setitimer(signal.ITIMER_PROF, 0)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        say(reply)


if __name__ == "__main__":
    main()
