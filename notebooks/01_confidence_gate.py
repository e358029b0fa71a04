# %% [markdown]
# # 01 · The confidence gate: how a sentence of hindsight becomes a weight per token
#
# One real episode, played by the tiny base. Somebody who has seen all of it writes one line of
# advice, a *skill*. Then the policy reads its own words a second time, now with that line in front
# of it, and every token it sampled gets a number: did the advice make you surer of this, or less
# sure? This notebook draws these numbers over the text, takes the gate apart, and shows where it
# fails.
#
# You need: softmax, log-probabilities, what a policy gradient is. Numbers that depend on the base
# are printed by the cells and not repeated in the text; what the text says about them is asserted.
# Nothing here is a benchmark: one tiny model, a few dozen episodes.
#
# Time: about half a minute on one CPU thread, most of it for making and playing the games
# (`SEED_MINI_QUICK=1`: fewer episodes).

# %%
import importlib.util
import math
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

# no progress bars here
warnings.filterwarnings("ignore", message="IProgress not found")

HERE = Path.cwd() if (Path.cwd() / "build.py").exists() else Path.cwd() / "notebooks"
# Colab: fetch the project ...
if not (HERE.parent / "seed_mini.py").exists():
    HERE = Path.cwd() / "seed_mini" / "notebooks"
    if not HERE.exists():
        subprocess.run(["git", "clone", "-q", "--depth", "1",
                        "https://github.com/seed-mini/seed_mini"], check=True)
# ... and what it needs
if importlib.util.find_spec("alfworld") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-r",
                    str(HERE.parent / "requirements.txt")], check=True)
sys.path.insert(0, str(HERE.parent))

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

import envs
import losses
import seed_mini
import skills
from environments import alfworld, alfworld_games
from policy import score
from runs import Pool, load_policy

QUICK = os.environ.get("SEED_MINI_QUICK") == "1"
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
plt.rcParams.update({"figure.dpi": 100, "font.size": 9, "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False})
# told apart by the colour-blind; line styles and hatches tell them apart in grey
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"

# %% [markdown]
# ## 1. A real episode
#
# Twelve generated houses, two of each ALFWorld task type, several episodes of each at the training
# temperature (`temperature=1.0`), at most `max_steps=20` steps: exactly what an update of Stage 2
# does first. The base wins rarely. We play until there are a few wins to look at.

# %%
cfg = seed_mini.resolve(seed_mini.Config(seed=1))
policy = load_policy(cfg, seed_mini.weights_of(cfg), trainable=False)
env = envs.make(envs.find("alfworld"), ["games=generated"])
games = alfworld_games.find_games("generated", seed=7, counts={"train": 12})[0]["train"]
# at least so many rounds, and so many wins
rolls, need = [], (2, 1) if QUICK else (8, 3)
with Pool(env, workers=1) as pool:
    for k in range(30):
        keys = [("notebook 01", k, i) for i in range(len(games))]
        rolls += seed_mini.rollout(policy, pool, games, cfg, keys, cfg.temperature)[0]
        if k + 1 >= need[0] and sum(r.episode.won for r in rolls) >= need[1]:
            break
won = np.array([r.episode.won for r in rolls])
sampled = sum(sum(r.sampled) for r in rolls)
print(f"{len(rolls)} episodes of {len(games)} games, {won.sum()} won; {sampled} sampled tokens "
      f"among {sum(len(r.ids) for r in rolls)}")
assert won.any() and not won.all(), "this notebook needs a won and a lost episode"

# %%
# the shortest win
W = min((i for i in range(len(rolls)) if won[i]), key=lambda i: (len(rolls[i].episode.steps), i))
game = rolls[W].episode.task_id
same = [i for i in range(len(rolls)) if not won[i] and rolls[i].episode.task_id == game]
# and a loss, of the same game if there is one
L = same[0] if same else int(np.flatnonzero(~won)[0])
print(f"The task: {rolls[W].episode.goal}.\n")
for n, step in enumerate(rolls[W].episode.steps, 1):
    print(f"{n:2d}  {step.observation}\n    > "
          f"{step.response}{'' if step.valid else '      (not possible)'}")
print(f"    {rolls[W].episode.final_observation}\n\nended: {rolls[W].episode.end}, reward "
      f"{rolls[W].episode.reward:g}")
assert rolls[W].episode.end == "won"

# %% [markdown]
# ## 2. The skill
#
# The analyzer sees the whole finished episode *and its outcome*, so it knows what the player could
# not know: hindsight. Here the embedded rule analyzer writes the skill. In SEED that holds for
# Stage 1 only (there it stands for the paper's GLM-5.2); after Stage 1 the policy writes its skills
# itself, anew in every update, from the very same prompt, whose end you see below.

# %%
replies, counters = skills.analyze(env, [r.episode for r in rolls])
print("...\n" + "\n".join(skills.analyzer_prompt(env, rolls[W].episode).split("\n")[-4:]))
print("\nThe reply\n" + skills.canonical_reply(*env.hindsight(rolls[W].episode)))
print("\nThe block that goes into the teacher's context, right after the task line\n"
      + skills.skill_block(replies[W].skill))
print("and the skill of the lost episode\n" + skills.skill_block(replies[L].skill))
assert all(reply.status == "ok" for reply in replies)
assert replies[W].skill.startswith(alfworld.SEARCH), "a win gives a workflow"
assert replies[L].skill.startswith("Do not"), "a loss what to avoid"

# %% [markdown]
# ## 3. The same tokens, scored twice
#
# * **student** $\ell_\theta = \log \pi_\theta(a_l \mid h, a_{<l})$: the sampled token under
#   ordinary history,
# * **teacher** $\ell_s = \log \pi(a_l \mid H(h, s), a_{<l})$: the *same* token, same weights, with
#   the skill block in the context,
# * $\Delta = \ell_s - \ell_\theta$ in nats, and the gate $g = \sigma(\beta \Delta)$ with the
#   paper's `beta_opd=5.0`.
#
# The teacher is no bigger model. It is the policy with one more line to read. All four are numbers:
# gradients come in section 6.

# %%
plain = [seed_mini.plain(r) for r in rolls]
advised = [seed_mini.with_skill(policy, r, reply.skill) for r, reply in zip(rolls, replies)]
student, _ = score(policy, plain, cfg)
teacher, _ = score(policy, advised, cfg)
delta = [t - s for t, s in zip(teacher, student)]
gate = [losses.confidence_gate(t, s, cfg.beta_opd) for t, s in zip(teacher, student)]

block = len(policy.encode(skills.skill_block(replies[W].skill)))
(ids, on), (ids_s, on_s), cut = plain[W], advised[W], rolls[W].cut
assert ids_s[:cut] + ids_s[cut + block:] == ids and sum(on) == sum(on_s), (
    "nothing but the block differs")
gap = max((torch.tensor([lp for lp, on in zip(r.logp, r.sampled) if on]) - s).abs().max().item()
          for r, s in zip(rolls, student))
print(f"the skill block is {block} tokens; sampler and scorer differ by at most {gap:.1e} nats")
assert gap < 1e-2, "the tokens must be scored at the temperature they were sampled at"
every = torch.cat(gate)
print(f"all {len(every)} tokens: mean gate {every.mean():.2f}, {(every > 0.9).float().mean():.0%} "
      f"above 0.9, {(every < 0.1).float().mean():.0%} below 0.1")
assert (every > 0.9).any() and (every < 0.1).any()

# %% [markdown]
# ## 4. Drawn over the text
#
# One line per step: what the policy saw (grey, shortened), then the tokens it sampled. The darker a
# box, the wider the gate; the number is $\Delta$. Read it from the top: where does the hindsight
# agree with what was done?


# %%
def positions(roll: seed_mini.Rollout) -> list[tuple[int, int]]:
    """(position in the sequence, step) of every sampled token; a gap between sampled tokens is the
    game's turn."""
    on = [t for t, sampled in enumerate(roll.sampled) if sampled]
    return list(zip(on, np.cumsum([0] + [b != a + 1 for a, b in zip(on, on[1:])]).tolist()))


def word(token: int) -> str:
    """A token as we print it; a space alone as an underscore. (A word the tokenizer does not know
    is spelled letter by letter.)"""
    return "end" if token == policy.end_id else policy.decode([token]).strip() or "_"


def draw(index: int, delta: torch.Tensor, skill: str, title: str) -> None:
    """The sampled tokens of episode `index` as boxes: fill = gate (light 0, dark 1), number = Delta
    in nats."""
    roll, shades = rolls[index], plt.get_cmap("Blues")
    g = losses.confidence_gate(delta, torch.zeros_like(delta), cfg.beta_opd)
    steps = roll.episode.steps
    fig, ax = plt.subplots(figsize=(10, 0.4 * len(steps) + 1.6), layout="constrained")
    x, last, right = 0.0, -1, 0.0
    for k, (t, row) in enumerate(positions(roll)):
        if row != last:
            x, last, seen = 0.0, row, steps[row].observation.replace("\n", " ")
            ax.text(-0.15, -row, seen if len(seen) < 58 else seen[:27] + " ... " + seen[-27:],
                    ha="right", va="center", color="#555555", fontsize=7)
        text = word(roll.ids[t])
        width = 0.2 + 0.1 * max(len(text), 4)
        ax.add_patch(plt.Rectangle((x, -row - 0.44), width, 0.88, facecolor=shades(float(g[k])),
                                   edgecolor="black", lw=0.6))
        ink = "white" if g[k] > 0.55 else "black"
        ax.text(x + width / 2, -row + 0.17, text, ha="center", va="center", color=ink, fontsize=8)
        number = f"{float(delta[k]):+.2f}" if abs(delta[k]) >= 0.005 else "0"
        ax.text(x + width / 2, -row - 0.23, number, ha="center", va="center", color=ink,
                fontsize=6.5)
        x += width + 0.05
        right = max(right, x)
    ax.set(xlim=(-4.6, max(right, 7.0)), ylim=(-len(steps) + 0.45, 0.6))
    ax.axis("off")
    ax.set_title("\n".join([title, *textwrap.wrap(skills.skill_block(skill), 135)]), loc="left",
                 fontsize=8.5)
    fig.colorbar(plt.cm.ScalarMappable(plt.Normalize(0, 1), shades), ax=ax,
                 orientation="horizontal", shrink=0.5, aspect=40, pad=0.01,
                 label=f"fill: gate = sigmoid({cfg.beta_opd:g} Delta);  numbers: Delta in nats")
    plt.show()


draw(W, delta[W], replies[W].skill, f"Won: {rolls[W].episode.goal}")

# %% [markdown]
# Three kinds of tokens:
#
# * **dark**: with the hindsight in front of it the policy would have been surer of this token. The
#   gate opens and the token is taught.
# * **white**: the hindsight would have done something else. The gate closes; the token is left
#   alone.
# * **in between, with $\Delta \approx 0$**: the skill has no opinion, usually because the token was
#   certain anyway (the second half of a command, the end token). The gate is one half, not zero.
#
# The same as log-probabilities:

# %%
fig, ax = plt.subplots(figsize=(10, 2.8))
x = np.arange(len(student[W]))
ax.bar(x - 0.2, student[W], 0.4, color="white", edgecolor=BLUE, hatch="////",
       label="student: history only")
ax.bar(x + 0.2, teacher[W], 0.4, color=ORANGE, edgecolor=ORANGE, label="teacher: with the skill")
ax.set_xticks(x, [word(rolls[W].ids[t]) for t, _ in positions(rolls[W])], rotation=90, fontsize=7)
ax.set(ylabel="log-prob of the sampled\ntoken (nats)", xlim=(-0.7, len(x) - 0.3))
ax.legend(loc="lower right", fontsize=8)
plt.show()
idle = torch.cat(delta).abs() < 0.05
print(f"{idle.float().mean():.0%} of all tokens have |Delta| < 0.05: the skill has no opinion. "
      f"Mean student probability there: {torch.cat(student)[idle].exp().mean():.2f}, elsewhere "
      f"{torch.cat(student)[~idle].exp().mean():.2f}")
assert (idle.float().mean() > 0.2
        and torch.cat(student)[idle].exp().mean() > torch.cat(student)[~idle].exp().mean())

# %% [markdown]
# ## 5. The knob: beta from 0 to 20
#
# $\beta = 0$ is no gate at all: every sampled token weighs one half, which is plain imitation of
# one's own samples. $\beta \to \infty$ is a hard threshold: 1 where the skill agrees, 0 where it
# does not. The paper's 5 lies between: it needs $|\Delta| = \ln(9)/5 \approx 0.44$ nats, a factor
# of 1.55 in probability, to go from 0.5 to 0.9 or 0.1.
#
# The weight is not all. A token's own logit is pushed by $g\,(1 - p)$, and a token without an
# opinion is usually one with $p \approx 1$. So the half weight on the many idle tokens costs less
# than it looks: compare the two panels on the right.

# %%
betas = [0, 1, 2, 5, 10, 20]
d, p = torch.cat(delta), torch.cat(student).exp()
kinds = {"skill agrees (Delta > 0.05)": d > 0.05, "no opinion": d.abs() <= 0.05,
         "skill disagrees (Delta < -0.05)": d < -0.05}
shares = {"weight": [], "push": []}
for beta in betas:
    g = losses.confidence_gate(torch.cat(teacher), torch.cat(student), beta)
    for name, w in (("weight", g), ("push", g * (1 - p))):
        shares[name].append([float(w[k].sum() / w.sum()) for k in kinds.values()])
# [beta, kind]
shares = {name: np.array(rows) for name, rows in shares.items()}

fig, axes = plt.subplots(1, 3, figsize=(11, 3.2), width_ratios=(1.3, 1, 1))
grid = torch.linspace(-3, 3, 301)
for beta, style, shade in zip(betas, (":", "-.", "--", "-", (0, (5, 1)), (0, (1, 1))),
                              np.linspace(0.35, 1, len(betas))):
    axes[0].plot(grid, torch.sigmoid(beta * grid), ls=style, lw=2.4 if beta == 5 else 1.3,
                 color=plt.get_cmap("Blues")(shade), label=f"beta = {beta}")
axes[0].set(xlabel="Delta (nats)", ylabel="gate")
axes[0].legend(fontsize=7, loc="upper left")
for ax, (name, rows), label in zip(axes[1:], shares.items(),
                                   ("share of the gate's weight", "share of the push  g (1 - p)")):
    bottom = np.zeros(len(betas))
    looks = zip(kinds, (BLUE, "white", ORANGE), ("", "....", "///"))
    for k, (kind, colour, hatch) in enumerate(looks):
        ax.bar(range(len(betas)), 100 * rows[:, k], bottom=bottom, color=colour, hatch=hatch,
               edgecolor="black", lw=0.6, label=kind)
        bottom += 100 * rows[:, k]
    ax.set_xticks(range(len(betas)), betas)
    ax.set(xlabel="beta", ylabel=f"{label} (%)")
fig.legend(*axes[1].get_legend_handles_labels(), loc="upper right", ncols=3, fontsize=8,
           bbox_to_anchor=(0.98, 1.06))
fig.tight_layout()
plt.show()

five = betas.index(5)
print("share of the weight / of the push on tokens without an opinion, at beta = 5: "
      f"{shares['weight'][five, 1]:.0%} / {shares['push'][five, 1]:.0%}; on tokens the skill "
      "disagrees with, from beta = 0 to 20: "
      f"{shares['push'][0, 2]:.0%} -> {shares['push'][-1, 2]:.0%} of the push")
assert torch.equal(losses.confidence_gate(torch.cat(teacher), torch.cat(student), 0),
                   torch.full_like(d, 0.5)), "beta = 0 is no gate"
assert abs(float(losses.confidence_gate(torch.tensor([[math.log(9) / 5]]), torch.zeros(1, 1), 5))
           - 0.9) < 1e-6
assert shares["push"][five, 1] < shares["weight"][five, 1], "idle tokens push less than they weigh"
assert all(np.diff(rows[:, 2]).max() < 0 for rows in shares.values()), (
    "a sharper gate always takes weight from what the skill disagrees with")

# %% [markdown]
# ## 6. The loss, by hand
#
# $$L_{opd} = \frac{1}{|m|}\sum_{l \in m} g_l \,\big(\mathrm{sg}[\ell_s] - \ell_\theta\big), \qquad
#   \frac{\partial L_{opd}}{\partial \ell_\theta} = -\frac{g_l}{|m|}$$
#
# Gate and teacher are constants (sg: stop-gradient), $m$ marks the response tokens of episodes that
# have a usable skill. Two rows of two tokens, the second row without a skill, $\beta = 1$:

# %%
l_theta = torch.tensor([[-2.0, -1.0], [-0.5, -0.25]], dtype=torch.float64, requires_grad=True)
l_skill = torch.tensor([[-1.0, -2.0], [0.0, 0.0]], dtype=torch.float64)
mask = torch.tensor([[True, True], [False, False]])
loss = losses.opd_loss(l_theta, l_skill, mask, beta=1.0)
loss.backward()
print(f"Delta, row 0: {(l_skill - l_theta).detach()[0].tolist()}; loss {loss.item():+.6f}; "
      f"gradient\n{l_theta.grad}")
# sigmoid(+1), sigmoid(-1)
up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
assert math.isclose(loss.item(), (up * 1 + down * -1) / 2)
assert torch.allclose(l_theta.grad,
                      torch.tensor([[-up / 2, -down / 2], [0, 0]], dtype=torch.float64))
assert losses.opd_loss(l_theta, l_skill, torch.zeros_like(mask), 1.0).item() == 0.0, (
    "no skill anywhere: exactly 0, and no NaN")
assert losses.opd_loss(torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1), 1.0) < 0, (
    "the value may be negative: watch the gate, not the loss")

# %% [markdown]
# ## 7. What kind of gradient is this? Against plain NLL and reverse KL
#
# A vocabulary of three tokens A, B, C; the student says $p = (\tfrac12, \tfrac14, \tfrac14)$, the
# teacher, having read the skill, $q = (\tfrac14, \tfrac12, \tfrac14)$. With $\beta = 1$ the gate is
# a fraction: $\sigma(\ln q_a/p_a) = q_a/(p_a+q_a) = (\tfrac13, \tfrac23, \tfrac12)$. What does each
# loss do to the student's logits?
#
# **One sample.** Every sampled token is pushed *up*, $-\partial L/\partial z = g\,(e_a - p)$, also
# A, which the teacher likes less. Plain NLL is the same with $g = 1$.
#
# **On average over the student's own samples**, plain NLL does *nothing*:
# $\sum_a p_a (e_a - p) = 0$. What a constant weight pushes up when it is sampled, it pushes down
# when something else is. Only what the gate says beyond a constant survives:
#
# $$-\,\mathbb E\,\frac{\partial L_{opd}}{\partial z} = \sum_a p_a\, g_a (e_a - p)
#   = \sum_a p_a\,(g_a - \tfrac12)(e_a - p) = \tfrac{1}{96}(-6, 5, 1)$$
#
# So A, pushed up whenever it is sampled, goes down *on average*, because B is pushed up twice as
# hard. And the reverse KL over the whole vocabulary, $\mathrm{KL}(p\|q)$, has
# $-\partial/\partial z_a = p_a(\Delta_a + \mathrm{KL}) = \tfrac{\ln 2}{16}(-6, 5, 1)$: the same
# direction. That is no accident: for small $\beta\Delta$ the gate is
# $\tfrac12 + \tfrac{\beta\Delta}{4}$, hence
#
# $$\mathbb E\,\nabla L_{opd} \approx \tfrac{\beta}{4}\,\nabla\,\mathrm{KL}(p\|q).$$
#
# L_opd is a *sampled, saturating* cousin of the reverse KL: it costs one log-prob a token instead
# of a vocabulary, and no single token can count for more than weight 1, however wild its $\Delta$.
# What it gives up: one sample is noise around that average, and the constant half cancels only as
# long as the samples come from the very student that is trained.


# %%
def gradients(logits: torch.Tensor, q: torch.Tensor, beta: float) -> dict[str, torch.Tensor]:
    """Descent directions -dL/dlogits [V]: per sampled token [V, V], their on-policy means, and the
    reverse KL. float64."""
    z = logits.clone().requires_grad_()
    logp = z.log_softmax(0)
    p, one = logp.detach().exp(), torch.ones(1, 1, dtype=torch.bool)
    step = lambda loss: -torch.autograd.grad(loss, z, retain_graph=True)[0]
    opd = torch.stack([step(losses.opd_loss(logp[a].view(1, 1), q[a].log().view(1, 1), one, beta))
                       for a in range(len(z))])
    nll = torch.stack([step(-logp[a]) for a in range(len(z))])
    return dict(opd=opd, nll=nll, mean_opd=p @ opd, mean_nll=p @ nll,
                kl=step((logp.exp() * (logp - q.log())).sum()))


p3, q3 = (torch.tensor(x, dtype=torch.float64)
          for x in ((1 / 2, 1 / 4, 1 / 4), (1 / 4, 1 / 2, 1 / 4)))
three = gradients(p3.log(), q3, beta=1.0)
for name, rows in three.items():
    print(f"{name:9s}", np.array2string(rows.numpy(), precision=4, suppress_small=True,
                                        sign="+").replace("\n", "\n" + " " * 10))
exact = torch.tensor([-6.0, 5.0, 1.0], dtype=torch.float64)
assert torch.allclose(three["opd"], torch.tensor([[1 / 3], [2 / 3], [1 / 2]], dtype=torch.float64)
                      * (torch.eye(3, dtype=torch.float64) - p3))
assert (three["opd"].diagonal() > 0).all(), "whatever is sampled is pushed up"
assert torch.allclose(three["mean_nll"], torch.zeros(3, dtype=torch.float64), atol=1e-15)
assert torch.allclose(three["mean_opd"], exact / 96)
assert torch.allclose(three["kl"], math.log(2) / 16 * exact)

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3))
x = np.arange(3)
for k, (key, label, colour, hatch) in enumerate((("nll", "plain NLL", "white", "////"),
                                                 ("opd", "L_opd, beta = 1", BLUE, ""))):
    axes[0].bar(x + 0.3 * k - 0.15, three[key].diagonal(), 0.28, color=colour, hatch=hatch,
                edgecolor="black", lw=0.6, label=label)
axes[0].set(title="one sample: the sampled token's own logit", xlabel="token that was sampled",
            ylabel="push on its logit")
bars = (("mean_nll", "plain NLL (exactly 0)", 1.0, "white", "////"),
        ("mean_opd", "L_opd, beta = 1", 1.0, BLUE, ""),
        ("kl", "reverse KL, times beta/4", 0.25, ORANGE, "..."))
for k, (key, label, scale, colour, hatch) in enumerate(bars):
    axes[1].bar(x + 0.28 * (k - 1), scale * three[key], 0.26, color=colour, hatch=hatch,
                edgecolor="black", lw=0.6, label=label)
axes[1].axhline(0, color="black", lw=0.6)
axes[1].set(title="average over the student's own samples", xlabel="token",
            ylabel="push on the token's logit")
for ax in axes:
    ax.set_xticks(x, ["A (teacher: less)", "B (teacher: more)", "C (no opinion)"])
    ax.legend(fontsize=8)
fig.tight_layout()
plt.show()

# %% [markdown]
# The same with 50 tokens and random student and teacher, $\beta$ from nearly 0 to 20. *Cosine*
# compares directions, *size* the length relative to $\tfrac\beta4 \nabla \mathrm{KL}$: the gate
# starts as the reverse KL and saturates.

# %%
rng = torch.Generator().manual_seed(0)
z50 = torch.randn(50, generator=rng, dtype=torch.float64)
q50 = (z50 + torch.randn(50, generator=rng, dtype=torch.float64)).softmax(0)
table = []
for beta in (0.01, 1, 2, 5, 10, 20):
    g50 = gradients(z50, q50, beta)
    a, b = g50["mean_opd"], beta / 4 * g50["kl"]
    table.append((float(torch.cosine_similarity(a, b, dim=0)), float(a.norm() / b.norm())))
    print(f"beta {beta:5.2f}   cosine {table[-1][0]:.4f}   size {table[-1][1]:.3f}")
assert table[0][0] > 0.9999 and abs(table[0][1] - 1) < 1e-3, (
    "small beta: a reverse KL, times beta / 4")
assert all(a[1] > b[1] for a, b in zip(table, table[1:])), "the larger, the more saturated"
assert table[-1][1] < 0.5, "large beta: saturated"
assert min(c for c, _ in table) > 0.8, "still much the same direction"

# %% [markdown]
# ## 8. A lost episode, a wrong skill, shuffled skills
#
# First a loss. Its skill says what to avoid and repeats the workflow. Where the policy did what the
# workflow says the boxes are dark all the same: a lost episode has good moves, too, and SEED
# teaches them. GRPO gives every token of an episode the same advantage: here a negative one if
# another rollout of this game was won, and none at all if none was.

# %%
draw(L, delta[L], replies[L].skill, f"Lost: {rolls[L].episode.goal}")
kept = (delta[L] > 0.05).float().mean()
print(f"{kept:.0%} of the lost episode's tokens have Delta > 0.05")
lost_delta = torch.cat([delta[i] for i in np.flatnonzero(~won)])
assert (lost_delta > 0.05).any() and (lost_delta < -0.05).any(), (
    "a loss has both: moves to teach and moves to leave alone")

# %% [markdown]
# Now the won episode again, but with the skill of *another task*: same tokens, same weights, a
# wrong line in the context.

# %%
info = alfworld.parse_task(rolls[W].episode.goal)
strangers = [i for i, r in enumerate(rolls) if r.episode.kind != info.task_type
             and alfworld.parse_task(r.episode.goal).object != info.object
             and alfworld.parse_task(r.episode.goal).target != info.target]
stranger = strangers[0]
wrong = score(policy, [seed_mini.with_skill(policy, rolls[W], replies[stranger].skill)], cfg)[0][0]
draw(W, wrong - student[W], replies[stranger].skill,
     f"Won: {rolls[W].episode.goal}. Scored with the skill of another task: "
     f"{rolls[stranger].episode.goal}")
g = losses.confidence_gate(wrong, student[W], cfg.beta_opd)
moved = (g - gate[W]).abs() > 0.1
print("gates that moved by more than 0.1, own -> stranger's skill:",
      "; ".join(f"{word(rolls[W].ids[t])} (step {step + 1}) {gate[W][k]:.2f} -> {g[k]:.2f}"
                for k, (t, step) in enumerate(positions(rolls[W])) if moved[k]))
assert 0 < moved.float().mean() < 0.5, "some tokens care whose skill it is, most do not"

# %% [markdown]
# Compare the two pictures token by token: what belongs to any task (opening what is closed, going
# on to a new place) does not mind whose skill it is. And all episodes, each with the skill of an
# episode of another game (that is what `--ablate shuffle` does in a run, the control the paper does
# not have: is it *this* skill that helps, or any extra text?). We look at two sets of tokens: all
# of them, and the *deciding choices*: in commands that name the task's object or use a lamp (take,
# heat, cool, clean, move, use), the tokens that were a choice, that is, where the student was not
# sure already ($p < 0.95$).

# %%
n = len(rolls)
giver = [next((i + k) % n for k in range(1, n)
              if rolls[(i + k) % n].episode.task_id != rolls[i].episode.task_id) for i in range(n)]
shuffled = score(policy, [seed_mini.with_skill(policy, r, replies[giver[i]].skill)
                          for i, r in enumerate(rolls)], cfg)[0]


def deciding(i: int) -> torch.Tensor:
    """[n] bool over the sampled tokens of episode i: the choices in possible commands that name the
    task's object or use a lamp."""
    wanted = alfworld.parse_task(rolls[i].episode.goal).object
    command = [s.valid and (f" {wanted} " in f"{s.action} " or s.action.startswith("use "))
               for s in rolls[i].episode.steps]
    return torch.tensor([command[k] for _, k in positions(rolls[i])]) & (student[i].exp() < 0.95)


SETS = {"all tokens": lambda i: torch.ones_like(student[i], dtype=torch.bool),
        "deciding choices": deciding}
# (outcome, set, skill) -> Delta of its tokens, one tensor per episode that has any
results = {}
print(f"{'':34s}{'tokens':>7s}{'mean Delta':>12s}{'mean gate':>11s}{'gate > 0.5':>12s}")
for outcome, members in (("won", np.flatnonzero(won)), ("lost", np.flatnonzero(~won)),
                         ("both", range(n))):
    for tokens, choose in SETS.items():
        for name, scored in (("own skill", teacher), ("shuffled", shuffled)):
            results[outcome, tokens, name] = [(scored[i] - student[i])[choose(i)]
                                              for i in members if choose(i).any()]
            x = torch.cat(results[outcome, tokens, name])
            g = losses.confidence_gate(x, torch.zeros_like(x), cfg.beta_opd)
            print(
                f"{outcome + ', ' + tokens + ', ' + name:34s}{len(x):7d}{x.mean():+12.3f}"
                f"{g.mean():11.3f}{(g > 0.5).float().mean():12.0%}")
mean_gate = {key: float(torch.sigmoid(cfg.beta_opd * torch.cat(rows)).mean())
             for key, rows in results.items()}
apart = {tokens: mean_gate["both", tokens, "own skill"] - mean_gate["both", tokens, "shuffled"]
         for tokens in SETS}
print("own minus shuffled, mean gate:", {tokens: round(v, 3) for tokens, v in apart.items()})
assert apart["deciding choices"] > 0, (
    "where it matters, the own skill opens the gate wider than a stranger's")
assert apart["deciding choices"] > apart["all tokens"], "and more so than on the average token"

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for ax, tokens in zip(axes, SETS):
    looks = (("own skill", BLUE, ""), ("shuffled", "white", "////"))
    for k, (name, colour, hatch) in enumerate(looks):
        rows = [torch.stack([torch.sigmoid(cfg.beta_opd * d).mean()
                             for d in results[outcome, tokens, name]])
                for outcome in ("won", "lost")]
        error = [2 * float(r.std()) / math.sqrt(len(r)) if len(r) > 1 else 0 for r in rows]
        ax.bar(np.arange(2) + 0.36 * k - 0.18, [float(r.mean()) for r in rows], 0.34, yerr=error,
               capsize=4, color=colour, hatch=hatch, edgecolor="black", label=name)
    ax.axhline(0.5, color=GREY, ls=":", lw=1.2)
    ax.set_xticks(range(2), [f"{o}\n({len(results[o, tokens, 'own skill'])} episodes)"
                             for o in ("won", "lost")])
    ax.set(title=tokens, ylim=(0, 1))
axes[0].set_ylabel("gate, mean over episodes\n(bars: 2 standard errors)")
axes[1].legend(loc="upper right", fontsize=8)
fig.tight_layout()
plt.show()

# %% [markdown]
# Two things to take home. A mean of $\Delta$ is ruled by a few tokens at $-5$ or $-10$ nats, moves
# the skill would never make; the gate does not care how far below zero they are. So look at the
# gate, at the share above one half, and at both outcomes, never at the mean $\Delta$ alone (that is
# why the training log prints all of them). And over *all* tokens a stranger's skill looks much like
# the own one: most tokens of an episode are the same search in any house. The difference sits in
# the few choices that decide. With so few wins the bars on the left of each panel are wide.

# %%
x = torch.cat(delta)
lowest = x.sort().values[:max(1, len(x) // 20)]
print(f"mean Delta {x.mean():+.3f}; without the lowest 5% of the tokens "
      f"{(x.sum() - lowest.sum()) / (len(x) - len(lowest)):+.3f}; lowest {x.min():+.1f} nats")
few = len(lowest) / len(x)
assert lowest.sum().abs() > 5 * few * x.abs().sum(), (
    "5% of the tokens hold far more than 5% of all |Delta|")

# %% [markdown]
# ## 9. Where it fails
#
# **(a) A teacher that is wrong but sure.** The gate measures whether the *policy believes* the
# skill, not whether the skill is right. Here are the tokens at which a *stranger's* skill opened
# the gate widest. Some belong to good moves, some to bad ones; each would be taught at nearly full
# weight, on the word of a skill for another task. Nothing in $L_{opd}$ can tell; what stands
# against it is the reward (the GRPO term), and $\lambda$ (`lambda_opd=0.3` here; paper:
# `lambda_opd=0.01`), which keeps the distillation the smaller voice.

# %%
rows = []
for i, r in enumerate(rolls):
    for (t, k), x in zip(positions(r), (shuffled[i] - student[i]).tolist()):
        if r.episode.steps[k].valid:
            rows.append((x, i, word(r.ids[t]), r.episode.steps[k].action))
rows.sort(reverse=True)
seen = set()
for x, i, token, action in rows:
    if action not in seen and len(seen) < 5:
        seen.add(action)
        print(f"Delta {x:+.2f}, gate {1 / (1 + math.exp(-cfg.beta_opd * x)):.3f}: {token!r} in "
              f"'{action}' ({'won' if won[i] else 'lost'})\n"
              f"    task: {rolls[i].episode.goal}\n    skill in context: {replies[giver[i]].skill}")
sure = torch.cat([losses.confidence_gate(t, s, cfg.beta_opd)
                  for t, s in zip(shuffled, student)]) > 0.9
print(f"\ngate above 0.9 under a stranger's skill: {sure.float().mean():.0%} of all tokens")
assert rows[0][0] > 0.44 and sure.float().mean() > 0.01

# %% [markdown]
# **(b) It only pushes up.** Whatever $\Delta$ says, the weight lies in $(0, 1)$. A token the
# teacher is horrified by gets weight 0, not a negative one: a bad move is unlearned only because
# better ones, *if they are ever sampled*, are pushed up more. In a state where the policy never
# samples the good move, L_opd is silent about it. A KL over the vocabulary would not be.

# %%
awful = torch.tensor([[-30.0, -3.0, -0.3, 0.0, 3.0]], dtype=torch.float64)
l = torch.zeros_like(awful).requires_grad_()
losses.opd_loss(l, awful, torch.ones_like(awful), cfg.beta_opd).backward()
print("Delta           ", awful[0].tolist(), "\nd L / d log-prob",
      [f"{v:.1e}" for v in l.grad[0].tolist()])
assert (l.grad <= 0).all(), "descent raises every sampled token's log-prob, or leaves it alone"

# %% [markdown]
# **(c) $\Delta = 0$ weighs one half.** If the skill says nothing, L_opd imitates the policy's own
# samples. On average that cancels (section 7); each single step does not. Let a softmax over three
# tokens train on that noise alone, with a teacher that always agrees with the student: whatever
# happens to be sampled more often is sampled still more often.

# %%
def drift(steps: int, replicas: int = 64, batch: int = 8,
          lr: float = 0.6) -> tuple[list[float], torch.Tensor]:
    """SGD on L_opd with Delta = 0 everywhere, from the uniform distribution: mean entropy by step,
    final probabilities [replicas, 3]."""
    rng, entropy = torch.Generator().manual_seed(0), []
    z = torch.zeros(replicas, 3, requires_grad=True)
    for _ in range(steps):
        logp = z.log_softmax(1)
        entropy.append(float(torch.special.entr(logp.detach().exp()).sum(1).mean()))
        # [replicas, batch]
        own = logp.gather(1, torch.multinomial(logp.detach().exp(), batch, replacement=True,
                                               generator=rng))
        # a mean over all rows ...
        (step,) = torch.autograd.grad(replicas * losses.opd_loss(own, own.detach(),
                                                                 torch.ones_like(own), beta=5.0), z)
        # ... times their number: each replica takes its own step
        z = (z - lr * step).detach().requires_grad_()
    return entropy, z.softmax(1).detach()


entropy, final = drift(400 if QUICK else 1000)
fig, axes = plt.subplots(1, 2, figsize=(9, 2.8))
axes[0].plot(entropy, color=BLUE)
axes[0].axhline(math.log(3), color=GREY, ls=":", label="uniform: ln 3")
axes[0].set(xlabel="step", ylabel="mean entropy (nats)", ylim=(0, 1.2),
            title="a skill that says nothing, trained on")
axes[0].legend(loc="lower left")
axes[1].hist(final.max(1).values, bins=np.linspace(1 / 3, 1, 15), color=BLUE, edgecolor="white")
axes[1].set(title="where the 64 runs end", xlabel="largest of the three probabilities at the end",
            ylabel="runs (of 64)")
fig.tight_layout()
plt.show()
winners = final.argmax(1).bincount(minlength=3)
print(f"entropy {entropy[0]:.2f} -> {entropy[-1]:.2f} nats; favourite token by run: "
      f"{winners.tolist()}; mean probabilities {[round(v, 2) for v in final.mean(0).tolist()]}")
assert entropy[-1] < 0.9 * entropy[0], "noise alone makes the policy surer"
assert (winners > 0).all(), "and of no token in particular"

# %% [markdown]
# The policy becomes surer for no reason, each run of another token. In SEED the KL to the reference
# policy pulls against this (`kl_coef=0.02`; paper: `kl_coef=0.01`), and the training log warns when
# the entropy collapses.
#
# ## What to remember
#
# * Teacher and student are the same weights; the skill is the only difference.
# * $L_{opd}$ is a gated NLL of one's own samples. One sample is always pushed up; on average it is
#   a reverse KL that saturates.
# * The gate tells *followed* from *not followed*, never right from wrong.
# * Watch: parse rate, coverage, mean gate, share above one half, $\Delta$ by outcome. A skill that
#   never parses gives exactly 0, and SEED silently is GRPO.
#
# Next: `02_chunked_logprob`, how the log-probs of section 3 are computed without ever holding a row
# of logits.
