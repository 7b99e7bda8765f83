"""An engine with scripted replies, for conversations with tools."""

from __future__ import annotations

from collections.abc import Sequence

from talkers import family

from rollgym.chat import ChatTemplate
from rollgym.core.messages import ToolCall
from rollgym.engines.base import GenerateRequest
from rollgym.testing import ScriptedEngine


class Scripted:
    """An engine that replies with these texts, as the ids that a model would sample."""

    def __init__(self, name: str, texts: Sequence[str | Sequence[ToolCall]]) -> None:
        self.template = ChatTemplate(family(name))
        self.sampled: list[tuple[int, ...]] = []
        self.starts: list[GenerateRequest] = []
        self.engine = ScriptedEngine(self._reply, context_length=100_000)
        self._texts = list(texts)
        self._pieces: dict[str, tuple[int, tuple[int, ...]]] = {}

    def _reply(self, request: GenerateRequest) -> Sequence[int]:
        # A request with stop strings comes in pieces.
        if request.request_id not in self._pieces:
            said = self._texts.pop(0)
            tools = self.template.tools
            text = said if isinstance(said, str) else tools.format.write(said)
            ids = [*self.template.codec.encode([text], "\n")]
            harmony = tools.format.name == "harmony" and "to=functions." in text
            ids.append(self.template.codec.added["<|call|>"] if harmony else request.sampling.stop_ids[0])
            self.starts.append(request)
            self.sampled.append(tuple(ids))
            self._pieces[request.request_id] = len(request.prompt_ids), tuple(ids)
        start, whole = self._pieces[request.request_id]
        return whole[len(request.prompt_ids) - start :]
