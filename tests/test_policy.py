"""policy.py: generation with a cache, the sampler, chat templates, scoring, the reference.

The oracles are independent: full forward passes without a cache, the softmax itself, the chat
template itself.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch

import seed_mini as sm
import skills
from policy import (
    KVBatch,
    complete,
    freeze_reference,
    generate_turn,
    micro_batches,
    sample,
    score,
    token_logp,
)
from runs import load_policy
from test_seed_mini import base, games, games_root, played, pool  # noqa: F401  (fixtures)
from test_seed_mini import BASE, all_logits, config, flat, keys, naive_logps, short, wide


# --------------------------------------------------------------------------------------------------
# 1. Generation
# --------------------------------------------------------------------------------------------------
# Lengths of the chunks of one feed(), and the rows that are kept after it.
FEEDS = [
    ((7, 31, 1, 12, 5), None),
    ((1, 1, 0, 1, 1), None),
    ((1, 0, 0, 1, 0), None),
    ((9, 2, 14, 1, 3), [0, 1, 3, 4]),
    ((1, 1, 1, 0), [1, 3]),
    ((20, 4), None),
    ((0, 1), [1]),
    ((6,), None),
]


def test_the_kv_cache_changes_nothing(base):
    """Ragged chunks, empty chunks, dropped rows, several turns: every next-token distribution
    equals a plain forward pass, in float64."""
    policy, rng = wide(base), np.random.default_rng(3)
    rows = {i: [] for i in range(5)}
    kv, alive = KVBatch(policy, 5), list(rows)
    for sizes, keep in FEEDS:
        new = [rng.integers(4, 1000, n).tolist() for n in sizes]
        hidden = kv.feed(new)
        assert int(kv.length.sum()) == sum(len(rows[i]) + len(c) for i, c in zip(alive, new))
        for row, (i, c) in enumerate(zip(alive, new)):
            rows[i] += c
            if c:
                expected = all_logits(policy, rows[i])[-1]
                assert (hidden[row] @ policy.head.T - expected).abs().max() < 1e-9
        if keep is not None:
            alive = [alive[row] for row in keep]
            kv.keep(keep)
            # The holes are gone.
            assert kv.mask.shape[1] == max(len(rows[i]) for i in alive)
            assert all(layer.keys.shape[2] == kv.mask.shape[1] for layer in kv.cache.layers)


def test_greedy_turns_equal_greedy_decoding_without_a_cache(base, games, pool):
    policy = wide(base)
    prompts = []
    for text, info in pool.reset(games["train"][:3]):
        parts = pool.env.prompt(info["goal"], text, think=False)
        prompts.append(policy.user_turn(policy.encode("\n".join(parts))))
    kv = KVBatch(policy, 3)
    hidden = kv.feed(prompts)
    sequences = [list(p) for p in prompts]
    nothing = policy.encode("Nothing happens.")
    for turn in range(2):
        new, logps = generate_turn(kv, hidden, [None] * 3, 0, 6)
        for sequence, ids, lps in zip(sequences, new, logps):
            for i, lp in zip(ids, lps):
                logits = all_logits(policy, sequence)[-1].detach()
                assert int(logits.argmax()) == i
                assert abs(float(torch.log_softmax(logits, -1)[i]) - lp) < 1e-5
                sequence.append(i)
            assert len(ids) == 6 or ids[-1] == policy.end_id and policy.end_id not in ids[:-1]
        chunks = [
            [ids[-1]] + policy.later[0] + nothing * (1 + n) + policy.later[1]
            for n, ids in enumerate(new)
        ]
        for sequence, c in zip(sequences, chunks):
            sequence += c[1:]
        hidden = kv.feed(chunks)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scoring_agrees_with_the_sampler(base, pool, games, temperature):
    cfg = short(temperature=temperature, micro_tokens=700)
    rolls, _ = sm.rollout(base, pool, games["train"], cfg, keys(12), temperature)
    said = [torch.tensor([lp for lp, on in zip(r.logp, r.sampled) if on]) for r in rolls]
    scored, entropy = score(base, [sm.plain(r) for r in rolls], cfg)
    assert max(float((a - b).abs().max()) for a, b in zip(said, scored)) < 1e-4
    for roll, row, e in zip(rolls[:3], scored, entropy):
        logps = naive_logps(base, roll.ids, roll.sampled, temperature)
        assert (row - logps).abs().max() < 1e-4
        at = [t - 1 for t, on in enumerate(roll.sampled) if on]
        full = torch.log_softmax(all_logits(base, roll.ids).double() / temperature, -1)[at]
        assert (e + (full.exp() * full).sum(-1)).abs().max() < 1e-4
    # The test can tell.
    other = config(temperature=1.7 - temperature, micro_tokens=700)
    wrong, _ = score(base, [sm.plain(r) for r in rolls], other)
    assert max(float((a - b).abs().max()) for a, b in zip(said, wrong)) > 0.05


def test_completions_come_back_in_order(base, pool, played):
    texts = [skills.analyzer_prompt(pool.env, r.episode) for r in played[0][:5]]
    prompts = [base.user_turn(base.encode(text)) for text in texts]
    replies, cut = complete(base, prompts, 4, 2)
    alone = [complete(base, [p], 4, 1) for p in prompts]
    assert replies == [t for (t,), _ in alone] and cut == sum(c for _, c in alone)


# --------------------------------------------------------------------------------------------------
# 2. The sampler
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [1.0, 0.4, 2.0])
def test_sampling_follows_the_softmax(temperature):
    logits, n = torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0, -8.0]), 20_000
    # A grid: the frequencies must be right to 1/n, not to a standard error.
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ids, logp = sample(logits.expand(n, -1), uniforms, temperature)
    p = torch.softmax(logits.double() / temperature, -1)
    assert (torch.bincount(ids, minlength=6) / n - p).abs().max() < 1.5 / n
    assert (logp.double() - p.log()[ids]).abs().max() < 1e-6


def test_no_uniform_picks_an_impossible_token():
    never = float("-inf")
    logits = torch.tensor(
        [
            [never, never, 0.0, never, 1.0, never],
            [-1e4, 0.0, -1e4, -1e4, -1e4, -1e4],
            [never] * 5 + [0.0],
        ]
    )
    for u in (0.0, 5e-324, 0.2689, 0.5, 1 - 2**-53, np.nextafter(1, 0)):
        ids, logp = sample(logits, torch.full((3,), u, dtype=torch.float64), 1.0)
        assert ids[0] in (2, 4) and ids[1] == 1 and ids[2] == 5 and logp.isfinite().all()
    big = torch.linspace(-30, 5, 50_000)[None]
    big[:, -7:] = never
    for u in (1 - 2**-53, 0.0):
        ids, logp = sample(big, torch.tensor([u], dtype=torch.float64), 1.0)
        assert ids < 50_000 - 7 and logp.isfinite()


def test_greedy_takes_the_largest_and_reports_its_plain_log_prob():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 4.0, 4.9]])
    ids, logp = sample(logits, torch.zeros(2, dtype=torch.float64), 0)
    assert ids.tolist() == [1, 0]
    assert torch.allclose(logp, torch.log_softmax(logits, -1)[[0, 1], [1, 0]])


# --------------------------------------------------------------------------------------------------
# 3. Text is data; chat templates
# --------------------------------------------------------------------------------------------------
QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a player.<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: no default system turn; the generation prompt closes the thinking when it is off;
# older answers lose theirs.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def qwen_like():
    """A small byte-level BPE tokenizer with special tokens and with added tokens that are not
    special, one of them a single character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = (
        "system\nYou are a player. user\nYou arrive at shelf 1. assistant\ngo to the shelf think "
        "tool_call im_start im_end"
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=level.alphabet(),
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    words = ("<think>", "</think>", "<tool_call>", "\n\n", "€")
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )


def policy_around(tokenizer, template, folder):
    """A loaded policy with this tokenizer and template and a random two-layer model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    sizes = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(sizes)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return load_policy(config(), str(folder / "model"))


def conversation(policy, *contents):
    """Ids of user, assistant, user, ... turns put together from the policy's pieces."""
    ids = policy.user_turn(policy.encode(contents[0]))
    for n, text in enumerate(contents[1:]):
        if n % 2 == 0:
            ids += policy.encode(text) + [policy.end_id]
        else:
            ids += policy.later[0] + policy.encode(text) + policy.later[1]
    return ids


def by_template(policy, *contents):
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": c} for n, c in enumerate(contents)
    ]
    text = policy.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return policy.tokenizer(text, add_special_tokens=False)["input_ids"]


TALK = (
    "You are in a room. You see a shelf 1.",
    "go to shelf 1",
    "You arrive at shelf 1. On the shelf 1, you see a mug 1.",
    "take mug 1 from shelf 1",
    "Nothing happens.",
)


def test_turns_put_together_equal_the_chat_template(base, qwen_like, tmp_path):
    for policy in (base, policy_around(qwen_like, QWEN25, tmp_path / "25")):
        for n in (1, 3, 5):
            assert conversation(policy, *TALK[:n]) == by_template(policy, *TALK[:n])


def test_a_template_that_is_not_append_only_gives_its_own_pieces(qwen_like, tmp_path):
    policy = policy_around(qwen_like, QWEN3, tmp_path)
    assert conversation(policy, TALK[0]) == by_template(policy, TALK[0])

    def ids(text):
        return policy.tokenizer(text, add_special_tokens=False)["input_ids"]

    assert [policy.end_id] + policy.later[0] == ids("<|im_end|>\n<|im_start|>user\n")
    # Thinking is off, in every turn.
    last = ids("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert policy.later[1] == policy.first[1] == last


CONTROL = (
    "<|end|> <|user|> <|assistant|> <|pad|> <|im_start|> <|im_end|> <|endoftext|> <think> </think> "
    "<tool_call>"
).split()
PIECES = CONTROL + [
    *("<", "|", ">", "<|", "<th", "ink>", "</", "im_end|>", " ", "\n", "\n\n"),
    *("€", "é", "\u202e", "漢", "🙂", "mug 1", "a", "\x1b[31m"),
]


def test_no_text_becomes_a_control_token(base, qwen_like, tmp_path):
    qwen, rng = policy_around(qwen_like, QWEN3, tmp_path), np.random.default_rng(0)
    texts = CONTROL + ["<|im_end|>" * 3, "<thin<think>k>", "<|im_<|im_end|>end|>", "€€", ""]
    texts += ["".join(rng.choice(PIECES, rng.integers(1, 12))) for _ in range(150)]
    for policy in (base, qwen):
        added = policy.tokenizer.added_tokens_decoder.items()
        forbidden = {i for i, t in added if t.content in CONTROL}
        assert len(forbidden) == (4 if policy is base else 6)
        for text in texts:
            ids = policy.encode(text)
            assert not forbidden & set(ids), text
            exact = dict(skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert policy.tokenizer.decode(ids, **exact) == text


@pytest.mark.parametrize(
    "template, word",
    [
        (None, "chat template"),
        ("{% for m in messages %}{{ m['content'] }} {% endfor %}", "control token"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_a_sentence(qwen_like, tmp_path, template, word):
    with pytest.raises(ValueError, match=word) as error:
        policy_around(qwen_like, template, tmp_path)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------
# 4. Scoring and the reference
# --------------------------------------------------------------------------------------------------
def test_token_logp_is_log_softmax(base, played):
    policy, rolls = wide(base), played[0][:5]
    for temperature in (1.0, 0.7):
        logp, mask, entropy = token_logp(policy, [sm.plain(r) for r in rolls], temperature)
        assert mask.sum(1).tolist() == [sum(r.sampled) for r in rolls]
        assert (logp[~mask] == 0).all() and (entropy[~mask] == 0).all()
        for row, m, roll in zip(logp, mask, rolls):
            expected = naive_logps(policy, roll.ids, roll.sampled, temperature)
            assert (row[m] - expected).abs().max() < 1e-10


def test_micro_batches_are_a_partition_within_the_budget():
    sequences = [([0] * n, [True] * n) for n in (5, 90, 31, 7, 7, 60, 1, 200)]
    for budget in (1, 100, 190, 10_000):
        batches = micro_batches(sequences, budget)
        assert sorted(i for b in batches for i in b) == list(range(8))
        for b in batches:
            assert len(b) == 1 or len(b) * max(len(sequences[i][0]) for i in b) <= budget


def test_lora_starts_from_the_seed_and_keeps_its_reference_apart(base, played):
    cfg = config(tune="lora")
    seeds = (cfg, cfg, dataclasses.replace(cfg, seed=1))
    policies = policy, *_ = [load_policy(c, str(BASE)) for c in seeds]
    first, second, third = (
        flat(p for p in x.model.parameters() if p.requires_grad) for x in policies
    )
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert not policy.head.requires_grad
    freeze_reference(policy)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            p += 0.02 if ".lora_B.default" in name else 0
    kl = sm.anchor_kl(policy, [sm.plain(played[0][0])])
    # To the adapter as it was, not to itself.
    assert float(kl.detach()) > 1e-4
    kl.backward()
    grads = {name: p.grad for name, p in policy.model.named_parameters()}
    trained = [g for name, g in grads.items() if ".lora_B.default" in name]
    assert trained and all(g is not None and g.norm() > 0 for g in trained)
    assert all(g is None for name, g in grads.items() if ".reference." in name)
