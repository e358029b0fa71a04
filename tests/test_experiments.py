"""notebooks/experiments.py: the runs it plans are runs seed_mini accepts, it resumes, it never
mixes, and its records suffice.

A stub stands in for seed_mini: it reads the command line with seed_mini's own parser and writes the
files a run writes, with evaluations and updates whose numbers the tests know. No model, no game.
"""
import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from transformers import HfArgumentParser

import runs
import seed_mini

REPO = Path(seed_mini.__file__).parent
spec = importlib.util.spec_from_file_location("experiments", REPO / "notebooks" / "experiments.py")
experiments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiments)

SETTINGS = experiments.COMMON | dict(updates=4, eval_every=2)
GAMES = ("a", "b", "c", "d")


def parsed(words: list[str]) -> seed_mini.Config:
    """The configuration that seed_mini would run for a command line; raises if it would refuse
    it."""
    cfg = seed_mini.Config(**vars(HfArgumentParser(seed_mini.Config).parse_args(words[2:])))
    runs.check_config(cfg)
    return seed_mini.resolve(cfg)


def write_run(root: Path, cfg: seed_mini.Config) -> None:
    """What a finished run leaves behind, as far as records need it: each evaluation wins as many
    games as there were updates."""
    run = root / cfg.out / cfg.name
    run.mkdir(parents=True, exist_ok=True)
    start = "base" if cfg.ablate == "no_sft" else "sft"
    rl = [dict(stage="rl", update=u, success=u / 10, step_time=1.23456, kl=0.1)
          | ({"parse_rate": 1.0} if cfg.method == "seed" else {})
          for u in range(1, cfg.updates + 1)]
    evals = []
    for at in [start] + [str(u) for u in range(1, cfg.updates + 1) if u % cfg.eval_every == 0]:
        wins = 0 if at == start else min(int(at), len(GAMES))
        won = {g: i < wins for i, g in enumerate(GAMES)}
        types = {"pick_and_place_simple": dict(wins=wins, n=len(GAMES))}
        evals += [dict(stage="eval", at=at, split=s, skill_in_context=False, wins=wins,
                       n=len(GAMES), by_kind=types, invalid_action_rate=0.125,
                       tasks=dict(reversed(won.items()))) for s in cfg.eval_splits]
    skills = [dict(update=u, task_id=g, goal="put a hot mug in shelf", won=g == "a", status="ok",
                   delta_mean=-0.123456, skill=f"skill {g}"
                   + (": put the mug in the shelf" if g == "a" else ": a mugshelf"))
              for u in range(cfg.updates + 1) for g in GAMES] if cfg.method == "seed" else []
    (run / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)
                                                | dict(git_commit="c" * 40)))
    for name, lines in (("metrics", evals + rl), ("skills", skills)):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "report.md").write_text("done")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A project in an empty folder with a base of its own; `launched` lists the runs started, `die`
    names those that are killed on the way."""
    base = tmp_path / "base" / "alfworld"
    base.mkdir(parents=True)
    (base / "model.safetensors").write_bytes(b"weights")

    class World:
        root, path, folder, launched, die = (tmp_path, tmp_path / "data" / "curves.jsonl",
                                             Path("runs"), [], set())

        def go(self, settings=SETTINGS, seeds=(0, 1), experiment="curves"):
            self.launched = []
            return experiments.run_experiment(experiment, settings, seeds, self.path, self.folder,
                                              jobs=1, say=lambda text: None)

        def records(self):
            return runs.read_jsonl(self.path)

    world = World()

    def launch(words, log, lock):
        cfg = parsed(words)
        world.launched.append(cfg.name + (" --resume" if cfg.resume else ""))
        # killed: the folder is there, the report is not
        if cfg.name in world.die:
            (tmp_path / cfg.out / cfg.name).mkdir(parents=True, exist_ok=True)
            (tmp_path / cfg.out / cfg.name / "config.json").write_text("{}")
            log.write_text("first line\nthe last thing it said\n")
            return 137
        write_run(tmp_path, cfg)
        return 0

    monkeypatch.setattr(experiments, "ROOT", tmp_path)
    monkeypatch.setattr(experiments, "launch", launch)
    monkeypatch.setattr(seed_mini, "TINY", base.parent)
    return world


# --------------------------------------------------------------------------------------------------
# 1. The plan
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("experiment", experiments.EXPERIMENTS)
@pytest.mark.parametrize("variant",
                         [{}, experiments.TUNING["settings"], experiments.QUICK["settings"]],
                         ids=["reported", "tuning", "quick"])
def test_every_planned_run_is_accepted_and_differs_only_where_it_says(experiment,
                                                                      variant, tmp_path):
    settings = experiments.COMMON | variant
    shared = experiments.shared_settings(settings)
    planned = experiments.missing(experiment, (0, 1), tmp_path / "none.jsonl")
    assert len(planned) == 2 * (1 + len(experiments.arms_of(experiment)))
    for arm, changes, seed in planned:
        options = experiments.options_of(arm, changes, seed, settings, Path("runs"))
        cfg = parsed(experiments.command(f"{arm}-s{seed}", options, Path("runs")))
        have = {k: v
                for k, v in dataclasses.asdict(cfg).items() if k not in experiments.BOOKKEEPING}
        changed = dict(updates=0) if arm == "start" else changes
        assert have | experiments.CONSTANTS == shared | changed and cfg.seed == seed
        assert cfg.sft_from == ("" if arm == "start" or cfg.ablate == "no_sft"
                                else f"runs/start-s{seed}"), "arms of a seed share its Stage 1"


def test_defaults_are_the_profiles():
    """Changing the profile changes the experiment: the common options name no setting of the
    method."""
    profile = seed_mini.resolve(seed_mini.Config())
    assert all(experiments.shared_settings(experiments.COMMON)[k] == getattr(profile, k)
               for k in seed_mini.PROFILES["tiny"])
    lambdas = [c["lambda_opd"]
               for c in experiments.arms_of("sensitivity").values() if "lambda_opd" in c]
    assert lambdas[0] < profile.lambda_opd < lambdas[-1] and profile.lambda_opd not in lambdas


@pytest.mark.parametrize("words",
                         [["curves", "--tuning", "--seeds", "7", "3"], ["curves", "--seeds", "101"],
                          ["curves", "--quick", "--seeds", "100"]])
def test_a_seed_is_for_choosing_or_for_reporting(words, capsys):
    assert experiments.main(words + ["--list"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "not reported on it" in said.err and said.err.count("\n") == 1


def test_tuning_and_reporting_share_neither_seeds_nor_houses():
    assert not set(experiments.SEEDS) & set(experiments.TUNING["seeds"])
    assert experiments.TUNING["settings"]["task_seed"] != experiments.COMMON["task_seed"]


# --------------------------------------------------------------------------------------------------
# 2. Records
# --------------------------------------------------------------------------------------------------
def test_records_hold_what_an_interval_needs(world):
    assert world.go() == []
    assert world.launched == ["start-s0", "start-s1", "grpo-s0", "seed-s0", "grpo-s1", "seed-s1"]
    records = world.records()
    assert [(r["arm"], r["seed"], r["update"]) for r in records] == (
        [("grpo", s, u) for s in (0, 1) for u in (0, 2, 4)]
        + [("seed", s, u) for s in (0, 1) for u in (0, 2, 4)] + [("start", 0, 0), ("start", 1, 0)])
    assert len({(r["settings_hash"], r["base"]) for r in records}) == 1
    row = next(r for r in records if r["arm"] == "seed" and r["update"] == 2)
    for split in ("valid_seen", "valid_unseen"):
        assert row["eval"][split]["won"] == "1100", "not in the order of the sorted ids"
        assert (row["eval"][split]["wins"], row["eval"][split]["n"],
                row["eval"][split]["by_type"]) == (2, 4, {"pick_and_place_simple": [2, 4]})
    assert row["training"]["success"] == [0.1, 0.2]
    assert row["training"]["step_time"] == [1.235, 1.235]
    assert row["config"] == dict(env_args=["games=generated", "list_actions=False"],
                                 eval_splits=["valid_seen", "valid_unseen"], threads=1, workers=1,
                                 updates=4, eval_every=2)
    assert (row["games_seed"] == 0 and row["commit"].startswith("c" * 40)
            and {"cores", "torch"} <= row["machine"].keys())
    assert [(q["won"], q["skill"], q["delta_mean"]) for q in row["skills"]["quotes"]] == [
        (True, "skill a: put the mug in the shelf", -0.1235),
        (False, "skill b: a mugshelf", -0.1235), (False, "skill c: a mugshelf", -0.1235)]
    assert (row["skills"]["n"], row["skills"]["distinct"], row["skills"]["on_task"]) == (4, 4, 1)
    grpo = next(r for r in records if r["arm"] == "grpo" and r["update"] == 2)
    assert (grpo["skills"] is None and "parse_rate" not in grpo["training"]
            and grpo["config"]["method"] == "grpo")


def test_records_survive_what_a_run_survives_and_keep_what_the_environment_lost(world):
    """An update without an optimizer step has no KL; an episode that died at its reset has no task;
    both are rare, and neither is an error."""
    cfg = seed_mini.Config(name="odd", out="runs", method="seed", updates=2, eval_every=2,
                           eval_splits=["valid_unseen"])
    write_run(world.root, cfg)
    run = world.root / "runs" / "odd"
    metrics, texts = (runs.read_jsonl(run / f"{name}.jsonl") for name in ("metrics", "skills"))
    rl = [m for m in metrics if m["stage"] == "rl"]
    del rl[1]["kl"]
    rl[0]["counters"] = {"env died": 2, "ended: env died": 2, "invalid actions": 9}
    metrics[1]["counters"] = {"env timeout": 1, "task unplayable": 0}
    texts[-1]["goal"] = ""
    for name, lines in (("metrics", metrics), ("skills", texts)):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = experiments.collect(run, {})[-1]
    assert record["training"]["kl"] == [0.1, None] and record["lost"] == {"env died": 2}
    assert (record["eval"]["valid_unseen"]["lost"] == {"env timeout": 1}
            and record["skills"]["on_task"] == 1)


def test_arms_without_stage_1_begin_at_the_base(world):
    assert world.go(seeds=(0,), experiment="ablations") == []
    first = {r["arm"]: r["at"] for r in reversed(world.records()) if r["update"] == 0}
    assert first == dict(no_sft="base", grpo_no_sft="base", no_opd="sft", static="sft",
                         shuffled="sft", start="sft")


# --------------------------------------------------------------------------------------------------
# 3. Resuming
# --------------------------------------------------------------------------------------------------
def test_a_killed_arm_is_resumed_and_finished_ones_are_left_alone(world):
    world.die = {"seed-s0"}
    failed = world.go()
    assert (len(failed) == 1 and "seed-s0" in failed[0] and "137" in failed[0]
            and "the last thing it said" in failed[0])
    before = world.path.read_text().splitlines()
    assert (("seed", 0) not in {(r["arm"], r["seed"]) for r in world.records()}
            and ("seed", 1) in {(r["arm"], r["seed"]) for r in world.records()})
    world.die = set()
    assert world.go() == [] and world.launched == ["seed-s0 --resume"]
    assert set(before) < set(world.path.read_text().splitlines()), "what was kept is kept as it was"
    assert {r["wall_seconds"] for r in world.records()
            if (r["arm"], r["seed"]) == ("seed", 0)} == {None}, "a resumed run's time is not known"
    assert world.go() == [] and world.launched == []


def test_a_finished_run_without_records_is_not_run_again(world):
    world.go()
    whole = {(r["arm"], r["seed"], r["update"]) for r in world.records()}
    # as if killed between the end of the runs and their records
    world.path.unlink()
    assert world.go() == [] and world.launched == []
    assert {(r["arm"], r["seed"], r["update"]) for r in world.records()} == whole


def test_more_seeds_are_added(world):
    world.go(seeds=(0,))
    assert world.go(seeds=(0, 5)) == [] and world.launched == ["start-s5", "grpo-s5", "seed-s5"]


def test_without_its_stage_1_no_arm_is_started(world):
    world.die = {"start-s0"}
    failed = world.go()
    assert sorted(f.split(":")[0] for f in failed) == ["grpo-s0", "seed-s0", "start-s0"]
    assert world.launched == ["start-s0", "start-s1", "grpo-s1", "seed-s1"]


def test_one_launcher_at_a_time(world):
    folder = world.folder / "-".join(experiments.identity(SETTINGS).values())
    with experiments.locked(world.root / folder), pytest.raises(ValueError, match="still going"):
        world.go()
    assert world.go() == []


# --------------------------------------------------------------------------------------------------
# 4. Never mixing
# --------------------------------------------------------------------------------------------------
def test_other_settings_are_refused(world):
    world.go()
    kept = world.path.read_text()
    with pytest.raises(ValueError, match="lr was 0.0002, is 0.1.*never mixed"):
        world.go(settings=SETTINGS | dict(lr=0.1), seeds=(0, 1, 2))
    assert world.launched == [] and world.path.read_text() == kept


def test_a_changed_profile_is_refused(world, monkeypatch):
    world.go()
    monkeypatch.setitem(seed_mini.PROFILES["tiny"], "kl_coef", 0.5)
    with pytest.raises(ValueError, match="kl_coef was 0.02, is 0.5"):
        world.go()


def test_a_changed_constant_is_refused(world, monkeypatch):
    """What once was an option still tells settings apart."""
    world.go()
    monkeypatch.setitem(experiments.CONSTANTS, "weight_decay", 0.5)
    with pytest.raises(ValueError, match="weight_decay was 0.01, is 0.5"):
        world.go()


def test_another_base_is_refused_and_its_runs_lie_apart(world):
    world.go()
    old = experiments.identity(SETTINGS)
    (world.root / "base" / "alfworld" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ValueError, match=f"the base was {old['base']}"):
        world.go()
    world.path.unlink()
    assert world.go() == [] and len(world.launched) == 6, ("the runs of the old base are not taken "
                                                           "for the new one's")


def test_reported_and_trial_records_are_not_read_together(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "HERE", tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("curves.jsonl", "curves.trial.jsonl", "ablations.trial.jsonl"):
        (tmp_path / "data" / name).write_text(json.dumps(dict(file=name)) + "\n")
    assert experiments.read("curves") == [dict(file="curves.jsonl")]
    assert experiments.read("curves", "ablations") == [dict(file="curves.trial.jsonl"),
                                                       dict(file="ablations.trial.jsonl")]
    with pytest.raises(ValueError, match="no records of sensitivity"):
        experiments.read("sensitivity")


def test_records_from_before_some_options_were_renamed_are_read():
    """Each of today's shared settings has its value in the kept records, under whatever name; and a
    difference in a renamed option is seen."""
    kept = next(r for r in experiments.read("curves") if "shared" in r)
    assert "games_seed" in kept["shared"], "these are such records"
    shared = experiments.todays_names(kept["shared"])
    assert experiments.shared_settings(experiments.COMMON).items() <= shared.items()
    assert experiments.todays_names(shared) == shared
    for option, value in dict(games_seed=1, games="official", show_admissible=True,
                              eval_games=24).items():
        other = kept | dict(shared=kept["shared"] | {option: value})
        assert len(experiments.drift([other], experiments.COMMON)) == 1, option


@pytest.mark.parametrize("path", sorted((REPO / "notebooks" / "data").glob("*.jsonl")),
                         ids=lambda path: path.name)
def test_kept_records_say_what_they_are(path):
    """A trial is labelled so; reported records are complete and of this program and this base (or
    must be made again)."""
    experiment, *purpose = path.stem.split(".")
    records = runs.read_jsonl(path)
    assert ({r["purpose"] for r in records} == {purpose[0] if purpose else "reported"}
            and {r["experiment"] for r in records} == {experiment})
    assert len({(r["settings_hash"], r["base"]) for r in records}) == 1
    for r in records:
        for e in r["eval"].values():
            assert (e["won"].count("1") == e["wins"] == sum(w for w, _ in e["by_type"].values())
                    and len(e["won"]) == e["n"])
    if not purpose:
        seeds = experiments.SEEDS if experiment == "curves" else experiments.SEEDS[:experiments.FEW]
        assert experiments.missing(experiment, seeds, path) == []
        assert experiments.drift(records, experiments.COMMON) == [], (
            "made with other settings: run python notebooks/experiments.py again")
        assert not [r for r in records if r["commit"].endswith("+changes")], (
            "a commit alone must say which program it was")
