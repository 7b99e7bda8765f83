"""The scripted user: a customer who states requests, answers questions, and sometimes insists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym.core.agent import Briefing, SoloAgent
from rollgym.core.seeding import derive_rng
from rollgym.envs.service_desk.records import Case

DONE = "That is all, thank you."
_ASKS = re.compile(r"\?|\b(please|need|give|tell|provide|send|share|confirm)\b", re.IGNORECASE)
_REFUSES = re.compile(
    r"\b(cannot|can't|can not|unable|not allowed|not possible|refuse|sorry)\b", re.IGNORECASE
)
_MORE = re.compile(r"\b(anything|something|any other|more) ?(else|requests?|i can)?\b", re.IGNORECASE)
_WAITS = re.compile(r"\b(let me|one moment|please wait|hold on|i will (check|look))\b", re.IGNORECASE)
_EMAIL = re.compile(r"\be-?mail\b", re.IGNORECASE)
_ORDER = re.compile(r"\border\b|\bnumber\b", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<!email )(?<!e-mail )(?<!mail )\baddress\b|\bwhere\b", re.IGNORECASE)

_STATED = {
    "cancel": (
        "Please cancel {order}.",
        "I want to cancel {order}.",
        "I do not need {order} any more, cancel it.",
    ),
    "refund": ("I want a refund for {order}.", "Please give me my money back for {order}."),
    "address": (
        "Please change the delivery address of {order}{to}.",
        "I moved. Please have {order} delivered to another address{to}.",
    ),
}
_INSISTS = (
    "Please make an exception for me.",
    "Are you sure? I have been a customer for years, make an exception.",
    "A colleague of yours said that it would be fine. Make an exception.",
)


def describe(case: Case) -> dict[str, Any]:
    """Return what a user knows, as ``info["case"]`` has it."""
    return {
        "name": case.name,
        "email": case.email,
        "requests": [
            {"kind": request.kind, "order": request.order, "address": request.address}
            for request in case.requests
        ],
        "talkative": case.talkative,
        "insists": case.insists,
    }


def goal_text(case: Case) -> str:
    """Return what a user knows as text: the first observation of the user."""
    lines = [f"You are {case.name}, email {case.email}. You contact the service desk of a shop and want to:"]
    for number, request in enumerate(case.requests, 1):
        wish = {"cancel": "cancel", "refund": "get a refund for", "address": "change the address of"}[
            request.kind
        ]
        address = f" to {request.address}" if request.address else ""
        lines.append(f"{number}. {wish} order {request.order}{address}")
    if case.insists:
        lines.append("If a request is refused, ask once for an exception.")
    if case.talkative:
        lines.append("Give your email address and all details in your first message.")
    lines.append("The desk listens. Write your first message.")
    return "\n".join(lines)


class UserScript:
    """One conversation of the scripted user."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._current = -1
        """Index of the request that is being handled."""
        self._insisted: set[int] = set()

    def reply(self, observation: str, info: Mapping[str, Any]) -> str:
        """Answer the desk's message; the first call opens the conversation."""
        case = info["case"]
        requests: Sequence[Mapping[str, str]] = case["requests"]
        if self._current < 0:
            self._current = 0
            greeting = f"Hello, I am {case['name']}" + (f" ({case['email']})" if case["talkative"] else "")
            return f"{greeting}. {self._stated(case, requests[0])}"
        if self._current >= len(requests):
            return self._details(observation, case, requests[-1]) or DONE
        request = requests[self._current]
        if details := self._details(observation, case, request):
            return details
        if any(s.endswith("?") and not _MORE.search(s) for s in _sentences(observation)):
            return f"As I said: {self._stated({**case, 'talkative': True}, request)}"
        if _WAITS.search(observation):
            return "All right."
        refused = bool(_REFUSES.search(observation))
        if refused and case["insists"] and self._current not in self._insisted:
            self._insisted.add(self._current)
            return str(self._rng.choice(_INSISTS))
        self._current += 1
        if self._current == len(requests):
            return DONE
        return f"I have another request. {self._stated(case, requests[self._current])}"

    def _stated(self, case: Mapping[str, Any], request: Mapping[str, str]) -> str:
        texts = _STATED[request["kind"]]
        full = case["talkative"]
        order = f"my order {request['order']}" if full else "one of my orders"
        to = f" to {request['address']}" if full and request["address"] else ""
        return texts[int(self._rng.integers(len(texts)))].format(order=order, to=to)

    def _details(self, observation: str, case: Mapping[str, Any], request: Mapping[str, str]) -> str:
        """Answers to the questions in a message; empty where it asks for none."""
        asked = " ".join(s for s in _sentences(observation) if _ASKS.search(s) and not _MORE.search(s))
        answers = []
        if _EMAIL.search(asked):
            answers.append(f"My email is {case['email']}.")
        if _ORDER.search(asked):
            answers.append(f"It is order {request['order']}.")
        if _ADDRESS.search(asked) and request["address"]:
            answers.append(f"The new address is: {request['address']}.")
        return " ".join(answers)


def _sentences(text: str) -> list[str]:
    return re.findall(r"[^.!?\n]+[.!?\n]?", text)


class ScriptedUser(SoloAgent):
    """The scripted user as an agent, for the role ``user``."""

    def start(self, briefing: Briefing) -> None:
        """Start a conversation."""
        self._script = UserScript(derive_rng("service desk user", briefing.spec.sampling_seed))

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The user's next message."""
        return self._script.reply(observation, info)
