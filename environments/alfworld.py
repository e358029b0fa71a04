"""alfworld.py: the household text game of ALFWorld, as an environment of seed_mini.

The engine lives in alfworld_engine.py (made fast without changing a character), the games in
alfworld_games.py (official ones on disk, or generated houses). Here is what the trainer sees: the
wording, the six task types, and a rule analyzer that knows the household. Every constant sentence
is part of the tiny base's closed vocabulary (SENTENCES), so changing one means making that base
again.

    python seed_mini.py --env alfworld --env_args games=official list_actions=true
"""
from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import envs
from environments import alfworld_games
from environments.alfworld_games import TASK_TYPES
from envs import Episode, Task

# -------------------------------------------------------------------------------------------------
# 1. The environment
# --------------------------------------------------------------------------------------------------
class Env(envs.Env):
    """ALFWorld's text games.

    games: 'official' ones (from ALFWORLD_DATA, or ~/.cache/alfworld), 'generated' houses, or
    'auto': official ones if they are on this machine. list_actions: list the admissible commands in
    every observation (paper: yes; it costs tokens, and the tiny base was not made for it).
    """
    kinds = TASK_TYPES
    max_steps = 30
    # The paper's. In the tiny run 0: in a group that lost every game the penalty is the only
    # difference, and dividing by the group's std blows it up to full-size advantages. An earlier,
    # weaker base then learned to walk about and take nothing; on a later one GRPO did better
    # without it.
    invalid_penalty = 0.1
    # The paper's reward of a win.
    win_reward = 10.0
    defaults = {"tiny": dict(max_steps=20, invalid_penalty=0.0, list_actions=False),
                "paper": dict(list_actions=True)}
    world = "a household text game"
    shown_by = "the game"
    action_word = "command"
    elsewhere = "in another house"
    leave_out = "no numbered places"
    decoration = "\"'`*>-.[]"

    def __init__(self, games: str = "auto", list_actions: bool = False):
        if games not in ("auto", "official", "generated"):
            raise ValueError(f"--env_args games={games}: it is auto, official or generated.")
        self.games, self.list_actions = games, list_actions
        self._engine = self._loaded = None

    def tasks(self, seed: int) -> tuple[dict[str, list[Task]], str]:
        """Official or generated games; `seed` is that of the generated houses."""
        return alfworld_games.find_games(self.games, seed=seed)

    def reset(self, task: Task) -> tuple[str, dict]:
        """Starts the game of task.spec["path"] from its one start state. RuntimeError with the path
        if the file cannot be played."""
        from environments import alfworld_engine
        self._engine = self._engine or alfworld_engine.take_engine()
        path = task.spec["path"]
        file = (path, alfworld_engine.modified(path))
        try:
            if self._loaded != file:
                self._loaded = None
                self._engine.load(path)
            state = self._engine.reset()
        # Anything: a parser's error, the translator's, a KeyError.
        except Exception as error:
            raise RuntimeError(f"{path} is not a playable ALFWorld game: {error!r}") from error
        self._loaded = file
        room, _, goal = state["feedback"].partition(alfworld_engine.TASK_MARK)
        self._info = {"goal": goal.strip().removesuffix("."),
                      "actions": state["admissible_commands"],
                      "won": False, "valid": True}
        return room.replace(alfworld_engine.BANNER, "").strip(), dict(self._info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One command. One that is not admissible changes nothing, in the engine's own words."""
        info = self._info
        info["valid"] = action.strip() in info["actions"]
        observation = NOTHING
        if info["valid"]:
            state = self._engine.step(action)[0]
            observation, info["won"] = state["feedback"], state["won"]
            info["actions"] = state["admissible_commands"]
        return observation, self.win_reward * info["won"], info["won"], False, dict(info)

    def parse(self, response: str) -> str:
        """Every ALFWorld command is lower case with single spaces."""
        return " ".join(super().parse(response).lower().split())

    def plan(self, task: Task) -> str:
        """The workflow of the task type, with its objects filled in."""
        return workflow(parse_task(task.spec["goal"], task.kind)) if task.spec.get("goal") else ""

    def hindsight(self, episode: Episode) -> tuple[str, str]:
        """Won: the workflow and where the object was. Lost: the core mistake, then the workflow.

        A task it cannot read gets no skill.
        """
        try:
            info = parse_task(episode.goal, episode.kind)
        except ValueError:
            return "", ""
        place, facts = read_trace(episode, info)
        if episode.won:
            return _fill(WON, info, place) if place else WON_ELSE, success_skill(info, place)
        mistake = find_mistake(info, place, facts, len(episode.steps))
        return _fill(MISTAKES[mistake][0], info), failure_skill(info, mistake)

    def expert(self, task: Task) -> list[str] | None:
        """The walkthrough of a generated game; of an official one, which has none, what solve()
        finds."""
        try:
            game, traj = (json.loads(Path(task.spec["path"]).with_name(name).read_text(
                encoding="utf-8"))
                          for name in ("game.tw-pddl", "traj_data.json"))
            return game.get("walkthrough") or alfworld_games.solve(game, traj)
        # No solution known.
        except (OSError, ValueError, KeyError):
            return None

    def close(self) -> None:
        """Give the engine back for the next environment of this process to use."""
        from environments import alfworld_engine
        if self._engine is not None:
            alfworld_engine.SPARE_ENGINES.append(self._engine)
        self._engine = self._loaded = None


# ------------------------------------------------------------------------------------------------
# 2. The rule analyzer: tasks, their workflows, and the mistakes it can name
# --------------------------------------------------------------------------------------------------
# Its skills are policy-level on purpose: they name types ("mug", "cabinet"), never numbered places,
# which another house would not share. What depends on the trajectory is the hint (where such an
# object turned up) and the mistake.
class TaskInfo(NamedTuple):
    """What a task line asks for. `target` is the receptacle type, or the lamp type in a look
    task."""
    task_type: str
    object: str
    target: str
    count: int
    verb: str     # "heat", "cool", "clean" or ""
    tool: str     # "microwave", "fridge", "sinkbasin" or ""


# The two sentences alfworld has for each task type (alfworld.gen.goal_library); old and new data
# share them.
_TASKS = {
    "pick_and_place_simple": r"put (?:a (?P<o>\w+) in|some (?P<o2>\w+) on) (?P<r>\w+)",
    "look_at_obj_in_light": r"(?:look at (?P<o>\w+) under|examine the (?P<o2>\w+) with) the "
                            r"(?P<r>\w+)",
    "pick_clean_then_place_in_recep": r"(?:put a clean (?P<o>\w+)|clean some (?P<o2>\w+) and put "
                                      r"it) in (?P<r>\w+)",
    "pick_heat_then_place_in_recep": r"(?:put a hot (?P<o>\w+)|heat some (?P<o2>\w+) and put it) "
                                     r"in (?P<r>\w+)",
    "pick_cool_then_place_in_recep": r"(?:put a cool (?P<o>\w+)|cool some (?P<o2>\w+) and put it) "
                                     r"in (?P<r>\w+)",
    "pick_two_obj_and_place": r"(?:put two (?P<o>\w+)|find two (?P<o2>\w+) and put them) in "
                              r"(?P<r>\w+)",
}
TREATMENTS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


def parse_task(task: str, task_type: str = "") -> TaskInfo:
    """Read a task line such as "put a hot mug in shelf". Raises ValueError if it is none of
    alfworld's, or not of task_type."""
    for name, pattern in _TASKS.items():
        match = re.fullmatch(pattern, task.strip().rstrip("."))
        if match and task_type in ("", name):
            obj = match["o"] or match["o2"]
            verb = next((v for v in TREATMENTS if name == f"pick_{v}_then_place_in_recep"), "")
            return TaskInfo(name, obj, match["r"], 1 + (name == "pick_two_obj_and_place"), verb,
                            TREATMENTS.get(verb, ""))
    raise ValueError(f"not an ALFWorld task{' of type ' + task_type if task_type else ''}: "
                     f"{task[:100]!r}")


# Sentence patterns. Slots are single words of the closed vocabulary; the verbs are those of today's
# commands.
SEARCH = "Look in each place once and open what is closed."
PLANS = {
    "pick_and_place_simple": "Take the {obj}, then move it to the {target}.",
    "look_at_obj_in_light": "Take the {obj}, find the {target}, then use the {target}.",
    "pick_two_obj_and_place": "Take one {obj}, move it to the {target}, then take another {obj} "
                              "and move it to the {target}.",
} | {f"pick_{verb}_then_place_in_recep": "Take the {obj}, {verb} it with the {tool}, then move it "
                                         "to the {target}."
     for verb in TREATMENTS}
HINT = "The {obj} can be in or on the {place}."
WON = "Won: found the {obj} in or on the {place}."
WON_ELSE = "Won."
# mistake -> (what happened, for the summary; what to avoid, for the skill)
MISTAKES = {
    "no effect": ("Lost: most commands changed nothing.", "Do not give commands that change "
                                                          "nothing."),
    "wrong object": ("Lost: took something else than the {obj}.",
                     "Do not take anything but the {obj}."),
    "passed": ("Lost: saw the {obj} but did not take it.", "Do not walk past the {obj}: take it "
                                                           "when you see it."),
    "not opened": ("Lost: left closed places unopened.", "Do not leave a closed place without "
                                                         "opening it."),
    "revisited": ("Lost: went back to the same places.", "Do not go back to places you have seen."),
    "not found": ("Lost: did not find the {obj} in time.", "Do not stay where the {obj} is not: go "
                                                           "to a new place."),
    "lamp first": ("Lost: used the {target} without the {obj}.",
                   "Do not use the {target} before you hold the {obj}."),
    "not lit": ("Lost: held the {obj} but did not use the {target}.",
                "Do not wander with the {obj}: use the {target}."),
    "untreated": ("Lost: moved the {obj} before it was treated.",
                  "Do not move the {obj} to the {target} before you {verb} it."),
    "not treated": ("Lost: held the {obj} but did not {verb} it.",
                    "Do not wander with the {obj}: {verb} it with the {tool}."),
    "dropped": ("Lost: put the {obj} down elsewhere.", "Do not put the {obj} down elsewhere."),
    "only one": ("Lost: moved only one {obj}.", "Do not stop after one {obj}: look for another "
                                                "{obj}."),
    "not delivered": ("Lost: held the {obj} but did not move it.",
                      "Do not wander with the {obj}: move it to the {target}."),
}


def workflow(info: TaskInfo) -> str:
    """The plan of the task type with its objects filled in: how to search, then the order of the
    actions."""
    return f"{SEARCH} {_fill(PLANS[info.task_type], info)}"


def success_skill(info: TaskInfo, place: str = "") -> str:
    """The workflow that worked; with the type of place where the object turned up, if that is
    known."""
    return workflow(info) + (" " + _fill(HINT, info, place) if place else "")


def failure_skill(info: TaskInfo, mistake: str) -> str:
    """What to avoid (a key of MISTAKES), then the workflow to keep to."""
    return f"{_fill(MISTAKES[mistake][1], info)} {workflow(info)}"


def _fill(pattern: str, info: TaskInfo, place: str = "") -> str:
    return pattern.format(obj=info.object, target=info.target, verb=info.verb, tool=info.tool,
                          place=place)


_TAKE = re.compile(r"take (\w+ \d+) from (\w+) \d+")
# today's wording, and the one before alfworld 0.4
_PUT = re.compile(r"(?:move|put) (\w+ \d+) (?:to|in/on|in|on) (\w+) \d+")
_TREAT = re.compile(r"(?:heat|cool|clean) (\w+ \d+) with \w+ \d+")
NOTHING = "Nothing happens."


def read_trace(episode: Episode, info: TaskInfo) -> tuple[str, Counter]:
    """Follow an episode's actions: (type of place the first wanted object was taken from or "",
    facts by name).

    "Wanted" is an object of the task's type. The facts are counts; those that are not obvious:
    `wasted` actions changed nothing; `seen` counts observations that list a wanted object and that
    the agent could still act on; `left closed` counts walking away from a closed place; `walks` and
    `revisits` count "go to" before the first take; `raw` counts moving a wanted object to the
    target untreated; `dropped` moving one elsewhere; `holds`, `delivered` and `treated` describe
    the end.
    """
    place, held, closed, visited, treated, delivered, t = "", "", "", set(), set(), set(), Counter()
    listed = re.compile(rf"you see .*\ban? {re.escape(info.object)} \d", re.DOTALL | re.IGNORECASE)
    results = [step.observation for step in episode.steps[1:]] + [episode.final_observation]
    for step, result in zip(episode.steps, results):
        t["seen"] += bool(listed.search(step.observation))
        verb, _, rest = step.action.partition(" ")
        take, put, treat = (pattern.fullmatch(step.action) for pattern in (_TAKE, _PUT, _TREAT))
        # The object in hand.
        name = (take or put or treat or [held, held])[1]
        wanted = name.rsplit(" ", 1)[0] == info.object
        if not step.valid or result.strip() == NOTHING or verb in ("look", "inventory", "help",
                                                                   "examine"):
            t["wasted"] += 1
        elif take:
            held, place = name, place or (take[2] if wanted else "")
            t["other"] += not wanted
            delivered.discard(name)
        elif put:
            held, there = "", put[2] == info.target
            (delivered if there and wanted else set()).add(name)
            t["raw"] += wanted and there and bool(info.verb) and name not in treated
            t["dropped"] += wanted and not there
        elif treat and verb == info.verb and wanted:
            treated.add(name)
        elif verb == "use":
            t["lamp held" if wanted else "lamp empty"] += 1
        elif verb == "open":
            closed, t["opened"] = "", t["opened"] + 1
        elif verb == "go":
            t["left closed"] += bool(closed)
            closed = f"The {rest[3:]} is closed" in result
            t["walks"] += not place
            t["revisits"] += not place and rest in visited
            visited.add(rest)
    t.update(holds=held.rsplit(" ", 1)[0] == info.object, treated=len(treated),
             delivered=len(delivered))
    return place, t


def find_mistake(info: TaskInfo, place: str, t: Counter, steps: int) -> str:
    """The core mistake of a lost episode (a key of MISTAKES): the first subgoal that was missed,
    and why (see read_trace)."""
    if 2 * t["wasted"] > steps:
        return "no effect"
    # A wanted object was never taken.
    if not place:
        if t["other"] or t["seen"]:
            return "wrong object" if t["other"] else "passed"
        if t["left closed"] > t["opened"]:
            return "not opened"
        return "revisited" if t["revisits"] >= 2 and 3 * t["revisits"] >= t[
            "walks"] else "not found"
    if info.verb and t["raw"] and not t["treated"]:
        return "untreated"
    if t["dropped"] and not t["holds"] and not t["delivered"]:
        return "dropped"
    if info.task_type == "look_at_obj_in_light":
        return "lamp first" if t["lamp empty"] and not t["lamp held"] else "not lit"
    if info.verb and not t["treated"]:
        return "not treated"
    return "only one" if t["delivered"] and not t["holds"] else "not delivered"


# All sentences above, for whoever builds a closed vocabulary.
SENTENCES = (SEARCH, *PLANS.values(), HINT, WON, WON_ELSE,
             *(s for pair in MISTAKES.values() for s in pair))
