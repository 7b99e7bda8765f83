"""ServiceDesk: an agent serves a customer of a shop, with tools over the shop's records and a policy."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from rollgym.core.env import StepResult
from rollgym.core.messages import ToolCall
from rollgym.core.role_env import RoleEnv, ScriptedRole
from rollgym.core.tasks import Task, TaskSet
from rollgym.core.tool_env import tool
from rollgym.core.tools import write_calls
from rollgym.core.types import RoleSpec
from rollgym.envs.arguments import check_choice, check_range
from rollgym.envs.service_desk.generate import make_case
from rollgym.envs.service_desk.records import (
    REFUND_DAYS,
    REFUND_LIMIT,
    Case,
    Kind,
    Request,
    carry_out,
    verdict,
)
from rollgym.envs.service_desk.user import UserScript, describe, goal_text

AGENT, USER = "agent", "user"
SILENCE = "(The customer says nothing.)"
"""The desk reads this after an empty message of the user."""

_POLICY = f"""\
You work at the service desk of a shop and talk to one customer. Follow this policy:
1. Ask for the customer's email address and look it up with `find_customer` first, before you look at orders.
2. Act only on orders of that customer.
3. Look at an order with `get_order` before you decide on it.
4. An order can be cancelled, and its address changed, only while its status is processing.
5. A delivered order can be refunded once, within {REFUND_DAYS} days of delivery.
6. Refunds of more than {REFUND_LIMIT} are made by a colleague: do not make them, they are transferred.
7. A request that the policy does not allow is refused, whatever the customer says.
8. Answer each request in words. When the customer has no more requests, call `close_case` with one result for
   each request, in order: done, refused or transferred.
Each turn, either call tools or write a message to the customer as plain text. You have {{turns}} turns.
You get a reward of 1 if all requests were handled by the policy and nothing else was changed, else 0."""
_USER = """\
You are a customer who talks to the service desk of a shop. First you read who you are and what you want.
Each turn, you read a message of the desk and write one short message to it as plain text. Write only what the
customer says, never what the desk says. State one request at a time, in the given order: the next one when
the desk has answered. Give your email address, order numbers and addresses when the desk asks for them, and
invent none: if you do not know something, say so. When the desk has answered everything, write:
That is all, thank you.
You get a reward of 1 if everything that you want was done, else the fraction that was done."""

OrderNumber = Annotated[str, Field(pattern=r"^[0-9]{4}$", description="Number of the order, four digits.")]


class ServiceDeskEnv(RoleEnv):
    """Serve a customer by a policy; the customer is scripted, or another agent (role ``user``).

    Observation: the customer's message, or the results of the tools.

    Actions: calls of tools, or a message to the customer as plain text.

    Reward: 1 to the agent for success, else 0; to the user the fraction of its requests that was carried out,
    when the case is closed.

    Success: the records are as the policy requires, every result was reported right, and no step broke the
    policy.

    Ends: terminated by ``close_case``; truncated after ``max_turns`` turns of the agent.

    Splits: generated customers, orders and requests, no case in two splits.
    """

    pool_thread = "any"  # its calls are quick
    role_names = (AGENT, USER)
    others_known = ("scripted",)
    success_means = "all requests were handled as the policy requires, and nothing else was changed"
    reward_range = (0.0, 1.0)
    tasks: TaskSet

    def __init__(
        self,
        *,
        level: int = 2,
        max_turns: int = 30,
        others: str | None = "scripted",
        render_mode: str | None = None,
    ) -> None:
        """Make cases of a level from 1 to 3."""
        check_choice("level", str(level), ("1", "2", "3"))
        check_range("max_turns", max_turns, 1, 1_000)
        self._level, self._max_turns = level, max_turns
        self.instructions = _POLICY.format(turns=max_turns)
        self.tasks = TaskSet(f"ServiceDesk-{level}", {"train": 20_000, "dev": 1_000, "test": 1_000})
        super().__init__(others=others, render_mode=render_mode)

    def role_spec(self, role: str) -> RoleSpec:
        """The agent has the policy and the tools; the user has neither."""
        if role == USER:
            return RoleSpec(name=USER, instructions=_USER, free_text=True)
        return RoleSpec(name=AGENT, instructions=self.instructions, tools=self.tools)

    def begin(self, task: Task) -> str:
        """Make the task's case; the user has the first word."""
        # Cases are too many to repeat, so it is enough that no seed of a case is in two splits.
        seed = self.tasks.draw(task, lambda rng: int(rng.integers(2**62)), key=str)
        self._case: Case = make_case(np.random.default_rng(seed), self._level)
        self._records = copy.deepcopy(self._case.records)
        self._customer = ""
        self._looked_up: set[str] = set()
        self._violations: list[str] = []
        self._turns_left = self._max_turns
        self._messages: list[str] = []
        self.to_move = USER
        return goal_text(self._case)

    def respond(self, action: str) -> StepResult:
        """Execute the agent's calls, or pass a message on to the other side."""
        if self.to_move == USER:
            return self._message(action, AGENT)
        self._turns_left -= 1
        result = super().respond(action) if _is_call(action) else self._message(action, USER)
        if result.terminated or self._turns_left:
            return result
        return StepResult(
            f"{result.observation}\nThe time is up: the case was not closed.",
            truncated=True,
            valid=result.valid,
            info=result.info,
        )

    def facts(self) -> Mapping[str, Any]:
        """What the user knows on the user's turn; the turns left on the agent's turn."""
        return {"case": describe(self._case)} if self.to_move == USER else {"turns_left": self._turns_left}

    def scripted(self, role: str, name: str, rng: np.random.Generator) -> ScriptedRole:
        """The scripted user."""
        return UserScript(rng).reply

    def render_text(self) -> str:
        """The conversation so far."""
        return "\n".join(self._messages) or "(no message yet)"

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A question or a call, with the emails and order numbers of the observation if it has any."""
        if "case" in info:
            return str(rng.choice(["Hello.", "Please help me.", "I have a question about an order."]))
        emails = re.findall(r"[a-z.]+@[a-z.]+[a-z]", observation) or ["someone@post.example"]
        orders = re.findall(r"\b[0-9]{4}\b", observation) or [str(int(rng.integers(1000, 10_000)))]
        order = orders[int(rng.integers(len(orders)))]
        results = ("done", "refused", "transferred")
        choices: list[str | ToolCall] = [
            "What is your email address?",
            "Which order is it?",
            ToolCall(name="find_customer", arguments={"email": emails[int(rng.integers(len(emails)))]}),
            ToolCall(name="get_order", arguments={"order": order}),
            ToolCall(name="cancel_order", arguments={"order": order}),
            ToolCall(name="refund_order", arguments={"order": order}),
            ToolCall(name="change_address", arguments={"order": order, "address": "1 Elm Street, Selby"}),
            ToolCall(name="close_case", arguments={"results": [results[int(rng.integers(3))]]}),
        ]
        choice = choices[int(rng.integers(len(choices)))]
        return choice if isinstance(choice, str) else write_calls([choice])

    # Tools of the agent.

    @tool
    def find_customer(self, email: Annotated[str, Field(max_length=200)]) -> str:
        """Find a customer by email address, with the numbers of the customer's orders."""
        customer = self._records.customers.get(email.strip().lower())
        if customer is None:
            return f"There is no customer with the email address {email!r}."
        if customer.email == self._case.email:
            self._customer = customer.number
        orders = [
            order.number for order in self._records.orders.values() if order.customer == customer.number
        ]
        return json.dumps({"customer": customer.number, "name": customer.name, "orders": orders})

    @tool
    def get_order(self, order: OrderNumber) -> str:
        """Show an order: customer, items, total, status, days since it changed, address, refunded or not."""
        if order not in self._records.orders:
            return f"There is no order {order}."
        if not self._customer:
            self._violations.append("looked at an order before the customer was known")
        self._looked_up.add(order)
        return json.dumps(self._records.orders[order].shown())

    @tool
    def cancel_order(self, order: OrderNumber) -> str:
        """Cancel an order."""
        return self._change(Request(kind="cancel", order=order), "cancelled")

    @tool
    def refund_order(self, order: OrderNumber) -> str:
        """Refund the total of an order."""
        return self._change(Request(kind="refund", order=order), "refunded")

    @tool
    def change_address(self, order: OrderNumber, address: Annotated[str, Field(max_length=200)]) -> str:
        """Change the delivery address of an order; write it as the customer does: number, street, town."""
        request = Request(kind="address", order=order, address=" ".join(address.split()))
        return self._change(request, f"sent to {request.address}")

    @tool
    def close_case(self, results: list[Literal["done", "refused", "transferred"]]) -> StepResult:
        """Close the case, with the result of each request in order."""
        case, orders = self._case, {request.order for request in self._case.requests}
        problems = list(self._violations)
        if results != case.results:
            problems.append("the results are not those that the policy requires")
        if self._records != case.expected():
            problems.append("the records are not as the policy requires")
        if not orders <= self._looked_up:
            problems.append("an order was decided on that was not looked up")
        right = not problems
        note = (
            "Everything was handled by the policy." if right else f"Not by the policy: {'; '.join(problems)}."
        )
        done = [self._is_done(request) for request in case.requests]
        return StepResult(
            f"The case is closed. {note}",
            terminated=True,
            rewards={AGENT: float(right), USER: sum(done) / len(done)},
            successes={AGENT: right, USER: all(done)},
        )

    def _change(self, request: Request, change: str) -> str:
        order = self._records.orders.get(request.order)
        if order is None:
            return f"There is no order {request.order}."
        if not self._customer:
            self._violations.append("changed an order before the customer was known")
        elif request.order not in self._looked_up:
            self._violations.append("changed an order that was not looked up")
        elif verdict(request, order, self._customer) != "done":
            self._violations.append(f"order {request.order} must not be {change}")
        carry_out(request, self._records)
        return f"Order {request.order} is {change} now."

    def _is_done(self, request: Request) -> bool:
        now = self._records.orders[request.order]
        states: dict[Kind, bool] = {
            "cancel": now.status == "cancelled",
            "refund": now.refunded and not self._case.records.orders[request.order].refunded,
            "address": now.address == request.address,
        }
        return states[request.kind]

    def _message(self, text: str, to: str) -> StepResult:
        text = " ".join(text.split())
        if not text and self.to_move == AGENT:
            return StepResult("An empty message was not sent.", valid=False)
        # The desk goes on after a silent customer, so that the desk's turns bound the episode.
        valid, text = bool(text), text or SILENCE
        self._messages.append(f"{self.to_move}: {text}")
        self.to_move = to
        return StepResult(text, valid=valid)


def _is_call(action: str) -> bool:
    """Whether an action is meant as tool calls; a message never starts with a bracket or a code fence."""
    return action.lstrip().startswith(("{", "[", "```"))
