"""Prompts in parts: whatever is lost on the way, an engine reads the whole prompt that was asked for."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.cluster import prompts
from rollgym.cluster.prompts import PromptReceiver, PromptSender
from rollgym.engines.base import GenerateRequest, Generation


def request(*ids: int, session: str = "s") -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_ids=ids, session=session)


def reply(*ids: int) -> Generation:
    return Generation(
        token_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop", version_spans=((0, len(ids)),)
    )


def exchange(
    sender: PromptSender, receiver: PromptReceiver, asked: GenerateRequest, answer: Generation
) -> list[int]:
    """One turn; returns the numbers of ids sent."""
    sent = []
    for whole in (False, True):
        delta = sender.delta(asked, whole=whole)
        assert delta is not None
        sent.append(len(delta.ids))
        delta = deepcopy(delta)
        received = receiver.request(delta)
        if received is not None:
            assert received == asked
            receiver.replied(delta, received, answer)
            sender.replied(asked, delta.serial, answer)
            return sent
    raise AssertionError("the whole prompt was not taken")


def test_a_turn_sends_its_new_ids_only() -> None:
    sender, receiver = PromptSender(), PromptReceiver()
    assert exchange(sender, receiver, request(1, 2, 3), reply(4, 5)) == [3]
    assert exchange(sender, receiver, request(1, 2, 3, 4, 5, 6), reply(7)) == [1]
    assert exchange(sender, receiver, request(1, 2, 9, 4), reply(7)) == [4], "history was rewritten"
    assert exchange(sender, receiver, request(8, session=""), reply(7)) == [1]
    assert exchange(sender, receiver, request(8, 7, 6, session=""), reply(7)) == [3]
    assert sender.delta(request(2**40)) is None


def test_a_new_actor_gets_whole_prompts() -> None:
    sender, receiver = PromptSender(), PromptReceiver()
    exchange(sender, receiver, request(1, 2), reply(3))
    assert exchange(sender, PromptReceiver(), request(1, 2, 3, 4), reply(5)) == [1, 4]
    sender.clear()
    assert exchange(sender, receiver, request(1, 2, 3, 4), reply(5)) == [4]


def test_an_actor_bounds_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_TOKENS", 8)
    sender, receiver = PromptSender(), PromptReceiver()
    for name in "abc":
        exchange(sender, receiver, request(1, 2, session=name), reply(3))
    assert exchange(sender, receiver, request(1, 2, 3, 4, session="a"), reply(5)) == [1, 4]
    assert exchange(sender, receiver, request(1, 2, 3, 4, session="a"), reply(5)) == [4]


events = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["turn", "rewrite", "cancel", "restart", "forget"])),
    max_size=12,
)


@given(events)
def test_any_order_of_losses_gives_the_whole_prompt(story: list[tuple[str, str]]) -> None:
    """`exchange` compares every received prompt with the one asked for."""
    sender, receiver = PromptSender(), PromptReceiver()
    talk: dict[str, tuple[int, ...]] = {"a": (1,), "b": (2,)}
    for number, (name, event) in enumerate(story, 10):
        if event == "restart":
            receiver = PromptReceiver()
        elif event == "forget":
            receiver.forget(name)
            sender.forget(name)
        elif event == "cancel":  # the actor replied, and the driver did not wait for it
            delta = sender.delta(request(*talk[name], number, session=name))
            assert delta is not None
            if (received := receiver.request(delta)) is not None:
                receiver.replied(delta, received, reply(99))
        else:
            talk[name] = ((3,) if event == "rewrite" else talk[name]) + (number,)
            exchange(sender, receiver, request(*talk[name], session=name), reply(number + 50))
            talk[name] += (number + 50,)
