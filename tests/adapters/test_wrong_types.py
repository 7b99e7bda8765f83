"""Libraries and servers that answer with wrong types: that episode is `env_error`, the others are kept."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rollgym
from rollgym.core.errors import EnvError

Play = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Play three episodes; return their outcomes and the messages of their errors."""

    def run(env: str, action: str = "x", **options: Any) -> list[tuple[str, str]]:
        results = rollgym.evaluate(
            env,
            lambda observation, info: action,
            episodes=3,
            concurrency=1,
            env_kwargs=options,
            out=tmp_path / "run",
        )
        kept = rollgym.load_run(tmp_path / "run").episodes
        return [(str(e.outcome), "" if e.error is None else e.error.message) for e in kept] + [
            ("scored", f"{results.summary['success_rate']:g}")
        ]

    return run


def assert_only_the_second_failed(episodes: list[tuple[str, str]], sentence: str) -> None:
    assert [outcome for outcome, _ in episodes] == ["terminated", "env_error", "terminated", "scored"]
    assert sentence in episodes[1][1]
    assert episodes[-1] == ("scored", "0.666667"), "it counts as a failure"


class SecondIsWrong:
    """Gives a right answer for each task but the second, also where that one is tried again."""

    def __init__(self, right: Any, wrong: Any) -> None:
        self._right, self._wrong, self._seen = right, wrong, list[Any]()

    def answer(self, task: Any) -> Any:
        if task not in self._seen:
            self._seen.append(task)
        return self._wrong if self._seen.index(task) == 1 else self._right


@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        (None, "reasoning_gym:leg_counting returned None as reward; it must be a number"),
        ("high", "returned 'high' as reward"),
        (float("nan"), "returned the reward nan; it must be finite"),
        (1.5, "scored an answer with 1.5, outside 0 to 1"),
    ],
)
def test_a_score_of_the_wrong_type_is_no_wrong_answer(
    play: Play, monkeypatch: pytest.MonkeyPatch, score: Any, sentence: str
) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra [adapters] is not installed: no reasoning-gym")
    from reasoning_gym.factory import DATASETS

    scores = SecondIsWrong(1.0, score)
    monkeypatch.setattr(
        DATASETS["leg_counting"][0],
        "score_answer",
        lambda self, answer, entry: scores.answer(entry["question"]),
    )
    assert_only_the_second_failed(play("reasoning_gym:leg_counting"), sentence)


class FakeGem:
    """An environment with GEM's interface that ends after one action."""

    frames: SecondIsWrong

    def __init__(self) -> None:
        self.seed = 0

    @property
    def unwrapped(self) -> "FakeGem":
        return self

    def reset(self, seed: int) -> tuple[Any, Any]:
        self.seed = seed
        return f"Say {seed}.", {"suffix": "Now."}

    def step(self, action: str) -> Any:
        return self.frames.answer(self.seed)


@pytest.fixture
def gem(monkeypatch: pytest.MonkeyPatch) -> None:
    """GEM's modules with one environment, `fake`."""
    library, envs, registry = (ModuleType(name) for name in ("gem", "gem.envs", "gem.envs.registration"))
    vars(library)["make"] = lambda name: FakeGem()
    vars(registry)["ENV_REGISTRY"] = {"fake": FakeGem}
    for module in (library, envs, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for place in ("rollgym.core.env_prefixes.version", "rollgym.adapters.gem.version"):
        monkeypatch.setattr(place, lambda package: "0.1.0")


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (None, "gem:fake returned from step() a NoneType; it must be a tuple of 5"),
        (("Done.", 1.0, True, {}), "a tuple of 4"),
        (("Done.", "many", True, False, {}), "returned 'many' as reward"),
        (("Done.", 1.0, "no", False, {}), "returned a str as end flag"),
        (("Done.", 1.0, True, False, None), "returned a NoneType as info"),
        ((["Done."], 1.0, True, False, {}), "returned a list as observation; it must be a str"),
    ],
)
def test_a_frame_of_gem_with_a_wrong_type_is_named(
    play: Play, gem: None, monkeypatch: pytest.MonkeyPatch, frame: Any, sentence: str
) -> None:
    frames = SecondIsWrong(("Done.", 1.0, True, False, {}), frame)
    monkeypatch.setattr(FakeGem, "frames", frames, raising=False)
    assert_only_the_second_failed(play("gem:fake"), sentence)


@pytest.mark.parametrize("start", ["Say 1.", ("Say 1.",), (1, {}), ("Say 1.", None)])
def test_a_start_of_gem_with_a_wrong_type_makes_no_environment(
    gem: None, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    monkeypatch.setattr(FakeGem, "reset", lambda self, seed: start)
    with pytest.raises(EnvError, match="gem:fake returned "):
        rollgym.make("gem:fake")


def observation(**changes: Any) -> dict[str, Any]:
    data = {"observation": {"text": "Done."}, "reward": 1.0, "done": True, **changes}
    return {"type": "observation", "data": data}


@contextmanager
def openenv_server(answers: SecondIsWrong) -> Iterator[str]:
    """A server of OpenEnv's protocol whose answers to steps are made up."""
    from websockets.sync.server import serve

    pages = {
        "/schema": {"action": {"properties": {"text": {"type": "string"}}}},
        "/metadata": {"name": "fake", "version": "1", "description": "Say anything."},
    }

    def page(connection: Any, request: Any) -> Any:
        found = pages.get(request.path)
        return None if found is None else connection.respond(HTTPStatus.OK, json.dumps(found))

    def talk(connection: Any) -> None:
        seed = None
        for text in connection:
            message = json.loads(text)
            if message["type"] == "reset":
                seed = message["data"]["seed"]
                connection.send(json.dumps(observation(reward=None, done=False)))
            elif message["type"] == "step":
                answer = answers.answer(seed)
                connection.send(answer if isinstance(answer, str) else json.dumps(answer))
            else:
                return

    with serve(talk, "127.0.0.1", 0, process_request=page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("{", "sent no JSON"),
        ([], "answered a step without an observation"),
        ({"type": "observation", "data": [1]}, "answered a step without an observation"),
        ({"type": "error", "data": "broken"}, "refused a step: 'broken'"),
        (observation(observation="Done."), "sent an observation of type str, not an object"),
        (observation(reward="many"), "sent reward 'many' and done True: expected a number and a bool"),
        (observation(reward=float("nan")), "returned the reward nan; it must be finite"),
        (observation(done=1), "sent reward 1.0 and done 1"),
    ],
)
def test_a_message_of_an_openenv_server_with_a_wrong_type_is_named(
    play: Play, answer: Any, sentence: str
) -> None:
    pytest.importorskip("websockets", reason="the extra [openenv] is not installed: no websockets")
    with openenv_server(SecondIsWrong(observation(), answer)) as address:
        found = play(f"openenv:{address}", success_reward=1, disjoint=False)
    assert_only_the_second_failed(found, sentence)
