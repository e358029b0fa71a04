"""alfworld_games.py: the games of ALFWorld, official ones on disk, or generated houses in the same
layout.

Opened only by whoever wants to know how. It imports without alfworld's packages.
"""
from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import envs
from envs import SPLITS, Task

# The six official task types, in the order the paper's table uses: Pick, Look, Clean, Heat, Cool,
# Pick2.
TASK_TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
              "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep",
              "pick_two_obj_and_place")
# The folder that alfworld-download fills; generated games are laid out alike.
OFFICIAL_LAYOUT = "json_2.1.1"
# Raise it whenever the same seed would give other bytes.
GENERATOR_VERSION = 1
DEFAULT_COUNTS = {"train": 240, "valid_seen": 120, "valid_unseen": 126}
CURE = "run `alfworld-download -f` again, or use --env_args games=generated"

# Where a game's grammar states its goal.
TASK_RULE = re.compile(r'("task": \[\s*\{\s*"rhs": "Your task is to: )([\w ,.\'-]+)("\s*\}\s*\])')

# Generated houses. Theme -> (receptacles every house has, further receptacles with their largest
# number, objects). Which object may stand where, and what can be heated, cooled, cleaned or opened,
# is the wheel's table, not ours.
THEMES = {
    "Kitchen": ("Fridge Microwave SinkBasin".split(),
                {"Cabinet": 3, "CoffeeMachine": 1, "CounterTop": 2, "DiningTable": 1, "Drawer": 2,
                 "GarbageCan": 1,
                 "Shelf": 2, "SideTable": 1, "StoveBurner": 2},
                "Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife "
                "Ladle Lettuce Mug Pan "
                "PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Tomato "
                "WineBottle".split()),
    "LivingRoom": (["CoffeeTable"],
                   {"ArmChair": 2, "Cabinet": 2, "Desk": 1, "Drawer": 2, "Dresser": 1,
                    "GarbageCan": 1, "Ottoman": 1,
                    "Safe": 1, "Shelf": 2, "SideTable": 2, "Sofa": 1},
                   "Book Box CD CellPhone CreditCard KeyChain Laptop Newspaper Pen Pillow "
                   "RemoteControl Statue "
                   "TissueBox Vase Watch WateringCan".split()),
    "Bedroom": (["Bed"],
                {"ArmChair": 1, "Cabinet": 2, "Desk": 1, "Drawer": 3, "Dresser": 1, "GarbageCan": 1,
                 "LaundryHamper": 1, "Safe": 1, "Shelf": 2, "SideTable": 2},
                "AlarmClock BaseballBat BasketBall Book Bowl CD CellPhone CreditCard KeyChain "
                "Laptop Mug Pen Pencil "
                "Pillow Statue TennisRacket Watch".split()),
    "Bathroom": ("SinkBasin Toilet".split(),
                 {"BathtubBasin": 1, "Cabinet": 3, "Cart": 1, "CounterTop": 1, "Drawer": 2,
                  "GarbageCan": 1,
                  "HandTowelHolder": 1, "Shelf": 2, "SideTable": 1, "ToiletPaperHanger": 1},
                 "Candle Cloth DishSponge HandTowel PaperTowel SoapBar SoapBottle SprayBottle "
                 "TissueBox "
                 "ToiletPaper".split()),
}
# the only lamp used; it cannot be carried
LAMP = "DeskLamp"
# the wheel's table has carried objects only
LAMP_SUPPORTS = ("Desk", "Dresser", "Shelf", "SideTable")
# Task -> (verb of the command, receptacle it happens at, row of the wheel's affordance table).
TREATMENTS = {"pick_clean_then_place_in_recep": ("clean", "SinkBasin", "Cleanable"),
              "pick_heat_then_place_in_recep": ("heat", "Microwave", "Heatable"),
              "pick_cool_then_place_in_recep": ("cool", "Fridge", "Coolable")}


def wheel(name: str):
    """Import module `name` of the alfworld package without its side effect.

    `import alfworld` creates the folder ALFWORLD_DATA (or ~/.cache/alfworld) and sets the variable,
    and fails where the folder cannot be made or the variable is empty. It is shown a folder that
    exists, then the variable is put back.
    """
    before = os.environ.get("ALFWORLD_DATA")
    os.environ["ALFWORLD_DATA"] = tempfile.gettempdir()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"ALFWorld is not installed: pip install -r requirements.txt ({error})"
                          ) from error
    finally:
        del os.environ["ALFWORLD_DATA"]
        if before is not None:
            os.environ["ALFWORLD_DATA"] = before


def goal_of(grammar: str) -> str:
    """The goal in a game's grammar, as the first text of the game will say it; "" if it is not
    plain there."""
    task = TASK_RULE.search(grammar)
    return task[2].strip().removesuffix(".") if task else ""


@functools.lru_cache(maxsize=None)
def object_pairs() -> tuple[frozenset, frozenset]:
    """(known, held_out): pairs (object type, receptacle type) that may be brought together, split
    in two for good.

    Train, valid_seen and base games use `known` pairs only, valid_unseen games `held_out` pairs
    only, for where every object stands at the start and for the goal alike. Held out is a quarter
    of each object's receptacles, those with the smallest hash: that depends on the names alone, so
    no seed shows a held-out pair to a model trained on the games of another seed. The pairs
    (object, lamp) of the look tasks are split in the same way.
    """
    contains = wheel("alfworld.gen.constants").VAL_RECEPTACLE_OBJECTS
    pairs = {(LAMP, support) for support in LAMP_SUPPORTS}
    for theme, (fixed, optional, objects) in THEMES.items():
        pairs |= {(obj, recep) for recep in (*fixed, *optional) for obj in objects
                  if obj in contains[recep]}
        pairs |= {(obj, LAMP) for obj in objects if theme in ("LivingRoom", "Bedroom")}
    held_out = set()
    for obj in {obj for obj, _ in pairs}:
        row = sorted((pair for pair in pairs if pair[0] == obj),
                     key=lambda pair: hashlib.sha256("|".join(pair).encode()).digest())
        held_out.update(row[:round(len(row) / 4)])
    return frozenset(pairs - held_out), frozenset(held_out)


def _new_id(rng: random.Random, kind: str) -> str:
    """An id in the official style, type|x|y|z escaped, such as
    Mug_bar__minus_01_dot_25_bar__plus_00_dot_90_bar__..."""
    return kind + "".join(
        f"_bar__{rng.choice(('plus', 'minus'))}_{rng.randrange(5):02d}_dot_{rng.randrange(100):02d}"
                          for _ in range(3))


def _house(rng: random.Random, theme: str, size: int) -> list[tuple[str, str, bool]]:
    """A room of `size` receptacles, sorted: (id, type, openable)."""
    openable = wheel("alfworld.gen.constants").OPENABLE_CLASS_SET
    fixed, optional, _ = THEMES[theme]
    house = []
    spare = [kind for kind, most in optional.items() for _ in range(most)]
    for kind in [*fixed, *rng.sample(spare, size - len(fixed))]:
        stem, tail = (kind[:-5], f"_bar_{kind}") if kind.endswith("Basin") else (kind, "")
        # About one official cabinet or drawer in five cannot be opened.
        opens = kind in openable and (kind not in ("Cabinet", "Drawer") or rng.random() < 0.8)
        house.append((_new_id(rng, stem) + tail, kind, opens))
    return sorted(house)


def _furnish(rng: random.Random, task_type: str, theme: str, house: list, pairs: frozenset,
             size: int):
    """Choose the goal and put `size` objects in the house: (object type, goal type, [(id, type,
    receptacle index)]).

    The target starts outside every receptacle of the goal's type, so that no game is won before it
    begins, and away from the appliance or lamp of the task. There are as many objects of its type
    as the task needs; everything else is a distractor, possibly doubled. Returns None if this house
    cannot hold such a task.
    """
    able, kinds = wheel("alfworld.gen.constants").VAL_ACTION_OBJECTS, [kind for _, kind, _ in house]
    look = task_type == "look_at_obj_in_light"
    _, station, affordance = TREATMENTS.get(task_type, (None, None, None))
    homes = {obj: [i for i, kind in enumerate(kinds) if (obj, kind) in pairs]
             for obj in (LAMP, *THEMES[theme][2])}
    # object type -> [(goal type, indices of possible starts)]
    options = {}
    for obj in THEMES[theme][2]:
        for goal in [LAMP] if look else sorted(set(kinds) - {station}):
            starts = [i for i in homes[obj] if kinds[i] not in (goal, station)]
            if starts and (obj, goal) in pairs and (affordance is None or obj in able[affordance]):
                options.setdefault(obj, []).append((goal, starts))
    if not options:
        return None
    target = rng.choice(sorted(options))
    goal, starts = rng.choice(options[target])
    placed = [(target, rng.choice(starts)) for _ in range(2 if task_type == "pick_two_obj_and_place"
                                                          else 1)]
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
    """The PDDL problem of one game, in the wheel's domain. Receptacle i is at location i + 1, the
    agent starts at 0."""
    constants = wheel("alfworld.gen.constants")
    contains, able = constants.VAL_RECEPTACLE_OBJECTS, constants.VAL_ACTION_OBJECTS
    at = [f"loc_bar_{i}_bar_0_bar_0_bar_30" for i in range(len(house) + 1)]
    # The domain's actions name these types, so every problem has them, used or not.
    rtypes = sorted({"Fridge", "Microwave", "SinkBasin"} | {kind for _, kind, _ in house})
    otypes = sorted({"ButterKnife", "Knife"} | {kind for _, kind, _ in placed})
    objects = ["agent1 - agent", *(f"{place} - location" for place in at),
               *(f"{kind}Type - rtype" for kind in rtypes),
               *(f"{kind}Type - otype" for kind in otypes),
               *(f"{recep} - receptacle" for recep, _, _ in house),
               *(f"{obj} - object" for obj, _, _ in placed)]
    init = [f"atLocation agent1 {at[0]}"]
    init += [f"canContain {r}Type {o}Type" for r in rtypes for o in otypes
             if o in contains.get(r, ())]
    for place, (recep, kind, opens) in zip(at[1:], house):
        init += [f"receptacleType {recep} {kind}Type", f"receptacleAtLocation {recep} {place}"]
        # nothing is opened: everything that opens starts closed
        init += [f"openable {recep}"] * opens
    for obj, kind, where in placed:
        init += [f"objectType {obj} {kind}Type", f"inReceptacle {obj} {house[where][0]}",
                 f"objectAtLocation {obj} {at[where + 1]}"]
        init += [f"pickupable {obj}"] * (kind != LAMP)
        init += [f"isReceptacleObject {obj}"] * (kind in constants.MOVABLE_RECEPTACLES_SET)
        # heatable, sliceable, ...
        init += [f"{row.lower()} {obj}" for row in sorted(able) if kind in able[row]]
    return "\n".join([f"(define (problem {name})", "(:domain alfred)", "(:objects", *objects, ")",
                      "(:init",
                      *(f"({fact})" for fact in init), ")", goal])


def _facts(problem: str) -> tuple[dict[str, list[list[str]]], dict[str, str]]:
    """({predicate: its arguments} of a PDDL problem's start, {entity: the engine's name for it}).

    The engine names an entity by its type and its rank among the sorted lower-case ids, counted
    from the last one.
    """
    facts = [fact.split() for fact in re.findall(r"\(([^()]+)\)",
                                                 problem.lower().split("(:goal")[0])]
    rows = {name: [fact[1:] for fact in facts if fact[0] == name]
            for name in ("inreceptacle", "objecttype", "receptacletype", "openable",
                         "receptacleatlocation")}
    names, count = {}, Counter()
    for entity in sorted({word for fact in facts for word in fact[1:] if "_bar_" in word},
                         reverse=True):
        kind = entity.split("_bar_")[0] + ("basin" if "basin" in entity else "")
        count[kind] += 1
        names[entity] = f"{kind} {count[kind]}"
    return rows, names


def solve(game_data: dict, traj_data: dict) -> list[str]:
    """Commands that win a game, built from its PDDL problem by someone who knows where everything
    is.

    For generated and for official files of both wordings; official files carry no walkthrough.
    Raises ValueError if the problem lacks what the task needs.
    """
    rows, names = _facts(game_data["pddl_problem"])
    # some official entities are nowhere: they are left out
    place = dict(rows["receptacleatlocation"])
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
        # the engine offers no way to where one stands already
        if place[recep] != here:
            commands.append(f"go to {names[recep]}")
            here = place[recep]
        # cleaning, heating and cooling work on a closed appliance
        if reach_in and recep in shut:
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


def _draw_games(seed: int, counts: dict[str, int]):
    """Yield (split, index, scene, task_type, house, target, goal, placed, sentence) for every game,
    train first.

    Every game has a random stream of its own, named by seed, split and index: it does not depend on
    how many others there are (but valid_seen games do depend on the train houses).
    """
    rooms = {task: sorted(themes) for task,
             themes in wheel("alfworld.gen.constants").GOALS_VALID.items()}
    # (scene, theme, house): valid_seen returns to these
    train = []
    for digit, split in enumerate(("train", "valid_seen", "valid_unseen", "base"), 1):
        unseen = split == "valid_unseen"
        for index in range(counts.get(split, 0)):
            task_type, setup, attempt = TASK_TYPES[index % 6], None, 0
            # Until the house can hold the task.
            while setup is None:
                rng = random.Random(f"{seed} {split} {index} {attempt}")
                attempt += 1
                if split == "valid_seen":
                    scene, theme, house = rng.choice([known for known in train
                                                      if known[1] in rooms[task_type]])
                else:
                    # Training layouts have 6-8 receptacles, unseen ones 9 or 10: none can occur on
                    # both sides.
                    scene, theme = digit * 100_000 + index, rng.choice(rooms[task_type])
                    house = _house(rng, theme, rng.choice((9, 10) if unseen else (6, 7, 8)))
                setup = _furnish(rng, task_type, theme, house, object_pairs()[unseen],
                                 rng.choice((10, 11, 12) if unseen else (8, 9, 10)))
            if split == "train":
                train.append((scene, theme, house))
            yield split, index, scene, task_type, house, *setup, rng.randrange(2)


def _write_game(root: Path, seed: int, draw: tuple) -> tuple[Task, list[str]]:
    """Write game.tw-pddl and traj_data.json of one drawn game, as the official data has them.

    Returns the task and its walkthrough.
    """
    split, index, scene, task_type, house, target, goal, placed, sentence = draw
    info, template = wheel("alfworld.info"), wheel("alfworld.gen.goal_library").gdict[task_type]
    trial, look = f"trial_S{seed}_{index:05d}", goal == LAMP
    words = {"obj": target, "recep": "" if look else goal, "toggle": goal if look else ""}
    task = template["templates"][sentence].format(**{key: word.lower() for key,
                                                     word in words.items()})
    traj_data = {"task_id": trial, "task_type": task_type, "scene": {"scene_num": scene},
                 "pddl_params": {"mrecep_target": "", "object_sliced": False,
                                 "object_target": target,
                                 "parent_target": words["recep"], "toggle_target": words["toggle"]}}
    game_data = {"pddl_domain": Path(info.ALFRED_PDDL_PATH).read_text(encoding="utf-8"),
                 "grammar": Path(info.ALFRED_TWL2_PATH).read_text(encoding="utf-8").replace(
                     "UNKNOWN GOAL", task),
                 "pddl_problem": _problem(trial, house, placed,
                                          template["pddl"].format(**words).replace("#", "-")),
                 # envs.failure proves it.
                 "solvable": True}
    game_data["walkthrough"] = solve(game_data, traj_data)
    folder = root / OFFICIAL_LAYOUT / split / f"{task_type}-{target}-None-{goal}-{scene}" / trial
    folder.mkdir(parents=True)
    for name, data in (("game.tw-pddl", game_data), ("traj_data.json", traj_data)):
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
    game_id = folder.relative_to(root / OFFICIAL_LAYOUT).as_posix()
    spec = dict(path=str(folder / "game.tw-pddl"), goal=task)
    return Task(game_id, split, task_type, spec), game_data["walkthrough"]


def _manifest(seed: int, counts: dict[str, int]) -> dict:
    """What generated games depend on. Where manifest.json says the same, the games can be used
    again."""
    version = wheel("alfworld.info").__version__
    return {"generator": GENERATOR_VERSION, "alfworld": version, "seed": seed, "counts": counts}


def generate_games(root, seed: int, counts: dict[str, int], progress=None) -> None:
    """Make up houses and write their games to root/json_2.1.1/<split>/<task-...-scene>/<trial>/,
    the official layout.

    counts: split -> number of games, for train, valid_seen, valid_unseen and base (a training pool
    of its own houses, for making the base model). The six task types alternate. valid_seen games
    are played in train houses (same scene number, receptacles and ids) with new objects and goals;
    valid_unseen has layouts and pairs that no other split has, see object_pairs. Every game is
    played on the engine to a win, else RuntimeError. Same seed and counts, same bytes.
    progress(done, total) is called after each game. Everything is written beside `root` and renamed
    at the end: a half-made folder is never taken for a whole one. ValueError if root exists already
    or the counts make no sense.
    """
    root, counts = Path(root), {split: int(n) for split, n in counts.items() if n}
    if not counts or min(counts.values()) < 0 or not set(counts) <= {*SPLITS, "base"}:
        raise ValueError(f"Cannot generate {counts or 'no games'}: splits are {', '.join(SPLITS)}, "
                         f"base; counts >= 1.")
    if "valid_seen" in counts and counts.get("train", 0) < 6:
        raise ValueError("valid_seen games are played in train houses: ask for at least 6 train "
                         "games as well.")
    if root.exists():
        raise ValueError(f"{root} exists already: remove it or choose another folder for the "
                         f"generated games.")
    scratch = root.with_name(f"{root.name}.part-{os.getpid()}")
    # By name: alfworld.py imports this module, so this one must not import it.
    env = envs.find("alfworld")()
    try:
        for done, draw in enumerate(_draw_games(seed, counts), 1):
            game, walkthrough = _write_game(scratch, seed, draw)
            if problem := envs.failure(env, game, walkthrough):
                raise RuntimeError(f"Generated game {game.id} is not right: {problem}.")
            if progress:
                progress(done, sum(counts.values()))
        (scratch / "manifest.json").write_text(json.dumps(_manifest(seed, counts), indent=1),
                                               encoding="utf-8")
        scratch.rename(root)
    finally:
        env.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _read_game(base: Path, split: str, folder: Path) -> Task | str:
    """One trial folder as a Task, or why the stock environment would leave it out. RuntimeError if
    a file is broken."""
    name = folder.relative_to(base).as_posix()
    if "movable" in name or "Sliced" in name:
        return "movable or sliced"
    traj_file, game_file = folder / "traj_data.json", folder / "game.tw-pddl"
    for file in (traj_file, game_file):
        if not file.is_file():
            return f"without {file.name}"
    try:
        # One field is wanted of traj_data.json; parsing all of it would take ten seconds for the
        # 3,800 official games.
        traj_data = traj_file.read_bytes()
        task_type = re.search(rb'"task_type":\s*"(\w+)"', traj_data)[1].decode()
        game_data = json.loads(game_file.read_text(encoding="utf-8"))
        whole = traj_data.rstrip().endswith(b"}") and {"pddl_domain", "grammar",
                                                       "pddl_problem"} <= set(game_data)
    except (OSError, ValueError, TypeError):
        # TypeError: no such field, or no JSON object
        whole = False
    if not whole:
        raise RuntimeError(f"{folder} holds a broken {traj_file.name} or {game_file.name}; {CURE}.")
    if task_type not in TASK_TYPES:
        return "of other task types"
    if not game_data.get("solvable"):
        return "not marked solvable"
    goal = goal_of(game_data["grammar"])
    return Task(name, split, task_type, dict(path=str(game_file), goal=goal))


def read_games(root, splits=SPLITS) -> tuple[dict[str, list[Task]], Counter]:
    """Games of root/json_2.1.1 by split, sorted by id, and a count of what was left out and why.

    Follows the stock environment: "movable" and "Sliced" tasks, other task types, trials that lack
    one of the two files and games not marked solvable are left out. RuntimeError, naming what is
    missing, if a split has no folder or no usable game or a file cannot be read: a download that
    stopped half-way must not pass for a small one.
    """
    root, games, skipped = Path(root), {}, Counter()
    base = root / OFFICIAL_LAYOUT
    if archives := sorted(path.name for path in root.glob("json_2.1.*.zip")):
        raise RuntimeError(f"{root} still holds {', '.join(archives)}: it was not unpacked to its "
                           f"end; {CURE}.")
    if any("\\" in path.name for folder in (root, base) if folder.is_dir()
           for path in folder.iterdir()):
        raise RuntimeError(f"{root} has file names with backslashes: it was unpacked by a tool "
                           f"that makes no folders "
                           f"of them; {CURE}.")
    if missing := [f"{OFFICIAL_LAYOUT}/{split}" for split in splits if not (base / split).is_dir()]:
        raise RuntimeError(f"No {', no '.join(missing)} in {root}; {CURE}.")
    for split in splits:
        found = [_read_game(base, split, folder) for folder in (base / split).glob("*/*")
                 if folder.is_dir()]
        left_out = Counter(reason for reason in found if isinstance(reason, str))
        games[split] = sorted((game for game in found if isinstance(game, Task)),
                              key=lambda game: game.id)
        if not games[split]:
            why = ", ".join(f"{n} {reason}" for reason, n in left_out.items()) or "it is empty"
            raise RuntimeError(f"No usable game in {base / split} ({why}); {CURE}.")
        skipped += left_out
    return games, skipped


def find_games(source: str = "auto", *, seed: int = 0, counts: dict[str, int] | None = None,
               cache=None,
               progress=None) -> tuple[dict[str, list[Task]], str]:
    """({split: games sorted by id}, one line that says which games these are).

    source: "official" takes ALFWORLD_DATA, or alfworld's default folder ~/.cache/alfworld;
    "generated" makes games for `seed` and `counts` (default DEFAULT_COUNTS) once and keeps them
    below `cache` (default envs.cache_dir()); "auto" takes official ones if there are any, else
    generated ones. An official folder that is there but broken is an error for "auto", too. Raises
    RuntimeError (data) or ValueError (arguments).
    """
    if source not in ("auto", "official", "generated"):
        raise ValueError(f"games is auto, official or generated, not {source!r}.")
    # An empty ALFWORLD_DATA counts as unset. Importing alfworld leaves an empty folder behind: that
    # is no data.
    root = Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser().absolute()
    if source != "generated" and any(root.glob("json_2.1.*")):
        games, skipped = read_games(root)
        left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items()))
        return games, (f"Official ALFWorld games from {root}: "
                       f"{', '.join(f'{len(games[s])} {s}' for s in games)}"
                       + (f" (left out: {left_out})" if left_out else "") + ".")
    if source == "official":
        raise RuntimeError(f"No official ALFWorld games in {root}: run `alfworld-download`, set "
                           f"ALFWORLD_DATA to the folder that holds {OFFICIAL_LAYOUT}, or use "
                           "--env_args games=generated.")
    manifest = _manifest(seed, {split: n for split, n in (counts or DEFAULT_COUNTS).items() if n})
    sizes = [f"{n} {split}" for split, n in manifest["counts"].items()]
    folder = Path(cache or envs.cache_dir()) / "-".join(
        [f"games-v{GENERATOR_VERSION}", f"alfworld{manifest['alfworld']}", f"seed{seed}",
         *sizes]).replace(" ", "")
    if made := not folder.exists():
        try:
            generate_games(folder, seed, manifest["counts"], progress)
        except OSError as error:
            # else another process made the same one meanwhile
            if not folder.exists():
                raise RuntimeError(f"The generated games cannot be kept in {folder} "
                                   f"({error.strerror}): set "
                                   "XDG_CACHE_HOME to a folder that can be written.") from error
    try:
        games, _ = read_games(folder, tuple(manifest["counts"]))
        whole = (json.loads((folder / "manifest.json").read_text(encoding="utf-8")) == manifest
                 and {split: len(games[split]) for split in games} == manifest["counts"])
    except (OSError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise RuntimeError(f"The generated games in {folder} are damaged: delete that folder, and "
                           f"they are made again.")
    how_to = "" if source == "generated" else (f" (no official ones in {root}: "
                                               "`alfworld-download` gets them)")
    return games, (f"Generated ALFWorld games {'made in' if made else 'from'} {folder}: "
                   f"{', '.join(sizes)}{how_to}.")
