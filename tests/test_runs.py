"""runs.py, and whole runs by the command line: killed and resumed, their arms, bad options.

The oracle is the same run undisturbed, bit for bit.
"""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import runs
import seed_mini as sm
from environments import alfworld
from test_seed_mini import BASE, REPO, SMALL, config, contents, launch
from test_seed_mini import games_root  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A SEED run that nobody disturbed: its folder and what it printed."""
    out = tmp_path_factory.mktemp("runs")
    code, printed, err = launch("--out", out, "--name", "whole")
    assert (code, err) == (0, "")
    return out / "whole", printed


def metrics_of(folder, stage):
    """The metrics lines of a stage."""
    return [m for m in runs.read_jsonl(folder / "metrics.jsonl") if m["stage"] == stage]


def weights_of(folder, update):
    """Checksum of the weights in a checkpoint."""
    policy = folder / "checkpoints" / f"update-{update:06d}" / "policy"
    return runs.sha256(policy / "model.safetensors")


def checkpoints(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def refused(result, *words):
    """Whether main() ended with one sentence that has these words."""
    code, _, err = result
    return code == 2 and err.count("\n") == 1 and all(word in err for word in words)


# --------------------------------------------------------------------------------------------------
# 1. Runs
# --------------------------------------------------------------------------------------------------
def test_what_a_run_leaves(finished):
    folder, printed = finished
    metrics = runs.read_jsonl(folder / "metrics.jsonl")
    assert checkpoints(folder) == ["update-000000", "update-000002", "update-000003"]
    # The value used, not None.
    saved = json.loads((folder / "config.json").read_text())
    assert saved["lr"] == sm.PROFILES["tiny"]["lr"]
    assert [(m["at"], m["skill_in_context"]) for m in metrics if m["stage"] == "eval"] == [
        ("base", False),
        ("base", True),
        ("sft", False),
        ("sft", True),
        ("2", False),
        ("3", False),
    ]
    rl = metrics_of(folder, "rl")
    assert [m["update"] for m in rl] == [1, 2, 3]
    for m in rl:
        json.dumps(m, allow_nan=False)
        assert m["parse_rate"] == 0.75 and m["counters"]["analysis no json"] == 1
        assert m["sampler_gap"] < 1e-3 and m["opd_loss"] != 0 and m["loss"] != m["rl_loss"]
    rows = runs.read_jsonl(folder / "skills.jsonl")
    expected = [("sft", 0)] * 4 + [("rl", u) for u in (1, 2, 3) for _ in range(4)]
    assert [(r["stage"], r["update"]) for r in rows] == expected
    for r in rows:
        assert bool(r["skill"]) == (r["status"] in ("ok", "repaired"))
        assert (r["delta_mean"] is not None) == (r["stage"] == "rl" and bool(r["skill"]))
        assert r["text"] == ("" if r["skill"] else "no skill")
    episodes = runs.read_jsonl(folder / "rollouts.jsonl")
    assert len(episodes) == 2 + 3 * 2 and all(e["steps"] and e["end"] for e in episodes)
    report = (folder / "report.md").read_text()
    assert all(task in report for task in metrics[-1]["tasks"]) and "Wilson" in report
    assert "\x1b" not in printed


def test_two_runs_with_one_seed_are_one_run(finished, tmp_path):
    assert launch("--out", tmp_path, "--name", "again")[0] == 0
    assert contents(tmp_path / "again") == contents(finished[0])
    launch("--out", tmp_path, "--name", "other", "--seed", 1, "--sft_from", finished[0])
    assert contents(tmp_path / "other")[2] != contents(finished[0])[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing(finished, tmp_path, workers):
    code, _, err = launch("--out", tmp_path, "--name", "whole", "--workers", workers)
    assert (code, err) == (0, "") and contents(tmp_path / "whole") == contents(finished[0])


def stop_at(patch, where):
    """Make the next call that fits `where` end as Ctrl-C (or a kill) does: in the middle of
    things."""
    owner, name, fits, first = where
    real = getattr(owner, name)

    def stopped(*args, **kwargs):
        if fits(*args, **kwargs):
            # The harm is done before the stop.
            if first:
                real(*args, **kwargs)
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    patch.setattr(owner, name, stopped)


def always(*args, **kwargs):
    return True


def second_manifest(path, data):
    return path.name == "state.json" and data["update"] == 2


# Where it stops: what is called, on what, which call of it, and whether that one is done first.
STOPS = [
    ("Stage 1", (sm, "sft", always, False)),
    ("writing checkpoint 0", (runs, "save_policy", always, True)),
    ("a rollout", (sm, "tasks_of", lambda cfg, tasks, update: update == 2, False)),
    ("scoring", (sm, "score_all", always, False)),
    ("the gradients", (sm, "gradients", always, True)),
    ("the optimizer step", (torch.optim.AdamW, "step", always, True)),
    ("after the logs of an update", (runs, "warnings_of", lambda c, m: m["update"] == 2, False)),
    ("an evaluation", (sm, "evaluate", lambda *a, **k: a[4] == "2", False)),
    ("the manifest of a checkpoint", (runs, "write_json", second_manifest, False)),
    ("the last update", (runs, "update_metrics", lambda *a: a[2] == 3, True)),
    ("the report", (runs, "write_report", always, False)),
]


@pytest.mark.slow
def test_a_run_stopped_anywhere_and_resumed_is_the_same_run(finished, tmp_path):
    """One run, stopped at every point in turn, and resumed each time."""
    flags = ()
    for name, where in STOPS:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, where)
            code, _, err = launch("--out", tmp_path, "--name", "whole", *flags)
        assert code == 130 and "--resume" in err, (name, err)
        # A line cut short by the kill.
        with open(tmp_path / "whole" / "metrics.jsonl", "a") as f:
            f.write('{"stage": "rl", "upd')
        flags = ("--resume",)
    code, _, err = launch("--out", tmp_path, "--name", "whole", "--resume")
    assert (code, err) == (0, "")
    assert contents(tmp_path / "whole") == contents(finished[0])
    assert not list((tmp_path / "whole" / "checkpoints").glob("writing-*"))


TORN = {
    "weights": "policy/model.safetensors",
    "moments": "optimizer.safetensors",
    "state": "state.json",
}


@pytest.mark.parametrize("harm", [*TORN, "state is noise", "no state"])
def test_a_torn_newest_checkpoint_falls_back_to_the_one_before(finished, tmp_path, harm):
    folder = tmp_path / "whole"
    shutil.copytree(finished[0], folder)
    newest = folder / "checkpoints" / "update-000003"
    if harm == "no state":
        (newest / "state.json").unlink()
    elif harm == "state is noise":
        (newest / "state.json").write_bytes(bytes(range(256)))
    else:
        file = newest / TORN[harm]
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    code, out, err = launch("--out", tmp_path, "--name", "whole", "--resume")
    assert (code, err) == (0, "") and "damaged" in out and "after update 2" in out
    assert contents(folder) == contents(finished[0])


def test_resume_refuses_other_options_by_name(finished, tmp_path):
    folder = tmp_path / "whole"
    shutil.copytree(finished[0], folder)
    here = ("--out", tmp_path, "--name", "whole", "--resume")
    result = launch(*here, "--lr", 0.5, "--group_size", 3)
    assert refused(result, "lr was 0.0002, now 0.5", "group_size was 2, now 3")
    assert "temperature" not in result[2] and contents(folder) == contents(finished[0])
    assert launch("--out", tmp_path, "--name", "nothing", "--resume")[0] == 2
    # More updates are no other run.
    assert launch(*here, "--updates", 4)[0] == 0
    assert [m["update"] for m in metrics_of(folder, "rl")] == [1, 2, 3, 4]


def rewrite(file, **changes):
    """Change some values of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_resume_refuses_a_checkpoint_of_a_newer_format(finished, tmp_path):
    folder = tmp_path / "whole"
    shutil.copytree(finished[0], folder)
    rewrite(folder / "checkpoints" / "update-000003" / "state.json", format=99)
    assert refused(launch("--out", tmp_path, "--name", "whole", "--resume"), "newer")


@pytest.mark.parametrize("format", [1, 99, None])
def test_resume_refuses_a_run_of_another_format(finished, tmp_path, format):
    folder = tmp_path / "whole"
    shutil.copytree(finished[0], folder)
    rewrite(folder / "config.json", format=format, git_commit="c" * 40)
    result = launch("--out", tmp_path, "--name", "whole", "--resume")
    assert refused(result, f"format {format}", f"format {runs.FORMAT}", "c" * 40)
    assert contents(folder) == contents(finished[0])


def test_a_folder_in_use_is_never_overwritten_unasked(finished, tmp_path):
    before = contents(finished[0])
    result = launch("--out", finished[0].parent, "--name", "whole")
    assert refused(result, "--resume", "--overwrite") and contents(finished[0]) == before
    chapter = tmp_path / "thesis" / "chapter.md"
    chapter.parent.mkdir()
    chapter.write_text("years of work")
    assert launch("--out", tmp_path, "--name", "thesis", "--overwrite")[0] == 2
    assert chapter.read_text() == "years of work"
    # It has a config.json, as a run has.
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    for flag, word in (("--resume", "no run"), ("--overwrite", "no run of seed_mini")):
        assert refused(launch("--out", tmp_path, "--name", "model", flag), word)
        sums = [{p.name: runs.sha256(p) for p in folder.iterdir()} for folder in (model, BASE)]
        assert sums[0] == sums[1]


def test_going_on_with_another_commit_is_said(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "whole")
    rewrite(tmp_path / "whole" / "config.json", git_commit="c" * 40)
    code, out, err = launch("--out", tmp_path, "--name", "whole", "--resume")
    assert (code, err) == (0, "") and f"started with commit {'c' * 40}" in out


def test_a_run_may_replace_the_run_it_starts_from(finished, tmp_path):
    folder = tmp_path / "whole"
    shutil.copytree(finished[0], folder)
    start = weights_of(folder, 0)
    flags = ("--overwrite", "--sft_from", folder, "--updates", 1)
    code, _, err = launch("--out", tmp_path, "--name", "whole", *flags)
    assert (code, err) == (0, "") and weights_of(folder, 0) == start


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--model", BASE), "--model was 'tiny' there"),
        (
            ("--env_args", "games=official", "list_actions=true"),
            "--env_args was ['games=official', 'list_actions=False'] there",
        ),
        (("--tune", "lora"), "--tune was 'full' there and is 'lora' here"),
        (("--think", "true", "--max_response", 12), "--think was False there and is True here"),
    ],
)
def test_arms_that_do_not_share_their_model_cannot_share_its_start(
    finished, tmp_path, flags, words
):
    result = launch("--out", tmp_path, "--name", "arm", "--sft_from", finished[0], *flags)
    assert refused(result, words) and not (tmp_path / "arm").exists()


SCRIPT = """
import sys
sys.path[:0] = [{repo!r}, {tests!r}]
import runs, seed_mini as sm, test_seed_mini as t
sm.complete, runs.draw_curves = t.answer, lambda run: None
sys.exit(sm.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_kill_minus_nine(finished, tmp_path):
    """A real process, killed for real while it works, resumed: the same run. Nothing is left
    running."""
    script = SCRIPT.format(repo=str(REPO), tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, *SMALL, "--out", str(tmp_path), "--name", "whole"]
    log, quiet, workers = tmp_path / "whole" / "metrics.jsonl", subprocess.DEVNULL, []
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, cwd=REPO) as process:
        deadline = time.monotonic() + 120
        while not (log.exists() and '"stage": "rl"' in log.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        if shutil.which("pgrep"):
            children = ["pgrep", "-P", str(process.pid)]
            workers = subprocess.run(children, capture_output=True, text=True).stdout.split()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    # Else it was quicker than the signal.
    if log.read_text().count('"stage": "rl"') < 3:
        assert not (tmp_path / "whole" / "report.md").exists()
    again = [*command, "--resume"]
    done = subprocess.run(again, capture_output=True, text=True, cwd=REPO, timeout=120)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "whole") == contents(finished[0])
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("updates", [3, 8])
def test_numbers_that_are_not_finite_stop_the_run_and_keep_the_good_checkpoint(tmp_path, updates):
    """Sick from the second update on: two in a row are borne, the third stops the run."""
    real, calls = sm.score_all, []

    def sick(policy, cfg, counters, rolls, replies):
        scores = real(policy, cfg, counters, rolls, replies)
        calls.append(1)
        if len(calls) > 1:
            scores.old[0] = scores.old[0] * float("nan")
        return scores

    flags = ("--ablate", "no_sft", "--eval_every", 0, "--updates", updates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm, "score_all", sick)
        code, _, err = launch("--out", tmp_path, "--name", "sick", *flags)
    folder = tmp_path / "sick"
    rl = metrics_of(folder, "rl")
    assert [m["counters"].get(runs.DROPPED, 0) for m in rl] == [0, 1, 1, 1][: min(updates, 4)]
    for m in rl:
        json.dumps(m, allow_nan=False)
    dropped = runs.read_jsonl(folder / "dropped.jsonl")
    assert [d["update"] for d in dropped] == [2, 3, 4][: len(rl) - 1]
    assert all(d["ids"] and d["episode"]["steps"] for d in dropped)
    if updates == 3:
        assert (code, err) == (0, "")
        return
    assert refused((code, "", err), "not finite")
    assert checkpoints(folder) == ["update-000000", "update-000001"]
    # One of each task.
    shown = [e for e in runs.read_jsonl(folder / "rollouts.jsonl") if e["update"] >= 2]
    assert len(shown) >= 3 * 2


# --------------------------------------------------------------------------------------------------
# 2. Arms and ablations
# --------------------------------------------------------------------------------------------------
def arm(tmp_path, finished, *flags, updates=1):
    """Another arm from the start of the finished run: (folder, lines of its updates, skills)."""
    share = ("--sft_from", finished[0], "--updates", updates)
    code, _, err = launch("--out", tmp_path, "--name", "arm", *share, *flags)
    assert (code, err) == (0, "")
    folder = tmp_path / "arm"
    return folder, metrics_of(folder, "rl"), runs.read_jsonl(folder / "skills.jsonl")


def test_grpo_and_seed_share_everything_but_the_skills(finished, tmp_path):
    folder, rl, rows = arm(tmp_path, finished, "--method", "grpo")
    assert rows == [] and "parse_rate" not in rl[0] and "gate_mean" not in rl[0]
    assert weights_of(folder, 0) == weights_of(finished[0], 0) != weights_of(folder, 1)
    theirs = metrics_of(finished[0], "rl")[0]
    # The same first rollouts.
    for key in ("reward", "success", "num_tokens", "entropy", "frac_reward_zero_std"):
        assert rl[0][key] == theirs[key]
    both = runs.read_jsonl(finished[0] / "rollouts.jsonl")
    first = [e for e in both if e["stage"] == "rl" and e["update"] == 1]
    assert runs.read_jsonl(folder / "rollouts.jsonl") == first


def test_no_opd_analyzes_and_logs_but_trains_like_grpo(finished, tmp_path):
    grpo, *_ = arm(tmp_path / "grpo", finished, "--method", "grpo", updates=2)
    folder, rl, rows = arm(tmp_path / "no_opd", finished, "--ablate", "no_opd", updates=2)
    assert weights_of(folder, 2) == weights_of(grpo, 2) and len(rows) == 8
    assert rl[0]["parse_rate"] == 0.75 and rl[0]["delta_mean"] is not None


@pytest.mark.slow
def test_static_skills_come_from_the_stage_1_analyzer(finished, tmp_path):
    folder, rl, rows = arm(tmp_path, finished, "--ablate", "static", updates=2)
    assert rl[0]["parse_rate"] == 1.0 and len(rows) == 8
    (library,) = metrics_of(folder, "library")
    written = json.loads((folder / "library.json").read_text())["skills"]
    assert library["tasks"] == library["skills"] == len(written) > 1
    assert library["counters"]["reply ok"] == library["tasks"]
    assert any(k.startswith("ended") for k in library["counters"])
    by_task = {}
    for row in rows:
        assert alfworld.SEARCH in row["skill"]
        assert by_task.setdefault(row["task_id"], row["skill"]) == row["skill"]


def test_shuffled_skills_run(finished, tmp_path):
    _, rl, rows = arm(tmp_path, finished, "--ablate", "shuffle")
    assert rl[0]["parse_rate"] == 0.75 and len(rows) == 4


def test_without_stage_1_the_base_is_the_start(tmp_path):
    flags = ("--ablate", "no_sft", "--updates", 1, "--eval_every", 0)
    code, _, err = launch("--out", tmp_path, "--name", "arm", *flags)
    assert (code, err) == (0, "")
    assert weights_of(tmp_path / "arm", 0) == runs.sha256(BASE / "model.safetensors")
    assert not metrics_of(tmp_path / "arm", "sft")
    assert {m["at"] for m in metrics_of(tmp_path / "arm", "eval")} == {"base", "1"}


def test_grpo_goes_without_stage_1_too(tmp_path):
    flags = ("--ablate", "no_sft", "--method", "grpo", "--updates", 1, "--eval_every", 0)
    code, _, err = launch("--out", tmp_path, "--name", "arm", *flags)
    assert (code, err) == (0, "") and not metrics_of(tmp_path / "arm", "sft")


def test_evaluating_a_checkpoint(finished, tmp_path):
    model = finished[0] / "checkpoints" / "update-000003" / "policy"
    last = metrics_of(finished[0], "eval")[-1]
    for flags in ((), ("--eval_temperature", "1")):
        code, out, err = launch("--eval", "--model", model, "--out", tmp_path, *flags)
        assert (code, err) == (0, "") and re.search(r"eval +eval valid_unseen: \d/2 = ", out)
        report = json.loads((tmp_path / "eval" / "eval-valid_unseen.json").read_text())
        assert report["n"] == 2 == len(report["tasks"]) and report["model"].endswith("policy")
        assert report["config"]["eval_temperature"] == (1.0 if flags else 0.4)
        # As the run itself measured it.
        if not flags:
            assert all(report[k] == last[k] for k in ("tasks", "episode_steps"))
    with runs.Run(config(out=str(tmp_path), name="busy")).opened(fresh=False):
        busy = ("--out", tmp_path, "--name", "busy", "--eval_tasks", 1)
        assert refused(launch("--eval", "--model", "tiny", *busy), "in use")
        assert not list((tmp_path / "busy").iterdir())


# --------------------------------------------------------------------------------------------------
# 3. The command line
# --------------------------------------------------------------------------------------------------
BAD = """
--env webshop | --env_args games=mine | --env_args list_actions=maybe | --env_args colour=red |
--env_args games | --method ppo | --analyzer gpt | --ablate everything | --tune qlora8 |
--workers -1 | --threads -1 | --max_steps 0 | --max_context 0 | --updates -1 | --group_size 1 |
--train_tasks 0 | --eval_tasks 0 | --clip_range 1.5 | --clip_range nan | --lr 0 | --lr nan |
--lr inf | --sft_lr=-1e-3 | --kl_coef -0.1 | --kl_coef nan | --lambda_opd inf |
--invalid_penalty inf | --invalid_penalty -1 | --temperature 0 | --eval_temperature -1 |
--eval_splits test | --seed -1 | --task_seed -1 | --name a/b | --max_response 900 |
--max_context 10 | --ablate no_sft --sft_from x | --resume --overwrite | --eval --sft_from x |
--eval --resume | --method grpo --ablate no_opd | --method grpo --ablate static |
--method grpo --ablate shuffle | --sft_from nowhere | --model nowhere/at/all | --resume
"""


@pytest.mark.parametrize("text", [" ".join(text.split()) for text in BAD.split("|")])
def test_bad_values_are_refused_with_one_sentence(tmp_path, capsys, text):
    more = "--threads" if "--threads" not in text else "--workers"
    assert sm.main([*text.split(), "--out", str(tmp_path / "runs"), more, "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("seed_mini: ")
    assert err.count("\n") == 1 and "Traceback" not in err, err
    option = re.split("[ =]", text)[0] if not text.startswith("--model") else "nowhere/at/all"
    assert option in err
    # Nothing was begun.
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "text",
    [
        "--lr much",
        "--nonsense 3",
        "--updates 1.5",
        "--think maybe",
        # Options of the past.
        "--no_sft",
        "--games official",
        "--no_4bit",
        "--adapter x",
    ],
)
def test_what_cannot_be_read_is_refused_shortly(text, capsys):
    with pytest.raises(SystemExit) as error:
        sm.main(text.split())
    assert error.value.code == 2 and len(capsys.readouterr().err) < 400


def test_a_broken_model_folder_is_one_sentence(tmp_path, capsys):
    shutil.copytree(BASE, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    flags = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "runs")]
    assert sm.main(flags) == 2
    err = capsys.readouterr().err
    assert "cannot load the model" in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as error:
        sm.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert error.value.code == 0
    for option in dataclasses.fields(sm.Config):
        words = " ".join(option.metadata["help"].replace("%%", "%").split())[:60]
        assert f"--{option.name}" in text and words in text, option.name
    # The world's own settings are the world's to explain.
    assert "games=auto list_actions=False" in text and "official" in text


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="clip_range"):
        sm.main(["--clip_range", "3", "--debug"])


def test_profiles_name_options_and_leave_none_open():
    names = {f.name for f in dataclasses.fields(sm.Config)}
    for profile, model in (("tiny", "tiny"), ("paper", runs.QWEN)):
        assert set(sm.PROFILES[profile]) <= names
        cfg = sm.resolve(sm.Config(model=model))
        assert {n for n in names if getattr(cfg, n) is None} == {"train_tasks", "eval_tasks"}
        assert all(getattr(cfg, n) == value for n, value in sm.PROFILES[profile].items())
    assert sm.PROFILES["tiny"]["think"] is False and sm.PROFILES["paper"]["think"] is True
    assert sm.resolve(sm.Config(lr=7.0)).lr == 7.0
    for model in ("auto", str(BASE)):
        assert sm.resolve(sm.Config(model=model)).tune == sm.PROFILES["tiny"]["tune"]


def test_the_world_has_a_say_in_the_defaults():
    """Its step limit, its penalty and its settings, by the size of the model; what is given
    wins."""
    world = alfworld.Env
    tiny, paper = (sm.resolve(sm.Config(model=model)) for model in ("tiny", runs.QWEN))
    assert (tiny.max_steps, tiny.invalid_penalty) == (20, 0.0)
    assert (paper.max_steps, paper.invalid_penalty) == (world.max_steps, world.invalid_penalty)
    assert tiny.env_args == ["games=auto", "list_actions=False"]
    assert paper.env_args == ["games=auto", "list_actions=True"]
    own = dict(max_steps=3, invalid_penalty=0.5, env_args=["list_actions=true", "games=generated"])
    given = sm.resolve(sm.Config(**own))
    assert (given.max_steps, given.invalid_penalty) == (3, 0.5)
    assert given.env_args == ["games=generated", "list_actions=True"]
    # A second time changes nothing: --resume compares what was resolved.
    for cfg in (tiny, paper, given):
        assert sm.resolve(cfg) == cfg
