"""Writes tasks as task folders in the form of Harbor (``rollgym export harbor``)."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_choice
from rollgym.envs.code import compare
from rollgym.envs.code import harness as code_harness
from rollgym.envs.code.loaders import load_problems
from rollgym.envs.code.problems import Generated as GeneratedProblems
from rollgym.envs.code.types import Cases, Problem
from rollgym.envs.terminal import code_check, untrusted
from rollgym.envs.terminal.generate import KINDS, Generated
from rollgym.envs.terminal.shell import ROOT, harness_source
from rollgym.envs.terminal.types import TerminalTask, Tree
from rollgym.sandbox import worker_confinement

IMAGE = "python:3.12"
"""Base image of exported tasks: it has Python, git and the usual tools."""
TERMINAL_DATA, CODE_DATA = "checks.json", "tests.json"
"""What the tests of a task expect, in their folder."""
TERMINAL_COMMAND = f"python3 -I /tests/check.py {ROOT} /tests/{TERMINAL_DATA}"
CODE_COMMAND = f"python3 /tests/check.py {ROOT}/solution.py /tests/{CODE_DATA}"
MAIN = '\n\nif __name__ == "__main__":\n    sys.exit(main())\n'

_TEST = """\
#!/bin/bash
# Checks what the agent left and writes the reward.
mkdir -p /logs/verifier
reward=0
if {command}; then
  reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
"""
_TOML = """\
version = "1.0"

[task]
name = {name}
description = {summary}
keywords = {keywords}

[metadata]
source = {source}
split = {split}
index = {index}
category = {category}
difficulty = {difficulty}

[agent]
timeout_sec = {agent_seconds}

[verifier]
timeout_sec = {verifier_seconds}

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 4096
allow_internet = false
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """Content of a task folder, besides its settings."""

    instruction: str
    category: str
    level: int
    dockerfile: str
    workspace: Tree | None
    tests: Mapping[str, str]
    test_command: str
    solution: str | None
    keywords: tuple[str, ...] = field(default=("terminal",))


def _terminal_files(task: TerminalTask, image: str) -> TaskFiles:
    commands = "\n".join(KINDS[task.kind].solve(task.parameters))
    checks = [check.to_json() for check in task.checks]
    return TaskFiles(
        instruction=f"{task.instruction}\n\nThe working folder is {ROOT}.\n",
        category=task.family,
        level=task.level,
        dockerfile=f"FROM {image}\nWORKDIR {ROOT}\nADD workspace.tar {ROOT}/\n",
        workspace=task.tree,
        tests={**_terminal_programs(), TERMINAL_DATA: json.dumps(checks, indent=1)},
        test_command=TERMINAL_COMMAND,
        solution=f"#!/bin/bash\ncd {ROOT}\n{commands}\n",
        keywords=("terminal", task.family, task.kind),
    )


def _code_files(problem: Problem, image: str) -> TaskFiles:
    hidden = problem.hidden
    tests: dict[str, Any] = {"name": problem.name, "prelude": problem.prelude}
    if isinstance(hidden, Cases):
        tests["cases"] = [asdict(case) for case in hidden.cases]
    else:
        tests |= {"tests": list(hidden.tests), "setup": hidden.setup}
    lines = [f"Write the Python function {problem.signature} to the file solution.py in {ROOT}."]
    lines.append(problem.statement)
    if problem.shown:
        lines += ["", "Examples:", "", *(f"    {line}" for line in problem.shown)]
    lines += ["", "Hidden tests call the function. The file must work by itself."]
    solution = None
    if problem.solution is not None:
        program = f"{problem.solution.rstrip()}\n"
        solution = f"#!/bin/bash\ncat > {ROOT}/solution.py <<'END_OF_FILE'\n{program}END_OF_FILE\n"
    return TaskFiles(
        instruction="\n".join(lines) + "\n",
        category="code",
        level=problem.level,
        dockerfile=f"FROM {image}\nWORKDIR {ROOT}\n",
        workspace=None,
        tests={**_code_programs(), CODE_DATA: json.dumps(tests, indent=1)},
        test_command=CODE_COMMAND,
        solution=solution,
        keywords=("code", "python", *([problem.family] if problem.family else [])),
    )


def _terminal_programs() -> dict[str, str]:
    """Return the programs of the tests of a terminal task."""
    return {"check.py": harness_source() + MAIN, **_untrusted_files()}


def _code_programs() -> dict[str, str]:
    """Return the programs of the tests of a code task."""
    check = _source(code_check).replace("from rollgym.envs.code import compare", "import compare") + MAIN
    return {
        "check.py": check,
        "compare.py": _source(compare).replace(
            "from rollgym.envs.code.harness import", "from harness import"
        ),
        "harness.py": _source(code_harness),
        **_untrusted_files(),
    }


def has_exported_tests(tests: Tree) -> bool:
    """Return whether all programs among a task's tests are those that this version exports.

    They run programs of the agent without the right to write the reward, where Landlock is available.
    """
    for programs, data, command in (
        (_terminal_programs(), TERMINAL_DATA, TERMINAL_COMMAND),
        (_code_programs(), CODE_DATA, CODE_COMMAND),
    ):
        expected = {**programs, "test.sh": _TEST.format(command=command)}
        if set(tests) == {*expected, data} and all(
            tests[name]["content"] == text.encode() for name, text in expected.items()
        ):
            return True
    return False


def _untrusted_files() -> dict[str, str]:
    """Return the program that gives up rights, and its module."""
    package = "from rollgym.sandbox.worker_confinement import"
    return {
        "untrusted.py": _source(untrusted).replace(package, "from worker_confinement import") + MAIN,
        "worker_confinement.py": _source(worker_confinement),
    }


def _source(module: Any) -> str:
    return Path(module.__file__).read_text(encoding="utf-8")


def _terminal_source(families: list[str] | None = None, level: int | None = None) -> Any:
    generated = Generated(families, level)
    return generated.tasks, lambda task, image: _terminal_files(generated.load(task), image)


def _code_source(
    problems: str = "generated", form: str = "auto", difficulty: int | None = None, family: str | None = None
) -> Any:
    source = (
        GeneratedProblems(difficulty, family) if problems == "generated" else load_problems(problems, form)
    )
    return source.tasks, lambda task, image: _code_files(source.problem(task), image)


SOURCES: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "rollgym/Terminal-v0": (_terminal_source, ("families", "level")),
    "rollgym/Code-v0": (_code_source, ("problems", "form", "difficulty", "family")),
}
"""For each environment: its tasks, and the arguments that choose them."""


def export_tasks(
    env_id: str,
    out: Path,
    *,
    split: str = "test",
    count: int = 10,
    start: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    image: str = IMAGE,
) -> list[Path]:
    """Write tasks of an environment as task folders; return them.

    Args:
        env_id: ``rollgym/Terminal-v0`` or ``rollgym/Code-v0``.
        out: A new or empty folder.
        split: Split of the tasks.
        count: Number of tasks.
        start: Index of the first one.
        env_kwargs: Arguments of the environment that choose its tasks.
        image: Base image of the Dockerfiles, with bash, Python 3.10 or later, and git.
    """
    check_choice("environment to export", env_id, list(SOURCES))
    make, known = SOURCES[env_id]
    for name in env_kwargs or {}:
        check_choice(f"argument of {env_id} that chooses tasks", name, known)
    if count < 1 or start < 0:
        raise UsageError(f"count must be 1 or more and start 0 or more, not {count} and {start}.")
    tasks: TaskSet
    tasks, files_of = make(**(env_kwargs or {}))
    chosen = [tasks.task(split, index) for index in range(start, start + count)]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not an empty folder: name another one with --out.")
    slug = env_id.partition("/")[2].partition("-")[0].lower()
    return [
        _write_task(out / f"{slug}-{split}-{task.index:05d}", env_id, task, files_of(task, image))
        for task in chosen
    ]


def _write_task(folder: Path, env_id: str, task: Task, files: TaskFiles) -> Path:
    difficulty = {1: "easy", 2: "medium", 3: "hard"}.get(files.level, "medium")
    settings = {
        "name": f"rollgym/{folder.name}",
        "summary": files.instruction.splitlines()[0][:200],
        "keywords": list(files.keywords),
        "source": env_id,
        "split": task.split,
        "index": task.index,
        "category": files.category,
        "difficulty": difficulty,
        "agent_seconds": 600.0,
        "verifier_seconds": 120.0,
    }
    _write(
        folder / "task.toml", _TOML.format(**{name: json.dumps(value) for name, value in settings.items()})
    )
    _write(folder / "instruction.md", files.instruction)
    _write(folder / "environment" / "Dockerfile", files.dockerfile)
    if files.workspace is not None:
        (folder / "environment" / "workspace.tar").write_bytes(_tar(files.workspace))
    for name, text in files.tests.items():
        _write(folder / "tests" / name, text)
    _write(folder / "tests" / "test.sh", _TEST.format(command=files.test_command), mode=0o755)
    if files.solution is not None:
        _write(folder / "solution" / "solve.sh", files.solution, mode=0o755)
    return folder


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _tar(tree: Tree) -> bytes:
    """Return a tree as an archive, with permissions and times."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, entry in sorted(tree.items()):
            member = tarfile.TarInfo(path)
            member.mode, member.mtime = entry["mode"], entry["mtime"]
            if entry["kind"] == "folder":
                member.type = tarfile.DIRTYPE
            elif entry["kind"] == "link":
                member.type, member.linkname = tarfile.SYMTYPE, entry["target"]
            member.size = len(entry["content"])
            archive.addfile(member, io.BytesIO(entry["content"]))
    return buffer.getvalue()
