"""policy.py: the model. One causal language model in four roles: actor, analyzer, teacher and
student.

    1  Policy       a model, its tokenizer, and the chat template taken apart into token ids
    2  generation   a KV cache for a batch of growing sequences; a sampler with counted randomness
    3  scoring      log-probs of the tokens that were sampled, with and without gradient
    4  reference    the frozen policy of the KL term, without a second copy of a large model

Left out: a separate inference engine (generation is ordinary forward passes, so what is sampled is
what is trained), several cards, sliding-window attention, heads that change their logits. Loading
(4-bit bases, adapters) stands in runs.py, beside saving. Functions that take `cfg` want seed_mini's
options: temperature, micro_tokens.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

import losses


# --------------------------------------------------------------------------------------------------
# 1. The policy: a model, its tokenizer, its chat template
# --------------------------------------------------------------------------------------------------
@dataclass
class Policy:
    """A model, its tokenizer, and the chat template taken apart into token ids.

    The first user turn is  first[0] + text + first[1];  a later one is  [end_id] + later[0] + text
    + later[1]. `end_id` is the token that closes an assistant turn: the policy samples it itself
    (and is trained on it).
    """
    model: torch.nn.Module
    tokenizer: object
    device: torch.device
    end_id: int
    first: tuple[list[int], list[int]]
    later: tuple[list[int], list[int]]
    # Full fine-tuning: a frozen copy; LoRA: None (reference_of).
    reference: torch.nn.Module | None = None
    # Added tokens that are not marked special, for encode().
    control_words: list[str] = field(default_factory=list)
    # Layers whose activations are recomputed in backward
    recompute: list[torch.nn.Module] = field(default_factory=list)
    # 1: off. fp16 gradients underflow without it (runs.optimizer_step).
    loss_scale: float = 1.0
    # Optimizer steps since the scale last changed.
    clean_steps: int = 0

    def encode(self, text: str) -> list[int]:
        """Token ids of text that is DATA: no control token can come out, whatever the text spells.

        `split_special_tokens` handles the tokens marked special. Tokenizers also have added tokens
        that are not (Qwen3's <think>, <tool_call>); a text that spells one is cut inside the word,
        so that it becomes ordinary pieces.
        """
        for word in self.control_words:
            if word in text:
                return sum((self.encode(part) for part in _cut_inside(text, word)), [])
        # Half a surrogate pair, which JSON can carry, is no text for a tokenizer.
        text = text.encode("utf-8", "replace").decode()
        return self.tokenizer(text, add_special_tokens=False,
                              split_special_tokens=True)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of sampled ids, without control tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def user_turn(self, text_ids: list[int]) -> list[int]:
        """A whole first turn around already encoded text."""
        return self.first[0] + text_ids + self.first[1]

    @property
    def backbone(self) -> torch.nn.Module:
        """The transformer without its head: hidden states, so that only the positions that matter
        meet the vocabulary."""
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return model.model

    @property
    def head(self) -> torch.Tensor:
        """The vocabulary matrix [V, H] (tied to the embedding in small models)."""
        return self.model.get_output_embeddings().weight


def _cut_inside(text: str, word: str) -> list[str]:
    parts = text.split(word)
    for i in range(len(parts) - 1):
        parts[i] += word[:1]
        parts[i + 1] = word[1:] + parts[i + 1]
    return parts


def chat_pieces(tokenizer) -> tuple[int, tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """Take the chat template apart by rendering it around placeholders: (end_id, first, later) as
    in Policy.

    We append these pieces and never render a conversation again. So the trained ids are the sampled
    ids even where a template is not append-only (Qwen3's drops the thinking of earlier turns when
    it renders them anew; ours stays as it was sampled).
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; choose an instruct model, or give "
                         "the tokenizer one.")

    def render(*contents):
        """The template around user, assistant, user messages, as text."""
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents)]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                             enable_thinking=False)

    def ids(text):
        """Control tokens included: this text is the template's own."""
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before, after = render("SLOTA").split("SLOTA")
    middle, last = render("SLOTA", "SLOTB", "SLOTC").split("SLOTB")[1].split("SLOTC")
    glue = ids(middle)
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if not glue or glue[0] not in control:
        raise ValueError(f"the chat template closes an assistant turn with {middle[:20]!r}, which "
                         f"is not a control token; this model cannot be used.")
    return glue[0], (ids(before), ids(after)), (glue[1:], ids(last))


# --------------------------------------------------------------------------------------------------
# 2. Generation: a KV cache for a batch of growing sequences
# --------------------------------------------------------------------------------------------------
# Padded tokens of one forward pass in generation; long prompts go in pieces.
PREFILL = {"cpu": 1 << 18, "cuda": 8192}


class KVBatch:
    """The KV cache of B sequences that grow by chunks of different lengths (a class, because it is
    state that must stay in step).

    feed() appends a chunk to every row, padded on the right to the longest: the padding leaves
    holes in the cache that the mask hides and keep() squeezes out. Positions count real tokens
    only, so a row never notices its neighbours.
    """

    def __init__(self, policy: Policy, rows: int):
        self.policy = policy
        self.cache = DynamicCache(config=policy.model.config)
        # [B, L], 1 = a real token.
        self.mask = torch.zeros(rows, 0, dtype=torch.long, device=policy.device)
        # [B], real tokens so far.
        self.length = torch.zeros(rows, dtype=torch.long, device=policy.device)

    @torch.no_grad()
    def feed(self, chunks: list[list[int]]) -> torch.Tensor:
        """Append one chunk of ids per row (may be empty); return the hidden state after each row's
        last new token, [B, H]."""
        device, sizes = self.policy.device, torch.tensor([len(c) for c in chunks])
        width, most = int(sizes.max()), max(1, PREFILL[self.policy.device.type] // len(chunks))
        if width > most:
            # In pieces; a row's answer is that of its last piece.
            for start in range(0, width, most):
                hidden = self.feed([c[start:start + most] for c in chunks])
                new = (sizes > start).to(device)[:, None]
                last = hidden if start == 0 else torch.where(new, hidden, last)
            return last
        # [B, C]
        ids = torch.tensor([c + [0] * (width - len(c)) for c in chunks], device=device)
        sizes = sizes.to(device)
        column = torch.arange(width, device=device)
        self.mask = torch.cat([self.mask, (column < sizes[:, None]).long()], dim=1)
        # [B, C, H]
        hidden = self.policy.backbone(input_ids=ids, attention_mask=self.mask,
                                      position_ids=self.length[:, None] + column,
                                      cache=self.cache, use_cache=True).last_hidden_state
        self.length = self.length + sizes
        return hidden[torch.arange(len(chunks), device=device), (sizes - 1).clamp(min=0)]

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows and the holes: real entries move to the left, in order."""
        rows = torch.tensor(rows, device=self.policy.device)
        self.mask, self.length = self.mask[rows], self.length[rows]
        # [b, l], real columns first.
        order = torch.argsort(1 - self.mask, dim=1, stable=True)[:, : int(self.length.max())]
        self.mask = self.mask.gather(1, order)
        for layer in self.cache.layers:
            index = order[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys = layer.keys[rows].gather(2, index)
            layer.values = layer.values[rows].gather(2, index)


def sample(logits: torch.Tensor, uniforms: torch.Tensor,
           temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling: logits [B, V], one uniform number per row [B] -> ids [B], log-probs of
    them [B] (at this temperature).

    No top-k and no top-p: a sampler that cuts the tail samples from another distribution than the
    one scored in training. temperature 0 is greedy (log-probs are then those of temperature 1).
    """
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = logp.argmax(-1)
    else:
        cdf = logp.double().exp().cumsum(-1)
        mark = uniforms[:, None].double() * cdf[:, -1:]
        ids = torch.searchsorted(cdf, mark, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return ids, logp.gather(1, ids[:, None])[:, 0]


@torch.no_grad()
def generate_turn(kv: KVBatch, hidden: torch.Tensor, rngs: list[np.random.Generator | None],
                  temperature: float, max_new: int) -> tuple[list[list[int]], list[list[float]]]:
    """Sample one assistant turn per row from hidden [B, H]; a row ends with the end token or after
    max_new tokens.

    Returns the sampled ids and their log-probs. A row's last id has NOT been fed to the cache: it
    starts the row's next chunk.
    """
    policy, head = kv.policy, kv.policy.head
    ids, logps = [[] for _ in rngs], [[] for _ in rngs]
    live = list(range(len(rngs)))
    for step in range(max_new):
        uniforms = torch.tensor([rngs[b].random() if temperature else 0.0 for b in live],
                                dtype=torch.float64, device=policy.device)
        new, logp = sample(hidden[live] @ head.T.to(hidden.dtype), uniforms, temperature)
        for b, i, lp in zip(live, new.tolist(), logp.tolist()):
            ids[b].append(i)
            logps[b].append(lp)
        live = [b for b in live if ids[b][-1] != policy.end_id]
        if not live or step == max_new - 1:
            break
        alive = set(live)
        hidden = kv.feed([[ids[b][-1]] if b in alive else [] for b in range(len(rngs))])
    return ids, logps


def complete(policy: Policy, prompts: list[list[int]], max_new: int,
             batch: int) -> tuple[list[str], int]:
    """Greedy completions of independent prompts (ids): texts in order, and how many were cut at
    max_new."""
    texts, cut = [""] * len(prompts), 0
    # Alike lengths together: less padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        rows = order[start:start + batch]
        kv = KVBatch(policy, len(rows))
        hidden = kv.feed([prompts[i] for i in rows])
        ids, _ = generate_turn(kv, hidden, [None] * len(rows), 0, max_new)
        for i, out in zip(rows, ids):
            texts[i] = policy.decode(out)
            cut += out[-1] != policy.end_id
    return texts, cut


# --------------------------------------------------------------------------------------------------
# 3. Scoring: log-probs of the sampled tokens
# --------------------------------------------------------------------------------------------------
# Token ids and, for each, whether it is a response token.
Sequence = tuple[list[int], list[bool]]
Tensors = tuple[torch.Tensor, ...]


def micro_batches(sequences: list[Sequence], budget: int) -> list[list[int]]:
    """Indices grouped by length so that rows x longest row <= budget (a longer single sequence
    makes a batch of its own)."""
    batches, order = [], sorted(range(len(sequences)), key=lambda i: -len(sequences[i][0]))
    for i in order:
        if batches and (len(batches[-1]) + 1) * len(sequences[batches[-1][0]][0]) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def response_hidden(policy: Policy, sequences: list[Sequence]) -> Tensors:
    """Hidden states that predict the response tokens of B sequences.

    Returns hidden [N, H], labels [N] (the tokens they predict), row [N] and rank [N]: token n is
    response token rank[n] of sequence row[n]. Only these N positions ever meet the vocabulary; the
    rest of the [B, T] positions is never projected.
    """
    width = max(len(ids) for ids, _ in sequences)
    # [B, T]
    ids = torch.tensor([s + [0] * (width - len(s)) for s, _ in sequences], device=policy.device)
    with recomputing(policy):
        # [B, T, H]; padded on the right, where causal attention never looks.
        hidden = policy.backbone(input_ids=ids, use_cache=False).last_hidden_state
    places = [(b, t) for b, (_, m) in enumerate(sequences) for t, on in enumerate(m) if on]
    ranks = [k for _, m in sequences for k in range(sum(m))]
    row, column = torch.tensor(places, dtype=torch.long, device=policy.device).reshape(-1, 2).T
    rank = torch.tensor(ranks, dtype=torch.long, device=policy.device)
    return hidden[row, column - 1], ids[row, column], row, rank


def token_logp(policy: Policy, sequences: list[Sequence], temperature: float) -> Tensors:
    """One forward pass: log-probs [B, R], mask [B, R] and entropy [B, R], R = most response tokens
    of a sequence.

    Entropy is a metric: zeros while gradients are on, since no training pass needs it. The
    temperature is the one the tokens were sampled at: otherwise the ratio to the sampler is not 1
    before the first step.
    """
    hidden, labels, row, rank = response_hidden(policy, sequences)
    scoring = not torch.is_grad_enabled()
    flat = losses.chunked_logprob(hidden, policy.head, labels, temperature=temperature,
                                  return_entropy=scoring)
    flat, entropy = flat if scoring else (flat, torch.zeros_like(flat))
    shape = (len(sequences), int(rank.max()) + 1 if len(rank) else 0)
    logp = flat.new_zeros(shape).index_put((row, rank), flat)
    mask = torch.zeros(shape, dtype=torch.bool, device=flat.device)
    mask = mask.index_put((row, rank), torch.ones_like(row, dtype=torch.bool))
    return logp, mask, flat.new_zeros(shape).index_put((row, rank), entropy.to(flat.dtype))


@torch.no_grad()
def score(policy: Policy, sequences: list[Sequence], cfg) -> tuple[list[torch.Tensor], ...]:
    """Log-probs and entropies of each sequence's response tokens, as lists of [n_i] tensors in the
    order given. No gradient, eval mode."""
    policy.model.eval()
    logps, entropies = [None] * len(sequences), [None] * len(sequences)
    for batch in micro_batches(sequences, cfg.micro_tokens):
        logp, mask, entropy = token_logp(policy, [sequences[i] for i in batch], cfg.temperature)
        for i, lp, m, e in zip(batch, logp, mask, entropy):
            logps[i], entropies[i] = lp[m], e[m]
    return logps, entropies


def pad(rows: list[torch.Tensor], width: int) -> torch.Tensor:
    """Stack [n_i] tensors to [B, width], zeros on the right (where the mask is False)."""
    return torch.stack([torch.nn.functional.pad(r, (0, width - len(r))) for r in rows])


# --------------------------------------------------------------------------------------------------
# 4. The reference policy
# --------------------------------------------------------------------------------------------------
def is_lora(policy: Policy) -> bool:
    """Whether adapters are trained rather than the weights themselves."""
    return hasattr(policy.model, "peft_config")


def freeze_reference(policy: Policy, adapter: Path | None = None) -> None:
    """The current weights (LoRA: or a saved adapter) become the reference policy of the KL term
    (the paper: the checkpoint RL starts from).

    LoRA keeps ONE set of base weights: the reference is a second, frozen adapter; or, if that
    adapter is still zero, the base with adapters off.
    """
    if not is_lora(policy):
        policy.reference = copy.deepcopy(policy.model).requires_grad_(False).eval()
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    model = policy.model
    state = (load_file(adapter / "adapter_model.safetensors") if adapter
             else get_peft_model_state_dict(model, adapter_name="default"))
    if "reference" in model.peft_config:
        model.delete_adapter("reference")
    if any(x.any() for name, x in state.items() if ".lora_B." in name):
        # Its random start is overwritten.
        with torch.random.fork_rng():
            model.add_adapter("reference", copy.deepcopy(model.peft_config["default"]))
        set_peft_model_state_dict(model, {name: x.clone() for name, x in state.items()},
                                  adapter_name="reference")
        model.set_requires_grad("reference", False)
    model.set_adapter("default")


@contextlib.contextmanager
def reference_of(policy: Policy):
    """`with reference_of(policy) as reference:` the same policy with the reference weights (a
    frozen copy, a frozen adapter, or no adapter)."""
    if policy.reference is not None:
        yield dataclasses.replace(policy, model=policy.reference)
    elif "reference" not in policy.model.peft_config:
        with policy.model.disable_adapter():
            yield policy
    else:
        policy.model.set_adapter("reference", inference_mode=True)
        try:
            yield policy
        finally:
            policy.model.set_adapter("default")


@contextlib.contextmanager
def recomputing(policy: Policy):
    """Inside, a forward pass with gradient keeps only each layer's input (activation
    checkpointing); never in generation or evaluation.

    Transformers asks a layer's `training` flag. Only that flag is set, so the model itself stays in
    eval mode: no dropout, ratio 1.
    """
    on = torch.is_grad_enabled()
    for layer in policy.recompute:
        layer.training = on
    try:
        yield
    finally:
        for layer in policy.recompute:
            layer.training = False
