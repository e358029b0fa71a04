"""The notebooks: each .ipynb holds exactly its source, the defaults their prose quotes are the
program's, and each runs in minutes.

The oracles: notebooks/build.py's comparison, tried on notebooks that do differ; seed_mini's
PROFILES; and the notebooks' own assertions, executed by `python notebooks/build.py --execute` on a
temporary copy of the project, so that no stored output changes.
"""
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import runs
import seed_mini

REPO = Path(seed_mini.__file__).parent
NOTEBOOKS = sorted((REPO / "notebooks").glob("[0-9]*.py"))
# seconds, for the short version of one notebook
LIMIT = 180

spec = importlib.util.spec_from_file_location("build", REPO / "notebooks" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
names = lambda path: path.stem


# --------------------------------------------------------------------------------------------------
# 1. Source and notebook
# --------------------------------------------------------------------------------------------------
def test_there_are_notebooks():
    assert NOTEBOOKS, "no notebooks/[0-9]*.py: the tests below would pass on nothing"


@pytest.mark.parametrize("source", NOTEBOOKS + [REPO / "notebooks" / "assignment.py"], ids=names)
def test_notebook_holds_exactly_its_source(source):
    assert not build.differs(source), f"run python notebooks/build.py --execute {source.name[:2]}"


def test_the_shipped_base_is_the_one_its_notebook_made():
    text = (REPO / "notebooks" / "00_tiny_base.py").read_text(encoding="utf-8")
    assert f"`{runs.sha256(seed_mini.TINY / 'alfworld' / 'model.safetensors')}`" in text, (
        "say which base the notebook's outputs are of")


def test_no_notebook_without_a_source():
    assert [p.name for p in (REPO / "notebooks").glob("[0-9]*.ipynb")
            if not p.with_suffix(".py").exists()] == []


@pytest.mark.parametrize("change",
                         ["x = 2", "# %%\nx = 1\n# %%\nprint(x)", "# %% [markdown]\n# x = 1"])
def test_a_changed_source_is_noticed(tmp_path, change):
    """Another line, another cell, another kind of cell."""
    source = tmp_path / "09_example.py"
    source.write_text("# %%\nx = 1\n")
    assert build.differs(source), "there is no notebook yet"
    build.nbformat.write(build.build(source), source.with_suffix(".ipynb"))
    assert not build.differs(source)
    source.write_text(change if change.startswith("# %%") else f"# %%\n{change}\n")
    assert build.differs(source)


def test_outputs_survive_where_the_code_did_not_change(tmp_path):
    source = tmp_path / "09_example.py"
    source.write_text("# %%\nx = 1\n# %%\ny = 2\n")
    notebook = build.build(source)
    for cell in notebook["cells"]:
        cell["outputs"] = [build.nbformat.v4.new_output("stream", text=cell["source"])]
    build.nbformat.write(notebook, source.with_suffix(".ipynb"))
    source.write_text("# %%\nx = 1\n# %%\ny = 3\n")
    assert [len(cell["outputs"]) for cell in build.build(source)["cells"]] == [1, 0]


@pytest.mark.parametrize("source", NOTEBOOKS, ids=names)
def test_stored_outputs_have_no_error_and_no_local_path(source):
    text = source.with_suffix(".ipynb").read_text(encoding="utf-8")
    outputs = [o for c in json.loads(text)["cells"] for o in c.get("outputs", [])]
    assert not [o for o in outputs if o["output_type"] == "error"]
    said = source.read_text(encoding="utf-8") + json.dumps(
        [{k: v for k, v in o.get("data", o).items() if k != "image/png"} for o in outputs])
    assert not re.search(r"/(?:home|root|Users|tmp)/", said) and f"{REPO.parent}/" not in said


# --------------------------------------------------------------------------------------------------
# 2. Quoted defaults
# --------------------------------------------------------------------------------------------------
# The convention of the prose: `name=value` in back-quotes quotes the default of the tiny profile,
# which the notebooks run with; "paper: `name=value`" that of the paper profile.
QUOTE = re.compile(r"(paper:\s)?`([a-z_]+)=([^`\s]+)`")


def quoted(source: Path) -> list[tuple[str, str, str]]:
    """(profile, option, value) of every default that a notebook's prose quotes."""
    prose = "\n".join(c["source"] for c in build.cells_of(source.read_text(encoding="utf-8"))
                      if c["cell_type"] == "markdown")
    options = {f.name for f in dataclasses.fields(seed_mini.Config)}
    return [("paper" if paper else "tiny", name, value)
            for paper, name, value in QUOTE.findall(prose) if name in options]


def default(profile: str, name: str):
    """A model's size decides the profile; nothing is loaded."""
    model = "tiny" if profile == "tiny" else runs.QWEN
    return getattr(seed_mini.resolve(seed_mini.Config(model=model)), name)


@pytest.mark.parametrize("source", NOTEBOOKS, ids=names)
def test_quoted_defaults_are_the_programs(source):
    for profile, name, value in quoted(source):
        have = default(profile, name)
        same = (float(value) == float(have) if isinstance(have, (int, float))
                and not isinstance(have, bool) else value == str(have))
        assert same, (f"{source.name} quotes {name}={value} ({profile} profile), seed_mini "
                      f"has {have}")


def test_the_gate_notebook_quotes_defaults():
    """Otherwise the test above would check nothing."""
    found = quoted(REPO / "notebooks" / "01_confidence_gate.py")
    assert {("tiny", "beta_opd"), ("tiny", "lambda_opd"),
            ("paper", "lambda_opd")} <= {(profile, name) for profile, name, _ in found}


# --------------------------------------------------------------------------------------------------
# 3. Run them
# --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project to run notebooks in, and an environment in which they find no games but
    those they make."""
    root = tmp_path_factory.mktemp("notebooks") / "project"
    shutil.copytree(REPO, root,
                    ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "tests", "venv"))
    env = {k: v for k, v in os.environ.items()
           if k not in ("ALFWORLD_DATA", "MPLBACKEND", "SEED_MINI_BASE_GAMES")}
    return root, env | {"SEED_MINI_QUICK": "1", "XDG_CACHE_HOME": str(root.parent / "cache")}


@pytest.mark.slow
@pytest.mark.parametrize("source", NOTEBOOKS, ids=names)
def test_notebook_runs_in_minutes(source, copy):
    """Its assertions are the test. A kernel ends by itself when the process that started it
    does."""
    root, env = copy
    process = subprocess.Popen([sys.executable, "notebooks/build.py", "--execute", source.stem],
                               cwd=root, env=env, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{source.name} takes more than {LIMIT} s on the short settings:\n"
                    f"{output[-2000:]}")
    assert process.returncode == 0, output[-4000:]
    cells = json.loads(
        (root / "notebooks" / f"{source.stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(c["execution_count"]
               for c in cells if c["cell_type"] == "code"), "every cell must have run"
