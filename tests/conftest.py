"""The options of the contract that every environment keeps, see test_environments.py:

python -m pytest tests/test_environments.py --env ./my_world.py --env_args size=6
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_addoption(parser):
    group = parser.getgroup("environments (tests/test_environments.py)")
    group.addoption(
        "--env",
        action="append",
        default=[],
        metavar="NAME_OR_FILE",
        help="check this environment, and nothing else (again for a second one)",
    )
    group.addoption(
        "--env_args",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="its settings, behind the name of the test file",
    )


def pytest_configure(config):
    """A name that means nothing is one sentence, not a page of errors."""
    import envs

    pairs = config.getoption("--env_args")
    if pairs and not config.getoption("--env"):
        raise pytest.UsageError("--env_args are the settings of a world: name it by --env.")
    for name in config.getoption("--env"):
        try:
            envs.make(envs.find(name), pairs)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config, items):
    """With --env only the contract runs."""
    if config.getoption("--env"):
        left = [item for item in items if "any_world" not in item.fixturenames]
        items[:] = [item for item in items if "any_world" in item.fixturenames]
        config.hook.pytest_deselected(items=left)
