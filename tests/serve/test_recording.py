"""Recorded episodes match what the engine did: ids, log-probs, rows."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_models import plain_logprobs
from transformers import AutoModelForCausalLM

from rollgym.core.types import Episode, Outcome
from rollgym.engines.base import WeightSource
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.io.run_dir import RunFolder, read_run
from rollgym.trainer.data.batch import make_batch
from rollgym.trainer.data.sequences import token_episode

Serving = Callable[..., Any]
BEGIN, NEXT, THIRD = "@ F F F\nF H F H", "F @ F F\nF H F H", "F F @ F\nF H F H"


def play(serving: Serving, talk: Callable[[Any], Any], **options: Any) -> tuple[list[Episode], Any]:
    """Run a client; return its episodes and the engine's record."""

    async def run() -> tuple[list[Episode], Any]:
        async with serving(**options) as place:
            finished = place.server.episodes()
            await talk(place)
        return [episode async for episode in finished], place.spy

    return asyncio.run(run())


def test_the_ids_recorded_are_those_that_were_sampled(serving: Serving) -> None:
    async def talk(place: Any) -> None:
        first = await place.say([BEGIN], "one")
        await place.say([BEGIN, first, NEXT], "one")
        await place.end("one", reward=0.5, success=True)

    (episode,), spy = play(serving, talk)
    assert [turn.action_ids for turn in episode.turns] == [made.token_ids for _, made in spy.made]
    assert [turn.logprobs for turn in episode.turns] == [made.logprobs for _, made in spy.made]
    assert [turn.version_spans for turn in episode.turns] == [made.version_spans for _, made in spy.made]
    assert episode.turns[0].prompt_ids == spy.made[0][0].prompt_ids
    assert (episode.outcome, episode.success, episode.total_reward) == (Outcome.TERMINATED, True, 0.5)
    assert [turn.observation for turn in episode.turns] == [BEGIN, NEXT]


def test_the_second_turn_extends_the_first_without_tokenising_it_again(serving: Serving) -> None:
    async def talk(place: Any) -> None:
        said = [BEGIN]
        for text in (NEXT, THIRD):
            said += [await place.say(said, "one"), text]
        await place.say(said, "one")
        await place.end("one")

    (episode,), spy = play(serving, talk)
    first, second, third = [request.prompt_ids for request, _ in spy.made]
    assert second[: len(first)] == first
    assert second[len(first) :][: len(spy.made[0][1].token_ids)] == spy.made[0][1].token_ids
    assert third[: len(second)] == second
    assert not any(turn.new_row for turn in episode.turns)
    (row,) = token_episode(episode).sequences
    assert row.ids.tolist() == [*third, *spy.made[2][1].token_ids]


def test_log_probs_equal_a_recomputation_with_the_model(serving: Serving, model: Path) -> None:
    async def talk(place: Any) -> None:
        first = await place.say([BEGIN], "one", temperature=0.7)
        await place.say([BEGIN, first, NEXT], "one", temperature=0.7)
        await place.end("one")

    (episode,), _ = play(serving, talk)
    tokens = token_episode(episode)
    (row,) = tokens.sequences
    plain: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    again = plain_logprobs(plain, row.ids.tolist(), start=1, temperature=0.7)
    assert [again[place - 1] for place in row.action_positions] == pytest.approx(
        tokens.behavior.tolist(), abs=1e-4
    )


@pytest.mark.parametrize(
    "history",
    [
        ["@ F", "Down", NEXT],  # another first message
        [BEGIN, "not what was said", NEXT],
        [BEGIN],  # asked again
        [{"role": "system", "content": "Walk."}, {"role": "user", "content": BEGIN}],
    ],
)
def test_a_rewritten_history_begins_a_row(serving: Serving, history: list[Any]) -> None:
    async def talk(place: Any) -> None:
        first = await place.say([BEGIN], "one")
        assert first.strip() != "not what was said"
        reply = await place.say(history, "one")
        await place.say([*history, {"role": "assistant", "content": reply}, user(THIRD)], "one")
        await place.end("one")

    (episode,), spy = play(serving, talk)
    assert [turn.new_row for turn in episode.turns] == [False, True, False]
    assert episode.turns[1].prompt_ids == spy.made[1][0].prompt_ids
    rows = token_episode(episode).sequences
    assert [row.ids.tolist() for row in rows] == [
        [*request.prompt_ids, *made.token_ids] for request, made in (spy.made[0], spy.made[2])
    ]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_resumed_conversation_keeps_its_sampled_ids_in_a_new_row(serving: Serving) -> None:
    async def talk(place: Any) -> None:
        first = await place.say([BEGIN], "one")
        await place.say(["something else"], "one")
        await place.say([BEGIN, first, NEXT], "one")
        await place.end("one")

    (episode,), spy = play(serving, talk)
    assert [turn.new_row for turn in episode.turns] == [False, True, True]
    (asked, said), _, (again, _) = spy.made
    start = [*asked.prompt_ids, *said.token_ids]
    assert list(again.prompt_ids[: len(start)]) == start
    assert episode.turns[2].prompt_ids == again.prompt_ids


def test_a_reply_that_the_client_trimmed_is_still_the_reply(serving: Serving) -> None:
    async def talk(place: Any) -> None:
        first = await place.say([BEGIN], "one")
        await place.say([BEGIN, f"  {first.strip()}\n", NEXT], "one")
        await place.end("one")

    (episode,), _ = play(serving, talk)
    assert [turn.new_row for turn in episode.turns] == [False, False]


def test_messages_of_one_role_are_joined_and_the_system_message_is_the_instructions(serving: Serving) -> None:
    async def talk(place: Any) -> None:
        system = {"role": "developer", "content": "Reach G."}
        parts = {"role": "user", "content": [{"type": "text", "text": "@ F"}, {"type": "text", "text": " F"}]}
        await place.say([system, parts, user("F H")], "one")
        await place.say([system, user("@ F F\n\nF H")], "two")
        await place.end("one")
        await place.end("two")

    (one, two), _ = play(serving, talk)
    assert one.instructions == two.instructions == "Reach G."
    assert one.turns[0].observation == "@ F F\n\nF H"
    assert one.turns[0].prompt_ids == two.turns[0].prompt_ids


def test_examples_of_replies_in_the_first_request_are_read_as_the_template_writes_them(
    serving: Serving,
) -> None:
    async def talk(place: Any) -> None:
        await place.say([BEGIN, "Down", NEXT], "one")
        await place.end("one")
        shown = [user(BEGIN), {"role": "assistant", "content": "Down"}, user(NEXT)]
        text = place.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        ids = place.tokenizer.encode(text, add_special_tokens=False)
        assert list(place.spy.made[0][0].prompt_ids) == ids

    (episode,), _ = play(serving, talk)
    assert episode.turns[0].new_row is False


def test_versions_are_recorded_when_weights_change_between_turns(serving: Serving, model: Path) -> None:
    own = EmbeddedEngine(model, threads=1, device="cpu")

    async def talk(place: Any) -> None:
        first = await place.say([BEGIN], "one")
        await place.spy.update_weights(3, WeightSource(path=model))
        await place.say([BEGIN, first, NEXT], "one")
        await place.end("one")

    (episode,), _ = play(serving, talk, inner=own)
    assert [turn.policy_version for turn in episode.turns] == [0, 3]
    asyncio.run(own.close())


def test_a_recorded_run_is_read_by_our_own_readers_and_becomes_a_batch(
    serving: Serving, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "run", {"schema": 1, "kind": "serve"})

    async def talk(place: Any) -> None:
        for name in ("a", "b"):
            first = await place.say([BEGIN], name)
            await place.say([BEGIN, first, NEXT], name)
            await place.end(name, reward=1.0)

    episodes, _ = play(serving, talk, folder=folder, env_id="rollgym/FrozenLake-v0")
    manifest, read = read_run(tmp_path / "run")
    assert read == episodes
    assert manifest["kind"] == "serve"
    tokens = [token_episode(episode) for episode in read]
    ones = [np.ones(one.num_tokens) for one in tokens]
    batch = make_batch(tokens, advantages=ones, old=[one.behavior for one in tokens])
    assert batch.num_tokens == sum(len(turn.action_ids) for episode in read for turn in episode.turns)
    assert len(batch.sequences) == 2


def test_sampling_follows_the_request(serving: Serving) -> None:
    async def talk(place: Any) -> None:
        await place.say([BEGIN], "a", temperature=0.5, top_p=0.9, seed=11, max_tokens=3)
        await place.say([BEGIN], "b", temperature=0.5, top_p=0.9, seed=11, max_tokens=3)
        await place.say([BEGIN], "c", max_completion_tokens=2, seed=-1)
        await place.say([BEGIN], "d", max_tokens=100_000)

    _, spy = play(serving, talk)
    first, second, third, fourth = (request.sampling for request, _ in spy.made)
    assert (first.temperature, first.top_p, first.seed, first.max_tokens) == (0.5, 0.9, 11, 3)
    assert spy.made[0][1].token_ids == spy.made[1][1].token_ids
    assert (third.max_tokens, third.seed) == (2, 2**64 - 1)
    assert fourth.max_tokens == 256 - len(spy.made[3][0].prompt_ids)


def test_a_server_can_insist_on_its_own_temperature(serving: Serving) -> None:
    async def talk(place: Any) -> None:
        await place.say([BEGIN], temperature=0)

    (_,), spy = play(serving, talk, temperature=1.0)
    assert spy.made[0][0].sampling.temperature == 1.0
