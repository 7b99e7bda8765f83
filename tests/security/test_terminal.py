"""Control characters of files, environments, agents and servers are shown on a terminal, never sent to it."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strangers import ENV, rewrite_episodes

from rollgym.bench.run import SuiteRun
from rollgym.bench.suite import AgentSpec, read_suite
from rollgym.evaluation.runner import Request, evaluate
from rollgym.utils.terminal import SafeStream, guarded, printable

Command = Callable[..., Any]
EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\x7f‮"
"""Clears the screen, sets the title, colors, goes back over the line, and turns the text around."""
HARMFUL = frozenset(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x202E))) - {"\n", "\t"}
WRITES_ANY = (
    "from rollgym import StepResult, TextEnv\n"
    "EVIL = {evil!r}\n"
    "class Evil(TextEnv):\n"
    "    instructions = 'Say anything.' + EVIL\n"
    "    success_means = 'evil' + EVIL\n"
    "    def begin(self, task):\n"
    "        print('printed' + EVIL)\n"
    "        return 'begin' + EVIL\n"
    "    def respond(self, action):\n"
    "        if action == 'raise':\n"
    "            raise ValueError('raised' + EVIL)\n"
    "        return StepResult('end' + EVIL, 1.0, terminated=True, success=True)\n"
    "    def facts(self):\n"
    "        return {{'actions': ['go' + EVIL]}}\n"
    "def player(observation, info):\n"
    "    raise ValueError('agent' + EVIL)\n"
)


def harmful(text: str) -> list[str]:
    """The characters in a text that a terminal would obey."""
    return [char for char in text if char in HARMFUL]


def test_printable_text_stays_as_it_is_and_control_characters_are_written_out() -> None:
    for plain in ("", "plain", "two\n\tlines", "Grüße 你好 🙂 │"):
        assert printable(plain) == plain
    assert printable("a\x1b[31mb\x9bc\r\nd\re\x7f") == "a\\u001b[31mb\\u009bc\nd\\u000de\\u007f"
    assert not harmful(printable("".join(map(chr, range(0x3000)))))
    value = {"text": EVIL}
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value, "JSON says the same"


def test_a_guarded_stream_lets_no_bytes_past_it() -> None:
    below = io.StringIO()
    stream = SafeStream(below)
    print("x" + EVIL, file=stream)  # type: ignore[call-overload]
    stream.writelines(["y" + EVIL])
    assert not harmful(below.getvalue())
    assert not hasattr(stream, "buffer")


def test_streams_are_as_before_after_a_command(rollgym_command: Command) -> None:
    before = sys.stdout, sys.stderr
    rollgym_command("config", "list")
    assert (sys.stdout, sys.stderr) == before
    with guarded(), guarded():
        assert isinstance(sys.stdout, SafeStream)
        assert not isinstance(sys.stdout.rich_proxied_file, SafeStream)
    assert (sys.stdout, sys.stderr) == before


def test_rich_colors_but_sends_nothing_of_the_text() -> None:
    from rich.panel import Panel
    from rich.table import Table

    from rollgym.utils.rich_console import SafeConsole

    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, width=200)
    table = Table(f"head{EVIL}")
    table.add_row(f"[bold]cell{EVIL}[/]")
    words = (f"[link=http://x]words{EVIL}[/link]", f"[/wrong] {EVIL}")
    console.print(table, Panel(f"panel{EVIL}"), *words, highlight=False)
    shown = file.getvalue()
    assert "\x1b[1m" in shown, "its own styles are there"
    assert "\x1b]" not in shown, "no title, no link"
    assert "\x1b[2J" not in shown
    assert not harmful(shown) or set(harmful(shown)) == {"\x1b"}
    assert "[/wrong]" in shown, "brackets that are not markup are text"


@pytest.fixture
def evil(tmp_path: Path, rollgym_command: Command, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of environments and agents that write control characters wherever they can."""
    name = f"evil_words_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(WRITES_ANY.format(evil=EVIL))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield name  # type: ignore[misc]
    sys.modules.pop(name, None)


def check(ran: Any) -> None:
    assert not harmful(ran.out), repr(ran.out)
    assert not harmful(ran.err), repr(ran.err)


@pytest.mark.parametrize("more", [(), ("--json",), ("--workers", "1")], ids=["plain", "json", "workers"])
def test_an_evaluation_shows_what_environments_and_agents_say(
    rollgym_command: Command, evil: str, more: tuple[str, ...]
) -> None:
    for agent in ("random", f"{evil}:player"):
        ran = rollgym_command("eval", f"{evil}:Evil", "--agent", agent, "--episodes", "3", *more)
        check(ran)
        assert "\\u001b" in ran.out + ran.err


def test_a_game_shows_what_the_environment_says(
    rollgym_command: Command, evil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["/rules", "/hint", "go", "n"])
    monkeypatch.setattr("builtins.input", lambda *words: next(answers))
    ran = rollgym_command("play", f"{evil}:Evil")
    check(ran)
    assert "begin\\u001b" in ran.out
    answers = iter(["raise"])
    check(rollgym_command("play", f"{evil}:Evil"))


def test_a_person_sees_what_the_environment_says(rollgym_command: Command, evil: str) -> None:
    from rollgym.agents.human import HumanAgent

    out = io.StringIO()
    HumanAgent(None, output=out)._show(f"observation {EVIL}")  # type: ignore[arg-type]
    assert not harmful(out.getvalue())
    check(rollgym_command("check", f"{evil}:Evil", "--quick"))


def test_every_command_shows_what_a_run_says(rollgym_command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    evaluate(Request(env_id=ENV, agent="random", episodes=2), run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["agent"]["name"] = manifest["name"] = manifest["env"]["id"] = f"{EVIL}[/bold][link=x]"
    manifest["versions"]["numpy"] = f"1{EVIL}"
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "metrics.jsonl").write_text(f"{EVIL}\n")
    (run / "config.yaml").write_text(f"envs: [{{id: {json.dumps(EVIL)}}}]\n")
    event = {
        "t": 1,
        "kind": "episode_state",
        "episode": EVIL,
        "state": EVIL,
        "turn": 1,
        "worker": EVIL,
        "engine": 1,
    }
    events = [event, {"t": 2, "kind": "episode_finished", "episode": EVIL}]
    (run / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    for words in (
        ("view", "run"),
        ("compare", "run", "run"),
        ("compare", "run", "run", "--json"),
        ("trace", "run"),
        ("replay", "run"),
        ("config", "show", "run/config.yaml"),
        ("config", "show", "run/config.yaml", "--json"),
        ("plan", "run/config.yaml", "--cluster", "cpu:2"),
        ("train", "--resume", "--out", "run"),
        ("eval", f"nothing{EVIL}", "--agent", EVIL),
        ("bench", "show", "run"),
    ):
        ran = rollgym_command(*words)
        check(ran)
        assert "Unexpected error" not in ran.err, (words, ran.err)
    rewrite_episodes(run / "episodes.jsonl", ENV, {})
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    lines[0]["turns"][0]["observation"] = f"recorded {EVIL}"
    lines[1]["spec"]["env_id"] = f"{EVIL}:Env"
    for line in lines:
        (run / "episodes.jsonl").write_text(json.dumps(line) + "\n")
        check(rollgym_command("replay", "run"))
        check(rollgym_command("replay", "run", "--json"))


def test_every_command_shows_what_results_of_a_suite_say(rollgym_command: Command, tmp_path: Path) -> None:
    suite = tmp_path / "evil.toml"
    text = json.dumps(EVIL)
    entry = f'[[entries]]\nname = "one"\nenv = "{ENV}"\ntasks = 2\n'
    suite.write_text(f"schema = 1\nname = {text}\nversion = 1\nsummary = {text}\n{entry}")
    out = tmp_path / "results"
    SuiteRun(read_suite(suite), AgentSpec(agent="random", options={}), out).run()
    for words in (("show", "evil.toml"), ("show", "results"), ("compare", "results", "results"),
                  ("verify", "results"), ("verify", "results", "--json")):  # fmt: skip
        check(rollgym_command("bench", *words))


def test_the_training_panel_shows_untrusted_text_safely() -> None:
    pytest.importorskip("rich")
    from rollgym.trainer.tracking.console import Console

    file = io.StringIO()
    before, sys.stderr = sys.stderr, file
    try:
        console = Console(plain=True)
    finally:
        sys.stderr = before
    console.start(f"name{EVIL}", 3)
    console.note(f"note{EVIL}")
    console.step(1, {f"metric{EVIL}": 1.0, "success": 0.5})
    assert not harmful(file.getvalue())
    assert "note: note" in file.getvalue()


def test_a_real_terminal_gets_colors_and_no_control_characters_of_others(tmp_path: Path) -> None:
    """On a pseudo-terminal, where rich is at its most talkative."""
    run = tmp_path / "run"
    evaluate(Request(env_id=ENV, agent="random", episodes=2), run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["agent"]["name"] = "agent\x1b]0;title\x07\x1b[2J"
    (run / "manifest.json").write_text(json.dumps(manifest))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "rollgym", "compare", str(run), str(run)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "ascii:replace"},
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            shown += piece
        assert process.wait() == 0, shown
    os.close(ours)
    assert b"\x1b[1m" in shown, "rich's own styles reach the terminal"
    assert b"agent\\u001b]0;title" in shown
    assert b"\x1b]" not in shown
    assert b"\x1b[2J" not in shown


def test_a_traceback_is_shown_without_control_characters(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "rollgym", "--debug", "view", f"no{EVIL}where"],
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    shown = ran.stderr.decode()
    assert "Traceback" in shown
    assert not harmful(shown), shown
