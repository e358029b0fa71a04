"""The course kit: right answers pass, classic wrong answers fail, no submission can hurt the
grading, no hand-out holds a solution."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "assignment"))

import kit  # noqa: E402
import test_exercises as exercises  # noqa: E402

PLAIN = ROOT / "tests" / "plain_solution.py"

# The mutants: exercise, what is wrong, and the edit of plain_solution.py that makes it so (old
# text, new text).
# fmt: off
MUTANTS = [
    (1, "biased std", "rewards.std(dim=1, keepdim=True)",
     "rewards.std(dim=1, keepdim=True, correction=0)"),
    (1, "epsilon under the root", "centred / (std + eps)", "centred / (std**2 + eps).sqrt()"),
    (1, "epsilon after the division", "centred / (std + eps)",
     "centred / std.clamp(min=1e-30) + eps"),
    (1, "epsilon of 1e-4", "eps=1e-6", "eps=1e-4"),
    (1, "epsilon ignored: NaN for a tie", "centred / (std + eps)", "centred / std"),
    (1, "mean over the whole batch", "rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
    (1, "std over the whole batch", "rewards.std(dim=1, keepdim=True)", "rewards.std()"),
    (1, "groups along the wrong dimension", "rewards.mean(dim=1, keepdim=True)",
     "rewards.mean(dim=0, keepdim=True)"),
    (1, "divide_by_std ignored", "centred / (std + eps) if divide_by_std else centred",
     "centred / (std + eps)"),
    (1, "computed in half precision", "centred = rewards -",
     "rewards = rewards.half().to(rewards.dtype)\n    centred = rewards -"),
    (1, "rewards centred in place", "centred = rewards - rewards.mean(dim=1, keepdim=True)",
     "centred = rewards.sub_(rewards.mean(dim=1, keepdim=True))"),
    (2, "mean of the rows' means", "torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)",
     "(torch.where(mask, x, 0.0).sum(1) / mask.sum(1).clamp(min=1)).mean()"),
    (2, "mean over all positions", "/ mask.sum().clamp(min=1)", "/ mask.numel()"),
    (2, "masked by multiplication", "torch.where(mask, x, 0.0).sum()", "(x * mask).sum()"),
    (2, "empty mask gives NaN", "mask.sum().clamp(min=1)", "mask.sum()"),
    (2, "sign of the policy loss", "return -masked_mean(torch.minimum",
     "return masked_mean(torch.minimum"),
    (2, "clip on the wrong side: maximum", "torch.minimum(ratio * advantages",
     "torch.maximum(ratio * advantages"),
    (2, "clip without the minimum", "torch.minimum(ratio * advantages, clipped * advantages)",
     "clipped * advantages"),
    (2, "no clip", "torch.minimum(ratio * advantages, clipped * advantages)", "ratio * advantages"),
    (2, "clip range fixed at 0.2", "1 - clip_range, 1 + clip_range", "0.8, 1.2"),
    (2, "ratio upside down", "logp - old_logp.detach(), 0.0", "old_logp.detach() - logp, 0.0"),
    (2, "ratio without exp", "ratio = torch.exp(difference)", "ratio = 1 + difference"),
    (2, "no importance ratio: REINFORCE", "torch.minimum(ratio * advantages, clipped * advantages)",
     "logp * advantages"),
    (2, "advantage b goes to column b", "advantages.detach()[:, None]",
     "advantages.detach()[None, :].expand(len(logp), -1)[:, :logp.shape[1]]"),
    (2, "old log-probs with a gradient", "logp - old_logp.detach(), 0.0", "logp - old_logp, 0.0"),
    (2, "exp before the mask", "torch.where(mask.bool(), logp - old_logp.detach(), 0.0)",
     "logp - old_logp.detach()"),
    (2, "KL estimator k1", "return torch.exp(d) - d - 1", "return -d"),
    (2, "KL estimator k2", "return torch.exp(d) - d - 1", "return d**2 / 2"),
    (2, "k3 of the other direction", "d = ref_logp.detach() - logp",
     "d = logp - ref_logp.detach()"),
    (2, "reference with a gradient", "d = ref_logp.detach() - logp", "d = ref_logp - logp"),
    (3, "temperature forgotten in the score", ".T / temperature", ".T"),
    (3, "temperature forgotten in the gradient", "- expected) / temperature", "- expected)"),
    (3, "temperature forgotten in dW", "grad[rows, None] / ctx.temperature", "grad[rows, None]"),
    (3, "dW dropped", "if ctx.needs_input_grad[1]:", "if False:"),
    (3, "dW without the label's own term", "change[torch.arange(len(change)), labels[rows]] += 1",
     "pass"),
    (3, "dW accumulated in bfloat16", "total = torch.zeros(weight.shape, dtype=grad.dtype)",
     "total = torch.zeros_like(weight)"),
    (3, "logits in bfloat16", "hidden.to(wide) @ weight.to(wide).T",
     "(hidden @ weight.T).to(wide)"),
    (3, "labels shifted by one", "labels[rows, None])[:, 0] - torch.logsumexp",
     "labels.roll(1)[rows, None])[:, 0] - torch.logsumexp"),
    (3, "every chunk gets the first labels", "logs.gather(1, labels[rows, None])",
     "logs.gather(1, labels[:len(logs), None])"),
    (3, "exp without a maximum", "torch.logsumexp(z, dim=1)", "z.exp().sum(1).log()"),
    (3, "forward with a gradient", "@torch.no_grad()\ndef logprob_forward", "def logprob_forward"),
    (3, "all logits at once, forward", "parts = []\n", "parts, rows_per_chunk = [], len(hidden)\n"),
    (3, "all logits at once, with autograd",
     "return LogProb.apply(hidden, weight, labels, temperature, rows_per_chunk)",
     "return torch.log_softmax(chunk_logits(hidden, weight, temperature), 1).gather(1, "
     "labels[:, None])[:, 0]"),
    (3, "logits computed again in backward",
     "return LogProb.apply(hidden, weight, labels, temperature, rows_per_chunk)",
     "from torch.utils.checkpoint import checkpoint\n"
     "    def score(h, y):\n"
     "        return torch.log_softmax(chunk_logits(h, weight, temperature), 1).gather(1, y[:, "
     "None])[:, 0]\n"
     "    chunks = zip(hidden.split(rows_per_chunk), labels.split(rows_per_chunk))\n"
     "    return torch.cat([checkpoint(score, h, y, use_reentrant=False) for h, y in chunks])"),
    (3, "gradient ignores the loss", "(grad[:, None] * unit)", "unit"),
    (3, "label -100 accepted", "labels.min() < 0", "labels.min() < -100"),
    (3, "every chunk's probabilities kept for backward", "expected = logs.exp() @",
     "ctx.kept = getattr(ctx, 'kept', []) + [logs.exp()]\n            expected = ctx.kept[-1] @"),
    (4, "sign of Delta", "torch.sigmoid(beta * (teacher_logp - student_logp))",
     "torch.sigmoid(beta * (student_logp - teacher_logp))"),
    (4, "beta forgotten", "torch.sigmoid(beta * (", "torch.sigmoid(1.0 * ("),
    (4, "gate not detached", "torch.sigmoid(beta * (teacher_logp - student_logp)).detach()",
     "torch.sigmoid(beta * (teacher_logp - student_logp))"),
    (4, "gate as a threshold", "torch.sigmoid(beta * (teacher_logp - student_logp)).detach()",
     "(teacher_logp > student_logp).to(teacher_logp.dtype)"),
    (4, "gate left out of the loss", "gate * (teacher_logp - logp)", "teacher_logp - logp"),
    (4, "teacher with a gradient", "torch.where(mask.bool(), teacher_logp, 0.0).detach()",
     "torch.where(mask.bool(), teacher_logp, 0.0)"),
    (4, "loss pushes tokens down", "gate * (teacher_logp - logp)", "gate * (logp - teacher_logp)"),
    (4, "mean over all tokens", "masked_mean(gate * (teacher_logp - logp), mask)",
     "(gate * (teacher_logp - logp)).mean()"),
    (4, "mask shifted by one", "gate = confidence_gate",
     "mask = mask.roll(1, dims=1)\n    gate = confidence_gate"),
    (4, "gap through the gate only", "gate * (teacher_logp - logp)",
     "gate * (teacher_logp - logp.detach())"),
    (4, "masked by multiplication", "logp = torch.where(mask.bool(), logp, 0.0)",
     "logp = logp * mask"),
    (5, "trailing comma crashes the parser",
     r"""mended = re.sub(r",(\s*[}\]])(?=[^\"']*$)", r"\1", match[0])""", "mended = match[0]"),
    (5, "crashes on what is no JSON", "except ValueError:\n            try:",
     "except ZeroDivisionError:\n            try:"),
    (5, "only bare JSON", 'r"\\{[^{}]*\\}", answer)', 'r"^\\s*\\{[^{}]*\\}\\s*$", answer)'),
    (5, "Python dict refused", "value = ast.literal_eval(mended)", "continue"),
    (5, "reply is executed", "value = ast.literal_eval(mended)", "value = eval(mended)"),
    (5, "half a skill is salvaged", 'best = ""\n',
     """best = (re.findall(r'episode_skill": "(.+)$', answer) or [""])[-1]\n"""),
    (5, "falls back to the summary", 'value.get("episode_skill")',
     '(value.get("episode_skill") or value.get("episode_summary"))'),
    (5, "draft in the thinking block", 'text.rpartition("</think>")[2]', "text"),
    (5, "first object instead of the last", 'best = " ".join', 'best = best or " ".join'),
    (5, "any type as skill", "isinstance(skill, str) and skill.strip():",
     "skill:\n            skill = str(skill)"),
    (5, "line breaks kept", '" ".join(skill.split()[:60])', "skill.strip()"),
    (5, "no limit of words", "skill.split()[:60]", "skill.split()"),
    (5, "skill before the task line", "return ids[:cut] + block + ids[cut:]", "return block + ids"),
    (5, "skill right before the first sampled token", "def teacher_view(ids, sampled, cut, block):",
     "def teacher_view(ids, sampled, cut, block):\n    cut = sampled.index(True)"),
    (5, "mask not moved with the ids", "sampled[:cut] + [False] * len(block) + sampled[cut:]",
     "sampled + [False] * len(block)"),
    (5, "block counted as sampled", "[False] * len(block)", "[True] * len(block)"),
    (5, "block written into the student's list", "return ids[:cut]",
     "ids[cut:cut] = block\n    return ids[:cut]"),
    (6, "KL as a reward", "policy + kl_coef * kl", "policy - kl_coef * kl"),
    (6, "lambda forgotten", "lambda_opd * opd", "opd"),
    (6, "KL forgotten", "+ kl_coef * kl ", ""),
    (6, "OPD on episodes without a skill", "mask & has_skill[:, None]", "mask"),
    (6, "episodes without a skill lose their policy term",
     "policy_loss(logp, old_logp, advantages, mask, clip_range=clip_range)",
     "policy_loss(logp, old_logp, advantages, mask & has_skill[:, None], clip_range=clip_range)"),
    (6, "KL over all positions", "masked_mean(kl_k3(logp, ref_logp), mask)",
     "kl_k3(logp, ref_logp).mean()"),
    (6, "teacher and reference swapped", "opd_loss(logp, teacher_logp, mask &",
     "opd_loss(logp, ref_logp, mask &"),
    (6, "clip range not passed on", "advantages, mask, clip_range=clip_range)",
     "advantages, mask)"),
]
# fmt: on


@pytest.fixture(scope="module")
def answers():
    """The right answers, computed once."""
    answers = kit.Answers(None)
    yield answers
    answers.close()


@pytest.fixture(scope="module")
def shared():
    """One process for all solutions: a file is loaded anew for each call, so only the path has to
    change. Patient, as CI machines are busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "CALL_SECONDS", 60)
        worker = kit.Worker(PLAIN, seconds=3600)
        yield worker
        worker.close()


def failures(worker, answers, exercise: int | None = None) -> dict[str, str]:
    """Check -> message, of the checks (of one exercise) that a solution does not pass. Without the
    training run."""
    found = {}
    for check in exercises.CHECKS:
        if not check.trains and exercise in (None, check.exercise):
            try:
                check(worker, answers(check.name))
            except kit.Failed as failure:
                found[check.name] = str(failure)
    return found


def use(worker, path: Path) -> None:
    worker.path, worker.gone = path, {}


def test_points_add_up_to_100():
    assert sum(check.points for check in exercises.CHECKS) == 100
    order = [check.exercise for check in exercises.CHECKS]
    assert order == sorted(order)
    assert len({check.name for check in exercises.CHECKS}) == len(exercises.CHECKS)


def test_the_reference_passes(shared, answers, tmp_path):
    (tmp_path / "solution.py").write_text(kit.solution_file())
    use(shared, tmp_path / "solution.py")
    assert failures(shared, answers) == {}


def test_an_independent_answer_passes(shared, answers):
    use(shared, PLAIN)
    assert failures(shared, answers) == {}


def test_the_list_of_mutants_covers_every_exercise():
    assert len(MUTANTS) >= 25 and {exercise for exercise, *_ in MUTANTS} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    "exercise, name, old, new", MUTANTS, ids=[f"{e}: {name}" for e, name, *_ in MUTANTS]
)
def test_mutant_fails_on_its_exercise(shared, answers, tmp_path, exercise, name, old, new):
    source = PLAIN.read_text()
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in plain_solution.py"
    (tmp_path / "mutant.py").write_text(source.replace(old, new))
    use(shared, tmp_path / "mutant.py")
    found = failures(shared, answers)
    print(*(f"{check}: {message}\n" for check, message in found.items()))
    lost = {int(check[0]) for check in found}
    assert exercise in lost, f"the graders accept: {name}"
    assert lost <= {exercise} | BUILT_ON.get(exercise, set()), f"{name} also fails {lost}"
    # It must fail because the grader notices, and not because the edit broke the code.
    own = [message for check, message in found.items() if check[0] == str(exercise)]
    assert "crash" in name or any(" raised " not in message for message in own)


# plain_solution.py's later exercises use its earlier functions, as a student's do.
BUILT_ON = {2: {4, 6}, 4: {6}}


@pytest.mark.slow
def test_other_years_have_other_numbers(shared, monkeypatch):
    monkeypatch.setattr(exercises, "SEED", 2031)
    answers = kit.Answers(None)
    try:
        use(shared, PLAIN)
        assert failures(shared, answers) == {}
        first = answers.recorded["1-values 0"]
    finally:
        answers.close()
    monkeypatch.setattr(exercises, "SEED", 2032)
    assert exercises.draw(1, 0).uniform() != first["value"]["tensor"][0]
    other = kit.Answers(None)
    # Last year's answers do not pass this year.
    other.recorded = {"1-values 0": first}
    with pytest.raises(kit.Failed):
        exercises.values(shared, other("1-values"))


# -- submissions that misbehave --------------------------------------------------------------------
BAD = {
    "loops": ("def group_advantages(r, **k):\n    while True: pass", "did not come back"),
    "sleeps": ("import time\ndef group_advantages(r, **k): time.sleep(1000)", "did not come back"),
    "loops when loaded": ("while True: pass", "did not come back"),
    "ends the process": (
        "import os\ndef group_advantages(r, **k): os._exit(0)",
        "ended the Python process",
    ),
    "crashes the interpreter": (
        "import ctypes\ndef group_advantages(r, **k): ctypes.string_at(0)",
        "ended the Python process",
    ),
    "exits": ("raise SystemExit", "cannot be loaded: SystemExit"),
    "no Python": ("def group_advantages(r:\n", "cannot be loaded: SyntaxError"),
    "recursion": ("def group_advantages(r, **k): return group_advantages(r)", "RecursionError"),
    "takes all memory": ("def group_advantages(r, **k): return bytearray(1 << 40)", "MemoryError"),
    "prints without end": (
        "def group_advantages(r, **k):\n    while True: print('x' * 1000000)",
        "File too large",
    ),
    "forges a reply": (
        "import os\nprint('{\"value\": 1}')\nos.write(1, b'{\"value\": 1}')\n"
        "def group_advantages(r, **k): return input()",
        "EOFError",
    ),
    "imports the project": ("from losses import group_advantages", "No module named 'losses'"),
    "imports the solution": (
        "def group_advantages(r, **k):\n    import kit\n    return kit.solution_file()",
        "No module named 'kit'",
    ),
    "returns something else": (
        "def group_advantages(r, **k): return open",
        "should return a tensor",
    ),
    "returns too much": (
        "import torch\ndef group_advantages(r, **k): return torch.zeros(10**7)",
        "should return a tensor",
    ),
    "has no such function": ("x = 1", "there is no function group_advantages"),
    "raises": ("def group_advantages(r, **k):\n    return r.nothing", "line 2 of bad.py"),
    "is empty": (None, "NotImplementedError"),
}


WAITS = ("loops", "sleeps", "loops when loaded")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in WAITS)) for name in BAD]
)
def test_a_bad_submission_is_marked_and_not_fatal(shared, answers, tmp_path, monkeypatch, name):
    monkeypatch.setattr(kit, "CALL_SECONDS", 1)
    source, message = BAD[name]
    (tmp_path / "bad.py").write_text(kit.stub_file() if source is None else source)
    use(shared, tmp_path / "bad.py")
    with pytest.raises(kit.Failed, match=message):
        exercises.values(shared, answers("1-values"))
    # Whatever became of the process: the next one is graded.
    use(shared, PLAIN)
    exercises.only_centred(shared, answers("1-only_centred"))


def test_a_submission_leaves_no_process_behind(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import subprocess\n"
        "def group_advantages(r, **k): return subprocess.Popen(['sleep', '1000']).pid"
    )
    worker = kit.Worker(tmp_path / "bad.py")
    pid = worker("group_advantages", kit.tensor([[1.0, 2.0]])).value
    worker.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            stat = Path(f"/proc/{pid}/stat")
            # Dead, and not yet collected by init.
            if stat.exists() and stat.read_text().split(") ")[1][0] == "Z":
                raise ProcessLookupError
            time.sleep(0.05)


@pytest.mark.slow
def test_the_time_of_a_submission_is_bounded(tmp_path):
    (tmp_path / "bad.py").write_text("while True: pass")
    worker, start = kit.Worker(tmp_path / "bad.py", seconds=3), time.monotonic()
    for name in ("group_advantages", "masked_mean", "kl_k3"):
        with pytest.raises(kit.Failed, match="used up"):
            worker(name, kit.tensor([[1.0, 2.0]]))
    worker.close()
    assert time.monotonic() - start < 30


# -- hand-out and grading --------------------------------------------------------------------------
def run(*command, cwd, **env):
    outer = {k: v for k, v in os.environ.items() if not k.startswith("SEED_MINI_COURSE")}
    env = outer | {"PYTHONPATH": "", "SEED_MINI_COURSE_PATIENCE": "5"} | env
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def graders(*options, cwd=ROOT, **env):
    """The exercises' tests in a process of their own, quietly."""
    return run("-m", "pytest", "tests/assignment", "-q", *options, cwd=cwd, **env)


def definitions(source: str) -> dict:
    """Name -> node of the functions and classes at the top of a module."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: node for node in ast.parse(source).body if isinstance(node, kinds)}


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "seed_mini"
    done = run("tests/assignment/kit.py", "handout", folder, "--seed", 5, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_handout_holds_no_solution(handout):
    files = {p.relative_to(handout).as_posix() for p in handout.rglob("*") if p.is_file()}
    assert not files & {
        "notebooks/assignment.py",
        "tests/plain_solution.py",
        "tests/test_assignment_kit.py",
    }
    for module, graded in kit.GRADED.items():
        left = definitions((handout / module).read_text())
        for name in graded:
            *doc, last = left[name].body
            assert len(doc) == 1 and isinstance(last, ast.Raise), name
        gone = definitions((ROOT / module).read_text()).keys() - left.keys()
        assert all(name.startswith("_") for name in gone)
    text = "".join((handout / f).read_text() for f in files if f.endswith((".py", ".ipynb")))
    original = "".join((ROOT / m).read_text() for m in kit.GRADED)
    for solution in (
        "_ChunkedLogProb",
        "expm1(d)",
        "torch.sigmoid(beta",
        "roll.ids[:roll.cut] + block",
        "raw_decode(",
        "/ (std + eps) if",
    ):
        assert solution in original and solution not in text, solution
    assert kit.tables()["ANSWERS"][1][:40] not in text


@pytest.mark.slow
def test_a_handouts_modules_are_the_project_otherwise(handout):
    for file in ("envs.py", "policy.py", "runs.py", *(ROOT / "environments").glob("*.py")):
        name = (ROOT / file).relative_to(ROOT)
        assert (handout / name).read_text() == (ROOT / name).read_text()
    code = (
        "import seed_mini, envs, skills; print(skills.skill_block('x'), envs.wilson(1, 2)); "
        "print(envs.find('alfworld').file); import losses; losses.kl_k3(0, 0)"
    )
    done = run("-c", code, cwd=handout)
    assert str((handout / "environments" / "alfworld.py").resolve()) in done.stdout
    assert "Skill to follow: x" in done.stdout and "NotImplementedError" in done.stderr


@pytest.mark.slow
def test_a_handout_grades_by_recorded_answers(handout, tmp_path):
    untrained = ("-k", "not training")
    done = graders(*untrained, f"--junitxml={tmp_path / 'marks.xml'}", cwd=handout)
    assert "total:        0 of 95" in done.stdout, done.stdout[-2000:]
    assert '<property name="points" value="4"' in (tmp_path / "marks.xml").read_text()
    done = graders(*untrained, cwd=handout, SEED_MINI_SOLUTION=str(PLAIN))
    assert done.returncode == 0 and "total:       95 of 95" in done.stdout, done.stdout[-2000:]
    answers = json.loads((handout / "tests" / "assignment" / "answers.json").read_text())
    assert answers["seed"] == 5
    done = graders(cwd=handout, SEED_MINI_COURSE_SEED="6")
    assert "the recorded answers are for seed 5" in done.stdout + done.stderr


def test_without_a_solution_the_exercises_are_skipped(tmp_path):
    done = graders("-p", "no:cacheprovider", SEED_MINI_SOLUTION=str(tmp_path / "none.py"))
    assert done.returncode == 0 and "kit.py start" in done.stdout and "failed" not in done.stdout


def test_start_never_overwrites(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "STUDENT", tmp_path / "my_solution.py")
    kit.start()
    stubs = definitions((tmp_path / "my_solution.py").read_text())
    assert set(stubs) == set(kit.tables()["SOLUTION"])
    with pytest.raises(ValueError, match="already there"):
        kit.start()


@pytest.mark.slow
def test_the_reference_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "TRAIN_SECONDS", 600)
    (tmp_path / "solution.py").write_text(kit.solution_file())
    worker = kit.Worker(tmp_path / "solution.py", seconds=3600)
    try:
        exercises.training(worker, None)
    finally:
        worker.close()


@pytest.mark.slow
def test_a_folder_of_submissions_becomes_a_table(tmp_path):
    folder = tmp_path / "submissions"
    for name, source in {
        "ada": PLAIN.read_text(),
        "bob": kit.stub_file(),
        "cleo": BAD["ends the process"][0],
        "dan": BAD["loops when loaded"][0],
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "my_solution.py").write_text(source)
    (folder / "eve").mkdir()
    # The first two exercises only.
    (folder / "finn.py").write_text(PLAIN.read_text().partition("# -- 3")[0])
    done = run("tests/assignment/kit.py", "grade", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("| ")
    }
    assert rows["ada"][:7] == ["10", "20", "30", "15", "15", "10", "100"]
    assert rows["finn"][:7] == ["10", "20", "0", "0", "0", "0", "30"]
    assert {rows[name][6] for name in ("bob", "cleo", "dan", "eve")} == {"0"}
    assert "ended the Python process" in rows["cleo"][7] and "no my_solution.py" in rows["eve"][7]


@pytest.mark.slow
def test_a_policy_that_learns_the_wrong_way_fails_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "TRAIN_SECONDS", 600)
    loss = "policy + kl_coef * kl + lambda_opd * opd"
    (tmp_path / "mutant.py").write_text(PLAIN.read_text().replace(loss, f"-({loss})"))
    worker = kit.Worker(tmp_path / "mutant.py", seconds=3600)
    try:
        with pytest.raises(kit.Failed, match="does not come closer|not win more|not finite"):
            exercises.training(worker, None)
    finally:
        worker.close()
