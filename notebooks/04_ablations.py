# %% [markdown]
# # 04 · What does it: ablations, a control, sensitivity, and the skills themselves
#
# Notebook 03 asks *whether* SEED beats GRPO here. This one asks *what* in SEED does it:
#
# | arm | what is different from SEED | the question |
# |---|---|---|
# | no OPD | the distillation term has weight 0 | does the term do anything? |
# | no skill SFT | no Stage 1; the base writes the skills | must the analyzer be taught? |
# | static skills | one offline skill per game, never renewed | must hindsight be fresh? |
# | shuffled skills | each episode gets *another game's* skill | control: its words, or any? |
# | GRPO, no SFT | plain GRPO from the base (the paper's) | what Stage 1 does for, or to, GRPO |
#
# From a shared start, "no OPD" *is* our GRPO. As long as no analysis of the base parses, "no skill
# SFT" and "GRPO, no SFT" are the same run.
#
# Then a few values of lambda and beta, one changed at a time, and the skills as the policy wrote
# them. Same houses, start, evaluation and statistics as notebook 03, fewer seeds. Records:
# `python notebooks/experiments.py ablations` and `... sensitivity`; SEED and GRPO themselves are
# those of `... curves` on the same seeds. Every verdict is computed from the records.
#
# Time: seconds; nothing is trained here.

# %%
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

# no progress bars here
warnings.filterwarnings("ignore", message="IProgress not found")

HERE = Path.cwd() if (Path.cwd() / "build.py").exists() else Path.cwd() / "notebooks"
# Colab: fetch the project ...
if not (HERE.parent / "seed_mini.py").exists():
    HERE = Path.cwd() / "seed_mini" / "notebooks"
    if not HERE.exists():
        subprocess.run(["git", "clone", "-q", "--depth", "1",
                        "https://github.com/seed-mini/seed_mini"], check=True)
# ... and what it needs
if importlib.util.find_spec("alfworld") is None:
    requirements = str(HERE.parent / "requirements.txt")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-r", requirements], check=True)
sys.path[:0] = [str(HERE), str(HERE.parent)]

import matplotlib.pyplot as plt
import numpy as np

import build
import experiments
from envs import counted_rng, wilson

plt.rcParams.update({"figure.dpi": 100, "font.size": 9, "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False})
# Okabe-Ito; line styles and markers tell them apart in grey
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
SPLITS = {"valid_unseen": "unseen houses", "valid_seen": "seen houses, new games"}
NAMES = {"no_opd": "no OPD (= GRPO)", "no_sft": "no skill SFT", "static": "static skills",
         "shuffled": "shuffled skills", "grpo_no_sft": "GRPO, no SFT"}

# The statistics are those of notebook 03, section 2: we run that cell of its source rather than
# write it a second time.
source = build.cells_of((HERE / "03_grpo_vs_seed.py").read_text(encoding="utf-8"))
exec(next(cell["source"] for cell in source if "def bootstrap(" in cell["source"]))

# %%
records = experiments.read("curves", "ablations", "sensitivity")
assert len({(r["settings_hash"], r["base"], r["purpose"]) for r in records}) == 1, (
    "only the like is compared")
purpose = records[0]["purpose"]
TRIAL = "" if purpose == "reported" else f"{purpose.upper()} RECORDS, they say nothing: "
runs = {}
# Stage 1 stands in each of the three files, once is enough
for r in records:
    runs.setdefault((r["arm"], r["seed"]), {})[r["at"]] = r
SEEDS = sorted(
    set.intersection(*({s for a, s in runs if a == arm} for arm in ("seed", "grpo", *NAMES))))
shared = next(experiments.todays_names(r["shared"]) for r in records if "shared" in r)
if TRIAL:
    print("The reported runs have not been made yet. What follows is drawn from a trial that shows "
          "the machinery.\n")
print(f"seeds {SEEDS}, {shared['updates']} updates, lr {shared['lr']:g}, lambda "
      f"{shared['lambda_opd']:g}, "
      f"beta {shared['beta_opd']:g}; {len(runs)} runs, base {records[0]['base']}, "
      f"commits {sorted({r['commit'][:10] + r['commit'][40:] for r in records})}")


def lines(arm: str, seed: int) -> list[dict]:
    """The records of one run in the order of its evaluations; the first is its start."""
    return sorted(runs[arm, seed].values(), key=lambda r: r["update"])


def won(arm: str, split: str, seeds: list[int] = SEEDS) -> np.ndarray:
    """Who won which game: bool [seeds, evaluations, games]."""
    return np.array([[[c == "1" for c in r["eval"][split]["won"]] for r in lines(arm, s)]
                     for s in seeds])


def metric(arm: str, key: str, seeds: list[int] = SEEDS) -> float:
    """A training metric, mean over updates and seeds; nan if the arm has none."""
    values = [v for s in seeds for r in lines(arm, s)
              for v in r["training"].get(key, []) if v is not None]
    return float(np.mean(values)) if values else float("nan")


def dash(value: float, spec: str) -> str:
    """A number, or a dash where there is none."""
    return format(value, spec) if np.isfinite(value) else "-"


AT = [r["update"] for r in lines("seed", SEEDS[0])]

# %% [markdown]
# ## 1. The arms
#
# The difference is *arm minus SEED*: below 0 means that the arm, with its part of SEED taken out,
# does worse.

# %%
def end(arm: str, split: str = "valid_unseen", seeds: list[int] = SEEDS) -> np.ndarray:
    """Who won which game at the last update: [seeds, games]."""
    return won(arm, split, seeds)[:, -1]


def way(arm: str, split: str = "valid_unseen", seeds: list[int] = SEEDS) -> np.ndarray:
    """Area under the curve per game: [seeds, games]."""
    return area(won(arm, split, seeds), AT)


against = {(arm, split): compare(end(arm, split), end("seed", split)) for arm in ("grpo", *NAMES)
           for split in SPLITS}
on_the_way = {arm: compare(way(arm), way("seed")) for arm in ("grpo", *NAMES)}
for split, words in SPLITS.items():
    print(f"{words}, update {AT[-1]}, {len(SEEDS)} seeds x {end('seed', split).shape[1]} games; "
          f"SEED {100 * end('seed', split).mean():.1f}%, "
          f"area {100 * way('seed', split).mean():.1f}%\n"
          "                            minus SEED, t over seeds, seeds and games"
          "                    area")
    for arm in ("grpo", *NAMES):
        c = against[arm, split]
        print(f"  {NAMES.get(arm, 'GRPO'):17s} {c['a']:5.1f}%   {c['diff']:+6.1f}   {both(c)}"
              f"   {100 * way(arm, split).mean():5.1f}%")
print("\nduring training     parses gates>.5  D won    D lost   invalid    KL     ties")
for arm in ("seed", "grpo", *NAMES):
    text = "  ".join(f"{dash(metric(arm, key), spec):>7s}" for key, spec in (
        ("parse_rate", ".0%"), ("gate_above_half", ".0%"),
        ("delta_won", "+.3f"), ("delta_lost", "+.3f"),
        ("invalid_action_rate", ".0%"), ("kl", ".3f"), ("frac_outcome_tied", ".0%")))
    print(f"{NAMES.get(arm, arm.upper()):17s} {text}")

# %%
# [seeds, E]
full = 100 * won("seed", "valid_unseen").mean(2)
fig, axes = plt.subplots(1, len(NAMES), figsize=(11, 3), sharey=True, layout="constrained")
for ax, (arm, words) in zip(axes, NAMES.items()):
    part = 100 * won(arm, "valid_unseen").mean(2)
    for curves, colour, style, mark in ((full, BLUE, "-", "o"), (part, ORANGE, "--", "s")):
        for curve in curves:
            ax.plot(AT, curve, color=colour, ls=style, lw=0.7, alpha=0.5)
        ax.plot(AT, curves.mean(0), color=colour, ls=style, marker=mark, lw=2, ms=4.5,
                markeredgecolor="white")
    ax.set(title=words, xlabel="update", xticks=AT)
    ax.grid(alpha=0.25, lw=0.5)
axes[0].set(ylabel="success on unseen houses (%)", ylim=(0, None))
handles = [line for line in axes[0].lines if line.get_marker() in ("o", "s")]
fig.legend(handles, ["SEED", "the arm named above"], loc="outside lower center", ncols=2)
note = f"{TRIAL}thin: {len(SEEDS)} seeds; thick: their mean; {end('seed').shape[1]} games"
fig.suptitle(note, color="#555555", fontsize=9)
plt.show()

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 2.9), sharey=True, sharex=True, layout="constrained")
# longer bars are cut
wide = 1.3 * max(abs(c["diff"]) for c in (*against.values(), *on_the_way.values())) + 15
last = {"unseen": [against[a, "valid_unseen"] for a in NAMES],
        "seen": [against[a, "valid_seen"] for a in NAMES]}
for ax, title, groups in ((axes[0], f"update {AT[-1]}", last),
                          (axes[1], "on the way (area)",
                           {"unseen": [on_the_way[a] for a in NAMES]})):
    for offset, (label, values) in zip((-0.14, 0.14), groups.items()):
        style = (dict(fmt="o", color=BLUE, mfc=BLUE) if label == "unseen"
                 else dict(fmt="s", color=ORANGE, mfc="white"))
        ax.errorbar([c["diff"] for c in values], np.arange(len(NAMES)) + offset, capsize=3, ms=5,
                    xerr=[c["t"][1] - c["diff"] for c in values], label=f"{label} houses", **style)
    ax.axvline(0, color=GREY, lw=0.8)
    ax.set(title=title, xlabel="arm minus SEED (points), 95% t over seeds", xlim=(-wide, wide))
    ax.grid(alpha=0.25, lw=0.5, axis="x")
axes[0].set_yticks(range(len(NAMES)), NAMES.values())
axes[0].invert_yaxis()
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
if TRIAL:
    fig.suptitle(f"{TRIAL}only the machinery", color="#555555", fontsize=9)
plt.show()

# %% [markdown]
# What the numbers allow us to say. Three seeds decide little unless effects are large: "not
# decided" is no proof that a part does not matter.
#
# The paper's authors report on ALFWorld (Qwen2.5-3B): SEED 91.8, without skill SFT 86.0, without
# OPD 87.0, static offline skills 84.4. Theirs, not checked by us, and not comparable with the
# numbers here.

# %%
for arm, words in NAMES.items():
    print(TRIAL + verdict(compare(end("seed"), end(arm)), "on unseen houses, last update", "SEED",
                          f"'{words}'"))
controls = {"at the last update": compare(end("seed"), end("shuffled")),
            "on the way": compare(way("seed"), way("shuffled"))}
clear = " and ".join(what for what, c in controls.items() if min(c["t"][0], c["boot"][0]) > 0)
print("\n" + TRIAL + "The control: "
      + (f"what the skill says matters here ({clear})." if clear
         else "that the skill's own content matters is NOT shown; another episode's skill did not "
              "do clearly worse."))
# without its term SEED must be GRPO, to the last game: this checks the ablation, and determinism
for s in SEEDS:
    for a, b in zip(lines("no_opd", s), lines("grpo", s)):
        assert a["eval"] == b["eval"], "no OPD is not GRPO"
        assert a["training"].get("success") == b["training"].get("success"), "no OPD is not GRPO"
print(f"\nno OPD and GRPO agree in every game of every evaluation on {len(SEEDS)} seeds.")

# %% [markdown]
# ## 2. Sensitivity
#
# `lambda_opd` weighs the term, `beta_opd` sharpens the gate (0: no gate, every sampled token weighs
# one half). Small marks are seeds, big ones their mean, bars the 95% t-interval. The row below
# shows the price: invalid actions in training rollouts.

# %%
VARIED = experiments.arms_of("sensitivity")
FEW = sorted(
    set.intersection(*({s for a, s in runs if a == arm} for arm in ("seed", "grpo", *VARIED))))
VALUES = {"lambda_opd": {0.0: "grpo", shared["lambda_opd"]: "seed"},
          "beta_opd": {shared["beta_opd"]: "seed"}}
for arm, change in VARIED.items():
    for option, value in change.items():
        VALUES[option][value] = arm


def draw_sensitivity() -> None:
    """Success, and invalid actions, by value of lambda and of beta; a sentence about the highest
    mean of each."""
    fig, axes = plt.subplots(2, 2, figsize=(9, 5), sharex="col", sharey="row", layout="constrained",
                             height_ratios=(2, 1))
    for column, (option, arms) in enumerate(VALUES.items()):
        for x, (value, arm) in enumerate(sorted(arms.items())):
            rates, invalid = (100 * end(arm, seeds=FEW).mean(1),
                              100 * metric(arm, "invalid_action_rate", FEW))
            mean, half = mean_half(rates)
            default = arm == "seed"
            style = (dict(fmt="o", color=BLUE, mfc=BLUE) if default
                     else dict(fmt="s", color=ORANGE, mfc="white"))
            bar = [[min(half, mean)], [min(half, 100 - mean)]]
            axes[0, column].errorbar(x, mean, yerr=bar, capsize=3, ms=8, **style)
            axes[0, column].plot(np.full(len(FEW), x + 0.12), rates, ".", color="black", ms=4)
            axes[1, column].bar(x, invalid, 0.5, edgecolor="black",
                                color=BLUE if default else "white", hatch="" if default else "///")
            print(f"{option} = {value:<5g} last update {mean:5.1f} +- {half:5.1f}%   "
                  f"area {100 * way(arm, seeds=FEW).mean():5.1f}%   invalid {invalid:3.0f}%   "
                  f"gate mean {dash(metric(arm, 'gate_mean', FEW), '.2f'):4s}   KL "
                  f"{metric(arm, 'kl', FEW):.3f}")
        notes = {"seed": "\n(default)", "grpo": "\n(GRPO)"}
        axes[1, column].set_xticks(range(len(arms)),
                                   [f"{v:g}{notes.get(a, '')}" for v, a in sorted(arms.items())])
        axes[1, column].set_xlabel(option)
        axes[0, column].grid(alpha=0.25, lw=0.5, axis="y")
    axes[0, 0].set(ylabel=f"success on unseen houses\nat update {AT[-1]} (%)", ylim=(0, None))
    axes[1, 0].set(ylabel="invalid actions (%)", ylim=(0, None))
    fig.suptitle(f"{TRIAL}{len(FEW)} seeds; filled: the default", color="#555555", fontsize=9)
    plt.show()
    for option, arms in VALUES.items():
        best = max(arms, key=lambda v: end(arms[v], seeds=FEW).mean())
        note = f"; the default is {shared[option]:g} (not chosen on these seeds)."
        rest = ", the default." if arms[best] == "seed" else note
        print(f"{TRIAL}{option}: the highest mean at the last update is at {best:g}{rest}")


draw_sensitivity()
print(f"\n{TRIAL}minus SEED at update {AT[-1]}, unseen houses: t over seeds, seeds and games")
for arm in VARIED:
    c = compare(end(arm, seeds=FEW), end("seed", seeds=FEW))
    print(f"  {arm:15s} {c['diff']:+6.1f}   {both(c)}")

# %% [markdown]
# ## 3. The skills, as they were written
#
# At each evaluation the records keep a few skills of that update. How many parse, how many name the
# object and the place of their own task (a small model copies names badly), how many are different,
# how long they are; then the words themselves, with the mean Delta they gave to their own episode's
# tokens. Update 0 is Stage 1's teacher, the rule analyzer: what the policy was taught to write.

# %%
print("update   parse   on task   different   words")
for k, update in enumerate(AT):
    rows = [lines("seed", s)[k]["skills"] if update else lines("start", s)[-1]["skills"]
            for s in SEEDS]
    parsed = np.mean([1 - sum(v for status, v in r["status"].items() if status != "ok") / r["n"]
                      for r in rows])
    usable = [max(1, r["status"].get("ok", 0)) for r in rows]
    right, different = (np.mean([r[key] / n for r, n in zip(rows, usable)])
                        for key in ("on_task", "distinct"))
    print(f"{update:6d} {parsed:7.0%} {right:9.0%} {different:11.0%} "
          f"{np.mean([r['words'] for r in rows]):7.1f}")

# Over all seeds of the curves: do the skills last, and did Stage 1 cost any acting?
ALL = sorted(s for a, s in runs if a == "seed")
parsing = np.array([[v for r in lines("seed", s) for v in r["training"].get("parse_rate", [])]
                    for s in ALL])
print(f"\n{TRIAL}{len(ALL)} seeds: of the policy's own analyses {parsing[:, :5].mean():.0%} parse "
      f"in the first five updates, {parsing[:, -5:].mean():.0%} in the last five (lowest seed "
      f"{parsing[:, -5:].mean(1).min():.0%})")
for split, words in SPLITS.items():
    evals = {at: [runs["start", s][at]["eval"][split] for s in ALL] for at in ("base", "sft")}
    rates = [100 * np.mean([e["won"].count("1") / e["n"] for e in rows]) for rows in evals.values()]
    print(f"{TRIAL}{words}, alone: base {rates[0]:.1f}%, after Stage 1 {rates[1]:.1f}%, mean of "
          f"{len(ALL)} seeds")

# %%
for k, update in enumerate(AT):
    row = lines("seed", SEEDS[0])[k] if update else lines("start", SEEDS[0])[-1]
    print(f"--- update {update}" + ("" if update else ": Stage 1, written by the rule analyzer"))
    for q in row["skills"]["quotes"]:
        gap = "" if q["delta_mean"] is None else f"  [mean Delta {q['delta_mean']:+.2f}]"
        print(f"  {'won ' if q['won'] else 'lost'} \"{q['task']}\"\n       {q['skill']}{gap}")
print("\nWithout Stage 1 the base writes skills that parse in "
      f"{metric('no_sft', 'parse_rate'):.0%} of its analyses"
      f" (with it: {metric('seed', 'parse_rate'):.0%}).")

# %% [markdown]
# ## In words, with the records of commit eec99fb
#
# * *No OPD* from a shared start is our GRPO, game by game (checked above). *No skill SFT*: none of
#   the base's analyses parse, so nothing is distilled, and it equals GRPO without Stage 1.
# * *No difference is seen between static skills and the policy's own*, unlike in the paper: with
#   one workflow for each task type, fresh hindsight has little to add here.
# * *The skills of other games keep some 30 to 60% of SEED's gain*, depending on split and measure.
#   What the skill says matters (clearly so in the area under the curve on unseen houses, not
#   decided at the last update); but some of the effect is what any workflow says ("look in each
#   place once"), or comes from picking out tokens that are likely anyway.
# * *The policy's skills wear out*: nothing trains the analyzer in Stage 2, and from the first to
#   the last five updates the share that parses falls from 98 to 86% (all eight seeds; the lowest
#   ends at 68%), with stubs like "drawer." among those that do.
# * *The gate matters*: without it (beta 0) SEED loses all of its gain (-15.6 points, -21.3 to -9.9
#   over seeds). To reinforce whatever was sampled does nothing on average, as notebook 01 derives.
# * With three seeds the intervals are wide, and "contains 0" is no proof that a part does not
#   matter. Time: 29 minutes for `experiments.py ablations`, 23 for `sensitivity`.

# %% [markdown]
# ## What to remember
#
# * Every ablation is one option: `--ablate no_sft`, `no_opd`, `static` or `shuffle`. Try them.
# * A control that *should* fail (another episode's skill) says more than an ablation that merely
#   does worse.
# * Read the skills. A curve cannot tell you that they are all the same sentence.
