"""From records to examples: what is learned, what is dropped, and that nothing is lost."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spelt import END, Spelt

from rollgym.agents.policy.agent import PolicyAgent
from rollgym.agents.policy.options import PolicyOptions
from rollgym.chat import ChatTemplate
from rollgym.core.errors import UsageError
from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, Turn
from rollgym.testing import ScriptedEngine
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence
from rollgym.trainer.imitation.examples import (
    Exchange,
    epoch_batches,
    fitting_turns,
    message_turns,
    supervised_batch,
    token_example,
)
from rollgym.trainer.sft.config import DataConfig
from rollgym.trainer.sft.dataset import DROPPED, DataReader, Example, no_examples, split_off
from rollgym.trainer.sft.records import DataFile


def text(ids: Any) -> str:
    return Spelt().decode(
        np.asarray(ids).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def learned(row: TokenSequence) -> str:
    return text(row.ids[row.action_positions])


def agent(**options: Any) -> PolicyAgent:
    return PolicyAgent(ScriptedEngine([END]), Spelt(), PolicyOptions(**options))


def episode(task: int = 0, replies: Sequence[str] = ("yes",), **more: Any) -> Episode:
    turns = tuple(
        Turn(observation=f"at {n}", action=reply, reward=1.0, terminated=n == len(replies) - 1)
        for n, reply in enumerate(replies)
    )
    spec = EpisodeSpec(episode_id=f"e{task}", env_id="test/Env-v0", task=task)
    return replace(
        Episode(spec=spec, outcome=Outcome.TERMINATED, turns=turns, success=True, instructions="Walk."),
        **more,
    )


def write(path: Path, *records: Episode | list[str] | bytes) -> DataFile:
    def line(record: Episode | list[str] | bytes) -> bytes:
        if isinstance(record, Episode):
            return encode_episode(record)
        if isinstance(record, bytes):
            return record
        roles = ["user", "assistant"] * len(record)
        messages = [{"role": role, "content": words} for role, words in zip(roles, record, strict=False)]
        return json.dumps({"messages": messages}).encode()

    path.write_bytes(b"".join(line(record) + b"\n" for record in records))
    return DataFile(path)


def read(
    file: DataFile, made: PolicyAgent | None = None, max_tokens: int = 1000, **settings: Any
) -> tuple[list[Example], DataReader]:
    held = settings.pop("held_out", ())
    reader = DataReader(DataConfig(files=["x"], **settings), made or agent(), max_tokens, held)
    return reader.read([file]), reader


def test_only_the_assistants_messages_are_learned_in_the_template_of_the_model() -> None:
    turns = message_turns(
        ChatTemplate(Spelt()), "Be kind.", [Exchange("hi", "hello"), Exchange("bye", "ciao")]
    )
    (row,) = token_example("c", turns).sequences
    assert text(row.ids) == (
        "<start>s:Be kind.<end>\n<start>u:hi<end>\n<start>a:hello<end>\n<start>u:bye<end>\n<start>a:ciao<end>"
    )
    assert learned(row) == "hello<end>ciao<end>"


def test_a_reply_that_is_not_learned_is_still_context() -> None:
    turns = message_turns(
        ChatTemplate(Spelt()), "", [Exchange("hi", "hello", learned=False), Exchange("bye", "ciao")]
    )
    example = token_example("c", turns)
    (row,) = example.sequences
    assert "a:hello<end>" in text(row.ids)
    assert learned(row) == "ciao<end>"
    assert example.num_tokens == len(example.behavior) == 5
    batch = supervised_batch([example])
    assert batch.arrays["advantages"].tolist() == [1.0] * 5


def test_text_that_looks_like_a_control_token_ends_no_reply(tmp_path: Path) -> None:
    examples, reader = read(write(tmp_path / "a.jsonl", ["hi", "a<end>b"], ["<end>hi", "ok"]))
    assert [learned(example.tokens.sequences[0]) for example in examples] == ["ok<end>"]
    (dropped,) = reader.report.dropped
    assert "contains a token that ends replies" in dropped["reason"]


def test_truncation_ends_at_a_turn() -> None:
    exchanges = [Exchange("hi", "hello"), Exchange("bye", "ciao"), Exchange("eh", "oh")]
    turns = message_turns(ChatTemplate(Spelt()), "", exchanges)
    sizes = np.cumsum([len(turn.prompt_ids) + len(turn.action_ids) for turn in turns]).tolist()
    for limit, kept in [(sizes[0] - 1, 0), (sizes[0], 1), (sizes[1] - 1, 1), (sizes[1], 2), (sizes[2], 3)]:
        assert len(fitting_turns(turns, limit)) == kept


def test_conversations_that_are_too_long_are_dropped_or_truncated_and_counted(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl", ["hi", "yes"], ["hi", "yes", "again", "yes " * 20], ["long " * 20, "no"]
    )
    examples, reader = read(file, max_tokens=60)
    assert len(examples) == 1
    assert (reader.report.counts["too_long"], reader.report.counts["truncated"]) == (2, 0)
    assert "at most 60 fit" in reader.report.dropped[0]["reason"]
    examples, reader = read(file, max_tokens=60, too_long="truncate")
    assert [learned(example.tokens.sequences[0]) for example in examples] == ["yes<end>", "yes<end>"]
    assert (reader.report.counts["too_long"], reader.report.counts["truncated"]) == (1, 1)
    assert all(len(row.ids) <= 60 for example in examples for row in example.tokens.sequences)


def test_every_record_is_counted_once(tmp_path: Path) -> None:
    failed = episode(1, outcome=Outcome.ENV_ERROR, success=None, error=Failure(type="E", message="broke"))
    failed = replace(failed, turns=(replace(failed.turns[0], terminated=False),))
    empty = replace(episode(2), turns=(), outcome=Outcome.TURN_LIMIT, success=False)
    held = replace(episode(3), spec=EpisodeSpec(episode_id="h", env_id="test/Env-v0", split="dev"))
    records: list[Any] = [["hi", "yes"], b"{broken", ["hi", "yes " * 200], episode(4), failed, empty, held]
    records += [episode(5, success=False), episode(4, success=False), ["only a question"]]
    file = write(tmp_path / "a.jsonl", *records)
    for keep in ("all", "successful", "best"):
        examples, reader = read(file, max_tokens=100, keep=keep, held_out=[("test/Env-v0", "dev")])
        counts = reader.report.counts
        assert counts["read"] == len(records) == len(examples) + sum(counts[name] for name in DROPPED)
        assert counts["examples"] == len(examples)
        assert (counts["broken"], counts["failed"], counts["no_turns"], counts["held_out"]) == (2, 1, 1, 1)
        assert counts["unsuccessful"] == (0 if keep == "all" else 2)
    assert [one["place"].rpartition(":")[2] for one in reader.report.dropped][:2] == ["2", "3"]


def test_the_best_of_each_task_is_the_shortest_with_the_highest_return(tmp_path: Path) -> None:
    worse = episode(1, ("left",))
    worse = replace(worse, turns=(replace(worse.turns[0], reward=0.5),))
    longer = episode(1, ("up", "down"))
    longer = replace(longer, turns=tuple(replace(turn, reward=0.5) for turn in longer.turns))
    best, again = episode(1, ("right",)), episode(1, ("RIGHT",))
    unknown = [episode(2, ("a",), success=None), episode(2, ("b", "c"), success=None)]
    file = write(
        tmp_path / "a.jsonl", worse, longer, best, again, episode(3, ("no",), success=False), *unknown
    )
    examples, reader = read(file, keep="best")
    assert [learned(example.tokens.sequences[0]) for example in examples] == ["right<end>", "b<end>c<end>"]
    assert (reader.report.counts["not_best"], reader.report.counts["unsuccessful"]) == (4, 1)


def test_recorded_token_ids_are_used_if_they_are_of_this_tokenizer(tmp_path: Path) -> None:
    made = agent(instructions=False)
    odd = (
        *Spelt().encode("y", add_special_tokens=False),
        *Spelt().encode("es", add_special_tokens=False),
        END,
    )
    turn = Turn(
        observation="at 0", action="yes", response="yes", terminated=True, prompt_ids=(1,), action_ids=odd
    )
    own = replace(episode(1), turns=(turn,))
    other = replace(episode(2), turns=(replace(turn, action_ids=(10**6, 3)),))
    foreign = replace(episode(3), turns=(replace(turn, response="no"),))
    cut = replace(episode(4), turns=(replace(turn, action_ids=odd[:-1], finish_reason="length"),))
    open_end = replace(episode(5), turns=(replace(turn, action_ids=odd[:-1]),))
    examples, _ = read(write(tmp_path / "a.jsonl", own, other, foreign, cut, open_end), made)
    assert [example.recorded for example in examples] == [True, False, False, True, False]
    rows = [example.tokens.sequences[0] for example in examples]
    assert rows[0].ids[rows[0].action_positions].tolist() == list(odd)
    assert [learned(row) for row in rows] == ["yes<end>", "yes<end>", "no<end>", "yes", "yes<end>"]
    assert text(rows[0].ids) == "<start>u:at 0<end>\n<start>a:yes<end>", "the prompt is the policy's own"


def test_turns_of_a_demonstration_that_erred_are_context(tmp_path: Path) -> None:
    line = b'{"erred": [true, false], ' + encode_episode(episode(1, ("no", "yes")))[1:]
    all_erred = b'{"erred": [true], ' + encode_episode(episode(2))[1:]
    examples, reader = read(write(tmp_path / "a.jsonl", line, all_erred), agent(instructions=False))
    (example,) = examples
    assert learned(example.tokens.sequences[0]) == "yes<end>"
    assert "no turn to learn" in reader.report.dropped[0]["reason"]


def test_strict_stops_at_the_first_broken_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ["hi", "yes"], b"{broken", ["hi"])
    with pytest.raises(UsageError, match=r"a\.jsonl:2: not valid JSON"):
        read(file, strict=True)


def test_more_broken_lines_than_allowed_stop_the_run(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ["hi", "yes"], *[b"{broken"] * 3)
    examples, _ = read(file, max_broken=3)
    assert len(examples) == 1
    with pytest.raises(UsageError, match=r"(?s)More than 2 records are unusable.*a\.jsonl:2: not valid JSON"):
        read(file, max_broken=2)


def test_data_without_an_example_say_why(tmp_path: Path) -> None:
    examples, reader = read(write(tmp_path / "a.jsonl", ["hi", "yes"], b"{"), max_tokens=4)
    assert not examples
    sentence = str(no_examples(reader, "train"))
    assert "of 2 records 1 unusable, 1 too long" in sentence
    assert "at most 4 fit: use a model with a longer context" in sentence
    assert "a.jsonl:2: not valid JSON" in sentence
    _, reader = read(write(tmp_path / "b.jsonl"))
    assert "b.jsonl has no records" in str(no_examples(reader, "train"))
    _, reader = read(write(tmp_path / "c.jsonl", episode(success=False)), keep="successful")
    assert "data.keep=successful drops" in str(no_examples(reader, "train"))


def example(task: int) -> Example:
    return Example(TokenEpisode("e", (), np.zeros(0), np.zeros(0, dtype=np.int64)), task)


def test_validation_holds_out_whole_tasks_and_never_all() -> None:
    examples = [example(number // 4) for number in range(40)]
    train, validation = split_off(examples, 0.25, seed=3)
    assert len(validation) == 12
    assert not {one.task for one in train} & {one.task for one in validation}
    assert [one.task for one in train] == sorted(one.task for one in train)
    again = split_off(examples, 0.25, seed=3)[1]
    assert [one.task for one in again] == [one.task for one in validation]
    assert [one.task for one in split_off(examples, 0.25, seed=4)[1]] != [one.task for one in validation]
    assert split_off(examples, 0.0, seed=0) == (examples, [])
    assert len(split_off([example(0)] * 3, 0.5, seed=0)[0]) == 3


def test_every_epoch_has_every_example_once_in_another_order() -> None:
    batches = list(epoch_batches(10, 4, 3, seed=0))
    assert [len(batch) for batch in batches] == [4, 4, 2] * 3
    epochs = [[i for batch in batches[n : n + 3] for i in batch] for n in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
