"""Allowed addresses of a reward service, and sources of its secrets."""

from typing import Any

import pytest

from rollgym.core.errors import UsageError
from rollgym.rewards.http import HttpScorer

SECRET = "Bearer sk-very-secret-0123456789"


@pytest.mark.parametrize(
    ("header_env", "said"),
    [
        ({"Authorization": SECRET}, "must be the name of an environment variable"),
        ({"Authorization": "NOT_SET_ANYWHERE"}, "is not set"),
        ({"Authorization": "BROKEN"}, "line break"),
        ({"Bad Header": "REWARD_AUTH"}, "cannot set the header"),
        ({"Host": "REWARD_AUTH"}, "cannot set the header 'Host'"),
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_and_not_repeated(
    header_env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_AUTH", SECRET)
    monkeypatch.setenv("BROKEN", "a\nb")
    with pytest.raises(UsageError, match=said) as caught:
        HttpScorer("http://localhost:1/score", header_env=header_env)
    assert "sk-very" not in str(caught.value)


# Addresses


@pytest.mark.parametrize(
    "url",
    ["https://rewards.example/score", "http://localhost:8000/", "http://127.0.0.2:9/x", "http://[::1]:9/x"],
)
def test_https_and_this_machine_are_fine(url: str) -> None:
    assert HttpScorer(url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "http://rewards.example/score",
        "http://10.0.0.7:9/",
        "http://localhost.example/",
        "http://127.0.0.1.example/",
        "http://0x7f000001/",
    ],
)
def test_plain_http_over_a_network_must_be_asked_for(url: str) -> None:
    with pytest.raises(UsageError, match="plain http would send"):
        HttpScorer(url)
    assert HttpScorer(url, allow_plain_http=True).url == url


@pytest.mark.parametrize(
    "url",
    [
        "ftp://localhost/",
        "localhost:8000",
        "https://",
        "",
        None,
        "https://me:sk-secret@example.org/",
        "https://example.org/?key=sk-secret",
        "https://example.org/#sk-secret",
        "https://example.org:99999999/",
    ],
)
def test_other_addresses_are_refused_and_not_repeated(url: Any) -> None:
    with pytest.raises(UsageError, match="A reward's url must be an address") as caught:
        HttpScorer(url)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"retries": -1}, {"concurrency": 0}])
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        HttpScorer("http://localhost:1/", **options)
