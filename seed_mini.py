"""seed_mini.py: SEED (arXiv 2607.14777) on one GPU, or on a laptop's CPU, in one file you read from top to bottom.

    python seed_mini.py --env alfworld                    # the whole method; without a GPU the tiny shipped base, five to ten minutes
    python seed_mini.py --env alfworld --method grpo      # the baseline from the same start
    python seed_mini.py --eval --model runs/seed/checkpoints/update-000040/policy

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
    10 memory         what fits on a card; out of memory means smaller batches, counted
    11 main           arguments to exit code

Left out on purpose: multi-GPU, a separate inference engine, value networks, learning-rate schedules in Stage 2 (the paper's is constant),
vision, and the replay of the paper's other environments. The equations live in losses.py, prompts and parsers in skills.py, the world in envs.py.
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

try:
    if sys.version_info < (3, 11):
        raise ImportError(f"seed_mini needs Python 3.11 or newer; this is {sys.version_info[0]}.{sys.version_info[1]}")
    import envs  # first, because it imports in no time: a missing engine is said at once
    import torch
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise ImportError(f"seed_mini needs torch 2.6 or newer; this is {torch.__version__}: pip install -r requirements.txt")
    import numpy as np
    import transformers
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_layers import GradientCheckpointingLayer

    import losses
    import skills
except ImportError as error:
    if __name__ != "__main__" or "--debug" in sys.argv:
        raise
    print(f"seed_mini: {error}", file=sys.stderr)
    sys.exit(2)

HERE = Path(__file__).resolve().parent
TINY = HERE / "notebooks" / "tiny_base"  # made by notebooks/00_tiny_base.ipynb
QWEN = "Qwen/Qwen3-1.7B"                 # what --model auto takes where a card can hold it


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
    model: str = option("auto", "'tiny' (the shipped 0.7M-parameter base), a Hugging Face name such as Qwen/Qwen3-1.7B, or a checkpoint folder. "
                                "'auto': Qwen/Qwen3-1.7B in QLoRA on a CUDA card of 10 GB or more, otherwise 'tiny'.")
    adapter: str = option("", "A LoRA adapter folder to put on the model, e.g. RUN/checkpoints/update-000150/policy.")
    method: str = option("seed", "'seed' (the paper's method) or 'grpo' (the same run without skills: the baseline).")
    name: str = option("", "Name of the run: everything is written to OUT/NAME. Default: the method's name; with --eval: 'eval'.")
    out: str = option("runs", "Folder that holds the runs.")
    seed: int = option(0, "Seed of everything random. One seed, one run: bit for bit on a CPU with the same number of threads.")
    profile: str = option("auto", "'tiny' or 'paper': which column of defaults to use. 'auto': 'tiny' for the shipped base and for folders with a model "
                                 "under 50M parameters, else 'paper'.")
    # -- what to do
    dry_run: bool = option(False, "Print where the memory would go, and the settings for 12, 16 and 24 GB cards, and stop. Nothing is loaded.")
    eval: bool = option(False, "Only evaluate the model (every game of each split in --eval_splits once) and stop.")
    resume: bool = option(False, "Continue OUT/NAME from its newest checkpoint; with the same options the result is the same as without the break.")
    overwrite: bool = option(False, "Delete OUT/NAME first if it exists. Without it, a run that has a checkpoint is never started over.")
    sft_from: str = option("", "Reuse the Stage-1 result of this run folder instead of running Stage 1 again (how arms share their start).")
    # -- the paper's ablations, one flag each
    no_sft: bool = option(False, "Ablation: skip Stage 1; the base itself must write the skills.")
    no_opd: bool = option(False, "Ablation: analyze and log skills, Delta and gate as SEED does, but leave the distillation term out of the loss.")
    static_skills: bool = option(False, "Ablation: teach with the Stage-1 analyzer's offline skills instead of the policy's own, current ones.")
    shuffle_skills: bool = option(False, "Control the paper lacks: give every episode the skill of another game's episode, as far as there is one.")
    # -- games
    games: str = option("auto", "'official' ALFWorld games, 'generated' houses, or 'auto': official ones if they are on this machine.")
    games_seed: int = option(0, "Seed of the generated houses (tune on one, report on another).")
    train_games: int | None = option(None, "Use only N training games, spread evenly over the sorted ids (and so over the task types). Default: all.")
    eval_games: int | None = option(None, "Evaluate on N games of each split only, spread evenly over the sorted ids. Default: all, each once.")
    max_steps: int | None = option(None, "Environment steps after which an episode is over (paper: 30).")
    think: bool | None = option(None, "Ask for <think>..</think><action>..</action> answers (paper) or for the bare command.")
    show_admissible: bool | None = option(None, "List the admissible commands in every observation (paper: yes). "
                                                 "Costs tokens; the tiny base was not made for it.")
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
    sft_anchor: float | None = option(None, "Weight of KL(base || policy) on the base's own acting transcripts during Stage 1 (paper: 0, no anchor). "
                                          "The transcripts count twice: without a skill, and with theirs in the context.")
    # -- Stage 2
    updates: int | None = option(None, "Updates of Stage 2 (paper: 150).")
    tasks_per_update: int | None = option(None, "Games per update, each with a whole group (paper: 16).")
    group_size: int | None = option(None, "Rollouts of each game, the GRPO group G (paper: 8).")
    minibatches: int | None = option(None, "Optimizer steps per update; the episodes are split at random.")
    lr: float | None = option(None, "Constant learning rate of AdamW in Stage 2 (paper: 1e-6, full fine-tuning).")
    weight_decay: float = option(0.01, "Weight decay of AdamW (paper: 0.01).")
    clip_range: float = option(0.2, "PPO clip range epsilon (paper: 0.2).")
    dual_clip: float | None = option(None, "Dual-clip constant c for negative advantages (released code: 3.0; "
                                            "the paper does not have it). Default: off.")
    kl_coef: float | None = option(None, "Coefficient of the k3 KL to the reference policy (paper: 0.01).")
    lambda_opd: float | None = option(None, "Weight of the distillation term (paper: 0.01, with lr 1e-6 on billions of parameters).")
    beta_opd: float = option(5.0, "Sharpness of the confidence gate sigmoid(beta * Delta) (paper: 5).")
    max_grad_norm: float = option(1.0, "Gradient norm above which gradients are scaled down (paper: 1.0).")
    invalid_penalty: float | None = option(None, "Reward lost by each invalid action (paper: 0.1; a win gives 10).")
    temperature: float = option(1.0, "Sampling temperature of training rollouts; scoring uses the same (paper: 1.0).")
    # -- evaluation and bookkeeping
    eval_temperature: float = option(0.4, "Sampling temperature of evaluation (paper: 0.4).")
    eval_every: int | None = option(None, "Evaluate every so many updates (0: only before, between and after).")
    eval_splits: list[str] = option(["valid_unseen"], "Splits to evaluate: valid_seen, valid_unseen, or train.")
    save_every: int | None = option(None, "Write a checkpoint every so many updates (the last update always).")
    # -- the machine
    tune: str | None = option(None, "'full' fine-tuning or 'lora' adapters.")
    checkpointing: bool | None = option(None, "Recompute activations in the backward pass instead of keeping them: far less memory, "
                                              "about a third more training time. Default: with --tune lora.")
    no_4bit: bool = option(False, "Load the base in 16 bit instead of 4-bit NF4 (lora only): faster generation, about 2 GB more for 1.7B.")
    lora_rank: int = option(16, "Rank of the LoRA adapters.")
    device: str = option("auto", "'cpu', 'cuda', or 'auto'.")
    threads: int = option(2, "CPU threads of torch. Results are bit-identical only for the same number.")
    rollout_batch: int | None = option(None, "Episodes generated at once (they share one KV cache). Default on a card: what fits (--dry_run).")
    micro_tokens: int | None = option(None, "Most padded tokens in one forward pass of scoring or training. Default on a card: what fits.")
    debug: bool = option(False, "Show the traceback of an error instead of one sentence.")


# Two columns of defaults. 'paper' repeats the paper where one GPU allows it (LoRA needs a higher learning rate than full fine-tuning);
# 'tiny' was tuned on other seeds and houses than the reported ones (README, "Results").
PROFILES = {
    "tiny": dict(max_steps=20, think=False, show_admissible=False, max_response=12, max_context=800, max_analysis=96,
                 sft_tasks=90, sft_rollouts=8, sft_epochs=3, sft_lr=8e-4, sft_batch=16, sft_anchor=2.0,
                 updates=40, tasks_per_update=8, group_size=6, minibatches=2, lr=2e-4, kl_coef=0.02, lambda_opd=0.3,
                 invalid_penalty=0.0, eval_every=8, save_every=4, tune="full", rollout_batch=64, micro_tokens=8192),
    "paper": dict(max_steps=30, think=True, show_admissible=True, max_response=512, max_context=8192, max_analysis=512,
                  sft_tasks=180, sft_rollouts=8, sft_epochs=3, sft_lr=1e-4, sft_batch=8, sft_anchor=0.0,
                  updates=150, tasks_per_update=16, group_size=8, minibatches=1, lr=1e-5, kl_coef=0.01, lambda_opd=0.01,
                  invalid_penalty=0.1, eval_every=10, save_every=5, tune="lora", rollout_batch=32, micro_tokens=8192),
}


def check_config(cfg: Config) -> None:
    """Refuse bad values with one sentence each, before anything is loaded. Raises ValueError."""
    def need(ok, text):
        """ValueError with this sentence unless ok."""
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
    need(not (cfg.adapter and cfg.tune == "full"), "--adapter is a LoRA adapter, so it cannot go with --tune full.")
    need(not (cfg.adapter and cfg.sft_from), "--adapter and --sft_from exclude each other: both say where the adapter starts.")
    need(not (cfg.adapter and (Path(cfg.model) / "adapter_config.json").exists()), "--adapter needs a base as --model, not another adapter.")
    need(not (cfg.static_skills and cfg.shuffle_skills), "--static_skills and --shuffle_skills exclude each other.")
    need(not (cfg.no_sft and cfg.sft_from), "--no_sft and --sft_from exclude each other.")
    need(not (cfg.static_skills and cfg.no_sft), "--static_skills takes its skills from Stage 1, so it cannot go with --no_sft.")
    need(not (cfg.resume and cfg.overwrite), "--resume and --overwrite exclude each other.")
    need(not (cfg.eval and (cfg.sft_from or cfg.resume or cfg.overwrite)),
         "--eval takes no --sft_from, --resume or --overwrite; give the checkpoint's policy folder as --model (or --adapter).")
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
    reference: torch.nn.Module | None = None  # full fine-tuning: a frozen copy; LoRA: None (reference_of)
    control_words: list[str] = field(default_factory=list)
    recompute: list[torch.nn.Module] = field(default_factory=list)  # layers whose activations are recomputed in backward
    loss_scale: float = 1.0                   # 1: off. fp16 gradients underflow without it (see optimizer_step)
    clean_steps: int = 0                      # optimizer steps since the scale last changed

    def encode(self, text: str) -> list[int]:
        """Token ids of text that is DATA: no control token can come out, whatever the text spells.

        `split_special_tokens` handles the tokens marked special. Tokenizers also have added tokens that are not (Qwen3's <think>,
        <tool_call>); a text that spells one is cut inside the word, so that it becomes ordinary pieces.
        """
        for word in self.control_words:
            if word in text:
                return sum((self.encode(part) for part in _cut_inside(text, word)), [])
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair, which JSON can carry, is no text for a tokenizer
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
        """The template around user, assistant, user messages, as text."""
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents)]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)

    def ids(text):
        """Control tokens included: this text is the template's own."""
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before, after = render("SLOTA").split("SLOTA")
    middle, last = render("SLOTA", "SLOTB", "SLOTC").split("SLOTB")[1].split("SLOTC")
    glue = ids(middle)
    if not glue or glue[0] not in tokenizer.all_special_ids and glue[0] not in tokenizer.added_tokens_decoder:
        raise ValueError(f"the chat template closes an assistant turn with {middle[:20]!r}, which is not a control token; this model cannot be used.")
    return glue[0], (ids(before), ids(after)), (glue[1:], ids(last))


def model_config(path: str):
    """A model's config.json (folder or hub name), without its weights. Raises ValueError in one sentence."""
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # a folder with something wrong makes transformers raise anything
        reason = str(error).splitlines()[0]
        if "couldn't connect" in reason:
            raise ValueError(f"the Hugging Face hub cannot be reached and {path!r} is not in its cache; download it where there is a network "
                             f"('hf download {path}'), give --model a folder, or use --model tiny.") from error
        raise ValueError(f"cannot load the model {path!r}: {reason}") from error


def compute_dtype(device: torch.device, lora: bool) -> torch.dtype:
    """fp32 on a CPU and for full fine-tuning (AdamW loses its small steps in 16 bit); under adapters bf16, or fp16 where a card has no bf16."""
    if device.type == "cpu" or not lora:
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def load_policy(cfg: Config, path: str, *, trainable: bool = True) -> Policy:
    """Load a base model (any causal LM with a chat template), or an adapter folder with its base, ready for `cfg.tune`.

    Raises ValueError in one sentence.
    """
    device = torch.device("cuda" if cfg.device == "auto" and torch.cuda.is_available() else "cpu" if cfg.device == "auto" else cfg.device)
    path = str(TINY) if path == "tiny" else path
    adapter = Path(path) if (Path(path) / "adapter_config.json").exists() else Path(cfg.adapter) if cfg.adapter else None
    made_for = adapter_config(adapter)["base_model_name_or_path"] if adapter else ""
    base = made_for if adapter == Path(path) else path
    lora = cfg.tune == "lora" or adapter is not None
    if adapter and cfg.tune == "full":
        raise ValueError(f"{str(adapter)!r} is a LoRA adapter, so it cannot go with --tune full.")
    config, dtype = model_config(base), compute_dtype(device, lora)
    limit = getattr(config, "max_position_embeddings", None)
    if limit and cfg.max_context + cfg.max_analysis > limit:  # the analyzer reads an episode and writes behind it
        raise ValueError(f"--max_context {cfg.max_context} plus --max_analysis {cfg.max_analysis} exceeds the {limit} positions of {base!r}.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(adapter if adapter and (adapter / "tokenizer_config.json").exists() else base)
        kwargs = dict(dtype=dtype) | (dict(device_map={"": device}) if lora else {})
        if lora and not cfg.no_4bit:
            from transformers import BitsAndBytesConfig
            kwargs["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
        model = AutoModelForCausalLM.from_pretrained(base, **kwargs)
        if not hasattr(model, "model") or model.get_output_embeddings() is None:
            raise ValueError("it is no causal language model with a backbone and a head")
    except Exception as error:  # a folder with something wrong makes transformers raise anything
        raise ValueError(f"cannot load the model {path!r}: {' '.join(str(error).split())[:300]}") from error
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):  # heads the chunked kernel does not model
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{path!r} changes its logits by {name}; seed_mini scores hidden @ head.T / temperature only.")
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers):
        raise ValueError(f"{path!r} has layers without full attention (a sliding window, say); the cache of seed_mini's generation knows full attention only.")
    if cfg.checkpointing and trainable:  # takes effect inside recomputing() only
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()  # a frozen embedding: without it the first layer's input has no gradient
    model = _add_lora(cfg, model, adapter, trainable) if lora else model.to(device)
    model.requires_grad_(False) if not trainable else None
    end_id, first, later = chat_pieces(tokenizer)
    words = [t.content for t in tokenizer.added_tokens_decoder.values() if not t.special and len(t.content) > 1]  # "\n" is no control token
    policy = Policy(model.eval(), tokenizer, device, end_id, first, later, control_words=words)
    if cfg.checkpointing and trainable:
        policy.recompute = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if dtype == torch.float16:
        saved = adapter / "seed_mini.json" if adapter else None
        saved = json.loads(saved.read_text()) if saved and saved.exists() else {}
        scale, policy.clean_steps = saved.get("loss_scale", 1.0), saved.get("clean_steps", 0)
        policy.loss_scale = scale if scale > 1 else 2.0 ** 14  # 1: it was saved where no scale is needed
    return policy


def adapter_config(folder: Path) -> dict:
    """adapter_config.json of a PEFT folder, which must name its base. Raises ValueError in one sentence."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        if isinstance(config["base_model_name_or_path"], str):
            return config
        raise KeyError("base_model_name_or_path")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder)!r} is not a LoRA adapter folder: its adapter_config.json is missing or broken, or names no base.") from error


def base_check(model) -> list[float]:
    """A few numbers of the base's embedding, saved with an adapter: names and folders of a base change, its weights do not."""
    return model.get_input_embeddings().weight[:4, :4].float().flatten().tolist()


def _put_adapter(model, folder: Path, trainable: bool):
    """Load an adapter; refuse, with the reason, one of another base or one that would not do here what it was trained to do. Raises ValueError."""
    from peft import PeftConfig, PeftModel
    from peft.tuners.tuners_utils import check_target_module_exists
    from safetensors import safe_open
    config, check, modules = PeftConfig.from_pretrained(folder), folder / "seed_mini.json", dict(model.named_modules())
    if config.peft_type != "LORA":
        raise ValueError(f"the adapter {str(folder)!r} is of type {config.peft_type}; seed_mini knows LoRA only.")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    for name in [n for n, m in modules.items() if m is head or (tied and m is embedding)]:
        saved = config.trainable_token_indices or any(name.endswith(part) for part in config.modules_to_save or ())
        if saved or check_target_module_exists(config, name):
            raise ValueError(f"the adapter {str(folder)!r} changes {name}: " + (
                "head and embedding are one tied matrix in this model, and an adapter on one silently changes or misses the other."
                if tied else "log-probs are computed from the frozen head, so it would have no effect."))
    with safe_open(folder / "adapter_model.safetensors", "pt") as f:
        layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in f.keys()}
    other = check.exists() and not np.allclose(json.loads(check.read_text())["base_check"], base_check(model), rtol=0.01, atol=1e-5)
    try:
        if not other and layers <= modules.keys():
            loaded = PeftModel.from_pretrained(model, folder, is_trainable=trainable)
            loaded.peft_config["default"].base_model_name_or_path = model.name_or_path  # where the base is now, for --resume
            return loaded
    except RuntimeError:  # other sizes
        pass
    raise ValueError(f"the adapter {str(folder)!r} was made for {config.base_model_name_or_path!r} and does not fit {model.name_or_path!r}.")


def _add_lora(cfg: Config, model, adapter: Path | None, trainable: bool):
    """LoRA on every linear layer but the head. A tied head is the embedding: an adapter there would change both, so it is left alone.

    peft's prepare_model_for_kbit_training is not called: it would turn embedding and head to fp32 (twice 0.6 GB for Qwen3-1.7B).
    """
    from peft import LoraConfig, get_peft_model
    for module in model.modules():  # bitsandbytes: on CPUs with AVX512-BF16 the first forward without gradient would repack the weights,
        if hasattr(module, "support_avx512bf16_for_cpu"):  # round their scales to bf16, and switch to a product that has no gradient
            module.support_avx512bf16_for_cpu = False
    if adapter is not None:
        return _put_adapter(model, adapter, trainable)
    with torch.random.fork_rng():  # peft draws the A matrices from torch's global generator
        torch.manual_seed(cfg.seed)
        return get_peft_model(model, LoraConfig(r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def is_lora(policy: Policy) -> bool:
    """Whether adapters are trained rather than the weights themselves."""
    return hasattr(policy.model, "peft_config")


def freeze_reference(policy: Policy, adapter: Path | None = None) -> None:
    """The current weights (LoRA: or a saved adapter) become the reference policy of the KL term (the paper: the checkpoint RL starts from).

    LoRA keeps ONE set of base weights: the reference is a second, frozen adapter; or, if that adapter is still zero, the base with adapters off.
    """
    if not is_lora(policy):
        policy.reference = copy.deepcopy(policy.model).requires_grad_(False).eval()
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    model = policy.model
    state = load_file(adapter / "adapter_model.safetensors") if adapter else get_peft_model_state_dict(model, adapter_name="default")
    if "reference" in model.peft_config:
        model.delete_adapter("reference")
    if any(x.any() for name, x in state.items() if ".lora_B." in name):
        with torch.random.fork_rng():  # the random start is overwritten
            model.add_adapter("reference", copy.deepcopy(model.peft_config["default"]))
        set_peft_model_state_dict(model, {name: x.clone() for name, x in state.items()}, adapter_name="reference")
        model.set_requires_grad("reference", False)
    model.set_adapter("default")


@contextlib.contextmanager
def reference_of(policy: Policy):
    """`with reference_of(policy) as reference:` the same policy with the reference weights (a frozen copy, a frozen adapter, or no adapter)."""
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
    """Inside, a forward pass with gradient keeps only each layer's input (activation checkpointing); never in generation or evaluation.

    Transformers asks a layer's `training` flag. Only that flag is set, so the model itself stays in eval mode: no dropout, ratio 1.
    """
    on = torch.is_grad_enabled()
    for layer in policy.recompute:
        layer.training = on
    try:
        yield
    finally:
        for layer in policy.recompute:
            layer.training = False


# ------------------------------------------------------------------------------------------------------------------
# 3. Generation: a KV cache for a batch of growing sequences
# ------------------------------------------------------------------------------------------------------------------
PREFILL = {"cpu": 1 << 18, "cuda": 8192}  # padded tokens of one forward pass in generation; long prompts go in pieces


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
        width, most = int(sizes.max()), max(1, PREFILL[self.policy.device.type] // len(chunks))
        if width > most:  # a row's answer is that of its last piece
            for start in range(0, width, most):
                hidden = self.feed([c[start:start + most] for c in chunks])
                last = hidden if start == 0 else torch.where((sizes > start).to(device)[:, None], hidden, last)
            return last
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
    dropped: str = ""  # why it was taken out of its update, see drop()


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
    if not math.isfinite(reward):  # an environment that says so is out of order; the advantages of its group must not notice
        reward, truncated, info = 0.0, True, info | dict(end="env died", reason="its reward was not a finite number")
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
        episode.end, episode.reason = "won" if episode.won else info.get("end", "step limit"), info.get("reason", "")
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
    while len(rolls) < len(games):
        luck = [r.bit_generator.state for r in rngs[len(rolls):len(rolls) + cfg.rollout_batch]]

        def play():
            """The next batch of episodes."""
            at = slice(len(rolls), len(rolls) + cfg.rollout_batch)
            for r, state in zip(rngs[at], luck):  # a second try has the same luck
                r.bit_generator.state = state
            return _play(policy, pool, games[at], cfg, rngs[at], temperature, (skill_texts or [""] * len(games))[at])

        part, more = retry_smaller(cfg, "rollout_batch", counters, play)
        rolls += part
        counters += more
    if rolls and all(r.episode.end == "game unplayable" for r in rolls):  # one bad file must not stop a night's run; all of them are no run
        raise RuntimeError(f"none of {len({g.id for g in games})} games can be played; the last one: {rolls[-1].episode.reason}")
    if rolls and all(r.episode.end == "context limit" and not r.episode.steps for r in rolls):
        raise RuntimeError(f"no game can begin: the first prompt alone needs more than --max_context {cfg.max_context} "
                           f"minus --max_response {cfg.max_response}.")
    return rolls, counters + (Counter(pool.counters) - before)  # + also drops the zeros


def _play(policy: Policy, pool: envs.EnvPool, games: list[envs.Game], cfg: Config, rngs: list[np.random.Generator], temperature: float,
          skill_texts: list[str]) -> tuple[list[Rollout], Counter]:
    """One batch of episodes from reset to end, in one KV cache."""
    rolls, chunks, counters = [], {}, Counter()
    for i, (game, (observation, info)) in enumerate(zip(games, pool.reset(games))):
        roll = start_rollout(policy, cfg, game, observation, info, skill_texts[i])
        roll.episode.end = info.get("end", "" if len(roll.ids) + cfg.max_response < cfg.max_context else "context limit")
        roll.episode.reason = info.get("reason", "")
        if roll.episode.end:  # over before it began: no step, no sampled token, counted
            counters[f"ended: {roll.episode.end}"] += 1
        else:
            chunks[i] = roll.ids
        rolls.append(roll)
    alive = sorted(chunks)
    kv = KVBatch(policy, len(alive)) if alive else None
    while alive:
        hidden = kv.feed([chunks[i] for i in alive])
        new, logps = generate_turn(kv, hidden, [rngs[i] for i in alive], temperature, cfg.max_response)
        results = pool.step({i: envs.parse_action(policy.decode(ids)) for i, ids in zip(alive, new)})
        chunks = {i: take_turn(policy, cfg, rolls[i], ids, lp, results[i], counters) for i, ids, lp in zip(alive, new, logps)}
        rows = [row for row, i in enumerate(alive) if chunks[i]]
        alive = [alive[row] for row in rows]
        if alive:
            kv.keep(rows)
    return rolls, counters


def token_costs(policy: Policy, cfg: Config, roll: Rollout, window: int = 5) -> tuple[int, int]:
    """Tokens one pass over the same episode takes with one prompt per step (the paper), and tokens of our transcript that list admissible commands.

    A step there = role, task and instruction + the last `window` pairs of observation and command + this turn's text + the response. The
    transcript takes len(roll.ids), each token once. Without that format's numbering words, so the comparison flatters it.
    """
    def size(text):
        """Tokens of a text."""
        return len(policy.encode(text))

    runs = [len(list(group)) for _, group in itertools.groupby(roll.sampled)]  # prompt, response, turn, response, ...
    fixed = len(policy.user_turn([])) + sum(map(size, envs.prompt_parts(roll.episode.task, "", think=cfg.think)))
    glue = len(policy.later[0] + policy.later[1])
    per_step = listed = 0
    past = [(size(step.observation), size(step.action)) for step in roll.episode.steps]
    for t, (seen, _) in enumerate(past):
        now = runs[2 * t] - (glue if t else fixed)  # this turn's text
        per_step += fixed + sum(map(sum, past[max(0, t - window):t])) + now + runs[2 * t + 1]
        listed += max(0, now - seen) if cfg.show_admissible else 0
    return per_step, listed


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
    with recomputing(policy):
        hidden = policy.backbone(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]; right padding: causal attention never sees it
    row, column = torch.tensor([(b, t) for b, (_, m) in enumerate(sequences) for t, on in enumerate(m) if on],
                               dtype=torch.long, device=policy.device).reshape(-1, 2).T
    rank = torch.tensor([k for _, m in sequences for k in range(sum(m))], dtype=torch.long, device=policy.device)
    return hidden[row, column - 1], ids[row, column], row, rank


def token_logp(policy: Policy, sequences: list[Sequence], temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One forward pass: log-probs [B, R], mask [B, R] and entropy [B, R], R = most response tokens of a sequence.

    Entropy is a metric: zeros while gradients are on, since no training pass needs it.
    The temperature is the one the tokens were sampled at: otherwise the ratio to the sampler is not 1 before the first step.
    """
    hidden, labels, row, rank = response_hidden(policy, sequences)
    scoring = not torch.is_grad_enabled()
    flat = losses.chunked_logprob(hidden, policy.head, labels, temperature=temperature, return_entropy=scoring)
    flat, entropy = flat if scoring else (flat, torch.zeros_like(flat))
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

    Not in the paper: a small model that learns the analysis format from nothing forgets how to act (README, "Where we differ from the paper and from the released code").
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


SKIPPED, SCALED = "optimizer steps skipped: gradient not finite", "optimizer steps skipped: fp16 loss scale halved"  # counters


def optimizer_step(policy: Policy, cfg: Config, optimizer: torch.optim.Optimizer) -> tuple[float, str]:
    """Undo the loss scale, clip, step. Returns the gradient norm before clipping, and the counter of why the step was skipped ("": it was not).

    The loss scale serves fp16 alone: it halves when a gradient overflows and doubles after 200 clean steps. Elsewhere it is 1 and stays 1.
    """
    params = optimizer.param_groups[0]["params"]
    if policy.loss_scale != 1:
        torch._foreach_div_([p.grad for p in params if p.grad is not None], policy.loss_scale)
    norm, skipped = float(torch.nn.utils.clip_grad_norm_(params, cfg.max_grad_norm)), ""
    if math.isfinite(norm):
        optimizer.step()
        policy.clean_steps += 1
        if policy.loss_scale != 1 and policy.clean_steps % 200 == 0:
            policy.loss_scale *= 2
    else:  # such a step would turn every weight into NaN
        skipped = SCALED if policy.loss_scale > 2 else SKIPPED
        policy.loss_scale, policy.clean_steps = policy.loss_scale / 2 if skipped == SCALED else policy.loss_scale, 0
    optimizer.zero_grad(set_to_none=True)
    return norm, skipped


def cosine(step: int, steps: int) -> float:
    """Learning-rate factor of Stage 1: 10% linear warm-up, then a half cosine to 0."""
    warm = max(1, steps // 10)
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def sft(policy: Policy, cfg: Config, sequences: list[Sequence], acting: list[Sequence], log) -> None:
    """Train the policy to write skills: token mean of -log p(response) per batch, plus the optional anchor on `acting` transcripts."""
    optimizer = make_optimizer(policy, cfg.sft_lr, cfg.weight_decay)
    steps, skips, in_a_row = cfg.sft_epochs * math.ceil(len(sequences) / cfg.sft_batch), Counter(), 0
    anchored = cfg.sft_anchor > 0 and len(acting) > 0
    for step in range(steps):
        epoch, at = divmod(step * cfg.sft_batch, math.ceil(len(sequences) / cfg.sft_batch) * cfg.sft_batch)
        order = counted_rng(cfg.seed, "sft order", epoch).permutation(len(sequences))
        batch = [sequences[i] for i in order[at:at + cfg.sft_batch]]
        tokens = sum(sum(m) for _, m in batch)
        optimizer.param_groups[0]["lr"] = cfg.sft_lr * cosine(step, steps)
        anchor = torch.zeros(())

        def backward():
            """Gradients of the batch's mean loss, which is returned."""
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for rows in micro_batches(batch, cfg.micro_tokens):
                logp, mask, _ = token_logp(policy, [batch[i] for i in rows], 1.0)
                loss = -(logp * mask).sum() / tokens
                (policy.loss_scale * loss).backward()
                total += loss.item()
            return total

        total = retry_smaller(cfg, "micro_tokens", skips, backward)
        if anchored:
            picks = counted_rng(cfg.seed, "sft anchor", step).choice(len(acting), size=min(cfg.sft_batch, len(acting)), replace=False)
            anchor = anchor_kl(policy, [acting[i] for i in picks])
            (policy.loss_scale * cfg.sft_anchor * anchor).backward()
        norm, skipped = optimizer_step(policy, cfg, optimizer)
        skips.update([skipped] if skipped else [])
        in_a_row = in_a_row + 1 if skipped == SKIPPED else 0
        if in_a_row > 3:
            raise RuntimeError("Stage 1: four steps in a row had gradients that are not finite. Start again with a lower --sft_lr.")
        if skips or step % 10 == 0 or step == steps - 1:
            log(dict(stage="sft", step=step + 1, steps=steps, loss=total, anchor_kl=anchor.item(), grad_norm=norm,
                     learning_rate=optimizer.param_groups[0]["lr"], **(dict(counters=dict(skips)) if skips else {})))
            skips.clear()


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
        out, cut = retry_smaller(cfg, "rollout_batch", counters,
                                 lambda: complete(policy, [prompts[i] for i in some], cfg.max_analysis, cfg.rollout_batch))
        for i, text in zip(some, out):
            texts[i] = text
        counters["analyses cut at max_analysis"] += cut
        replies = skills.parse_replies(texts)
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


DROPPED = "episodes dropped: numbers not finite"  # counter


def drop(rolls: list[Rollout], scores: Scores, bad: list[int], why: str) -> int:
    """Take episodes out of the update and return how many: from here on they have no sampled token. The reward stays in its group.

    Run.write_rollouts keeps them in dropped.jsonl.
    """
    for i in bad:
        rolls[i].dropped, rolls[i].sampled = why, [False] * len(rolls[i].ids)
        for s in (scores.old, scores.reference, scores.teacher, scores.entropy):
            s[i] = s[i][:0]
    return len(bad)


def drop_not_finite(rolls: list[Rollout], scores: Scores) -> int:
    """Drop episodes with a log-prob that is NaN or inf, by the sampler or by a scoring pass. Returns how many.

    Before the training pass, because a gradient that is 0 at such a token is still NaN in the layers below it.
    """
    bad = [i for i, r in enumerate(rolls) if not all(s[i].isfinite().all() for s in (scores.old, scores.reference, scores.teacher))
           or not all(map(math.isfinite, r.logp))]
    return drop(rolls, scores, bad, "log-prob not finite")


def gradients(policy: Policy, cfg: Config, params: list, rolls: list[Rollout], scores: Scores, advantages: torch.Tensor, has_skill: list[bool],
              part: list[int], apart: bool) -> list[tuple[str, float]]:
    """Put the gradient of one mini-batch (rollouts `part`), times the loss scale, into .grad of the parameters; returns the loss
    statistics, as pairs to be added up.

    The mini-batch is split into micro-batches that fit in memory; every mean is taken with the mini-batch's own number of tokens, so the
    split does not change the loss (the released code averages within each micro-batch, which weighs tokens unequally).
    With `apart` the gradients of the RL part and of the OPD part are taken apart, to log their norms: backward is linear, so their sum
    is the gradient of the joint loss.
    """
    stats, sequences = [], [plain(rolls[i]) for i in part]
    use_opd = cfg.method == "seed" and not cfg.no_opd
    tokens = sum(sum(m) for _, m in sequences)
    skill_tokens = sum(sum(rolls[i].sampled) for i in part if has_skill[i])
    opd_grads = [torch.zeros_like(p) for p in params] if apart else None
    for rows in micro_batches(sequences, cfg.micro_tokens):
        index = [part[r] for r in rows]
        logp, mask, _ = token_logp(policy, [sequences[r] for r in rows], cfg.temperature)
        old, ref, teacher = (pad([part_scores[i] for i in index], logp.shape[1]) for part_scores in (scores.old, scores.reference, scores.teacher))
        skill_mask = torch.tensor([float(has_skill[i]) for i in index], device=logp.device)
        rl, opd, out = losses.seed_loss(
            logp, old, ref, teacher if use_opd else None, advantages[index].to(logp), mask, skill_mask, clip_range=cfg.clip_range,
            dual_clip=cfg.dual_clip, kl_coef=cfg.kl_coef, lambda_opd=cfg.lambda_opd, beta_opd=cfg.beta_opd, rl_tokens=tokens,
            opd_tokens=skill_tokens)
        if apart:
            for total, g in zip(opd_grads, torch.autograd.grad(policy.loss_scale * opd, params, retain_graph=True, allow_unused=True)):
                total += 0 if g is None else g
            (policy.loss_scale * rl).backward()
        else:
            (policy.loss_scale * (rl + opd)).backward()
        stats += [(name, float(out[key])) for key, name in LOSS_METRICS.items()]
    if apart:
        stats += [("grad_norm_rl", _norm([p.grad for p in params]) / policy.loss_scale), ("grad_norm_opd", _norm(opd_grads) / policy.loss_scale)]
        for p, g in zip(params, opd_grads):
            p.grad = g if p.grad is None else p.grad + g
    return stats


def update_policy(policy: Policy, cfg: Config, optimizer: torch.optim.Optimizer, rolls: list[Rollout], scores: Scores, advantages: torch.Tensor,
                  has_skill: list[bool], update: int) -> dict:
    """One epoch over the rollouts in `cfg.minibatches` optimizer steps. Returns the loss statistics, averaged over the steps.

    One step with a gradient that is not finite would turn every weight into NaN. So the episodes that cause one are found (each alone),
    dropped, and the step is taken without them; if none of them does it alone, the step is skipped.
    """
    params = optimizer.param_groups[0]["params"]
    totals, steps = Counter(), 0
    use_opd = cfg.method == "seed" and not cfg.no_opd
    usable = [i for i, r in enumerate(rolls) if any(r.sampled)]
    order = [usable[i] for i in counted_rng(cfg.seed, "minibatch", update).permutation(len(usable))]

    def attempt(part, apart=False):
        """Gradients of these rollouts alone, in place of any before; (statistics, whether all of it is finite)."""
        def work():
            """What retry_smaller may have to do again."""
            optimizer.zero_grad(set_to_none=True)
            return gradients(policy, cfg, params, rolls, scores, advantages, has_skill, part, apart)
        stats = retry_smaller(cfg, "micro_tokens", totals, work)
        return stats, all(math.isfinite(value) for _, value in stats) and math.isfinite(_norm([p.grad for p in params]))

    for part in np.array_split(order, cfg.minibatches):
        part = [int(i) for i in part]
        if not part:
            continue
        stats, good = attempt(part, use_opd and steps == 0)
        if not good and policy.loss_scale <= 2:  # above that, fp16's scale is the first suspect, and optimizer_step halves it
            bad = [i for i in part if not attempt([i])[1]]
            totals[DROPPED] += drop(rolls, scores, bad, "loss or gradient not finite")
            part = [i for i in part if i not in bad]
            stats, good = attempt(part, use_opd and steps == 0) if bad and part else (stats, False)
        if good or policy.loss_scale > 2:
            norm, skipped = optimizer_step(policy, cfg, optimizer)
            totals.update([skipped] if skipped else [])
            for name, value in [] if skipped else stats + [("grad_norm", norm)]:
                totals[name] += value
            steps += not skipped
        else:
            totals[SKIPPED] += bool(part)
            optimizer.zero_grad(set_to_none=True)
    once = ("grad_norm_rl", "grad_norm_opd", SKIPPED, SCALED, DROPPED, HALVED.format("micro_tokens"))
    return {key: value if key in once else value / max(1, steps) for key, value in totals.items()}


# losses.seed_loss's statistics that are logged, under the names that users of other trainers know
LOSS_METRICS = {"loss": "loss", "rl_loss": "rl_loss", "opd_loss": "opd_loss", "kl": "kl", "approx_kl": "approx_kl", "clip_fraction": "clip_ratio"}


def _norm(grads: list[torch.Tensor | None]) -> float:
    return float(torch.stack([g.float().norm() for g in grads if g is not None] or [torch.zeros(())]).norm())


def gate_metrics(cfg: Config, rolls: list[Rollout], replies: list[skills.Reply], scores: Scores) -> dict:
    """What tells a working SEED run from one that silently is GRPO: parse rate, coverage, Delta by outcome, and the gate. All token means."""
    covered = [i for i, reply in enumerate(replies) if reply.skill and any(rolls[i].sampled)]
    tokens = sum(sum(r.sampled) for r in rolls)
    out = dict(parse_rate=sum(bool(r.skill) for r in replies) / len(replies),
               skill_token_share=sum(sum(rolls[i].sampled) for i in covered) / max(1, tokens))
    deltas = {i: scores.teacher[i] - scores.old[i] for i in covered}

    def mean(rows):
        """Token mean over episodes; None without any, which JSON can say and NaN cannot."""
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
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    P, G = cfg.tasks_per_update, cfg.group_size
    batch = [game for game in games_of(cfg, games, update) for _ in range(G)]
    rngs = [counted_rng(cfg.seed, "rollout", update, i) for i in range(P * G)]
    rolls, counters = rollout(policy, pool, batch, cfg, rngs, cfg.temperature)  # (a) act
    costs = [token_costs(policy, cfg, r) for r in rolls[::G]]  # one rollout of each game
    clock.lap("rollout")
    replies, more = analyze_own(policy, cfg, rolls, update, library) if cfg.method == "seed" else (None, Counter())  # (b) analyze
    clock.lap("analysis")
    scores = retry_smaller(cfg, "micro_tokens", counters, lambda: score_all(policy, cfg, rolls, replies))  # (c) teach
    counters[DROPPED] = drop_not_finite(rolls, scores)
    clock.lap("scoring")
    rewards = torch.tensor([r.episode.reward for r in rolls], dtype=torch.float64).view(P, G)
    advantages = losses.group_advantages(rewards).view(-1).float()
    has_skill = [bool(r.skill) for r in replies] if replies else [False] * len(rolls)
    stats = update_policy(policy, cfg, optimizer, rolls, scores, advantages, has_skill, update)
    counters += Counter({name: stats.pop(name, 0) for name in (DROPPED, SKIPPED, SCALED, HALVED.format("micro_tokens"))})
    clock.lap("training")
    run.write_rollouts(rolls, replies, update, stage="rl", scores=scores)
    lengths = [sum(r.sampled) for r in rolls]
    gaps = [(torch.tensor([lp for lp, on in zip(r.logp, r.sampled) if on]) - s.cpu()).abs().max() for r, s in zip(rolls, scores.old) if len(s)]
    line = dict(stage="rl", update=update, reward=float(rewards.mean()), reward_std=float(rewards.std(dim=1).mean()),
                success=float(np.mean([r.episode.won for r in rolls])),
                frac_reward_zero_std=float((rewards.amax(1) == rewards.amin(1)).double().mean()),
                frac_outcome_tied=float(np.mean([len({r.episode.won for r in rolls[g * G:(g + 1) * G]}) == 1 for g in range(P)])))
    if replies:
        line |= gate_metrics(cfg, rolls, replies, scores)
    return line | stats | {
        "entropy": float(torch.cat(scores.entropy).sum()) / max(1, sum(lengths)), "sampler_gap": float(max(gaps, default=0.0)), "repetition": repetition(rolls),
        "invalid_action_rate": counters["invalid actions"] / max(1, sum(len(r.episode.steps) for r in rolls)),
        "completions/mean_length": float(np.mean(lengths)), "episode_tokens": float(np.mean([len(r.ids) for r in rolls])),
        "episode_steps": float(np.mean([len(r.episode.steps) for r in rolls])), "num_tokens": sum(len(r.ids) for r in rolls),
        "one_prompt_per_step_tokens": float(np.mean([c for c, _ in costs])), "admissible_tokens": float(np.mean([c for _, c in costs])),
        **(measured_peak(policy, cfg, rolls) if policy.device.type == "cuda" else {}),
        "learning_rate": cfg.lr, "counters": dict(counters + more),
        "step_time": clock.total(), **{f"seconds/{k}": v for k, v in clock.laps.items()}}


def warnings_of(cfg: Config, line: dict) -> list[str]:
    """Sentences for what a user must not overlook in a metrics line."""
    out = []
    if cfg.method == "seed" and line["parse_rate"] < 0.5:
        out.append(f"only {line['parse_rate']:.0%} of the analyses parsed, so most of this update was plain GRPO. Run Stage 1 longer "
                   "(--sft_epochs), or raise --max_analysis; if they parsed before, the updates unlearn it: lower --lr. \"text\" in "
                   "skills.jsonl is what the policy wrote.")
    if cfg.method == "seed" and line["gate_mean"] is not None and not 0.02 < line["gate_mean"] < 0.98:
        out.append(f"the gate is dead (mean {line['gate_mean']:.3f}): it no longer tells tokens apart. Lower --beta_opd, or look at delta_mean.")
    if line["repetition"] > 0.6 or (line["entropy"] < 0.01 and line.get("completions/mean_length", 1)):
        out.append(f"the policy is collapsing (repeated commands {line['repetition']:.0%}, entropy {line['entropy']:.3f}). Lower --lr or "
                   "--lambda_opd, or raise --kl_coef, and start again from an earlier checkpoint.")
    if {DROPPED, SKIPPED} & line["counters"].keys():
        out.append("an episode or a step had numbers that are not finite and was left out (see counters); "
                   "a fourth such update in a row stops the run.")
    if line["sampler_gap"] > (0.5 if cfg.tune == "lora" else 0.05):  # adapters compute in 16 bit on a card, where a logit of 20 is rounded to 0.1
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
    low, high = (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)
    return low if wins else 0.0, high if wins < n else 1.0  # exactly, where rounding would leave the rate outside its interval


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
LOGS = ("metrics.jsonl", "rollouts.jsonl", "skills.jsonl", "dropped.jsonl")
START = "checkpoints/update-000000"  # in a run's folder: where Stage 2 begins, its reference policy, and what --sft_from reads


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

    @contextlib.contextmanager
    def opened(self, fresh: bool):
        """`with run.opened(fresh):` the folder is this process's alone. ValueError if another process works in it.

        A lock of the operating system on the folder itself: it ends with the process, however that ends, and leaves no file behind.
        """
        self.dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.dir, os.O_RDONLY)  # not inherited by the environment workers
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.dir} is in use: another process is running there. Wait for it, or choose another --name.") from None
            if fresh:
                self.create()
            yield
        finally:
            os.close(handle)

    def create(self) -> None:
        """An empty folder with the config; what a run has left there is deleted with --overwrite, or with --resume if it has no checkpoint."""
        present = [p for p in self.dir.iterdir() if p.name != "config.json.tmp"]
        if present and not run_config(self.dir):
            raise ValueError(f"{self.dir} holds files that are no run of seed_mini; choose another --name or --out.")
        if present and not (self.cfg.overwrite or self.cfg.resume):
            raise ValueError(f"{self.dir} already holds a run: continue it with --resume, replace it with --overwrite, or choose another --name.")
        if self.cfg.resume and any((self.dir / "checkpoints").glob("update-*")):
            raise ValueError(f"{self.dir} got a checkpoint while this process was starting; run --resume again.")
        for path in sorted(present, key=lambda p: p.name == "config.json"):  # that one last: killed here, it is still a run
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        write_json(self.dir / "config.json", dataclasses.asdict(self.cfg) | dict(git_commit=git_commit(), torch=torch.__version__, format=FORMAT))

    def say(self, text: str) -> None:
        """One line for the person at the terminal."""
        print(safe(text), flush=True)

    def log(self, line: dict) -> None:
        """One line of metrics.jsonl, and its progress line."""
        line = finite(line)
        with open(self.dir / "metrics.jsonl", "a") as f:
            f.write(json.dumps(line, allow_nan=False) + "\n")
        self.metrics.append(line)
        self.say(progress_line(line))

    def write_rollouts(self, rolls: list[Rollout], replies: list[skills.Reply] | None, update: int, stage: str, scores: Scores | None = None) -> None:
        """Readable episodes to rollouts.jsonl (one of each game, and all that have no token to train), every skill to skills.jsonl with
        outcome, status and mean Delta (text: what was written where none could be read), and what was dropped to dropped.jsonl: episode,
        token ids and the sampler's log-probs (null: not finite)."""
        seen = set()
        with open(self.dir / "rollouts.jsonl", "a") as f:
            for r in rolls:
                if r.episode.game_id not in seen or not any(r.sampled):
                    f.write(json.dumps({"update": update, "stage": stage} | dataclasses.asdict(r.episode)) + "\n")
                seen.add(r.episode.game_id)
        for r in rolls:
            if r.dropped:
                with open(self.dir / "dropped.jsonl", "a") as f:
                    row = dict(update=update, why=r.dropped, episode=dataclasses.asdict(r.episode), ids=r.ids, logp=r.logp)
                    f.write(json.dumps(finite(row)) + "\n")
        with open(self.dir / "skills.jsonl", "a") as f:
            for i, (r, reply) in enumerate(zip(rolls, replies or [])):
                delta = (scores.teacher[i] - scores.old[i]).mean().item() if scores and reply.skill and len(scores.old[i]) else None
                f.write(json.dumps(dict(update=update, stage=stage, game_id=r.episode.game_id, task=r.episode.task, won=r.episode.won,
                                        status=reply.status, skill=reply.skill, summary=reply.summary, text=reply.text, delta_mean=delta)) + "\n")

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
            if path.exists():
                sync(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync(final.parent)
        self.prune()

    def best(self) -> str:
        """Name of the checkpoint with the best evaluation so far (the first of equals), "" without any. Kept for the user, never reported as
        the result: it was chosen on the games it is measured on."""
        rows = [m for m in self.metrics if m["stage"] == "eval" and m["at"].isdigit() and m["split"] == self.cfg.eval_splits[0]]
        rows = [(m["success"], f"update-{int(m['at']):06d}") for m in rows]
        rows = [row for row in rows if (self.dir / "checkpoints" / row[1]).exists()]  # not every evaluation has a checkpoint
        return max(rows, key=lambda row: row[0])[1] if rows else ""

    def prune(self) -> None:
        """Keep the newest two checkpoints (if the last is torn, the one before is good), the best, and the start of Stage 2, which is the
        reference policy and what --sft_from reads. Delete the others."""
        kept = sorted((self.dir / "checkpoints").glob("update-*"))
        for old in kept[:-2]:
            if old.name not in (Path(START).name, self.best()):
                shutil.rmtree(old)

    def newest(self) -> tuple[Path, dict]:
        """The newest checkpoint whose checksums agree, and its state. Raises ValueError if there is none."""
        for path in sorted((self.dir / "checkpoints").glob("update-*"), reverse=True):
            if state := good_checkpoint(path):
                return path, state
            self.say(f"warning: checkpoint {path} is damaged; trying the one before")
        raise ValueError(f"--resume: {self.dir} holds no usable checkpoint. Start it again with --overwrite.")

    def rewind(self, state: dict) -> None:
        """Cut the logs back to where they were when the checkpoint was written (which takes half-written lines away), and reload the metrics."""
        for name, size in state["log_bytes"].items():
            data = (self.dir / name).read_bytes()[:size] if (self.dir / name).exists() else b""
            if len(data) < size:  # not by a kill: the logs are synced before the checkpoint gets its name
                self.say(f"warning: {self.dir / name} is shorter than it was; its last lines are lost")
                data = data[:data.rfind(b"\n") + 1]
            if data or (self.dir / name).exists():
                os.truncate(self.dir / name, len(data))
        self.metrics = read_jsonl(self.dir / "metrics.jsonl")
        self.update = state["update"]


def run_config(folder: Path) -> dict:
    """config.json of a run's folder; {} if this is none (model folders have a config.json, too, and must never be taken for a run and emptied).

    Raises ValueError if it cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        return config if isinstance(config, dict) and "method" in config else {}
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is damaged ({error}). Start the run again in another folder.") from error


def good_checkpoint(path: Path) -> dict | None:
    """The state of a checkpoint folder, None if it is damaged. Raises ValueError if a newer seed_mini wrote it."""
    try:
        state = json.loads((path / "state.json").read_text())
        if state["format"] > FORMAT:
            raise ValueError(f"{path} was written by a newer seed_mini (format {state['format']}, this one reads {FORMAT}); update seed_mini.")
        return state if all(sha256(path / name) == digest for name, digest in state["sha256"].items()) else None
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def finite(value):
    """The same JSON data with None for every number that is not finite: NaN is no JSON, and no measurement."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk: a power cut must not undo a rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_jsonl(path: Path) -> list[dict]:
    """The records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_json(path: Path, data: dict) -> None:
    """Indented JSON, written to a temporary name and synced first: whoever sees the name sees all of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    sync(temporary)
    temporary.replace(path)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as f:  # not read as a whole: AdamW's moments of a large model fill many GB
        return hashlib.file_digest(f, "sha256").hexdigest()


def git_commit() -> str:
    """The commit of this checkout, for the records; "" outside a checkout."""
    out = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True) if shutil.which("git") else None
    return out.stdout.strip() if out and out.returncode == 0 else ""


def save_policy(policy: Policy, path: Path) -> None:
    """An ordinary Hugging Face folder (or, for LoRA, a PEFT adapter folder with a model card), with the tokenizer."""
    if is_lora(policy):
        policy.model.save_pretrained(path, selected_adapters=["default"], save_embedding_layers=False)  # "auto" would ask the hub
        base = policy.model.peft_config["default"].base_model_name_or_path
        (path / "README.md").write_text(MODEL_CARD.format(base=base))  # instead of peft's empty form
        write_json(path / "seed_mini.json", dict(base_check=base_check(policy.model), loss_scale=policy.loss_scale, clean_steps=policy.clean_steps))
    else:
        policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)


MODEL_CARD = """---
base_model: {base}
library_name: peft
pipeline_tag: text-generation
tags: [lora, seed, alfworld]
---
A LoRA adapter for `{base}`, trained to play ALFWorld by seed_mini ([SEED](https://arxiv.org/abs/2607.14777), or GRPO as its baseline). How it was
trained and what it scored is in the run's config.json and report.md, three folders up. At inference it needs no skill, memory or retrieval.

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "<this folder>")
    python seed_mini.py --eval --model {base} --adapter <this folder>
"""


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Put saved AdamW moments back, bit for bit."""
    state = {}
    for name, value in load_file(path).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    full = optimizer.state_dict()
    full["state"] = state
    optimizer.load_state_dict(full)


def rate(result: dict) -> str:
    """Success and its interval."""
    return "{success:.1%} [{interval[0]:.1%}, {interval[1]:.1%}]".format_map(result)


def progress_line(line: dict) -> str:
    """A metrics line for the eye."""
    if line["stage"] == "eval":
        skill = " with a workflow skill in context" if line["skill_in_context"] else ""
        return f"eval {line['at']:>6} {line['split']}{skill}: {line['wins']}/{line['n']} = {rate(line)}, macro {line['macro']:.1%}"
    if line["stage"] == "library":
        return f"static skills for {line['skills']} of {line['games']} training games"
    if line["stage"] == "sft":
        if "rows" in line:
            return f"sft   base wins {line['success']:.1%} of {line['episodes']} episodes, {line['rows']} rows to learn from"
        skipped = (" skipped: the gradient is not finite" if {SKIPPED, SCALED} & line.get("counters", {}).keys()
                   else f" loss {line['loss']:.3f} anchor {line['anchor_kl']:.4f}")
        return f"sft   {line['step']:4d}/{line['steps']}{skipped}"
    if "kl" not in line:
        return f"update {line['update']:3d} | reward {line['reward']:6.2f} | nothing to learn from: no optimizer step was taken, see counters"
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
    """curves.png: success on held-out games with Wilson intervals; training success, ties and invalid actions; Delta by update."""
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
        for key, colour, style, label in (("delta_won", "#0072B2", "-", "mean Delta, won episodes"),
                                          ("delta_lost", "#D55E00", "--", "mean Delta, lost episodes")):
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
             f"{cfg.tasks_per_update} games x {cfg.group_size} rollouts. Evaluation at temperature {cfg.eval_temperature}, "
             "each game once, ordinary history only.", "",
             "| at | split | context | wins / n | success [Wilson 95%] | macro | invalid |", "|---|---|---|---|---|---|---|"]
    for m in evals:
        lines.append(f"| {m['at']} | {m['split']} | {'workflow skill' if m['skill_in_context'] else 'history'} | {m['wins']} / {m['n']} | "
                     f"{rate(m)} | {m['macro']:.1%} | {m['invalid_action_rate']:.0%} |")
    for m in {m["split"]: m for m in evals if not m["skill_in_context"]}.values():  # the last one of each split
        lines += ["", f"## {m['split']} at {m['at']}, by task type", "", "| task type | wins / n | success [Wilson 95%] |", "|---|---|---|"]
        lines += [f"| {t} | {v['wins']} / {v['n']} | {rate(v)} |" for t, v in m["by_type"].items()]
        lines += ["", f"Games (won in bold): {', '.join(f'**{g}**' if won else g for g, won in m['games'].items())}"]
    rl = [m for m in run.metrics if m["stage"] == "rl"]
    totals = Counter()
    for m in run.metrics:
        totals.update({k: v for k, v in m.get("counters", {}).items() if not k.startswith("ended: won")})
    lines += ["", f"Best evaluation among the kept checkpoints: {run.best() or 'none'}. It was chosen on these games, so it is no result."]
    lines += ["", "## Counted on the way", ""] + [f"* {k}: {v}" for k, v in sorted(totals.items())]
    if rl:
        lines += ["", f"Seconds per update (median): {np.median([m['step_time'] for m in rl]):.1f}. "
                      f"First update's sampler-to-scoring gap in log-prob: {rl[0]['sampler_gap']:.2e}."]
        ours, theirs, listed = (np.mean([m[k] for m in rl]) for k in ("episode_tokens", "one_prompt_per_step_tokens", "admissible_tokens"))
        lines += [f"Tokens of one pass over an episode: {ours:.0f} as one transcript ({listed:.0f} of them list admissible commands), "
                  f"{theirs:.0f} with one prompt per step and a window of 5 steps."]
    if rl and "peak_gb" in rl[0]:
        lines += [f"Peak memory: {max(m['peak_gb'] for m in rl):.1f} GB measured, {max(m['predicted_peak_gb'] for m in rl):.1f} GB predicted."]
    if rl and "parse_rate" in rl[0]:
        lines += [f"Parse rate: first update {rl[0]['parse_rate']:.0%}, last {rl[-1]['parse_rate']:.0%}. "
                  f"Tokens with a skill in the last update: {rl[-1]['skill_token_share']:.0%}."]
    (run.dir / "report.md").write_text("\n".join(lines + ["", "![curves](curves.png)", ""]))


# ------------------------------------------------------------------------------------------------------------------
# 10. Memory: what fits on a card
# ------------------------------------------------------------------------------------------------------------------
# All of it follows from config.json, so it can be said before anything is loaded. GB = 1e9 bytes.
QWEN_CONFIG = dict(num_hidden_layers=28, hidden_size=2048, num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=6144,
                   vocab_size=151936, tie_word_embeddings=True)  # as published, for --dry_run without a network


def card_memory(cfg: Config) -> float:
    """Memory of the CUDA card this run would use, in GB; 0.0 without one."""
    return torch.cuda.get_device_properties(0).total_memory / 1e9 if cfg.device != "cpu" and torch.cuda.is_available() else 0.0


def choose_model(cfg: Config) -> tuple[str, str]:
    """What --model auto means on this machine, and one line that says so ("" if the user chose)."""
    if cfg.model != "auto":
        return cfg.model, ""
    card = card_memory(cfg)
    if card >= 10:
        how = "full fine-tuning" if cfg.tune == "full" else "16-bit LoRA" if cfg.no_4bit else "QLoRA"
        return QWEN, f"model: {QWEN} in {how}, because the CUDA card has {card:.0f} GB (--model tiny takes the shipped 0.7M-parameter base instead)"
    why = f"the CUDA card has only {card:.0f} of 10 GB" if card else "no CUDA card is used"
    return "tiny", f"model: the shipped tiny base, because {why} (--model {QWEN}, or another Llama-like LM with a chat template, takes that instead)"


def memory_plan(model, cfg: Config) -> dict[str, float]:
    """Bytes on the card by use, from a model's config (attributes as in QWEN_CONFIG) and the run's settings; the two peaks come last.

    Llama-like layers are assumed, and every episode as long as allowed. With checkpointing, activations are every layer's input and one layer in
    full. Not counted: the CUDA context and fragmentation.
    """
    H, L, V, I = model.hidden_size, model.num_hidden_layers, model.vocab_size, getattr(model, "intermediate_size", None) or 4 * model.hidden_size
    head = getattr(model, "head_dim", None) or H // model.num_attention_heads
    q, kv = head * model.num_attention_heads, head * (getattr(model, "num_key_value_heads", None) or model.num_attention_heads)
    lora, size = cfg.tune == "lora", 2 if cfg.tune == "lora" else 4
    shapes = [(H, q), (H, kv), (H, kv), (q, H), (H, I), (H, I), (I, H)]  # inputs, outputs of a layer's linear maps
    linear, vocab = L * sum(a * b for a, b in shapes), V * H * (1 if model.tie_word_embeddings else 2)
    nf4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes: 4 bits, an 8-bit scale per 64 weights, a 32-bit scale per 256 scales
    trained = L * cfg.lora_rank * sum(a + b for a, b in shapes) if lora else linear + vocab
    positions, tokens = cfg.max_context + cfg.max_analysis, max(cfg.micro_tokens, cfg.max_context + cfg.max_analysis)  # one episode is never cut
    # Bytes autograd keeps per token of a layer: norms, q/k norms, attention, gated MLP; then each adapter's own fp32 copy of its input
    # (full: the linear maps' inputs). `scratch`: temporary numbers around the MLP, forward or backward.
    layer = 8 * H + (4 + 2 * size) * (q + kv) + 3 * size * I + (4 * (5 * H + q + I) + 28 * cfg.lora_rank if lora else size * (4 * H + I))
    scratch = (4 + 3 * size) * I + (4 + 2 * size) * H
    kept = L * H * size + layer if cfg.checkpointing else L * layer
    plan = dict(weights=vocab * size + linear * (nf4 if lora and not cfg.no_4bit else size),
                adapter=4.0 * trained * (1 if cfg.no_sft else 2) if lora else 0.0, reference=0.0 if lora else 4.0 * trained,
                optimizer=8.0 * trained, gradients=8.0 * trained,  # fp32; the RL and the OPD part are taken apart
                kv_cache=2.0 * L * kv * size * cfg.rollout_batch * positions, activations=float(tokens * (kept + scratch)),
                logits_chunk=float(losses.SCRATCH_BUDGET["cuda"]))
    # Generation: one layer's cache is copied as it grows and repeated for all heads; the first prompts, in pieces; the sampler's distributions.
    working = (2.0 * (kv + q) * size * positions + V * (size + 24)) * cfg.rollout_batch + PREFILL["cuda"] * scratch
    always = plan["weights"] + plan["adapter"] + plan["reference"] + plan["optimizer"]
    return plan | dict(generation=working, peak_rollout=always + plan["kv_cache"] + working,
                       peak_training=always + plan["gradients"] + plan["activations"] + plan["logits_chunk"])


def measured_peak(policy: Policy, cfg: Config, rolls: list["Rollout"]) -> dict[str, float]:
    """GB at the update's peak, measured and predicted for the lengths that these rollouts had."""
    lengths = [len(r.ids) for r in rolls]
    now = dataclasses.replace(cfg, max_context=max(lengths), micro_tokens=min(cfg.micro_tokens, sum(lengths)),
                              rollout_batch=min(cfg.rollout_batch, len(rolls)))
    plan = memory_plan(policy.model.config, now)
    return dict(peak_gb=torch.cuda.max_memory_allocated() / 1e9, predicted_peak_gb=max(plan["peak_rollout"], plan["peak_training"]) / 1e9)


def fit(model, cfg: Config, card: float) -> dict[str, int]:
    """The largest rollout_batch and micro_tokens whose peaks leave a tenth of `card` GB free; the smallest ones if nothing fits."""
    batches, tokens, best = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64), (2048, 4096, 8192), {}
    for name, values, peak in (("rollout_batch", batches, "peak_rollout"), ("micro_tokens", tokens, "peak_training")):
        trial = dict(rollout_batch=batches[0], micro_tokens=tokens[0])
        fits = [v for v in values if memory_plan(model, dataclasses.replace(cfg, **trial | {name: v}))[peak] < 0.9e9 * card]
        best[name] = max(fits, default=values[0])
    return best


def plan_config(cfg: Config):
    """The config that memory_plan needs, of --model or of an adapter's base; Qwen3-1.7B's is known without a network."""
    path = str(TINY) if cfg.model == "tiny" else cfg.model
    path = adapter_config(Path(path))["base_model_name_or_path"] if (Path(path) / "adapter_config.json").exists() else path
    return argparse.Namespace(**QWEN_CONFIG) if path == QWEN else model_config(path)


def dry_run(cfg: Config) -> str:
    """The memory plan as a table, against the card found, and what would be chosen for other cards."""
    model = plan_config(cfg)
    plan, card = memory_plan(model, cfg), card_memory(cfg)
    kind = "full fine-tuning" if cfg.tune == "full" else "LoRA" if cfg.no_4bit else "QLoRA"
    lines = [f"{cfg.model}, {kind}: episodes of up to {cfg.max_context} tokens, {cfg.rollout_batch} at once, micro-batches of {cfg.micro_tokens}"]
    lines += [f"    {name.replace('_', ' '):14s} {size / 1e9:7.2f} GB" for name, size in plan.items()]
    need = max(plan["peak_rollout"], plan["peak_training"]) / 1e9
    lines += [f"card: {card:.1f} GB, {'fits' if need < 0.9 * card else 'does NOT fit (a tenth stays free)'}" if card else "card: none found"]
    for gb in (12, 16, 24):
        best = fit(model, cfg, gb)
        peaks = memory_plan(model, dataclasses.replace(cfg, **best))
        need = max(peaks["peak_rollout"], peaks["peak_training"]) / 1e9
        text = f"--rollout_batch {best['rollout_batch']} --micro_tokens {best['micro_tokens']} (peak {need:.1f} GB)"
        lines.append(f"{gb} GB card: " + (text if need < 0.9 * gb else f"does not fit, needs {need:.1f} GB; lower --max_context, or a smaller model"))
    return "\n".join(lines + ["Predicted from config.json; not yet measured on a GPU."])


HALVED = "out of memory: {} halved"  # counter


def retry_smaller(cfg: Config, name: str, counters: Counter, work):
    """work(); if it runs out of memory, again with half of cfg.rollout_batch or cfg.micro_tokens (`name`), for the rest of the run. Counted."""
    while True:
        with contextlib.suppress(torch.OutOfMemoryError):
            return work()
        if getattr(cfg, name) == 1:  # out here, where the exception keeps no tensor alive
            raise RuntimeError(f"out of memory even with --{name} 1; see --dry_run, and lower --max_context or take a smaller model.")
        setattr(cfg, name, getattr(cfg, name) // 2)
        counters[HALVED.format(name)] += 1
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------------
# 11. Main
# ------------------------------------------------------------------------------------------------------------------
def resolve(cfg: Config) -> Config:
    """Fill every None from the profile and the name from the method, so that config.json says what was really used."""
    if cfg.model == "auto":  # main() has asked choose_model by now; a notebook means the tiny base, on any machine
        cfg = dataclasses.replace(cfg, model="tiny")
    profile, base = cfg.profile, cfg.model
    if (Path(base) / "adapter_config.json").exists():
        base = adapter_config(Path(base))["base_model_name_or_path"]
    begin = Path(cfg.sft_from) / START / "policy" if cfg.sft_from else Path(cfg.model)
    if cfg.tune is None and (cfg.adapter or (begin / "adapter_config.json").exists()):
        cfg = dataclasses.replace(cfg, tune="lora")
    if profile == "auto":
        small = base == "tiny"
        if not small and (Path(base) / "config.json").exists():
            with contextlib.suppress(Exception):  # load_policy says what is wrong with it
                c = AutoConfig.from_pretrained(base)
                small = 12 * c.num_hidden_layers * c.hidden_size ** 2 < 50e6  # about the parameters of the transformer itself
        profile = "tiny" if small else "paper"
    filled = {k: v for k, v in PROFILES[profile].items() if getattr(cfg, k) is None}
    given = {name for name in ("rollout_batch", "micro_tokens") if getattr(cfg, name) is not None}
    cfg = dataclasses.replace(cfg, **filled, profile=profile, name=cfg.name or ("eval" if cfg.eval else cfg.method))
    if cfg.checkpointing is None:
        cfg = dataclasses.replace(cfg, checkpointing=cfg.tune == "lora")
    if profile == "paper" and card_memory(cfg) and len(given) < 2:
        best = fit(plan_config(cfg), cfg, card_memory(cfg))
        cfg = dataclasses.replace(cfg, **{name: v for name, v in best.items() if name not in given})
    return cfg


def find_games(cfg: Config) -> tuple[dict[str, list[envs.Game]], str]:
    """The games of the run, thinned to --train_games and --eval_games, and one line about where they come from.

    Ids begin with the task type, so the first N would be of one type; evenly spaced ones are a fair sample.
    """
    games, notice = envs.find_games(cfg.games, seed=cfg.games_seed)
    for split, limit in (("train", cfg.train_games), ("valid_seen", cfg.eval_games), ("valid_unseen", cfg.eval_games)):
        n = min(limit or len(games[split]), len(games[split]))
        games[split] = [games[split][i * len(games[split]) // n] for i in range(n)]
    return games, notice


def pool_of(cfg: Config) -> envs.EnvPool:
    """The workers that play a run's games."""
    return envs.EnvPool(workers=cfg.workers, step_timeout=cfg.step_timeout, max_steps=cfg.max_steps, invalid_penalty=cfg.invalid_penalty)


def evaluate_splits(policy: Policy, pool: envs.EnvPool, games: dict, run: Run, key: str, teacher: bool = False) -> None:
    """Evaluate every split of --eval_splits and log it; with `teacher` also with the right workflow in context (a diagnostic)."""
    for split in run.cfg.eval_splits:
        run.log(evaluate(policy, pool, games[split], run.cfg, key))
    if teacher:
        run.log(evaluate(policy, pool, games[run.cfg.eval_splits[0]], run.cfg, key, with_rule_skill=True))


def first_weights(cfg: Config) -> str:
    """Where a fresh run's weights come from: the model, or the Stage-1 result of another run, which must be one of the same model and format."""
    if not cfg.sft_from:
        return cfg.model
    source, saved, now = Path(cfg.sft_from) / START / "policy", run_config(Path(cfg.sft_from)), dataclasses.asdict(cfg)
    if not (source.exists() and saved):
        raise ValueError(f"--sft_from {cfg.sft_from}: no Stage-1 result there (looked for {source}).")
    differs = [f"--{k} was {saved[k]!r} there and is {now[k]!r} here" for k in ("model", "tune", "no_4bit", "think", "show_admissible")
               if saved.get(k, now[k]) != now[k]]
    if differs:
        raise ValueError(f"--sft_from {cfg.sft_from}: arms that share a start must share these: {'; '.join(differs)}.")
    return str(source)


def start(policy: Policy, pool: envs.EnvPool, games: dict, run: Run) -> None:
    """From the base to the policy Stage 2 starts from: evaluation, Stage 1 (or its reuse, or not), evaluation. Ends with checkpoint 0."""
    cfg = run.cfg
    if not cfg.sft_from:  # an arm that shares its start has the base's numbers in the run it starts from
        evaluate_splits(policy, pool, games, run, "base", teacher=True)
    if not (cfg.sft_from or cfg.no_sft):
        stage1(policy, pool, games["train"], cfg, run)
    if not cfg.no_sft:
        evaluate_splits(policy, pool, games, run, "sft", teacher=True)
    run.save(policy, None)


def to_resume(run: Run) -> bool:
    """Whether there is a checkpoint to go on from. A run stopped before its first one (in Stage 1, say) starts again: same options, same run.

    Raises ValueError if there is no such run, or if it was started with other options. (Free are the number of updates and where the folder lies.)
    """
    if not run.cfg.resume:
        return False
    saved, now, free = run_config(run.dir), dataclasses.asdict(run.cfg), ("resume", "overwrite", "updates", "debug", "out", "name")
    if not saved:
        raise ValueError(f"--resume: there is no run in {run.dir}.")
    changed = [f"{k} was {v!r}, now {now[k]!r}" for k, v in saved.items() if k in now and now[k] != v and k not in free]
    if changed:
        raise ValueError(f"--resume needs the options the run was started with: {'; '.join(changed)}.")
    if saved.get("git_commit", "") != git_commit():  # config.json keeps the first: records made of this run would name only that one
        run.say(f"warning: this run was started with commit {saved.get('git_commit') or 'unknown'}, and goes on with {git_commit() or 'unknown'}")
    return any((run.dir / "checkpoints").glob("update-*"))


def resume(run: Run) -> tuple[Policy, Path]:
    """The policy of the newest good checkpoint (its reference policy is update-000000); logs are cut back to that moment."""
    path, state = run.newest()
    if path != run.dir / START and not good_checkpoint(run.dir / START):
        raise ValueError(f"--resume: {run.dir / START}, the reference policy, is damaged. Start the run again with --overwrite.")
    run.rewind(state)
    run.prune()  # what a kill in the middle of it has left
    run.say(f"resuming {run.dir} after update {run.update}")
    return load_policy(run.cfg, str(path / "policy")), path


def static_library(policy: Policy, pool: envs.EnvPool, games: list[envs.Game], run: Run) -> dict[str, str]:
    """Ablation: one offline skill per training game, from one rollout of the Stage-2 start, written by the Stage-1 analyzer and never renewed.

    Kept in the run's library.json: an endpoint need not answer the same twice, so --resume must not ask it again.
    """
    cfg, file = run.cfg, run.dir / "library.json"
    if not file.exists():
        rolls, counters = rollout(policy, pool, games, cfg, [counted_rng(cfg.seed, "static", g.id) for g in games], cfg.temperature)
        replies, more = analyze_with(cfg, [r.episode for r in rolls])
        write_json(file, dict(skills={r.episode.game_id: reply.skill for r, reply in zip(rolls, replies) if reply.skill}, counters=counters + more))
    library = json.loads(file.read_text())
    if not any(m["stage"] == "library" for m in run.metrics):
        run.log(dict(stage="library", games=len(games), skills=len(library["skills"]), counters=library["counters"]))
    return library["skills"]


def still_healthy(run: Run, optimizer: torch.optim.Optimizer) -> bool:
    """Whether everything was finite in the last update. Raises RuntimeError where going on could only spoil the good checkpoints."""
    advice = "the checkpoint from before is kept. Start again from its policy folder (--model) with a lower --lr."
    sick = [bool({DROPPED, SKIPPED} & {k for k, n in m["counters"].items() if n}) for m in run.metrics if m["stage"] == "rl"][-4:]
    if len(sick) == 4 and all(sick):
        raise RuntimeError(f"four updates in a row had log-probs or gradients that are not finite, so the run stops; {advice}")
    if not all(p.isfinite().all() for p in optimizer.param_groups[0]["params"]):
        raise RuntimeError(f"the weights are not finite after update {run.update + 1}, so the run stops; {advice}")
    return not sick[-1]


def train(cfg: Config, notice: str = "") -> None:
    """The whole method, from the first evaluation to the report. `notice`: a line to print before anything is loaded."""
    run = Run(cfg)
    going_on = to_resume(run)
    weights = "" if going_on else first_weights(cfg)
    if notice:
        run.say(notice)
    policy = None if going_on else load_policy(cfg, weights)  # first: a wrong model must not leave a run's folder behind
    games, notice = find_games(cfg)
    run.say(notice)
    if not games["train"]:
        raise ValueError("there is no training game (train split empty).")
    envs.check_engine(games)
    with (run.opened(fresh=not going_on),
          pool_of(cfg) as pool):
        if going_on:
            policy, path = resume(run)
        else:
            start(policy, pool, games, run)
            path = run.dir / START
        begin = run.dir / START / "policy"
        if is_lora(policy):
            freeze_reference(policy, begin)
        else:
            policy.reference = load_policy(cfg, str(begin), trainable=False).model
        optimizer = make_optimizer(policy, cfg.lr, cfg.weight_decay)
        if (path / "optimizer.safetensors").exists():
            load_optimizer(optimizer, path / "optimizer.safetensors")
        with reference_of(policy) as reference:
            library = static_library(reference, pool, games["train"], run) if cfg.static_skills else {}
        for update in range(run.update + 1, cfg.updates + 1):
            line = one_update(policy, pool, games["train"], cfg, optimizer, update, run, library)
            run.log(line)
            for text in warnings_of(cfg, line):
                run.say(f"warning: {text}")
            healthy = still_healthy(run, optimizer)
            run.update = update
            if update == cfg.updates or (cfg.eval_every and update % cfg.eval_every == 0):
                evaluate_splits(policy, pool, games, run, str(update))
            if update == cfg.updates or (update % cfg.save_every == 0 and healthy):
                run.save(policy, optimizer)
    draw_curves(run)
    write_report(run)
    run.say(f"report: {run.dir / 'report.md'}")


def evaluate_only(cfg: Config, notice: str = "") -> None:
    """--eval: every game of each split once; the result as a line, and in OUT/NAME/eval-*.json with the game ids."""
    games, games_notice = find_games(cfg)
    print(*filter(None, (notice, games_notice)), sep="\n", flush=True)
    policy = load_policy(cfg, cfg.model, trainable=False)
    if is_lora(policy) and not cfg.no_4bit:
        print("weights: the base in 4-bit NF4, as QLoRA trains it (--no_4bit takes it in 16 bit; for a fully fine-tuned folder, --tune full)", flush=True)
    folder = Path(cfg.out) / cfg.name
    with (Run(cfg).opened(fresh=False),  # not into the folder of a run that is going on
          pool_of(cfg) as pool):
        for split in cfg.eval_splits:
            if not games[split]:
                raise ValueError(f"split {split} has no games.")
            envs.check_engine({split: games[split]})
            result = evaluate(policy, pool, games[split], cfg, "eval")
            print(progress_line(result), flush=True)
            for task_type, v in result["by_type"].items():
                print(f"    {task_type:32s} {v['wins']:4d}/{v['n']:<4d} {rate(v)}")
            write_json(folder / f"eval-{split}.json", result | dict(model=cfg.model, config=dataclasses.asdict(cfg), git_commit=git_commit()))
            print(f"written: {folder / f'eval-{split}.json'}")


def one_sentence(error: Exception) -> str:
    """An error as one line that is safe to print."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if getattr(error, "errno", 0) in full or any(f"(os error {n})" in str(error) for n in full):  # the second is how safetensors says it
        return f"the disk is full ({error}); what was written before is intact: make room and continue with --resume"
    return safe(" ".join(str(error).split()))[:600]


def main(argv: list[str] | None = None) -> int:
    """Command line. 0 = done, 2 = bad input or a run that cannot go on (one sentence), 130 = Ctrl-C and 143 = SIGTERM (both resumable)."""
    parser = HfArgumentParser(Config, prog="python seed_mini.py", usage="%(prog)s [--option value ...] (--help explains every option)",
                              description=__doc__.split("\n")[0],
                              epilog="Defaults by profile: " + "; ".join(f"{p}: " + ", ".join(f"{k}={v}" for k, v in d.items())
                                                                         for p, d in PROFILES.items()))
    cfg = Config(**vars(parser.parse_args(argv)))
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a hub that cannot be reached: our one sentence, not its retries

    def terminate(*_):
        """SIGTERM as Ctrl-C: unwinds the stack, so that workers end and the folder is released."""
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        check_config(cfg)
        model, notice = choose_model(cfg)
        cfg = resolve(dataclasses.replace(cfg, model=model))
        check_config(cfg)  # again: a given value may contradict a default
        torch.set_num_threads(cfg.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        if cfg.dry_run:
            print(*filter(None, (notice, dry_run(cfg))), sep="\n")
        else:
            evaluate_only(cfg, notice) if cfg.eval else train(cfg, notice)
    except KeyboardInterrupt as stop:
        print("\nstopped" if cfg.eval or cfg.dry_run else "\nstopped; continue with --resume", file=sys.stderr)
        return 143 if stop.args == ("SIGTERM",) else 130
    except (ValueError, RuntimeError, OSError, ImportError, SafetensorError) as error:
        if cfg.debug:
            raise
        print(f"seed_mini: {one_sentence(error)}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
