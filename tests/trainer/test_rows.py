"""Rows: what was read and written, verbatim, and whose it was."""

from typing import Any

import numpy as np
import pytest
from spelt import END, Spelt, chatml, spell

from rollgym.chat import ChatTemplate, Conversation
from rollgym.errors import UsageError
from rollgym.trainer.rows import Row, TokenEpisode, token_episode
from rollgym.types import Episode, EpisodeSpec, Outcome, Turn


def turn(prompt: Any, action: Any, **more: Any) -> Turn:
    known = {"logprobs": tuple(-0.5 - n for n in range(len(action)))}
    values = {"prompt_ids": tuple(prompt), "action_ids": tuple(action), **known, **more}
    return Turn(observation="see", action="do", **values)


def played(*turns: Turn, outcome: Outcome = Outcome.TURN_LIMIT, **more: Any) -> Episode:
    spec = EpisodeSpec(episode_id="e7", env_id="test/Env-v0")
    return Episode(spec=spec, outcome=outcome, turns=turns, **more)


def shown(made: TokenEpisode) -> list[tuple[list[int], list[int]]]:
    return [(row.ids.tolist(), row.places.tolist()) for row in made.rows]


def test_turns_are_laid_end_to_end_and_the_policys_own_tokens_are_marked() -> None:
    made = token_episode(played(turn([1, 2, 3], [4, 5]), turn([6], [7])))
    assert shown(made) == [([1, 2, 3, 4, 5, 6, 7], [3, 4, 6])]
    assert made.behaviour.tolist() == [-0.5, -1.5, -0.5]
    assert made.per_turn.tolist() == [2, 1]
    assert made.count == 3
    assert made.name == "e7"


def test_the_mask_says_who_wrote_a_token_never_what_it_is() -> None:
    """Rule 3: the same id is the policy's in one place and the environment's in another."""
    made = token_episode(played(turn([9, 9, 9], [9, 8]), turn([9, 8], [9])))
    assert shown(made) == [([9, 9, 9, 9, 8, 9, 8, 9], [3, 4, 7])]


def test_a_sampled_end_of_turn_is_an_action_and_one_that_was_put_in_is_not() -> None:
    """Rule 3: the first reply ends itself, the second is cut off and closed by the template."""
    talk = Conversation(ChatTemplate(Spelt(chatml)))
    turns = []
    for observation, reply in (("a", (*b"Up", END)), ("b", (*b"No",)), ("c", (END,))):
        talk.observe(observation)
        turns.append(turn(talk.added_ids, reply, new_row=talk.new_row))
        talk.reply(reply)
    (row,) = token_episode(played(*turns)).rows
    assert tuple(row.ids) == spell(
        "<start>u:a<end>\n<start>a:Up<end>\n<start>u:b<end>\n<start>a:No<end>\n<start>u:c<end>\n<start>a:<end>"
    )
    assert "".join(Spelt().decode(row.ids[row.places].tolist(), **PLAIN)) == "Up<end>No<end>"
    ends = [at in row.places for at in np.flatnonzero(row.ids == END)]
    assert ends == [False, True, False, False, False, True]  # users, sampled, users, closed for it, ...


PLAIN: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def forgetful(messages: list[dict[str, str]], add_generation_prompt: bool, **kwargs: Any) -> str:
    """A template that drops what earlier replies thought."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    cut = [
        {**m, "content": m["content"].split("|")[-1]} if m["role"] == "assistant" and i < last else m
        for i, m in enumerate(messages)
    ]
    return chatml(cut, add_generation_prompt)


@pytest.mark.parametrize("render", [chatml, forgetful])
def test_rows_are_those_of_the_conversation(render: Any) -> None:
    """Rule 4: where the template rewrites history a row of its own begins; nothing is merged or lost."""
    talk = Conversation(ChatTemplate(Spelt(render)))
    turns = []
    for observation, reply in (("a", b"hm|Up"), ("b", b"Up"), ("c", b"ha|No")):
        talk.observe(observation)
        ids = (*reply, END)
        logprobs = tuple(-0.5 - n for n in range(len(ids)))
        turns.append(turn(talk.added_ids, ids, new_row=talk.new_row))
        talk.reply(ids, logprobs)
    made = token_episode(played(*turns))
    assert len(made.rows) == (1 if render is chatml else 2)
    for row, whole in zip(made.rows, talk.rows, strict=True):
        assert tuple(row.ids) == whole.ids
        assert row.places.tolist() == np.flatnonzero(whole.mask).tolist()
    told = [logprob for row in talk.rows for logprob, own in zip(row.logprobs, row.mask, strict=True) if own]
    assert made.behaviour.tolist() == told


def test_a_row_in_which_nothing_was_sampled_is_left_out() -> None:
    made = token_episode(played(turn([1], []), turn([2, 3], [4], new_row=True), turn([5], [])))
    assert shown(made) == [([2, 3, 4, 5], [2])]
    assert made.per_turn.tolist() == [0, 1, 0]


def test_an_episode_without_turns_has_no_rows() -> None:
    made = token_episode(played(outcome=Outcome.TOKEN_LIMIT))
    assert (made.rows, made.count, made.final) == ((), 0, None)


@pytest.mark.parametrize(
    "turns",
    [
        [Turn(observation="see", action="do")],
        [turn([1], [2]), turn([3], [4], logprobs=())],
        [turn([1], [2]), turn([], [4], new_row=True)],
    ],
    ids=["no tokens", "no log-probs", "a row that begins with a reply"],
)
def test_what_no_token_agent_played_is_refused_by_name(turns: list[Turn]) -> None:
    with pytest.raises(UsageError, match=rf"Episode e7 cannot be trained on: turn {len(turns) - 1} .*'lm'"):
        token_episode(played(*turns))


@pytest.mark.parametrize("outcome", [Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.TRUNCATED])
def test_a_critic_reads_on_where_a_limit_cut_the_episode_short(outcome: Outcome) -> None:
    """Rule 9: what follows is valued as the policy would have read it."""
    last = turn([6], [7], truncated=outcome is Outcome.TRUNCATED)
    grown = token_episode(played(turn([1, 2], [3]), last, outcome=outcome, final_ids=(8, 9)))
    assert grown.final is not None
    assert grown.final.tolist() == [1, 2, 3, 6, 7, 8, 9]
    anew = token_episode(played(turn([1, 2], [3]), last, outcome=outcome, final_ids=(8, 9), final_row=True))
    assert anew.final is not None
    assert anew.final.tolist() == [8, 9]
    bare = token_episode(played(turn([1, 2], [3]), last, outcome=outcome))
    assert bare.final is not None
    assert bare.final.tolist() == [1, 2, 3, 6, 7]


def test_an_end_of_the_task_has_no_state_after_it() -> None:
    """Rule 9."""
    ended = played(turn([1], [2], terminated=True), outcome=Outcome.TERMINATED, final_ids=(8, 9))
    assert token_episode(ended).final is None


def test_a_model_reads_no_further_than_the_last_token_it_predicts() -> None:
    row = Row(np.arange(10), np.array([3, 4, 7]))
    assert row.inputs.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_rows_are_alike_where_only_what_was_sampled_last_differs() -> None:
    row = Row(np.array([1, 2, 3, 4]), np.array([1, 3]))
    assert row.key == Row(np.array([1, 2, 3, 9]), np.array([1, 3])).key
    assert row.key != Row(np.array([1, 9, 3, 4]), np.array([1, 3])).key
    assert row.key != Row(np.array([1, 2, 3, 4]), np.array([2, 3])).key
    assert row.key != Row(np.array([1, 2, 3, 4, 5]), np.array([1, 4])).key
