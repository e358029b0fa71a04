"""What the safety of a run costs: `python tests/safety_cost.py [options of seed_mini.py]` prints
its share of the main job's time.

One run, one stopwatch around each safety measure: the share is a ratio within that run, so a busy
machine does not matter much.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

import runs  # noqa: E402
import seed_mini as sm  # noqa: E402

MEASURES = {
    "checksums": "sha256",
    "syncing to the disk": "sync",
    "checks for finite numbers": "drop_not_finite",
    "health of the weights": "still_healthy",
    "rewriting NaN for JSON": "finite",
    "checking a checkpoint": "good_checkpoint",
}
WRITING = {
    "checkpoints, all of it": "save",
    "log lines": "log",
    "rollouts and skills": "write_rollouts",
}


def timed(owner, name: str, spent: dict) -> None:
    """Replace owner.name by itself with a stopwatch; a recursive call counts once."""
    real, running = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        """The same call, timed."""
        if running:
            return real(*args, **kwargs)
        running.append(1)
        start = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
            running.clear()

    setattr(owner, name, wrapped)


def main() -> int:
    """0 if the safety measures took at most 3% of the run."""
    spent, start = {}, time.perf_counter()
    for name in MEASURES.values():
        timed(runs, name, spent)
    for name in WRITING.values():
        timed(runs.Run, name, spent)
    options = sys.argv[1:] or ["--updates", "10", "--eval_every", "5"]
    with tempfile.TemporaryDirectory() as folder:
        code = sm.main(["--out", folder, "--name", "cost", *options])
    total = time.perf_counter() - start
    if code:
        return code
    about = f"(torch {torch.__version__}, {total:.0f} s in all)"
    print(f"\n{'safety measure':<28}{'seconds':>9}{'share':>9}   {about}")
    for label, name in (MEASURES | WRITING).items():
        seconds = spent.get(name, 0.0)
        more = "   includes checksums and syncing" if name == "save" else ""
        print(f"{label:<28}{seconds:>9.3f}{seconds / total:>9.2%}{more}")
    safety = sum(spent.get(name, 0.0) for name in MEASURES.values())
    # Double counts, to be on the safe side.
    everything = safety + sum(spent.get(name, 0.0) for name in WRITING.values())
    print(
        f"safety measures {safety / total:.2%}, with all writing {everything / total:.2%} of the "
        "main job (allowed: 3%)"
    )
    return int(everything / total > 0.03)


if __name__ == "__main__":
    sys.exit(main())
