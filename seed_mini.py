"""seed_mini.py: SEED (arXiv 2607.14777) on one GPU, or on a laptop's CPU: the method.

    python seed_mini.py --env alfworld                    # the whole method
    python seed_mini.py --env alfworld --method grpo      # the baseline from the same start
    python seed_mini.py --env alfworld --eval --model runs/seed/checkpoints/update-000040/policy

    1  options      one dataclass; its texts are the --help
    2  rollout      episodes as ONE token sequence each: what was sampled is what is trained
    3  Stage 1      hindsight-skill SFT: learn to write a skill from a finished episode
    4  Stage 2      each update: act -> analyze -> score again with the skill -> train
    5  evaluation   every task of a split once
    6  train, main  from the base to the report; arguments to exit code

The equations live in losses.py, the model in policy.py, prompts and parsers in skills.py, what an
environment is in envs.py; what keeps a run alive (logs, checkpoints, resume, memory) in runs.py.

Left out on purpose: several GPUs, a separate inference engine, value networks, learning-rate
schedules in Stage 2 (the paper's is constant), pictures. Where we differ from the paper or its
released code, the line that differs says so; notebooks/differences.md has the list.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

try:
    if sys.version_info < (3, 11):
        raise ImportError("seed_mini needs Python 3.11 or newer; this is "
                          f"{sys.version_info[0]}.{sys.version_info[1]}")
    import envs
    import torch
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise ImportError(f"seed_mini needs torch 2.6 or newer; this is {torch.__version__}: "
                          "pip install -r requirements.txt")
    import numpy as np
    import transformers
    from safetensors import SafetensorError
    from transformers import HfArgumentParser

    import losses
    import runs
    import skills
    from envs import Episode, Step, Task, counted_rng
    from policy import (KVBatch, Policy, Sequence, complete, freeze_reference, generate_turn,
                        is_lora, micro_batches, pad, reference_of, response_hidden, score,
                        token_logp)
    from runs import Pool, Run, base_of, load_policy, model_config, smaller_on_oom
except ImportError as error:
    if __name__ != "__main__" or "--debug" in sys.argv:
        raise
    print(f"seed_mini: {error}", file=sys.stderr)
    sys.exit(2)

# The shipped bases, one folder a world, made by notebooks/00_tiny_base.ipynb.
TINY = Path(__file__).resolve().parent / "notebooks" / "tiny_base"


# --------------------------------------------------------------------------------------------------
# 1. Options
# --------------------------------------------------------------------------------------------------
def option(default, text):
    """A dataclass field whose text is the --help line (where argparse wants % doubled)."""
    metadata = {"help": text.replace("%", "%%")}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    """Every option of a run. None means: from PROFILES and from the world's own defaults."""
    env: str = option("alfworld", "The world: a name in environments/, or a file of your own (NAME "
                      "for NAME.py in this folder, or its path).")
    env_args: list[str] = option([], "The world's own settings, key=value; --env NAME --help lists "
                                 "them.")
    model: str = option("auto", "'tiny' (the world's shipped base), a Hugging Face name such as "
                        "Qwen/Qwen3-1.7B, or a checkpoint or adapter folder. 'auto': Qwen3-1.7B in "
                        "QLoRA on a CUDA card of 10 GB or more, otherwise 'tiny'.")
    method: str = option("seed", "'seed' (the paper's method) or 'grpo' (the same without skills).")
    ablate: str = option("", "Leave one part out: 'no_sft' (no Stage 1), 'no_opd' (skills are "
                         "written and logged, not distilled), 'static' (the Stage-1 analyzer's "
                         "offline skills, not the policy's own), 'shuffle' (another task's skill).")
    name: str = option("", "Name of the run, which is OUT/NAME. Default: the method; or 'eval'.")
    out: str = option("runs", "Folder that holds the runs.")
    seed: int = option(0, "Seed of everything random. One seed, one run: bit for bit on a CPU with "
                       "the same number of threads.")
    task_seed: int = option(0, "Seed of made-up tasks (tune on one, report on another).")
    # What to do.
    dry_run: bool = option(False, "Print where the memory would go, and the settings for 12, 16 "
                           "and 24 GB cards, and stop. Nothing is loaded.")
    eval: bool = option(False, "Only evaluate the model, and stop.")
    resume: bool = option(False, "Continue OUT/NAME from its newest checkpoint; the result is the "
                          "same as without the break.")
    overwrite: bool = option(False, "Delete OUT/NAME first if it holds a run.")
    sft_from: str = option("", "Reuse the Stage-1 result of this run folder (how arms share their "
                           "start).")
    # Tasks.
    train_tasks: int | None = option(None, "Use N training tasks, evenly spread over sorted ids.")
    eval_tasks: int | None = option(None, "Evaluate on N tasks of each split, likewise spread.")
    max_steps: int | None = option(None, "Most steps of an episode. Default: the world's.")
    invalid_penalty: float | None = option(None, "Reward lost by each invalid action. Default: the "
                                           "world's.")
    think: bool | None = option(None, "Ask for <think>..</think><action>..</action> (paper) or for "
                                "the bare action.")
    workers: int = option(2, "Processes that run the environments; 0: this one.")
    # Lengths, in tokens.
    max_response: int | None = option(None, "Most tokens sampled in one turn (paper: 512).")
    max_context: int | None = option(None, "Most tokens of an episode; one that reaches it ends "
                                     "and is counted, never cut.")
    max_analysis: int | None = option(None, "Most tokens of one analysis (summary and skill).")
    # Stage 1.
    analyzer: str = option("rule", "Who annotates in Stage 1: 'rule' (the world's own, offline) or "
                           "'endpoint' (an OpenAI-compatible server, GLM-5.2 in the paper; set "
                           "SEED_ANALYZER_URL, SEED_ANALYZER_MODEL and SEED_ANALYZER_KEY).")
    sft_tasks: int | None = option(None, "Tasks rolled out for Stage 1 (paper: 180).")
    sft_rollouts: int | None = option(None, "Rollouts per Stage-1 task, K0 (paper: 8).")
    sft_epochs: int | None = option(None, "Epochs over the Stage-1 rows (paper: 3).")
    sft_lr: float | None = option(None, "Peak learning rate of Stage 1, cosine, 10% warm-up "
                                  "(paper: 5e-6).")
    sft_batch: int | None = option(None, "Rows per Stage-1 step (paper: 8).")
    sft_anchor: float | None = option(None, "Weight of KL(base || policy) on the base's own acting "
                                      "transcripts during Stage 1 (paper: 0, no anchor).")
    # Stage 2.
    updates: int | None = option(None, "Updates of Stage 2 (paper: 150).")
    tasks_per_update: int | None = option(None, "Tasks per update, each a group (paper: 16).")
    group_size: int | None = option(None, "Rollouts of each task, the GRPO group G (paper: 8).")
    minibatches: int | None = option(None, "Optimizer steps per update, over random parts of it.")
    lr: float | None = option(None, "Constant learning rate of AdamW in Stage 2 (paper: 1e-6, "
                              "full).")
    clip_range: float = option(0.2, "PPO clip range epsilon (paper: 0.2).")
    kl_coef: float | None = option(None, "Weight of the k3 KL to the reference (paper: 0.01).")
    lambda_opd: float | None = option(None, "Weight of the distillation term (paper: 0.01).")
    beta_opd: float = option(5.0, "Sharpness of the gate sigmoid(beta * Delta) (paper: 5).")
    temperature: float = option(1.0, "Temperature of sampling and scoring in training (paper: 1).")
    # Evaluation.
    eval_temperature: float = option(0.4, "Sampling temperature of evaluation (paper: 0.4).")
    eval_every: int | None = option(None, "Evaluate every so many updates (0: only at both ends).")
    eval_splits: list[str] = option(["valid_unseen"], "Any of valid_seen, valid_unseen, train.")
    # The machine.
    tune: str | None = option(None, "'full' fine-tuning, 'lora' adapters on a 16-bit base, or "
                              "'qlora' on a 4-bit one.")
    threads: int = option(2, "CPU threads of torch. Results are bit-identical for one number only.")
    rollout_batch: int | None = option(None, "Episodes generated at once. On a card: what fits.")
    micro_tokens: int | None = option(None, "Most padded tokens in one forward pass of scoring or "
                                      "training.")
    debug: bool = option(False, "Show the traceback of an error instead of one sentence.")


# Two columns of defaults. 'paper' repeats the paper where one GPU allows it (adapters need a higher
# learning rate than full fine-tuning); 'tiny' was tuned on other seeds and tasks than the reported
# ones. A world adds its own (Env.max_steps, Env.invalid_penalty, Env.defaults).
PROFILES = {
    "tiny": dict(think=False, max_response=12, max_context=800, max_analysis=96,
                 sft_tasks=90, sft_rollouts=8, sft_epochs=3, sft_lr=8e-4, sft_batch=16,
                 sft_anchor=2.0, updates=40, tasks_per_update=8, group_size=6, minibatches=2,
                 lr=2e-4, kl_coef=0.02, lambda_opd=0.3, eval_every=8, tune="full",
                 rollout_batch=64, micro_tokens=8192),
    "paper": dict(think=True, max_response=512, max_context=8192, max_analysis=512,
                  sft_tasks=180, sft_rollouts=8, sft_epochs=3, sft_lr=1e-4, sft_batch=8,
                  sft_anchor=0.0, updates=150, tasks_per_update=16, group_size=8, minibatches=1,
                  lr=1e-5, kl_coef=0.01, lambda_opd=0.01, eval_every=10, tune="qlora",
                  rollout_batch=32, micro_tokens=8192),
}
# The paper's, and nobody has needed others here.
WEIGHT_DECAY, MAX_GRAD_NORM = 0.01, 1.0


def resolve(cfg: Config) -> Config:
    """Fill every None, so that config.json says what was really used: from the profile of the
    model's size, from the world, and from what a card has room for."""
    world = envs.find(cfg.env)
    # main() has asked runs.choose_model by now; a notebook means the tiny base, on any machine.
    model = "tiny" if cfg.model == "auto" else cfg.model
    base, size = base_of(model), 0.0
    if base != "tiny" and (Path(base) / "config.json").exists():
        # load_policy says what is wrong with it.
        with contextlib.suppress(ValueError, AttributeError):
            c = model_config(base)
            # About the parameters of the transformer itself.
            size = 12 * c.num_hidden_layers * c.hidden_size ** 2
    profile = "tiny" if base == "tiny" or 0 < size < 50e6 else "paper"
    special, known = world.defaults.get(profile, {}), envs.settings_of(world)
    pairs = [f"{k}={v}" for k, v in special.items() if k in known]
    settings = envs.settings_of(world, pairs + cfg.env_args)
    defaults = dict(max_steps=world.max_steps, invalid_penalty=world.invalid_penalty)
    defaults |= PROFILES[profile] | {k: v for k, v in special.items() if k not in known}
    begin = str(Path(cfg.sft_from) / runs.START / "policy") if cfg.sft_from else model
    if base_of(begin) != begin:
        # What continues an adapter trains adapters.
        defaults["tune"] = "qlora"
    given = {k for k in ("rollout_batch", "micro_tokens") if getattr(cfg, k) is not None}
    filled = {k: v for k, v in defaults.items() if getattr(cfg, k) is None}
    cfg = dataclasses.replace(cfg, **filled, model=model,
                              env_args=[f"{k}={v}" for k, v in settings.items()],
                              name=cfg.name or ("eval" if cfg.eval else cfg.method))
    if profile == "paper" and runs.card_memory() and len(given) < 2:
        best = runs.fit(runs.plan_config(weights_of(cfg)), cfg, runs.card_memory())
        cfg = dataclasses.replace(cfg, **{k: v for k, v in best.items() if k not in given})
    return cfg


def weights_of(cfg: Config) -> str:
    """The path or name that --model means. ValueError if this world has no shipped base."""
    if cfg.model != "tiny":
        return cfg.model
    folder = TINY / envs.find(cfg.env).name
    if not folder.exists():
        raise ValueError(f"--model tiny: no base is shipped for {folder.name}; name a model, e.g. "
                         "--model Qwen/Qwen3-1.7B, or a folder. (To try out the plumbing, any will "
                         "do: --model notebooks/tiny_base/alfworld.)")
    return str(folder)


# --------------------------------------------------------------------------------------------------
# 2. Rollout: an episode is ONE token sequence
# --------------------------------------------------------------------------------------------------
# The paper and its code build one prompt per step, with a window of 5 steps, cut at 2,048 tokens.
# Here an episode is one conversation: full history, token in, token out, nothing tokenised twice.
# One that reaches the context limit ends, and is counted.
@dataclass
class Rollout:
    """One episode as text and as tokens. ids, sampled and logp have one entry per token.

    sampled[t] is True where the policy sampled ids[t]: only those tokens are ever trained. Prompts,
    observations, template glue and an end token that had to be forced (the response hit its length
    limit) are False. logp[t] is the sampler's own log-prob (0.0 elsewhere). cut is the index right
    after the goal line: where the teacher's copy of the sequence gets the skill block.
    """
    episode: Episode
    ids: list[int]
    sampled: list[bool]
    logp: list[float]
    cut: int
    # Why it was taken out of its update (runs.drop_not_finite).
    dropped: str = ""

    def add(self, ids: list[int], logps: list[float] | None = None) -> None:
        """More tokens: sampled ones with their log-probs, or given ones."""
        self.ids += ids
        self.sampled += [logps is not None] * len(ids)
        self.logp += logps or [0.0] * len(ids)


def start_rollout(policy: Policy, env: envs.Env, cfg: Config, task: Task, observation: str,
                  info: dict, skill: str) -> Rollout:
    """The first user turn. With `skill` (evaluation of the teacher only) its block is already
    inside, encoded apart, so that a sequence has the same ids on both sides of it."""
    before, after = env.prompt(info["goal"], observation, think=cfg.think, actions=info["actions"])
    head = policy.first[0] + policy.encode(before)
    block = policy.encode(skills.skill_block(skill)) if skill else []
    episode = Episode(task.id, task.split, task.kind, info["goal"], final_observation=observation)
    roll = Rollout(episode, [], [], [], len(head))
    roll.add(head + block + policy.encode(after) + policy.first[1])
    return roll


def take_turn(policy: Policy, env: envs.Env, cfg: Config, roll: Rollout, new: list[int],
              logps: list[float], result: tuple, counters: Counter) -> list[int]:
    """Write one sampled turn and the world's answer into the rollout. Returns the ids to feed next
    ([] when the episode is over)."""
    observation, reward, terminated, truncated, info = result
    episode, closed = roll.episode, new[-1] == policy.end_id
    response = policy.decode(new)
    # When the environment failed, info is that of the step before.
    valid = info["valid"] or "end" in info
    episode.steps.append(Step(episode.final_observation, response, env.parse(response), valid))
    episode.final_observation = observation
    episode.reward += reward - cfg.invalid_penalty * (not valid)
    episode.won = episode.won or info["won"]
    episode.score = float(info.get("score", episode.won))
    forced = [] if closed else [policy.end_id]
    counters["responses cut at max_response"] += not closed
    counters["invalid actions"] += not valid
    roll.add(new, logps)
    roll.add(forced)
    if terminated or truncated or len(episode.steps) >= cfg.max_steps:
        over = "lost" if terminated else "step limit"
        episode.end = "won" if episode.won else info.get("end", over)
        episode.reason = info.get("reason", "")
    else:
        text = policy.encode(env.turn(observation, actions=info["actions"]))
        turn = policy.later[0] + text + policy.later[1]
        # Not <=: an end token may have to be forced.
        if len(roll.ids) + len(turn) + cfg.max_response < cfg.max_context:
            roll.add(turn)
            return [new[-1]] + forced + turn
        episode.end = "context limit"
    counters[f"ended: {episode.end}"] += 1
    return []


def rollout(policy: Policy, pool: Pool, tasks: list[Task], cfg: Config, keys: list[tuple],
            temperature: float, plans: list[str] | None = None) -> tuple[list[Rollout], Counter]:
    """Play each task once, cfg.rollout_batch at a time: rollouts in order, and the counters of
    everything that did not go smoothly. `plans` (evaluation only): a skill for each, in context.

    keys: one per episode, the address of its random numbers (counted_rng): they do not depend on
    its neighbours, and a batch that ran out of memory is played again with the same luck.
    """
    rolls, counters, before = [], Counter(), Counter(pool.counters)
    plans = plans or [""] * len(tasks)
    while len(rolls) < len(tasks):
        at = len(rolls)
        part, more = _play(policy, cfg, counters, pool, tasks[at:], keys[at:], temperature,
                           plans[at:])
        rolls += part
        counters += more
    # One bad task must not stop a night's run; all of them are no run.
    if rolls and all(r.episode.end == "task unplayable" for r in rolls):
        n, last = len({task.id for task in tasks}), rolls[-1].episode.reason
        raise RuntimeError(f"none of {n} tasks can be played; the last one: {last}")
    if rolls and all(r.episode.end == "context limit" and not r.episode.steps for r in rolls):
        raise RuntimeError("no task can begin: the first prompt alone needs more than "
                           f"--max_context {cfg.max_context} minus --max_response "
                           f"{cfg.max_response}.")
    # + also drops the zeros.
    return rolls, counters + (Counter(pool.counters) - before)


@smaller_on_oom("rollout_batch")
def _play(policy: Policy, cfg: Config, _, pool: Pool, tasks: list[Task], keys: list[tuple],
          temperature: float, plans: list[str]) -> tuple[list[Rollout], Counter]:
    """The first cfg.rollout_batch episodes, from reset to end, in one KV cache."""
    env, tasks = pool.env, tasks[:cfg.rollout_batch]
    rngs = [counted_rng(cfg.seed, *key) for key in keys[:cfg.rollout_batch]]
    rolls, chunks, counters = [], {}, Counter()
    for i, (task, (observation, info)) in enumerate(zip(tasks, pool.reset(tasks))):
        roll = start_rollout(policy, env, cfg, task, observation, info, plans[i])
        fits = len(roll.ids) + cfg.max_response < cfg.max_context
        roll.episode.end = info.get("end", "" if fits else "context limit")
        roll.episode.reason = info.get("reason", "")
        # Over before it began: no step, no sampled token, counted.
        if roll.episode.end:
            counters[f"ended: {roll.episode.end}"] += 1
        else:
            chunks[i] = roll.ids
        rolls.append(roll)
    alive = sorted(chunks)
    kv = KVBatch(policy, len(alive)) if alive else None
    while alive:
        hidden = kv.feed([chunks[i] for i in alive])
        new, logps = generate_turn(kv, hidden, [rngs[i] for i in alive], temperature,
                                   cfg.max_response)
        results = pool.step({i: env.parse(policy.decode(ids)) for i, ids in zip(alive, new)})
        chunks = {i: take_turn(policy, env, cfg, rolls[i], ids, lp, results[i], counters)
                  for i, ids, lp in zip(alive, new, logps)}
        rows = [row for row, i in enumerate(alive) if chunks[i]]
        alive = [alive[row] for row in rows]
        if alive:
            kv.keep(rows)
    return rolls, counters


def plain(roll: Rollout) -> Sequence:
    """The student's (and snapshot's, and reference's) view: ordinary history h."""
    return roll.ids, roll.sampled


def with_skill(policy: Policy, roll: Rollout, skill: str) -> Sequence:
    """The teacher's view H(h, s): the same ids with the skill block right after the goal line; the
    same tokens are scored."""
    block = policy.encode(skills.skill_block(skill))
    return (roll.ids[:roll.cut] + block + roll.ids[roll.cut:],
            roll.sampled[:roll.cut] + [False] * len(block) + roll.sampled[roll.cut:])


# --------------------------------------------------------------------------------------------------
# 3. Stage 1: hindsight-skill SFT
# --------------------------------------------------------------------------------------------------
def analyze_with(env: envs.Env, cfg: Config,
                 episodes: list[Episode]) -> tuple[list[skills.Reply], Counter]:
    """Skills by the Stage-1 analyzer: the world's rules, or the endpoint that stands for the
    paper's GLM-5.2. Its key is read from the environment only."""
    ask = functools.partial(runs.ask_endpoint, model=os.environ.get("SEED_ANALYZER_MODEL", ""),
                            base_url=os.environ.get("SEED_ANALYZER_URL", ""),
                            api_key=os.environ.get("SEED_ANALYZER_KEY", ""))
    return skills.analyze(env, episodes, ask if cfg.analyzer == "endpoint" else None)


def sft_sequences(policy: Policy, cfg: Config, rows: list[dict],
                  counters: Counter) -> list[Sequence]:
    """Stage-1 rows as tokens: one user turn (the analyzer's prompt), then the skill's JSON and the
    end token, which alone are trained."""
    sequences = []
    for row in rows:
        prompt = policy.user_turn(policy.encode(row["prompt"]))
        response = policy.encode(row["response"]) + [policy.end_id]
        too_long = len(prompt) + len(response) > cfg.max_context + cfg.max_analysis
        if too_long or len(response) > cfg.max_analysis:
            counters["SFT rows too long"] += 1
            continue
        sequences.append((prompt + response, [False] * len(prompt) + [True] * len(response)))
    return sequences


def anchor_kl(policy: Policy, sequences: list[Sequence]) -> torch.Tensor:
    """Mean over sampled tokens of KL(reference || policy) over the whole vocabulary: the acting the
    base had, kept without any label.

    Not in the paper: a small model that learns the analysis format from nothing forgets how to act.
    Plain logits [N, V], so this is for small vocabularies; the paper profile leaves it off.
    """
    hidden, *_ = response_hidden(policy, sequences)
    with torch.no_grad(), reference_of(policy) as reference:
        target, *_ = response_hidden(reference, sequences)
        target = torch.log_softmax((target @ reference.head.T).float(), -1)
    own = torch.log_softmax((hidden @ policy.head.T).float(), -1)
    return torch.nn.functional.kl_div(own, target, log_target=True, reduction="batchmean")


def make_optimizer(policy: Policy, lr: float) -> torch.optim.AdamW:
    """AdamW over everything that trains (all weights, or the adapters)."""
    params = [p for p in policy.model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=lr, weight_decay=WEIGHT_DECAY)


def cosine(step: int, steps: int) -> float:
    """Learning-rate factor of Stage 1: 10% linear warm-up, then a half cosine to 0."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@smaller_on_oom("micro_tokens")
def sft_gradients(policy: Policy, cfg: Config, _, optimizer: torch.optim.Optimizer,
                  batch: list[Sequence]) -> float:
    """Gradients of a batch's loss, the token mean of -log p(response), which is returned."""
    optimizer.zero_grad(set_to_none=True)
    tokens, total = sum(sum(m) for _, m in batch), 0.0
    for rows in micro_batches(batch, cfg.micro_tokens):
        logp, mask, _ = token_logp(policy, [batch[i] for i in rows], 1.0)
        loss = -(logp * mask).sum() / tokens
        (policy.loss_scale * loss).backward()
        total += loss.item()
    return total


def sft(policy: Policy, cfg: Config, sequences: list[Sequence], acting: list[Sequence],
        log) -> None:
    """Train the policy to write skills, with the optional anchor on `acting` transcripts."""
    optimizer, counters = make_optimizer(policy, cfg.sft_lr), Counter()
    per_epoch = math.ceil(len(sequences) / cfg.sft_batch)
    steps, sick = cfg.sft_epochs * per_epoch, 0
    for step in range(steps):
        epoch, at = divmod(step * cfg.sft_batch, per_epoch * cfg.sft_batch)
        order = counted_rng(cfg.seed, "sft order", epoch).permutation(len(sequences))
        batch = [sequences[i] for i in order[at:at + cfg.sft_batch]]
        optimizer.param_groups[0]["lr"] = cfg.sft_lr * cosine(step, steps)
        loss, anchor = sft_gradients(policy, cfg, counters, optimizer, batch), torch.zeros(())
        if cfg.sft_anchor > 0 and acting:
            rng, size = counted_rng(cfg.seed, "sft anchor", step), min(cfg.sft_batch, len(acting))
            picks = rng.choice(len(acting), size=size, replace=False)
            anchor = anchor_kl(policy, [acting[i] for i in picks])
            (policy.loss_scale * cfg.sft_anchor * anchor).backward()
        norm = runs.optimizer_step(policy, optimizer, MAX_GRAD_NORM, counters)
        sick = sick + 1 if counters[runs.SKIPPED] else 0
        if sick == 3:
            raise RuntimeError("Stage 1: three steps in a row had gradients that are not finite. "
                               "Start again with a lower --sft_lr.")
        if +counters or step % 10 == 0 or step == steps - 1:
            more = dict(counters=dict(+counters)) if +counters else {}
            log(dict(stage="sft", step=step + 1, steps=steps, loss=loss, anchor_kl=anchor.item(),
                     grad_norm=norm, learning_rate=optimizer.param_groups[0]["lr"]) | more)
            counters.clear()


def stage1(policy: Policy, pool: Pool, tasks: list[Task], cfg: Config, run: Run) -> None:
    """Stage 1 in whole: the base acts, the analyzer annotates with hindsight, the policy learns to
    write such skills."""
    chosen = counted_rng(cfg.seed, "sft tasks").permutation(len(tasks))[:cfg.sft_tasks]
    batch = [tasks[i] for i in chosen for _ in range(cfg.sft_rollouts)]
    keys = [("sft rollout", i) for i in range(len(batch))]
    run.say(f"Stage 1: {len(chosen)} tasks x {cfg.sft_rollouts} rollouts of the base, annotated by "
            f"the {cfg.analyzer} analyzer")
    rolls, counters = rollout(policy, pool, batch, cfg, keys, cfg.temperature)
    episodes = [r.episode for r in rolls]
    replies, more = analyze_with(pool.env, cfg, episodes)
    counters += more
    rows = skills.sft_rows(pool.env, episodes, replies, counters)
    sequences = sft_sequences(policy, cfg, rows, counters)
    run.write_rollouts(rolls, replies, update=0, stage="sft")
    if not sequences:
        raise RuntimeError("Stage 1 has no usable skill to learn from: the analyzer's replies did "
                           "not parse (see skills.jsonl). Check the analyzer.")
    acting = [plain(r) for r in rolls if any(r.sampled)]
    acting += [with_skill(policy, r, reply.skill) for r, reply in zip(rolls, replies)
               if reply.skill and any(r.sampled)]
    won = float(np.mean([e.won for e in episodes]))
    run.log(dict(stage="sft", episodes=len(rolls), success=won, rows=len(sequences),
                 counters=dict(counters)))
    # The base: what the anchor holds on to.
    freeze_reference(policy)
    sft(policy, cfg, sequences, acting, run.log)


# --------------------------------------------------------------------------------------------------
# 4. Stage 2: act -> analyze -> score again with the skill -> train
# --------------------------------------------------------------------------------------------------
def one_update(policy: Policy, pool: Pool, tasks: list[Task], cfg: Config, optimizer, update: int,
               run: Run, library: dict[str, str]) -> dict:
    """One update of Stage 2 in whole: P tasks x G rollouts. Returns its metrics line."""
    P, G, clock = cfg.tasks_per_update, cfg.group_size, runs.Stopwatch(policy)
    # (a) act, from ordinary history alone
    batch = [task for task in tasks_of(cfg, tasks, update) for _ in range(G)]
    keys = [("rollout", update, i) for i in range(P * G)]
    rolls, counters = rollout(policy, pool, batch, cfg, keys, cfg.temperature)
    clock.lap("rollout")
    # (b) analyze: the same policy writes a skill for each of its finished episodes
    replies = analyze_own(policy, pool.env, cfg, rolls, update, library, counters)
    clock.lap("analysis")
    # (c) teach: the same tokens scored again, with the skill in the context; lists of [n_i]
    scores = score_all(policy, cfg, counters, rolls, replies)
    runs.drop_not_finite(rolls, scores, counters)
    clock.lap("scoring")
    # (d) train: GRPO + KL + gated distillation
    rewards = torch.tensor([r.episode.reward for r in rolls], dtype=torch.float64).view(P, G)
    advantages = losses.group_advantages(rewards).view(-1).float()  # [P * G]
    has_skill, stats = [bool(r.skill) for r in replies] or [False] * len(rolls), []
    for part in minibatches_of(cfg, rolls, update):
        stats.append(gradients(policy, cfg, counters, optimizer, rolls, scores, advantages,
                               has_skill, part))
        stats[-1]["grad_norm"] = runs.optimizer_step(policy, optimizer, MAX_GRAD_NORM, counters)
    clock.lap("training")
    run.write_rollouts(rolls, replies, update, stage="rl", scores=scores)
    return runs.update_metrics(policy, cfg, update, rolls, replies, scores, rewards, stats,
                               counters, clock)


@smaller_on_oom("micro_tokens")
def gradients(policy: Policy, cfg: Config, _, optimizer: torch.optim.Optimizer,
              rolls: list[Rollout], scores: Scores, advantages: torch.Tensor,
              has_skill: list[bool], part: list[int]) -> dict:
    """Put the gradient of one mini-batch (rollouts `part`), times the loss scale, into .grad;
    returns the loss statistics.

    The mini-batch is split into micro-batches that fit in memory; every mean is taken with the
    mini-batch's own number of tokens, so the split does not change the loss (the released code
    averages within each micro-batch, which weighs tokens unequally).
    """
    optimizer.zero_grad(set_to_none=True)
    stats, sequences = Counter(), [plain(rolls[i]) for i in part]
    use_opd = cfg.method == "seed" and cfg.ablate != "no_opd"
    tokens = sum(sum(m) for _, m in sequences)
    skill_tokens = sum(sum(rolls[i].sampled) for i in part if has_skill[i])
    for rows in micro_batches(sequences, cfg.micro_tokens):
        index = [part[r] for r in rows]
        logp, mask, _ = token_logp(policy, [sequences[r] for r in rows], cfg.temperature)  # [B, R]
        old, ref, teacher = (pad([values[i] for i in index], logp.shape[1])
                             for values in (scores.old, scores.reference, scores.teacher))
        skill_mask = torch.tensor([float(has_skill[i]) for i in index], device=logp.device)  # [B]
        rl_loss, opd_loss, out = losses.seed_loss(
            logp, old, ref, teacher if use_opd else None, advantages[index].to(logp), mask,
            skill_mask, clip_range=cfg.clip_range, kl_coef=cfg.kl_coef, lambda_opd=cfg.lambda_opd,
            beta_opd=cfg.beta_opd, rl_tokens=tokens, opd_tokens=skill_tokens)
        (policy.loss_scale * (rl_loss + opd_loss)).backward()
        stats.update({name: float(value) for name, value in out.items()})
    return dict(stats)


@dataclass
class Scores:
    """Everything the update needs about its rollouts, without gradient and from before its first
    optimizer step: the snapshot that sampled, scored once, as in the released code. Lists of
    [n_i]."""
    # The policy that sampled.
    old: list[torch.Tensor]
    # The checkpoint RL starts from.
    reference: list[torch.Tensor]
    # The snapshot with the skill in context; equal to `old` where there is no usable skill.
    teacher: list[torch.Tensor]
    entropy: list[torch.Tensor]


@smaller_on_oom("micro_tokens")
def score_all(policy: Policy, cfg: Config, _, rolls: list[Rollout],
              replies: list[skills.Reply]) -> Scores:
    """Snapshot, reference and teacher log-probs: one forward pass each."""
    sequences = [plain(r) for r in rolls]
    old, entropy = score(policy, sequences, cfg)
    with reference_of(policy) as reference:
        ref, _ = score(reference, sequences, cfg)
    teacher = list(old)
    usable = [i for i, reply in enumerate(replies) if reply.skill]
    told, _ = score(policy, [with_skill(policy, rolls[i], replies[i].skill) for i in usable], cfg)
    for i, logp in zip(usable, told):
        teacher[i] = logp
    return Scores(old, ref, teacher, entropy)


def analyze_own(policy: Policy, env: envs.Env, cfg: Config, rolls: list[Rollout], update: int,
                library: dict[str, str], counters: Counter) -> list[skills.Reply]:
    """The skill of each episode for this update: the policy's own hindsight (SEED), or an
    ablation's; [] for GRPO.

    A reply that does not parse is "no skill": that episode loses its distillation term and keeps
    its GRPO term.
    """
    if cfg.method == "grpo":
        return []
    ids = [r.episode.task_id for r in rolls]
    if cfg.ablate == "static":
        offline = [library.get(i, "") for i in ids]
        replies = [skills.Reply(skill, "", "ok" if skill else "empty") for skill in offline]
    else:
        replies = write_skills(policy, env, cfg, rolls, counters)
    if cfg.ablate == "shuffle":
        rng = counted_rng(cfg.seed, "shuffle", update)
        giver = skill_givers([i if reply.skill else "" for i, reply in zip(ids, replies)], rng)
        counters["shuffled within a task"] += sum(ids[i] == ids[j] for i, j in giver.items())
        replies = [replies[giver[i]] if i in giver else r for i, r in enumerate(replies)]
    counters.update(f"analysis {r.status}" for r in replies if r.status != "ok")
    counters["skills shortened"] += sum(r.cut for r in replies)
    return replies


def write_skills(policy: Policy, env: envs.Env, cfg: Config, rolls: list[Rollout],
                 counters: Counter) -> list[skills.Reply]:
    """The policy as analyzer: greedy replies to the analyzer's prompt about each episode, read."""
    asked = [skills.analyzer_prompt(env, r.episode, counters=counters) for r in rolls]
    prompts = [policy.user_turn(policy.encode(text)) for text in asked]
    # Too long: counted, and visible as an empty reply; never cut.
    fits = [i for i, ids in enumerate(prompts) if len(ids) <= cfg.max_context]
    counters["analyzer prompts too long"] += len(prompts) - len(fits)
    out, cut = _complete(policy, cfg, counters, [prompts[i] for i in fits])
    counters["analyses cut at max_analysis"] += cut
    texts = dict(zip(fits, out))
    return skills.parse_replies([texts.get(i, "") for i in range(len(rolls))])


@smaller_on_oom("rollout_batch")
def _complete(policy: Policy, cfg: Config, _, prompts: list[list[int]]) -> tuple[list[str], int]:
    return complete(policy, prompts, cfg.max_analysis, cfg.rollout_batch)


def skill_givers(tasks: list[str], rng: np.random.Generator) -> dict[int, int]:
    """--ablate shuffle, a control the paper lacks: {i: whose skill episode i gets}, a permutation
    of the episodes with a skill (tasks[i], "" = none).

    Nobody gets a skill of the own task as long as no task has more than half of them; nobody ever
    gets the own one, unless it is the only one.
    """
    order = [int(i) for i in rng.permutation(len(tasks)) if tasks[i]]
    # Tasks as blocks; moved on by the longest block, everybody leaves the own one.
    names = dict.fromkeys(tasks[i] for i in order)
    order = [i for name in names for i in order if tasks[i] == name]
    shift = max(Counter(tasks[i] for i in order).values(), default=0)
    shift = 1 if shift == len(order) else shift
    return dict(zip(order, order[shift:] + order[:shift]))


def tasks_of(cfg: Config, tasks: list[Task], update: int) -> list[Task]:
    """The training tasks of one update: epochs over all tasks, each in its own random order, cut
    into updates."""
    first, chosen = (update - 1) * cfg.tasks_per_update, []
    for k in range(first, first + cfg.tasks_per_update):
        epoch, at = divmod(k, len(tasks))
        chosen.append(tasks[counted_rng(cfg.seed, "epoch", epoch).permutation(len(tasks))[at]])
    return chosen


def minibatches_of(cfg: Config, rolls: list[Rollout], update: int) -> list[list[int]]:
    """The rollouts with a token to train, in random order, cut into cfg.minibatches parts."""
    usable = [i for i, r in enumerate(rolls) if any(r.sampled)]
    order = counted_rng(cfg.seed, "minibatch", update).permutation(len(usable))
    parts = np.array_split([usable[i] for i in order], cfg.minibatches)
    return [[int(i) for i in part] for part in parts if len(part)]


# --------------------------------------------------------------------------------------------------
# 5. Evaluation
# --------------------------------------------------------------------------------------------------
def evaluate(policy: Policy, pool: Pool, tasks: list[Task], cfg: Config, key: str,
             with_plan: bool = False) -> dict:
    """Every task of the list exactly once, in sorted order, from ordinary history (no skill, memory
    or retrieval). The released code draws tasks with replacement.

    `with_plan` puts the world's own right plan in the context: what the teacher could do, a
    diagnostic, never a result.
    """
    tasks = sorted(tasks, key=lambda task: task.id)
    # Random numbers depend on the task only: the same luck for every arm and every update.
    keys = [("eval", task.id) for task in tasks]
    plans = [pool.env.plan(task) for task in tasks] if with_plan else None
    rolls, counters = rollout(policy, pool, tasks, cfg, keys, cfg.eval_temperature, plans)
    steps = sum(len(r.episode.steps) for r in rolls)
    return (dict(stage="eval", at=key, split=tasks[0].split if tasks else "",
                 skill_in_context=with_plan)
            | pool.env.metrics([r.episode for r in rolls])
            | dict(invalid_action_rate=counters["invalid actions"] / max(1, steps),
                   episode_steps=steps / max(1, len(tasks)), temperature=cfg.eval_temperature,
                   counters=dict(counters),
                   tasks={r.episode.task_id: r.episode.won for r in rolls}))


def evaluate_splits(policy: Policy, pool: Pool, tasks: dict, run: Run, key: str,
                    teacher: bool = False) -> None:
    """Evaluate every split of --eval_splits and log it; with `teacher` also with the plan in
    context."""
    cfg = run.cfg
    for split in cfg.eval_splits:
        run.log(evaluate(policy, pool, tasks[split], cfg, key))
    if teacher and envs.has(pool.env, "plan"):
        run.log(evaluate(policy, pool, tasks[cfg.eval_splits[0]], cfg, key, with_plan=True))


def evaluate_only(cfg: Config, notice: str = "") -> None:
    """--eval: every task of each split once; the result as a line, and in OUT/NAME/eval-*.json."""
    env, tasks, tasks_notice = find_tasks(cfg)
    print(*filter(None, (notice, tasks_notice)), sep="\n", flush=True)
    policy = load_policy(cfg, weights_of(cfg), trainable=False)
    if cfg.tune == "qlora":
        print("weights: the base in 4-bit NF4, as QLoRA trains it (--tune lora takes it in 16 bit; "
              "for a fully fine-tuned folder, --tune full)", flush=True)
    folder = Path(cfg.out) / cfg.name
    # Not into the folder of a run that is going on.
    with Run(cfg).opened(fresh=False), Pool(env, cfg.workers) as pool:
        for split in cfg.eval_splits:
            if not tasks[split]:
                raise ValueError(f"split {split} has no tasks.")
            envs.check(env, {split: tasks[split]})
            result = evaluate(policy, pool, tasks[split], cfg, "eval")
            print(runs.progress_line(result), flush=True)
            for kind, row in result["by_kind"].items():
                print(f"    {kind:32s} {row['wins']:4d}/{row['n']:<4d} {runs.rate(row)}")
            about = dict(model=cfg.model, config=dataclasses.asdict(cfg),
                         git_commit=runs.git_commit())
            runs.write_json(folder / f"eval-{split}.json", result | about)
            print(f"written: {folder / f'eval-{split}.json'}")


# --------------------------------------------------------------------------------------------------
# 6. Training from the base to the report; the command line
# --------------------------------------------------------------------------------------------------
def find_tasks(cfg: Config) -> tuple[envs.Env, dict[str, list[Task]], str]:
    """The world, its tasks thinned to --train_tasks and --eval_tasks, and one line about them.

    Ids may begin with the kind, so the first N would be of one kind; evenly spaced ones are a fair
    sample.
    """
    env = envs.make(envs.find(cfg.env), cfg.env_args)
    tasks, notice = env.tasks(cfg.task_seed)
    tasks = {split: list(tasks.get(split, [])) for split in envs.SPLITS}
    for split in envs.SPLITS:
        limit, total = cfg.train_tasks if split == "train" else cfg.eval_tasks, len(tasks[split])
        n = min(limit or total, total)
        tasks[split] = [tasks[split][i * total // n] for i in range(n)]
    return env, tasks, notice


def start(policy: Policy, pool: Pool, tasks: dict, run: Run) -> None:
    """From the base to the policy Stage 2 starts from: evaluation, Stage 1 (or its reuse, or not),
    evaluation. Ends with checkpoint 0."""
    cfg = run.cfg
    # An arm that shares its start has the base's numbers in the run it starts from.
    if not cfg.sft_from:
        evaluate_splits(policy, pool, tasks, run, "base", teacher=True)
    if not cfg.sft_from and cfg.ablate != "no_sft":
        stage1(policy, pool, tasks["train"], cfg, run)
    if cfg.ablate != "no_sft":
        evaluate_splits(policy, pool, tasks, run, "sft", teacher=True)
    run.save(policy, None)


def static_library(policy: Policy, pool: Pool, tasks: list[Task], run: Run) -> dict[str, str]:
    """--ablate static: one offline skill per training task, from one rollout of the Stage-2 start,
    by the Stage-1 analyzer, never renewed.

    Kept in the run's library.json: an endpoint need not answer the same twice, so --resume must not
    ask it again.
    """
    cfg, file = run.cfg, run.dir / "library.json"
    if not file.exists():
        keys = [("static", task.id) for task in tasks]
        rolls, counters = rollout(policy, pool, tasks, cfg, keys, cfg.temperature)
        replies, more = analyze_with(pool.env, cfg, [r.episode for r in rolls])
        written = {r.episode.task_id: reply.skill for r, reply in zip(rolls, replies)
                   if reply.skill}
        runs.write_json(file, dict(skills=written, counters=counters + more))
    library = json.loads(file.read_text())
    if not any(m["stage"] == "library" for m in run.metrics):
        run.log(dict(stage="library", tasks=len(tasks), skills=len(library["skills"]),
                     counters=library["counters"]))
    return library["skills"]


def train(cfg: Config, notice: str = "") -> None:
    """The whole method, from the first evaluation to the report. `notice`: a line to print
    first."""
    run = Run(cfg)
    going_on = run.to_resume()
    weights = "" if going_on else runs.first_weights(cfg, weights_of(cfg))
    if notice:
        run.say(notice)
    # First: a wrong model must not leave a run's folder behind.
    policy = None if going_on else load_policy(cfg, weights)
    env, tasks, notice = find_tasks(cfg)
    runs.need_analyzer(env, cfg)
    run.say(notice)
    if not tasks["train"]:
        raise ValueError("there is no training task (train split empty).")
    envs.check(env, tasks)
    with run.opened(fresh=not going_on), Pool(env, cfg.workers) as pool:
        if going_on:
            policy, path = run.resume()
        else:
            start(policy, pool, tasks, run)
            path = run.dir / runs.START
        begin = run.dir / runs.START / "policy"
        if is_lora(policy):
            freeze_reference(policy, begin)
        else:
            policy.reference = load_policy(cfg, str(begin), trainable=False).model
        optimizer = make_optimizer(policy, cfg.lr)
        runs.load_optimizer(optimizer, path / "optimizer.safetensors")
        with reference_of(policy) as reference:
            static = cfg.ablate == "static"
            library = static_library(reference, pool, tasks["train"], run) if static else {}
        for update in range(run.update + 1, cfg.updates + 1):
            line = one_update(policy, pool, tasks["train"], cfg, optimizer, update, run, library)
            run.log(line)
            for text in runs.warnings_of(cfg, line):
                run.say(f"warning: {text}")
            healthy = runs.still_healthy(run, optimizer)
            run.update = update
            if update == cfg.updates or (cfg.eval_every and update % cfg.eval_every == 0):
                evaluate_splits(policy, pool, tasks, run, str(update))
            if healthy or update == cfg.updates:
                run.save(policy, optimizer)
    runs.draw_curves(run)
    runs.write_report(run)
    run.say(f"report: {run.dir / 'report.md'}")


def main(argv: list[str] | None = None) -> int:
    """Command line. 0 = done, 2 = bad input or a run that cannot go on (one sentence), 130 = Ctrl-C
    and 143 = SIGTERM (both resumable)."""
    profiles = [f"{p}: " + ", ".join(f"{k}={v}" for k, v in d.items()) for p, d in PROFILES.items()]
    about = runs.world_help(sys.argv[1:] if argv is None else argv, Config.env)
    parser = HfArgumentParser(
        Config, prog="python seed_mini.py", description=__doc__.split("\n")[0],
        usage="%(prog)s [--option value ...] (--help explains every option)",
        epilog=about + "Defaults by profile: " + "; ".join(profiles))
    cfg = Config(**vars(parser.parse_args(argv)))
    transformers.utils.logging.disable_progress_bar()
    # A hub that cannot be reached: our one sentence, not its retries.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    def terminate(*_):
        """SIGTERM as Ctrl-C: unwinds the stack, so that workers end and the folder is released."""
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        runs.check_config(cfg)
        model, notice = runs.choose_model(cfg)
        cfg = resolve(dataclasses.replace(cfg, model=model))
        # Again: a given value may contradict a default.
        runs.check_config(cfg)
        torch.set_num_threads(cfg.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        if cfg.dry_run:
            print(*filter(None, (notice, runs.dry_run(cfg, weights_of(cfg)))), sep="\n")
        else:
            evaluate_only(cfg, notice) if cfg.eval else train(cfg, notice)
    except KeyboardInterrupt as stop:
        print("\nstopped" if cfg.eval or cfg.dry_run else "\nstopped; continue with --resume",
              file=sys.stderr)
        return 143 if stop.args == ("SIGTERM",) else 130
    except (ValueError, RuntimeError, OSError, ImportError, NotImplementedError,
            SafetensorError) as error:
        if cfg.debug:
            raise
        print(f"seed_mini: {runs.one_sentence(error)}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
