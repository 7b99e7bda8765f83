"""A whole evaluation with the chat agent: what its folder holds, and what it must not."""

import json
from pathlib import Path
from typing import Any

import pytest

KEY = "sk-very-secret-0123456789"
LAMP = '''
from rollgym import StepResult, Task, TextEnv

class Lamp(TextEnv):
    """Switch the lamp on."""

    instructions = "Say on."

    def begin(self, task: Task) -> str:
        return "It is dark."

    def respond(self, action: str) -> StepResult:
        lit = action == "on"
        return StepResult("It is light." if lit else "It is dark.", float(lit), terminated=lit, success=lit)
'''


def test_an_evaluation_records_the_settings_and_totals_but_no_key(
    endpoint: Any, answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollgym_command: Any
) -> None:
    (tmp_path / "lamp_env.py").write_text(LAMP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MY_KEY", KEY)

    def echo(headers: dict[str, str]) -> Any:
        return answer(f"My key is {headers['authorization']}.")

    def refuse(headers: dict[str, str]) -> Any:
        return 401, {}, {"error": {"message": f"{headers['authorization']} is not valid"}}

    usage = {"prompt_tokens": 20, "completion_tokens": 5}
    endpoint.answers = [echo, answer("<answer>on</answer>", usage), refuse]
    words = ["eval", "lamp_env:Lamp", "--agent", "chat", "--episodes", 2, "--out", "run", "--json"]
    options = ["model=m", f"base_url={endpoint.url}", "api_key_env=MY_KEY", "price_in=1000"]
    ran = rollgym_command(*words, *(word for option in options for word in ("--agent-arg", option)))

    assert endpoint.headers[0]["authorization"] == f"Bearer {KEY}"
    files = [path for path in Path("run").rglob("*") if path.is_file()]
    texts = [path.read_text() for path in files]
    assert not [path for path, text in zip(files, texts, strict=True) if KEY in text]
    assert KEY not in ran.out + ran.err
    episodes = [json.loads(line) for line in "\n".join(texts).splitlines() if '"episode_id"' in line]
    won, failed = sorted((e for e in episodes if "outcome" in e), key=lambda e: e["outcome"], reverse=True)
    assert (won["outcome"], won["success"], won["length"]) == ("terminated", True, 2)
    assert won["turns"][0]["action"] == "My key is Bearer [api key]."
    assert won["turns"][1]["usage"] == {"prompt_tokens": 20, "completion_tokens": 5, "cost": 0.02}
    assert (failed["outcome"], failed["success"]) == ("engine_error", None)
    assert "answered 401: Bearer [api key] is not valid" in failed["error"]["message"]
    notes = json.loads(ran.out)["agent_notes"]
    assert notes["describe"]["model"] == "m"
    assert notes["totals"]["requests"] == 3
    assert notes["totals"]["format_misses"] == 1


def test_a_key_as_an_option_leaves_no_trace(endpoint: Any, tmp_path: Path, rollgym_command: Any) -> None:
    words = ["eval", "rollgym/FrozenLake-v0", "--agent", "chat", "--out", "run"]
    ran = rollgym_command(*words, "--agent-arg", "model=m", "--agent-arg", f"api_key={KEY}")
    assert ran.code == 2
    assert KEY not in ran.out + ran.err
    assert not Path("run").exists()
