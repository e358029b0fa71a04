"""Fixtures and the table of marks. Without a student's file every exercise is skipped, so that the
project's own test run stays green."""

import os
from pathlib import Path

import kit
import pytest

MARKS = pytest.StashKey()


def pytest_configure(config):
    config.stash[MARKS] = {}
    # Properties of a test case (exercise, points) are what graders read from --junitxml; the
    # stricter schema has no place for them.
    config.addinivalue_line("filterwarnings", "ignore:record_property is incompatible")


@pytest.fixture(scope="session")
def mine():
    """The submission: SEED_MINI_SOLUTION, or the student's file."""
    path = Path(os.environ.get("SEED_MINI_SOLUTION", kit.STUDENT))
    if not path.exists():
        pytest.skip(
            f"no solution at {path}: `python tests/assignment/kit.py start` makes a student's file"
        )
    worker = kit.Worker(path)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def answers(mine):
    """The right answers (after `mine`: without a submission nobody asks for them)."""
    answers = kit.Answers(kit.answers_file())
    yield answers
    answers.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Collect points: (reached, possible) by exercise."""
    report = yield
    check = getattr(item, "callspec", None) and item.callspec.params.get("check")
    if check and (report.when == "call" or report.skipped):
        reached, possible = item.config.stash[MARKS].get(check.exercise, (0, 0))
        item.config.stash[MARKS][check.exercise] = (
            reached + check.points * report.passed,
            possible + check.points,
        )
        if report.skipped:
            item.config.stash[MARKS].pop(check.exercise)
    return report


def pytest_terminal_summary(terminalreporter, config):
    marks = config.stash[MARKS]
    if marks:
        terminalreporter.section("marks")
        for exercise, (reached, possible) in sorted(marks.items()):
            terminalreporter.line(f"exercise {exercise}: {reached:3d} of {possible}")
        terminalreporter.line(
            f"total:      {sum(r for r, _ in marks.values()):3d} of "
            f"{sum(p for _, p in marks.values())}"
        )
