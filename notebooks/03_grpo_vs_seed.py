# %% [markdown]
# # 03 · GRPO against SEED, at reduced scale
#
# Two arms, one difference. Both start from the *same* Stage-1 checkpoint of a seed and see the same games in the same order, with the same
# steps, history and evaluation; one of them adds the gated distillation term. The tiny base, generated houses, the real engine.
#
# The curves below are drawn from records that `python notebooks/experiments.py curves` made (each run's configuration and git commit stand
# in the first line of its file in `data/curves/`). The last section trains both arms live, for a few updates.
#
# Time: seconds for the curves, about four minutes for the live run.

# %%
import os
import sys
from pathlib import Path

HERE = Path.cwd() if (Path.cwd() / "experiments.py").exists() else Path.cwd() / "notebooks"
if not (HERE / "experiments.py").exists():  # Colab: fetch the project and what it needs
    os.system("git clone -q https://github.com/seed-mini/seed_mini && pip install -q -r seed_mini/requirements.txt")
    HERE = Path.cwd() / "seed_mini" / "notebooks"
sys.path[:0] = [str(HERE), str(HERE.parent)]

import matplotlib.pyplot as plt
import numpy as np

import experiments
import seed_mini

QUICK = os.environ.get("SEED_MINI_QUICK") == "1"
ARMS = {"seed": dict(color="#0072B2", ls="-", marker="o"), "grpo": dict(color="#D55E00", ls="--", marker="s")}
SPLITS = {"valid_seen": "known houses, new placements", "valid_unseen": "houses never in training"}

# %%
records = experiments.read_records("curves")
SEEDS = sorted({int(name.rsplit("-s", 1)[1]) for name in records if name.startswith("seed")})
config = records[f"seed-s{SEEDS[0]}"][0]
print(f"{len(SEEDS)} seeds; {config['updates']} updates of {config['tasks_per_update']} games x {config['group_size']} rollouts; lr {config['lr']}, "
      f"lambda {config['lambda_opd']}, beta {config['beta_opd']}, KL {config['kl_coef']}; commit {config['git_commit'][:10]}")


def wins(arm: str, seed: int, split: str) -> np.ndarray:
    """Won games of one run, [E, n]: evaluation by evaluation (the first is the shared start), games in sorted order."""
    return np.array([m["games"] for m in records[f"{arm}-s{seed}"] if m["stage"] == "eval" and m["split"] == split and not m["skill_in_context"]])


at = [0 if m["at"] == "sft" else int(m["at"]) for m in records[f"seed-s{SEEDS[0]}"] if m["stage"] == "eval" and m["split"] == "valid_unseen" and not m["skill_in_context"]]
W = {(arm, split): np.stack([wins(arm, s, split) for s in SEEDS]) for arm in ARMS for split in SPLITS}  # [seeds, E, n]
for split in SPLITS:
    assert np.array_equal(W["seed", split][:, 0], W["grpo", split][:, 0]), "both arms must start from the same policy"
    assert W["seed", split].shape[2] >= 120

# %% [markdown]
# ## The curves
#
# Thin lines are seeds, thick lines their mean, bands the 95% t-interval of the mean over seeds. Each point is one evaluation of every game of
# the split, once, at temperature 0.4, from ordinary history alone.

# %%
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def mean_band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds [E] and the half-width of its 95% t-interval [E]; values [seeds, E]."""
    n = len(values)
    return values.mean(0), T95[n] * values.std(0, ddof=1) / np.sqrt(n)


fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
for ax, (split, words) in zip(axes, SPLITS.items()):
    for arm, style in ARMS.items():
        curve = 100 * W[arm, split].mean(2)  # [seeds, E]
        mean, half = mean_band(curve)
        for line in curve:
            ax.plot(at, line, color=style["color"], ls=style["ls"], lw=0.7, alpha=0.45)
        ax.plot(at, mean, lw=2.4, label=f"{arm.upper()} (mean of {len(SEEDS)} seeds, 95% band)", **style)
        ax.fill_between(at, mean - half, mean + half, color=style["color"], alpha=0.15, lw=0)
    ax.set(title=f"{split}: {words} (n = {W['seed', split].shape[2]} games)", xlabel="update", ylim=(0, None))
    ax.grid(alpha=0.25)
axes[0].set_ylabel("success (%), ordinary history only")
axes[0].legend(frameon=False, loc="upper left")
fig.tight_layout()
if not QUICK:
    fig.savefig(HERE / "grpo_vs_seed.png", dpi=130)
plt.show()

# %% [markdown]
# ## How sure is that?
#
# The difference at the end, and in the area under the curve (mean over the evaluations after the start). The bootstrap resamples seeds, and
# within each seed the games, always in pairs: both arms of a seed meet the same games with the same luck. Macro = mean over the six task types.

# %%
def paired_bootstrap(a: np.ndarray, b: np.ndarray, rounds: int = 10_000) -> tuple[float, float, float]:
    """Mean difference of two [seeds, n] tables of per-game scores and its 95% interval, in points."""
    rng = seed_mini.counted_rng(0, "bootstrap")
    diff = 100 * (a - b)
    seeds = rng.integers(len(diff), size=(rounds, len(diff)))
    draws = np.empty(rounds)
    for r in range(rounds):
        games = rng.integers(diff.shape[1], size=(len(diff), diff.shape[1]))
        draws[r] = np.take_along_axis(diff[seeds[r]], games, 1).mean()
    return diff.mean(), *np.percentile(draws, [2.5, 97.5])


rounds = 1_000 if QUICK else 10_000
print(f"{'split':14s} {'what':22s} {'SEED':>7s} {'GRPO':>7s} {'difference [95%]':>26s}")
result = {}
for split in SPLITS:
    s, g = W["seed", split].astype(float), W["grpo", split].astype(float)
    for what, a, b in (("last update", s[:, -1], g[:, -1]), ("area under the curve", s[:, 1:].mean(1), g[:, 1:].mean(1))):
        d, low, high = result[split, what] = paired_bootstrap(a, b, rounds)
        print(f"{split:14s} {what:22s} {100 * a.mean():6.1f}% {100 * b.mean():6.1f}% {d:+8.1f} [{low:+.1f}, {high:+.1f}] points")

# %%
print(f"{'arm':6s} {'split':14s} {'start':>7s} {'end':>7s} {'macro':>7s}   by task type at the end")
for arm in ARMS:
    for split in SPLITS:
        last = [[m for m in records[f"{arm}-s{s}"] if m["stage"] == "eval" and m["split"] == split and not m["skill_in_context"]][-1] for s in SEEDS]
        types = {t: np.mean([m["by_type"][t]["success"] for m in last]) for t in last[0]["by_type"]}
        print(f"{arm:6s} {split:14s} {100 * W[arm, split][:, 0].mean():6.1f}% {100 * W[arm, split][:, -1].mean():6.1f}% {100 * np.mean(list(types.values())):6.1f}%   "
              + "  ".join(f"{t.split('_')[1]} {100 * v:.0f}" for t, v in types.items()))

# %% [markdown]
# ## Sample efficiency
#
# SEED after 20, 40, 60, 80 and 100% of the updates against GRPO after all of them.

# %%
for split in SPLITS:
    end = 100 * W["grpo", split][:, -1].mean()
    print(f"{split}: GRPO at 100% of the updates {end:.1f}%")
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        e = int(np.argmin([abs(u - share * at[-1]) for u in at]))
        d, low, high = paired_bootstrap(W["seed", split][:, e].astype(float), W["grpo", split][:, -1].astype(float), rounds)
        print(f"    SEED at {share:4.0%} (update {at[e]:2d}): {100 * W['seed', split][:, e].mean():5.1f}%   difference {d:+.1f} [{low:+.1f}, {high:+.1f}] points")

# %% [markdown]
# ## What the distillation did meanwhile
#
# Parse rate, gate and Delta by outcome, averaged over seeds. If the parse rate were near zero, SEED would silently be GRPO.

# %%
fig, axes = plt.subplots(1, 3, figsize=(13, 3.6))


def series(key: str, arm: str = "seed") -> np.ndarray:
    """A metric by update, averaged over seeds (undefined values left out)."""
    rows = [[np.nan if m.get(key) is None else m[key] for m in records[f"{arm}-s{s}"] if m["stage"] == "rl"] for s in SEEDS]
    return np.nanmean(np.array(rows, dtype=float), axis=0)


x = np.arange(1, config["updates"] + 1)
axes[0].plot(x, 100 * series("parse_rate"), color="#000000", label="analyses that parse")
axes[0].plot(x, 100 * series("gate_above_half"), color="#0072B2", ls="--", label="gates above 0.5")
axes[0].plot(x, 100 * series("invalid_action_rate"), color="#D55E00", ls=":", label="invalid actions")
axes[0].set(title="SEED: shares", xlabel="update", ylabel="%", ylim=(0, 102))
axes[1].plot(x, series("delta_won"), color="#0072B2", label="won episodes")
axes[1].plot(x, series("delta_lost"), color="#D55E00", ls="--", label="lost episodes")
axes[1].axhline(0, color="#999999", lw=0.8)
axes[1].set(title="SEED: mean Delta", xlabel="update", ylabel="nats per token")
for arm, style in ARMS.items():
    axes[2].plot(x, 100 * series("frac_outcome_tied", arm), color=style["color"], ls=style["ls"], label=arm.upper())
axes[2].set(title="groups all won or all lost", xlabel="update", ylabel="%", ylim=(0, 102))
for ax in axes:
    ax.legend(frameon=False, fontsize=9)
fig.tight_layout()
plt.show()
assert series("parse_rate").mean() > 0.5, "most updates must really have been SEED"
seconds = {arm: np.median([m["step_time"] for s in SEEDS for m in records[f"{arm}-s{s}"] if m["stage"] == "rl"]) for arm in ARMS}
print(f"median seconds per update, one core each: SEED {seconds['seed']:.1f}, GRPO {seconds['grpo']:.1f} ({seconds['seed'] / seconds['grpo'] - 1:+.0%})")

# %% [markdown]
# ## Live: both arms, here and now
#
# A short start and a few updates of each arm. Too short to show a difference; long enough to see every part work.

# %%
import tempfile

out = tempfile.mkdtemp()
few = ["--env", "alfworld", "--games", "generated", "--out", out, "--eval_games", "6" if QUICK else "30"]
seed_mini.main([*few, "--name", "start", "--updates", "0", "--sft_tasks", "6" if QUICK else "40", "--sft_epochs", "1" if QUICK else "3"])
for arm in ("grpo", "seed"):
    assert seed_mini.main([*few, "--name", arm, "--method", arm, "--updates", "2" if QUICK else "8", "--eval_every", "0",
                           "--sft_from", f"{out}/start"]) == 0

# %%
live = {arm: seed_mini.read_jsonl(Path(out) / arm / "metrics.jsonl") for arm in ("grpo", "seed")}
for arm, lines in live.items():
    print(arm, [f"{m['success']:.0%}" for m in lines if m["stage"] == "rl"])
first = {arm: next(m for m in lines if m["stage"] == "rl") for arm, lines in live.items()}
assert first["seed"]["success"] == first["grpo"]["success"], "the first update's rollouts come from the same policy with the same luck"
assert "parse_rate" in first["seed"] and "parse_rate" not in first["grpo"]
