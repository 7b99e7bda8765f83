"""Reasons of a death, extracted from Ray's messages. Without Ray."""

import pytest

from rollgym.cluster.errors import ActorLost, why_lost

HEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: LearnerRank
\tactor_id: 6fabbf9e4197665aefc066da01000000
\tpid: 2224
\tnamespace: cf682a1d-1959-496f-993a-aecbc1a8e768
\tip: 127.0.0.1
"""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (HEAD + "The actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`"),
        (
            HEAD + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            "Worker exit detail: Worker unexpectedly exits. Some common causes include: (1) a crash.",
            "its worker process has died",
        ),
        (
            "The actor 8089f9ac is unavailable: The actor is temporarily unavailable: RpcError: Socket "
            "closed rpc_code: 14. The task may or may not have been executed on the actor.",
            "it cannot be reached",
        ),
        ("Its node is gone.\nMore about it.", "Its node is gone"),
    ],
)
def test_a_death_is_reported_in_one_sentence(said: str, why: str) -> None:
    assert why_lost(RuntimeError(said)) == why
    assert str(ActorLost.of("critic", 1, RuntimeError(said))) == f"critic rank 1 is lost: {why}"
