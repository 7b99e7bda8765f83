"""Data of the first page as one JSON-able object."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rollgym.core.serialization import clean_text
from rollgym.core.types import Outcome
from rollgym.evaluation.stats import bootstrap_mean, percentiles, success_interval
from rollgym.view.page import bounded, bounded_text
from rollgym.view.reader import Row, RunView

LARGEST = 1e15
"""Largest plotted magnitude; larger numbers are invalid and break the arithmetic of curves."""
MOST_EVALUATIONS = 5_000
MOST_PARTS = 40
"""Maximum parts of a step's time split and of pass@k, and maximum domains with a chart."""
MOST_ENVIRONMENTS = 200
POINTS = 500
"""Points of a curve; longer runs are averaged over neighboring steps."""
TRAINING = ("train", "sft", "dpo")
"""Kinds of runs that train a policy."""
CURVES = (
    ("loss", "Training loss", "nats per learned token; of DPO, per pair"),
    ("validation_loss", "Validation loss", "nats per learned token; of DPO, per pair"),
    ("preference_accuracy", "Preference accuracy", "share of pairs"),
    ("validation_preference_accuracy", "Validation preference accuracy", "share of pairs"),
    ("reward_margin", "Reward margin", "chosen minus rejected"),
    ("reward_chosen", "Reward of chosen", "beta times the log-ratio to the reference"),
    ("reward_rejected", "Reward of rejected", "beta times the log-ratio to the reference"),
    ("success", "Success in training", "share of the step's episodes"),
    ("return", "Return", "mean of the step's episodes"),
    ("length", "Episode length", "turns"),
    ("entropy", "Entropy", "nats per token"),
    ("approx_kl", "KL of the update", "nats per token, to the previous policy"),
    ("teacher_kl", "KL to the teachers", "nats per token, at sampled tokens"),
    ("clip", "Clip fraction", "share of tokens"),
    ("train_rollout_logprob_diff_max", "Log-prob difference", "learner vs. engine, maximum"),
    ("staleness", "Staleness", "updates behind, mean over tokens"),
    ("turns_discarded_frac", "Turns discarded", "share of turns played"),
    ("masked_token_frac", "Masked tokens", "share of tokens, older than the bound"),
    ("grad_norm", "Gradient norm", ""),
    ("valid_actions", "Valid actions", "share of turns"),
    ("tokens_per_second", "Throughput", "tokens per second"),
)
"""Metrics with their own chart: name, title, unit."""
_CLIPPED = ("clipped_low", "clipped_high")
_SPLIT = "seconds_"
_DOMAIN = "success/"


def overview(run: RunView, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data of the first page."""
    manifest, training = run.manifest, run.manifest.get("kind") in TRAINING
    summary = run.summary
    return {
        "kind": _text(manifest.get("kind")) or "run",
        "name": run.folder.resolve().name,
        "command": _text(manifest.get("command")),
        "created": _text(manifest.get("created")),
        "state": _state(summary),
        "about": _about(manifest),
        "headline": _trained(run) if training else _evaluated(run),
        "totals": describe(run.rows),
        "evaluations": [_evaluation(line) for line in run.evaluations[:MOST_EVALUATIONS]],
        "curves": curves(run.metrics),
        "split": time_split(run.metrics),
        "outcomes": outcomes(run.rows),
        "envs": _environments(run.rows),
        "failures": failures(run.rows),
        "suite": _suite(run.manifest, summary),
        "notes": [*notes, *_notes(run, summary)],
        "suspect": bool(_warnings(summary)),
        "config": run.config,
        "manifest": _text(json.dumps(manifest, indent=2, ensure_ascii=False)),
        "versions": {_text(k): _text(v) for k, v in _object(manifest.get("versions")).items()},
        "pass_at_k": _numbers((summary or {}).get("pass_at_k")),
        "success_means": _text(manifest.get("success_means")),
        "version": run.version,
        "epoch": run.epoch,
        "episodes": len(run.rows),
    }


def curves(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of a training run."""
    charts = []
    domains = sorted({key for line in metrics for key in line if key.startswith(_DOMAIN)})[:MOST_PARTS]
    share = "share of the step's episodes"
    own = [(key, f"Success in training: {_text(key.removeprefix(_DOMAIN))}", share) for key in domains]
    for name, title, unit in (*CURVES, *own):
        points = thin([(_number(line.get("step")), _value(line, name)) for line in metrics])
        if points:
            charts.append({"name": name, "title": title, "unit": unit, "points": points})
    return charts


def time_split(metrics: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the time split of the training steps."""
    names = sorted({key for line in metrics for key in line if key.startswith(_SPLIT)})[:MOST_PARTS]
    if not names:
        return None
    parts = {
        name.removeprefix(_SPLIT): thin(
            [(_number(line.get("step")), _number(line.get(name)) or 0.0) for line in metrics]
        )
        for name in names
    }
    return {"title": "Seconds per step", "unit": "seconds", "parts": parts}


def thin(points: Sequence[tuple[float | None, float | None]], most: int = POINTS) -> list[list[float]]:
    """Average neighboring points down to a maximum count; non-numbers are omitted."""
    numbers = [(x, y) for x, y in points if x is not None and y is not None]
    every = max(1, math.ceil(len(numbers) / most))
    parts = [numbers[i : i + every] for i in range(0, len(numbers), every)]
    return [[part[-1][0] if every > 1 else part[0][0], sum(y for _, y in part) / len(part)] for part in parts]


def _trained(run: RunView) -> dict[str, Any]:
    """Return first and last held-out success per environment, the first environment first."""
    by_env: dict[str, list[dict[str, Any]]] = {}
    for line in map(_evaluation, run.evaluations):
        if line["success"] is not None:
            by_env.setdefault(line["env"], []).append(line)
    trained = [
        {"env": env, "first": lines[0], "taught": _taught(lines), "last": lines[-1]}
        for env, lines in by_env.items()
    ]
    steps = [_number(line.get("step")) for line in run.metrics]
    return {
        "trained": trained[:MOST_ENVIRONMENTS],
        "steps": max((s for s in steps if s is not None), default=0),
    }


def _taught(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the evaluation after the warm start, which separates imitation from RL."""
    return next((line for line in lines[1:] if line["phase"] == "warm start"), None)


def _evaluated(run: RunView) -> dict[str, Any]:
    agent = _object(run.manifest.get("agent"))
    return {"agent": _text(agent.get("name")), "requested": _number(run.manifest.get("episodes"))}


def _evaluation(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": _number(line.get("step")) or 0,
        "phase": _text(line.get("phase")).replace("_", " "),
        "env": _text(line.get("env")),
        "success": _interval(line.get("success_rate"), line.get("success_ci")),
        "return": _interval(line.get("mean_return"), line.get("return_ci")),
        "episodes": _number(line.get("episodes")),
        "failed": _number(line.get("failed")) or 0,
        "excluded": _number(line.get("excluded")) or 0,
        "length": _number(_object(line.get("length")).get("mean")),
        "valid": _number(line.get("valid_actions")),
        "suspect": bool(_warnings(line)),
    }


def _environments(rows: Sequence[Row]) -> list[dict[str, Any]]:
    by_env: dict[str, list[Row]] = {}
    for row in rows:
        by_env.setdefault(row.entry or row.env, []).append(row)
    return [{"env": env, **describe(some)} for env, some in list(by_env.items())[:MOST_ENVIRONMENTS]]


def _suite(manifest: dict[str, Any], summary: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a suite's entries compared with its golden scores, from its summary."""
    if manifest.get("kind") != "bench":
        return None
    suite, entries = _object(manifest.get("suite")), (summary or {}).get("entries")
    rows = [_object(entry) for entry in entries[:MOST_ENVIRONMENTS]] if isinstance(entries, list) else []
    return {
        "name": f"{_text(suite.get('name'))} {_text(suite.get('version'))}".strip(),
        "success": _interval((summary or {}).get("success"), (summary or {}).get("success_ci")),
        "entries": [
            {
                "name": _text(entry.get("name")),
                "success": _interval(entry.get("success"), entry.get("success_ci")),
                "score": _interval(entry.get("score"), entry.get("score_ci")),
                "golden": bounded(_object(entry.get("golden"))) or None,
            }
            for entry in rows
        ],
    }


def _about(manifest: dict[str, Any]) -> dict[str, str]:
    """Return agent, environment and settings for the header."""
    env, agent = _object(manifest.get("env")), _object(manifest.get("agent"))
    envs = manifest.get("envs") if isinstance(manifest.get("envs"), list) else [env]
    names = [_text(_object(item).get("id")) for item in (envs or [])[:MOST_ENVIRONMENTS]]
    values = {
        "configuration": _text(manifest.get("name")),
        "environment": ", ".join(name for name in names if name),
        "agent": _text(agent.get("name")),
        "split": _text(manifest.get("split")),
        "seed": _text(manifest.get("seed")),
        "plan": _text(manifest.get("plan")),
    }
    return {name: text for name, text in values.items() if text}


def _state(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "no summary yet: the run is in progress or was interrupted"
    ended = _text(summary.get("ended"))
    if summary.get("complete") is False:
        return "not complete"
    return f"finished: {ended}" if ended else "finished"


def _warnings(holder: dict[str, Any] | None) -> list[str]:
    """Return the warning messages of a summary or an evaluation."""
    listed = (holder or {}).get("warnings")
    sentences = (
        [_text(_object(warning).get("sentence")) for warning in listed] if isinstance(listed, list) else []
    )
    return [f"Warning: {sentence}" for sentence in sentences if sentence]


def _notes(run: RunView, summary: dict[str, Any] | None) -> list[str]:
    notes = _warnings(summary)
    if run.evaluations:
        notes += _warnings(run.evaluations[-1])
    for name, skipped in run.skipped.items():
        lines = "1 line" if skipped.count == 1 else f"{skipped.count} lines"
        half = " (half written)" if skipped.half == skipped.count else ""
        notes.append(f"{lines} of {name} could not be read{half} and {'is' if skipped.count == 1 else 'are'} "
                     f"left out; {skipped.first}.")  # fmt: skip
    if not run.rows:
        held = run.manifest.get("kind") in TRAINING and run.metrics
        notes.append("The run stored no episodes." if held else "No episode has ended yet.")
    return notes


def _interval(value: Any, around: Any) -> dict[str, Any] | None:
    number = _number(value)
    if number is None:
        return None
    ends = [_number(end) for end in around] if isinstance(around, list) and len(around) == 2 else []
    return {"value": number} | ({"low": ends[0], "high": ends[1]} if len(ends) == 2 else {})


def _value(line: dict[str, Any], name: str) -> float | None:
    if name != "clip":
        return _number(line.get(name))
    parts = [number for part in _CLIPPED if (number := _number(line.get(part))) is not None]
    return sum(parts) if parts else None


def _number(value: Any) -> float | None:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if plain and abs(value) <= LARGEST else None


def _numbers(values: Any) -> dict[str, float]:
    numbers = {_text(key): _number(value) for key, value in list(_object(values).items())[:MOST_PARTS]}
    return {key: value for key, value in numbers.items() if value is not None}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    """Return a bounded, valid UTF-8 text for any value of a file."""
    try:
        text = "" if value is None else str(value)
    except (ValueError, RecursionError):  # a number of too many digits, a list of too many levels
        return "…"
    return clean_text(bounded_text(text))


FAILED = frozenset(kind.value for kind in Outcome if kind.failed)
_HUGE = 1e200
_EXACT = 2_000
"""Maximum tasks for a bootstrap interval; above it the interval is narrow and slow to compute."""


def describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Return statistics of episodes. Infrastructure failures are counted but not scored."""
    # Errors that the agent may have caused count as no success in the row.
    scored = [row for row in rows if row.outcome not in FAILED or row.success is not None]
    clusters = _clusters(scored)
    valid = [row.valid for row in scored if row.valid is not None]
    return {
        "episodes": len(rows),
        "tasks": len(clusters),
        "failed": sum(row.outcome in FAILED for row in rows),
        "excluded": len(rows) - len(scored),
        "success": success(clusters),
        "return": _mean(clusters),
        "length": percentiles([float(row.turns) for row in scored]),
        "seconds": percentiles([row.seconds for row in scored if abs(row.seconds) < _HUGE]),
        "tokens": sum(row.tokens for row in rows),
        "valid": sum(valid) / len(valid) if valid else None,
        "outcomes": outcomes(rows),
    }


def outcomes(rows: Iterable[Row]) -> dict[str, int]:
    """Count episodes by outcome, in the order of `Outcome`."""
    counts = Counter(row.outcome for row in rows)
    return {kind.value: counts[kind.value] for kind in Outcome if counts[kind.value]}


def success(clusters: Sequence[Sequence[Row]]) -> dict[str, Any] | None:
    """Return the success rate; ``None`` if no environment defines success."""
    values = [[float(row.success) for row in cluster if row.success is not None] for cluster in clusters]
    values = [cluster for cluster in values if cluster]
    count, wins = sum(map(len, values)), int(sum(map(sum, values)))
    if not count:
        return None
    if 0 < wins < count and len(values) < count and len(values) > 10 * _EXACT:
        return {"value": wins / count, "of": count}
    _, (low, high) = success_interval(values)
    return {"value": wins / count, "low": low, "high": high, "of": count}


def failures(rows: Sequence[Row], most: int = 50) -> list[dict[str, Any]]:
    """Return errors by frequency, each with an example episode."""
    by_error: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        if row.outcome in FAILED:
            by_error.setdefault((row.outcome, row.error, row.env), []).append(row.n)
    ranked = sorted(by_error.items(), key=lambda item: -len(item[1]))[:most]
    return [
        {"outcome": outcome, "message": message, "env": env, "count": len(numbers), "episode": numbers[0]}
        for (outcome, message, env), numbers in ranked
    ]


def _mean(clusters: Sequence[Sequence[Row]]) -> dict[str, Any] | None:
    # Sums near the float maximum would overflow.
    values = [[row.total for row in cluster if abs(row.total) < _HUGE] for cluster in clusters]
    values = [cluster for cluster in values if cluster]
    count = sum(map(len, values))
    if not count:
        return None
    mean = sum(map(sum, values)) / count
    if len(values) > _EXACT:
        return {"value": mean, "of": count}
    low, high = bootstrap_mean(values)
    return {"value": mean, "low": low, "high": high, "of": count}


def _clusters(rows: Iterable[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.entry, row.env, row.group or row.id), []).append(row)
    return list(groups.values())
