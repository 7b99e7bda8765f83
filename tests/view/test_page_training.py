"""The page of a real training run: what it kept of its tokens is what is shown."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.view import RunView, export
from rollgym.view.episode_detail import EpisodeDetails

pytest.importorskip("torch")

SETTINGS = ["stop.steps=2", "warm_start.episodes=20", "evaluation.episodes=10", "tracking.tensorboard=false"]


@pytest.mark.slow
def test_a_trained_run_is_shown_with_its_tokens(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    command = [sys.executable, "-m", "rollgym", "train", "bandit-grpo", *SETTINGS, "--out", tmp_path / "run"]
    subprocess.run(command, check=True, capture_output=True)
    run = RunView(tmp_path / "run")
    run.follow(final=True)
    bodies = EpisodeDetails(run)
    for line in run.metrics:  # what is worked out again is what the run had
        step = [bodies.body(n)["values"]["advantages"] for n in run.by_step[line["step"]]]
        assert max(abs(a) for one in step for a in one) == pytest.approx(line["advantage_abs_max"])
        tokens = [a for one in step for a in one]
        assert sum(tokens) / len(tokens) == pytest.approx(line["advantage_mean"], abs=1e-9)
    body = bodies.body(0)
    page = open_page(export(tmp_path / "run", tmp_path / "page.html").path)
    page.wait_for_selector(".hero")
    assert "success on held-out tasks by 2 steps" in page.inner_text(".hero")
    assert page.locator("svg.chart").count() >= 10
    page.click("nav.main >> text=Episodes")
    page.click(".rows .row >> nth=0")
    page.click(".tabs >> text=Tokens")
    page.wait_for_selector(".token.own")
    turns = body["turns"]
    assert page.locator(".token").count() == sum(len(t["prompt_ids"]) + len(t["action_ids"]) for t in turns)
    assert page.locator(".token.own").count() == sum(len(t["action_ids"]) for t in turns)
    assert len(body["values"]["advantages"]) == page.locator(".token.own").count()
    assert body["texts"], "the run has a tokenizer of its own"
    page.click("nav.main >> text=Timeline")
    page.wait_for_selector("canvas.lanes")
