"""A second, independent answer to the assignment, written as a student would: plain, and without
this project's modules.

It shows that the graders accept other code than ours, and it is what the mutants in
test_assignment_kit.py are made from.
"""
import ast
import json
import re

import torch


# -- 1
def group_advantages(rewards, *, divide_by_std=True, eps=1e-6):
    if rewards.shape[1] < 2:
        raise ValueError("a group needs at least two rollouts")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True)
    return centred / (std + eps) if divide_by_std else centred


# -- 2
def masked_mean(x, mask):
    mask = mask.bool()
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def policy_loss(logp, old_logp, advantages, mask, *, clip_range=0.2):
    difference = torch.where(mask.bool(), logp - old_logp.detach(), 0.0)
    ratio = torch.exp(difference)
    advantages = advantages.detach()[:, None]
    clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    return -masked_mean(torch.minimum(ratio * advantages, clipped * advantages), mask)


def kl_k3(logp, ref_logp):
    d = ref_logp.detach() - logp
    return torch.exp(d) - d - 1


# -- 3
def chunk_logits(hidden, weight, temperature):
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(wide) @ weight.to(wide).T / temperature


def check_labels(labels, V):
    if len(labels) and (labels.min() < 0 or labels.max() >= V):
        raise ValueError("a label is outside the vocabulary")


@torch.no_grad()
def logprob_forward(hidden, weight, labels, *, temperature=1.0, rows_per_chunk=256):
    check_labels(labels, len(weight))
    parts = []
    for start in range(0, len(hidden), rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        z = chunk_logits(hidden[rows], weight, temperature)
        parts.append(z.gather(1, labels[rows, None])[:, 0] - torch.logsumexp(z, dim=1))
    return torch.cat(parts)


class LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, rows_per_chunk):
        parts, unit = [], torch.empty_like(hidden)
        for start in range(0, len(hidden), rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            logs = torch.log_softmax(chunk_logits(hidden[rows], weight, temperature), dim=1)
            parts.append(logs.gather(1, labels[rows, None])[:, 0])
            expected = logs.exp() @ weight.to(logs.dtype)
            unit[rows] = ((weight[labels[rows]] - expected) / temperature).to(unit.dtype)
        ctx.save_for_backward(unit, hidden, weight, labels)
        ctx.temperature, ctx.rows_per_chunk = temperature, rows_per_chunk
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        unit, hidden, weight, labels = ctx.saved_tensors
        grad_hidden = (grad[:, None] * unit).to(hidden.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            total = torch.zeros(weight.shape, dtype=grad.dtype)
            for start in range(0, len(hidden), ctx.rows_per_chunk):
                rows = slice(start, start + ctx.rows_per_chunk)
                change = -torch.softmax(chunk_logits(hidden[rows], weight, ctx.temperature), dim=1)
                change[torch.arange(len(change)), labels[rows]] += 1
                change = change * grad[rows, None] / ctx.temperature
                total += change.T @ hidden[rows].to(grad.dtype)
            grad_weight = total.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def chunked_logprob(hidden, weight, labels, *, temperature=1.0, rows_per_chunk=256):
    check_labels(labels, len(weight))
    return LogProb.apply(hidden, weight, labels, temperature, rows_per_chunk)


# -- 4
def confidence_gate(teacher_logp, student_logp, beta):
    return torch.sigmoid(beta * (teacher_logp - student_logp)).detach()


def opd_loss(logp, teacher_logp, mask, beta):
    logp = torch.where(mask.bool(), logp, 0.0)
    teacher_logp = torch.where(mask.bool(), teacher_logp, 0.0).detach()
    gate = confidence_gate(teacher_logp, logp, beta)
    return masked_mean(gate * (teacher_logp - logp), mask)


# -- 5
def parse_skill(text):
    answer = text.rpartition("</think>")[2]
    best = ""
    for match in re.finditer(r"\{[^{}]*\}", answer):
        mended = re.sub(r",(\s*[}\]])(?=[^\"']*$)", r"\1", match[0])
        try:
            value = json.loads(mended, strict=False)
        except ValueError:
            try:
                value = ast.literal_eval(mended)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
        skill = value.get("episode_skill") if isinstance(value, dict) else None
        if isinstance(skill, str) and skill.strip():
            best = " ".join(skill.split()[:60])
    return best


def teacher_view(ids, sampled, cut, block):
    return ids[:cut] + block + ids[cut:], sampled[:cut] + [False] * len(block) + sampled[cut:]


# -- 6
def seed_loss(logp, old_logp, ref_logp, teacher_logp, advantages, mask, has_skill, *, clip_range,
              kl_coef, lambda_opd, beta_opd):
    policy = policy_loss(logp, old_logp, advantages, mask, clip_range=clip_range)
    kl = masked_mean(kl_k3(logp, ref_logp), mask)
    opd = opd_loss(logp, teacher_logp, mask & has_skill[:, None], beta_opd)
    return policy + kl_coef * kl + lambda_opd * opd
