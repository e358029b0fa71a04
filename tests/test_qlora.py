"""Adapters on a 4-bit base: the real NF4 path on a tiny random Qwen3, on the CPU. What a GPU alone can show is in gpu_check.py.

The oracles are independent: an fp32 copy of the dequantised base, plain peft, the chat template, sums done by hand, what autograd really keeps.
"""
import copy
import dataclasses
import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import envs
import gpu_check
import seed_mini as sm
import skills
from gpu_check import SKILL, ScriptedGames, fake_games

DIMS = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128, vocab_size=600,
            tie_word_embeddings=True, dtype=torch.float32)
SMALL = dict(profile="paper", tune="lora", lora_rank=4, threads=1, max_steps=3, max_response=8, max_context=1500, max_analysis=24, micro_tokens=4096,
             tasks_per_update=2, group_size=2, rollout_batch=4, lr=1e-2, sft_lr=1e-2, sft_epochs=1, sft_batch=2, lambda_opd=0.3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm, "card_memory", lambda cfg: 0.0)
        patch.setattr(sm.torch.cuda, "is_available", lambda: False)  # these tests are about the CPU, on any machine
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
    return cfg, sm.load_policy(cfg, cfg.model)


def parts(policy, piece):
    return {name: p for name, p in policy.model.named_parameters() if piece in name}


def stir(policy, seed=0, std=0.05):
    """Give the adapter weights that matter."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parts(policy, ".lora_B.default").values():
            p.normal_(std=std, generator=rng)


def rngs(n):
    return [sm.counted_rng(0, "test", i) for i in range(n)]


def play(policy, cfg, n=4):
    return sm.rollout(policy, ScriptedGames(cfg.max_steps), fake_games(n), cfg, rngs(n), 1.0)


def scored(policy, cfg, rolls):
    return torch.cat(sm.score(policy, [sm.plain(r) for r in rolls], cfg)[0])


def twin(policy, cfg):
    """The same policy on an fp32 copy of the dequantised base: no bitsandbytes in it."""
    import bitsandbytes.functional as F
    other = sm.load_policy(dataclasses.replace(cfg, no_4bit=True, checkpointing=False), cfg.model)
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
    logp, mask, _ = sm.token_logp(policy, sequences, temperature)
    (logp * mask).sum().div(mask.sum()).backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.requires_grad}


def bits(policy):
    """Every bit of the base: packed weights, their scales, embeddings, norms."""
    out = {name: p.detach().clone() for name, p in policy.model.named_parameters() if ".lora_" not in name}
    for name, module in policy.model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            out |= {f"{name}.absmax": state.absmax.clone(), f"{name}.scales": state.state2.absmax.clone(), f"{name}.offset": state.offset.clone()}
    return out


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ------------------------------------------------------------------------------------------------------------------
# 1. The policy
# ------------------------------------------------------------------------------------------------------------------
def test_only_fp32_adapters_train_on_a_4_bit_base(folder):
    _, policy = loaded(folder)
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {name for name in parts(policy, ".lora_")} and len(trained) == 2 * 7 * DIMS["num_hidden_layers"]
    assert all(p.dtype == torch.float32 for p in parts(policy, ".lora_").values())
    assert all(p.dtype == torch.uint8 for p in parts(policy, "base_layer.weight").values())
    assert not [name for name in trained if "lm_head" in name or "embed" in name]
    assert policy.head is policy.backbone.embed_tokens.weight and policy.head.dtype == torch.float32  # a CPU's compute dtype


def test_head_embedding_and_norms_keep_the_dtype_they_are_loaded_in(folder, monkeypatch):
    """No fp32 upcast: as on a card, where the compute dtype is bf16 or fp16."""
    for dtype in (torch.bfloat16, torch.float16):
        monkeypatch.setattr(sm, "compute_dtype", lambda device, lora, dtype=dtype: dtype)
        cfg, policy = loaded(folder)
        assert {p.dtype for name, p in policy.model.named_parameters() if "norm" in name or "embed" in name or "head" in name} == {dtype}
        rolls, _ = play(policy, cfg)
        sm.freeze_reference(policy)
        stir(policy)
        sm.freeze_reference(policy)
        assert {p.dtype for p in parts(policy, ".lora_").values()} == {torch.float32} and len(parts(policy, ".reference.")) == 28
        assert scored(policy, cfg, rolls).isfinite().all() and policy.loss_scale == (2.0 ** 14 if dtype == torch.float16 else 1.0)
        assert all(g.isfinite().all() for g in grads(policy, [sm.plain(r) for r in rolls]).values())


@pytest.mark.parametrize("device, bf16, lora, expected", [("cpu", True, True, "float32"), ("cuda", True, True, "bfloat16"),
                                                          ("cuda", False, True, "float16"), ("cuda", True, False, "float32")])
def test_cards_without_bf16_compute_in_fp16(monkeypatch, device, bf16, lora, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    assert str(sm.compute_dtype(torch.device(device), lora)) == f"torch.{expected}"


def test_nf4_gradients_are_those_of_the_dequantised_base(folder):
    """Also after passes without gradient in eval mode, where bitsandbytes on some CPUs repacks the weights and loses the gradient."""
    cfg, policy = loaded(folder)
    stir(policy)
    before = bits(policy)
    rolls, _ = play(policy, cfg)
    sequences, other = [sm.plain(r) for r in rolls], twin(policy, cfg)
    assert (scored(policy, cfg, rolls) - scored(other, cfg, rolls)).abs().max() < 1e-4
    ours, theirs = grads(policy, sequences), grads(other, sequences)
    assert len(ours) == 28
    for name in ours:
        assert theirs[name].norm() > 0 and (ours[name] - theirs[name]).norm() < 1e-4 * theirs[name].norm(), name
    assert same(bits(policy), before)


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_checkpointing_recomputes_in_training_only_and_changes_nothing(folder, tune):
    assert not config(folder, tune="full").checkpointing and config(folder).checkpointing  # the defaults
    cfg, policy = loaded(folder, tune=tune, checkpointing=True)
    _, kept = loaded(folder, tune=tune, checkpointing=False)
    assert len(policy.recompute) == 2 and not kept.recompute
    for p in (policy, kept):
        stir(p)
    calls = Counter()
    for layer in policy.recompute:
        layer.self_attn.register_forward_hook(lambda *_: calls.update(["attention"]))
    rolls, _ = play(policy, cfg)
    calls.clear()
    scored(policy, cfg, rolls)
    assert calls["attention"] == 2  # one pass, two layers
    calls.clear()
    sequences = [sm.plain(r) for r in rolls]
    ours = grads(policy, sequences)
    assert calls["attention"] == 4  # and once more in backward
    assert not any(m.training for m in policy.model.modules())  # eval mode: generation has its cache and no dropout
    theirs = grads(kept, sequences)
    assert all((ours[n] - theirs[n]).abs().max() < 1e-6 for n in theirs)


def test_lora_without_4_bit(folder):
    cfg, policy = loaded(folder, no_4bit=True)
    assert not any(p.dtype == torch.uint8 for p in policy.model.parameters())
    rolls, _ = play(policy, cfg)
    assert all(g.norm() > 0 for name, g in grads(policy, [sm.plain(r) for r in rolls]).items() if "lora_B" in name)


def test_more_positions_than_the_model_has_are_refused(folder):
    with pytest.raises(ValueError, match=r"--max_context 40950 plus --max_analysis 24 exceeds the 40960 positions"):
        loaded(folder, max_context=40950)


def test_a_long_prompt_in_pieces_is_the_same_prompt(folder, monkeypatch):
    cfg, policy = loaded(folder)
    prompts = [list(range(5, 5 + n)) for n in (40, 3, 17, 1)]
    whole = sm.KVBatch(policy, 4).feed(prompts)
    monkeypatch.setitem(sm.PREFILL, "cpu", 4 * 16)
    kv = sm.KVBatch(policy, 4)
    pieces = kv.feed(prompts)
    assert (whole - pieces).abs().max() < 1e-5 and kv.length.tolist() == [40, 3, 17, 1]
    kv.keep([0, 2])
    assert kv.mask.shape[1] == 40
    monkeypatch.setitem(sm.PREFILL, "cpu", 4)
    assert (whole - sm.KVBatch(policy, 4).feed(prompts)).abs().max() < 1e-5


# ------------------------------------------------------------------------------------------------------------------
# 2. One set of weights, four roles
# ------------------------------------------------------------------------------------------------------------------
def frozen_copy(policy):
    return {name: p.detach().clone() for name, p in parts(policy, ".default.").items()}


def with_adapter(policy, cfg, adapter):
    """A policy of its own, loaded apart, that has this adapter (None: no adapter)."""
    other = sm.load_policy(cfg, cfg.model)
    with torch.no_grad():
        for name, p in parts(other, ".default.").items():
            p.copy_(adapter[name]) if adapter else p.zero_()
    return other


def test_every_role_uses_the_weights_it_should(folder):
    """Snapshot and teacher: the policy as it is before the step. Reference: the start of Stage 2, whatever happened since."""
    cfg, policy = loaded(folder)
    for stage_1 in (False, True):
        if stage_1:
            stir(policy, seed=1)
        begin = frozen_copy(policy) if stage_1 else None
        sm.freeze_reference(policy)
        assert ("reference" in policy.model.peft_config) == stage_1 and policy.reference is None
        optimizer, replies = sm.make_optimizer(policy, cfg.lr, 0.0), [skills.Reply(SKILL, "", "ok", False)] * 4
        assert len(optimizer.param_groups[0]["params"]) == 28  # the reference does not train
        for update in range(3):
            rolls, _ = play(policy, cfg)
            snapshot = frozen_copy(policy)
            scores = sm.score_all(policy, cfg, rolls, replies)
            now, start = with_adapter(policy, cfg, snapshot), with_adapter(policy, cfg, begin)
            assert (torch.cat(scores.old) - scored(now, cfg, rolls)).abs().max() < 1e-5
            assert (torch.cat(scores.reference) - scored(start, cfg, rolls)).abs().max() < 1e-5
            teacher = torch.cat(sm.score(now, [sm.with_skill(now, r, SKILL) for r in rolls], cfg)[0])
            assert (torch.cat(scores.teacher) - teacher).abs().max() < 1e-5
            gap = (torch.cat(scores.old) - torch.cat(scores.reference)).abs().max()
            assert gap < 1e-6 if update == 0 else gap > 1e-4  # the test can tell
            sm.update_policy(policy, cfg, optimizer, rolls, scores, torch.tensor([1.0, -1.0, 1.0, -1.0]), [True] * 4, update)
            assert policy.model.active_adapter == "default" and not same(frozen_copy(policy), snapshot)


class Scripted(ScriptedGames):
    """EnvPool's place in main()."""

    def __init__(self, max_steps, **_):
        super().__init__(max_steps)


def launch(monkeypatch, *args):
    """main() on scripted games, with skills in place of what a random model writes."""
    monkeypatch.setattr(sm.envs, "EnvPool", Scripted)
    monkeypatch.setattr(sm.envs, "check_engine", lambda games: None)
    monkeypatch.setattr(sm, "find_games", lambda cfg: ({split: fake_games(2) for split in envs.SPLITS}, "scripted"))
    monkeypatch.setattr(sm, "complete", lambda policy, prompts, max_new, batch: ([skills.canonical_reply("s", SKILL)] * len(prompts), 0))
    monkeypatch.setattr(sm, "draw_curves", lambda run: None)
    flags = [f"--{k}={v}" for k, v in dict(SMALL, sft_tasks=2, sft_rollouts=2, max_analysis=120, updates=3, save_every=1, eval_every=0).items()]
    return sm.main([*flags, *map(str, args)])


@pytest.mark.parametrize("flags", [(), ("--no_sft",)])
def test_a_resumed_run_has_one_base_and_the_same_adapter_and_reference(folder, tmp_path, monkeypatch, flags):
    loads, real = [], sm.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(sm.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loads.append(a) or real(*a, **k))
    args = ("--model", folder, "--out", tmp_path, *flags)
    assert launch(monkeypatch, *args, "--name", "whole") == 0 and len(loads) == 1
    assert launch(monkeypatch, *args, "--name", "parts", "--updates", 1) == 0
    assert launch(monkeypatch, *args, "--name", "parts", "--resume") == 0 and len(loads) == 3
    whole, parts_ = (load_file(tmp_path / n / "checkpoints" / "update-000003" / "policy" / "adapter_model.safetensors") for n in ("whole", "parts"))
    assert same(whole, parts_) and any(x.any() for n, x in whole.items() if "lora_B" in n)
    lines = [[m["kl"] for m in sm.read_jsonl(tmp_path / n / "metrics.jsonl") if m["stage"] == "rl"] for n in ("whole", "parts")]
    assert lines[0] == lines[1] and lines[0][0] == 0 < lines[0][2]  # the reference is the start, also after the resume
    report = (tmp_path / "whole" / "report.md").read_text()
    assert "with one prompt per step" in report


# ------------------------------------------------------------------------------------------------------------------
# 3. Adapters on disk
# ------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Load, rollout, Stage 1, one SEED update, save: (cfg, policy, adapter folder, rollouts, base bits before)."""
    cfg, policy = loaded(folder)
    before = bits(policy)
    rolls, _ = play(policy, cfg)
    rows = [dict(prompt="Analyze.", response=skills.canonical_reply("s", SKILL))] * 4
    counters = Counter()
    sequences = sm.sft_sequences(policy, dataclasses.replace(cfg, max_analysis=200), rows, counters)
    assert len(sequences) == 4
    sm.sft(policy, cfg, sequences, [], lambda line: None)
    sm.freeze_reference(policy)
    optimizer, replies = sm.make_optimizer(policy, cfg.lr, 0.0), [skills.Reply(SKILL, "", "ok", False)] * 4
    sm.update_policy(policy, cfg, optimizer, rolls, sm.score_all(policy, cfg, rolls, replies), torch.tensor([1.0, -1.0, 1.0, -1.0]), [True] * 4, 1)
    place = tmp_path_factory.mktemp("adapter") / "policy"
    sm.save_policy(policy, place)
    return cfg, policy, place, rolls, before


def test_the_base_keeps_every_bit_and_every_b_learns(trained):
    cfg, policy, _, rolls, before = trained
    assert same(bits(policy), before)
    assert all(p.abs().max() > 0 for p in parts(policy, ".lora_B.default").values())
    assert all(g.norm() > 0 for name, g in grads(policy, [sm.plain(r) for r in rolls]).items())


def test_what_is_saved_is_a_peft_folder(trained):
    cfg, _, place, _, _ = trained
    names = {p.name for p in place.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "seed_mini.json"} <= names
    assert "reference" not in names and not [p for p in place.rglob("*.bin")]
    assert all("reference" not in name for name in load_file(place / "adapter_model.safetensors"))
    card = (place / "README.md").read_text()
    assert card.startswith("---\nbase_model: ") and cfg.model in card and len(card) < 1500 and "[More Information Needed]" not in card


def test_reloaded_it_scores_the_same_bit_for_bit(trained):
    cfg, policy, place, rolls, _ = trained
    for again in (sm.load_policy(cfg, str(place)), sm.load_policy(dataclasses.replace(cfg, adapter=str(place)), cfg.model, trainable=False)):
        assert torch.equal(scored(again, cfg, rolls), scored(policy, cfg, rolls))


def test_plain_peft_loads_it_and_scores_the_same(trained):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    cfg, policy, place, rolls, _ = trained
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32, quantization_config=four_bit, device_map={"": "cpu"})
    model = PeftModel.from_pretrained(model, place).train()  # no dropout in it; in eval mode some CPUs take bitsandbytes' rounded kernel
    assert AutoTokenizer.from_pretrained(place).chat_template == policy.tokenizer.chat_template
    for roll in rolls:
        full = torch.log_softmax(model(input_ids=torch.tensor([roll.ids])).logits[0].double(), -1)
        at = [t for t, on in enumerate(roll.sampled) if on]
        theirs = torch.stack([full[t - 1, roll.ids[t]] for t in at])
        assert (scored(policy, cfg, [roll]) - theirs).abs().max() < 1e-4


def test_an_adapter_is_evaluated_on_its_base(trained, tmp_path, monkeypatch, capsys):
    cfg, _, place, _, _ = trained
    assert launch(monkeypatch, "--eval", "--model", cfg.model, "--adapter", place, "--out", tmp_path) == 0
    assert "1/2" in capsys.readouterr().out  # every second scripted game is won


def changed(place, to, **changes):
    shutil.copytree(place, to)
    (to / "adapter_config.json").write_text(json.dumps(json.loads((to / "adapter_config.json").read_text()) | changes))
    return to


def test_an_adapter_that_does_not_belong_here_is_refused_in_a_sentence(trained, folder, tmp_path):
    cfg, _, place, _, _ = trained
    noise = gpu_check.random_qwen3(tmp_path / "other", seed=5, **DIMS)
    shallow = gpu_check.random_qwen3(tmp_path / "shallow", **DIMS | dict(num_hidden_layers=1))
    narrow = gpu_check.random_qwen3(tmp_path / "narrow", **DIMS | dict(intermediate_size=64))
    apart = gpu_check.random_qwen3(tmp_path / "apart", **DIMS | dict(tie_word_embeddings=False))
    unsigned = changed(place, tmp_path / "unsigned")
    (unsigned / "seed_mini.json").unlink()
    regex = changed(unsigned, tmp_path / "regex", target_modules=r".*(q_proj|lm_head)")
    for base, adapter, word in [
            (noise, place, "was made for"), (shallow, unsigned, "does not fit"), (narrow, unsigned, "does not fit"),
            (folder, changed(unsigned, tmp_path / "0", trainable_token_indices=[5]), "one tied matrix"), (folder, tmp_path, "not a LoRA adapter folder"),
            (folder, changed(unsigned, tmp_path / "1", target_modules=["q_proj", "lm_head"]), "lm_head: head and embedding are one"),
            (folder, changed(unsigned, tmp_path / "2", target_modules=["embed_tokens"]), "embed_tokens: head and embedding are one"),
            (folder, changed(unsigned, tmp_path / "3", modules_to_save=["lm_head"]), "one tied matrix"),
            (folder, regex, "one tied matrix"), (apart, regex, "no effect"),
            (folder, changed(unsigned, tmp_path / "4", peft_type="IA3"), "LoRA only")]:
        with pytest.raises(ValueError, match=word) as error:
            sm.load_policy(dataclasses.replace(cfg, adapter=str(adapter)), str(base))
        assert "\n" not in str(error.value)
    sm.load_policy(dataclasses.replace(cfg, adapter=str(unsigned)), str(folder))  # made elsewhere, but it fits


# ------------------------------------------------------------------------------------------------------------------
# 4. The loss scale of fp16
# ------------------------------------------------------------------------------------------------------------------
def test_the_loss_scale_backs_off_grows_and_changes_no_step(folder):
    cfg, policy = loaded(folder)
    _, plain = loaded(folder)
    for p, scale in ((policy, 2.0 ** 10), (plain, 1.0)):
        stir(p)
        p.loss_scale = scale
        optimizer = sm.make_optimizer(p, cfg.lr, 0.0)
        rolls, _ = play(p, cfg)
        sm.freeze_reference(p)
        scores = sm.score_all(p, cfg, rolls, [skills.Reply(SKILL, "", "ok", False)] * 4)
        stats = sm.update_policy(p, cfg, optimizer, rolls, scores, torch.tensor([1.0, -1.0, 1.0, -1.0]), [True] * 4, 1)
        p.stats = stats
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(parts(policy, ".lora_B.default").values(), parts(plain, ".lora_B.default").values()))
    for name in ("grad_norm", "grad_norm_rl", "grad_norm_opd"):
        assert policy.stats[name] == pytest.approx(plain.stats[name], rel=1e-3)
    weights, params = frozen_copy(policy), optimizer.param_groups[0]["params"]
    assert len(params) == 28

    def step(value):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, value)
        return sm.optimizer_step(target, cfg, optimizer)

    optimizer, target = sm.make_optimizer(policy, cfg.lr, 0.0), policy
    policy.loss_scale = 8.0
    assert [step(float("inf"))[1] for _ in range(3)] == [sm.SCALED, sm.SCALED, sm.SKIPPED] and policy.loss_scale == 2  # never below 2
    assert same(frozen_copy(policy), weights) and policy.clean_steps == 0
    assert [step(1e-3)[1] for _ in range(200)] == [""] * 200 and policy.loss_scale == 4
    optimizer, target = sm.make_optimizer(plain, cfg.lr, 0.0), plain
    assert step(float("nan"))[1] == sm.SKIPPED and plain.loss_scale == 1  # bf16 and fp32 never scale


def test_the_loss_scale_is_saved_with_the_adapter(trained, tmp_path, monkeypatch):
    cfg, policy, _, _, _ = trained
    sm.save_policy(dataclasses.replace(policy, loss_scale=32.0, clean_steps=150), tmp_path / "policy")
    assert sm.load_policy(cfg, str(tmp_path / "policy")).loss_scale == 1  # fp32: off
    monkeypatch.setattr(sm, "compute_dtype", lambda device, lora: torch.float16)
    again = sm.load_policy(cfg, str(tmp_path / "policy"))
    assert again.loss_scale == 32 and again.clean_steps == 150  # a resumed run doubles it at the same step


def test_an_adapter_is_not_fully_fine_tuned_in_secret(trained, tmp_path):
    cfg, policy, _, _, _ = trained
    sm.save_policy(policy, tmp_path / "policy")
    with pytest.raises(ValueError, match="LoRA adapter.*--tune full"):
        sm.load_policy(dataclasses.replace(cfg, tune="full"), str(tmp_path / "policy"))


# ------------------------------------------------------------------------------------------------------------------
# 5. Which model, and how much memory
# ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("card, device, model, word", [
    (16.0, "auto", sm.QWEN, "16 GB"), (10.0, "auto", sm.QWEN, "--model tiny"), (8.0, "auto", "tiny", "only 8 of 10"),
    (0.0, "auto", "tiny", "no CUDA card"), (24.0, "cpu", "tiny", "no CUDA card")])
def test_auto_says_what_it_takes_and_why(monkeypatch, card, device, model, word):
    monkeypatch.setattr(sm, "card_memory", lambda cfg: card if cfg.device != "cpu" else 0.0)
    name, line = sm.choose_model(sm.Config(device=device))
    assert name == model and word in line and "\n" not in line
    cfg = sm.resolve(sm.Config(device=device, model=name))
    assert sm.resolve(sm.Config(device=device)).model == "tiny"  # a notebook's default, on any machine
    assert (cfg.model, cfg.tune, cfg.profile) == ((sm.QWEN, "lora", "paper") if model == sm.QWEN else ("tiny", "full", "tiny"))
    assert sm.choose_model(sm.Config(model="tiny")) == ("tiny", "")


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch, capsys):
    def no_network(path, **_):
        raise OSError(f"We couldn't connect to 'https://huggingface.co' to load {path}.\nCheck your connection.")

    monkeypatch.setattr(sm.AutoConfig, "from_pretrained", no_network)
    assert sm.main(["--model", sm.QWEN]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "cannot be reached" in err and "--model tiny" in err


PAPER = dict(profile="paper", model=sm.QWEN)


def test_the_plan_of_qwen3_by_hand():
    cfg = sm.resolve(sm.Config(**PAPER, rollout_batch=8, max_context=4096, max_analysis=512))
    plan = sm.memory_plan(sm.argparse.Namespace(**sm.QWEN_CONFIG), cfg)
    linear = 28 * (2048 * 2048 * 2 + 2048 * 1024 * 2 + 3 * 2048 * 6144)  # 1.409e9
    assert plan["weights"] == pytest.approx(151936 * 2048 * 2 + linear * 0.516, rel=1e-3)
    lora = 28 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))  # 17.4M
    assert plan["adapter"] == 2 * 4 * lora and plan["optimizer"] == 8 * lora
    assert plan["kv_cache"] == 8 * (4096 + 512) * 28 * 2 * 8 * 128 * 2  # 114,688 bytes a token
    full = sm.memory_plan(sm.argparse.Namespace(**sm.QWEN_CONFIG), sm.resolve(sm.Config(**PAPER, tune="full")))
    assert full["weights"] == pytest.approx(4 * (linear + 151936 * 2048)) and full["reference"] == full["weights"] and full["adapter"] == 0


QWEN_LIKE = dict(hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=16, intermediate_size=384, vocab_size=600)  # its proportions


@pytest.mark.parametrize("tune, checkpointing", [("lora", True), ("lora", False), ("full", False)])
def test_predicted_activations_are_what_autograd_keeps(tmp_path, tune, checkpointing, monkeypatch):
    """Adapters in bf16 as on a card, full in fp32. Counted: the bytes of every different tensor that waits for backward, per further layer."""
    monkeypatch.setattr(sm, "compute_dtype", lambda device, lora: torch.bfloat16 if lora else torch.float32)
    T, measured, predicted = 256, [], []
    for layers in (1, 3):
        folder = gpu_check.random_qwen3(tmp_path / str(layers), **QWEN_LIKE, num_hidden_layers=layers)
        cfg, policy = loaded(folder, tune=tune, checkpointing=checkpointing, max_context=T - 1, max_analysis=1, micro_tokens=T)
        own, kept = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}, {}

        def pack(x):
            if x.untyped_storage().data_ptr() not in own:
                kept[x.untyped_storage().data_ptr()] = x  # held, so that no address is used twice
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), sm.recomputing(policy):
            policy.backbone(input_ids=torch.arange(T)[None], use_cache=False)
        measured.append(sum(x.untyped_storage().nbytes() for x in kept.values()))
        predicted.append(sm.memory_plan(policy.model.config, cfg)["activations"])
    assert predicted[1] - predicted[0] == pytest.approx(measured[1] - measured[0], rel=0.1)


def test_settings_grow_with_the_card_and_fit_it(monkeypatch):
    cfg, model = sm.resolve(sm.Config(**PAPER)), sm.argparse.Namespace(**sm.QWEN_CONFIG)
    best = [sm.fit(model, cfg, gb) for gb in (12, 16, 24, 80)]
    assert [b["rollout_batch"] for b in best] == sorted(b["rollout_batch"] for b in best) and best[0] != best[3]
    for gb, b in zip((12, 16, 24, 80), best):
        plan = sm.memory_plan(model, dataclasses.replace(cfg, **b))
        assert max(plan["peak_rollout"], plan["peak_training"]) < 0.9e9 * gb
    assert sm.fit(model, cfg, 1.0) == dict(rollout_batch=1, micro_tokens=2048)
    monkeypatch.setattr(sm, "card_memory", lambda cfg: 16.0)
    chosen = sm.resolve(sm.Config(model=sm.QWEN))
    assert dict(rollout_batch=chosen.rollout_batch, micro_tokens=chosen.micro_tokens) == best[1]
    assert sm.resolve(sm.Config(model=sm.QWEN, rollout_batch=3)).rollout_batch == 3  # the user's word counts


def test_a_dry_run_loads_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sm, "load_policy", None)
    monkeypatch.setattr(sm.AutoConfig, "from_pretrained", None)
    assert sm.main(["--dry_run", "--model", sm.QWEN, "--out", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    for word in ("weights", "kv cache", "activations", "logits chunk", "optimizer", "12 GB card", "24 GB card", "none found", "not yet measured"):
        assert word in out
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------------------------------
# 6. Out of memory
# ------------------------------------------------------------------------------------------------------------------
def limited(monkeypatch, most):
    """A card that holds `most` rows."""
    real = sm.KVBatch.__init__

    def init(self, policy, rows):
        if rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        real(self, policy, rows)

    monkeypatch.setattr(sm.KVBatch, "__init__", init)


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


def test_the_analysis_halves_its_batch_too(folder, monkeypatch):
    cfg, policy = loaded(folder)
    rolls, _ = play(policy, cfg)
    expected, _ = sm.analyze_own(policy, cfg, rolls, 1, {})
    limited(monkeypatch, 2)
    replies, counters = sm.analyze_own(policy, cfg, rolls, 1, {})
    assert counters["out of memory: rollout_batch halved"] == 1 and replies == expected


def test_training_and_scoring_halve_their_micro_batches_and_lose_nothing(folder, monkeypatch):
    adapters, counters = [], []
    for most in (None, (2100, 900)):  # padded tokens that the card holds, without and with gradient
        cfg, policy = loaded(folder)
        stir(policy)
        real, run, optimizer = sm.response_hidden, sm.Run(cfg), sm.make_optimizer(policy, 1e-3, 0.0)

        def limited_hidden(policy, sequences, most=most, real=real):
            out = real(policy, sequences)  # first, as on a card: memory runs out in the middle
            if most and len(sequences) * max(len(ids) for ids, _ in sequences) > most[torch.is_grad_enabled()]:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return out

        with monkeypatch.context() as patch:
            patch.setattr(sm, "response_hidden", limited_hidden)
            patch.setattr(sm, "complete", lambda policy, prompts, max_new, batch: ([skills.canonical_reply("s", SKILL)] * len(prompts), 0))
            patch.setattr(run, "write_rollouts", lambda *a, **k: None)
            sm.freeze_reference(policy)
            line = sm.one_update(policy, ScriptedGames(cfg.max_steps), fake_games(2), cfg, optimizer, 1, run, {})
        adapters.append(frozen_copy(policy))
        counters.append(line["counters"].get(sm.HALVED.format("micro_tokens"), 0))
    assert counters == [0, 2] and cfg.micro_tokens == 1024  # once in scoring, once in training; 4096 tokens: all at once; 1024: one by one
    assert all((adapters[0][name] - adapters[1][name]).abs().max() < 1e-4 for name in adapters[0])


def test_stage_1_halves_its_micro_batches_too(folder, monkeypatch):
    losses_ = []
    for most in (10_000, 400):
        cfg, policy = loaded(folder, sft_batch=4)
        real = sm.token_logp

        def limited_logp(policy, sequences, temperature, most=most, real=real):
            if sum(len(ids) for ids, _ in sequences) > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(policy, sequences, temperature)

        rows, lines = [([5 + n] * 100 + [7] * 50, [False] * 100 + [True] * 50) for n in range(4)], []
        with monkeypatch.context() as patch:
            patch.setattr(sm, "token_logp", limited_logp)
            sm.sft(policy, cfg, rows, [], lines.append)
        losses_.append(lines[0]["loss"])
        assert lines[0].get("counters", {}) == ({} if most > 1000 else {sm.HALVED.format("micro_tokens"): 4})
    assert losses_[0] == pytest.approx(losses_[1], rel=1e-5)


# ------------------------------------------------------------------------------------------------------------------
# 7. What real models write, and what it costs
# ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, action", [
    ("<think>\nThe mug may be there.\n</think>\n\n<action>go to shelf 1</action>", "go to shelf 1"),
    ("<think>I could <action>look</action> first.</think><action>go to shelf 1</action><|im_end|>", "go to shelf 1"),
    ("<action>\ngo to shelf 1\n</action>", "go to shelf 1"), ("<Action> Go to Shelf 1. </Action>", "go to shelf 1"),
    ("<action>go to shelf 1", "go to shelf 1"), ("Action: go to shelf 1", "go to shelf 1"), ("**go to shelf 1**", "go to shelf 1"),
    ("> go to shelf 1", "go to shelf 1"), ("`go to shelf 1`", "go to shelf 1"), ("```\ngo to shelf 1\n```", "go to shelf 1"),
    ("I will look for it.\n\nNext action: \"go to shelf 1\"", "go to shelf 1"), ("<think>\n\n</think>\n\ngo to shelf 1", "go to shelf 1"),
    ("<action>[go to shelf 1]</action>", "go to shelf 1"), ("- go to shelf 1", "go to shelf 1"), ("<think>still thinking", ""), ("", "")])
def test_the_parser_takes_what_real_models_write(text, action):
    assert envs.parse_action(text) == action


QWEN25 = ("{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}{% for m in messages %}"
          "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TALK = ("You see a shelf 1.", "<think>\nThe mug.\n</think>\n\n<action>go to shelf 1</action>", "You arrive at shelf 1.",
        "<action>take mug 1</action>", "Nothing happens.")


@pytest.mark.parametrize("template, append_only", [(QWEN25, True), (gpu_check.QWEN3, False)])
def test_an_episodes_ids_and_the_templates(template, append_only):
    """Qwen2.5: the same ids at every turn. Qwen3 is not append-only: rendered anew, it takes the thinking (also the empty block that switches it
    off) out of earlier turns. We never render again, so that the policy is trained on what it saw and sampled; that is the whole difference."""
    tokenizer = gpu_check.make_tokenizer(template)
    end_id, first, later = sm.chat_pieces(tokenizer)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    no_thinking = encode("<think>\n\n</think>\n\n")
    ours, theirs_now = first[0] + encode(TALK[0]) + first[1], None
    assert append_only or ours[-len(no_thinking):] == no_thinking
    for turn in (1, 3, 5):
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(TALK[:turn])]
        theirs = encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False))
        spelled = tokenizer.decode(ours)
        if not append_only:  # what the template would drop: each earlier turn's thinking
            spelled = spelled.replace("<think>\n\n</think>\n\n", "", (turn - 1) // 2).replace("<think>\nThe mug.\n</think>\n\n", "")
        assert spelled == tokenizer.decode(theirs) and (ours == theirs) == (append_only or turn == 1)
        if turn < 5:
            ours += encode(TALK[turn]) + [end_id] + later[0] + encode(TALK[turn + 1]) + later[1]


def test_token_costs_by_hand():
    """Words are tokens, a turn's glue is one token on either side."""
    words = lambda text: list(range(len(text.split())))
    policy = sm.Policy(None, None, None, 9, ([9], [9]), ([9], [9]))
    policy.encode = words
    cfg = sm.Config(think=True, show_admissible=True)
    fixed = 2 + len(" ".join(envs.prompt_parts("x y", "", think=True)).split())
    steps = [envs.Step("a b c", "r", "go one", True), envs.Step("d e", "r", "go", True), envs.Step("f", "r", "go far away", True)]
    episode = envs.Episode("g", "train", "x y", envs.TASK_TYPES[0], steps=steps)
    spans = [(fixed + 3 + 4, False), (5, True), (2 + 2 + 4, False), (6, True), (2 + 1 + 4, False), (7, True)]  # each turn lists 4 words of commands
    sampled = [on for n, on in spans for _ in range(n)]
    roll = sm.Rollout(episode, [0] * len(sampled), sampled, [], 0)
    first, second, third = fixed + 7 + 5, fixed + (3 + 2) + 6 + 6, fixed + (3 + 2) + (2 + 1) + 5 + 7
    assert sm.token_costs(policy, cfg, roll) == (first + second + third, 12)
    assert sm.token_costs(policy, cfg, roll, window=1) == (first + second + third - 5, 12)
    assert sm.token_costs(policy, cfg, dataclasses.replace(roll, episode=dataclasses.replace(episode, steps=[]))) == (0, 0)


def test_the_gpu_check_runs_small(tmp_path):
    settings = {k: v for k, v in SMALL.items() if k not in ("profile", "tune")}
    seed, grpo = gpu_check.check(tmp_path, DIMS, **settings)
    assert seed["parse_rate"] == 1 and "parse_rate" not in grpo
    for line in (seed, grpo):
        assert line["episode_steps"] == 3 and line["grad_norm"] > 0 and line["sampler_gap"] < 1e-3
        assert line["one_prompt_per_step_tokens"] > line["episode_tokens"] > line["admissible_tokens"] > 0


def test_a_halved_batch_is_not_reported_as_a_skipped_step():
    line = dict(stage="sft", step=1, steps=3, loss=1.0, anchor_kl=0.0, counters={sm.HALVED.format("micro_tokens"): 1})
    assert "skipped" not in sm.progress_line(line) and "skipped" in sm.progress_line(line | dict(counters={sm.SKIPPED: 1}))
