# %% [markdown]
# # 02 · The log-prob kernel: two sweeps over the vocabulary instead of three, and no logits
#
# Everything SEED does to a token needs its log-probability: the student's with a gradient, the
# snapshot's, the reference's and the teacher's without. The obvious code makes a row of logits for
# each, 151,936 numbers to read off one. `losses.chunked_logprob` never holds such a row. This
# notebook derives how, checks it in float64 against autograd, counts its matrix products, and
# measures memory and time here and now on small shapes.
#
# You need: softmax, the chain rule, what autograd keeps for backward. Times are ratios, never
# seconds: your machine is not ours.
#
# Time: about 20 seconds on one CPU thread (`SEED_MINI_QUICK=1`: smaller shapes, half of that).

# %%
import contextlib
import importlib.util
import io
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

# the profiler announces itself on every use
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
HERE = Path.cwd() if (Path.cwd() / "build.py").exists() else Path.cwd() / "notebooks"
# Colab: fetch the project ...
if not (HERE.parent / "losses.py").exists():
    HERE = Path.cwd() / "seed_mini" / "notebooks"
    if not HERE.exists():
        subprocess.run(["git", "clone", "-q", "--depth", "1",
                        "https://github.com/seed-mini/seed_mini"], check=True)
# ... and what it needs
if any(importlib.util.find_spec(name) is None for name in ("torch", "matplotlib")):
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-r",
                    str(HERE.parent / "requirements.txt")], check=True)
sys.path[:0] = [str(HERE), str(HERE.parent)]

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import kernel_benchmark
import losses

QUICK = os.environ.get("SEED_MINI_QUICK") == "1"
torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 100, "font.size": 9, "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False})
# Told apart by the colour-blind, and in grey by line and marker.
STYLES = {"naive log_softmax": dict(color="#D55E00", ls="--", marker="s"),
          "recompute (checkpoint)": dict(color="#666666", ls=":", marker="^"),
          "seed_mini": dict(color="#0072B2", ls="-", marker="o")}


def example(N: int, H: int, V: int, dtype=torch.float64, scale: float = 1.0):
    """hidden [N, H], head [V, H], labels [N], and the gradient [N] that some loss sends back;
    seeded."""
    rng = torch.Generator().manual_seed(0)
    h, w = (scale * torch.randn(N, H, generator=rng, dtype=torch.float64),
            torch.randn(V, H, generator=rng, dtype=torch.float64) / H**0.5)
    return (h.to(dtype), w.to(dtype), torch.randint(V, (N,), generator=rng),
            torch.randn(N, generator=rng, dtype=torch.float64))


# %% [markdown]
# ## 1. Why the logits do not fit
#
# Qwen3-1.7B: V = 151,936 tokens in the vocabulary, H = 2,048 numbers in a hidden state. One row of
# logits in fp32 is 0.6 MB. A micro-batch of 8,192 tokens (the trainer's `micro_tokens=8192`) has 5
# GB of logits, more than the model's weights (1.7 billion in bf16: 3.4 GB), and backward needs
# several tensors of that size at once: the logits, their softmax, its gradient. What has to be
# *kept* without them is a hidden state per token.

# %%
V, H, N = 151_936, 2_048, 8_192
gb = lambda numbers, size: numbers * size / 1e9
lines = {"one row of logits, fp32 (MB)": 1e3 * gb(V, 4), "all logits, fp32 (GB)": gb(N * V, 4),
         "logits + softmax + gradient, fp32 (GB)": 3 * gb(N * V, 4),
         "model weights, bf16 (GB)": gb(1.7e9, 2), "the head itself, bf16 (GB)": gb(V * H, 2),
         "hidden states, bf16 (GB)": gb(N * H, 2),
         "work of one sweep, 2 N H V (TFLOP)": 2 * N * H * V / 1e12}
for name, value in lines.items():
    print(f"{name:40s}{value:8.2f}")
assert (0.6 < lines["one row of logits, fp32 (MB)"] < 0.61
        and 4.9 < lines["all logits, fp32 (GB)"] < 5.0 > lines["model weights, bf16 (GB)"])
assert V / H > 74, "a row of logits is 74 times a hidden state"

# %% [markdown]
# The first saving costs nothing: only *response* positions need a log-prob. With the paper's
# lengths, a prompt of 2,048 tokens and a response of at most 512, that is a fifth of the positions,
# so `policy.response_hidden` picks them *before* the head. What follows is about the fifth that is
# left.

# %%
assert 512 / (2048 + 512) == 0.2

# %% [markdown]
# ## 2. Three matrix products
#
# With $z = hW^\top/T$, $p = \mathrm{softmax}(z)$, one sampled token $y$ per row, and
# $d = \partial L/\partial \log p_y$, one number per row:
#
# | | product | shape | needed for |
# |---|---|---|---|
# | 1 | $z = h W^\top / T$ | [N, H] [H, V] | $\log p_y$ |
# | 2 | $\partial L/\partial h = G W$ | [N, V] [V, H] | everything below the head |
# | 3 | $\partial L/\partial W = G^\top h$ | [V, N] [N, H] | only if the head trains |
#
# where $G = d\,(e_y - p)/T$ is [N, V]. Each is one *sweep*: 2 N H V floating-point operations. Here
# they are by hand, against autograd:

# %%
h, w, y, d = example(6, 8, 50)
T = 0.7
# sweep 1
z = h @ w.T / T
G = d[:, None] * (F.one_hot(y, 50) - z.softmax(1)) / T
# sweeps 2 and 3
by_hand = G @ w, G.T @ h


def naive(h, w, y, T=1.0):
    """The obvious code, our reference below."""
    return torch.log_softmax(h @ w.T / T, 1).gather(1, y[:, None])[:, 0]


hg, wg = h.clone().requires_grad_(), w.clone().requires_grad_()
auto = torch.autograd.grad((d * naive(hg, wg, y, T)).sum(), (hg, wg))
assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(by_hand, auto))
print("three products by hand = autograd, to",
      max((a - b).abs().max().item() for a, b in zip(by_hand, auto)))

# %% [markdown]
# The naive code keeps an [N, V] tensor from product 1 until product 2. The usual remedy (TRL,
# Liger, torch, verl) is to keep only $h$ and to *recompute* $z$ in backward, a chunk of rows at a
# time. That bounds the memory and costs one more sweep. Let us count, by watching every matrix
# product that PyTorch dispatches:


# %%
class CountSweeps(TorchDispatchMode):
    """Adds up the floating-point operations of every matrix product, in units of one sweep (a
    class, because torch wants one)."""

    def __init__(self, N, H, V):
        super().__init__()
        self.unit, self.flops = 2 * N * H * V, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def sweeps(f, h, w, y, train_hidden=True, train_head=False) -> float:
    """Sweeps of forward and backward of f(h, w, y)."""
    h, w = h.clone().requires_grad_(train_hidden), w.clone().requires_grad_(train_head)
    wanted = [x for x in (h, w) if x.requires_grad]
    with CountSweeps(*h.shape, len(w)) as count:
        logp = f(h, w, y)
        if wanted:
            torch.autograd.grad(logp.sum(), wanted)
    return count.flops / count.unit


# which other libraries are not installed does not matter here
with contextlib.redirect_stdout(io.StringIO()):
    contestants = {name: f for name, f in kernel_benchmark.contestants().items() if name in STYLES}
h, w, y, _ = example(64, 16, 10_000, torch.float32)
counted = {}
print(f"{'sweeps, V = 10,000':28s}{'no gradient':>12s}{'frozen head':>13s}{'trainable head':>16s}")
for name, f in contestants.items():
    counted[name] = [sweeps(f, h, w, y, False), sweeps(f, h, w, y), sweeps(f, h, w, y, True, True)]
    print(f"{name:28s}{counted[name][0]:12.2f}{counted[name][1]:13.2f}{counted[name][2]:16.2f}")
assert [round(x, 2) for x in counted["naive log_softmax"]] == [1, 2, 3]
assert [round(x, 2) for x in counted["recompute (checkpoint)"]] == [1, 3, 4]
assert [round(x, 2) for x in counted["seed_mini"]] == [1, 2, 4]

# %% [markdown]
# Ours takes two with a frozen head (the usual case: LoRA leaves the head alone), with no [N, V]
# anywhere. How?
#
# ## 3. The trick: the gradient before the loss
#
# $$\frac{\partial L}{\partial h} =
#   \underbrace{\frac{\partial L}{\partial \log p_y}}_{\text{one number, known later}} \cdot
#   \underbrace{\frac{1}{T}\Big(W_y - \sum_j p_j W_j\Big)}_{\text{unit gradient: no loss in it}}$$
#
# Whatever the loss will be, it reaches a row's hidden state through the single number
# $\partial L/\partial\log p_y$. So the second factor, one row of H numbers, can be formed in
# *forward*, while the probabilities of the chunk are at hand, and backward is one multiply. Product
# 2 moves from backward to forward, and nothing is computed twice.
#
# $\sum_j p_j W_j$ is attention with one query: keys W, values W. And attention can be done in one
# pass over the keys, tile by tile, with a *running maximum* (FlashAttention's way). With the
# largest logit so far $m$, $S = \sum_j e^{z_j - m}$ and $A = \sum_j e^{z_j - m} W_j$, a new tile
# with maximum $m'$ needs
#
# $$m_{new} = \max(m, m'), \quad c = e^{m - m_{new}}, \quad
#   S \leftarrow c\,S + \sum_{tile} e^{z_j - m_{new}}, \quad
#   A \leftarrow c\,A + \sum_{tile} e^{z_j - m_{new}} W_j .$$
#
# One reading of the head feeds both products. At the end $\log Z = m + \ln S$ and
# $\sum_j p_j W_j = A/S$. In ten lines, for teaching:

# %%
def tiled(h, w, y, tile):
    """(log p_y [N], unit gradient [N, H]) with a running maximum over tiles of the vocabulary; T =
    1. The real one is losses._sweep."""
    m = torch.full((len(h), 1), float("-inf"), dtype=h.dtype)
    S, A = torch.zeros(len(h), 1, dtype=h.dtype), torch.zeros_like(h)
    for v in range(0, len(w), tile):
        # product 1 of this tile ...
        z = h @ w[v:v + tile].T
        m_new = torch.maximum(m, z.amax(1, keepdim=True))
        e, c = (z - m_new).exp(), (m - m_new).exp()
        # ... and product 2
        S, A, m = c * S + e.sum(1, keepdim=True), c * A + e @ w[v:v + tile], m_new
    return (h * w[y]).sum(1) - (m + S.log())[:, 0], w[y] - A / S


h, w, y, d = example(20, 16, 301)
hg = h.clone().requires_grad_()
reference = naive(hg, w, y)
(auto,) = torch.autograd.grad((d * reference).sum(), hg)
# any tile width gives the same
for tile in (1, 7, 64, 301):
    logp, unit = tiled(h, w, y, tile)
    assert torch.allclose(logp, reference, rtol=1e-12)
    assert torch.allclose(d[:, None] * unit, auto, rtol=1e-9, atol=1e-14)
print("tiles of 1, 7, 64 and 301 columns agree with autograd")
# logits in the hundreds: exp alone overflows in fp32
big = 400 * h.float()
assert ((big @ w.float().T).exp().isinf().any()
        and tiled(big, w.float(), y, 64)[0].isfinite().all()), "that is what the maximum is for"

# %% [markdown]
# The real kernel differs in one point of numerics. It treats $y$ against *the rest*: with
# $R = \ln\sum_{j\ne y} e^{z_j}$ it returns $\log p_y = \mathrm{logsigmoid}(z_y - R)$ and scales the
# gradient by $1 - p_y = \sigma(R - z_y)$. For a token the policy is sure of, $p_y$ rounds to 1 in
# fp32 and $1 - p_y$, computed as a difference, to 0; computed as a sigmoid it keeps its digits.

# %%
h1, w1, y1 = torch.tensor([[1.0]]), torch.tensor([[0.0], [40.0]]), torch.tensor([1])
sure = losses.chunked_logprob(h1, w1, y1)
print(f"a token 40 nats ahead: log_softmax {naive(h1, w1, y1).item():.1e}, kernel "
      f"{sure.item():.4e}, true "
      f"{-torch.tensor(-40.0, dtype=torch.float64).exp().log1p().item():.4e}")
assert naive(h1, w1, y1).item() == 0.0
assert torch.allclose(sure.double(), -torch.tensor([-40.0], dtype=torch.float64).exp().log1p(),
                      rtol=1e-6, atol=0)

# %% [markdown]
# ### Checked
#
# Against autograd in float64: log-prob, both gradients, several temperatures and chunk sizes,
# vocabularies smaller and larger than a tile; and torch's own `gradcheck` (finite differences).

# %%
worst = 0.0
for V in (97, losses.TILE["cpu"] + 501):
    h, w, y, d = example(23, 12, V, scale=3)
    for T in (0.4, 1.0, 2.0):
        for rows in (1, 5, 23, None):
            for train_head in (False, True):
                ours, refs = [], []
                for f, out in ((lambda *x: losses.chunked_logprob(*x, temperature=T,
                                                                  rows_per_chunk=rows), ours),
                               (lambda *x: naive(*x, T), refs)):
                    hg, wg = h.clone().requires_grad_(), w.clone().requires_grad_(train_head)
                    logp = f(hg, wg, y)
                    wanted = [hg, wg] if train_head else [hg]
                    out += [logp.detach(), *torch.autograd.grad((d * logp).sum(), wanted)]
                worst = max(worst, max((a - b).abs().max().item() for a, b in zip(ours, refs)))
print(f"largest difference to autograd: {worst:.1e}")
assert worst < 1e-11
h, w, y, _ = example(4, 3, 11)
assert torch.autograd.gradcheck(lambda h, w: losses.chunked_logprob(h, w, y, temperature=0.7,
                                                                    rows_per_chunk=3),
                                (h.requires_grad_(), w.requires_grad_()))

# %% [markdown]
# ## 4. Memory, measured
#
# The most bytes held at once during forward and backward, beyond the inputs, as the allocator saw
# them. Frozen head, fp32, growing vocabulary. Naive and recompute (chunks of 256 rows, each over
# the whole vocabulary) grow with V. The kernel stays where it is once the vocabulary is wider than
# a tile: its scratch is rows x tile.

# %%
N, H, ROWS = (128, 32, 32) if QUICK else (512, 64, 64)
vocabularies = [4096, 8192, 16384, 32768] if QUICK else [4096, 8192, 16384, 32768, 65536]


def step(f, h, w, y, train_head=False):
    """Forward and backward of f, as a function without arguments."""
    hg, wg = h.clone().requires_grad_(), w.clone().requires_grad_(train_head)
    return lambda: torch.autograd.grad(f(hg, wg, y).sum(), [hg, wg] if train_head else [hg])


runs = dict(contestants, seed_mini=lambda *x: losses.chunked_logprob(*x, rows_per_chunk=ROWS))
peak = {name: [] for name in runs}
for V in vocabularies:
    h, w, y, _ = example(N, H, V, torch.float32)
    for name, f in runs.items():
        run = step(f, h, w, y)
        # warm up
        run()
        peak[name].append(kernel_benchmark.peak_extra_bytes(run, "cpu") / 2**20)
fig, ax = plt.subplots(figsize=(6.5, 3.4))
for name, values in peak.items():
    ax.plot(vocabularies, values, label=name, **STYLES[name])
ax.set(xscale="log", yscale="log", xlabel="vocabulary V (tokens)", ylabel="peak extra memory (MiB)",
       title=f"N = {N} tokens, H = {H}, fp32, forward + backward")
ax.set_xticks(vocabularies, [f"{v:,}" for v in vocabularies])
ax.minorticks_off()
ax.legend(loc="upper left", fontsize=8)
fig.tight_layout()
plt.show()
# one [N, V] tensor
one = [N * V * 4 / 2**20 for V in vocabularies]
print("in units of one [N, V] tensor, at the largest V:",
      {name: round(values[-1] / one[-1], 3) for name, values in peak.items()})
held = zip(peak["naive log_softmax"], one)
assert all(v >= o for v, o in held), "naive holds at least the logits"
assert (peak["seed_mini"][-1] < 1.1 * peak["seed_mini"][0]
        and peak["naive log_softmax"][-1] > 0.9 * len(vocabularies) * peak["naive log_softmax"][0])
bound = (ROWS * (4 * losses.TILE["cpu"] + 12 * H) + 3 * 4 * N * H) / 2**20
print(f"kernel: {peak['seed_mini'][-1]:.2f} MiB; what the source promises, rows x (4 tile + 12 H) "
      f"bytes of scratch and a few [N, H]: {bound:.2f} MiB")
assert peak["seed_mini"][-1] < 1.25 * bound

# %% [markdown]
# ## 5. Time, measured
#
# As a ratio to the bare matrix products (two GEMMs, nothing else), the median over interleaved
# rounds, so that what disturbs one disturbs all. Fewer sweeps do not automatically mean less time:
# the exponentials cost, too, and on a small head they cost as much as the products. The more
# columns H the hidden state has, the more the sweeps decide.

# %%
N, V, ROUNDS = (128, 8192, 5) if QUICK else (256, 16384, 7)
widths = [64, 512]
times = {name: [] for name in contestants}


def seconds(run) -> float:
    """CPU time of one call on this thread: what other programs do meanwhile does not count."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


for H in widths:
    h, w, y, _ = example(N, H, V, torch.float32)
    logits = torch.empty(N, V)
    floor = lambda: torch.mm(h, w.t(), out=logits) @ w
    steps = {name: step(f, h, w, y) for name, f in contestants.items()}
    ratios = {name: [] for name in steps}
    # the first round warms up
    for k in range(ROUNDS + 1):
        base = seconds(floor)
        for name, run in steps.items():
            ratios[name].append(seconds(run) / base)
    for name in steps:
        times[name].append(statistics.median(ratios[name][1:]))
print(f"{'time / two bare GEMMs':28s}" + "".join(f"{f'H = {H}':>10s}" for H in widths))
for name, values in times.items():
    print(f"{name:28s}" + "".join(f"{v:10.2f}" for v in values))
assert QUICK or times["seed_mini"][1] < times["recompute (checkpoint)"][1], (
    "one sweep fewer shows, once the products dominate")
assert QUICK or sum(v[1] for v in times.values()) < sum(v[0] for v in times.values()), (
    "a wider hidden state brings them closer to the floor")

# %% [markdown]
# One dial trades memory for time: `rows_per_chunk`, how many tokens share a sweep. A single row
# reads the whole head for one token, which no processor likes; from a few dozen to a few hundred
# rows on, the products run at full speed and more rows only cost memory. (By default the kernel
# takes as many as fit in `losses.SCRATCH_BUDGET`.)

# %%
N, H, V = (64, 128, 8192) if QUICK else (256, 256, 16384)
h, w, y, _ = example(N, H, V, torch.float32)
dial = [1, 4, 16, 64] if QUICK else [1, 4, 16, 64, 256]
runs = {rows: step(lambda *x, rows=rows: losses.chunked_logprob(*x, rows_per_chunk=rows), h, w, y)
        for rows in dial}
clock = {rows: [] for rows in dial}
for k in range(4):
    for rows, run in runs.items():
        clock[rows].append(seconds(run))
clock = {rows: statistics.median(t[1:]) for rows, t in clock.items()}
memory = {rows: kernel_benchmark.peak_extra_bytes(run, "cpu") / 2**20 for rows, run in runs.items()}
fig, ax = plt.subplots(figsize=(6.5, 3.2))
ax.plot(dial, [clock[r] / clock[dial[-1]] for r in dial], color="#0072B2", marker="o",
        label="time (left)")
ax.set(xscale="log", xlabel="rows_per_chunk (tokens)", ylabel=f"time, relative to {dial[-1]} rows")
ax.set_xticks(dial, dial)
ax.minorticks_off()
other = ax.twinx()
other.plot(dial, [memory[r] for r in dial], color="#D55E00", ls="--", marker="s",
           label="peak memory (right)")
other.set(ylabel="peak extra memory (MiB)", ylim=(0, None))
other.spines["right"].set_visible(True)
ax.legend(*[a + b
            for a, b in zip(ax.get_legend_handles_labels(), other.get_legend_handles_labels())],
          loc="upper center", fontsize=8)
fig.tight_layout()
plt.show()
print({rows: f"{clock[rows] / clock[dial[-1]]:.2f} x, {memory[rows]:.2f} MiB" for rows in dial})
assert clock[1] > 1.5 * clock[dial[-1]] and memory[dial[-1]] > 5 * memory[1]

# %% [markdown]
# ## 6. A head that trains, tied or not
#
# $\partial L/\partial W = G^\top h$ sums over rows, each weighted by its own
# $\partial L/\partial \log p$. Before the loss is known, the sum cannot be formed. Two ways out:
#
# * a small vocabulary (one tile; probabilities within `losses.SOFTMAX_BUDGET`): keep the [N, V]
#   probabilities for backward. **3** sweeps, the floor.
# * a large one: compute them once more. **4** sweeps, like everybody.
#
# The tiny base has a *tied* head: the embedding matrix is the vocabulary matrix. It trains in full,
# so it takes the first way. Its gradient then has two sources, lookup and head, and both must
# arrive:

# %%
h, w, y, _ = example(40, 16, 900, torch.float32)
assert round(sweeps(losses.chunked_logprob, h, w, y, True, True), 2) == 3.0
assert round(counted["seed_mini"][2], 2) == 4.0
E = torch.randn(900, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ids = torch.arange(40)
grads = []
for f in (naive, losses.chunked_logprob):
    tied = E.clone().requires_grad_()
    (f(torch.tanh(F.embedding(ids, tied)), tied, y) * torch.linspace(-1, 1, 40)).sum().backward()
    grads.append(tied.grad)
print(f"tied head, largest difference to autograd: {(grads[0] - grads[1]).abs().max():.1e}")
assert torch.allclose(*grads, rtol=1e-9, atol=1e-13)

# %% [markdown]
# ## 7. When it does not help
#
# * **Nothing to save.** With a vocabulary of 900 tokens the logits are small, and a naive
#   implementation is as good.
# * **A trainable head with a large vocabulary** takes as many sweeps as recomputing.
# * **Losses that differentiate more than $\log p_y$**: an entropy bonus, top-k distillation, a full
#   KL. Their gradient is not one number per row. The kernel reports the entropy, from the same
#   sweep, but as a number without gradient. (SEED's losses need $\log p_y$ only, by design:
#   notebook 01.)
# * **Second derivatives.** The unit gradient is a constant to autograd; asking again raises an
#   error instead of a wrong answer.

# %%
h, w, y, _ = example(8, 4, 30)
hg = h.clone().requires_grad_()
logp, entropy = losses.chunked_logprob(hg, w, y, return_entropy=True)
exact = torch.distributions.Categorical(logits=h @ w.T).entropy()
assert torch.allclose(entropy, exact) and not entropy.requires_grad, "right, and only a number"
(first,) = torch.autograd.grad((logp**2).sum(), hg, create_graph=True)
try:
    first.sum().backward()
    refused = False
except RuntimeError as error:
    refused = True
    print("second derivative:", error)
assert refused

# %% [markdown]
# ## 8. bf16: where to round
#
# A CPU's bf16 matrix product returns bf16: 8 significant bits, an error of $2^{-9}$ of the *size*
# of a logit. For a logit of 30 that is 0.06, and a log-prob inherits it. In a policy ratio
# $e^{0.06}$ is a third of the clip range of 0.2, from rounding alone. The kernel therefore
# subtracts the sampled token's own logit, computed exactly, *before* the product is rounded: the
# error is then $2^{-9}$ of the distance to that logit, and near competitors, the ones that matter,
# are accurate. (On a GPU the kernel has the product returned in fp32, and there is nothing to fix.)

# %%
assert abs(30 * 2**-9 - 0.06) < 0.002 and abs((math.exp(0.06) - 1) / 0.2 - 1 / 3) < 0.03
N, H, V = 400, 64, 2000
h, w, _, _ = example(N, H, V, scale=6)
# a common offset of 30: softmax does not care, bf16 does
h[:, 0], w[:, 0] = 24.0, 1.25
h, w = h.bfloat16(), w.bfloat16()
exact = torch.log_softmax(h.double() @ w.double().T, 1)
# tokens as a policy samples them
y = torch.multinomial(exact.exp(), 1, generator=torch.Generator().manual_seed(0))[:, 0]
truth = exact.gather(1, y[:, None])[:, 0]
rounded = contestants["naive log_softmax"](h, w, y).double()
kernel = losses.chunked_logprob(h, w, y).double()
errors = {"naive log_softmax": (rounded - truth).abs(), "seed_mini": (kernel - truth).abs()}
fig, ax = plt.subplots(figsize=(6.5, 3.2))
for name, error in errors.items():
    filled = "none" if name == "naive log_softmax" else STYLES[name]["color"]
    ax.scatter(truth, error.clamp(min=1e-6), s=14, facecolors=filled, color=STYLES[name]["color"],
               marker=STYLES[name]["marker"], linewidths=0.8, label=f"{name}, bf16 inputs")
ax.axhline(30 * 2**-9, color="black", ls=":", lw=1.2, label="$2^{-9}$ of a logit of 30")
ax.set(yscale="log", xlabel="true log-prob of the sampled token (nats)",
       ylabel="absolute error (nats)")
ax.legend(fontsize=8, loc="lower left")
fig.tight_layout()
plt.show()
print({name: f"mean error {e.mean():.1e}, largest {e.max():.1e} nats"
       for name, e in errors.items()})
assert errors["seed_mini"].mean() < errors["naive log_softmax"].mean() / 3

# %% [markdown]
# ## 9. Traps, and what the kernel says to them
#
# Each of these has cost somebody a training run: a temperature used for sampling and forgotten in
# scoring; a label of -100 (the usual "ignore me") that gives a finite number and a gradient; one
# bad row that poisons a whole batch.

# %%
h, w, y, _ = example(5, 4, 30)
assert not torch.allclose(losses.chunked_logprob(h, w, y, temperature=0.4),
                          losses.chunked_logprob(h, w, y)), "the temperature is part of the policy"
try:
    losses.chunked_logprob(h, w, torch.where(torch.arange(5) == 3, -100, y))
    refused = False
except ValueError as error:
    refused = True
    print(error)
assert refused
broken = h.clone()
broken[2] = float("nan")
broken.requires_grad_()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    logp = losses.chunked_logprob(broken, w, y)
print(said[-1].message)
logp.nansum().backward()
others = torch.arange(5) != 2
assert logp[2].isnan() and torch.allclose(logp[others], losses.chunked_logprob(h, w, y)[others])
assert (broken.grad[2] == 0).all(), "nothing comes from the bad row"
assert broken.grad.isfinite().all(), "one bad row leaves the others alone"

# %% [markdown]
# ## On real shapes
#
# `python notebooks/kernel_benchmark.py`, two CPU cores, torch 2.13.0, bfloat16, frozen head, with
# TRL 1.16.0 and Liger 0.8.5 installed; commit eec99fb. Times are multiples of the two bare matrix
# products, the implementations taking turns in one run; MiB are the peak beyond the inputs. **Not
# yet measured on a GPU.**
#
# |  | Qwen3-1.7B: time, MiB | error | SmolLM2-135M: time, MiB | error |
# |---|---|---|---|---|
# | two matrix products, the floor | 1.00 (0.81 s) | | 1.00 (0.14 s) | |
# | **seed_mini** | **1.07**, 18 | 2e-03 | **1.27**, 18 | 3e-03 |
# | naive `log_softmax` | 1.55, 890 | 3e-02 | 3.09, 576 | 3e-02 |
# | recompute in backward | 2.29, 447 | 3e-02 | 4.28, 145 | 3e-02 |
# | Liger | 3.01, 64 | 3e-02 | 3.86, 82 | 3e-02 |
# | TRL | 5.06, 500 | 3e-02 | 10.5, 994 | 3e-02 |
# | torch `F.linear_cross_entropy` | 8.72, 5 | 5e-02 | 4.73, 3 | 4e-02 |
#
# Shapes: 512 tokens, H 2048, V 151,936; 1024 tokens, H 576, V 49,152. With a trainable head like
# the tiny model's (10,000 tokens, H 128, V 1,500, float32; three products): ours 1.45, torch 1.48,
# recompute 1.87, Liger 1.90, naive 2.19, TRL 4.56; ours takes 70 MiB there and torch 9.

# %% [markdown]
# ## What to remember
#
# * Pick the positions first, then the vocabulary.
# * The loss reaches a row through one number, so the row's gradient can be made before the loss:
#   two sweeps instead of three, nothing [N, V] kept.
# * A running maximum makes both sums in one reading of the head.
# * A trainable head, or a loss on the whole distribution, needs the probabilities again.
#
# `python notebooks/kernel_benchmark.py` runs the benchmark on real shapes, against every other
# implementation that is installed.
