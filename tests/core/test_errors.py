"""Errors are sentences for people, in one tree, and survive the way between processes."""

import pickle

import pytest

from rollgym.cluster.rpc import error_from_dict, error_to_dict
from rollgym.core import errors
from rollgym.core.errors import (
    AgentError,
    EngineLost,
    EnvError,
    MissingExtra,
    ResultsError,
    RollgymError,
    RunError,
    UnknownName,
    UsageError,
    WorkerLost,
    boundary,
    nearest,
    one_line,
)
from rollgym.core.extras import install_command
from rollgym.core.failures import failure_of, outcome_of
from rollgym.core.types import Failure, Outcome
from rollgym.pool.base import LeaseLost


def test_a_wrong_call_exits_with_2_and_failed_work_with_1():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not RollgymError]
    kinds = [kind for kind in kinds if issubclass(kind, RollgymError)]
    assert {kind.__name__ for kind in kinds if kind.exit_code == 2} == {
        "UsageError",
        "UnknownName",
        "MissingExtra",
    }
    assert {kind.__name__ for kind in kinds if kind.exit_code == 1} == {
        "RunError",
        "EnvError",
        "WorkerLost",
        "AgentError",
        "AgentRaised",
        "ContextFull",
        "EngineLost",
        "RewardError",
        "ResultsError",
    }


def test_every_error_is_a_usage_error_or_a_run_error():
    assert issubclass(UnknownName, UsageError)
    assert issubclass(MissingExtra, UsageError)
    assert all(issubclass(kind, RunError) for kind in (EnvError, WorkerLost, AgentError, ResultsError))
    assert not issubclass(RunError, UsageError)


def test_an_unknown_name_suggests_near_ones_and_gives_the_hint():
    error = UnknownName("split", "tset", ["train", "test"], "Splits: train, test.")
    assert str(error) == ("There is no split called 'tset'. Did you mean test? Splits: train, test.")
    assert list(error.suggestions) == ["test"]


def test_an_unknown_name_without_neighbours_or_hint_is_one_sentence():
    error = UnknownName("agent", "zzz", ["random"])
    assert str(error) == "There is no agent called 'zzz'."
    assert list(error.suggestions) == []


def test_a_missing_extra_says_the_pip_command():
    told = str(MissingExtra("web/Shop-v0", "browser"))
    assert told == f"web/Shop-v0 needs the optional dependencies [browser]: {install_command('browser')}"


def test_nearest_is_blind_to_case_and_namespace():
    known = ["rollgym/Sokoban-v0", "rollgym/Wordle-v0", "Taxi-v3"]
    assert nearest("SOKOBAN", known) == ["rollgym/Sokoban-v0"]
    assert nearest("rollgym/sokobna-v0", known)[0] == "rollgym/Sokoban-v0"
    assert nearest("taxi-v2", known) == ["Taxi-v3"]
    assert nearest("quite different", known) == []


def test_nearest_gives_at_most_three_different_names_best_first():
    found = nearest("abcd", ["abcx", "abcd1", "abcy", "abcz", "abc"])
    assert found[0] == "abcd1"
    assert len(found) == len(set(found)) == 3


def test_nearest_takes_names_that_can_be_read_only_once():
    assert nearest("tset", iter(["test"])) == ["test"]


def test_one_line_joins_lines_and_copes_with_no_message():
    assert one_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert one_line(KeyError()) == "KeyError"


def test_a_boundary_names_a_foreign_error_once_and_keeps_its_cause():
    with pytest.raises(EnvError) as caught, boundary(EnvError, "a/B-v0 raised in step()"):
        raise ZeroDivisionError("no")
    assert str(caught.value) == "a/B-v0 raised in step(): ZeroDivisionError: no"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_boundary_lets_our_own_errors_and_interrupts_through():
    with pytest.raises(WorkerLost, match="^gone$"), boundary(EnvError, "here"):
        raise WorkerLost("gone")
    with pytest.raises(KeyboardInterrupt), boundary(EnvError, "here"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "error",
    [
        UnknownName("split", "tset", ["test"], "A hint."),
        MissingExtra("this", "train"),
        UsageError("wrong"),
        EnvError("bad"),
    ],
)
def test_errors_survive_pickling_with_what_they_say(error):
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


@pytest.mark.parametrize("kind", [UnknownName, MissingExtra])
def test_errors_can_be_rebuilt_from_their_message(kind):
    assert str(kind("The whole message.")) == "The whole message."


def test_a_failure_names_the_first_error_and_keeps_the_traceback():
    with pytest.raises(EnvError) as caught, boundary(EnvError, "step"):
        raise LookupError("lost \ud800")
    failure = failure_of(caught.value)
    assert failure.type == "LookupError"
    assert failure.message.startswith("step: LookupError: lost")
    assert "raise LookupError" in failure.traceback
    failure.message.encode()


def test_a_failure_from_another_process_is_kept_as_it_was():
    error = EnvError("here")
    error.failure = Failure(type="KeyError", message="there", traceback="far away")
    assert failure_of(error) is error.failure


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (WorkerLost("x"), Outcome.WORKER_LOST),
        (AgentError("x"), Outcome.ENGINE_ERROR),
        (EnvError("x"), Outcome.ENV_ERROR),
        (UsageError("x"), Outcome.ENV_ERROR),
        (UnknownName("split", "x", []), Outcome.ENV_ERROR),
    ],
)
def test_each_error_has_its_outcome(error, outcome):
    assert outcome_of(error) is outcome


@pytest.mark.parametrize(
    ("error", "infrastructure"),
    [
        (EngineLost("x"), True),
        (WorkerLost("x"), True),
        (LeaseLost("its node died"), True),
        (LeaseLost("a sibling hung", reason="deadline", culprits=["b"]), True),
        (LeaseLost("it hung", reason="deadline", guilty=True, culprits=["a"]), False),
        (LeaseLost("it crashed", guilty=True, culprits=["a"]), False),
        (LeaseLost("one of two crashed", guilty=True, culprits=["a", "b"]), True),
        (AgentError("x"), False),
        (EnvError("x"), False),
    ],
)
def test_infrastructure_failures_are_distinguished_from_those_of_an_episode(error, infrastructure):
    assert failure_of(error).infrastructure is infrastructure
    assert failure_of(error_from_dict(error_to_dict(error))).infrastructure is infrastructure, (
        "also from another process"
    )


def test_the_tree_in_the_module_docstring_names_every_error():
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, RollgymError):
            assert kind.__name__ in (errors.__doc__ or "")
