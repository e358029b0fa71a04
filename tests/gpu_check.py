"""The whole method at full size on one card:   python tests/gpu_check.py   (or: python -m pytest -m gpu tests/gpu_check.py -s)

Builds Qwen3-1.7B with random weights on the spot, loads it as 4-bit base with LoRA adapters by seed_mini's own loading code, plays episodes of
ALFWorld's length against scripted observations, runs one whole SEED update and one GRPO update, and prints phase times, tokens per second, and
predicted against measured peak memory. It says nothing about learning: the weights are noise. Needs no network and 4 GB of disk. Never run in CI.
"""
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import envs
import seed_mini as sm
import skills

# As Qwen3's: no default system turn; the generation prompt closes the thinking when it is off; older answers lose theirs.
QWEN3 = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and '</think>' in m['content'] %}"
         "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n"
         "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
PLACES = [f"{kind} {n}" for kind in ("cabinet", "countertop", "drawer", "shelf") for n in range(1, 6)]
ROOM = "You are in the middle of a room. Looking quickly around you, you see a " + ", a ".join(PLACES) + "."
SEEN = "You arrive at {}. On the {}, you see a apple 2, a bread 1, a mug 3, a knife 1, a plate 2, and a soapbottle 1."
COMMANDS = [f"go to {place}" for place in PLACES] + ["inventory", "look", "examine shelf 1"]
SKILL = "Look in each place once and open what is closed. Take the mug, then move it to the shelf."


def make_tokenizer(template: str = QWEN3):
    """A byte-level BPE tokenizer that knows the words of these episodes, with Qwen's control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = [ROOM, SEEN, ", ".join(COMMANDS), SKILL, envs.ROLE_LINE, envs.ANSWER_THINK, "system user assistant"] * 3
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False))
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        additional_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


def random_qwen3(folder: Path, *, seed: int = 0, dtype=torch.bfloat16, template: str = QWEN3, **dims) -> Path:
    """A Qwen3 checkpoint folder of random weights, one layer in memory at a time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    config = Qwen3Config(**dict(max_position_embeddings=40960, architectures=["Qwen3ForCausalLM"], dtype=str(dtype).split(".")[1]) | dims)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng, files = torch.Generator(device).manual_seed(seed), {}
    for name in shapes:
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({n: torch.ones(shapes[n], dtype=dtype) if "norm" in n else
                   torch.randn(shapes[n], generator=rng, device=device).mul_(0.02).to(dtype).cpu() for n in names}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, names in files.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class ScriptedGames:
    """Stands for envs.EnvPool: observations of ALFWorld's length, whatever the policy says; every second slot wins in its last step."""

    def __init__(self, steps: int):
        self.steps, self.counters = steps, Counter()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def result(self, slot, won=False):
        return dict(task="put a mug in shelf", task_type=envs.TASK_TYPES[0], game_id=str(slot), admissible=COMMANDS, won=won, valid=True, steps=0)

    def reset(self, games):
        self.n, self.first = dict.fromkeys(range(len(games)), 0), [int(game.id[-2:]) for game in games]
        return [(ROOM, self.result(slot)) for slot in self.n]

    def step(self, actions):
        out = {}
        for slot in actions:
            self.n[slot] += 1
            last = self.n[slot] == self.steps
            place, won = PLACES[(self.first[slot] + self.n[slot]) % len(PLACES)], last and slot % 2 == 1
            out[slot] = (SEEN.format(place, place), 10.0 * won, won, last, self.result(slot, won))
        return out


def fake_games(n: int) -> list[envs.Game]:
    return [envs.Game(f"train/game-{i:02d}", "train", envs.TASK_TYPES[0], "") for i in range(n)]


def check(folder: Path, dims: dict, **settings) -> list[dict]:
    """One SEED and one GRPO update on a random model of these dimensions; prints the table and returns both metrics lines."""
    started = time.perf_counter()
    random_qwen3(folder / "model", **dims)
    built = time.perf_counter()
    cfg = sm.resolve(sm.Config(model=str(folder / "model"), profile="paper", tune="lora", out=str(folder), name="check", updates=2, **settings))
    policy = sm.load_policy(cfg, cfg.model)
    print(f"built in {built - started:.0f} s, loaded in {time.perf_counter() - built:.0f} s")
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=1e-3, generator=torch.Generator(p.device).manual_seed(0))
    sm.freeze_reference(policy)  # stands for Stage 1's adapter
    run, optimizer, games, real = sm.Run(cfg), sm.make_optimizer(policy, cfg.lr, cfg.weight_decay), fake_games(cfg.tasks_per_update), sm.complete
    run.dir.mkdir(parents=True, exist_ok=True)
    run.create()

    def complete(*args):  # noise does not write JSON: the real generation, for its time and memory, then a skill in its place
        texts, cut = real(*args)
        return [skills.canonical_reply("Played.", SKILL)] * len(texts), cut

    lines = []
    for update, method in enumerate(("seed", "grpo"), start=1):
        cfg.method = method
        try:
            sm.complete = complete
            line = sm.one_update(policy, ScriptedGames(cfg.max_steps), games, cfg, optimizer, update, run, {})
        finally:
            sm.complete = real
        lines.append(line)
        sampled = line["completions/mean_length"] * cfg.tasks_per_update * cfg.group_size
        print(f"{method}: " + ", ".join(f"{k.split('/')[1]} {v:.1f} s" for k, v in line.items() if k.startswith("seconds/"))
              + f"; {line['num_tokens']} tokens, {line['episode_tokens']:.0f} an episode "
              + f"({line['one_prompt_per_step_tokens']:.0f} with one prompt per step)"
              + f"; {sampled / line['seconds/rollout']:.0f} sampled tokens/s, {line['num_tokens'] / line['seconds/training']:.0f} trained tokens/s")
        peak = f"predicted {line['predicted_peak_gb']:.2f} GB, measured {line['peak_gb']:.2f} GB" if "peak_gb" in line else "no card"
        print(f"    peak memory: {peak}")
        print(f"    counters: {line['counters']}, sampler gap {line['sampler_gap']:.3f}")
    print(f"all in {time.perf_counter() - started:.0f} s")
    return lines


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_full_size(tmp_path):
    torch.use_deterministic_algorithms(True, warn_only=True)  # as main() does: other kernels, other times
    print(torch.cuda.get_device_name(0), f"{sm.card_memory(sm.Config()):.1f} GB, torch {torch.__version__}")
    lines = check(tmp_path, sm.QWEN_CONFIG, tasks_per_update=2, group_size=4, rollout_batch=8, micro_tokens=8192, max_response=48, max_analysis=128,
                  max_context=7000)
    for line in lines:
        assert line["episode_steps"] == 30 and line["sampler_gap"] < 0.2 and line["grad_norm"] > 0
        assert abs(line["predicted_peak_gb"] / line["peak_gb"] - 1) < 0.15


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("gpu_check: this torch sees no CUDA card.")
    with tempfile.TemporaryDirectory() as place:
        test_full_size(Path(place))
