"""Episodes survive the way through a line of JSON, and a bad line says what is wrong with it."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import ResultsError
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.serialization import clean_text, decode_episode, encode_episode, read_episodes
from rollgym.core.types import (
    SCHEMA_VERSION,
    Episode,
    EpisodeSpec,
    Failure,
    Limits,
    Outcome,
    Seconds,
    Turn,
    Usage,
)

counts = st.integers(0, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
short_times = st.floats(0, 1e9)
text = st.text(st.characters(codec=None), max_size=20).map(clean_text)
names = text.filter(bool)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
infos = st.dictionaries(text, plain, max_size=3)
limits = st.builds(
    Limits,
    turns=st.none() | st.integers(1, 99),
    tokens=st.none() | st.integers(1, 10**9),
    seconds=st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
)
specs = st.builds(
    EpisodeSpec,
    episode_id=names,
    env_id=names,
    env_kwargs=infos,
    env_version=text,
    task=st.none() | counts,
    split=text,
    env_seed=counts,
    sampling_seed=counts,
    group_id=text,
    member=counts,
    limits=limits,
)


@st.composite
def turns(draw, terminated=False, truncated=False):
    tokens = draw(st.lists(counts, max_size=4))
    with_logprobs = draw(st.booleans())
    return Turn(
        observation=draw(text),
        action=draw(text),
        response=draw(st.none() | text),
        reward=draw(finite),
        terminated=terminated,
        truncated=truncated,
        info=draw(infos),
        prompt_ids=tuple(draw(st.lists(counts, max_size=4))),
        action_ids=tuple(tokens),
        logprobs=tuple(draw(finite) for _ in tokens) if with_logprobs else (),
        new_row=draw(st.booleans()),
        policy_version=draw(st.none() | st.integers(0, 10**6)),
        version_spans=draw(st.sampled_from([(), ((draw(counts), len(tokens)), (0, 0))])),
        finish_reason=draw(st.none() | text),
        seconds=draw(st.builds(Seconds, queue=short_times, generate=short_times, step=short_times)),
        usage=draw(st.none() | st.builds(Usage, prompt_tokens=counts, completion_tokens=counts, cost=finite)),
    )


@st.composite
def episodes(draw):
    outcome = draw(st.sampled_from(Outcome))
    played = draw(st.lists(turns(), max_size=3))
    if outcome is Outcome.TERMINATED:
        played.append(draw(turns(terminated=True, truncated=draw(st.booleans()))))
    if outcome is Outcome.TRUNCATED:
        played.append(draw(turns(truncated=True)))
    failure = st.builds(Failure, type=text, message=text, traceback=text)
    return Episode(
        spec=draw(specs),
        outcome=outcome,
        turns=tuple(played),
        instructions=draw(text),
        reset_info=draw(infos),
        final_observation=draw(text),
        success=None if outcome.failed else draw(st.none() | st.booleans()),
        error=draw(st.none() | failure) if outcome.failed else None,
        attempts=draw(st.integers(1, 9)),
        started=draw(finite),
        seconds=draw(finite),
    )


@settings(deadline=None, max_examples=60)
@given(episodes())
def test_any_episode_is_the_same_after_one_line_of_json(episode):
    line = encode_episode(episode)
    assert not set(b"\r\n") & set(line)
    again = decode_episode(line)
    assert again == episode
    assert repr(again) == repr(episode)  # -0.0 and 0.0 are equal but not the same


def small(**changes):
    turn = Turn(observation="o", action="a", reward=0.5)
    return Episode(
        **{
            "spec": EpisodeSpec(episode_id="e", env_id="a/B-v0"),
            "outcome": Outcome.TURN_LIMIT,
            "turns": (turn, turn, turn),
        }
        | changes
    )


@pytest.mark.parametrize("value", [-0.0, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1 + 0.2])
def test_floats_come_back_bit_by_bit(value):
    again = decode_episode(encode_episode(small(reset_info={"x": value}, started=value)))
    assert math.copysign(1, again.started) == math.copysign(1, value)
    assert again.started == again.reset_info["x"] == value


def test_the_line_says_its_schema_return_and_length_first():
    line = json.loads(encode_episode(small()))
    assert list(line)[:3] == ["schema", "return", "length"]
    assert (line["schema"], line["return"], line["length"]) == (SCHEMA_VERSION, 1.5, 3)


def test_a_return_no_float_can_hold_is_null():
    huge = Turn(observation="", action="", reward=1.7e308)
    assert json.loads(encode_episode(small(turns=(huge, huge))))["return"] is None


def test_lone_surrogates_do_not_keep_an_episode_from_being_written():
    again = decode_episode(encode_episode(small(instructions="a\ud800b", reset_info={"\udfff": "ok"})))
    assert again.instructions == "a" + clean_text("\ud800") + "b"
    assert list(again.reset_info.values()) == ["ok"]
    assert again.turns == small().turns


def test_a_newer_schema_is_refused_by_name():
    line = encode_episode(small()).replace(b'"schema":2', b'"schema":7')
    with pytest.raises(ResultsError, match="written with schema 7, but this rollgym reads up to 2: upgrade"):
        decode_episode(line)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"schema":2,', b"", "it has no schema version"),
        (b'"schema":2', b'"schema":0', "0 is not a schema version"),
        (b'"schema":2', b'"schema":true', "True is not a schema version"),
        (b'"schema":2', b'"schema":"1"', "'1' is not a schema version"),
        (b'"schema":2', b'"schema":2e999', "not valid JSON"),
        (b'"attempts":1', b'"attempts":0', "attempts must be >= 1, not 0"),
        (b'"attempts":1', b'"attempts":"1"', "Expected `int`, got `str`"),
        (b'"attempts":1', b'"attempts":', "not valid JSON"),
        (b'"turn_limit"', b'"terminated"', "'terminated' needs a last turn"),
        (b'"turn_limit"', b'"tired"', "Invalid enum value 'tired'"),
        (b'"env_id":"a/B-v0",', b"", "missing required field `env_id`"),
        (b'"instructions":""', b'"instructions":"\xff"', "not a valid episode"),
        (b'"instructions":""', b'"instructions":"\\ud800"', "not valid JSON"),
        (b'"reset_info":{}', b'"reset_info":' + b"[" * 9999 + b"]" * 9999, "recursion"),
    ],
)
def test_a_broken_line_says_what_is_wrong_with_it(old, new, message):
    line = encode_episode(small())
    assert old in line
    with pytest.raises(ResultsError, match=message):
        decode_episode(line.replace(old, new))


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"1", b"{", b"\xff", "\ud800", "hello", encode_episode(small())[:-1]]
)
def test_a_line_that_is_not_a_json_object_is_not_an_episode(line):
    with pytest.raises(ResultsError, match="not valid JSON"):
        decode_episode(line)


def test_reading_a_file_names_the_bad_line_and_skips_empty_ones(tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(b"\n" + encode_episode(small()) + b"\n\n")
    assert read_episodes(path) == [small()]
    path.write_bytes(encode_episode(small()) + b"\noops\n")
    with pytest.raises(ResultsError, match=r"episodes\.jsonl, line 2: not valid JSON"):
        read_episodes(path)
    with pytest.raises(ResultsError, match=r"Cannot read .*none\.jsonl: No such file"):
        read_episodes(tmp_path / "none.jsonl")


SCHEMA_1 = (
    '{"schema":1,"return":1.0,"length":1,"spec":{"episode_id":"test-7-0","env_id":"rollgym/Sokoban-v0",'
    '"env_kwargs":{},"env_version":"","task":7,"split":"test","env_seed":1,"sampling_seed":2,"group_id":"",'
    '"member":0,"limits":{"turns":30,"tokens":null,"seconds":null}},"outcome":"terminated","turns":['
    '{"observation":"o","action":"Up","response":null,"reward":1.0,"terminated":true,"truncated":false,'
    '"info":{"success":true},"prompt_ids":[],"action_ids":[],"logprobs":[],"new_row":false,'
    '"policy_version":null,"version_spans":[],"finish_reason":null,'
    '"seconds":{"queue":0.0,"generate":0.0,"step":0.0},"usage":null}],"instructions":"Push.",'
    '"reset_info":{},"final_observation":"won","final_ids":[],"final_row":false,"success":true,"error":null,'
    '"attempts":1,"started":0.0,"seconds":0.5}'
)


def test_a_line_of_schema_1_is_read():
    episode = decode_episode(SCHEMA_1)
    assert (episode.success, episode.turns[0].action, episode.spec.task) == (True, "Up", 7)
    assert (episode.tools, episode.turns[0].message) == ((), None)
    assert json.loads(encode_episode(episode))["schema"] == 2


def test_tools_and_messages_survive_a_line():
    tool = ToolSpec(name="move", description="Move.", parameters={"type": "object", "properties": {"x": {}}})
    call = ToolCall(name="move", arguments={"x": [1, None, "é"]}, id="a")
    message = Message(role="assistant", content="Right.", reasoning="Hm.", tool_calls=(call,))
    turn = Turn(observation="o", action=call.to_json(), message=message.to_openai())
    spec = EpisodeSpec(episode_id="e", env_id="x")
    episode = Episode(spec=spec, outcome=Outcome.TURN_LIMIT, turns=(turn,), tools=(tool,))
    again = decode_episode(encode_episode(episode))
    assert again == episode
    assert Message.from_openai(again.turns[0].message) == message
