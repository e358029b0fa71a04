"""The stock ALFWorld engine and ours side by side: speed and text, in one table.

    python tests/engine_benchmark.py [--games DIR] [--steps 50]

Python 3.11 or 3.12: the stock engine raises NameError from 3.13 on, ours does not.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environments import alfworld_engine, alfworld_games  # noqa: E402


def compare(stock, ours, path: str, steps: int, seed: int) -> tuple[dict[str, list], int, int]:
    """Plays one game on two engines side by side: its known solution, then `steps` random commands,
    some of them wrong.

    Returns ({kind of call: [seconds stock, seconds ours, calls]}, resets and steps compared, how
    many differed); the text, the admissible commands in their order, won, score and done are
    compared.
    """
    times = {kind: [0.0, 0.0, 0] for kind in ("first load", "load again", "reset", "step")}
    compared = differed = 0

    def both(kind, call):
        nonlocal compared, differed
        results = []
        for i, engine in enumerate((stock, ours)):
            start = time.perf_counter()
            results.append(call(engine))
            times[kind][i] += time.perf_counter() - start
        times[kind][2] += 1
        states = [result[0] if kind == "step" else result for result in results]
        if states[0] is not None:
            views = [
                (s["feedback"], s["admissible_commands"], s["won"], s.score, s.done) for s in states
            ]
            compared, differed = compared + 1, differed + (views[0] != views[1])
        return states[0]

    both("first load", lambda engine: engine.load(path))
    # As in another worker or another run: the translation comes from the disk cache.
    alfworld_engine._load_game.cache_clear()
    both("load again", lambda engine: engine.load(path))
    game_data, traj_data = (
        json.loads(Path(path).with_name(name).read_text(encoding="utf-8"))
        for name in ("game.tw-pddl", "traj_data.json")
    )
    state = both("reset", lambda engine: engine.reset())
    for command in game_data.get("walkthrough") or alfworld_games.solve(game_data, traj_data):
        state = both("step", lambda engine: engine.step(command))
    differed += not state["won"]
    rng = random.Random(seed)
    for n in range(steps):
        if n % 50 == 0 or state["won"]:
            state = both("reset", lambda engine: engine.reset())
        known = state["admissible_commands"]
        command = rng.choice(known) if rng.random() < 0.9 else "go to nowhere 1"
        state = both("step", lambda engine: engine.step(command))
    return times, compared, differed


def benchmark(paths: list[str], steps: int) -> int:
    """Prints stock against ours, milliseconds per call, timed in turn in this process. Returns the
    differing calls."""
    from textworld.envs.pddl import PddlEnv

    ours = alfworld_engine.take_engine()
    stock = type(ours)(PddlEnv())
    totals, compared, differed = {}, 0, 0
    for seed, path in enumerate(paths):
        times, n, bad = compare(stock, ours, path, steps, seed)
        totals = {
            kind: [a + b for a, b in zip(totals.get(kind, (0, 0, 0)), row)]
            for kind, row in times.items()
        }
        compared, differed = compared + n, differed + bad
    print(f"{'ms per call':<12}{'stock':>10}{'ours':>10}{'ratio':>9}   calls")
    for kind, (slow, fast, calls) in totals.items():
        print(
            f"{kind:<12}{1e3 * slow / calls:>10.2f}{1e3 * fast / calls:>10.2f}"
            f"{slow / fast:>8.1f}x   {calls}"
        )
    print(f"{compared:,} resets and steps of {len(paths)} games compared: {differed} differences")
    return differed


def main() -> int:
    """Command line. 0: no differences, 1: some, 2: bad input."""
    parser = argparse.ArgumentParser(
        description="Compares the stock ALFWorld engine with ours: speed and text."
    )
    parser.add_argument(
        "--games", metavar="DIR", help="folder with game.tw-pddl files below it (default: 12 new)"
    )
    parser.add_argument(
        "--steps", type=int, default=50, help="random steps per game after its solution"
    )
    args = parser.parse_args()
    if sys.version_info >= (3, 13):
        parser.error("the stock engine does not run on Python 3.13 or later: nothing to compare")
    with tempfile.TemporaryDirectory() as folder:
        # An empty disk cache, or no load would be a first one.
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        if not args.games:
            alfworld_games.generate_games(Path(folder) / "games", 0, {"train": 12})
            # Generating plays, and so translates, every game.
            shutil.rmtree(f"{folder}/cache")
        paths = sorted(map(str, Path(args.games or folder).rglob("game.tw-pddl")))
        if not paths:
            parser.error(f"no game.tw-pddl below {args.games}")
        return 1 if benchmark(paths, args.steps) else 0


if __name__ == "__main__":
    sys.exit(main())
