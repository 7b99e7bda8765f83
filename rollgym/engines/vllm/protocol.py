"""Requests to ``/inference/v1/generate`` and its replies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollgym.core.errors import AgentError
from rollgym.engines.base import Sampling
from rollgym.engines.servers.client import parse
from rollgym.engines.servers.reply import (
    GREEDY,
    Piece,
    VersionSpan,
    reply_error,
    reported_logprobs,
    version_spans,
)
from rollgym.engines.servers.routed_experts import from_npy, routed_experts
from rollgym.engines.vllm.server import MODEL_NAME
from rollgym.models.hf_files import ExpertShape
from rollgym.utils.http_client import short

PREFIX = "generate-tokens-"
"""vLLM puts this before the id of a request."""


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: Any = None
    weight_versions: list[VersionSpan] | None = None
    logprobs: _LogProbs | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    request_id: str | None = None
    usage: Any = None


def request_body(
    rid: str, ids: Sequence[int], sampling: Sampling, max_tokens: int, position: int
) -> dict[str, Any]:
    """Build the JSON body of a call. All values are explicit: a server may have other defaults."""
    greedy = sampling.temperature < GREEDY
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0 if greedy else sampling.min_p,
        "min_tokens": 0,
        "n": 1,
        "stop": [],
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": _seed(sampling.seed, position),
    }
    return {"request_id": rid, "model": MODEL_NAME, "token_ids": list(ids), "sampling_params": params}


def _seed(seed: int, position: int) -> int:
    """Return the seed of the rest of a reply: its start would repeat the random numbers of the reply."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


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
    if len(found.choices) != 1:
        raise AgentError(f"{where} returned an invalid reply: {len(found.choices)} choices instead of 1.")
    (choice,) = found.choices
    ids = choice.token_ids
    content = (choice.logprobs.content if choice.logprobs is not None else None) or []
    logged = [(one.token_id, one.logprob) for one in content]
    if found.request_id is not None and found.request_id != PREFIX + rid:
        wrong: str | None = f"it belongs to another request, {short(found.request_id)}"
    else:
        wrong = reply_error(
            ids,
            logged,
            choice.finish_reason,
            max_tokens=max_tokens,
            vocabulary=vocabulary,
            stop_ids=sampling.stop_ids,
        )
    if wrong is not None:
        raise AgentError(f"{where} returned an invalid reply: {wrong}.")
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        raise AgentError(f"{where} stopped a reply: {short(choice.stop_reason)}")
    if ids and choice.weight_versions is None:
        raise AgentError(f"{where} does not report the weight version of a reply.")
    spans = version_spans(choice.weight_versions or [], len(ids), number, where)
    logprobs = reported_logprobs(logged, sampling.temperature)
    told = None if choice.finish_reason == "abort" else choice.routed_experts  # the rest is requested anyway
    routed = routed_experts(told, from_npy, experts, prompt + len(ids) - 1, where)
    return Piece(ids, logprobs, str(choice.finish_reason), spans, _cached(found.usage), routed)


def _cached(usage: Any) -> int:
    """Return the prompt tokens found in the prefix cache; 0 if the server does not report it."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return max(cached, 0) if type(cached) is int else 0
