"""Sampling: distribution, log-probs and seeds."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rollgym.engines.base import Sampling
from rollgym.engines.embedded.sampling import draw, keep_mask, stream, uniforms


def logits(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2


def uniform(seed: int, position: int) -> float:
    return uniforms([stream(seed)], [position])[0]


def reference(row: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """The distribution after temperature and filters, the plain way, in double precision."""
    scores = row.double().numpy() / sampling.temperature
    probs = np.exp(scores - scores.max())
    order = np.argsort(-probs, kind="stable")
    kept = list(order[: sampling.top_k] if sampling.top_k else order)
    total, mass = sum(probs[i] for i in kept), 0.0
    nucleus = []
    for i in kept:
        if mass < sampling.top_p:
            nucleus.append(i)
        mass += probs[i] / total
    nucleus = [i for i in nucleus if probs[i] >= sampling.min_p * probs[order[0]]]
    out = np.zeros_like(probs)
    out[nucleus] = probs[nucleus]
    return out / out.sum()


GRID = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in product((0.6, 1.0, 1.7), (0, 1, 5), (1.0, 0.9, 0.3), (0.0, 0.05, 0.5))
]


def test_filters_leave_what_transformers_leaves() -> None:
    rows = logits(len(GRID), 40)
    kept = keep_mask(rows / torch.tensor([s.temperature for s in GRID])[:, None], GRID)
    for row, mask, sampling in zip(rows, kept, GRID, strict=True):
        scores = TemperatureLogitsWarper(sampling.temperature)(None, row[None])
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
        if sampling.min_p:
            scores = MinPLogitsWarper(sampling.min_p)(None, scores)
        assert torch.equal(mask, torch.isfinite(scores[0])), sampling


@pytest.mark.parametrize("u", [0.0, 0.3, 0.77, 1 - 2.0**-52])
def test_samples_and_log_probs_match_a_plain_implementation(u: float) -> None:
    rows = logits(len(GRID), 40, seed=3)
    tokens, logs = draw(rows, GRID, [u] * len(GRID))
    for row, token, log, sampling in zip(rows, tokens, logs, GRID, strict=True):
        probs = reference(row, sampling)
        rising = probs.cumsum()
        low, high = rising[token] - probs[token], rising[token]
        assert probs[token] > 0
        assert low - 1e-6 <= u * rising[-1] <= high + 1e-6
        assert log == pytest.approx(math.log(probs[token]), abs=1e-5)


def test_temperature_zero_is_greedy_with_log_prob_zero() -> None:
    rows = logits(3, 50)
    rows[1, [7, 30]] = 99.0
    tokens, logs = draw(rows, [Sampling(temperature=0)] * 3, [0.999] * 3)
    assert tokens == [int(rows[0].argmax()), 7, int(rows[2].argmax())]
    assert logs == [0.0, 0.0, 0.0]
    assert draw(rows[:1], [Sampling(top_k=1)], [0.5]) == (tokens[:1], [0.0])


def test_ties_go_to_the_lower_id() -> None:
    rows = torch.zeros(1, 6)
    assert keep_mask(rows, [Sampling(top_k=2)]).tolist() == [[True, True, False, False, False, False]]
    assert keep_mask(rows, [Sampling(top_p=0.5)]).sum() == 3


def test_top_p_one_keeps_every_token_however_unlikely() -> None:
    rows = torch.tensor([[50.0, 0.0, -50.0, -90.0]])
    assert keep_mask(rows, [Sampling(top_p=1.0)]).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = logits(37, 101, seed=5)
    how = [GRID[n % len(GRID)] if n % 3 else Sampling(temperature=n % 2) for n in range(37)]
    numbers = uniforms([stream(n) for n in range(37)], [5] * 37)
    assert numbers == [uniform(n, 5) for n in range(37)]
    together = draw(rows, how, numbers)
    alone = [draw(rows[n : n + 1], how[n : n + 1], numbers[n : n + 1]) for n in range(37)]
    assert together == ([a[0][0] for a in alone], [a[1][0] for a in alone])


def test_extreme_logits_are_handled() -> None:
    rows = torch.tensor([[0.0, 5.0, -torch.inf], [torch.nan, 0.0, 0.0], [3e38, -3e38, 0.0]])
    tokens, logs = draw(rows, [Sampling(temperature=1e-300)] * 3, [1 - 2.0**-52] * 3)
    assert tokens[0] == 1
    assert tokens[2] == 0
    assert logs[0] == logs[2] == 0.0
    assert math.isnan(logs[1])
    assert math.isnan(draw(rows, [Sampling(temperature=0)] * 3, [0.5] * 3)[1][1])
    masked = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for u in (0.0, 0.49, 0.5, 1 - 2.0**-52):
        assert draw(masked, [Sampling()], [u])[0][0] in (1, 3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=30),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(GRID),
)
def test_only_tokens_that_were_kept_are_drawn(row: list[float], u: float, sampling: Sampling) -> None:
    scores = torch.tensor([row])
    [token], [log] = draw(scores, [sampling], [math.floor(u * 2**52) / 2**52])
    kept = keep_mask((scores - scores.max()) / sampling.temperature, [sampling])
    assert kept[0, token]
    assert log <= 0.0


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    row, draws = logits(1, 20, seed=9) / 2, 20_000
    how = [Sampling(temperature=temperature)] * draws
    tokens, _ = draw(row.expand(draws, -1), how, [uniform(n, 17) for n in range(draws)])
    expected = torch.softmax(row[0].double() / temperature, -1).numpy() * draws
    assert chi_square(np.bincount(tokens, minlength=20), expected) < 43.8  # 19 degrees, 0.1 %


def test_uniforms_are_uniform_over_seeds_positions_and_their_pairs() -> None:
    by_seed = np.array([[uniform(seed, at) for at in range(40)] for seed in range(500)])
    for values in (by_seed, by_seed[:, 0], by_seed[0]):
        counts, _ = np.histogram(values, bins=10, range=(0, 1))
        assert chi_square(counts, np.full(10, values.size / 10)) < 27.9  # 9 degrees, 0.1 %
    for one, other in ((by_seed[:-1], by_seed[1:]), (by_seed[:, :-1], by_seed[:, 1:])):
        table, _, _ = np.histogram2d(one.ravel(), other.ravel(), bins=5, range=((0, 1), (0, 1)))
        assert chi_square(table, np.full((5, 5), one.size / 25)) < 51.2  # 24 degrees, 0.1 %


def test_seeds_of_any_size_count() -> None:
    seeds = [0, 1, 2**31, 2**63, 2**64, 2**64 + 1, 2**200, 2**200 + 2**64]
    assert len({stream(seed) for seed in seeds}) == len(seeds)
    assert uniform(2**200, 3) != uniform(2**200, 4)


@pytest.mark.parametrize("columns", [8192, 49_152, 10_007])
def test_a_large_vocabulary_is_sampled_from_the_same_distribution(columns: int) -> None:
    rows = logits(20, columns) * 3
    numbers = [0.0, 2.0**-52, 1 - 2.0**-52, *(uniform(n, 5) for n in range(17))]
    tokens, logprobs = draw(rows, [Sampling()] * 20, numbers)
    probs = torch.softmax(rows.double(), -1).numpy()
    for row, u, token, logprob in zip(probs, numbers, tokens, logprobs, strict=True):
        rising = np.cumsum(row)
        # Single precision moves the borders between tokens a little.
        assert rising[token] - row[token] - 1e-6 <= u <= rising[token] + 1e-6
        assert logprob == pytest.approx(math.log(row[token]), abs=1e-4)


def test_a_row_of_a_large_vocabulary_does_not_depend_on_its_batch() -> None:
    rows = logits(33, 10_007).to(torch.bfloat16)
    options = [GRID[n % len(GRID)] if n % 2 else Sampling(temperature=n % 3 / 2) for n in range(33)]
    numbers = [uniform(n, 7) for n in range(33)]
    together = draw(rows, options, numbers)
    alone = [draw(rows[n : n + 1], options[n : n + 1], numbers[n : n + 1]) for n in range(33)]
    assert together == ([t for tokens, _ in alone for t in tokens], [p for _, ps in alone for p in ps])


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-52])
def test_tokens_without_probability_are_never_drawn_from_a_large_vocabulary(u: float) -> None:
    rows = torch.full((3, 10_007), -torch.inf)
    only = [700, 8191, 10_006]
    for row, token in zip(rows, only, strict=True):
        row[token] = 1.0
    assert draw(rows, [Sampling()] * 3, [u] * 3) == (only, [0.0] * 3)
    rows[1] = torch.nan
    assert math.isnan(draw(rows, [Sampling()] * 3, [u] * 3)[1][1])
    assert math.isnan(draw(rows, [Sampling(temperature=0)] * 3, [u] * 3)[1][1])
