"""The live page's /metrics: the newest numbers in the text format of Prometheus."""

import json
import re
from pathlib import Path

import pytest

from rollgym.view.prometheus import metrics_text
from rollgym.view.reader import RunView

SAMPLE = re.compile(
    r'[a-zA-Z_][a-zA-Z0-9_]*(\{[a-z_]+="(\\.|[^"\\\n])*"(,[a-z_]+="(\\.|[^"\\\n])*")*\})? \S+'
)


def make_run(folder: Path, name: str = "run") -> Path:
    run = folder / name
    run.mkdir()
    (run / "manifest.json").write_text(json.dumps({"schema": 1, "kind": "train", "name": "x", "envs": []}))
    (run / "episodes.jsonl").write_text("")
    (run / "config.yaml").write_text("")
    steps = [
        {"step": n, "time": 1.0, "loss": n / 4, "grad/norm": 2.0, "not_finite": ["kl"], "kl": None}
        for n in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    evaluations = [
        {"step": 2, "env": env, "success_rate": 0.5, "length": {"p50": 3}} for env in ("a/B-v0", "c/D-v0")
    ]
    (run / "evaluations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in evaluations))
    return run


def test_the_newest_numbers_are_gauges(tmp_path: Path) -> None:
    view = RunView(make_run(tmp_path))
    view.follow()
    lines = metrics_text(view).splitlines()
    assert 'rollgym_train_loss{run="run"} 0.5' in lines
    assert 'rollgym_train_step{run="run"} 2.0' in lines
    assert 'rollgym_train_grad_norm{run="run"} 2.0' in lines
    assert 'rollgym_eval_success_rate{run="run",env="a/B-v0"} 0.5' in lines
    assert 'rollgym_eval_length_p50{run="run",env="c/D-v0"} 3.0' in lines
    assert not any("kl" in line or "time" in line for line in lines)
    assert lines.count("# TYPE rollgym_eval_success_rate gauge") == 1
    assert all(line.startswith("# TYPE ") or SAMPLE.fullmatch(line) for line in lines)


def test_labels_are_escaped(tmp_path: Path) -> None:
    view = RunView(make_run(tmp_path, 'a"b\\c\nd'))
    view.follow()
    lines = metrics_text(view).splitlines()
    assert all(line.startswith("# TYPE ") or SAMPLE.fullmatch(line) for line in lines)


def test_the_live_page_serves_them(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    from rollgym.view.live import make_app

    client = TestClient(make_app(make_run(tmp_path)), base_url="http://127.0.0.1")
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.headers["cache-control"] == "no-store"
    assert "rollgym_train_loss" in answer.text
    assert client.get("/metrics", headers={"host": "evil.example"}).status_code == 400
