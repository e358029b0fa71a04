"""Adapters on a 4-bit base: the real NF4 path on a tiny random Qwen3, on the CPU. What a GPU alone
can show is in gpu_check.py.

The oracles are independent: an fp32 copy of the dequantised base, plain peft, the chat template,
sums done by hand, what autograd really keeps.
"""

import argparse
import dataclasses
import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

import envs
import gpu_check
import policy as policy_module
import runs
import seed_mini as sm
import skills
from gpu_check import SKILL, ScriptedGames, fake_tasks
from policy import KVBatch, chat_pieces, freeze_reference, score, token_logp
from runs import load_policy

DIMS = dict(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=600,
    tie_word_embeddings=True,
    dtype=torch.float32,
)
# What the paper's profile has, in a small size: a model this small would get the tiny one's.
PAPER_LIKE = dict(
    env_args=gpu_check.ENV_ARGS,
    think=True,
    kl_coef=0.01,
    sft_anchor=0.0,
    minibatches=1,
    invalid_penalty=0.1,
    tune="qlora",
)
SMALL = PAPER_LIKE | dict(
    threads=1,
    max_steps=3,
    max_response=8,
    max_context=1500,
    max_analysis=24,
    micro_tokens=4096,
    tasks_per_update=2,
    group_size=2,
    rollout_batch=4,
    lr=1e-2,
    sft_lr=1e-2,
    sft_epochs=1,
    sft_batch=2,
    lambda_opd=0.3,
)
GOOD = [skills.Reply(SKILL, "", "ok")] * 4
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # These tests are about the CPU, on any machine.
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen3 checkpoint with random weights."""
    return gpu_check.random_qwen3(tmp_path_factory.mktemp("qwen3") / "model", **DIMS)


def config(folder, **options):
    return sm.resolve(sm.Config(**dict(model=str(folder)) | SMALL | options))


def loaded(folder, **options):
    cfg = config(folder, **options)
    return cfg, load_policy(cfg, cfg.model)


def parts(policy, piece):
    return {name: p for name, p in policy.model.named_parameters() if piece in name}


def stir(policy, seed=0, std=0.05):
    """Give the adapter weights that matter."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parts(policy, ".lora_B.default").values():
            p.normal_(std=std, generator=rng)


def keys(n):
    return [("test", i) for i in range(n)]


def play(policy, cfg, n=4):
    return sm.rollout(policy, ScriptedGames(cfg.max_steps), fake_tasks(n), cfg, keys(n), 1.0)


def scored(policy, cfg, rolls):
    return torch.cat(score(policy, [sm.plain(r) for r in rolls], cfg)[0])


def score_all(policy, cfg, rolls):
    """Scores of rollouts that all have a skill."""
    return sm.score_all(policy, cfg, Counter(), rolls, GOOD)


def learn(policy, cfg, optimizer, rolls, scores, update):
    """The training half of an update; returns the statistics of its one optimizer step."""
    counters = Counter()
    (part,) = sm.minibatches_of(cfg, rolls, update)
    stats = sm.gradients(
        policy, cfg, counters, optimizer, rolls, scores, ADVANTAGES, [True] * 4, part
    )
    norm = runs.optimizer_step(policy, optimizer, sm.MAX_GRAD_NORM, counters)
    assert not counters
    return stats | dict(grad_norm=norm)


def twin(policy, cfg):
    """The same policy on an fp32 copy of the dequantised base: no bitsandbytes in it."""
    import bitsandbytes.functional as F

    other = load_policy(dataclasses.replace(cfg, tune="lora"), cfg.model)
    # Nor recomputation.
    other.recompute = []
    quantised = dict(policy.model.named_modules())
    with torch.no_grad():
        for name, module in other.model.named_modules():
            if name.endswith("base_layer"):
                packed = quantised[name].weight
                assert packed.quant_state.nested and packed.quant_state.quant_type == "nf4"
                module.weight.copy_(F.dequantize_4bit(packed.data, packed.quant_state))
        adapter = parts(policy, ".default.")
        for name, p in parts(other, ".default.").items():
            p.copy_(adapter[name])
    return other


def grads(policy, sequences, temperature=1.0):
    """Gradient of the mean log-prob for every adapter matrix."""
    policy.model.zero_grad()
    logp, mask, _ = token_logp(policy, sequences, temperature)
    (logp * mask).sum().div(mask.sum()).backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.requires_grad}


def bits(policy):
    """Every bit of the base: packed weights, their scales, embeddings, norms."""
    out = {
        name: p.detach().clone()
        for name, p in policy.model.named_parameters()
        if ".lora_" not in name
    }
    for name, module in policy.model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            out |= {
                f"{name}.absmax": state.absmax.clone(),
                f"{name}.scales": state.state2.absmax.clone(),
                f"{name}.offset": state.offset.clone(),
            }
    return out


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --------------------------------------------------------------------------------------------------
# 1. The policy
# --------------------------------------------------------------------------------------------------
def test_only_fp32_adapters_train_on_a_4_bit_base(folder):
    _, policy = loaded(folder)
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert (
        trained == {name for name in parts(policy, ".lora_")}
        and len(trained) == 2 * 7 * DIMS["num_hidden_layers"]
    )
    assert all(p.dtype == torch.float32 for p in parts(policy, ".lora_").values())
    assert all(p.dtype == torch.uint8 for p in parts(policy, "base_layer.weight").values())
    assert not [name for name in trained if "lm_head" in name or "embed" in name]
    # a CPU's compute dtype
    assert policy.head is policy.backbone.embed_tokens.weight and policy.head.dtype == torch.float32


def test_head_embedding_and_norms_keep_the_dtype_they_are_loaded_in(folder, monkeypatch):
    """No fp32 upcast: as on a card, where the compute dtype is bf16 or fp16."""
    for dtype in (torch.bfloat16, torch.float16):
        monkeypatch.setattr(runs, "compute_dtype", lambda device, lora, dtype=dtype: dtype)
        cfg, policy = loaded(folder)
        assert {
            p.dtype
            for name, p in policy.model.named_parameters()
            if "norm" in name or "embed" in name or "head" in name
        } == {dtype}
        rolls, _ = play(policy, cfg)
        freeze_reference(policy)
        stir(policy)
        freeze_reference(policy)
        assert {p.dtype for p in parts(policy, ".lora_").values()} == {torch.float32} and len(
            parts(policy, ".reference.")
        ) == 28
        assert scored(policy, cfg, rolls).isfinite().all() and policy.loss_scale == (
            2.0**14 if dtype == torch.float16 else 1.0
        )
        assert all(g.isfinite().all() for g in grads(policy, [sm.plain(r) for r in rolls]).values())


@pytest.mark.parametrize(
    "device, bf16, lora, expected",
    [
        ("cpu", True, True, "float32"),
        ("cuda", True, True, "bfloat16"),
        ("cuda", False, True, "float16"),
        ("cuda", True, False, "float32"),
    ],
)
def test_cards_without_bf16_compute_in_fp16(monkeypatch, device, bf16, lora, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    assert str(runs.compute_dtype(torch.device(device), lora)) == f"torch.{expected}"


def test_nf4_gradients_are_those_of_the_dequantised_base(folder):
    """Also after passes without gradient in eval mode, where bitsandbytes on some CPUs
    repacks the weights and loses the gradient."""
    cfg, policy = loaded(folder)
    stir(policy)
    before = bits(policy)
    rolls, _ = play(policy, cfg)
    sequences, other = [sm.plain(r) for r in rolls], twin(policy, cfg)
    assert (scored(policy, cfg, rolls) - scored(other, cfg, rolls)).abs().max() < 1e-4
    ours, theirs = grads(policy, sequences), grads(other, sequences)
    assert len(ours) == 28
    for name in ours:
        assert (
            theirs[name].norm() > 0
            and (ours[name] - theirs[name]).norm() < 1e-4 * theirs[name].norm()
        ), name
    assert same(bits(policy), before)


@pytest.mark.parametrize("tune", ["qlora", "lora"])
def test_checkpointing_recomputes_in_training_only_and_changes_nothing(folder, tune):
    cfg, policy = loaded(folder, tune=tune)
    _, kept = loaded(folder, tune=tune)
    assert len(policy.recompute) == 2
    # As in full fine-tuning, and where nothing trains.
    kept.recompute = []
    assert not loaded(folder, tune="full")[1].recompute
    assert not load_policy(cfg, cfg.model, trainable=False).recompute
    for p in (policy, kept):
        stir(p)
    calls = Counter()
    for layer in policy.recompute:
        layer.self_attn.register_forward_hook(lambda *_: calls.update(["attention"]))
    rolls, _ = play(policy, cfg)
    calls.clear()
    scored(policy, cfg, rolls)
    # One pass, two layers.
    assert calls["attention"] == 2
    calls.clear()
    sequences = [sm.plain(r) for r in rolls]
    ours = grads(policy, sequences)
    # And once more in backward.
    assert calls["attention"] == 4
    # Eval mode: generation has its cache and no dropout.
    assert not any(m.training for m in policy.model.modules())
    theirs = grads(kept, sequences)
    assert all((ours[n] - theirs[n]).abs().max() < 1e-6 for n in theirs)


def test_full_fine_tuning_keeps_its_activations(folder):
    cfg, policy = loaded(folder, tune="full")
    rolls, _ = play(policy, cfg)
    calls = Counter()
    for layer in policy.backbone.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.update(["attention"]))
    grads(policy, [sm.plain(r) for r in rolls])
    assert calls["attention"] == 2


def test_lora_on_a_base_that_is_not_quantised(folder):
    cfg, policy = loaded(folder, tune="lora")
    assert not any(p.dtype == torch.uint8 for p in policy.model.parameters())
    rolls, _ = play(policy, cfg)
    assert all(
        g.norm() > 0
        for name, g in grads(policy, [sm.plain(r) for r in rolls]).items()
        if "lora_B" in name
    )


def test_more_positions_than_the_model_has_are_refused(folder):
    with pytest.raises(
        ValueError, match=r"--max_context 40950 plus --max_analysis 24 exceeds the 40960 positions"
    ):
        loaded(folder, max_context=40950)


def test_a_long_prompt_in_pieces_is_the_same_prompt(folder, monkeypatch):
    cfg, policy = loaded(folder)
    prompts = [list(range(5, 5 + n)) for n in (40, 3, 17, 1)]
    whole = KVBatch(policy, 4).feed(prompts)
    monkeypatch.setitem(policy_module.PREFILL, "cpu", 4 * 16)
    kv = KVBatch(policy, 4)
    pieces = kv.feed(prompts)
    assert (whole - pieces).abs().max() < 1e-5 and kv.length.tolist() == [40, 3, 17, 1]
    kv.keep([0, 2])
    assert kv.mask.shape[1] == 40
    monkeypatch.setitem(policy_module.PREFILL, "cpu", 4)
    assert (whole - KVBatch(policy, 4).feed(prompts)).abs().max() < 1e-5


# --------------------------------------------------------------------------------------------------
# 2. One set of weights, four roles
# --------------------------------------------------------------------------------------------------
def frozen_copy(policy):
    return {name: p.detach().clone() for name, p in parts(policy, ".default.").items()}


def with_adapter(policy, cfg, adapter):
    """A policy of its own, loaded apart, that has this adapter (None: no adapter)."""
    other = load_policy(cfg, cfg.model)
    with torch.no_grad():
        for name, p in parts(other, ".default.").items():
            p.copy_(adapter[name]) if adapter else p.zero_()
    return other


def test_every_role_uses_the_weights_it_should(folder):
    """Snapshot and teacher: the policy as it is before the step. Reference: the start of Stage 2,
    whatever happened since."""
    cfg, policy = loaded(folder)
    for stage_1 in (False, True):
        if stage_1:
            stir(policy, seed=1)
        begin = frozen_copy(policy) if stage_1 else None
        freeze_reference(policy)
        assert ("reference" in policy.model.peft_config) == stage_1 and policy.reference is None
        optimizer = sm.make_optimizer(policy, cfg.lr)
        # the reference does not train
        assert len(optimizer.param_groups[0]["params"]) == 28
        for update in range(3):
            rolls, _ = play(policy, cfg)
            snapshot = frozen_copy(policy)
            scores = score_all(policy, cfg, rolls)
            now, start = with_adapter(policy, cfg, snapshot), with_adapter(policy, cfg, begin)
            assert (torch.cat(scores.old) - scored(now, cfg, rolls)).abs().max() < 1e-5
            assert (torch.cat(scores.reference) - scored(start, cfg, rolls)).abs().max() < 1e-5
            teacher = torch.cat(score(now, [sm.with_skill(now, r, SKILL) for r in rolls], cfg)[0])
            assert (torch.cat(scores.teacher) - teacher).abs().max() < 1e-5
            gap = (torch.cat(scores.old) - torch.cat(scores.reference)).abs().max()
            # the test can tell
            assert gap < 1e-6 if update == 0 else gap > 1e-4
            learn(policy, cfg, optimizer, rolls, scores, update)
            assert policy.model.active_adapter == "default" and not same(
                frozen_copy(policy), snapshot
            )


class Scripted(ScriptedGames):
    """Pool's place in main()."""

    def __init__(self, env, workers):
        super().__init__(SMALL["max_steps"])


def write_skill(policy, prompts, max_new, batch):
    """What a random model cannot do."""
    return [skills.canonical_reply("s", SKILL)] * len(prompts), 0


def launch(monkeypatch, *args):
    """main() on scripted games, with skills in place of what a random model writes."""
    tasks = {split: fake_tasks(2) for split in envs.SPLITS}
    monkeypatch.setattr(sm, "Pool", Scripted)
    monkeypatch.setattr(envs, "check", lambda env, tasks: None)
    monkeypatch.setattr(sm, "find_tasks", lambda cfg: (gpu_check.world(), tasks, "scripted"))
    monkeypatch.setattr(sm, "complete", write_skill)
    monkeypatch.setattr(runs, "draw_curves", lambda run: None)
    options = SMALL | dict(sft_tasks=2, sft_rollouts=2, max_analysis=120, updates=3, eval_every=0)
    flags = [f"--{k}={v}" for k, v in options.items() if k != "env_args"]
    return sm.main([*flags, "--env_args", *gpu_check.ENV_ARGS, *map(str, args)])


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.slow),
                                   ("--ablate", "no_sft")])
def test_a_resumed_run_has_one_base_and_the_same_adapter_and_reference(
    folder, tmp_path, monkeypatch, flags
):
    loads, causal_lm = [], runs.AutoModelForCausalLM
    real = causal_lm.from_pretrained
    monkeypatch.setattr(
        causal_lm, "from_pretrained", lambda *a, **k: loads.append(a) or real(*a, **k)
    )
    args = ("--model", folder, "--out", tmp_path, *flags)
    assert launch(monkeypatch, *args, "--name", "whole") == 0 and len(loads) == 1
    assert launch(monkeypatch, *args, "--name", "parts", "--updates", 1) == 0
    assert launch(monkeypatch, *args, "--name", "parts", "--resume") == 0 and len(loads) == 3
    file = "checkpoints/update-000003/policy/adapter_model.safetensors"
    whole, parts_ = (load_file(tmp_path / name / file) for name in ("whole", "parts"))
    assert same(whole, parts_) and any(x.any() for n, x in whole.items() if "lora_B" in n)
    logs = [runs.read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    lines = [[m["kl"] for m in log if m["stage"] == "rl"] for log in logs]
    # the reference is the start, also after the resume
    assert lines[0] == lines[1] and lines[0][0] == 0 < lines[0][2]
    assert (tmp_path / "whole" / "report.md").exists()


# --------------------------------------------------------------------------------------------------
# 3. Adapters on disk
# --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Load, rollout, Stage 1, one SEED update, save: (cfg, policy, adapter folder, rollouts,
    base bits before)."""
    cfg, policy = loaded(folder)
    before = bits(policy)
    rolls, _ = play(policy, cfg)
    rows = [dict(prompt="Analyze.", response=skills.canonical_reply("s", SKILL))] * 4
    counters = Counter()
    sequences = sm.sft_sequences(policy, dataclasses.replace(cfg, max_analysis=200), rows, counters)
    assert len(sequences) == 4
    sm.sft(policy, cfg, sequences, [], lambda line: None)
    freeze_reference(policy)
    optimizer = sm.make_optimizer(policy, cfg.lr)
    learn(policy, cfg, optimizer, rolls, score_all(policy, cfg, rolls), 1)
    place = tmp_path_factory.mktemp("adapter") / "policy"
    runs.save_policy(policy, place, "alfworld")
    return cfg, policy, place, rolls, before


def test_the_base_keeps_every_bit_and_every_b_learns(trained):
    cfg, policy, _, rolls, before = trained
    assert same(bits(policy), before)
    assert all(p.abs().max() > 0 for p in parts(policy, ".lora_B.default").values())
    assert all(g.norm() > 0 for name, g in grads(policy, [sm.plain(r) for r in rolls]).items())


def test_what_is_saved_is_a_peft_folder(trained):
    cfg, _, place, _, _ = trained
    names = {p.name for p in place.iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "seed_mini.json",
    } <= names
    assert "reference" not in names and not [p for p in place.rglob("*.bin")]
    assert all("reference" not in name for name in load_file(place / "adapter_model.safetensors"))
    card = (place / "README.md").read_text()
    assert (
        card.startswith("---\nbase_model: ")
        and cfg.model in card
        and len(card) < 1500
        and "[More Information Needed]" not in card
    )


def test_reloaded_it_scores_the_same_bit_for_bit(trained):
    cfg, policy, place, rolls, _ = trained
    for again in (load_policy(cfg, str(place), trainable=on) for on in (True, False)):
        assert torch.equal(scored(again, cfg, rolls), scored(policy, cfg, rolls))


def test_plain_peft_loads_it_and_scores_the_same(trained):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    cfg, policy, place, rolls, _ = trained
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        cfg.model, dtype=torch.float32, quantization_config=four_bit, device_map={"": "cpu"}
    )
    # no dropout in it; in eval mode some CPUs take bitsandbytes' rounded kernel
    model = PeftModel.from_pretrained(model, place).train()
    assert AutoTokenizer.from_pretrained(place).chat_template == policy.tokenizer.chat_template
    for roll in rolls:
        full = torch.log_softmax(model(input_ids=torch.tensor([roll.ids])).logits[0].double(), -1)
        at = [t for t, on in enumerate(roll.sampled) if on]
        theirs = torch.stack([full[t - 1, roll.ids[t]] for t in at])
        assert (scored(policy, cfg, [roll]) - theirs).abs().max() < 1e-4


def test_an_adapter_is_evaluated_on_its_base(trained, tmp_path, monkeypatch, capsys):
    cfg, _, place, _, _ = trained
    assert launch(monkeypatch, "--eval", "--model", place, "--out", tmp_path) == 0
    # every second scripted game is won
    assert "1/2" in capsys.readouterr().out


def changed(place, to, **changes):
    """A copy of an adapter's folder with other entries in its config."""
    shutil.copytree(place, to)
    file = to / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return to


def test_an_adapter_of_another_base_is_refused_in_a_sentence(trained, tmp_path):
    cfg, _, place, _, _ = trained
    unsigned = changed(place, tmp_path / "unsigned")
    (unsigned / "seed_mini.json").unlink()
    noise = gpu_check.random_qwen3(tmp_path / "other", seed=5, **DIMS)
    shallow = gpu_check.random_qwen3(tmp_path / "shallow", **DIMS | dict(num_hidden_layers=1))
    narrow = gpu_check.random_qwen3(tmp_path / "narrow", **DIMS | dict(intermediate_size=64))
    for n, (adapter, base, word) in enumerate(
        [
            (place, noise, "was made for"),
            (unsigned, shallow, "does not fit"),
            (unsigned, narrow, "does not fit"),
        ]
    ):
        other = changed(adapter, tmp_path / str(n), base_model_name_or_path=str(base))
        refused(cfg, other, word)
    # Made elsewhere, but it fits.
    load_policy(cfg, str(unsigned))


def test_an_adapter_that_would_not_do_what_it_was_trained_to_do_is_refused(trained, tmp_path):
    cfg, _, place, _, _ = trained
    unsigned = changed(place, tmp_path / "unsigned")
    (unsigned / "seed_mini.json").unlink()
    apart = gpu_check.random_qwen3(tmp_path / "apart", **DIMS | dict(tie_word_embeddings=False))
    regex = dict(target_modules=r".*(q_proj|lm_head)")
    for n, (changes, word) in enumerate(
        [
            (dict(trainable_token_indices=[5]), "one tied matrix"),
            (dict(target_modules=["q_proj", "lm_head"]), "lm_head: head and embedding are one"),
            (dict(target_modules=["embed_tokens"]), "embed_tokens: head and embedding are one"),
            (dict(modules_to_save=["lm_head"]), "one tied matrix"),
            (regex, "one tied matrix"),
            (regex | dict(base_model_name_or_path=str(apart)), "no effect"),
            (dict(peft_type="IA3"), "LoRA only"),
        ]
    ):
        refused(cfg, changed(unsigned, tmp_path / str(n), **changes), word)


def test_a_folder_that_is_no_adapter_is_refused_in_a_sentence(trained, tmp_path):
    cfg, _, place, _, _ = trained
    refused(
        cfg,
        changed(place, tmp_path / "nameless", base_model_name_or_path=None),
        "no LoRA adapter folder",
    )
    broken = changed(place, tmp_path / "broken")
    (broken / "adapter_config.json").write_text("{")
    refused(cfg, broken, "no LoRA adapter folder")
    # Neither adapter nor model.
    (tmp_path / "empty").mkdir()
    refused(cfg, tmp_path / "empty", "cannot load the model")


def refused(cfg, adapter, word):
    """Whether loading it ends in one sentence with this word."""
    with pytest.raises(ValueError, match=word) as error:
        load_policy(cfg, str(adapter))
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------
# 4. The loss scale of fp16
# --------------------------------------------------------------------------------------------------
def test_the_loss_scale_changes_no_step(folder):
    cfg, policy = loaded(folder)
    _, plain = loaded(folder)
    norms = []
    for p, scale in ((policy, 2.0**10), (plain, 1.0)):
        stir(p)
        p.loss_scale = scale
        optimizer = sm.make_optimizer(p, cfg.lr)
        rolls, _ = play(p, cfg)
        freeze_reference(p)
        norms.append(learn(p, cfg, optimizer, rolls, score_all(p, cfg, rolls), 1)["grad_norm"])
    ours, theirs = (parts(p, ".lora_B.default").values() for p in (policy, plain))
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(ours, theirs))
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and norms[0] > 0


def test_the_loss_scale_backs_off_and_grows(folder):
    cfg, policy = loaded(folder)
    stir(policy)
    weights, optimizer = frozen_copy(policy), sm.make_optimizer(policy, cfg.lr)
    params = optimizer.param_groups[0]["params"]
    assert len(params) == 28

    def step(value):
        """What is counted when every gradient has this value."""
        for p in params:
            p.grad = torch.full_like(p, value)
        counters = Counter()
        runs.optimizer_step(policy, optimizer, sm.MAX_GRAD_NORM, counters)
        return list(counters)

    policy.loss_scale = 8.0
    skipped = [step(float("inf")) for _ in range(3)]
    # Never below 2.
    assert skipped == [[runs.SCALED], [runs.SCALED], [runs.SKIPPED]] and policy.loss_scale == 2
    assert same(frozen_copy(policy), weights) and policy.clean_steps == 0
    assert [step(1e-3) for _ in range(200)] == [[]] * 200 and policy.loss_scale == 4
    # bf16 and fp32 never scale.
    policy.loss_scale = 1.0
    weights = frozen_copy(policy)
    assert step(float("nan")) == [runs.SKIPPED] and policy.loss_scale == 1
    assert same(frozen_copy(policy), weights)


def test_the_loss_scale_is_saved_with_the_adapter(trained, tmp_path, monkeypatch):
    cfg, policy, _, _, _ = trained
    scaled = dataclasses.replace(policy, loss_scale=32.0, clean_steps=150)
    runs.save_policy(scaled, tmp_path / "policy", "alfworld")
    # fp32: off
    assert load_policy(cfg, str(tmp_path / "policy")).loss_scale == 1
    monkeypatch.setattr(runs, "compute_dtype", lambda device, lora: torch.float16)
    again = load_policy(cfg, str(tmp_path / "policy"))
    # a resumed run doubles it at the same step
    assert again.loss_scale == 32 and again.clean_steps == 150


def test_an_adapter_is_not_fully_fine_tuned_in_secret(trained, tmp_path):
    cfg, policy, _, _, _ = trained
    runs.save_policy(policy, tmp_path / "policy", "alfworld")
    with pytest.raises(ValueError, match="LoRA adapter.*--tune full"):
        load_policy(dataclasses.replace(cfg, tune="full"), str(tmp_path / "policy"))


# --------------------------------------------------------------------------------------------------
# 5. Which model, and how much memory
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "card, model, word",
    [
        (16.0, runs.QWEN, "16 GB"),
        (10.0, runs.QWEN, "--model tiny"),
        (8.0, "tiny", "only 8 of 10"),
        (0.0, "tiny", "no CUDA card"),
    ],
)
def test_auto_says_what_it_takes_and_why(monkeypatch, card, model, word):
    monkeypatch.setattr(runs, "card_memory", lambda: card)
    name, line = runs.choose_model(sm.Config())
    assert name == model and word in line and "\n" not in line
    cfg = sm.resolve(sm.Config(model=name))
    # A notebook's default, on any machine.
    assert sm.resolve(sm.Config()).model == "tiny"
    large = model == runs.QWEN
    assert (cfg.model, cfg.tune, cfg.think) == (model, "qlora" if large else "full", large)
    assert ("list_actions=True" in cfg.env_args) == large
    assert runs.choose_model(sm.Config(model="tiny")) == ("tiny", "")


@pytest.mark.parametrize(
    "tune, how", [("qlora", "QLoRA"), ("lora", "16-bit LoRA"), ("full", "full")]
)
def test_auto_names_what_is_tuned(monkeypatch, tune, how):
    monkeypatch.setattr(runs, "card_memory", lambda: 24.0)
    assert how in runs.choose_model(sm.Config(tune=tune))[1]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch, capsys):
    def no_network(path, **_):
        raise OSError(
            f"We couldn't connect to 'https://huggingface.co' to load {path}.\n"
            "Check your connection."
        )

    monkeypatch.setattr(runs.AutoConfig, "from_pretrained", no_network)
    assert sm.main(["--model", runs.QWEN]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "cannot be reached" in err and "--model tiny" in err


PAPER = dict(model=runs.QWEN)
MODEL = argparse.Namespace(**runs.QWEN_CONFIG)


def test_the_plan_of_qwen3_by_hand():
    cfg = sm.resolve(sm.Config(**PAPER, rollout_batch=8, max_context=4096, max_analysis=512))
    plan = runs.memory_plan(MODEL, cfg)
    # 1.409e9
    linear = 28 * (2048 * 2048 * 2 + 2048 * 1024 * 2 + 3 * 2048 * 6144)
    assert plan["weights"] == pytest.approx(151936 * 2048 * 2 + linear * 0.516, rel=1e-3)
    # 17.4M
    lora = 28 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))
    assert plan["adapter"] == 2 * 4 * lora and plan["optimizer"] == 8 * lora
    # 114,688 bytes a token
    assert plan["kv_cache"] == 8 * (4096 + 512) * 28 * 2 * 8 * 128 * 2
    half = runs.memory_plan(MODEL, dataclasses.replace(cfg, tune="lora"))
    # 16 bits a weight; all else as with 4.
    assert half["weights"] == 2 * (linear + 151936 * 2048)
    assert {k: v for k, v in half.items() if plan[k] != v}.keys() == {
        "weights",
        "peak_rollout",
        "peak_training",
    }
    full = runs.memory_plan(MODEL, sm.resolve(sm.Config(**PAPER, tune="full")))
    assert (
        full["weights"] == pytest.approx(4 * (linear + 151936 * 2048))
        and full["reference"] == full["weights"]
    )
    assert full["adapter"] == 0


# its proportions
QWEN_LIKE = dict(
    hidden_size=128,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=384,
    vocab_size=600,
)


def bytes_kept(policy, tokens):
    """Bytes of every different tensor that waits for backward, weights apart."""
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept = {}

    def pack(x):
        """Held, so that no address is used twice."""
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        policy_module.recomputing(policy),
    ):
        policy.backbone(input_ids=torch.arange(tokens)[None], use_cache=False)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def kept_and_planned(tmp_path, monkeypatch, tune, recompute=True, tokens=256):
    """What two further layers add to the bytes that autograd keeps, and to the plan; and the plan
    of three layers. Adapters compute in bf16 as on a card, full in fp32."""
    dtype = torch.float32 if tune == "full" else torch.bfloat16
    monkeypatch.setattr(runs, "compute_dtype", lambda device, lora: dtype)
    lengths = dict(max_context=tokens - 1, max_analysis=1, micro_tokens=tokens)
    measured, predicted = [], []
    for layers in (1, 3):
        place = tmp_path / str(layers)
        folder = gpu_check.random_qwen3(place, **QWEN_LIKE, num_hidden_layers=layers)
        cfg, policy = loaded(folder, tune=tune, **lengths)
        policy.recompute = policy.recompute if recompute else []
        measured.append(bytes_kept(policy, tokens))
        predicted.append(runs.memory_plan(policy.model.config, cfg)["activations"])
    return measured[1] - measured[0], predicted[1] - predicted[0], predicted[1]


@pytest.mark.parametrize("tune", ["qlora", "lora", "full"])
def test_predicted_activations_are_what_autograd_keeps(tmp_path, tune, monkeypatch):
    """Per further layer: its input where it is recomputed, else all of it."""
    measured, predicted, _ = kept_and_planned(tmp_path, monkeypatch, tune)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_the_one_layer_that_is_recomputed_takes_what_the_plan_says(tmp_path, monkeypatch):
    """A layer in full, as autograd keeps it if nothing is recomputed. The plan's activations are
    the inputs of three layers, one layer in full, and the scratch around an MLP."""
    tokens = 256
    measured, _, plan = kept_and_planned(tmp_path, monkeypatch, "qlora", False, tokens)
    H, I = QWEN_LIKE["hidden_size"], QWEN_LIKE["intermediate_size"]
    inputs, scratch = 3 * H * 2, (4 + 3 * 2) * I + (4 + 2 * 2) * H
    assert plan / tokens - inputs - scratch == pytest.approx(measured / 2 / tokens, rel=0.1)


def test_settings_grow_with_the_card_and_fit_it(monkeypatch):
    cfg, model = sm.resolve(sm.Config(**PAPER)), MODEL
    best = [runs.fit(model, cfg, gb) for gb in (12, 16, 24, 80)]
    assert [b["rollout_batch"] for b in best] == sorted(b["rollout_batch"] for b in best) and best[
        0
    ] != best[3]
    for gb, b in zip((12, 16, 24, 80), best):
        plan = runs.memory_plan(model, dataclasses.replace(cfg, **b))
        assert max(plan["peak_rollout"], plan["peak_training"]) < 0.9e9 * gb
    assert runs.fit(model, cfg, 1.0) == dict(rollout_batch=1, micro_tokens=2048)
    monkeypatch.setattr(runs, "card_memory", lambda: 16.0)
    chosen = sm.resolve(sm.Config(model=runs.QWEN))
    assert dict(rollout_batch=chosen.rollout_batch, micro_tokens=chosen.micro_tokens) == best[1]
    # the user's word counts
    assert sm.resolve(sm.Config(model=runs.QWEN, rollout_batch=3)).rollout_batch == 3


def test_a_dry_run_loads_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sm, "load_policy", None)
    monkeypatch.setattr(runs.AutoConfig, "from_pretrained", None)
    assert sm.main(["--dry_run", "--model", runs.QWEN, "--out", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    for word in (
        "weights",
        "kv cache",
        "activations",
        "logits chunk",
        "optimizer",
        "12 GB card",
        "24 GB card",
        "none found",
        "not yet measured",
    ):
        assert word in out
    assert not (tmp_path / "runs").exists()


# --------------------------------------------------------------------------------------------------
# 6. Out of memory
# --------------------------------------------------------------------------------------------------
HALVED = "out of memory: micro_tokens halved"


def limited(monkeypatch, most):
    """A card that holds `most` rows."""
    real = KVBatch.__init__

    def init(self, policy, rows):
        if rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        real(self, policy, rows)

    monkeypatch.setattr(KVBatch, "__init__", init)


def test_a_rollout_halves_its_batch_and_plays_the_same_episodes(folder, monkeypatch):
    cfg, policy = loaded(folder)
    expected, _ = play(policy, cfg, 5)
    limited(monkeypatch, 1)
    rolls, counters = play(policy, cfg, 5)
    assert [(r.ids, r.sampled) for r in rolls] == [(r.ids, r.sampled) for r in expected]
    assert counters["out of memory: rollout_batch halved"] == 2 and cfg.rollout_batch == 1
    limited(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="--rollout_batch 1") as error:
        play(policy, cfg, 2)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_analysis_halves_its_batch_too(folder, monkeypatch):
    cfg, policy = loaded(folder)
    rolls, _ = play(policy, cfg)
    world, counters = gpu_check.world(), Counter()
    expected = sm.analyze_own(policy, world, cfg, rolls, 1, {}, Counter())
    limited(monkeypatch, 2)
    replies = sm.analyze_own(policy, world, cfg, rolls, 1, {}, counters)
    assert counters["out of memory: rollout_batch halved"] == 1 and replies == expected


@pytest.mark.slow
def test_training_and_scoring_halve_their_micro_batches_and_lose_nothing(folder, monkeypatch):
    adapters, counters = [], []
    # padded tokens that the card holds, without and with gradient
    for most in (None, (2100, 900)):
        cfg, policy = loaded(folder)
        stir(policy)
        real, run = policy_module.response_hidden, runs.Run(cfg)
        optimizer = sm.make_optimizer(policy, 1e-3)

        def limited_hidden(policy, sequences, most=most, real=real):
            # first, as on a card: memory runs out in the middle
            out = real(policy, sequences)
            if (
                most
                and len(sequences) * max(len(ids) for ids, _ in sequences)
                > most[torch.is_grad_enabled()]
            ):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return out

        with monkeypatch.context() as patch:
            patch.setattr(policy_module, "response_hidden", limited_hidden)
            patch.setattr(sm, "complete", write_skill)
            patch.setattr(run, "write_rollouts", lambda *a, **k: None)
            freeze_reference(policy)
            pool = ScriptedGames(cfg.max_steps)
            line = sm.one_update(policy, pool, fake_tasks(2), cfg, optimizer, 1, run, {})
        adapters.append(frozen_copy(policy))
        counters.append(line["counters"].get(HALVED, 0))
    # once in scoring, once in training; 4096 tokens: all at once; 1024: one by one
    assert counters == [0, 2] and cfg.micro_tokens == 1024
    assert all((adapters[0][name] - adapters[1][name]).abs().max() < 1e-4 for name in adapters[0])


@pytest.mark.slow
def test_stage_1_halves_its_micro_batches_too(folder, monkeypatch):
    losses_ = []
    for most in (10_000, 400):
        cfg, policy = loaded(folder, sft_batch=4)
        real = sm.token_logp

        def limited_logp(policy, sequences, temperature, most=most, real=real):
            if sum(len(ids) for ids, _ in sequences) > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(policy, sequences, temperature)

        rows, lines = (
            [([5 + n] * 100 + [7] * 50, [False] * 100 + [True] * 50) for n in range(4)],
            [],
        )
        with monkeypatch.context() as patch:
            patch.setattr(sm, "token_logp", limited_logp)
            sm.sft(policy, cfg, rows, [], lines.append)
        losses_.append(lines[0]["loss"])
        assert lines[0].get("counters", {}) == ({} if most > 1000 else {HALVED: 4})
    assert losses_[0] == pytest.approx(losses_[1], rel=1e-5)


# --------------------------------------------------------------------------------------------------
# 7. What real models write, and what it costs
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, action",
    [
        (
            "<think>\nThe mug may be there.\n</think>\n\n<action>go to shelf 1</action>",
            "go to shelf 1",
        ),
        (
            "<think>I could <action>look</action> first.</think><action>go to shelf 1</action>"
            "<|im_end|>",
            "go to shelf 1",
        ),
        ("<action>\ngo to shelf 1\n</action>", "go to shelf 1"),
        ("<Action> Go to Shelf 1. </Action>", "go to shelf 1"),
        ("<action>go to shelf 1", "go to shelf 1"),
        ("Action: go to shelf 1", "go to shelf 1"),
        ("**go to shelf 1**", "go to shelf 1"),
        ("> go to shelf 1", "go to shelf 1"),
        ("`go to shelf 1`", "go to shelf 1"),
        ("```\ngo to shelf 1\n```", "go to shelf 1"),
        ('I will look for it.\n\nNext action: "go to shelf 1"', "go to shelf 1"),
        ("<think>\n\n</think>\n\ngo to shelf 1", "go to shelf 1"),
        ("<action>[go to shelf 1]</action>", "go to shelf 1"),
        ("- go to shelf 1", "go to shelf 1"),
        ("<think>still thinking", ""),
        ("", ""),
    ],
)
def test_the_parser_takes_what_real_models_write(text, action):
    assert gpu_check.world().parse(text) == action


QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = (
    "You see a shelf 1.",
    "<think>\nThe mug.\n</think>\n\n<action>go to shelf 1</action>",
    "You arrive at shelf 1.",
    "<action>take mug 1</action>",
    "Nothing happens.",
)


@pytest.mark.parametrize("template, append_only", [(QWEN25, True), (gpu_check.QWEN3, False)])
def test_an_episodes_ids_and_the_templates(template, append_only):
    """Qwen2.5: the same ids at every turn. Qwen3 is not append-only: rendered anew, it takes the
    thinking (also the empty block that switches it off) out of earlier turns. We never render
    again, so that the policy is trained on what it saw and sampled; that is the whole
    difference."""
    tokenizer = gpu_check.make_tokenizer(template)
    end_id, first, later = chat_pieces(tokenizer)

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    no_thinking = encode("<think>\n\n</think>\n\n")
    ours = first[0] + encode(TALK[0]) + first[1]
    assert append_only or ours[-len(no_thinking) :] == no_thinking
    for turn in (1, 3, 5):
        messages = [
            {"role": ("user", "assistant")[n % 2], "content": text}
            for n, text in enumerate(TALK[:turn])
        ]
        theirs = encode(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        )
        spelled = tokenizer.decode(ours)
        # what the template would drop: each earlier turn's thinking
        if not append_only:
            spelled = spelled.replace("<think>\n\n</think>\n\n", "", (turn - 1) // 2).replace(
                "<think>\nThe mug.\n</think>\n\n", ""
            )
        assert spelled == tokenizer.decode(theirs) and (ours == theirs) == (
            append_only or turn == 1
        )
        if turn < 5:
            ours += encode(TALK[turn]) + [end_id] + later[0] + encode(TALK[turn + 1]) + later[1]


def test_token_costs_by_hand():
    """Words are tokens, a turn's glue is one token on either side."""
    policy = policy_module.Policy(None, None, None, 9, ([9], [9]), ([9], [9]))
    policy.encode = lambda text: list(range(len(text.split())))
    cfg, env = sm.Config(think=True), gpu_check.world()
    fixed = 2 + len(" ".join(env.prompt("x y", "", think=True)).split())
    steps = [
        envs.Step(*step, True)
        for step in (("a b c", "r", "go one"), ("d e", "r", "go"), ("f", "r", "go far away"))
    ]
    episode = envs.Episode("g", "train", fake_tasks(1)[0].kind, "x y", steps=steps)
    # Each turn lists 4 words of commands.
    spans = [
        (fixed + 3 + 4, False),
        (5, True),
        (2 + 2 + 4, False),
        (6, True),
        (2 + 1 + 4, False),
        (7, True),
    ]
    sampled = [on for n, on in spans for _ in range(n)]
    roll = sm.Rollout(episode, [0] * len(sampled), sampled, [], 0)
    first, second, third = fixed + 7 + 5, fixed + (3 + 2) + 6 + 6, fixed + (3 + 2) + (2 + 1) + 5 + 7
    assert gpu_check.token_costs(policy, env, cfg, roll) == (first + second + third, 12)
    assert gpu_check.token_costs(policy, env, cfg, roll, window=1) == (
        first + second + third - 5,
        12,
    )
    nothing = dataclasses.replace(roll, episode=dataclasses.replace(episode, steps=[]))
    assert gpu_check.token_costs(policy, env, cfg, nothing) == (0, 0)


@pytest.mark.slow
def test_the_gpu_check_runs_small(tmp_path):
    seed, grpo = gpu_check.check(tmp_path, DIMS, **SMALL)
    assert seed["parse_rate"] == 1 and "parse_rate" not in grpo
    for line in (seed, grpo):
        assert line["episode_steps"] == 3 and line["grad_norm"] > 0 and line["sampler_gap"] < 1e-3
        assert (
            line["one_prompt_per_step_tokens"]
            > line["episode_tokens"]
            > line["admissible_tokens"]
            > 0
        )


def test_a_halved_batch_is_not_reported_as_a_skipped_step():
    line = dict(stage="sft", step=1, steps=3, loss=1.0, anchor_kl=0.0, counters={HALVED: 1})
    assert "skipped" not in runs.progress_line(line) and "skipped" in runs.progress_line(
        line | dict(counters={runs.SKIPPED: 1})
    )
