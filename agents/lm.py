"""A language model whose token ids we see: it plays through an `Engine`, and every turn can be trained on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollgym.agent import AgentSetup, Briefing, Move
from rollgym.agents.dialogue import Dialogue
from rollgym.agents.lm_carried import carried_options
from rollgym.agents.lm_options import EngineOptions, LmOptions, read_options
from rollgym.agents.parsing import make_parser, read_action
from rollgym.agents.prompting import listed_actions, load_template
from rollgym.chat import ChatTemplate, Conversation, Tokenizer, load_tokenizer
from rollgym.engines import BorrowedEngine, Engine, GenerateRequest, Generation
from rollgym.errors import AgentError, ContextFull, MissingExtra, RollgymError, UsageError, one_line
from rollgym.pretrained import NAMED, describe_model, model_folder
from rollgym.seeding import derive_seed
from rollgym.text import MAX_ACTION_CHARS
from rollgym.types import Usage


def make_lm(setup: AgentSetup, **options: Any) -> LmAgent:
    """The agent from plain options: ``model`` and those of `LmOptions` and `EngineOptions`.

    A model is a folder, or a name of `rollgym.pretrained`, which brings options of its own. A folder that
    training wrote carries the options it was trained with (`rollgym.model_settings`); they hold unless others
    are given.
    """
    model = options.get("model")
    usual = NAMED[model].options if isinstance(model, str) and model in NAMED else {}
    given = {name: value for name, value in options.items() if name != "model"}
    chosen, how = read_options({**usual, **given})
    if find_spec("torch") is None:
        raise MissingExtra("Agent 'lm'", "train")
    folder = _model_folder(model)
    carried = carried_options(folder)
    if carried is not None:
        chosen, how = read_options({**carried.options, **given})
    agent = LmAgent(
        lambda: _open_engine(folder, how),
        load_tokenizer(folder),
        chosen,
        about=describe_model(folder),
        template_text=carried.template_text if carried is not None and "template" not in given else "",
    )
    if carried is not None:
        agent.notes = carried.notes(folder, given, setup)
    return agent


def _model_folder(model: object) -> Path:
    if not isinstance(model, str) or not model:
        raise UsageError(
            "Say which model is to play: model=DIR, a folder in Hugging Face format, or "
            f"model={' or '.join(NAMED)}."
        )
    folder = model_folder(model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UsageError(f"The folder {folder} holds no model: it has no config.json.")
    return folder


def _open_engine(folder: Path, how: EngineOptions) -> Engine:
    # Imported here: whoever looks at this module, or gives an engine of another kind, needs no torch.
    import torch

    from rollgym.engines.torch import TorchEngine

    try:
        return TorchEngine(
            folder,
            device=how.device,
            dtype=getattr(torch, how.dtype) if how.dtype else None,
            max_batch=how.max_batch,
            context_length=how.context_length,
            threads=how.threads,
        )
    except Exception as error:
        reason = str(error) if isinstance(error, RollgymError) else one_line(error)
        raise AgentError(f"The model in {folder} cannot be loaded: {reason}") from error


class LmAgent:
    """Plays with any engine; its players share nothing but the engine and the totals.

    ``engine`` may be a function that makes one: it is called for the first player, and the engine is then
    closed with the agent. An engine that is given stays open. ``about`` says which model it is, for records;
    ``template_text`` replaces the text of ``options.template``.
    """

    lanes = 16
    """How many episodes to play at once, where nobody says: a pass for many costs little more than one."""

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        tokenizer: Tokenizer,
        options: LmOptions | None = None,
        *,
        about: Mapping[str, Any] | None = None,
        template_text: str = "",
    ) -> None:
        self.options = options or LmOptions()
        self.about = about
        self.notes: list[str] = []
        """Sentences about where the settings came from, for the console."""
        self.chat = ChatTemplate(tokenizer, self.options.chat_kwargs, date=self.options.date)
        self.parser = make_parser(self.options.parser)
        self.prompt = template_text or load_template(self.options.template)
        self.counts = dict.fromkeys(
            [
                "requests",
                "prompt_tokens",
                "completion_tokens",
                "format_misses",
                "new_rows",
                "context_full",
                "dropped_turns",
                "cut_observations",
            ],
            0,
        )
        self.forms = dict.fromkeys((name for name, _ in self.parser.forms), 0)
        """How many replies had which form."""
        self._borrowed = BorrowedEngine(engine)
        self._players = itertools.count()

    @property
    def engine(self) -> Engine:
        """What draws the tokens."""
        return self._borrowed.get()

    def player(self, briefing: Briefing) -> LmPlayer:
        """A player with a conversation of its own."""
        return LmPlayer(self, self.engine, briefing, next(self._players))

    def dialogue(self, instructions: str, context: int | None = None) -> Dialogue:
        """A conversation of this agent's in an environment with these instructions."""
        return Dialogue(self.chat, self.prompt, self.options, instructions, context)

    async def close(self) -> None:
        """Close the engine, if it was made here."""
        await self._borrowed.close()

    def describe(self) -> dict[str, Any]:
        """The settings, for a record of the run."""
        settings = {"agent": "lm", **dataclasses.asdict(self.options), "template_text": self.prompt}
        return settings | ({"model": dict(self.about)} if self.about else {})

    def totals(self) -> dict[str, Any]:
        """What all episodes so far took."""
        return {**self.counts, "forms": dict(self.forms)}


class LmPlayer:
    """One episode's conversation with the model."""

    def __init__(self, agent: LmAgent, engine: Engine, briefing: Briefing, number: int) -> None:
        self._agent = agent
        self._engine = engine
        self._seed = briefing.spec.sampling_seed
        # Two players may play the same episode, one after a failure or at another version of the weights.
        self.session = f"{briefing.spec.episode_id}#{number}"
        self.dialogue = agent.dialogue(briefing.instructions, engine.context_length)
        self._info: Mapping[str, Any] = {}

    async def act(self, observation: str, info: Mapping[str, Any]) -> Move:
        """Ask the model, and take the action out of its reply. `ContextFull` where there is no more room."""
        self._info = info
        added, new_row = self._hear(observation)
        made = await self._generate()
        reply = self.dialogue.reply(made.token_ids, made.logprobs)
        action, form = read_action(self._agent.parser, reply, listed_actions(info))
        self._count(made, new_row, form)
        return Move(
            action=action[:MAX_ACTION_CHARS],
            response=reply,
            prompt_ids=added,
            action_ids=made.token_ids,
            logprobs=made.logprobs,
            new_row=new_row,
            policy_version=made.version,
            version_spans=made.version_spans,
            finish_reason=made.finish_reason,
            usage=Usage(
                prompt_tokens=len(self.talk.prompt_ids) - len(made.token_ids),
                completion_tokens=len(made.token_ids),
            ),
        )

    async def leave(self) -> None:
        """The episode has ended: the engine need not keep anything for it."""
        await self._engine.forget(self.session)

    def view(self, observation: str) -> tuple[tuple[int, ...], bool]:
        """What an observation after the last turn adds, for a critic: its ids, and whether in a new row."""
        return self._hear(observation)

    def _hear(self, observation: str) -> tuple[tuple[int, ...], bool]:
        it, counts = self.dialogue, self._agent.counts
        before = it.dropped_turns, it.cut_observations
        heard = it.observe(observation, self._info)
        counts["dropped_turns"] += it.dropped_turns - before[0]
        counts["cut_observations"] += it.cut_observations - before[1]
        return heard

    @property
    def talk(self) -> Conversation:
        """The conversation so far."""
        return self.dialogue.talk

    async def _generate(self) -> Generation:
        prompt = self.talk.prompt_ids
        turn = self.dialogue.turn
        room = self._engine.context_length - len(prompt)
        if room < 1:
            self._agent.counts["context_full"] += 1
            raise ContextFull(
                f"The conversation has {len(prompt)} tokens before turn {turn + 1}, which leaves no "
                f"room for a reply in a context of {self._engine.context_length}."
            )
        seed = derive_seed("lm", self._seed, turn)
        made = await self._engine.generate(
            GenerateRequest(
                request_id=f"{self.session}/{turn}",
                prompt_ids=prompt,
                sampling=self._agent.options.sampling(seed, self.talk.stop_ids, room),
                session=self.session,
            )
        )
        if made.finish_reason == "aborted":
            raise AgentError(f"The reply of turn {turn + 1} was aborted.")
        return made

    def _count(self, made: Generation, new_row: bool, form: str | None) -> None:
        counts = self._agent.counts
        counts["requests"] += 1
        counts["prompt_tokens"] += len(self.talk.prompt_ids) - len(made.token_ids)
        counts["completion_tokens"] += len(made.token_ids)
        counts["format_misses"] += form is None
        if form is not None:
            self._agent.forms[form] += 1
        counts["new_rows"] += new_row
