"""An agent of smolagents as the program of a training run, in its own virtual environment.

Set ROLLGYM_TEST_CLIENTS to the environment that tests/serve/clients/make_venv.py makes (`make test-clients`).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scripted_replies import Scripted
from training import Story, fast_versions

from rollgym.chat import ChatTemplate, load_tokenizer
from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolCall
from rollgym.core.types import Episode, EpisodeSpec, Limits, Outcome
from rollgym.pool.inline import InlinePool
from rollgym.sandbox.namespaces import find_bwrap
from rollgym.serve import Program, SubprocessAgent
from rollgym.serve.program import check_program
from rollgym.trainer.builtin_policy.model import make_policy
from rollgym.trainer.data.sequences import TokenSequence, token_episode
from rollgym.trainer.main import run_training

CLIENTS = os.environ.get("ROLLGYM_TEST_CLIENTS", "")
pytestmark = [
    pytest.mark.skipif(
        not CLIENTS, reason="ROLLGYM_TEST_CLIENTS does not name an environment: run `make test-clients`"
    ),
    pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is not installed"),
]
LAKE = "rollgym/FrozenLake-v0"
KWARGS = {"tools": True, "size": 3, "frozen_probability": 0.7}
EXAMPLE = Path(__file__).parents[2] / "examples" / "blackbox_smolagents.py"


@pytest.fixture
def program() -> Program:
    python = str(Path(CLIENTS).absolute() / "bin" / "python")
    made = Program(function=f"{EXAMPLE}:play", python=python, reward="environment")
    try:
        check_program(made)
    except UsageError as error:
        pytest.skip(str(error))
    return made


def moves(seed: int, count: int) -> list[ToolCall]:
    """Random moves towards the goal."""
    rng = random.Random(seed)
    return [
        ToolCall(name="move", arguments={"direction": rng.choice(("right", "down"))}) for _ in range(count)
    ]


def played(
    serving: Callable[..., Any], program: Program, template: str | ChatTemplate, count: int
) -> tuple[list[Episode], Scripted, list[ToolCall]]:
    """Episodes in which the model replies with random moves, played one after the other."""
    calls = moves(0, 30 * count)
    scripted = Scripted(template, [[call] for call in calls])

    async def play() -> list[Episode]:
        options = {"inner": scripted.engine, "tokens": scripted.template, "api_key": "secret"}
        async with serving(**options) as place:
            player = SubprocessAgent(place.server, program, envs=InlinePool())
            try:
                return [await player.play(spec(task)) for task in range(3, 3 + count)]
            finally:
                await player.close()

    return asyncio.run(play()), scripted, calls


def spec(task: int) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=f"e{task}", env_id=LAKE, env_kwargs=KWARGS, task=task, limits=Limits(seconds=240)
    )


def test_the_example_plays_in_a_sandbox_and_every_turn_is_a_sequence(
    serving: Callable[..., Any], program: Program
) -> None:
    (episode,), scripted, calls = played(serving, program, "qwen2.5 tools", 1)
    assert episode.error is None
    assert episode.outcome is Outcome.TERMINATED
    assert episode.length > 1
    assert [tool.name for tool in episode.tools] == ["move", "final_answer"]
    assert [turn.action for turn in episode.turns] == [call.to_json() for call in calls][: episode.length]
    assert [turn.action_ids for turn in episode.turns] == scripted.sampled[: episode.length]
    assert [turn.new_row for turn in episode.turns] == [False] + [True] * (episode.length - 1)
    prompts = [list(request.prompt_ids) for request in scripted.starts]
    rows = [row.ids.tolist() for row in token_episode(episode).sequences]
    assert rows == [[*p, *s] for p, s in zip(prompts, scripted.sampled, strict=True)][: episode.length]


def teach(folder: Path, rows: Sequence[TokenSequence]) -> None:
    """Train the model in a folder on the replies of these rows."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    size = max(len(row.ids) for row in rows)
    ids = torch.zeros((len(rows), size), dtype=torch.long)
    replies = torch.zeros((len(rows), size), dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.from_numpy(row.ids).long()
        replies[number, torch.from_numpy(row.action_positions).long()] = True
    for _ in range(160):
        chosen = torch.randperm(len(rows))[:8]
        # The model is causal, so padding at the end needs no mask.
        wanted = replies[chosen][:, 1:]
        logits = model(input_ids=ids[chosen]).logits[:, :-1][wanted]
        loss = torch.nn.functional.cross_entropy(logits, ids[chosen][:, 1:][wanted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    print(f"{len(rows)} rows of up to {size} tokens, loss {loss.item():.3f}")


@pytest.mark.timeout(1200)
def test_a_step_is_trained_on_episodes_of_the_example(
    serving: Callable[..., Any], program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy has learned to call `move` right or down; where there is a hole, returns differ."""
    fast_versions(monkeypatch)
    words = [
        "Calling tools: [{'id': 'call_0', 'type': 'function', 'function': {'name': 'move', 'arguments': "
    ]
    made = make_policy([(LAKE, KWARGS)], tmp_path / "policy", size="tiny", context=2048, texts=words * 4)
    template = ChatTemplate(load_tokenizer(made.path))
    lessons, *_ = played(serving, program, template, 16)
    teach(made.path, [row for episode in lessons for row in token_episode(episode).sequences[:4]])
    settings = {
        "program.function": program.function, "program.python": program.python,
        "program.reward": "environment", "model.path": made.path, "warm_start": "null",
        # Below 1: a policy that was taught by 16 episodes makes few mistakes in the form of a call.
        "agent.temperature": 0.5,
        "envs.0.kwargs.size": KWARGS["size"],
        "envs.0.kwargs.frozen_probability": KWARGS["frozen_probability"],
        "rollout.groups": 3, "rollout.group_size": 6, "rollout.max_in_flight": 6, "stop.steps": 1,
        "evaluation.on_start": "false", "evaluation.episodes": 2, "tracking.tensorboard": "false",
    }  # fmt: skip
    overrides = [f"{name}={value}" for name, value in settings.items()]
    run_training("frozen-lake-tools", overrides, tmp_path / "run", plain=True)
    story = Story.of(tmp_path / "run")
    (metrics,) = story.metrics
    returns: dict[str, set[float]] = defaultdict(set)
    for one in story.episodes:
        assert one.get("error") is None
        for turn, following in pairwise(one["turns"]):
            # Only calls are rewritten: a malformed one comes back as it was.
            assert following["new_row"] or not (turn["message"] or {}).get("tool_calls")
        returns[one["spec"]["group_id"]].add(sum(turn["reward"] for turn in one["turns"]))
    assert len(story.episodes) == 18
    assert any(len(values) > 1 for values in returns.values()), returns
    assert metrics["train_rollout_logprob_diff_max"] < 1e-4
    before = (made.path / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() != before
