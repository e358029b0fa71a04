"""What is graded, exercise by exercise. `mine` is the student's side, `key` the right one; both are
called alike (kit.Worker, kit.Answers).

Every check draws its numbers from the course's seed. A message says where to look, and the values;
it never says what to write.
"""

import json

import numpy as np
import pytest
from kit import Array, Failed, course_seed, tensor

CHECKS = []
SEED = course_seed()
# An argument that asks for its gradient.
G = dict(grad=True)


def check(exercise: int, points: int, trains: bool = False):
    """Register a check. Its docstring is the title that failures carry."""

    def register(function):
        function.exercise, function.points, function.trains = exercise, points, trains
        function.name = f"{exercise}-{function.__name__}"
        CHECKS.append(function)
        return function

    return register


def draw(*address: int) -> np.random.Generator:
    """Random numbers of one place in this file."""
    return np.random.default_rng([SEED, *address])


def need(ok, hint: str) -> None:
    if not ok:
        raise Failed(hint)


def same(got, want, hint: str, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """got must be an Array like want: shape, dtype, and numbers within rtol and atol."""
    need(
        isinstance(got, Array),
        f"{hint}\nA tensor was expected, not "
        f"{got if not isinstance(got, list) else 'a list or tuple'}.",
    )
    need(
        got.numbers.shape == want.numbers.shape,
        f"{hint}\nYours has the shape {list(got.numbers.shape)}, not {list(want.numbers.shape)}.",
    )
    need(got.dtype == want.dtype, f"{hint}\nYours has the dtype {got.dtype}, not {want.dtype}.")
    wrong = ~np.isclose(got.numbers, want.numbers, rtol=rtol, atol=atol, equal_nan=True)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise Failed(
            f"{hint}\n{wrong.sum()} of {wrong.size} numbers differ, first at {list(at)}: "
            f"yours {got.numbers[at]:.10g}, expected {want.numbers[at]:.10g}."
        )


def same_gradients(got, want, hint: str, **tolerance) -> None:
    """Gradients of all arguments that asked for one. None counts as zeros where zeros are right."""
    for mine, right in zip(got, want):
        if mine is None and (right is None or not right.numbers.any()):
            continue
        need(mine is not None, f"{hint}\nThere is no gradient at all.")
        zeros = Array(np.zeros_like(mine.numbers), mine.dtype, False)
        same(mine, right or zeros, hint, **tolerance)


def no_gradient(grad, hint: str) -> None:
    need(grad is None or not np.any(grad.numbers), hint)


# -- 1 ---------------------------------------------------------------------------------------------
@check(1, 4)
def values(mine, key):
    """advantages of five groups of four"""
    rewards = tensor(draw(1, 0).uniform(-1, 10, (5, 4)))
    got, want = mine("group_advantages", rewards).value, key("group_advantages", rewards).value
    need(isinstance(got, Array), "group_advantages should return a tensor.")
    if got.numbers.shape == want.numbers.shape:
        need(
            np.allclose(got.numbers.sum(1), 0, atol=1e-9),
            "The advantages of each group (row) should add up to 0: whom is a rollout compared "
            "with?",
        )
        ratio = got.numbers / want.numbers
        need(
            abs(ratio[0, 0] - 1) < 0.01 or not np.allclose(ratio, ratio[0, 0], rtol=1e-6),
            "All your advantages are off by one and the same factor: which divisor has the "
            "standard deviation of a sample?",
        )
    same(
        got,
        want,
        "The values differ: go through the equation once more, and check along which dimension "
        "mean and std run.",
    )


@check(1, 2)
def epsilon(mine, key):
    """groups whose rewards hardly differ, where epsilon decides"""
    rewards = tensor(5 + draw(1, 1).uniform(0, 3e-6, (3, 4)))
    hint = (
        "Your epsilon has another size or stands at another place than in the equation: here the "
        "rewards differ by a millionth only."
    )
    same(
        mine("group_advantages", rewards).value,
        key("group_advantages", rewards).value,
        hint,
        rtol=1e-6,
    )
    rewards = tensor(draw(1, 2).uniform(0, 1, (3, 4)))
    same(
        mine("group_advantages", rewards, eps=0.5).value,
        key("group_advantages", rewards, eps=0.5).value,
        "With eps=0.5 the values differ: where in the equation does epsilon stand?",
    )


@check(1, 2)
def ties(mine, key):
    """a group that ties"""
    rewards = [[0.1] * 3, [10.0] * 3, [0.0] * 3]
    got = mine("group_advantages", tensor(rewards)).value
    need(
        isinstance(got, Array) and np.isfinite(got.numbers).all(),
        "A group whose rewards all tie must not give NaN or inf.",
    )
    need(
        np.abs(got.numbers).max() < 1e-9,
        "A group whose rewards all tie carries no signal: its advantages are 0.",
    )


@check(1, 1)
def only_centred(mine, key):
    """divide_by_std=False"""
    rewards = tensor(draw(1, 3).uniform(-1, 10, (3, 5)))
    same(
        mine("group_advantages", rewards, divide_by_std=False).value,
        key("group_advantages", rewards, divide_by_std=False).value,
        "With divide_by_std=False only the mean is subtracted.",
    )


@check(1, 1)
def manners(mine, key):
    """dtype, arguments, refusals"""
    rewards = tensor(draw(1, 4).uniform(-1, 10, (3, 4)), "float32")
    got = mine("group_advantages", rewards)
    same(
        got.value,
        key("group_advantages", rewards).value,
        "The result has the dtype of rewards.",
        rtol=1e-4,
        atol=1e-5,
    )
    need(
        not got.changed,
        "group_advantages changed its argument in place; the caller still needs the rewards.",
    )
    need(
        mine.error("group_advantages", tensor([[1.0], [2.0]])) == "ValueError",
        "A group of one rollout should be refused with a ValueError.",
    )


POISON = (
    "If yours is NaN: what is 0 * NaN, and when do you select? If it is a number, first see to the "
    "other checks."
)


# -- 2 ---------------------------------------------------------------------------------------------
def batch(rng, B: int, T: int, filler: float = 0.0):
    """A mask of rows with different numbers of tokens, and a function that draws [B, T] with
    `filler` where it is 0."""
    lengths = rng.permutation(np.linspace(1, T, B).astype(int))
    mask = np.arange(T) < lengths[:, None]
    return mask, lambda low, high: np.where(mask, rng.uniform(low, high, (B, T)), filler)


@check(2, 3)
def token_mean(mine, key):
    """masked_mean over rows of different lengths"""
    mask, numbers = batch(draw(2, 0), 4, 7, filler=3.0)
    args = tensor(numbers(-5, 5), **G), tensor(mask, "bool")
    got, want = mine("masked_mean", *args), key("masked_mean", *args)
    hint = (
        "Every token of the mask weighs the same, whichever row it is in, and no other position "
        "counts."
    )
    same(got.value, want.value, hint)
    same_gradients(got.grads, want.grads, hint)
    numbers = tensor(draw(2, 1).uniform(-5, 5, (3, 4)), "float32"), tensor(np.eye(3, 4), "int64")
    same(
        mine("masked_mean", *numbers).value,
        key("masked_mean", *numbers).value,
        "A mask may also hold the integers 0 and 1.",
        rtol=1e-5,
    )


@check(2, 3)
def masked_garbage(mine, key):
    """masked_mean with NaN and inf at masked positions, and with an empty mask"""
    mask, numbers = batch(draw(2, 2), 3, 5)
    x = numbers(-5, 5)
    for filler in (np.nan, np.inf):
        args = tensor(np.where(mask, x, filler), **G), tensor(mask, "bool")
        got, want = mine("masked_mean", *args), key("masked_mean", *args)
        same(got.value, want.value, f"Masked positions hold {filler}. {POISON}")
        same_gradients(
            got.grads, want.grads, f"Masked positions hold {filler}: the gradient differs. {POISON}"
        )
    got = mine("masked_mean", tensor(x, **G), tensor(np.zeros_like(mask), "bool"))
    need(
        isinstance(got.value, Array) and got.value.numbers.shape == () and got.value.numbers == 0,
        "Without any token the mean is 0 here, not NaN.",
    )
    no_gradient(got.grads[0], "Without any token the gradient is 0.")


@check(2, 3)
def first_step(mine, key):
    """policy_loss at ratio 1"""
    mask, numbers = batch(draw(2, 3), 4, 6)
    logp, advantages = numbers(-3, -0.1), tensor(draw(2, 4).normal(size=4))
    args = tensor(logp, **G), tensor(logp), advantages, tensor(mask, "bool")
    got, want = mine("policy_loss", *args), key("policy_loss", *args)
    if isinstance(got.value, Array) and got.value.numbers.shape == ():
        need(
            not np.isclose(got.value.numbers, -want.value.numbers),
            "This is a loss: it is minimised, while the objective is to be maximised.",
        )
    hint = (
        "logp equals old_logp, so the ratio is 1 everywhere and the clip does nothing: look at the "
        "mean, and at how rows meet their advantages."
    )
    same(got.value, want.value, hint)
    same_gradients(
        got.grads,
        want.grads,
        "The value is right at ratio 1 but the gradient with respect to logp is not: is the ratio "
        "made of logp as in the equation?",
    )


@check(2, 5)
def clipping(mine, key):
    """policy_loss one token at a time, on both sides of the clip"""
    rng = draw(2, 5)
    for advantage in (rng.uniform(0.5, 2), -rng.uniform(0.5, 2)):
        for ratio in (
            rng.uniform(0.3, 0.65),
            rng.uniform(0.75, 0.95),
            rng.uniform(1.05, 1.25),
            rng.uniform(1.35, 2),
        ):
            args = (
                tensor([[np.log(ratio)]], **G),
                tensor([[0.0]]),
                tensor([advantage]),
                tensor([[True]], "bool"),
            )
            got, want = (
                mine("policy_loss", *args, clip_range=0.3),
                key("policy_loss", *args, clip_range=0.3),
            )
            where = f"(one token, A = {advantage:.2f}, ratio {ratio:.2f}, clip_range 0.3)"
            same(
                got.value,
                want.value,
                f"The value is wrong {where}: which of the two objectives is the pessimistic one "
                f"here?",
            )
            same_gradients(
                got.grads,
                want.grads,
                f"The gradient is wrong {where}: on which side must it survive?",
            )


@check(2, 3)
def policy_batch(mine, key):
    """policy_loss on a square batch with padding"""
    rng = draw(2, 6)
    mask, numbers = batch(rng, 5, 5)
    old = numbers(-3, -0.1)
    logp = old + rng.normal(scale=0.3, size=old.shape)
    args = [
        tensor(np.where(mask, logp, -1.0), **G),
        tensor(np.where(mask, old, -1000.0), **G),
        tensor(rng.normal(size=5), **G),
        tensor(mask, "bool"),
    ]
    got, want = mine("policy_loss", *args), key("policy_loss", *args)
    hint = (
        "On a batch (B = T = 5, some positions masked, ratios inside and outside the clip) it "
        "differs: "
    )
    same(got.value, want.value, hint + "check the mask, and that advantage b goes to row b.")
    same_gradients(
        got.grads[:1],
        want.grads[:1],
        hint
        + "the gradient with respect to logp (a masked position may have a huge ratio: select, "
        "before exp).",
    )
    no_gradient(
        got.grads[1], "old_logp gets a gradient; it belongs to the snapshot, which is fixed."
    )
    no_gradient(got.grads[2], "The advantages get a gradient; they are data.")


@check(2, 3)
def k3(mine, key):
    """kl_k3, value and gradient"""
    rng = draw(2, 7)
    args = tensor(rng.uniform(-3, -0.1, (3, 4)), **G), tensor(rng.uniform(-3, -0.1, (3, 4)), **G)
    got, want = mine("kl_k3", *args), key("kl_k3", *args)
    need(
        isinstance(got.value, Array) and got.value.numbers.shape == (3, 4),
        "kl_k3 returns one estimate per token, [B, T].",
    )
    need((got.value.numbers >= 0).all(), "An estimate is negative; k3 never is.")
    same(
        got.value,
        want.value,
        "The values differ: which estimator is it, and in which direction does the difference run?",
    )
    same_gradients(got.grads[:1], want.grads[:1], "The gradient with respect to logp differs.")
    no_gradient(got.grads[1], "ref_logp gets a gradient; the reference policy is fixed.")


# -- 3 ---------------------------------------------------------------------------------------------
def scoring(
    rng, N: int, H: int, V: int, dtype: str = "float64", scale: float = 1.0, grads: str = ""
):
    """hidden [N, H], weight [V, H] and labels [N]; grads: which of "h" and "w" ask for a
    gradient."""
    hidden, weight = rng.normal(size=(N, H)) * scale, rng.normal(size=(V, H))
    return [
        tensor(hidden, dtype, "h" in grads),
        tensor(weight, dtype, "w" in grads),
        tensor(rng.integers(V, size=N), "int64"),
    ]


def in_bfloat16(x) -> np.ndarray:
    """Numbers that bfloat16 holds exactly: the first 16 bits of float32."""
    return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(float)


@check(3, 4)
def forward_values(mine, key):
    """logprob_forward: values, temperature, odd numbers of rows"""
    for n, (rows, temperature) in enumerate([(4, 1.0), (5, 0.6), (100, 1.7), (1, 1.0)]):
        args = scoring(draw(3, n), 13, 6, 37)
        options = dict(temperature=temperature, rows_per_chunk=rows)
        hint = (
            f"logprob_forward differs (13 rows, rows_per_chunk={rows}, temperature={temperature}): "
            + (
                "which logits does the temperature change?"
                if temperature != 1
                else "are all rows there, and does each get its own label?"
            )
        )
        same(
            mine("logprob_forward", *args, **options).value,
            key("logprob_forward", *args, **options).value,
            hint,
        )


@check(3, 2)
def large_logits(mine, key):
    """logprob_forward with logits in the thousands"""
    args = scoring(draw(3, 10), 6, 8, 21, scale=1000)
    got = mine("logprob_forward", *args).value
    need(
        isinstance(got, Array) and np.isfinite(got.numbers).all(),
        "With logits in the thousands the result is not finite: what can exp() bear?",
    )
    same(
        got, key("logprob_forward", *args).value, "With logits in the thousands the values differ."
    )


@check(3, 3)
def forward_memory(mine, key):
    """logprob_forward: memory"""
    N, V, rows = 512, 800, 16
    got = mine(
        "logprob_forward",
        *scoring(draw(3, 11), N, 4, V, grads="hw"),
        rows_per_chunk=rows,
        cost=True,
    )
    need(
        not got.value.grad,
        "logprob_forward carries a gradient; then autograd keeps everything for backward.",
    )
    need(
        got.peak < 8 * N * V / 3,
        f"It holds {got.peak / 1e6:.1f} MB at its peak; [N, V] takes {8 * N * V / 1e6:.1f} MB and "
        f"one chunk only "
        f"{8 * rows * V / 1e6:.2f} MB. What outlives its chunk?",
    )


@check(3, 1)
def bad_labels(mine, key):
    """labels outside the vocabulary"""
    for label in (-100, -1, 21, 400):
        hidden, weight, labels = scoring(draw(3, 12), 6, 8, 21)
        labels["tensor"][4] = label
        for name in ("logprob_forward", "chunked_logprob"):
            need(
                mine.error(name, hidden, weight, labels) == "ValueError",
                f"{name} should refuse the label {label} (of 21 tokens) with a ValueError.",
            )


@check(3, 2)
def low_precision(mine, key):
    """bfloat16 inputs"""
    rng = draw(3, 13)
    hidden, weight = in_bfloat16(rng.normal(size=(40, 64))), in_bfloat16(rng.normal(size=(200, 64)))
    labels = (hidden @ weight.T).argmax(
        1
        # Likely tokens, as a policy samples them; their logits are near 20.
    )
    exact = key("logprob_forward", tensor(hidden), tensor(weight), tensor(labels, "int64")).value
    for name in ("logprob_forward", "chunked_logprob"):
        got = mine(
            name,
            tensor(hidden, "bfloat16"),
            tensor(weight, "bfloat16"),
            tensor(labels, "int64"),
            rows_per_chunk=8,
        ).value
        same(
            got,
            exact._replace(dtype="float32"),
            f"{name} on bfloat16 inputs: in which dtype are the sums, and which dtype comes back?",
            rtol=0,
            atol=5e-3,
        )


@check(3, 4)
def hidden_gradient(mine, key):
    """chunked_logprob: the gradient with respect to hidden"""
    for n, (rows, temperature) in enumerate([(4, 1.0), (100, 0.6)]):
        args, weight = (
            scoring(draw(3, 20, n), 13, 6, 37, grads="h"),
            tensor(draw(3, 21, n).normal(size=13)),
        )
        options = dict(temperature=temperature, rows_per_chunk=rows, weight=weight)
        got, want = (
            mine("chunked_logprob", *args, **options),
            key("chunked_logprob", *args, **options),
        )
        same(
            got.value,
            want.value,
            f"chunked_logprob: the values differ (temperature={temperature}).",
        )
        same_gradients(
            got.grads,
            want.grads,
            f"chunked_logprob: the gradient with respect to hidden differs "
            f"(temperature={temperature}). It is "
            "linear in dL/dlogp, which is another number for each row.",
        )


@check(3, 4)
def head_gradient(mine, key):
    """chunked_logprob: the gradient with respect to the head"""
    for n, (grads, temperature) in enumerate([("hw", 0.6), ("w", 1.0)]):
        args, weight = (
            scoring(draw(3, 22, n), 13, 6, 37, grads=grads),
            tensor(draw(3, 23, n).normal(size=13)),
        )
        options = dict(temperature=temperature, rows_per_chunk=5, weight=weight)
        got, want = (
            mine("chunked_logprob", *args, **options),
            key("chunked_logprob", *args, **options),
        )
        need(
            got.grads[-1] is not None,
            "chunked_logprob: weight requires a gradient and gets none; a tied head would never "
            "learn from this side.",
        )
        same_gradients(
            got.grads[-1:],
            want.grads[-1:],
            f"chunked_logprob: the gradient with respect to weight differs "
            f"(temperature={temperature}).",
        )
        same_gradients(
            got.grads,
            want.grads,
            "chunked_logprob: the gradient with respect to hidden differs when weight has one too.",
        )


@check(3, 4)
def passes(mine, key):
    """chunked_logprob: two passes with a frozen head, at most four with a trainable one"""
    N, H, V = 64, 16, 300
    for grads, most in (("h", 2), ("hw", 4)):
        got = mine(
            "chunked_logprob",
            *scoring(draw(3, 24), N, H, V, grads=grads),
            rows_per_chunk=16,
            cost=True,
        )
        need(got.value.grad, "chunked_logprob carries no gradient.")
        count = got.flop / (2 * N * H * V)
        need(
            count <= most + 0.01,
            f"Forward and backward make {count:.2f} passes over weight with gradients for "
            f"{'hidden and weight' if grads == 'hw' else 'hidden only'}; {most} are enough. What "
            f"is computed twice?",
        )


@check(3, 4)
def backward_memory(mine, key):
    """chunked_logprob: memory until backward is done"""
    N, V, rows = 512, 800, 16
    got = mine(
        "chunked_logprob", *scoring(draw(3, 25), N, 4, V, grads="h"), rows_per_chunk=rows, cost=True
    )
    need(got.value.grad, "chunked_logprob carries no gradient.")
    need(
        got.peak < 8 * N * V / 3,
        f"It holds {got.peak / 1e6:.1f} MB at its peak; [N, V] takes {8 * N * V / 1e6:.1f} MB. "
        f"What is kept for backward "
        "besides numbers of size [N] and [N, H]?",
    )


@check(3, 2)
def gradient_precision(mine, key):
    """chunked_logprob: gradients of bfloat16 inputs"""
    rng = draw(3, 26)
    arrays = in_bfloat16(rng.uniform(size=(400, 16))), in_bfloat16(rng.normal(size=(24, 16)) * 0.3)
    labels, factor = tensor(rng.integers(24, size=400), "int64"), tensor(1 + rng.uniform(size=400))
    got = mine(
        "chunked_logprob",
        *(tensor(x, "bfloat16", **G) for x in arrays),
        labels,
        rows_per_chunk=4,
        weight=factor,
    ).grads
    want = key("chunked_logprob", *(tensor(x, **G) for x in arrays), labels, weight=factor).grads
    for ours, right, name in zip(got, want, ("hidden", "weight")):
        need(
            ours is not None and ours.dtype == "bfloat16",
            f"The gradient of a bfloat16 {name} is bfloat16.",
        )
        error = np.abs(ours.numbers - right.numbers).max() / np.abs(right.numbers).max()
        need(
            error < 0.008,
            f"The gradient with respect to {name} is off by {error:.1%} of its largest number: "
            f"bfloat16 has three digits, and every "
            "addition in it loses some. When is it rounded?",
        )


# -- 4 ---------------------------------------------------------------------------------------------
def pair(rng, B: int = 4, T: int = 6, **kinds):
    """teacher and student log-probs [B, T]."""
    return [
        tensor(rng.uniform(-3, -0.1, (B, T)), **kinds),
        tensor(rng.uniform(-3, -0.1, (B, T)), **kinds),
    ]


@check(4, 3)
def gate_values(mine, key):
    """confidence_gate: values"""
    args = pair(draw(4, 0))
    for beta in (5.0, 0.7):
        got, want = (
            mine("confidence_gate", *args, beta).value,
            key("confidence_gate", *args, beta).value,
        )
        if isinstance(got, Array) and got.numbers.shape == want.numbers.shape:
            need(
                not np.allclose(got.numbers, 1 - want.numbers, atol=1e-9),
                "Your gate opens where it should close: which of the two is surer of the token?",
            )
        same(
            got,
            want,
            f"The gate's values differ (beta={beta}): what makes it sharper, and what is it for "
            f"Delta = 0?",
        )


@check(4, 2)
def gate_detached(mine, key):
    """confidence_gate: detached"""
    got = mine("confidence_gate", *pair(draw(4, 1), **G), 5.0).value
    need(isinstance(got, Array) and not got.grad, "The gate carries a gradient; it is a weight.")


def distillation(rng, filler: float = 0.0):
    """logp, teacher_logp and mask: two of four rows have a skill, and padding."""
    mask, numbers = batch(rng, 4, 6)
    mask &= np.array([True, False, True, False])[rng.permutation(4)][:, None]
    logp, teacher = rng.uniform(-3, -0.1, (2, 4, 6))
    return [
        tensor(np.where(mask, logp, filler), **G),
        tensor(np.where(mask, teacher, filler), **G),
        tensor(mask, "bool"),
    ]


@check(4, 5)
def opd_values(mine, key):
    """opd_loss: value and gradient"""
    for n, beta in enumerate((5.0, 0.7)):
        args = distillation(draw(4, 2, n), filler=-0.5)
        got, want = mine("opd_loss", *args, beta), key("opd_loss", *args, beta)
        same(
            got.value,
            want.value,
            f"The value differs (beta={beta}): check the gap's sign, the gate, and over which "
            f"tokens the mean runs.",
        )
        same_gradients(
            got.grads[:1],
            want.grads[:1],
            f"The value is right, the gradient is not (beta={beta}): through which factor may it "
            f"flow?",
        )
        need(
            (got.grads[0].numbers <= 0).all(), "This loss should only ever push a sampled token up."
        )


@check(4, 2)
def teacher_fixed(mine, key):
    """opd_loss: the teacher has no gradient"""
    got = mine("opd_loss", *distillation(draw(4, 3)), 5.0)
    need(got.grads[0] is not None, "logp gets no gradient.")
    no_gradient(
        got.grads[1],
        "The teacher gets a gradient. It is the same network: what would it learn from that?",
    )


@check(4, 3)
def opd_mask(mine, key):
    """opd_loss: empty mask, garbage at masked positions"""
    for filler in (np.nan, -np.inf):
        args = distillation(draw(4, 4), filler)
        got, want = mine("opd_loss", *args, 5.0), key("opd_loss", *args, 5.0)
        same(got.value, want.value, f"Masked positions hold {filler}. {POISON}")
        same_gradients(
            got.grads[:1],
            want.grads[:1],
            f"Masked positions hold {filler}: the gradient differs. {POISON}",
        )
    logp, teacher, mask = distillation(draw(4, 5))
    got = mine("opd_loss", logp, teacher, {**mask, "tensor": [0.0] * len(mask["tensor"])}, 5.0)
    need(
        isinstance(got.value, Array) and got.value.numbers == 0,
        "Without any skill in the batch the loss is 0, not NaN.",
    )
    no_gradient(got.grads[0], "Without any skill in the batch the gradient is 0.")


# -- 5 ---------------------------------------------------------------------------------------------
VERBS, OBJECTS, PLACES = (
    ("Take", "Heat", "Cool", "Clean"),
    ("mug", "plate", "apple", "knife", "pan"),
    ("shelf", "desk", "cabinet", "drawer"),
)


def sentence(rng) -> str:
    verb, thing, place = (str(rng.choice(words)) for words in (VERBS, OBJECTS, PLACES))
    return f'{verb} the {thing}, then move it to the {place}. It\'s "closed": open it.'


def reply(skill, **more) -> str:
    return json.dumps({"episode_summary": "Won.", "episode_skill": skill, **more})


def reads(mine, key, cases: dict) -> None:
    """Each reply must give what the solution gives; the case's name goes into the message."""
    for name, text in cases.items():
        got, want = mine("parse_skill", text).value, key("parse_skill", text).value
        need(
            isinstance(got, str),
            f"parse_skill should return a str, not {type(got).__name__} ({name}).",
        )
        need(
            got == want,
            f"parse_skill, {name}: "
            + (
                f"it should find nothing usable, but returned {got[:80]!r}."
                if not want
                else "it found nothing."
                if not got
                else f"it returned {got[:80]!r}, which is not what the reply says."
            ),
        )


@check(5, 3)
def plain_json(mine, key):
    """parse_skill: JSON, bare and decorated"""
    s = sentence(draw(5, 0))
    reads(
        mine,
        key,
        {
            "plain JSON": reply(s),
            "spread over lines": json.dumps(json.loads(reply(s)), indent=2),
            "other order": json.dumps({"episode_skill": s, "episode_summary": "Lost."}),
            "prose around it": f"Sure! Here it is:\n{reply(s)}\nI hope this helps.",
            "a code fence": f"```json\n{reply(s)}\n```",
            "a bare fence and prose": f"My skill:\n```\n{reply(s)}\n```\nDone.",
            "no summary": json.dumps({"episode_skill": s}),
            "a key too many": reply(s, confidence=0.9),
            "other languages": reply("Nimm die Tasse: 杯子 ☕"),
        },
    )


@check(5, 2)
def mended(mine, key):
    """parse_skill: not quite JSON"""
    s = sentence(draw(5, 1))
    literal = str({"episode_summary": "Won.", "episode_skill": s})
    reads(
        mine,
        key,
        {
            "a trailing comma": reply(s)[:-1] + ",}",
            "a trailing comma and a line break": reply(s)[:-1] + ",\n}",
            "a trailing comma, and null as summary": f'{{"episode_summary": null, "episode_skill": '
            f"{json.dumps(s)},}}",
            "a Python dict": literal,
            "a Python dict in a fence": f"```python\n{literal}\n```",
            "a Python dict with a trailing comma": literal[:-1] + ",}",
            "a comma before a bracket inside the skill": reply(
                "Open it (the box,) then [look,] and go."
            ),
        },
    )


@check(5, 2)
def unusable(mine, key):
    """parse_skill: nothing usable"""
    s = sentence(draw(5, 2))
    whole = reply(s)
    reads(
        mine,
        key,
        {
            "empty text": "",
            "no JSON": "Always open what is closed.",
            "cut in the skill": whole[:-12],
            "cut before the last bracket": whole[:-1],
            "cut in the summary": whole[:20],
            "no skill key": json.dumps({"episode_summary": s}),
            "an empty skill": reply(""),
            "a blank skill": reply(" \n\t "),
            "null": reply(None),
            "a number": reply(7),
            "a dict as skill": reply({"skill": s}),
            "a list, not an object": json.dumps(["episode_skill", s]),
            "a bare string": json.dumps(s),
            "brackets only": "}{][",
            "cut inside the thinking": f"<think>Perhaps {s}",
            "a lone surrogate": "\ud800{",
        },
    )


@check(5, 2)
def hostile(mine, key):
    """parse_skill: hostile and huge replies"""
    bomb = '{"episode_skill": "a" + str(__import__("os")._exit(3))}'
    reads(
        mine,
        key,
        {
            "code in place of a string": bomb,
            "a call as value": "{'episode_skill': print('x')}",
            "100,000 open brackets": "{" * 100_000,
            "deep nesting": '{"episode_skill":' * 3000 + "1" + "}" * 3000,
            "quotes without end": '{"' * 50_000,
            "a 190,000-letter word": "x" * 190_000,
            "backslashes": '{"episode_skill": "' + "\\" * 100_001,
            "commas": "{" + "," * 150_000 + "}",
        },
    )


@check(5, 1)
def one_line(mine, key):
    """parse_skill: one line, at most 60 words"""
    s = sentence(draw(5, 3))
    reads(
        mine,
        key,
        {
            "line breaks in the skill": reply(f"  {s}\nStep 3 saw:\tnothing.\r\n\r\n{s} "),
            "raw line breaks": reply(s + "@" + s).replace("@", "\n"),
            "200 words": reply(" ".join(f"word{i}" for i in range(200))),
        },
    )


@check(5, 1)
def drafts(mine, key):
    """parse_skill: drafts, and more than one object"""
    rng = draw(5, 4)
    a, b = reply("Draft: " + sentence(rng)), reply(sentence(rng))
    reads(
        mine,
        key,
        {
            "a draft in a thinking block": f"<think>{a}</think>\n{b}",
            "a draft and no answer": f"<think>{a}</think> I cannot say.",
            "only the closing tag": f"{a} Hmm.</think>{b}",
            "two objects": f"{a}\nNo, better:\n{b}",
            "the second without a skill": f"{b}\n{json.dumps({'episode_summary': 'Won.'})}",
        },
    )


@check(5, 4)
def placement(mine, key):
    """teacher_view"""
    rng = draw(5, 5)
    for n in range(3):
        length, cut = 14, int(rng.integers(3, 7))
        ids, block = (
            rng.integers(100, size=length).tolist(),
            rng.integers(100, 200, size=2 + n).tolist(),
        )
        sampled = [i > cut and bool(rng.random() < 0.5) for i in range(length)]
        got, want = (
            mine("teacher_view", ids, sampled, cut, block),
            key("teacher_view", ids, sampled, cut, block),
        )
        need(
            isinstance(got.value, list)
            and len(got.value) == 2
            and all(isinstance(x, list) for x in got.value),
            "teacher_view returns two lists.",
        )
        need(
            not got.changed,
            "teacher_view changed its arguments; the student's copy of the episode is still "
            "needed.",
        )
        need(
            got.value[0] == want.value[0],
            f"The ids are not in the right order: the block starts at index cut = {cut}, and all "
            f"others stay, in order.",
        )
        need(
            len(got.value[1]) == len(got.value[0]),
            "The two lists have different lengths: then the mask points at other tokens than it "
            "should.",
        )
        need(
            [i for i, on in zip(*got.value) if on] == [i for i, on in zip(ids, sampled) if on],
            "The teacher must score exactly the tokens that the student sampled, neither more nor "
            "others.",
        )
        need(got.value[1] == want.value[1], "sampled differs.")


# -- 6 ---------------------------------------------------------------------------------------------
def whole_batch(rng):
    """Everything seed_loss takes: [B, T] log-probs (zeros where padded), advantages, mask, which
    rows have a skill."""
    mask, numbers = batch(rng, 4, 6)
    old = numbers(-3, -0.1)
    others = [np.where(mask, old + rng.normal(scale=0.4, size=old.shape), 0) for _ in range(3)]
    has_skill = np.array([True, True, False, False])[rng.permutation(4)]
    return [
        tensor(others[0], **G),
        tensor(old, **G),
        tensor(others[1], **G),
        tensor(others[2], **G),
        tensor(rng.normal(size=4)),
        tensor(mask, "bool"),
        tensor(has_skill, "bool"),
    ]


@check(6, 4)
def joint_loss(mine, key):
    """seed_loss: value and gradient"""
    settings = dict(clip_range=0.2, kl_coef=0.0, lambda_opd=0.0, beta_opd=5.0)
    for n, (part, change) in enumerate(
        {
            "the policy loss alone": {},
            "with the KL term": dict(kl_coef=0.3),
            "with the OPD term": dict(lambda_opd=0.4),
            "all terms": dict(kl_coef=0.1, lambda_opd=0.7, beta_opd=2.0, clip_range=0.1),
        }.items()
    ):
        args = whole_batch(draw(6, n))
        got, want = (
            mine("seed_loss", *args, **settings | change),
            key("seed_loss", *args, **settings | change),
        )
        same(
            got.value,
            want.value,
            f"seed_loss differs ({part}): which sign, which coefficient, which tokens?",
        )
        same_gradients(got.grads[:1], want.grads[:1], f"seed_loss: the gradient differs ({part}).")
        for grad, name in zip(got.grads[1:], ("old_logp", "ref_logp", "teacher_logp")):
            no_gradient(grad, f"{name} gets a gradient ({part}).")


@check(6, 1)
def without_skill(mine, key):
    """seed_loss: episodes without a skill"""
    settings = dict(clip_range=0.2, kl_coef=0.1, lambda_opd=0.7, beta_opd=5.0)
    args = whole_batch(draw(6, 10))
    teacher, has_skill = args[3], args[6]
    wild = {
        **teacher,
        "tensor": [
            x + 5 * (not has_skill["tensor"][i // 6]) for i, x in enumerate(teacher["tensor"])
        ],
    }
    need(
        mine("seed_loss", *args, **settings).value
        == mine("seed_loss", *args[:3], wild, *args[4:], **settings).value,
        "The teacher's log-probs of an episode without a skill change the loss.",
    )
    none = {**has_skill, "tensor": [0.0] * 4}
    got, want = (
        mine("seed_loss", *args[:6], none, **settings),
        key("seed_loss", *args[:6], none, **settings),
    )
    same(got.value, want.value, "When no episode has a skill, what is left is GRPO.")


@check(6, 5, trains=True)
def training(mine, key):
    """ten updates on the tiny base"""
    # First see that everything is there: the run itself takes most of a minute.
    mine("group_advantages", tensor([[0.0, 1.0]]))
    mine("chunked_logprob", *scoring(draw(6, 20), 3, 2, 5, "float32", grads="hw"))
    mine("parse_skill", "")
    mine("teacher_view", [1, 2], [False, True], 1, [3])
    mine(
        "seed_loss",
        *whole_batch(draw(6, 21)),
        clip_range=0.2,
        kl_coef=0.1,
        lambda_opd=0.7,
        beta_opd=5.0,
    )
    curve = mine.train()
    need(
        all(np.isfinite([line["reward"], line["delta"]]).all() for line in curve),
        "The training run gave numbers that are not finite.",
    )
    success, delta = ([line[name] for line in curve] for name in ("success", "delta"))
    told = (
        "; success by update: "
        + " ".join(f"{s:.0%}" for s in success)
        + "; mean Delta: "
        + " ".join(f"{d:+.2f}" for d in delta)
    )
    need(
        min(line["with_skill"] for line in curve) > 0.9,
        "Most episodes had no skill: does parse_skill read the rule analyzer's replies?",
    )
    need(
        np.mean(delta[-3:]) > np.mean(delta[:2]) + 0.1,
        "The policy does not come closer to what the skill makes of it" + told,
    )
    need(
        np.mean(success[-3:]) > np.mean(success[:3]) + 0.05,
        "The policy does not win more games than before" + told,
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_exercise(check, mine, answers, record_property):
    record_property("exercise", check.exercise)
    record_property("points", check.points)
    message = ""
    try:
        check(mine, answers(check.name))
    except Failed as failure:
        message = f"exercise {check.exercise}, {check.__doc__} ({check.points} points): {failure}"
    if message:
        pytest.fail(message, pytrace=False)
