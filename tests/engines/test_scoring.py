"""`TokenScorer`: log-probs of given tokens from vLLM and SGLang servers, and answers that do not fit."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import VOCABULARY, tiny
from scoring_server import Scoring, scoring_server
from scripted_server import as_json

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines import sglang, vllm
from rollgym.engines.embedded.model import read_module
from rollgym.engines.servers.scoring import TokenScorer

KINDS = ("vllm", "sglang")
ROWS = [[3, 1, 4, 1, 5], [9, 2], [3, 1, 4, 1, 5]]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Scoring]:
    with scoring_server(tiny(1), request.param) as script:
        yield script


def scorer(server: Scoring) -> TokenScorer:
    return TokenScorer(server.url, retries=0, timeout=5)


def plain(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)[:-1]


def test_log_probs_are_those_of_the_model(server: Scoring) -> None:
    scored = scorer(server).score(ROWS, top=3)
    assert scorer(server).model == "teacher"
    for row, found in zip(ROWS, scored, strict=True):
        table = plain(tiny(1), row)
        expected = [float(logprobs[token]) for logprobs, token in zip(table, row[1:], strict=True)]
        assert found.logprobs.tolist() == pytest.approx(expected, abs=1e-9)
        best = table.topk(3)
        assert found.top_ids.tolist() == best.indices.tolist()
        assert found.top_logprobs == pytest.approx(best.values.numpy(), abs=1e-9)


def test_equal_rows_are_sent_once(server: Scoring) -> None:
    scorer(server).score(ROWS)
    asked = [path for path, _ in server.seen if path in ("/v1/completions", "/generate")]
    assert len(asked) == 2


def test_the_key_is_sent_and_required() -> None:
    with scoring_server(tiny(1), api_key="secret") as server:
        assert TokenScorer(server.url, api_key="secret").score([[1, 2]])[0].logprobs.shape == (1,)
        with pytest.raises(UsageError, match="answered 401"):
            TokenScorer(server.url)


def test_a_row_longer_than_the_context_is_refused(server: Scoring) -> None:
    server.context = 5
    with pytest.raises(UsageError, match=r"context of 5 tokens, and a sequence to score has 5: at most 4"):
        scorer(server).score(ROWS)


def test_an_address_without_a_server_is_refused() -> None:
    with scoring_server(tiny(1)) as server:
        url = server.url
        server.scripts["/v1/models"] = lambda _: as_json({"data": []})
        with pytest.raises(UsageError, match="is not a vLLM or SGLang server: it lists no model"):
            scorer(server)
    with pytest.raises(UsageError, match="No vLLM or SGLang server can be reached"):
        TokenScorer(url, retries=0)
    with pytest.raises(UsageError, match="is not the address of a server"):
        TokenScorer("127.0.0.1:8000")


def test_a_connection_that_breaks_is_tried_again(server: Scoring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring changes nothing on the server, so a request may be repeated whatever the server did with it."""
    monkeypatch.setattr("rollgym.engines.servers.scoring.RETRY_SECONDS", 0.0)
    path = "/v1/completions" if server.kind == "vllm" else "/generate"
    faults = ["cut", "cut"]

    def broken(body: Any) -> Any:
        if faults:
            return faults.pop()
        return server.vllm(body) if server.kind == "vllm" else as_json(server.sglang(body))

    server.scripts[path] = broken
    assert scorer(server).score([[1, 2]])[0].logprobs.shape == (1,)
    assert faults == []
    server.scripts[path] = lambda _: "cut"
    with pytest.raises(AgentError, match="broke off"):
        scorer(server).score([[1, 2]])


MALFORMED: list[tuple[str, Any, str]] = [
    ("vllm", {"choices": [{"text": "x"}]}, "no prompt_logprobs"),
    ("vllm", {"choices": []}, "no prompt_logprobs"),
    ("vllm", {"choices": [{"prompt_logprobs": [None]}]}, "log-probs of 1 tokens, but 2 were sent"),
    ("vllm", {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}]}, "is missing"),
    ("vllm", {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": 0.5}}]}]}, "not a number up to 0"),
    ("vllm", {"choices": "x"}, "sent an invalid response"),
    ("sglang", {"meta_info": {}}, "sent an invalid response"),
    ("sglang", {"meta_info": {"input_token_logprobs": [[None, 1, None]]}}, "of other tokens than those sent"),
    ("sglang", {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1, 3, None]]}}, "of other tokens"),
    ("sglang", {"meta_info": {"input_token_logprobs": [[None, 1, None], [None, 2, None]]}}, "is missing"),
]


@pytest.mark.parametrize(("kind", "answer", "sentence"), MALFORMED)
def test_an_answer_that_does_not_fit_is_an_error(kind: str, answer: Any, sentence: str) -> None:
    with scoring_server(tiny(1), kind) as server:
        server.scripts["/v1/completions" if kind == "vllm" else "/generate"] = lambda _: as_json(answer)
        with pytest.raises(AgentError, match=sentence):
            scorer(server).score([[1, 2]])


def test_too_few_top_tokens_are_an_error(server: Scoring) -> None:
    server.max_logprobs = 4
    sentence = "Requested prompt logprobs" if server.kind == "vllm" else "tokens at a position, but"
    if server.kind == "sglang":
        whole = server.sglang
        server.scripts["/generate"] = lambda body: as_json(whole({**body, "top_logprobs_num": 4}))
    with pytest.raises(AgentError, match=sentence):
        scorer(server).score([[1, 2]], top=8)
    assert VOCABULARY > 8


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_server_scores_like_the_model(
    kind: str, server_options: Callable[[str], Any], real_model: Callable[[int], Path]
) -> None:
    software: Any = {"vllm": vllm, "sglang": sglang}[kind]
    folder = real_model(0)
    started = software.Server(folder, server_options(kind))
    started.start()
    try:
        found = TokenScorer(started.url, api_key=started.api_key)
        assert found.context == 256
        module = read_module(folder)
        for row, scored in zip(ROWS, found.score(ROWS, top=5), strict=True):
            table = plain(module, row)
            best = table.topk(5).values
            expected = [float(logprobs[token]) for logprobs, token in zip(table, row[1:], strict=True)]
            assert scored.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
            assert scored.top_logprobs == pytest.approx(best.numpy(), abs=1e-4)
            assert all(math.isfinite(value) for value in scored.logprobs)
    finally:
        started.close()
