"""The compute dtype: as asked for, or as measured."""

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch_models import gather, make_engine, make_model, plain_logprobs, prompt, request

from rollgym.core.errors import UsageError
from rollgym.engines.embedded import precision
from rollgym.engines.embedded.precision import SMALLEST, bfloat16_speedup, choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("requested", "device", "parameters", "speedup", "expected"),
    [
        (None, CPU, SMALLEST, 9.0, torch.float32),
        (None, CUDA, 1, 0.1, torch.bfloat16),
        ("auto", CPU, SMALLEST, 2.0, torch.bfloat16),
        ("auto", CPU, SMALLEST, 1.1, torch.float32),
        ("auto", CPU, SMALLEST - 1, 2.0, torch.float32),
        ("auto", CUDA, 1, 0.1, torch.bfloat16),
        ("bfloat16", CPU, 1, 0.1, torch.bfloat16),
        (torch.float16, CPU, 1, 0.1, torch.float16),
    ],
)
def test_the_dtype_is_as_requested_or_as_measured(
    monkeypatch: pytest.MonkeyPatch,
    requested: Any,
    device: torch.device,
    parameters: int,
    speedup: float,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(precision, "bfloat16_speedup", lambda threads: speedup)
    assert choose_dtype(requested, device, parameters) is expected


def test_the_speedup_is_measured_once() -> None:
    threads = torch.get_num_threads()
    first = bfloat16_speedup(threads)
    assert 0 < first == bfloat16_speedup(threads)


def test_small_models_run_in_float32_and_others_as_asked_for() -> None:
    model = make_model()
    engines = {dtype: make_engine(model, dtype=dtype) for dtype in (None, "auto", "bfloat16", torch.bfloat16)}
    assert [engine.dtype for engine in engines.values()] == ["float32", "float32", "bfloat16", "bfloat16"]

    async def main() -> None:
        ids = prompt(0, 40)
        for dtype, engine in engines.items():
            [reply] = await gather(engine, [request("x", ids)])
            gap = 2e-5 if engine.dtype == "float32" else 0.3
            plain = plain_logprobs(model, [*ids, *reply.token_ids], len(ids))
            assert reply.logprobs == pytest.approx(plain, abs=gap), dtype
            await engine.close()

    asyncio.run(main())
    with pytest.raises(UsageError, match="dtype must be one of auto, float32, bfloat16, float16, not 'int8'"):
        make_engine(model, dtype="int8")


def test_a_model_that_bfloat16_itself_moves_far_is_not_refused() -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    ids = torch.tensor(prompt(0, 24))[None]
    with torch.no_grad():
        exact = torch.log_softmax(model(ids).logits, -1)
        rounded = torch.log_softmax(copy.deepcopy(model).bfloat16()(ids).logits.float(), -1)
    assert (exact - rounded).abs().mean(-1).max() > 0.1  # the limit for models that rounding moves less
    engine = make_engine(model, dtype="bfloat16")
    assert engine.fused
    asyncio.run(engine.close())


def test_sums_between_layers_are_float32_on_cpu() -> None:
    engine = make_engine(make_model(), dtype="bfloat16")
    decoder = engine._model._decoder
    assert (decoder.residual, decoder.embed.dtype) == (torch.float32, torch.bfloat16)
    asyncio.run(engine.close())
