"""Console output of a training run; no terminal problem can end the run."""

import io
import math
import os
import pty
import subprocess
import sys
import threading
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from rollgym.trainer.tracking.console import WINDOW, Console, duration, short, sparkline

METRICS = {
    "success": 0.41,
    "return": 2.9,
    "length": 15.2,
    "entropy": 0.46,
    "approx_kl": 0.001,
    "clipped_low": 0.005,
    "clipped_high": 0.015,
    "train_rollout_logprob_diff_max": 3e-07,
    "tokens_per_second": 9120.4,
    "learning_rate": 1e-05,
    "seconds": 6.1,
    "seconds_generate": 2.928,
    "seconds_train": 3.05,
    "seconds_sync": 0.122,
    "something_else": 99.0,
}


class Clock:
    """Time that passes when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 100, **options: Any) -> RichConsole:
    settings: dict[str, Any] = {"file": io.StringIO(), "force_terminal": True, "_environ": {}} | options
    return RichConsole(width=width, height=50, **settings)


def written(console: RichConsole) -> str:
    stream: Any = console.file  # as it was given, behind what keeps it from raising
    return str(stream._stream.getvalue())


def plain_run(**options: Any) -> tuple[Console, RichConsole, Clock]:
    clock, rich = Clock(), RichConsole(file=io.StringIO(), width=40, _environ={})
    return Console(rich, clock=clock, **options), rich, clock


def shown(console: Console, width: int = 100) -> str:
    """The panel as text."""
    rich = RichConsole(file=io.StringIO(), width=width, record=True, _environ={})
    rich.print(console.render())
    return rich.export_text()


def panel(width: int = 100) -> tuple[Console, Clock]:
    clock = Clock()
    return Console(terminal(width), clock=clock), clock


def test_a_step_is_one_line_without_a_terminal() -> None:
    console, rich, clock = plain_run()
    with console:
        console.start("lake", 100)
        for step in range(1, 13):
            clock.now += 5.0
            console.phase("train")
            console.step(step, METRICS)
    first, *rest = written(rich).splitlines()
    assert first == "lake: 100 steps"
    assert len(rest) == 12
    assert rest[-1] == (
        "step 12/100  success 0.41  return 2.9  length 15.2  entropy 0.46  kl 0.001  clip 0.02  gap 3e-07  "
        "9,120 tok/s  6.1 s  (generate 48 % train 50 % sync 2 %)  ETA 7:20"
    )


def test_evaluations_and_notes_have_separate_lines() -> None:
    console, rich, _ = plain_run()
    console.start("lake", 10, done=4)
    console.evaluated(5, 0.5, 0.4, 0.6)
    console.evaluated(10, 0.25, 0.1, 0.4)
    console.note("group [7] was\nleft out \x1b[31m")
    assert written(rich).splitlines() == [
        "lake: 10 steps, 4 done",
        "evaluation  0.50 [0.40, 0.60] at step 5  best 0.50 at step 5",
        "evaluation  0.25 [0.10, 0.40] at step 10  best 0.50 at step 5",
        "note: group [7] was left out [31m",
    ]


def test_metrics_that_are_missing_are_left_out() -> None:
    console, rich, _ = plain_run()
    console.step(1, {"entropy": 0.5, "seconds_train": 2.0})
    assert written(rich) == "step 1/0  entropy 0.5  (train 100 %)\n"
    bare, _ = panel()
    bare.step(1, {})
    assert "success" not in shown(bare)
    assert "numbers" not in shown(bare)


def test_time_that_is_unknown_has_no_share() -> None:
    console, rich, _ = plain_run()
    times = {"generate": 3.0, "environment": math.nan, "train": 1.0, "sync": math.inf}
    console.step(1, {f"seconds_{part}": seconds for part, seconds in times.items()})
    assert written(rich) == "step 1/0  (generate 75 % train 25 %)\n"


def test_plain_is_plain_even_in_a_terminal() -> None:
    rich = terminal()
    with Console(rich, plain=True) as console:
        console.start("lake", 2)
        console.step(1, {"success": 0.5})
    assert "╭" not in written(rich)
    assert "success 0.50" in written(rich)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines() -> None:
    rich = terminal(_environ={"TERM": "dumb"})
    with Console(rich) as console:
        console.start("lake", 2)
    assert written(rich) == "lake: 2 steps\n"


def test_the_panel_shows_everything() -> None:
    console, clock = panel()
    console.start("lake", 100)
    for step in range(1, 13):
        clock.now += 6.0
        console.step(step, METRICS | {"success": step / 12})
    console.evaluated(5, 0.38, 0.31, 0.45)
    console.evaluated(10, 0.36, 0.3, 0.42)
    console.note("one group was left out")
    console.phase("generate")
    clock.now += 12.0
    text = shown(console)
    console.close()
    for words in (
        "lake",
        "12/100",
        "1:24 so far  ETA 8:36",
        "success   1.00  ▂▂▃▃▄▅▅▆▆▇▇█",
        "held out  0.36 [0.30, 0.42] at step 10  best 0.38 at step 5",
        "return 2.9",
        "length 15.2",
        "entropy 0.46",
        "kl 0.001",
        "clip 0.02",
        "gap 3e-07",
        "9,120 tok/s",
        "lr 1e-05",
        "generate 48 %  train 50 %  sync 2 %",
        "! one group was left out",
        "generate 0:12",
    ):
        assert words in text
    assert "something_else" not in text


def test_the_panel_keeps_the_last_notes_and_the_last_forty_steps() -> None:
    console, _ = panel()
    for step in range(WINDOW + 5):
        console.step(step, {"success": 0.0 if step < 5 else 1.0})
    for number in range(5):
        console.note(f"note {number}")
    text = shown(console)
    assert "█" * WINDOW in text
    assert "▁" not in text
    assert ("note 1" in text, "note 2" in text, "note 4" in text) == (False, True, True)


@pytest.mark.parametrize("width", [1, 5, 20, 40, 70, 200])
def test_the_panel_fits_any_terminal(width: int) -> None:
    console, _ = panel(width)
    console.start("a run with a name that is longer than some terminals are wide", 10**6)
    for step in range(50):
        console.step(step, METRICS)
    console.evaluated(40, 0.5, 0.4, 0.6)
    console.note("a note that is longer than some terminals are wide, and then some")
    console.phase("evaluate")
    assert all(cell_len(line) <= width for line in shown(console, width).splitlines())
    console.close()


def test_a_narrow_panel_shows_the_latest_steps() -> None:
    console, _ = panel(40)
    for step in range(40):
        console.step(step, {"success": float(step >= 30)})
    assert "▁" * 10 + "█" * 10 in shown(console, 40)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "word", 10**400, 1e300, -0.0])
def test_no_value_can_end_the_run(plain: bool, value: Any) -> None:
    rich = terminal()
    with Console(rich, plain=plain) as console:
        console.start("lake", 3)
        console.step(1, dict.fromkeys(METRICS, value))
        console.step(2, METRICS)
        console.evaluated(2, value, value, value)
        console.evaluated(2, 0.5, value, value)
        console.evaluated(2, value, 0.1, 0.2)
    assert "best 0.50 at step 2" in written(rich) or value in (1e300, math.inf)


def test_non_finite_numbers_are_shown() -> None:
    console, rich, _ = plain_run()
    console.step(1, {"success": math.nan, "approx_kl": math.inf})
    assert written(rich) == "step 1/0  success nan  kl inf\n"


def test_the_remaining_time_follows_the_median_step() -> None:
    """One slow step (a compilation, a suspended machine) does not move it."""
    console, rich, clock = plain_run()
    console.start("lake", 20)
    for step, seconds in enumerate((500.0, 2.0, 2.0, 2.0, 400.0), 1):
        clock.now += seconds
        console.step(step, {})
    assert written(rich).splitlines()[-1] == "step 5/20  ETA 0:30"


def test_the_remaining_time_uses_recent_steps() -> None:
    console, rich, clock = plain_run()
    console.start("lake", 200)
    for step in range(1, 2 * WINDOW + 21):
        clock.now += 1.0 if step <= WINDOW + 20 else 3.0
        console.step(step, {})
    assert written(rich).splitlines()[-1] == "step 100/200  ETA 5:00"


def test_a_resumed_run_counts_only_its_own_time() -> None:
    console, rich, clock = plain_run()
    console.start("lake", 100, done=90)
    clock.now += 4.0
    console.step(91, {})
    assert written(rich).splitlines()[-1] == "step 91/100  ETA 0:36"


def test_a_resumed_run_starts_at_its_step() -> None:
    console, _ = panel()
    console.start("lake", 100, done=90)
    assert "90/100" in shown(console)
    console.close()


def test_the_remaining_time_runs_down_during_a_step() -> None:
    console, clock = panel()
    console.start("lake", 11)
    clock.now += 10.0
    console.step(1, {})
    clock.now += 4.0
    assert "ETA 1:36" in shown(console)
    clock.now += 1000.0
    assert "ETA 0:00" in shown(console)
    console.close()


def test_the_panel_is_drawn_and_the_cursor_restored() -> None:
    rich = terminal()
    console = Console(rich)
    console.start("lake", 10)
    console.step(4, METRICS)
    with pytest.raises(ZeroDivisionError), console:
        _ = 1 / 0
    text = written(rich)
    assert "4/10" in text
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")
    console.close()
    console.step(5, METRICS)


class Gone(io.StringIO):
    """A stream without a reader."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("make", [Gone, closed])
def test_a_closed_stream_does_not_end_the_run(make: Any, plain: bool) -> None:
    with Console(terminal(file=make()), plain=plain) as console:
        console.start("lake", 3)
        console.step(1, METRICS)
        console.note("still here")
        console.evaluated(1, 0.5, 0.4, 0.6)


def test_standard_error_may_be_closed_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with Console() as console:
        console.start("lake", 3)
        console.step(1, METRICS)


def test_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Console() as console:
        console.start("lake", 3)
        console.step(1, {"success": 1.0})
    out, err = capsys.readouterr()
    assert (out, "success 1.00" in err) == ("", True)


@pytest.mark.parametrize("plain", [True, False])
def test_a_stream_without_unicode_gets_what_it_can_show(plain: bool) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    with Console(terminal(file=stream), plain=plain) as console:
        console.start("lake – ∞", 3)
        console.step(1, METRICS)
        console.step(2, METRICS)
    stream.flush()
    assert b"2/3" in raw.getvalue()
    assert plain or b"##" in raw.getvalue()


def test_prints_go_above_the_panel_unless_stdout_is_redirected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Redirected standard output is the user's data."""
    rich = terminal()
    with Console(rich) as console:
        console.start("lake", 3)
        print("data")
        print("warning", file=sys.stderr)
    assert capsys.readouterr().out == "data\n"
    assert ("data" in written(rich), "warning" in written(rich)) == (False, True)


def test_a_real_terminal_gets_the_panel() -> None:
    code = (
        "from rollgym.trainer.tracking.console import Console\n"
        "with Console() as console:\n"
        "    console.start('lake', 3)\n"
        "    console.step(2, {'success': 0.5})\n"
    )
    ours, theirs = pty.openpty()  # its buffer holds all that this writes
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=theirs, stdout=subprocess.DEVNULL, env=environment
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        found += part
    os.close(ours)
    assert done.returncode == 0
    assert b"lake" in found
    assert "╭─".encode() in found
    assert b"2/3" in found


def test_the_panel_may_be_drawn_while_it_changes() -> None:
    """The drawing thread and the run do not trip over one another."""
    console, _ = panel()
    console.step(0, METRICS)
    done, before = threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not done.is_set():
            console.step(1, METRICS)
            console.note("again")

    running = threading.Thread(target=run)
    sys.setswitchinterval(1e-6)
    try:
        running.start()
        for _ in range(300):
            console.render()
    finally:
        done.set()
        running.join()
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([0.0, 0.0], "▁▁"),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.01, 0.02], "▅█"),
        ([0.0, math.nan, 1.0, math.inf], "▁ █ "),
        ([-1.0, 1.0], "▁█"),
    ],
)
def test_a_sparkline_starts_at_zero(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-3, "0:00"),
        (59.6, "1:00"),
        (510, "8:30"),
        (3723, "1:02:03"),
        (172_799, "47:59:59"),
        (180_000, "2 d 2 h"),
    ],
)
def test_durations_are_short(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.4567, "0.457"),
        (3e-7, "3e-07"),
        (15.23, "15.2"),
        (9120.4, "9,120"),
        (1.5e7, "1.5e+07"),
        (math.nan, "nan"),
    ],
)
def test_numbers_are_short(value: float, expected: str) -> None:
    assert short(value) == expected


def test_the_remaining_time_excludes_the_warm_start() -> None:
    console, rich, clock = plain_run()
    console.start("lake", 11)
    for phase, seconds in (
        ("evaluate", 50),
        ("imitate", 900),
        ("evaluate", 50),
        ("save", 1),
        ("generate", 4),
    ):
        console.phase(phase)
        clock.now += seconds
    console.phase("train")
    clock.now += 2
    console.step(1, {})
    assert written(rich).splitlines()[-1].endswith("ETA 1:00")  # ten steps of six seconds
    for _ in range(2):
        console.phase("generate")
        clock.now += 4
        console.phase("train")
        clock.now += 4
        console.step(2, {})
    assert "ETA 1:12" in written(rich).splitlines()[-1]  # the evaluations between steps count, as before


def test_a_mixture_has_a_line_for_each_environment_with_its_own_best() -> None:
    console, rich, _ = plain_run()
    console.start("two", 4)
    console.evaluated(0, 0.5, 0.4, 0.6, env="A-v0")
    console.evaluated(0, -3.0, -4.0, -2.0, env="B-v0", what="return")
    console.evaluated(2, 0.25, 0.2, 0.3, env="A-v0")
    console.step(
        3, {"success": 0.5, "env/A-v0/success": 0.75, "env/A-v0/return": 1.0, "env/B-v0/return": -2.0}
    )
    lines = written(rich).splitlines()
    assert lines[1:4] == [
        "evaluation  A-v0  0.50 [0.40, 0.60] at step 0  best 0.50 at step 0",
        "evaluation  B-v0  return -3.00 [-4.00, -2.00] at step 0  best -3.00 at step 0",
        "evaluation  A-v0  0.25 [0.20, 0.30] at step 2  best 0.50 at step 0",
    ]
    assert lines[4].startswith("step 3/4  success 0.50  (A-v0 0.75, B-v0 return -2.00)")
    panel = RichConsole(file=io.StringIO(), width=100, _environ={})
    panel.print(console.render())
    shown = str(panel.file.getvalue())  # type: ignore[attr-defined]
    assert "A-v0  0.25 [0.20, 0.30]" in shown
    assert "B-v0  return -3.00" in shown
