"""Requests to ``/generate`` and its replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollgym.core.errors import AgentError
from rollgym.engines.base import BadRequest, GenerateRequest, Sampling
from rollgym.engines.servers.client import parse
from rollgym.engines.servers.reply import (
    Piece,
    Spans,
    VersionSpan,
    reply_error,
    reported_logprobs,
    version_spans,
)
from rollgym.engines.servers.routed_experts import from_int32, routed_experts
from rollgym.models.hf_files import ExpertShape
from rollgym.utils.http_client import short


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any]
    id: str | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[tuple[float, int, Any]] = []
    cached_tokens: Any = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] = []


def check_filters(request: GenerateRequest) -> None:
    """Raise `BadRequest` for top-p, top-k and min-p."""
    sampling = request.sampling
    if sampling.temperature and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
        raise BadRequest(
            f"Request {request.request_id!r} uses top_p, top_k or min_p: SGLang reports log-probs before "
            "these filters, so the reply could not be trained on. Use temperature only."
        )


def request_body(
    rid: str, ids: Sequence[int], sampling: Sampling, max_tokens: int, seeded: bool, experts: bool = False
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
    body = {
        "rid": rid,
        "input_ids": list(ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "stream": False,
    }
    return {**body, "return_routed_experts": True} if experts else body


def read(
    answer: bytes,
    rid: str,
    prompt: int,
    sampling: Sampling,
    max_tokens: int,
    vocabulary: int,
    number: Callable[[str], int],
    where: str,
    experts: ExpertShape | None = None,
) -> Piece:
    """Parse and validate a reply; raises `AgentError` if it is inconsistent."""
    found = parse(answer, _Answer, where)
    meta, ids = found.meta_info, found.output_ids
    kind = meta.finish_reason.get("type")
    logged = [(token, value) for value, token, _ in meta.output_token_logprobs]
    if meta.id is not None and meta.id != rid:
        wrong: str | None = f"it belongs to another request, {short(meta.id)}"
    else:
        wrong = reply_error(
            ids, logged, kind, max_tokens=max_tokens, vocabulary=vocabulary, stop_ids=sampling.stop_ids
        )
    if wrong is not None:
        raise AgentError(f"{where} returned an invalid reply: {wrong}.")
    if kind == "abort" and (meta.finish_reason.get("status_code") or 0) != 0:
        raise AgentError(f"{where} aborted a reply: {short(meta.finish_reason.get('message'))}")
    if kind == "stop" and isinstance(meta.finish_reason.get("matched"), str):
        raise AgentError(f"{where} stopped a reply: {short(meta.finish_reason['matched'])}")
    cached = meta.cached_tokens if type(meta.cached_tokens) is int else 0
    spans = _spans(meta, len(ids), number, where)
    logprobs = reported_logprobs(logged, sampling.temperature)
    told = None if kind == "abort" else meta.routed_experts  # the rest of the reply is requested anyway
    routed = routed_experts(told, from_int32, experts, prompt + len(ids) - 1, where)
    return Piece(ids, logprobs, str(kind), spans, max(cached, 0), routed)


def _spans(meta: _Meta, count: int, number: Callable[[str], int], where: str) -> Spans:
    """Return (version, number of tokens) spans: as reported, or all with the last version."""
    if count and meta.weight_versions is None:
        if meta.weight_version is None:
            raise AgentError(f"{where} does not report the weight version of a reply.")
        return [(number(meta.weight_version), count)]
    return version_spans(meta.weight_versions or [], count, number, where)
