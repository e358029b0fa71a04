"""Properties that must hold for every text and every number, on generated ones (seeded, so a
failure repeats)."""

import math
import random
import time

import numpy as np
import pytest
import torch

import losses
import runs
import seed_mini as sm
import skills
import test_seed_mini as t
from policy import token_logp
from test_seed_mini import base  # noqa: F401  (a fixture)

PIECES = ["<|end|>", "<|user|>", "<|assistant|>", "<|pad|>", "<|im_end|>", "<|", "|>", "<", ">"]
PIECES += ["<think>", "</think>", "<action>", "</action>", "Action:", "`", '"', "\x1b[31m"]
PIECES += ["\x1b]0;title\x07", "\x9b2J", "\x00", "\x07", "\r\n", "\n", "\u2028", "\u202e", "\ud800"]
PIECES += ["＜|end|＞", "<\u200b|end|>", "ｍug", "мug 1", "é", "日本", "👩\u200d🍳", " ", "mug 1"]
PIECES += ["go to", "shelf 1", "Step 2 saw:", "Outcome: success.", "Skill to follow:"]
PIECES += ["Your task is to:", "{", "}", "a" * 300, "9"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On a busy machine two threads wait for each other for minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hostile(rng, most=12):
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(most)))


def test_parse_action_gives_one_short_line_whatever_it_reads():
    rng, parse = random.Random(0), t.world().parse
    for _ in range(3000):
        text = hostile(rng, 20)
        action = parse(text)
        assert isinstance(action, str) and "\n" not in action
        assert action == action.strip() and len(action) <= len(text)
        right = "<action>go to shelf 1</action>"
        assert parse(right) == parse(text + "</think>" + right) == "go to shelf 1"


def scripted_episode(base, cfg, rng):  # noqa: F811
    """One rollout whose task, room and observations are hostile, and the texts it saw."""
    texts = [hostile(rng) for _ in range(6)]

    def script(slot, n):
        return texts[n + 1], float(n == 3), n == 3, False, dict(won=n == 3)

    pool = t.ScriptedPool(script, start=lambda slot: (texts[0], dict(goal=texts[1])))
    (roll,), _ = sm.rollout(base, pool, t.fake_tasks(1), cfg, [(rng.random(),)], 1.0)
    return roll, texts


def test_no_hostile_text_puts_a_control_token_into_a_sequence(base):  # noqa: F811
    """Observations, tasks and skills: the only control ids that were not sampled are the template's
    own, in the template's number."""
    rng, cfg = random.Random(1), t.config(max_response=4)
    added = base.tokenizer.added_tokens_decoder
    control = {i for i, token in added.items() if len(token.content) > 1}
    assert len(control) == 4

    def glue(pieces):
        return [i for piece in pieces for i in piece if i in control]

    for _ in range(60):
        roll, texts = scripted_episode(base, cfg, rng)
        turns = len(roll.episode.steps)
        given = [i for i, on in zip(roll.ids, roll.sampled) if not on and i in control]
        expected = glue(base.first) + glue(base.later) * (turns - 1)
        forced = sum(run[-1] != base.end_id for run in t.turns(roll))
        assert sorted(given) == sorted(expected + [base.end_id] * forced)
        skill = hostile(rng)
        ids, sampled = sm.with_skill(base, roll, skill)
        # the skill adds none
        assert [i for i, on in zip(ids, sampled) if not on and i in control] == given
        block = len(ids) - len(roll.ids)
        end = roll.cut + block
        assert ids[: roll.cut] + ids[end:] == roll.ids and not any(sampled[roll.cut : end])
        kept = [i for i, on in zip(ids, sampled) if on]
        assert kept == [i for i, on in zip(roll.ids, roll.sampled) if on]
        # bounded: at most a token a byte
        assert block <= 4 * skills.MAX_SKILL_CHARS + 20
        prompt = base.encode(skills.analyzer_prompt(t.world(), roll.episode))
        assert not control & set(prompt)
        assert len(roll.ids) == len(roll.sampled) == len(roll.logp) <= cfg.max_context
        assert all((lp == 0.0) or on for lp, on in zip(roll.logp, roll.sampled))


@pytest.mark.slow
def test_an_enormous_line_ends_the_episode_and_is_never_cut(base):  # noqa: F811
    started, huge = time.perf_counter(), "mug 1 " * 200_000
    cfg = t.config()
    pool = t.ScriptedPool(
        lambda slot, n: (huge, 0.0, False, n == 9, {}),
        start=lambda slot: (huge if slot else "Room.", {}),
    )
    rolls, counters = sm.rollout(base, pool, t.fake_tasks(2), cfg, t.keys(2), 1.0)
    assert [r.episode.end for r in rolls] == ["context limit"] * 2
    assert counters["ended: context limit"] == 2
    assert len(rolls[0].ids) <= cfg.max_context and not rolls[1].episode.steps
    assert len(skills.analyzer_prompt(t.world(), rolls[0].episode)) < 10 * skills.MAX_TEXT_CHARS
    assert time.perf_counter() - started < 60


def test_what_is_printed_is_safe(base, tmp_path, capsys):  # noqa: F811
    rng, run = random.Random(2), runs.Run(t.config(out=str(tmp_path), name="r"))
    for _ in range(500):
        run.say(hostile(rng) + "x")
        print(runs.one_sentence(ValueError(hostile(rng))))
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert "\x1b" not in out and "\u202e" not in out
    run.dir.mkdir()
    roll, _ = scripted_episode(base, t.config(), rng)
    reply = skills.canonical_reply(hostile(rng), "a" + hostile(rng))
    run.write_rollouts([roll], [skills.parse_reply(reply)], 1, "rl")
    for name in ("rollouts.jsonl", "skills.jsonl"):
        text = (run.dir / name).read_text()
        # escapes, so `cat` and `less` are safe, too
        assert text.isascii() and text.count("\n") == 1 and text.strip().isprintable()
        assert runs.read_jsonl(run.dir / name)


def test_group_advantages_on_generated_rewards():
    rng = np.random.default_rng(0)
    for _ in range(300):
        P, G = int(rng.integers(1, 6)), int(rng.integers(2, 9))
        rewards = torch.tensor(rng.choice([0.0, 10.0, -0.1, 9.7, rng.normal()], (P, G)))
        A = losses.group_advantages(rewards)
        tied = rewards.amax(1) == rewards.amin(1)
        assert A.isfinite().all() and (A[tied] == 0).all() and A.sum(1).abs().max() < 1e-9
        # the divisor is std + 1e-6
        std = rewards.std(1)
        assert torch.allclose(A.std(1)[~tied], (std / (std + 1e-6))[~tied], atol=1e-9)
        # no episode can be further off than this
        assert (A.abs() <= math.sqrt(G)).all()
        order = torch.tensor(rng.permutation(G))
        assert torch.allclose(losses.group_advantages(rewards[:, order]), A[:, order], atol=1e-9)
        # only differences within the group count
        assert torch.allclose(losses.group_advantages(rewards + 3.0), A, atol=1e-5)
        better = rewards[:, :, None] > rewards[:, None, :]
        assert (A[:, :, None] > A[:, None, :])[better].all()


@pytest.mark.parametrize("seed", range(3))
def test_masks_of_generated_sequences(base, seed):  # noqa: F811
    """token_logp puts the n-th sampled token of each row at column n, and nothing else is
    scored."""
    rng = np.random.default_rng(seed)
    sequences = []
    for n in rng.integers(2, 40, 7):
        mask = rng.random(n) < 0.4
        # nothing predicts the first token
        mask[0] = False
        sequences.append((rng.integers(4, 900, n).tolist(), mask.tolist()))
    logp, mask, _ = token_logp(base, sequences, 1.0)
    assert mask.sum(1).tolist() == [sum(m) for _, m in sequences] and (logp[~mask] == 0).all()
    for row, m, (ids, sampled) in zip(logp, mask, sequences):
        # on the left, padding on the right
        assert m.tolist() == sorted(m.tolist(), reverse=True)
        if any(sampled):
            assert (row[m] - t.naive_logps(base, ids, sampled)).abs().max() < 1e-4
