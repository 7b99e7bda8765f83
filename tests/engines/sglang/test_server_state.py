"""No sequence of calls sends anything that crashes a server."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines.base import MEMORY_TAGS
from rollgym.engines.servers.server_state import ServerState
from rollgym.engines.sglang.compat import SglangCompat, compat_of


class Fragile:
    """What is known of a server: it dies of these calls in these states."""

    def __init__(self, version: tuple[int, int, int]) -> None:
        self.version = version
        self.paused: str | None = None
        self.released: set[str] = set()
        self.group: str | None = None
        self.session = False
        self.weights_missing = False
        self.live = 0
        """Replies it holds: running, or waiting where they were retracted."""

    def pause(self, mode: str) -> None:
        assert self.paused is None
        self.paused = mode
        if mode == "abort":
            self.live = 0

    def resume(self) -> None:
        assert not self.released, "generates without memory"
        self.paused = None

    def release(self, tags: list[str]) -> None:
        assert tags, "no tags means all of them"
        assert not self.live, "asserts that it is idle"
        self.released |= set(tags)

    def resume_memory(self, tags: list[str]) -> None:
        assert tags, "no tags means all of them"
        for tag in tags:
            self.released.remove(tag)
        self.weights_missing = self.weights_missing or "weights" in tags

    def generate(self) -> None:
        assert not self.weights_missing, "generates with whatever was in the memory"
        assert not self.released
        self.live += self.paused is None

    def update(self, *, tensors: bool, flush: bool, group: str | None = None) -> None:
        assert "weights" not in self.released, "writes into memory it has not"
        if tensors and self.version >= (0, 5, 21):
            assert self.session, "answers 400, while a broadcast waits forever"
        if flush:
            assert not self.live or (self.paused == "retract" and self.version >= (0, 5, 22)), "flush fails"
            assert "kv_cache" not in self.released
        if group is not None:
            assert group == self.group, "asserts that it is in the group"
        self.weights_missing = False


VERSIONS = [(0, 5, 9), (0, 5, 18), (0, 5, 20), (0, 5, 21), (0, 5, 22), (0, 5, 23)]
SOME = st.lists(st.sampled_from(MEMORY_TAGS), max_size=3)
CALLS = st.one_of(
    st.tuples(st.just("pause"), st.sampled_from(["abort", "in_place", "retract"])),
    st.tuples(st.just("resume"), st.none()),
    st.tuples(st.just("arrive"), st.none()),
    st.tuples(st.just("release"), SOME),
    st.tuples(st.just("resume_memory"), SOME),
    st.tuples(st.just("update"), st.booleans()),
    st.tuples(st.just("join"), st.sampled_from(["g", "h"])),
    st.tuples(st.just("broadcast"), st.none()),
    st.tuples(st.just("leave"), st.none()),
)


def send(state: ServerState, server: Fragile, call: str, what: Any) -> None:
    """Imitate the engine: query the state and send what it returns."""
    if call == "arrive":
        state.may_generate()
        server.generate()
    elif call == "pause" and state.pause(what):
        server.pause(what)
    elif call == "resume" and state.resume():
        server.resume()
    elif call == "release":
        if tags := state.release(what, live=server.live):
            server.release(tags)
    elif call == "resume_memory":
        if tags := state.resume_memory(what):
            server.resume_memory(tags)
    elif call in ("update", "broadcast"):
        group = state.broadcast() if call == "broadcast" else None
        tensors = call == "broadcast" or what
        if state.begin_update(tensors=tensors):
            server.session = True
        server.update(tensors=tensors, flush=state.flush(), group=group)
        if state.end_update():
            server.session = False
        state.written()
    elif call == "join":
        state.join(what)
        server.group = what
    elif call == "leave" and state.leave():
        server.group = None


@settings(max_examples=400, deadline=None)
@given(version=st.sampled_from(VERSIONS), calls=st.lists(CALLS, max_size=30))
def test_no_order_of_calls_crashes_a_server(version: Any, calls: list[tuple[str, Any]]) -> None:
    state, server = ServerState(SglangCompat(version)), Fragile(version)
    for call, what in calls:
        try:
            send(state, server, call, what)
        except AgentError:
            continue
        assert state.paused == server.paused
        assert state.released == server.released
        assert state.group == server.group
        assert state.session == server.session
        assert state.weights_missing == server.weights_missing


def test_a_cache_that_could_not_be_flushed_is_stale_until_it_is() -> None:
    state = ServerState(SglangCompat((0, 5, 20)))
    state.pause("retract")
    assert not state.flush()
    assert state.stale
    state.flushed()
    state.resume()
    state.pause("abort")
    assert state.flush()
    assert not state.stale


def test_a_partial_update_generates_nothing() -> None:
    state = ServerState(SglangCompat((0, 5, 23)), consistent=False)
    with pytest.raises(AgentError, match="weights of two versions"):
        state.may_generate()


def test_unknown_memory_tags_are_rejected() -> None:
    with pytest.raises(UsageError, match="Unknown memory tag disk: choose from kv_cache, weights"):
        ServerState(SglangCompat((0, 5, 23))).resume_memory(["disk"])


@pytest.mark.parametrize(
    ("version", "spans", "sessions", "flush"),
    [
        ("0.5.9", False, False, False),
        ("0.5.18", False, False, False),
        ("0.5.19", True, False, False),
        ("0.5.21", True, True, False),
        ("v0.5.23.post1", True, True, True),
        ("0.6.0.dev3+g12", True, True, True),
    ],
)
def test_features_by_version(version: str, spans: bool, sessions: bool, flush: bool) -> None:
    found = compat_of(version, "it")
    assert (found.spans, found.sessions, found.flush_after_retract) == (spans, sessions, flush)


@pytest.mark.parametrize("version", ["", "0.5", "zero", None, 5, "0.5.1000000000000"])
def test_invalid_versions(version: Any) -> None:
    with pytest.raises(UsageError, match="reports an invalid SGLang version"):
        compat_of(version, "it")
