"""The ``lm`` agent: a language model behind an `Engine`, with token ids and log-probs for training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollgym.agents.parsing import Reading, make_parser, read_action
from rollgym.agents.policy.options import EngineOptions, PolicyOptions, read_options
from rollgym.agents.policy.saved_options import saved_options
from rollgym.agents.prompt_builder import PromptBuilder
from rollgym.agents.prompting import TOOL_CALL, listed_actions, load_template
from rollgym.chat import ChatTemplate, Tokenizer, load_tokenizer
from rollgym.core.agent import Agent, AgentAction, AgentSetup, Briefing, Player
from rollgym.core.env import MAX_ACTION_CHARS
from rollgym.core.errors import AgentError, ContextFull, MissingExtra, RollgymError, UsageError, one_line
from rollgym.core.messages import Message, ToolSpec
from rollgym.core.seeding import derive_seed
from rollgym.core.tools import write_calls
from rollgym.core.types import Usage
from rollgym.engines.base import BorrowedEngine, Engine, GenerateRequest, Generation
from rollgym.models.zoo import NAMED, describe_model, model_folder

if TYPE_CHECKING:
    from rollgym.engines.embedded.engine import EmbeddedEngine

_COUNTS = (
    *("requests", "prompt_tokens", "completion_tokens", "format_misses", "new_rows", "context_full"),
    *("dropped_turns", "cut_observations"),
)


def make_policy_agent(setup: AgentSetup, **options: Any) -> PolicyAgent:
    """Make the agent from plain options: ``model`` and those of `PolicyOptions` and `EngineOptions`.

    ``model`` is a folder, or a name of `rollgym.models.zoo`, which has default options. A folder written by
    training holds the options it was trained with (`rollgym.models.policy_settings`); given options override
    them.
    """
    model = options.get("model")
    defaults = NAMED[model].options if isinstance(model, str) and model in NAMED else {}
    overrides = {name: value for name, value in options.items() if name != "model"}
    agent_options, engine_options = read_options({**defaults, **overrides})
    if find_spec("torch") is None:
        raise MissingExtra("Agent 'lm'", "train")
    folder = _model_folder(model)
    saved = saved_options(folder)
    if saved is not None:
        agent_options, engine_options = read_options({**saved.options, **overrides})

    def open_engine() -> Engine:
        engine = _open_engine(folder, engine_options)
        agent.dtype = engine.dtype
        return engine

    agent = PolicyAgent(
        open_engine,
        load_tokenizer(folder),
        agent_options,
        model_info=describe_model(folder),
        template_text=saved.template_text if saved is not None and "template" not in overrides else "",
    )
    if saved is not None:
        agent.notes = saved.notes(folder, overrides, setup)
    return agent


def _model_folder(model: object) -> Path:
    if not isinstance(model, str) or not model:
        raise UsageError(
            f"No model given: pass model=DIR, a folder in Hugging Face format, or model={' or '.join(NAMED)}."
        )
    folder = model_folder(model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UsageError(f"The folder {folder} does not hold a model: config.json is missing.")
    return folder


def _open_engine(folder: Path, options: EngineOptions) -> EmbeddedEngine:
    # Imported here: the agent itself, with another engine, does not need torch.
    from rollgym.engines.embedded.engine import EmbeddedEngine

    try:
        return EmbeddedEngine(
            folder,
            device=options.device,
            dtype=cast(Any, options.dtype),
            max_batch=options.max_batch,
            context_length=options.context_length,
            threads=options.threads,
        )
    except Exception as error:
        reason = str(error) if isinstance(error, RollgymError) else one_line(error)
        raise AgentError(f"The model in {folder} cannot be loaded: {reason}") from error


class PolicyAgent(Agent):
    """Plays with any engine; its players share only the engine and the totals.

    Args:
        engine: An engine, which stays open; or a function that makes one for the first player, and whose
            engine is closed with the agent.
        tokenizer: The tokenizer of the engine's model.
        options: Prompting, sampling and parsing.
        model_info: Which model it is, for records.
        template_text: Replaces the text of ``options.template``.
    """

    default_concurrency = 16
    """A forward pass for many episodes costs little more than one for a single episode."""

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        tokenizer: Tokenizer,
        options: PolicyOptions | None = None,
        *,
        model_info: Mapping[str, Any] | None = None,
        template_text: str = "",
    ) -> None:
        self.options = options or PolicyOptions()
        self.model_info = model_info
        self.notes: list[str] = []
        self.dtype: str | None = None
        """Dtype of the engine that this agent opened; None before that."""
        self.chat = ChatTemplate(
            tokenizer,
            self.options.chat_kwargs,
            date=self.options.date,
            tool_format=self.options.tool_format,
        )
        self.parser = make_parser(self.options.parser)
        self.prompt = template_text or load_template(self.options.template)
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.forms = dict.fromkeys((name for name, _ in self.parser.forms), 0)
        """Number of replies per parser form."""
        self._borrowed = BorrowedEngine(engine)
        self._players = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine that samples the replies."""
        return self._borrowed.get()

    def player(self, briefing: Briefing) -> PolicyPlayer:
        """Return a player with its own conversation."""
        return PolicyPlayer(self, self.engine, briefing, next(self._players))

    def prompt_builder(
        self, instructions: str, context: int | None = None, tools: Sequence[ToolSpec] = ()
    ) -> PromptBuilder:
        """Return the prompt builder for an episode with these instructions and tools."""
        return PromptBuilder(self.chat, self.prompt, self.options, instructions, context, tools)

    async def close(self) -> None:
        """Close the engine if the agent made it."""
        await self._borrowed.close()

    def describe(self) -> dict[str, Any]:
        """Return the settings, for the record of a run."""
        settings = {"agent": "lm", **dataclasses.asdict(self.options), "template_text": self.prompt}
        if self.dtype is not None:
            settings["dtype"] = self.dtype
        return settings | ({"model": dict(self.model_info)} if self.model_info else {})

    def totals(self) -> dict[str, Any]:
        """Return requests, tokens and parser forms of all episodes so far."""
        return {**self.counts, "forms": dict(self.forms)}


class PolicyPlayer(Player):
    """One episode's conversation with the model."""

    def __init__(self, agent: PolicyAgent, engine: Engine, briefing: Briefing, number: int) -> None:
        self._agent = agent
        self._engine = engine
        self._seed = briefing.spec.sampling_seed
        # Two players may play the same episode: a retry, or a restart with newer weights.
        self.session = f"{briefing.spec.episode_id}#{number}"
        self.prompts = agent.prompt_builder(briefing.instructions, engine.context_length, briefing.tools)
        self._has_tools = bool(briefing.tools)
        self._info: Mapping[str, Any] = {}

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction:
        """Sample a reply and parse the action out of it.

        Raises:
            ContextFull: The prompt leaves no room for a reply.
        """
        self._info = info
        prompt_ids, new_row = self._observe(observation)
        prompt = len(self.prompts.conversation.prompt_ids)
        generation = await self._generate()
        reply = self.prompts.reply(generation.token_ids)
        message = self.prompts.conversation.last_message
        action, form = self._read_action(reply, message, info)
        self._count(generation, new_row, form)
        return AgentAction(
            action=action[:MAX_ACTION_CHARS],
            response=reply,
            message=message if self._has_tools else None,
            prompt_ids=prompt_ids,
            action_ids=generation.token_ids,
            logprobs=generation.logprobs,
            new_row=new_row,
            policy_version=generation.version,
            version_spans=generation.version_spans,
            finish_reason=generation.finish_reason,
            usage=Usage(prompt_tokens=prompt, completion_tokens=len(generation.token_ids)),
            routed_experts=generation.experts_of_turn(prompt, len(prompt_ids)),
        )

    async def leave(self) -> None:
        """Let the engine drop the cached prefix of this episode."""
        await self._engine.forget(self.session)

    def final_prompt(self, observation: str) -> tuple[tuple[int, ...], bool]:
        """Return the ids that an observation after the last turn adds, and whether they start a new row."""
        return self._observe(observation, final=True)

    def _read_action(self, reply: str, message: Message, info: Mapping[str, Any]) -> Reading:
        """Return the action in a reply: its tool calls as JSON, or what the parser finds."""
        if self._has_tools:
            if message.tool_calls:
                return Reading(write_calls(message.tool_calls), TOOL_CALL)
            return Reading(message.text, None)
        if self._agent.chat.tools.format.channels:
            reply = message.text
        return read_action(self._agent.parser, reply, listed_actions(info))

    def _observe(self, observation: str, *, final: bool = False) -> tuple[tuple[int, ...], bool]:
        prompts, counts = self.prompts, self._agent.counts
        before = prompts.dropped_turns, prompts.cut_observations
        if final and self._has_tools:
            added = prompts.final(observation)
        else:
            added = prompts.observe(observation, self._info)
        counts["dropped_turns"] += prompts.dropped_turns - before[0]
        counts["cut_observations"] += prompts.cut_observations - before[1]
        return added

    async def _generate(self) -> Generation:
        conversation, turn = self.prompts.conversation, self.prompts.turn
        prompt_ids = conversation.prompt_ids
        room = self._engine.context_length - len(prompt_ids)
        if room < 1:
            self._agent.counts["context_full"] += 1
            raise ContextFull(
                f"The conversation has {len(prompt_ids)} tokens before turn {turn + 1}, which leaves no "
                f"room for a reply in a context of {self._engine.context_length}."
            )
        seed = derive_seed("lm", self._seed, turn)
        generation = await self._engine.generate(
            GenerateRequest(
                request_id=f"{self.session}/{turn}",
                prompt_ids=prompt_ids,
                sampling=self._agent.options.sampling(seed, conversation.stop_ids, room),
                session=self.session,
            )
        )
        if generation.finish_reason == "aborted":
            raise AgentError(f"The reply of turn {turn + 1} was aborted.")
        return generation

    def _count(self, generation: Generation, new_row: bool, form: str | None) -> None:
        counts = self._agent.counts
        counts["requests"] += 1
        counts["prompt_tokens"] += len(self.prompts.conversation.prompt_ids) - len(generation.token_ids)
        counts["completion_tokens"] += len(generation.token_ids)
        counts["format_misses"] += form is None
        if form is not None:
            self._agent.forms[form] = self._agent.forms.get(form, 0) + 1
        counts["new_rows"] += new_row
