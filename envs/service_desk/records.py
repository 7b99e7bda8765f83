"""The records of the shop, the rules for changing them, and the cases that customers come with."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["cancel", "refund", "address"]
Result = Literal["done", "refused", "transferred"]
REFUND_DAYS = 30
"""Days after the delivery in which an order can be refunded."""
REFUND_LIMIT = 200
"""Largest refund that the desk makes itself."""


@dataclass(slots=True, kw_only=True)
class Order:
    """An order of a customer."""

    number: str
    customer: str
    items: list[str]
    total: int
    status: str
    """``processing``, ``shipped``, ``delivered`` or ``cancelled``."""
    days: int
    """Days since the status changed."""
    address: str
    refunded: bool = False

    def shown(self) -> dict[str, Any]:
        """Return the order as the tools show it."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Customer:
    """A customer of the shop."""

    number: str
    name: str
    email: str


@dataclass(slots=True, kw_only=True)
class Records:
    """All customers by email and all orders by number."""

    customers: dict[str, Customer] = field(default_factory=dict)
    orders: dict[str, Order] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Something that a customer asks for."""

    kind: Kind
    order: str
    address: str = ""
    """The new address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A customer with requests, and the records before they are handled."""

    email: str
    name: str
    requests: tuple[Request, ...]
    records: Records
    talkative: bool
    """Whether the customer gives all details at once."""
    insists: bool
    """Whether the customer asks for an exception once a request is refused."""

    @property
    def results(self) -> list[Result]:
        """The right result of each request."""
        customer = self.records.customers[self.email].number
        return [verdict(request, self.records.orders[request.order], customer) for request in self.requests]

    def expected(self) -> Records:
        """Return the records after all requests were handled by the policy."""
        records = copy.deepcopy(self.records)
        for request, result in zip(self.requests, self.results, strict=True):
            if result == "done":
                carry_out(request, records)
        return records


def verdict(request: Request, order: Order, customer: str) -> Result:
    """Return what the policy says about a request of a customer."""
    if order.customer != customer:
        return "refused"
    if request.kind in ("cancel", "address"):
        return "done" if order.status == "processing" else "refused"
    if order.status != "delivered" or order.days > REFUND_DAYS or order.refunded:
        return "refused"
    return "transferred" if order.total > REFUND_LIMIT else "done"


def carry_out(request: Request, records: Records) -> None:
    """Change the records as a request asks for, whether or not the policy allows it."""
    order = records.orders[request.order]
    if request.kind == "cancel":
        order.status, order.days = "cancelled", 0
    elif request.kind == "address":
        order.address = request.address
    else:
        order.refunded = True
