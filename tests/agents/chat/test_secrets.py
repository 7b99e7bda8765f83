"""The API key is sent, and is nowhere else."""

import json
import logging
import traceback
from typing import Any

import pytest

from rollgym.core.errors import AgentError, UsageError

KEY = "sk-very/secret-0123456789"


@pytest.fixture
def keyed(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    endpoint.keyed = lambda **options: endpoint.agent(api_key_env="MY_KEY", **options)
    return endpoint


def test_the_key_is_sent(keyed: Any, play: Any) -> None:
    play(keyed.keyed(), "o1")
    assert keyed.headers[0]["authorization"] == f"Bearer {KEY}"


def test_no_key_is_sent_where_there_is_none(endpoint: Any, play: Any, monkeypatch: Any) -> None:
    play(endpoint.agent(), "o1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    play(endpoint.agent(api_key_env=None), "o1")
    assert ["authorization" in headers for headers in endpoint.headers] == [False, False]


def test_the_key_does_not_show_in_the_agent_or_its_record(keyed: Any) -> None:
    agent = keyed.keyed()
    texts = [repr(agent), json.dumps(agent.describe()), json.dumps(agent.totals())]
    texts += [repr(vars(part)) for part in (agent, agent.endpoint, agent.endpoint.http)]
    assert not [text for text in texts if KEY in text]
    assert agent.describe()["api_key_env"] == "MY_KEY"


@pytest.mark.parametrize("status", [401, 500, 400])
@pytest.mark.parametrize("form", ["json", "text", "escaped", "at the cut"])
def test_an_echoed_key_is_removed_from_errors(
    keyed: Any, play: Any, caplog: Any, status: int, form: str
) -> None:
    def echo(headers: dict[str, str]) -> Any:
        header = headers["authorization"]
        bodies = {
            "json": {"error": {"message": f"bad key: {header}", header: 1}},
            "text": f"bad key: {header}".encode(),
            "escaped": json.dumps({"error": f"bad key: {header}"}).replace("/", "\\/").encode(),
            "at the cut": {"error": {"message": "x" * 180 + header}},
        }
        return status, {}, bodies[form]

    keyed.answers = [echo]
    caplog.set_level(logging.DEBUG)
    with pytest.raises(AgentError) as caught:
        play(keyed.keyed(retries=0), "o1")
    text = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caplog.text
    assert KEY[:10] not in text
    assert "[api key]" in text or form == "at the cut"


@pytest.mark.parametrize("escape", [False, True])
def test_an_echoed_key_is_blotted_out_of_episodes(keyed: Any, play: Any, answer: Any, escape: bool) -> None:
    def echo(headers: dict[str, str]) -> Any:
        body = json.dumps(answer(f"<answer>{headers['authorization']}</answer>", reasoning_content=KEY))
        return 200, {}, (body.replace("/", "\\/") if escape else body).encode()

    keyed.answers = [echo]
    moves = play(keyed.keyed(reasoning="keep"), "o1", "o2")
    assert KEY not in repr(moves)
    assert moves[0].action == "Bearer [api key]"
    assert KEY not in json.dumps(keyed.bodies)


@pytest.mark.parametrize("name", ["api_key", "key", "token", "API_KEY"])
def test_a_key_as_an_option_is_refused_and_not_repeated(endpoint: Any, name: str) -> None:
    with pytest.raises(UsageError, match="would be recorded with the results.*api_key_env") as caught:
        endpoint.agent(**{name: KEY})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("value", [KEY, "gsk_0123456789", 7, ""])
def test_a_key_in_place_of_its_name_is_not_repeated(endpoint: Any, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        endpoint.agent(api_key_env=value)
    assert not value or str(value) not in str(caught.value)


@pytest.mark.parametrize("url", [f"http://user:{KEY}@127.0.0.1/v1", f"http://127.0.0.1/v1?key={KEY}"])
def test_a_key_in_the_address_is_refused_and_not_repeated(endpoint: Any, url: str) -> None:
    with pytest.raises(UsageError, match="without a user name, password or query") as caught:
        endpoint.agent(base_url=url)
    assert KEY not in str(caught.value)


def test_a_key_inside_another_option_is_refused(keyed: Any) -> None:
    with pytest.raises(UsageError, match="An option contains the API key") as caught:
        keyed.keyed(extra_body={"user": KEY})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-a b-0123456789", "sk-“0123456789”", "sk-0123\n456789"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(UsageError, match="copy it again") as caught:
        endpoint.agent(api_key_env="MY_KEY")
    assert "0123" not in str(caught.value)


def test_a_placeholder_key_does_not_eat_words(
    endpoint: Any, play: Any, answer: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    endpoint.answers = [answer("<answer>EMPTY</answer>")]
    assert play(endpoint.agent(), "o1")[0].action == "EMPTY"
