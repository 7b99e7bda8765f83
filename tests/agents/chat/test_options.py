"""Wrong options of the chat agent, each with its sentence; and the record of the right ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.agent import AgentSetup, make_agent
from rollgym.core.errors import UnknownName, UsageError

URL = "http://localhost:8000/v1"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def chat(**options: Any) -> Any:
    return make_agent("chat", AgentSetup(env_id="test/Env-v0"), **{"model": "m", "base_url": URL, **options})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": ""}, "No model given: pass model=NAME"),
        ({"model": None}, "No model given"),
        ({"model": True}, "model must be the name of a model, not True"),
        ({"model": ["m"]}, "model must be the name"),
        ({"temperature": -1}, "temperature must be a number of at least 0, not -1"),
        ({"temperature": "hot"}, "temperature must be a number of at least 0, not 'hot'"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be a number above 0"),
        ({"top_p": 1.5}, "top_p must be at most 1, not 1.5"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"seed": -1}, "seed must be true, false or a whole number"),
        ({"seed": "yes"}, "seed must be true, false or"),
        ({"timeout": 0}, "timeout must be a number above 0"),
        ({"timeout": None}, "timeout must be a number above 0"),
        ({"retries": -1}, "retries must be a whole number of at least 0"),
        ({"requests_per_minute": 0}, "requests_per_minute must be a number above 0"),
        ({"price_in": "1"}, "price_in must be a number"),
        ({"system": "no"}, "system must be true or false, not 'no'"),
        ({"reasoning": "hide"}, "reasoning must be strip or keep, not 'hide'"),
        ({"history": 3}, "history must be text, not 3"),
        ({"history": "last"}, "history must be full, none or last:N"),
        ({"parser": "anser"}, "Did you mean answer"),
        ({"parser": "regex:("}, "is not a regular expression"),
        ({"template": "no such file"}, "no template called 'no such file'"),
        ({"extra_body": "x"}, "extra_body must be a JSON object, not 'x'"),
        ({"extra_body": {"messages": []}}, "extra_body must not hold 'messages'"),
        ({"extra_body": {"stream": True}}, "extra_body must not hold 'stream'"),
        ({"extra_body": {"x": float("inf")}}, "extra_body must be a JSON object"),
        ({"base_url": "localhost:8000"}, "base_url must be an address such as"),
        ({"base_url": "ftp://host/v1"}, "base_url must be an address such as"),
        ({"base_url": "http://"}, "base_url must be an address such as"),
        ({"base_url": "http://host:port/v1"}, "base_url must be an address such as"),
        ({"base_url": 8000}, "base_url must be an address .* not a int"),
    ],
)
def test_a_wrong_option_is_explained(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        chat(**options)


def test_an_unknown_option_names_the_agent() -> None:
    with pytest.raises(
        UnknownName, match="no option of agent 'chat' called 'temprature'. Did you mean temperature"
    ):
        chat(temprature=1)


def test_an_address_is_needed() -> None:
    with pytest.raises(UsageError, match="No endpoint given: pass base_url=.*OPENAI_API_KEY to use"):
        chat(base_url=None)


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1/")
    assert chat(base_url=None).describe()["base_url"] == "http://127.0.0.1:9/v1"
    assert chat().describe()["base_url"] == URL
    assert chat(base_url=URL + "/chat/completions/").describe()["base_url"] == URL


def test_the_public_address_is_used_with_its_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-public-key")
    assert chat(base_url=None).describe()["base_url"] == "https://api.openai.com/v1"
    monkeypatch.setenv("OTHER_KEY", "sk-other-key")
    with pytest.raises(UsageError, match="No endpoint given"):
        chat(base_url=None, api_key_env="OTHER_KEY")


def test_settings_are_recorded_as_json(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("T {instructions}")
    agent = chat(template=str(path), temperature=0.5, extra_body={"top_k": 3}, history="last:4")
    settings = agent.describe()
    assert json.loads(json.dumps(settings)) == settings
    assert settings["agent"] == "chat"
    assert settings["model"] == "m"
    assert settings["template_text"] == "T {instructions}"
    assert (settings["temperature"], settings["top_p"], settings["history"]) == (0.5, None, "last:4")
    assert settings["extra_body"] == {"top_k": 3}


def test_null_stands_for_the_default() -> None:
    settings = chat(template=None, extra_body=None, api_key_env=None).describe()
    assert settings["extra_body"] == {}
    assert settings["template"] == "plain"
