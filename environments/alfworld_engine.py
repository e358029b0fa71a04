"""alfworld_engine.py: the ALFWorld text engine, made fast without changing a character.

Opened only by whoever wants to know how; environments/alfworld.py imports it inside reset().
"""
from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import struct
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import envs
from environments.alfworld_games import TASK_RULE, wheel

try:
    import fast_downward
    import mementos.core
    from textworld.core import GameState
    from textworld.envs.pddl import PddlEnv, logic as pddl_logic, textgen
    from textworld.logic import (Action, Placeholder, Proposition, Rule, Signature, Type,
                                 TypeHierarchy,
                                 Variable)
# OSError: a C++ library that is there but cannot be loaded.
except (ImportError, OSError) as error:
    raise ImportError("ALFWorld needs its text engine: pip install -r requirements.txt, with "
                      f"gcc, g++, make and cmake to build it ({error})") from error

# The stock engine (alfworld + textworld + fast-downward) parses the text template of every
# applicable action again on every step, deep-copies a context per symbol, sorts and scans all facts
# per query, and translates the PDDL problem twice per load and twice per reset. The subclasses
# below keep its translator, its parsers, its C++ state machine, its step() and alfworld's naming,
# and remember results instead of computing them again. `python tests/engine_benchmark.py` plays
# both engines side by side and counts the differences.

# In the first text of every game.
BANNER, TASK_MARK = "-= Welcome to TextWorld, ALFRED! =-", "Your task is to: "
_parse_symbols = functools.lru_cache(4096)(
    lambda text: textgen._parse_and_convert(text, rule_name="symbols"))
_parse_query = functools.lru_cache(4096)(Rule.parse_conjunctive_query)
_parse_grammar = functools.lru_cache(16)(lambda text: pddl_logic.GameLogic(domain="", grammar=text))
_compile = functools.lru_cache(4096)(
    lambda expression: compile(expression.strip(), "<grammar>", "eval"))


class _Grammar(textgen.ContextSensitiveGrammar):
    """The stock grammar's rules with a derivation that shares parsed symbols and remembers finished
    texts."""

    def __init__(self, rules: dict, entities: dict):
        # entities: id -> textworld EntityInfo, has .name
        self._rules, self._entities = rules, entities

    def derive(self, start: str, context: dict) -> str:
        """Text of template `start`. It depends on the template, the action's arguments and the
        facts its queries look at, so it is kept until one of those facts changes (_State._forget).
        Bounded by the game's ground actions."""
        state, mapping = context["state"], context["mapping"]
        key = (start, *mapping.items())
        if key not in state.texts:
            state.asked = set()
            state.texts[key] = "".join(self._expand(symbol, state, mapping)
                                       for symbol in _parse_symbols(start))
            for predicate in state.asked:
                state.readers.setdefault(predicate, []).append(key)
        return state.texts[key]

    def _expand(self, symbol, state, mapping) -> str:
        """One grammar symbol as text; the recursion does what the stock stack of copied symbols
        does."""
        if isinstance(symbol, textgen.TerminalSymbol):
            return symbol.symbol
        if isinstance(symbol, textgen.NonterminalSymbol):
            if symbol.symbol not in self._rules:
                raise textgen.CSGUnknownSymbolError(symbol)
            rule = next(r for r in self._rules[symbol.symbol] if not r.condition
                        or state.matches(r.condition, mapping))
            return "".join(self._expand(s, state, mapping) for s in rule.rhs)
        # e.g. {o.indefinite + ' ' + o.name}
        if isinstance(symbol, textgen.EvalSymbol):
            names = {ph.name: self._entities[var.name] for ph, var in mapping.items()}
            # stock passes them by locals().update(), which has no effect from Python 3.13 on
            # (NameError)
            return str(eval(_compile(symbol.expression), {}, names))
        inner = symbol.symbol if isinstance(symbol, textgen.ListSymbol) else symbol
        matches = state.matches(inner.given, mapping) if inner.given else [mapping]
        items = [self._expand(inner.expression, state, match) for match in matches]
        if inner is symbol:
            return "".join(items)
        # a list: "a, b, and c"; the words are rules too
        if len(items) < 2:
            return items[0] if items else self._expand(textgen.NonterminalSymbol("list_empty"),
                                                       state, mapping)
        comma, last = (self._expand(textgen.NonterminalSymbol(name), state, mapping)
                       for name in ("list_separator", "list_last_separator"))
        return comma.join(items[:-1]) + last + items[-1]


class _State(pddl_logic.PddlState):
    """The stock state on top of a remembered translation; reset() puts changed facts back instead
    of starting over."""

    def __init__(self, downward_lib, logic, game: dict):
        self._logic, self.downward_lib, self._game = logic, downward_lib, game
        self._actions, self.name2type, self._known_actions = game["parameters"], game["objects"], {}
        # see _Grammar.derive and _indexed
        self.texts, self.readers, self.asked, self.index = {}, {}, set(), {}
        # first slot of this process to play the game
        if "start" not in game:
            downward_lib.load_sas(game["sas"])
            atoms = (pddl_logic.Atom * downward_lib.get_state_size())()
            downward_lib.get_state(atoms)
            facts = {fact for fact in (atom.get_fact(self.name2type) for atom in atoms)
                     if not fact.is_negation}
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
        """Ways to bind a query's free placeholders, in the stock order (facts sorted by their
        arguments' names, nested by predicate); an index replaces sorting and scanning all facts.
        Notes which predicates were looked at."""
        found = [mapping]
        for predicate in _parse_query(expression).preconditions:
            self.asked.add(predicate.name)
            found = [bound for match in found for bound in self._bindings(predicate, match)]
        return found

    def _bindings(self, predicate, match: dict):
        types = self._logic.types
        known = next(((i, match[ph]) for i, ph in enumerate(predicate.parameters) if ph in match),
                     None)
        for subtypes in types.multi_subtypes([types.get(name)
                                              for name in predicate.signature.types]):
            for fact in self._indexed(Signature(predicate.name,
                                                [t.name for t in subtypes])).get(known, ()):
                bound = dict(match)
                for placeholder, variable in zip(predicate.parameters, fact.arguments):
                    if placeholder in bound and bound[placeholder] != variable:
                        break
                    if placeholder not in bound and variable in bound.values():
                        # two placeholders never share a variable
                        break
                    bound[placeholder] = variable
                else:
                    yield bound

    def _indexed(self, signature) -> dict:
        """Facts of one signature, sorted, under None and under every (argument position,
        variable)."""
        if signature not in self.index:
            index = self.index[signature] = {}
            facts = self._facts.get(signature, ())
            for fact in sorted(facts, key=lambda fact: [(v.name, v.type) for v in fact.arguments]):
                for key in (None, *enumerate(fact.arguments)):
                    index.setdefault(key, []).append(fact)
        return self.index[signature]

    def all_applicable_actions(self) -> list[Action]:
        """As in the stock class, but an Action is built once per operator and game, not on every
        step."""
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
                                  for (parameter, kind),
                                  argument in zip(self._actions[name], arguments)}
                action.command_template = self._logic.actions[name].template
                action.feedback_rule = self._logic.actions[name].feedback_rule
            action = self._known_actions[operator.id]
            # the same action may come from two operators
            actions.setdefault(action.key, action)
        return list(actions.values())


class _FastPddlEnv(PddlEnv):
    """textworld's PddlEnv (its step() is used as it is) with load, reset and the gathering of
    commands replaced."""

    def load(self, path: str) -> None:
        """Read a game file, or take what was read of it before."""
        # textworld interns every fact it ever saw; facts
        if len(mementos.core._memento_cache) > 200_000:
            # compare by value, so dropping them is safe
            mementos.core._memento_cache.clear()
        game = _load_game(path, modified(path))
        self._logic = pddl_logic.GameLogic.__new__(pddl_logic.GameLogic)
        self._logic.types, self._logic.actions = game["types"], game["actions"]
        self._pddl_state = _State(self.downward_lib, self._logic, game)
        self._entity_infos = self._get_entity_infos()
        self._logic.grammar = _Grammar(game["rules"], self._entity_infos)

    def _gather_infos(self) -> None:
        state = self.state
        state["won"], state["lost"], state["_last_action"] = self._pddl_state.check_goal(
            ), False, self._last_action
        state["_valid_actions"] = self._pddl_state.all_applicable_actions()
        state["_valid_commands"] = [self._logic.grammar.derive(action.command_template,
                                                               self._context(action.mapping))
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
    """Stands in for shutil.copyfile in fast_downward.load_lib, which copies the C++ library once
    per environment and keeps it mapped. 32 of its 34 MB are debug sections that lie behind
    everything that is loaded: leave them out."""
    with open(source, "rb") as file:
        data = file.read(4096)
        # 64-bit little-endian ELF: end of its last segment
        if data[:6] == b"\x7fELF\2\1":
            (table,), (size, count) = struct.unpack_from("<Q", data,
                                                         32), struct.unpack_from("<HH", data, 54)
            segments = [struct.unpack_from("<I4xQ16xQ", data, table + i * size)
                        for i in range(count)]
            data += file.read(max(offset + length for kind, offset, length in segments if kind == 1)
                              - len(data))
        else:
            data += file.read()
    Path(target).write_bytes(data)


def _translate(domain: str, problem: str) -> dict:
    """PDDL to SAS by fast-downward, as JSON-able data: what the C++ library reads and what the
    query matching needs.

    The stock class translates twice; the second result only serves its planner, which nothing here
    asks for.
    """
    argv = sys.argv
    try:
        task, sas = fast_downward.pddl2sas(domain, problem)
    except (KeyError, SystemExit) as error:
        # an unsatisfiable goal; two objects of one name
        raise ValueError(
            f"its PDDL problem has no solution or names an object twice ({error!r})") from error
    finally:
        # The translator overwrites it.
        sys.argv = argv
    # task.init also holds distances between locations; they are numbers, which no query of a
    # grammar can name.
    facts = [[atom.predicate, list(atom.args)] for atom in task.init
             if isinstance(atom, fast_downward.translate.pddl.conditions.Atom)
             and atom.predicate != "="]
    return {"sas": sas, "facts": facts, "types": [[t.name, list(t.supertype_names)]
                                                  for t in task.types],
            "objects": {o.name: o.type_name for o in task.objects},
            "parameters": {a.name: [[p.name.strip("?"), p.type_name] for p in a.parameters]
                           for a in task.actions}}


def _cached_translation(domain: str, problem: str) -> dict:
    """_translate through a per-user disk cache (compressed JSON): the 0.04-0.7 s are paid once per
    game, not once per worker and run. Only speed depends on it: a file that cannot be read is made
    again, a folder that cannot be written is left alone."""
    engine = importlib.metadata.version("fast-downward-textworld")
    name = hashlib.sha256("\0".join(["format 1", engine, domain, problem]).encode()).hexdigest()
    file = envs.cache_dir() / "translations" / f"{name}.json.z"
    try:
        return json.loads(zlib.decompress(file.read_bytes()))
    except (OSError, ValueError, zlib.error):
        translation = _translate(domain, problem)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # written aside, then renamed: workers share it
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(zlib.compress(json.dumps(translation).encode()))
        part.replace(file)
    except OSError:
        pass
    return translation


def modified(path: str) -> int:
    """When a file was last written; 0 if it is missing, which is _load_game's error to report."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0


@functools.lru_cache(64)                                              # 0.5-3 MB each
def _load_game(path: str, mtime_ns: int) -> dict:
    """Everything about a game file that slots can share; mtime_ns makes a rewritten file a new
    game."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    domain, problem, grammar = (data[key] for key in ("pddl_domain", "pddl_problem", "grammar"))
    game = _cached_translation(domain, problem)
    game["sas"] = game["sas"].encode()
    declared, game["types"] = game["types"], TypeHierarchy()
    for name, parents in declared:
        # as stock: the first declaration counts
        if name not in game["types"]._types:
            game["types"].add(Type(name, parents))
    # Parsing a grammar takes 50 ms and all games share one up to the task sentence: parse it with
    # the sentence blanked.
    task = TASK_RULE.search(grammar)
    logic = _parse_grammar(TASK_RULE.sub(r"\1UNKNOWN GOAL.\3", grammar))
    game["actions"], game["rules"] = logic.actions, dict(logic.grammar._rules)
    if task:
        game["rules"]["task"] = [textgen.ProductionRule("task",
                                                        _parse_symbols(TASK_MARK + task[2]))]
    return game


# A PddlEnv maps its own copy of the C++ library until the process ends (closing the library crashes
# the interpreter at exit), so a closed slot hands its engine on to the next one.
SPARE_ENGINES = []


def take_engine():
    """A spare engine, or a new one under alfworld's own naming wrapper: "mug 1" is AlfredTWEnv's
    mug 1."""
    if SPARE_ENGINES:
        return SPARE_ENGINES.pop()
    demangler = wheel("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
    fast_downward.interface.shutil = SimpleNamespace(copyfile=_copy_loadable)
    return demangler(_FastPddlEnv())
