"""A page about a training run: one HTML file that opens from disk, without a network."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from rollgym.store import MANIFEST, read_json
from rollgym.trainer.journal import read_evaluations, read_metrics
from rollgym.trainer.picture import learning_curve

PAGE = "report.html"
_SHOWN = (
    "success", "return", "length", "entropy", "approx_kl", "logprob_gap_max", "grad_norm",
    "tokens_per_second", "seconds",
)  # fmt: skip
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:820px;margin:2em auto;padding:0 1em;color:#1e293b}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #e2e8f0}"
    "td:first-child,th:first-child{text-align:left}pre{background:#f8fafc;padding:1em;overflow:auto}"
)


def write_report(folder: Path) -> Path:
    """Write the page into the run's folder. Everything in it that a model or user wrote is escaped."""
    manifest = read_json(folder / MANIFEST)
    evaluations = read_evaluations(folder)
    by_env: dict[str, list[dict[str, Any]]] = {}
    for line in evaluations:
        by_env.setdefault(line["env"], []).append(line)
    body = [
        f"<h1>{escape(manifest['name'])}</h1>",
        learning_curve(by_env, "success on held-out tasks, 95 % intervals"),
        _table(["when", "step", "environment", "success", "interval", "return"], map(_row, evaluations)),
        "<h2>Training steps</h2>",
        _steps(read_metrics(folder)),
        "<h2>Settings</h2>",
        f"<pre>{escape((folder / 'config.yaml').read_text(encoding='utf-8'))}</pre>",
        "<h2>Versions</h2>",
        f"<pre>{escape(json.dumps(manifest['versions'], indent=2))}</pre>",
    ]
    page = folder / PAGE
    page.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(manifest["name"])}</title>'
        f"<style>{_STYLE}</style>{''.join(body)}</html>\n",
        encoding="utf-8",
    )
    return page


def _row(line: dict[str, Any]) -> list[str]:
    rate, interval = line["success_rate"], line["success_ci"]
    return [
        line["phase"].replace("_", " "),
        str(line["step"]),
        line["env"],
        "" if rate is None else f"{rate:.3f}",
        "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        f"{line['mean_return']:.2f}",
    ]


def _steps(lines: list[dict[str, Any]]) -> str:
    """Up to forty steps, evenly chosen."""
    every = max(1, len(lines) // 40)
    names = [name for name in _SHOWN if any(line.get(name) is not None for line in lines)]
    rows = [
        [str(line["step"]), *("" if line.get(name) is None else f"{line[name]:.4g}" for name in names)]
        for line in lines[::every]
    ]
    return _table(["step", *names], rows)


def _table(head: list[str], rows: Any) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines}</table>"
