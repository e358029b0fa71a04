"""policy.py: the model. One causal language model in four roles: actor, analyzer, teacher and
student.

    1  Policy       a model, its tokenizer, and the chat template taken apart into token ids
    2  generation   a KV cache for a batch of growing sequences; a sampler with counted randomness
    3  scoring      log-probs of the tokens that were sampled, with and without gradient
    4  reference    the frozen policy of the KL term, without a second copy of a large model
    5  loading      a base in 32, 16 or 4 bits, LoRA adapters; what does not fit is refused

Left out: a separate inference engine (generation is ordinary forward passes, so what is sampled is
what is trained), several cards, sliding-window attention, heads that change their logits. Functions
that take `cfg` want seed_mini's options: tune, seed, temperature, micro_tokens, max_context,
max_analysis.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

import losses

LORA_RANK = 16


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


# --------------------------------------------------------------------------------------------------
# 5. Loading
# --------------------------------------------------------------------------------------------------
def model_config(path: str):
    """A model's config.json (folder or hub name) without its weights. ValueError in one
    sentence."""
    try:
        return AutoConfig.from_pretrained(path)
    # A folder with something wrong makes transformers raise anything.
    except Exception as error:
        reason = str(error).splitlines()[0]
        if "couldn't connect" in reason:
            reason = ("the Hugging Face hub cannot be reached and it is not in the cache; download "
                      f"it where there is a network ('hf download {path}'), give --model a folder, "
                      "or use --model tiny.")
        raise ValueError(f"cannot load the model {path!r}: {reason}") from error


def adapter_config(folder: Path) -> dict | None:
    """adapter_config.json of a LoRA adapter's folder, None if this is none. ValueError if it is
    damaged or names no base."""
    if not (folder / "adapter_config.json").exists():
        return None
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        if isinstance(config["base_model_name_or_path"], str):
            return config
        raise KeyError("base_model_name_or_path")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder)!r} is no LoRA adapter folder: its adapter_config.json is "
                         "broken, or names no base.") from error


def base_of(path: str) -> str:
    """The base model of a path: that of an adapter folder, else the path itself."""
    config = adapter_config(Path(path))
    return config["base_model_name_or_path"] if config else path


def load_policy(cfg, path: str, *, trainable: bool = True) -> Policy:
    """Load a base (any causal LM with a chat template), or an adapter folder with its base, ready
    for cfg.tune: "full", "lora" (adapters on a 16-bit base) or "qlora" (on a 4-bit one).

    ValueError in one sentence for whatever cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapter, base, lora = Path(path), base_of(path), cfg.tune != "full"
    adapter = adapter if base != path else None
    if adapter and not lora:
        raise ValueError(f"{path!r} is a LoRA adapter, so it cannot go with --tune full.")
    dtype, config = compute_dtype(device, lora), model_config(base)
    limit = getattr(config, "max_position_embeddings", None)
    # The analyzer reads an episode and writes behind it.
    if limit and cfg.max_context + cfg.max_analysis > limit:
        raise ValueError(f"--max_context {cfg.max_context} plus --max_analysis {cfg.max_analysis} "
                         f"exceeds the {limit} positions of {base!r}.")
    try:
        with_tokenizer = adapter and (adapter / "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(adapter if with_tokenizer else base)
        model = AutoModelForCausalLM.from_pretrained(base, **_weights(cfg, device, dtype))
        if not hasattr(model, "model") or model.get_output_embeddings() is None:
            raise ValueError("it is no causal language model with a backbone and a head")
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"cannot load the model {path!r}: {why}") from error
    _refuse_other_models(model, path)
    if lora and trainable:
        # Recompute activations in the backward pass; takes effect inside recomputing() only.
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": False})
        # The embedding is frozen: without this the first layer's input has no gradient.
        model.enable_input_require_grads()
    model = _add_lora(cfg, model, adapter, trainable) if lora else model.to(device)
    if not trainable:
        model.requires_grad_(False)
    # Added tokens that are not marked special; one character ("\n") is no control token.
    words = [t.content for t in tokenizer.added_tokens_decoder.values()
             if not t.special and len(t.content) > 1]
    policy = Policy(model.eval(), tokenizer, device, *chat_pieces(tokenizer), control_words=words)
    if lora and trainable:
        policy.recompute = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if dtype == torch.float16:
        file = adapter / "seed_mini.json" if adapter else None
        saved = json.loads(file.read_text()) if file and file.exists() else {}
        scale, policy.clean_steps = saved.get("loss_scale", 1.0), saved.get("clean_steps", 0)
        # 1: it was saved where no scale is needed.
        policy.loss_scale = scale if scale > 1 else 2.0 ** 14
    return policy


def compute_dtype(device: torch.device, lora: bool) -> torch.dtype:
    """fp32 on a CPU and for full fine-tuning (AdamW loses its small steps in 16 bit); under
    adapters bf16, or fp16 where a card has no bf16."""
    if device.type == "cpu" or not lora:
        return torch.float32
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if bf16 else torch.float16


def _weights(cfg, device: torch.device, dtype: torch.dtype) -> dict:
    """from_pretrained's arguments: in which numbers the base is kept."""
    if cfg.tune == "full":
        return dict(dtype=dtype)
    if cfg.tune == "lora":
        return dict(dtype=dtype, device_map={"": device})
    from transformers import BitsAndBytesConfig
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                             bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    return dict(dtype=dtype, device_map={"": device}, quantization_config=nf4)


def _refuse_other_models(model, path: str) -> None:
    """ValueError for models whose logits or attention are not what the kernel and the cache
    compute."""
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{path!r} changes its logits by {name}; seed_mini scores hidden @ "
                             "head.T / temperature only.")
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers):
        raise ValueError(f"{path!r} has layers without full attention (a sliding window, say); the "
                         "cache of seed_mini's generation knows full attention only.")


def base_check(model) -> list[float]:
    """A few numbers of the base's embedding, saved with an adapter: names and folders of a base
    change, its weights do not."""
    return model.get_input_embeddings().weight[:4, :4].float().flatten().tolist()


def _add_lora(cfg, model, adapter: Path | None, trainable: bool):
    """LoRA on every linear layer but the head. A tied head is the embedding: an adapter there would
    change both, so it is left alone.

    peft's prepare_model_for_kbit_training is not called: it would turn embedding and head to fp32
    (twice 0.6 GB for Qwen3-1.7B).
    """
    from peft import LoraConfig, get_peft_model
    # bitsandbytes: on CPUs with AVX512-BF16 the first forward without gradient would repack the
    # weights, round their scales to bf16, and switch to a product that has no gradient.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if adapter is not None:
        return _put_adapter(model, adapter, trainable)
    # peft draws the A matrices from torch's global generator.
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seed)
        return get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK,
                                                target_modules="all-linear", task_type="CAUSAL_LM"))


def _put_adapter(model, folder: Path, trainable: bool):
    """Load an adapter; ValueError, with the reason, for one of another base, or one that would not
    do here what it was trained to do."""
    from peft import PeftConfig, PeftModel
    from peft.tuners.tuners_utils import check_target_module_exists
    from safetensors import safe_open
    config, check = PeftConfig.from_pretrained(folder), folder / "seed_mini.json"
    if config.peft_type != "LORA":
        raise ValueError(f"the adapter {str(folder)!r} is of type {config.peft_type}; seed_mini "
                         "knows LoRA only.")
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    for name in [n for n, m in modules.items() if m is head or (tied and m is embedding)]:
        saved = any(name.endswith(part) for part in config.modules_to_save or ())
        if config.trainable_token_indices or saved or check_target_module_exists(config, name):
            why = ("head and embedding are one tied matrix in this model, and an adapter on one "
                   "silently changes or misses the other" if tied else
                   "log-probs are computed from the frozen head, so it would have no effect")
            raise ValueError(f"the adapter {str(folder)!r} changes {name}: {why}.")
    with safe_open(folder / "adapter_model.safetensors", "pt") as f:
        names = list(f.keys())
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    numbers = json.loads(check.read_text())["base_check"] if check.exists() else base_check(model)
    # A RuntimeError: other sizes.
    with contextlib.suppress(RuntimeError):
        same = np.allclose(numbers, base_check(model), rtol=0.01, atol=1e-5)
        if same and layers <= modules.keys():
            loaded = PeftModel.from_pretrained(model, folder, is_trainable=trainable)
            # Where the base is now, for --resume.
            loaded.peft_config["default"].base_model_name_or_path = model.name_or_path
            return loaded
    raise ValueError(f"the adapter {str(folder)!r} was made for {config.base_model_name_or_path!r} "
                     f"and does not fit {model.name_or_path!r}.")
