"""The reduced-scale experiments: which runs there are, how to make them, what is kept of them.

    python notebooks/experiments.py curves           # GRPO vs SEED: 8 seeds, Stage 1 shared
    python notebooks/experiments.py ablations        # 3 seeds: a part of SEED taken out
    python notebooks/experiments.py sensitivity      # 3 seeds: lambda_opd, beta_opd, one at a time
    python notebooks/experiments.py curves --quick   # a trial of minutes, far too small to count
    python notebooks/experiments.py curves --tuning  # other seeds and houses: to choose settings
    python notebooks/experiments.py curves --list    # only print the commands of missing runs

Every run is an ordinary `python seed_mini.py ...` with the defaults of its profile (change PROFILES
and the experiment changes); what is added stands in COMMON and arms_of below. Two runs go side by
side, one core and one torch thread each. Killed? Give the same command again: an arm whose records
are there is skipped, an unfinished run goes on from its newest checkpoint with --resume.

Runs stay in notebooks/runs/SETTINGS-BASE/ (hashes of the settings and of the base's weights, so no
run continues one of another kind). What the notebooks read is notebooks/data/EXPERIMENT.jsonl: one
line per arm, seed and evaluation, with who won which game, the training metrics since the
evaluation before, and a few skills as they were written. A file never mixes settings or bases: the
command refuses. Ablations and sensitivity take SEED and GRPO themselves from the curves of the same
seeds, so make the curves first.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import torch

import seed_mini
from environments import alfworld
from runs import git_commit, read_jsonl

# --------------------------------------------------------------------------------------------------
# 1. Which runs
# --------------------------------------------------------------------------------------------------
# Settings are chosen on TUNING's seeds and houses and reported on these; never the other way round.
# FEW: how many of them the ablations and the sensitivity use
SEEDS, FEW = tuple(range(8)), 3
COMMON = dict(env_args=["games=generated"], task_seed=0, eval_splits=["valid_seen", "valid_unseen"],
              threads=1, workers=1)
TUNING = dict(seeds=(100, 101, 102), settings=dict(task_seed=1))
# Stage 1 of 120 small steps: just enough for skills that parse
QUICK = dict(
    seeds=(0, 1), settings=dict(sft_tasks=20, sft_rollouts=4, sft_batch=4, sft_epochs=6, updates=5,
                                tasks_per_update=3, group_size=4, eval_every=1, eval_tasks=24))
EXPERIMENTS = ("curves", "ablations", "sensitivity")


def arms_of(experiment: str) -> dict[str, dict]:
    """The arms of an experiment: name -> options of seed_mini.py beyond the common ones.

    All arms of a seed but the no_sft ones share its Stage 1. no_opd trains on exactly what GRPO
    trains on, from the same start, so it must come out equal to it: a check of the code more than
    an ablation. The paper's GRPO, which never saw Stage 1, is grpo_no_sft. lambda_opd is varied
    around the profile's value.
    """
    if experiment == "curves":
        return {"grpo": dict(method="grpo"), "seed": {}}
    if experiment == "ablations":
        return {"no_sft": dict(ablate="no_sft"), "no_opd": dict(ablate="no_opd"),
                "static": dict(ablate="static"), "shuffled": dict(ablate="shuffle"),
                "grpo_no_sft": dict(method="grpo", ablate="no_sft")}
    middle = seed_mini.PROFILES["tiny"]["lambda_opd"]
    values = [("lambda_opd", float(f"{factor * middle:.2g}")) for factor in (1 / 3, 3)]
    values += [("beta_opd", 0.0), ("beta_opd", 20.0)]
    return {f"{option}={value:g}": {option: value} for option, value in values}


def digest(data: bytes) -> str:
    """Twelve hex digits of a SHA-256: enough to tell settings apart."""
    return hashlib.sha256(data).hexdigest()[:12]


# Not settings: which run it is, where it lies, how it was started.
BOOKKEEPING = {"name", "out", "seed", "eval", "resume", "overwrite", "sft_from", "debug"}
assert BOOKKEEPING <= {f.name for f in dataclasses.fields(seed_mini.Config)}
# Settings that are no options.
CONSTANTS = dict(weight_decay=seed_mini.WEIGHT_DECAY, max_grad_norm=seed_mini.MAX_GRAD_NORM)


def shared_settings(settings: dict) -> dict:
    """Every option that all arms share, resolved through the profile: what `settings` really means
    today."""
    config = dataclasses.asdict(seed_mini.resolve(seed_mini.Config(**settings)))
    return {k: v for k, v in config.items() if k not in BOOKKEEPING} | CONSTANTS


def todays_names(shared: dict) -> dict:
    """Shared settings of kept records under today's names: until commit eec99fb some options had
    others."""
    if "games" not in shared:
        return shared
    old = {"games", "games_seed", "show_admissible", "train_games", "eval_games", "no_sft",
           "no_opd", "static_skills", "shuffle_skills"}
    return {k: v for k, v in shared.items() if k not in old} | dict(
        env_args=[f"games={shared['games']}", f"list_actions={shared['show_admissible']}"],
        task_seed=shared["games_seed"], train_tasks=shared["train_games"],
        eval_tasks=shared["eval_games"], ablate="")


def identity(settings: dict) -> dict:
    """What must be the same in all records of a file: hash of the shared settings, hash of the
    base's weights."""
    return dict(
        settings_hash=digest(json.dumps(shared_settings(settings), sort_keys=True).encode()),
        base=digest((seed_mini.TINY / "alfworld" / "model.safetensors").read_bytes()))


def command(name: str, options: dict, folder: Path) -> list[str]:
    """The command line of a run (from the project's folder); a run that was broken off is
    resumed."""
    words = [sys.executable, "seed_mini.py"]
    for key, value in (dict(env="alfworld", model="tiny", out=folder, name=name) | options).items():
        words.append(f"--{key}")
        # a flag stands alone
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return words + (["--resume"] if (ROOT / folder / name / "config.json").exists() else [])


def options_of(arm: str, changes: dict, seed: int, settings: dict, folder: Path) -> dict:
    """All options of one run; the arm "start" is Stage 1 alone, which the other arms of its seed
    continue."""
    if arm == "start":
        changes = dict(updates=0)
    elif changes.get("ablate") != "no_sft":
        changes = changes | dict(sft_from=folder / f"start-s{seed}")
    return settings | dict(seed=seed) | changes


# --------------------------------------------------------------------------------------------------
# 2. What is kept of a run
# --------------------------------------------------------------------------------------------------
TRAINING = ("success", "frac_outcome_tied", "frac_reward_zero_std", "parse_rate", "gate_mean",
            "gate_above_half", "delta_won", "delta_lost", "invalid_action_rate", "kl", "entropy",
            "step_time")


def short(value):
    """Four significant digits; anything that is no float as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def lost(lines: list[dict]) -> dict[str, int]:
    """What the environment, not the policy, brought to its end, by counter: such episodes count as
    not won."""
    total = Counter()
    for line in lines:
        total.update({k: n for k, n in line.get("counters", {}).items()
                      if n and k.startswith(("env ", "task "))})
    return dict(total)


def evaluation(line: dict) -> dict:
    """An evaluation, small, but enough for any interval: who won which game, in the order of the
    sorted game ids.

    "by_type" and "games_seed" are the records' own words, older than the log's "by_kind" and
    "task_seed": so that one reader reads all records.
    """
    ids = sorted(line["tasks"])
    return dict(wins=line["wins"], n=line["n"],
                by_type={t: [v["wins"], v["n"]] for t, v in line["by_kind"].items()},
                won="".join("01"[line["tasks"][i]] for i in ids),
                ids=digest("\n".join(ids).encode()),
                invalid=short(line["invalid_action_rate"]), lost=lost([line]))


def on_task(line: dict) -> bool:
    """Whether a skill names the object and the place of its episode's task: is it at least about
    the right things?"""
    # died before its task was known
    if not line["goal"]:
        return False
    info = alfworld.parse_task(line["goal"])
    return {info.object, info.target} <= set(re.findall(r"\w+", line["skill"]))


def quoted(lines: list[dict]) -> dict:
    """Of the skills of one update: counts, and up to two different ones each of won and of lost
    episodes, verbatim."""
    picks, ok = [], [s for s in lines if s["skill"]]
    for outcome in (True, False):
        texts = {s["skill"]: s for s in sorted(ok, key=lambda s: s["task_id"])
                 if s["won"] == outcome}
        picks += [dict(task=s["goal"], won=s["won"], skill=s["skill"],
                       delta_mean=short(s["delta_mean"])) for s in list(texts.values())[:2]]
    words = sum(len(s["skill"].split()) for s in ok) / max(1, len(ok))
    return dict(n=len(lines), status=dict(Counter(s["status"] for s in lines)),
                distinct=len({s["skill"] for s in ok}), words=short(words),
                on_task=sum(map(on_task, ok)), quotes=picks)


def collect(run: Path, about: dict) -> list[dict]:
    """The records of a finished run, one per evaluation: `about`, results, and what happened since
    the one before."""
    config = json.loads((run / "config.json").read_text())
    defaults = dataclasses.asdict(seed_mini.resolve(seed_mini.Config()))
    differs = {k: v for k, v in config.items()
               if k in defaults and k not in BOOKKEEPING and v != defaults[k]}
    metrics, texts = (read_jsonl(run / f"{name}.jsonl") for name in ("metrics", "skills"))
    about = about | dict(config=differs, updates=config["updates"], games_seed=config["task_seed"],
                         commit=config["git_commit"] + changes_since_commit())
    records, before = [], 0
    for at in dict.fromkeys(m["at"] for m in metrics if m["stage"] == "eval"):
        update = 0 if at in ("base", "sft") else int(at)
        evals = [m for m in metrics if m["stage"] == "eval" and m["at"] == at]
        since = [m for m in metrics if m["stage"] == "rl" and before < m["update"] <= update]
        written = [s for s in texts if s["update"] == update and at != "base"]
        records.append(about | dict(
            at=at, update=update,
            eval={m["split"]: evaluation(m) for m in evals if not m["skill_in_context"]},
            eval_with_skill={m["split"]: evaluation(m) for m in evals if m["skill_in_context"]},
            training={k: [short(m.get(k)) for m in since] for k in TRAINING
                      if any(k in m for m in since)},
            lost=lost(since), skills=quoted(written) if written else None))
        before = update
    return records


def changes_since_commit() -> str:
    """"+changes" if the modules or the base are not as committed: a commit alone would then say the
    wrong thing."""
    # no git, or no checkout
    if not git_commit():
        return ""
    same = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "*.py", "notebooks/tiny_base"],
                          cwd=ROOT, capture_output=True).returncode == 0
    return "" if same else "+changes"


def keep(path: Path, new: list[dict]) -> None:
    """Add the records of one run to the file, sorted. Written to a temporary name first: a kill
    leaves the old file."""
    records = read_jsonl(path) + new
    records.sort(key=lambda r: (r["arm"], r["seed"], r["update"], r["at"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(r) + "\n" for r in records))
    temporary.replace(path)


def drift(records: list[dict], settings: dict) -> list[str]:
    """In which values the records' settings, or their base, differ from today's (options that are
    new: left out)."""
    now, base = shared_settings(settings), identity(settings)["base"]
    then = {k: v for r in records for k, v in todays_names(r.get("shared", {})).items()}
    out = [f"{k} was {v!r}, is {now[k]!r}" for k, v in then.items() if k in now and now[k] != v]
    others = sorted({r["base"] for r in records} - {base})
    return out + [f"the base was {b}, is {base}" for b in others]


def refuse_mixture(path: Path, settings: dict) -> None:
    """ValueError if the file holds records of other settings, or of another base, than those about
    to be made."""
    records = read_jsonl(path)
    if any(r[k] != v for r in records for k, v in identity(settings).items()):
        what = ("; ".join(drift(records, settings))
                or "an option that did not exist then, or had another name")
        raise ValueError(f"{path.name} holds records of something else ({what}). Records are never "
                         "mixed: move that file away, or put the settings and the base back.")


def read(*names: str) -> list[dict]:
    """The kept records of these experiments: the reported ones, or, if any is missing, a trial's
    (see "purpose")."""
    for suffix in ("", ".trial"):
        files = [HERE / "data" / f"{name}{suffix}.jsonl" for name in names]
        if all(file.exists() for file in files):
            return [record for file in files for record in read_jsonl(file)]
    raise ValueError(f"no records of {', '.join(names)}: make them with "
                     "python notebooks/experiments.py.")


# --------------------------------------------------------------------------------------------------
# 3. Running them
# --------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def locked(folder: Path):
    """One launcher per folder. Runs inherit the lock, so what a killed launcher left running is not
    started twice."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError("an experiment with these settings, or a run that a killed one left "
                             f"behind, is still going in {folder.name}: wait for it, or end "
                             "it.") from None
        yield lock.fileno()


def launch(words: list[str], log: Path, lock: int) -> int:
    """Run one command to its end, its output appended to `log`; its exit code. (The tests put a
    stub in its place.)"""
    with open(log, "a") as out:
        return subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
                              stderr=subprocess.STDOUT, pass_fds=(lock,),
                              env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def make(name: str, options: dict, folder: Path, lock: int,
         after: concurrent.futures.Future | None) -> float | None:
    """Bring one run to its end unless it is there. Returns its seconds; None if unknown (there
    before, or resumed).

    `after` is the run it continues. RuntimeError, with the log's last line, if the run fails.
    """
    if after is not None:
        after.result()
    if (ROOT / folder / name / "report.md").exists():
        return None
    log, words = ROOT / folder / f"{name}.log", command(name, options, folder)
    began = time.perf_counter()
    if code := launch(words, log, lock):
        said = log.read_text().strip().splitlines() if log.exists() else []
        raise RuntimeError(f"seed_mini ended with code {code}: {said[-1] if said else 'no output'}")
    return None if "--resume" in words else round(time.perf_counter() - began, 1)


def missing(experiment: str, seeds, path: Path) -> list[tuple[str, dict, int]]:
    """(arm, changes, seed) of the runs whose records are not in the file, and before them the Stage
    1 they need."""
    have = {(r["arm"], r["seed"]) for r in read_jsonl(path)}
    arms = [(arm, changes, seed) for seed in seeds for arm, changes in arms_of(experiment).items()
            if (arm, seed) not in have]
    starts = dict.fromkeys(seed for _, changes, seed in arms if changes.get("ablate") != "no_sft")
    return [("start", {}, seed) for seed in starts] + arms


def run_experiment(experiment: str, settings: dict, seeds, path: Path, runs: Path, jobs: int = 2,
                   purpose: str = "reported", say=print) -> list[str]:
    """Make every missing run, `jobs` side by side, and keep its records in `path`. Returns a
    sentence per failed run.

    runs: the folder for all runs, relative to the project. ValueError before anything runs if
    records would be mixed.
    """
    refuse_mixture(path, settings)
    same = identity(settings)
    folder = runs / "-".join(same.values())
    machine = dict(cores=os.cpu_count(), torch=torch.__version__, side_by_side=jobs)
    about = same | dict(experiment=experiment, purpose=purpose, machine=machine)
    # every value: in Stage 1's records only, to keep the file small
    whole = dict(shared=shared_settings(settings))
    failed, futures = [], {}
    with locked(ROOT / folder) as lock, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        # first in, first out: nobody waits for a later one
        for arm, changes, seed in missing(experiment, seeds, path):
            alone = arm == "start" or changes.get("ablate") == "no_sft"
            after = None if alone else futures["start", seed]
            options = options_of(arm, changes, seed, settings, folder)
            futures[arm, seed] = pool.submit(make, f"{arm}-s{seed}", options, folder, lock, after)
        names = {future: name for name, future in futures.items()}
        try:
            for future in concurrent.futures.as_completed(names):
                arm, seed = names[future]
                if future.exception():
                    failed.append(f"{arm}-s{seed}: {future.exception()}")
                    say(f"FAILED {failed[-1]}")
                    continue
                about_run = about | dict(arm=arm, seed=seed, wall_seconds=future.result())
                records = collect(ROOT / folder / f"{arm}-s{seed}",
                                  about_run | (whole if arm == "start" else {}))
                if (arm, seed) not in {(r["arm"], r["seed"]) for r in read_jsonl(path)}:
                    keep(path, records)
                won = ", ".join(
                    f"{split} {e['wins']}/{e['n']}" for split, e in records[-1]["eval"].items())
                say(f"{arm}-s{seed}: {won}"
                    + (f" in {future.result() / 60:.1f} min" if future.result() else ""))
        # the runs got it, too; those that had not begun must not begin now
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return failed


def main(argv: list[str] | None = None) -> int:
    """Command line: 0 all there, 1 a run failed, 2 refused (one sentence), 130 stopped."""
    parser = argparse.ArgumentParser(prog="python notebooks/experiments.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true",
                       help="a trial; records go to EXPERIMENT.trial.jsonl")
    which.add_argument(
        "--tuning", action="store_true",
        help="seeds and houses that are not reported; records go to EXPERIMENT.tuning.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+",
                        help="these seeds; more can be added to a file later")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args(argv)
    purpose = "trial" if args.quick else "tuning" if args.tuning else "reported"
    variant = dict(trial=QUICK, tuning=TUNING, reported=dict(seeds=SEEDS, settings={}))[purpose]
    seeds = args.seeds or variant["seeds"][:None if args.experiment == "curves" else FEW]
    settings = COMMON | variant["settings"]
    if mixed := set(seeds) & set(SEEDS if purpose == "tuning" else TUNING["seeds"]):
        owner = "reported" if purpose == "tuning" else "tuning"
        print(f"experiments: seed {min(mixed)} belongs to the {owner} runs; what is chosen on a "
              "seed is not reported on it.", file=sys.stderr)
        return 2
    suffix = "" if purpose == "reported" else f".{purpose}"
    path = HERE / "data" / f"{args.experiment}{suffix}.jsonl"
    runs, began = Path("notebooks/runs"), time.perf_counter()
    if args.list:
        folder = runs / "-".join(identity(settings).values())
        for arm, changes, seed in missing(args.experiment, seeds, path):
            options = options_of(arm, changes, seed, settings, folder)
            print(" ".join(command(f"{arm}-s{seed}", options, folder)))
        return 0
    say = lambda text: print(text, flush=True)
    try:
        # made once, not by two runs at once
        say(seed_mini.find_tasks(seed_mini.resolve(seed_mini.Config(**settings)))[2])
        failed = run_experiment(args.experiment, settings, seeds, path, runs, args.jobs, purpose,
                                say)
    except ValueError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    minutes = (time.perf_counter() - began) / 60
    say(f"{args.experiment}: {len(failed)} failed, {minutes:.1f} minutes; records in "
        f"notebooks/data/{path.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
