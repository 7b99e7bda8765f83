"""A run's files may hold anything: reading them neither hangs nor crashes nor leaves the run's folder."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from strangers import ENV, make_canary, make_run

from rollgym.evaluation.runner import Request, evaluate

Command = Callable[..., Any]
FILES = ("manifest.json", "summary.json", "config.yaml", "metrics.jsonl", "evaluations.jsonl", "events.jsonl",
         "episodes.jsonl")  # fmt: skip
HANGS_AFTER = 120
"""Seconds after which a test is ended instead of waiting forever."""
SECRET = "the-secret-outside-of-the-run"


@pytest.fixture(autouse=True)
def _not_forever() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANGS_AFTER)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path, rollgym_command: Command) -> Path:
    folder = make_run(tmp_path / "run", make_canary(tmp_path))
    (folder / "evaluations.jsonl").write_text('{"step": 1, "env": "x", "success_rate": 0.5}\n')
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "kind": "train"}))
    return folder


def said_by(page: Path) -> str:
    """All the data that a page holds."""
    text = page.read_text(encoding="utf-8")
    parts = re.findall(r'<script type="text/plain" id="[^"]*">([^<]*)</script>', text)
    return text + "".join(gzip.decompress(base64.b64decode(part)).decode() for part in parts)


def change(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


DEEP = "[" * 100_000 + "]" * 100_000
VALUES: dict[str, Any] = {
    "null": None,
    "number": 7,
    "huge": 10**400,
    "float": 1e308,
    "text": "x" * 300_000,
    "surrogate": "\ud800 alone",
    "list": [[1, [2, [3]]], None],
    "object": {"id": {"id": []}, "name": ["x"], "options": 3, "kwargs": None},
    "markup": "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
}
KEYS = ("name", "kind", "env", "envs", "agent", "seed", "episodes", "versions", "entries", "suite", "created",
        "success_means", "split")  # fmt: skip


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_manifest_of_any_types_is_shown(run: Path, rollgym_command: Command, value: Any) -> None:
    for key in KEYS:
        change(run / "manifest.json", key, value)
    change(run / "manifest.json", "kind", "bench" if isinstance(value, list) else "train")
    change(run / "summary.json", "pass_at_k", value)
    change(run / "summary.json", "entries", [value])
    ran = rollgym_command("view", "run")
    assert ran.code == 0, ran.err
    assert "<img src=x" not in (run / "report.html").read_text(encoding="utf-8")


LINES = {
    "deep": DEEP,
    "deep-object": '{"schema":1,"spec":' * 50_000,
    "nan": '{"step": NaN, "success": Infinity, "t": NaN, "kind": "episode_state"}',
    "big-numbers": '{"step": 1e308, "success": -1e308, "t": 1e308, "kind": "episode_state", '
    '"schema": 9999999999999}',
    "digits": '{"step": ' + "9" * 10_000 + ', "schema": 1}',
    "types": '{"step": [], "success": {}, "env": 3, "t": 1, "kind": "episode_state", "episode": [], '
    '"state": {}, "turn": "x", "worker": 3, "engine": {}}',
    "mixed-engines": '{"t": 1, "kind": "episode_state", "episode": "a", "state": "generating", '
    '"turn": 1, "worker": "", "engine": "x"}',
    "surrogate": '{"step": 1, "phase": "\\ud800", "env": "\\udfff", "t": 1, "kind": "\\ud800"}',
    "not-utf8": "\xff\xfe{}",
    "nothing": "",
    "no-object": '3\n[]\nnull\n"x"',
    "names": json.dumps({"step": 1} | {f"seconds_{number}": 1.0 for number in range(20_000)}),
    "schema": '{"schema": 999}',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_lines_of_any_kind_are_skipped_or_shown(run: Path, rollgym_command: Command, line: str) -> None:
    for name in FILES[1:]:
        good = (run / name).read_bytes() if name.endswith("jsonl") else b""
        (run / name).write_bytes(good + (f"{line}\n" * 20).encode("latin-1"))
    ran = rollgym_command("view", "run")
    assert ran.code == 0, ran.err
    assert "all 2 episodes" in ran.out, "the good lines are shown"


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_manifest_that_cannot_be_read_is_one_sentence(
    run: Path, rollgym_command: Command, line: str
) -> None:
    (run / "manifest.json").write_bytes(line.encode("latin-1"))
    ran = rollgym_command("view", "run")
    assert ran.code in (1, 2), ran.err
    assert "manifest.json" in ran.err
    assert len(ran.err.splitlines()) == 1
    assert "Unexpected error" not in ran.err


def test_an_episode_of_any_size_and_depth_is_shown(run: Path, rollgym_command: Command) -> None:
    path = run / "episodes.jsonl"
    episode = json.loads(path.read_text().splitlines()[0])
    for depth in (10, 200, 400, 600, 800, 900, 950, 990, 5_000):
        info = "[" * depth + "]" * depth
        turn = json.dumps(episode["turns"][-1]).replace('"info": {', f'"info": {{"deep": {info}, ')
        text = json.dumps({**episode, "turns": ["TURN"], "step": 1}).replace('"TURN"', turn)
        with open(path, "a") as file:
            file.write(text + "\n")
    for reward in (1e308, -1e308, 0.0):
        odd = {**episode["turns"][0], "reward": reward, "action_ids": [2**62, 0], "prompt_ids": [2**31]}
        many = {**episode, "turns": [*[odd] * 50, episode["turns"][-1]], "seconds": 1e308, "step": 10**15}
        many["spec"] = {**episode["spec"], "episode_id": "e" * 100_000, "env_id": f"{reward}"}
        with open(path, "a") as file:
            file.write(json.dumps(many) + "\n")
    ran = rollgym_command("view", "run")
    assert ran.code == 0, ran.err
    assert "nested too deeply" in said_by(run / "report.html")


def test_a_line_longer_than_any_episode_is_skipped_without_being_held(
    run: Path, rollgym_command: Command
) -> None:
    with open(run / "episodes.jsonl", "ab") as file:
        file.truncate(file.tell() + 300_000_000)  # sparse: zeros without a newline
        file.seek(0, 2)
        file.write(b"\n")
    ran = rollgym_command("view", "run")
    assert ran.code == 0, ran.err
    assert "longer than 64,000,000 bytes" in ran.out


def test_spans_that_all_overlap_are_drawn_in_order_of_their_number(
    run: Path, rollgym_command: Command
) -> None:
    events = [
        {"t": 0.001 * n, "kind": "episode_state", "episode": str(n), "state": "stepping", "turn": 1,
         "worker": "w", "engine": None}
        for n in range(20_000)
    ]  # fmt: skip
    events += [{"t": 1_000 + 0.001 * n, "kind": "episode_finished", "episode": str(n)} for n in range(20_000)]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert rollgym_command("view", "run").code == 0


@pytest.mark.parametrize(
    "text", [DEEP, "{" * 5_000, "a: &x [1]\nb: *x\n", "x" * 3_000_000, "- \x00", "extends: /dev/zero"]
)
def test_a_config_of_any_kind_is_shown_or_refused(run: Path, rollgym_command: Command, text: str) -> None:
    (run / "config.yaml").write_text(text)
    assert rollgym_command("view", "run").code == 0
    ran = rollgym_command("config", "show", "run/config.yaml")
    assert ran.code == 2
    assert "Unexpected error" not in ran.err


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
        {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}],
        },
        {"type": "nonsense"},
    ],
)
def test_a_tokenizer_of_others_does_not_hang_the_page(
    run: Path, rollgym_command: Command, decoder: dict[str, Any]
) -> None:
    pytest.importorskip("tokenizers")
    vocab = {"a" * 64 + "!": 0, "<unk>": 1}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    (run / "final").mkdir()
    (run / "final" / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model})
    )
    path = run / "episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["turns"][0].update(action_ids=[0, 1, 2**40], logprobs=[0.0, 0.0, 0.0])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert rollgym_command("view", "run").code == 0


def test_thousands_of_entries_and_files_are_left_aside(run: Path, rollgym_command: Command) -> None:
    names = ["../../outside", "a\0b", "..", "/etc", *map(str, range(100_000))]
    change(run / "manifest.json", "kind", "bench")
    change(run / "manifest.json", "entries", names)
    for number in range(3_000):
        (run / f"file-{number}").touch()
    assert rollgym_command("view", "run").code == 0


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_run_is_not_shown(
    run: Path, rollgym_command: Command, tmp_path: Path, name: str
) -> None:
    content = (run / name).read_text()
    outside = tmp_path / "outside"
    outside.write_text(content.replace("{", f'{{"{SECRET}": 1, "name": "{SECRET}", "phase": "{SECRET}", ', 1))
    (run / name).unlink()
    (run / name).symlink_to(outside)
    ran = rollgym_command("view", "run")
    assert SECRET not in ran.out + ran.err
    if name == "manifest.json":
        assert ran.code != 0
        assert "a link that leads out of the folder" in ran.err
    else:
        assert ran.code == 0, ran.err
        assert SECRET not in said_by(run / "report.html")


def test_a_linked_folder_out_of_the_run_is_not_shown(
    run: Path, rollgym_command: Command, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    os.replace(run / "episodes.jsonl", tmp_path / "outside" / "episodes.jsonl")
    change(run / "manifest.json", "kind", "bench")
    change(run / "manifest.json", "entries", ["one"])
    (run / "entries").mkdir()
    (run / "entries" / "one").symlink_to(tmp_path / "outside")
    assert rollgym_command("view", "run").code == 0
    assert '"episodes":0' in said_by(run / "report.html")


@pytest.mark.parametrize("names", [FILES[:1], FILES[1:]], ids=["manifest", "others"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_not_a_file_is_not_waited_for(
    run: Path, rollgym_command: Command, names: tuple[str, ...], kind: str
) -> None:
    for name in names:
        (run / name).unlink()
        if kind == "pipe":
            os.mkfifo(run / name)
        elif kind == "folder":
            (run / name).mkdir()
        else:
            (run / name).symlink_to("/dev/zero")
    for words in (("view", "run"), ("trace", "run"), ("compare", "run", "run"), ("replay", "run")):
        ran = rollgym_command(*words)
        assert "Unexpected error" not in ran.err, (words, ran.err)
        assert words[0] != "view" or ran.code == (0 if "manifest.json" not in names else 1), ran.err


@pytest.mark.parametrize("name", ["report.html", "trace.json"])
def test_what_a_reader_writes_goes_through_no_link(
    run: Path, rollgym_command: Command, tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (run / name).symlink_to(outside)
    for number in range(os.getpid() - 3, os.getpid() + 4):
        (run / f".{name}.{number}").symlink_to(outside)
    assert rollgym_command("view", "run").code == 0
    assert rollgym_command("trace", "run").code == 0
    assert outside.read_text() == "precious"


LINKED = ("episodes.jsonl", "events.jsonl", "manifest.json", "summary.json", "anything", ".manifest.json.1")


@pytest.mark.parametrize("name", LINKED)
def test_an_evaluation_is_not_resumed_through_a_link(
    rollgym_command: Command, tmp_path: Path, name: str
) -> None:
    evaluate(Request(env_id=ENV, agent="random", episodes=2), tmp_path / "r")
    outside = tmp_path / "outside"
    if (tmp_path / "r" / name).exists():
        os.replace(tmp_path / "r" / name, outside)
    else:
        outside.write_text("precious")
    before = outside.read_bytes() + b"half a line"
    outside.write_bytes(before)
    (tmp_path / "r" / name).symlink_to(outside)
    ran = rollgym_command("eval", ENV, "--agent", "random", "--episodes", "2", "--out", "r", "--resume")
    assert ran.code == 2, ran
    assert "is a link out of the run folder" in ran.err
    assert outside.read_bytes() == before


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "checkpoints", "tensorboard", "final", "wandb.json"]
)
def test_a_training_is_not_resumed_through_a_link(
    run: Path, rollgym_command: Command, tmp_path: Path, name: str
) -> None:
    (run / "config.yaml").write_text(json.dumps({"envs": [{"id": ENV}]}))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step-00000001").mkdir()
    (outside / "file").write_text("precious")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside if "." not in name else outside / "file")
    ran = rollgym_command("train", "--resume", "--out", "run")
    assert ran.code == 2, ran
    assert f"run/{name} is a link out of the run folder" in ran.err
    assert (outside / "file").read_text() == "precious"
    assert (outside / "step-00000001").is_dir()


def test_a_link_within_the_run_and_a_linked_run_are_fine(
    run: Path, rollgym_command: Command, tmp_path: Path
) -> None:
    os.replace(run / "episodes.jsonl", run / "moved.jsonl")
    (run / "episodes.jsonl").symlink_to("moved.jsonl")
    (tmp_path / "linked").symlink_to(run)
    ran = rollgym_command("view", "linked")
    assert ran.code == 0
    assert "all 2 episodes" in ran.out
