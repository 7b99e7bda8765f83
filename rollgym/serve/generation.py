"""Sampling of one reply, up to a stop string."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rollgym.chat.tokenizer import Codec
from rollgym.core.errors import AgentError
from rollgym.engines.base import Engine, GenerateRequest, Generation, OnToken

PIECE = 32
"""Tokens that are sampled between two checks for a stop string."""


async def generate_until_stop(
    engine: Engine,
    request: GenerateRequest,
    stops: Sequence[str],
    codec: Codec,
    on_token: OnToken | None = None,
) -> Generation:
    """Sample a reply; one with a stop string ends with the token that completes it.

    Args:
        engine: Samples the reply.
        request: The request.
        stops: Stop strings.
        codec: Decodes the sampled ids.
        on_token: Receives tokens as they are sampled, also a few after a stop string.
    """

    async def sample(piece: GenerateRequest) -> Generation:
        work = engine.generate(piece) if on_token is None else engine.stream(piece, on_token)
        return _whole(await work)

    if not stops:
        return await sample(request)
    pieces: list[Generation] = []
    ids: tuple[int, ...] = ()
    left = request.sampling.max_tokens
    while True:
        size = min(PIECE, left)
        piece_request = dataclasses.replace(
            request,
            prompt_ids=request.prompt_ids + ids,
            sampling=dataclasses.replace(request.sampling, max_tokens=size),
        )
        pieces.append(await sample(piece_request))
        ids += pieces[-1].token_ids
        left -= len(pieces[-1].token_ids)
        if find_stop(codec.decode(ids, special=False), stops) is not None:
            return _cut(_joined(pieces), _tokens_to_stop(ids, stops, codec))
        if pieces[-1].finish_reason == "stop" or left < 1 or len(pieces[-1].token_ids) < size:
            return _joined(pieces)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the position of the first stop string."""
    return min((text.index(stop) for stop in stops if stop in text), default=None)


def _whole(generation: Generation) -> Generation:
    if generation.finish_reason == "aborted":
        raise AgentError("The reply was aborted.")
    return generation


def _joined(pieces: Sequence[Generation]) -> Generation:
    spans: list[tuple[int, int]] = []
    for version, count in (span for piece in pieces for span in piece.version_spans):
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + count)
        else:
            spans.append((version, count))
    return Generation(
        token_ids=tuple(number for piece in pieces for number in piece.token_ids),
        logprobs=tuple(value for piece in pieces for value in piece.logprobs),
        finish_reason=pieces[-1].finish_reason,
        version_spans=tuple(spans),
        routed_experts=pieces[-1].routed_experts,
        queue_seconds=sum(piece.queue_seconds for piece in pieces),
        generate_seconds=sum(piece.generate_seconds for piece in pieces),
    )


def _tokens_to_stop(ids: Sequence[int], stops: Sequence[str], codec: Codec) -> int:
    """Return the number of tokens up to the one that completes a stop string."""
    for count in range(max(1, len(ids) - PIECE), len(ids)):
        if find_stop(codec.decode(ids[:count], special=False), stops) is not None:
            return count
    return len(ids)


def _cut(generation: Generation, count: int) -> Generation:
    spans, left = [], count
    for version, length in generation.version_spans:
        if left > 0:
            spans.append((version, min(length, left)))
            left -= length
    experts = generation.routed_experts
    if experts is not None:
        experts = experts.part(0, max(experts.num_tokens - len(generation.token_ids) + count, 0))
    return dataclasses.replace(
        generation,
        routed_experts=experts,
        token_ids=generation.token_ids[:count],
        logprobs=generation.logprobs[:count],
        finish_reason="stop",
        version_spans=tuple(spans),
    )
