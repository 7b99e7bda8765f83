"""ServiceDesk: the policy, the tools, the scripted user, both forms."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.errors import UsageError
from rollgym.core.registry import make
from rollgym.core.roles import role_trajectory
from rollgym.envs.service_desk.env import ServiceDeskEnv
from rollgym.envs.service_desk.generate import make_case
from rollgym.envs.service_desk.records import Case, Customer, Order, Records, Request, verdict
from rollgym.envs.service_desk.user import DONE, UserScript, describe
from rollgym.evaluation.replay import replay

ENV_ID = "rollgym/ServiceDesk-v0"
ME, OTHER = "ada.berg@post.example", "finn.holm@post.example"


def order(number: str, customer: str = "C1", **more: Any) -> Order:
    fields = {
        "items": ["lamp"],
        "total": 50,
        "status": "processing",
        "days": 1,
        "address": "1 Elm Row, Selby",
    }
    return Order(number=number, customer=customer, **{**fields, **more})


def desk(*requests: Request, orders: Sequence[Order] = (), **kwargs: Any) -> ServiceDeskEnv:
    """A desk with this case, after the user's first message."""
    records = Records(
        customers={
            ME: Customer(number="C1", name="Ada Berg", email=ME),
            OTHER: Customer(number="C2", name="Finn Holm", email=OTHER),
        },
        orders={each.number: each for each in orders or [order("1111")]},
    )
    env = ServiceDeskEnv(**kwargs)
    env.reset(seed=0)
    env._case = Case(
        email=ME, name="Ada Berg", requests=requests, records=records, talkative=True, insists=False
    )
    env._records = Records(
        customers=dict(records.customers), orders={k: replace(v) for k, v in records.orders.items()}
    )
    return env


FOUND, SEEN = ("find_customer", {"email": ME}), ("get_order", {"order": "1111"})
CANCEL = Request(kind="cancel", order="1111")


def call(env: ServiceDeskEnv, name: str, **arguments: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    return env.step(json.dumps({"name": name, "arguments": arguments}))


def known(env: ServiceDeskEnv, *orders: str) -> ServiceDeskEnv:
    """Look the customer and orders up, as the policy requires."""
    call(env, "find_customer", email=ME)
    for number in orders:
        call(env, "get_order", order=number)
    return env


def test_gymnasium_accepts_both_forms() -> None:
    check_env(make(ENV_ID).unwrapped)
    check_env(make(ENV_ID, others=None).unwrapped)


@pytest.mark.parametrize(
    ("kind", "fields", "result"),
    [
        ("cancel", {}, "done"),
        ("cancel", {"status": "shipped"}, "refused"),
        ("cancel", {"customer": "C2"}, "refused"),
        ("address", {}, "done"),
        ("address", {"status": "delivered"}, "refused"),
        ("refund", {}, "refused"),
        ("refund", {"status": "delivered", "days": 30}, "done"),
        ("refund", {"status": "delivered", "days": 31}, "refused"),
        ("refund", {"status": "delivered", "refunded": True}, "refused"),
        ("refund", {"status": "delivered", "total": 200}, "done"),
        ("refund", {"status": "delivered", "total": 201}, "transferred"),
        ("refund", {"status": "delivered", "total": 201, "days": 31}, "refused"),
    ],
)
def test_the_policy(kind: Any, fields: dict[str, Any], result: str) -> None:
    assert verdict(Request(kind=kind, order="1111"), order("1111", **fields), "C1") == result


def test_a_case_handled_by_the_policy_succeeds() -> None:
    env = known(desk(CANCEL), "1111")
    assert call(env, "cancel_order", order="1111")[0] == "Order 1111 is cancelled now."
    observation, reward, over, _, info = call(env, "close_case", results=["done"])
    assert observation == "The case is closed. Everything was handled by the policy."
    assert (reward, over, info["success"]) == (1.0, True, True)


def test_results_of_tools_are_json() -> None:
    env = desk(CANCEL, orders=[order("1111"), order("2222", "C2")])
    observation, *_, info = call(env, "find_customer", email=f" {ME.upper()} ")
    assert json.loads(observation) == {"customer": "C1", "name": "Ada Berg", "orders": ["1111"]}
    assert info["messages"][0]["role"] == "tool"
    assert json.loads(call(env, "get_order", order="1111")[0])["status"] == "processing"
    assert call(env, "get_order", order="9999")[0] == "There is no order 9999."
    assert call(env, "find_customer", email="x@y")[0] == "There is no customer with the email address 'x@y'."


@pytest.mark.parametrize(
    ("requests", "steps", "results", "problem"),
    [
        ([CANCEL], [], ["refused"], "the results are not those"),
        ([CANCEL], [FOUND, SEEN], ["done"], "records are not"),
        ([CANCEL], [SEEN], ["done"], "before the customer was known"),
        ([CANCEL], [("cancel_order", {"order": "1111"})], ["done"], "changed an order before the customer"),
        (
            [CANCEL],
            [FOUND, ("cancel_order", {"order": "1111"})],
            ["done"],
            "changed an order that was not looked up",
        ),
        (
            [CANCEL],
            [("find_customer", {"email": OTHER}), ("get_order", {"order": "1111"})],
            ["done"],
            "before the customer was known",
        ),
        (
            [Request(kind="refund", order="1111")],
            [FOUND, SEEN, ("refund_order", {"order": "1111"})],
            ["done"],
            "order 1111 must not be refunded",
        ),
        ([Request(kind="refund", order="1111")], [], ["refused"], "decided on that was not looked up"),
    ],
)  # fmt: skip
def test_what_breaks_the_policy_fails(
    requests: list[Request], steps: list[tuple[str, dict[str, Any]]], results: list[str], problem: str
) -> None:
    env = desk(*requests)
    for name, arguments in steps:
        assert not call(env, name, **arguments)[2]
    observation, reward, over, _, info = call(env, "close_case", results=results)
    assert problem in observation
    assert (reward, over, info["success"]) == (0.0, True, False)


def test_another_change_fails_too() -> None:
    env = known(desk(CANCEL, orders=[order("1111"), order("2222")]), "1111", "2222")
    call(env, "cancel_order", order="1111")
    call(env, "change_address", order="2222", address="2 Oak Hill, Selby")
    assert "the records are not as the policy requires" in call(env, "close_case", results=["done"])[0]


def test_a_refused_request_must_be_looked_up_and_reported() -> None:
    request = Request(kind="refund", order="2222")
    env = known(desk(request, orders=[order("2222", "C2", status="delivered")]), "2222")
    assert call(env, "close_case", results=["refused"])[4]["success"]


def test_the_address_is_compared_without_extra_space() -> None:
    request = Request(kind="address", order="1111", address="2 Oak Hill, Selby")
    env = known(desk(request), "1111")
    call(env, "change_address", order="1111", address="  2 Oak  Hill, Selby ")
    assert call(env, "close_case", results=["done"])[4]["success"]


def test_text_goes_to_the_user_and_broken_calls_do_not() -> None:
    env = desk(CANCEL)
    observation, *_, info = env.step("What is your email address?")
    assert (observation, info["valid"]) == (f"My email is {ME}.", True)
    for broken in ('{"name": "cancel_order"', "[1]", '{"name": "fly", "arguments": {}}', "```json\n{}```"):
        observation, *_, info = env.step(broken)
        assert not info["valid"]
        assert "tool" in observation
    observation, *_, info = env.step("  ")
    assert (observation, info["valid"]) == ("An empty message was not sent.", False)


def test_the_time_is_limited() -> None:
    env = desk(CANCEL, max_turns=2)
    assert env.step("Hello.")[4]["turns_left"] == 1
    observation, reward, terminated, truncated, info = env.step("Hello.")
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)
    assert "The time is up" in observation


def test_the_agent_does_not_see_what_the_user_wants() -> None:
    env = make(ENV_ID)
    observation, info = env.reset(seed=0)
    assert "case" not in info
    assert "case" not in env.step("Hello.")[4]
    both = make(ENV_ID, others=None)
    observation, info = both.reset(seed=0)
    assert info["role"] == "user"
    assert info["case"]["email"] in observation
    *_, info = both.step("Hello, I need help.")
    assert info["role"] == "agent"
    assert "case" not in info


# --- the scripted user


def user(*requests: Request, insists: bool = False) -> tuple[UserScript, dict[str, Any]]:
    case = Case(
        email=ME, name="Ada Berg", requests=requests, records=Records(), talkative=False, insists=insists
    )
    script, info = UserScript(np.random.default_rng(0)), {"case": describe(case)}
    script.reply("", info)
    return script, info


def test_the_user_answers_questions_and_only_these() -> None:
    script, info = user(Request(kind="address", order="1111", address="2 Oak Hill, Selby"))
    assert script.reply("May I have your e-mail address?", info) == f"My email is {ME}."
    assert script.reply("Please tell me the number of the order.", info) == "It is order 1111."
    answer = script.reply("Which order, and what is the new address?", info)
    assert answer == "It is order 1111. The new address is: 2 Oak Hill, Selby."
    assert "1111" in script.reply("How can I help you?", info)
    assert script.reply("Let me check.", info) == "All right."
    assert script.reply("I changed order 1111. Anything else?", info) == DONE


def test_the_user_states_all_at_once_if_talkative() -> None:
    case = replace(make_case(np.random.default_rng(0), 1))
    opening = UserScript(np.random.default_rng(0)).reply("", {"case": describe(case)})
    assert case.email in opening
    assert case.requests[0].order in opening


def test_the_user_insists_once_and_goes_on() -> None:
    script, info = user(CANCEL, Request(kind="refund", order="2222"), insists=True)
    assert "exception" in script.reply("I am sorry, I cannot do that.", info)
    second = script.reply("I am sorry, I cannot do that.", info)
    assert second.startswith("I have another request.")
    assert script.reply("It is done.", info) == DONE
    assert script.reply("Goodbye.", info) == DONE


# --- generated cases and episodes


def test_cases_have_all_results_and_levels_differ() -> None:
    for level, most in ((1, 1), (2, 1), (3, 3)):
        cases = [make_case(np.random.default_rng(n), level) for n in range(300)]
        results = [result for case in cases for result in case.results]
        assert {results.count(kind) > 20 for kind in ("done", "refused", "transferred")} == {True}
        assert 0.3 < results.count("done") / len(results) < 0.7
        assert max(len(case.requests) for case in cases) == most
        assert all(len({r.order for r in case.requests}) == len(case.requests) for case in cases)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_expert_succeeds_and_random_actions_do_not(level: int) -> None:
    kwargs = {"level": level}
    assert rollgym.evaluate(ENV_ID, "expert", episodes=100, env_kwargs=kwargs).summary["success_rate"] == 1.0
    assert rollgym.evaluate(ENV_ID, "random", episodes=100, env_kwargs=kwargs).summary["success_rate"] <= 0.02


def test_another_agent_can_be_the_user_and_episodes_replay_exactly(tmp_path: Any) -> None:
    results = rollgym.evaluate(
        ENV_ID, "expert", episodes=30, roles={"user": "expert"}, env_kwargs={"level": 3}, out=tmp_path / "r"
    )
    assert results.summary["success_rate"] == 1.0
    assert 0.0 < results.summary["roles"]["user"]["mean_return"] < 1.0
    episodes = list(results.episodes)
    assert [done.difference for done in replay(episodes)] == [None] * 30
    for episode in episodes:
        agent, customer = (role_trajectory(episode, role) for role in ("agent", "user"))
        assert {spec.name for spec in agent.tools} >= {"find_customer", "close_case"}
        assert customer.tools == ()
        assert agent.total_reward == 1.0
        assert all(turn.action[0] not in "{[" for turn in customer.turns)


def test_scripted_episodes_replay_exactly() -> None:
    episodes = list(rollgym.evaluate(ENV_ID, "random", episodes=30).episodes)
    assert [done.difference for done in replay(episodes)] == [None] * 30


@pytest.mark.parametrize("kwargs", [{"level": 0}, {"level": 4}, {"max_turns": 0}, {"others": "expert"}])
def test_bad_options_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServiceDeskEnv(**kwargs)
