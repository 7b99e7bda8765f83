"""Requests to ``/generate`` and validation of its replies: token ids, never text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollgym.core.errors import AgentError
from rollgym.engines.base import BadRequest, GenerateRequest, Sampling
from rollgym.engines.sglang.client import parse
from rollgym.utils.http_client import short

TOKEN_BYTES = 1024
"""Upper bound of the size of a token in a reply, its text included."""
_ROUNDING = 1e-3
"""Log-probs may exceed 0 by this much due to rounding."""
GREEDY = 1e-6
"""SGLang decodes greedily below this temperature."""
Spans = list[tuple[int, int]]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any]
    id: str | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float, int, Any]] = []


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class Piece:
    """The result of one call: a whole reply, or its first part if it was interrupted."""

    token_ids: list[int]
    logprobs: list[float]
    kind: str
    """Finish reason: ``stop``, ``length`` or ``abort``."""
    spans: Spans


def check_request(request: GenerateRequest, vocabulary: int, context: int) -> int:
    """Return the maximum number of tokens of the reply, or raise `BadRequest`.

    An id outside the vocabulary would crash the server.
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
    if sampling.temperature and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
        raise BadRequest(
            f"Request {name!r} uses top_p, top_k or min_p: SGLang reports log-probs before these filters, "
            "so the reply could not be trained on. Use temperature only."
        )
    return min(sampling.max_tokens, context - len(ids))


def request_body(
    rid: str, ids: Sequence[int], sampling: Sampling, max_tokens: int, seeded: bool
) -> dict[str, Any]:
    """Build the JSON body of a call. All values are explicit: a server may have other defaults."""
    params: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop": None,
        "stop_token_ids": list(sampling.stop_ids) or None,
        # With ignore_eos, SGLang ignores stop ids as well.
        "ignore_eos": not sampling.stop_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    if seeded:
        params["sampling_seed"] = sampling.seed % (1 << 31)
    return {
        "rid": rid,
        "input_ids": list(ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "stream": False,
    }


def read(
    answer: bytes,
    rid: str,
    sampling: Sampling,
    max_tokens: int,
    vocabulary: int,
    number: Callable[[str], int],
    where: str,
) -> Piece:
    """Parse and validate a reply; raises `AgentError` if it is inconsistent."""
    found = parse(answer, _Answer, where)
    meta, ids = found.meta_info, found.output_ids
    kind = meta.finish_reason.get("type")
    logprobs = [one[0] for one in meta.output_token_logprobs]
    wrong = _wrong(found, rid, max_tokens, vocabulary)
    if wrong is None and set(ids[:-1]).intersection(sampling.stop_ids):
        wrong = "it continues after a stop id"
    if wrong is None and not ids and kind != "abort":
        wrong = "it has no tokens"
    if wrong is not None:
        raise AgentError(f"{where} returned an invalid reply: {wrong}.")
    if kind == "abort" and (meta.finish_reason.get("status_code") or 0) != 0:
        raise AgentError(f"{where} aborted a reply: {short(meta.finish_reason.get('message'))}")
    if kind == "stop" and isinstance(meta.finish_reason.get("matched"), str):
        raise AgentError(f"{where} stopped a reply: {short(meta.finish_reason['matched'])}")
    # Greedy decoding samples from a point mass, as in the embedded engine; SGLang reports temperature 1.
    logs = [0.0] * len(ids) if sampling.temperature < GREEDY else [min(value, 0.0) for value in logprobs]
    return Piece(ids, logs, str(kind), _spans(meta, len(ids), number, where))


def _wrong(found: _Answer, rid: str, max_tokens: int, vocabulary: int) -> str | None:
    """Return what is wrong with a reply, or None."""
    meta, ids = found.meta_info, found.output_ids
    kind = meta.finish_reason.get("type")
    triples = meta.output_token_logprobs
    if meta.id is not None and meta.id != rid:
        return f"it belongs to another request, {short(meta.id)}"
    if kind not in ("stop", "length", "abort"):
        return f"its finish reason is {short(kind)!r}"
    if len(ids) > max_tokens:
        return f"{len(ids)} tokens, but at most {max_tokens} were requested"
    if len(triples) != len(ids):
        return f"{len(ids)} token ids but {len(triples)} log-probs"
    if [one[1] for one in triples] != ids:
        return "its token ids and those of its log-probs differ"
    if any(not 0 <= token < vocabulary for token in ids):
        return f"it has ids outside the vocabulary of {vocabulary}"
    if any(not math.isfinite(one[0]) or one[0] > _ROUNDING for one in triples):
        return "it has log-probs above 0, or infinite or NaN ones"
    return None


def _spans(meta: _Meta, count: int, number: Callable[[str], int], where: str) -> Spans:
    """Return (version, number of tokens) spans: as reported, or all with the last version."""
    if not count:
        return []
    if meta.weight_versions is None:
        if meta.weight_version is None:
            raise AgentError(f"{where} does not report the weight version of a reply.")
        return [(number(meta.weight_version), count)]
    spans: Spans = []
    at = 0
    for span in meta.weight_versions:
        if span.start != at or span.end < at:
            break
        if span.end > at:
            spans.append((number(span.version), span.end - at))
        at = span.end
    if at != count:
        raise AgentError(f"{where} returned {count} tokens but weight versions for {at}.")
    return spans
