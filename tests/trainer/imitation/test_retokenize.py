"""Retelling: what others did, as the model's own tokens."""

from typing import Any

import numpy as np
import pytest
from spelt import END, Spelt, chatml

from rollgym.agents.parsing import make_parser, take_action
from rollgym.agents.policy.agent import PolicyAgent
from rollgym.agents.policy.options import PolicyOptions
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.testing import ScriptedEngine
from rollgym.trainer.data.sequences import TokenSequence, token_episode
from rollgym.trainer.imitation.retokenize import reply_format, retokenize

FORMS = {"raw": "{}", "last_line": "{}", "answer": "<answer>{}</answer>", "action": "<action>{}</action>"}
FORMS["boxed"] = "\\boxed{{{}}}"
ASK = "Reply with your action only, and nothing else."


def agent(**options: Any) -> PolicyAgent:
    return PolicyAgent(ScriptedEngine([END]), Spelt(), PolicyOptions(**options))


def shown(*moves: tuple[str, str], **more: Any) -> Episode:
    """An episode of an agent without tokens."""
    turns = tuple(
        Turn(observation=see, action=do, reward=1.0, terminated=n == len(moves) - 1, **more)
        for n, (see, do) in enumerate(moves)
    )
    spec = EpisodeSpec(episode_id="e", env_id="test/Env-v0")
    return Episode(
        spec=spec,
        outcome=Outcome.TERMINATED,
        turns=turns,
        instructions="Walk.",
        success=True,
        final_ids=(1, 2),
    )


def text(ids: Any) -> str:
    return Spelt().decode(
        np.asarray(ids).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def own(row: TokenSequence) -> str:
    return text(row.ids[row.action_positions])


@pytest.mark.parametrize("parser", list(FORMS))
def test_rows_decode_to_the_conversation_with_actions_in_the_form_of_the_parser(parser: str) -> None:
    made = agent(parser=parser, instructions=False)
    told = retokenize(shown(("at 1", "go left"), ("at 2", "go up")), made)
    (row,) = token_episode(told).sequences
    left, up = (FORMS[parser].format(action) for action in ("go left", "go up"))
    assert text(row.ids) == (
        f"<start>u:at 1<end>\n<start>a:{left}<end>\n<start>u:at 2<end>\n<start>a:{up}<end>"
    )
    assert own(row) == f"{left}<end>{up}<end>"
    for turn in told.turns:
        said = text(turn.action_ids[:-1])
        assert take_action(make_parser(parser), said) == (turn.action, True)


def test_without_memory_each_turn_is_a_row_with_all_instructions() -> None:
    told = retokenize(shown(("at 1", "left"), ("at 2", "up")), agent(history="none"))
    made = token_episode(told)
    assert [text(row.ids) for row in made.sequences] == [
        f"<start>s:Walk.\n\n{ASK}<end>\n<start>u:at {n}<end>\n<start>a:{action}<end>"
        for n, action in ((1, "left"), (2, "up"))
    ]
    assert [own(row) for row in made.sequences] == ["left<end>", "up<end>"]
    assert made.tokens_per_turn.tolist() == [5, 3]


def test_the_episode_itself_stays_as_it_was() -> None:
    episode = shown(("at 1", "left"), ("at 2", "up"))
    told = retokenize(episode, agent())
    for before, after in zip(episode.turns, told.turns, strict=True):
        assert (after.observation, after.action, after.reward) == (
            before.observation,
            before.action,
            before.reward,
        )
        assert after.logprobs == (0.0,) * len(after.action_ids)
        assert (after.policy_version, after.version_spans) == (None, ())
    assert (told.spec, told.outcome, told.success) == (episode.spec, episode.outcome, True)
    assert (told.final_ids, told.final_row) == ((), False), "ids of another model's tokens"


def test_ids_of_another_model_are_replaced() -> None:
    other = shown(
        ("at 1", "left"), prompt_ids=(1,), action_ids=(2, 3), logprobs=(-1.0, -2.0), version_spans=((4, 2),)
    )
    told = retokenize(other, agent(instructions=False))
    assert text(told.turns[0].prompt_ids) == "<start>u:at 1<end>\n<start>a:"
    assert text(told.turns[0].action_ids) == "left<end>"


def test_a_known_reply_is_retokenized_in_full() -> None:
    told = retokenize(shown(("at 1", "left"), response="Well. <answer>left</answer>"), agent(parser="answer"))
    assert text(told.turns[0].action_ids) == "Well. <answer>left</answer><end>"


def test_a_template_that_drops_thoughts_gets_separate_rows() -> None:
    """Rule 4: the second prompt does not continue the first row, and nothing is lost."""

    def forgetful(messages: list[dict[str, str]], add_generation_prompt: bool, **kwargs: Any) -> str:
        cut = [
            {**m, "content": m["content"].split("|")[-1]} if m["role"] == "assistant" else m for m in messages
        ]
        return chatml(cut, add_generation_prompt)

    made = PolicyAgent(ScriptedEngine([END]), Spelt(forgetful), PolicyOptions(instructions=False))
    told = retokenize(shown(("a", "x"), ("b", "y"), response="hm|x"), made)
    assert [turn.new_row for turn in told.turns] == [False, True]
    first, second = token_episode(told).sequences
    assert own(first) == own(second) == "hm|x<end>"
    assert text(second.ids) == "<start>u:a<end>\n<start>a:x<end>\n<start>u:b<end>\n<start>a:hm|x<end>"


def test_a_custom_phrase_is_used() -> None:
    told = retokenize(shown(("at 1", "left")), agent(), lambda turn: f"I go {turn.action}")
    assert text(told.turns[0].action_ids) == "I go left<end>"


def test_an_unsupported_parser_is_refused() -> None:
    with pytest.raises(UsageError, match=r"parser 'regex:x\(.\)': use one of raw, .*boxed"):
        reply_format("regex:x(.)")
