"""Text helpers for messages."""

from hypothesis import given
from hypothesis import strategies as st

from rollgym.core.text import shorten


@given(text=st.text(max_size=40), limit=st.integers(3, 30), middle=st.booleans())
def test_a_shortened_text_fits_and_a_short_one_is_unchanged(text: str, limit: int, middle: bool) -> None:
    short = shorten(text, limit, middle=middle)
    assert len(short) == min(len(text), limit)
    assert (short == text) == (len(text) <= limit) or "…" in text


def test_the_ellipsis_is_at_the_end_or_in_the_middle() -> None:
    assert shorten("abcdefgh", 5) == "abcd…"
    assert shorten("abcdefgh", 5, middle=True) == "ab…gh"
