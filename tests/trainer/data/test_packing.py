"""Packed sequences: a shared prefix is computed once, and that changes no number."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import (  # noqa: E402
    VOCABULARY,
    assert_same,
    differ,
    episode,
    gradient,
    make_learner,
    shaken,
    tiny,
)
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from rollgym.trainer.data.batch import Batch, make_batch  # noqa: E402
from rollgym.trainer.data.packing import (  # noqa: E402
    MIN_OVERLAP,
    MIN_SAVED,
    SHARED_TOKEN_COST,
    bundles,
    pack,
    row_index,
)
from rollgym.trainer.data.sequences import TokenSequence  # noqa: E402
from rollgym.trainer.learner.forward import allow_packing, score  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402

FEW = settings(max_examples=60, deadline=None)
token_lists = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8)


def gpt2() -> Any:
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return shaken(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ends)).eval())


def qwen3() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config: Any = Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads, bos_token_id=None, eos_token_id=None)
    return shaken(Qwen3ForCausalLM(config).eval())


def array(tokens: Any) -> Any:
    return np.array(tokens, dtype=np.int64)


@FEW
@given(token_lists)
def test_every_sequence_finds_its_tokens_along_its_path(lists: list[list[int]]) -> None:
    packing = pack([array(tokens) for tokens in lists])
    for tokens, path in zip(lists, packing.paths, strict=True):
        assert packing.ids[path].tolist() == tokens
        assert packing.positions[path].tolist() == list(range(len(tokens)))
    beginnings = {tuple(tokens[:end]) for tokens in lists for end in range(1, len(tokens) + 1)}
    total = sum(map(len, lists))
    worth_it = total - len(beginnings) >= MIN_SAVED * total
    assert len(packing.ids) == (len(beginnings) if worth_it else total)


@FEW
@given(token_lists)
def test_the_route_visits_sequences_in_the_order_of_their_tokens(
    lists: list[list[int]],
) -> None:
    packing = pack([array(tokens) for tokens in lists])
    route = np.arange(len(packing.ids)) if packing.route is None else packing.route
    brought = [
        row[known:]
        for row, known in zip(
            np.split(route, np.cumsum(packing.sizes)[:-1].astype(int)), packing.shared, strict=True
        )
    ]
    assert np.concatenate(brought).tolist() == list(range(len(packing.ids)))


def family(count: int = 8, seed: int = 0) -> list[TokenSequence]:
    """Sequences that share 20 to 30 tokens and fork at different positions; actions before and after."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, VOCABULARY, 30)
    rows = []
    for number in range(count):
        fork = (30, 30, 20, 25)[number % 4]
        ids = np.concatenate([trunk[:fork], rng.integers(0, VOCABULARY, 6 + number)])
        rows.append(TokenSequence(ids, np.array([15, 16, fork + 2, len(ids) - 1])))
    return rows


def batch_of(rows: list[TokenSequence]) -> Batch:
    rng = np.random.default_rng(1)
    made = make_batch(
        [episode([row], str(number)) for number, row in enumerate(rows)],
        advantages=[rng.normal(size=len(row.action_positions)) for row in rows],
    )
    return made.with_arrays(old=made.arrays["behavior"] + rng.normal(0, 0.2, made.num_tokens))


@pytest.mark.parametrize("make", [tiny, gpt2, qwen3])
def test_sequences_with_a_shared_prefix_get_their_own_logprobs(make: Any) -> None:
    rows, model = family(), make()
    expected = score(model, rows, layout="padded")
    assert allow_packing(model) is None
    assert allow_packing(model) is None, "and again, which changes nothing"
    found = score(model, rows, layout="packed")
    assert torch.allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert torch.allclose(found.entropy, expected.entropy, atol=1e-5, rtol=0)
    assert torch.allclose(found.hidden, expected.hidden, atol=1e-5, rtol=0)
    ids = torch.arange(9)[None]
    assert torch.allclose(model(input_ids=ids).logits, make()(input_ids=ids).logits, atol=1e-5, rtol=0)


def test_the_last_layer_runs_only_where_an_action_is_predicted() -> None:
    rows, model = family(), tiny()
    assert allow_packing(model) is None
    seen: dict[int, int] = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.up_proj.register_forward_hook(
            lambda _, given, __, number=number: seen.update({number: given[0].shape[1]})
        )
    score(model, rows, layout="packed")
    beginnings = {tuple(row.inputs[:end]) for row in rows for end in range(1, len(row.inputs) + 1)}
    predicting = {tuple(row.inputs[:place]) for row in rows for place in row.action_positions}
    assert seen == {0: len(beginnings), 1: len(predicting)}


@pytest.mark.parametrize("budget", [1, 60, 120, 10_000])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_shared_prefix_does_not_change_the_gradient(budget: int, checkpointing: bool) -> None:
    """Rule 16, where one token's state is part of several sequences."""
    batch = batch_of(family())
    loss = LossConfig("grpo", entropy_coef=0.1)
    expected = gradient(batch, loss=loss, layout="padded")
    how: dict[str, Any] = {"max_tokens_per_microbatch": budget, "gradient_checkpointing": checkpointing}
    assert_same(gradient(batch, loss=loss, layout="packed", **how), expected)
    assert differ(gradient(batch_of(family(seed=1)), loss=loss), expected) > 1e-3


def test_a_shared_prefix_is_computed_once() -> None:
    rows, read = family(), []
    learner = make_learner(layout="packed")
    learner.model.model.embed_tokens.register_forward_hook(lambda _, given, __: read.append(given[0].numel()))
    learner.update(batch_of(rows))
    beginnings = {tuple(row.inputs[:end]) for row in rows for end in range(1, len(row.inputs) + 1)}
    assert sum(read) == len(beginnings) < sum(len(row.inputs) for row in rows) / 2


def row(*tokens: int) -> TokenSequence:
    return TokenSequence(array([*tokens, 0]), array([len(tokens)]))


@FEW
@given(token_lists, st.integers(1, 40))
def test_bundles_cost_what_they_report_and_contain_every_sequence(lists: list[list[int]], room: int) -> None:
    rows = [row(*range(MIN_OVERLAP), *tokens) for tokens in lists]
    found = bundles(row_index(rows), MIN_OVERLAP + room)
    assert sorted(i for members, _ in found for i in members) == list(range(len(rows)))
    for members, cost in found:
        different = {rows[i].inputs.tobytes() for i in members}
        assert cost <= MIN_OVERLAP + room or len(different) == 1
        paths = pack([rows[i].inputs for i in members])
        read_elsewhere = sum(paths.sizes) - len(paths.ids)
        assert cost <= len(paths.ids) + SHARED_TOKEN_COST * read_elsewhere + 1


@FEW
@given(token_lists, st.integers(1, 60), st.data())
def test_some_sequences_are_bundled_as_if_there_were_no_others(
    lists: list[list[int]], room: int, data: st.DataObject
) -> None:
    """The index of a batch gives the partition of any of its rows, so no rank needs the tokens of others."""
    rows = [row(*range(data.draw(st.integers(0, MIN_OVERLAP + 2))), *tokens) for tokens in lists]
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True).map(sorted))
    alone = bundles(row_index([rows[i] for i in chosen]), MIN_OVERLAP + room)
    expected = [([chosen[i] for i in members], cost) for members, cost in alone]
    assert bundles(row_index(rows), MIN_OVERLAP + room, chosen) == expected


def test_sequences_without_a_shared_prefix_are_not_bundled() -> None:
    rows = [row(3, 1), row(1, 2, 3), row(2), row(1, 2, 3)]
    assert bundles(row_index(rows), 1000) == [([0], 2), ([1, 3], 3), ([2], 1)]
    apart = pack([array([5, 6]), array([1]), array([4, 4, 4])])
    assert apart.order == (0, 1, 2)
    assert apart.route is None


def test_sequences_with_a_long_shared_prefix_are_bundled_up_to_the_limit() -> None:
    trunk = list(range(MIN_OVERLAP))
    rows = [row(*trunk, 7), row(9, 9), row(*trunk, 8), row(*trunk, 6)]
    more = round(MIN_OVERLAP + 1 + 1 + SHARED_TOKEN_COST * MIN_OVERLAP)
    assert bundles(row_index(rows), 1000) == [
        ([0, 2, 3], more + round(1 + SHARED_TOKEN_COST * MIN_OVERLAP)),
        ([1], 2),
    ]
    assert bundles(row_index(rows), more) == [([0, 3], more), ([1], 2), ([2], MIN_OVERLAP + 1)]
    assert [members for members, _ in bundles(row_index(rows), 0)] == [[0], [1], [2], [3]]
