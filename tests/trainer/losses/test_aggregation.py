"""Token weights: computed once over the batch, by episode."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import UnknownName, UsageError
from rollgym.trainer.losses.aggregation import MODES, Mode, token_weights

EPISODES = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6)
few = settings(max_examples=50, deadline=None)


def constant_for(mode: Mode) -> float | None:
    return 8.0 if mode == "constant" else None


@pytest.mark.parametrize(
    ("mode", "constant", "first", "second"),
    [
        ("token-mean", None, 1 / 8, 1 / 8),  # 8 tokens
        ("sequence-mean", None, 1 / 4, 1 / 12),  # 2 episodes, of 2 and 6 tokens
        ("constant", 10, 1 / 20, 1 / 20),  # 2 episodes times 10
    ],
)
def test_each_mode_by_hand(mode: Mode, constant: float | None, first: float, second: float) -> None:
    """Rule 17."""
    found = token_weights([[2], [1, 5]], mode, constant=constant)
    assert [w.tolist() for w in found] == [pytest.approx([first] * 2), pytest.approx([second] * 6)]


@pytest.mark.parametrize("mode", MODES)
@few
@given(episodes=EPISODES)
def test_the_split_into_sequences_changes_no_weight(mode: Mode, episodes: list[list[int]]) -> None:
    """Rule 5: an episode has one total weight, however many sequences it has."""
    cut = token_weights(episodes, mode, constant=constant_for(mode))
    whole = token_weights([[sum(rows)] for rows in episodes], mode, constant=constant_for(mode))
    for a, b in zip(cut, whole, strict=True):
        assert a.tolist() == b.tolist()


@few
@given(episodes=EPISODES)
def test_means_have_a_total_weight_of_one(episodes: list[list[int]]) -> None:
    """Rule 17."""
    tokens = sum(map(sum, episodes))
    for mode in ("token-mean", "sequence-mean"):
        total = sum(w.sum() for w in token_weights(episodes, mode))
        assert total == pytest.approx(1.0 if tokens else 0.0)
    filled = sum(1 for rows in episodes if sum(rows))
    shares = [w.sum() for w in token_weights(episodes, "sequence-mean") if len(w)]
    assert shares == pytest.approx([1 / filled] * filled if filled else [])


@pytest.mark.parametrize("mode", MODES)
@few
@given(data=st.data(), episodes=EPISODES)
def test_episodes_left_out_are_in_no_denominator(
    mode: Mode, data: st.DataObject, episodes: list[list[int]]
) -> None:
    """Rule 19: the others have the same weights as without it."""
    keep = data.draw(st.lists(st.booleans(), min_size=len(episodes), max_size=len(episodes)))
    found = token_weights(episodes, mode, constant=constant_for(mode), keep=keep)
    alone = iter(
        token_weights(
            [rows for rows, kept in zip(episodes, keep, strict=True) if kept and sum(rows)],
            mode,
            constant=constant_for(mode),
        )
    )
    for rows, kept, weights in zip(episodes, keep, found, strict=True):
        expected = next(alone).tolist() if kept and sum(rows) else [0.0] * sum(rows)
        assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_are_in_no_denominator(mode: Mode) -> None:
    """Rules 17 and 19: every mode honors a mask of tokens; an episode masked whole is left out."""
    keep = [[True, False, True], np.zeros(2, dtype=bool), True]
    found = token_weights([[3], [2], [4]], mode, constant=constant_for(mode), keep=keep)
    short, long = token_weights([[2], [4]], mode, constant=constant_for(mode))
    assert found[0].tolist() == [short[0], 0.0, short[1]]
    assert found[1].tolist() == [0.0, 0.0]
    assert found[2].tolist() == long.tolist()


def test_an_empty_batch_has_no_weights() -> None:
    for mode in MODES:
        assert token_weights([], mode, constant=constant_for(mode)) == []


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(UnknownName, match="Did you mean token-mean"):
        token_weights([[1]], "tokenmean")  # type: ignore[arg-type]
    for constant in (None, 0, -1, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="positive, finite"):
            token_weights([[1]], "constant", constant=constant)
    with pytest.raises(UsageError, match="does not read aggregation_constant"):
        token_weights([[1]], "token-mean", constant=5)
    with pytest.raises(UsageError, match="must be 0 or more"):
        token_weights([[1], [2, -1]], "token-mean")
    with pytest.raises(UsageError, match="1 entries for 2 episodes"):
        token_weights([[1], [2]], "token-mean", keep=[True])
    with pytest.raises(UsageError, match="3 flags for the 2 tokens of episode 1"):
        token_weights([[1], [2]], "token-mean", keep=[True, [True, False, True]])
