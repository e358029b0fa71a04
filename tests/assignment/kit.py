"""kit.py: the course kit. Students need the first command, instructors the other three.

    python tests/assignment/kit.py start                      # make notebooks/my_solution.py
    python tests/assignment/kit.py handout FOLDER [--seed N]  # what a class needs, no solution
    python tests/assignment/kit.py grade FOLDER [--seed N]    # a table of marks, a row each
    python tests/assignment/kit.py solution FILE              # the instructor's, with answers

notebooks/my_solution.py is the one file a student edits; a hand-out has one in it. `solution` also
writes the model answers to the questions. notebooks/course.md tells instructors more.

One source, notebooks/assignment.py: its cells are the student's notebook, those headed "# ----
Exercise" are the stub file, and the two tables before its first cell turn the stubs into the
instructor's solution, which calls this project's own modules.

How grading works. test_exercises.py draws inputs from a seed and puts the same calls to two
processes: the submission, and the solution (or, in a hand-out, the solution's recorded answers).
Only their values are compared, here. A submission's process holds no answer and has no path to the
project, so it cannot import one either; exercise 6 lends it the project's modules with the graded
functions taken out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The source is not in a hand-out.
SOURCE = ROOT / "notebooks" / "assignment.py"
NOTEBOOK = ROOT / "notebooks" / "assignment.ipynb"
STUDENT = ROOT / "notebooks" / "my_solution.py"
# What the exercises ask for, by module; these functions, and the private helpers that only they
# use, are left out of a hand-out's modules.
GRADED = {
    "losses.py": tuple(
        "chunked_logprob masked_mean group_advantages policy_loss kl_k3 confidence_gate opd_loss "
        "seed_loss".split()
    ),
    "skills.py": ("parse_reply",),
    "seed_mini.py": ("with_skill",),
}
# Copied as they are, with every file of environments/.
WHOLE = ("envs.py", "policy.py", "runs.py")
# Limits. A call's is in CPU seconds (and five times as many on the clock), so that a busy machine
# marks nobody down; a right answer needs milliseconds, and the training run 25 s. What is not
# graded after ALL_SECONDS on the clock has failed.
PATIENCE = float(os.environ.get("SEED_MINI_COURSE_PATIENCE", 1))
CALL_SECONDS, TRAIN_SECONDS, ALL_SECONDS = 6 * PATIENCE, 80 * PATIENCE, 100 * PATIENCE


# --------------------------------------------------------------------------------------------------
# 1. Files that are made from others
# --------------------------------------------------------------------------------------------------
def exercise_cells() -> list[str]:
    """The code of the exercises' cells, from the source or, in a hand-out, from the notebook."""
    if SOURCE.exists():
        _, *parts = re.split(r"^# %%", SOURCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
        cells = [part.partition("\n")[2] for part in parts]
    else:
        notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
        cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    return [cell.strip() for cell in cells if "\n# ---- Exercise" in "\n" + cell]


def tables() -> dict[str, dict]:
    """SOLUTION (function -> its body) and ANSWERS (exercise -> model answer): the literals before
    the first cell."""
    header = SOURCE.read_text(encoding="utf-8").split("\n# %%")[0]
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(header).body
        if isinstance(node, ast.Assign)
    }


STUB_HEAD = '''"""My solution of the seed_mini assignment. Read notebooks/assignment.ipynb, fill
in the functions below, and see your marks by

    python -m pytest tests/assignment

You may add imports (Python's own library, NumPy and torch) and functions of your own. Prints are
shown when an exercise fails.
"""
'''


def stub_file() -> str:
    """The student's file: every exercise, nothing solved."""
    return STUB_HEAD + "\n\n\n".join(exercise_cells()) + "\n"


# Copies under other names: exercise 6 puts a solution's functions into losses and seed_mini, and
# this solution must not find itself there.
SOLUTION_HEAD = '''"""The instructor's solution, made by kit.py. Model answers to the questions:

{answers}"""
import importlib.util
import sys

sys.path.append({root!r})


def project(name):
    """A module of seed_mini, loaded once."""
    if "project_" + name not in sys.modules:
        spec = importlib.util.spec_from_file_location("project_" + name, f"{root}/{{name}}.py")
        sys.modules["project_" + name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["project_" + name])
    return sys.modules["project_" + name]


'''


def solution_file() -> str:
    """The instructor's file: each stub's raise is replaced by the body that SOLUTION has for it."""
    bodies, answers = tables()["SOLUTION"], tables()["ANSWERS"]
    head = SOLUTION_HEAD.format(
        answers="\n".join(f"{n}. {answer}\n" for n, answer in answers.items()), root=str(ROOT)
    )
    text = "\n\n\n".join(exercise_cells())
    for name, body in bodies.items():
        pattern = rf"(^def {name}\((?:.*\n)*?)    raise NotImplementedError\n"
        text, found = re.subn(
            pattern,
            lambda match: match[1] + "".join(f"    {line}\n" for line in body.strip().split("\n")),
            text + "\n",
            count=1,
            flags=re.MULTILINE,
        )
        if not found:
            raise RuntimeError(
                f"{SOURCE.name}: SOLUTION has a body for {name}, but no exercise cell has a stub "
                "of that name."
            )
    if "raise NotImplementedError\n" in text:
        raise RuntimeError(f"{SOURCE.name}: an exercise has no body in SOLUTION.")
    return head + text


def without(source: str, graded: tuple[str, ...]) -> str:
    """A module's source in which the graded functions keep signature and docstring only, and what
    no other code uses is gone."""
    tree, lines = ast.parse(source), source.split("\n")
    # name -> node, of top-level functions, classes and constants
    nodes = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes[node.name] = node
        elif isinstance(node, ast.Assign):
            nodes |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}

    def uses(node):
        parts = [node.args] if getattr(node, "name", "") in graded else [node]
        return {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}

    kept = {name for name in nodes if not name.startswith("_")}
    rest = [node for node in tree.body if node not in nodes.values()]
    todo = [nodes[name] for name in kept] + rest
    while todo:
        new = {name for name in uses(todo.pop()) if name in nodes and name not in kept}
        kept |= new
        todo += [nodes[name] for name in new]
    for name, node in sorted(nodes.items(), key=lambda item: -item[1].lineno):
        first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        if name in graded:
            after = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            lines[after : node.end_lineno] = [
                '    raise NotImplementedError("an exercise: see notebooks/assignment.ipynb")'
            ]
        elif name not in kept and len([n for n in nodes.values() if n is node]) == 1:
            while lines[first - 2].startswith("#") and not lines[first - 2].startswith("# ---"):
                first -= 1
            lines[first - 1 : node.end_lineno] = []
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines))


def write_modules(folder: Path) -> None:
    """The project's modules without solutions."""
    worlds = (p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "environments").glob("*.py")))
    (folder / "environments").mkdir()
    for name in (*WHOLE, *worlds):
        shutil.copy(ROOT / name, folder / name)
    for name, graded in GRADED.items():
        gutted = without((ROOT / name).read_text(encoding="utf-8"), graded)
        (folder / name).write_text(gutted, encoding="utf-8")


# --------------------------------------------------------------------------------------------------
# 2. Two sides that answer calls: a file in a process of its own, and recorded answers
# --------------------------------------------------------------------------------------------------
class Failed(AssertionError):
    """An exercise is not right; the message is for the student."""


class Array(NamedTuple):
    """A tensor that came back: its numbers in float64, its dtype's name, whether it carries a
    gradient."""

    numbers: np.ndarray
    dtype: str
    grad: bool


class Result(NamedTuple):
    """What one call gave: value; gradients of sum(value * weight) for the tensors with grad=True,
    in order; indices of arguments that were changed; FLOP of all matrix products and the peak of
    additional bytes, if cost was asked for (0 otherwise)."""

    value: object
    grads: list
    changed: list[int]
    flop: int
    peak: int


def tensor(numbers, dtype: str = "float64", grad: bool = False) -> dict:
    """An argument that arrives as a torch tensor, with requires_grad=grad."""
    numbers = np.asarray(numbers)
    return {
        "tensor": numbers.astype(float).ravel().tolist(),
        "shape": list(numbers.shape),
        "dtype": dtype,
        "grad": grad,
    }


def read(x):
    """A packed value (worker.pack) as Python and Array."""
    if isinstance(x, dict) and "tensor" in x:
        return Array(np.array(x["tensor"], dtype=float).reshape(x["shape"]), x["dtype"], x["grad"])
    return [read(item) for item in x] if isinstance(x, list) else x


def result(reply: dict) -> Result:
    """A worker's reply as a Result."""
    return Result(
        read(reply["value"]),
        read(reply.get("grads", [])),
        reply.get("changed", []),
        reply.get("flop", 0),
        reply.get("peak", 0),
    )


class Worker:
    """A solution file behind a pipe (a class, because a process is state). It can loop, crash,
    print or exit: the caller gets a Failed.

    worker(name, *args, weight=, cost=, **kwargs) -> Result calls a function of the file;
    worker.error(...) -> the name of the error it raises or ""; worker.train(...) -> exercise 6. A
    function that did not come back once is not called again.
    """

    def __init__(self, path: Path, seconds: float = ALL_SECONDS):
        self.path, self.process, self.gone = Path(path).resolve(), None, {}
        # On the clock, for this solution alone.
        self.left = seconds
        self.scratch = Path(tempfile.mkdtemp(prefix="seed_mini_grading_"))

    def start(self) -> None:
        """A fresh process in an empty folder, without a path to the project (-P, -E) and as the
        leader of its own group."""
        self.log = open(self.scratch / "printed", "w+b")
        (self.scratch / "cwd").mkdir(exist_ok=True)
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("SEED_MINI_", "PYTEST_"))
        } | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-E", HERE / "worker.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=self.scratch / "cwd",
            env=env,
            start_new_session=True,
        )
        self.replies = b""
        # It says "ready".
        self.line(time.monotonic() + 120, "torch does not load")

    def close(self) -> None:
        """End the process and everything it started."""
        self.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def kill(self) -> int | None:
        """The process and all of its group, now. Returns what it had ended with, if it had."""
        if self.process is None:
            return None
        # One that ended by itself must be asked before its group is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        ended = self.process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process = None
        return ended

    def __call__(self, name: str, *args, weight=None, cost: bool = False, **kwargs) -> Result:
        reply = self.ask(
            dict(call=name, args=list(args), kwargs=kwargs, weight=weight, cost=cost), CALL_SECONDS
        )
        if "error" in reply:
            said = {
                "missing": f"{name}: {reply['text']}.",
                "load": f"{self.path.name} cannot be loaded: {reply['text']}",
            }
            raise Failed(
                said.get(reply["error"], f"{name} raised {reply['text']}") + self.printed()
            )
        return result(reply)

    def error(self, name: str, *args, **kwargs) -> str:
        """The type of the error that a call raises, "" if it raises none."""
        reply = self.ask(dict(call=name, args=list(args), kwargs=kwargs), CALL_SECONDS)
        if reply.get("error") in ("missing", "load"):
            raise Failed(f"{name}: {reply['text']}.")
        return reply.get("error", "")

    def train(self) -> list[dict]:
        """Exercise 6: the curve of training.train with this solution."""
        modules = self.scratch / "modules"
        if not modules.exists():
            modules.mkdir()
            write_modules(modules)
            shutil.copy(HERE / "training.py", modules)
        base = str(ROOT / "notebooks" / "tiny_base" / "alfworld")
        kwargs = dict(model=os.environ.get("SEED_MINI_COURSE_BASE", base))
        reply = self.ask(dict(call="train", kwargs=kwargs, modules=str(modules)), TRAIN_SECONDS)
        if "error" in reply:
            raise Failed(f"the training run stopped: {reply['text']}" + self.printed())
        return reply["value"]

    def ask(self, request: dict, seconds: float) -> dict:
        """One request, one reply. Raises Failed if none comes in time, or ever; the function (or a
        file that does not even load) is then `gone`."""
        name, begun, hung = request["call"], time.monotonic(), "the file itself"
        for what in (name, hung):
            if what in self.gone:
                raise Failed(f"{name} was not called again: {self.gone[what]}")
        endless = f"it did not come back within {seconds:g} s (a loop without end?)"
        late = endless
        if self.left <= 5 * seconds:
            late = (
                "the time for one submission is used up (on a busy machine set "
                "SEED_MINI_COURSE_PATIENCE=4)"
            )
        try:
            if self.left <= 0:
                raise TimeoutError(late)
            if self.process is None:
                self.start()
            self.process.stdin.write(
                json.dumps(request | {"file": str(self.path), "seconds": seconds}).encode() + b"\n"
            )
            self.process.stdin.flush()
            deadline = time.monotonic() + min(5 * seconds, self.left)
            line = self.line(deadline, late)
            if line == b"loaded":
                hung = name
                line = self.line(deadline, late)
            return json.loads(line)
        except (TimeoutError, EOFError, BrokenPipeError) as failure:
            out_of_time = self.kill() == -signal.SIGPROF
            self.gone[hung] = endless if out_of_time else str(failure) or "its process is gone"
            raise Failed(f"{hung}: {self.gone[hung]}.") from None
        finally:
            self.left -= time.monotonic() - begun

    def line(self, deadline: float, late: str) -> bytes:
        """The next line from the process. TimeoutError(late) after the deadline, EOFError if the
        process ends."""
        while b"\n" not in self.replies:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError(late)
            more = os.read(self.process.stdout.fileno(), 1 << 20)
            if not more:
                raise EOFError(
                    "it ended the Python process (a crash, an exit, or too much memory or output)"
                )
            self.replies += more
        line, _, self.replies = self.replies.partition(b"\n")
        return line

    def printed(self) -> str:
        """The end of what the solution printed, for the message of a failure."""
        file = self.scratch / "printed"
        text = file.read_text(errors="replace")[-600:] if file.exists() else ""
        clean = "".join(c for c in text if c.isprintable() or c == "\n").strip()
        return f"\nIt printed: {clean}" if clean else ""


class Answers:
    """The right side of every comparison: the solution's values, from its own process and
    remembered, or from a hand-out's answers.json.

    answers(check) -> a function that is called like a Worker. Values are kept by check and
    position, as they are packed.
    """

    def __init__(self, file: Path | None):
        self.recorded = json.loads(file.read_text())["answers"] if file else {}
        self.worker = None
        self.live = file is None

    def __call__(self, check: str):
        position = [0]

        def answer(name, *args, weight=None, **kwargs):
            key, position[0] = f"{check} {position[0]}", position[0] + 1
            if key not in self.recorded:
                if not self.live:
                    raise RuntimeError(
                        f"answers.json has no answer for {key!r}: make the hand-out again."
                    )
                # Patiently: its first calls import the project.
                try:
                    self.recorded[key] = self.solution().ask(
                        dict(call=name, args=list(args), kwargs=kwargs, weight=weight), 300
                    )
                except Failed as failure:
                    raise RuntimeError(f"the solution itself fails in {key!r}: {failure}") from None
            if "error" in self.recorded[key]:
                raise RuntimeError(
                    f"the solution itself fails in {key!r}: {self.recorded[key]['text']}"
                )
            return result(self.recorded[key])

        return answer

    def solution(self) -> Worker:
        """The instructor's solution as a Worker."""
        if self.worker is None:
            self.worker = Worker(
                Path(tempfile.mkdtemp(prefix="seed_mini_solution_")) / "solution.py", seconds=3600
            )
            self.worker.path.write_text(solution_file())
        return self.worker

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            shutil.rmtree(self.worker.path.parent, ignore_errors=True)


def answers_file() -> Path | None:
    """Recorded answers: SEED_MINI_COURSE_ANSWERS (set by `grade`), a hand-out's answers.json, or
    None: ask the solution itself."""
    named, own = os.environ.get("SEED_MINI_COURSE_ANSWERS"), HERE / "answers.json"
    return Path(named) if named else own if own.exists() else None


def course_seed() -> int:
    """The seed the exercises' numbers are drawn from: SEED_MINI_COURSE_SEED, or that of the
    recorded answers, or 0."""
    file, wanted = answers_file(), os.environ.get("SEED_MINI_COURSE_SEED")
    recorded = json.loads(file.read_text())["seed"] if file else None
    if wanted is not None and recorded is not None and int(wanted) != recorded:
        raise RuntimeError(
            f"SEED_MINI_COURSE_SEED is {wanted}, but the recorded answers are for seed {recorded}."
        )
    return int(wanted) if wanted is not None else recorded or 0


# --------------------------------------------------------------------------------------------------
# 3. Commands
# --------------------------------------------------------------------------------------------------
def start() -> str:
    """Make the student's file. Never overwrites one."""
    if STUDENT.exists():
        raise ValueError(f"{STUDENT} is already there; it is left as it is.")
    STUDENT.write_text(stub_file(), encoding="utf-8")
    return f"made {STUDENT}: open it next to notebooks/assignment.ipynb"


def record(seed: int, file: Path) -> None:
    """Write the solution's answers for a seed."""
    os.environ["SEED_MINI_COURSE_SEED"] = str(seed)
    import test_exercises

    answers = Answers(None)
    try:
        for check in test_exercises.CHECKS:
            if not check.trains:
                check(answers.solution(), answers(check.name))
    finally:
        answers.close()
    file.write_text(json.dumps({"seed": seed, "answers": answers.recorded}) + "\n")


def handout(folder: Path, seed: int) -> str:
    """Everything a class needs, in a new folder: notebook, stub, modules without solutions, graders
    with recorded answers, the tiny base."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty.")
    (folder / "tests" / "assignment").mkdir(parents=True)
    (folder / "notebooks").mkdir()
    write_modules(folder)
    files = "README.md requirements.txt pyproject.toml LICENSE notebooks/assignment.ipynb".split()
    for name in (*files, *(f"tests/assignment/{p.name}" for p in HERE.glob("*.py"))):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "notebooks" / "tiny_base", folder / "notebooks" / "tiny_base")
    (folder / "notebooks" / "my_solution.py").write_text(stub_file(), encoding="utf-8")
    record(seed, folder / "tests" / "assignment" / "answers.json")
    return f"made {folder} for seed {seed}; a student starts with notebooks/assignment.ipynb"


def submissions(folder: Path) -> dict[str, Path]:
    """Name -> file: every *.py in the folder, and in each subfolder my_solution.py (or its only
    *.py)."""
    found = {p.stem: p for p in sorted(folder.glob("*.py"))}
    for sub in sorted(p for p in folder.iterdir() if p.is_dir()):
        files = sorted(sub.rglob("my_solution.py")) or sorted(sub.rglob("*.py"))
        found[sub.name] = files[0] if len(files) == 1 else sub / "my_solution.py"
    return found


def marks(path: Path, answers: Path) -> tuple[dict[int, int], list[str]]:
    """Grade one submission in a pytest of its own: points by exercise, and remarks."""
    with tempfile.TemporaryDirectory() as scratch:
        xml = Path(scratch) / "marks.xml"
        env = os.environ | {
            "SEED_MINI_SOLUTION": str(path.resolve()),
            "SEED_MINI_COURSE_ANSWERS": str(answers),
        }
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={xml}"]
        command = [sys.executable, "-m", "pytest", HERE, *options]
        try:
            subprocess.run(command, env=env, cwd=ROOT, capture_output=True, timeout=3 * ALL_SECONDS)
            cases = ElementTree.parse(xml).getroot().iter("testcase")
        except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError) as error:
            return {}, [f"not graded: {type(error).__name__}"]
        points, remarks = {}, []
        for case in cases:
            about = {p.get("name"): int(p.get("value")) for p in case.iter("property")}
            failures = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
            reached = 0 if failures else about["points"]
            points[about["exercise"]] = points.get(about["exercise"], 0) + reached
            said = [f.get("message", "").removeprefix("Failed: ") for f in failures]
            remarks += [message.split("\n")[0] for message in said]
        return points, list(dict.fromkeys(remarks))


def grade(folder: Path, seed: int | None) -> str:
    """The table of marks of every submission in a folder, in Markdown; remarks name the first
    failure."""
    found = submissions(folder)
    if not found:
        raise ValueError(
            f"{folder} holds no submission (a *.py file, or a folder with my_solution.py, for each "
            "student)."
        )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        if seed is not None:
            os.environ["SEED_MINI_COURSE_SEED"] = str(seed)
        seed, answers = course_seed(), answers_file() or Path(scratch) / "answers.json"
        if not answers.exists():
            record(seed, answers)
        for name, path in found.items():
            points, remarks = marks(path, answers) if path.exists() else ({}, ["no my_solution.py"])
            rows.append((name, points, remarks))
            print(f"{name}: {sum(points.values())}", file=sys.stderr, flush=True)
    exercises = sorted({e for _, points, _ in rows for e in points}) or [1]
    lines = [
        f"| submission | {' | '.join(map(str, exercises))} | total | first remark |",
        "|---" * (len(exercises) + 3) + "|",
    ]
    for name, points, remarks in rows:
        first = remarks[0].replace("|", "/")[:160] if remarks else ""
        cells = " | ".join(str(points.get(e, 0)) for e in exercises)
        lines.append(f"| {name} | {cells} | {sum(points.values())} | {first} |")
    return "\n".join(lines)


def main() -> int:
    """Command line: 0 = done, 2 = one sentence about what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("start")
    for name in ("handout", "grade"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.add_argument(
            "--seed",
            type=int,
            default=0 if name == "handout" else None,
            help="seed of the numbers in the exercises: another one each year",
        )
    commands.add_parser("solution").add_argument("file", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "start":
            print(start())
        elif args.command == "solution":
            args.file.write_text(solution_file(), encoding="utf-8")
        else:
            print((handout if args.command == "handout" else grade)(args.folder, args.seed))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"kit: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # The module that test_exercises.py imports, and not a second copy of it.
    import kit

    sys.exit(kit.main())
