"""Evaluation can be called from plain code, under a running event loop and from a thread."""

import asyncio
import threading
from pathlib import Path
from typing import Any

from rollgym.evaluation.runner import Request, evaluate

REQUEST = Request(env_id="faulty:Counting", agent="faulty:Yes", episodes=3)


def test_under_a_running_event_loop(tmp_path: Path) -> None:
    async def cell() -> dict[str, Any]:
        return evaluate(REQUEST, tmp_path / "r")

    assert asyncio.run(cell())["success_rate"] == 1.0


def test_in_a_thread(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(evaluate(REQUEST, tmp_path / "r")))
    thread.start()
    thread.join()
    assert found[0]["success_rate"] == 1.0


def test_an_error_under_a_running_loop_is_raised_to_the_caller(tmp_path: Path) -> None:
    broken = Request(env_id="faulty:RaisesInReset", agent="faulty:Yes", episodes=20)

    async def cell() -> str:
        try:
            evaluate(broken, tmp_path / "r")
        except Exception as error:
            return str(error)
        return ""

    assert "the shop is closed" in asyncio.run(cell())
