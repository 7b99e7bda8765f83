"""Console output of a training run: a live panel in a terminal, one line per step elsewhere.

No console problem can end a run: metrics may be missing or not finite, the terminal tiny, the stream closed.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, cast

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollgym.utils.rich_console import SafeConsole
from rollgym.utils.terminal import raw

WINDOW = 40
"""Number of steps in the sparkline and in the median that gives the ETA."""
NOTES = 3
"""Number of notes in the panel."""
FIRST_PHASES = ("generate", "learn")
"""Phases with which a step of training or of fine-tuning starts."""
PARTS = ("generate", "environment", "train", "sync")
NUMBERS = {"approx_kl": "kl", "clip": "clip", "train_rollout_logprob_diff_max": "gap"}
"""Short labels of some metrics; others keep their names."""


class Console:
    """Shows the progress of a training run. ``step`` counts finished steps, from 1 to the total."""

    def __init__(
        self,
        console: RichConsole | None = None,
        *,
        plain: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or SafeConsole(file=_safe(sys.stderr))
        self._console.file = _safe(self._console.file)  # rich ends the program where a pipe breaks
        self._plain = plain or not self._console.is_terminal or self._console.is_dumb_terminal
        self._clock = clock
        self._lock = threading.Lock()  # a separate thread draws the panel
        self._live: Live | None = None
        self._name, self._total, self._step = "", 0, 0
        self._phase = ""
        self._began = self._phase_began = self._step_ended = clock()
        self._metrics: dict[str, float] = {}
        self._success: deque[float] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._last: dict[str, tuple[int, str, float, float, float]] = {}
        self._best: dict[str, tuple[int, float]] = {}

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, name: str, total_steps: int, *, done: int = 0) -> None:
        """Start with a run of ``total_steps`` steps, ``done`` of them before a resume."""
        with self._lock:
            self._name, self._total, self._step = _one_line(name), total_steps, done
            self._began = self._phase_began = self._step_ended = self._clock()
        if self._plain:
            self._print(f"{self._name}: {total_steps} steps" + (f", {done} done" if done else ""))
        elif self._live is None:
            # Redirected standard output is the user's data and must not end up on the terminal.
            self._live = Live(
                get_renderable=self.render,
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=_is_terminal(sys.stdout),
            )
            self._live.start()

    def phase(self, name: str) -> None:
        """Show the current phase: generate, train, evaluate, sync or save."""
        with self._lock:
            self._phase, self._phase_began = _one_line(name), self._clock()
            if name in FIRST_PHASES and not self._seconds:
                # The first step starts here: an evaluation or a warm start before it happens only once.
                self._step_ended = self._phase_began

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        with self._lock:
            now = self._clock()
            self._seconds.append(now - self._step_ended)
            self._step, self._step_ended = step, now
            self._metrics = _readable(metrics)
            self._success.append(self._metrics.get("success", math.nan))
        if self._plain:
            self._print(self._step_line())

    def note(self, text: str) -> None:
        """Show a note or a warning."""
        with self._lock:
            self._notes.append(_one_line(text))
        if self._plain:
            self._print(f"note: {_one_line(text)}")

    def block(self, lines: Iterable[str]) -> None:
        """Print lines that stay on the screen, above the panel if there is one."""
        for line in lines:
            self._print("".join(letter if letter.isprintable() else " " for letter in line))

    def evaluated(
        self, step: int, value: float, low: float, high: float, *, env: str = "", what: str = "success"
    ) -> None:
        """Show the mean held-out success, or return, after ``step``, with its confidence interval."""
        numbers = _readable({"value": value, "low": low, "high": high})
        value, low, high = (numbers.get(name, math.nan) for name in ("value", "low", "high"))
        env = _one_line(env)
        with self._lock:
            self._last[env] = (step, what, value, low, high)
            if math.isfinite(value) and (env not in self._best or value > self._best[env][1]):
                self._best[env] = (step, value)
        if self._plain:
            self._print(f"evaluation  {env}{'  ' if env else ''}{self._held_out(env)}")

    def close(self) -> None:
        """Stop updating the panel and restore the terminal."""
        live, self._live = self._live, None
        if live is not None:
            self.phase("")
            live.stop()

    def render(self) -> RenderableType:
        """The current panel."""
        with self._lock:
            rows = Table.grid(padding=(0, 2))
            rows.add_column(style="dim", no_wrap=True)
            rows.add_column(ratio=1)
            for label, value in self._rows():
                rows.add_row(label, value)
            notes = [Text(f"! {note}", style="yellow") for note in self._notes]
            phase = Text(f"{self._phase} {duration(self._clock() - self._phase_began)}", style="cyan")
            return Panel(
                Group(rows, *notes),
                title=Text(self._name, style="bold"),
                title_align="left",
                subtitle=phase if self._phase else None,
                subtitle_align="right",
            )

    def _rows(self) -> Iterable[tuple[str, RenderableType]]:
        metrics = self._metrics
        yield "step", self._progress()
        if "success" in metrics:
            room = max(self._console.width - 20, 1)  # beside the frame, the label and the number
            spark = sparkline([*self._success][-room:], ascii_only=self._console.options.ascii_only)
            yield "success", Text.assemble((f"{metrics['success']:.2f}", "bold"), "  ", (spark, "green"))
        for number, env in enumerate(self._last):
            name = f"{env}  " if env else ""
            yield "held out" if not number else "", Text(name + self._held_out(env), style="bold")
        if by_env := _by_env(metrics):
            yield "by environment", Text("  ".join(by_env))
        rate = metrics.get("learning_rate")
        numbers = [*_numbers(metrics), *_speed(metrics), *([f"lr {short(rate)}"] if rate is not None else [])]
        if numbers:
            cells = (
                Text(number, style="red" if number.endswith(("nan", "inf")) else "") for number in numbers
            )
            yield "numbers", Columns(cells, padding=(0, 3))
        if shares := _shares(metrics):
            yield "time", Text("  ".join(shares))

    def _progress(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        words = [f"{duration(self._clock() - self._began)} so far", *self._eta()]
        bar = ProgressBar(total=max(self._total, 1), completed=min(self._step, self._total))
        grid.add_row(
            f"{self._step}/{self._total}", bar, "  ".join(words if self._console.width >= 70 else words[-1:])
        )
        return grid

    def _step_line(self) -> str:
        metrics = self._metrics
        words = [f"step {self._step}/{self._total}"]
        if "success" in metrics:
            words.append(f"success {metrics['success']:.2f}")
        if by_env := _by_env(metrics):
            words.append(f"({', '.join(by_env)})")
        words += [*_numbers(metrics), *_speed(metrics)]
        if shares := _shares(metrics):
            words.append(f"({' '.join(shares)})")
        return "  ".join([*words, *self._eta()])

    def _eta(self) -> list[str]:
        left = self._total - self._step
        if not self._seconds or left < 0:
            return []
        spent = self._clock() - self._step_ended
        return [f"ETA {duration(statistics.median(self._seconds) * left - (spent if left else 0))}"]

    def _held_out(self, env: str) -> str:
        step, what, value, low, high = self._last[env]
        best = f"  best {self._best[env][1]:.2f} at step {self._best[env][0]}" if env in self._best else ""
        name = "" if what == "success" else f"{what} "
        return f"{name}{value:.2f} [{low:.2f}, {high:.2f}] at step {step}{best}"

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def sparkline(values: Iterable[float], *, ascii_only: bool = False) -> str:
    """Bars from 0 to the largest value; a gap for each non-finite value."""
    bars = "_.-=+*%#" if ascii_only else "▁▂▃▄▅▆▇█"
    values = list(values)
    top = max((value for value in values if math.isfinite(value)), default=0.0)
    scale = (len(bars) - 1) / top if top > 0 else 0.0
    return "".join(
        bars[round(min(max(value * scale, 0), len(bars) - 1))] if math.isfinite(value) else " "
        for value in values
    )


def short(value: float) -> str:
    """Format a number in a few characters."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format seconds as ``m:ss``, ``h:mm:ss`` or days; negative values count as 0."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _readable(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers; both clip fractions are added up as ``clip``."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    clipped = [numbers[name] for name in ("clipped_low", "clipped_high") if name in numbers]
    return numbers | ({"clip": sum(clipped)} if clipped else {})


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    names = ("loss", "validation_loss", "return", "length", "entropy", *NUMBERS)
    return [f"{NUMBERS.get(name, name)} {short(metrics[name])}" for name in names if name in metrics]


def _by_env(metrics: Mapping[str, float]) -> list[str]:
    """In a mixture: success of each environment in the step, or its return if it defines no success."""
    shown: dict[str, str] = {}
    for what in ("return", "success"):
        for name, value in metrics.items():
            if name.startswith("env/") and name.endswith(f"/{what}"):
                env = name.removeprefix("env/").removesuffix(f"/{what}")
                shown[env] = f"{env} {'' if what == 'success' else 'return '}{value:.2f}"
    return list(shown.values())


def _speed(metrics: Mapping[str, float]) -> list[str]:
    units = (("tokens_per_second", "tok/s"), ("seconds", "s"))
    return [f"{short(metrics[name])} {unit}" for name, unit in units if name in metrics]


def _shares(metrics: Mapping[str, float]) -> list[str]:
    parts = {part: metrics.get(f"seconds_{part}", 0.0) for part in PARTS}
    parts = {part: seconds for part, seconds in parts.items() if 0 < seconds < math.inf}
    return [
        f"{part} {seconds / sum(parts.values()):.0%}".replace("%", " %") for part, seconds in parts.items()
    ]


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _safe(stream: IO[str] | None) -> IO[str]:
    # The console escapes its text itself; an escaping stream would print the codes of its panel.
    return cast(IO[str], stream if isinstance(stream, _SafeStream) else _SafeStream(raw(stream)))


class _SafeStream:
    """A stream that drops all output, and never raises, once its reader is gone."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._do(lambda stream: stream.write(text.encode(self.encoding, "replace").decode(self.encoding)))
        return len(text)

    def flush(self) -> None:
        self._do(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return _is_terminal(self._stream)

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    def _do(self, act: Callable[[IO[str]], object]) -> None:
        if self._stream is not None:
            try:
                act(self._stream)
            except (OSError, ValueError):
                self._stream = None
