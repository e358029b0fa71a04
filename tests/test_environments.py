"""What every environment promises, checked on each file in environments/, or on yours:

    python -m pytest tests/test_environments.py --env ./my_world.py --env_args key=value

Read failures from the top: later promises stand on earlier ones. What a world leaves out (an
expert, a plan, hindsight) is skipped, with its name.
"""

import inspect
import json
import math
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import envs
import seed_mini as sm
import skills
from envs import Episode, Step
from runs import Pool

ROOT = Path(envs.__file__).parent
WORLDS = sorted(p.stem for p in (ROOT / "environments").glob("*.py") if "_" not in p.stem)
# Settings in which our own worlds are tested: what needs no download.
SETTINGS = {"alfworld": ["games=generated"]}
ODD = ["", " \n\t\n", "\0", "\x1b[31m\x07\r\x08", "a" * 10_000, "9" * 10_000, "word " * 2_000]
ODD += ["<action></action>", "</action><action>", "<think>", "<|im_end|>", "[" * 500, "search[]"]
ODD += ["{goal} %s {0}", "\u2603\u202e\u0663 \U0001f600 e\u0301", '"; drop \\', "-1", "1e999"]
ODD += ["None", "nan", "look\nlook", "*", "click[", "()", "__import__('os')", "<think>a</think>"]


def pytest_generate_tests(metafunc):
    if "any_world" in metafunc.fixturenames:
        names = metafunc.config.getoption("--env") or WORLDS
        ids = [Path(name).stem for name in names]
        metafunc.parametrize("any_world", names, indirect=True, scope="module", ids=ids)


@pytest.fixture(scope="module")
def any_world(request):
    """A world: env (for its wording; it never plays), player (plays), pool (plays in the trainer's
    way), tasks, a sample of them, and words to try where every text is allowed."""
    option = request.config.getoption
    pairs = option("--env_args") if option("--env") else SETTINGS.get(request.param, [])
    env, player = (envs.make(envs.find(request.param), pairs) for _ in range(2))
    try:
        tasks, notice = env.tasks(0)
    except (ValueError, RuntimeError) as error:
        if option("--env"):
            raise
        pytest.skip(f"no tasks: {error}")
    sample = [s[i * len(s) // 3] for s in tasks.values() for i in range(min(3, len(s)))]
    words = {action for task in sample for action in env.expert(task) or ["a", "1"]}
    with Pool(env, workers=0) as pool:
        yield SimpleNamespace(env=env, player=player, pool=pool, tasks=tasks, notice=notice,
                              sample=sample, words=sorted(words), pairs=pairs, name=request.param)
    player.close()


def another(world):
    """The same world anew, as a worker or a second run would have it."""
    return envs.make(envs.find(world.name), world.pairs)


def needs(world, part):
    if not envs.has(world.env, part):
        pytest.skip(f"this world has no {part}()")


def reread(thing):
    """A task as it arrives in a worker, an episode as rollouts.jsonl gives it back."""
    data = json.loads(json.dumps(asdict(thing)))
    if isinstance(thing, Episode):
        data["steps"] = [Step(**s) for s in data["steps"]]
    return type(thing)(**data)


# --------------------------------------------------------------------------------------------------
# Playing: directly, and as the trainer does
# --------------------------------------------------------------------------------------------------
def check_info(info):
    assert {"goal", "actions", "won", "valid"} <= set(info), "info lacks a key"
    assert isinstance(info["goal"], str) and info["goal"].isprintable() and info["goal"].strip()
    assert info["actions"] is None or all(isinstance(a, str) for a in info["actions"])
    assert isinstance(info["won"], bool) and isinstance(info["valid"], bool)
    assert 0 <= info.get("score", 0.0) <= 1
    # A copy: who hands out one dict again and again must not look as if nothing changed.
    copy = json.loads(json.dumps(info))
    assert copy == info, "info is not plain JSON"
    return copy


def start(env, task):
    """env.reset, and a look at what comes back."""
    observation, info = env.reset(task)
    info = check_info(info)
    assert isinstance(observation, str) and info["valid"] and not info["won"]
    return observation, info


def step(env, action):
    """env.step, likewise: (result, whether the episode is over)."""
    observation, reward, terminated, truncated, info = env.step(action)
    info = check_info(info)
    assert isinstance(observation, str) and math.isfinite(reward)
    assert isinstance(terminated, bool) and isinstance(truncated, bool)
    return (observation, reward, terminated, truncated, info), terminated or truncated


def trace(env, task, actions):
    """All that an environment says to these actions."""
    seen, over = [start(env, task)], False
    while not over and len(seen) <= len(actions):
        result, over = step(env, actions[len(seen) - 1])
        seen.append(result)
    return json.loads(json.dumps(seen))


def scripts(world, task):
    """Ways to play a task: ten actions at random, and the expert's."""
    rng, walk, over, info = random.Random(task.id), [], False, start(world.player, task)[1]
    while not over and len(walk) < 10:
        walk.append(rng.choice(info["actions"] or world.words))
        (*_, info), over = step(world.player, walk[-1])
    return [walk, *filter(None, [world.env.expert(task)])]


class Scribe:
    """A policy with one token a character: it writes what a test wants it to write."""
    end_id, first, later = 0, ([], []), ([], [])

    def encode(self, text):
        return [ord(c) + 1 for c in text]

    def decode(self, ids):
        return "".join(chr(i - 1) for i in ids if i)


def play(world, tasks, say, limit, pool=None):
    """Episodes by the trainer's own turns: in episode i, say(i, n, actions) is response n."""
    env, scribe, counters, pool = world.env, Scribe(), Counter(), pool or world.pool
    cfg = SimpleNamespace(think=False, max_context=10**9, max_response=10**6, max_steps=limit,
                          invalid_penalty=env.invalid_penalty)
    starts = pool.reset(tasks)
    assert not any("end" in info for _, info in starts), starts
    infos = dict(enumerate(info for _, info in starts))
    rolls = [sm.start_rollout(scribe, env, cfg, task, observation, info, "")
             for task, (observation, info) in zip(tasks, starts)]
    alive = list(infos)
    while alive:
        said = {i: say(i, len(rolls[i].episode.steps), infos[i]["actions"]) for i in alive}
        results = pool.step({i: env.parse(text) for i, text in said.items()})
        for i, text in said.items():
            ids = [*scribe.encode(text), 0]
            sm.take_turn(scribe, env, cfg, rolls[i], ids, [0.0] * len(ids), results[i], counters)
            infos[i] = results[i][-1]
        alive = [i for i in alive if not rolls[i].episode.end]
    return [roll.episode for roll in rolls]


def at_random(world):
    """What play() says: some action or other, one in five odd."""
    def say(i, n, actions):
        rng = random.Random(f"{i} {n}")
        return rng.choice(ODD if rng.random() < 0.2 else actions or world.words)
    return say


def by_expert(world, tasks, pattern="{}"):
    """(tasks that an expert can do, what play() says to win them)."""
    known = [(task, actions) for task in tasks if (actions := world.env.expert(task))]
    return [task for task, _ in known], lambda i, n, _: pattern.format(known[i][1][n])


def steps_allowed(world):
    """The least step limit among the common one and those of the profiles."""
    given = [profile.get("max_steps") for profile in world.env.defaults.values()]
    return min(filter(None, [world.env.max_steps, *given]))


def lost_episodes(world):
    """Lost ones: by chance, by nonsense, and one that ended before its first step."""
    random_ones = play(world, world.sample, at_random(world), 8)
    nonsense = play(world, world.sample[:1], lambda i, n, actions: "", 3)
    task = world.sample[0]
    return [e for e in random_ones + nonsense if not e.won] + [
        Episode(task.id, task.split, task.kind, nonsense[0].goal, end="context limit")]


# --------------------------------------------------------------------------------------------------
# The contract
# --------------------------------------------------------------------------------------------------
def test_tasks_are_the_same_for_the_same_seed_and_splits_share_none(any_world):
    tasks, every = any_world.tasks, [task for split in any_world.tasks.values() for task in split]
    assert any_world.notice.isprintable() and set(tasks) <= set(envs.SPLITS) and tasks["train"]
    assert another(any_world).tasks(0)[0] == tasks
    assert len({task.id for task in every}) == len(every), "two tasks have one id"
    assert all(task.split == split for split in tasks for task in tasks[split])
    assert {task.kind for task in every} <= set(any_world.env.kinds or [t.kind for t in every])
    assert list(map(reread, every)) == every, "a task does not survive JSON"
    owner = {}
    for task in every:
        spec = json.dumps(task.spec, sort_keys=True)
        assert owner.setdefault(spec, task.split) == task.split, f"{spec} is in two splits"


def test_reset_gives_the_same_episode_again_and_elsewhere(any_world):
    player, sample = any_world.player, any_world.sample
    for task, other in zip(sample, sample[1:] + sample[:1]):
        for script in scripts(any_world, task):
            first = trace(player, task, script)
            assert trace(player, task, script) == first, "a second time it was another episode"
            # Another task, and half of another way through this one.
            trace(player, other, scripts(any_world, other)[0])
            trace(player, task, script[:len(script) // 2])
            assert trace(player, task, script) == first, "what was played before made a difference"
            fresh = another(any_world)
            assert trace(fresh, reread(task), script) == first, "a new instance differs"
            fresh.close()


def test_no_text_raises(any_world):
    env, rng, player = any_world.env, random.Random(0), any_world.player
    for task in any_world.sample[::3]:
        pieces = [*ODD[2:], start(player, task)[1]["goal"], *any_world.words, "<action>", " "]
        mixed = ["".join(rng.choices(pieces, k=3))[:20_000] for _ in range(60)]
        for text in ODD + mixed:
            for action in (text, env.parse(text)):
                assert isinstance(action, str)
                if step(player, action)[1]:
                    start(player, task)


def test_an_invalid_action_changes_nothing(any_world):
    player = any_world.player
    for task in any_world.sample[::3]:
        invalid = []
        for text in ODD:
            start(player, task)
            invalid += [text] * (not step(player, text)[0][-1]["valid"])
        for script in scripts(any_world, task):
            plain = trace(player, task, script)
            info, stopped = start(player, task)[1], False
            for n, action in enumerate(script):
                for text in invalid[n % 3::3]:
                    (_, reward, *_, after), over = step(player, text)
                    # Here the text means something, so this way ends.
                    if stopped := after["valid"]:
                        break
                    # The penalty is the trainer's.
                    assert reward == 0 and not over
                    assert {**after, "valid": info["valid"]} == info
                if stopped:
                    break
                result = step(player, action)[0]
                assert json.loads(json.dumps(result)) == plain[n + 1]
                info = result[-1]


TAGGED = "<think>So be it.</think>\n<action>{}</action>"


@pytest.mark.parametrize("pattern", ["{}", TAGGED], ids=["bare", "thinking"])
def test_the_expert_wins_and_its_actions_survive_the_parser(any_world, pattern):
    needs(any_world, "expert")
    tasks, say = by_expert(any_world, any_world.sample, pattern)
    assert tasks, "the expert knows no task of the sample"
    for task in tasks:
        for action in any_world.env.expert(task):
            assert any_world.env.parse(pattern.format(action)) == action
        assert envs.failure(any_world.player, task, any_world.env.expert(task)) == ""
    for episode in play(any_world, tasks, say, steps_allowed(any_world)):
        assert episode.end == "won", f"{episode.task_id}: {episode.end}"
        assert 0 < episode.score <= 1 and all(s.valid for s in episode.steps)


def test_the_prompt_ends_its_first_half_with_the_goal(any_world):
    env = any_world.env
    for task in any_world.sample:
        observation, info = start(any_world.player, task)
        for think in (False, True):
            before, after = env.prompt(info["goal"], observation, think=think,
                                       actions=info["actions"])
            assert before.endswith("\n") and info["goal"] in before.splitlines()[-1]
            assert observation in after and ("<action>" in after) == think
        turn = env.turn(observation, actions=info["actions"])
        assert observation in turn
        assert not env.list_actions or all(action in turn for action in info["actions"] or [])


def one_short_line(text):
    assert text.isprintable() and skills.clean_skill(text) == (text, False), text
    return text


def test_a_plan_is_one_short_line_from_the_task_alone(any_world):
    needs(any_world, "plan")
    plans = [one_short_line(any_world.env.plan(task)) for task in any_world.sample]
    assert any(plans) and plans == [another(any_world).plan(reread(t)) for t in any_world.sample]


def test_hindsight_is_one_short_line_from_the_episode_alone(any_world):
    needs(any_world, "hindsight")
    tasks, say = by_expert(any_world, any_world.sample)
    won = play(any_world, tasks, say, steps_allowed(any_world)) if tasks else []
    for episodes in filter(None, (won, lost_episodes(any_world))):
        pairs = [tuple(map(one_short_line, any_world.env.hindsight(e))) for e in episodes]
        assert any(skill for _, skill in pairs), f"no skill for episodes with won={episodes[0].won}"
        assert pairs == [tuple(another(any_world).hindsight(e)) for e in map(reread, episodes)]


def test_workers_play_as_this_process_does(any_world):
    tasks = any_world.sample[:5]
    here = play(any_world, tasks, at_random(any_world), 8)
    assert list(map(reread, here)) == here, "an episode does not survive JSON"
    assert all(0 <= e.score <= 1 for e in here)
    with Pool(any_world.env, workers=2) as pool:
        assert play(any_world, tasks, at_random(any_world), 8, pool) == here
        assert not any(pool.counters.values()), pool.counters


def test_metrics_of_two_episodes_are_well_formed(any_world):
    one, two = lost_episodes(any_world)[-2:]
    two.won, two.score = True, 1.0
    found = any_world.env.metrics([one, two])
    assert json.loads(json.dumps(found))["n"] == 2 and found["wins"] == 1
    for row in (found, *found["by_kind"].values()):
        assert 0 <= row["interval"][0] <= row["success"] <= row["interval"][1] <= 1
    assert sum(row["n"] for row in found["by_kind"].values()) == 2
    assert 0 <= found["macro"] <= 1 and 0 <= found.get("score", 0) <= 1
