"""The report of a simulation: utilization, time by cause, lost work, staleness, what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollgym.core.text import shorten
from rollgym.devices.report import PlanReport
from rollgym.simulation.durations import duration_text
from rollgym.simulation.samples import age_quantile, ages, discarded_share, mean, mean_age
from rollgym.simulation.simulate import Accuracy, Simulation
from rollgym.simulation.step_level import CAUSES
from rollgym.utils import svg

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLORS = {
    "train": "#2563eb", "sync": "#0891b2", "wait_generate": "#d97706", "wait_environment": "#94a3b8",
    "evaluation": "#7c3aed", "checkpoint": "#059669", "restart": "#db2777", "node": "#be123c",
    "repeated": "#f472b6", "unfinished": "#e2e8f0",
}  # fmt: skip
LEAST_SHARE = 0.0005
"""Causes with a smaller share of the time are left out of tables and pictures."""
MOST_SUGGESTIONS = 12


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A variant of the run and what it would gain."""

    change: str
    settings: tuple[str, ...]
    """As overrides of the config."""
    gain: float
    """Relative change of useful steps per day; negative: a loss."""
    steps_per_day: float
    note: str
    """Side effects on the data that is trained on; empty: none."""
    result: Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """The simulation of a run, with its accuracy and with variants."""

    name: str
    cluster: str
    days: float
    base: Simulation
    plan: PlanReport
    accuracy: Accuracy | None
    """The tick level against the real scheduler; ``None``: the real scheduler was used, or not compared."""
    suggestions: tuple[Suggestion, ...]
    tried: int
    """Number of variants simulated."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        base, long, scenario = self.base, self.base.long, self.base.scenario
        tokens = ages(base.samples)
        return {
            "kind": "simulation",
            "config": self.name,
            "cluster": self.cluster,
            "layout": scenario.layout,
            "days": self.days,
            "seed": scenario.seed,
            "latencies": scenario.latencies.describe(),
            "failures": scenario.failures.model_dump(),
            "level": base.level,
            "representative_steps": len(base.samples),
            "accuracy": None if self.accuracy is None else self._accuracy(self.accuracy),
            "step": {
                "seconds": base.step_seconds,
                "wait": mean(sample.wait for sample in base.samples),
                "wait_forced": mean(sample.forced for sample in base.samples),
                "train": mean(sample.train for sample in base.samples),
                "sync": mean(sample.sync for sample in base.samples),
            },
            "throughput": {
                "steps": long.steps,
                "steps_per_day": long.steps_per_day,
                "useful_steps_per_day": long.useful_steps_per_day,
                "episodes_per_day": long.steps_per_day * self._episodes,
                "tokens_per_second": long.steps_per_day * self._episodes * scenario.trained_tokens / 86_400,
            },
            "utilization": {role: busy for role, _, busy in self.utilization() if busy is not None},
            "episodes_in_flight": mean(sample.in_flight for sample in base.samples),
            "replies_at_once": mean(sample.generating for sample in base.samples),
            "time": {cause: long.time[cause] for cause in CAUSES},
            "lost_work": {
                "turns_trained": long.turns,
                "turns_discarded": long.turns_discarded,
                "turns_filtered": long.turns_filtered,
                "turns_lost_to_failures": long.turns_lost,
                "steps_repeated": long.repeated_steps,
                "masked_token_share": long.masked,
            },
            "failed": dict(sorted(long.failures.items())),
            "staleness": {
                "mean": mean_age(tokens),
                **{f"p{p}": age_quantile(tokens, p / 100) for p in (50, 90, 99)},
                "max": float(max(tokens, default=0)),
                "shares": {str(age): count / sum(tokens.values()) for age, count in sorted(tokens.items())},
            },
            "suggestions": [self._suggestion(suggestion) for suggestion in self.suggestions],
            "variants_tried": self.tried,
            "notes": list(self.notes),
        }

    @property
    def _episodes(self) -> int:
        return self.base.scenario.batch * self.base.scenario.scheduler.groups.size

    def utilization(self) -> Iterator[tuple[str, str, float | None]]:
        """Yield role, what it has, and the share of the time in which it does new work."""
        scenario, long = self.base.scenario, self.base.long
        nodes, engine = scenario.nodes, scenario.engine
        lent = f", {engine.lent} of them lent by the learner" if engine.lent else ""
        yield "learner", f"{nodes.train_devices} devices", long.learner_busy
        yield "engines", f"{engine.engines} engines on {nodes.engine_devices} devices{lent}", long.engine_busy
        stepping = mean(sample.in_flight - sample.generating for sample in self.base.samples)
        # A step may wait rather than compute: whether the cores are busy is not known.
        yield "environments", f"{stepping:,.0f} steps at once, {nodes.cpus:,} CPU cores", None

    def _accuracy(self, accuracy: Accuracy) -> dict[str, Any]:
        return {
            "scale": accuracy.scale,
            "steps": accuracy.steps,
            "step_seconds": list(accuracy.step_seconds),
            "staleness": list(accuracy.staleness),
            "discarded": list(accuracy.discarded),
            "error": accuracy.error,
        }

    def _suggestion(self, suggestion: Suggestion) -> dict[str, Any]:
        samples = suggestion.result.samples
        return {
            "change": suggestion.change,
            "settings": list(suggestion.settings),
            "gain": suggestion.gain,
            "useful_steps_per_day": suggestion.steps_per_day,
            "note": suggestion.note,
            "step_seconds": suggestion.result.step_seconds,
            "staleness": mean_age(ages(samples)),
            "discarded": discarded_share(samples),
        }


def render_text(console: Console, report: SimulationReport) -> None:
    """Print a report."""
    base, long, scenario = report.base, report.base.long, report.base.scenario
    episodes = scenario.batch * scenario.scheduler.groups.size
    console.print(
        f"[bold]{long.steps:,} steps in {report.days:g} days[/], {long.steps_per_day:,.0f} a day; "
        f"a step takes {duration_text(base.step_seconds)} without failures",
        highlight=False,
    )
    for line in _setting(report, episodes):
        console.print(line, highlight=False, markup=False, style="dim")
    _section(console, "Utilization", _utilization(report))
    _section(console, "Time of the learner", _time(report))
    _section(console, "Lost work", _lost(report))
    _section(console, "Staleness of trained tokens, in weight versions", _staleness(report))
    if report.suggestions:
        title = f"What to change (simulated gain in useful steps a day; {report.tried} variants)"
        _section(console, title, _suggestions(report))
    for note in report.notes:
        console.print(f"Note: {note}", style="dim", highlight=False, markup=False)


def _setting(report: SimulationReport, episodes: int) -> Iterator[str]:
    base, scenario = report.base, report.base.scenario
    yield f"{report.name} on {report.cluster}, {scenario.layout}; {episodes:,} episodes a step"
    yield f"Latencies {scenario.latencies.describe()}"
    name = "the real scheduler" if base.level == "events" else "the tick level, full size"
    yield f"{len(base.samples)} representative steps with {name}"
    if report.accuracy is not None:
        accuracy = report.accuracy
        yield (
            f"Tick level against the real scheduler at {accuracy.scale:.2g} of the size: step "
            f"{accuracy.error:+.1%}, staleness {accuracy.staleness[0]:.2f} and {accuracy.staleness[1]:.2f}, "
            f"turns discarded {accuracy.discarded[0]:.1%} and {accuracy.discarded[1]:.1%}"
        )


def _section(console: Console, title: str, table: Table) -> None:
    from rich.markup import escape

    console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    console.print(table)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(columns), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _utilization(report: SimulationReport) -> Table:
    table = _table("role", "on", "busy")
    for role, place, busy in report.utilization():
        table.add_row(role, place, "" if busy is None else f"{busy:.0%}")
    return table


def _time(report: SimulationReport) -> Table:
    table, long = _table("", "", ""), report.base.long
    for cause, name in CAUSES.items():
        share = long.share(cause)
        if share >= LEAST_SHARE:
            table.add_row(name, f"{share:6.1%}", "█" * round(40 * share))
    forced = mean(sample.forced for sample in report.base.samples) / max(report.base.step_seconds, 1e-9)
    if forced >= LEAST_SHARE and report.base.scenario.bound:
        table.add_row(
            "waiting although groups are ready", f"{forced:6.1%}", "of a step, for the staleness bound"
        )
    return table


def _lost(report: SimulationReport) -> Table:
    table, long = _table("", ""), report.base.long
    played = long.turns + long.turns_discarded + long.turns_lost + long.turns_filtered
    rows = {
        "turns of stale groups and surplus episodes": long.turns_discarded,
        "turns of groups filtered for equal returns": long.turns_filtered,
        "turns lost to failures": long.turns_lost,
    }
    for name, turns in rows.items():
        table.add_row(name, f"{turns:,.0f} ({turns / played if played else 0.0:.2%} of those played)")
    steps = long.repeated_steps
    table.add_row("steps trained again from a checkpoint", f"{steps:,} ({steps / max(long.steps, 1):.2%})")
    if long.masked:
        table.add_row("tokens without a gradient", f"{long.masked:.2%}")
    kinds = [f"{count} x {name.replace(':', ' of ')}" for name, count in sorted(long.failures.items())]
    table.add_row("failures", ", ".join(kinds) or "none")
    return table


def _staleness(report: SimulationReport) -> Table:
    table, tokens = _table("mean", "p50", "p90", "p99", "max", "share by age"), ages(report.base.samples)
    total = sum(tokens.values()) or 1.0
    by_age = "  ".join(f"{age}: {count / total:.1%}" for age, count in sorted(tokens.items())[:8])
    quantiles = [f"{age_quantile(tokens, share):.0f}" for share in (0.5, 0.9, 0.99)]
    table.add_row(f"{mean_age(tokens):.2f}", *quantiles, f"{max(tokens, default=0)}", by_age)
    return table


def _suggestions(report: SimulationReport) -> Table:
    table = _table("gain", "change", "settings", "also")
    for suggestion in report.suggestions[:MOST_SUGGESTIONS]:
        style = "green" if suggestion.gain > 0.005 else "dim"
        table.add_row(
            f"{suggestion.gain:+.1%}",
            suggestion.change,
            " ".join(suggestion.settings),
            suggestion.note,
            style=style,
        )
    return table


WIDTH, LEFT, RIGHT, ROW = 860, 250, 90, 22


def render_svg(report: SimulationReport) -> str:
    """Return a picture: the time of the learner by cause, for the run and for its best variants."""
    rows = [("as configured", report.base)]
    rows += [(s.change, s.result) for s in report.suggestions[:8] if s.gain > 0]
    slowest = max(min(result.long.steps_per_day for _, result in rows), 1e-9)
    title = f"{report.name}: the time of a step, by what the learner does"
    parts = [svg.text(12, 22, title, size=15)]
    used = [c for c in CAUSES if any(result.long.share(c) >= LEAST_SHARE for _, result in rows)]
    for at, cause in enumerate(used):
        left, top = 12 + 280 * (at % 3), 40 + 18 * (at // 3)
        parts.append(svg.rect(left, top, 12, 12, COLORS[cause], cause))
        parts.append(svg.text(left + 18, top + 10, CAUSES[cause]))
    y = 40.0 + 18 * -(-len(used) // 3) + 14
    for name, result in rows:
        parts.append(svg.text(12, y + 13, shorten(name, 40)))
        # The length of a bar is the time of a step.
        length = (WIDTH - LEFT - RIGHT) * slowest / max(result.long.steps_per_day, 1e-9)
        x = float(LEFT)
        for cause in used:
            wide = length * result.long.share(cause)
            parts.append(
                svg.rect(x, y, wide, 16, COLORS[cause], f"{CAUSES[cause]}: {result.long.share(cause):.1%}")
            )
            x += wide
        parts.append(svg.text(x + 8, y + 13, f"{result.long.steps_per_day:,.0f} a day"))
        y += ROW
    return svg.document(WIDTH, y + 10, parts, title)
