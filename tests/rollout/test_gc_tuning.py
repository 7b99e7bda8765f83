"""The garbage collector is left as it was found."""

import gc

import pytest

from rollgym.rollout.gc_tuning import NEW_OBJECTS, rare_collections


def test_collections_are_rare_inside_and_as_before_after() -> None:
    before = gc.get_threshold()
    with rare_collections():
        with rare_collections():
            assert gc.get_threshold()[0] == NEW_OBJECTS
        assert gc.get_threshold()[0] == NEW_OBJECTS
    assert gc.get_threshold() == before
    with pytest.raises(ZeroDivisionError), rare_collections():
        raise ZeroDivisionError
    assert gc.get_threshold() == before


@pytest.mark.parametrize("own", [0, NEW_OBJECTS + 1])
def test_a_process_that_chose_rarer_ones_or_none_keeps_them(own: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(own)
    try:
        with rare_collections():
            assert gc.get_threshold()[0] == own
        assert gc.get_threshold()[0] == own
    finally:
        gc.set_threshold(*before)
