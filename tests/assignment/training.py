"""training.py: exercise 6. Puts a student's functions where seed_mini looks for its own, and trains the tiny base with them.

Everything else is the project: games, rollouts, scoring, the update loop. One thing is simpler than in SEED: the skills come from the rule
analyzer (skills.rule_analyzer) and not from the policy itself, because teaching the policy to write them (Stage 1) takes minutes.
"""
from collections import defaultdict

import torch
import transformers

import envs
import losses
import seed_mini
import skills

# Small enough for a minute on one core; strong enough (learning rate, lambda) that ten updates show.
SETTINGS = dict(updates=10, tasks_per_update=4, group_size=8, minibatches=1, lr=1e-3, lambda_opd=1.0, micro_tokens=10 ** 6, threads=1)


def inject(mine) -> None:
    """Let losses and seed_mini use the functions of the solution `mine` (a module)."""
    def chunked_logprob(hidden, weight, labels, *, temperature=1.0, rows_per_chunk=None, return_entropy=False):
        logp = mine.chunked_logprob(hidden, weight, labels, temperature=temperature, rows_per_chunk=rows_per_chunk or 256)
        return (logp, torch.zeros_like(logp)) if return_entropy else logp  # the entropy is a metric only, and no exercise

    def seed_loss(logp, old, ref, teacher, advantages, mask, skill_mask, *, clip_range, kl_coef, lambda_opd, beta_opd, **_):
        has_skill = skill_mask.bool().reshape(len(mask), -1).any(1)  # [B]
        loss = mine.seed_loss(logp, old, ref, teacher, advantages, mask, has_skill, clip_range=clip_range, kl_coef=kl_coef,
                              lambda_opd=lambda_opd, beta_opd=beta_opd)
        return loss, 0 * loss, defaultdict(float, loss=loss.item())  # the project keeps the two parts apart, to log their gradients

    losses.chunked_logprob, losses.seed_loss = chunked_logprob, seed_loss
    seed_mini.with_skill = lambda policy, roll, skill: mine.teacher_view(roll.ids, roll.sampled, roll.cut,
                                                                         policy.encode(skills.skill_block(skill)))


def train(mine, model: str = "tiny", say=None, **changes) -> list[dict]:
    """Some updates of SEED, always on the same four games, with the functions of `mine`: one dict of numbers per update.

    model: folder of the base. say: called with one line per update. changes: other values for Config's options than SETTINGS.
    """
    inject(mine)
    transformers.utils.logging.disable_progress_bar()
    cfg = seed_mini.resolve(seed_mini.Config(**SETTINGS | changes))
    torch.set_num_threads(cfg.threads)
    found = envs.find_games("generated", seed=7, counts={"train": 24})[0]["train"]
    games = [game for game in found if game.task_type == "pick_and_place_simple"][:cfg.tasks_per_update]
    batch = [game for game in games for _ in range(cfg.group_size)]
    policy = seed_mini.load_policy(cfg, model)
    seed_mini.freeze_reference(policy)
    optimizer = seed_mini.make_optimizer(policy, cfg.lr, cfg.weight_decay)
    curve = []
    with envs.EnvPool(workers=cfg.workers, max_steps=cfg.max_steps) as pool:
        for update in range(1, cfg.updates + 1):
            rngs = [seed_mini.counted_rng(cfg.seed, "rollout", update, i) for i in range(len(batch))]
            rolls, _ = seed_mini.rollout(policy, pool, batch, cfg, rngs, cfg.temperature)          # act
            skill = [mine.parse_skill(skills.rule_analyzer(roll.episode)) for roll in rolls]         # analyze
            scores = seed_mini.score_all(policy, cfg, rolls, [skills.Reply(s, "", "") for s in skill])  # teach
            rewards = torch.tensor([roll.episode.reward for roll in rolls]).view(len(games), -1)     # [P, G]
            advantages = mine.group_advantages(rewards).flatten()                                    # [P G]
            seed_mini.update_policy(policy, cfg, optimizer, rolls, scores, advantages, [bool(s) for s in skill], update)
            delta = torch.cat(scores.teacher) - torch.cat(scores.old)
            curve.append(dict(update=update, reward=rewards.mean().item(), success=sum(r.episode.won for r in rolls) / len(rolls),
                              delta=delta.mean().item(), with_skill=sum(map(bool, skill)) / len(rolls)))
            if say:
                say("update {update:2d}   reward {reward:5.2f}   success {success:4.0%}   mean Delta {delta:+.3f}".format(**curve[-1]))
    return curve
