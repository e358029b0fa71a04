"""training.py: exercise 6. Puts a student's functions where seed_mini looks for its own, and trains
the tiny base with them.

Everything else is the project: games, rollouts, scoring, the update loop. One thing is simpler than
in SEED: the skills come from the world's rules (Env.hindsight) and not from the policy itself,
because teaching the policy to write them (Stage 1) takes minutes.
"""
from collections import Counter, defaultdict

import torch
import transformers

import envs
import losses
import runs
import seed_mini
import skills
from environments import alfworld_games

# Small enough for a minute on one core; strong enough (learning rate, lambda) that ten updates
# show. As in the paper an invalid action costs 0.1.
SETTINGS = dict(env="alfworld", updates=10, tasks_per_update=4, group_size=8, minibatches=1,
                lr=1e-3, lambda_opd=1.0, invalid_penalty=0.1, micro_tokens=10**6, threads=1)


def inject(mine) -> None:
    """Let losses and seed_mini use the functions of the solution `mine` (a module)."""
    def chunked_logprob(hidden, weight, labels, *, temperature=1.0, rows_per_chunk=None,
                        return_entropy=False):
        logp = mine.chunked_logprob(hidden, weight, labels, temperature=temperature,
                                    rows_per_chunk=rows_per_chunk or 256)
        # The entropy is a metric only, and no exercise.
        return (logp, torch.zeros_like(logp)) if return_entropy else logp

    def seed_loss(logp, old, ref, teacher, advantages, mask, skill_mask, *, clip_range, kl_coef,
                  lambda_opd, beta_opd, **_):
        has_skill = skill_mask.bool().reshape(len(mask), -1).any(1)  # [B]
        loss = mine.seed_loss(logp, old, ref, teacher, advantages, mask, has_skill,
                              clip_range=clip_range, kl_coef=kl_coef, lambda_opd=lambda_opd,
                              beta_opd=beta_opd)
        # The project keeps the two parts apart; here all of it is in the first.
        return loss, 0 * loss, defaultdict(float, loss=loss.item())

    def with_skill(policy, roll, skill):
        block = policy.encode(skills.skill_block(skill))
        return mine.teacher_view(roll.ids, roll.sampled, roll.cut, block)

    losses.chunked_logprob, losses.seed_loss = chunked_logprob, seed_loss
    seed_mini.with_skill = with_skill


def train(mine, model: str = "", say=None, **changes) -> list[dict]:
    """Some updates of SEED, always on the same four games, with the functions of `mine`: one dict
    of numbers per update.

    model: folder of the base (default: the shipped one). say: called with one line per update.
    changes: other values for Config's options than SETTINGS.
    """
    inject(mine)
    transformers.utils.logging.disable_progress_bar()
    cfg = seed_mini.resolve(seed_mini.Config(**SETTINGS | changes))
    torch.set_num_threads(cfg.threads)
    found = alfworld_games.find_games("generated", seed=7, counts={"train": 24})[0]["train"]
    games = [game for game in found if game.kind == "pick_and_place_simple"][:cfg.tasks_per_update]
    batch = [game for game in games for _ in range(cfg.group_size)]
    env = envs.make(envs.find(cfg.env), cfg.env_args)
    policy = seed_mini.load_policy(cfg, model or seed_mini.weights_of(cfg))
    seed_mini.freeze_reference(policy)
    optimizer = seed_mini.make_optimizer(policy, cfg.lr)
    curve, counters = [], Counter()
    with runs.Pool(env, cfg.workers) as pool:
        for update in range(1, cfg.updates + 1):
            # act
            keys = [("rollout", update, i) for i in range(len(batch))]
            rolls, _ = seed_mini.rollout(policy, pool, batch, cfg, keys, cfg.temperature)
            # analyze: a reply in JSON, as the policy would give it, which is then read
            written = [skills.canonical_reply(*env.hindsight(roll.episode)) for roll in rolls]
            replies = [skills.Reply(mine.parse_skill(text), "", "") for text in written]
            has_skill = [bool(reply.skill) for reply in replies]
            # teach
            scores = seed_mini.score_all(policy, cfg, counters, rolls, replies)
            # train
            rewards = torch.tensor([roll.episode.reward for roll in rolls])
            rewards = rewards.view(len(games), cfg.group_size)                 # [P, G]
            advantages = mine.group_advantages(rewards).flatten()              # [P G]
            for part in seed_mini.minibatches_of(cfg, rolls, update):
                seed_mini.gradients(policy, cfg, counters, optimizer, rolls, scores, advantages,
                                    has_skill, part)
                runs.optimizer_step(policy, optimizer, seed_mini.MAX_GRAD_NORM, counters)
            delta = torch.cat(scores.teacher) - torch.cat(scores.old)
            curve.append(dict(update=update, reward=rewards.mean().item(),
                              success=sum(r.episode.won for r in rolls) / len(rolls),
                              delta=delta.mean().item(), with_skill=sum(has_skill) / len(rolls)))
            if say:
                say("update {update:2d}   reward {reward:5.2f}   success {success:4.0%}   "
                    "mean Delta {delta:+.3f}".format(**curve[-1]))
    return curve
