"""The cache of first prompts stays within its bound."""

from hypothesis import given
from hypothesis import strategies as st

from rollgym.chat.bounded_cache import BoundedCache


@given(st.lists(st.integers(1, 40), max_size=60))
def test_it_never_holds_more_than_it_may_and_returns_what_was_made(lengths: list[int]) -> None:
    cache = BoundedCache[str](50, cost=len)
    for length in lengths:
        assert cache.get(length, lambda length=length: "x" * length) == "x" * length  # type: ignore[misc]
        assert cache.total == sum(map(len, cache._values.values())) <= 50


def test_the_value_that_was_not_used_for_the_longest_time_goes_first() -> None:
    cache, made = BoundedCache[str](8, cost=len), list[str]()

    def get(key: str) -> None:
        cache.get(key, lambda: made.append(key) or key * 2)

    for key in "abcd" + "a" + "e":
        get(key)
    assert len(cache) == 4
    get("a")
    assert made == ["a", "b", "c", "d", "e"]
    get("b")
    assert made[-1] == "b"
    assert cache.get("long", lambda: "more than a quarter") == "more than a quarter"
    assert len(cache) == 4
