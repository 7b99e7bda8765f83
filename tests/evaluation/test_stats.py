"""The numbers agree with hand calculation, enumeration and, where there is chance, with themselves."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.evaluation.stats import bootstrap_mean, paired, pass_at_k, percentiles, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # With z² = 3.841459: 0/n gives [0, z²/(n+z²)]; 5/10 gives 1/2 ± z/(2√(10+z²)).
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (5, 10, 0.236593, 0.763407),
        (0, 1, 0.0, 0.793451),
        (1, 1, 0.206549, 1.0),
        (50, 100, 0.403832, 0.596168),
        (0, 1000, 0.0, 0.003827),
    ],
)
def test_wilsons_interval_is_the_one_in_the_books(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-6)


@settings(deadline=None)
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_holds_the_share_and_mirrors_failure(counts):
    successes, trials = counts
    low, high = wilson(successes, trials)
    assert 0.0 <= low <= successes / trials <= high <= 1.0
    assert low < high
    mirrored = wilson(trials - successes, trials)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9])
def test_wilsons_interval_covers_the_true_share_about_as_often_as_it_says(share):
    trials = 40
    covered = sum(
        math.comb(trials, k) * share**k * (1 - share) ** (trials - k)
        for k in range(trials + 1)
        if wilson(k, trials)[0] <= share <= wilson(k, trials)[1]
    )
    assert 0.92 <= covered <= 0.985


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_invalid_proportions(successes, trials):
    with pytest.raises(ValueError, match=f"{successes} successes in {trials} trials is not a proportion"):
        wilson(successes, trials)


def test_the_bootstrap_of_equal_values_is_that_value():
    assert bootstrap_mean([[2.5], [2.5], [2.5]]) == (2.5, 2.5)
    assert bootstrap_mean([[1.0, 3.0]]) == (2.0, 2.0)


def test_the_bootstrap_of_two_values_spans_them():
    # Resamples of {0, 1} have mean 0, ½ or 1 with chance ¼, ½, ¼: far more than 2.5 % at either end.
    assert bootstrap_mean([[0.0], [1.0]]) == (0.0, 1.0)


def test_the_bootstrap_is_near_the_normal_interval_for_many_values():
    values = [float(i % 2) for i in range(400)]
    low, high = bootstrap_mean([[v] for v in values])
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.008)


def test_the_bootstrap_gives_the_same_every_time_unless_the_seed_changes():
    clusters = [[math.sin(i)] for i in range(30)]
    first = bootstrap_mean(clusters)
    assert bootstrap_mean(clusters) == first
    assert bootstrap_mean(clusters, seed=1) != first
    assert bootstrap_mean(clusters, resamples=300) != first


def test_values_that_belong_together_make_the_interval_wider():
    clusters = [[float(i % 2)] * 4 for i in range(50)]
    together = bootstrap_mean(clusters)
    alone = bootstrap_mean([[value] for cluster in clusters for value in cluster])
    assert together[1] - together[0] > 1.7 * (alone[1] - alone[0])


def test_larger_clusters_weigh_more():
    low, high = bootstrap_mean([[1.0] * 9, [0.0]])
    assert (low, high) == (0.0, 1.0)
    many = [[1.0] * 9, [0.0]] * 200
    low, high = bootstrap_mean(many)
    assert low < 0.9 < high
    assert high - low < 0.05


@pytest.mark.parametrize("clusters", [[], [[]], [[1.0], []]])
def test_the_bootstrap_needs_values(clusters):
    with pytest.raises(ValueError, match="at least one value in every cluster"):
        bootstrap_mean(clusters)


@pytest.mark.parametrize("tries", range(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_success(tries):
    for successes in range(tries + 1):
        results = [True] * successes + [False] * (tries - successes)
        for k in range(1, tries + 1):
            choices = list(itertools.combinations(results, k))
            expected = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k(tries, successes, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tries", "successes", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1)]
)
def test_pass_at_k_refuses_what_is_not_defined(tries, successes, k):
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(tries, successes, k)


def test_percentiles_of_zero_to_a_hundred():
    found = percentiles([float(i) for i in range(100, -1, -1)])
    assert found == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert percentiles([3.0]) == dict.fromkeys(["mean", "p50", "p90", "p99", "max"], 3.0)
    assert percentiles([]) == {}


@pytest.mark.parametrize(
    ("differences", "p_value"),
    [
        ([1], 1.0),  # both ±1 are as large
        ([1, 1], 2 / 4),  # ++ and --
        ([1, -1], 1.0),  # a sum of 0: everything is as large
        ([1, 1, 1], 2 / 8),
        ([3, 2, -1], 4 / 8),  # sum 4: ±(3+2+1) and ±(3+2-1) reach it; 3-2+1 does not
        ([4, 2, 1], 2 / 8),
        ([1, 1, 1, 1], 2 / 16),
        ([1, 1, 1, -1], 10 / 16),  # sum 2: 2 with ±4, 8 with ±2
        ([0, 0, 1, 1], 2 / 4),  # tasks without a difference say nothing
        ([0, 0], 1.0),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.1, 1e9, 1e-10])
def test_the_sign_flip_test_is_exact_for_few_tasks_at_any_scale(differences, p_value, scale):
    found = paired([scale * d for d in differences], [0.0] * len(differences))
    assert found.p_value == pytest.approx(p_value)


def test_a_paired_comparison_by_hand():
    found = paired([1.0, 1.0, 0.0, 0.5], [0.0, 1.0, 0.5, 0.0])
    assert (found.tasks, found.a_better, found.b_better, found.equal) == (4, 2, 1, 1)
    assert (found.mean_a, found.mean_b, found.difference) == (0.625, 0.375, 0.25)
    assert found.p_value == 0.75  # of ±1 ±½ ±½ (8 ways), 6 reach a sum of 1
    assert found.low <= found.difference <= found.high


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)), min_size=1, max_size=20))
def test_swapping_the_sides_changes_signs_only(pairs):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    one, other = paired(a, b), paired(b, a)
    assert (one.p_value, one.tasks, one.equal) == (other.p_value, other.tasks, other.equal)
    assert (one.a_better, one.b_better) == (other.b_better, other.a_better)
    assert one.difference == -other.difference
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


@pytest.mark.parametrize(("wins", "losses", "tolerance"), [(12, 4, 1e-12), (13, 5, 0.01), (30, 20, 0.02)])
def test_the_flips_of_equal_differences_follow_the_binomial_distribution(wins, losses, tolerance):
    n = wins + losses
    tail = 2 * sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n
    found = paired([1.0] * wins + [0.0] * losses, [0.0] * wins + [1.0] * losses)
    assert found.p_value == pytest.approx(tail, abs=tolerance)


def test_a_p_value_by_random_flips_is_never_zero():
    assert paired([1.0] * 30, [0.0] * 30).p_value == pytest.approx(1 / 10_001)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], []), ([1.0], [1.0, 2.0])])
def test_a_paired_comparison_needs_pairs(a, b):
    with pytest.raises(ValueError, match="equally many scores"):
        paired(a, b)
