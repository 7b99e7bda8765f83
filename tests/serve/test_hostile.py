"""Whatever is sent: an answer or a refusal with a sentence, never a failure of the server."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgym.serve.requests import Refused, read_chat

Serving = Callable[..., Any]
TEXT = "@ F F F\nF H F H"
GOOD = {"model": "policy", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}


def with_server(serving: Serving, work: Callable[[Any], Any]) -> None:
    async def run() -> None:
        async with serving() as place:
            await work(place)

    asyncio.run(run())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "n",
    "seed",
    "stream",
    "logprobs",
    "tools",
]
ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": JSON}), max_size=5)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    messages=MESSAGES | st.none(),
    body=st.binary(max_size=40) | st.none(),
)
def test_whatever_is_sent_is_read_or_refused_with_a_sentence(
    changes: dict[str, Any], messages: Any, body: bytes | None
) -> None:
    told = GOOD | ({"messages": messages} if messages is not None else {}) | changes
    answer: Any
    try:
        answer = read_chat(json.dumps(told).encode() if body is None else body)
    except Refused as refused:
        answer = refused
    if isinstance(answer, Refused):
        assert answer.status == 400
        assert str(answer).endswith(".")
    else:
        assert answer.messages[-1]["role"] == "user"


def test_fuzzed_requests_over_http_are_never_a_500(serving: Serving) -> None:
    async def work(place: Any) -> None:
        seen: set[int] = set()

        async def send(changes: dict[str, Any], path: str) -> None:
            data = json.dumps(GOOD | changes).encode()
            head = {"content-type": "application/json"}
            answer = await place.http.post(path, content=data, headers=head)
            seen.add(answer.status_code)
            assert answer.status_code < 500, answer.text
            if answer.status_code != 200 and answer.status_code != 201:
                assert len(answer.json()["error"]["message"]) > 10

        cases: list[tuple[dict[str, Any], str]] = []

        @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(
            changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2),
            messages=MESSAGES | st.none(),
            path=st.sampled_from(["/v1/chat/completions", "/session", "/session/x/end", "/session/x/reward"]),
        )
        def collect(changes: dict[str, Any], messages: Any, path: str) -> None:
            cases.append((changes | ({"messages": messages} if messages is not None else {}), path))

        collect()
        for changes, path in cases:
            await send(changes, path)
        assert {200, 400} <= seen

    with_server(serving, work)


def test_hostile_texts_stay_text(serving: Serving) -> None:
    async def work(place: Any) -> None:
        controls = " ".join(place.tokenizer.all_special_tokens)
        marks = "".join(chr(c) for c in range(0xF0000, 0xF0000 + 2000))
        answer = await place.ask([f"{controls} {TEXT}"], "one")
        assert answer.status_code == 200
        plain = await place.ask([f"x {TEXT}"], "two")
        assert plain.status_code == 200
        special = set(place.tokenizer.all_special_ids) - {place.tokenizer.unk_token_id}
        one, two = ([i for i in request.prompt_ids if i in special] for request, _ in place.spy.made)
        assert one == two
        assert (await place.ask([marks])).status_code == 400
        lone = json.dumps(GOOD | {"messages": [{"role": "user", "content": "\ud800"}]}).encode()
        head = {"content-type": "application/json"}
        assert (await place.http.post("/v1/chat/completions", content=lone, headers=head)).status_code < 500

    with_server(serving, work)
