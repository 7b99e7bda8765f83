"""Validation of requests to a server and of its replies: token ids, never text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from rollgym.core.errors import AgentError
from rollgym.core.routed_experts import RoutedExperts
from rollgym.engines.base import BadRequest, GenerateRequest
from rollgym.utils.http_client import short

TOKEN_BYTES = 1024
"""Upper bound of the size of a token in a reply, its text included."""
GREEDY = 1e-6
"""Temperatures below this are greedy decoding in every engine."""
_ROUNDING = 1e-3
"""Log-probs may exceed 0 by this much due to rounding."""
_FLOOR = -9999.0
"""vLLM reports this for log-probs that are infinite or NaN; no sampled token has it."""
Spans = list[tuple[int, int]]


class VersionSpan(msgspec.Struct):
    """Tokens ``start`` to ``end`` of a reply, sampled with one version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The result of one call: a whole reply, or its first part if it was interrupted."""

    token_ids: list[int]
    logprobs: list[float]
    kind: str
    """Finish reason: ``stop``, ``length`` or ``abort``."""
    spans: Spans
    cached_tokens: int = 0
    """Prompt tokens found in the server's prefix cache."""
    routed_experts: RoutedExperts | None = None
    """Experts of all tokens of the call's prompt and reply but the last, if the server reports them."""


def check_request(request: GenerateRequest, vocabulary: int, context: int) -> int:
    """Return the maximum number of tokens of the reply, or raise `BadRequest`.

    An id outside the vocabulary would crash an SGLang server.
    """
    name, ids, sampling = request.request_id, request.prompt_ids, request.sampling
    if not ids:
        raise BadRequest(f"Request {name!r} has no prompt ids.")
    for token in (*ids, *sampling.stop_ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadRequest(
                f"Request {name!r} has the id {token!r}; ids must be integers from 0 to {vocabulary - 1}."
            )
    if len(ids) >= context:
        raise BadRequest(
            f"Request {name!r} has {len(ids)} prompt ids; the context of {context} leaves no room "
            "for a reply."
        )
    return min(sampling.max_tokens, context - len(ids))


def reply_error(
    ids: Sequence[int],
    logged: Sequence[tuple[int, float]],
    kind: object,
    *,
    max_tokens: int,
    vocabulary: int,
    stop_ids: Sequence[int],
) -> str | None:
    """Return what is wrong with a reply, or None.

    Args:
        ids: Its token ids.
        logged: Token id and log-prob of each of its tokens.
        kind: Its finish reason.
        max_tokens: Number of tokens requested.
        vocabulary: Size of the vocabulary.
        stop_ids: The ids that end a reply.
    """
    if kind not in ("stop", "length", "abort"):
        return f"its finish reason is {short(kind)!r}"
    if len(ids) > max_tokens:
        return f"{len(ids)} tokens, but at most {max_tokens} were requested"
    if len(logged) != len(ids):
        return f"{len(ids)} token ids but {len(logged)} log-probs"
    if [token for token, _ in logged] != list(ids):
        return "its token ids and those of its log-probs differ"
    if any(not 0 <= token < vocabulary for token in ids):
        return f"it has ids outside the vocabulary of {vocabulary}"
    if any(not math.isfinite(value) or not _FLOOR < value <= _ROUNDING for _, value in logged):
        return "it has log-probs above 0, or infinite or NaN ones"
    if set(ids[:-1]).intersection(stop_ids):
        return "it continues after a stop id"
    if not ids and kind != "abort":
        return "it has no tokens"
    return None


def reported_logprobs(logged: Sequence[tuple[int, float]], temperature: float) -> list[float]:
    """Return the log-probs of the distribution that the tokens were sampled from.

    Greedy decoding samples from a point mass, as in the embedded engine; servers report temperature 1.
    """
    return [0.0 if temperature < GREEDY else min(value, 0.0) for _, value in logged]


def version_spans(
    reported: Sequence[VersionSpan], count: int, number: Callable[[str], int], where: str
) -> Spans:
    """Return (version, number of tokens) spans; raises `AgentError` if they do not cover the reply."""
    spans: Spans = []
    at = 0
    for span in reported if count else ():
        if span.start != at or span.end < at:
            break
        if span.end > at:
            spans.append((number(span.version), span.end - at))
        at = span.end
    if at != count:
        raise AgentError(f"{where} returned {count} tokens but weight versions for {at}.")
    return spans
