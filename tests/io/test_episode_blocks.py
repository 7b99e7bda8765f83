"""Blocks of episodes: what is read equals what was written, and damage is never read as an episode."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgym.core.errors import ResultsError, UsageError
from rollgym.core.serialization import decode_episode, encode_episode
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Seconds, Turn
from rollgym.evaluation.replay import finished_episodes
from rollgym.evaluation.run_results import load_run
from rollgym.evaluation.trajectory_export import export_episodes
from rollgym.io import episode_blocks
from rollgym.io.episode_blocks import (
    complete_end,
    encode_blocks,
    episode_line,
    find_episode,
    read_blocks,
    stored_episodes,
)
from rollgym.io.run_dir import read_run

NAME = "episodes.blocks"
ids = st.lists(st.one_of(st.integers(0, 200_000), st.integers(-(2**40), 2**40)), max_size=6).map(tuple)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def turns(draw: Callable[..., Any]) -> Turn:
    action = draw(ids)
    exact = draw(st.booleans())
    logprobs = tuple(draw(st.floats(-9, 0, width=32 if exact else 64)) for _ in action)
    return Turn(
        observation=draw(st.text(max_size=5)),
        action=draw(st.text(max_size=5)),
        reward=draw(numbers),
        info=draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)),
        prompt_ids=draw(ids),
        action_ids=action,
        logprobs=draw(st.sampled_from([logprobs, ()])),
        version_spans=((3, len(action)),),
        new_row=draw(st.booleans()),
        seconds=Seconds(generate=draw(st.floats(0, 9))),
    )


@st.composite
def episodes(draw: Callable[..., Any]) -> Episode:
    played = draw(st.lists(turns(), max_size=3))
    spec = EpisodeSpec(
        episode_id=draw(st.text(min_size=1, max_size=4)), env_id="a/B-v0", task=draw(st.none() | st.just(7))
    )
    outcome = Outcome.TURN_LIMIT if played else Outcome.TIME_LIMIT
    return Episode(
        spec=spec, outcome=outcome, turns=tuple(played), final_ids=draw(ids), success=draw(st.booleans())
    )


def plain(name: str, tokens: int = 3) -> Episode:
    turn = Turn(
        observation="o", action="a", action_ids=tuple(range(tokens)), logprobs=(-0.5,) * tokens,
        prompt_ids=(1, 2), version_spans=((4, tokens),), policy_version=4,
    )  # fmt: skip
    return Episode(
        spec=EpisodeSpec(episode_id=name, env_id="a/B-v0"), outcome=Outcome.TURN_LIMIT, turns=(turn,)
    )


@pytest.fixture(params=["zstd", "zlib"])
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Without zstandard, blocks are written with zlib."""
    if request.param == "zlib":
        monkeypatch.setattr(episode_blocks, "_zstandard", lambda: None)
    else:
        pytest.importorskip("zstandard")
    return str(request.param)


@given(played=st.lists(episodes(), max_size=5), step=st.none() | st.integers(0, 9))
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
def test_what_is_read_equals_what_was_written(
    tmp_path: Path, played: list[Episode], step: int | None
) -> None:
    path = tmp_path / NAME
    values = [{"ratios": [1.0] * sum(len(turn.action_ids) for turn in one.turns)} for one in played]
    path.write_bytes(b"".join([*encode_blocks(step, played, values), *encode_blocks(1, played)]))
    stored = list(stored_episodes(path))
    assert [one.episode for one in stored] == [*played, *played]
    assert [one.step for one in stored] == [step] * len(played) + [1] * len(played)
    assert [dict(one.values) for one in stored[: len(played)]] == values
    assert all(type(turn.prompt_ids) is tuple for one in stored for turn in one.episode.turns)
    for one, episode in zip(stored[len(played) :], played, strict=True):
        assert episode_line(one) == b'{"step":1,' + encode_episode(episode)[1:]
        assert decode_episode(episode_line(one)) == episode
    light = list(stored_episodes(path, tokens=False))
    assert [one.action_tokens for one in light] == [one.action_tokens for one in stored]
    assert not any(turn.action_ids for one in light for turn in one.episode.turns)
    for number, one in enumerate(
        episode for block in read_blocks(path) for episode in map(block.read_one, range(len(block.ids)))
    ):
        assert one == stored[number]


def test_lone_surrogates_are_replaced_as_in_lines(tmp_path: Path) -> None:
    episode = replace(plain("a"), instructions="\ud800x")
    (tmp_path / NAME).write_bytes(b"".join(encode_blocks(1, [episode])))
    (stored,) = stored_episodes(tmp_path / NAME)
    assert stored.episode == decode_episode(encode_episode(episode)) != episode


def test_the_index_finds_an_episode(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / NAME
    monkeypatch.setattr(episode_blocks, "BLOCK_EPISODES", 2)
    for step in (1, 2):
        with open(path, "ab") as file:
            file.writelines(encode_blocks(step, [plain(f"{step}-{n}") for n in range(5)]))
    blocks = list(read_blocks(path))
    assert [(block.step, block.ids) for block in blocks] == [
        (step, names)
        for step in (1, 2)
        for names in ([f"{step}-0", f"{step}-1"], [f"{step}-2", f"{step}-3"], [f"{step}-4"])
    ]
    assert {block.head.codec for block in blocks} == {codec}
    assert [block.start for block in blocks][1:] == [block.end for block in blocks][:-1]
    found = find_episode(path, "2-3")
    assert found is not None
    assert (found.step, found.episode) == (2, plain("2-3"))
    assert find_episode(path, "3-0") is None
    assert [block.step for block in read_blocks(path, blocks[3].start, blocks[4].end)] == [2, 2]


def test_tokens_that_are_all_the_same_are_read(tmp_path: Path, codec: str) -> None:
    """Such a column is thousands of times smaller than its content."""
    turn = replace(plain("a").turns[0], action_ids=(7,) * 300_000, logprobs=(), version_spans=())
    episode = replace(plain("a"), turns=(turn,))
    (tmp_path / NAME).write_bytes(b"".join(encode_blocks(1, [episode])))
    assert (tmp_path / NAME).stat().st_size < 20_000
    assert [stored.episode for stored in stored_episodes(tmp_path / NAME)] == [episode]


def test_blocks_end_after_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_blocks, "BLOCK_TOKENS", 20)
    assert len(list(encode_blocks(1, [plain(str(n), tokens=8) for n in range(5)]))) == 3
    monkeypatch.setattr(episode_blocks, "BLOCK_TEXT", 1_000)
    assert len(list(encode_blocks(1, [plain(str(n), tokens=1) for n in range(4)]))) == 2
    assert list(encode_blocks(1, [])) == []


def test_a_file_cut_off_anywhere_holds_its_complete_blocks(tmp_path: Path) -> None:
    """A killed process leaves any number of bytes of the block that it wrote."""
    first, second = (b"".join(encode_blocks(step, [plain(str(step))])) for step in (1, 2))
    path = tmp_path / NAME
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        assert [block.step for block in read_blocks(path)] == [1]
        assert complete_end(path, len(first) + cut) == len(first)
    path.write_bytes(first + second)
    assert complete_end(path, len(first + second)) == len(first + second)
    assert complete_end(path, len(first + second) - 1) == len(first)


def test_a_last_block_with_other_bytes_does_not_count(tmp_path: Path) -> None:
    """After a power cut a file can have its length without its content."""
    first, second = (b"".join(encode_blocks(step, [plain(str(step))])) for step in (1, 2))
    path = tmp_path / NAME
    path.write_bytes(first + second[:-30] + bytes(30))
    assert complete_end(path, path.stat().st_size) == len(first)
    path.write_bytes(first + bytes(len(second)))
    with pytest.raises(ResultsError, match=f"is damaged at byte {len(first)}: no block starts there"):
        complete_end(path, path.stat().st_size)


@pytest.mark.parametrize("change", ["raw", "kind", "rows", "ids", "codec", "schema", "head"])
def test_damage_is_an_error_with_the_place(tmp_path: Path, change: str) -> None:
    """A hostile head neither crashes the reader nor makes it allocate what it claims."""
    (data,) = encode_blocks(1, [plain("a"), plain("b")])
    magic, size, payload, checksum = struct.unpack_from("<8sIQI", data)
    head = json.loads(data[24 : 24 + size])
    if change == "raw":
        head["columns"][0]["raw"] = 10**12
    elif change == "kind":
        head["columns"][1]["kind"] = "|O"
    elif change == "rows":
        head["columns"][0]["size"] = 3
    elif change == "ids":
        head["ids"] = ["a"]
    elif change == "codec":
        head["codec"] = "rot13"
    elif change == "schema":
        head["schema"] = 99
    changed = b"nonsense" if change == "head" else json.dumps(head).encode()
    prefix = struct.pack("<8sIQI", magic, len(changed), payload, checksum)
    (tmp_path / NAME).write_bytes(prefix + changed + data[24 + size :])
    words = {"codec": "upgrade rollgym", "schema": "written with schema 99", "head": "damaged at byte 0"}
    with pytest.raises(ResultsError, match=words.get(change, "block at byte 0: not valid")):
        list(stored_episodes(tmp_path / NAME))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_bytes(b"".join(encode_blocks(1, [plain("a")])))
    (tmp_path / "run" / NAME).symlink_to(tmp_path / "secret")
    with pytest.raises(ResultsError, match="a link that leads out of the folder"):
        list(stored_episodes(tmp_path / "run" / NAME, tmp_path / "run"))


def test_episodes_are_exported_as_lines(tmp_path: Path) -> None:
    """What an older version would have written, byte for byte."""
    (tmp_path / "manifest.json").write_text('{"schema": 1, "kind": "train"}')
    old = b'{"step":1,' + encode_episode(plain("a"))[1:] + b"\n"
    (tmp_path / "episodes.jsonl").write_bytes(old)
    (tmp_path / NAME).write_bytes(b"".join(encode_blocks(2, [plain("b")], [{"ratios": [1.0, 0.5, 2.0]}])))
    done = export_episodes(tmp_path, tmp_path / "out.jsonl")
    new = b'{"step":2,"tokens":{"ratios":[1.0,0.5,2.0]},' + encode_episode(plain("b"))[1:] + b"\n"
    assert (tmp_path / "out.jsonl").read_bytes() == old + new
    assert done.rows == 2
    with pytest.raises(UsageError, match="exists already"):
        export_episodes(tmp_path, tmp_path / "out.jsonl")


def test_runs_are_read_from_lines_and_blocks(tmp_path: Path) -> None:
    """A run that an older version began has both; other readers see one list of episodes."""
    (tmp_path / "manifest.json").write_text('{"schema": 1, "kind": "train"}')
    (tmp_path / "episodes.jsonl").write_bytes(b'{"step":1,' + encode_episode(plain("a"))[1:] + b"\n")
    assert list(load_run(tmp_path).episodes) == [plain("a")]
    (tmp_path / NAME).write_bytes(b"".join(encode_blocks(2, [plain("b")])))
    for _ in range(2):
        expected = [plain("a"), plain("b")] if (tmp_path / "episodes.jsonl").exists() else [plain("b")]
        run = load_run(tmp_path)
        assert list(run.episodes) == read_run(tmp_path)[1] == finished_episodes(tmp_path)[0] == expected
        assert [record["step"] for record in run.to_records()] == [1, 2][-len(expected) :]
        (tmp_path / "episodes.jsonl").unlink(missing_ok=True)
