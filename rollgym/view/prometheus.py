"""The newest numbers of a run in the text format of Prometheus, for the live page's ``/metrics``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rollgym.evaluation.run_results import flatten
from rollgym.view.reader import RunView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")
_LEFT_OUT = ("time", "not_finite")


def metrics_text(run: RunView) -> str:
    """All numbers of the last training step and of each environment's last evaluation, as gauges.

    The labels hold the name of the run and of environments; no other text of the run is shown.
    """
    labels = {"run": run.folder.resolve().name}
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    _add(samples, "rollgym_episodes", labels, len(run.rows))
    _add(samples, "rollgym_finished", labels, float(run.summary is not None))
    if run.metrics:
        for name, value in _numbers(run.metrics[-1]):
            _add(samples, f"rollgym_train_{name}", labels, value)
    newest: dict[str, dict[str, Any]] = {}
    for line in run.evaluations:
        newest[str(line.get("env") or "")] = line
    for env, line in newest.items():
        for name, value in _numbers(line):
            _add(samples, f"rollgym_eval_{name}", {**labels, "env": env}, value)
    lines: list[str] = []
    for name, values in samples.items():
        lines.append(f"# TYPE {name} gauge")
        lines += [f"{name}{_labels(own)} {_number(value)}" for own, value in values]
    return "\n".join([*lines, ""])


def _add(
    samples: dict[str, list[tuple[dict[str, str], float]]], name: str, labels: dict[str, str], value: float
) -> None:
    samples.setdefault(_NOT_IN_NAMES.sub("_", name), []).append((labels, value))


def _numbers(line: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in flatten(line).items():
        if name not in _LEFT_OUT and isinstance(value, (int, float)):
            yield name, float(value)


def _labels(labels: Mapping[str, str]) -> str:
    """Labels with the escapes of the format."""
    pairs = []
    for name, value in labels.items():
        text = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        pairs.append(f'{name}="{text}"')
    return "{" + ",".join(pairs) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
