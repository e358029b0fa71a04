"""faulty_world.py: ALFWorld with bugs to order, for the tests. A world of one's own is a file like
this one.

    python seed_mini.py --env tests/faulty_world.py --env_args fault=die at=2 only=pick_two ...

In-process play (--workers 0) survives "raise", "nan" and "inf" alone: who hangs or dies there takes
the trainer along.
"""
import os
import time

from environments import alfworld

REWARDS = {"nan": float("nan"), "inf": float("inf")}


def misbehave(fault: str) -> None:
    """What bugs in an environment do to the process that plays it."""
    if fault == "hang":
        time.sleep(3600)
    if fault == "die":
        os._exit(1)
    if fault == "raise":
        raise ValueError("raised on request")


class Env(alfworld.Env):
    """ALFWorld in which steps fail.

    fault: hang, die, raise, nan or inf (a reward that is no number). It happens in step `at` of an
    episode whose task id contains `only`, and in every `every`-th step that an instance (a slot of
    a worker) plays, over all its episodes; 0 is never. The actions "hang", "die", "raise", "nan"
    and "inf" do the same at once, whatever the settings. timeout: seconds after which a step counts
    as hung.
    """
    def __init__(self, fault: str = "", at: int = 0, only: str = "", every: int = 0,
                 timeout: float = 20.0, games: str = "auto", list_actions: bool = False):
        super().__init__(games, list_actions)
        self.fault, self.at, self.only, self.every = fault, at, only, every
        self.step_timeout, self.played = timeout, 0

    def reset(self, task):
        """As ALFWorld; remembers whose episode this is."""
        self.id, self.n = task.id, 0
        return super().reset(task)

    def step(self, action):
        """As ALFWorld, or the fault."""
        self.n += 1
        self.played += 1
        due = self.n == self.at and self.only in self.id
        due = due or bool(self.every) and self.played % self.every == 0
        fault = self.fault if due else action
        misbehave(fault)
        observation, reward, *rest = super().step(action)
        return observation, REWARDS.get(fault, reward), *rest
