"""The demo with its report page, and the learning curve."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from rich.console import Console

from docs.images.learning_curve import learning_curve

ROOT = Path(__file__).parents[2]
SMALL = (
    "warm_start.episodes=8", "warm_start.epochs=1", "warm_start.validation_episodes=4", "rollout.groups=2",
    "rollout.group_size=2", "evaluation.episodes=4", "stop.steps=1", "tracking.tensorboard=false",
)  # fmt: skip


def test_the_demo_ends_with_results_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    import demo

    demo.main([*SMALL, "--plain"], Console(width=100))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for phase in ("before", "warm_start", "after", "random", "expert"):
        assert 0 <= result[phase]["low"] <= result[phase]["success"] <= result[phase]["high"] <= 1
    assert result["expert"]["success"] == 1.0
    assert result["seconds"] > 0
    page = (tmp_path / result["run"] / "report.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", ""), "the page loads nothing"


def test_a_curve_shows_each_evaluation_and_escapes_names() -> None:
    lines = [
        {"step": step, "phase": "training", "success_rate": rate, "success_ci": [rate - 0.1, rate + 0.1]}
        for step, rate in ((0, 0.2), (10, 0.7))
    ]
    picture = learning_curve({"<one> & two": lines, "none": [{"step": 5, "success_rate": None}]}, "a < b")
    tree = ElementTree.fromstring(picture)
    circles = tree.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2
    assert float(circles[1].attrib["cy"]) < float(circles[0].attrib["cy"]), "better is higher"
    assert "<one>" not in picture
