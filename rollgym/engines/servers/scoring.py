"""`TokenScorer`: log-probs of given tokens from a running vLLM or SGLang server.

The server may hold any model and needs none of rollgym's plugins: vLLM's ``/v1/completions`` and SGLang's
``/generate`` report log-probs of a prompt in every installation.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollgym.core.errors import AgentError, EngineLost, UsageError
from rollgym.engines.servers.client import Busy, Client, Unreached, parse
from rollgym.engines.servers.server_group import positive_int

CONCURRENCY = 16
"""Requests at once."""
RETRIES = 2
"""Repetitions of a request whose connection broke off."""
RETRY_SECONDS = 5.0
BYTES_PER_LOGPROB = 160
"""Upper limit of the size of one log-prob in a response, with the token's text."""
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Entries = Sequence[tuple[int, float]]
"""(token, log-prob) pairs for one position."""


class _Logprob(msgspec.Struct):
    logprob: float


class _VllmChoice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _VllmAnswer(msgspec.Struct):
    choices: list[_VllmChoice]


_Entry = tuple[float | None, int, Any]


class _SGLangMeta(msgspec.Struct):
    input_token_logprobs: list[_Entry]
    input_top_logprobs: list[list[_Entry] | None] | None = None


class _SGLangAnswer(msgspec.Struct):
    meta_info: _SGLangMeta


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Log-probs of a sequence; the first token has none, so index 0 belongs to the second one."""

    logprobs: FloatArray
    """[tokens - 1] Log-prob of each token given all before it, at temperature 1."""
    top_ids: IntArray
    """[tokens - 1, k] The most likely tokens at each position, the likeliest first."""
    top_logprobs: FloatArray
    """[tokens - 1, k] Their log-probs."""


class TokenScorer:
    """Scores token sequences with the model of a running server.

    Args:
        url: Address of a vLLM or SGLang server.
        api_key: Sent as a bearer token.
        timeout: Seconds for one request.
        retries: Attempts after the first while the server cannot be reached, about five seconds apart.

    Raises:
        UsageError: No vLLM or SGLang server answers at the address.

    Example:
        >>> scorer = TokenScorer("http://127.0.0.1:8000")
        >>> scorer.score([[5, 7, 11]])[0].logprobs.shape
        (2,)
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 600.0, retries: int = 24
    ) -> None:
        self._client = Client(url, name="vLLM or SGLang", timeout=timeout, retries=retries, api_key=api_key)
        self.url = self._client.url
        models = self._ask("/v1/models")
        listed = models.get("data") if isinstance(models, dict) else None
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise UsageError(f"{self.url} is not a vLLM or SGLang server: it lists no model at /v1/models.")
        self.model: str = first["id"]
        self.context: int | None = positive_int(first, "max_model_len")
        """Maximum number of tokens of a sequence, with one more that the server samples."""
        info = self._ask("/model_info")
        self._score_one = self._score_sglang if isinstance(info, dict) else self._score_vllm

    def score(self, rows: Sequence[Sequence[int]], top: int = 0) -> list[ScoredTokens]:
        """Score sequences of at least two tokens; equal ones are sent once. Blocks.

        Args:
            rows: Token ids.
            top: Number of most likely tokens to report at each position.

        Raises:
            AgentError: The server cannot be reached, or its answer does not fit the request.
            UsageError: A sequence is longer than the server's context.
        """
        longest = max(map(len, rows), default=0)
        if self.context is not None and longest >= self.context:
            raise UsageError(
                f"The server at {self.url} has a context of {self.context} tokens, and a sequence to score "
                f"has {longest}: at most {self.context - 1} are possible. Start it with a longer context."
            )
        distinct = {tuple(row): None for row in rows}
        return asyncio.run(self._score_all(rows, list(distinct), top))

    async def _score_all(
        self, rows: Sequence[Sequence[int]], distinct: Sequence[tuple[int, ...]], top: int
    ) -> list[ScoredTokens]:
        gate = asyncio.Semaphore(CONCURRENCY)
        score_one: Callable[[tuple[int, ...], int], Awaitable[ScoredTokens]] = self._score_one

        async def score(row: tuple[int, ...]) -> tuple[tuple[int, ...], ScoredTokens]:
            async with gate:
                for _ in range(RETRIES):  # scoring changes nothing, so it may be repeated
                    try:
                        return row, await score_one(row, top)
                    except (Unreached, Busy):
                        raise  # the client has retried these
                    except EngineLost:
                        await asyncio.sleep(RETRY_SECONDS)
                return row, await score_one(row, top)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score(row)) for row in distinct]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._client.close()
        scored = dict(task.result() for task in tasks)
        return [scored[tuple(row)] for row in rows]

    async def _score_vllm(self, row: tuple[int, ...], top: int) -> ScoredTokens:
        body = {
            "model": self.model,
            "prompt": list(row),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top,
            "add_special_tokens": False,
            "return_tokens_as_token_ids": True,
        }
        path = "/v1/completions"
        answer = await self._client.generate(path, body, self._limit(row, top), {})
        found = parse(answer, _VllmAnswer, self.url)
        logprobs = found.choices[0].prompt_logprobs if len(found.choices) == 1 else None
        if logprobs is None:
            raise AgentError(f"{self.url} returned no prompt_logprobs: is it a vLLM server?")
        tables = [
            {} if table is None else {token: each.logprob for token, each in table.items()}
            for table in logprobs
        ]
        own = [table.get(token) for table, token in zip(tables, row, strict=False)]
        return self._checked(row, own, [list(table.items()) for table in tables], top)

    async def _score_sglang(self, row: tuple[int, ...], top: int) -> ScoredTokens:
        body = {
            "input_ids": list(row),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
            "return_text_in_logprobs": False,
            "stream": False,
        }
        answer = await self._client.generate("/generate", body, self._limit(row, top), {})
        meta = parse(answer, _SGLangAnswer, self.url).meta_info
        tokens = tuple(token for _, token, _ in meta.input_token_logprobs)
        if tokens != row:
            raise AgentError(f"{self.url} returned log-probs of other tokens than those sent.")
        tables = [
            [(token, value) for value, token, _ in entries or () if value is not None]
            for entries in meta.input_top_logprobs or [None] * len(row)
        ]
        return self._checked(row, [value for value, _, _ in meta.input_token_logprobs], tables, top)

    def _checked(
        self, row: Sequence[int], own: Sequence[float | None], tables: Sequence[Entries], top: int
    ) -> ScoredTokens:
        """Check that every token but the first has a log-prob, and ``top`` others where they were asked."""
        if len(own) != len(row) or len(tables) != len(row):
            raise AgentError(f"{self.url} returned log-probs of {len(own)} tokens, but {len(row)} were sent.")
        values = own[1:]
        if not all(value is not None and math.isfinite(value) and value < 1e-3 for value in values):
            raise AgentError(f"{self.url} returned a log-prob that is missing or not a number up to 0.")
        ordered = [sorted(table, key=lambda entry: (-entry[1], entry[0]))[:top] for table in tables[1:]]
        if any(len(table) < top for table in ordered):
            raise AgentError(
                f"{self.url} returned {min(map(len, ordered))} tokens at a position, but {top} were "
                "requested: start vLLM with --max-logprobs at least as high."
            )
        shape = (len(row) - 1, top)
        return ScoredTokens(
            np.array(values, dtype=np.float64),
            np.array([[token for token, _ in table] for table in ordered], dtype=np.int64).reshape(shape),
            np.array([[value for _, value in table] for table in ordered], dtype=np.float64).reshape(shape),
        )

    def _limit(self, row: Sequence[int], top: int) -> int:
        return (1 << 16) + BYTES_PER_LOGPROB * len(row) * (top + 2)

    def _ask(self, path: str) -> Any:
        try:
            return self._client.ask(path)
        except AgentError as error:
            raise UsageError(str(error)) from None
