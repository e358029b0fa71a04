"""ALFWorld's games: generated houses against the stock engine, their splits, and what find_games
says about a folder."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import envs
from environments import alfworld_games
from environments.alfworld_games import TASK_TYPES
from envs import SPLITS

COUNTS = {"train": 12, "valid_seen": 12, "valid_unseen": 12, "base": 6}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The user's own cache stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pool(cache, tmp_path_factory):
    """One small generated folder and its games."""
    root = tmp_path_factory.mktemp("games") / "pool"
    alfworld_games.generate_games(root, 3, COUNTS)
    return root, alfworld_games.read_games(root, tuple(COUNTS))[0]


@pytest.fixture
def official():
    """The folder with current/ and old_wording/, official games of today's and of the older
    wording."""
    folder = os.environ.get("SEED_MINI_ALFWORLD_GAMES")
    if not folder:
        pytest.skip("SEED_MINI_ALFWORLD_GAMES is not set: no official ALFWorld games to test with")
    return Path(folder)


def everything(games):
    return [game for split in games.values() for game in split]


def data_of(game):
    folder = Path(game.spec["path"]).parent
    return json.loads((folder / "game.tw-pddl").read_text()), json.loads(
        (folder / "traj_data.json").read_text()
    )


def facts(game):
    """The problem read by other means than the module's: predicate -> list of arguments."""
    found = {}
    init = data_of(game)[0]["pddl_problem"].split("(:goal")[0]
    for name, arguments in re.findall(r"^\s*\((\w+) ([^()]+)\)\s*$", init, flags=re.MULTILINE):
        found.setdefault(name, []).append(arguments.split())
    return found


def pairs_of(game):
    """(object type, receptacle type) of everything that stands somewhere, and of the goal; then the
    sorted layout."""
    found = facts(game)
    kind = {
        name: kind.removesuffix("Type")
        for name, kind in found["objectType"] + found["receptacleType"]
    }
    params = data_of(game)[1]["pddl_params"]
    goal = (params["object_target"], params["parent_target"] or params["toggle_target"])
    stands = {(kind[obj], kind[recep]) for obj, recep in found["inReceptacle"]}
    return stands, goal, tuple(sorted(kind[recep] for recep, _ in found["receptacleType"]))


def digest(root):
    """One hash over every file's path and bytes."""
    total = hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        total.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return total.hexdigest()


# ---- generated games -----------------------------------------------------------------------------
def test_walkthroughs_win_with_the_last_command_only(pool):
    env = envs.find("alfworld")()
    for game in everything(pool[1]):
        commands = data_of(game)[0]["walkthrough"]
        _, info = env.reset(game)
        assert info["goal"] == game.spec["goal"] and env.expert(game) == commands
        for number, command in enumerate(commands, 1):
            assert command in info["actions"], (game.id, command)
            _, _, won, _, info = env.step(command)
            assert won == (number == len(commands)), (game.id, command)
    env.close()


def test_the_stock_engine_agrees(pool):
    """One game of each task type on textworld's own PddlEnv with alfworld's own naming, none of our
    engine code."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs.pddl import PddlEnv

    engine = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
    for game in pool[1]["valid_unseen"][::2]:
        game_data, _ = data_of(game)
        engine.load(game.spec["path"])
        state = engine.reset()
        assert "UNKNOWN GOAL" not in state["feedback"] and not state["won"]
        for number, command in enumerate(game_data["walkthrough"], 1):
            assert command in state["admissible_commands"]
            state = engine.step(command)[0]
            assert state["won"] == (number == len(game_data["walkthrough"]))


def test_files_have_the_official_layout(pool):
    root, games = pool
    assert {split: len(found) for split, found in games.items()} == COUNTS
    for split, found in games.items():
        assert Counter(game.kind for game in found) == {
            task: COUNTS[split] // 6 for task in TASK_TYPES
        }
        assert [game.id for game in found] == sorted(game.id for game in found)
    for game in everything(games):
        game_data, traj_data = data_of(game)
        params = traj_data["pddl_params"]
        goal = params["parent_target"] or params["toggle_target"]
        name = f"{game.split}/{game.kind}-{params['object_target']}-None-{goal}"
        assert re.fullmatch(rf"{name}-\d+/trial_\w+", game.id)
        assert Path(game.spec["path"]) == root / "json_2.1.1" / game.id / "game.tw-pddl"
        assert set(game_data) == {
            "pddl_domain",
            "grammar",
            "pddl_problem",
            "solvable",
            "walkthrough",
        }
        task = re.search(r"Your task is to: (.*)\.\"", game_data["grammar"]).group(1)
        assert params["object_target"].lower() in task and goal.lower() in task
        assert "move {o} to {r}" in game_data["grammar"]


def test_the_target_has_to_be_looked_for(pool):
    """Not in the goal's kind of receptacle nor at the appliance or lamp; two of it for pick-two,
    else one."""
    for game in everything(pool[1]):
        found, params = facts(game), data_of(game)[1]["pddl_params"]
        targets = [
            obj for obj, kind in found["objectType"] if kind == f"{params['object_target']}Type"
        ]
        assert len(targets) == (2 if game.kind == "pick_two_obj_and_place" else 1)
        kind, inside = dict(found["receptacleType"]), dict(found["inReceptacle"])
        appliance = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}.get(
            game.kind.split("_")[1]
        )
        for obj in targets:
            assert kind[inside[obj]] not in (f"{params['parent_target']}Type", f"{appliance}Type")
            assert all(
                inside[lamp] != inside[obj]
                for lamp, of in found["objectType"]
                if of == "DeskLampType"
            )
        low, high = ((9, 10), (10, 12)) if game.split == "valid_unseen" else ((6, 8), (8, 10))
        assert low[0] <= len(kind) <= low[1] and high[0] <= len(inside) <= high[1]
        # Everything that opens starts closed.
        assert "opened" not in found


def test_same_seed_same_bytes(pool, tmp_path):
    alfworld_games.generate_games(tmp_path / "again", 3, COUNTS)
    assert digest(tmp_path / "again") == digest(pool[0])
    # A game does not depend on how many others there are; another seed gives other games.
    first = next(alfworld_games._draw_games(3, {"train": 1}))
    assert (
        first
        == next(alfworld_games._draw_games(3, COUNTS))
        != next(alfworld_games._draw_games(4, {"train": 1}))
    )


def test_seen_houses_are_train_houses_with_new_placements(pool):
    train = {game.id.split("/")[1].rsplit("-")[-1]: facts(game) for game in pool[1]["train"]}
    for game in pool[1]["valid_seen"]:
        found, known = facts(game), train[game.id.split("/")[1].rsplit("-")[-1]]
        for predicate in ("receptacleType", "receptacleAtLocation", "openable"):
            assert found.get(predicate) == known.get(predicate)
        stands, before = (
            {(dict(of["objectType"])[obj], recep) for obj, recep in of["inReceptacle"]}
            for of in (found, known)
        )
        assert stands != before


def test_unseen_layouts_and_pairs_are_new(pool):
    known_pairs, known_layouts, new_pairs, new_layouts = set(), set(), set(), set()
    for game in everything(pool[1]):
        stands, goal, layout = pairs_of(game)
        unseen = game.split == "valid_unseen"
        (new_pairs if unseen else known_pairs).update(stands | {goal})
        (new_layouts if unseen else known_layouts).add(layout)
    assert len(new_pairs) > 20 and not new_pairs & known_pairs
    assert not new_layouts & known_layouts


def test_held_out_pairs_do_not_depend_on_the_seed():
    """No training game of any of ten seeds shows a pair or a layout that an unseen game of any of
    them shows."""
    shown = {True: set(), False: set()}
    scenes = set()
    for seed in range(10):
        for split, index, scene, _, house, target, goal, placed, _ in alfworld_games._draw_games(
            seed, {"train": 30, "valid_seen": 12, "valid_unseen": 30, "base": 30}
        ):
            shown[split == "valid_unseen"] |= {(obj, house[where][1]) for _, obj, where in placed}
            shown[split == "valid_unseen"] |= {
                (target, goal),
                tuple(sorted(kind for _, kind, _ in house)),
            }
            assert split == "valid_seen" or (seed, scene) not in scenes
            scenes.add((seed, scene))
    assert not shown[True] & shown[False]
    known, held_out = alfworld_games.object_pairs()
    assert not known & held_out and 0.2 < len(held_out) / len(known | held_out) < 0.3
    # The shipped base was trained on the other pairs: with another set, its unseen split would no
    # longer be unseen.
    assert hashlib.sha256(repr(sorted(held_out)).encode()).hexdigest()[:16] == "ca57c92064e74092"


def test_generation_is_all_or_nothing(tmp_path):
    def interrupt(done, total):
        assert (done, total) == (1, 6)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        alfworld_games.generate_games(tmp_path / "games", 0, {"train": 6}, interrupt)
    assert not list(tmp_path.iterdir())
    (tmp_path / "games").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        alfworld_games.generate_games(tmp_path / "games", 0, {"train": 6})
    for counts, sentence in [
        ({"test": 6}, "splits are"),
        ({"train": 0}, "no games"),
        ({"train": -1}, "counts >= 1"),
        ({"valid_seen": 6}, "at least 6 train games"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            alfworld_games.generate_games(tmp_path / "other", 0, counts)


def test_reading_the_wheel_leaves_no_trace(tmp_path):
    """`import alfworld` makes ~/.cache/alfworld and fails on an empty ALFWORLD_DATA; asking for its
    tables must not."""
    code = (
        "import os\nfrom environments import alfworld_games\nalfworld_games.object_pairs()\n"
        "data = os.environ.get('ALFWORLD_DATA')\n"
        "assert data == os.environ.get('EXPECTED'), data\n"
    )
    surroundings = {key: value for key, value in os.environ.items() if key != "ALFWORLD_DATA"} | {
        "HOME": str(tmp_path)
    }
    for extra in ({}, {"ALFWORLD_DATA": "", "EXPECTED": ""}):
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            cwd=Path(envs.__file__).parent,
            env=surroundings | extra,
        )
    assert not (tmp_path / ".cache" / "alfworld").exists()


# ---- official games, and what is wrong with a folder ---------------------------------------------
@pytest.fixture
def download(pool, tmp_path, monkeypatch):
    """What looks like an official download (generated games in its place), and ALFWORLD_DATA
    pointing at it."""
    shutil.copytree(pool[0] / "json_2.1.1", tmp_path / "data" / "json_2.1.1")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_official_folders(official, monkeypatch):
    for name, each in (("current", 6), ("old_wording", 1)):
        monkeypatch.setenv("ALFWORLD_DATA", str(official / name))
        for source in ("auto", "official"):
            games, notice = alfworld_games.find_games(source)
            assert {split: len(found) for split, found in games.items()} == dict.fromkeys(
                SPLITS, each
            )
            assert (
                notice.startswith("Official")
                and str(official / name) in notice
                and "\n" not in notice
            )
        envs.check(envs.make(envs.find("alfworld"), ["games=official"]), games)


@pytest.mark.slow
def test_solve_wins_official_games(official):
    """Official files carry no walkthrough: solve() has to find one in their PDDL. One game of each
    task type."""
    env = envs.find("alfworld")()
    old = everything(alfworld_games.read_games(official / "old_wording")[0])
    for game in [*alfworld_games.read_games(official / "current")[0]["valid_seen"], *old]:
        game_data, traj_data = data_of(game)
        assert game_data.get("walkthrough") is None
        env.reset(game)
        won = [env.step(command)[2] for command in alfworld_games.solve(game_data, traj_data)]
        assert won.pop() and not any(won), game.id
    env.close()


def test_auto_generates_once_and_says_so(tmp_path, monkeypatch, pool):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nothing"))
    counts, calls = {"train": 6, "valid_seen": 6}, []
    games, notice = alfworld_games.find_games(
        "auto", seed=5, counts=counts, cache=tmp_path, progress=lambda *call: calls.append(call)
    )
    assert calls[-1] == (12, 12) and {split: len(found) for split, found in games.items()} == counts
    assert "\n" not in notice
    assert (
        "made in" in notice and "alfworld-download" in notice and "6 train, 6 valid_seen" in notice
    )
    (folder,) = (path for path in tmp_path.iterdir() if path.name.startswith("games-v"))
    before = digest(folder)
    again, notice = alfworld_games.find_games(
        "generated", seed=5, counts=counts, cache=tmp_path, progress=pytest.fail
    )
    assert again == games and digest(folder) == before and "made in" not in notice
    shutil.rmtree(Path(games["train"][0].spec["path"]).parents[1])
    with pytest.raises(RuntimeError, match="damaged: delete that folder"):
        alfworld_games.find_games("generated", seed=5, counts=counts, cache=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot be kept in .*set XDG_CACHE_HOME"):
        alfworld_games.find_games("generated", counts=counts, cache=tmp_path / "file")
    with pytest.raises(
        RuntimeError, match="No official ALFWorld games in .*nothing: run `alfworld-download`"
    ):
        alfworld_games.find_games("official")
    with pytest.raises(ValueError, match="auto, official or generated"):
        alfworld_games.find_games("downloaded")


def test_default_places(tmp_path, monkeypatch, pool):
    """An empty ALFWORLD_DATA is an unset one: ~/.cache/alfworld. The cache follows
    XDG_CACHE_HOME."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("ALFWORLD_DATA", "")
    games, _ = alfworld_games.find_games("auto", counts={"train": 1})
    assert str(tmp_path / "xdg" / "seed_mini") in games["train"][0].spec["path"]
    shutil.copytree(pool[0] / "json_2.1.1", tmp_path / ".cache" / "alfworld" / "json_2.1.1")
    assert "Official" in alfworld_games.find_games("auto")[1]


def trials(root, split):
    return sorted(root.glob(f"json_2.1.1/{split}/*/*"))


def cut_short(file):
    file.write_text(file.read_text()[:-3])


@pytest.mark.parametrize(
    "harm, sentence",
    [
        (
            lambda root: shutil.rmtree(root / "json_2.1.1" / "valid_seen"),
            r"No json_2\.1\.1/valid_seen in ",
        ),
        (
            lambda root: [shutil.rmtree(root / "json_2.1.1" / split) for split in SPLITS],
            "No json_2.1.1/train, no json",
        ),
        (
            lambda root: [(t / "game.tw-pddl").unlink() for t in trials(root, "train")],
            "No usable game in .*12 without game.tw-pddl",
        ),
        (
            lambda root: [(t / "traj_data.json").unlink() for t in trials(root, "train")],
            "12 without traj_data.json",
        ),
        (
            lambda root: [shutil.rmtree(t.parent) for t in trials(root, "valid_unseen")],
            "valid_unseen .it is empty",
        ),
        (
            lambda root: (trials(root, "train")[0] / "game.tw-pddl").write_text('{"grammar": "tor'),
            "broken .*game.tw-pddl",
        ),
        (
            lambda root: (trials(root, "train")[0] / "game.tw-pddl").write_text('{"grammar": ""}'),
            "broken .*game.tw-pddl",
        ),
        (
            lambda root: (trials(root, "train")[0] / "traj_data.json").write_text("{}"),
            "broken traj_data.json",
        ),
        (
            lambda root: cut_short(trials(root, "train")[0] / "traj_data.json"),
            "broken traj_data.json",
        ),
        (
            lambda root: (root / "json_2.1.2_tw-pddl.zip").write_text("PK"),
            "still holds json_2.1.2_tw-pddl.zip",
        ),
        (lambda root: (root / r"json_2.1.1\train\x\game.tw-pddl").write_text(""), "backslashes"),
    ],
)
def test_broken_downloads_are_named(download, harm, sentence):
    harm(download)
    for source in ("auto", "official"):
        with pytest.raises(RuntimeError, match=sentence) as error:
            alfworld_games.find_games(source)
        assert "alfworld-download" in str(error.value) and "\n" not in str(error.value)


def test_what_the_stock_environment_leaves_out_is_counted(download):
    train = trials(download, "train")
    train[0].parent.rename(
        train[0].parent.with_name("pick_and_place_with_movable_recep-Mug-Cup-Shelf-1")
    )
    train[2].parent.rename(
        train[2].parent.with_name("pick_and_place_simple-AppleSliced-None-Fridge-2")
    )
    (train[4] / "game.tw-pddl").unlink()
    for trial, name, key, value in (
        (train[6], "game.tw-pddl", "solvable", False),
        (train[8], "game.tw-pddl", "solvable", None),
        (train[10], "traj_data.json", "task_type", "pick_and_dance"),
    ):
        data = json.loads((trial / name).read_text())
        (trial / name).write_text(json.dumps({**data, key: value}))
    games, notice = alfworld_games.find_games("official")
    assert [len(games[split]) for split in SPLITS] == [6, 12, 12]
    for part in (
        "2 movable or sliced",
        "1 without game.tw-pddl",
        "2 not marked solvable",
        "1 of other task types",
    ):
        assert part in notice
    assert {Path(game.spec["path"]).parent for game in games["train"]} == {
        train[i] for i in (1, 3, 5, 7, 9, 11)
    }


# ---- the check at start --------------------------------------------------------------------------
def test_check_engine(pool, download):
    env = envs.make(envs.find("alfworld"), ["games=official"])
    envs.check(env, {"train": pool[1]["train"][:1]})
    games = alfworld_games.find_games("official")[0]
    first = Path(games["train"][0].spec["path"])
    whole = json.loads(first.read_text())

    def check_with(**changes):
        first.write_text(json.dumps({**whole, **changes}))
        envs.check(env, games)

    # As in official files.
    check_with(walkthrough=None)
    with pytest.raises(RuntimeError, match="'dance', is not valid"):
        check_with(walkthrough=["dance"])
    with pytest.raises(RuntimeError, match="does not win"):
        check_with(walkthrough=whole["walkthrough"][:-1])
    with pytest.raises(RuntimeError, match="won before action"):
        check_with(walkthrough=[*whole["walkthrough"], "look"])
    with pytest.raises(RuntimeError, match="do not fit together.*requirements.txt") as error:
        check_with(pddl_domain=whole["pddl_domain"].replace("GotoLocation", "Teleport"))
    assert "\n" not in str(error.value)
    # Without a solution the next game is asked; without any there is nothing to check with.
    unsolved = {"walkthrough": None, "pddl_problem": "(define (problem empty))"}
    check_with(**unsolved)
    with pytest.raises(RuntimeError, match="no task of alfworld has a known solution"):
        envs.check(env, {"train": games["train"][:1]})
