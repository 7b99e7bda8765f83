"""Scoring: the plain model's numbers, however rows share a pass, and only at action tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import VOCABULARY, make_row, shaken, tiny  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.trainer.data.packing import LONG_PREFIX, pack  # noqa: E402
from rollgym.trainer.data.sequences import TokenSequence  # noqa: E402
from rollgym.trainer.learner import forward as scoring  # noqa: E402
from rollgym.trainer.learner import packed_attention  # noqa: E402
from rollgym.trainer.learner.forward import Layout, TokenStats, allow_packing, distinct, packs, score  # noqa: E402

LAYOUTS: list[Layout] = ["padded", "packed"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}


def rows_of(seed: int = 0) -> list[TokenSequence]:
    """Rows of one to three turns, from very short to long."""
    rng = np.random.default_rng(seed)
    spans = [[(5, 3), (7, 2), (1, 4)], [(1, 1)], [(20, 6)], [(2, 2), (3, 3)], [(9, 1)]]
    return [make_row(rng, one) for one in spans]


def ready(model: Any, layout: Layout) -> Any:
    if layout == "packed":
        assert allow_packing(model) is None
    return model


@torch.no_grad()
def plain(model: Any, rows: Sequence[TokenSequence], temperature: float) -> tuple[Any, Any]:
    """Log-probs and entropies from the model's own logits, one row at a time and in double precision."""
    logprobs, entropies = [], []
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row.ids)[None]).logits[0].double() / temperature
        logs = torch.log_softmax(logits, -1)[torch.from_numpy(row.action_positions - 1)]
        logprobs.append(logs.gather(-1, torch.from_numpy(row.ids[row.action_positions])[:, None])[:, 0])
        entropies.append(-(logs.exp() * logs).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_are_those_of_the_tempered_distribution(layout: Layout, temperature: float) -> None:
    """Rule 20: log_softmax(logits / T), which is what an engine draws from."""
    rows = rows_of()
    logprobs, entropies = plain(tiny(), rows, temperature)
    found = score(ready(tiny(), layout), rows, layout=layout, temperature=temperature)
    assert torch.allclose(found.logprobs.double(), logprobs, atol=2e-5, rtol=0)
    assert torch.allclose(found.entropy.double(), entropies, atol=2e-5, rtol=0)
    assert found.hidden.shape == (len(logprobs), 32)


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, **sizes, bos_token_id=None, eos_token_id=None)
    ).eval()


@pytest.mark.parametrize(
    "make", [gpt2, lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()], ids=["gpt2", "qwen3"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_architectures_give_their_own_log_probs(make: Any, layout: Layout) -> None:
    model = shaken(make())
    expected, _ = plain(model, rows_of(), 1.0)
    found = score(ready(model, layout), rows_of(), layout=layout).logprobs
    assert torch.allclose(found.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_never_see_one_another(layout: Layout) -> None:
    model, rows = ready(tiny(), layout), rows_of()
    others = [*rows_of(seed=1)[:2], rows[2], *rows_of(seed=1)[3:]]
    at = slice(
        sum(len(row.action_positions) for row in rows[:2]), sum(len(row.action_positions) for row in rows[:3])
    )
    together = score(model, rows, layout=layout)
    beside = score(model, others, layout=layout)
    alone = score(model, [rows[2]], layout=layout)
    for found in (beside.logprobs[at], alone.logprobs):
        assert torch.allclose(found, together.logprobs[at], atol=1e-6, rtol=0)
    assert torch.allclose(beside.hidden[at], together.hidden[at], atol=1e-6, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_action_tokens_are_scored_and_nothing_after_the_last_is_read(layout: Layout) -> None:
    model = ready(tiny(), layout)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 12)
    row = TokenSequence(ids, np.array([3, 4, 8]))
    longer = TokenSequence(np.append(ids[:9], [1, 2, 3, 4, 5]), row.action_positions)
    other_end = TokenSequence(np.append(ids[:8], (ids[8] + 1) % VOCABULARY), row.action_positions)
    found = score(model, [row], layout=layout).logprobs
    assert found.shape == (3,)
    assert torch.equal(score(model, [longer], layout=layout).logprobs, found)
    changed = score(model, [other_end], layout=layout).logprobs
    assert torch.equal(changed[:2], found[:2])
    assert changed[2] != found[2]


def with_prefix(prefix: int, ends: Sequence[int], seed: int = 5) -> list[TokenSequence]:
    """Rows with one prefix; each second one shares a few tokens more with the row before it."""
    rng = np.random.default_rng(seed)
    trunk, rows = rng.integers(0, VOCABULARY, prefix), []
    for number, end in enumerate(ends):
        ids = np.concatenate([trunk, rng.integers(0, VOCABULARY, end)])
        if number % 2:
            ids[prefix : prefix + 2] = rows[-1].ids[prefix : prefix + 2]
        rows.append(TokenSequence(ids, np.arange(len(ids) - 2, len(ids))))
    return rows


@pytest.mark.parametrize("much_shared", [0, 1000], ids=["gathered again", "kept"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("prefix", [LONG_PREFIX - 5, LONG_PREFIX, LONG_PREFIX + 9])
def test_a_long_prefix_is_computed_once_with_the_gradient_of_separate_rows(
    prefix: int, window: int | None, much_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "MUCH_SHARED", much_shared)
    rows = with_prefix(prefix, [6, 9, 4, 3, 20])
    queries: list[int] = []
    attend_row = packed_attention.attend_row

    def counting(query: Any, *args: Any) -> Any:
        queries.append(query.shape[2])
        return attend_row(query, *args)

    monkeypatch.setattr(packed_attention, "attend_row", counting)

    def gradients(layout: Layout, parts: Sequence[Sequence[TokenSequence]]) -> list[Any]:
        torch.manual_seed(0)
        model = ready(
            shaken(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval()), layout
        )
        queries.clear()
        for part in parts:
            stats = score(model, part, layout=layout)
            (stats.logprobs.square().sum() + stats.entropy.sum()).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients("padded", [[row] for row in rows])
    found = gradients("packed", [rows])
    for ours, plain_one in zip(found, expected, strict=True):
        assert torch.allclose(ours, plain_one, atol=2e-4, rtol=1e-4)
    packing = pack([row.inputs for row in rows])
    assert (max(packing.shared) >= LONG_PREFIX) == (prefix >= LONG_PREFIX)
    computed = len(packing.ids) if prefix >= LONG_PREFIX else sum(packing.sizes)
    assert sum(queries[: len(rows)]) == computed


def alike() -> list[TokenSequence]:
    """Five rows, of which three and two are read alike but end with different tokens."""
    rng = np.random.default_rng(3)
    first, second = make_row(rng, [(4, 2), (3, 1)]), make_row(rng, [(6, 1)])

    def ending(row: TokenSequence, token: int) -> TokenSequence:
        return TokenSequence(np.append(row.ids[:-1], token), row.action_positions)

    return [first, second, ending(first, 7), ending(second, 8), ending(first, 9)]


def test_rows_that_are_read_alike_are_computed_once() -> None:
    once, at = distinct(alike())
    assert [len(row.action_positions) for row in once] == [3, 1]
    assert at.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_computing_once_changes_no_number(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = ready(tiny(), layout), alike()
    together = score(model, rows, layout=layout)
    monkeypatch.setattr(scoring, "distinct", apart)
    for mine, theirs in zip(values(together), values(score(model, rows, layout=layout)), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=0)


def apart(rows: Sequence[TokenSequence]) -> tuple[list[TokenSequence], Any]:
    return list(rows), np.arange(sum(len(row.action_positions) for row in rows))


def values(scores: TokenStats) -> list[Any]:
    return [scores.logprobs, scores.entropy, scores.hidden]


class Scaled(LlamaForCausalLM):
    """A model that changes its logits after the head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = found.logits / 2
        return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_changes_its_logits_after_the_head_gives_the_log_probs_of_those(layout: Layout) -> None:
    model = shaken(Scaled(tiny().config).eval())
    expected, _ = plain(model, rows_of(), 1.0)
    other, _ = plain(shaken(LlamaForCausalLM(tiny().config).eval()), rows_of(), 1.0)
    found = score(ready(model, layout), rows_of(), layout=layout).logprobs
    assert torch.allclose(found.double(), expected, atol=2e-5, rtol=0)
    assert (expected - other).abs().max() > 0.1


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(
        UsageError, match="LlamaModel cannot be trained: its transformer and output layer were not found"
    ):
        scoring.parts(LlamaModel(tiny().config))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_keep_to_the_window_of_a_layer(layout: Layout) -> None:
    """A window of 4 tokens: computed without it, log-probs would be those of another model."""
    model = shaken(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).eval())
    expected, _ = plain(model, rows_of(), 1.0)
    found = score(ready(model, layout), rows_of(), layout=layout).logprobs
    assert torch.allclose(found.double(), expected, atol=2e-5, rtol=0)


def test_attention_that_cannot_be_replaced_is_not_packed() -> None:
    model = shaken(MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY)).eval())
    expected, _ = plain(model, rows_of(), 1.0)
    assert allow_packing(model) == "its attention cannot be replaced"
    assert not packs(model)
    assert torch.allclose(score(model, rows_of()).logprobs.double(), expected, atol=2e-5, rtol=0)


def test_packed_rows_are_computed_as_they_are_and_not_padded() -> None:
    model = ready(tiny(), "packed")
    seen: list[tuple[int, ...]] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    score(model, rows_of(), layout="packed")
    score(model, rows_of(), layout="padded")
    lengths = [len(row.inputs) for row in rows_of()]
    assert seen == [(1, sum(lengths)), (len(lengths), max(lengths))]


@pytest.mark.parametrize("window", [None, 6])
def test_masked_attention_over_few_queries_at_a_time_is_the_same(
    monkeypatch: Any, window: int | None
) -> None:
    """Scores of all heads, queries and keys never exist at once, and gradients are the same."""
    rng = np.random.default_rng(0)
    rows = [make_row(rng, [(30, 3), (20, 9)]), make_row(rng, [(12, 5)])]
    config = MistralConfig(**SIZES, sliding_window=window)
    results = []
    for limit in (2**26, 4 * 62 * 2):
        monkeypatch.setattr(packed_attention, "MAX_SCORES", limit)
        model = ready(shaken(MistralForCausalLM(config).eval()), "packed")
        largest: list[int] = []
        masked = packed_attention._masked
        monkeypatch.setattr(
            packed_attention,
            "_masked",
            lambda query, key, *rest, masked=masked, largest=largest: (
                largest.append(query.shape[1] * query.shape[2] * key.shape[2]) or masked(query, key, *rest)
            ),
        )
        stats = score(model, rows, layout="packed")
        stats.logprobs.sum().backward()
        monkeypatch.setattr(packed_attention, "_masked", masked)
        results.append((stats.logprobs.detach(), model.model.layers[0].self_attn.q_proj.weight.grad, largest))
    (whole, gradient, many), (parts, again, few) = results
    assert max(many) > limit >= max(few)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(again, gradient, atol=1e-5, rtol=1e-4)
