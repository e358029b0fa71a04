"""A world of one's own: the contract (test_environments.py) on a student's file, and on the same
file with one bug at a time; wrong names and settings; and the project without ALFWorld's engine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envs
import seed_mini as sm

ROOT = Path(envs.__file__).parent
GUESS = '''
"""A number to guess: what a world needs at least, and a little more."""
import random

import envs
from envs import SPLITS, Task


class Env(envs.Env):
    """top: the numbers are 1 to this."""
    max_steps = 8
    world = "a guessing game"

    def __init__(self, top: int = 30):
        self.top = top

    def tasks(self, seed):
        numbers = (envs.counted_rng(seed, "numbers").permutation(self.top) + 1).tolist()
        made = {split: [Task(f"{split}-{n}", split, "low" if 2 * n <= self.top else "high",
                             {"number": n}) for n in numbers[i::3]]
                for i, split in enumerate(SPLITS)}
        return made, f"The numbers 1 to {self.top}."

    def reset(self, task):
        self.number = task.spec["number"]
        self.info = {"goal": f"guess the number from 1 to {self.top}", "actions": None,
                     "won": False, "valid": True}
        return "No guess yet.", dict(self.info)

    def step(self, action):
        self.info["valid"] = action in map(str, range(1, self.top + 1))
        if not self.info["valid"]:
            return "That is no number to guess.", 0.0, False, False, dict(self.info)
        guess = int(action)
        self.info["won"] = won = guess == self.number
        said = "Right." if won else "Higher." if guess < self.number else "Lower."
        return said, float(won), won, False, dict(self.info)

    def plan(self, task):
        return f"Guess {task.spec['number']}."

    def hindsight(self, episode):
        if episode.won:
            return "Won.", f"Guess {episode.steps[-1].action}."
        return "Lost: too few halvings.", "Guess the middle of what is left."

    def expert(self, task):
        return [str(task.spec["number"])]
'''
# test of the contract -> a bug that it must find: (correct, wrong).
BUGS = {
    "tasks_are_the_same_for_the_same_seed": ('envs.counted_rng(seed, "numbers").',
                                             "envs.np.random."),
    "splits_share_none": ("numbers[i::3]", "numbers[i:]"),
    "reset_gives_the_same_episode": ('task.spec["number"]\n        self.info',
                                     "random.randint(1, self.top)\n        self.info"),
    "no_text_raises": ("action in map(str, range(1, self.top + 1))",
                       "1 <= int(action.strip('[]') or 0) <= self.top"),
    "an_invalid_action_changes_nothing": ("return \"That", "self.number = 1\n            "
                                                           "return \"That"),
    "the_expert_wins": ('return [str(task.spec["number"])]', 'return ["1", "2", "3"]'),
    "its_actions_survive_the_parser": ("    def plan(", "    def parse(self, response):\n"
                                       "        return response[:1]\n\n    def plan("),
    "the_prompt_ends_its_first_half": ("max_steps", "goal_line = 'You have a goal.'\n"
                                                    "    max_steps"),
    "a_plan_is_one_short_line": ('return f"Guess {task', 'return f"Guess\\n{task'),
    "hindsight_is_one_short_line": ("too few halvings", "too few " + "halvings " * 60),
    "workers_play_as_this_process_does": ('"No guess yet."', 'f"No guess {envs.os.getpid()}"'),
    "metrics_of_two_episodes": ("    def plan(", "    def metrics(self, episodes):\n"
                                "        return {'success': 2.0}\n\n    def plan("),
}


def contract(*options, cwd):
    """Run the contract as a student does: (exit code, output)."""
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "test_environments.py"),
               "-p", "no:cacheprovider", "--tb=line", *options]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_contract_passes_a_correct_world_and_finds_each_bug(tmp_path):
    (tmp_path / "guess.py").write_text(GUESS)
    names = ["--env", "./guess.py", "--env", "guess"]
    for test, (right, wrong) in BUGS.items():
        assert GUESS.count(right) == 1, right
        (tmp_path / f"bug_{test}.py").write_text(GUESS.replace(right, wrong))
        names += ["--env", f"bug_{test}.py"]
    code, output = contract(*names, "--env_args", "top=24", cwd=tmp_path)
    bad = re.findall(r"^(?:FAILED|ERROR) \S*::test_(\w+)\[([^\]]*)", output, re.MULTILINE)
    assert code == 1, output
    assert not [test for test, world in bad if not world.startswith("bug_")], output
    for name in BUGS:
        assert [test for test, world in bad if world.startswith(f"bug_{name}") and name in test], (
            f"the bug of {name} was not found by its test: {bad}")
    # Everything ran, nothing was left out, and nothing but the contract ran.
    assert "skipped" not in output and "deselected" not in output


WRONG = [
    (["--env", "nope"], r"--env 'nope' is neither one of alfworld.* nor a file NAME\.py"),
    (["--env", "./gone.py"], r"--env '\./gone\.py' is neither"),
    (["--env", "./empty.py"], r"--env \./empty\.py: empty\.py has no `class Env\(envs\.Env\)`"),
    (["--env", "./other.py"], r"other\.py has no `class Env\(envs\.Env\)`"),
    (["--env", "./broken.py"], r"broken\.py cannot be imported \(SyntaxError"),
    (["--env", "guess", "--env_args", "top"], r"_args 'top': the settings of guess are top=30"),
    (["--env", "guess", "--env_args", "size=3"], r"'size=3': the settings of guess are top=30"),
    (["--env", "guess", "--env_args", "top=high"], r"top must be int, not 'high'"),
    (["--env", "no_default"], r"no_default: the setting 'tries' of its class Env needs a default"),
    (["--env", "alfworld", "--env_args", "list_actions=maybe"], r"must be bool, not 'maybe'"),
    (["--env", "alfworld", "--env_args", "games=new"], r"auto, official or generated"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A student's folder, and one stands in it."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"guess": GUESS, "empty": "", "other": "class Env:\n    pass\n",
                       "broken": "class Env(\n",
                       "no_default": GUESS.replace("top: int = 30", "tries, top: int = 30"),
                       }.items():
        (tmp_path / f"{name}.py").write_text(text)


@pytest.mark.parametrize("options, sentence", WRONG)
def test_a_wrong_name_or_setting_is_one_sentence_of_the_trainer(folder, capsys, options, sentence):
    assert sm.main(options) == 2
    said = capsys.readouterr().err
    assert said.startswith("seed_mini: ") and said.count("\n") == 1
    assert re.search(sentence, said), said


def test_a_wrong_name_or_setting_is_one_sentence_of_the_contract(folder, tmp_path):
    for options, sentence in (WRONG[0], WRONG[2], WRONG[6]):
        code, output = contract(*options, cwd=tmp_path)
        assert (code, output.strip().count("\n")) == (4, 0) and re.search(sentence, output), output


def test_names_are_found_here_and_by_path(folder, tmp_path):
    assert envs.find("alfworld").file == str(ROOT / "environments" / "alfworld.py")
    for name in ("guess", "./guess.py", str(tmp_path / "guess.py")):
        world = envs.find(name)
        assert (world.name, world.file) == ("guess", str(tmp_path / "guess.py"))
    env = envs.make(world, ["top=9"])
    assert env.settings == {"top": 9} and len(env.tasks(0)[0]["train"]) == 3


BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("alfworld", "textworld", "fast_downward", "mementos"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import envs, skills, losses, policy, seed_mini
env = envs.make(envs.find("alfworld"))
task = envs.Task("t", "train", "pick_and_place_simple", {"goal": "put a mug in shelf"})
episode = envs.Episode("t", "train", task.kind, "put a mug in shelf")
assert env.plan(task) and env.hindsight(episode)[1] and env.parse("Look") == "look"
assert "mug" in env.prompt(episode.goal, "You see a mug 1.", think=True)[0]
sys.exit(seed_mini.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_without_alfworlds_engine_all_but_playing_it_works(folder, tmp_path):
    """Import, wording, plan and hindsight; games on disk or new ones are one sentence."""
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "c")}
    command = [sys.executable, "-c", BLOCKED, "--env", "alfworld", "--env_args", "games=generated"]
    done = subprocess.run([*command, "--out", "runs"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=120, env=surroundings)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(r"seed_mini: .*blocked.*\n", done.stderr), done.stderr
