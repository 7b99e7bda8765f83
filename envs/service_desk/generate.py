"""Cases from a random generator: a shop with a few customers, and one customer's requests."""

from __future__ import annotations

import numpy as np

from rollgym.envs.service_desk.records import (
    REFUND_LIMIT,
    Case,
    Customer,
    Kind,
    Order,
    Records,
    Request,
)

FIRST_NAMES = (
    *("Ada", "Bela", "Cora", "Dario", "Edda", "Finn", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Lars"),
    *("Mara", "Nils", "Olga", "Pavel", "Rosa", "Sven", "Tara", "Ulf", "Vera", "Willem", "Yara", "Zeno"),
)
LAST_NAMES = (
    *("Adler", "Berg", "Conte", "Dahl", "Eklund", "Falk", "Grau", "Holm", "Ivers", "Jansen", "Kroll"),
    *("Lind", "Moser", "Novak", "Olsen", "Petri", "Quast", "Rossi", "Stern", "Thoma", "Urban", "Weiss"),
)
STREETS = (
    "Elm Street",
    "Mill Lane",
    "Harbor Road",
    "Castle Square",
    "Garden Row",
    "Station Road",
    "Oak Hill",
)
TOWNS = ("Dorwick", "Lunden", "Marbach", "Norvale", "Ostheim", "Pelham", "Redmere", "Selby")
ITEMS = (
    *(
        "lamp",
        "kettle",
        "backpack",
        "radio",
        "desk",
        "mirror",
        "blanket",
        "bicycle pump",
        "notebook",
        "clock",
    ),
    *("chair", "teapot", "umbrella", "camera", "toolbox", "rug", "pan", "headphones", "tent", "vase"),
)
KINDS: tuple[Kind, ...] = ("cancel", "refund", "address")
LEVELS = {1: (1, 1), 2: (1, 1), 3: (2, 3)}
"""Fewest and most requests of each level."""
_CUSTOMERS = 3
_ORDERS = 4
"""Orders of each customer."""


def make_case(rng: np.random.Generator, level: int) -> Case:
    """Make a case. From level 2 on the customer gives details only when asked, and may insist."""
    records = _records(rng)
    customers = list(records.customers.values())
    customer = customers[int(rng.integers(len(customers)))]
    low, high = LEVELS[level]
    own = [order for order in records.orders.values() if order.customer == customer.number]
    picks = [own[int(i)] for i in rng.permutation(len(own))[: int(rng.integers(low, high + 1))]]
    if level > 1 and rng.random() < 0.15:
        foreign = [order for order in records.orders.values() if order.customer != customer.number]
        picks[0] = foreign[int(rng.integers(len(foreign)))]
    return Case(
        email=customer.email,
        name=customer.name,
        requests=tuple(_request(rng, order) for order in picks),
        records=records,
        talkative=level == 1,
        insists=level > 1 and bool(rng.random() < 0.5),
    )


def _request(rng: np.random.Generator, order: Order) -> Request:
    kind = KINDS[int(rng.integers(len(KINDS)))]
    if rng.random() < 0.8:  # most requests fit the order's status: random ones seldom do
        kind = {"processing": KINDS[2 * int(rng.integers(2))], "delivered": KINDS[1]}.get(order.status, kind)
    return Request(kind=kind, order=order.number, address=_address(rng) if kind == "address" else "")


def _records(rng: np.random.Generator) -> Records:
    records = Records()
    firsts, lasts = rng.permutation(len(FIRST_NAMES)), rng.permutation(len(LAST_NAMES))
    numbers = iter(rng.choice(9_000, _CUSTOMERS * _ORDERS, replace=False).tolist())
    for place in range(_CUSTOMERS):
        first, last = FIRST_NAMES[int(firsts[place])], LAST_NAMES[int(lasts[place])]
        email = f"{first}.{last}@post.example".lower()
        customer = Customer(number=f"C{place + 1}", name=f"{first} {last}", email=email)
        records.customers[email] = customer
        home = _address(rng)
        for _ in range(_ORDERS):
            order = _order(rng, str(1_000 + next(numbers)), customer.number, home)
            records.orders[order.number] = order
    return records


def _order(rng: np.random.Generator, number: str, customer: str, address: str) -> Order:
    status = ("processing", "shipped", "delivered", "delivered")[int(rng.integers(4))]
    items = [ITEMS[int(i)] for i in rng.permutation(len(ITEMS))[: int(rng.integers(1, 4))]]
    total = int(rng.integers(REFUND_LIMIT + 1, 600) if rng.random() < 0.4 else rng.integers(10, REFUND_LIMIT))
    return Order(
        number=number,
        customer=customer,
        items=items,
        total=total,
        status=status,
        days=int(rng.integers(0, 45 if status == "delivered" else 6)),
        address=address,
        refunded=status == "delivered" and bool(rng.random() < 0.1),
    )


def _address(rng: np.random.Generator) -> str:
    street, town = STREETS[int(rng.integers(len(STREETS)))], TOWNS[int(rng.integers(len(TOWNS)))]
    return f"{int(rng.integers(1, 200))} {street}, {town}"
