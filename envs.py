"""envs.py: what an environment is, how one is found by its name, and how a worker plays it.

A world is one flat file that fills in one class: `class Env(envs.Env)`. The trainer knows nothing
else about it: no task types, no commands, no wording. `--env NAME` takes environments/NAME.py, or
NAME.py in the folder you stand in, or a path to a file; a world of your own needs no edit of ours.

    1  data        Task, Step, Episode: plain, and JSON from end to end
    2  Env         the interface, with a default for whatever a world leaves out
    3  finding     a name becomes a class, key=value becomes its settings
    4  playing     the far end of runs.Pool, which plays many at once; and a check by an expert

An observation is text. The paper also has worlds with pictures: there an observation would be a
text and an image, `prompt` and `turn` would return both, and policy.encode would have to know what
an image is; nothing else here would change. Left out: rewards by a model, several agents in one
world, asynchronous play (a batch waits for its slowest environment).
"""
from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import queue
import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
SPLITS = ("train", "valid_seen", "valid_unseen")


# --------------------------------------------------------------------------------------------------
# 1. Data
# --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Task:
    """One task of a world. `spec` is JSON and all that reset() needs, so a task can travel to a
    worker.

    `id` is what reports quote; `kind` is the row of the results table the task counts in.
    """
    id: str
    split: str
    kind: str
    spec: dict


@dataclass
class Step:
    """One turn: what the policy saw, what it wrote, the action read from that, and if it was
    valid."""
    observation: str
    response: str
    action: str
    valid: bool


@dataclass
class Episode:
    """One finished episode as text; rollouts.jsonl holds it as a dict.

    `score` lies in 0..1 (worlds without one: 1.0 for a win). `end` is "won", "lost", "step limit",
    "context limit", "env timeout", "env died" or "task unplayable"; `reason` says more where the
    environment ended it.
    """
    task_id: str
    split: str
    kind: str
    goal: str
    steps: list[Step] = field(default_factory=list)
    final_observation: str = ""
    reward: float = 0.0
    won: bool = False
    score: float = 0.0
    end: str = ""
    reason: str = ""


def counted_rng(seed: int, *key: int | str) -> np.random.Generator:
    """A generator that depends only on (seed, key): randomness is *addressed*, not carried along.

    That is why a checkpoint holds no random states: whoever knows the update and the episode knows
    its random numbers, whatever was run, skipped or resumed before.
    """
    words = [int.from_bytes(hashlib.sha256(str(k).encode()).digest()[:4], "little") for k in key]
    return np.random.default_rng([seed, *words])


def wilson(wins: int, n: int) -> tuple[float, float]:
    """Wilson 95% interval of a success rate, as fractions; (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    z, p = 1.959964, wins / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)
    # Exact ends: rounding could leave the rate outside of its own interval.
    return low if wins else 0.0, high if wins < n else 1.0


# --------------------------------------------------------------------------------------------------
# 2. The interface
# --------------------------------------------------------------------------------------------------
class Env:
    """One environment. Write `class Env(envs.Env)` in a file of your own; only three methods are a
    must: tasks, reset and step. An instance plays one episode at a time; the trainer also keeps one
    that never plays, for the wording.

    The contract:
    1. Wording and hindsight need no engine. Import engines inside reset(), never at the top of the
       file.
    2. reset() with the same task gives the same episode: resume, replay and groups stand on that.
    3. step() never raises for text. An action that does not exist has info["valid"] False, and
       changes nothing.
    4. The step limit and the penalty for invalid actions are the trainer's, not the world's.
    5. What is not said here the trainer does not know.

    Settings of a world are the keyword arguments of its __init__, each with a default; --env_args
    sets them by name.
    """
    # Rows of the results table, in order; () takes them as they come.
    kinds: tuple[str, ...] = ()
    # The trainer's limits in this world, unless told otherwise: steps, and reward lost per invalid
    # action.
    max_steps = 30
    invalid_penalty = 0.1
    # Seconds after which a step in a worker counts as hung.
    step_timeout = 20.0
    # Whether the prompt lists info["actions"].
    list_actions = False
    # Options (or settings) in which the tiny run and the paper-size run of this world are special.
    defaults: dict[str, dict] = {"tiny": {}, "paper": {}}
    # The few phrases in which the prompts of worlds differ.
    world = "a text environment"
    shown_by = "the environment"
    goal_line = "Your task is to: {goal}.\n"
    action_word = "action"
    elsewhere = "again"
    leave_out = "no names or numbers of this one"
    # Characters that models put around an action, to be stripped besides white space.
    decoration = ""

    def tasks(self, seed: int) -> tuple[dict[str, list[Task]], str]:
        """({split: tasks}, one line that says which tasks these are); splits as in SPLITS.

        The same seed gives the same tasks, and splits share none. ValueError or RuntimeError, in
        one sentence, if they cannot be had.
        """
        raise NotImplementedError("its class Env has no tasks()")

    def reset(self, task: Task) -> tuple[str, dict]:
        """(observation, info) of a new episode, in Gymnasium's form.

        info: goal, actions (list of actions now possible; None: free text), won, valid, and score
        (0..1) if this world has one. RuntimeError if the task cannot be played.
        """
        raise NotImplementedError("its class Env has no reset()")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """(observation, reward, terminated, truncated, info) after one action, info as in
        reset()."""
        raise NotImplementedError("its class Env has no step()")

    def close(self) -> None:
        """Give back what an episode holds (an engine, a connection)."""

    def prompt(self, goal: str, observation: str, *, think: bool,
               actions: list[str] | None = None) -> tuple[str, str]:
        """The first user turn in two halves: the student reads before + after, the teacher before +
        skill + after. `before` ends with the goal's line, because the paper puts the skill behind
        it.

        With `think` the model is asked for <think>..</think><action>..</action>, else for the bare
        action.
        """
        word = self.action_word
        before = f"You are an agent in {self.world}.\n" + self.goal_line.format(goal=goal)
        ask = (f"Reason inside <think></think>, then give exactly one {word} inside "
               f"<action></action>.\n"
               if think else f"Answer with exactly one {word}.\n")
        return before, ask + self.turn(observation, actions=actions)

    def turn(self, observation: str, *, actions: list[str] | None = None) -> str:
        """A later user turn: the observation, then, if this world lists them, the possible
        actions."""
        if not self.list_actions or actions is None:
            return observation
        return f"{observation}\nAdmissible {self.action_word}s: {', '.join(actions)}."

    def parse(self, response: str) -> str:
        """The action in a response, "" if there is none; whether it is valid is step()'s business.

        It is the content of the last <action> (its closing tag may be missing), else the last line
        that is not empty after </think>; an "Action:" before it is dropped. Upper and lower case
        stay.
        """
        # A chat template's control tokens, should they have been decoded.
        text = re.sub(r"<\|[^|>]*\|>", " ", response).rpartition("</think>")[2]
        # Cut off while still thinking: no action.
        if "<think>" in text and "</action>" not in text:
            return ""
        tagged = re.findall(r"<action>(.*?)(?:</action>|$)", text, flags=re.DOTALL | re.IGNORECASE)
        lines = (tagged[-1] if tagged else text).splitlines()
        lines = [line.strip().strip(" \t" + self.decoration) for line in lines]
        last = next((line for line in reversed(lines) if line), "")
        return re.sub(r"^(?:next |my )?(?:action|command)\W*:\W*", "", last, flags=re.IGNORECASE)

    def plan(self, task: Task) -> str:
        """The right way to do a task, in one line, from the task alone: what a teacher could say.
        "" where this world knows none; evaluations with a plan are then left out."""
        return ""

    def hindsight(self, episode: Episode) -> tuple[str, str]:
        """(summary, skill) by rules, from the episode's text and outcome, never from what only the
        engine knows. Won: the way that worked. Lost: what went wrong and what to avoid. ("", ""):
        no skill.

        A world without it needs --analyzer endpoint for Stage 1.
        """
        return "", ""

    def expert(self, task: Task) -> list[str] | None:
        """Actions that win a task, or None. They prove that tasks can be won; no policy is trained
        on them."""
        return None

    def metrics(self, episodes: list[Episode]) -> dict:
        """Results of episodes, each of another task: wins, n, success with its Wilson interval,
        macro (mean over kinds), by_kind, and the mean score where it says more than the wins do."""
        kinds = self.kinds or tuple(dict.fromkeys(e.kind for e in episodes))
        won = {kind: [e.won for e in episodes if e.kind == kind] for kind in kinds}
        by_kind = {kind: dict(wins=sum(w), n=len(w), success=sum(w) / len(w),
                              interval=wilson(sum(w), len(w)))
                   for kind, w in won.items() if w}
        wins, n = sum(e.won for e in episodes), len(episodes)
        out = dict(n=n, wins=wins, success=wins / max(1, n), interval=wilson(wins, n),
                   by_kind=by_kind,
                   macro=float(np.mean([row["success"] for row in by_kind.values()])))
        if any(e.score != e.won for e in episodes):
            out["score"] = float(np.mean([e.score for e in episodes]))
        return out


# --------------------------------------------------------------------------------------------------
# 3. Finding one by its name
# --------------------------------------------------------------------------------------------------
def find(name: str) -> type[Env]:
    """The class Env of a world, by name or by path to its file. ValueError in one sentence."""
    places = [HERE / "environments" / f"{name}.py",
              Path(f"{name}.py")] if name.isidentifier() else [Path(name)]
    file = next((place.resolve() for place in places if place.suffix == ".py" and place.is_file()),
                None)
    if file is None:
        ours = ", ".join(sorted(p.stem for p in (HERE / "environments").glob("*.py")
                                if "_" not in p.stem))
        raise ValueError(f"--env {name!r} is neither one of {ours} nor a file NAME.py in this "
                         f"folder.")
    try:
        if file.parent == HERE / "environments":
            # As a namespace, with no __init__.py: a file here never hides a package of the same
            # name.
            module = importlib.import_module(f"environments.{file.stem}")
        else:
            spec = importlib.util.spec_from_file_location(f"world_{file.stem}", file)
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--env {name}: {file.name} cannot be imported ({error!r}).") from error
    world = getattr(module, "Env", None)
    if not (inspect.isclass(world) and issubclass(world, Env) and world is not Env):
        raise ValueError(f"--env {name}: {file.name} has no `class Env(envs.Env)`.")
    world.name, world.file = file.stem, str(file)
    return world


def settings_of(world: type[Env], pairs: list[str] = ()) -> dict:
    """A world's settings: its defaults, changed by key=value pairs. ValueError for what it does not
    know.

    A value is read as the type of its default, which must be a text, a number or a truth value.
    """
    known = {}
    if world.__init__ is not object.__init__:
        known = {p.name: p.default
                 for p in list(inspect.signature(world.__init__).parameters.values())[1:]}
    odd = [k for k, v in known.items() if not isinstance(v, (str, int, float))]
    if odd:
        raise ValueError(f"{world.name}: the setting {odd[0]!r} of its class Env needs a default "
                         "that is a text, a number, True or False.")
    for pair in pairs:
        key, found, text = pair.partition("=")
        if not found or key not in known:
            allowed = ", ".join(f"{k}={v}" for k, v in known.items()) or "none"
            raise ValueError(f"--env_args {pair!r}: the settings of {world.name} are {allowed}.")
        kind = type(known[key])
        try:
            truth = {"true": True, "false": False}
            known[key] = truth[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise ValueError(f"--env_args {pair!r}: {key} must be {kind.__name__}, not "
                             f"{text!r}.") from None
    return known


def make(world: type[Env], pairs: list[str] = ()) -> Env:
    """An instance of a world with these settings. ValueError if it refuses them."""
    settings = settings_of(world, pairs)
    env = world(**settings)
    env.settings = settings
    return env


def has(env: Env, part: str) -> bool:
    """Whether a world brings a method of its own, rather than the default."""
    return getattr(type(env), part) is not getattr(Env, part)


def cache_dir() -> Path:
    """This project's per-user cache: $XDG_CACHE_HOME/seed_mini, normally ~/.cache/seed_mini. Not
    made here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seed_mini"


# --------------------------------------------------------------------------------------------------
# 4. Playing: the worker's side of runs.Pool, and the check before a run
# --------------------------------------------------------------------------------------------------
def _worker(world: str) -> None:
    """Main of a worker: requests on stdin, one JSON line per answer on what was stdout when it
    started."""
    protocol = os.fdopen(os.dup(1), "w")
    # Whatever an engine prints goes to stderr, not into the protocol.
    os.dup2(2, 1)
    inbox, slots = queue.SimpleQueue(), {}

    def listen():
        """Requests into the inbox; in a thread, so that even a worker stuck in an engine ends at
        EOF."""
        for line in sys.stdin:
            inbox.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    find(json.loads(world)[0])
    print(json.dumps("ready"), file=protocol, flush=True)
    while True:
        for request in inbox.get():
            print(json.dumps(answer(slots, request, world)), file=protocol, flush=True)


def answer(slots: dict[int, Env], request: dict, world: str) -> dict:
    """Do what a request says, in the slot's environment: {"result": ..} or {"error": ..}."""
    try:
        if request["slot"] not in slots:
            file, settings = json.loads(world)
            slots[request["slot"]] = find(file)(**settings)
        env = slots[request["slot"]]
        result = env.reset(Task(**request["task"])) if request["task"] else None
        for action in request["actions"]:
            result = env.step(action)
        return {"result": result}
    except Exception as error:
        # The environment may be in any state now: the slot gets a new one.
        slots.pop(request["slot"], None)
        return {"error": f"{type(error).__name__}: {error}" if request["actions"] else str(error)}


def check(env: Env, tasks: dict[str, list[Task]], most: int = 20) -> None:
    """Play the first task that an expert can solve to its win: do world and tasks fit together?

    RuntimeError if they do not. A world without expert() is taken as it is.
    """
    if not has(env, "expert"):
        return
    every = [task for split in tasks.values() for task in split][:most]
    solved = next(((task, actions) for task in every if (actions := env.expert(task))), None)
    if not solved:
        raise RuntimeError(f"no task of {env.name} has a known solution, so the environment cannot "
                           f"be checked.")
    task, actions = solved
    player = type(env)(**env.settings)
    try:
        problem = failure(player, task, actions)
    # An engine that does not fit can fail in any way.
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error}"
    player.close()
    if problem:
        raise RuntimeError(f"{env.name} and its task {task.id} do not fit together: {problem}; "
                           f"reinstall by "
                           "pip install -r requirements.txt, or take other tasks.")


def failure(env: Env, task: Task, actions: list[str]) -> str:
    """Play actions: "" if the last one wins and none before it did, else what went wrong."""
    info = env.reset(task)[1]
    for n, action in enumerate(actions, 1):
        if info["won"]:
            return f"it was won before action {n} of its known solution"
        info = env.step(action)[-1]
        if not info["valid"]:
            return f"action {n} of its known solution, {action!r}, is not valid"
    return "" if info["won"] else "its known solution does not win"


if __name__ == "__main__" and sys.argv[1:2] == ["--worker"]:
    # The module under its own name: classes must be the same as in the worlds' `import envs`.
    sys.modules["envs"] = sys.modules["__main__"]
    _worker(sys.argv[2])
