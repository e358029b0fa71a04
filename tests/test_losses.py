"""losses.py against independent oracles: numbers worked out by hand, float64 autograd of the naive
formulas, finite differences.

Section 3 turns every rule around: it edits one line of losses.py into a plausible mistake and
demands that a check above notices.
"""

import itertools
import math
import os
import pathlib
import sys
import types
import warnings

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import losses

sys.path.insert(0, str(pathlib.Path(losses.__file__).parent / "notebooks"))
import kernel_benchmark  # noqa: E402

NAN, INF = float("nan"), float("inf")
# or the profiler, which measures memory below, announces itself
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def close(a, b, tol=1e-12):
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape and (a - b).abs().max() <= tol, f"{a} is not {b}"


def problem(N=7, H=5, V=11, dtype=torch.float64, scale=1.0, seed=0):
    """hidden [N, H], weight [V, H], labels [N], upstream gradient [N]."""
    rng = torch.Generator().manual_seed(seed)
    hidden, weight = scale * torch.randn(N, H, generator=rng), torch.randn(V, H, generator=rng)
    return (
        hidden.to(dtype),
        weight.to(dtype),
        torch.randint(V, (N,), generator=rng),
        torch.randn(N, generator=rng).to(torch.float64),
    )


def naive(hidden, weight, labels, grad, temperature=1.0):
    """The textbook in float64: logp, entropy, d (grad . logp) / d hidden, d .. / d weight."""
    hidden, weight = (
        hidden.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
    )
    full = torch.log_softmax(hidden @ weight.T / temperature, -1)
    logp = full[torch.arange(len(labels)), labels]
    return (
        logp.detach(),
        -(full.exp() * full).sum(-1).detach(),
        *torch.autograd.grad((logp * grad).sum(), [hidden, weight]),
    )


def ours(L, hidden, weight, labels, grad, trainable, **kwargs):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(trainable)
    logp, entropy = L.chunked_logprob(hidden, weight, labels, return_entropy=True, **kwargs)
    inputs = [hidden, weight] if trainable else [hidden]
    return logp.detach(), entropy, *torch.autograd.grad((logp * grad).sum(), inputs)


# --------------------------------------------------------------------------------------------------
# 1. The checks: each takes the module, so that section 3 can hand it a wrong one
# --------------------------------------------------------------------------------------------------
def check_kernel_by_hand(L):
    # Logits [0, ln 3]: probabilities 1/4 and 3/4. At temperature 1/2 they are 1/10 and 9/10.
    hidden, weight = (
        torch.tensor([[1.0], [1.0]], dtype=torch.float64),
        torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64),
    )
    labels = torch.tensor([0, 1])
    for temperature, p in ((1.0, [0.25, 0.75]), (0.5, [0.1, 0.9])):
        logp, entropy, d_hidden, d_weight = ours(
            L, hidden, weight, labels, torch.tensor([1.0, 2.0]), True, temperature=temperature
        )
        close(logp, [math.log(q) for q in p])
        close(entropy, [-sum(q * math.log(q) for q in p)] * 2)
        # d logp_0 / d h = (W_0 - sum p W) / T = -p_1 ln 3 / T;  d logp_1 / d h = p_0 ln 3 / T
        close(
            d_hidden, [[-p[1] * math.log(3) / temperature], [2 * p[0] * math.log(3) / temperature]]
        )
        # d L / d W_0 = (1 (1 - p_0) - 2 p_0) / T;  d L / d W_1 is its negative
        d = (p[1] - 2 * p[0]) / temperature
        close(d_weight, [[d], [-d]])


def check_kernel_vs_naive(L):
    hidden, weight, labels, grad = problem()
    # first and last token, and both sides of a tile's edge
    labels[:4] = torch.tensor([0, 10, 4, 5])
    keep, L.TILE = L.TILE, dict(L.TILE)
    for tile, rows, trainable, budget in itertools.product(
        (3, 5, 4096), (1, 3, None), (False, True), (0, 1 << 20)
    ):
        # tile 5: the last tile is one column wide
        L.TILE["cpu"], L.SOFTMAX_BUDGET = tile, budget
        for got, want in zip(
            ours(L, hidden, weight, labels, grad, trainable, temperature=0.7, rows_per_chunk=rows),
            naive(hidden, weight, labels, grad, 0.7),
        ):
            close(got, want)
    L.TILE = keep


def check_kernel_gradcheck(L):
    hidden, weight, labels, _ = problem(4, 3, 6)
    for trainable in (False, True):
        assert gradcheck(
            lambda h, w: L.chunked_logprob(h, w, labels, temperature=1.7, rows_per_chunk=3),
            (hidden.requires_grad_(), weight.detach().requires_grad_(trainable)),
            raise_exception=False,
        )


def check_kernel_extremes(L):
    # Labels nearly certain and nearly impossible, logits in the hundreds: exact to the last digits
    # where 1 - p, or exp, has none left
    # (log_softmax in float64 gives 0 in rows 0 and 2). Logits [x, 0, -x], by hand:
    hidden, weight = (
        torch.tensor(x, dtype=torch.float64)[:, None]
        for x in ([40.0, 800.0, 700.0], [1.0, 0.0, -1.0])
    )
    logp, entropy, d_hidden, _ = ours(
        L, hidden, weight, torch.tensor([0, 2, 0]), torch.ones(3), True
    )
    for got, want in (
        (logp, [-math.exp(-40), -1600, -math.exp(-700)]),
        (d_hidden[:, 0], [math.exp(-40), -2, math.exp(-700)]),
        (entropy[[0, 2]], [41 * math.exp(-40), 701 * math.exp(-700)]),
    ):
        assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0), (
            got,
            want,
        )


def check_kernel_non_finite_row(L):
    for bad, trainable, budget in itertools.product((NAN, INF), (False, True), (0, 1 << 20)):
        hidden, weight, labels, grad = problem()
        want = naive(
            hidden[[0, 1, 3, 4, 5, 6]], weight, labels[[0, 1, 3, 4, 5, 6]], grad[[0, 1, 3, 4, 5, 6]]
        )
        hidden[2, 1], grad[2], L.SOFTMAX_BUDGET = bad, NAN, budget
        with pytest.warns(RuntimeWarning, match=r"1 of 7 rows .*rows \[2\]"):
            logp, entropy, *grads = ours(
                L, hidden, weight, labels, grad, trainable, rows_per_chunk=4
            )
        assert (
            logp.isnan().tolist() == [False, False, True, False, False, False, False]
            and entropy[2].isnan()
        )
        close(logp[[0, 1, 3, 4, 5, 6]], want[0])
        close(grads[0][[0, 1, 3, 4, 5, 6]], want[2])
        assert torch.equal(grads[0][2], torch.zeros(5, dtype=torch.float64))
        if trainable:
            close(grads[1], want[3])


def check_kernel_bfloat16(L):
    # Logits up to about 30, where a bfloat16 logit is off by up to 0.06. Labels as a policy samples
    # them.
    hidden, weight, _, grad = problem(64, 64, 9000, torch.bfloat16, scale=0.64)
    probs = torch.softmax(hidden.double() @ weight.double().T / 0.8, -1)
    labels = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    want = naive(hidden, weight, labels, grad, 0.8)
    logp, entropy, d_hidden, d_weight = ours(L, hidden, weight, labels, grad, True, temperature=0.8)
    assert logp.dtype == torch.float32 and d_hidden.dtype == d_weight.dtype == torch.bfloat16
    assert (logp - want[0]).abs().max() < 0.008 and (entropy - want[1]).abs().max() < 0.02
    for got, exact in ((d_hidden, want[2]), (d_weight, want[3])):
        assert (got - exact).norm() < 0.005 * exact.norm()


def check_advantages(L):
    # Mean 4, unbiased variance (9 + 1 + 1 + 9) / 3
    rewards, std = torch.tensor([[1.0, 3.0, 5.0, 7.0]], dtype=torch.float64), math.sqrt(20 / 3)
    close(
        L.group_advantages(rewards),
        [[-3 / (std + 1e-6), -1 / (std + 1e-6), 1 / (std + 1e-6), 3 / (std + 1e-6)]],
        1e-15,
    )
    close(L.group_advantages(rewards, divide_by_std=False), [[-3, -1, 1, 3]])
    # By step rows: [10] and [0] * 3 -> mean 2.5, unbiased variance of the four rows (56.25 + 3 *
    # 6.25) / 3 = 25
    close(
        L.group_advantages(
            torch.tensor([[10.0, 0.0]], dtype=torch.float64),
            step_counts=torch.tensor([[1, 3]]),
            eps=0.0,
        ),
        [[1.5, -0.5]],
    )
    # Small spreads: eps is 1e-6 and not 1e-4
    close(L.group_advantages(1e-5 * rewards), 1e-5 * (rewards - 4) / (1e-5 * std + 1e-6), 1e-9)
    # Ties are exactly 0, also where the float mean of equal numbers is another number; groups do
    # not mix
    equal = torch.full((6,), 0.3)
    assert equal.sum() / 6 != equal[0]
    tied = L.group_advantages(torch.stack([equal, 0 * equal, torch.tensor([0.0] * 5 + [10.0])]))
    assert torch.equal(tied[:2], torch.zeros(2, 6)) and tied[2, 5] > 2


def check_policy_loss(L):
    # Two rows of different length: the mean is over the 3 tokens, not over rows. rho: 1.5 and 0.5 |
    # 1.5; clip to [0.8, 1.2].
    logp = torch.log(torch.tensor([[1.5, 0.5], [1.5, 9.0]], dtype=torch.float64)).requires_grad_()
    old, mask = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([[1, 1], [1, 0]])
    loss, stats = L.policy_loss(
        logp, old, torch.tensor([2.0, -1.0], dtype=torch.float64), mask, clip_range=0.2
    )
    # row 0: clipped, free; row 1: A < 0 and rho above the range is free
    close(loss, -(1.2 * 2 + 0.5 * 2 - 1.5) / 3)
    (grad,) = torch.autograd.grad(loss, logp)
    close(grad, [[0, -0.5 * 2 / 3], [1.5 / 3, 0]])
    close(stats["clip_fraction"], 1 / 3)
    close(stats["ratio"], 3.5 / 3)
    close(stats["approx_kl"], (3.5 - 3 - math.log(1.5 * 0.5 * 1.5)) / 3)
    # Dual clip at 3: rho = 5 with A = -1 costs 3 and not 5, and has no gradient
    logp = torch.log(torch.tensor([[5.0, 2.0]], dtype=torch.float64)).requires_grad_()
    args = (
        logp,
        torch.zeros(1, 2, dtype=torch.float64),
        torch.tensor([-1.0], dtype=torch.float64),
        torch.ones(1, 2),
    )
    close(L.policy_loss(*args)[0], 7 / 2)
    loss, stats = L.policy_loss(*args, dual_clip=3.0)
    close(loss, 5 / 2)
    close(torch.autograd.grad(loss, logp)[0], [[0.0, 1.0]])
    close(stats["dual_clip_fraction"], 0.5)


def check_policy_loss_vs_finite_differences(L):
    rng = torch.Generator().manual_seed(3)
    logp, old = (0.3 * torch.randn(4, 6, generator=rng, dtype=torch.float64) for _ in range(2))
    mask, advantages = (
        torch.rand(4, 6, generator=rng) < 0.7,
        torch.randn(4, generator=rng, dtype=torch.float64),
    )
    assert gradcheck(
        lambda x: L.policy_loss(x, old, advantages, mask, dual_clip=3.0)[0],
        logp.requires_grad_(),
        raise_exception=False,
    )


def check_kl(L):
    # k3 over a whole distribution is the exact KL(pi || ref), and every term is >= 0; its value at
    # one token by hand
    pi, ref = (
        torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64),
        torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64),
    )
    k3 = L.kl_k3(pi.log(), ref.log())
    close((pi * k3).sum(), (pi * (pi / ref).log()).sum())
    close(k3[0, 0], 0.2 - math.log(0.2) - 1)
    assert (k3 > 0).all()
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-3.0]], dtype=torch.float64, requires_grad=True)
    L.kl_k3(logp, ref).sum().backward()
    close(logp.grad, [[1 - math.exp(-2)]])
    assert ref.grad is None


def check_opd(L):
    # The hand-computed case of the method: gap [1, -1] in row 0, no skill in row 1
    student = torch.tensor([[-2.0, -1.0], [-0.5, -0.25]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-1.0, -2.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    mask, s = torch.tensor([[1, 1], [0, 0]]), lambda x: 1 / (1 + math.exp(-x))
    loss = L.opd_loss(student, teacher, mask, beta=1.0)
    close(loss, (s(1) - s(-1)) / 2)
    loss.backward()
    close(student.grad, [[-s(1) / 2, -s(-1) / 2], [0, 0]])
    assert teacher.grad is None
    gate = L.confidence_gate(teacher, student, 5.0)
    close(gate, [[s(5), s(-5)], [s(2.5), s(1.25)]])
    assert not gate.requires_grad
    close(L.confidence_gate(student, student, 5.0), [[0.5] * 2] * 2)


def check_masks(L):
    # Unequal rows; a mask that is not a prefix; masked entries that are NaN or infinite; an empty
    # mask
    x = torch.tensor([[1.0, NAN, 3.0], [5.0, INF, -INF]], requires_grad=True)
    mean = L.masked_mean(x, torch.tensor([[1, 0, 1], [1, 0, 0]]))
    close(mean, 3.0)
    close(torch.autograd.grad(mean, x)[0], torch.tensor([[1, 0, 1], [1, 0, 0]]) / 3, 1e-7)
    close(L.masked_mean(x, torch.tensor([[1, 0, 1], [1, 0, 0]]), denominator=9), 1.0)
    for mask in (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)):
        x.grad = None
        dirty = x.detach().clone().requires_grad_()
        rl, opd, stats = L.seed_loss(
            dirty,
            x.detach(),
            x.detach(),
            x.detach(),
            torch.tensor([1.0, NAN]),
            mask,
            torch.ones(2, 3),
            clip_range=0.2,
            kl_coef=0.01,
            lambda_opd=0.1,
            beta_opd=5.0,
            dual_clip=3.0,
        )
        assert rl.item() == opd.item() == 0 and all(v.item() == 0 for v in stats.values())
        (rl + opd).backward()
        assert torch.equal(dirty.grad, torch.zeros(2, 3))


def check_seed_loss(L):
    # Against the equations, written out anew in float64; and an optimizer's view: micro-batches add
    # up to the mini-batch
    rng = torch.Generator().manual_seed(5)
    logp, old, ref, teacher = (
        -torch.rand(6, 5, generator=rng, dtype=torch.float64) for _ in range(4)
    )
    mask, has_skill = torch.rand(6, 5, generator=rng) < 0.6, torch.tensor([1.0, 0, 1, 1, 0, 1])
    A = torch.randn(6, generator=rng, dtype=torch.float64)
    kwargs = dict(clip_range=0.1, kl_coef=0.3, lambda_opd=0.4, beta_opd=5.0, dual_clip=3.0)
    both = mask & has_skill.bool()[:, None]
    gate = torch.sigmoid(5.0 * (teacher - logp))

    def oracle(x):
        rho, d = torch.exp(x - old), ref - x
        J = torch.minimum(rho * A[:, None], rho.clamp(0.9, 1.1) * A[:, None])
        J = torch.where(A[:, None] < 0, torch.maximum(J, 3 * A[:, None]), J)
        return -J[mask].mean() + 0.3 * (d.exp() - d - 1)[mask].mean(), 0.4 * (gate * (teacher - x))[
            both
        ].mean()

    def gradients(parts, x):
        return [torch.autograd.grad(part, x, retain_graph=True)[0] for part in parts]

    x = logp.clone().requires_grad_()
    rl, opd, stats = L.seed_loss(x, old, ref, teacher, A, mask, has_skill, **kwargs)
    for got, want in zip(
        (rl, opd, *gradients((rl, opd), x)), (*oracle(x), *gradients(oracle(x), x))
    ):
        close(got.detach(), want.detach())
    for name, want in (
        ("rl_loss", rl),
        ("opd_loss", opd / 0.4),
        ("loss", rl + opd),
        ("kl", L.kl_k3(logp, ref)[mask].mean()),
    ):
        close(stats[name], want.detach())
    # the GRPO arm
    close(L.seed_loss(x, old, ref, None, A, mask, has_skill, **kwargs)[1].detach(), 0, 0)
    total = [0, 0, {k: 0 for k in stats}]
    for rows in ([0], [1, 2, 3], [4, 5]):
        cut = [tensor[rows] for tensor in (x, old, ref, teacher, A, mask, has_skill)]
        part = L.seed_loss(*cut, rl_tokens=int(mask.sum()), opd_tokens=both.sum(), **kwargs)
        sums = {k: total[2][k] + v for k, v in part[2].items()}
        total = [total[0] + part[0], total[1] + part[1], sums]
    for got, want in zip(
        (*total[:2], *gradients(total[:2], x), *total[2].values()),
        (rl, opd, *gradients((rl, opd), x), *stats.values()),
    ):
        close(got.detach(), want.detach())


CHECKS = [f for name, f in list(globals().items()) if name.startswith("check_")]


def mutant(*edits):
    """losses.py with edits (old, new), each of which must match exactly one place."""
    source = pathlib.Path(losses.__file__).read_text()
    for old, new in edits:
        assert source.count(old) == 1, (
            f"the edit must match one place: {old!r} is there {source.count(old)} times"
        )
        source = source.replace(old, new)
    module = types.ModuleType("mutant")
    exec(compile(source, "mutant of losses.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_losses(check):
    # a fresh copy: some checks set the module's constants
    check(mutant())


# --------------------------------------------------------------------------------------------------
# 2. What the kernel promises beyond its values: sweeps, memory, manners
# --------------------------------------------------------------------------------------------------
class GemmFlop(TorchDispatchMode):
    """Adds up 2 m k n over every matrix product [m, k] @ [k, n], in place or not (torch's own
    counter misses addmm_)."""

    flop = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.flop += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        assert func.overloadpacket not in (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "trainable, gradient, budget, sweeps",
    [
        (False, False, None, 1),
        (False, True, None, 2),
        (True, False, None, 1),
        (True, True, None, 3),
        (True, True, 0, 4),
    ],
)
def test_number_of_sweeps(monkeypatch, trainable, gradient, budget, sweeps):
    """Counted in FLOP: one sweep over the vocabulary matrix is 2 N H V."""
    N, H, V = 40, 16, 300
    if budget is not None:
        monkeypatch.setattr(losses, "SOFTMAX_BUDGET", budget)
    hidden, weight, labels, _ = problem(N, H, V, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_(trainable)
    with GemmFlop() as counter, torch.set_grad_enabled(gradient):
        logp = losses.chunked_logprob(hidden, weight, labels, rows_per_chunk=16)
        if gradient:
            logp.sum().backward()
    assert counter.flop == sweeps * 2 * N * H * V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_one_chunk_and_one_row_per_token(dtype, request):
    """Peak extra bytes <= rows x (6 or 4 tile + 12 H) + one [N, H]; 16 times the vocabulary costs
    nothing more."""
    request.addfinalizer(lambda threads=torch.get_num_threads(): torch.set_num_threads(threads))
    # a GEMM library takes scratch per thread, and that is not what is measured here
    torch.set_num_threads(1)
    N, H, rows, peaks = 600, 64, 200, []
    for V in (10000, 160000):
        hidden, weight, labels, _ = problem(N, H, V, dtype)
        hidden.requires_grad_()

        def forward_and_backward():
            torch.autograd.grad(
                losses.chunked_logprob(hidden, weight, labels, rows_per_chunk=rows).sum(), hidden
            )

        peaks.append(kernel_benchmark.peak_extra_bytes(forward_and_backward, "cpu"))
    size = hidden.element_size()
    # vectors of N numbers; what a GEMM takes for itself (on some processors the bfloat16 one takes
    # half a megabyte; one more copy of a tile, the smallest mistake there is, takes 1.6)
    small = 64 * N + ((768 if size == 2 else 256) << 10)
    assert peaks[0] <= rows * ((6 if size == 2 else 4) * 4096 + 12 * H) + N * H * size + small
    assert abs(peaks[1] - peaks[0]) < 256 << 10


def test_default_rows_respect_the_budget(monkeypatch):
    hidden, weight, labels, _ = problem(3000, 64, 5000, torch.float32)
    hidden.requires_grad_()
    monkeypatch.setitem(losses.SCRATCH_BUDGET, "cpu", 4 << 20)
    peak = kernel_benchmark.peak_extra_bytes(
        lambda: losses.chunked_logprob(hidden, weight, labels), "cpu"
    )
    assert (3 << 20) < peak < (4 << 20) + hidden.nbytes + 64 * len(hidden)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 1e-3)])
def test_other_dtypes(dtype, tolerance):
    hidden, weight, labels, grad = problem(32, 64, 5000, dtype)
    logp, entropy, *grads = ours(losses, hidden, weight, labels, grad, True, temperature=0.8)
    want = naive(hidden, weight, labels, grad, 0.8)
    assert logp.dtype == entropy.dtype == torch.float32 and [g.dtype for g in grads] == [
        dtype,
        dtype,
    ]
    assert (logp - want[0]).abs().max() < 1e-4 and (entropy - want[1]).abs().max() < 1e-4
    for got, exact in zip(grads, want[2:]):
        assert (got - exact).norm() < tolerance * exact.norm()


def test_bfloat16_is_ten_times_closer_than_bfloat16_logits():
    hidden, weight, _, _ = problem(64, 64, 9000, torch.bfloat16, scale=0.8)
    full = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    labels = torch.multinomial(full.exp(), 1, generator=torch.Generator().manual_seed(1))
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1)
    error = (
        losses.chunked_logprob(hidden, weight, labels[:, 0]) - full.gather(1, labels)[:, 0]
    ).abs()
    error_rounded = (rounded - full).gather(1, labels)[:, 0].abs()
    assert error.mean() * 10 < error_rounded.mean() and error.max() * 5 < error_rounded.max()


def test_tied_embedding_gets_the_sum_of_both_gradients():
    _, table, labels, grad = problem(N=6)
    ids = torch.tensor([1, 2, 2, 0, 5, 7])
    tied, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    (losses.chunked_logprob(torch.tanh(tied[ids]), tied, labels) * grad).sum().backward()
    full = torch.log_softmax(torch.tanh(plain[ids]) @ plain.T, -1)
    (full[torch.arange(6), labels] * grad).sum().backward()
    close(tied.grad, plain.grad)


@pytest.mark.parametrize("trainable", [False, True])
def test_backward_twice_and_only_what_is_asked(trainable):
    """The trainer takes the gradient of two parts of one loss; neither may disturb the other."""
    hidden, weight, labels, grad = problem()
    hidden.requires_grad_(), weight.requires_grad_(trainable)
    logp = losses.chunked_logprob(hidden, weight, labels)
    inputs = [hidden, weight] if trainable else [hidden]
    first = torch.autograd.grad((logp * grad).sum(), inputs, retain_graph=True)
    again = torch.autograd.grad((logp * grad).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    only_head = weight.detach().requires_grad_()
    (losses.chunked_logprob(hidden.detach(), only_head, labels) * grad).sum().backward()
    close(only_head.grad, naive(hidden, weight, labels, grad)[3])


@pytest.mark.parametrize("trainable", [False, True])
def test_no_rows(trainable):
    hidden, weight = (
        torch.zeros(0, 5, requires_grad=True),
        torch.randn(9, 5, requires_grad=trainable),
    )
    logp, entropy = losses.chunked_logprob(
        hidden, weight, torch.zeros(0, dtype=torch.long), return_entropy=True
    )
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,) and hidden.grad.shape == (0, 5)
    assert not trainable or torch.equal(weight.grad, torch.zeros(9, 5))


def test_autocast_does_not_lower_the_precision():
    hidden, weight, labels, grad = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(losses, hidden, weight, labels, grad, True)
    assert all(
        torch.equal(a, b) for a, b in zip(got, ours(losses, hidden, weight, labels, grad, True))
    )


def test_entropy_has_no_gradient_and_does_not_change_logp():
    hidden, weight, labels, _ = problem()
    logp, entropy = losses.chunked_logprob(
        hidden.requires_grad_(), weight, labels, return_entropy=True
    )
    assert logp.requires_grad and not entropy.requires_grad
    assert torch.equal(logp, losses.chunked_logprob(hidden, weight, labels))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert torch.equal(logp, losses.chunked_logprob(hidden, weight, labels))


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            dict(labels=torch.tensor([0, 1, 11])),
            r"label 11 in row 2, outside the vocabulary \[0, 11\)",
        ),
        (dict(labels=torch.tensor([0, -100, 1])), r"label -100 in row 1"),
        (dict(labels=torch.tensor([0.0, 1.0, 2.0])), "integer labels"),
        (dict(labels=torch.tensor([0, 1])), r"\[3, 5\], \[11, 5\] and \[2\]"),
        (dict(labels=torch.tensor([[0, 1, 2]])), "labels \\[N\\]"),
        (dict(hidden=torch.zeros(3, 4)), r"\[3, 4\], \[11, 5\]"),
        (dict(hidden=torch.zeros(1, 3, 5)), r"hidden \[N, H\]"),
        (dict(weight=torch.zeros(1, 5)), "V >= 2"),
        (dict(weight=torch.zeros(11, 5, dtype=torch.bfloat16)), "one floating dtype"),
        (dict(weight=torch.zeros(11, 5, device="meta")), "one device"),
        (dict(temperature=0.0), "positive, finite temperature"),
        (dict(temperature=-1.0), "positive, finite temperature"),
        (dict(temperature=NAN), "positive, finite temperature"),
        (dict(rows_per_chunk=0), "rows_per_chunk >= 1"),
    ],
)
def test_kernel_refuses(change, sentence):
    inputs = (
        dict(hidden=torch.zeros(3, 5), weight=torch.zeros(11, 5), labels=torch.tensor([0, 1, 2]))
        | change
    )
    with pytest.raises(ValueError, match=sentence):
        losses.chunked_logprob(
            inputs.pop("hidden"), inputs.pop("weight"), inputs.pop("labels"), **inputs
        )


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: losses.group_advantages(torch.ones(4, 1)), "G >= 2"),
        (lambda: losses.group_advantages(torch.ones(4)), "G >= 2"),
        (lambda: losses.group_advantages(torch.tensor([[1.0, NAN]])), "finite rewards"),
        (
            lambda: losses.group_advantages(torch.ones(2, 2), step_counts=torch.zeros(2, 2)),
            "one step or more",
        ),
        (lambda: losses.group_advantages(torch.ones(2, 2), step_counts=torch.ones(2)), "one shape"),
        (
            lambda: losses.policy_loss(
                torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), torch.ones(2, 3)
            ),
            "one shape",
        ),
        (
            lambda: losses.policy_loss(
                torch.ones(2, 3), torch.ones(3), torch.ones(2), torch.ones(2, 3)
            ),
            "one shape",
        ),
        (
            lambda: losses.policy_loss(
                torch.ones(2, 3), torch.ones(2, 3), torch.ones(2), torch.ones(3)
            ),
            "one shape",
        ),
        (lambda: losses.policy_loss(*[torch.ones(2, 3)] * 4, clip_range=0.0), "clip_range"),
        (lambda: losses.policy_loss(*[torch.ones(2, 3)] * 4, dual_clip=0.5), "dual_clip"),
        (
            lambda: losses.opd_loss(torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3), 1.0),
            "one shape",
        ),
        (lambda: losses.kl_k3(torch.ones(2, 3), torch.ones(3)), "one shape"),
    ],
)
def test_losses_refuse(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_all_groups_tied_give_no_policy_gradient():
    logp = torch.randn(4, 5, requires_grad=True)
    advantages = losses.group_advantages(torch.tensor([[9.9, 9.9], [-0.3, -0.3]])).flatten()
    loss, _ = losses.policy_loss(logp, torch.randn(4, 5), advantages, torch.ones(4, 5))
    loss.backward()
    assert loss.item() == 0 and torch.equal(logp.grad, torch.zeros(4, 5))


# --------------------------------------------------------------------------------------------------
# 3. Mistakes people make, each an edit of losses.py, and the check that must reject it
# --------------------------------------------------------------------------------------------------
LOSS_MUTANTS = [
    (
        "sequence mean instead of token mean",
        check_policy_loss,
        "torch.where(mask, x, 0).sum() / count.clamp(min=1)",
        "(torch.where(mask, x, 0).sum(1) / mask.sum(1).clamp(min=1)).mean()",
    ),
    (
        "sequence mean instead of token mean, seen by the mean itself",
        check_masks,
        "torch.where(mask, x, 0).sum() / count.clamp(min=1)",
        "(torch.where(mask, x, 0).sum(1) / mask.sum(1).clamp(min=1)).mean()",
    ),
    (
        "mask multiplied instead of selected",
        check_masks,
        "torch.where(mask, x, 0).sum()",
        "(mask * x).sum()",
    ),
    (
        "mask off by one",
        check_policy_loss,
        "    mask = mask.bool()\n",
        "    mask = mask.bool().roll(1, -1)\n",
    ),
    (
        "mask off by one in the skill mask",
        check_seed_loss,
        "_only(mask, _per_token(skill_mask, mask))",
        "_only(mask, _per_token(skill_mask, mask)).roll(1, -1)",
    ),
    (
        "masked entries enter exp",
        check_masks,
        "log_ratio = _only(mask, logp - old_logp.detach())",
        "log_ratio = logp - old_logp.detach()",
    ),
    (
        "denominator ignored",
        check_seed_loss,
        "mask.sum() if denominator is None else denominator",
        "mask.sum()",
    ),
    (
        "padding counted",
        check_masks,
        "mask.sum() if denominator is None",
        "mask.numel() if denominator is None",
    ),
    ("empty mask divides by 0", check_masks, "count.clamp(min=1)", "count"),
    (
        "gate not detached",
        check_opd,
        "(teacher_logp - student_logp)).detach()",
        "(teacher_logp - student_logp))",
    ),
    (
        "teacher with gradient",
        check_opd,
        "_only(mask, teacher_logp).detach()",
        "_only(mask, teacher_logp)",
    ),
    (
        "sign of Delta in the gate",
        check_opd,
        "beta * (teacher_logp - student_logp)",
        "beta * (student_logp - teacher_logp)",
    ),
    (
        "sign of Delta in the loss",
        check_opd,
        "(teacher_logp - logp), mask",
        "(logp - teacher_logp), mask",
    ),
    ("beta forgotten", check_opd, "torch.sigmoid(beta * ", "torch.sigmoid(1.0 * "),
    ("no gate at all", check_opd, "confidence_gate(teacher_logp, logp, beta) * (", "1.0 * ("),
    ("skill mask forgotten", check_seed_loss, "_only(mask, _per_token(skill_mask, mask))", "mask"),
    (
        "response mask forgotten",
        check_seed_loss,
        "_only(mask, _per_token(skill_mask, mask))",
        "_per_token(skill_mask, mask)",
    ),
    (
        "lambda forgotten",
        check_seed_loss,
        "return rl_loss, lambda_opd * opd",
        "return rl_loss, opd",
    ),
    ("KL coefficient forgotten", check_seed_loss, "kl_coef * kl", "kl"),
    ("biased std", check_advantages, "/ (rows - 1)", "/ rows"),
    ("eps 1e-4", check_advantages, "eps=1e-6", "eps=1e-4"),
    (
        "eps inside the root",
        check_advantages,
        "centred / (std + eps)",
        "centred / (std**2 + eps).sqrt()",
    ),
    (
        "mean over the batch instead of the group",
        check_advantages,
        "(weights * rewards).sum(1, keepdim=True) / rows",
        "rewards.mean()",
    ),
    (
        "steps do not weigh",
        check_advantages,
        "torch.ones_like(rewards) if step_counts is None else step_counts.to(rewards)",
        "torch.ones_like(rewards)",
    ),
    ("ties left to rounding", check_advantages, "torch.where(tied, 0, centred)", "centred"),
    (
        "maximum instead of minimum",
        check_policy_loss,
        "torch.minimum(free, clipped)",
        "torch.maximum(free, clipped)",
    ),
    ("clip only", check_policy_loss, "torch.minimum(free, clipped)", "clipped"),
    (
        "sign of the policy loss",
        check_policy_loss,
        "return -masked_mean(objective",
        "return masked_mean(objective",
    ),
    (
        "ratio upside down",
        check_policy_loss,
        "logp - old_logp.detach()",
        "old_logp.detach() - logp",
    ),
    (
        "dual clip on every sign",
        check_policy_loss,
        "(advantages < 0) & (objective < floor)",
        "objective > -1e9",
    ),
    ("KL estimator swapped for k1", check_kl, "torch.expm1(d) - d", "-d"),
    ("KL estimator swapped for k2", check_kl, "torch.expm1(d) - d", "d * d / 2"),
    (
        "KL the other way round",
        check_kl,
        "d = ref_logp.detach() - logp",
        "d = logp - ref_logp.detach()",
    ),
    ("reference with gradient", check_kl, "d = ref_logp.detach() - logp", "d = ref_logp - logp"),
]
KERNEL_MUTANTS = [
    ("temperature forgotten", check_kernel_vs_naive, "1.0 / temperature", "1.0"),
    ("temperature forgotten, seen by hand", check_kernel_by_hand, "1.0 / temperature", "1.0"),
    ("temperature multiplied", check_kernel_by_hand, "1.0 / temperature", "temperature"),
    ("temperature missing from the gradient", check_kernel_gradcheck, "(rest * inv_t)", "rest"),
    (
        "temperature missing from the weight gradient",
        check_kernel_gradcheck,
        "torch.expm1(logp) * inv_t",
        "torch.expm1(logp)",
    ),
    (
        "running maximum not followed by the sum",
        check_kernel_vs_naive,
        "total = shrink * total",
        "total = total",
    ),
    (
        "running maximum not followed by the gradient",
        check_kernel_vs_naive,
        "acc.mul_(shrink[:, None])",
        "acc",
    ),
    (
        "running maximum not followed by the entropy",
        check_kernel_vs_naive,
        "(peak - new_peak) * total",
        "0 * total",
    ),
    (
        "label left among the others",
        check_kernel_vs_naive,
        "_fill_label(z, tokens - v, NEVER)",
        "pass",
    ),
    (
        "label looked for in the wrong tile",
        check_kernel_vs_naive,
        "_fill_label(z, tokens - v, NEVER)",
        "_fill_label(z, tokens, NEVER)",
    ),
    (
        "label missing from the kept probabilities",
        check_kernel_vs_naive,
        "_fill_label(kept[r], tokens[r], -total[r, None])",
        "pass",
    ),
    (
        "label missing from the recomputed ones",
        check_kernel_vs_naive,
        "_fill_label(e, tokens[r] - v, -total[r, None])",
        "pass",
    ),
    (
        "anchor not added back",
        check_kernel_vs_naive,
        "odds = own - anchor - peak",
        "odds = own - peak",
    ),
    (
        "1 - p by subtraction",
        check_kernel_extremes,
        "rest = torch.sigmoid(-odds)",
        "rest = 1 - torch.sigmoid(odds)",
    ),
    (
        "no running maximum",
        check_kernel_extremes,
        "new_peak = torch.maximum(peak, z.amax(1))",
        "new_peak = torch.zeros_like(peak)",
    ),
    (
        "bfloat16 logits rounded at their own size",
        check_kernel_bfloat16,
        "anchor = own.to(gemm).to(wide)",
        "anchor = own * 0",
    ),
    (
        "a dead row reaches the weight gradient",
        check_kernel_non_finite_row,
        "    if len(dead):\n",
        "    if False:\n",
    ),
    (
        "a dead row keeps its gradient",
        check_kernel_non_finite_row,
        "grad = grad.index_fill(0, dead, 0)",
        "pass",
    ),
    (
        "entropy of the others only",
        check_kernel_by_hand,
        "-logp.exp() * logp + torch.special.entr(rest) + rest",
        "rest",
    ),
]


@pytest.mark.parametrize(
    "name, check, old, new",
    LOSS_MUTANTS + KERNEL_MUTANTS,
    ids=[m[0] for m in LOSS_MUTANTS + KERNEL_MUTANTS],
)
def test_mistake_is_noticed(name, check, old, new):
    wrong = mutant((old, new))
    with pytest.raises((AssertionError, RuntimeError)):
        check(wrong)
