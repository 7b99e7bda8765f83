"""A small custom suite, and results of it to inspect and to corrupt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.bench.run import SuiteRun
from rollgym.bench.suite import AgentSpec, read_suite

SUITE = """\
schema = 1
name = "little"
version = 3
summary = "two entries that count"
seed = 5

[[entries]]
name = "alone"
env = "faulty:Counting"
tasks = 6
success = "the episode reports success"

[[entries]]
name = "twice"
env = "faulty:Counting"
split = "dev"
tasks = 3
samples = 2
max_turns = 10
"""


@pytest.fixture
def rollgym_command(rollgym_command: Callable[..., Any]) -> Callable[..., Any]:
    """Suites here have environments of the module faulty, which a command must name before it is imported."""

    def run(*words: object) -> Any:
        named = ("--env-module", "faulty") if words[:2] in (("bench", "run"), ("bench", "verify")) else ()
        return rollgym_command(*words, *named)

    return run


def write_suite(folder: Path, text: str = SUITE) -> Path:
    path = folder / "little.toml"
    path.write_text(text)
    return path


def play(folder: Path, agent: str, text: str = SUITE, **more: Any) -> Path:
    """Play a suite into ``folder/AGENT``."""
    suite = read_suite(write_suite(folder, text))
    out = folder / agent.replace(":", "-")
    SuiteRun(suite, AgentSpec(agent=agent, options={}, modules=("faulty",)), out, **more).run()
    return out


@pytest.fixture
def suite_path(tmp_path: Path) -> Path:
    return write_suite(tmp_path)


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results that no test may change."""
    return play(tmp_path_factory.mktemp("played"), "random")


@pytest.fixture
def results(played: Path, tmp_path: Path) -> Path:
    """Results that a test may spoil."""
    return Path(shutil.copytree(played, tmp_path / "results"))


@pytest.fixture
def spoil(results: Path) -> Callable[..., None]:
    """Change one episode's line (the n-th of an entry), to forge a better result."""

    def change(work: Callable[[dict[str, Any]], Any], entry: str = "alone", number: int = 0) -> None:
        path = results / "entries" / entry / "episodes.jsonl"
        lines = path.read_text().splitlines()
        episode = json.loads(lines[number])
        work(episode)
        lines[number] = json.dumps(episode)
        path.write_text("\n".join(lines) + "\n")

    return change


@pytest.fixture
def forge(results: Path) -> Callable[[], None]:
    """Make every number and hash follow from the episodes again, as a careful forger would."""

    def work() -> None:
        from rollgym.bench.results import read_results_manifest, recorded_suite
        from rollgym.bench.summary import markdown, suite_summary
        from rollgym.evaluation.metrics import summarize
        from rollgym.io.run_dir import read_run, write_json

        manifest = read_results_manifest(results)
        suite = recorded_suite(manifest, results)
        parts = []
        for name in manifest["entries"]:
            folder = results / "entries" / name
            told, episodes = read_run(folder)
            write_json(folder / "summary.json", summarize(told, episodes))
            parts.append((suite.entry(name), told, episodes))
        summary = suite_summary(suite, manifest, parts, results)
        write_json(results / "summary.json", summary)
        (results / "report.md").write_text(markdown(summary))

    return work
