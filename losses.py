"""losses.py: every loss of SEED, and the log-prob kernel they share.   `python losses.py` prints the kernel's benchmark.

Part 1, the kernel. A trainer needs log pi(token) of every response token, and its gradient. Over a vocabulary of 151,936
that is the largest tensor of the whole update: 4 N V bytes, 0.6 GB for a thousand tokens in fp32. Today's memory-efficient
kernels never keep it and therefore compute the logits again in backward: three sweeps over the vocabulary matrix, where
two are enough. Let y be the sampled token, z = h W^T / T its row of logits, and R = log sum_{j != y} exp z_j:

    log p_y         = logsigmoid(z_y - R)                                    y against the rest of the vocabulary
    d log p_y / d h = (1 - p_y) (W_y - sum_{j != y} r_j W_j) / T,            r = softmax of z over the rest
    d L / d h       = (d L / d log p_y) * (d log p_y / d h)                  the loss enters as one number per token

The middle line does not know the loss, so forward can already form it, and it is attention with W as keys and as values:
one sweep with a running maximum (as in FlashAttention) yields R and sum r_j W_j together. Backward is one multiply.

    | sweeps over [V, H] (one = 2 N H V FLOP) | no gradient | frozen head | trainable head   | kept for backward, in bytes |
    |-----------------------------------------|-------------|-------------|------------------|-----------------------------|
    | naive log_softmax                       | 1           | 2           | 3                | 4 to 10 N V                 |
    | recompute (TRL, Liger, torch, verl)     | 1           | 3           | 4                | 2 N H                       |
    | this file, bf16 or fp16                 | 1           | **2**       | 4                | 2 N H                       |
    | this file, fp32, small vocabulary       | 1           | **2**       | **3**            | 4 N H (+ 4 N V if trainable)|

    Scratch while it runs: rows x (6 tile + 12 H) bytes for bfloat16 and rows x (4 tile + 12 H) for fp32, where tile is the
    width of one vocabulary tile and rows is the one dial, `rows_per_chunk`. It grows with neither N nor V.

When the trick does not help: a *trainable* head. d L / d W adds up rows weighted by d L / d log p, which only the finished
loss knows; so the probabilities are kept where they fit (SOFTMAX_BUDGET; the tiny tied model: 3 sweeps, the floor again)
and computed again where they do not (4). Nor does it serve a loss that differentiates more of the distribution than log p_y
(entropy bonus, top-k or full KL), or second derivatives. SEED needs neither.

Part 2, the losses: short pure functions on [B, T] tensors, with the equation and its source. Sources are "paper" (SEED,
arXiv 2607.14777) and "code" (its authors' release of July 2026), named wherever the two differ.
Left out: the entropy bonus of 0.001 that the code leaves on by a default and the paper does not have.
"""
from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings

import torch
import torch.nn.functional as F

# Vocabulary columns per tile and bytes of scratch. A CPU wants the tile to stay in its cache; a GPU wants few, large launches.
TILE = {"cpu": 4096, "cuda": 32768}
SCRATCH_BUDGET = {"cpu": 32 << 20, "cuda": 256 << 20}
SOFTMAX_BUDGET = 256 << 20  # a trainable head keeps its probabilities for backward if they take at most this
NEVER = -1e30  # the logit of a token that does not take part; finite, so that 0 * NEVER is 0 and not NaN


# ------------------------------------------------------------------------------------------------------------------
# 1. The kernel
# ------------------------------------------------------------------------------------------------------------------
def chunked_logprob(hidden, weight, labels, *, temperature=1.0, rows_per_chunk=None, return_entropy=False):
    """Log-probability of one token per row, log softmax(hidden @ weight.T / temperature)[labels], in bounded memory.

    hidden [N, H] and weight [V, H]: one dtype (float64, float32, bfloat16, float16), one device; labels [N]: integers.
    Pass the positions that matter (response tokens), not whole sequences: nothing here is cheaper than a row not scored.
    Returns logp [N], fp32 (float64 for float64), or (logp, entropy) with return_entropy: the entropy of the same
    distribution in nats, [N], same dtype, from the same sweep, without gradient.
    Gradients: hidden and, if it requires one, weight. Each sum runs in fp32 or better and is rounded to its tensor's dtype
    at the end; d logp / d hidden waits for backward in hidden's dtype, which costs bfloat16 one more rounding (2^-9).
    rows_per_chunk: rows that share one sweep (default: what SCRATCH_BUDGET allows). Memory: see the top of this file.
    A row that is not finite gets logp NaN and gradient 0, leaves the other rows alone, and is named in a RuntimeWarning;
    callers find the rows by logp.isnan(). One host synchronisation per call checks labels and finiteness together.
    Raises ValueError for shapes, dtypes, devices, labels, temperatures or rows_per_chunk that cannot be meant.
    """
    _check_inputs(hidden, weight, labels, temperature, rows_per_chunk)
    if rows_per_chunk is None:
        rows_per_chunk = max(1, SCRATCH_BUDGET.get(hidden.device.type, SCRATCH_BUDGET["cuda"]) // _bytes_per_row(weight))
    wants = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    with torch.autocast(hidden.device.type, enabled=False):  # autocast would round the fp32 sums to bfloat16
        logp, entropy = _ChunkedLogProb.apply(hidden, weight, labels, 1.0 / temperature, rows_per_chunk,
                                              return_entropy, *wants)
    return (logp, entropy) if return_entropy else logp


def _check_inputs(hidden, weight, labels, temperature, rows_per_chunk):
    """Refuse what cannot be meant, in one sentence. Label values are checked later, to spare a synchronisation."""
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or labels.dim() != 1:
        raise ValueError(f"chunked_logprob needs hidden [N, H], weight [V, H] and labels [N], not {shapes}.")
    if hidden.shape[0] != labels.shape[0] or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"chunked_logprob got sizes that do not fit together: {shapes}.")
    if weight.shape[0] < 2:
        raise ValueError("chunked_logprob needs a vocabulary of at least two tokens: with one there is nothing to score.")
    if not hidden.device == weight.device == labels.device:
        raise ValueError(f"chunked_logprob needs one device, not hidden on {hidden.device}, weight on {weight.device} "
                         f"and labels on {labels.device}.")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"chunked_logprob needs one floating dtype, not hidden {hidden.dtype} and weight {weight.dtype}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"chunked_logprob needs integer labels, not {labels.dtype}.")
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"chunked_logprob needs a positive, finite temperature, not {temperature}.")
    if rows_per_chunk is not None and rows_per_chunk < 1:
        raise ValueError(f"chunked_logprob needs rows_per_chunk of at least 1, not {rows_per_chunk}.")


def _tile(weight):
    """Columns per tile."""
    return min(len(weight), TILE.get(weight.device.type, TILE["cuda"]))


def _bytes_per_row(weight):
    """Scratch of one row: its tile of logits (16-bit inputs: once more in 16 bits), and H-long rows in flight."""
    size = max(4, weight.element_size())
    return (size + (2 if weight.element_size() == 2 else 0)) * _tile(weight) + 3 * size * weight.shape[1]


def _wide(dtype):
    """The dtype sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _gemm_dtype(dtype):
    """The dtype GEMMs read: float16 goes in as float32, its range is too small for exp(z - max) of a large vocabulary."""
    return torch.float32 if dtype == torch.float16 else dtype


def _report(logp, labels, V):
    """The call's one synchronisation: refuse labels outside [0, V), name rows that are not finite; returns their indices."""
    if not len(labels):
        return []
    lowest, highest, bad = torch.stack([labels.min().long(), labels.max().long(), (~logp.isfinite()).sum()]).tolist()
    if lowest < 0 or highest >= V:
        i = ((labels < 0) | (labels >= V)).nonzero()[0].item()
        raise ValueError(f"chunked_logprob got the label {labels[i].item()} in row {i}, outside the vocabulary [0, {V}).")
    if not bad:
        return []
    rows = (~logp.isfinite()).nonzero().flatten().tolist()
    named = f"{rows[:20]}{' and so on' if bad > 20 else ''}"
    warnings.warn(f"chunked_logprob: {bad} of {len(logp)} rows are not finite (their logp is NaN, their gradient 0): "
                  f"rows {named}", RuntimeWarning, stacklevel=4)
    return rows


class _ChunkedLogProb(torch.autograd.Function):
    """The autograd glue: loop over row chunks, keep what backward needs. The arithmetic is in the functions below."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, inv_t, rows, want_entropy, want_hidden, want_weight):
        (N, H), V, wide = hidden.shape, weight.shape[0], _wide(hidden.dtype)
        logp, entropy, anchor, peak, total = hidden.new_zeros(5, N, dtype=wide)  # [N] each
        unit = torch.empty_like(hidden) if want_hidden else None  # [N, H] d logp / d hidden
        keep = want_weight and V == _tile(weight) and N * V * logp.element_size() <= SOFTMAX_BUDGET
        kept = hidden.new_empty(N, V, dtype=wide) if keep else None
        tokens = labels.long().clamp(0, V - 1)  # a wrong label must not crash the gather before it is reported below
        scratch = None if keep else hidden.new_empty(min(rows, N) * _tile(weight), dtype=wide)
        for r in range(0, N, rows):
            r = slice(r, r + rows)
            logp[r], entropy[r], anchor[r], peak[r], total[r], gradient = _sweep(
                hidden[r], weight, tokens[r], inv_t, kept[r].view(-1) if keep else scratch, want_hidden, want_entropy)
            if want_hidden:
                unit[r] = gradient
            if keep:
                _fill_label(kept[r], tokens[r], -total[r, None])
        dead = _report(logp, labels, V)
        if dead:  # these rows take no part in any gradient, and 0 * NaN would be NaN
            logp[dead] = entropy[dead] = float("nan")
            anchor[dead], peak[dead], total[dead] = 0, 0, 1
            for x in (unit, kept):
                if x is not None:
                    x[dead] = 0
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(unit, *((hidden, weight, tokens, logp, anchor, peak, total, kept) if want_weight else ()))
        ctx.settings, ctx.dead = (inv_t, rows), dead
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):  # grad [N] = d L / d logp
        (inv_t, rows), (unit, *saved) = ctx.settings, ctx.saved_tensors
        if ctx.dead:
            grad = grad.clone()
            grad[ctx.dead] = 0
        with torch.autocast(grad.device.type, enabled=False):
            grad_hidden = None
            if unit is not None:
                grad_hidden = torch.empty_like(unit)
                for r in range(0, len(unit), rows):  # by chunks, so that the fp32 product is never [N, H]
                    grad_hidden[r:r + rows] = grad[r:r + rows, None] * unit[r:r + rows]
            grad_weight = _weight_gradient(grad, *saved, inv_t, rows, ctx.dead) if saved else None
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _sweep(h, weight, tokens, inv_t, scratch, want_gradient, want_entropy):
    """One pass over the vocabulary for one chunk of rows h [n, H]; tokens [n]; scratch: n * tile numbers to work in.

    Returns logp [n], entropy [n] (0 unless wanted), the anchor, running maximum and sum that rebuild r,
    and d logp / d h [n, H] (None unless wanted). With a gradient it is two GEMMs per tile, without it is one.
    """
    wide, gemm = _wide(h.dtype), _gemm_dtype(h.dtype)
    own_row = weight[tokens]  # [n, H]
    acc = h.to(wide, copy=True).mul_(own_row)  # the label's logit gets its own exact dot product ...
    own = acc.sum(1).mul_(inv_t)  # [n]
    anchor = own.to(gemm).to(wide)  # ... and all others are computed relative to it (see _logits)
    acc.zero_()  # [n, H] from here on: sum of e_j W_j
    peak, total, moment = torch.full_like(own, NEVER), torch.zeros_like(own), torch.zeros_like(own)  # [n] each
    h = h.to(gemm)
    for v in range(0, weight.shape[0], _tile(weight)):
        w = weight[v:v + _tile(weight)].to(gemm)  # [k, H]
        z = _logits(h, w, anchor, inv_t, scratch)  # [n, k]
        _fill_label(z, tokens - v, NEVER)  # what follows is about the others
        new_peak = torch.maximum(peak, z.amax(1))
        shrink = torch.exp(peak - new_peak)
        z.sub_(new_peak[:, None])
        ln_e = z.clone() if want_entropy else None
        e = z.exp_()
        if want_entropy:  # moment = sum of e ln e, brought to the new maximum like the other two
            moment = shrink * (moment + (peak - new_peak) * total) + torch.linalg.vecdot(e, ln_e)
        total = shrink * total + e.sum(1)
        if want_gradient:
            _add_product(acc.mul_(shrink[:, None]), e.to(gemm), w)
        peak = new_peak
    odds = own - anchor - peak - total.log()  # z_y - R: the label against the rest
    rest = torch.sigmoid(-odds)  # 1 - p_y, without cancellation
    logp, entropy = F.logsigmoid(odds), torch.zeros_like(own)
    if want_entropy:  # chain rule: first "y or another?", then which other
        entropy = torch.special.entr(logp.exp()) + torch.special.entr(rest) + rest * (total.log() - moment / total)
    gradient = acc.div_(-total[:, None]).add_(own_row).mul_((rest * inv_t)[:, None]) if want_gradient else None
    return logp, entropy, anchor, peak, total, gradient


def _logits(h, w, anchor, inv_t, scratch):
    """h w^T / T - anchor, [n, k], in scratch.

    Why subtract: a CPU's bfloat16 GEMM returns bfloat16. Rounded after subtracting the label's own logit, an entry is wrong
    by 2^-9 of its distance to the label: the entries with weight are nearly exact, and log p keeps two to three digits.
    Rounded before, it is wrong by 2^-9 of its size, 0.06 for a logit of 30, whatever its weight.
    """
    z, start = scratch[:len(h) * len(w)].view(len(h), len(w)), -anchor[:, None]
    if h.dtype == z.dtype or h.is_cuda:
        return _add_product(z.copy_(start), h, w.t(), inv_t)
    return z.copy_(torch.addmm(start.to(h.dtype), h, w.t(), alpha=inv_t))  # fp32 inside, one rounding at the end


def _fill_label(z, label, value):
    """z[i, label[i]] = value wherever that column is in the tile z [n, k]; without a synchronisation."""
    at, inside = label.clamp(0, z.shape[1] - 1)[:, None], ((label >= 0) & (label < z.shape[1]))[:, None]
    z.scatter_(1, at, torch.where(inside, value, z.gather(1, at)))


def _add_product(acc, a, b, alpha=1.0):
    """acc += alpha * a @ b, acc in fp32 or better whatever a and b are. On CUDA the GEMM itself adds 16-bit products in fp32;
    on the CPU the product of one tile is rounded once to bfloat16 and the tiles are added in fp32."""
    if a.dtype == acc.dtype:
        return acc.addmm_(a, b, alpha=alpha)
    if acc.is_cuda:
        return torch.addmm(acc, a, b, alpha=alpha, out_dtype=acc.dtype, out=acc)
    return acc.add_(a @ b, alpha=alpha)


def _weight_gradient(grad, hidden, weight, tokens, logp, anchor, peak, total, kept, inv_t, rows, dead):
    """d L / d weight [V, H] = sum over rows of grad (onehot(y) - p) h / T, tile by tile, each added up in fp32 or better.

    With e_j = total * r_j for the others and e_y = -total, the bracket is -(1 - p_y) / total * e: one factor per row, so
    it scales h and the sweep over e is a bare GEMM. Without `kept` one more sweep computes e again."""
    wide, gemm = _wide(hidden.dtype), _gemm_dtype(hidden.dtype)
    factor = grad.to(wide) * torch.expm1(logp) * inv_t / total  # [N]; expm1(logp) = -(1 - p_y)
    if dead:
        factor[dead], hidden = 0, hidden.index_fill(0, torch.tensor(dead, device=hidden.device), 0)
    out = torch.empty_like(weight)
    scratch = hidden.new_empty(min(rows, len(hidden)) * _tile(weight), dtype=wide) if kept is None else None
    for v in range(0, len(weight), _tile(weight)):
        w = weight[v:v + _tile(weight)].to(gemm)
        acc = torch.zeros_like(w, dtype=wide)
        for r in range(0, len(hidden), rows):
            r = slice(r, r + rows)
            h = hidden[r].to(gemm)
            if kept is None:
                e = _logits(h, w, anchor[r], inv_t, scratch).sub_(peak[r, None]).exp_()
                _fill_label(e, tokens[r] - v, -total[r, None])
            else:
                e = kept[r]
            _add_product(acc, e.to(gemm).t(), (factor[r, None] * h).to(gemm))
        out[v:v + len(w)] = acc
    return out


# ------------------------------------------------------------------------------------------------------------------
# 2. The losses
# ------------------------------------------------------------------------------------------------------------------
def masked_mean(x, mask, denominator=None):
    """Token mean: sum of x where mask, divided by the number of such tokens; exactly 0, with gradient 0, if there are none.

    x [B, T] floating; mask [B, T] bool or 0/1. What stands at a masked position never matters, not even a NaN.
    denominator: the token count of the whole mini-batch, when x is one micro-batch of it. Then the micro-batches' results
    (and gradients) add up to exactly the mini-batch's token mean, however it is split. The code divides by each
    micro-batch's own count instead, so there a token weighs more if its micro-batch happens to be short.
    """
    _check_shapes(x=x, mask=mask)
    mask = mask.bool()
    count = torch.as_tensor(mask.sum() if denominator is None else denominator, device=x.device)
    return torch.where(mask, x, 0).sum() / count.clamp(min=1)


def group_advantages(rewards, *, divide_by_std=True, eps=1e-6, step_counts=None):
    """Group-relative advantages [P, G] of G rollouts of each of P tasks: A = (R - mean) / (std + eps).  Source: GRPO; paper.

    rewards [P, G], one per trajectory. std is the unbiased one (divisor G - 1). A group whose rewards tie gets exactly 0.
    divide_by_std=False: A = R - mean (the code's WebShop launcher).
    step_counts [P, G]: the code's variant. There every environment step is a row of the batch, and mean and std run over
    all rows of the group, so an episode of n steps weighs n times: mean = sum n R / sum n, and
    var = sum n (R - mean)^2 / (sum n - 1). On ALFWorld lost episodes are the long ones, so the mean sinks, and wins get
    smaller advantages than under the paper's mean over trajectories, the default. (The code subtracts the invalid-action
    penalty before this; so do callers here.)
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"group_advantages needs rewards [P, G] with G >= 2 (one rollout has no group to be compared with), "
                         f"not {list(rewards.shape)}.")
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    if not rewards.isfinite().all():
        raise ValueError("group_advantages got a reward that is not finite.")
    weights = torch.ones_like(rewards) if step_counts is None else step_counts.to(rewards)
    _check_shapes(rewards=rewards, step_counts=weights)
    if (weights < 1).any():
        raise ValueError("group_advantages needs at least one step per trajectory.")
    rows = weights.sum(1, keepdim=True)
    centred = rewards - (weights * rewards).sum(1, keepdim=True) / rows
    tied = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    centred = torch.where(tied, 0, centred)  # the mean of equal numbers is not always that number
    std = ((weights * centred**2).sum(1, keepdim=True) / (rows - 1)).sqrt()
    return centred / (std + eps) if divide_by_std else centred


def policy_loss(logp, old_logp, advantages, mask, *, clip_range=0.2, dual_clip=None, denominator=None):
    """Clipped policy loss, a scalar to minimise, and its statistics.  Source: PPO; dual clip: Ye et al. 2020; paper, code.

        rho = exp(logp - old_logp),   J = min(rho A, clip(rho, 1 - clip_range, 1 + clip_range) A),   loss = -mean(J)

    logp (the only one with a gradient), old_logp, mask [B, T]; advantages [B] (one per trajectory) or [B, T].
    dual_clip = c > 1: where A < 0, J is at least c A, so that no single token pulls without bound (the code: 3.0; the paper
    has none). denominator: see masked_mean.
    Statistics, detached scalars, all of them token means: clip_fraction and dual_clip_fraction (tokens whose gradient that
    clip removes), ratio (mean rho), approx_kl (mean of rho - 1 - log rho, which estimates KL(old || new)).
    """
    if not 0 < clip_range < 1 or (dual_clip is not None and dual_clip <= 1):
        raise ValueError(f"policy_loss needs 0 < clip_range < 1 and dual_clip > 1 (or None), not {clip_range} and {dual_clip}.")
    advantages = _per_token(advantages, logp)
    _check_shapes(logp=logp, old_logp=old_logp, advantages=advantages, mask=mask)
    log_ratio = _only(mask, logp - old_logp.detach())  # [B, T]
    ratio, advantages = log_ratio.exp(), advantages.detach()
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    objective = torch.minimum(free, clipped)
    flags = {"clip_fraction": clipped < free, "dual_clip_fraction": torch.zeros_like(mask, dtype=torch.bool)}
    if dual_clip is not None:
        floor = dual_clip * advantages
        flags["dual_clip_fraction"] = (advantages < 0) & (objective < floor)
        objective = torch.where(flags["dual_clip_fraction"], floor, objective)
    with torch.no_grad():
        stats = {name: masked_mean(flag.to(ratio.dtype), mask, denominator) for name, flag in flags.items()}
        stats["ratio"] = masked_mean(ratio, mask, denominator)
        stats["approx_kl"] = masked_mean(ratio - 1 - log_ratio, mask, denominator)
    return -masked_mean(objective, mask, denominator), stats


def kl_k3(logp, ref_logp):
    """Per-token estimate of KL(pi || ref) at tokens sampled from pi, [B, T]:  k3 = exp(d) - d - 1,  d = ref_logp - logp.

    Source: Schulman, "Approximating KL divergence" (2020); GRPO; code. Never negative, 0 only where both agree, unbiased
    on-policy. The gradient goes to logp [B, T] alone; ref_logp [B, T] is the checkpoint RL starts from.
    """
    _check_shapes(logp=logp, ref_logp=ref_logp)
    d = ref_logp.detach() - logp
    return torch.expm1(d) - d


def confidence_gate(teacher_logp, student_logp, beta):
    """The confidence gate, [B, T] in (0, 1), detached:  g = sigmoid(beta Delta),  Delta = teacher_logp - student_logp.

    Source: paper. Delta > 0: the skill makes the policy surer of the token it sampled, and the gate opens. Delta = 0: 0.5.
    """
    _check_shapes(teacher_logp=teacher_logp, student_logp=student_logp)
    return torch.sigmoid(beta * (teacher_logp - student_logp)).detach()


def opd_loss(logp, teacher_logp, mask, beta, denominator=None):
    """On-policy distillation loss, a scalar to minimise:  mean over mask of g (teacher_logp - logp).  Source: paper.

    logp [B, T]: log pi(token | history), the only branch with a gradient; teacher_logp [B, T]: the same tokens scored with
    the skill in context; mask [B, T]: real response tokens of trajectories that have a usable skill; beta > 0: sharpness.
    The gradient, -g / count per token, is a gated NLL of the sampled tokens: it only pushes them up. The value may be negative.
    """
    logp, teacher_logp = _only(mask, logp), _only(mask, teacher_logp).detach()
    return masked_mean(confidence_gate(teacher_logp, logp, beta) * (teacher_logp - logp), mask, denominator)


def seed_loss(logp, old_logp, ref_logp, teacher_logp, advantages, mask, skill_mask, *, clip_range, kl_coef, lambda_opd,
              beta_opd, dual_clip=None, rl_tokens=None, opd_tokens=None):
    """The joint loss of SEED in two parts, (rl_loss, opd_loss, stats); the loss to minimise is rl_loss + opd_loss.

        rl_loss = policy_loss + kl_coef * mean k3(logp, ref_logp),    opd_loss = lambda_opd * L_opd      Source: paper.

    opd_loss *already carries lambda_opd*: the parts are separate so that a caller can take the gradient norm of each.
    All log-probs and masks [B, T], advantages [B] or [B, T]; skill_mask [B] or [B, T]: 1 where the trajectory has a usable
    skill (it is cut to mask here). teacher_logp=None is the GRPO arm: opd_loss is exactly 0.
    rl_tokens, opd_tokens: the mini-batch's mask.sum() and (mask * skill_mask).sum(), if this is one micro-batch of it.
    The teacher: paper and code both use the policy's own weights, stop-grad; callers score it once per update, as the code
    does, while Delta uses the live logp. On an update's first mini-batch the two coincide.
    stats: policy_loss's; loss, rl_loss, kl (mean k3), opd_loss (without lambda); gate_mean, gate_above_half (share) and
    delta_mean over skill tokens; skill_tokens (share). Detached scalars that add up over micro-batches like the losses.
    """
    skill_mask = _only(mask, _per_token(skill_mask, mask)).bool()
    if teacher_logp is None:
        teacher_logp, skill_mask = logp.detach(), torch.zeros_like(skill_mask)
    rl_loss, stats = policy_loss(logp, old_logp, advantages, mask, clip_range=clip_range, dual_clip=dual_clip,
                                 denominator=rl_tokens)
    kl = masked_mean(kl_k3(_only(mask, logp), _only(mask, ref_logp)), mask, rl_tokens)
    rl_loss = rl_loss + kl_coef * kl
    opd = opd_loss(logp, teacher_logp, skill_mask, beta_opd, opd_tokens)
    with torch.no_grad():
        gate = confidence_gate(teacher_logp, logp, beta_opd)
        stats |= {"loss": rl_loss + lambda_opd * opd, "rl_loss": rl_loss, "kl": kl, "opd_loss": opd,
                  "gate_mean": masked_mean(gate, skill_mask, opd_tokens),
                  "gate_above_half": masked_mean((gate > 0.5).to(gate.dtype), skill_mask, opd_tokens),
                  "delta_mean": masked_mean(teacher_logp - logp, skill_mask, opd_tokens),
                  "skill_tokens": masked_mean(skill_mask.to(gate.dtype), mask, rl_tokens)}
    return rl_loss, lambda_opd * opd, {name: value.detach() for name, value in stats.items()}


def _only(mask, x):
    """x where mask, else 0: before any arithmetic, since the gradient of exp at a masked inf would be 0 * inf = NaN."""
    _check_shapes(x=x, mask=mask)
    return torch.where(mask.bool(), x, 0)


def _per_token(x, like):
    """One number per trajectory, [B], spread over its tokens, [B, T]."""
    return x[:, None].expand_as(like) if x.dim() == 1 and len(x) == len(like) else x


def _check_shapes(**tensors):
    """Broadcasting would hide a wrong shape: all of them must be equal."""
    if len({x.shape for x in tensors.values()}) > 1:
        raise ValueError("These must have one shape: " + ", ".join(f"{k} {list(x.shape)}" for k, x in tensors.items()) + ".")
