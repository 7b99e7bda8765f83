"""The expert of ServiceDesk: asks for details, looks orders up, and follows the policy; or plays the user."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import Agent, AgentSetup, Briefing, Player, SoloAgent
from rollgym.core.messages import ToolCall
from rollgym.core.tools import write_calls
from rollgym.envs.service_desk.env import USER
from rollgym.envs.service_desk.records import Order, Request, Result, verdict
from rollgym.envs.service_desk.user import DONE, ScriptedUser

_EMAIL = re.compile(r"[\w.]+@[\w.]+\w")
_ORDER = re.compile(r"\b[0-9]{4}\b")
_ADDRESS = re.compile(r"\b[0-9]{1,3} [A-Z]\w+ \w+, [A-Z]\w+")
_KINDS = (("refund", r"refund|money back"), ("address", r"(?<!mail )address"), ("cancel", r"cancel"))
_TOOLS = {"cancel": "cancel_order", "refund": "refund_order", "address": "change_address"}


class ServiceDeskExpert(Agent):
    """Plays the agent by the policy, and the user by the script, whichever role it is given."""

    def __init__(self, setup: AgentSetup) -> None:
        self._agent, self._user = _Clerk(setup), ScriptedUser(setup)

    def player(self, briefing: Briefing) -> Player:
        """Return a player of the role."""
        return (self._user if briefing.role == USER else self._agent).player(briefing)

    async def close(self) -> None:
        """Do nothing: it holds nothing."""


class _Clerk(SoloAgent):
    """Reads requests out of messages, as the scripted user writes them; asks again for what it cannot use."""

    def start(self, briefing: Briefing) -> None:
        self._email = self._customer = self._call = ""
        self._results: list[Result] = []
        self._request: dict[str, str] = {}
        self._order: Order | None = None

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        call, self._call = self._call, ""
        if call in ("find_customer", "get_order"):
            self._look_at(call, observation)
        elif call:  # a change: report it
            return self._settle("done", "That is done.")
        else:
            self._read(observation)
            if DONE in observation:
                return self._use("close_case", results=self._results)
            if not self._request:
                insists = self._results[-1:] == ["refused"]
                return "I am sorry, but the policy allows no exception." if insists else "How can I help you?"
        return self._next()

    def _look_at(self, call: str, result: str) -> None:
        """Keep a record that was found; forget an email address or order number that does not exist."""
        found = result.startswith("{")
        if call == "find_customer":
            self._customer = json.loads(result)["customer"] if found else ""
            self._email = self._email if found else ""
        elif found:
            self._order = Order(**json.loads(result))
        else:
            del self._request["order"]

    def _read(self, text: str) -> None:
        kind = next((kind for kind, words in _KINDS if re.search(words, text, re.IGNORECASE)), None)
        if not self._request and kind is not None and "exception" not in text:
            self._request, self._order = {"kind": kind}, None
        for name, pattern in (("order", _ORDER), ("address", _ADDRESS)):
            if self._request and (found := pattern.search(text)):
                self._request[name] = found[0]
        if found := _EMAIL.search(text):
            self._email = found[0]

    def _next(self) -> str:
        request = self._request
        if not self._email:
            return "What is your email address?"
        if not self._customer:
            return self._use("find_customer", email=self._email)
        if "order" not in request:
            return "Which order is it?"
        if request["kind"] == "address" and "address" not in request:
            return "What is the new address?"
        if self._order is None:
            return self._use("get_order", order=request["order"])
        wanted = Request(kind=request["kind"], order=request["order"])  # type: ignore[arg-type]
        result = verdict(wanted, self._order, self._customer)
        if result == "done":
            address = {"address": request["address"]} if request["kind"] == "address" else {}
            return self._use(_TOOLS[request["kind"]], order=request["order"], **address)
        if result == "transferred":
            return self._settle(result, "A colleague of mine will look into that.")
        return self._settle(result, "I am sorry, our policy does not allow that.")

    def _settle(self, result: Result, message: str) -> str:
        self._results.append(result)
        self._request = {}
        return message

    def _use(self, name: str, **arguments: Any) -> str:
        self._call = name
        return write_calls([ToolCall(name=name, arguments=arguments)])
