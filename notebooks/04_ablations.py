# %% [markdown]
# # 04 · What matters: ablations, a control, and sensitivity
#
# The paper's three ablations (no skill SFT, no distillation term, static offline skills), the control it lacks (every episode gets *another*
# episode's skill: is it the skill, or any extra text?), and a few values of lambda and beta. Same houses, same evaluation as notebook 03, the first
# three of its seeds. Records: `python notebooks/experiments.py ablations` and `... sensitivity`.
#
# Time: seconds; nothing is trained here.

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

records = {name: lines for experiment in ("curves", "ablations", "sensitivity") for name, lines in experiments.read_records(experiment).items()}
SEEDS = list(experiments.FEW)


def curve(arm: str, split: str = "valid_unseen") -> tuple[list[int], np.ndarray]:
    """(updates, success in % [seeds, E]) of an arm."""
    evals = [[m for m in records[f"{arm}-s{s}"] if m["stage"] == "eval" and m["split"] == split and not m["skill_in_context"]] for s in SEEDS]
    at = [0 if m["at"] in ("sft", "base") else int(m["at"]) for m in evals[0]]
    return at, np.array([[100 * m["success"] for m in row] for row in evals])


def mean_of(arm: str, key: str) -> float:
    """A metric of the updates, averaged over updates and seeds (undefined values left out)."""
    values = [m[key] for s in SEEDS for m in records[f"{arm}-s{s}"] if m["stage"] == "rl" and m.get(key) is not None]
    return float(np.mean(values)) if values else float("nan")


# %%
ARMS = {"seed": "SEED", "grpo": "GRPO", "no_opd": "SEED without the OPD term", "no_sft": "SEED without skill SFT", "static": "static offline skills",
        "shuffled": "skills shuffled between episodes"}
ARMS = {arm: words for arm, words in ARMS.items() if f"{arm}-s{SEEDS[-1]}" in records}
print(f"{'arm':34s} {'end':>6s} {'area':>6s}  per seed at the end       parse  gates>.5  Delta won / lost   invalid")
for arm, words in ARMS.items():
    at, y = curve(arm)
    print(f"{words:34s} {y[:, -1].mean():5.1f}% {y[:, 1:].mean():5.1f}%  {'  '.join(f'{v:5.1f}' for v in y[:, -1])}   {mean_of(arm, 'parse_rate'):8.0%} "
          f"{mean_of(arm, 'gate_above_half'):8.0%}   {mean_of(arm, 'delta_won'):+.2f} / {mean_of(arm, 'delta_lost'):+.2f}   {mean_of(arm, 'invalid_action_rate'):6.0%}")

# %%
STYLES = {"seed": ("#0072B2", "-", "o"), "grpo": ("#D55E00", "--", "s"), "no_opd": ("#000000", ":", "^"), "no_sft": ("#CC79A7", "-.", "v"),
          "static": ("#009E73", "-", "D"), "shuffled": ("#E69F00", "--", "x")}
fig, ax = plt.subplots(figsize=(7.5, 4.4))
for arm, words in ARMS.items():
    at, y = curve(arm)
    colour, style, mark = STYLES[arm]
    ax.plot(at, y.mean(0), color=colour, ls=style, marker=mark, ms=5, label=words)
ax.set(xlabel="update", ylabel="success on unseen houses (%)", ylim=(0, None), title=f"Mean of {len(SEEDS)} seeds, 126 games each, ordinary history only")
ax.legend(frameon=False, fontsize=9)
ax.grid(alpha=0.25)
fig.tight_layout()
plt.show()

# %% [markdown]
# ## Sensitivity
#
# One value changed at a time.

# %%
config = records[f"seed-s{SEEDS[0]}"][0]
rows = [("lambda_opd", arm.removeprefix("lambda"), arm) for arm in experiments.SENSITIVITY if arm.startswith("lambda")]
rows += [("beta_opd", arm.removeprefix("beta"), arm) for arm in experiments.SENSITIVITY if arm.startswith("beta")]
rows += [("lambda_opd", str(config["lambda_opd"]), "seed"), ("beta_opd", str(config["beta_opd"]), "seed"), ("lambda_opd", "0 (GRPO)", "grpo")]
for key, value, arm in sorted(rows):
    if f"{arm}-s{SEEDS[-1]}" in records:
        at, y = curve(arm)
        print(f"{key:10s} {value:>9s}   end {y[:, -1].mean():5.1f}%   area {y[:, 1:].mean():5.1f}%   invalid {mean_of(arm, 'invalid_action_rate'):4.0%}   KL {mean_of(arm, 'kl'):.2f}")
