"""The whole method at full size on one card: `python tests/gpu_check.py`, or
`python -m pytest -m gpu tests/gpu_check.py -s`.

Builds Qwen3-1.7B with random weights on the spot, loads it as 4-bit base with LoRA adapters by the
product's own loading code, plays episodes of ALFWorld's length against scripted observations, runs
one whole SEED update and one GRPO update, and prints phase times, tokens per second, and predicted
against measured peak memory. It says nothing about learning: the weights are noise. Needs no
network and 4 GB of disk. Never run in CI.
"""

import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import envs  # noqa: E402
import runs  # noqa: E402
import seed_mini as sm  # noqa: E402
import skills  # noqa: E402
from environments.alfworld_games import TASK_TYPES  # noqa: E402
from policy import freeze_reference  # noqa: E402
from runs import load_policy  # noqa: E402

# As Qwen3's: no default system turn; the generation prompt closes the thinking when it is off;
# older answers lose theirs.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PLACES = [
    f"{kind} {n}" for kind in ("cabinet", "countertop", "drawer", "shelf") for n in range(1, 6)
]
ROOM = (
    "You are in the middle of a room. Looking quickly around you, you see a "
    + ", a ".join(PLACES)
    + "."
)
SEEN = (
    "You arrive at {}. On the {}, you see a apple 2, a bread 1, a mug 3, a knife 1, a plate 2, "
    "and a soapbottle 1."
)
COMMANDS = [f"go to {place}" for place in PLACES] + ["inventory", "look", "examine shelf 1"]
GOAL = "put a mug in shelf"
SKILL = "Look in each place once and open what is closed. Take the mug, then move it to the shelf."
ENV_ARGS = ["games=generated", "list_actions=true"]


def make_tokenizer(template: str = QWEN3):
    """A byte-level BPE tokenizer that knows the words of these episodes, with Qwen's control
    tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wording = world().prompt("", "", think=True)
    text = [ROOM, SEEN, ", ".join(COMMANDS), SKILL, *wording, "system user assistant"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    words = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def random_qwen3(
    folder: Path, *, seed: int = 0, dtype=torch.bfloat16, template: str = QWEN3, **dims
) -> Path:
    """A Qwen3 checkpoint folder of random weights, one layer in memory at a time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    about = dict(
        max_position_embeddings=40960,
        architectures=["Qwen3ForCausalLM"],
        dtype=str(dtype).split(".")[1],
    )
    config = Qwen3Config(**about | dims)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng, files = torch.Generator(device).manual_seed(seed), {}

    def weights(name):
        """Norms are one, all else is noise."""
        if "norm" in name:
            return torch.ones(shapes[name], dtype=dtype)
        noise = torch.randn(shapes[name], generator=rng, device=device)
        return noise.mul_(0.02).to(dtype).cpu()

    for name in shapes:
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({name: weights(name) for name in names}, folder / file, {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def world() -> envs.Env:
    """The household, which never plays here: wording and metrics."""
    return envs.make(envs.find("alfworld"), ENV_ARGS)


class ScriptedGames:
    """Stands for runs.Pool: observations of ALFWorld's length, whatever the policy says; every
    second slot wins in its last step."""

    def __init__(self, steps: int):
        self.steps, self.counters, self.env = steps, Counter(), world()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def reset(self, tasks):
        """All slots at their start."""
        self.n = dict.fromkeys(range(len(tasks)), 0)
        self.first = [int(task.id[-2:]) for task in tasks]
        info = dict(goal=GOAL, actions=COMMANDS, won=False, valid=True)
        return [(ROOM, dict(info)) for _ in tasks]

    def step(self, actions):
        """The next place, for each slot named."""
        out = {}
        for slot in actions:
            self.n[slot] += 1
            last = self.n[slot] == self.steps
            place = PLACES[(self.first[slot] + self.n[slot]) % len(PLACES)]
            won = last and slot % 2 == 1
            info = dict(goal=GOAL, actions=COMMANDS, won=won, valid=True)
            out[slot] = (SEEN.format(place, place), 10.0 * won, won, last, info)
        return out


def fake_tasks(n: int) -> list[envs.Task]:
    """Tasks that only ScriptedGames can play."""
    spec = dict(goal=GOAL)
    return [envs.Task(f"train/game-{i:02d}", "train", TASK_TYPES[0], spec) for i in range(n)]


def token_costs(policy, env, cfg, roll, window: int = 5) -> tuple[int, int]:
    """Tokens that one pass over the same episode takes with one prompt per step (the paper), and
    tokens of our transcript that list possible actions.

    A step there = role, task and instruction + the last `window` pairs of observation and action +
    this turn's text + the response. The transcript takes len(roll.ids), each token once. Without
    that format's numbering words, so the comparison flatters it.
    """

    def size(text):
        """Tokens of a text."""
        return len(policy.encode(text))

    # Prompt, response, turn, response, ...
    pieces = [len(list(group)) for _, group in itertools.groupby(roll.sampled)]
    wording = env.prompt(roll.episode.goal, "", think=cfg.think)
    fixed = len(policy.user_turn([])) + sum(map(size, wording))
    glue = len(policy.later[0] + policy.later[1])
    per_step = listed = 0
    past = [(size(step.observation), size(step.action)) for step in roll.episode.steps]
    for t, (seen, _) in enumerate(past):
        # This turn's text.
        now = pieces[2 * t] - (glue if t else fixed)
        before = sum(map(sum, past[max(0, t - window) : t]))
        per_step += fixed + before + now + pieces[2 * t + 1]
        listed += max(0, now - seen) if env.list_actions else 0
    return per_step, listed


class KeepingRun(runs.Run):
    """A run that remembers the rollouts it wrote last."""

    def write_rollouts(self, rolls, *args, **kwargs):
        """As ever."""
        self.rolls = rolls
        super().write_rollouts(rolls, *args, **kwargs)


def report(method: str, cfg, line: dict) -> None:
    """What an update took, for the eye."""
    seconds = {k.split("/")[1]: v for k, v in line.items() if k.startswith("seconds/")}
    sampled = line["completions/mean_length"] * cfg.tasks_per_update * cfg.group_size
    print(
        f"{method}: "
        + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        + f"; {line['num_tokens']} tokens, {line['episode_tokens']:.0f} an episode "
        + f"({line['one_prompt_per_step_tokens']:.0f} with one prompt per step)"
        + f"; {sampled / seconds['rollout']:.0f} sampled tokens/s, "
        + f"{line['num_tokens'] / seconds['training']:.0f} trained tokens/s"
    )
    peak = "no card"
    if "peak_gb" in line:
        peak = "predicted {predicted_peak_gb:.2f} GB, measured {peak_gb:.2f} GB".format_map(line)
    print(f"    peak memory: {peak}")
    print(f"    counters: {line['counters']}, sampler gap {line['sampler_gap']:.3f}")


def check(folder: Path, dims: dict, **settings) -> list[dict]:
    """One SEED and one GRPO update on a random model of these dimensions; prints the table and
    returns both metrics lines."""
    started = time.perf_counter()
    random_qwen3(folder / "model", **dims)
    built = time.perf_counter()
    options = dict(model=str(folder / "model"), env_args=ENV_ARGS, tune="qlora", updates=2)
    cfg = sm.resolve(sm.Config(**options | settings, out=str(folder), name="check"))
    policy = load_policy(cfg, cfg.model)
    loaded = time.perf_counter()
    print(f"built in {built - started:.0f} s, loaded in {loaded - built:.0f} s")
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=1e-3, generator=torch.Generator(p.device).manual_seed(0))
    # Stands for Stage 1's adapter.
    freeze_reference(policy)
    run, optimizer, real = KeepingRun(cfg), sm.make_optimizer(policy, cfg.lr), sm.complete
    pool, tasks = ScriptedGames(cfg.max_steps), fake_tasks(cfg.tasks_per_update)
    run.dir.mkdir(parents=True, exist_ok=True)
    run.create()

    def complete(*args):
        """Noise does not write JSON: the real generation, for its time and memory, then a skill in
        its place."""
        texts, cut = real(*args)
        return [skills.canonical_reply("Played.", SKILL)] * len(texts), cut

    lines = []
    for update, method in enumerate(("seed", "grpo"), start=1):
        cfg.method = method
        try:
            sm.complete = complete
            line = sm.one_update(policy, pool, tasks, cfg, optimizer, update, run, {})
        finally:
            sm.complete = real
        # One rollout of each task.
        rolls = run.rolls[:: cfg.group_size]
        costs = np.mean([token_costs(policy, pool.env, cfg, roll) for roll in rolls], axis=0)
        line["one_prompt_per_step_tokens"], line["admissible_tokens"] = map(float, costs)
        lines.append(line)
        report(method, cfg, line)
    print(f"all in {time.perf_counter() - started:.0f} s")
    return lines


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_full_size(tmp_path):
    # As main() does: other kernels, other times.
    torch.use_deterministic_algorithms(True, warn_only=True)
    name = torch.cuda.get_device_name(0)
    print(name, f"{runs.card_memory():.1f} GB, torch {torch.__version__}")
    lines = check(
        tmp_path,
        runs.QWEN_CONFIG,
        tasks_per_update=2,
        group_size=4,
        rollout_batch=8,
        micro_tokens=8192,
        max_response=48,
        max_analysis=128,
        max_context=7000,
    )
    for line in lines:
        assert line["episode_steps"] == 30 and line["sampler_gap"] < 0.2 and line["grad_norm"] > 0
        assert abs(line["predicted_peak_gb"] / line["peak_gb"] - 1) < 0.15


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("gpu_check: this torch sees no CUDA card.")
    with tempfile.TemporaryDirectory() as place:
        test_full_size(Path(place))
