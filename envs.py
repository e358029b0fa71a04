"""envs.py: the ALFWorld text environment, its games, and a pool of environments in worker processes."""
from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import queue
import random
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

try:
    import fast_downward
    import mementos.core
    from textworld.core import GameState
    from textworld.envs.pddl import PddlEnv, logic as pddl_logic, textgen
    from textworld.logic import Action, Placeholder, Proposition, Rule, Signature, Type, TypeHierarchy, Variable
except (ImportError, OSError) as error:          # OSError: a C++ library that is there but cannot be loaded
    raise ImportError("envs.py needs the ALFWorld text engine: pip install -r requirements.txt, with gcc, g++, make and cmake "
                      f"to build it ({error})") from error

# The six official task types, in the order the paper's table uses: Pick, Look, Clean, Heat, Cool, Pick2.
TASK_TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
              "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place")
SPLITS = ("train", "valid_seen", "valid_unseen")


# ------------------------------------------------------------------------------------------------------------------
# 1. What the other modules see: games, steps, episodes
# ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Game:
    """One ALFWorld game file. `id` is the trial folder relative to json_2.1.1, the name reports quote."""
    id: str
    split: str
    task_type: str
    path: str


@dataclass
class Step:
    """One turn: what the policy saw, what it wrote, the command read from that, and whether it was admissible."""
    observation: str
    response: str
    action: str
    valid: bool


@dataclass
class Episode:
    """One finished trajectory as text. `end` is "won", "step limit", "context limit", "env timeout", "env died" or
    "game unplayable"; `reason` says more where the environment ended it."""
    game_id: str
    split: str
    task: str
    task_type: str
    steps: list[Step] = field(default_factory=list)
    final_observation: str = ""
    won: bool = False
    reward: float = 0.0
    end: str = ""
    reason: str = ""


# ------------------------------------------------------------------------------------------------------------------
# 2. Prompt wording of the environment (constants, so that the tiny tokenizer can be built from them)
# ------------------------------------------------------------------------------------------------------------------
ROLE_LINE = "You are an agent in a household text game.\n"
TASK_PREFIX = "Your task is to: "
ANSWER_PLAIN = "Answer with exactly one command.\n"
ANSWER_THINK = "Reason inside <think></think>, then give exactly one command inside <action></action>.\n"
ADMISSIBLE_PREFIX = "Admissible commands: "


def turn_text(observation: str, *, admissible: list[str] | None = None) -> str:
    """Text of a user turn: the observation, then, if asked for, one line with the admissible commands."""
    return observation if admissible is None else f"{observation}\n{ADMISSIBLE_PREFIX}{', '.join(admissible)}."


def prompt_parts(task: str, observation: str, *, think: bool, admissible: list[str] | None = None) -> tuple[str, str]:
    """The first user turn in two halves, (before, after); student = before + after, teacher = before + skill + after.

    `before` ends with the task line's newline because the paper puts the skill right after that line. With `think` the
    model is asked for verl-agent's <think>..</think><action>..</action>, without it for the bare command.
    """
    before = f"{ROLE_LINE}{TASK_PREFIX}{task}.\n"
    return before, (ANSWER_THINK if think else ANSWER_PLAIN) + turn_text(observation, admissible=admissible)


def parse_action(response: str) -> str:
    """The command in a response, "" if there is none: the content of the last <action> (its closing tag may be missing),
    else the last non-empty line after </think>. Models decorate: quotes, backticks, brackets, bullets, a full stop and an "Action:"
    prefix are dropped. Whether the command is admissible is the environment's business, not the parser's."""
    text = re.sub(r"<\|[^|>]*\|>", " ", response)                    # a chat template's control tokens, if decoded
    text = text.rpartition("</think>")[2]
    if "<think>" in text and "</action>" not in text:                 # cut off while still thinking: no command
        return ""
    tagged = re.findall(r"<action>(.*?)(?:</action>|$)", text, flags=re.DOTALL | re.IGNORECASE)
    lines = [line.strip(" \t\"'`*>-.[]") for line in (tagged[-1] if tagged else text).splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    last = re.sub(r"^(?:next |my )?(?:action|command)\W*:\W*", "", last, flags=re.IGNORECASE)
    return " ".join(last.lower().split())                             # every ALFWorld command is lower case


# ------------------------------------------------------------------------------------------------------------------
# 3. The engine, made fast without changing a character
# ------------------------------------------------------------------------------------------------------------------
# The stock engine (alfworld + textworld + fast-downward) parses the text template of every applicable action again on
# every step, deep-copies a context per symbol, sorts and scans all facts per query, and translates the PDDL problem
# twice per load and twice per reset. The subclasses below keep its translator, its parsers, its C++ state machine, its
# step() and alfworld's naming, and remember results instead of computing them again. `python envs.py --benchmark` plays
# both engines side by side and counts the differences.
_BANNER, _TASK = "-= Welcome to TextWorld, ALFRED! =-", "Your task is to: "      # in the first text of every game
_TASK_RULE = re.compile(r'("task": \[\s*\{\s*"rhs": "Your task is to: )([\w ,.\'-]+)("\s*\}\s*\])')
_parse_symbols = functools.lru_cache(4096)(lambda text: textgen._parse_and_convert(text, rule_name="symbols"))
_parse_query = functools.lru_cache(4096)(Rule.parse_conjunctive_query)
_parse_grammar = functools.lru_cache(16)(lambda text: pddl_logic.GameLogic(domain="", grammar=text))
_compile = functools.lru_cache(4096)(lambda expression: compile(expression.strip(), "<grammar>", "eval"))


def cache_dir() -> Path:
    """This project's per-user cache folder: $XDG_CACHE_HOME/seed_mini, normally ~/.cache/seed_mini. Not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seed_mini"


class _Grammar(textgen.ContextSensitiveGrammar):
    """The stock grammar's rules with a derivation that shares parsed symbols and remembers finished texts."""

    def __init__(self, rules: dict, entities: dict):
        self._rules, self._entities = rules, entities                 # entities: id -> textworld EntityInfo, has .name

    def derive(self, start: str, context: dict) -> str:
        """Text of template `start`. It depends on the template, the action's arguments and the facts its queries look
        at, so it is kept until one of those facts changes (_State._forget). Bounded by the game's ground actions."""
        state, mapping = context["state"], context["mapping"]
        key = (start, *mapping.items())
        if key not in state.texts:
            state.asked = set()
            state.texts[key] = "".join(self._expand(symbol, state, mapping) for symbol in _parse_symbols(start))
            for predicate in state.asked:
                state.readers.setdefault(predicate, []).append(key)
        return state.texts[key]

    def _expand(self, symbol, state, mapping) -> str:
        """One grammar symbol as text; the recursion does what the stock stack of copied symbols does."""
        if isinstance(symbol, textgen.TerminalSymbol):
            return symbol.symbol
        if isinstance(symbol, textgen.NonterminalSymbol):
            if symbol.symbol not in self._rules:
                raise textgen.CSGUnknownSymbolError(symbol)
            rule = next(r for r in self._rules[symbol.symbol] if not r.condition or state.matches(r.condition, mapping))
            return "".join(self._expand(s, state, mapping) for s in rule.rhs)
        if isinstance(symbol, textgen.EvalSymbol):                    # e.g. {o.indefinite + ' ' + o.name}
            names = {ph.name: self._entities[var.name] for ph, var in mapping.items()}
            return str(eval(_compile(symbol.expression), {}, names))  # stock passes them by locals().update(), which
                                                                      # has no effect from Python 3.13 on (NameError)
        inner = symbol.symbol if isinstance(symbol, textgen.ListSymbol) else symbol
        matches = state.matches(inner.given, mapping) if inner.given else [mapping]
        items = [self._expand(inner.expression, state, match) for match in matches]
        if inner is symbol:
            return "".join(items)
        if len(items) < 2:                                            # a list: "a, b, and c"; the words are rules too
            return items[0] if items else self._expand(textgen.NonterminalSymbol("list_empty"), state, mapping)
        comma, last = (self._expand(textgen.NonterminalSymbol(name), state, mapping)
                       for name in ("list_separator", "list_last_separator"))
        return comma.join(items[:-1]) + last + items[-1]


class _State(pddl_logic.PddlState):
    """The stock state on top of a remembered translation; reset() puts changed facts back instead of starting over."""

    def __init__(self, downward_lib, logic, game: dict):
        self._logic, self.downward_lib, self._game = logic, downward_lib, game
        self._actions, self.name2type, self._known_actions = game["parameters"], game["objects"], {}
        self.texts, self.readers, self.asked, self.index = {}, {}, set(), {}    # see _Grammar.derive and _indexed
        if "start" not in game:                                       # first slot of this process to play the game
            downward_lib.load_sas(game["sas"])
            atoms = (pddl_logic.Atom * downward_lib.get_state_size())()
            downward_lib.get_state(atoms)
            facts = {fact for fact in (atom.get_fact(self.name2type) for atom in atoms) if not fact.is_negation}
            facts |= {Proposition(name, [Variable(arg, self.name2type[arg]) for arg in args])
                      for name, args in game["facts"]}
            game["start"] = {}
            for fact in facts:
                game["start"].setdefault(fact.signature, set()).add(fact)
        self._facts = {signature: set(facts) for signature, facts in game["start"].items()}

    def reset(self) -> None:
        """Back to the start state of the loaded game."""
        self.downward_lib.load_sas(self._game["sas"])
        for signature in list(self._facts):
            start = self._game["start"].get(signature, set())
            for fact in self._facts[signature] - start:
                self.remove_fact(fact)
            for fact in start - self._facts[signature]:
                self.add_fact(fact)

    def add_fact(self, prop):
        """As TextWorld's, and forgets the query results the fact may change."""
        self._facts.setdefault(prop.signature, set()).add(prop)
        self._forget(prop)

    def remove_fact(self, prop):
        """As TextWorld's, and forgets the query results the fact may change."""
        self._facts.get(prop.signature, set()).discard(prop)
        self._forget(prop)

    def _forget(self, fact) -> None:
        self.index.pop(fact.signature, None)
        for key in self.readers.pop(fact.name, ()):
            self.texts.pop(key, None)

    def matches(self, expression: str, mapping: dict) -> list[dict]:
        """Ways to bind a query's free placeholders, in the stock order (facts sorted by their arguments' names, nested
        by predicate); an index replaces sorting and scanning all facts. Notes which predicates were looked at."""
        found = [mapping]
        for predicate in _parse_query(expression).preconditions:
            self.asked.add(predicate.name)
            found = [bound for match in found for bound in self._bindings(predicate, match)]
        return found

    def _bindings(self, predicate, match: dict):
        types = self._logic.types
        known = next(((i, match[ph]) for i, ph in enumerate(predicate.parameters) if ph in match), None)
        for subtypes in types.multi_subtypes([types.get(name) for name in predicate.signature.types]):
            for fact in self._indexed(Signature(predicate.name, [t.name for t in subtypes])).get(known, ()):
                bound = dict(match)
                for placeholder, variable in zip(predicate.parameters, fact.arguments):
                    if placeholder in bound and bound[placeholder] != variable:
                        break
                    if placeholder not in bound and variable in bound.values():
                        break                                         # two placeholders never share a variable
                    bound[placeholder] = variable
                else:
                    yield bound

    def _indexed(self, signature) -> dict:
        """Facts of one signature, sorted, under None and under every (argument position, variable)."""
        if signature not in self.index:
            index = self.index[signature] = {}
            facts = self._facts.get(signature, ())
            for fact in sorted(facts, key=lambda fact: [(v.name, v.type) for v in fact.arguments]):
                for key in (None, *enumerate(fact.arguments)):
                    index.setdefault(key, []).append(fact)
        return self.index[signature]

    def all_applicable_actions(self) -> list[Action]:
        """As in the stock class, but an Action is built once per operator and game, not on every step."""
        operators = (fast_downward.Operator * self.downward_lib.get_applicable_operators_count())()
        self.downward_lib.get_applicable_operators(operators)
        self._operators = {operator.id: operator for operator in operators}
        actions = {}
        for operator in operators:
            if operator.id not in self._known_actions:
                name, *arguments = operator.name.split()
                action = self._known_actions[operator.id] = Action(name, [], [])
                action.id, action.key = operator.id, operator.name
                action.mapping = {Placeholder(parameter, kind): Variable(argument, kind)
                                  for (parameter, kind), argument in zip(self._actions[name], arguments)}
                action.command_template = self._logic.actions[name].template
                action.feedback_rule = self._logic.actions[name].feedback_rule
            action = self._known_actions[operator.id]
            actions.setdefault(action.key, action)                    # the same action may come from two operators
        return list(actions.values())


class _FastPddlEnv(PddlEnv):
    """textworld's PddlEnv (its step() is used as it is) with load, reset and the gathering of commands replaced."""

    def load(self, path: str) -> None:
        """Read a game file, or take what was read of it before."""
        if len(mementos.core._memento_cache) > 200_000:               # textworld interns every fact it ever saw; facts
            mementos.core._memento_cache.clear()                      # compare by value, so dropping them is safe
        game = _load_game(path, _modified(path))
        self._logic = pddl_logic.GameLogic.__new__(pddl_logic.GameLogic)
        self._logic.types, self._logic.actions = game["types"], game["actions"]
        self._pddl_state = _State(self.downward_lib, self._logic, game)
        self._entity_infos = self._get_entity_infos()
        self._logic.grammar = _Grammar(game["rules"], self._entity_infos)

    def _gather_infos(self) -> None:
        state = self.state
        state["won"], state["lost"], state["_last_action"] = self._pddl_state.check_goal(), False, self._last_action
        state["_valid_actions"] = self._pddl_state.all_applicable_actions()
        state["_valid_commands"] = [self._logic.grammar.derive(action.command_template, self._context(action.mapping))
                                    for action in state["_valid_actions"]]
        state["admissible_commands"] = sorted(set(state["_valid_commands"]))

    def _context(self, mapping: dict) -> dict:
        return {"state": self._pddl_state, "mapping": mapping}

    def reset(self) -> GameState:
        """The first state of the loaded game."""
        self._pddl_state.reset()
        self.prev_state, self.state, self._last_action, self._moves = None, GameState(), None, 0
        self.state["feedback"] = self._logic.grammar.derive("#intro#", self._context({}))
        self._gather_infos()
        return self.state


def _copy_loadable(source: str, target: str) -> None:
    """Stands in for shutil.copyfile in fast_downward.load_lib, which copies the C++ library once per environment and
    keeps it mapped. 32 of its 34 MB are debug sections that lie behind everything that is loaded: leave them out."""
    with open(source, "rb") as file:
        data = file.read(4096)
        if data[:6] == b"\x7fELF\2\1":                               # 64-bit little-endian ELF: end of its last segment
            (table,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
            segments = [struct.unpack_from("<I4xQ16xQ", data, table + i * size) for i in range(count)]
            data += file.read(max(offset + length for kind, offset, length in segments if kind == 1) - len(data))
        else:
            data += file.read()
    Path(target).write_bytes(data)


def _translate(domain: str, problem: str) -> dict:
    """PDDL to SAS by fast-downward, as JSON-able data: what the C++ library reads and what the query matching needs.

    The stock class translates twice; the second result only serves its planner, which nothing here asks for.
    """
    argv = sys.argv
    try:
        task, sas = fast_downward.pddl2sas(domain, problem)
    except (KeyError, SystemExit) as error:                           # an unsatisfiable goal; two objects of one name
        raise ValueError(f"its PDDL problem has no solution or names an object twice ({error!r})") from error
    finally:
        sys.argv = argv                                               # the translator overwrites it
    # task.init also holds distances between locations; they are numbers, which no query of a grammar can name.
    facts = [[atom.predicate, list(atom.args)] for atom in task.init
             if isinstance(atom, fast_downward.translate.pddl.conditions.Atom) and atom.predicate != "="]
    return {"sas": sas, "facts": facts, "types": [[t.name, list(t.supertype_names)] for t in task.types],
            "objects": {o.name: o.type_name for o in task.objects},
            "parameters": {a.name: [[p.name.strip("?"), p.type_name] for p in a.parameters] for a in task.actions}}


def _cached_translation(domain: str, problem: str) -> dict:
    """_translate through a per-user disk cache (compressed JSON): the 0.04-0.7 s are paid once per game, not once per
    worker and run. Only speed depends on it: a file that cannot be read is made again, a folder that cannot be written
    is left alone."""
    engine = importlib.metadata.version("fast-downward-textworld")
    name = hashlib.sha256("\0".join(["format 1", engine, domain, problem]).encode()).hexdigest()
    file = cache_dir() / "translations" / f"{name}.json.z"
    try:
        return json.loads(zlib.decompress(file.read_bytes()))
    except (OSError, ValueError, zlib.error):
        translation = _translate(domain, problem)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")                    # written aside, then renamed: workers share it
        part.write_bytes(zlib.compress(json.dumps(translation).encode()))
        part.replace(file)
    except OSError:
        pass
    return translation


def _modified(path: str) -> int:
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0   # a missing file is _load_game's error to report


@functools.lru_cache(64)                                              # 0.5-3 MB each
def _load_game(path: str, mtime_ns: int) -> dict:
    """Everything about a game file that slots can share; mtime_ns makes a rewritten file a new game."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    domain, problem, grammar = (data[key] for key in ("pddl_domain", "pddl_problem", "grammar"))
    game = _cached_translation(domain, problem)
    game["sas"] = game["sas"].encode()
    declared, game["types"] = game["types"], TypeHierarchy()
    for name, parents in declared:
        if name not in game["types"]._types:                          # as stock: the first declaration counts
            game["types"].add(Type(name, parents))
    # Parsing a grammar takes 50 ms and all games share one up to the task sentence: parse it with the sentence blanked.
    task = _TASK_RULE.search(grammar)
    logic = _parse_grammar(_TASK_RULE.sub(r"\1UNKNOWN GOAL.\3", grammar))
    game["actions"], game["rules"] = logic.actions, dict(logic.grammar._rules)
    if task:
        game["rules"]["task"] = [textgen.ProductionRule("task", _parse_symbols(_TASK + task[2]))]
    return game


# A PddlEnv maps its own copy of the C++ library until the process ends (closing the library crashes the interpreter at
# exit), so a closed slot hands its engine on to the next one.
_SPARE_ENGINES = []


def _new_engine():
    """The fast engine under alfworld's own naming wrapper: "mug 1" is the mug that AlfredTWEnv calls mug 1."""
    AlfredDemangler = _wheel("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
    fast_downward.interface.shutil = SimpleNamespace(copyfile=_copy_loadable)
    return AlfredDemangler(_FastPddlEnv())


class AlfworldEnv:
    """One ALFWorld game slot in this process, with Gymnasium's observation, reward, terminated, truncated, info.

    info: task, task_type, game_id, admissible (list of commands in engine order), won, valid (was the last action
    admissible), steps (actions so far, invalid ones included). A step earns `win_reward` if it wins, minus
    `invalid_penalty` if it was not admissible (the paper's 10 and 0.1); an episode is truncated after `max_steps`.
    """

    def __init__(self, max_steps: int = 30, win_reward: float = 10.0, invalid_penalty: float = 0.1):
        self.max_steps, self.win_reward, self.invalid_penalty = max_steps, win_reward, invalid_penalty
        self._engine = _SPARE_ENGINES.pop() if _SPARE_ENGINES else _new_engine()
        self._loaded = self._info = None

    def reset(self, game: Game) -> tuple[str, dict]:
        """Starts `game` from its one start state. RuntimeError with the path if the file cannot be played."""
        file = (game.path, _modified(game.path))
        try:
            if self._loaded != file:
                self._loaded = None
                self._engine.load(game.path)
            state = self._engine.reset()
        except Exception as error:                                    # anything: a parser's, the translator's, a KeyError
            raise RuntimeError(f"{game.path} is not a playable ALFWorld game: {error!r}") from error
        self._loaded = file
        room, _, task = state["feedback"].partition(_TASK)
        self._info = {"task": task.strip().removesuffix("."), "task_type": game.task_type, "game_id": game.id,
                      "admissible": state["admissible_commands"], "won": False, "valid": True, "steps": 0}
        self._over = False
        return room.replace(_BANNER, "").strip(), dict(self._info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Plays one command; an inadmissible one costs the penalty and a step and changes nothing. Never raises for bad
        text, but RuntimeError if there is no running episode."""
        if self._info is None or self._over:
            raise RuntimeError("there is no running episode in this slot: call reset() first")
        info = self._info
        info["steps"] += 1
        info["valid"] = action.strip() in info["admissible"]
        observation = "Nothing happens."                              # the engine's own words for a command it rejects
        if info["valid"]:
            state = self._engine.step(action)[0]
            observation, info["admissible"], info["won"] = state["feedback"], state["admissible_commands"], state["won"]
        reward = self.win_reward * info["won"] - self.invalid_penalty * (not info["valid"])
        truncated = info["steps"] >= self.max_steps and not info["won"]
        self._over = info["won"] or truncated
        return observation, reward, info["won"], truncated, dict(info)

    def close(self) -> None:
        """Give the engine back for the next environment to use."""
        if self._engine is not None:
            _SPARE_ENGINES.append(self._engine)
        self._engine = self._info = None


# ------------------------------------------------------------------------------------------------------------------
# 4. Environments in worker processes: EnvPool
# ------------------------------------------------------------------------------------------------------------------
class _Request(NamedTuple):
    """Start `game` if `fresh`, play actions, answer the last result: a reset, a step and a replay are one message."""
    slot: int
    game: Game
    actions: list[str]                           # all of the episode's actions, up to and including this request's
    fresh: bool                                  # from the start (reset, replay), or only the last action (step)
    wanted: bool = True                          # False: a replay of a slot nobody is waiting for

    def message(self) -> dict:
        """The request as the worker reads it."""
        return {"slot": self.slot, "game": asdict(self.game) if self.fresh else None,
                "actions": self.actions if self.fresh else self.actions[-1:]}


class EnvPool:
    """Slots of AlfworldEnv spread over worker processes, in blocks, so that a group of rollouts shares its loaded game.

        with EnvPool(workers=2) as pool:
            starts = pool.reset(games)           # list of (observation, info), games[i] in slot i
            results = pool.step({0: "look"})     # {slot: (observation, reward, terminated, truncated, info)}

    An action that takes longer than `step_timeout` seconds, and an engine that raises or dies, end that slot's episode:
    observation "", reward 0, truncated, info["end"] "env timeout" or "env died" and info["reason"] (in reset() too). A
    worker that hangs or dies is replaced and its other slots are restored by replaying their actions: exact, because
    the engine is deterministic. `counters` counts all of it. A game file that cannot be played (gone, cut short, without a
    solution) ends its episode in reset() as "game unplayable".
    Nothing outlives close(), Ctrl-C or a kill -9 of this process: a worker ends as soon as its stdin closes.
    """

    def __init__(self, workers: int = 2, step_timeout: float = 30.0, max_steps: int = 30,
                 win_reward: float = 10.0, invalid_penalty: float = 0.1):
        self.step_timeout = step_timeout
        self.counters = {"env timeout": 0, "env died": 0, "workers restarted": 0, "slots replayed": 0}
        self._options = json.dumps([max_steps, win_reward, invalid_penalty])
        self._running = {}                       # slot -> the request that led to its present state, if not finished
        self._infos = []                         # slot -> its last info
        self._lost = {}                          # slot -> result of an episode lost while other slots were stepping
        self._workers = []
        self._stop = weakref.finalize(self, _stop_workers, self._workers)     # on close(), garbage collection and exit
        for _ in range(workers):                 # start all, then wait: the imports take a second
            self._workers.append(_start_worker(self._options))
        for worker in self._workers:
            _await_ready(worker)

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; nothing is left running."""
        self._stop()

    def reset(self, games: list[Game]) -> list[tuple[str, dict]]:
        """Starts games[i] in slot i; earlier episodes are dropped."""
        self._running, self._lost = {}, {}
        self._infos = [{"task": "", "task_type": game.task_type, "game_id": game.id, "admissible": [], "won": False,
                        "valid": True, "steps": 0} for game in games]
        results = self._exchange([_Request(slot, game, [], fresh=True) for slot, game in enumerate(games)])
        return [(results[slot][0], results[slot][-1]) for slot in range(len(games))]

    def step(self, actions: dict[int, str]) -> dict[int, tuple[str, float, bool, bool, dict]]:
        """Plays one action in each named slot; the workers compute at the same time."""
        idle = [slot for slot in actions if slot not in self._running and slot not in self._lost]
        if idle:
            raise RuntimeError(f"there is no running episode in slot {idle[0]}: call reset() first")
        lost = {slot: self._lost.pop(slot) for slot in actions if slot in self._lost}
        return lost | self._exchange([_Request(slot, self._running[slot].game, [*self._running[slot].actions, action],
                                               fresh=False) for slot, action in actions.items() if slot not in lost])

    def _exchange(self, requests: list[_Request]) -> dict[int, tuple]:
        """Sends every request to its worker, then collects answers, in the workers' own time, until all are in."""
        if not self._stop.alive:
            raise RuntimeError("this EnvPool is closed")
        results = {}
        try:
            for w, worker in enumerate(self._workers):
                self._send(worker, [request for request in requests if self._home(request.slot) == w])
            while busy := [w for w, worker in enumerate(self._workers) if worker.queue]:
                wait = min(self._workers[w].deadline for w in busy) - time.monotonic()
                ready = select.select([self._workers[w].stdout for w in busy], [], [], max(wait, 0))[0]
                for w in busy:
                    if self._workers[w].stdout in ready:
                        self._collect(w, results)
                    elif time.monotonic() > self._workers[w].deadline:
                        self._replace(w, "env timeout", f"no answer within {self.step_timeout} s", results)
        except BaseException:                    # Ctrl-C between question and answer: such pipes must not be used again
            self.close()
            raise
        return results

    def _home(self, slot: int) -> int:
        return slot * len(self._workers) // len(self._infos)

    def _send(self, worker, requests: list[_Request]) -> None:
        """One line for all requests: the worker reads it whole before it answers, so the two pipes cannot jam."""
        worker.queue = requests
        self._set_deadline(worker)
        with contextlib.suppress(BrokenPipeError):        # it died while idle: _collect finds its stdout closed
            worker.stdin.write(json.dumps([request.message() for request in requests]).encode() + b"\n")
            worker.stdin.flush()

    def _set_deadline(self, worker) -> None:
        actions = len(worker.queue[0].message()["actions"]) if worker.queue else 0
        worker.deadline = time.monotonic() + self.step_timeout * max(1, actions)

    def _collect(self, w: int, results: dict) -> None:
        """Takes the answers that have arrived from worker w; they come in the order of the requests."""
        worker = self._workers[w]
        chunk = os.read(worker.stdout.fileno(), 1 << 20)
        if not chunk:
            return self._replace(w, "env died", _last_words(worker), results)
        *lines, worker.partial = (worker.partial + chunk).split(b"\n")
        for line in lines:
            request, answer = worker.queue.pop(0), json.loads(line)
            if "error" in answer:
                self._lose(request, "env died" if request.actions else "game unplayable", answer["error"], results)
                continue
            result = answer["result"]
            self._running[request.slot], self._infos[request.slot] = request, result[-1]
            if request.actions and (result[2] or result[3]):
                del self._running[request.slot]
            if request.wanted:
                results[request.slot] = tuple(result)
        self._set_deadline(worker)

    def _lose(self, request: _Request, end: str, reason: str, results: dict) -> None:
        """Ends an episode that the environment, not the policy, brought to its end."""
        self.counters[end] = self.counters.get(end, 0) + 1
        self._running.pop(request.slot, None)
        info = {**self._infos[request.slot], "end": end, "reason": reason}
        (results if request.wanted else self._lost)[request.slot] = ("", 0.0, False, True, info)

    def _replace(self, w: int, end: str, reason: str, results: dict) -> None:
        """Worker w hangs or died over the request at the head of its queue: that episode is lost, the others live on."""
        guilty, *rest = self._workers[w].queue
        self._lose(guilty, end, reason, results)
        _stop_workers([self._workers[w]], patience=0)
        self._workers[w] = _start_worker(self._options)
        _await_ready(self._workers[w])
        waiting = {request.slot for request in rest}
        replays = [request._replace(wanted=False) for slot, request in self._running.items()
                   if self._home(slot) == w and slot not in waiting]
        requests = [request._replace(fresh=True) for request in rest + replays]
        self.counters["workers restarted"] += 1
        self.counters["slots replayed"] += sum(bool(request.actions) for request in requests)
        self._send(self._workers[w], requests)


def _start_worker(options: str) -> subprocess.Popen:
    # Its own session: Ctrl-C reaches only this process, which then closes the worker's stdin. stderr goes to a file.
    errors = tempfile.TemporaryFile()
    worker = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", options], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    worker.errors, worker.queue, worker.partial = errors, [], b""
    return worker


def _await_ready(worker: subprocess.Popen, patience: float = 120.0) -> None:
    """A worker says one line when the engine is imported; one that cannot would otherwise cost an episode per restart."""
    if not select.select([worker.stdout], [], [], patience)[0] or not os.read(worker.stdout.fileno(), 64):
        raise RuntimeError(f"an environment worker did not start: {_last_words(worker)}")


def _last_words(worker: subprocess.Popen) -> str:
    worker.errors.seek(0)
    lines = worker.errors.read().decode(errors="replace").split("\n")
    return " | ".join(line.strip() for line in lines[-4:] if line.strip()) or "the process ended without a word"


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


def _worker(options: str) -> None:
    """Main of a worker process: requests on stdin, one JSON line per answer on what was stdout when it started."""
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                # whatever the engine prints goes to stderr, not into the protocol
    inbox, slots = queue.SimpleQueue(), {}

    def listen():
        """Requests into the inbox; in a thread, so that even a worker stuck in the engine ends at EOF."""
        for line in sys.stdin:
            inbox.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    print(json.dumps("ready"), file=protocol, flush=True)
    while True:
        for request in inbox.get():
            print(json.dumps(_answer(slots, request, json.loads(options))), file=protocol, flush=True)


def _misbehave(action: str) -> None:
    """The tests' hook, off unless SEED_MINI_TEST_FAULTS is set: three commands that do to a worker what bugs would."""
    if action == "hang":
        time.sleep(3600)
    if action == "die":
        os._exit(1)
    if action == "raise":
        raise ValueError("raised on request")


def _answer(slots: dict[int, AlfworldEnv], request: dict, options: list) -> dict:
    try:
        if request["slot"] not in slots:
            slots[request["slot"]] = AlfworldEnv(*options)
        env = slots[request["slot"]]
        result = env.reset(Game(**request["game"])) if request["game"] else None
        for action in request["actions"]:
            if os.environ.get("SEED_MINI_TEST_FAULTS"):
                _misbehave(action)
            result = env.step(action)
        return {"result": result}
    except Exception as error:                   # the engine may be in any state now: the slot gets a new one
        slots.pop(request["slot"], None)
        return {"error": f"{type(error).__name__}: {error}" if request["actions"] else str(error)}


# ------------------------------------------------------------------------------------------------------------------
# 5. Games: official ones on disk, or generated houses
# ------------------------------------------------------------------------------------------------------------------
OFFICIAL_LAYOUT = "json_2.1.1"          # the folder that alfworld-download fills; generated games are laid out alike
GENERATOR_VERSION = 1                   # raise it whenever the same seed would give other bytes
DEFAULT_COUNTS = {"train": 240, "valid_seen": 120, "valid_unseen": 126}
CURE = "run `alfworld-download -f` again, or use --games generated"

# Generated houses. Theme -> (receptacles every house has, further receptacles with their largest number, objects).
# Which object may stand where, and what can be heated, cooled, cleaned or opened, is the wheel's table, not ours.
THEMES = {
    "Kitchen": ("Fridge Microwave SinkBasin".split(),
                {"Cabinet": 3, "CoffeeMachine": 1, "CounterTop": 2, "DiningTable": 1, "Drawer": 2, "GarbageCan": 1,
                 "Shelf": 2, "SideTable": 1, "StoveBurner": 2},
                "Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle Lettuce Mug Pan "
                "PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Tomato WineBottle".split()),
    "LivingRoom": (["CoffeeTable"],
                   {"ArmChair": 2, "Cabinet": 2, "Desk": 1, "Drawer": 2, "Dresser": 1, "GarbageCan": 1, "Ottoman": 1,
                    "Safe": 1, "Shelf": 2, "SideTable": 2, "Sofa": 1},
                   "Book Box CD CellPhone CreditCard KeyChain Laptop Newspaper Pen Pillow RemoteControl Statue "
                   "TissueBox Vase Watch WateringCan".split()),
    "Bedroom": (["Bed"],
                {"ArmChair": 1, "Cabinet": 2, "Desk": 1, "Drawer": 3, "Dresser": 1, "GarbageCan": 1,
                 "LaundryHamper": 1, "Safe": 1, "Shelf": 2, "SideTable": 2},
                "AlarmClock BaseballBat BasketBall Book Bowl CD CellPhone CreditCard KeyChain Laptop Mug Pen Pencil "
                "Pillow Statue TennisRacket Watch".split()),
    "Bathroom": ("SinkBasin Toilet".split(),
                 {"BathtubBasin": 1, "Cabinet": 3, "Cart": 1, "CounterTop": 1, "Drawer": 2, "GarbageCan": 1,
                  "HandTowelHolder": 1, "Shelf": 2, "SideTable": 1, "ToiletPaperHanger": 1},
                 "Candle Cloth DishSponge HandTowel PaperTowel SoapBar SoapBottle SprayBottle TissueBox "
                 "ToiletPaper".split()),
}
LAMP = "DeskLamp"                                            # the only lamp used; it cannot be carried
LAMP_SUPPORTS = ("Desk", "Dresser", "Shelf", "SideTable")    # the wheel's table has carried objects only
# Task -> (verb of the command, receptacle it happens at, row of the wheel's affordance table).
TREATMENTS = {"pick_clean_then_place_in_recep": ("clean", "SinkBasin", "Cleanable"),
              "pick_heat_then_place_in_recep": ("heat", "Microwave", "Heatable"),
              "pick_cool_then_place_in_recep": ("cool", "Fridge", "Coolable")}


def _wheel(name: str):
    """Import module `name` of the alfworld package without its side effect.

    `import alfworld` creates the folder ALFWORLD_DATA (or ~/.cache/alfworld) and sets the variable, and fails where
    the folder cannot be made or the variable is empty. It is shown a folder that exists, then the variable is put back.
    """
    before = os.environ.get("ALFWORLD_DATA")
    os.environ["ALFWORLD_DATA"] = tempfile.gettempdir()
    try:
        return importlib.import_module(name)
    finally:
        del os.environ["ALFWORLD_DATA"]
        if before is not None:
            os.environ["ALFWORLD_DATA"] = before


@functools.lru_cache(maxsize=None)
def object_pairs() -> tuple[frozenset, frozenset]:
    """(known, held_out): pairs (object type, receptacle type) that may be brought together, split in two for good.

    Train, valid_seen and base games use `known` pairs only, valid_unseen games `held_out` pairs only, for where every
    object stands at the start and for the goal alike. Held out is a quarter of each object's receptacles, those with
    the smallest hash: that depends on the names alone, so no seed shows a held-out pair to a model trained on the games
    of another seed. The pairs (object, lamp) of the look tasks are split in the same way.
    """
    contains = _wheel("alfworld.gen.constants").VAL_RECEPTACLE_OBJECTS
    pairs = {(LAMP, support) for support in LAMP_SUPPORTS}
    for theme, (fixed, optional, objects) in THEMES.items():
        pairs |= {(obj, recep) for recep in (*fixed, *optional) for obj in objects if obj in contains[recep]}
        pairs |= {(obj, LAMP) for obj in objects if theme in ("LivingRoom", "Bedroom")}
    held_out = set()
    for obj in {obj for obj, _ in pairs}:
        row = sorted((pair for pair in pairs if pair[0] == obj),
                     key=lambda pair: hashlib.sha256("|".join(pair).encode()).digest())
        held_out.update(row[:round(len(row) / 4)])
    return frozenset(pairs - held_out), frozenset(held_out)


def _new_id(rng: random.Random, kind: str) -> str:
    """An id in the official style, type|x|y|z escaped, such as Mug_bar__minus_01_dot_25_bar__plus_00_dot_90_bar__..."""
    return kind + "".join(f"_bar__{rng.choice(('plus', 'minus'))}_{rng.randrange(5):02d}_dot_{rng.randrange(100):02d}"
                          for _ in range(3))


def _house(rng: random.Random, theme: str, size: int) -> list[tuple[str, str, bool]]:
    """A room of `size` receptacles, sorted: (id, type, openable)."""
    openable = _wheel("alfworld.gen.constants").OPENABLE_CLASS_SET
    fixed, optional, _ = THEMES[theme]
    house = []
    spare = [kind for kind, most in optional.items() for _ in range(most)]
    for kind in [*fixed, *rng.sample(spare, size - len(fixed))]:
        stem, tail = (kind[:-5], f"_bar_{kind}") if kind.endswith("Basin") else (kind, "")
        # About one official cabinet or drawer in five cannot be opened.
        opens = kind in openable and (kind not in ("Cabinet", "Drawer") or rng.random() < 0.8)
        house.append((_new_id(rng, stem) + tail, kind, opens))
    return sorted(house)


def _furnish(rng: random.Random, task_type: str, theme: str, house: list, pairs: frozenset, size: int):
    """Choose the goal and put `size` objects in the house: (object type, goal type, [(id, type, receptacle index)]).

    The target starts outside every receptacle of the goal's type, so that no game is won before it begins, and away
    from the appliance or lamp of the task. There are as many objects of its type as the task needs; everything else is
    a distractor, possibly doubled. Returns None if this house cannot hold such a task.
    """
    able, kinds = _wheel("alfworld.gen.constants").VAL_ACTION_OBJECTS, [kind for _, kind, _ in house]
    look = task_type == "look_at_obj_in_light"
    _, station, affordance = TREATMENTS.get(task_type, (None, None, None))
    homes = {obj: [i for i, kind in enumerate(kinds) if (obj, kind) in pairs] for obj in (LAMP, *THEMES[theme][2])}
    options = {}                                             # object type -> [(goal type, indices of possible starts)]
    for obj in THEMES[theme][2]:
        for goal in [LAMP] if look else sorted(set(kinds) - {station}):
            starts = [i for i in homes[obj] if kinds[i] not in (goal, station)]
            if starts and (obj, goal) in pairs and (affordance is None or obj in able[affordance]):
                options.setdefault(obj, []).append((goal, starts))
    if not options:
        return None
    target = rng.choice(sorted(options))
    goal, starts = rng.choice(options[target])
    placed = [(target, rng.choice(starts)) for _ in range(2 if task_type == "pick_two_obj_and_place" else 1)]
    if look:
        lit = [i for i in homes[LAMP] if i != placed[0][1]]
        if not lit:
            return None
        placed.append((LAMP, rng.choice(lit)))
    others = [obj for obj in THEMES[theme][2] if obj != target and homes[obj]]
    while len(placed) < size:
        obj = rng.choice(others)
        placed.append((obj, rng.choice(homes[obj])))
    return target, goal, sorted((_new_id(rng, obj), obj, where) for obj, where in placed)


def _problem(name: str, house: list, placed: list, goal: str) -> str:
    """The PDDL problem of one game, in the wheel's domain. Receptacle i is at location i + 1, the agent starts at 0."""
    constants = _wheel("alfworld.gen.constants")
    contains, able = constants.VAL_RECEPTACLE_OBJECTS, constants.VAL_ACTION_OBJECTS
    at = [f"loc_bar_{i}_bar_0_bar_0_bar_30" for i in range(len(house) + 1)]
    # The domain's actions name these types, so every problem has them, used or not.
    rtypes = sorted({"Fridge", "Microwave", "SinkBasin"} | {kind for _, kind, _ in house})
    otypes = sorted({"ButterKnife", "Knife"} | {kind for _, kind, _ in placed})
    objects = ["agent1 - agent", *(f"{place} - location" for place in at), *(f"{kind}Type - rtype" for kind in rtypes),
               *(f"{kind}Type - otype" for kind in otypes), *(f"{recep} - receptacle" for recep, _, _ in house),
               *(f"{obj} - object" for obj, _, _ in placed)]
    init = [f"atLocation agent1 {at[0]}"]
    init += [f"canContain {r}Type {o}Type" for r in rtypes for o in otypes if o in contains.get(r, ())]
    for place, (recep, kind, opens) in zip(at[1:], house):
        init += [f"receptacleType {recep} {kind}Type", f"receptacleAtLocation {recep} {place}"]
        init += [f"openable {recep}"] * opens                # nothing is opened: everything that opens starts closed
    for obj, kind, where in placed:
        init += [f"objectType {obj} {kind}Type", f"inReceptacle {obj} {house[where][0]}",
                 f"objectAtLocation {obj} {at[where + 1]}"]
        init += [f"pickupable {obj}"] * (kind != LAMP)
        init += [f"isReceptacleObject {obj}"] * (kind in constants.MOVABLE_RECEPTACLES_SET)
        init += [f"{row.lower()} {obj}" for row in sorted(able) if kind in able[row]]        # heatable, sliceable, ...
    return "\n".join([f"(define (problem {name})", "(:domain alfred)", "(:objects", *objects, ")", "(:init",
                      *(f"({fact})" for fact in init), ")", goal])


def solve(game_data: dict, traj_data: dict) -> list[str]:
    """Commands that win a game, built from its PDDL problem by someone who knows where everything is.

    For generated and for official files of both wordings; official files carry no walkthrough. The engine names an
    entity by its type and its rank among the sorted lower-case ids, counted from the last one. Raises ValueError if the
    problem lacks what the task needs.
    """
    facts = [fact.split() for fact in re.findall(r"\(([^()]+)\)", game_data["pddl_problem"].lower().split("(:goal")[0])]
    rows = {name: [fact[1:] for fact in facts if fact[0] == name]
            for name in ("inreceptacle", "objecttype", "receptacletype", "openable", "receptacleatlocation")}
    names, count = {}, Counter()
    for entity in sorted({word for fact in facts for word in fact[1:] if "_bar_" in word}, reverse=True):
        kind = entity.split("_bar_")[0] + ("basin" if "basin" in entity else "")
        count[kind] += 1
        names[entity] = f"{kind} {count[kind]}"
    place = dict(rows["receptacleatlocation"])               # some official entities are nowhere: they are left out
    inside = {obj: recep for obj, recep in rows["inreceptacle"] if recep in place}
    shut = {recep for recep, in rows["openable"]}
    of_type = {}
    for entity, kind in sorted(rows["objecttype"] + rows["receptacletype"]):
        if entity in place or entity in inside:
            of_type.setdefault(kind, []).append(entity)
    task_type, params = traj_data["task_type"], traj_data["pddl_params"]
    verb, station, _ = TREATMENTS.get(task_type, ("", "", ""))
    wanted, lamps, goals, stations = (of_type.get(f"{kind}Type".lower(), []) for kind in (
        params["object_target"], params["toggle_target"], params["parent_target"], station))
    put = re.search(r'action\s+PutObject\s*\{\s*template\s*::\s*"([^"]*)"', game_data["grammar"])
    if not wanted or not (lamps or goals) or verb and not stations or not put:
        raise ValueError(f"the problem lacks what the task {task_type} needs")
    commands, here = [], None

    def do(recep, command, reach_in=True):
        nonlocal here
        if place[recep] != here:                             # the engine offers no way to where one stands already
            commands.append(f"go to {names[recep]}")
            here = place[recep]
        if reach_in and recep in shut:                       # cleaning, heating and cooling work on a closed appliance
            commands.append(f"open {names[recep]}")
            shut.discard(recep)
        commands.append(command)

    # Two objects must end up in one receptacle: the one that already holds most of them.
    goal = max(goals, key=lambda recep: sum(inside[obj] == recep for obj in wanted), default=None)
    away = [obj for obj in wanted if inside[obj] != goal]
    two = task_type == "pick_two_obj_and_place"
    for obj in away[:max(2 - len(wanted) + len(away), 0)] if two else (away or wanted)[:1]:
        do(inside[obj], f"take {names[obj]} from {names[inside[obj]]}")
        if verb:
            do(stations[0], f"{verb} {names[obj]} with {names[stations[0]]}", reach_in=False)
        if lamps:
            do(inside[lamps[0]], f"use {names[lamps[0]]}", reach_in=False)
        else:
            do(goal, put[1].replace("{o}", names[obj]).replace("{r}", names[goal]))
    return commands


def _failure(env: AlfworldEnv, game: Game, commands: list[str]) -> str | None:
    """Play `commands` on the engine. None if the last one wins and none before it did, else what went wrong."""
    _, info = env.reset(game)
    for number, command in enumerate(commands, 1):
        if info["won"]:
            return f"it was won before command {number} of its known solution"
        if command not in info["admissible"]:
            return f"command {number} of its known solution, '{command}', is not admissible"
        info = env.step(command)[-1]
    return None if info["won"] else "its known solution does not win"


def _draw_games(seed: int, counts: dict[str, int]):
    """Yield (split, index, scene, task_type, house, target, goal, placed, sentence) for every game, train first.

    Every game has a random stream of its own, named by seed, split and index: it does not depend on how many others
    there are (but valid_seen games do depend on the train houses).
    """
    rooms = {task: sorted(themes) for task, themes in _wheel("alfworld.gen.constants").GOALS_VALID.items()}
    train = []                                               # (scene, theme, house): valid_seen returns to these
    for digit, split in enumerate(("train", "valid_seen", "valid_unseen", "base"), 1):
        unseen = split == "valid_unseen"
        for index in range(counts.get(split, 0)):
            task_type, setup, attempt = TASK_TYPES[index % 6], None, 0
            while setup is None:                             # until the house can hold the task
                rng = random.Random(f"{seed} {split} {index} {attempt}")
                attempt += 1
                if split == "valid_seen":
                    scene, theme, house = rng.choice([known for known in train if known[1] in rooms[task_type]])
                else:
                    # Training layouts have 6-8 receptacles, unseen ones 9 or 10: none can occur on both sides.
                    scene, theme = digit * 100_000 + index, rng.choice(rooms[task_type])
                    house = _house(rng, theme, rng.choice((9, 10) if unseen else (6, 7, 8)))
                setup = _furnish(rng, task_type, theme, house, object_pairs()[unseen],
                                 rng.choice((10, 11, 12) if unseen else (8, 9, 10)))
            if split == "train":
                train.append((scene, theme, house))
            yield split, index, scene, task_type, house, *setup, rng.randrange(2)


def _write_game(root: Path, seed: int, draw: tuple) -> tuple[Game, list[str]]:
    """Write game.tw-pddl and traj_data.json of one drawn game, as the official data has them: (game, walkthrough)."""
    split, index, scene, task_type, house, target, goal, placed, sentence = draw
    info, template = _wheel("alfworld.info"), _wheel("alfworld.gen.goal_library").gdict[task_type]
    trial, look = f"trial_S{seed}_{index:05d}", goal == LAMP
    words = {"obj": target, "recep": "" if look else goal, "toggle": goal if look else ""}
    task = template["templates"][sentence].format(**{key: word.lower() for key, word in words.items()})
    traj_data = {"task_id": trial, "task_type": task_type, "scene": {"scene_num": scene},
                 "pddl_params": {"mrecep_target": "", "object_sliced": False, "object_target": target,
                                 "parent_target": words["recep"], "toggle_target": words["toggle"]}}
    game_data = {"pddl_domain": Path(info.ALFRED_PDDL_PATH).read_text(encoding="utf-8"),
                 "grammar": Path(info.ALFRED_TWL2_PATH).read_text(encoding="utf-8").replace("UNKNOWN GOAL", task),
                 "pddl_problem": _problem(trial, house, placed, template["pddl"].format(**words).replace("#", "-")),
                 "solvable": True}                           # _failure proves it
    game_data["walkthrough"] = solve(game_data, traj_data)
    folder = root / OFFICIAL_LAYOUT / split / f"{task_type}-{target}-None-{goal}-{scene}" / trial
    folder.mkdir(parents=True)
    for name, data in (("game.tw-pddl", game_data), ("traj_data.json", traj_data)):
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
    game_id = folder.relative_to(root / OFFICIAL_LAYOUT).as_posix()
    return Game(game_id, split, task_type, str(folder / "game.tw-pddl")), game_data["walkthrough"]


def _manifest(seed: int, counts: dict[str, int]) -> dict:
    """What generated games depend on. Where manifest.json says the same, the games can be used again."""
    version = _wheel("alfworld.info").__version__
    return {"generator": GENERATOR_VERSION, "alfworld": version, "seed": seed, "counts": counts}


def generate_games(root, seed: int, counts: dict[str, int], progress=None) -> None:
    """Make up houses and write their games to root/json_2.1.1/<split>/<task-...-scene>/<trial>/, the official layout.

    counts: split -> number of games, for train, valid_seen, valid_unseen and base (a training pool of its own houses,
    for making the base model). The six task types alternate. valid_seen games are played in train houses (same scene
    number, receptacles and ids) with new objects and goals; valid_unseen has layouts and pairs that no other split has,
    see object_pairs. Every game is played on the engine to a win, else RuntimeError. Same seed and counts, same bytes.
    progress(done, total) is called after each game. Everything is written beside `root` and renamed at the end: a
    half-made folder is never taken for a whole one. ValueError if root exists already or the counts make no sense.
    """
    root, counts = Path(root), {split: int(n) for split, n in counts.items() if n}
    if not counts or min(counts.values()) < 0 or not set(counts) <= {*SPLITS, "base"}:
        raise ValueError(f"Cannot generate {counts or 'no games'}: splits are {', '.join(SPLITS)}, base; counts >= 1.")
    if "valid_seen" in counts and counts.get("train", 0) < 6:
        raise ValueError("valid_seen games are played in train houses: ask for at least 6 train games as well.")
    if root.exists():
        raise ValueError(f"{root} exists already: remove it or choose another folder for the generated games.")
    scratch, env = root.with_name(f"{root.name}.part-{os.getpid()}"), AlfworldEnv()
    try:
        for done, draw in enumerate(_draw_games(seed, counts), 1):
            game, walkthrough = _write_game(scratch, seed, draw)
            if failure := _failure(env, game, walkthrough):
                raise RuntimeError(f"Generated game {game.id} is not right: {failure}.")
            if progress:
                progress(done, sum(counts.values()))
        (scratch / "manifest.json").write_text(json.dumps(_manifest(seed, counts), indent=1), encoding="utf-8")
        scratch.rename(root)
    finally:
        env.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _read_game(base: Path, split: str, folder: Path) -> Game | str:
    """One trial folder as a Game, or why the stock environment would leave it out. RuntimeError if a file is broken."""
    name = folder.relative_to(base).as_posix()
    if "movable" in name or "Sliced" in name:
        return "movable or sliced"
    traj_file, game_file = folder / "traj_data.json", folder / "game.tw-pddl"
    for file in (traj_file, game_file):
        if not file.is_file():
            return f"without {file.name}"
    try:
        # One field is wanted of traj_data.json; parsing all of it would take ten seconds for the 3,800 official games.
        traj_data = traj_file.read_bytes()
        task_type = re.search(rb'"task_type":\s*"(\w+)"', traj_data)[1].decode()
        game_data = json.loads(game_file.read_text(encoding="utf-8"))
        whole = traj_data.rstrip().endswith(b"}") and {"pddl_domain", "grammar", "pddl_problem"} <= set(game_data)
    except (OSError, ValueError, TypeError):                 # TypeError: no such field, or no JSON object
        whole = False
    if not whole:
        raise RuntimeError(f"{folder} holds a broken {traj_file.name} or {game_file.name}; {CURE}.")
    if task_type not in TASK_TYPES:
        return "of other task types"
    return Game(name, split, task_type, str(game_file)) if game_data.get("solvable") else "not marked solvable"


def read_games(root, splits=SPLITS) -> tuple[dict[str, list[Game]], Counter]:
    """Games of root/json_2.1.1 by split, sorted by id, and a count of what was left out and why.

    Follows the stock environment: "movable" and "Sliced" tasks, other task types, trials that lack one of the two files
    and games not marked solvable are left out. RuntimeError, naming what is missing, if a split has no folder or no
    usable game or a file cannot be read: a download that stopped half-way must not pass for a small one.
    """
    root, games, skipped = Path(root), {}, Counter()
    base = root / OFFICIAL_LAYOUT
    if archives := sorted(path.name for path in root.glob("json_2.1.*.zip")):
        raise RuntimeError(f"{root} still holds {', '.join(archives)}: it was not unpacked to its end; {CURE}.")
    if any("\\" in path.name for folder in (root, base) if folder.is_dir() for path in folder.iterdir()):
        raise RuntimeError(f"{root} has file names with backslashes: it was unpacked by a tool that makes no folders "
                           f"of them; {CURE}.")
    if missing := [f"{OFFICIAL_LAYOUT}/{split}" for split in splits if not (base / split).is_dir()]:
        raise RuntimeError(f"No {', no '.join(missing)} in {root}; {CURE}.")
    for split in splits:
        found = [_read_game(base, split, folder) for folder in (base / split).glob("*/*") if folder.is_dir()]
        left_out = Counter(reason for reason in found if isinstance(reason, str))
        games[split] = sorted((game for game in found if isinstance(game, Game)), key=lambda game: game.id)
        if not games[split]:
            why = ", ".join(f"{n} {reason}" for reason, n in left_out.items()) or "it is empty"
            raise RuntimeError(f"No usable game in {base / split} ({why}); {CURE}.")
        skipped += left_out
    return games, skipped


def find_games(source: str = "auto", *, seed: int = 0, counts: dict[str, int] | None = None, cache=None,
               progress=None) -> tuple[dict[str, list[Game]], str]:
    """({split: games sorted by id}, one line that says which games these are).

    source: "official" takes ALFWORLD_DATA, or alfworld's default folder ~/.cache/alfworld; "generated" makes games for
    `seed` and `counts` (default DEFAULT_COUNTS) once and keeps them below `cache` (default cache_dir()); "auto" takes
    official ones if there are any, else generated ones. An official folder that is there but broken is an error for
    "auto", too. Raises RuntimeError (data) or ValueError (arguments).
    """
    if source not in ("auto", "official", "generated"):
        raise ValueError(f"--games is auto, official or generated, not {source!r}.")
    # An empty ALFWORLD_DATA counts as unset. Importing alfworld leaves an empty folder behind: that is no data.
    root = Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser().absolute()
    if source != "generated" and any(root.glob("json_2.1.*")):
        games, skipped = read_games(root)
        left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items()))
        return games, (f"Official ALFWorld games from {root}: {', '.join(f'{len(games[s])} {s}' for s in games)}"
                       + (f" (left out: {left_out})" if left_out else "") + ".")
    if source == "official":
        raise RuntimeError(f"No official ALFWorld games in {root}: run `alfworld-download`, set ALFWORLD_DATA to the "
                           f"folder that holds {OFFICIAL_LAYOUT}, or use --games generated.")
    manifest = _manifest(seed, {split: n for split, n in (counts or DEFAULT_COUNTS).items() if n})
    sizes = [f"{n} {split}" for split, n in manifest["counts"].items()]
    folder = Path(cache or cache_dir()) / "-".join(
        [f"games-v{GENERATOR_VERSION}", f"alfworld{manifest['alfworld']}", f"seed{seed}", *sizes]).replace(" ", "")
    if made := not folder.exists():
        try:
            generate_games(folder, seed, manifest["counts"], progress)
        except OSError as error:
            if not folder.exists():                          # else another process made the same one meanwhile
                raise RuntimeError(f"The generated games cannot be kept in {folder} ({error.strerror}): set "
                                   "XDG_CACHE_HOME to a folder that can be written.") from error
    try:
        games, _ = read_games(folder, tuple(manifest["counts"]))
        whole = (json.loads((folder / "manifest.json").read_text(encoding="utf-8")) == manifest
                 and {split: len(games[split]) for split in games} == manifest["counts"])
    except (OSError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise RuntimeError(f"The generated games in {folder} are damaged: delete that folder, and they are made again.")
    how_to = "" if source == "generated" else f" (no official ones in {root}: `alfworld-download` gets them)"
    return games, f"Generated ALFWorld games {'made in' if made else 'from'} {folder}: {', '.join(sizes)}{how_to}."


def check_engine(games: dict[str, list[Game]]) -> None:
    """Play the first game with a known solution to a win; RuntimeError if engine and data do not fit together.

    Official files say "walkthrough": null, so their solution comes from solve().
    """
    for game in (game for split in games.values() for game in split):
        try:
            game_data = json.loads(Path(game.path).read_text(encoding="utf-8"))
            traj_data = json.loads(Path(game.path).with_name("traj_data.json").read_text(encoding="utf-8"))
            commands = game_data.get("walkthrough") or solve(game_data, traj_data)
        except (ValueError, KeyError):                       # no solution known: try the next game
            continue
        env = AlfworldEnv(max_steps=len(commands) + 1)
        try:
            failure = _failure(env, game, commands)
        except (Exception, SystemExit) as error:             # an engine that does not fit can fail in any way
            failure = f"{type(error).__name__}: {error}"
        finally:
            env.close()
        if failure:
            raise RuntimeError(f"The installed ALFWorld engine does not fit the game {game.path}: {failure}. Reinstall "
                               "it by pip install -r requirements.txt, or take other games (--games generated).")
        return
    raise RuntimeError("No game has a known solution, so the engine cannot be checked: use --games generated.")


# ------------------------------------------------------------------------------------------------------------------
# 6. Command line: worker, benchmark
# ------------------------------------------------------------------------------------------------------------------
def _compare(stock, ours, path: str, steps: int, seed: int) -> tuple[dict[str, list[float]], int, int]:
    """Plays one game on two engines side by side: its known solution, then `steps` random commands, some of them wrong.

    Returns ({kind of call: [seconds stock, seconds ours, calls]}, resets and steps compared, how many differed); the
    text, the admissible commands in their order, won, score and done are compared.
    """
    times = {kind: [0.0, 0.0, 0] for kind in ("first load", "load again", "reset", "step")}
    compared = differed = 0

    def both(kind, call):
        nonlocal compared, differed
        results = []
        for i, engine in enumerate((stock, ours)):
            start = time.perf_counter()
            results.append(call(engine))
            times[kind][i] += time.perf_counter() - start
        times[kind][2] += 1
        states = [result[0] if kind == "step" else result for result in results]
        if states[0] is not None:
            views = [(s["feedback"], s["admissible_commands"], s["won"], s.score, s.done) for s in states]
            compared, differed = compared + 1, differed + (views[0] != views[1])
        return states[0]

    both("first load", lambda engine: engine.load(path))
    _load_game.cache_clear()                     # as in another worker or another run: translation from the disk cache
    both("load again", lambda engine: engine.load(path))
    game_data = json.loads(Path(path).read_text(encoding="utf-8"))
    traj_data = json.loads(Path(path).with_name("traj_data.json").read_text(encoding="utf-8"))
    state = both("reset", lambda engine: engine.reset())
    for command in game_data.get("walkthrough") or solve(game_data, traj_data):
        state = both("step", lambda engine: engine.step(command))
    differed += not state["won"]
    rng = random.Random(seed)
    for n in range(steps):
        if n % 50 == 0 or state["won"]:
            state = both("reset", lambda engine: engine.reset())
        command = rng.choice(state["admissible_commands"]) if rng.random() < 0.9 else "go to nowhere 1"
        state = both("step", lambda engine: engine.step(command))
    return times, compared, differed


def benchmark(paths: list[str], steps: int) -> int:
    """Prints stock against ours, milliseconds per call, timed in turn in this process. Returns the differing calls."""
    ours = _new_engine()
    stock = type(ours)(PddlEnv())
    totals, compared, differed = {}, 0, 0
    for seed, path in enumerate(paths):
        times, n, bad = _compare(stock, ours, path, steps, seed)
        totals = {kind: [a + b for a, b in zip(totals.get(kind, (0, 0, 0)), row)] for kind, row in times.items()}
        compared, differed = compared + n, differed + bad
    print(f"{'ms per call':<12}{'stock':>10}{'ours':>10}{'ratio':>9}   calls")
    for kind, (slow, fast, calls) in totals.items():
        print(f"{kind:<12}{1e3 * slow / calls:>10.2f}{1e3 * fast / calls:>10.2f}{slow / fast:>8.1f}x   {calls}")
    print(f"{compared:,} resets and steps of {len(paths)} games compared: {differed} differences")
    return differed


def main() -> None:
    """Command line: the benchmark; --worker is how EnvPool starts its processes."""
    parser = argparse.ArgumentParser(description="Compares the stock ALFWorld engine with envs.py: speed and text.")
    parser.add_argument("--benchmark", action="store_true", help="play games on both engines and print a table")
    parser.add_argument("--games", metavar="DIR", help="folder with game.tw-pddl files below it (default: 12 new games)")
    parser.add_argument("--steps", type=int, default=50, help="random steps per game after its solution (default 50)")
    parser.add_argument("--worker", metavar="OPTIONS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _worker(args.worker)
    elif args.benchmark and sys.version_info >= (3, 13):
        parser.error("the stock engine does not run on Python 3.13 or later, so there is nothing to compare with")
    elif args.benchmark:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"     # an empty disk cache, or no load would be a first one
            if not args.games:
                generate_games(Path(folder) / "games", 0, {"train": 12})
                shutil.rmtree(f"{folder}/cache")                 # generating plays, and so translates, every game
            paths = sorted(map(str, Path(args.games or folder).rglob("game.tw-pddl")))
            if not paths:
                parser.error(f"no game.tw-pddl below {args.games}")
            sys.exit(1 if benchmark(paths, args.steps) else 0)
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
