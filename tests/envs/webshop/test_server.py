"""The shop as a web site: what it shows, whom it answers, and what it forgets."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from html import escape, unescape
from typing import Any

import httpx
import msgspec
import pytest
from starlette.testclient import TestClient

from rollgym.core.errors import UsageError
from rollgym.envs.webshop import server
from rollgym.envs.webshop.server import HEADERS, MAX_BODY, serve, shop_app
from rollgym.envs.webshop.server import sessions as server_visits
from rollgym.envs.webshop.server.sessions import ShopSessions
from rollgym.envs.webshop.shop import Shop
from rollgym.utils.http_server import listening

BASE = "http://127.0.0.1:3000"
WISH = "Find me a hand made mug with color: rectangular, and size: x-large"


class Person:
    """Somebody at a browser: sees pages, presses buttons by what is written on them."""

    def __init__(self, shop: Shop, visits: ShopSessions | None = None, driven: bool = False) -> None:
        self.visits = ShopSessions() if visits is None else visits
        self.client = TestClient(shop_app(self.visits, None if driven else shop), base_url=BASE)
        self.shop = shop
        self.answer: Any = None

    def take(self, goal: object = 0) -> "Person":
        return self.keep(self.client.post("/new", data={"goal": str(goal)}))

    def keep(self, answer: Any) -> "Person":
        self.answer = answer
        return self

    @property
    def path(self) -> str:
        return str(self.answer.url.path)

    @property
    def text(self) -> str:
        return unescape(self.answer.text)

    def search(self, words: str) -> "Person":
        return self.keep(self.client.post(self.path, data={"action": "search", "search": words}))

    def press(self, label: str) -> "Person":
        match = re.search(
            rf'name="action" value="([^"]*)"[^>]*>{re.escape(escape(label))}<', self.answer.text
        )
        assert match, label
        return self.keep(self.client.post(self.path, data={"action": unescape(match[1])}))


@pytest.fixture
def person(hand_made_shop: Callable[[str], Shop]) -> Person:
    return Person(hand_made_shop("clean"))


def test_a_person_plays_from_the_start_page_to_the_score(person: Person) -> None:
    assert "New task" not in person.keep(person.client.get("/")).text  # a catalog without splits
    assert "0 to 1" in person.text
    person.take(0)
    assert re.fullmatch(r"/search/[\w-]{22}/0", person.path)
    assert WISH in person.text
    person.search("blue mug")
    assert person.path.startswith("/search_results/")
    assert person.path.endswith("/1")
    person.press("B0000MUG01").press("x-large").press("rectangular")
    assert person.path.startswith("/item_page/")
    assert WISH in person.text
    assert "size (chosen: x-large)" in person.text
    person.press("Features")
    assert person.path.startswith("/item_sub_page/")
    person.press("< Prev").press("Buy Now")
    assert person.path.startswith("/done/")
    assert "Your score: <strong>100</strong> of 100" in person.text
    assert "2 of 2" in person.text
    assert "Next task" in person.text


def test_the_score_tells_what_was_missed(person: Person) -> None:
    person.take(0).search("blue mug").press("B0000MUG01").press("large").press("Buy Now")
    # The type, the attribute and the price are right, both options are not: 2 of 4.
    assert "Your score: <strong>50</strong> of 100" in person.text
    assert "0 of 2" in person.text
    assert WISH in person.text


def test_a_site_that_is_driven_tells_no_score_and_hands_out_no_tasks(hand_made_shop: Any) -> None:
    driven = Person(hand_made_shop("clean"), driven=True)
    visit = driven.visits.open(driven.shop, 0)
    driven.keep(driven.client.get(visit.address(0)))
    driven.search("plain mug").press("B0000MUG03").press("Buy Now")
    assert "score" not in driven.text.lower()
    assert "/new" not in driven.text
    assert visit.end == 3
    assert visit.steps[3].outcome is not None
    assert visit.steps[3].outcome.reward == 0.5  # attribute and price, without the two options
    assert driven.client.get("/").status_code == 404
    assert driven.client.post("/new", data={"goal": "0"}).status_code == 404


def test_an_action_is_played_from_the_page_it_was_posted_from(person: Person) -> None:
    person.take(0).search("mug")
    results = person.answer
    person.press("B0000MUG03")
    person.keep(results).press("B0000MUG01").press("large")
    other_tab = person.answer
    person.keep(person.client.get(results.url.path))  # the way back
    assert "Page 1" in person.text
    person.keep(other_tab).press("Buy Now")
    assert "B0000MUG01" in person.text


def test_a_purchase_ends_the_visit_on_all_its_pages(person: Person) -> None:
    person.take(0).search("blue mug").press("B0000MUG01")
    item = person.answer
    end = person.press("Buy Now").path
    assert person.keep(item).press("x-large").path == end
    assert person.keep(item).press("Buy Now").path == end
    assert person.keep(person.client.get(item.url.path)).path == end
    [visit] = person.visits._by_name.values()
    assert visit.end == visit.last == 3


def test_what_is_not_possible_is_said(person: Person) -> None:
    person.take(0).search("  ")
    assert "Not possible: say what you are looking for." in person.text
    assert person.path.endswith("/1")
    answer = person.client.post(person.path, data={"action": "click[no such thing]"})
    assert "Not possible: there is nothing called 'no such thing'" in unescape(answer.text)


def test_what_a_shop_says_never_becomes_markup(hand_made_shop: Any) -> None:
    shop = hand_made_shop("clean")
    evil = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'"
    products, goals = shop.catalog.products, shop.catalog.goals
    products[0] = msgspec.structs.replace(
        products[0],
        title=f"Blue Mug {evil}",
        description=evil,
        bullets=(evil,),
        options={f"size{evil}": (evil, "large")},
        image="https://images.test/mug.jpg",
        category=evil,
    )
    goals[0] = msgspec.structs.replace(goals[0], instruction=evil, attributes=(evil,), options={evil: evil})
    person, seen = Person(shop), []

    def look(now: Person) -> None:
        seen.append(now.answer.text)

    look(person.take(0))
    look(person.search("blue"))
    look(person.press("B0000MUG01"))
    for part in ("Description", "Features"):
        look(person.press(part))
        person.press("< Prev")
    visit = next(iter(person.visits._by_name.values()))
    number = visit.play(visit.last, f"click[size{evil}: {evil}]")
    look(person.keep(person.client.get(visit.address(number))))
    assert f"(chosen: {evil})" in person.text
    look(person.press("Buy Now"))
    look(person.keep(person.client.post("/new", data={"goal": evil})))
    for page in seen:
        assert "<script" not in page
        assert "<img" not in page
        assert "images.test" not in page
    assert sum("&lt;script&gt;" in page for page in seen) == 7


def test_every_answer_has_the_headers(person: Person) -> None:
    client = person.client
    answers = [client.get(path) for path in ("/", "/shop.css", "/nowhere", "/search/x/0")]
    answers += [client.post("/new", data={"split": ""}, follow_redirects=False), client.put("/new")]
    answers.append(client.get("/", headers={"host": "evil.test"}))
    assert [answer.status_code for answer in answers] == [200, 200, 404, 404, 303, 405, 400]
    for answer in answers:
        assert {name.lower() for name in HEADERS} <= set(answer.headers)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script" not in policy
        assert "http" not in policy


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (403, {"origin": "http://evil.test"}, "goal=0"),
        (403, {"origin": "null"}, "goal=0"),
        (403, {"sec-fetch-site": "cross-site"}, "goal=0"),
        (403, {"sec-fetch-site": "same-site"}, "goal=0"),
        (400, {"host": "evil.test"}, "goal=0"),
        (415, {"content-type": "application/json"}, "{}"),
        (415, {"content-type": "multipart/form-data; boundary=x"}, "--x--"),
        (413, {}, "goal=" + "0" * MAX_BODY),
        (400, {}, "&".join(["goal=0"] * 9)),
        (400, {}, "goal=%ff"),
        (303, {"origin": BASE, "sec-fetch-site": "same-origin"}, "goal=0"),
        (303, {}, "goal=0"),
    ],
)
def test_only_our_own_forms_are_taken(
    person: Person, status: int, headers: dict[str, str], body: str
) -> None:
    sent = {"content-type": "application/x-www-form-urlencoded", **headers}
    answer = person.client.post("/new", content=body, headers=sent, follow_redirects=False)
    assert answer.status_code == status
    assert len(person.visits) == (status == 303)


def test_a_form_must_say_what_to_do(person: Person) -> None:
    person.take(0)
    for form in ({}, {"action": ""}, {"action": "search[mug]"}, {"search": "mug"}):
        assert person.client.post(person.path, data=form).status_code == (400 if form else 415)


NUMBERED = "Task not found: tasks are numbered 0 to 1."


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"goal": "2"}, NUMBERED),
        ({"goal": "-1"}, NUMBERED),
        ({"goal": "first"}, NUMBERED),
        ({"goal": "٣"}, NUMBERED),
        ({"split": "no such"}, "Tasks not found."),
    ],
)
def test_an_unknown_goal_is_said(person: Person, form: dict[str, str], said: str) -> None:
    answer = person.client.post("/new", data=form)
    assert answer.status_code == 404
    assert said in answer.text
    assert len(person.visits) == 0


def test_pages_that_are_not_there_are_said(person: Person) -> None:
    _, page, visit, number = person.take(0).path.split("/")
    wrong = [
        f"/{page}/{visit}/1",
        f"/item_page/{visit}/0",
        f"/{page}/x{visit}/0",
        f"/{page}/{visit}/-1",
        "/a/b",
    ]
    for path in wrong:
        answer = person.client.get(path)
        assert answer.status_code == 404, path
        assert "To the start page" in answer.text
    assert person.client.get(f"/{page}/{visit}/{number}").status_code == 200


def test_a_visit_is_forgotten_when_nobody_looks_at_it(hand_made_shop: Any) -> None:
    now = [0.0]
    visits = ShopSessions(idle=60, clock=lambda: now[0])
    person = Person(hand_made_shop("clean"), visits).take(0)
    path = person.path
    now[0] = 59
    assert person.client.get(path).status_code == 200
    now[0] = 118
    assert person.client.get(path).status_code == 200
    now[0] = 179
    answer = person.client.get(path)
    assert answer.status_code == 404
    assert "This session has expired or does not exist." in answer.text
    assert len(visits) == 0


def test_there_are_only_so_many_visits_and_pages(hand_made_shop: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(server_visits, "MAX_STEPS", 3)
    visits = ShopSessions(most=2)
    shop = hand_made_shop("clean")
    first, second = visits.open(shop, 0), visits.open(shop, 1)
    assert visits.get(first.name) is first
    third = visits.open(shop, 0)
    assert [visits.get(visit.name) for visit in (first, second, third)] == [first, None, third]
    for _ in range(5):
        third.search(third.last, "mug")
    assert list(third.steps) == [3, 4, 5]


def test_a_shop_with_splits_hands_out_goals_of_each(shop_folder: str) -> None:
    from rollgym.envs.webshop.shop import open_shop

    shop = open_shop(shop_folder, rules="clean", search="auto", goals="synthetic")
    person = Person(shop)
    start = person.client.get("/").text
    splits = {
        name: list(numbers) for name, numbers in shop.catalog.splits["disjoint"].items() if len(numbers)
    }
    assert start.count("New task from") == len(splits) > 1
    for name, numbers in splits.items():
        assert f"New task from {name} ({len(numbers)})" in start
        for _ in range(3):
            person.keep(person.client.post("/new", data={"split": name}))
            [*_, visit] = person.visits._by_name.values()
            assert visit.number in numbers


def test_original_rules_say_nothing_and_show_the_originals_last_page(hand_made_shop: Any) -> None:
    person = Person(hand_made_shop("original")).take(0).search(" ")
    assert "Not possible" not in person.text
    person.search("blue").press("B0000MUG01").press("Buy Now")
    assert "Your score (min 0.0, max 1.0)" in person.text


def test_a_port_that_is_taken_is_said(shop_folder: str) -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}: Address already in use"):
            serve(shop_folder, port=port)


def test_a_shop_is_served_until_it_is_interrupted(shop_folder: str) -> None:
    code = "import sys; from rollgym.envs.webshop import manage; manage.serve(*sys.argv[1:3], 0, 'clean')"
    child = subprocess.Popen(
        [sys.executable, "-c", code, shop_folder, "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        match = re.search(r"A shop of 14 products is open at (http://127\.0\.0\.1:\d+) ", line)
        assert match, line
        assert "WebShop" in httpx.get(match[1], trust_env=False).text
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, out, err) == (0, "", "")


def test_pictures_are_drawn_and_of_the_products_own_colour(person: Person) -> None:
    person.take(0).search("mug")
    tiles = re.findall(r'<svg class="picture".*?</svg>', person.answer.text)
    assert len(tiles) == 10
    assert len(set(tiles)) > 1
    assert server._style() == person.client.get("/shop.css").content
