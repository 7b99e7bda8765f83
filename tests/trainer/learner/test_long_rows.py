"""Long rows in pieces: the numbers and gradients of one pass, with the activations of a piece."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from context_cases import rows_of  # noqa: E402
from family_models import make_family  # noqa: E402
from learner_cases import (  # noqa: E402
    differ,
    episode,
    gradient,
    make_learner,
    make_row,
    mixed_batch,
    shaken,
    tiny,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rollgym.trainer.data.batch import Batch, make_batch  # noqa: E402
from rollgym.trainer.data.packing import MIN_OVERLAP, pack  # noqa: E402
from rollgym.trainer.data.sequences import TokenSequence  # noqa: E402
from rollgym.trainer.learner import forward as scoring  # noqa: E402
from rollgym.trainer.learner import long_rows, packed_attention  # noqa: E402
from rollgym.trainer.learner.forward import allow_packing, score  # noqa: E402
from rollgym.trainer.learner.memory_count import StorageCount  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the pieces of each micro-batch that is cut."""
    sizes: list[list[int]] = []
    plan = scoring.plan_pieces

    def planning(*args: Any) -> Any:
        planned = plan(*args)
        sizes.append([piece.stop - piece.start for piece in planned])
        return planned

    monkeypatch.setattr(scoring, "plan_pieces", planning)
    return sizes


def passes(model: Any, rows: Sequence[TokenSequence], **given: Any) -> tuple[Any, dict[str, Any]]:
    """Log-probs, and the gradient of a function of all results."""
    model.zero_grad()
    stats = score(model, rows, layout="packed", **given)
    (stats.logprobs.square().sum() + stats.entropy.sum() + stats.hidden.sum()).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return stats.logprobs.detach(), grads


def worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-2))
        for name, grad in expected.items()
    )


@pytest.mark.parametrize("kind", ["apart", "prefix"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_moe"])
def test_pieces_have_the_gradient_of_one_pass(
    family: str, kind: str, pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shared prefixes, windows, caps, sinks and experts; few scores at once."""
    model = tiny() if family == "llama" else shaken(make_family(family))
    assert allow_packing(model) is None
    expected_logprobs, expected = passes(model, rows_of(kind))
    for max_tokens, scores in ((25, 2**22), (7, 200)):
        monkeypatch.setattr(long_rows, "MAX_SCORES", scores)
        logprobs, found = passes(model, rows_of(kind), max_tokens=max_tokens)
        assert len(pieces.pop()) > 1
        assert torch.allclose(logprobs, expected_logprobs, atol=1e-5, rtol=0)
        assert worst(found, expected) < 1e-5


def test_checkpointed_layers_and_logits_in_chunks_have_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch, pieces: list[list[int]]
) -> None:
    from rollgym.trainer.learner import chunked_logprobs

    model = tiny()
    assert allow_packing(model) is None
    _, expected = passes(model, rows_of("prefix"))
    monkeypatch.setattr(chunked_logprobs, "MAX_LOGITS", 100)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)
    _, found = passes(model, rows_of("prefix"), max_tokens=25, chunk_logits=True)
    assert pieces
    assert worst(found, expected) < 1e-5


def test_blocks_of_products_in_bfloat16_are_near_those_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, pieces: list[list[int]]
) -> None:
    """The attention of CPUs that are fast at bfloat16; rounding of it differs."""
    monkeypatch.setattr(packed_attention, "is_fast_at_bfloat16", lambda: True)
    model = tiny()
    assert allow_packing(model) is None
    _, exact = passes(model, rows_of("prefix"))
    errors = []
    for max_tokens in (None, 25):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            stats = score(model, rows_of("prefix"), layout="packed", max_tokens=max_tokens)
        model.zero_grad()
        (stats.logprobs.square().sum() + stats.entropy.sum() + stats.hidden.float().sum()).backward()
        squares = [
            (p.grad - exact[n]).square().sum() / exact[n].square().sum() for n, p in model.named_parameters()
        ]
        errors.append(float(sum(squares) / len(squares)) ** 0.5)
    assert len(pieces) == 1
    assert errors[1] < 1.5 * errors[0] < 0.1


@pytest.mark.parametrize(
    "given",
    [
        {"loss": LossConfig("gspo", clip_low=0.2, clip_high=0.2, ratio_level="episode")},
        {"loss": LossConfig("ppo", entropy_coef=0.1), "critic": "shared"},
        {"critic": "separate"},
        {"lora": 2},
    ],
    ids=["episodes", "a value head", "a separate critic", "lora"],
)
def test_a_learner_has_the_same_gradient(given: dict[str, Any], pieces: list[list[int]]) -> None:
    from rollgym.trainer.learner.config import LoraSettings

    batch = mixed_batch(also=("returns", "values") if "critic" in given else ())
    more = {"lora": LoraSettings(rank=given["lora"])} if "lora" in given else {}
    expected = gradient(batch, **{**given, **more}, max_tokens_per_microbatch=10_000)
    assert not pieces
    found = gradient(batch, **{**given, **more}, max_tokens_per_microbatch=6)
    assert pieces
    assert differ(found, expected) < 1e-5


def long_batch(tokens: int) -> Batch:
    row = make_row(np.random.default_rng(0), [(6, 2)] * (tokens // 8))
    one = episode([row])
    return make_batch([one], advantages=[np.ones(one.num_tokens)])


def test_rows_that_fit_are_not_cut(pieces: list[list[int]]) -> None:
    """Also if they exceed a micro-batch together, because sharing their prefix would save too little."""
    batch = long_batch(64)
    length = len(batch.sequences[0].inputs)
    gradient(batch, max_tokens_per_microbatch=length)
    assert not pieces
    gradient(batch, max_tokens_per_microbatch=length - 1)
    assert [sorted(sizes) for sizes in pieces] == 2 * [[31, 32]], "old log-probs, and the update"
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50, MIN_OVERLAP)
    inputs = [np.concatenate([trunk, rng.integers(0, 50, 160)]) for _ in range(2)]
    packing = pack(inputs)
    assert len(packing.ids) == 352, "the prefix is shared after all"
    assert not long_rows.exceeds(packing, 340)
    assert long_rows.exceeds(packing, 300)
    assert long_rows.exceeds(packing, 170)


def test_the_peak_is_that_of_a_piece(pieces: list[list[int]]) -> None:
    peaks = []
    batch = long_batch(1024)
    for budget in (10_000, 128):
        learner = make_learner(tiny(num_hidden_layers=4), max_tokens_per_microbatch=budget)
        batch = batch.with_arrays(old=batch.arrays["behavior"])
        learner.update(batch)
        with StorageCount() as count:
            learner.update(batch)
        peaks.append(count.peak)
    assert len(pieces) == 2
    assert peaks[1] < 0.5 * peaks[0]


def test_padded_rows_that_are_too_long_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    learner = make_learner(layout="padded", max_tokens_per_microbatch=40)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            learner.update(long_batch(64))
    assert [record.getMessage() for record in caplog.records] == [
        "a row of 63 tokens is computed at once, with more memory than learner.max_tokens_per_microbatch=40 "
        "suggests: rows are padded, and only packed rows are cut"
    ]


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("max_tokens", [None, 300], ids=["one pass", "pieces"])
@pytest.mark.parametrize("every", [2, 8], ids=["many actions", "few actions"])
def test_scores_of_all_heads_queries_and_keys_never_exist(
    every: int, max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no layer; the last one reads some queries of a row, with a mask."""
    for module in (packed_attention, long_rows):
        monkeypatch.setattr(module, "MAX_SCORES", 2**14)
    model = tiny()
    assert allow_packing(model) is None
    ids = np.random.default_rng(0).integers(0, 50, 600)
    row = TokenSequence(ids, np.arange(every, 600, every))
    with LargestTensor() as largest:
        passes(model, [row], max_tokens=max_tokens)
    heads, queries, keys = 4, 600 // every, 600
    assert heads * queries * keys > 3 * 600 * 48
    assert largest.elements <= 600 * 50, "more than the logits and the states of the MLP"
