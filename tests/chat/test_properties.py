"""Properties of every conversation, for any observations and any sampled ids."""

import asyncio
from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from recorded_conversation import RecordedConversation as Conversation
from spelt import Spelt
from talkers import FAMILIES, family

from rollgym.agents.policy.agent import PolicyAgent, PolicyOptions
from rollgym.chat import ChatTemplate
from rollgym.chat.tokenizer import MIDDLE
from rollgym.core.agent import Briefing
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.testing import ScriptedEngine
from rollgym.trainer.data.sequences import token_episode

NAMES = sorted(FAMILIES)
TEMPLATES = {name: ChatTemplate(family(name)) for name in NAMES} | {"spelt": ChatTemplate(Spelt())}
SIZES = {name: len(family(name)) for name in NAMES}
EVERY = pytest.mark.parametrize("name", NAMES)
LOSSLESS = pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "qwen3", "llama3", "words"])
"""Families that write text back as it was."""

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
words = st.sampled_from(["Up", "go left", "The door", "<answer>", "42", "box"])
white = st.sampled_from([" ", "\n", "\t", "  ", "\n\n", ""])


def observations(name):
    """Text that holds the template's own marks, whole and in parts."""
    marks = [*TEMPLATES[name].codec.added, "[INST]", "[/INST]", "user", "assistant\n", "<think>", "</think>"]
    whole = st.sampled_from(marks)
    part = st.tuples(whole, st.integers(0, 12)).map(lambda pair: pair[0][: pair[1]])
    pieces = st.one_of(whole, whole, part, words, white, st.text(max_size=4))
    return st.lists(pieces, max_size=6).map("".join)


def replies(name):
    """Any ids at all, often with an end."""
    ids = st.lists(st.integers(0, SIZES[name] - 1), max_size=8)
    ends = st.sampled_from([(), *((number,) for number in TEMPLATES[name].facts.stop_ids)])
    return st.tuples(ids, ends).map(lambda pair: [*pair[0], *pair[1]])


def turns(name, length=4):
    return st.lists(st.tuples(observations(name), replies(name)), min_size=1, max_size=length)


@EVERY
@few
@given(data=st.data())
def test_a_prompt_holds_the_last_prompt_and_reply_as_they_were(name, data):
    talk = Conversation(TEMPLATES[name], system=data.draw(observations(name)))
    past = ()
    for observation, reply in data.draw(turns(name)):
        talk.observe(observation)
        if talk.new_row:
            assert talk.added_ids == talk.prompt_ids
        else:
            assert talk.prompt_ids[: len(past)] == past
            assert talk.prompt_ids == past + talk.added_ids
        talk.reply(reply)
        past = talk.prompt_ids
        assert past[len(past) - len(reply) :] == tuple(reply)


class RecordingEngine(ScriptedEngine):
    """Records what it read and what it emitted; every emitted token has a different log-prob."""

    def __init__(self, script):
        super().__init__(script, context_length=100_000)
        self.emitted = []
        self._numbers = count(1)

    async def generate(self, request):
        made = await super().generate(request)
        made = replace(made, logprobs=tuple(-float(next(self._numbers)) for _ in made.token_ids))
        self.emitted.append((request.prompt_ids, made))
        return made


def look_alikes(name, prompt):
    """Replies of any ids, and replies that repeat a part of the prompt: marks, separators, observations."""
    parts = st.tuples(st.integers(0, len(prompt) - 1), st.integers(1, 8))
    return st.one_of(replies(name), parts.map(lambda part: list(prompt[part[0] : part[0] + part[1]])))


@EVERY
@pytest.mark.parametrize("history", ["full", "none"])
@few
@given(data=st.data())
def test_the_mask_says_who_wrote_each_id_and_each_reply_is_in_one_row(name, history, data):
    """Rule 3, from the engine to the trainer: a token is trained on if and only if the engine emitted it."""
    engine = RecordingEngine(lambda request: data.draw(look_alikes(name, request.prompt_ids)))
    agent = PolicyAgent(engine, family(name), PolicyOptions(history=history, max_tokens=9))
    spec = EpisodeSpec(episode_id="e", env_id="test/Env-v0")
    player = agent.player(Briefing(spec=spec, instructions="Play."))
    played = []
    for observation in data.draw(st.lists(observations(name), min_size=1, max_size=4)):
        made = asyncio.run(player.act(observation, {}))
        tokens = {key: getattr(made, key) for key in ("prompt_ids", "action_ids", "logprobs", "new_row")}
        played.append(Turn(observation=observation, action=made.action, **tokens))

    rows: list[list[tuple[int, float]]] = []
    for turn, (prompt, emitted) in zip(played, engine.emitted, strict=True):
        if turn.new_row or not rows:
            rows.append([])
        row = rows[-1]
        assert [token for token, _ in row] == list(prompt[: len(row)])
        row += [(token, 0.0) for token in prompt[len(row) :]]
        row += zip(emitted.token_ids, emitted.logprobs, strict=True)

    trained = token_episode(Episode(spec=spec, outcome=Outcome.TURN_LIMIT, turns=tuple(played)))
    behavior = iter(trained.behavior.tolist())
    found = []
    for sequence in trained.sequences:
        actions = set(sequence.action_positions.tolist())
        logprobs = [next(behavior) if at in actions else 0.0 for at in range(len(sequence.ids))]
        found.append(list(zip(sequence.ids.tolist(), logprobs, strict=True)))
    assert found == [row for row in rows if any(logprob for _, logprob in row)]
    assert not list(behavior)


@EVERY
@few
@given(data=st.data())
def test_what_is_observed_changes_no_control_token(name, data):
    """The same replies to harmless observations: the same control tokens, the same rows."""
    template = TEMPLATES[name]
    controls = set(template.controls.values()) - template.codec.unknown
    script = data.draw(turns(name))
    # A message that is all white space may be written like none.
    assume(all(observation.strip() for observation, _ in script))
    talks = [
        Conversation(template, system=data.draw(observations(name)).strip() or "x"),
        Conversation(template, "x"),
    ]
    for observation, reply in script:
        for talk, text in zip(talks, (observation, "x"), strict=True):
            talk.observe(text)
        written = [[number for number in talk.added_ids if number in controls] for talk in talks]
        assert written[0] == written[1]
        assert talks[0].new_row == talks[1].new_row
        for talk in talks:
            talk.reply(reply)


@pytest.mark.parametrize("name", [name for name in NAMES if TEMPLATES[name].facts.end_of_turn])
@few
@given(data=st.data())
def test_the_end_of_a_turn_is_there_once(name, data):
    template = TEMPLATES[name]
    facts, end = template.facts, template.facts.end_of_turn_id
    talk = Conversation(template)
    reply: list[int] | None = None
    for observation, next_reply in data.draw(turns(name)):
        talk.observe(observation)
        if reply is not None and not talk.new_row:
            closed = reply[-1:] == [end]
            assert (talk.added_ids[0] == end) <= (not closed)
            # A reply that was cut off may lack the white space round it, too.
            space = [[], *(template.codec.encode([text], MIDDLE) for text in (facts.lead, facts.tail))]
            assert closed or any(talk.added_ids[: len(ids) + 1] == (*ids, end) for ids in space)
        reply = next_reply
        talk.reply(reply)


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
@few
@given(data=st.data())
def test_a_template_that_leaves_replies_alone_never_begins_a_new_row(name, data):
    talk = Conversation(TEMPLATES[name])
    for observation, reply in data.draw(turns(name)):
        talk.observe(observation)
        talk.reply(reply)
    assert len(talk.rows) <= 1
    assert not talk.new_row


def spoken(template, text, end=True):
    facts = template.facts
    ids = template.codec.encode([facts.lead + text + facts.tail], MIDDLE)
    return ids + ([facts.end_of_turn_id] if end and facts.end_of_turn else [])


@EVERY
@few
@given(data=st.data())
def test_with_ordinary_text_it_is_what_the_template_writes(name, data):
    """Tokenised as a whole: where text is ordinary, our cuts make no difference."""
    tokenizer, template = family(name), TEMPLATES[name]
    text = st.lists(words, min_size=1, max_size=4).map(" ".join)
    talk = Conversation(template)
    messages = []
    for observation, reply in data.draw(st.lists(st.tuples(text, text), min_size=1, max_size=4)):
        talk.observe(observation)
        messages.append({"role": "user", "content": observation})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert list(talk.prompt_ids) == tokenizer.encode(rendered, add_special_tokens=False)
        talk.reply(spoken(template, reply))
        messages.append({"role": "assistant", "content": reply})


@LOSSLESS
@few
@given(data=st.data())
def test_nothing_is_lost_and_nothing_is_doubled(name, data):
    """Decoded, a prompt is the template's text to the letter, whatever was observed or cut off."""
    tokenizer, template = family(name), TEMPLATES[name]
    talk = Conversation(template)
    messages = []
    for observation, reply, end in data.draw(
        st.lists(st.tuples(observations(name), words, st.booleans()), min_size=1, max_size=4)
    ):
        talk.observe(observation)
        messages.append({"role": "user", "content": observation})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(talk.prompt_ids) == rendered
        assert not talk.new_row
        talk.reply(spoken(template, reply, end))
        messages.append({"role": "assistant", "content": reply})


@EVERY
@few
@given(data=st.data())
def test_the_same_conversation_gives_the_same_ids(name, data):
    script = data.draw(turns(name))
    talks = [Conversation(TEMPLATES[name], system="Play."), Conversation(ChatTemplate(family(name)), "Play.")]
    for talk in talks:
        for observation, reply in script:
            talk.observe(observation)
            talk.reply(reply)
    assert talks[0].rows == talks[1].rows


@few
@given(
    st.lists(st.tuples(st.text(max_size=8), st.lists(st.integers(0, 0x10FFFF)), st.booleans()), max_size=4)
)
def test_rows_grow_by_what_is_added(script):
    template = TEMPLATES["spelt"]
    talk = Conversation(template)
    lengths = [0]
    for observation, reply, end in script:
        talk.observe(observation)
        talk.reply([*reply, *talk.stop_ids[: int(end)]])
        lengths.append(len(talk.prompt_ids))
    assert all(a < b for a, b in pairwise(lengths))
