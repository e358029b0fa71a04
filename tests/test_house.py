"""How the house is built: what a reader of the code can count on, checked by parsing it."""
import ast
import dataclasses
import re
from pathlib import Path

import pytest

import seed_mini as sm

ROOT = Path(__file__).resolve().parent.parent
MODULES = ["envs", "losses", "policy", "runs", "seed_mini", "skills"]
WORLDS = sorted((ROOT / "environments").glob("*.py"))
FILES = sorted([*ROOT.glob("*.py"), *WORLDS, *ROOT.glob("tests/**/*.py"),
                *ROOT.glob("notebooks/*.py")])
READING = ["README.md", "losses.py", "envs.py", "skills.py", "policy.py", "seed_mini.py"]
# Who may import whom, among ourselves: the arrows point down, so there is no circle.
ARROWS = {"losses": set(), "envs": set(), "skills": {"envs"}, "policy": {"losses"},
          "runs": {"policy", "envs", "losses"},
          "seed_mini": {"runs", "policy", "skills", "envs", "losses"}}


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_line_is_wider_than_100_columns_and_no_function_longer_than_60_lines(path):
    wide = [n for n, line in enumerate(lines_of(path), 1) if len(line) > 100]
    assert not wide, f"{path.name}: lines {wide} are wider than 100 columns"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{path.name}: {node.name} has {length} lines"


def test_the_reading_path_is_an_evening():
    total = sum(len(lines_of(ROOT / name)) for name in READING)
    assert total <= 2700, f"the reading path has {total} lines"


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1800


def test_one_update_is_one_page_and_the_loss_is_one_call_below_it():
    tree = ast.parse((ROOT / "seed_mini.py").read_text())
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    update = functions["one_update"]
    code = {n.lineno for statement in update.body[1:] for n in ast.walk(statement)
            if hasattr(n, "lineno")}
    assert len(code) <= 30, f"one_update has {len(code)} lines of code"

    def called(function):
        return {ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}

    below = [name for name in called(update) if name in functions]
    assert any("losses.seed_loss" in called(functions[name]) for name in below)


def test_options_are_few_and_each_has_its_text():
    options = dataclasses.fields(sm.Config)
    assert len(options) <= 48
    assert all(option.metadata["help"] for option in options)


def imports_of(path: Path) -> set[str]:
    """Our own modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found & {*MODULES, "environments"}


def test_arrows_go_one_way():
    for name, allowed in ARROWS.items():
        extra = imports_of(ROOT / f"{name}.py") - allowed
        assert not extra, f"{name}.py imports {extra}"
    for path in WORLDS:
        assert imports_of(path) <= {"envs", "environments"}, path.name


def test_worlds_import_their_own_files_only():
    """environments/NAME.py may use NAME_*.py beside it, and no other world."""
    for path in WORLDS:
        for other in re.findall(r"^\s*from environments import (.*)$", path.read_text(), re.M):
            for name in re.findall(r"\w+", other.split("#")[0]):
                assert name.split("_")[0] == path.stem.split("_")[0], f"{path.name}: {name}"


def test_no_module_knows_a_world():
    """Nothing outside environments/ (but tests and notebooks) has a word of the household in it;
    the name of the default world, which --env and the help quote, is all."""
    words = re.compile(r"\b(household|fridge|microwave|countertop|lamp|receptacle|textworld|"
                       r"alfred|pick_and_place|admissible commands?)\b", re.I)
    for name in MODULES:
        hits = [f"{n}: {line}" for n, line in enumerate(lines_of(ROOT / f"{name}.py"), 1)
                if words.search(line)]
        assert not hits, f"{name}.py {hits}"
        if name != "seed_mini":
            assert "alfworld" not in (ROOT / f"{name}.py").read_text().lower(), name


def test_top_level_holds_nothing_else():
    allowed = {*(f"{name}.py" for name in MODULES), "README.md", "LICENSE", "requirements.txt",
               "pyproject.toml", "environments", "notebooks", "tests"}
    present = {p.name for p in ROOT.iterdir() if not p.name.startswith((".", "__"))}
    # What git ignores: a virtual environment, the runs of whoever works here.
    present -= {"runs", "venv", "submissions"}
    assert present <= allowed, present - allowed
