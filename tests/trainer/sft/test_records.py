"""Records of data files: messages, episodes, and the reason for each one that cannot be used."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import MissingExtra, UsageError
from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.trainer.imitation.examples import Exchange
from rollgym.trainer.sft.records import Broken, Chat, DataFile, data_files, parse_messages, read_records


def said(*roles: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} {number}", **more} for number, role in enumerate(roles)]


def episode() -> Episode:
    turns = (Turn(observation="task 1", action="yes", reward=1.0, terminated=True),)
    spec = EpisodeSpec(episode_id="e", env_id="lessons:Yes")
    return Episode(spec=spec, outcome=Outcome.TERMINATED, turns=turns, success=True)


def test_messages_become_exchanges() -> None:
    chat = parse_messages(said("system", "user", "assistant", "user", "assistant", "user"))
    assert chat.system == "system 0"
    assert chat.exchanges == (Exchange("user 1", "assistant 2"), Exchange("user 3", "assistant 4"))


def test_content_may_be_text_parts_or_the_messages_a_json_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    assert parse_messages(json.dumps(messages)) == Chat("", (Exchange("ab", "c"),))


def test_a_reply_with_weight_0_is_context() -> None:
    messages = said("user", "assistant", "user", "assistant")
    messages[1]["weight"] = 0
    assert [exchange.learned for exchange in parse_messages(messages).exchanges] == [False, True]


WRONG: list[tuple[Any, str]] = [
    ("not a list", "messages are text that is not valid JSON"),
    ({}, "messages must be a list"),
    ([], "messages must be a list"),
    (["hello"], r"messages\[0\]: expected an object with role and content"),
    (said("user", "tool"), r"messages\[1\]: the role 'tool' is not supported"),
    (said("user", "user", "assistant"), r"messages\[1\]: two user messages in a row"),
    (said("assistant"), r"messages\[0\]: a reply without a user message"),
    (said("user", "assistant", "assistant"), r"messages\[2\]: two assistant messages in a row"),
    (said("user", "system", "assistant"), "only the first message can have the role system"),
    (said("user"), "no assistant message to learn"),
    (said("user", "assistant", weight=0), "no assistant message to learn"),
    (said("user", "assistant", weight=0.5), "weight must be 0 or 1"),
    ([*said("user"), {"role": "assistant", "content": " \n"}], "the assistant's message is empty"),
    ([*said("user"), {"role": "assistant", "content": None}], "the content must be text, not NoneType"),
    (
        [*said("user"), {"role": "assistant", "content": "", "tool_calls": [1]}],
        "tool calls are not supported",
    ),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "content of type 'image_url' is not supported"),
]


@pytest.mark.parametrize(("messages", "reason"), WRONG)
def test_wrong_messages_are_refused_with_a_reason(messages: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_messages(messages)


def test_each_line_is_a_conversation_an_episode_or_broken(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    good = json.dumps({"messages": said("user", "assistant"), "id": 7}).encode()
    lines = [
        good,
        b"{not json",
        b"",
        b'{"text": "hello"}',
        encode_episode(episode()),
        b'{"spec": 1}',
        b"\xff\xfe",
        b"[1]",
        good[:20],
    ]
    path.write_bytes(b"\n".join(lines))
    records = list(read_records(DataFile(path)))
    assert [record.place.rpartition(":")[2] for record in records] == list("12456789")
    kinds = [type(record.content).__name__ for record in records]
    assert kinds == ["Chat", "Broken", "Broken", "Episode", "Broken", "Broken", "Broken", "Broken"]
    reasons = [record.content.reason for record in records if isinstance(record.content, Broken)]
    assert reasons[0].startswith("not valid JSON")
    assert reasons[1] == "expected a JSON object with messages, or an episode of rollgym"
    assert "no schema version" in reasons[2]
    assert records[3].content == episode()


def test_a_run_folder_stands_for_its_episodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run folder: it has no manifest\.json"):
        data_files([str(tmp_path)])
    (tmp_path / "manifest.json").write_text('{"schema": 1, "kind": "eval"}')
    with pytest.raises(UsageError, match=r"has no episodes\.jsonl"):
        data_files([str(tmp_path)])
    (tmp_path / "episodes.jsonl").write_bytes(encode_episode(episode()) + b"\n")
    (file,) = data_files([str(tmp_path)])
    assert [record.content for record in read_records(file)] == [episode()]
    with pytest.raises(UsageError, match=r"Data file not found: nothing\.jsonl"):
        data_files(["nothing.jsonl"])


def test_a_link_out_of_a_run_folder_is_not_followed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text('{"schema": 1, "kind": "eval"}')
    (tmp_path / "secret.jsonl").write_text("{}\n")
    (run / "episodes.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (file,) = data_files([str(run)])
    with pytest.raises(UsageError, match="leads out of the folder"):
        list(read_records(file))


def test_a_suite_stands_for_all_its_entries(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": 1, "kind": "bench", "entries": ["a", "b"]}')
    for name in "ab":
        (tmp_path / "entries" / name).mkdir(parents=True)
        (tmp_path / "entries" / name / "episodes.jsonl").write_bytes(encode_episode(episode()) + b"\n")
    assert len(data_files([str(tmp_path)])) == 2


def test_without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    (tmp_path / "chats.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        MissingExtra, match=r"chats\.parquet needs the optional dependencies \[parquet\]: pip"
    ):
        list(read_records(DataFile(tmp_path / "chats.parquet")))


def test_a_parquet_file_has_a_column_messages(tmp_path: Path) -> None:
    pa: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "chats.parquet"
    parquet.write_table(pa.table({"messages": [said("user", "assistant"), said("user")], "n": [1, 2]}), path)
    good, bad = read_records(DataFile(path))
    assert good.content == Chat("", (Exchange("user 0", "assistant 1"),))
    assert bad.content == Broken("no assistant message to learn")
    assert bad.place == f"{path}:2"
    parquet.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(UsageError, match="no column messages; its columns are text"):
        list(read_records(DataFile(path)))
    path.write_bytes(b"not parquet")
    with pytest.raises(UsageError, match="Cannot read"):
        list(read_records(DataFile(path)))
