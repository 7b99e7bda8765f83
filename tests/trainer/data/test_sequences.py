"""Token sequences: the exact tokens read and sampled, and which ones the policy sampled."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_conversation import RecordedConversation
from spelt import END, Spelt, chatml, spell

from rollgym.chat import ChatTemplate
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence, token_episode


def turn(prompt: Any, action: Any, **more: Any) -> Turn:
    known = {"logprobs": tuple(-0.5 - n for n in range(len(action)))}
    values = {"prompt_ids": tuple(prompt), "action_ids": tuple(action), **known, **more}
    return Turn(observation="see", action="do", **values)


def played(*turns: Turn, outcome: Outcome = Outcome.TURN_LIMIT, **more: Any) -> Episode:
    spec = EpisodeSpec(episode_id="e7", env_id="test/Env-v0")
    return Episode(spec=spec, outcome=outcome, turns=turns, **more)


def shown(made: TokenEpisode) -> list[tuple[list[int], list[int]]]:
    return [(row.ids.tolist(), row.action_positions.tolist()) for row in made.sequences]


def test_turns_are_concatenated_and_action_tokens_are_marked() -> None:
    made = token_episode(played(turn([1, 2, 3], [4, 5]), turn([6], [7])))
    assert shown(made) == [([1, 2, 3, 4, 5, 6, 7], [3, 4, 6])]
    assert made.behavior.tolist() == [-0.5, -1.5, -0.5]
    assert made.tokens_per_turn.tolist() == [2, 1]
    assert made.num_tokens == 3
    assert made.name == "e7"


def test_action_positions_depend_on_who_sampled_a_token_not_on_its_id() -> None:
    """Rule 3: the same id is an action at one position and part of the observation at another."""
    made = token_episode(played(turn([9, 9, 9], [9, 8]), turn([9, 8], [9])))
    assert shown(made) == [([9, 9, 9, 9, 8, 9, 8, 9], [3, 4, 7])]


IDS = st.lists(st.integers(0, 5), max_size=5)


@given(
    turns=st.lists(st.tuples(IDS.filter(bool), IDS, st.booleans()), min_size=1, max_size=5),
    new_ids=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_action_positions_stay_when_the_tokens_are_renamed(
    turns: list[tuple[list[int], list[int], bool]], new_ids: list[int]
) -> None:
    """Rule 3: any other ids in the same places, even all the same one, have the same mask."""

    def sequences(rename: Any) -> TokenEpisode:
        return token_episode(
            played(
                *(turn(map(rename, prompt), [*map(rename, ids)], new_row=new) for prompt, ids, new in turns)
            )
        )

    made, renamed = sequences(int), sequences(new_ids.__getitem__)
    assert shown(renamed) == [([new_ids[token] for token in ids], at) for ids, at in shown(made)]
    assert renamed.behavior.tolist() == made.behavior.tolist()
    sampled = [token for _, ids, _ in turns for token in ids]
    assert [ids[at] for ids, positions in shown(made) for at in positions] == sampled


def test_a_sampled_end_of_turn_is_an_action_and_an_inserted_one_is_not() -> None:
    """Rule 3: the first reply ends itself, the second is cut off and closed by the template."""
    talk = RecordedConversation(ChatTemplate(Spelt(chatml)))
    turns = []
    for observation, reply in (("a", (*b"Up", END)), ("b", (*b"No",)), ("c", (END,))):
        talk.observe(observation)
        turns.append(turn(talk.added_ids, reply, new_row=talk.new_row))
        talk.reply(reply)
    (row,) = token_episode(played(*turns)).sequences
    assert tuple(row.ids) == spell(
        "<start>u:a<end>\n<start>a:Up<end>\n<start>u:b<end>\n<start>a:No<end>\n<start>u:c<end>\n<start>a:<end>"
    )
    assert "".join(Spelt().decode(row.ids[row.action_positions].tolist(), **PLAIN)) == "Up<end>No<end>"
    ends = [at in row.action_positions for at in np.flatnonzero(row.ids == END)]
    assert ends == [False, True, False, False, False, True]  # users, sampled, users, closed for it, ...


PLAIN: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def forgetful(messages: list[dict[str, str]], add_generation_prompt: bool, **kwargs: Any) -> str:
    """A template that drops the reasoning of earlier replies."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    cut = [
        {**m, "content": m["content"].split("|")[-1]} if m["role"] == "assistant" and i < last else m
        for i, m in enumerate(messages)
    ]
    return chatml(cut, add_generation_prompt)


@pytest.mark.parametrize("render", [chatml, forgetful])
def test_sequences_match_the_conversation(render: Any) -> None:
    """Rule 4: where the template rewrites the history a new sequence starts; nothing is merged or lost."""
    talk = RecordedConversation(ChatTemplate(Spelt(render)))
    turns = []
    for observation, reply in (("a", b"hm|Up"), ("b", b"Up"), ("c", b"ha|No")):
        talk.observe(observation)
        ids = (*reply, END)
        logprobs = tuple(-0.5 - n for n in range(len(ids)))
        turns.append(turn(talk.added_ids, ids, new_row=talk.new_row))
        talk.reply(ids, logprobs)
    made = token_episode(played(*turns))
    assert len(made.sequences) == (1 if render is chatml else 2)
    for row, whole in zip(made.sequences, talk.rows, strict=True):
        assert tuple(row.ids) == whole.ids
        assert row.action_positions.tolist() == np.flatnonzero(whole.mask).tolist()
    logprobs = [
        logprob for row in talk.rows for logprob, own in zip(row.logprobs, row.mask, strict=True) if own
    ]
    assert made.behavior.tolist() == logprobs


def test_a_sequence_without_actions_is_left_out() -> None:
    made = token_episode(played(turn([1], []), turn([2, 3], [4], new_row=True), turn([5], [])))
    assert shown(made) == [([2, 3, 4, 5], [2])]
    assert made.tokens_per_turn.tolist() == [0, 1, 0]


def test_an_episode_without_turns_has_no_sequences() -> None:
    made = token_episode(played(outcome=Outcome.TOKEN_LIMIT))
    assert (made.sequences, made.num_tokens, made.final_ids) == ((), 0, None)


@pytest.mark.parametrize(
    "turns",
    [
        [Turn(observation="see", action="do")],
        [turn([1], [2]), turn([3], [4], logprobs=())],
        [turn([1], [2]), turn([], [4], new_row=True)],
    ],
    ids=["no tokens", "no log-probs", "a row that begins with a reply"],
)
def test_an_episode_without_token_ids_is_refused_by_name(turns: list[Turn]) -> None:
    with pytest.raises(UsageError, match=rf"Episode e7 cannot be trained on: turn {len(turns) - 1} .*'lm'"):
        token_episode(played(*turns))


@pytest.mark.parametrize("outcome", [Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.TRUNCATED])
def test_a_truncated_episode_has_a_final_state_for_the_critic(outcome: Outcome) -> None:
    """Rule 9: the critic values the final state as the policy would have read it."""
    last = turn([6], [7], truncated=outcome is Outcome.TRUNCATED)
    grown = token_episode(played(turn([1, 2], [3]), last, outcome=outcome, final_ids=(8, 9)))
    assert grown.final_ids is not None
    assert grown.final_ids.tolist() == [1, 2, 3, 6, 7, 8, 9]
    anew = token_episode(played(turn([1, 2], [3]), last, outcome=outcome, final_ids=(8, 9), final_row=True))
    assert anew.final_ids is not None
    assert anew.final_ids.tolist() == [8, 9]
    bare = token_episode(played(turn([1, 2], [3]), last, outcome=outcome))
    assert bare.final_ids is not None
    assert bare.final_ids.tolist() == [1, 2, 3, 6, 7]


def test_a_terminated_episode_has_no_final_state() -> None:
    """Rule 9."""
    ended = played(turn([1], [2], terminated=True), outcome=Outcome.TERMINATED, final_ids=(8, 9))
    assert token_episode(ended).final_ids is None


def test_inputs_end_before_the_last_action_token() -> None:
    row = TokenSequence(np.arange(10), np.array([3, 4, 7]))
    assert row.inputs.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_sequences_that_differ_in_the_last_token_have_the_same_key() -> None:
    row = TokenSequence(np.array([1, 2, 3, 4]), np.array([1, 3]))
    assert row.key == TokenSequence(np.array([1, 2, 3, 9]), np.array([1, 3])).key
    assert row.key != TokenSequence(np.array([1, 9, 3, 4]), np.array([1, 3])).key
    assert row.key != TokenSequence(np.array([1, 2, 3, 4]), np.array([2, 3])).key
    assert row.key != TokenSequence(np.array([1, 2, 3, 4, 5]), np.array([1, 4])).key
