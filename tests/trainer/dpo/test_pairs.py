"""Preference pairs from records and episodes, and what is said about those that cannot be used."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from spelt import END, Spelt

from rollgym.agents.policy.agent import PolicyAgent
from rollgym.agents.policy.options import PolicyOptions
from rollgym.core.errors import UsageError
from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.testing import ScriptedEngine
from rollgym.trainer.dpo.config import PairDataConfig
from rollgym.trainer.dpo.pairs import Pair, PairReader, parse_pair
from rollgym.trainer.sft.dataset import no_examples
from rollgym.trainer.sft.records import DataFile


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def episode(task: int, word: str, reward: float, success: bool | None = None, **more: Any) -> Episode:
    turn = Turn(observation=f"at {task}", action=word, reward=reward, terminated=True)
    spec = EpisodeSpec(episode_id=f"e{task}{word}", env_id="test/Env-v0", task=task)
    made = Episode(
        spec=spec, outcome=Outcome.TERMINATED, turns=(turn,), success=success, instructions="Walk."
    )
    return replace(made, **more)


def read(
    path: Path, records: Sequence[Episode | dict[str, Any] | bytes], max_tokens: int = 1000, **settings: Any
) -> tuple[list[Pair], PairReader]:
    def line(record: Episode | dict[str, Any] | bytes) -> bytes:
        if isinstance(record, Episode):
            return encode_episode(record)
        return record if isinstance(record, bytes) else json.dumps(record).encode()

    path.write_bytes(b"".join(line(record) + b"\n" for record in records))
    agent = PolicyAgent(ScriptedEngine([END]), Spelt(), PolicyOptions())
    reader = PairReader(PairDataConfig(files=["x"], **settings), agent, max_tokens)
    found = reader.read([DataFile(path)])
    assert all(isinstance(pair, Pair) for pair in found)
    return found, reader  # type: ignore[return-value]


def words(pair: Pair) -> tuple[str, str]:
    """The learned text of both sides."""
    texts, at = ["", ""], 0
    for row in pair.tokens.sequences:
        side = int(at >= pair.chosen_tokens)
        ids = row.ids[row.action_positions].tolist()
        texts[side] += Spelt().decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        at += len(ids)
    return texts[0], texts[1]


def test_texts_and_messages_give_the_same_pair(tmp_path: Path) -> None:
    records = [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": [user("hi")], "chosen": [said("yes")], "rejected": [said("no")]},
        {"chosen": [user("hi"), said("yes")], "rejected": [user("hi"), said("no")]},
    ]
    found, reader = read(tmp_path / "a.jsonl", records)
    assert reader.report.counts == {"read": 3, "examples": 3}
    for pair in found:
        assert words(pair) == ("yes<end>", "no<end>")
        assert pair.signs.tolist() == [1.0] * 4 + [-1.0] * 3
        for row, first in zip(pair.tokens.sequences, found[0].tokens.sequences, strict=True):
            assert np.array_equal(row.ids, first.ids)


def test_replies_in_the_prompt_are_context_and_later_ones_are_learned(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, user("a"), said("b"), user("c")]
    record = {"prompt": prompt, "chosen": [said("d"), user("e"), said("f")], "rejected": [said("g")]}
    (pair,), _ = read(tmp_path / "a.jsonl", [record])
    assert words(pair) == ("d<end>f<end>", "g<end>")


UNUSABLE: list[tuple[Any, str]] = [
    ({"prompt": "hi", "chosen": "yes"}, "rejected missing: expected a JSON object with chosen and rejected"),
    (
        {"messages": [user("hi"), said("yes")]},
        "expected a JSON object with chosen and rejected, or an episode",
    ),
    ({"chosen": "yes", "rejected": "no"}, "prompt missing: only lists of messages can contain the prompt"),
    ({"prompt": "hi", "chosen": "yes", "rejected": "yes"}, "chosen and rejected are equal"),
    ({"prompt": "hi", "chosen": "yes", "rejected": " "}, "prompt and rejected: .* message is empty"),
    (
        {"prompt": 3, "chosen": "yes", "rejected": "no"},
        "prompt must be a text or a list of messages, not int",
    ),
    ({"prompt": [said("hi")], "chosen": "yes", "rejected": "no"}, "a reply without a user message before it"),
    (["yes"], "expected a JSON object with chosen and rejected"),
    (b"{broken", "not valid JSON"),
]


@pytest.mark.parametrize(("record", "reason"), UNUSABLE, ids=[reason[:20] for _, reason in UNUSABLE])
def test_unusable_lines_have_a_reason(tmp_path: Path, record: Any, reason: str) -> None:
    good = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    found, reader = read(tmp_path / "a.jsonl", [good, record])
    assert len(found) == 1
    (dropped,) = reader.report.dropped
    assert dropped["place"].endswith("a.jsonl:2")
    with pytest.raises(UsageError, match=reason):
        read(tmp_path / "b.jsonl", [record], strict=True)


def test_pairs_that_do_not_fit_are_dropped_and_named(tmp_path: Path) -> None:
    records = [{"prompt": "hi", "chosen": "yes", "rejected": "no" * 40}]
    found, reader = read(tmp_path / "a.jsonl", records, max_tokens=50)
    assert not found
    sentence = str(no_examples(reader, "train"))
    assert "of 1 records 1 too long. The shortest of those that are too long has" in sentence
    assert "at most 50 fit: use a model with a longer context, or raise data.max_tokens." in sentence


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    _, reader = read(tmp_path / "a.jsonl", [])
    assert "nothing to train on" in str(no_examples(reader, "train"))
    assert "a.jsonl has no records" in str(no_examples(reader, "train"))


def test_episodes_of_a_task_are_paired_by_success(tmp_path: Path) -> None:
    episodes = [
        episode(0, "won", 1.0, success=True),
        episode(0, "lost", 0.2, success=False),
        episode(0, "worst", 0.0, success=False),
        episode(1, "alone", 1.0, success=True),
        episode(2, "none", 0.5),
        episode(2, "low", 0.1, success=False),
    ]
    found, reader = read(tmp_path / "a.jsonl", episodes)
    assert [words(pair) for pair in found] == [("won<end>", "worst<end>")]
    assert reader.report.counts == {"read": 6, "examples": 1, "paired": 2, "unpaired": 4}
    found, reader = read(tmp_path / "b.jsonl", episodes, pairs_per_task=5)
    assert [words(pair)[1] for pair in found] == ["worst<end>", "lost<end>"]
    assert found[0].task == found[1].task
    assert reader.report.counts == {"read": 6, "examples": 2, "paired": 3, "unpaired": 3}


def test_episodes_of_a_task_are_paired_by_return(tmp_path: Path) -> None:
    episodes = [episode(0, word, reward) for word, reward in [("a", 0.1), ("b", 0.9), ("c", 0.5), ("d", 0.4)]]
    episodes += [episode(1, "a", 0.3), episode(1, "b", 0.3)]
    found, _ = read(tmp_path / "a.jsonl", episodes, pairs="return", pairs_per_task=2)
    assert [words(pair) for pair in found] == [("b<end>", "a<end>"), ("c<end>", "d<end>")]
    found, reader = read(tmp_path / "b.jsonl", episodes, pairs="return", min_difference=0.2, pairs_per_task=2)
    assert [words(pair) for pair in found] == [("b<end>", "a<end>")]
    assert reader.report.counts["unpaired"] == 4


def test_episodes_without_a_counterpart_say_what_helps(tmp_path: Path) -> None:
    found, reader = read(tmp_path / "a.jsonl", [episode(0, "won", 1.0, success=True)])
    assert not found
    sentence = str(no_examples(reader, "train"))
    assert "of 1 records 1 without a counterpart of the same task." in sentence
    assert "A pair needs two episodes of the same task with different success" in sentence


def test_parquet_files_have_the_same_columns(tmp_path: Path) -> None:
    pa: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"prompt": ["hi"], "chosen": ["yes"], "rejected": ["no"]}), path)
    agent = PolicyAgent(ScriptedEngine([END]), Spelt(), PolicyOptions())
    (pair,) = PairReader(PairDataConfig(files=["x"]), agent, 100).read([DataFile(path)])
    assert isinstance(pair, Pair)
    assert words(pair) == ("yes<end>", "no<end>")
    parquet.write_table(pa.table({"prompt": ["hi"], "chosen": ["yes"]}), path)
    with pytest.raises(UsageError, match="no column rejected; its columns are prompt, chosen"):
        PairReader(PairDataConfig(files=["x"]), agent, 100).read([DataFile(path)])


def test_a_text_with_the_form_of_json_stays_a_text() -> None:
    pair = parse_pair({"prompt": "[1]", "chosen": "[2]", "rejected": "{}"})
    assert (pair.chosen.exchanges[0].user, pair.chosen.exchanges[0].reply) == ("[1]", "[2]")
