"""What is asked of ``/generate`` and what is believed of its answer: token ids, never text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollgym.engines import BadRequest, GenerateRequest, Sampling
from rollgym.engines.sglang.client import parse, short
from rollgym.errors import AgentError

TOKEN_BYTES = 1024
"""More than an answer spends on a token, its text included."""
_ABOVE = 1e-3
"""How far above 0 rounding may lift a log-prob."""
GREEDY = 1e-6
"""Below this temperature SGLang takes the most likely token."""
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
    """What one call brought: a whole reply, or as much of one as there was when it was interrupted."""

    token_ids: list[int]
    logprobs: list[float]
    kind: str
    """Why it ended: ``stop``, ``length`` or ``abort``."""
    spans: Spans


def check_request(request: GenerateRequest, vocabulary: int, context: int) -> int:
    """How many tokens the reply may have; `BadRequest` for what must not reach a server.

    An id beyond the vocabulary would end the server.
    """
    name, ids, sampling = request.request_id, request.prompt_ids, request.sampling
    if not ids:
        raise BadRequest(f"Request {name!r} has no prompt ids.")
    for token in (*ids, *sampling.stop_ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadRequest(
                f"Request {name!r} has the id {token!r}; ids are whole numbers from 0 to {vocabulary - 1}."
            )
    if len(ids) >= context:
        raise BadRequest(
            f"Request {name!r} has {len(ids)} prompt ids; the context of {context} leaves no room "
            "for a reply."
        )
    if sampling.temperature and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
        raise BadRequest(
            f"Request {name!r} asks for top_p, top_k or min_p: SGLang reports log-probs from before these "
            "filters, so what was drawn could not be trained on. Use temperature alone."
        )
    return min(sampling.max_tokens, context - len(ids))


def body(rid: str, ids: Sequence[int], sampling: Sampling, most: int, seeded: bool) -> dict[str, Any]:
    """The request, every value explicit: a server may have other defaults."""
    params: dict[str, Any] = {
        "max_new_tokens": most,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop": None,
        "stop_token_ids": list(sampling.stop_ids) or None,
        # SGLang ignores stop ids, too, where it is told to ignore the model's own end.
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
    most: int,
    vocabulary: int,
    number: Callable[[str], int],
    where: str,
) -> Piece:
    """An answer that has been checked: what it says of itself must hold together."""
    found = parse(answer, _Answer, where)
    meta, ids = found.meta_info, found.output_ids
    kind = meta.finish_reason.get("type")
    logprobs = [one[0] for one in meta.output_token_logprobs]
    wrong = _wrong(found, rid, most, vocabulary)
    if wrong is None and set(ids[:-1]).intersection(sampling.stop_ids):
        wrong = "it goes on after a stop id"
    if wrong is None and not ids and kind != "abort":
        wrong = "it has no tokens"
    if wrong is not None:
        raise AgentError(f"{where} gave a reply that cannot be right: {wrong}.")
    if kind == "abort" and (meta.finish_reason.get("status_code") or 0) != 0:
        raise AgentError(f"{where} gave up a reply: {short(meta.finish_reason.get('message'))}")
    if kind == "stop" and isinstance(meta.finish_reason.get("matched"), str):
        raise AgentError(f"{where} stopped a reply: {short(meta.finish_reason['matched'])}")
    # Temperature 0 draws from a point mass, as the embedded engine has it; SGLang says what it is at 1.
    logs = [0.0] * len(ids) if sampling.temperature < GREEDY else [min(value, 0.0) for value in logprobs]
    return Piece(ids, logs, str(kind), _spans(meta, len(ids), number, where))


def _wrong(found: _Answer, rid: str, most: int, vocabulary: int) -> str | None:
    """What is wrong with an answer, if anything."""
    meta, ids = found.meta_info, found.output_ids
    kind = meta.finish_reason.get("type")
    triples = meta.output_token_logprobs
    if meta.id is not None and meta.id != rid:
        return f"it is of another request, {short(meta.id)}"
    if kind not in ("stop", "length", "abort"):
        return f"it ended for the reason {short(kind)!r}"
    if len(ids) > most:
        return f"{len(ids)} tokens where at most {most} were asked for"
    if len(triples) != len(ids):
        return f"{len(ids)} token ids but {len(triples)} log-probs"
    if [one[1] for one in triples] != ids:
        return "its token ids and those of its log-probs differ"
    if any(not 0 <= token < vocabulary for token in ids):
        return f"it has ids beyond the vocabulary of {vocabulary}"
    if any(not math.isfinite(one[0]) or one[0] > _ABOVE for one in triples):
        return "it has log-probs that are none"
    return None


def _spans(meta: _Meta, count: int, number: Callable[[str], int], where: str) -> Spans:
    """(version, tokens) of an answer: as it says, or all of the version it ended with."""
    if not count:
        return []
    if meta.weight_versions is None:
        if meta.weight_version is None:
            raise AgentError(f"{where} does not say which weights a reply came from.")
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
        raise AgentError(f"{where} gave a reply of {count} tokens whose weights it names for {at}.")
    return spans
