"""The reduced-scale experiments: which runs there are, how to make them, and what is kept of them.

    python notebooks/experiments.py curves             # GRPO vs SEED: 5 seeds, both arms from their seed's own Stage 1
    python notebooks/experiments.py ablations          # 3 seeds: what is left when a part of SEED is taken out
    python notebooks/experiments.py sensitivity        # 3 seeds: lambda_opd and beta_opd, one changed at a time
    python notebooks/experiments.py curves --quick     # a trial of a minute or two: same code, far too small to say anything
    python notebooks/experiments.py curves --tuning    # other seeds, other houses: where settings are chosen
    python notebooks/experiments.py curves --list      # print the command of every run, run nothing

Every run is an ordinary `python seed_mini.py ...` with the defaults of its profile (change PROFILES and the experiment changes); what is added
stands in COMMON and arms_of below. Two runs go side by side, one core and one torch thread each. Killed? Give the same command again:
an arm whose records are there is skipped, an unfinished run goes on from its newest checkpoint with --resume.

Runs stay in notebooks/runs/SETTINGS-BASE/ (hashes of the settings and of the base's weights, so that no run continues another's). What the
notebooks read is notebooks/data/EXPERIMENT.jsonl: one line per arm, seed and evaluation, with who won which game, the training metrics
since the evaluation before, and a few skills as they were written. A file never mixes settings or bases: then the command refuses.
Ablations and sensitivity take SEED and GRPO themselves from the curves of the same seeds, so make the curves first.
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
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import torch

import envs
import seed_mini

# ------------------------------------------------------------------------------------------------------------------
# 1. Which runs
# ------------------------------------------------------------------------------------------------------------------
# Settings are chosen on TUNING's seeds and houses and reported on these; never the other way round.
SEEDS, FEW = (0, 1, 2, 3, 4), 3  # FEW: how many of them the ablations and the sensitivity use
COMMON = dict(games="generated", games_seed=0, eval_splits=["valid_seen", "valid_unseen"], threads=1, workers=1)
TUNING = dict(seeds=(100, 101, 102), settings=dict(games_seed=1))
QUICK = dict(seeds=(0, 1), settings=dict(sft_tasks=20, sft_rollouts=4, sft_batch=4, sft_epochs=6, updates=5, tasks_per_update=3,
                                         group_size=4, eval_every=1, eval_games=24))  # 120 small steps: enough for skills that parse
EXPERIMENTS = ("curves", "ablations", "sensitivity")


def arms_of(experiment: str) -> dict[str, dict]:
    """The arms of an experiment: name -> options of seed_mini.py beyond the common ones. All but the no_sft arms share Stage 1.

    no_opd trains on exactly what GRPO trains on, from the same start, so it must come out equal to it: a check of the code more than an
    ablation. The paper's GRPO, which never saw Stage 1, is grpo_no_sft. lambda_opd is varied around the profile's value.
    """
    if experiment == "curves":
        return {"grpo": dict(method="grpo"), "seed": {}}
    if experiment == "ablations":
        return {"no_sft": dict(no_sft=True), "no_opd": dict(no_opd=True), "static": dict(static_skills=True),
                "shuffled": dict(shuffle_skills=True), "grpo_no_sft": dict(method="grpo", no_sft=True)}
    middle = seed_mini.PROFILES["tiny"]["lambda_opd"]
    lambdas = [float(f"{factor * middle:.2g}") for factor in (0.1, 1 / 3, 3)]
    return {f"lambda_opd={v:g}": dict(lambda_opd=v) for v in lambdas} | {f"beta_opd={v:g}": dict(beta_opd=float(v)) for v in (0, 1, 20)}


def digest(data: bytes) -> str:
    """Twelve hex digits of a SHA-256: enough to tell settings apart."""
    return hashlib.sha256(data).hexdigest()[:12]


# Not settings: which run it is, where it lies, how it was started.
BOOKKEEPING = {f.name for f in dataclasses.fields(seed_mini.Config)} & {"name", "out", "seed", "resume", "overwrite", "sft_from", "debug", "eval"}


def shared_settings(settings: dict) -> dict:
    """Every option that all arms share, resolved through the profile: what `settings` (COMMON and a variant) really means today."""
    config = dataclasses.asdict(seed_mini.resolve(seed_mini.Config(**settings)))
    return {k: v for k, v in config.items() if k not in BOOKKEEPING}


def identity(settings: dict) -> dict:
    """What must be the same in all records of a file: hash of the shared settings, hash of the base's weights."""
    return dict(settings_hash=digest(json.dumps(shared_settings(settings), sort_keys=True).encode()),
                base=digest((seed_mini.TINY / "model.safetensors").read_bytes()))


def command(name: str, options: dict, folder: Path) -> list[str]:
    """The command line of a run (from the project's folder); a run that was broken off is resumed."""
    options = dict(env="alfworld", model="tiny", out=folder, name=name) | options
    words = [sys.executable, "seed_mini.py"]
    for key, value in options.items():
        words += [f"--{key}"] + ([] if value is True else [str(v) for v in value] if isinstance(value, list) else [str(value)])
    return words + (["--resume"] if (ROOT / folder / name / "config.json").exists() else [])


def options_of(arm: str, changes: dict, seed: int, settings: dict, folder: Path) -> dict:
    """All options of one run; the arm "start" is Stage 1 alone, which the other arms of its seed continue."""
    if arm == "start":
        changes = dict(updates=0)
    elif "no_sft" not in changes:
        changes = changes | dict(sft_from=folder / f"start-s{seed}")
    return settings | dict(seed=seed) | changes


# ------------------------------------------------------------------------------------------------------------------
# 2. What is kept of a run
# ------------------------------------------------------------------------------------------------------------------
TRAINING = ("success", "frac_outcome_tied", "frac_reward_zero_std", "parse_rate", "gate_mean", "gate_above_half", "delta_won", "delta_lost",
            "invalid_action_rate", "kl", "entropy", "step_time")


def short(value):
    """Four significant digits; anything that is no float as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def evaluation(line: dict) -> dict:
    """An evaluation so small that every interval can still be computed: who won which game, in the order of the sorted game ids."""
    ids = sorted(line["games"])
    return dict(wins=line["wins"], n=line["n"], by_type={t: [v["wins"], v["n"]] for t, v in line["by_type"].items()},
                won="".join("01"[line["games"][i]] for i in ids), ids=digest("\n".join(ids).encode()), invalid=short(line["invalid_action_rate"]))


def quoted(lines: list[dict]) -> dict:
    """Of the skills of one update: counts, and the first two different ones of won and of lost episodes, as they were written."""
    picks, ok = [], [s for s in lines if s["skill"]]
    for outcome in (True, False):
        texts = {s["skill"]: s for s in sorted(ok, key=lambda s: s["game_id"], reverse=True) if s["won"] == outcome}
        picks += [{k: short(s[k]) for k in ("task", "won", "skill", "delta_mean")} for s in list(texts.values())[-2:]]
    return dict(n=len(lines), status=dict(Counter(s["status"] for s in lines)), distinct=len({s["skill"] for s in ok}),
                words=short(sum(len(s["skill"].split()) for s in ok) / max(1, len(ok))), quotes=picks)


def collect(run: Path, about: dict) -> list[dict]:
    """The records of a finished run: `about` (arm, seed, ...), and for each evaluation its results and what happened since the one before."""
    config = json.loads((run / "config.json").read_text())
    defaults = dataclasses.asdict(seed_mini.resolve(seed_mini.Config()))
    metrics, skills = seed_mini.read_jsonl(run / "metrics.jsonl"), seed_mini.read_jsonl(run / "skills.jsonl")
    differs = {k: v for k, v in config.items() if k in defaults and k not in BOOKKEEPING and v != defaults[k]}
    records, before = [], 0
    for at in dict.fromkeys(m["at"] for m in metrics if m["stage"] == "eval"):
        update = 0 if at in ("base", "sft") else int(at)
        evals = [m for m in metrics if m["stage"] == "eval" and m["at"] == at]
        record = about | dict(at=at, update=update, updates=config["updates"], games_seed=config["games_seed"], config=differs,
                              commit=config["git_commit"] + changes_since_commit(),
                              eval={m["split"]: evaluation(m) for m in evals if not m["skill_in_context"]},
                              eval_with_skill={m["split"]: evaluation(m) for m in evals if m["skill_in_context"]})
        since = [m for m in metrics if m["stage"] == "rl" and before < m["update"] <= update]
        record["training"] = {k: [short(m[k]) for m in since] for k in TRAINING if since and k in since[0]}
        written = [s for s in skills if s["update"] == update and at != "base"]
        record["skills"] = quoted(written) if written else None
        records.append(record)
        before = update
    return records


def changes_since_commit() -> str:
    """"+changes" if the modules or the base are not as committed: a commit alone would then say the wrong thing."""
    done = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "*.py", "notebooks/tiny_base"], cwd=ROOT, capture_output=True)
    return "" if done.returncode == 0 else "+changes"


def keep(path: Path, new: list[dict]) -> None:
    """Add the records of one run to the file, sorted, by writing the whole file to a temporary name first: a kill leaves the old one."""
    records = seed_mini.read_jsonl(path) + new
    records.sort(key=lambda r: (r["arm"], r["seed"], r["update"], r["at"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(r) + "\n" for r in records))
    temporary.replace(path)


def refuse_mixture(path: Path, identity: dict, settings: dict) -> None:
    """ValueError if the file holds records of other settings, or of another base, than the run that is about to start."""
    records = seed_mini.read_jsonl(path)
    if any(r[k] != v for r in records for k, v in identity.items()):
        text = "; ".join(drift(records, settings)) or "an option that did not exist then"
        raise ValueError(f"{path.name} holds records of something else ({text}). Records are never mixed: move that file away, or put "
                         "the settings and the base back.")


def drift(records: list[dict], settings: dict) -> list[str]:
    """In which values the records' settings (or base) differ from today's; options that did not exist then are left out."""
    now, base = shared_settings(settings), identity(settings)["base"]
    then = {k: v for r in records for k, v in r.get("shared", {}).items()}
    out = [f"{k} was {v!r}, is {now[k]!r}" for k, v in then.items() if k in now and now[k] != v]
    return out + [f"the base was {b}, is {base}" for b in sorted({r["base"] for r in records} - {base})]


def read(*names: str) -> list[dict]:
    """The kept records of these experiments, of all of them or of none: the reported ones, or else those of trials ("purpose" says so)."""
    for suffix in ("", ".trial"):
        files = [HERE / "data" / f"{name}{suffix}.jsonl" for name in names]
        if all(file.exists() for file in files):
            return [record for file in files for record in seed_mini.read_jsonl(file)]
    raise ValueError(f"no records of {', '.join(names)}: make them with python notebooks/experiments.py.")


# ------------------------------------------------------------------------------------------------------------------
# 3. Running them
# ------------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def locked(folder: Path):
    """One launcher per folder. The runs inherit the lock: after a kill -9 of the launcher alone, a new one waits for nobody, it refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"an experiment with these settings, or a run that one left behind, is still going in {folder.name}.") from None
        yield lock.fileno()


def launch(words: list[str], log: Path, lock: int) -> int:
    """Run one command to its end, its output appended to `log`; its exit code. (The tests put a stub in its place.)"""
    with open(log, "a") as out:
        return subprocess.run(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, pass_fds=(lock,),
                              env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def make(name: str, options: dict, folder: Path, lock: int, after: concurrent.futures.Future | None) -> float | None:
    """Bring one run to its end unless it is there: seconds it took, None if they are not known (finished before, or resumed).

    `after` is the run it continues. RuntimeError, with the log's last line, if the run fails.
    """
    if after is not None:
        after.result()
    run, log = ROOT / folder / name, ROOT / folder / f"{name}.log"
    if (run / "report.md").exists():
        return None
    words, began = command(name, options, folder), time.perf_counter()
    if code := launch(words, log, lock):
        last = (log.read_text().strip().splitlines() or ["no output"])[-1] if log.exists() else "no output"
        raise RuntimeError(f"seed_mini ended with code {code}: {last}")
    return None if "--resume" in words else round(time.perf_counter() - began, 1)


def missing(experiment: str, seeds, path: Path) -> list[tuple[str, dict, int]]:
    """(arm, changes, seed) of the runs whose records are not in the file, Stage 1 of a seed before the arms that start from it."""
    have = {(r["arm"], r["seed"]) for r in seed_mini.read_jsonl(path)}
    arms = [(arm, changes, seed) for seed in seeds for arm, changes in arms_of(experiment).items() if (arm, seed) not in have]
    needed = dict.fromkeys(seed for _, changes, seed in arms if "no_sft" not in changes)
    return [("start", {}, seed) for seed in needed] + arms


def run_experiment(experiment: str, settings: dict, seeds, path: Path, runs: Path, jobs: int = 2, purpose: str = "reported", say=print) -> list[str]:
    """Make every missing run, `jobs` side by side, and keep its records in `path`. Returns a sentence for each run that failed.

    runs: the folder for all runs, relative to the project. Raises ValueError before anything runs if the records would be mixed.
    """
    same = identity(settings)
    refuse_mixture(path, same, settings)
    folder = runs / f"{same['settings_hash']}-{same['base']}"
    about = same | dict(experiment=experiment, purpose=purpose, machine=dict(cores=os.cpu_count(), torch=torch.__version__, side_by_side=jobs))
    whole = {"shared": shared_settings(settings)}  # every value, in the records of Stage 1 only; the others have what differs from the defaults
    failed, futures = [], {}
    with locked(ROOT / folder) as lock, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for arm, changes, seed in missing(experiment, seeds, path):  # first in, first out: a run never waits for one that comes later
            after = None if arm == "start" or "no_sft" in changes else futures["start", seed]
            futures[arm, seed] = pool.submit(make, f"{arm}-s{seed}", options_of(arm, changes, seed, settings, folder), folder, lock, after)
        try:
            names = {future: name for name, future in futures.items()}
            for future in concurrent.futures.as_completed(names):
                arm, seed = names[future]
                if future.exception():
                    failed.append(f"{arm}-s{seed}: {future.exception()}")
                    say(f"FAILED {failed[-1]}")
                    continue
                line = about | dict(arm=arm, seed=seed, wall_seconds=future.result()) | (whole if arm == "start" else {})
                records = collect(ROOT / folder / f"{arm}-s{seed}", line)
                if (arm, seed) not in {(r["arm"], r["seed"]) for r in seed_mini.read_jsonl(path)}:
                    keep(path, records)
                say(f"{arm}-s{seed}: " + ", ".join(f"{split} {e['wins']}/{e['n']}" for split, e in records[-1]["eval"].items())
                    + (f" in {future.result() / 60:.1f} min" if future.result() else ""))
        except KeyboardInterrupt:  # the runs got it, too; those that had not begun must not begin now
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return failed


def main(argv: list[str] | None = None) -> int:
    """Command line: 0 all there, 1 a run failed, 2 refused (one sentence), 130 stopped."""
    parser = argparse.ArgumentParser(prog="python notebooks/experiments.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="a trial: few games and updates; records go to EXPERIMENT.trial.jsonl")
    which.add_argument("--tuning", action="store_true", help="seeds and houses that are not reported; records go to EXPERIMENT.tuning.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", help="these seeds instead; more seeds can be added to a file later")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    args = parser.parse_args(argv)
    variant, purpose = (QUICK, "trial") if args.quick else (TUNING, "tuning") if args.tuning else (dict(seeds=SEEDS, settings={}), "reported")
    seeds = args.seeds or (variant["seeds"] if args.experiment == "curves" else variant["seeds"][:FEW])
    settings = COMMON | variant["settings"]
    path = HERE / "data" / (f"{args.experiment}.jsonl" if purpose == "reported" else f"{args.experiment}.{purpose}.jsonl")
    runs = Path("notebooks/runs")
    if args.list:
        folder = runs / "-".join(identity(settings).values())
        for arm, changes, seed in missing(args.experiment, seeds, path):
            print(" ".join(command(f"{arm}-s{seed}", options_of(arm, changes, seed, settings, folder), folder)))
        return 0
    began = time.perf_counter()
    try:
        print(envs.find_games("generated", seed=settings["games_seed"])[1], flush=True)  # once, before two runs would make them at once
        failed = run_experiment(args.experiment, settings, seeds, path, runs, args.jobs, purpose, say=lambda text: print(text, flush=True))
    except ValueError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"{args.experiment}: {len(failed)} failed, {(time.perf_counter() - began) / 60:.1f} minutes; records in notebooks/data/{path.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
