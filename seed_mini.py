"""seed_mini.py: SEED (arXiv 2607.14777) on one GPU, or on a laptop's CPU, in one file you read from top to bottom.

    python seed_mini.py --env alfworld                    # the whole method, tiny shipped base, about ten minutes on two cores
    python seed_mini.py --env alfworld --method grpo      # the baseline from the same start
    python seed_mini.py --eval --model runs/seed/checkpoints/update-000050/policy

What happens, in the order of this file:

    1  options        one dataclass; its comments are the --help
    2  policy         one causal language model: actor, analyzer, teacher and student (and a frozen reference)
    3  generation     a KV cache for a batch of growing sequences, and a sampler whose randomness is counted, not stateful
    4  rollout        episodes as ONE token sequence each: what was sampled is what is trained, nothing is tokenised twice
    5  scoring        log-probs of the sampled tokens: student, snapshot, reference, teacher
    6  Stage 1        hindsight-skill SFT: learn to write a skill from a finished episode
    7  Stage 2        each update: act -> analyze -> re-score with the skill -> GRPO + KL + gated distillation
    8  evaluation     every game of a split once, Wilson intervals, by task type
    9  runs           logs, checkpoints, exact resume, curves, report
    10 main           arguments to exit code

Left out on purpose: multi-GPU, a separate inference engine, value networks, learning-rate schedules in Stage 2 (the paper's is constant),
vision, and the replay of the paper's other environments. The equations live in losses.py, prompts and parsers in skills.py, the world in envs.py.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser

import envs
import losses
import skills

HERE = Path(__file__).resolve().parent
TINY = HERE / "notebooks" / "tiny_base"  # made by notebooks/00_tiny_base.ipynb


# ------------------------------------------------------------------------------------------------------------------
# 1. Options
# ------------------------------------------------------------------------------------------------------------------
def option(default, text, **kwargs):
    """A dataclass field whose text is the --help line."""
    text = text.replace("%", "%%")  # argparse formats it
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text, **kwargs})
    return field(default=default, metadata={"help": text, **kwargs})


@dataclass
class Config:
    """Every option of a run. A default of None means: take it from the profile (see PROFILES) that fits the model."""
    env: str = option("alfworld", "The environment. Only 'alfworld' so far.")
    model: str = option("tiny", "'tiny' (the shipped 1M-parameter base), a Hugging Face name such as Qwen/Qwen3-1.7B, or a checkpoint folder.")
    method: str = option("seed", "'seed' (the paper's method) or 'grpo' (the same run without skills: the baseline).")
    name: str = option("", "Name of the run: everything is written to OUT/NAME. Default: the method's name.")
    out: str = option("runs", "Folder that holds the runs.")
    seed: int = option(0, "Seed of everything random. One seed, one run: bit for bit on a CPU with the same number of threads.")
    profile: str = option("auto", "'tiny' or 'paper': which column of defaults to use. 'auto': 'tiny' for models under 50M parameters.")
    # -- what to do
    eval: bool = option(False, "Only evaluate the model (every game of each split in --eval-splits once) and stop.")
    resume: bool = option(False, "Continue OUT/NAME from its newest checkpoint; with the same options the result is the same as without the break.")
    overwrite: bool = option(False, "Delete OUT/NAME first if it exists. Without it, an existing run is never touched.")
    sft_from: str = option("", "Reuse the Stage-1 result of this run folder instead of running Stage 1 again (how arms share their start).")
    # -- the paper's ablations, one flag each
    no_sft: bool = option(False, "Ablation: skip Stage 1; the base itself must write the skills.")
    no_opd: bool = option(False, "Ablation: analyze and log as SEED does, but give the distillation term weight 0.")
    static_skills: bool = option(False, "Ablation: teach with the Stage-1 analyzer's offline skills instead of the policy's own, current ones.")
    shuffle_skills: bool = option(False, "Control the paper lacks: give every episode the skill of another episode.")
    # -- games
    games: str = option("auto", "'official' ALFWorld games, 'generated' houses, or 'auto': official ones if they are on this machine.")
    games_seed: int = option(0, "Seed of the generated houses (tune on one, report on another).")
    train_games: int | None = option(None, "Use only the first N training games (sorted by id). Default: all.")
    eval_games: int | None = option(None, "Evaluate on the first N games of each split only. Default: all, each once.")
    max_steps: int | None = option(None, "Environment steps after which an episode is over (paper: 30).")
    think: bool | None = option(None, "Ask for <think>..</think><action>..</action> answers (paper) or for the bare command.")
    show_admissible: bool | None = option(None, "List the admissible commands in every observation (paper: yes). Costs tokens; the tiny base was not made for it.")
    workers: int = option(2, "Processes that run the environments.")
    step_timeout: float = option(20.0, "Seconds after which a step counts as hung and its episode as truncated.")
    # -- lengths, in tokens
    max_response: int | None = option(None, "Most tokens the policy may sample in one turn (paper: 512).")
    max_context: int | None = option(None, "Most tokens of a whole episode; one that reaches it ends as truncated and is counted, never cut.")
    max_analysis: int | None = option(None, "Most tokens of one analysis (summary and skill, as JSON).")
    # -- Stage 1
    analyzer: str = option("rule", "Who annotates in Stage 1: 'rule' (offline, built in) or 'endpoint' (an OpenAI-compatible server, e.g. GLM-5.2).")
    analyzer_url: str = option("", "Base URL of the endpoint. Default: the environment variable SEED_ANALYZER_URL.")
    analyzer_model: str = option("", "Model name at the endpoint. Default: SEED_ANALYZER_MODEL. The key is read from SEED_ANALYZER_KEY only.")
    sft_tasks: int | None = option(None, "Tasks rolled out for Stage 1 (paper: 180).")
    sft_rollouts: int | None = option(None, "Rollouts per Stage-1 task, K0 (paper: 8).")
    sft_epochs: int | None = option(None, "Epochs over the Stage-1 rows (paper: 3).")
    sft_lr: float | None = option(None, "Peak learning rate of Stage 1, cosine with 10% warm-up (paper: 5e-6).")
    sft_batch: int | None = option(None, "Rows per Stage-1 step (paper: 8).")
    sft_anchor: float | None = option(None, "Weight of KL(base || policy) on the base's own acting transcripts during Stage 1 (paper: 0, no anchor).")
    # -- Stage 2
    updates: int | None = option(None, "Updates of Stage 2 (paper: 150).")
    tasks_per_update: int | None = option(None, "Different games per update (paper: 16).")
    group_size: int | None = option(None, "Rollouts of each game, the GRPO group G (paper: 8).")
    minibatches: int | None = option(None, "Optimizer steps per update; the episodes are split at random.")
    lr: float | None = option(None, "Constant learning rate of AdamW in Stage 2 (paper: 1e-6, full fine-tuning).")
    weight_decay: float = option(0.01, "Weight decay of AdamW (paper: 0.01).")
    clip_range: float = option(0.2, "PPO clip range epsilon (paper: 0.2).")
    dual_clip: float | None = option(None, "Dual-clip constant c for negative advantages (released code: 3.0; the paper does not have it). Default: off.")
    kl_coef: float | None = option(None, "Coefficient of the k3 KL to the reference policy (paper: 0.01).")
    lambda_opd: float | None = option(None, "Weight of the distillation term (paper: 0.01, with lr 1e-6 on billions of parameters).")
    beta_opd: float = option(5.0, "Sharpness of the confidence gate sigmoid(beta * Delta) (paper: 5).")
    max_grad_norm: float = option(1.0, "Gradient norm above which gradients are scaled down (paper: 1.0).")
    invalid_penalty: float | None = option(None, "Reward lost by each invalid action (paper: 0.1; a win gives 10).")
    temperature: float = option(1.0, "Sampling temperature of training rollouts; scoring uses the same (paper: 1.0).")
    # -- evaluation and bookkeeping
    eval_temperature: float = option(0.4, "Sampling temperature of evaluation (paper: 0.4).")
    eval_every: int | None = option(None, "Evaluate every so many updates (0: only before, between and after).")
    eval_splits: list[str] = option(["valid_unseen"], "Splits to evaluate: valid_seen and/or valid_unseen.")
    save_every: int | None = option(None, "Write a checkpoint every so many updates (the last update always).")
    # -- the machine
    tune: str | None = option(None, "'full' fine-tuning or 'lora' adapters.")
    no_4bit: bool = option(False, "Load the base in 16 bit instead of 4-bit NF4 (lora only): faster generation, about 2 GB more for 1.7B.")
    lora_rank: int = option(16, "Rank of the LoRA adapters.")
    device: str = option("auto", "'cpu', 'cuda', or 'auto'.")
    threads: int = option(2, "CPU threads of torch. Results are bit-identical only for the same number.")
    rollout_batch: int | None = option(None, "Episodes generated at once (they share one KV cache).")
    micro_tokens: int | None = option(None, "Most padded tokens in one forward pass of scoring or training.")
    debug: bool = option(False, "Show the traceback of an error instead of one sentence.")


# Two columns of defaults. 'paper' repeats the paper where one GPU allows it (LoRA needs a higher learning rate than full fine-tuning);
# 'tiny' was tuned on other seeds and houses than the reported ones (README, "Differences").
PROFILES = {
    "tiny": dict(max_steps=20, think=False, show_admissible=False, max_response=12, max_context=800, max_analysis=96,
                 sft_tasks=90, sft_rollouts=8, sft_epochs=3, sft_lr=8e-4, sft_batch=16, sft_anchor=2.0,
                 updates=40, tasks_per_update=8, group_size=6, minibatches=2, lr=2e-4, kl_coef=0.02, lambda_opd=0.3,
                 invalid_penalty=0.0, eval_every=10, save_every=5, tune="full", rollout_batch=64, micro_tokens=8192),
    "paper": dict(max_steps=30, think=True, show_admissible=True, max_response=512, max_context=8192, max_analysis=512,
                  sft_tasks=180, sft_rollouts=8, sft_epochs=3, sft_lr=1e-4, sft_batch=8, sft_anchor=0.0,
                  updates=150, tasks_per_update=16, group_size=8, minibatches=1, lr=1e-5, kl_coef=0.01, lambda_opd=0.01,
                  invalid_penalty=0.1, eval_every=10, save_every=5, tune="lora", rollout_batch=32, micro_tokens=8192),
}


def check_config(cfg: Config) -> None:
    """Refuse bad values with one sentence each, before anything is loaded. Raises ValueError."""
    def need(ok, text):
        if not ok:
            raise ValueError(text)

    need(cfg.env == "alfworld", f"--env {cfg.env!r} is not known; the environment available is 'alfworld'.")
    for name, allowed in dict(method=("seed", "grpo"), games=("auto", "official", "generated"), analyzer=("rule", "endpoint"),
                              profile=("auto", "tiny", "paper"), device=("auto", "cpu", "cuda"), tune=(None, "full", "lora")).items():
        value = getattr(cfg, name)
        need(value in allowed, f"--{name} {value!r} is not one of {', '.join(str(a) for a in allowed if a)}.")
    for name in ("workers", "threads", "lora_rank", "train_games", "eval_games", "max_steps", "max_response", "max_context", "max_analysis", "sft_tasks",
                 "sft_rollouts", "sft_epochs", "sft_batch", "tasks_per_update", "minibatches", "rollout_batch", "micro_tokens", "save_every"):
        value = getattr(cfg, name)
        need(value is None or value >= 1, f"--{name} must be at least 1, not {value}.")
    for name in ("updates", "eval_every", "seed", "games_seed", "sft_anchor", "kl_coef", "lambda_opd", "beta_opd", "weight_decay", "invalid_penalty"):
        value = getattr(cfg, name)
        need(value is None or (value >= 0 and math.isfinite(value)), f"--{name} must be a number that is not negative, not {value}.")
    for name in ("sft_lr", "lr", "max_grad_norm", "step_timeout", "temperature", "eval_temperature"):
        value = getattr(cfg, name)
        need(value is None or (value > 0 and math.isfinite(value)), f"--{name} must be a positive number, not {value}.")
    need(cfg.group_size is None or cfg.group_size >= 2, "--group_size must be at least 2: a group of one has no other rollout to be compared with.")
    need(0 < cfg.clip_range < 1, f"--clip_range must lie between 0 and 1, not {cfg.clip_range}.")
    need(cfg.dual_clip is None or cfg.dual_clip > 1, f"--dual_clip must be above 1, not {cfg.dual_clip}.")
    need(None in (cfg.max_context, cfg.max_response) or cfg.max_response < cfg.max_context,
         f"--max_response {cfg.max_response} leaves no room for a prompt in --max_context {cfg.max_context}.")
    need(cfg.device != "cuda" or torch.cuda.is_available(), "--device cuda: this torch sees no CUDA card; use --device cpu.")
    need(not (cfg.method == "grpo" and (cfg.no_opd or cfg.static_skills or cfg.shuffle_skills)),
         "--no_opd, --static_skills and --shuffle_skills are ablations of --method seed; with --method grpo there are no skills to change.")
    need(not (cfg.static_skills and cfg.shuffle_skills), "--static_skills and --shuffle_skills exclude each other.")
    need(not (cfg.no_sft and cfg.sft_from), "--no_sft and --sft_from exclude each other.")
    need(not (cfg.static_skills and cfg.no_sft), "--static_skills takes its skills from Stage 1, so it cannot go with --no_sft.")
    need(not (cfg.resume and cfg.overwrite), "--resume and --overwrite exclude each other.")
    bad = [s for s in cfg.eval_splits if s not in envs.SPLITS]
    need(not bad, f"--eval_splits {' '.join(bad)} is not known; choose from {', '.join(envs.SPLITS)}.")
    need("/" not in cfg.name and cfg.name not in (".", ".."), f"--name {cfg.name!r} must be a plain folder name.")


def counted_rng(seed: int, *key: int | str) -> np.random.Generator:
    """A generator that depends only on (seed, key): randomness is *addressed*, not carried along.

    That is why a checkpoint holds no random states: whoever knows the update and the episode knows its random numbers,
    whatever was run, skipped or resumed before.
    """
    words = [int.from_bytes(hashlib.sha256(str(k).encode()).digest()[:4], "little") for k in key]
    return np.random.default_rng([seed, *words])


# ------------------------------------------------------------------------------------------------------------------
# 2. The policy: one causal language model in four roles
# ------------------------------------------------------------------------------------------------------------------
@dataclass
class Policy:
    """A model, its tokenizer, and the chat template taken apart into token ids.

    The first user turn is  first[0] + text + first[1];  a later one is  [end_id] + later[0] + text + later[1].
    `end_id` is the token that closes an assistant turn: the policy samples it itself (and is trained on it).
    """
    model: torch.nn.Module
    tokenizer: object
    device: torch.device
    end_id: int
    first: tuple[list[int], list[int]]
    later: tuple[list[int], list[int]]
    reference: torch.nn.Module | None = None  # full fine-tuning: a frozen copy; LoRA: None, an adapter named "reference"
    control_words: list[str] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        """Token ids of text that is DATA: no control token can come out, whatever the text spells.

        `split_special_tokens` handles the tokens marked special. Tokenizers also have added tokens that are not (Qwen3's <think>,
        <tool_call>); a text that spells one is cut inside the word, so that it becomes ordinary pieces.
        """
        for word in self.control_words:
            if word in text:
                return sum((self.encode(part) for part in _cut_inside(text, word)), [])
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of sampled ids, without control tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def user_turn(self, text_ids: list[int]) -> list[int]:
        """A whole first turn around already encoded text."""
        return self.first[0] + text_ids + self.first[1]

    @property
    def backbone(self) -> torch.nn.Module:
        """The transformer without its head: hidden states, so that only the positions that matter meet the vocabulary."""
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
    """Take the chat template apart by rendering it around placeholders: (end_id, first, later) as in Policy.

    We append these pieces and never render a conversation again. So the trained ids are the sampled ids even where a template is
    not append-only (Qwen3's drops the thinking of earlier turns when it renders them anew; ours stays as it was sampled).
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; choose an instruct model, or give the tokenizer one.")

    def render(*contents):
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents)]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before, after = render("SLOTA").split("SLOTA")
    middle, last = render("SLOTA", "SLOTB", "SLOTC").split("SLOTB")[1].split("SLOTC")
    glue = ids(middle)
    if not glue or glue[0] not in tokenizer.all_special_ids and glue[0] not in tokenizer.added_tokens_decoder:
        raise ValueError(f"the chat template closes an assistant turn with {middle[:20]!r}, which is not a control token; this model cannot be used.")
    return glue[0], (ids(before), ids(after)), (glue[1:], ids(last))


def load_policy(cfg: Config, path: str, *, trainable: bool = True) -> Policy:
    """Load a base model (any causal LM with a chat template) ready for `cfg.tune`. Raises ValueError in one sentence."""
    device = torch.device("cuda" if cfg.device == "auto" and torch.cuda.is_available() else "cpu" if cfg.device == "auto" else cfg.device)
    path = str(TINY) if path == "tiny" else path
    adapter = Path(path) / "adapter_config.json"
    base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else path
    lora = cfg.tune == "lora" or adapter.exists()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        kwargs = dict(dtype=torch.float32 if device.type == "cpu" or not lora else torch.bfloat16)
        if lora and not cfg.no_4bit:
            from transformers import BitsAndBytesConfig
            kwargs["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=kwargs["dtype"])
            kwargs["device_map"] = {"": device}
        model = AutoModelForCausalLM.from_pretrained(base, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the model {path!r}: {str(error).splitlines()[0]}") from error
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):  # heads the chunked kernel does not model
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{path!r} changes its logits by {name}; seed_mini scores hidden @ head.T / temperature only.")
    if lora:
        model = _add_lora(cfg, model, adapter.parent if adapter.exists() else None, trainable)
    else:
        model.to(device)
    model.requires_grad_(False) if not trainable else None
    end_id, first, later = chat_pieces(tokenizer)
    words = [t.content for t in tokenizer.added_tokens_decoder.values() if not t.special and len(t.content) > 1]  # "\n" is no control token
    return Policy(model.eval(), tokenizer, device, end_id, first, later, control_words=words)


def _add_lora(cfg: Config, model, adapter: Path | None, trainable: bool):
    """LoRA on every linear layer but the head. A tied head is the embedding: an adapter there would change both, so it is left alone."""
    from peft import LoraConfig, PeftModel, get_peft_model
    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, is_trainable=trainable)
    with torch.random.fork_rng():  # peft draws the A matrices from torch's global generator
        torch.manual_seed(cfg.seed)
        return get_peft_model(model, LoraConfig(r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def freeze_reference(policy: Policy) -> None:
    """The current weights become the reference policy of the KL term (the paper: the checkpoint RL starts from)."""
    if hasattr(policy.model, "peft_config"):
        policy.reference = None
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        if "reference" not in policy.model.peft_config:
            policy.model.add_adapter("reference", copy.deepcopy(policy.model.peft_config["default"]))
        set_peft_model_state_dict(policy.model, get_peft_model_state_dict(policy.model, adapter_name="default"), adapter_name="reference")
        policy.model.set_adapter("default")
        for name, p in policy.model.named_parameters():
            if ".reference." in name:
                p.requires_grad_(False)
    else:
        policy.reference = copy.deepcopy(policy.model).requires_grad_(False).eval()


@contextlib.contextmanager
def reference_of(policy: Policy):
    """`with reference_of(policy) as reference:` the same policy with the reference weights (a frozen copy, or the frozen adapter)."""
    if policy.reference is not None:
        yield dataclasses.replace(policy, model=policy.reference)
        return
    policy.model.set_adapter("reference")
    try:
        yield policy
    finally:
        policy.model.set_adapter("default")


# ------------------------------------------------------------------------------------------------------------------
# 3. Generation: a KV cache for a batch of growing sequences
# ------------------------------------------------------------------------------------------------------------------
class KVBatch:
    """The KV cache of B sequences that grow by chunks of different lengths (a class, because it is state that must stay in step).

    feed() appends a chunk to every row, padded on the right to the longest: the padding leaves holes in the cache that the mask hides
    and keep() squeezes out. Positions count real tokens only, so a row never notices its neighbours.
    """

    def __init__(self, policy: Policy, rows: int):
        self.policy = policy
        self.cache = DynamicCache(config=policy.model.config)
        self.mask = torch.zeros(rows, 0, dtype=torch.long, device=policy.device)  # [B, L] 1 = a real token
        self.length = torch.zeros(rows, dtype=torch.long, device=policy.device)   # [B] real tokens so far

    @torch.no_grad()
    def feed(self, chunks: list[list[int]]) -> torch.Tensor:
        """Append one chunk of ids per row (may be empty); return the hidden state after each row's last new token, [B, H]."""
        device, sizes = self.policy.device, torch.tensor([len(c) for c in chunks])
        width = int(sizes.max())
        ids = torch.tensor([c + [0] * (width - len(c)) for c in chunks], device=device)  # [B, C]
        sizes = sizes.to(device)
        column = torch.arange(width, device=device)
        self.mask = torch.cat([self.mask, (column < sizes[:, None]).long()], dim=1)
        hidden = self.policy.backbone(input_ids=ids, attention_mask=self.mask, position_ids=self.length[:, None] + column,
                                      cache=self.cache, use_cache=True).last_hidden_state  # [B, C, H]
        self.length = self.length + sizes
        return hidden[torch.arange(len(chunks), device=device), (sizes - 1).clamp(min=0)]

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows and the holes: real entries move to the left, in order."""
        rows = torch.tensor(rows, device=self.policy.device)
        self.mask, self.length = self.mask[rows], self.length[rows]
        order = torch.argsort(1 - self.mask, dim=1, stable=True)[:, : int(self.length.max())]  # [b, l] real columns first
        self.mask = self.mask.gather(1, order)
        for layer in self.cache.layers:
            index = order[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys[rows].gather(2, index), layer.values[rows].gather(2, index)


def sample(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling: logits [B, V], one uniform number per row [B] -> ids [B], log-probs of them [B] (at this temperature).

    No top-k and no top-p: a sampler that cuts the tail samples from another distribution than the one scored in training.
    temperature 0 is greedy (log-probs are then those of temperature 1).
    """
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = logp.argmax(-1)
    else:
        cdf = logp.double().exp().cumsum(-1)
        ids = torch.searchsorted(cdf, uniforms[:, None].double() * cdf[:, -1:], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return ids, logp.gather(1, ids[:, None])[:, 0]


@torch.no_grad()
def generate_turn(kv: KVBatch, hidden: torch.Tensor, rngs: list[np.random.Generator | None], temperature: float,
                  max_new: int) -> tuple[list[list[int]], list[list[float]]]:
    """Sample one assistant turn per row from hidden [B, H]; a row ends with the end token or after max_new tokens.

    Returns the sampled ids and their log-probs. A row's last id has NOT been fed to the cache: it starts the row's next chunk.
    """
    policy, head = kv.policy, kv.policy.head
    ids, logps = [[] for _ in rngs], [[] for _ in rngs]
    live = list(range(len(rngs)))
    for step in range(max_new):
        uniforms = torch.tensor([rngs[b].random() if temperature else 0.0 for b in live], dtype=torch.float64, device=policy.device)
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


def complete(policy: Policy, prompts: list[list[int]], max_new: int, batch: int) -> tuple[list[str], int]:
    """Greedy completions of independent prompts (ids): texts in order, and how many were cut at max_new."""
    texts, cut = [""] * len(prompts), 0
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # alike lengths together: less padding
    for start in range(0, len(order), batch):
        rows = order[start:start + batch]
        kv = KVBatch(policy, len(rows))
        ids, _ = generate_turn(kv, kv.feed([prompts[i] for i in rows]), [None] * len(rows), 0, max_new)
        for i, out in zip(rows, ids):
            texts[i] = policy.decode(out)
            cut += out[-1] != policy.end_id
    return texts, cut


# ------------------------------------------------------------------------------------------------------------------
# 4. Rollout: an episode is ONE token sequence
# ------------------------------------------------------------------------------------------------------------------
@dataclass
class Rollout:
    """One finished episode as text and as tokens. ids, sampled and logp have one entry per token.

    sampled[t] is True where the policy sampled ids[t]: only those tokens are ever trained. Prompts, observations, template glue and an
    end token that had to be forced (the response hit its length limit) are False. logp[t] is the sampler's own log-prob (0.0 elsewhere).
    cut is the index right after the task line: where the teacher's copy of the sequence gets the skill block.
    """
    episode: envs.Episode
    ids: list[int]
    sampled: list[bool]
    logp: list[float]
    cut: int


def start_rollout(policy: Policy, cfg: Config, game: envs.Game, observation: str, info: dict, skill: str) -> Rollout:
    """The first user turn. With `skill` (evaluation of the teacher only) the skill block is already inside."""
    before, after = envs.prompt_parts(info["task"], observation, think=cfg.think, admissible=info["admissible"] if cfg.show_admissible else None)
    head = policy.first[0] + policy.encode(before)
    # The two halves are encoded apart, so the teacher's sequence has exactly the same ids on both sides of the inserted block.
    ids = head + (policy.encode(skills.skill_block(skill)) if skill else []) + policy.encode(after) + policy.first[1]
    episode = envs.Episode(game.id, game.split, info["task"], game.task_type, final_observation=observation)
    return Rollout(episode, ids, [False] * len(ids), [0.0] * len(ids), len(head))


def take_turn(policy: Policy, cfg: Config, roll: Rollout, new: list[int], logps: list[float], result: tuple, counters: Counter) -> list[int]:
    """Write one sampled turn and the environment's answer into the rollout. Returns the ids to feed next ([] when the episode is over)."""
    observation, reward, terminated, truncated, info = result
    episode, closed = roll.episode, new[-1] == policy.end_id
    response = policy.decode(new)
    valid = info["valid"] or "end" in info  # when the environment fails, info is the step before's
    episode.steps.append(envs.Step(episode.final_observation, response, envs.parse_action(response), valid))
    episode.final_observation = observation
    episode.reward += reward
    episode.won = episode.won or info["won"]
    forced = [] if closed else [policy.end_id]
    counters["responses cut at max_response"] += not closed
    counters["invalid actions"] += not valid
    _append(roll, new, True, logps)
    _append(roll, forced, False)
    if terminated or truncated:
        episode.end = "won" if episode.won else info.get("end", "step limit")
    else:
        text = envs.turn_text(observation, admissible=info["admissible"] if cfg.show_admissible else None)
        turn = policy.later[0] + policy.encode(text) + policy.later[1]
        if len(roll.ids) + len(turn) + cfg.max_response < cfg.max_context:  # not <=: an end token may have to be forced
            _append(roll, turn, False)
            return [new[-1]] + forced + turn
        episode.end = "context limit"
    counters[f"ended: {episode.end}"] += 1
    return []


def _append(roll: Rollout, ids: list[int], sampled: bool, logps: list[float] | None = None) -> None:
    roll.ids += ids
    roll.sampled += [sampled] * len(ids)
    roll.logp += logps or [0.0] * len(ids)


def rollout(policy: Policy, pool: envs.EnvPool, games: list[envs.Game], cfg: Config, rngs: list[np.random.Generator], temperature: float,
            skill_texts: list[str] | None = None) -> tuple[list[Rollout], Counter]:
    """Play each game once, `cfg.rollout_batch` at a time: rollouts in order, and the counters of everything that did not go smoothly.

    rngs holds one generator per episode, so an episode's random numbers do not depend on its neighbours in the batch.
    """
    rolls, counters, before = [], Counter(), Counter(pool.counters)
    for first in range(0, len(games), cfg.rollout_batch):
        batch = games[first:first + cfg.rollout_batch]
        part, chunks = [], {}
        for i, (game, (observation, info)) in enumerate(zip(batch, pool.reset(batch))):
            roll = start_rollout(policy, cfg, game, observation, info, skill_texts[first + i] if skill_texts else "")
            roll.episode.end = info.get("end", "" if len(roll.ids) + cfg.max_response < cfg.max_context else "context limit")
            if roll.episode.end:  # over before it began: no step, no sampled token, counted
                counters[f"ended: {roll.episode.end}"] += 1
            else:
                chunks[i] = roll.ids
            part.append(roll)
        alive = sorted(chunks)
        kv = KVBatch(policy, len(alive)) if alive else None
        while alive:
            hidden = kv.feed([chunks[i] for i in alive])
            new, logps = generate_turn(kv, hidden, [rngs[first + i] for i in alive], temperature, cfg.max_response)
            results = pool.step({i: envs.parse_action(policy.decode(ids)) for i, ids in zip(alive, new)})
            chunks = {i: take_turn(policy, cfg, part[i], ids, lp, results[i], counters) for i, ids, lp in zip(alive, new, logps)}
            rows = [row for row, i in enumerate(alive) if chunks[i]]
            alive = [alive[row] for row in rows]
            if alive:
                kv.keep(rows)
        rolls += part
    if rolls and all(r.episode.end == "context limit" and not r.episode.steps for r in rolls):
        raise RuntimeError(f"no game can begin: the first prompt alone needs more than --max_context {cfg.max_context} minus --max_response {cfg.max_response}.")
    return rolls, counters + (Counter(pool.counters) - before)  # + also drops the zeros


# ------------------------------------------------------------------------------------------------------------------
# 5. Scoring: log-probs of the sampled tokens
# ------------------------------------------------------------------------------------------------------------------
Sequence = tuple[list[int], list[bool]]  # token ids and, for each, whether it is a response token


def plain(roll: Rollout) -> Sequence:
    """The student's (and snapshot's, and reference's) view: ordinary history h."""
    return roll.ids, roll.sampled


def with_skill(policy: Policy, roll: Rollout, skill: str) -> Sequence:
    """The teacher's view H(h, s): the same ids with the skill block inserted right after the task line; the same tokens are scored."""
    block = policy.encode(skills.skill_block(skill))
    return roll.ids[:roll.cut] + block + roll.ids[roll.cut:], roll.sampled[:roll.cut] + [False] * len(block) + roll.sampled[roll.cut:]


def micro_batches(sequences: list[Sequence], budget: int) -> list[list[int]]:
    """Indices grouped by length so that rows x longest row <= budget (a longer single sequence makes a batch of its own)."""
    batches, order = [], sorted(range(len(sequences)), key=lambda i: -len(sequences[i][0]))
    for i in order:
        if batches and (len(batches[-1]) + 1) * len(sequences[batches[-1][0]][0]) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def response_hidden(policy: Policy, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states that predict the response tokens of B sequences.

    Returns hidden [N, H], labels [N] (the tokens they predict), row [N] and rank [N]: token n is response token rank[n] of sequence
    row[n]. Only these N positions ever meet the vocabulary; the rest of the [B, T] positions is never projected.
    """
    width = max(len(ids) for ids, _ in sequences)
    ids = torch.tensor([s + [0] * (width - len(s)) for s, _ in sequences], device=policy.device)  # [B, T]
    hidden = policy.backbone(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]; right padding: causal attention never sees it
    row, column = torch.tensor([(b, t) for b, (_, m) in enumerate(sequences) for t, on in enumerate(m) if on],
                               dtype=torch.long, device=policy.device).reshape(-1, 2).T
    rank = torch.tensor([k for _, m in sequences for k in range(sum(m))], dtype=torch.long, device=policy.device)
    return hidden[row, column - 1], ids[row, column], row, rank


def token_logp(policy: Policy, sequences: list[Sequence], temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One forward pass: log-probs [B, R], mask [B, R] and entropy [B, R] (no gradient), R = most response tokens of a sequence.

    The temperature is the one the tokens were sampled at: otherwise the ratio to the sampler is not 1 before the first step.
    """
    hidden, labels, row, rank = response_hidden(policy, sequences)
    flat, entropy = losses.chunked_logprob(hidden, policy.head, labels, temperature=temperature, return_entropy=True)
    shape = (len(sequences), int(rank.max()) + 1 if len(rank) else 0)
    logp = flat.new_zeros(shape).index_put((row, rank), flat)
    mask = torch.zeros(shape, dtype=torch.bool, device=flat.device).index_put((row, rank), torch.ones_like(row, dtype=torch.bool))
    return logp, mask, flat.new_zeros(shape).index_put((row, rank), entropy.to(flat.dtype))


@torch.no_grad()
def score(policy: Policy, sequences: list[Sequence], cfg: Config) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropies of each sequence's response tokens, as lists of [n_i] tensors in the order given. No gradient, eval mode."""
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


# ------------------------------------------------------------------------------------------------------------------
# 6. Stage 1: hindsight-skill SFT
# ------------------------------------------------------------------------------------------------------------------
def analyze_with(cfg: Config, episodes: list[envs.Episode]) -> tuple[list[skills.Reply], Counter]:
    """Skills by the Stage-1 analyzer (offline rules, or the endpoint that stands for the paper's GLM-5.2)."""
    if cfg.analyzer == "rule":
        replies, counters = skills.analyze(episodes, "rule")
    else:
        replies, counters = skills.analyze(episodes, "endpoint", model=cfg.analyzer_model or os.environ.get("SEED_ANALYZER_MODEL", ""),
                                           base_url=cfg.analyzer_url or os.environ.get("SEED_ANALYZER_URL", ""),
                                           api_key=os.environ.get("SEED_ANALYZER_KEY", ""))
    return replies, Counter(counters)


def sft_sequences(policy: Policy, cfg: Config, rows: list[dict], counters: Counter) -> list[Sequence]:
    """Stage-1 rows as tokens: one user turn (the analyzer's prompt), then the skill's JSON and the end token, which alone are trained."""
    sequences = []
    for row in rows:
        prompt, response = policy.user_turn(policy.encode(row["prompt"])), policy.encode(row["response"]) + [policy.end_id]
        if len(prompt) + len(response) > cfg.max_context + cfg.max_analysis or len(response) > cfg.max_analysis:
            counters["SFT rows too long"] += 1
            continue
        sequences.append((prompt + response, [False] * len(prompt) + [True] * len(response)))
    return sequences


def anchor_kl(policy: Policy, sequences: list[Sequence]) -> torch.Tensor:
    """Mean over sampled tokens of KL(reference || policy) over the whole vocabulary: the acting the base had, kept without any label.

    Not in the paper: a small model that learns the analysis format from nothing forgets how to act (README, "Differences").
    Plain logits [N, V], so this is for small vocabularies; the paper profile leaves it off.
    """
    hidden, *_ = response_hidden(policy, sequences)
    with torch.no_grad(), reference_of(policy) as reference:
        target, *_ = response_hidden(reference, sequences)
        target = torch.log_softmax((target @ reference.head.T).float(), -1)
    return torch.nn.functional.kl_div(torch.log_softmax((hidden @ policy.head.T).float(), -1), target, log_target=True, reduction="batchmean")


def make_optimizer(policy: Policy, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over everything that trains (all weights, or the adapters)."""
    return torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad], lr=lr, weight_decay=weight_decay)


def cosine(step: int, steps: int) -> float:
    """Learning-rate factor of Stage 1: 10% linear warm-up, then a half cosine to 0."""
    warm = max(1, steps // 10)
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def sft(policy: Policy, cfg: Config, sequences: list[Sequence], acting: list[Sequence], log) -> None:
    """Train the policy to write skills: token mean of -log p(response) per batch, plus the optional anchor on `acting` transcripts."""
    optimizer = make_optimizer(policy, cfg.sft_lr, cfg.weight_decay)
    params = optimizer.param_groups[0]["params"]
    steps = cfg.sft_epochs * math.ceil(len(sequences) / cfg.sft_batch)
    anchored = cfg.sft_anchor > 0 and len(acting) > 0
    for step in range(steps):
        epoch, at = divmod(step * cfg.sft_batch, math.ceil(len(sequences) / cfg.sft_batch) * cfg.sft_batch)
        order = counted_rng(cfg.seed, "sft order", epoch).permutation(len(sequences))
        batch = [sequences[i] for i in order[at:at + cfg.sft_batch]]
        tokens = sum(sum(m) for _, m in batch)
        optimizer.param_groups[0]["lr"] = cfg.sft_lr * cosine(step, steps)
        total, anchor = 0.0, torch.zeros(())
        for rows in micro_batches(batch, cfg.micro_tokens):
            logp, mask, _ = token_logp(policy, [batch[i] for i in rows], 1.0)
            loss = -(logp * mask).sum() / tokens
            loss.backward()
            total += loss.item()
        if anchored:
            picks = counted_rng(cfg.seed, "sft anchor", step).choice(len(acting), size=min(cfg.sft_batch, len(acting)), replace=False)
            anchor = anchor_kl(policy, [acting[i] for i in picks])
            (cfg.sft_anchor * anchor).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == steps - 1:
            log(dict(stage="sft", step=step + 1, steps=steps, loss=total, anchor_kl=anchor.item(), grad_norm=float(norm),
                     learning_rate=optimizer.param_groups[0]["lr"]))


def stage1(policy: Policy, pool: envs.EnvPool, games: list[envs.Game], cfg: Config, run: "Run") -> None:
    """Stage 1 in whole: the base acts, the analyzer annotates with hindsight, the policy learns to write such skills."""
    tasks = [games[i] for i in counted_rng(cfg.seed, "sft tasks").permutation(len(games))[:cfg.sft_tasks]]
    batch = [game for game in tasks for _ in range(cfg.sft_rollouts)]
    rngs = [counted_rng(cfg.seed, "sft rollout", i) for i in range(len(batch))]
    run.say(f"Stage 1: {len(tasks)} tasks x {cfg.sft_rollouts} rollouts of the base, annotated by the {cfg.analyzer} analyzer")
    rolls, counters = rollout(policy, pool, batch, cfg, rngs, cfg.temperature)
    episodes = [r.episode for r in rolls]
    replies, more = analyze_with(cfg, episodes)
    counters += more
    rows = skills.sft_rows(episodes, replies, counters=counters)
    sequences = sft_sequences(policy, cfg, rows, counters)
    run.write_rollouts(rolls, replies, update=0, stage="sft")
    if not sequences:
        raise RuntimeError("Stage 1 has no usable skill to learn from: the analyzer's replies did not parse (see skills.jsonl). Check the analyzer.")
    acting = [plain(r) for r in rolls if any(r.sampled)]
    acting += [with_skill(policy, r, reply.skill) for r, reply in zip(rolls, replies) if reply.skill and any(r.sampled)]
    run.log(dict(stage="sft", episodes=len(rolls), success=float(np.mean([e.won for e in episodes])), rows=len(sequences), counters=dict(counters)))
    freeze_reference(policy)  # the base: what the anchor holds on to
    sft(policy, cfg, sequences, acting, run.log)


# ------------------------------------------------------------------------------------------------------------------
# 7. Stage 2: act -> analyze -> re-score with the skill -> update
# ------------------------------------------------------------------------------------------------------------------
@dataclass
class Scores:
    """Everything the update needs about its rollouts, all without gradient and from before its first optimizer step. Lists of [n_i]."""
    old: list[torch.Tensor]        # snapshot = the policy that sampled
    reference: list[torch.Tensor]  # the checkpoint RL starts from
    teacher: list[torch.Tensor]    # snapshot with the skill in context; equal to `old` where there is no usable skill
    entropy: list[torch.Tensor]


def analyze_own(policy: Policy, cfg: Config, rolls: list[Rollout], update: int, library: dict[str, str]) -> tuple[list[skills.Reply], Counter]:
    """The skill of each episode for this update: the policy's own hindsight (SEED), or an ablation's.

    A reply that does not parse is "no skill": that episode loses its distillation term and keeps its GRPO term.
    """
    counters = Counter()
    if cfg.static_skills:
        offline = [library.get(r.episode.game_id, "") for r in rolls]
        replies = [skills.Reply(skill, "", "ok" if skill else "empty", False) for skill in offline]
    else:
        prompts = []
        for r in rolls:
            ids = policy.user_turn(policy.encode(skills.analyzer_prompt(r.episode, counters=counters)))
            if len(ids) > cfg.max_context:  # counted, and visible as an unparsed reply; never cut
                counters["analyzer prompts too long"] += 1
                ids = []
            prompts.append(ids)
        some = [i for i, ids in enumerate(prompts) if ids]
        texts = [""] * len(rolls)
        out, cut = complete(policy, [prompts[i] for i in some], cfg.max_analysis, cfg.rollout_batch)
        for i, text in zip(some, out):
            texts[i] = text
        counters["analyses cut at max_analysis"] += cut
        replies = [skills.parse_reply(text) for text in texts]
    if cfg.shuffle_skills:
        giver = skill_givers([r.episode.game_id if reply.skill else "" for r, reply in zip(rolls, replies)], counted_rng(cfg.seed, "shuffle", update))
        counters["shuffled within a game"] += sum(rolls[i].episode.game_id == rolls[j].episode.game_id for i, j in giver.items())
        replies = [replies[giver[i]] if i in giver else r for i, r in enumerate(replies)]
    counters.update(f"analysis {r.status}" for r in replies if r.status != "ok")
    counters["skills shortened"] += sum(r.cut for r in replies)
    return replies, +counters


def skill_givers(games: list[str], rng: np.random.Generator) -> dict[int, int]:
    """--shuffle_skills: {i: whose skill episode i gets}, a permutation of the episodes with a skill (games[i], "" = none).

    Nobody gets a skill of the own game as long as no game has more than half of them; nobody ever gets the own one, unless it is the only one.
    """
    order = [int(i) for i in rng.permutation(len(games)) if games[i]]
    order = [i for game in dict.fromkeys(games[i] for i in order) for i in order if games[i] == game]  # games as blocks
    shift = max(Counter(games[i] for i in order).values(), default=0)  # moved on by the longest block, everybody leaves the own one
    shift = 1 if shift == len(order) else shift
    return dict(zip(order, order[shift:] + order[:shift]))


def score_all(policy: Policy, cfg: Config, rolls: list[Rollout], replies: list[skills.Reply] | None) -> Scores:
    """Snapshot, reference and teacher log-probs: one forward pass each, before the first optimizer step of the update."""
    sequences = [plain(r) for r in rolls]
    old, entropy = score(policy, sequences, cfg)
    with reference_of(policy) as reference:
        ref, _ = score(reference, sequences, cfg)
    teacher = list(old)
    usable = [i for i, reply in enumerate(replies or []) if reply.skill]
    scored, _ = score(policy, [with_skill(policy, rolls[i], replies[i].skill) for i in usable], cfg)
    for i, logp in zip(usable, scored):
        teacher[i] = logp
    return Scores(old, ref, teacher, entropy)


DROPPED, SKIPPED = "episodes dropped: log-prob not finite", "optimizer steps skipped: gradient not finite"  # counters


def drop_not_finite(rolls: list[Rollout], scores: Scores) -> int:
    """Take episodes with a log-prob that is NaN or inf out of the update and return how many: from here on they have no sampled token.

    Before the training pass, because a gradient that is 0 at such a token is still NaN in the layers below it. The reward stays in its group.
    """
    bad = [i for i in range(len(rolls)) if not all(s[i].isfinite().all() for s in (scores.old, scores.reference, scores.teacher))]
    for i in bad:
        rolls[i].sampled = [False] * len(rolls[i].ids)
        for s in (scores.old, scores.reference, scores.teacher, scores.entropy):
            s[i] = s[i][:0]
    return len(bad)


def update_policy(policy: Policy, cfg: Config, optimizer: torch.optim.Optimizer, rolls: list[Rollout], scores: Scores, advantages: torch.Tensor,
                  has_skill: list[bool], update: int) -> dict:
    """One epoch over the rollouts in `cfg.minibatches` optimizer steps. Returns the loss statistics, averaged over the steps.

    Each mini-batch is split into micro-batches that fit in memory; every mean is taken with the mini-batch's own number of tokens, so the
    split does not change the loss (the released code averages within each micro-batch, which weighs tokens unequally).
    In the first mini-batch the gradients of the RL part and of the OPD part are taken apart, to log their norms: backward is linear,
    so their sum is the gradient of the joint loss.
    """
    params = optimizer.param_groups[0]["params"]
    totals, steps = Counter(), 0
    use_opd = cfg.method == "seed" and not cfg.no_opd
    usable = [i for i, r in enumerate(rolls) if any(r.sampled)]
    order = [usable[i] for i in counted_rng(cfg.seed, "minibatch", update).permutation(len(usable))]
    for part in np.array_split(order, cfg.minibatches):
        if not len(part):
            continue
        sequences = [plain(rolls[i]) for i in part]
        tokens = sum(sum(m) for _, m in sequences)
        skill_tokens = sum(sum(rolls[i].sampled) for i in part if has_skill[i])
        apart = use_opd and steps == 0
        opd_grads = [torch.zeros_like(p) for p in params] if apart else None
        for rows in micro_batches(sequences, cfg.micro_tokens):
            index = [int(part[r]) for r in rows]
            logp, mask, _ = token_logp(policy, [sequences[r] for r in rows], cfg.temperature)
            old, ref, teacher = (pad([part_scores[i] for i in index], logp.shape[1]) for part_scores in (scores.old, scores.reference, scores.teacher))
            skill_mask = torch.tensor([float(has_skill[i]) for i in index], device=logp.device)
            rl, opd, stats = losses.seed_loss(
                logp, old, ref, teacher if use_opd else None, advantages[index].to(logp), mask, skill_mask, clip_range=cfg.clip_range,
                dual_clip=cfg.dual_clip, kl_coef=cfg.kl_coef, lambda_opd=cfg.lambda_opd, beta_opd=cfg.beta_opd, rl_tokens=tokens,
                opd_tokens=skill_tokens)
            if apart:
                for total, g in zip(opd_grads, torch.autograd.grad(opd, params, retain_graph=True, allow_unused=True)):
                    total += 0 if g is None else g
                rl.backward()
            else:
                (rl + opd).backward()
            for key, name in LOSS_METRICS.items():
                totals[name] += float(stats[key])
        if apart:
            totals["grad_norm_rl"] = _norm([p.grad for p in params])
            totals["grad_norm_opd"] = _norm(opd_grads)
            for p, g in zip(params, opd_grads):
                p.grad = g if p.grad is None else p.grad + g
        norm = float(torch.nn.utils.clip_grad_norm_(params, cfg.max_grad_norm))
        totals["grad_norm"] += norm
        if math.isfinite(norm):
            optimizer.step()
        else:  # one such step would turn every weight into NaN
            totals[SKIPPED] += 1
        optimizer.zero_grad(set_to_none=True)
        steps += 1
    once = ("grad_norm_rl", "grad_norm_opd", SKIPPED)
    return {key: value if key in once else value / max(1, steps) for key, value in totals.items()}


# losses.seed_loss's statistics that are logged, under the names that users of other trainers know
LOSS_METRICS = {"loss": "loss", "rl_loss": "rl_loss", "opd_loss": "opd_loss", "kl": "kl", "approx_kl": "approx_kl", "clip_fraction": "clip_ratio"}


def _norm(grads: list[torch.Tensor | None]) -> float:
    return float(torch.stack([g.float().norm() for g in grads if g is not None]).norm())


def gate_metrics(cfg: Config, rolls: list[Rollout], replies: list[skills.Reply], scores: Scores) -> dict:
    """What tells a working SEED run from one that silently is GRPO: parse rate, coverage, Delta by outcome, and the gate. All token means."""
    covered = [i for i, reply in enumerate(replies) if reply.skill and any(rolls[i].sampled)]
    tokens = sum(sum(r.sampled) for r in rolls)
    out = dict(parse_rate=sum(bool(r.skill) for r in replies) / len(replies),
               skill_token_share=sum(sum(rolls[i].sampled) for i in covered) / max(1, tokens))
    deltas = {i: scores.teacher[i] - scores.old[i] for i in covered}

    def mean(rows):
        return float(torch.cat(rows).mean()) if rows else None

    gates = [losses.confidence_gate(scores.teacher[i], scores.old[i], cfg.beta_opd) for i in covered]
    return out | dict(gate_mean=mean(gates), gate_above_half=mean([(g > 0.5).float() for g in gates]), delta_mean=mean(list(deltas.values())),
                      delta_won=mean([d for i, d in deltas.items() if rolls[i].episode.won]),
                      delta_lost=mean([d for i, d in deltas.items() if not rolls[i].episode.won]))


def repetition(rolls: list[Rollout]) -> float:
    """Share of steps that repeat the command of the step before: near 1 when the policy has collapsed into a loop."""
    pairs = [(a.action, b.action) for r in rolls for a, b in zip(r.episode.steps, r.episode.steps[1:])]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


def games_of(cfg: Config, games: list[envs.Game], update: int) -> list[envs.Game]:
    """The training games of one update: epochs over all games, each in its own random order, cut into updates."""
    first = (update - 1) * cfg.tasks_per_update
    chosen = []
    for k in range(first, first + cfg.tasks_per_update):
        epoch, at = divmod(k, len(games))
        chosen.append(games[counted_rng(cfg.seed, "epoch", epoch).permutation(len(games))[at]])
    return chosen


def one_update(policy: Policy, pool: envs.EnvPool, games: list[envs.Game], cfg: Config, optimizer, update: int, run: "Run", library: dict) -> dict:
    """One update of Stage 2 in whole; returns its metrics line."""
    clock = Stopwatch()
    P, G = cfg.tasks_per_update, cfg.group_size
    batch = [game for game in games_of(cfg, games, update) for _ in range(G)]
    rngs = [counted_rng(cfg.seed, "rollout", update, i) for i in range(P * G)]
    rolls, counters = rollout(policy, pool, batch, cfg, rngs, cfg.temperature)  # (a) act
    clock.lap("rollout")
    replies, more = analyze_own(policy, cfg, rolls, update, library) if cfg.method == "seed" else (None, Counter())  # (b) analyze
    clock.lap("analysis")
    scores = score_all(policy, cfg, rolls, replies)  # (c) teach
    counters[DROPPED] = drop_not_finite(rolls, scores)
    clock.lap("scoring")
    rewards = torch.tensor([r.episode.reward for r in rolls], dtype=torch.float64).view(P, G)
    advantages = losses.group_advantages(rewards).view(-1).float()
    has_skill = [bool(r.skill) for r in replies] if replies else [False] * len(rolls)
    stats = update_policy(policy, cfg, optimizer, rolls, scores, advantages, has_skill, update)
    counters[SKIPPED] = stats.pop(SKIPPED, 0)
    clock.lap("training")
    run.write_rollouts(rolls, replies, update, stage="rl", scores=scores)
    lengths = [sum(r.sampled) for r in rolls]
    gap = max((float((torch.tensor([lp for lp, on in zip(r.logp, r.sampled) if on]) - s.cpu()).abs().max()) for r, s in zip(rolls, scores.old) if len(s)),
              default=0.0)
    line = dict(stage="rl", update=update, reward=float(rewards.mean()), reward_std=float(rewards.std(dim=1).mean()),
                success=float(np.mean([r.episode.won for r in rolls])), frac_reward_zero_std=float((rewards.amax(1) == rewards.amin(1)).double().mean()),
                frac_outcome_tied=float(np.mean([len({r.episode.won for r in rolls[g * G:(g + 1) * G]}) == 1 for g in range(P)])))
    if replies:
        line |= gate_metrics(cfg, rolls, replies, scores)
    return line | stats | {
        "entropy": float(torch.cat(scores.entropy).sum()) / max(1, sum(lengths)), "sampler_gap": gap, "repetition": repetition(rolls),
        "invalid_action_rate": counters["invalid actions"] / max(1, sum(len(r.episode.steps) for r in rolls)),
        "completions/mean_length": float(np.mean(lengths)), "episode_tokens": float(np.mean([len(r.ids) for r in rolls])),
        "episode_steps": float(np.mean([len(r.episode.steps) for r in rolls])), "num_tokens": sum(len(r.ids) for r in rolls),
        "learning_rate": cfg.lr, "counters": dict(counters + more),
        "step_time": clock.total(), **{f"seconds/{k}": v for k, v in clock.laps.items()}}


def warnings_of(cfg: Config, line: dict) -> list[str]:
    """Sentences for what a user must not overlook in a metrics line."""
    out = []
    if cfg.method == "seed" and line["parse_rate"] < 0.5:
        out.append(f"only {line['parse_rate']:.0%} of the analyses parsed, so most of this update was plain GRPO. Run Stage 1 longer "
                   "(--sft_epochs), raise --max_analysis, or read skills.jsonl to see what the policy writes.")
    if cfg.method == "seed" and line["gate_mean"] is not None and not 0.02 < line["gate_mean"] < 0.98:
        out.append(f"the gate is dead (mean {line['gate_mean']:.3f}): it no longer tells tokens apart. Lower --beta_opd, or look at delta_mean.")
    if line["repetition"] > 0.6 or line["entropy"] < 0.01:
        out.append(f"the policy is collapsing (repeated commands {line['repetition']:.0%}, entropy {line['entropy']:.3f}). Lower --lr or "
                   "--lambda_opd, or raise --kl_coef, and start again from an earlier checkpoint.")
    if {DROPPED, SKIPPED} & line["counters"].keys():
        out.append("an episode or a step had numbers that are not finite and was left out (see counters); a fourth such update in a row stops the run.")
    if line["sampler_gap"] > 0.05:
        out.append(f"sampling and scoring disagree by up to {line['sampler_gap']:.3f} in log-prob; ratios are not 1 at the first step.")
    return out


# ------------------------------------------------------------------------------------------------------------------
# 8. Evaluation
# ------------------------------------------------------------------------------------------------------------------
def wilson(wins: int, n: int) -> tuple[float, float]:
    """Wilson 95% interval of a success rate, as fractions; (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    z, p = 1.959964, wins / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def evaluate(policy: Policy, pool: envs.EnvPool, games: list[envs.Game], cfg: Config, key: str, with_rule_skill: bool = False) -> dict:
    """Every game of the list exactly once, in sorted order, from ordinary history (no skill, memory or retrieval).

    micro = wins / games; macro = mean over the task types. `with_rule_skill` puts the rule analyzer's workflow in the context instead:
    what the teacher could do, a diagnostic, never a result.
    """
    games = sorted(games, key=lambda g: g.id)
    # The evaluation's random numbers depend on the game only: the same luck for every arm and every update.
    rngs = [counted_rng(cfg.seed, "eval", g.id) for g in games]
    hints = None
    if with_rule_skill:
        tasks = []
        for first in range(0, len(games), cfg.rollout_batch):
            tasks += [info["task"] for _, info in pool.reset(games[first:first + cfg.rollout_batch])]
        hints = [skills.workflow(skills.parse_task(task, game.task_type)) if task else "" for game, task in zip(games, tasks)]  # "": died at reset
    rolls, counters = rollout(policy, pool, games, cfg, rngs, cfg.eval_temperature, hints)
    won = {g.id: r.episode.won for g, r in zip(games, rolls)}
    by_type = {t: [won[g.id] for g in games if g.task_type == t] for t in envs.TASK_TYPES}
    by_type = {t: dict(wins=sum(w), n=len(w), success=sum(w) / len(w), interval=wilson(sum(w), len(w))) for t, w in by_type.items() if w}
    wins, steps = sum(won.values()), sum(len(r.episode.steps) for r in rolls)
    return dict(stage="eval", at=key, split=games[0].split if games else "", skill_in_context=with_rule_skill, n=len(games), wins=wins,
                success=wins / max(1, len(games)), interval=wilson(wins, len(games)), macro=float(np.mean([t["success"] for t in by_type.values()])),
                by_type=by_type, invalid_action_rate=counters["invalid actions"] / max(1, steps), episode_steps=steps / max(1, len(games)),
                temperature=cfg.eval_temperature, counters=dict(counters), games=won)


# ------------------------------------------------------------------------------------------------------------------
# 9. Runs: logs, checkpoints, exact resume, curves, report
# ------------------------------------------------------------------------------------------------------------------
FORMAT = 1  # of the checkpoint folder
LOGS = ("metrics.jsonl", "rollouts.jsonl", "skills.jsonl")


class Stopwatch:
    """Seconds by phase."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.laps = {}

    def lap(self, name: str) -> None:
        """Seconds since the last lap belong to `name`."""
        now = time.perf_counter()
        self.laps[name], self.last = round(now - self.last, 3), now

    def total(self) -> float:
        """Seconds since the start."""
        return round(time.perf_counter() - self.start, 3)


def safe(text: str) -> str:
    """Text that is safe to print: model and game text may hold terminal escape codes."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Run:
    """The folder OUT/NAME and everything written to it (a class, because logs and checkpoints must agree about where they are)."""

    def __init__(self, cfg: Config):
        self.cfg, self.dir = cfg, Path(cfg.out) / cfg.name
        self.metrics: list[dict] = []
        self.update, self.stage1_done = 0, False

    def create(self) -> None:
        """A fresh folder; an existing run is refused unless --overwrite."""
        if self.dir.exists() and any(self.dir.iterdir()):
            if not (self.dir / "config.json").exists():
                raise ValueError(f"{self.dir} holds files that are no run of seed_mini; choose another --name or --out.")
            if not (self.cfg.overwrite or self.cfg.resume):
                raise ValueError(f"{self.dir} already holds a run: continue it with --resume, replace it with --overwrite, or choose another --name.")
            shutil.rmtree(self.dir)
        self.dir.mkdir(parents=True, exist_ok=True)
        write_json(self.dir / "config.json", dataclasses.asdict(self.cfg) | {"git_commit": git_commit(), "torch": torch.__version__, "format": FORMAT})

    def say(self, text: str) -> None:
        """One line for the person at the terminal."""
        print(safe(text), flush=True)

    def log(self, line: dict) -> None:
        """One line of metrics.jsonl, and its progress line."""
        self.metrics.append(line)
        with open(self.dir / "metrics.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")
        self.say(progress_line(line))

    def write_rollouts(self, rolls: list[Rollout], replies: list[skills.Reply] | None, update: int, stage: str, scores: Scores | None = None) -> None:
        """Readable episodes to rollouts.jsonl (one of each game, and all that have no token to train) and every skill to skills.jsonl
        with outcome, status and mean Delta."""
        seen = set()
        with open(self.dir / "rollouts.jsonl", "a") as f:
            for r in rolls:
                if r.episode.game_id not in seen or not any(r.sampled):  # what was dropped is kept for inspection
                    f.write(json.dumps({"update": update, "stage": stage} | dataclasses.asdict(r.episode)) + "\n")
                seen.add(r.episode.game_id)
        with open(self.dir / "skills.jsonl", "a") as f:
            for i, (r, reply) in enumerate(zip(rolls, replies or [])):
                delta = (scores.teacher[i] - scores.old[i]).mean().item() if scores and reply.skill and len(scores.old[i]) else None
                f.write(json.dumps(dict(update=update, stage=stage, game_id=r.episode.game_id, task=r.episode.task, won=r.episode.won,
                                        status=reply.status, skill=reply.skill, summary=reply.summary, delta_mean=delta)) + "\n")

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer | None) -> None:
        """Write checkpoints/update-N: weights, optimizer moments, log positions, checksums; to a temporary name, synced, then renamed."""
        final = self.dir / "checkpoints" / f"update-{self.update:06d}"
        temporary = final.with_name("writing-" + final.name)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_policy(policy, temporary / "policy")
        if optimizer is not None:
            state = optimizer.state_dict()["state"]
            save_file({f"{i}.{k}": v.contiguous() for i, s in state.items() for k, v in s.items()}, temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", dict(format=FORMAT, update=self.update, config=dataclasses.asdict(self.cfg),
                                                  log_bytes={n: (self.dir / n).stat().st_size if (self.dir / n).exists() else 0 for n in LOGS},
                                                  sha256={str(p.relative_to(temporary)): sha256(p) for p in sorted(temporary.rglob("*")) if p.is_file()}))
        for path in [*temporary.rglob("*"), *(self.dir / name for name in LOGS)]:
            if path.is_file():
                with open(path, "rb") as f:
                    os.fsync(f.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        kept = sorted(final.parent.glob("update-*"))
        for old in kept[:-2]:  # the newest two: if the last one is torn, the one before is good
            if old.name != "update-000000":  # the start of Stage 2 is the reference policy and what --sft_from reads
                shutil.rmtree(old)

    def newest(self) -> tuple[Path, dict]:
        """The newest checkpoint whose checksums agree, and its state. Raises ValueError if there is none."""
        for path in sorted((self.dir / "checkpoints").glob("update-*"), reverse=True):
            try:
                state = json.loads((path / "state.json").read_text())
                if state["format"] > FORMAT:
                    raise ValueError(f"{path} was written by a newer seed_mini (format {state['format']}, this one reads {FORMAT}); update seed_mini.")
                if all(sha256(path / name) == digest for name, digest in state["sha256"].items()):
                    return path, state
            except (OSError, KeyError, json.JSONDecodeError, UnicodeDecodeError):
                pass
            self.say(f"warning: checkpoint {path} is damaged; trying the one before")
        raise ValueError(f"--resume: {self.dir} holds no usable checkpoint. Start it again with --overwrite.")

    def rewind(self, state: dict) -> None:
        """Cut the logs back to where they were when the checkpoint was written, and reload the metrics."""
        for name, size in state["log_bytes"].items():
            if (self.dir / name).exists():
                os.truncate(self.dir / name, size)
        self.metrics = read_jsonl(self.dir / "metrics.jsonl")
        self.update = state["update"]


def read_jsonl(path: Path) -> list[dict]:
    """The records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_json(path: Path, data: dict) -> None:
    """Indented JSON, written to a temporary name first."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git_commit() -> str:
    """The commit of this checkout, for the records; "" outside a checkout."""
    out = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True) if shutil.which("git") else None
    return out.stdout.strip() if out and out.returncode == 0 else ""


def save_policy(policy: Policy, path: Path) -> None:
    """An ordinary Hugging Face folder (or, for LoRA, a PEFT adapter folder), with the tokenizer."""
    kwargs = dict(selected_adapters=["default"]) if hasattr(policy.model, "peft_config") else {}
    policy.model.save_pretrained(path, **kwargs)
    policy.tokenizer.save_pretrained(path)


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Put saved AdamW moments back, bit for bit."""
    state = {}
    for name, value in load_file(path).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    full = optimizer.state_dict()
    full["state"] = state
    optimizer.load_state_dict(full)


def progress_line(line: dict) -> str:
    """A metrics line for the eye."""
    if line["stage"] == "eval":
        low, high = line["interval"]
        skill = " with a workflow skill in context" if line["skill_in_context"] else ""
        return f"eval {line['at']:>6} {line['split']}{skill}: {line['wins']}/{line['n']} = {line['success']:.1%} [{low:.1%}, {high:.1%}], macro {line['macro']:.1%}"
    if line["stage"] == "sft":
        if "rows" in line:
            return f"sft   base wins {line['success']:.1%} of {line['episodes']} episodes, {line['rows']} rows to learn from"
        return f"sft   {line['step']:4d}/{line['steps']} loss {line['loss']:.3f} anchor {line['anchor_kl']:.4f}"
    text = (f"update {line['update']:3d} | reward {line['reward']:6.2f} success {line['success']:6.1%} tied groups {line['frac_reward_zero_std']:4.0%} "
            f"| kl {line['kl']:.4f} clip {line['clip_ratio']:.1%} entropy {line['entropy']:.3f} invalid {line['invalid_action_rate']:.0%}")
    if "parse_rate" in line:
        text += f" | parse {line['parse_rate']:4.0%}"
        if line["gate_mean"] is not None:
            won = "  none" if line["delta_won"] is None else f"{line['delta_won']:+.3f}"
            lost = "  none" if line["delta_lost"] is None else f"{line['delta_lost']:+.3f}"
            text += f" gate {line['gate_mean']:.2f} Delta won {won} lost {lost}"
    return text + f" | {line['step_time']:.1f}s"


def draw_curves(run: Run) -> None:
    """curves.png: success on held-out games with Wilson intervals, and training success, parse rate and Delta by update."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    evals = [m for m in run.metrics if m["stage"] == "eval" and not m["skill_in_context"] and m["at"] != "base"]
    for split, colour, mark in zip(envs.SPLITS[1:], ("#0072B2", "#D55E00"), ("o", "s")):
        rows = [m for m in evals if m["split"] == split]
        x, y = [0 if m["at"] == "sft" else int(m["at"]) for m in rows], [100 * m["success"] for m in rows]
        if rows:
            bars = [[v - 100 * m["interval"][0] for v, m in zip(y, rows)], [100 * m["interval"][1] - v for v, m in zip(y, rows)]]
            axes[0].errorbar(x, y, yerr=bars, color=colour, marker=mark, capsize=3, label=f"{split} (n = {rows[0]['n']}, Wilson 95%)")
    axes[0].set(title="Evaluation, ordinary history only", xlabel="update", ylabel="success (%)", ylim=(0, 100))
    rl = [m for m in run.metrics if m["stage"] == "rl"]
    x = [m["update"] for m in rl]
    axes[1].plot(x, [100 * m["success"] for m in rl], color="#0072B2", label="training success")
    axes[1].plot(x, [100 * m["frac_reward_zero_std"] for m in rl], color="#000000", ls=":", label="groups without signal")
    axes[1].plot(x, [100 * m["invalid_action_rate"] for m in rl], color="#D55E00", ls="-.", label="invalid actions")
    axes[1].set(title="Training rollouts", xlabel="update", ylabel="share (%)", ylim=(0, 100))
    if rl and "parse_rate" in rl[0]:
        for key, colour, style, label in (("delta_won", "#0072B2", "-", "mean Delta, won episodes"), ("delta_lost", "#D55E00", "--", "mean Delta, lost episodes")):
            axes[2].plot(x, [np.nan if m[key] is None else m[key] for m in rl], color=colour, ls=style, label=label)
        axes[2].axhline(0, color="#999999", lw=0.8)
        axes[2].set(title="Skill against no skill", xlabel="update", ylabel="Delta (nats per token)")
    else:
        axes[2].set_axis_off()
    for ax in axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    fig.tight_layout()
    fig.savefig(run.dir / "curves.png", dpi=120)
    plt.close(fig)


def write_report(run: Run) -> None:
    """report.md: what was run, every evaluation with its interval, the last one by task type, and what went wrong on the way."""
    cfg, evals = run.cfg, [m for m in run.metrics if m["stage"] == "eval"]
    lines = [f"# {cfg.name}: {cfg.method} on {cfg.env}", "", f"Model `{cfg.model}`, seed {cfg.seed}, games seed {cfg.games_seed}, {cfg.updates} updates of "
             f"{cfg.tasks_per_update} games x {cfg.group_size} rollouts. Evaluation at temperature {cfg.eval_temperature}, each game once, ordinary history only.", "",
             "| at | split | context | wins / n | success [Wilson 95%] | macro | invalid |", "|---|---|---|---|---|---|---|"]
    for m in evals:
        lines.append(f"| {m['at']} | {m['split']} | {'workflow skill' if m['skill_in_context'] else 'history'} | {m['wins']} / {m['n']} | "
                     f"{m['success']:.1%} [{m['interval'][0]:.1%}, {m['interval'][1]:.1%}] | {m['macro']:.1%} | {m['invalid_action_rate']:.0%} |")
    for m in {m["split"]: m for m in evals if not m["skill_in_context"]}.values():  # the last one of each split
        lines += ["", f"## {m['split']} at {m['at']}, by task type", "", "| task type | wins / n | success [Wilson 95%] |", "|---|---|---|"]
        lines += [f"| {t} | {v['wins']} / {v['n']} | {v['success']:.1%} [{v['interval'][0]:.1%}, {v['interval'][1]:.1%}] |" for t, v in m["by_type"].items()]
        lines += ["", f"Games (won in bold): {', '.join(f'**{g}**' if won else g for g, won in m['games'].items())}"]
    rl = [m for m in run.metrics if m["stage"] == "rl"]
    totals = Counter()
    for m in run.metrics:
        totals.update({k: v for k, v in m.get("counters", {}).items() if not k.startswith("ended: won")})
    lines += ["", "## Counted on the way", ""] + [f"* {k}: {v}" for k, v in sorted(totals.items())]
    if rl:
        lines += ["", f"Seconds per update (median): {np.median([m['step_time'] for m in rl]):.1f}. First update's sampler-to-scoring gap in log-prob: {rl[0]['sampler_gap']:.2e}."]
    if rl and "parse_rate" in rl[0]:
        lines += [f"Parse rate: first update {rl[0]['parse_rate']:.0%}, last {rl[-1]['parse_rate']:.0%}. Tokens with a skill in the last update: {rl[-1]['skill_token_share']:.0%}."]
    (run.dir / "report.md").write_text("\n".join(lines + ["", "![curves](curves.png)", ""]))


# ------------------------------------------------------------------------------------------------------------------
# 10. Main
# ------------------------------------------------------------------------------------------------------------------
def resolve(cfg: Config) -> Config:
    """Fill every None from the profile and the name from the method, so that config.json says what was really used."""
    profile = cfg.profile
    if profile == "auto":
        small = cfg.model == "tiny"
        if not small and (Path(cfg.model) / "config.json").exists():
            c = AutoConfig.from_pretrained(cfg.model)
            small = 12 * c.num_hidden_layers * c.hidden_size ** 2 < 50e6  # about the parameters of the transformer itself
        profile = "tiny" if small else "paper"
    filled = {k: v for k, v in PROFILES[profile].items() if getattr(cfg, k) is None}
    return dataclasses.replace(cfg, **filled, profile=profile, name=cfg.name or ("eval" if cfg.eval else cfg.method))


def find_games(cfg: Config) -> tuple[dict[str, list[envs.Game]], str]:
    """The games of the run, cut to --train_games and --eval_games, and one line about where they come from."""
    games, notice = envs.find_games(cfg.games, seed=cfg.games_seed)
    for split, limit in (("train", cfg.train_games), ("valid_seen", cfg.eval_games), ("valid_unseen", cfg.eval_games)):
        games[split] = games[split][:limit]
    return games, notice


def evaluate_splits(policy: Policy, pool: envs.EnvPool, games: dict, run: Run, key: str, teacher: bool = False) -> None:
    """Evaluate every split of --eval_splits and log it; with `teacher` also with the right workflow in context (a diagnostic)."""
    for split in run.cfg.eval_splits:
        run.log(evaluate(policy, pool, games[split], run.cfg, key))
    if teacher:
        run.log(evaluate(policy, pool, games[run.cfg.eval_splits[0]], run.cfg, key, with_rule_skill=True))


def first_weights(cfg: Config) -> str:
    """Where a fresh run's weights come from: the model, or the Stage-1 result of another run."""
    source = Path(cfg.sft_from) / "checkpoints" / "update-000000" / "policy"
    if cfg.sft_from and not source.exists():
        raise ValueError(f"--sft_from {cfg.sft_from}: no Stage-1 result there (looked for {source}).")
    return str(source) if cfg.sft_from else cfg.model


def start(policy: Policy, pool: envs.EnvPool, games: dict, run: Run) -> None:
    """From the base to the policy Stage 2 starts from: evaluation, Stage 1 (or its reuse, or not), evaluation. Ends with checkpoint 0."""
    cfg = run.cfg
    if not cfg.sft_from:  # an arm that shares its start has the base's numbers in the run it starts from
        evaluate_splits(policy, pool, games, run, "base", teacher=True)
    if not (cfg.sft_from or cfg.no_sft):
        stage1(policy, pool, games["train"], cfg, run)
    if cfg.sft_from or not cfg.no_sft:
        evaluate_splits(policy, pool, games, run, "sft", teacher=True)
    run.save(policy, None)


def to_resume(run: Run) -> bool:
    """Whether there is a checkpoint to go on from. A run stopped before its first one (in Stage 1, say) starts again: same options, same run.

    Raises ValueError if there is no such run, or if it was started with other options. (Free are the number of updates and where the folder lies.)
    """
    if not run.cfg.resume:
        return False
    if not (run.dir / "config.json").exists():
        raise ValueError(f"--resume: there is no run in {run.dir}.")
    now, free = dataclasses.asdict(run.cfg), ("resume", "overwrite", "updates", "debug", "out", "name")
    saved = json.loads((run.dir / "config.json").read_text())
    changed = [f"{k} was {v!r}, now {now[k]!r}" for k, v in saved.items() if k in now and now[k] != v and k not in free]
    if changed:
        raise ValueError(f"--resume needs the options the run was started with: {'; '.join(changed)}.")
    return any((run.dir / "checkpoints").glob("update-*"))


def resume(run: Run) -> tuple[Policy, Path]:
    """The policy of the newest good checkpoint (its reference policy is update-000000); logs are cut back to that moment."""
    path, state = run.newest()
    run.rewind(state)
    run.say(f"resuming {run.dir} after update {run.update}")
    return load_policy(run.cfg, str(path / "policy")), path


def static_library(policy: Policy, pool: envs.EnvPool, games: list[envs.Game], cfg: Config) -> dict[str, str]:
    """Ablation: one offline skill per training game, from one rollout of the Stage-2 start, written by the Stage-1 analyzer and never renewed."""
    rolls, _ = rollout(policy, pool, games, cfg, [counted_rng(cfg.seed, "static", g.id) for g in games], cfg.temperature)
    replies, _ = analyze_with(cfg, [r.episode for r in rolls])
    return {r.episode.game_id: reply.skill for r, reply in zip(rolls, replies) if reply.skill}


def train(cfg: Config) -> None:
    """The whole method, from the first evaluation to the report."""
    run = Run(cfg)
    going_on = to_resume(run)
    policy = None if going_on else load_policy(cfg, first_weights(cfg))  # first: a wrong model must not leave a run's folder behind
    games, notice = find_games(cfg)
    run.say(notice)
    if not games["train"]:
        raise ValueError("there is no training game (train split empty).")
    envs.check_engine(games)
    if not going_on:
        run.create()
    with envs.EnvPool(workers=cfg.workers, step_timeout=cfg.step_timeout, max_steps=cfg.max_steps, invalid_penalty=cfg.invalid_penalty) as pool:
        if going_on:
            policy, path = resume(run)
        else:
            start(policy, pool, games, run)
            path = run.dir / "checkpoints" / "update-000000"
        reference = load_policy(cfg, str(run.dir / "checkpoints" / "update-000000" / "policy"), trainable=False)
        policy.reference = reference.model
        optimizer = make_optimizer(policy, cfg.lr, cfg.weight_decay)
        if (path / "optimizer.safetensors").exists():
            load_optimizer(optimizer, path / "optimizer.safetensors")
        library = static_library(reference, pool, games["train"], cfg) if cfg.static_skills else {}
        for update in range(run.update + 1, cfg.updates + 1):
            line = one_update(policy, pool, games["train"], cfg, optimizer, update, run, library)
            run.log(line)
            for text in warnings_of(cfg, line):
                run.say(f"warning: {text}")
            sick = [bool({DROPPED, SKIPPED} & m["counters"].keys()) for m in run.metrics if m["stage"] == "rl"][-4:]
            if len(sick) == 4 and all(sick):
                raise RuntimeError("four updates in a row had log-probs or gradients that are not finite, so the run stops; the checkpoint "
                                   "from before them is kept. Start again from its policy folder (--model) with a lower --lr.")
            run.update = update
            if update == cfg.updates or (cfg.eval_every and update % cfg.eval_every == 0):
                evaluate_splits(policy, pool, games, run, str(update))
            if update == cfg.updates or (update % cfg.save_every == 0 and not sick[-1]):
                run.save(policy, optimizer)
    draw_curves(run)
    write_report(run)
    run.say(f"report: {run.dir / 'report.md'}")


def evaluate_only(cfg: Config) -> None:
    """--eval: every game of each split once; the result as a line, and in OUT/NAME/eval-*.json with the game ids."""
    games, notice = find_games(cfg)
    print(notice)
    policy = load_policy(cfg, cfg.model, trainable=False)
    folder = Path(cfg.out) / cfg.name
    folder.mkdir(parents=True, exist_ok=True)
    with envs.EnvPool(workers=cfg.workers, step_timeout=cfg.step_timeout, max_steps=cfg.max_steps, invalid_penalty=cfg.invalid_penalty) as pool:
        for split in cfg.eval_splits:
            if not games[split]:
                raise ValueError(f"split {split} has no games.")
            envs.check_engine({split: games[split]})
            result = evaluate(policy, pool, games[split], cfg, "eval")
            print(progress_line(result), flush=True)
            for task_type, v in result["by_type"].items():
                print(f"    {task_type:32s} {v['wins']:4d}/{v['n']:<4d} {v['success']:6.1%} [{v['interval'][0]:.1%}, {v['interval'][1]:.1%}]")
            write_json(folder / f"eval-{split}.json", result | dict(model=cfg.model, config=dataclasses.asdict(cfg), git_commit=git_commit()))
            print(f"written: {folder / f'eval-{split}.json'}")


def main(argv: list[str] | None = None) -> int:
    """Command line. 0 = done, 2 = bad input or a run that cannot go on (one sentence), 130 = Ctrl-C (resumable)."""
    parser = HfArgumentParser(Config, prog="python seed_mini.py", usage="%(prog)s [--option value ...] (--help explains every option)",
                              description=__doc__.split("\n")[0],
                              epilog="Defaults by profile: " + "; ".join(f"{p}: " + ", ".join(f"{k}={v}" for k, v in d.items()) for p, d in PROFILES.items()))
    cfg = Config(**vars(parser.parse_args(argv)))
    transformers.utils.logging.disable_progress_bar()
    try:
        check_config(cfg)
        cfg = resolve(cfg)
        check_config(cfg)  # again: a given value may contradict a default
        torch.set_num_threads(cfg.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        evaluate_only(cfg) if cfg.eval else train(cfg)
    except KeyboardInterrupt:
        print("\nstopped; continue with --resume", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if cfg.debug:
            raise
        print(f"seed_mini: {safe(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
