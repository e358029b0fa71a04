"""ALFWorld's engine against the stock one, the environment's manners, the pool under faults, and
the text of prompts and actions."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import engine_benchmark
import envs
import runs
import seed_mini as sm
from environments import alfworld, alfworld_engine, alfworld_games
from envs import Task
from runs import Pool

ROOT = Path(envs.__file__).parent
needs_stock = pytest.mark.skipif(
    sys.version_info >= (3, 13),
    reason="the stock engine raises NameError from Python 3.13 on; ours does not",
)
# ALFWorld with commands that do to a worker what bugs would: hang, die, raise.
FAULTY = Path(__file__).with_name("faulty_world.py")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Translations of these tests' games stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """Twelve generated games, two of each task type, in the order of TASK_TYPES."""
    root = tmp_path_factory.mktemp("generated") / "games"
    alfworld_games.generate_games(root, 5, {"train": 12})
    return sorted(
        alfworld_games.read_games(root, ("train",))[0]["train"],
        key=lambda game: alfworld_games.TASK_TYPES.index(game.kind),
    )


def world(file="alfworld"):
    """What a pool needs of ALFWorld, or of the world in another file."""
    return envs.make(envs.find(str(file)), ["games=generated"])


@pytest.fixture(scope="module")
def official():
    """Official games, today's wording first (18, sorted by id within a split), then three with the
    older wording."""
    folder = os.environ.get("SEED_MINI_ALFWORLD_GAMES")
    if not folder:
        pytest.skip("SEED_MINI_ALFWORLD_GAMES is not set: no official ALFWorld games to test with")
    return [
        game
        for part in ("current", "old_wording")
        for split in alfworld_games.read_games(Path(folder) / part)[0].values()
        for game in split
    ]


def solution(game):
    data, traj = (
        json.loads(Path(game.spec["path"]).with_name(name).read_text())
        for name in ("game.tw-pddl", "traj_data.json")
    )
    return alfworld_games.solve(data, traj)


def play(env, game, seed, n):
    """n random commands, some of them wrong; the list of everything that reset() and step()
    returned."""
    rng, seen = random.Random(seed), [env.reset(game)]
    for _ in range(n):
        seen.append(
            env.step(
                rng.choice(seen[-1][-1]["actions"])
                if rng.random() < 0.9
                else "open the pod bay doors"
            )
        )
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


def stock_alfworld(game):
    """The package's own AlfredTWEnv with this one game, set up as its users do."""
    from alfworld.agents.environment import get_environment

    config = {
        "env": {
            "goal_desc_human_anns_prob": 0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        "dataset": {
            "eval_ood_data_path": str(Path(game.spec["path"]).parent),
            "num_eval_games": -1,
        },
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 1000}},
    }
    return get_environment("AlfredTWEnv")(config, train_eval="eval_out_of_distribution").init_env(
        batch_size=1
    )


# --------------------------------------------------------------------------------------------------
# The engine: nothing lost
# --------------------------------------------------------------------------------------------------
def compare_with_alfworld(game, seed, n):
    """Half the known solution, n random or wrong commands; then the whole solution. Returns the
    steps compared."""
    stock, ours, rng = stock_alfworld(game), alfworld.Env(), random.Random(seed)
    commands, compared = solution(game), 0
    for script in (commands[: len(commands) // 2] + [None] * n, commands):
        (text,), infos = stock.reset()
        observation, info = ours.reset(game)
        banner, task = "-= Welcome to TextWorld, ALFRED! =-", f"Your task is to: {info['goal']}."
        assert text == f"{banner}\n\n{observation}\n\n{task}"
        assert info["actions"] == infos["admissible_commands"][0]
        admissible = info["actions"]
        for command in script:
            command = command or (
                rng.choice(info["actions"]) if rng.random() < 0.9 else "look at nothing"
            )
            (text,), (score,), (done,), infos = stock.step([command])
            observation, reward, terminated, truncated, info = ours.step(command)
            assert (observation, terminated, float(terminated)) == (text, done, score), command
            # The same commands in the same order.
            assert info["actions"] == infos["admissible_commands"][0], command
            assert info["won"] == infos["won"][0] and not truncated
            assert info["valid"] == (command in admissible)
            assert reward == 10.0 * info["won"]
            admissible = info["actions"]
            compared += 1
            if done:
                break
    assert info["won"]
    ours.close()
    return compared


@needs_stock
@pytest.mark.slow
def test_text_is_that_of_AlfredTWEnv_on_generated_games(games):
    assert (
        sum(compare_with_alfworld(game, seed, 40) for seed, game in enumerate(games[1::2])) >= 200
    )


@needs_stock
@pytest.mark.slow
def test_text_is_that_of_AlfredTWEnv_on_official_games_of_both_wordings(official):
    small = [
        next(g for g in official[6:18] if g.kind == kind)
        for kind in ("look_at_obj_in_light", "pick_two_obj_and_place")
    ]
    old = next(game for game in official[18:] if game.kind == "pick_and_place_simple")
    assert any(command.startswith("put ") for command in solution(old))
    assert (
        sum(compare_with_alfworld(game, seed, 40) for seed, game in enumerate([*small, old])) >= 90
    )


@needs_stock
@pytest.mark.slow
def test_two_thousand_steps_are_identical_and_at_least_ten_times_faster(games, official, capsys):
    steps = 0
    for some, n in ((games, 130), (official[6:12] + official[18:19], 70)):
        assert engine_benchmark.benchmark([game.spec["path"] for game in some], steps=n) == 0
        rows = {row[0]: row for row in map(str.split, capsys.readouterr().out.splitlines())}
        assert (
            float(rows["reset"][3].rstrip("x")) >= 10 and float(rows["step"][3].rstrip("x")) >= 10
        ), rows
        steps += int(rows["step"][4])
    assert steps >= 2000


@needs_stock
def test_benchmark_command_prints_its_table(games):
    command = [
        sys.executable,
        engine_benchmark.__file__,
        "--games",
        str(Path(games[0].spec["path"]).parent),
        "--steps",
        "5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "first load" in done.stdout and done.stdout.strip().endswith(
        "of 1 games compared: 0 differences"
    )


# --------------------------------------------------------------------------------------------------
# One environment
# --------------------------------------------------------------------------------------------------
def test_a_reset_and_a_second_slot_start_and_go_on_alike(games):
    one, two = alfworld.Env(), alfworld.Env()
    first = play(one, games[0], 0, 12)
    # Something else in between.
    play(one, games[3], 1, 12)
    # And another way through the same game.
    play(one, games[0], 2, 12)
    assert play(one, games[0], 0, 12) == first == play(two, games[0], 0, 12)
    assert first[0][1]["goal"] == games[0].spec["goal"]
    one.close(), two.close()


@pytest.mark.parametrize(
    "text",
    [
        "fly to the moon",
        "",
        "LOOK",
        "look\nlook",
        "go to {r} 1",
        "<|im_end|>",
        "\u2603 #intro#",
        "look " * 9999,
    ],
)
def test_an_invalid_action_costs_the_penalty_and_a_step_and_changes_nothing(games, text):
    env = alfworld.Env()
    _, start = env.reset(games[0])
    result = env.step(text)
    assert result == ("Nothing happens.", 0.0, False, False, {**start, "valid": False})
    roll, counters = trainers_turns(env, [result], max_steps=30, invalid_penalty=0.25)
    assert roll.episode.reward == -0.25 and len(roll.episode.steps) == 1
    assert not roll.episode.end and counters["invalid actions"] == 1
    env.close()


def trainers_turns(env, results, **limits):
    """The environment's results as the trainer counts them (step limit, penalty): the rollout, with
    a policy that always writes one letter, and the counters."""
    policy = SimpleNamespace(
        end_id=0,
        first=([], []),
        later=([], []),
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids[:-1]).decode(),
    )
    cfg = SimpleNamespace(think=False, max_context=10**6, max_response=8, **limits)
    info = dict(goal="g", actions=None, won=False, valid=True)
    task, counters = Task("t", "train", "k", {}), Counter()
    roll = sm.start_rollout(policy, env, cfg, task, "start", info, "")
    for result in results:
        assert not roll.episode.end
        sm.take_turn(policy, env, cfg, roll, [97, 0], [-0.1, -0.1], result, counters)
    return roll, counters


def test_a_win_ends_the_episode_even_on_the_last_step_allowed(games):
    commands = solution(games[4])
    env = alfworld.Env()
    env.win_reward = 7.0
    env.reset(games[4])
    results = [env.step(command) for command in commands]
    quiet = [(0.0, False, False)] * (len(commands) - 1)
    assert [result[1:4] for result in results] == [*quiet, (7.0, True, False)]
    assert results[-1][-1]["won"]
    roll, _ = trainers_turns(env, results, max_steps=len(commands), invalid_penalty=0.1)
    assert (roll.episode.end, roll.episode.reward, roll.episode.score) == ("won", 7.0, 1.0)
    env.close()
    with Pool(world(), workers=0) as pool:
        with pytest.raises(RuntimeError, match="no running episode"):
            pool.step({0: "look"})
        pool.reset([games[4]])
        for command in commands:
            over = pool.step({0: command})[0][2]
        assert over
        with pytest.raises(RuntimeError, match="no running episode"):
            pool.step({0: "look"})


def test_an_episode_ends_after_max_steps_invalid_ones_included(games):
    env = alfworld.Env()
    env.reset(games[0])
    results = [env.step(action) for action in ("look", "nonsense", "look")]
    assert [result[2:4] for result in results] == [(False, False)] * 3
    for steps, end in ((2, ""), (3, "step limit")):
        roll, counters = trainers_turns(env, results[:steps], max_steps=3, invalid_penalty=0.1)
        assert (roll.episode.end, len(roll.episode.steps)) == (end, steps)
        assert counters["ended: step limit"] == (end == "step limit")
        assert [step.valid for step in roll.episode.steps] == [True, False, True][:steps]
    env.close()


def broken_game(folder, game, change):
    data = json.loads(Path(game.spec["path"]).read_text())
    change(data)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(data))
    return Task("broken", "train", game.kind, {"path": str(path)})


def impossible_goal(data):
    data["pddl_problem"] = (
        data["pddl_problem"]
        .replace("(isClean", "(isNothing")
        .replace("(inReceptacle ?o ?r)", "(isUnknown ?o)")
    )


def duplicate_object(data):
    line = next(line for line in data["pddl_problem"].splitlines() if line.endswith(" - object"))
    data["pddl_problem"] = data["pddl_problem"].replace(line, f"{line}\n{line}")


@pytest.mark.parametrize(
    "change",
    [
        impossible_goal,
        duplicate_object,
        lambda data: data.pop("grammar"),
        lambda data: data.update(pddl_problem="(define (problem"),
        lambda data: data.update(grammar=data["grammar"][:999]),
    ],
)
def test_an_unplayable_game_is_one_error_that_names_the_file(games, tmp_path, change):
    env, argv, stdout = alfworld.Env(), list(sys.argv), sys.stdout
    with pytest.raises(RuntimeError, match=str(tmp_path)):
        env.reset(broken_game(tmp_path, games[0], change))
    # The translator overwrites the one and swaps the other.
    assert sys.argv == argv and sys.stdout is stdout
    # And the slot is still good.
    assert env.reset(games[0])[1]["goal"]
    env.close()


def test_a_missing_file_and_one_that_is_not_json_are_errors_too(games, tmp_path):
    env, path = alfworld.Env(), tmp_path / "game.tw-pddl"
    with pytest.raises(RuntimeError, match=str(path)):
        env.reset(Task("gone", "train", "", {"path": str(path)}))
    path.write_text("PK\x03")
    with pytest.raises(RuntimeError, match=str(path)):
        env.reset(Task("zip", "train", "", {"path": str(path)}))
    env.close()


def test_a_game_file_that_is_rewritten_is_read_again(games, tmp_path):
    env = alfworld.Env()
    first = env.reset(broken_game(tmp_path, games[0], lambda data: None))
    game = broken_game(tmp_path, games[2], lambda data: None)
    os.utime(game.spec["path"], ns=(1, 1))
    assert env.reset(game)[0] != first[0]
    env.close()


def test_the_translation_cache_may_be_damaged_or_impossible(games, tmp_path, monkeypatch):
    env = alfworld.Env()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    starts = []
    for prepare in (
        lambda: None,
        lambda: [file.write_bytes(b"junk") for file in (tmp_path / "cache").rglob("*.json.z")],
        lambda: monkeypatch.setenv("XDG_CACHE_HOME", os.devnull),
    ):
        prepare()
        alfworld_engine._load_game.cache_clear()
        # Another game, so that the next reset loads.
        env.reset(games[2])
        starts.append(env.reset(games[0]))
    assert starts[0] == starts[1] == starts[2]
    assert list((tmp_path / "cache").rglob("*.json.z"))
    env.close()


def test_a_closed_slot_hands_its_engine_on(games):
    env = alfworld.Env()
    # Wording needs no engine, and takes none.
    assert env._engine is None
    env.reset(games[0])
    engine = env._engine
    env.close(), env.close()
    again = alfworld.Env()
    assert again.reset(games[0]) and again._engine is engine
    again.close()


def test_the_alfworld_package_creates_no_folder(tmp_path):
    """Importing it creates ALFWORLD_DATA or ~/.cache/alfworld, and fails where it cannot: not
    here."""
    (tmp_path / "file").write_text("")
    code = (
        "import os\nfrom environments import alfworld_engine\nalfworld_engine.take_engine()\n"
        "print(os.environ['ALFWORLD_DATA'])"
    )
    for data in ({"ALFWORLD_DATA": str(tmp_path / "file" / "data")}, {"ALFWORLD_DATA": ""}):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HOME": str(tmp_path / "home"), **data},
        )
        assert (done.returncode, done.stdout) == (0, data["ALFWORLD_DATA"] + "\n"), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


# --------------------------------------------------------------------------------------------------
# The pool
# --------------------------------------------------------------------------------------------------
def alive(pid):
    """False for a process that is gone or a zombie nobody has reaped yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for_end(pids, seconds=10):
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def pool_episode(pool, games, seeds, n):
    """As play(), in all slots of a pool at once."""
    rngs, seen = [random.Random(seed) for seed in seeds], [[start] for start in pool.reset(games)]
    for _ in range(n):
        actions = {
            slot: rng.choice(seen[slot][-1][-1]["actions"])
            if rng.random() < 0.9
            else "open the pod bay doors"
            for slot, rng in enumerate(rngs)
            if not any(seen[slot][-1][2:4])
        }
        for slot, result in pool.step(actions).items():
            seen[slot].append(result)
    return seen


def test_a_pool_plays_as_single_environments_do(games):
    chosen, env = [games[0], games[0], games[5], games[6], games[11]], alfworld.Env()
    with Pool(world(), workers=2) as pool:
        seen = pool_episode(pool, chosen, range(5), 12)
        again = pool_episode(pool, chosen[::-1], range(5), 12)
        assert set(pool.counters.values()) == {0}
    assert seen == [play(env, game, seed, 12) for seed, game in enumerate(chosen)]
    assert again == [play(env, game, seed, 12) for seed, game in enumerate(chosen[::-1])]
    env.close()


def test_faults_end_one_episode_and_restore_all_others_exactly(games):
    # Slots 0-3 on the first worker, 4-7 on the second.
    chosen = [games[0]] * 4 + [games[3]] * 4
    with Pool(world(FAULTY), workers=2) as pool, Pool(world(), workers=1) as calm:
        seen, _ = pool_episode(pool, chosen, range(8), 6), pool_episode(calm, chosen, range(8), 6)
        won = {slot for slot in range(8) if any(seen[slot][-1][2:4])}
        # Or the test below would test less than it says.
        assert not won
        # Only now: the first reset of a worker imports the engine.
        pool.step_timeout = 1.5
        faults = {1: "hang", 2: "inventory", 4: "raise", 6: "die", 7: "look"}
        results = pool.step(faults)
        ends = {slot: result[-1].get("end") for slot, result in results.items()}
        assert ends == {1: "env timeout", 2: None, 4: "env died", 6: "env died", 7: None}
        assert all(
            results[slot][:4] == ("", 0.0, False, True) and results[slot][-1]["reason"]
            for slot in (1, 4, 6)
        )
        assert (
            "raised on request" in results[4][-1]["reason"]
            and results[1][-1]["goal"] == games[0].spec["goal"]
        )
        assert {slot: results[slot] for slot in (2, 7)} == calm.step({2: "inventory", 7: "look"})
        assert pool.counters == {
            "env timeout": 1,
            "env died": 2,
            "workers restarted": 2,
            "slots replayed": 5,
        }
        with pytest.raises(RuntimeError, match="no running episode in slot 6"):
            pool.step({6: "look"})
        rng = random.Random(0)
        # Every survivor goes on from exactly where it was.
        for _ in range(6):
            infos = calm.step({slot: "look" for slot in (0, 2, 3, 5, 7)})
            assert pool.step({slot: "look" for slot in (0, 2, 3, 5, 7)}) == infos
            actions = {slot: rng.choice(infos[slot][-1]["actions"]) for slot in (0, 2, 3, 5, 7)}
            assert pool.step(actions) == calm.step(actions)
        assert len(pool.reset(chosen)) == 8 and set(pool.step({1: "look", 6: "look"})) == {1, 6}


def test_an_episode_lost_while_it_is_replayed_is_reported_when_it_is_next_stepped(games):
    with Pool(world(FAULTY), workers=1) as pool:
        pool.reset(games[:3])
        # As if it had just survived this.
        pool._running[2] = pool._running[2]._replace(actions=["die"])
        results = pool.step({0: "die", 1: "look"})
        assert (results[0][-1]["end"], results[1][0][:3]) == ("env died", "You")
        assert pool.step({1: "look", 2: "look"})[2][-1]["end"] == "env died"
        assert pool.counters == {
            "env timeout": 0,
            "env died": 2,
            "workers restarted": 2,
            "slots replayed": 3,
        }


def test_a_game_the_workers_cannot_play_ends_its_episode_and_no_other(games, tmp_path):
    bad = broken_game(tmp_path, games[0], lambda data: data.pop("grammar"))
    with Pool(world(), workers=2) as pool:
        starts = pool.reset([games[0], bad, games[1], games[2]])
        ends = [info.get("end") for _, info in starts]
        assert ends == [None, "task unplayable", None, None]
        assert str(tmp_path) in starts[1][1]["reason"]
        assert pool.counters["task unplayable"] == 1
        assert set(pool.step({0: "look", 2: "look", 3: "look"})) == {0, 2, 3}
        assert [info["end"] for _, info in pool.reset([bad, bad])] == ["task unplayable"] * 2
        # And the pool is still good.
        assert pool.reset(games[:2])[1][1]["goal"] == games[1].spec["goal"]


def test_a_worker_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(runs.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="worker did not start"):
        Pool(world(), workers=1)


def test_nothing_is_left_after_close_or_after_an_error(games):
    pool = Pool(world(), workers=2)
    pids = [worker.pid for worker in pool._workers]
    assert all(map(alive, pids))
    pool.close(), pool.close()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        pool.reset(games[:1])
    with pytest.raises(ZeroDivisionError), Pool(world(), workers=1) as pool:
        pids = [worker.pid for worker in pool._workers]
        1 / 0
    assert not any(map(alive, pids))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_nothing_is_left_after_ctrl_c_or_kill_even_if_a_worker_hangs(games, how):
    code = (
        "import envs, json, runs, signal, sys\n"
        # A shell's background job ignores it, and hands that down.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "env = envs.make(envs.find(sys.argv[2]), ['games=generated'])\n"
        "pool = runs.Pool(env, workers=2)\n"
        "pool.reset([envs.Task(**json.loads(sys.argv[1]))] * 2)\n"
        "print(json.dumps([worker.pid for worker in pool._workers]), flush=True)\n"
        "pool.step({0: 'look', 1: 'hang'})\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(vars(games[0])), str(FAULTY)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids = json.loads(parent.stdout.readline())
    time.sleep(0.3)
    # As a terminal does: to the whole process group.
    os.killpg(parent.pid, how)
    parent.wait(30)
    parent.stdout.close()
    assert wait_for_end(pids)


# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "response, action",
    [
        ("go to shelf 1", "go to shelf 1"),
        ("  Go to Shelf 1.\n", "go to shelf 1"),
        (
            "<think>I need a mug.</think><action>take mug 1 from shelf 1</action>",
            "take mug 1 from shelf 1",
        ),
        (
            "<think>x</think>\n<action>\n  open fridge 1\n</action>\nThat should work.",
            "open fridge 1",
        ),
        ("<action>look</action> or rather <action>inventory</action>", "inventory"),
        ("<think>a\nb</think>\n\nheat mug 1 with microwave 1", "heat mug 1 with microwave 1"),
        ("<think>maybe <action>look</action></think>go to bed 1", "go to bed 1"),
        ("<think></think><action>go to desk 1", "go to desk 1"),
        ("<think>no end of thinking <action>look</action>", "look"),
        ("<think>I should go to the shelf and then", ""),
        ("Action: `examine shelf 2`", "examine shelf 2"),
        ("**Action:** use desklamp 1", "use desklamp 1"),
        ("Thought: the mug is hot.\nAction: move mug 1 to shelf 1", "move mug 1 to shelf 1"),
        ('> "put mug 1 in/on shelf 1"', "put mug 1 in/on shelf 1"),
        ("```\nclose drawer 3\n```", "close drawer 3"),
        ("- look<|im_end|>", "look"),
        ("<ACTION>Look</ACTION>", "look"),
        ("go  to\tcabinet 12", "go to cabinet 12"),
        ("<action></action>", ""),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_parse_action(response, action):
    assert alfworld.Env().parse(response) == action


@pytest.mark.parametrize(
    "response, action",
    [
        ("click[Buy Now]", "click[Buy Now]"),
        (
            "<think>a [b]</think><action>search[Red Shoes, size 9]</action>",
            "search[Red Shoes, size 9]",
        ),
        ("*", "*"),
        ("<action> A </action>", "A"),
        ("Action: push Left", "push Left"),
        ("<think>never ends", ""),
        ("what  is\n this", "this"),
    ],
)
def test_the_parser_of_other_worlds_leaves_case_and_brackets_alone(response, action):
    assert envs.Env().parse(response) == action


@pytest.mark.parametrize("think", [False, True])
def test_the_skill_goes_right_after_the_task_line(think):
    goal, seen = "put a hot mug in shelf", "You are in a room."
    before, after = alfworld.Env().prompt(goal, seen, think=think, actions=["look"])
    assert before.splitlines() == [
        "You are an agent in a household text game.",
        "Your task is to: put a hot mug in shelf.",
    ]
    assert before.endswith(".\n") and after.endswith("\nYou are in a room.")
    assert ("<think></think>" in after and "<action></action>" in after) == think


def test_admissible_commands_are_one_line_after_the_observation():
    seen, commands = "You see a mug 1.", ["help", "look"]
    assert alfworld.Env().turn(seen, actions=commands) == seen
    env = alfworld.Env(list_actions=True)
    assert env.turn(seen) == seen
    text = env.turn(seen, actions=commands)
    assert text == "You see a mug 1.\nAdmissible commands: help, look."
    assert env.prompt("t", seen, think=False, actions=commands)[1].endswith(text)


def test_every_admissible_command_survives_the_parser(games):
    env = alfworld.Env()
    for result in play(env, games[7], 0, 20):
        assert [env.parse(command) for command in result[-1]["actions"]] == result[-1]["actions"]
    env.close()
