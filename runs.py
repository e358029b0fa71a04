"""runs.py: what keeps a run alive. Opened only when needed: the method does not live here.

    1  playing      Pool: many episodes at once, in this process or in worker processes
    2  one update   out of memory, the optimizer step and its loss scale, sick numbers, metrics
    3  the folder   Run: logs, checkpoints, exact resume; its files
    4  weights      loading a base (4-bit too) or an adapter, saving what was trained
    5  reports      progress lines, warnings, curves, report
    6  memory       what a run needs on a card, and what a card has room for
    7  endpoint     Stage 1's analyzer as a server: retries, limits, and no secret in a message
    8  the border   bad options are refused here, with one sentence each

Functions that take `cfg` want seed_mini's options, `rolls` its Rollouts, `scores` its Scores: this
module imports neither, so the arrow goes one way.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

import envs
import losses
from policy import PREFILL, Policy, chat_pieces, is_lora

HERE = Path(__file__).resolve().parent
# What --model auto takes where a card can hold it.
QWEN = "Qwen/Qwen3-1.7B"


# --------------------------------------------------------------------------------------------------
# 1. Playing many episodes at once
# --------------------------------------------------------------------------------------------------
# Here rather than in envs.py: a reader of the method needs two calls, reset and step; what follows
# is about processes that hang or die.
class _Request(NamedTuple):
    """Start `task` if `fresh`, play actions, answer the last result: reset, step and replay in
    one."""
    slot: int
    task: envs.Task
    # All of the episode's actions, up to and including this request's.
    actions: list[str]
    # From the start (reset, replay), or only the last action (step).
    fresh: bool
    # False: a replay of a slot nobody is waiting for.
    wanted: bool = True

    def message(self) -> dict:
        """The request as the environment's side reads it."""
        return {"slot": self.slot, "task": dataclasses.asdict(self.task) if self.fresh else None,
                "actions": self.actions if self.fresh else self.actions[-1:]}


class Pool:
    """Episodes side by side, spread over worker processes in blocks, so that a group shares a
    worker.

        with Pool(env, workers=2) as pool:
            starts = pool.reset(tasks)           # list of (observation, info), tasks[i] in slot i
            # {slot: (observation, reward, terminated, truncated, info)}
            results = pool.step({0: "look"})

    workers=0 plays in this process, by the same two calls. A step that takes longer than the
    world's step_timeout (workers only), an environment that raises, dies, or gives a reward that is
    not finite ends that slot's episode: observation "", reward 0, truncated, info["end"] "env
    timeout" or "env died" and info["reason"]. A worker that hangs or dies is replaced, and its
    other slots are restored by playing their actions again: exact, because environments are
    deterministic. A task that cannot be played ends in reset() as "task unplayable". `counters`
    counts all of it.

    Nothing outlives close(), Ctrl-C or a kill -9 of this process: a worker ends as soon as its
    stdin closes.
    """

    def __init__(self, env: envs.Env, workers: int = 2):
        # The trainer asks it for wording; it never plays.
        self.env = env
        self.step_timeout = env.step_timeout
        self.counters = {"env timeout": 0, "env died": 0, "workers restarted": 0,
                         "slots replayed": 0}
        self._world = json.dumps([env.file, env.settings])
        # Without workers: {slot: environment}.
        self._slots = {}
        # slot -> the request that led to its present state, if its episode goes on.
        self._running = {}
        # slot -> its last info.
        self._infos = []
        # slot -> result of an episode lost while other slots were stepping.
        self._lost = {}
        self._workers = []
        # On close(), garbage collection and exit.
        self._stop = weakref.finalize(self, _stop_workers, self._workers)
        # Start all, then wait: imports take a second.
        for _ in range(workers):
            self._workers.append(_start_worker(self._world))
        for worker in self._workers:
            _await_ready(worker)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; nothing is left running."""
        self._stop()
        for env in self._slots.values():
            env.close()
        self._slots.clear()

    def reset(self, tasks: list[envs.Task]) -> list[tuple[str, dict]]:
        """Starts tasks[i] in slot i; earlier episodes are dropped."""
        self._running, self._lost = {}, {}
        self._infos = [dict(goal="", actions=None, won=False, valid=True) for _ in tasks]
        results = self._exchange([_Request(slot, task, [], fresh=True)
                                  for slot, task in enumerate(tasks)])
        return [(results[slot][0], results[slot][-1]) for slot in range(len(tasks))]

    def step(self, actions: dict[int, str]) -> dict[int, tuple[str, float, bool, bool, dict]]:
        """Plays one action in each named slot; the workers compute at the same time."""
        idle = [slot for slot in actions if slot not in self._running and slot not in self._lost]
        if idle:
            raise RuntimeError(f"there is no running episode in slot {idle[0]}: call reset() first")
        lost = {slot: self._lost.pop(slot) for slot in actions if slot in self._lost}
        old = self._running
        return lost | self._exchange([
            _Request(slot, old[slot].task, [*old[slot].actions, action], fresh=False)
            for slot, action in actions.items() if slot not in lost])

    def _exchange(self, requests: list[_Request]) -> dict[int, tuple]:
        """Sends every request to its worker, then collects answers as they come, until all are
        in."""
        if not self._stop.alive:
            raise RuntimeError("this Pool is closed")
        results = {}
        if not self._workers:
            for request in requests:
                answer = envs.answer(self._slots, request.message(), self._world)
                # Through JSON, as from a worker: what works here works there.
                self._take(request, json.loads(json.dumps(answer)), results)
            return results
        try:
            for w, worker in enumerate(self._workers):
                self._send(worker, [r for r in requests if self._home(r.slot) == w])
            while busy := [w for w, worker in enumerate(self._workers) if worker.queue]:
                wait = min(self._workers[w].deadline for w in busy) - time.monotonic()
                ready = select.select([self._workers[w].stdout for w in busy], [], [],
                                      max(wait, 0))[0]
                for w in busy:
                    if self._workers[w].stdout in ready:
                        self._collect(w, results)
                    elif time.monotonic() > self._workers[w].deadline:
                        self._replace(w, "env timeout", f"no answer within {self.step_timeout} s",
                                      results)
        except BaseException:
            # Ctrl-C between question and answer: such pipes must not be used again.
            self.close()
            raise
        return results

    def _home(self, slot: int) -> int:
        return slot * len(self._workers) // len(self._infos)

    def _send(self, worker, requests: list[_Request]) -> None:
        """One line for all requests: the worker reads it whole before it answers, so no pipe can
        jam."""
        worker.queue = requests
        self._set_deadline(worker)
        # A worker that died while idle: _collect finds its stdout closed.
        with contextlib.suppress(BrokenPipeError):
            line = json.dumps([request.message() for request in requests])
            worker.stdin.write(line.encode() + b"\n")
            worker.stdin.flush()

    def _set_deadline(self, worker) -> None:
        actions = len(worker.queue[0].message()["actions"]) if worker.queue else 0
        worker.deadline = time.monotonic() + self.step_timeout * max(1, actions)

    def _collect(self, w: int, results: dict) -> None:
        """Takes the answers that have arrived from worker w; they come in the order of the
        requests."""
        worker = self._workers[w]
        chunk = os.read(worker.stdout.fileno(), 1 << 20)
        if not chunk:
            return self._replace(w, "env died", _last_words(worker), results)
        *lines, worker.partial = (worker.partial + chunk).split(b"\n")
        for line in lines:
            self._take(worker.queue.pop(0), json.loads(line), results)
        self._set_deadline(worker)

    def _take(self, request: _Request, answer: dict, results: dict) -> None:
        """One answer: the slot goes on, is over, or is lost."""
        result = answer.get("result")
        if result and request.actions and not math.isfinite(result[1]):
            answer = {"error": "its reward was not a finite number"}
        if "error" in answer:
            end = "env died" if request.actions else "task unplayable"
            return self._lose(request, end, answer["error"], results)
        self._running[request.slot], self._infos[request.slot] = request, result[-1]
        if request.actions and (result[2] or result[3]):
            del self._running[request.slot]
        if request.wanted:
            results[request.slot] = tuple(result)

    def _lose(self, request: _Request, end: str, reason: str, results: dict) -> None:
        """Ends an episode that the environment, not the policy, brought to its end."""
        self.counters[end] = self.counters.get(end, 0) + 1
        self._running.pop(request.slot, None)
        info = {**self._infos[request.slot], "end": end, "reason": reason}
        (results if request.wanted else self._lost)[request.slot] = ("", 0.0, False, True, info)

    def _replace(self, w: int, end: str, reason: str, results: dict) -> None:
        """Worker w hangs or died over the request at the head of its queue: that episode is lost,
        the others live on."""
        guilty, *rest = self._workers[w].queue
        self._lose(guilty, end, reason, results)
        _stop_workers([self._workers[w]], patience=0)
        self._workers[w] = _start_worker(self._world)
        _await_ready(self._workers[w])
        waiting = {request.slot for request in rest}
        replays = [request._replace(wanted=False) for slot, request in self._running.items()
                   if self._home(slot) == w and slot not in waiting]
        requests = [request._replace(fresh=True) for request in rest + replays]
        self.counters["workers restarted"] += 1
        self.counters["slots replayed"] += sum(bool(request.actions) for request in requests)
        self._send(self._workers[w], requests)


def _start_worker(world: str) -> subprocess.Popen:
    # Its own session: Ctrl-C reaches only this process, which then closes the worker's stdin.
    errors = tempfile.TemporaryFile()
    worker = subprocess.Popen([sys.executable, os.path.abspath(envs.__file__), "--worker", world],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                              start_new_session=True)
    worker.errors, worker.queue, worker.partial = errors, [], b""
    return worker


def _await_ready(worker: subprocess.Popen, patience: float = 120.0) -> None:
    """A worker says one line when its world is imported; one that cannot is an error of the whole
    run."""
    ready = select.select([worker.stdout], [], [], patience)[0]
    if not ready or not os.read(worker.stdout.fileno(), 64):
        raise RuntimeError(f"an environment worker did not start: {_last_words(worker)}")


def _last_words(worker: subprocess.Popen) -> str:
    worker.errors.seek(0)
    lines = worker.errors.read().decode(errors="replace").split("\n")
    return " | ".join(line.strip() for line in lines[-4:]
                      if line.strip()) or "the process ended without a word"


def _stop_workers(workers: list[subprocess.Popen], patience: float = 2.0) -> None:
    for worker in workers:
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(patience)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        worker.stdout.close()
        worker.errors.close()


# --------------------------------------------------------------------------------------------------
# 2. One update: memory, the optimizer step, sick numbers, metrics
# --------------------------------------------------------------------------------------------------
# Counters; the report prints them as they are.
DROPPED = "episodes dropped: numbers not finite"
SKIPPED = "optimizer steps skipped: gradient not finite"
SCALED = "optimizer steps skipped: fp16 loss scale halved"


def smaller_on_oom(name: str):
    """Decorator of f(policy, cfg, counters, ...): out of memory means again with half of cfg.NAME,
    for the rest of the run, counted. f must be free to start over."""
    def decorate(work):
        """The function that starts over."""
        @functools.wraps(work)
        def again(policy, cfg, counters, *rest):
            """work, until it fits."""
            while True:
                with contextlib.suppress(torch.OutOfMemoryError):
                    return work(policy, cfg, counters, *rest)
                # Out here, where the exception keeps no tensor alive.
                if getattr(cfg, name) == 1:
                    raise RuntimeError(f"out of memory even with --{name} 1; see --dry_run, and "
                                       "lower --max_context or take a smaller model.")
                setattr(cfg, name, getattr(cfg, name) // 2)
                counters[f"out of memory: {name} halved"] += 1
                torch.cuda.empty_cache()
        return again
    return decorate


def optimizer_step(policy: Policy, optimizer: torch.optim.Optimizer, max_norm: float,
                   counters: Counter) -> float:
    """Undo the loss scale, clip, step. Returns the gradient norm before clipping; where that is not
    finite, the step is skipped and counted (it would turn every weight into NaN).

    The loss scale serves fp16 alone: it halves when a gradient overflows and doubles after 200
    clean steps. Elsewhere it is 1 and stays 1.
    """
    params = optimizer.param_groups[0]["params"]
    if policy.loss_scale != 1:
        torch._foreach_div_([p.grad for p in params if p.grad is not None], policy.loss_scale)
    norm = float(torch.nn.utils.clip_grad_norm_(params, max_norm))
    if math.isfinite(norm):
        optimizer.step()
        policy.clean_steps += 1
        if policy.loss_scale != 1 and policy.clean_steps % 200 == 0:
            policy.loss_scale *= 2
    elif policy.loss_scale > 2:
        counters[SCALED] += 1
        policy.loss_scale, policy.clean_steps = policy.loss_scale / 2, 0
    else:
        counters[SKIPPED] += 1
        policy.clean_steps = 0
    optimizer.zero_grad(set_to_none=True)
    return norm


def drop_not_finite(rolls: list, scores, counters: Counter) -> None:
    """Take episodes with a log-prob that is NaN or inf, by the sampler or by a scoring pass, out of
    the update: from here on they have no sampled token. Their reward stays in its group.

    Before the training pass, because a gradient that is 0 at such a token is still NaN in the
    layers below it. Run.write_rollouts keeps them in dropped.jsonl.
    """
    for i, roll in enumerate(rolls):
        scored = (scores.old[i], scores.reference[i], scores.teacher[i])
        if all(s.isfinite().all() for s in scored) and all(map(math.isfinite, roll.logp)):
            continue
        counters[DROPPED] += 1
        roll.dropped, roll.sampled = "log-prob not finite", [False] * len(roll.ids)
        for s in (scores.old, scores.reference, scores.teacher, scores.entropy):
            s[i] = s[i][:0]


class Stopwatch:
    """Seconds by phase, and on a card the peak of its memory from here on."""

    def __init__(self, policy: Policy):
        self.start = self.last = time.perf_counter()
        self.laps = {}
        if policy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def lap(self, name: str) -> None:
        """Seconds since the last lap belong to `name`."""
        now = time.perf_counter()
        self.laps[name], self.last = round(now - self.last, 3), now

    def total(self) -> float:
        """Seconds since the start."""
        return round(time.perf_counter() - self.start, 3)


# losses.seed_loss's statistics that are logged, under names that users of other trainers know.
LOSS_METRICS = {"loss": "loss", "rl_loss": "rl_loss", "opd_loss": "opd_loss", "kl": "kl",
                "approx_kl": "approx_kl", "clip_fraction": "clip_ratio", "grad_norm": "grad_norm"}


def update_metrics(policy: Policy, cfg, update: int, rolls: list, replies: list, scores,
                   rewards: torch.Tensor, stats: list[dict], counters: Counter,
                   clock: Stopwatch) -> dict:
    """The metrics line of one update. rewards: [P, G]; stats: one dict per optimizer step, of which
    the skipped ones are left out of the means."""
    won = np.array([r.episode.won for r in rolls]).reshape(rewards.shape)
    lengths = [sum(r.sampled) for r in rolls]
    steps = [len(r.episode.steps) for r in rolls]
    tied = rewards.amax(1) == rewards.amin(1)
    line = dict(stage="rl", update=update, reward=float(rewards.mean()),
                reward_std=float(rewards.std(dim=1).mean()), success=float(won.mean()),
                frac_reward_zero_std=float(tied.double().mean()),
                frac_outcome_tied=float((won.all(1) | ~won.any(1)).mean()))
    if cfg.method == "seed":
        line |= gate_metrics(cfg, rolls, replies, scores)
    taken = [s for s in stats if math.isfinite(s["grad_norm"])]
    if taken:
        line |= {name: sum(s[key] for s in taken) / len(taken)
                 for key, name in LOSS_METRICS.items()}
    return line | {
        "entropy": float(torch.cat(scores.entropy).sum()) / max(1, sum(lengths)),
        "sampler_gap": sampler_gap(rolls, scores), "repetition": repetition(rolls),
        "invalid_action_rate": counters["invalid actions"] / max(1, sum(steps)),
        "completions/mean_length": float(np.mean(lengths)),
        "episode_tokens": float(np.mean([len(r.ids) for r in rolls])),
        "episode_steps": float(np.mean(steps)), "num_tokens": sum(len(r.ids) for r in rolls),
        **(measured_peak(policy, cfg, rolls) if policy.device.type == "cuda" else {}),
        "learning_rate": cfg.lr, "counters": dict(+counters),
        "step_time": clock.total(), **{f"seconds/{k}": v for k, v in clock.laps.items()}}


def gate_metrics(cfg, rolls: list, replies: list, scores) -> dict:
    """What tells a working SEED run from one that silently is GRPO: parse rate, coverage, Delta by
    outcome, and the gate. All token means; None without any token, which JSON can say."""
    covered = [i for i, reply in enumerate(replies) if reply.skill and any(rolls[i].sampled)]
    tokens = sum(sum(r.sampled) for r in rolls)
    deltas = {i: scores.teacher[i] - scores.old[i] for i in covered}
    gates = [losses.confidence_gate(scores.teacher[i], scores.old[i], cfg.beta_opd)
             for i in covered]

    def mean(rows):
        """Token mean over episodes."""
        return float(torch.cat(rows).mean()) if rows else None

    return dict(
        parse_rate=sum(bool(r.skill) for r in replies) / len(replies),
        skill_token_share=sum(sum(rolls[i].sampled) for i in covered) / max(1, tokens),
        gate_mean=mean(gates), gate_above_half=mean([(g > 0.5).float() for g in gates]),
        delta_mean=mean(list(deltas.values())),
        delta_won=mean([d for i, d in deltas.items() if rolls[i].episode.won]),
        delta_lost=mean([d for i, d in deltas.items() if not rolls[i].episode.won]))


def sampler_gap(rolls: list, scores) -> float:
    """Largest difference between the sampler's log-prob of a token and the scorer's. Zero would
    mean that the ratio of the first step is exactly 1."""
    gaps = [0.0]
    for roll, scored in zip(rolls, scores.old):
        if len(scored):
            own = torch.tensor([lp for lp, on in zip(roll.logp, roll.sampled) if on])
            gaps.append(float((own - scored.cpu()).abs().max()))
    return max(gaps)


def repetition(rolls: list) -> float:
    """Share of steps that repeat the action of the step before: near 1 when the policy has
    collapsed into a loop."""
    pairs = [(a.action, b.action) for r in rolls
             for a, b in zip(r.episode.steps, r.episode.steps[1:])]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


# --------------------------------------------------------------------------------------------------
# 3. The folder of a run: logs, checkpoints, exact resume
# --------------------------------------------------------------------------------------------------
# Of the checkpoint folder.
FORMAT = 2
LOGS = ("metrics.jsonl", "rollouts.jsonl", "skills.jsonl", "dropped.jsonl")
# Where Stage 2 begins: its reference policy, and what --sft_from reads.
START = "checkpoints/update-000000"


class Run:
    """The folder OUT/NAME and everything written to it (a class, because logs and checkpoints must
    agree about where they are)."""

    def __init__(self, cfg):
        self.cfg, self.dir = cfg, Path(cfg.out) / cfg.name
        self.metrics: list[dict] = []
        self.update = 0

    @contextlib.contextmanager
    def opened(self, fresh: bool):
        """`with run.opened(fresh):` the folder is this process's alone. ValueError if another
        process works in it.

        A lock of the operating system on the folder itself: it ends with the process, however that
        ends, and leaves no file behind.
        """
        self.dir.mkdir(parents=True, exist_ok=True)
        # Not inherited by the environment workers.
        handle = os.open(self.dir, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.dir} is in use: another process is running there. Wait "
                                 "for it, or choose another --name.") from None
            if fresh:
                self.create()
            yield
        finally:
            os.close(handle)

    def create(self) -> None:
        """An empty folder with the config; what a run has left there is deleted with --overwrite,
        or with --resume if it has no checkpoint."""
        present = [p for p in self.dir.iterdir() if p.name != "config.json.tmp"]
        if present and not run_config(self.dir):
            raise ValueError(f"{self.dir} holds files that are no run of seed_mini; choose another "
                             "--name or --out.")
        if present and not (self.cfg.overwrite or self.cfg.resume):
            raise ValueError(f"{self.dir} already holds a run: continue it with --resume, replace "
                             "it with --overwrite, or choose another --name.")
        if self.cfg.resume and any((self.dir / "checkpoints").glob("update-*")):
            raise ValueError(f"{self.dir} got a checkpoint while this process was starting; run "
                             "--resume again.")
        # config.json last: killed here, it is still a run.
        for path in sorted(present, key=lambda p: p.name == "config.json"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        about = dict(git_commit=git_commit(), torch=torch.__version__, format=FORMAT)
        write_json(self.dir / "config.json", dataclasses.asdict(self.cfg) | about)

    def say(self, text: str) -> None:
        """One line for the person at the terminal."""
        print(safe(text), flush=True)

    def log(self, line: dict) -> None:
        """One line of metrics.jsonl, and its progress line."""
        line = finite(line)
        append_jsonl(self.dir / "metrics.jsonl", [line])
        self.metrics.append(line)
        self.say(progress_line(line))

    def write_rollouts(self, rolls: list, replies: list, update: int, stage: str,
                       scores=None) -> None:
        """Readable episodes to rollouts.jsonl (one of each task, and all that have no token to
        train), every skill to skills.jsonl with outcome, status and mean Delta (text: what was
        written where none could be read), and what was dropped to dropped.jsonl: episode, token ids
        and the sampler's log-probs (null: not finite)."""
        head, seen, shown, written = dict(update=update, stage=stage), set(), [], []
        for r in rolls:
            if r.episode.task_id not in seen or not any(r.sampled):
                shown.append(head | dataclasses.asdict(r.episode))
            seen.add(r.episode.task_id)
        for i, (r, reply) in enumerate(zip(rolls, replies)):
            measured = scores and reply.skill and len(scores.old[i])
            delta = (scores.teacher[i] - scores.old[i]).mean().item() if measured else None
            written.append(head | dict(task_id=r.episode.task_id, goal=r.episode.goal,
                                       won=r.episode.won, status=reply.status, skill=reply.skill,
                                       summary=reply.summary, text=reply.text, delta_mean=delta))
        dropped = [dict(update=update, why=r.dropped, episode=dataclasses.asdict(r.episode),
                        ids=r.ids, logp=r.logp) for r in rolls if r.dropped]
        append_jsonl(self.dir / "rollouts.jsonl", shown)
        append_jsonl(self.dir / "skills.jsonl", written)
        if dropped:
            append_jsonl(self.dir / "dropped.jsonl", finite(dropped))

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer | None) -> None:
        """Write checkpoints/update-N: weights, optimizer moments, log positions, checksums; to a
        temporary name, synced, then renamed."""
        final = self.dir / "checkpoints" / f"update-{self.update:06d}"
        temporary = final.with_name("writing-" + final.name)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_policy(policy, temporary / "policy", self.cfg.env)
        if optimizer is not None:
            state = optimizer.state_dict()["state"]
            save_file({f"{i}.{k}": v.contiguous() for i, s in state.items() for k, v in s.items()},
                      temporary / "optimizer.safetensors")
        logs = [self.dir / name for name in LOGS if (self.dir / name).exists()]
        sums = {str(p.relative_to(temporary)): sha256(p)
                for p in sorted(temporary.rglob("*")) if p.is_file()}
        write_json(temporary / "state.json", dict(
            format=FORMAT, update=self.update, config=dataclasses.asdict(self.cfg),
            log_bytes={n: 0 for n in LOGS} | {p.name: p.stat().st_size for p in logs},
            sha256=sums))
        for path in [*temporary.rglob("*"), *logs]:
            sync(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync(final.parent)
        self.prune()

    def best(self) -> str:
        """Name of the checkpoint with the best evaluation so far (the first of equals), "" without
        any. Kept for the user, never reported as the result: it was chosen on the tasks it is
        measured on."""
        rows = [(m["success"], f"update-{int(m['at']):06d}") for m in self.metrics
                if m["stage"] == "eval" and m["at"].isdigit()
                and m["split"] == self.cfg.eval_splits[0]]
        # Not every evaluation has a checkpoint.
        rows = [row for row in rows if (self.dir / "checkpoints" / row[1]).exists()]
        return max(rows, key=lambda row: row[0])[1] if rows else ""

    def prune(self) -> None:
        """Keep the newest two checkpoints (if the last is torn, the one before is good), the best,
        and the start of Stage 2, which is the reference policy and what --sft_from reads."""
        kept = sorted((self.dir / "checkpoints").glob("update-*"))
        for old in kept[:-2]:
            if old.name not in (Path(START).name, self.best()):
                shutil.rmtree(old)

    def newest(self) -> tuple[Path, dict]:
        """The newest checkpoint whose checksums agree, and its state. ValueError if there is
        none."""
        for path in sorted((self.dir / "checkpoints").glob("update-*"), reverse=True):
            if state := good_checkpoint(path):
                return path, state
            self.say(f"warning: checkpoint {path} is damaged; trying the one before")
        raise ValueError(f"--resume: {self.dir} holds no usable checkpoint. Start it again with "
                         "--overwrite.")

    def rewind(self, state: dict) -> None:
        """Cut the logs back to where they were when the checkpoint was written (which takes
        half-written lines away), and reload the metrics."""
        for name, size in state["log_bytes"].items():
            file = self.dir / name
            data = file.read_bytes()[:size] if file.exists() else b""
            # Not by a kill: the logs are synced before the checkpoint gets its name.
            if len(data) < size:
                self.say(f"warning: {file} is shorter than it was; its last lines are lost")
                data = data[:data.rfind(b"\n") + 1]
            if file.exists():
                os.truncate(file, len(data))
        self.metrics = read_jsonl(self.dir / "metrics.jsonl")
        self.update = state["update"]

    def to_resume(self) -> bool:
        """Whether there is a checkpoint to go on from. A run stopped before its first one (in Stage
        1, say) starts again: same options, same run.

        ValueError if there is no such run, or if it was started with other options. (Free are the
        number of updates and where the folder lies.)
        """
        if not self.cfg.resume:
            return False
        saved, now = run_config(self.dir), dataclasses.asdict(self.cfg)
        free = ("resume", "overwrite", "updates", "debug", "out", "name")
        if not saved:
            raise ValueError(f"--resume: there is no run in {self.dir}.")
        if saved.get("format") != FORMAT:
            raise ValueError(f"--resume: {self.dir} is a run of format {saved.get('format')}, and "
                             f"this seed_mini goes on with format {FORMAT} only. Continue it with "
                             f"the commit it was started with ({saved.get('git_commit')}).")
        changed = [f"{k} was {v!r}, now {now[k]!r}" for k, v in saved.items()
                   if k in now and now[k] != v and k not in free]
        if changed:
            raise ValueError(f"--resume needs the options the run was started with: "
                             f"{'; '.join(changed)}.")
        # config.json keeps the first: records made of this run would name only that one.
        if saved.get("git_commit", "") != git_commit():
            self.say(f"warning: this run was started with commit "
                     f"{saved.get('git_commit') or 'unknown'}, and goes on with "
                     f"{git_commit() or 'unknown'}")
        return any((self.dir / "checkpoints").glob("update-*"))

    def resume(self) -> tuple[Policy, Path]:
        """The policy of the newest good checkpoint (its reference policy is update-000000), and
        that checkpoint; logs are cut back to that moment."""
        path, state = self.newest()
        if path != self.dir / START and not good_checkpoint(self.dir / START):
            raise ValueError(f"--resume: {self.dir / START}, the reference policy, is damaged. "
                             "Start the run again with --overwrite.")
        self.rewind(state)
        # What a kill in the middle of it has left.
        self.prune()
        self.say(f"resuming {self.dir} after update {self.update}")
        return load_policy(self.cfg, str(path / "policy")), path


def still_healthy(run: Run, optimizer: torch.optim.Optimizer) -> bool:
    """Whether everything was finite in the last update. RuntimeError where going on could only
    spoil the good checkpoints."""
    advice = ("the checkpoint from before is kept. Start again from its policy folder (--model) "
              "with a lower --lr.")
    sick = [bool({DROPPED, SKIPPED} & m["counters"].keys())
            for m in run.metrics if m["stage"] == "rl"][-3:]
    if len(sick) == 3 and all(sick):
        raise RuntimeError("three updates in a row had log-probs or gradients that are not finite, "
                           f"so the run stops; {advice}")
    if not all(p.isfinite().all() for p in optimizer.param_groups[0]["params"]):
        raise RuntimeError(f"the weights are not finite after update {run.update + 1}, so the run "
                           f"stops; {advice}")
    return not sick[-1]


def run_config(folder: Path) -> dict:
    """config.json of a run's folder; {} if this is none (model folders have a config.json, too, and
    must never be taken for a run and emptied). ValueError if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return config if isinstance(config, dict) and "method" in config else {}
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is damaged ({error}). Start the run again in "
                         "another folder.") from error


def good_checkpoint(path: Path) -> dict | None:
    """The state of a checkpoint folder, None if it is damaged. ValueError if a newer seed_mini
    wrote it."""
    try:
        state = json.loads((path / "state.json").read_text())
        if state["format"] > FORMAT:
            raise ValueError(f"{path} was written by a newer seed_mini (format {state['format']}, "
                             f"this one reads {FORMAT}); update seed_mini.")
        sums = state["sha256"].items()
        return state if all(sha256(path / name) == digest for name, digest in sums) else None
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def finite(value):
    """The same JSON data with None for every number that is not finite: NaN is no JSON, and no
    measurement."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk: a power cut must not undo a
    rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_jsonl(path: Path) -> list[dict]:
    """The records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_jsonl(path: Path, rows: list[dict]) -> None:
    """Add records to a JSON-lines file."""
    with open(path, "a") as f:
        f.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def write_json(path: Path, data: dict) -> None:
    """Indented JSON, written to a temporary name and synced first: whoever sees the name sees all
    of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    sync(temporary)
    temporary.replace(path)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    # Not read as a whole: AdamW's moments of a large model fill many GB.
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def git_commit() -> str:
    """The commit of this checkout, for the records; "" outside a checkout."""
    if not shutil.which("git"):
        return ""
    out = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True,
                         text=True)
    return out.stdout.strip() if out.returncode == 0 else ""


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Put saved AdamW moments back, bit for bit; no file, nothing to put back."""
    if not path.exists():
        return
    state = {}
    for name, value in load_file(path).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict(optimizer.state_dict() | dict(state=state))


# --------------------------------------------------------------------------------------------------
# 4. Weights: from a base in 32, 16 or 4 bits, or an adapter; and to a folder
# --------------------------------------------------------------------------------------------------
LORA_RANK = 16


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


MODEL_CARD = """---
base_model: {base}
library_name: peft
pipeline_tag: text-generation
tags: [lora, seed]
---
A LoRA adapter for `{base}`, trained in the environment {env} by seed_mini
([SEED](https://arxiv.org/abs/2607.14777), or GRPO as its baseline). How it was trained and what it
scored is in the run's config.json and report.md, three folders up. At inference it needs no skill,
memory or retrieval.

    base = AutoModelForCausalLM.from_pretrained("{base}")
    model = PeftModel.from_pretrained(base, "<this folder>")
    python seed_mini.py --env {env} --eval --model <this folder>
"""


def save_policy(policy: Policy, path: Path, env: str) -> None:
    """An ordinary Hugging Face folder (or, for LoRA, a PEFT adapter folder with a model card), with
    the tokenizer."""
    if is_lora(policy):
        # "auto" would ask the hub.
        policy.model.save_pretrained(path, selected_adapters=["default"],
                                     save_embedding_layers=False)
        base = policy.model.peft_config["default"].base_model_name_or_path
        # Instead of peft's empty form.
        (path / "README.md").write_text(MODEL_CARD.format(base=base, env=env))
        write_json(path / "seed_mini.json",
                   dict(base_check=base_check(policy.model), loss_scale=policy.loss_scale,
                        clean_steps=policy.clean_steps))
    else:
        policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)


# --------------------------------------------------------------------------------------------------
# 5. Reports: progress lines, warnings, curves, report
# --------------------------------------------------------------------------------------------------
def safe(text: str) -> str:
    """Text that is safe to print: model and environment text may hold terminal escape codes."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def one_sentence(error: Exception) -> str:
    """An error as one line that is safe to print."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # The second is how safetensors says it.
    if getattr(error, "errno", 0) in full or any(f"(os error {n})" in str(error) for n in full):
        return (f"the disk is full ({error}); what was written before is intact: make room and "
                "continue with --resume")
    return safe(" ".join(str(error).split()))[:600]


def rate(result: dict) -> str:
    """Success and its interval."""
    return "{success:.1%} [{interval[0]:.1%}, {interval[1]:.1%}]".format_map(result)


def progress_line(line: dict) -> str:
    """A metrics line for the eye."""
    if line["stage"] == "eval":
        skill = " with the plan in context" if line["skill_in_context"] else ""
        score = f", score {line['score']:.3f}" if "score" in line else ""
        return (f"eval {line['at']:>6} {line['split']}{skill}: {line['wins']}/{line['n']} = "
                f"{rate(line)}, macro {line['macro']:.1%}{score}")
    if line["stage"] == "library":
        return f"static skills for {line['skills']} of {line['tasks']} training tasks"
    if line["stage"] == "sft":
        if "rows" in line:
            return (f"sft   base wins {line['success']:.1%} of {line['episodes']} episodes, "
                    f"{line['rows']} rows to learn from")
        skipped = {SKIPPED, SCALED} & line.get("counters", {}).keys()
        return f"sft   {line['step']:4d}/{line['steps']}" + (
            " skipped: the gradient is not finite" if skipped
            else f" loss {line['loss']:.3f} anchor {line['anchor_kl']:.4f}")
    text = f"update {line['update']:3d} | reward {line['reward']:6.2f}"
    if "kl" not in line:
        return text + " | nothing to learn from: no optimizer step was taken, see counters"
    text += (f" success {line['success']:6.1%} tied groups {line['frac_reward_zero_std']:4.0%} "
             f"| kl {line['kl']:.4f} clip {line['clip_ratio']:.1%} entropy {line['entropy']:.3f} "
             f"invalid {line['invalid_action_rate']:.0%}")
    if "parse_rate" in line:
        text += f" | parse {line['parse_rate']:4.0%}"
    if line.get("gate_mean") is not None:
        won, lost = ("  none" if line[k] is None else f"{line[k]:+.3f}"
                     for k in ("delta_won", "delta_lost"))
        text += f" gate {line['gate_mean']:.2f} Delta won {won} lost {lost}"
    return text + f" | {line['step_time']:.1f}s"


def warnings_of(cfg, line: dict) -> list[str]:
    """Sentences for what a user must not overlook in a metrics line of an update."""
    out = []
    if cfg.method == "seed" and line["parse_rate"] < 0.5:
        out.append(f"only {line['parse_rate']:.0%} of the analyses parsed, so most of this update "
                   "was plain GRPO. Run Stage 1 longer (--sft_epochs), or raise --max_analysis; if "
                   "they parsed before, the updates unlearn it: lower --lr. \"text\" in "
                   "skills.jsonl is what the policy wrote.")
    if line.get("gate_mean") is not None and not 0.02 < line["gate_mean"] < 0.98:
        out.append(f"the gate is dead (mean {line['gate_mean']:.3f}): it no longer tells tokens "
                   "apart. Lower --beta_opd, or look at delta_mean.")
    still = line["entropy"] < 0.01 and line["completions/mean_length"]
    if line["repetition"] > 0.6 or still:
        out.append(f"the policy is collapsing (repeated actions {line['repetition']:.0%}, entropy "
                   f"{line['entropy']:.3f}). Lower --lr or --lambda_opd, or raise --kl_coef, and "
                   "start again from an earlier checkpoint.")
    if {DROPPED, SKIPPED} & line["counters"].keys():
        out.append("an episode or a step had numbers that are not finite and was left out (see "
                   "counters); a third such update in a row stops the run.")
    # Adapters compute in 16 bit on a card, where a logit of 20 is rounded to 0.1.
    if line["sampler_gap"] > (0.05 if cfg.tune == "full" else 0.5):
        out.append(f"sampling and scoring disagree by up to {line['sampler_gap']:.3f} in log-prob; "
                   "ratios are not 1 at the first step.")
    return out


BLUE, RED, BLACK, GREY = "#0072B2", "#D55E00", "#000000", "#999999"


def draw_curves(run: Run) -> None:
    """curves.png: success on held-out tasks with Wilson intervals; training success, ties and
    invalid actions; Delta by update."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    evals = [m for m in run.metrics if m["stage"] == "eval" and not m["skill_in_context"]
             and m["at"] != "base"]
    for split, colour, mark in zip(envs.SPLITS[1:], (BLUE, RED), ("o", "s")):
        rows = [m for m in evals if m["split"] == split]
        x = [0 if m["at"] == "sft" else int(m["at"]) for m in rows]
        y = [100 * m["success"] for m in rows]
        if rows:
            bars = [[v - 100 * m["interval"][0] for v, m in zip(y, rows)],
                    [100 * m["interval"][1] - v for v, m in zip(y, rows)]]
            axes[0].errorbar(x, y, yerr=bars, color=colour, marker=mark, capsize=3,
                             label=f"{split} (n = {rows[0]['n']}, Wilson 95%)")
    axes[0].set(title="Evaluation, ordinary history only", xlabel="update", ylabel="success (%)",
                ylim=(0, 100))
    rl = [m for m in run.metrics if m["stage"] == "rl"]
    x = [m["update"] for m in rl]
    for key, colour, style, label in (("success", BLUE, "-", "training success"),
                                      ("frac_reward_zero_std", BLACK, ":", "groups without signal"),
                                      ("invalid_action_rate", RED, "-.", "invalid actions")):
        axes[1].plot(x, [100 * m[key] for m in rl], color=colour, ls=style, label=label)
    axes[1].set(title="Training rollouts", xlabel="update", ylabel="share (%)", ylim=(0, 100))
    if rl and "parse_rate" in rl[0]:
        for key, colour, style, label in (
                ("delta_won", BLUE, "-", "mean Delta, won episodes"),
                ("delta_lost", RED, "--", "mean Delta, lost episodes")):
            axes[2].plot(x, [np.nan if m[key] is None else m[key] for m in rl], color=colour,
                         ls=style, label=label)
        axes[2].axhline(0, color=GREY, lw=0.8)
        axes[2].set(title="Skill against no skill", xlabel="update",
                    ylabel="Delta (nats per token)")
    else:
        axes[2].set_axis_off()
    for ax in axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    fig.tight_layout()
    fig.savefig(run.dir / "curves.png", dpi=120)
    plt.close(fig)


def write_report(run: Run) -> None:
    """report.md: what was run, every evaluation with its interval, the last one by kind of task,
    and what went wrong on the way."""
    cfg, evals = run.cfg, [m for m in run.metrics if m["stage"] == "eval"]
    lines = [f"# {cfg.name}: {cfg.method} on {cfg.env}", "",
             f"Model `{cfg.model}`, seed {cfg.seed}, task seed {cfg.task_seed}, {cfg.updates} "
             f"updates of {cfg.tasks_per_update} tasks x {cfg.group_size} rollouts. Settings of "
             f"the world: {' '.join(cfg.env_args) or 'none'}. Evaluation at temperature "
             f"{cfg.eval_temperature}, each task once, ordinary history only.", "",
             "| at | split | context | wins / n | success [Wilson 95%] | macro | invalid |",
             "|---|---|---|---|---|---|---|"]
    for m in evals:
        context = "plan" if m["skill_in_context"] else "history"
        lines.append(f"| {m['at']} | {m['split']} | {context} | {m['wins']} / {m['n']} | "
                     f"{rate(m)} | {m['macro']:.1%} | {m['invalid_action_rate']:.0%} |")
    # The last one of each split.
    for m in {m["split"]: m for m in evals if not m["skill_in_context"]}.values():
        lines += ["", f"## {m['split']} at {m['at']}, by kind of task", "",
                  "| kind | wins / n | success [Wilson 95%] |", "|---|---|---|"]
        lines += [f"| {kind} | {row['wins']} / {row['n']} | {rate(row)} |"
                  for kind, row in m["by_kind"].items()]
        names = ", ".join(f"**{t}**" if won else t for t, won in m["tasks"].items())
        lines += ["", f"Tasks (won in bold): {names}"]
    totals = Counter()
    for m in run.metrics:
        totals.update({k: v for k, v in m.get("counters", {}).items() if k != "ended: won"})
    lines += ["", f"Best evaluation among the kept checkpoints: {run.best() or 'none'}. It was "
                  "chosen on these tasks, so it is no result.", "", "## Counted on the way", ""]
    lines += [f"* {k}: {v}" for k, v in sorted(totals.items())]
    rl = [m for m in run.metrics if m["stage"] == "rl"]
    if rl:
        seconds, first, last = np.median([m["step_time"] for m in rl]), rl[0], rl[-1]
        lines += ["", f"Seconds per update (median): {seconds:.1f}. First update's "
                      f"sampler-to-scoring gap in log-prob: {first['sampler_gap']:.2e}."]
        if "peak_gb" in first:
            peak, said = (max(m[k] for m in rl) for k in ("peak_gb", "predicted_peak_gb"))
            lines += [f"Peak memory: {peak:.1f} GB measured, {said:.1f} GB predicted."]
        if "parse_rate" in first:
            lines += [f"Parse rate: first update {first['parse_rate']:.0%}, last "
                      f"{last['parse_rate']:.0%}. Tokens with a skill in the last update: "
                      f"{last['skill_token_share']:.0%}."]
    (run.dir / "report.md").write_text("\n".join(lines + ["", "![curves](curves.png)", ""]))


# --------------------------------------------------------------------------------------------------
# 6. Memory: what fits on a card
# --------------------------------------------------------------------------------------------------
# All of it follows from config.json, so it can be said before anything is loaded. GB = 1e9 bytes.
# Qwen3-1.7B's as published, for --dry_run without a network.
QWEN_CONFIG = dict(num_hidden_layers=28, hidden_size=2048, num_attention_heads=16,
                   num_key_value_heads=8, head_dim=128, intermediate_size=6144, vocab_size=151936,
                   tie_word_embeddings=True)


def card_memory() -> float:
    """Memory of the CUDA card this run would use, in GB; 0.0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    return torch.cuda.get_device_properties(0).total_memory / 1e9


def choose_model(cfg) -> tuple[str, str]:
    """What --model auto means on this machine, and one line that says so ("" if the user chose)."""
    if cfg.model != "auto":
        return cfg.model, ""
    card = card_memory()
    if card >= 10:
        how = {"full": "full fine-tuning", "lora": "16-bit LoRA"}.get(cfg.tune, "QLoRA")
        return QWEN, (f"model: {QWEN} in {how}, because the CUDA card has {card:.0f} GB (--model "
                      "tiny takes the shipped tiny base of the world instead)")
    why = f"the CUDA card has only {card:.0f} of 10 GB" if card else "no CUDA card is used"
    return "tiny", (f"model: the shipped tiny base, because {why} (--model {QWEN}, or another "
                    "Llama-like LM with a chat template, takes that instead)")


def memory_plan(model, cfg) -> dict[str, float]:
    """Bytes on the card by use, from a model's config (attributes as in QWEN_CONFIG) and the run's
    settings; the two peaks come last.

    Llama-like layers are assumed, and every episode as long as allowed. Adapters recompute
    activations: every layer's input and one layer in full are kept. Not counted: the CUDA context
    and fragmentation.
    """
    H, L, V = model.hidden_size, model.num_hidden_layers, model.vocab_size
    I = getattr(model, "intermediate_size", None) or 4 * H
    head = getattr(model, "head_dim", None) or H // model.num_attention_heads
    q = head * model.num_attention_heads
    kv = head * (getattr(model, "num_key_value_heads", None) or model.num_attention_heads)
    lora, size = cfg.tune != "full", 4 if cfg.tune == "full" else 2
    # Inputs and outputs of a layer's linear maps.
    shapes = [(H, q), (H, kv), (H, kv), (q, H), (H, I), (H, I), (I, H)]
    linear = L * sum(a * b for a, b in shapes)
    vocab = V * H * (1 if model.tie_word_embeddings else 2)
    # Bytes a weight: 4 bits, an 8-bit scale per 64 weights, a 32-bit scale per 256 scales.
    base = 0.5 + 1 / 64 + 4 / (64 * 256) if cfg.tune == "qlora" else size
    trained = L * LORA_RANK * sum(a + b for a, b in shapes) if lora else linear + vocab
    positions = cfg.max_context + cfg.max_analysis
    # One episode is never cut.
    tokens = max(cfg.micro_tokens, positions)
    # Bytes autograd keeps per token of a layer: norms, q/k norms, attention, gated MLP; then each
    # adapter's own fp32 copy of its input (full: the linear maps' inputs).
    layer = 8 * H + (4 + 2 * size) * (q + kv) + 3 * size * I
    layer += 4 * (5 * H + q + I) + 28 * LORA_RANK if lora else size * (4 * H + I)
    # Temporary numbers around the MLP, forward or backward.
    scratch = (4 + 3 * size) * I + (4 + 2 * size) * H
    kept = L * H * size + layer if lora else L * layer
    plan = dict(weights=vocab * size + linear * base,
                adapter=4.0 * trained * (1 if cfg.ablate == "no_sft" else 2) if lora else 0.0,
                reference=0.0 if lora else 4.0 * trained, optimizer=8.0 * trained,
                gradients=4.0 * trained,
                kv_cache=2.0 * L * kv * size * cfg.rollout_batch * positions,
                activations=float(tokens * (kept + scratch)),
                logits_chunk=float(losses.SCRATCH_BUDGET["cuda"]))
    # Generation: one layer's cache is copied as it grows and repeated for all heads; the first
    # prompts, in pieces; the sampler's distributions.
    working = (2.0 * (kv + q) * size * positions + V * (size + 24)) * cfg.rollout_batch
    working += PREFILL["cuda"] * scratch
    always = plan["weights"] + plan["adapter"] + plan["reference"] + plan["optimizer"]
    training = always + plan["gradients"] + plan["activations"] + plan["logits_chunk"]
    return plan | dict(generation=working, peak_rollout=always + plan["kv_cache"] + working,
                       peak_training=training)


def peak_gb(plan: dict) -> float:
    """GB that a run with this plan needs."""
    return max(plan["peak_rollout"], plan["peak_training"]) / 1e9


def measured_peak(policy: Policy, cfg, rolls: list) -> dict[str, float]:
    """GB at the update's peak, measured and predicted for the lengths that these rollouts had."""
    lengths = [len(r.ids) for r in rolls]
    now = dataclasses.replace(cfg, max_context=max(lengths),
                              micro_tokens=min(cfg.micro_tokens, sum(lengths)),
                              rollout_batch=min(cfg.rollout_batch, len(rolls)))
    return dict(peak_gb=torch.cuda.max_memory_allocated() / 1e9,
                predicted_peak_gb=peak_gb(memory_plan(policy.model.config, now)))


def fit(model, cfg, card: float) -> dict[str, int]:
    """The largest rollout_batch and micro_tokens whose peaks leave a tenth of `card` GB free; the
    smallest ones if nothing fits."""
    batches, tokens = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64), (2048, 4096, 8192)
    least, best = dict(rollout_batch=batches[0], micro_tokens=tokens[0]), {}
    for name, values, peak in (("rollout_batch", batches, "peak_rollout"),
                               ("micro_tokens", tokens, "peak_training")):
        plans = {v: memory_plan(model, dataclasses.replace(cfg, **least | {name: v}))
                 for v in values}
        fits = [v for v, plan in plans.items() if plan[peak] < 0.9e9 * card]
        best[name] = max(fits, default=values[0])
    return best


def plan_config(path: str):
    """The config that memory_plan needs, of a model or of an adapter's base; Qwen3-1.7B's is known
    without a network."""
    base = base_of(path)
    return argparse.Namespace(**QWEN_CONFIG) if base == QWEN else model_config(base)


def dry_run(cfg, path: str) -> str:
    """The memory plan as a table, against the card found, and what would be chosen for other
    cards."""
    model, card = plan_config(path), card_memory()
    plan = memory_plan(model, cfg)
    kind = {"full": "full fine-tuning", "lora": "16-bit LoRA", "qlora": "QLoRA"}[cfg.tune]
    lines = [f"{cfg.model}, {kind}: episodes of up to {cfg.max_context} tokens, "
             f"{cfg.rollout_batch} at once, micro-batches of {cfg.micro_tokens}"]
    lines += [f"    {name.replace('_', ' '):14s} {size / 1e9:7.2f} GB"
              for name, size in plan.items()]
    fits = "fits" if peak_gb(plan) < 0.9 * card else "does NOT fit (a tenth stays free)"
    lines += [f"card: {card:.1f} GB, {fits}" if card else "card: none found"]
    for gb in (12, 16, 24):
        best = fit(model, cfg, gb)
        need = peak_gb(memory_plan(model, dataclasses.replace(cfg, **best)))
        text = (f"--rollout_batch {best['rollout_batch']} --micro_tokens {best['micro_tokens']} "
                f"(peak {need:.1f} GB)")
        if need >= 0.9 * gb:
            text = (f"does not fit, needs {need:.1f} GB; lower --max_context, or a smaller model")
        lines.append(f"{gb} GB card: {text}")
    return "\n".join(lines + ["Predicted from config.json; not yet measured on a GPU."])


# --------------------------------------------------------------------------------------------------
# 7. The endpoint: any OpenAI-compatible server, through huggingface_hub's client
# --------------------------------------------------------------------------------------------------
# Of one HTTP answer.
MAX_BODY_BYTES = 4_000_000
# Seconds; a longer Retry-After is not waited for in full.
MAX_WAIT = 120.0
# Prompts in a row without an answer: the rest is not sent.
DEAD_AFTER = 8


def ask_endpoint(prompts: list[str], counters: Counter, *, model: str, base_url: str,
                 api_key: str = "", concurrency: int = 4, tries: int = 5, timeout: float = 180.0,
                 max_tokens: int = 1024, backoff: float = 1.0) -> list[str]:
    """Ask a server for one greedy reply to each prompt; returns the raw texts in order, "" for no
    reply.

    429, 408, 5xx, timeouts, broken connections and answers that are no chat completion are tried
    `tries` times in all, after backoff * 2^k seconds or what Retry-After says. `timeout` (seconds)
    bounds the wait for an answer to begin, and again for it to end. Every failure is counted by
    kind in `counters`.

    Raises RuntimeError for 401, 403 and 404 (every other request would fail alike), ValueError for
    a base_url or key that cannot be sent. No message holds the key, nor any text of the server,
    which may quote the key.
    """
    # Only this analyzer needs them.
    from huggingface_hub import InferenceClient, get_session

    # The client appends /v1/chat/completions unless the path ends in /v1: wrong for servers at /v4.
    # And for an empty key it would send the user's Hugging Face token to this server, hence the
    # placeholder.
    host = _checked_host(model, base_url, api_key)
    url = base_url.rstrip("/") + ("/chat/completions" if re.search(r"/v\d+/*$", base_url) else "")
    client = InferenceClient(base_url=url, api_key=api_key or "none", timeout=timeout,
                             headers={"accept-encoding": "identity"})
    # Silent: prompts in a row without an answer.
    stop, silent = threading.Event(), [0]

    def ask(prompt):
        """(the reply's text or "", what happened on the way) for one prompt, retries included."""
        events = []
        for attempt in range(tries):
            if stop.is_set() or silent[0] >= DEAD_AFTER:
                return "", events + ["prompt not sent"]
            text, event, wait = _request(client, model, prompt, max_tokens)
            events += [event] if event else []
            if event in ("HTTP 401", "HTTP 403", "HTTP 404"):
                stop.set()
                hint = "base URL and the model's name" if event == "HTTP 404" else "API key"
                raise RuntimeError(f"the analyzer endpoint at {host} answered {event}: check the "
                                   f"{hint}")
            if text is not None:
                silent[0] = 0
                return text, events
            # This prompt is refused for good, by a server that works.
            if wait is None:
                return "", events + ["no reply"]
            if attempt < tries - 1:
                stop.wait(min(MAX_WAIT, max(wait, backoff * 2 ** attempt)))
        silent[0] += 1
        return "", events + ["no reply"]

    with _bounded(get_session(), timeout), ThreadPoolExecutor(concurrency) as pool:
        try:
            answers = list(pool.map(ask, prompts))
        finally:
            # On an error or Ctrl-C the waiting threads end now.
            stop.set()
    counters.update("endpoint " + event for _, events in answers for event in events)
    return [text for text, _ in answers]


def _checked_host(model: str, base_url: str, api_key: str) -> str:
    """The server's name, for messages. ValueError for what cannot be sent."""
    host = urlsplit(base_url).hostname
    if not base_url.startswith(("http://", "https://")) or not host or not model:
        raise ValueError("the endpoint analyzer needs a base URL such as https://host/v1 and a "
                         "model name")
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ValueError("the analyzer's API key holds spaces, control or non-ASCII characters; it "
                         "was not sent")
    return host


def _request(client, model: str, prompt: str,
             max_tokens: int) -> tuple[str | None, str, float | None]:
    """One request -> (text or None, what to count or "", least seconds before another try or None
    if there is no point)."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
    try:
        choice = client.chat_completion([{"role": "user", "content": prompt}], model=model,
                                        temperature=0.0, max_tokens=max_tokens).choices[0]
        # TypeError if it is no text.
        text, cut = "" + (choice.message.content or ""), choice.finish_reason == "length"
        return text, "reply cut by the token limit" if cut else "", None
    except OfflineModeIsEnabled:
        raise RuntimeError(
            "the analyzer endpoint cannot be asked while HF_HUB_OFFLINE is set") from None
    except HfHubHTTPError as error:
        status, after = error.response.status_code, error.response.headers.get("retry-after", "")
        again = status in (408, 429) or status >= 500
        return None, f"HTTP {status}", _retry_after(after) if again else None
    # Timeouts, refused and broken connections, answers over the bound.
    except HTTPError as error:
        return None, type(error).__name__, 0.0
    except (ValueError, TypeError, LookupError, AttributeError):
        # Not UTF-8, not JSON, not a chat completion.
        return None, "malformed answer", 0.0


def _retry_after(header: str) -> float:
    """Seconds that a Retry-After header asks for, as a number or an HTTP date; 0.0 if it says
    nothing readable."""
    try:
        if header.strip().isdecimal():
            return float(header)
        return parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0


@contextlib.contextmanager
def _bounded(session, timeout: float):
    """Inside, chat answers are read with a bound. One session serves the whole hub library: the
    bound is hooked in, and out again."""
    hooks = session.event_hooks
    bound = functools.partial(_bound_body, timeout=timeout)
    session.event_hooks = hooks | {"response": [*hooks["response"], bound]}
    try:
        yield
    finally:
        session.event_hooks = hooks


def _bound_body(response, timeout: float) -> None:
    """Read a chat answer here, bounded in bytes and seconds: a read timeout alone never ends a
    server that sends a byte a minute, or for ever. Raises ReadError."""
    # huggingface_hub's HTTP library.
    import httpx2
    if response.request.url.path.endswith("/chat/completions"):
        body, deadline = bytearray(), time.monotonic() + timeout
        for chunk in response.stream:
            body += chunk
            if len(body) > MAX_BODY_BYTES or time.monotonic() > deadline:
                raise httpx2.ReadError("the answer is too large or too slow")
        response.stream.close()
        response.stream = httpx2.ByteStream(bytes(body))


# --------------------------------------------------------------------------------------------------
# 8. The border: bad options
# --------------------------------------------------------------------------------------------------
CHOICES = dict(method=("seed", "grpo"), analyzer=("rule", "endpoint"),
               tune=(None, "full", "lora", "qlora"),
               ablate=("", "no_sft", "no_opd", "static", "shuffle"))
AT_LEAST_ONE = ("threads train_tasks eval_tasks max_steps max_response max_context max_analysis "
                "sft_tasks sft_rollouts sft_epochs sft_batch tasks_per_update minibatches "
                "rollout_batch micro_tokens").split()
NOT_NEGATIVE = ("workers updates eval_every seed task_seed sft_anchor kl_coef lambda_opd beta_opd "
                "invalid_penalty").split()
POSITIVE = "sft_lr lr temperature eval_temperature".split()


def check_config(cfg) -> None:
    """Refuse bad values with one sentence each, before anything is loaded. Raises ValueError."""
    def need(ok, text):
        """ValueError with this sentence unless ok."""
        if not ok:
            raise ValueError(text)

    def values(names):
        """The options of these names that are given."""
        return [(n, getattr(cfg, n)) for n in names if getattr(cfg, n) is not None]

    # Made, not only read: a world refuses bad values of its settings itself.
    envs.make(envs.find(cfg.env), cfg.env_args)
    for name, allowed in CHOICES.items():
        value, known = getattr(cfg, name), ", ".join(str(a) for a in allowed if a)
        need(value in allowed, f"--{name} {value!r} is not one of {known}.")
    for name, value in values(AT_LEAST_ONE):
        need(value >= 1, f"--{name} must be at least 1, not {value}.")
    for name, value in values(NOT_NEGATIVE):
        need(value >= 0 and math.isfinite(value),
             f"--{name} must be a number that is not negative, not {value}.")
    for name, value in values(POSITIVE):
        need(value > 0 and math.isfinite(value),
             f"--{name} must be a positive number, not {value}.")
    need(cfg.group_size is None or cfg.group_size >= 2,
         "--group_size must be at least 2: a group of one has nothing to be compared with.")
    need(0 < cfg.clip_range < 1, f"--clip_range must lie between 0 and 1, not {cfg.clip_range}.")
    need(None in (cfg.max_context, cfg.max_response) or cfg.max_response < cfg.max_context,
         f"--max_response {cfg.max_response} leaves no room for a prompt in --max_context "
         f"{cfg.max_context}.")
    need(not (cfg.method == "grpo" and cfg.ablate not in ("", "no_sft")),
         f"--ablate {cfg.ablate} changes the skills of --method seed; --method grpo has none.")
    need(not (cfg.ablate == "no_sft" and cfg.sft_from),
         "--ablate no_sft and --sft_from exclude each other.")
    need(not (cfg.resume and cfg.overwrite), "--resume and --overwrite exclude each other.")
    need(not (cfg.eval and (cfg.sft_from or cfg.resume or cfg.overwrite)),
         "--eval takes no --sft_from, --resume or --overwrite; give the checkpoint's policy folder "
         "as --model.")
    bad = [s for s in cfg.eval_splits if s not in envs.SPLITS]
    need(not bad, f"--eval_splits {' '.join(bad)} is not known; choose from "
                  f"{', '.join(envs.SPLITS)}.")
    need("/" not in cfg.name and cfg.name not in (".", ".."),
         f"--name {cfg.name!r} must be a plain folder name.")


def first_weights(cfg, own: str) -> str:
    """Where a fresh run's weights come from: its `own` model, or the Stage-1 result of another run,
    which must be one of the same world, model and format."""
    if not cfg.sft_from:
        return own
    source, saved = Path(cfg.sft_from) / START / "policy", run_config(Path(cfg.sft_from))
    if not (source.exists() and saved):
        raise ValueError(f"--sft_from {cfg.sft_from}: there is no Stage-1 result ({source}).")
    now, shared = dataclasses.asdict(cfg), ("env", "env_args", "model", "tune", "think")
    differs = [f"--{k} was {saved[k]!r} there and is {now[k]!r} here" for k in shared
               if saved.get(k, now[k]) != now[k]]
    if differs:
        raise ValueError(f"--sft_from {cfg.sft_from}: arms that share a start must share these: "
                         f"{'; '.join(differs)}.")
    return str(source)


def need_analyzer(env: envs.Env, cfg) -> None:
    """ValueError if Stage 1 (or the static ablation) needs rules that this world does not have."""
    needed = (not cfg.sft_from and cfg.ablate != "no_sft") or cfg.ablate == "static"
    if needed and cfg.analyzer == "rule" and not envs.has(env, "hindsight"):
        raise ValueError(f"{env.name} has no rule analyzer: give its class Env a hindsight(), or "
                         "take --analyzer endpoint, or leave Stage 1 out by --ablate no_sft.")


def world_help(argv: list[str], default: str) -> str:
    """What --help says about the world of this command line: its description and settings."""
    name = next((b for a, b in zip(argv, argv[1:]) if a == "--env"), default)
    with contextlib.suppress(ValueError):
        world = envs.find(name)
        settings = " ".join(f"{k}={v}" for k, v in envs.settings_of(world).items())
        about = " ".join((world.__doc__ or "").split())
        return f"Settings of --env {name} (--env_args): {settings or 'none'}. {about} "
    return ""
