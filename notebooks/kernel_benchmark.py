"""The log-prob kernel against the bare matrix products and other libraries: `python
notebooks/kernel_benchmark.py [--quick]`.

Prints a table for each shape: forward and backward as a multiple of the bare matrix products (the
floor), the implementations taking turns in one run. TRL, Liger and cut-cross-entropy take part
where they are installed.
"""
from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from losses import chunked_logprob


def contestants():
    """Name -> function (hidden, weight, labels) -> logp, for every implementation at hand. Other
    packages are optional."""
    def naive(h, w, y):
        """All logits at once."""
        return torch.log_softmax(F.linear(h, w).float(), -1).gather(1, y[:, None])[:, 0]

    def recompute(h, w, y):
        """Chunks of 256 rows whose logits are computed again in backward."""
        return torch.cat([checkpoint(naive, h[i:i + 256], w, y[i:i + 256], use_reentrant=False)
                          for i in range(0, len(h), 256)])

    # the fastest of its settings here; "auto" takes three times as long
    options = torch.nn.LinearCrossEntropyOptions(acc_policy="compact")
    found = {"naive log_softmax": naive, "recompute (checkpoint)": recompute,
             "seed_mini": chunked_logprob,
             "torch": lambda h, w, y: -F.linear_cross_entropy(h, w, y, reduction="none",
                                                              options=options)}
    packages = {
        "TRL": (
            "trl.kernels", lambda m, h, w, y:
            m.ChunkedLogProbFunction.apply(h, w, None, y, 1.0, 32768, None, 1.0, ())[0]),
        "Liger": (
            "liger_kernel.chunked_loss.fused_linear_ppo", lambda m, h, w, y:
            m._ChunkedSelectiveLogProbFunction.apply(h, w, y, None, 1.0, 4096)),
        "cut-cross-entropy": (
            "cut_cross_entropy", lambda m, h, w, y:
            -m.linear_cross_entropy(h, w, y, reduction="none"))}
    for name, (module, call) in packages.items():
        try:
            found[name] = functools.partial(call, importlib.import_module(module))
        except ImportError as missing:
            print(f"{name}: left out ({missing})")
    return found


def peak_extra_bytes(run, device):
    """Most bytes held at once beyond what was there before while run() runs, results included.
    CUDA: the caching allocator's peak. CPU: the peak over every tensor allocation and release, as
    torch.profiler records them (what a GEMM library takes for itself is not seen)."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    # negative: a release
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def compare(N, H, V, dtype, trainable, device, found, rounds=5):
    """One table: forward + backward of every contestant, interleaved, as the median ratio to bare
    GEMMs of the same round."""
    rng = torch.Generator(device).manual_seed(0)
    h, w = (scale * torch.randn(n, H, generator=rng, device=device) for n,
            scale in ((N, 3), (V, H**-0.5)))
    h, w, logits = h.to(dtype), w.to(dtype), torch.empty(N, V, dtype=dtype, device=device)
    hidden, weight = h.clone().requires_grad_(), w.clone().requires_grad_(trainable)
    labels = torch.cat([torch.multinomial((rows @ w.t()).float().softmax(1), 1, generator=rng)[:, 0]
                        for rows in h.split(256)])
    grad = torch.randn(N, generator=rng, device=device)
    exact = torch.cat([h[:16].double() @ tile.double().t() for tile in w.split(4096)],
                      1).log_softmax(1).gather(1, labels[:16, None])[:, 0]

    def floor():
        """The bare matrix products, nothing else."""
        torch.mm(h, w.t(), out=logits)
        return logits @ w, (logits.t() @ h if trainable else None)

    def step(f):
        logp = f(hidden, weight, labels)
        torch.autograd.grad((logp.float() * grad).sum(), [hidden, weight] if trainable
                            else [hidden])
        return logp.detach()

    def seconds(run):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    runs, ratios = {}, {}
    print(f"\n{N} tokens, H = {H}, V = {V}, {str(dtype)[6:]}, "
          f"{'trainable head: 3' if trainable else 'frozen head: 2'} GEMMs take "
          f"{min(seconds(floor) for _ in range(3)):.3f} s\n\n| | time / floor | peak extra MiB | "
          f"error of logp |\n|---|---|---|---|")
    for name, f in found.items():
        run = functools.partial(step, f)
        try:
            error = (run()[:16] - exact).abs().max().item()  # also warms up
            runs[name], ratios[name] = (run, peak_extra_bytes(run, device) / 2**20, error), []
        except Exception as failure:
            # somebody else's kernel, on a device it was not made for: say so and go on
            print(f"| {name} | failed: {str(failure).splitlines()[0][:80]} | | |")
    for _ in range(rounds):
        base = seconds(floor)
        for name, (run, _, _) in runs.items():
            ratios[name].append(seconds(run) / base)
    for name, (_, peak, error) in runs.items():
        print(f"| {name} | {statistics.median(ratios[name]):.2f} | {peak:.1f} | {error:.0e} |")


def main():
    """Command line: the benchmark."""
    parser = argparse.ArgumentParser(description="Benchmark of chunked_logprob against the bare "
                                                 "GEMMs and other libraries.")
    parser.add_argument("--quick", action="store_true", help="small shapes, a few seconds")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, "
          f"{torch.cuda.get_device_name() if device == 'cuda' else threads}")
    shapes = [(512, 256, 16384, torch.bfloat16, False),
              (2048, 128, 1500, torch.float32, True)] if parser.parse_args().quick else [
        (10000, 128, 1500, torch.float32, True),  # a head like this project's tiny model's
        (1024, 576, 49152, torch.bfloat16, False),  # SmolLM2-135M
        (512 if device == "cpu" else 8192, 2048, 151936, torch.bfloat16, False)]  # Qwen3-1.7B
    found = contestants()
    for shape in shapes:
        compare(*shape, device, found)


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on every use
    main()
