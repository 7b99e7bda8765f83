"""Malformed, slow or missing replies raise typed errors and never return a wrong reply."""

import asyncio
import copy
import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_server import VOCABULARY, Scripted, as_json, model_folder, reply, scripted

from rollgym.core.errors import AgentError, EngineLost, RollgymError, UsageError
from rollgym.engines.base import BadRequest, GenerateRequest, Generation, Sampling
from rollgym.engines.sglang import SglangEngine

MOST = 6
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as script:
        yield script


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def engine(server: Scripted, folder: Path, runner: asyncio.Runner) -> Iterator[SglangEngine]:
    engine = SglangEngine(server.url, folder, timeout=60.0, retries=1)
    yield engine
    runner.run(engine.close())


def ask(**changes: Any) -> GenerateRequest:
    sampling = Sampling(**{"max_tokens": MOST, **changes.pop("sampling", {})})
    return GenerateRequest(**{"request_id": "r", "prompt_ids": (3, 4), "sampling": sampling, **changes})


def sentence(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 700
    return text


def change(value: Any, path: list[int], new: Any, remove: bool) -> Any:
    """The value with one inner place, found by walking along the path, replaced or left out."""
    value = copy.deepcopy(value)
    at, parent, key = value, None, None
    for step in path:
        keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
        if not keys:
            break
        parent, key = at, keys[step % len(keys)]
        at = parent[key]
    if parent is None:
        return new
    if remove:
        del parent[key]
    else:
        parent[key] = new
    return value


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.lists(st.integers(0, 20), max_size=5), new=JSON, remove=st.booleans())
def test_a_modified_reply_is_rejected_or_correct(
    server: Scripted, engine: SglangEngine, runner: asyncio.Runner, path: list[int], new: Any, remove: bool
) -> None:
    said: dict[str, Any] = {}

    def answer(body: Any) -> tuple[int, bytes]:
        said["it"] = change(reply(body), path, new, remove)
        return as_json(said["it"])

    server.scripts["/generate"] = answer
    try:
        made: Generation = runner.run(engine.generate(ask()))
    except AgentError as error:
        sentence(error)
        return
    triples = said["it"]["meta_info"]["output_token_logprobs"]
    assert list(made.token_ids) == said["it"]["output_ids"] == [one[1] for one in triples]
    assert list(made.logprobs) == [min(one[0], 0.0) for one in triples]
    assert all(math.isfinite(value) for value in made.logprobs)
    assert all(0 <= token < VOCABULARY for token in made.token_ids)
    assert 1 <= len(made.token_ids) <= MOST
    assert made.version_spans == ((0, len(made.token_ids)),)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()),
    status=st.integers(200, 599),
)
def test_any_bytes_under_any_status_are_a_typed_error(
    server: Scripted, engine: SglangEngine, runner: asyncio.Runner, text: bytes, status: int
) -> None:
    server.scripts["/generate"] = lambda _: (status if status not in (204, 304) else 200, text)
    with pytest.raises(AgentError) as caught:
        runner.run(engine.generate(ask()))
    sentence(caught.value)


@pytest.mark.parametrize(
    ("ids", "logprobs", "says"),
    [
        ([1, 2], [-1.0], "2 token ids but 1 log-probs"),
        ([1, 2], [-1.0, math.nan], r"invalid response \(JSON is malformed: invalid character"),
        ([1, 2], [-1.0, None], r"invalid response \(Expected `float`, got `null`"),
        ([1, 2], [-1.0, 2.0], "log-probs above 0, or infinite"),
        ([1, VOCABULARY], [-1.0, -1.0], "outside the vocabulary"),
        ([1] * (MOST + 1), [-1.0] * (MOST + 1), f"{MOST + 1} tokens, but at most {MOST}"),
        ([], [], "no tokens"),
    ],
)
def test_an_invalid_reply_is_rejected_with_the_reason(
    server: Scripted,
    engine: SglangEngine,
    runner: asyncio.Runner,
    ids: list[int],
    logprobs: list[Any],
    says: str,
) -> None:
    def answer(body: Any) -> tuple[int, bytes]:
        made = reply(body, ids=ids)
        made["meta_info"]["output_token_logprobs"] = [
            [value, token, None] for value, token in zip(logprobs, ids, strict=False)
        ]
        return as_json(made)

    server.scripts["/generate"] = answer
    with pytest.raises(AgentError, match=says) as caught:
        runner.run(engine.generate(ask()))
    sentence(caught.value)


@pytest.mark.parametrize(
    ("way", "says"), [("cut", "broke off"), ("slow", "within 0.4 s"), ("endless", "more than")]
)
def test_broken_replies_raise_typed_errors(
    server: Scripted, engine: SglangEngine, runner: asyncio.Runner, way: str, says: str
) -> None:
    engine._tracker.servers.front.timeout = 0.4 if way == "slow" else 60.0
    server.scripts["/generate"] = lambda _: way
    with pytest.raises(AgentError, match=says) as caught:
        runner.run(engine.generate(ask()))
    sentence(caught.value)


def test_html_and_error_replies_are_quoted_briefly(
    server: Scripted, engine: SglangEngine, runner: asyncio.Runner
) -> None:
    server.scripts["/generate"] = lambda _: (200, b"<html>" + b"busy " * 1000)
    with pytest.raises(AgentError, match="invalid response.*<html>busy") as caught:
        runner.run(engine.generate(ask()))
    sentence(caught.value)
    server.scripts["/generate"] = lambda _: as_json({"error": {"message": "too long"}}, 400)
    with pytest.raises(AgentError, match="answered 400: too long"):
        runner.run(engine.generate(ask()))


def test_a_busy_proxy_is_retried(server: Scripted, engine: SglangEngine, runner: asyncio.Runner) -> None:
    answers = iter([(503, b"no"), None])
    server.scripts["/generate"] = lambda body: next(answers) or as_json(reply(body))
    assert runner.run(engine.generate(ask())).token_ids == (1, 2, 3, 4, 5, 6)


def test_an_unknown_weight_version_is_rejected(
    server: Scripted, engine: SglangEngine, runner: asyncio.Runner
) -> None:
    server.scripts["/generate"] = lambda body: as_json(reply(body, version="default"))
    with pytest.raises(EngineLost, match="weight version 'default' instead of 0"):
        runner.run(engine.generate(ask()))


def test_an_eos_outside_stop_ids_does_not_end_a_reply(
    server: Scripted, engine: SglangEngine, runner: asyncio.Runner
) -> None:
    answers = iter([([1, 2], "stop"), ([9], "stop")])

    def answer(body: Any) -> tuple[int, bytes]:
        ids, kind = next(answers)
        return as_json(reply(body, ids=ids, kind=kind))

    server.scripts["/generate"] = answer
    made = runner.run(engine.generate(ask(sampling={"stop_ids": (9,)})))
    assert made.token_ids == (1, 2, 9)
    assert made.finish_reason == "stop"
    first, second = server.asked("/generate")
    assert second["input_ids"] == [3, 4, 1, 2]
    assert second["sampling_params"]["max_new_tokens"] == MOST - 2
    assert first["rid"] != second["rid"]
    assert len(first["rid"]) == len(second["rid"]) == 32


def test_an_unrequested_abort_is_an_error(
    server: Scripted, engine: SglangEngine, runner: asyncio.Runner
) -> None:
    server.scripts["/generate"] = lambda body: as_json(reply(body, ids=[1], kind="abort"))
    with pytest.raises(AgentError, match="aborted a reply without being asked to"):
        runner.run(engine.generate(ask()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_ids": ()}, "no prompt ids"),
        ({"prompt_ids": (1, VOCABULARY)}, f"id {VOCABULARY}"),
        ({"prompt_ids": (True,)}, "id True"),
        ({"prompt_ids": (1,) * 40}, "no room for a reply"),
        ({"sampling": {"stop_ids": (VOCABULARY,)}}, f"id {VOCABULARY}"),
        ({"sampling": {"top_p": 0.9}}, "top_p, top_k or min_p"),
        ({"sampling": {"top_k": 3}}, "top_p, top_k or min_p"),
    ],
)
def test_what_would_kill_a_server_or_spoil_training_is_never_sent(
    server: Scripted, engine: SglangEngine, runner: asyncio.Runner, changes: Any, says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        runner.run(engine.generate(ask(**changes)))
    assert not server.asked("/generate")


def test_greedy_replies_are_certain(server: Scripted, engine: SglangEngine, runner: asyncio.Runner) -> None:
    made = runner.run(engine.generate(ask(sampling={"temperature": 0.0, "top_k": 3})))
    assert made.logprobs == (0.0,) * MOST


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"version": "0.4.9.post2"}, "SGLang 0.4.9, which is too old: 0.5.9 or later"),
        ({"version": None}, "invalid SGLang version, 'None'"),
        ({"version": "nightly"}, "invalid SGLang version, 'nightly'"),
        ({"max_req_input_len": "many"}, "does not report max_req_input_len"),
    ],
)
def test_an_unsuitable_server_is_rejected_at_once(
    server: Scripted, folder: Path, info: dict[str, Any], says: str
) -> None:
    server.info |= info
    with pytest.raises(RollgymError, match=says) as caught:
        SglangEngine(server.url, folder)
    sentence(caught.value)


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'"sglang"', b"\xff\xfe", b""])
@pytest.mark.parametrize("path", ["/server_info", "/model_info"])
def test_another_service_at_the_address_is_rejected(
    server: Scripted, folder: Path, path: str, answer: bytes
) -> None:
    server.scripts[path] = lambda _: (200, answer)
    with pytest.raises(UsageError, match="is not an SGLang server"):
        SglangEngine(server.url, folder)


def test_a_dead_address_is_one_sentence(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(
        EngineLost, match=f"No SGLang server can be reached at http://127.0.0.1:{port}"
    ) as caught:
        SglangEngine(f"http://127.0.0.1:{port}", folder, retries=0)
    sentence(caught.value)
    with pytest.raises(UsageError, match="write it as http://HOST:PORT"):
        SglangEngine("localhost:30000", folder)


def test_an_interrupt_mode_needs_a_recent_server(server: Scripted, folder: Path) -> None:
    server.info["version"] = "0.5.18"
    with pytest.raises(UsageError, match="interrupt='in_place' needs SGLang 0.5.19.*runs 0.5.18"):
        SglangEngine(server.url, folder, interrupt="in_place")


def test_workers_of_a_router_must_have_the_same_weights(server: Scripted, folder: Path) -> None:
    with scripted() as other:
        other.weights = "7"
        workers = {"workers": [{"url": server.url}, {"url": other.url}]}
        server.scripts["/workers"] = lambda _: as_json(workers)
        with pytest.raises(UsageError, match=f"different versions: {server.url} has 0, {other.url} has 7"):
            SglangEngine(server.url, folder)


def test_control_calls_go_to_every_worker_of_a_router(
    server: Scripted, folder: Path, runner: asyncio.Runner
) -> None:
    with scripted() as first, scripted() as second:
        server.scripts["/workers"] = lambda _: as_json({"workers": [{"url": first.url}, {"url": second.url}]})
        engine = SglangEngine(server.url, folder)
        runner.run(engine.pause())
        runner.run(engine.resume())
        made = runner.run(engine.generate(ask(session="s")))
        runner.run(engine.close())
    assert made.version_spans == ((0, MOST),)
    assert len(server.asked("/generate")) == 1
    for worker in (first, second):
        assert worker.asked("/pause_generation") == [{"mode": "abort"}]
        assert len(worker.asked("/continue_generation")) == 1
        assert not worker.asked("/generate")
    assert not server.asked("/pause_generation")


def test_the_api_key_is_sent_with_every_call(server: Scripted, folder: Path, runner: asyncio.Runner) -> None:
    server.api_key = "let-me-in-please"
    with pytest.raises(AgentError, match="answered 401"):
        SglangEngine(server.url, folder, retries=0)
    with pytest.raises(AgentError, match="answered 401"):
        SglangEngine(server.url, folder, retries=0, api_key="another-key")
    server.weights = "default"
    engine = SglangEngine(server.url, folder, version=3, retries=0, api_key="let-me-in-please")
    assert runner.run(engine.generate(ask())).token_ids
    assert engine.version == 3
    runner.run(engine.close())
