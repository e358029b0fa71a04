# The source of the course assignment (tests/assignment/kit.py says what is made from it). What
# stands before the first cell is for instructors and reaches neither the notebook nor the students'
# file: the solution, which is this project's own code, and model answers.
SOLUTION = {
    "group_advantages": """
return project("losses").group_advantages(rewards, divide_by_std=divide_by_std, eps=eps)""",
    "masked_mean": """
return project("losses").masked_mean(x, mask)""",
    "policy_loss": """
return project("losses").policy_loss(logp, old_logp, advantages, mask, clip_range=clip_range)[0]""",
    "kl_k3": """
return project("losses").kl_k3(logp, ref_logp)""",
    "logprob_forward": """
with torch.no_grad():
    return project("losses").chunked_logprob(
        hidden, weight, labels, temperature=temperature, rows_per_chunk=rows_per_chunk)""",
    "chunked_logprob": """
return project("losses").chunked_logprob(
    hidden, weight, labels, temperature=temperature, rows_per_chunk=rows_per_chunk)""",
    "confidence_gate": """
return project("losses").confidence_gate(teacher_logp, student_logp, beta)""",
    "opd_loss": """
return project("losses").opd_loss(logp, teacher_logp, mask, beta)""",
    "parse_skill": """
return project("skills").parse_reply(text).skill""",
    "teacher_view": """
from types import SimpleNamespace
roll = SimpleNamespace(ids=ids, sampled=sampled, cut=cut)
policy = SimpleNamespace(encode=lambda text: block)
return project("seed_mini").with_skill(policy, roll, "any skill")""",
    "seed_loss": """
rl, opd, _ = project("losses").seed_loss(
    logp, old_logp, ref_logp, teacher_logp, advantages, mask, has_skill, clip_range=clip_range,
    kl_coef=kl_coef, lambda_opd=lambda_opd, beta_opd=beta_opd)
return rl + opd""",
}
ANSWERS = {
    1: "One win in eight: mean 10/8, unbiased std 10 sqrt(1/8) = 3.54, so +2.47 for the winner "
       "and -0.35 for each of the others. Seven wins in eight: -2.47 for the loser, +0.35 for the "
       "others: the rare outcome speaks loudest. A group that ties says nothing; a base that wins "
       "2% of its games has mostly groups of eight losses, so most of the compute of an early "
       "update buys no policy gradient at all. That is the gap OPD fills: its signal does not "
       "need a difference in reward.",
    2: "The clip bounds what several steps on the same rollouts can do: it matters from the "
       "second mini-batch on. With A > 0 only the upper side cuts and with A < 0 only the lower "
       "one; a ratio on the other side means the policy went the wrong way, and the gradient that "
       "brings it back must stay. k1 = logp - ref has the right mean, but on each token its "
       "gradient is that of logp, whatever the distance; in expectation it vanishes, so as a loss "
       "term k1 is noise that restrains nothing. k3's gradient, 1 - exp(ref - logp), is zero "
       "exactly where both agree and grows with the distance.",
    3: "d logp / d hidden of a row needs only that row's hidden state, the head and the label; "
       "the loss enters as one factor per row, which backward multiplies in. d L / d W sums over "
       "rows, each weighted by its own factor: before the loss is known the sum cannot be formed, "
       "only its terms, which together are as large as the logits. An entropy bonus "
       "differentiates all of the row's distribution with its own factor: one stored vector per "
       "row is not enough, a second one (d entropy / d hidden) would be.",
    4: "A token with Delta << 0 gets a gate near 0: it is left alone, not pushed down. Not "
       "detached, the weight on -d logp is g + beta g (1 - g) Delta: with beta = 5 it is negative "
       "below Delta = -0.26, so tokens the skill disfavours would be pushed down, and that on the "
       "word of a teacher nobody has checked. If the teacher had a gradient, the cheapest way to "
       "a lower loss would be to make the teacher less sure (g (l_skill - l) falls), so that the "
       "model would learn to ignore its skills.",
    5: "Plain GRPO: the mask of every episode is 0, the OPD term is exactly 0, and nothing "
       "crashes. parse_rate and skill_token_share are 0. Half a skill can be the opposite of the "
       "whole one (\"Do not take the mug before ...\" cut after \"Do not take the mug\"), and a "
       "model that is rewarded for unfinished replies never learns to finish them. The summary "
       "tells what happened in this episode, in hindsight; a teacher who reads the outcome scores "
       "by what it knows, not by what the policy could have followed.",
    6: "Both change (they are the same weights); Delta rises towards 0 because the policy without "
       "the skill comes to act as it does with the skill: that is what distillation means here. "
       "With lambda_opd = 0 the reward alone moves it, and on few wins slowly. Ten updates on "
       "four games, trained and measured on the same games, with one seed, show that the code "
       "works. Evidence needs held-out games, each once, several seeds, and intervals.",
}

# %% [markdown]
# # SEED, piece by piece: an assignment that grades itself
#
# An agent plays a long game and learns only at the end whether it won. GRPO spreads that one number
# over every token the agent wrote. SEED ([arXiv 2607.14777](https://arxiv.org/abs/2607.14777)) adds
# a second, dense signal which the model makes for itself: after an episode it writes down a *skill*
# (advice in hindsight), scores its own tokens once more with the skill in the context, and learns
# to act as if it had known.
#
# In six exercises you write every formula of the method, and at the end your functions train a
# small model on a real text game.
#
# | | exercise | your functions | points | about |
# |---|---|---|---|---|
# | 1 | group-relative advantages | `group_advantages` | 10 | 45 min |
# | 2 | the clipped policy loss with k3 KL | `masked_mean`, `policy_loss`, `kl_k3` | 20 | 1.5 h |
# | 3 | the log-prob kernel in two passes | `logprob_forward`, `chunked_logprob` | 30 | 4 h |
# | 4 | the confidence gate and the OPD loss | `confidence_gate`, `opd_loss` | 15 | 1 h |
# | 5 | hindsight skills: reading them, placing them | `parse_skill`, `teacher_view` | 15 | 2 h |
# | 6 | putting it together: your functions train | `seed_loss` | 10 | 1 h |
#
# **How to work.** You edit one file, `notebooks/my_solution.py`. If it is not there,
# `python tests/assignment/kit.py start` makes it: it holds the stubs you see below. Fill in a
# function, save, run the sanity check under its stub here (it reads your file anew each time), and
# see your marks whenever you like:
#
# ```bash
# python -m pytest tests/assignment            # all; add  -k 1-  for exercise 1 only
# ```
#
# The sanity checks here are examples you could compute by hand. The graders are stricter: other
# numbers, float64, tight tolerances, and the corner cases which the docstrings name. **The
# docstring is the contract**; every sentence in it is tested. Nothing needs a GPU or a network.
#
# Shapes: B episodes (rows), T tokens, P tasks (groups), G rollouts of each, N scored tokens, H
# hidden size, V vocabulary.

# %%
import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path.cwd() if (Path.cwd() / "assignment.ipynb").exists() else Path.cwd() / "notebooks"
YOURS = Path(os.environ.get("SEED_MINI_SOLUTION", HERE / "my_solution.py"))


def mine():
    """Your file, read anew; the empty stubs of this notebook if there is none yet."""
    if not YOURS.exists():
        return SimpleNamespace(**globals())
    spec = importlib.util.spec_from_file_location("my_solution", YOURS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def sanity(what):
    """Say how a sanity check ended. A function that is still empty is no error."""
    try:
        yield
        print(f"{what}: fine so far")
    except NotImplementedError:
        print(f"{what}: not written yet")


def close(got, expected):
    """Stop with both values if they differ."""
    expected = torch.as_tensor(expected, dtype=got.dtype)
    same = got.shape == expected.shape and torch.allclose(got, expected, atol=1e-6)
    assert same, f"got {got}, expected {expected}"


missing = "not there yet: run  python tests/assignment/kit.py start"
print("your file:", YOURS if YOURS.exists() else missing)

# %% [markdown]
# ## Exercise 1 · Group-relative advantages
#
# A policy gradient needs to know whether an episode went *better than expected*. PPO trains a
# second network, the critic, to predict the expected return. GRPO asks the policy itself: it plays
# the same task G times and takes the group's mean as the expectation. Some tasks are easy and some
# are hopeless; comparing an episode only with its siblings on the same task removes that difference
# without learning anything.
#
# $$A_{i} = \frac{R_i - \mathrm{mean}(R_1, \dots, R_G)}{\mathrm{std}(R_1, \dots, R_G) + \epsilon}$$
#
# Dividing by the spread makes advantages comparable between a task that pays 10 and one that pays
# 0.1. It has a price: in a group with a single win, the winner's advantage does not depend on the
# size of the reward at all. Some settings therefore only centre (the WebShop launcher of the SEED
# authors does).
#
# Two details decide whether your numbers agree with anybody else's. The standard deviation is that
# of a *sample*, as everywhere in this family of trainers (which divisor is that?). And epsilon is
# tiny, because in ALFWorld a whole group may differ by one invalid action only, a penalty of 0.1;
# an epsilon of the same size would quietly shrink such a group's advantages.

# %%
import torch


# ---- Exercise 1 ----------------------------------------------------------------------------------
def group_advantages(rewards, *, divide_by_std=True, eps=1e-6):
    """Group-relative advantages of G rollouts of each of P tasks: A = (R - mean) / (std + eps).

    rewards [P, G], floating: one return per trajectory. Mean and std run over each group (row)
        alone; std is that of a sample (unbiased).
    divide_by_std=False: A = R - mean.
    Returns [P, G], in the dtype of rewards. A group whose rewards all tie gets 0, never NaN.
    Raises ValueError for G < 2 (one rollout has nobody to be compared with). rewards is left as it
        is.
    """
    raise NotImplementedError


# %%
with sanity("group_advantages"):
    A = mine().group_advantages(torch.tensor([[10.0, 0.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]]))
    close(A, [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]])

# %% [markdown]
# **Question 1.** Eight rollouts, a win pays 10, a loss 0. What is the advantage of the winner if
# one of them wins? What is the loser's if seven win? A base model wins 2% of its games: how many of
# the groups in its first update carry a policy gradient, and what does that mean for the compute
# you spend? (Answer in words, in the cell below.)

# %% [markdown]
# *Your answer:*

# %% [markdown]
# ## Exercise 2 · The clipped policy loss, and k3
#
# **What to average over.** A batch is a rectangle [B, T], but only some positions are tokens the
# policy *sampled*: prompts, observations and padding are not. `mask` says which. The mean of a
# token-level loss is taken over the mask's tokens of the whole batch. Averaging each episode first
# and then the episodes is another estimator (short episodes then weigh more per token); averaging
# over all T positions makes the step size depend on the padding. Both run, both train, both are
# wrong here.
#
# **What to maximise.** The rollouts were sampled by the policy as it was before the update (the
# *snapshot*, log-probs `old_logp`). After the first optimizer step the policy has moved, and the
# importance ratio corrects for it. PPO's clip then bounds how far one batch may take it:
#
# $$\rho = e^{\ell_\theta - \ell_{\mathrm{old}}}, \qquad
# L = -\,\mathrm{mean}_{\mathrm{mask}}\;
# \min\!\big(\rho A,\ \mathrm{clip}(\rho,\, 1-\epsilon,\, 1+\epsilon)\, A\big)$$
#
# The minimum makes it pessimistic: the clip may take an improvement away, but never hides that
# things got worse. Every token of an episode gets that episode's advantage.
#
# **What holds it back.** The KL divergence to the reference policy is an expectation over the
# policy's own samples, so it can be estimated from the sampled tokens alone. With
# $d = \ell_{\mathrm{ref}} - \ell_\theta$, the estimator called k3 is unbiased, never negative, and
# has a gradient that vanishes where both policies agree:
#
# $$k_3 = e^{d} - d - 1$$
#
# **Masked positions are not zero.** They hold whatever the padding gave: huge numbers, infinities,
# NaN. Multiplying by 0 does not remove those ($0 \cdot \infty$ is NaN, in the value or, later, in
# the gradient), selecting does.

# %%
# ---- Exercise 2 ----------------------------------------------------------------------------------
def masked_mean(x, mask):
    """Token mean: the sum of x over the mask's tokens, divided by their number.

    x [B, T] floating; mask [B, T] bool or 0/1. Returns a scalar tensor. Without any token: 0, with
        gradient 0.
    What stands at a masked position (mask 0) never matters, not even NaN or inf: not for the value,
        and its gradient is 0.
    """
    raise NotImplementedError


def policy_loss(logp, old_logp, advantages, mask, *, clip_range=0.2):
    """Clipped policy loss, a scalar tensor to minimise:
    -masked_mean(min(rho A, clip(rho, 1 - clip_range, 1 + clip_range) A)).

    rho = exp(logp - old_logp). logp, old_logp, mask [B, T]; advantages [B], one per episode (B may
        equal T).
    The gradient goes to logp alone. Masked positions may hold anything finite, however large, in
        logp and old_logp.
    """
    raise NotImplementedError


def kl_k3(logp, ref_logp):
    """Per-token estimate k3 of KL(policy || reference) at tokens sampled from the policy, [B, T],
    not averaged.

    logp, ref_logp [B, T]. The gradient goes to logp alone.
    """
    raise NotImplementedError


# %%
with sanity("masked_mean"):
    x = torch.tensor([[1.0, 2.0, 3.0], [6.0, float("nan"), 9.0]])
    close(mine().masked_mean(x, torch.tensor([[1, 1, 1], [1, 0, 0]])), 3.0)
# Ratios 1.5 and 0.5, advantages +1 and -1: both clipped, at 1.2 and 0.8.
with sanity("policy_loss"):
    old = torch.zeros(2, 1)
    logp, advantages = torch.tensor([[1.5], [0.5]]).log(), torch.tensor([1.0, -1.0])
    close(mine().policy_loss(logp, old, advantages, torch.ones(2, 1)), -(1.2 - 0.8) / 2)
with sanity("kl_k3"):
    logp, ref_logp = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]])
    close(mine().kl_k3(logp, ref_logp), [[0.0, torch.e - 2]])

# %% [markdown]
# **Question 2.** In the first step of an update the ratio is exactly 1: what is the clip for?
# Sketch the clipped objective as a function of the ratio for A > 0 and for A < 0, and say on which
# side the gradient must survive. Why is k1 = $\ell_\theta - \ell_{\mathrm{ref}}$, which has the
# same mean as k3, useless as a loss term?

# %% [markdown]
# *Your answer:*

# %% [markdown]
# ## Exercise 3 · The log-prob kernel
#
# All of SEED is made of one number per token: $\log \pi(\text{token})$. With hidden state $h$ (a
# row of [N, H]), the head's matrix $W$ [V, H] and temperature $T$
#
# $$\log p_y = z_y - \log \sum_j e^{z_j}, \qquad z = \frac{W h}{T}$$
#
# For Qwen3, V is 151,936: the logits of a thousand tokens take 0.6 GB in fp32, and `log_softmax`
# and its gradient each take as much again. Yet of every row we need one number. So work on
# `rows_per_chunk` rows at a time and forget their logits before the next chunk.
#
# **Forward** is then easy. Mind the trap of large logits (subtract something before `exp`), the
# temperature (score at the temperature you sampled at, or the ratio of exercise 2 is not 1 to begin
# with), and the dtype: weights arrive in bfloat16, which has three decimal digits; sum in float32.
#
# **Backward** is where the time goes. Autograd would keep every chunk's probabilities, so nothing
# is saved. The libraries you know compute the logits *again* in backward, which makes three passes
# over the [V, H] matrix. Look at what is needed:
#
# $$\frac{\partial \log p_y}{\partial h} = \frac{1}{T}\Big(W_y - \sum_j p_j W_j\Big)
# \qquad\qquad \frac{\partial L}{\partial h} = \frac{\partial L}{\partial \log p_y} \cdot
# \frac{\partial \log p_y}{\partial h}$$
#
# The left equation does not contain the loss. It can be formed in *forward*, while the chunk's
# probabilities are still there, and takes one row of H numbers to keep. Backward is one
# multiplication: two passes in all, the least possible. What the head itself learns is
#
# $$\frac{\partial L}{\partial W} = \frac{1}{T} \sum_{n}
# \frac{\partial L}{\partial \log p_n}\, \big(\mathrm{onehot}(y_n) - p_n\big)\, h_n^\top$$
#
# which does contain the loss; here the probabilities are computed again, chunk by chunk, in
# backward. Only if the head trains at all, which it does in small models, where it is the
# embedding.
#
# You will write a `torch.autograd.Function`:
#
# ```python
# class LogProb(torch.autograd.Function):
#     @staticmethod
#     def forward(ctx, hidden, weight, labels, temperature, rows_per_chunk):
#         ...                                    # autograd does not look in here
#         ctx.save_for_backward(...)             # tensors; everything else as ctx.name = ...
#         return logp
#
#     @staticmethod
#     def backward(ctx, grad):                   # grad [N] = dL / d logp
#         ctx.needs_input_grad                   # a tuple of bools, one per argument of forward
#         return grad_hidden, grad_weight, None, None, None
# ```
#
# `torch.autograd.gradcheck` is your friend.

# %%
# ---- Exercise 3 ----------------------------------------------------------------------------------
def logprob_forward(hidden, weight, labels, *, temperature=1.0, rows_per_chunk=256):
    """Log-probability of one token per row, log softmax(hidden @ weight.T / temperature)[labels],
    [N], without gradient.

    hidden [N, H] and weight [V, H]: both float64, float32 or bfloat16;
    labels [N]: integers in [0, V).
    Returns float64 for float64, else float32; all sums run in that dtype.
    Logits may be as large as 1e4.
    Memory: never more than a few [rows_per_chunk, V] tensors at once; [N, V] numbers never exist.
    N need be no multiple of rows_per_chunk, nor at least as large.
    Raises ValueError for a label outside [0, V), such as the -100 of other libraries.
    """
    raise NotImplementedError


def chunked_logprob(hidden, weight, labels, *, temperature=1.0, rows_per_chunk=256):
    """The same numbers as logprob_forward, [N], with gradients for hidden and weight (each only if
    it requires one).

    Cost, counted in passes over weight (one pass = 2 N H V FLOP of matrix products): forward and
        backward together 2 if only hidden requires a gradient, at most 4 with weight.
    Memory as in logprob_forward, plus what backward needs: a few [N, H].
    Gradients have their tensor's dtype; sums run in float32 or better and are rounded once, at the
        end.
    """
    raise NotImplementedError


# %%
with sanity("logprob_forward"):
    torch.manual_seed(0)
    h, W = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    y = torch.randint(11, (7,))
    naive = torch.log_softmax(h @ W.T, 1)[torch.arange(7), y]
    close(mine().logprob_forward(h, W, y, rows_per_chunk=3), naive)
with sanity("chunked_logprob"):
    h.requires_grad_(), W.requires_grad_()
    options = dict(temperature=0.7, rows_per_chunk=3)
    assert torch.autograd.gradcheck(lambda h, W: mine().chunked_logprob(h, W, y, **options), (h, W))

# %% [markdown]
# **Question 3.** Why can the gradient with respect to the hidden states be prepared before the loss
# is known, and the one with respect to the head not? Somebody adds an entropy bonus to the loss:
# does your kernel still do with two passes, and what would it have to keep?

# %% [markdown]
# *Your answer:*

# %% [markdown]
# ## Exercise 4 · The confidence gate and the OPD loss
#
# The same frozen policy scores its own sampled tokens twice: from the ordinary history
# ($\ell_\theta$, the student) and with the skill inserted in the context ($\ell_s$, the teacher).
# The difference says, token by token, what hindsight thinks of the choice:
#
# $$\Delta = \mathrm{stopgrad}(\ell_s - \ell_\theta) \qquad g = \sigma(\beta \Delta) \qquad
# L_{\mathrm{OPD}} = \mathrm{mean}_{m}\; g \cdot \big(\mathrm{stopgrad}(\ell_s) - \ell_\theta\big)$$
#
# If the skill makes the token more likely ($\Delta > 0$), the gate opens and the token is imitated;
# if it makes it less likely, the gate closes and the token is left alone. It is not a KL divergence
# over the vocabulary and has no threshold: the gradient is the likelihood gradient of the sampled
# token, times a weight in (0, 1). So it only ever pushes tokens up. The value of the loss may be
# negative, which means nothing.
#
# Two places where a gradient must *not* flow: through the gate (it is a weight, not something to
# optimise), and into the teacher (it is the same network: it would learn to disagree less with
# itself instead of learning to act). And $m$ covers only tokens of episodes that have a usable
# skill; the number you divide by is theirs.

# %%
# ---- Exercise 4 ----------------------------------------------------------------------------------
def confidence_gate(teacher_logp, student_logp, beta):
    """The confidence gate g = sigmoid(beta Delta), Delta = teacher_logp - student_logp: [B, T], in
    (0, 1), detached.

    teacher_logp, student_logp [B, T]; beta > 0 is the sharpness.
    """
    raise NotImplementedError


def opd_loss(logp, teacher_logp, mask, beta):
    """On-policy distillation loss, a scalar tensor to minimise:
    masked_mean(g (teacher_logp - logp)) with the gate g.

    logp, teacher_logp [B, T]; mask [B, T]: 1 on sampled tokens of episodes that have a usable
        skill. The mean is over these tokens.
    The gradient goes to logp alone, and not through the gate. Masked positions may hold anything,
        even NaN; an empty mask gives 0.
    """
    raise NotImplementedError


# %%
# Only the first episode has a skill; its gaps are +1 and -1.
with sanity("opd_loss"):
    logp = torch.tensor([[-2.0, -1.0], [-0.5, -0.25]], requires_grad=True)
    teacher, mask = torch.tensor([[-1.0, -2.0], [0.0, 0.0]]), torch.tensor([[1, 1], [0, 0]])
    loss = mine().opd_loss(logp, teacher, mask, 1.0)
    up, down = torch.tensor([1.0, -1.0]).sigmoid().tolist()
    close(loss.detach(), (up - down) / 2)
    close(torch.autograd.grad(loss, logp)[0], [[-up / 2, -down / 2], [0.0, 0.0]])

# %% [markdown]
# **Question 4.** What does this loss do with a token that the skill makes much less likely? Derive
# the gradient for a gate that is *not* detached: for which $\Delta$ does its sign turn, with
# $\beta = 5$, and what would then happen to such tokens? What would the model learn if the teacher
# had a gradient?

# %% [markdown]
# *Your answer:*

# %% [markdown]
# ## Exercise 5 · Hindsight skills: reading them, placing them
#
# After the episode, an analyzer reads all of it, outcome included, and answers in JSON with exactly
# two keys:
#
# ```json
# {"episode_summary": "Lost: moved the mug before it was treated.",
#  "episode_skill": "Do not move the mug to the shelf before you heat it."}
# ```
#
# **Reading.** In SEED the analyzer is the policy itself, and language models decorate: code fences,
# a friendly sentence before and after, a trailing comma, a Python dict with single quotes, a draft
# in a thinking block, a reply cut off by the token limit. One public reproduction parsed 1 of 12
# replies, and its "SEED" was silently GRPO from then on. So be liberal in what you read. But not
# *too* liberal: a skill which the token limit cut in half is no skill, and the reply is *data*,
# written by a model which has read text from the environment: it must never be executed, never
# crash the trainer, and never bring a line break into the prompt (a forged line could pose as an
# instruction).
#
# **Placing.** The teacher sees the same episode with the skill as a block right after the task
# line, and scores the *same tokens*:
#
# $$\underbrace{\texttt{Your task is to: put a hot mug in shelf.}}_{\texttt{ids[:cut]}}\ \
# \underbrace{\texttt{Skill to follow: ...}}_{\texttt{block}}\ \
# \underbrace{\texttt{You are in the middle of a room...}}_{\texttt{ids[cut:]}}$$
#
# We do this with token ids, not with text: text that is tokenised anew may fall into other tokens
# than those that were sampled.

# %%
# ---- Exercise 5 ----------------------------------------------------------------------------------
def parse_skill(text):
    """The skill in an analyzer's reply, "" if it has none that is usable. Never raises, whatever
    the text (a str); never executes any of it.

    A reply is a JSON object with the keys "episode_summary" and "episode_skill". Accept it also
        with prose around it, or in a code fence (``` or ```json);
        with a comma too many before a closing bracket;
        as a Python-literal dict (single quotes);
        without a summary, or with keys too many.
    What stands before a closing </think> is a draft and does not count. Of several objects with a
        usable skill the last one counts.
    Not usable: no such object; one that is not closed (the token limit); no skill key; a skill that
        is no string, or blank.
    The skill comes back as one line: white space of any kind and length becomes one space, none at
        the ends; at most the first 60 words.
    Time: below a second for any text of up to 200,000 characters.
    """
    raise NotImplementedError


def teacher_view(ids, sampled, cut, block):
    """The teacher's copy of an episode: (ids, sampled) with the skill block inserted at `cut`, the
    index right after the task line.

    ids: list of token ids; sampled: list of bools as long, True where the policy sampled the token
        (those are scored); block: list of ids.
    The returned lists are as long as each other. The block was not sampled. The arguments are left
        as they are.
    """
    raise NotImplementedError


# %%
REPLY = """Sure! Here is the skill:
```json
{"episode_summary": "Won.", "episode_skill": "Take the mug, heat it, then move it to the shelf.",}
```"""
with sanity("parse_skill"):
    skill = mine().parse_skill(REPLY)
    assert skill == "Take the mug, heat it, then move it to the shelf.", repr(skill)
with sanity("teacher_view"):
    view = mine().teacher_view([10, 11, 12, 13], [False, False, True, True], 2, [77, 78])
    assert tuple(view) == ([10, 11, 77, 78, 12, 13], [False, False, False, False, True, True]), view

# %% [markdown]
# **Question 5.** An analyzer's replies never parse. What exactly is being trained then, and which
# two logged numbers of an update show it (`metrics.jsonl` in a run's folder)? Why is half a skill
# worse than none? The summary is written with the skill but never shown to the teacher: why not?

# %% [markdown]
# *Your answer:*

# %% [markdown]
# ## Exercise 6 · Putting it together
#
# One update of SEED, with the frozen current policy in three roles:
#
# 1. **act**: G rollouts of each task, from ordinary history only;
# 2. **analyze**: a skill for each finished episode; no usable skill, no OPD term, but the GRPO
#    term stays;
# 3. **teach**: score the sampled tokens with the skill inserted (`teacher_view`,
#    `chunked_logprob`);
#
# then minimise
#
# $$L_{\mathrm{SEED}} =
# \underbrace{L_{\mathrm{PG}} + \beta_{\mathrm{KL}}\, \mathrm{mean}\, k_3}
# _{\text{all sampled tokens}} + \lambda_{\mathrm{OPD}}\,
# \underbrace{L_{\mathrm{OPD}}}_{\text{tokens of episodes with a skill}}$$
#
# `tests/assignment/training.py` (100 lines: read it) puts your functions where the project has its
# own and trains the tiny base on four games: a model of under a million parameters, on the real
# ALFWorld engine. In place of the policy's own analysis it takes the skills of the world's rules,
# because teaching the policy to write them (Stage 1) takes minutes. It runs about a minute.

# %%
# ---- Exercise 6 ----------------------------------------------------------------------------------
def seed_loss(logp, old_logp, ref_logp, teacher_logp, advantages, mask, has_skill, *, clip_range,
              kl_coef, lambda_opd, beta_opd):
    """SEED's joint loss, a scalar tensor to minimise:
    policy_loss + kl_coef * mean k3 + lambda_opd * opd_loss.

    logp, old_logp, ref_logp, teacher_logp [B, T]; advantages [B]; mask [B, T] bool: sampled tokens;
        has_skill [B] bool: whether the episode has a usable skill.
    Policy loss and KL are means over all sampled tokens, the OPD loss over those of episodes with a
        skill.
    The gradient goes to logp alone. Use your own functions.
    """
    raise NotImplementedError


# %%
ready = False
with sanity("seed_loss"):
    one = torch.ones(2, 1)
    loss = mine().seed_loss(-one, -one, -2 * one, -one, torch.tensor([1.0, 3.0]), one.bool(),
                            torch.tensor([True, False]), clip_range=0.2, kl_coef=0.1,
                            lambda_opd=0.5, beta_opd=5.0)
    close(loss, -2 + 0.1 / torch.e)
    ready = True

# %% [markdown]
# Now let it learn. The left curve is what the policy earns; the right one is mean Delta, how much
# likelier the skill makes the policy's own tokens. Change `lambda_opd` (try 0) or `updates`, and
# compare.

# %%
with sanity("training"):
    if not ready:
        raise NotImplementedError
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "assignment")]
    import matplotlib.pyplot as plt
    import training
    curve = training.train(mine(), say=print)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3))
    labels = {"success": "won episodes (share)", "delta": "mean Delta (nats per token)"}
    for axis, (key, label) in zip(axes, labels.items()):
        axis.plot([line["update"] for line in curve], [line[key] for line in curve], marker="o")
        axis.set(xlabel="update", ylabel=label)
    figure.tight_layout()
    plt.show()

# %% [markdown]
# **Question 6.** Mean Delta rises towards 0: does the teacher change, or the student? Run it with
# `lambda_opd=0` as well and describe the difference. Give three reasons why these curves are no
# evidence that SEED beats GRPO, and what such evidence would need.

# %% [markdown]
# *Your answer:*
