"""losses.py: every loss of SEED, then the log-prob kernel they share.

Part 1, the losses: short pure functions on [B, T] tensors, with equation and source. "paper" is
SEED, arXiv 2607.14777; "code" is its authors' release of July 2026, named wherever the two differ.
Left out: the entropy bonus of 0.001, on by a default of the code only.

Part 2, the kernel. A trainer needs log pi(token) of every response token, and its gradient. Over a
vocabulary of 151,936 the logits are the largest tensor of the whole update: 0.6 GB in fp32 for a
thousand tokens. Today's memory-efficient kernels do not keep them and so compute them again in
backward: three sweeps over the vocabulary matrix, where two are enough. Let y be the sampled token,
z = h W^T / T its row of logits, R = log sum_{j != y} exp z_j everything else, and r = softmax of z
over everything else:

    log p_y         = logsigmoid(z_y - R)                      y against the rest of the vocabulary
    d log p_y / d h = (1 - p_y) (W_y - sum_{j != y} r_j W_j) / T           no loss in it
    d L / d h       = (d L / d log p_y) * (d log p_y / d h)    the loss is one number per token

The second line can be formed in forward, before there is a loss. It is attention with W as keys and
as values, so one sweep with a running maximum (as in FlashAttention) yields R and sum r_j W_j
together, a tile of the vocabulary at a time. Backward is one multiply.

    | sweeps (one = 2 N H V FLOP) | no gradient | frozen head | trainable head | kept for backward |
    |-----------------------------|-------------|-------------|----------------|-------------------|
    | naive log_softmax           | 1           | 2           | 3              | one to several NV |
    | recompute (TRL, Liger, ..)  | 1           | 3           | 4              | N H               |
    | this file                   | 1           | **2**       | **3** or 4     | N H; with 3: + NV |

    Scratch while it runs: rows x (6 tile + 12 H) bytes in bfloat16, rows x (4 tile + 12 H) in fp32
    (entropy: 4 tile more), at any N and V. tile is the width of a vocabulary tile; rows, the number
    of tokens that share a sweep, is the one dial (`rows_per_chunk`).

When the trick does not help: a *trainable* head. d L / d W adds up rows weighted by d L / d log p,
which only the finished loss knows. So the probabilities are kept where they fit (SOFTMAX_BUDGET;
the tiny tied model: 3 sweeps, the floor again), else computed again (4). Nor does it serve second
derivatives, or a loss that differentiates more of the distribution than log p_y (entropy bonus,
top-k, full KL). `python notebooks/kernel_benchmark.py` measures it.
"""
from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F


# --------------------------------------------------------------------------------------------------
# 1. The losses
# --------------------------------------------------------------------------------------------------
def masked_mean(x, mask, denominator=None):
    """Token mean: sum of x where mask, divided by the number of such tokens; exactly 0, with
    gradient 0, if there are none.

    x [B, T] floating; mask [B, T] bool or 0/1. What stands at a masked position never matters, not
    even a NaN. denominator: the token count of the whole mini-batch, when x is one micro-batch of
    it. Then the micro-batches' results (and gradients) add up to exactly the mini-batch's token
    mean, however it is split. (The code averages each micro-batch by its own count.)
    """
    _check_shapes(x=x, mask=mask)
    mask = mask.bool()
    count = torch.as_tensor(mask.sum() if denominator is None else denominator, device=x.device)
    return torch.where(mask, x, 0).sum() / count.clamp(min=1)


def group_advantages(rewards, *, divide_by_std=True, eps=1e-6, step_counts=None):
    """Group-relative advantages [P, G] of G rollouts of each of P tasks: A = (R - mean) / (std +
    eps).  Source: GRPO; paper.

    rewards [P, G], one per trajectory, penalties included. std is the unbiased one. A group whose
    rewards tie gets exactly 0. divide_by_std=False: A = R - mean (the code's WebShop launcher).
    step_counts [P, G]: the code's variant. There every environment step is a row of the batch, and
    mean and std run over all rows of the group, so an episode of n steps weighs n times: mean = sum
    n R / sum n, var = sum n (R - mean)^2 / (sum n - 1). Lost episodes are the long ones, so against
    the paper's mean over trajectories (the default) a win stands out more and a loss is punished
    less.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError("group_advantages needs rewards [P, G] with G >= 2 (one rollout has "
                         f"nothing to be compared with), not {list(rewards.shape)}.")
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    weights = torch.ones_like(rewards) if step_counts is None else step_counts.to(rewards)
    _check_shapes(rewards=rewards, step_counts=weights)
    if not rewards.isfinite().all() or (weights < 1).any():
        raise ValueError("group_advantages needs finite rewards, and one step or more in each.")
    rows = weights.sum(1, keepdim=True)
    centred = rewards - (weights * rewards).sum(1, keepdim=True) / rows
    tied = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    # The mean of equal numbers is not always that number.
    centred = torch.where(tied, 0, centred)
    std = ((weights * centred**2).sum(1, keepdim=True) / (rows - 1)).sqrt()
    return centred / (std + eps) if divide_by_std else centred


def policy_loss(logp, old_logp, advantages, mask, *, clip_range=0.2, dual_clip=None,
                denominator=None):
    """Clipped policy loss, a scalar to minimise, and its statistics.  Source: PPO; dual clip: Ye et
    al. 2020; paper, code.

        rho = exp(logp - old_logp),   J = min(rho A, clip(rho, 1 - clip_range, 1 + clip_range) A),
        loss = -mean(J)

    logp (the only one with a gradient), old_logp, mask [B, T]; advantages [B] (one per trajectory)
    or [B, T]. dual_clip = c > 1: where A < 0, J >= c A, so that no token pulls without bound (code:
    3.0; paper: none). denominator: masked_mean's. Statistics, detached scalars, all of them token
    means: clip_fraction and dual_clip_fraction (tokens whose gradient that clip removes), ratio
    (mean rho), approx_kl (mean of rho - 1 - log rho, which estimates KL(old || new)).
    """
    if not 0 < clip_range < 1 or (dual_clip is not None and dual_clip <= 1):
        raise ValueError(f"policy_loss needs 0 < clip_range < 1 and dual_clip > 1 (or None), not "
                         f"{clip_range} and {dual_clip}.")
    advantages = _per_token(advantages, logp)
    _check_shapes(logp=logp, old_logp=old_logp, advantages=advantages, mask=mask)
    log_ratio = _only(mask, logp - old_logp.detach())  # [B, T]
    ratio, advantages = log_ratio.exp(), advantages.detach()
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    objective = torch.minimum(free, clipped)
    floor = dual_clip * advantages if dual_clip else torch.full_like(advantages, float("-inf"))
    floored = (advantages < 0) & (objective < floor)
    objective = torch.where(floored, floor, objective)
    stats = {"clip_fraction": clipped < free, "dual_clip_fraction": floored, "ratio": ratio,
             "approx_kl": ratio - 1 - log_ratio}
    stats = {name: masked_mean(x.detach().to(ratio.dtype), mask, denominator)
             for name, x in stats.items()}
    return -masked_mean(objective, mask, denominator), stats


def kl_k3(logp, ref_logp):
    """Per-token estimate of KL(pi || ref) at tokens sampled from pi, [B, T]:  k3 = exp(d) - d - 1,
    d = ref_logp - logp.

    Source: Schulman, "Approximating KL divergence" (2020); GRPO; code. Never negative, 0 only where
    both agree, unbiased on-policy. The gradient goes to logp [B, T] alone; ref_logp [B, T] is the
    checkpoint RL starts from.
    """
    _check_shapes(logp=logp, ref_logp=ref_logp)
    d = ref_logp.detach() - logp
    return torch.expm1(d) - d


def confidence_gate(teacher_logp, student_logp, beta):
    """The confidence gate, [B, T] in (0, 1), detached:  g = sigmoid(beta Delta),  Delta =
    teacher_logp - student_logp.

    Source: paper. Delta > 0: the skill makes the policy surer of the token it sampled, and the gate
    opens. Delta = 0: 0.5.
    """
    _check_shapes(teacher_logp=teacher_logp, student_logp=student_logp)
    return torch.sigmoid(beta * (teacher_logp - student_logp)).detach()


def opd_loss(logp, teacher_logp, mask, beta, denominator=None):
    """On-policy distillation loss, a scalar to minimise:  mean over mask of g (teacher_logp -
    logp).  Source: paper.

    logp [B, T]: log pi(token | history), the only branch with a gradient; teacher_logp [B, T]: the
    same tokens with the skill in context; mask [B, T]: real response tokens of trajectories that
    have a usable skill; beta > 0: how sharp the gate is. The gradient, -g / count per token, is a
    gated NLL of the sampled tokens: it only pushes them up. The value may be negative.
    """
    logp, teacher_logp = _only(mask, logp), _only(mask, teacher_logp).detach()
    return masked_mean(confidence_gate(teacher_logp, logp, beta) * (teacher_logp - logp), mask,
                       denominator)


def seed_loss(logp, old_logp, ref_logp, teacher_logp, advantages, mask, skill_mask, *, clip_range,
              kl_coef, lambda_opd, beta_opd, dual_clip=None, rl_tokens=None, opd_tokens=None):
    """The loss of SEED in its two parts, (rl_loss, opd_loss, stats); the loss to minimise is
    rl_loss + opd_loss.  Source: paper.

        rl_loss = policy_loss + kl_coef * mean k3(logp, ref_logp),    opd_loss = lambda_opd * L_opd:
        it *already carries lambda_opd*

    Two parts, so that a caller can take the gradient norm of each. Log-probs and mask [B, T];
    advantages and skill_mask (1 where the trajectory has a usable skill; it is cut to mask) [B] or
    [B, T]. teacher_logp=None is the GRPO arm: opd_loss is exactly 0. rl_tokens, opd_tokens: the
    mini-batch's mask.sum() and (mask * skill_mask).sum(), if this is one micro-batch of it. The
    teacher is the policy itself, stop-grad. The code, and our trainer, score it once per update,
    with the weights from before it, and take Delta against the live logp; on an update's first
    mini-batch that is the paper's equation. stats: those of policy_loss, kl (mean k3), rl_loss,
    opd_loss (without lambda), loss: detached, adding up over micro-batches.
    """
    skill_mask = _only(mask, _per_token(skill_mask, mask)).bool()
    if teacher_logp is None:
        teacher_logp, skill_mask = logp, torch.zeros_like(skill_mask)
    rl_loss, stats = policy_loss(logp, old_logp, advantages, mask, clip_range=clip_range,
                                 dual_clip=dual_clip, denominator=rl_tokens)
    kl = masked_mean(kl_k3(_only(mask, logp), _only(mask, ref_logp)), mask, rl_tokens)
    rl_loss = rl_loss + kl_coef * kl
    opd = opd_loss(logp, teacher_logp, skill_mask, beta_opd, opd_tokens)
    stats |= {"kl": kl, "rl_loss": rl_loss, "opd_loss": opd, "loss": rl_loss + lambda_opd * opd}
    return rl_loss, lambda_opd * opd, {name: value.detach() for name, value in stats.items()}


def _only(mask, x):
    """x where mask, else 0: before any arithmetic, since the gradient of exp at a masked inf would
    be 0 * inf = NaN."""
    _check_shapes(x=x, mask=mask)
    return torch.where(mask.bool(), x, 0)


def _per_token(x, like):
    """One number per trajectory, [B], spread over its tokens, [B, T]; [B, T] as it is."""
    return x[:, None].expand(-1, like.shape[-1]) if x.dim() == 1 else x


def _check_shapes(**tensors):
    """Broadcasting would hide a wrong shape: all of them must be equal."""
    if len({x.shape for x in tensors.values()}) > 1:
        shapes = ", ".join(f"{k} {list(x.shape)}" for k, x in tensors.items())
        raise ValueError(f"These must have one shape: {shapes}.")


# --------------------------------------------------------------------------------------------------
# 2. The kernel
# --------------------------------------------------------------------------------------------------
# Columns per vocabulary tile and bytes of scratch. A CPU wants the work to stay in its cache; a GPU
# wants few, large launches.
TILE = {"cpu": 4096, "cuda": 32768}
SCRATCH_BUDGET = {"cpu": 16 << 20, "cuda": 256 << 20}
# a trainable head keeps its probabilities for backward if they take at most this
SOFTMAX_BUDGET = 256 << 20
# the logit of a token that does not take part; finite, so that 0 * NEVER is 0 and not NaN
NEVER = -1e30


def chunked_logprob(hidden, weight, labels, *, temperature=1.0, rows_per_chunk=None,
                    return_entropy=False):
    """Log-probability of one token per row, log_softmax(hidden @ weight.T / temperature)[labels],
    in bounded memory.

    hidden [N, H] and weight [V, H]: one dtype (float64, float32, bfloat16, float16), one device;
    labels [N]: integers. Pass the positions that matter (response tokens), not whole sequences:
    nothing here is cheaper than a row that is not scored. Returns logp [N], fp32 (float64 for
    float64), or with return_entropy (logp, entropy): the entropy of the same distribution in nats,
    [N], same dtype, from the same sweep, without gradient. Gradients reach hidden and, if it
    requires one, weight. They are summed in fp32 or better and rounded to their tensor's dtype at
    the end; d logp / d hidden waits for backward in hidden's dtype, which costs bfloat16 one more
    rounding (2^-9). rows_per_chunk: tokens that share a sweep; by default what SCRATCH_BUDGET
    allows. Memory: see the top of this file. A row that is not finite gets logp NaN and gradient 0,
    leaves all other rows alone, and is named in a RuntimeWarning; callers find such rows by
    logp.isnan(). One host synchronisation per call checks labels and finiteness together. Raises
    ValueError, one sentence, for shapes, dtypes, devices, labels, temperatures or rows_per_chunk
    that cannot be meant.
    """
    _check_inputs(hidden, weight, labels, temperature, rows_per_chunk)
    budget = SCRATCH_BUDGET.get(hidden.device.type, SCRATCH_BUDGET["cuda"])
    rows = rows_per_chunk or max(1, budget // _bytes_per_row(weight))
    wants = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    # autocast would round the fp32 sums to bfloat16
    with torch.autocast(hidden.device.type, enabled=False):
        logp, entropy = _ChunkedLogProb.apply(hidden, weight, labels, 1.0 / temperature, rows,
                                              return_entropy, *wants)
    return (logp, entropy) if return_entropy else logp


def _check_inputs(hidden, weight, labels, temperature, rows_per_chunk):
    """Refuse what cannot be meant. The values of labels are checked in _report, to spare a
    synchronisation."""
    dims = (hidden.dim(), weight.dim(), labels.dim())
    if dims != (2, 2, 1) or len(hidden) != len(labels) or hidden.shape[1] != weight.shape[1] \
            or len(weight) < 2:
        raise ValueError("chunked_logprob needs hidden [N, H], weight [V, H] with V >= 2 and "
                         f"labels [N], not {list(hidden.shape)}, {list(weight.shape)} and "
                         f"{list(labels.shape)}.")
    if not hidden.device == weight.device == labels.device:
        raise ValueError(f"chunked_logprob needs one device, not {hidden.device}, {weight.device} "
                         f"and {labels.device}.")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"chunked_logprob needs one floating dtype, not hidden {hidden.dtype} and "
                         f"weight {weight.dtype}.")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"chunked_logprob needs integer labels, not {labels.dtype}.")
    if not 0.0 < temperature < float("inf") or (rows_per_chunk is not None and rows_per_chunk < 1):
        raise ValueError("chunked_logprob needs a positive, finite temperature and rows_per_chunk "
                         f">= 1 (or None), not {temperature} and {rows_per_chunk}.")


def _report(logp, labels, V):
    """The call's one synchronisation: refuse labels outside [0, V), name rows that are not finite;
    their indices are returned."""
    if not len(labels):
        return labels.long()
    lowest, highest, bad = torch.stack([labels.min().long(), labels.max().long(),
                                        (~logp.isfinite()).sum()]).tolist()
    if lowest < 0 or highest >= V:
        i = ((labels < 0) | (labels >= V)).nonzero()[0].item()
        raise ValueError(f"chunked_logprob got the label {labels[i].item()} in row {i}, outside "
                         f"the vocabulary [0, {V}).")
    rows = (~logp.isfinite()).nonzero()[:, 0] if bad else labels[:0].long()
    if bad:
        named = f"{rows[:20].tolist()}{' and so on' if bad > 20 else ''}"
        warnings.warn(f"chunked_logprob: {bad} of {len(logp)} rows are not finite (their logp is "
                      f"NaN, their gradient 0): rows {named}", RuntimeWarning, stacklevel=4)
    return rows


def _tile(weight):
    return min(len(weight), TILE.get(weight.device.type, TILE["cuda"]))


def _bytes_per_row(weight):
    """Scratch of one row: its tile of logits in fp32 or better (16-bit inputs: once more in 16
    bits), and H-long rows in flight."""
    size, narrow = max(4, weight.element_size()), weight.element_size() == 2
    return (size + 2 * narrow) * _tile(weight) + 3 * size * weight.shape[1]


def _dtypes(dtype):
    """(the dtype sums are kept in: fp32 or better; the dtype GEMMs read). float16 is read as fp32:
    its range is too small for exp(z - max) over a large vocabulary."""
    gemm = torch.float32 if dtype == torch.float16 else dtype
    return torch.promote_types(dtype, torch.float32), gemm


class _ChunkedLogProb(torch.autograd.Function):
    """The autograd glue: loop over row chunks, keep what backward needs. The arithmetic is in the
    functions below."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, inv_t, rows, want_entropy, want_hidden, want_weight):
        """log-prob [N] and entropy [N]; forms d logp / d hidden in the same sweep, before there is
        a loss."""
        N, V, (wide, _) = len(hidden), len(weight), _dtypes(hidden.dtype)
        logp, entropy, anchor, peak, total = hidden.new_zeros(5, N, dtype=wide)  # [N] each
        unit = torch.empty_like(hidden) if want_hidden else None  # [N, H] d logp / d hidden
        keep = want_weight and V == _tile(weight) and N * V * logp.element_size() <= SOFTMAX_BUDGET
        kept = hidden.new_empty(N, V, dtype=wide) if keep else None
        scratch = None if keep else hidden.new_empty(min(rows, N) * _tile(weight), dtype=wide)
        # a wrong label must not crash the gather before _report can name it
        tokens = labels.long().clamp(0, V - 1)
        for r in range(0, N, rows):
            r = slice(r, r + rows)
            logp[r], entropy[r], anchor[r], peak[r], total[r], gradient = _sweep(
                hidden[r], weight, tokens[r], inv_t, kept[r].view(-1) if keep else scratch,
                want_hidden, want_entropy)
            if want_hidden:
                unit[r] = gradient
            if keep:
                _fill_label(kept[r], tokens[r], -total[r, None])
        # the NaN of these rows must reach no gradient, not even as 0 * NaN
        dead = _report(logp, labels, V)
        for x, value in ((logp, float("nan")), (entropy, float("nan")), (anchor, 0), (peak, 0),
                         (total, 1), (unit, 0), (kept, 0)):
            if x is not None:
                x.index_fill_(0, dead, value)
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(unit, dead, *((hidden, weight, tokens, logp, anchor, peak, total,
                                             kept) if want_weight else ()))
        ctx.settings = inv_t, rows
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        """grad [N] = d L / d logp: one multiply for hidden; the weight, if it trains, needs a
        product of its own."""
        (inv_t, rows), (unit, dead, *saved) = ctx.settings, ctx.saved_tensors
        grad = grad.index_fill(0, dead, 0)
        grad_hidden = None if unit is None else torch.empty_like(unit)
        # by chunks, so that the fp32 product is never [N, H]
        for r in range(0, 0 if unit is None else len(unit), rows):
            grad_hidden[r:r + rows] = grad[r:r + rows, None] * unit[r:r + rows]
        with torch.autocast(grad.device.type, enabled=False):
            grad_weight = _weight_gradient(grad, *saved, inv_t, rows, dead) if saved else None
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _sweep(h, weight, tokens, inv_t, scratch, want_gradient, want_entropy):
    """One sweep over the vocabulary for one chunk of rows h [n, H]; tokens [n]; scratch: n * tile
    numbers to work in.

    Returns logp [n], entropy [n] (0 unless wanted), what rebuilds r_j = exp(z_j - anchor - peak) /
    total, and d logp / d h [n, H] (None unless wanted). Per tile one GEMM, with the gradient two.
    """
    wide, gemm = _dtypes(h.dtype)
    own_row = weight[tokens]  # [n, H]
    # the label's logit gets its own exact dot product ...
    acc = h.to(wide, copy=True).mul_(own_row)
    own = acc.sum(1).mul_(inv_t)  # [n]
    # ... and all others are computed relative to it (see _logits).
    anchor = own.to(gemm).to(wide)
    acc.zero_()  # [n, H] from here on: sum of e_j W_j
    # [n] each
    peak, total, moment = torch.full_like(own, NEVER), torch.zeros_like(own), torch.zeros_like(own)
    h = h.to(gemm)
    for v in range(0, weight.shape[0], _tile(weight)):
        w = weight[v:v + _tile(weight)].to(gemm)  # [k, H]
        z = _logits(h, w, anchor, inv_t, scratch)  # [n, k]
        # What follows is about the others.
        _fill_label(z, tokens - v, NEVER)
        new_peak = torch.maximum(peak, z.amax(1))
        shrink = torch.exp(peak - new_peak)
        z.sub_(new_peak[:, None])
        ln_e = z.clone() if want_entropy else None
        e = z.exp_()
        # moment = sum of e ln e, brought to the new maximum like the other two.
        if want_entropy:
            moment = shrink * (moment + (peak - new_peak) * total) + ln_e.mul_(e).sum(1)
        total = shrink * total + e.sum(1)
        if want_gradient:
            _add_product(acc.mul_(shrink[:, None]), e.to(gemm), w)
        peak = new_peak
    # z_y - R: the label against the rest.
    odds = own - anchor - peak - total.log()
    rest = torch.sigmoid(-odds)  # 1 - p_y, without cancellation
    logp, entropy = F.logsigmoid(odds), torch.zeros_like(own)
    # Chain rule: first "y or another?", then which other.
    if want_entropy:
        others = total.log() - moment / total
        entropy = -logp.exp() * logp + torch.special.entr(rest) + rest * others
    if not want_gradient:
        return logp, entropy, anchor, peak, total, None
    gradient = acc.div_(-total[:, None]).add_(own_row).mul_((rest * inv_t)[:, None])
    return logp, entropy, anchor, peak, total, gradient


def _logits(h, w, anchor, inv_t, scratch):
    """h w^T / T - anchor, [n, k], in scratch.

    Why subtract: a CPU's bfloat16 GEMM returns bfloat16. Rounded after subtracting the label's own
    logit, an entry is wrong by 2^-9 of its distance to the label, so log p keeps two to three
    digits. Rounded before, it is wrong by 2^-9 of its size: 0.06 for a logit of 30.
    """
    z, start = scratch[:len(h) * len(w)].view(len(h), len(w)), -anchor[:, None]  # [n, k] and [n, 1]
    if h.dtype == z.dtype or h.is_cuda:
        return _add_product(z.copy_(start), h, w.t(), inv_t)
    # fp32 inside, one rounding at the end
    return z.copy_(torch.addmm(start.to(h.dtype), h, w.t(), alpha=inv_t))


def _fill_label(z, label, value):
    """z[i, label[i]] = value wherever that column is in the tile z [n, k]; without a
    synchronisation."""
    at = label.clamp(0, z.shape[1] - 1)[:, None]  # [n, 1]
    inside = ((label >= 0) & (label < z.shape[1]))[:, None]
    z.scatter_(1, at, torch.where(inside, value, z.gather(1, at)))


def _add_product(acc, a, b, alpha=1.0):
    """acc += alpha * a @ b, acc in fp32 or better whatever a and b are. On CUDA the GEMM itself
    adds 16-bit products in fp32; on the CPU one tile's product is rounded once to bfloat16, and the
    tiles are added in fp32."""
    if a.dtype == acc.dtype:
        return acc.addmm_(a, b, alpha=alpha)
    if acc.is_cuda:
        return torch.addmm(acc, a, b, alpha=alpha, out_dtype=acc.dtype, out=acc)
    return acc.add_(a @ b, alpha=alpha)


def _weight_gradient(grad, hidden, weight, tokens, logp, anchor, peak, total, kept, inv_t, rows,
                     dead):
    """d L / d weight [V, H] = sum over rows of grad (onehot(y) - p) h / T, tile by tile, each added
    up in fp32 or better.

    With e_j = total * r_j for the others and e_y = -total, the bracket is -(1 - p_y) / total * e:
    one factor per row, so it scales h, and the sweep over e is a bare GEMM. Without `kept`, one
    more sweep computes e again."""
    wide, gemm = _dtypes(hidden.dtype)
    factor = grad.to(wide) * torch.expm1(logp) * inv_t / total  # [N]; expm1(logp) = -(1 - p_y)
    if len(dead):
        factor, hidden = factor.index_fill(0, dead, 0), hidden.index_fill(0, dead, 0)
    out = torch.empty_like(weight)
    size = min(rows, len(hidden)) * _tile(weight) if kept is None else 0
    scratch = hidden.new_empty(size, dtype=wide)
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
