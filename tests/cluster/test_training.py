"""Training runs on Ray: the same as in one process, under every layout, and after a lost component."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from scoring_server import scoring_server
from training import Story, fast_versions, write
from transformers import AutoModelForCausalLM

from rollgym.cluster.engine import RemoteEngine
from rollgym.config.loader import load
from rollgym.engines.embedded.model import read_module
from rollgym.trainer import loop
from rollgym.trainer.builtin_policy.model import make_policy
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.loop import train
from rollgym.trainer.main import open_components
from rollgym.trainer.runtime import Components
from rollgym.trainer.tracking.console import Console
from rollgym.trainer.train_run import TrainRun

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def run_with(
    folder: Path,
    disturb: Callable[[Components, TrainRun], Any] | None = None,
    *,
    resume: bool = False,
    **changes: Any,
) -> Path:
    """Run a small config, with ``disturb`` running beside it."""
    folder.mkdir(exist_ok=resume)
    config = load(TrainConfig, write(folder, **changes), ["name=small"])
    run = TrainRun(config, folder / "run", Console(plain=True), resume=resume)

    async def main() -> None:
        async with open_components(config, run.folder) as components:
            tasks = [asyncio.create_task(train(components, run))]
            if disturb is not None:
                tasks.append(asyncio.create_task(disturb(components, run)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task.exception() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for error in filter(None, failed):
                raise error

    try:
        asyncio.run(main())
    finally:
        run.close()
    return run.folder


def test_a_run_on_ray_is_the_run_in_one_process_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    here = Story.of(run_with(tmp_path / "here"))
    there = Story.of(run_with(tmp_path / "there", runtime="ray", ray={"num_gpus": 1}))
    assert there.weights == here.weights
    assert there.evaluations == here.evaluations
    assert [one["turns"] for one in there.episodes] == [one["turns"] for one in here.episodes]


def test_a_teacher_on_a_server_teaches_on_ray_what_it_teaches_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    teacher = run_with(tmp_path / "teacher") / "final"
    with scoring_server(read_module(teacher)) as server:
        changes = {"distill": {"teachers": [{"path": str(teacher), "url": server.url}]}, "seed": 1}
        here = Story.of(run_with(tmp_path / "here", **changes))
        there = Story.of(run_with(tmp_path / "there", **changes, runtime="ray", ray={"num_gpus": 1}))
    assert there.weights == here.weights
    assert [line["teacher_kl"] for line in there.metrics] == [line["teacher_kl"] for line in here.metrics]


@pytest.mark.parametrize(
    "devices",
    [
        {"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1]"},
        {"layout": "overlapping", "actor_train": "gpu[0]", "actor_infer": "gpu[0-1]"},
    ],
    ids=["split", "overlapping"],
)
def test_other_layouts_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: dict[str, str]
) -> None:
    fast_versions(monkeypatch)
    here = Story.of(run_with(tmp_path / "here"))
    there = run_with(tmp_path / "there", runtime="ray", ray={"num_gpus": 2}, devices=devices)
    assert Story.of(there).weights == here.weights
    plan = json.loads((there / "plan.json").read_text())
    assert (plan["runtime"], plan["layout"]) == ("ray", devices["layout"])
    assert (plan["strategy"], plan["ranks"]) == ("single", 1)
    assert plan["engines"] == (2 if devices["layout"] == "overlapping" else 1)
    assert {role: one["devices"] for role, one in plan["roles"].items()} == {
        "actor_train": devices["actor_train"],
        "actor_infer": devices["actor_infer"],
    }


def policy_of_even_vocabulary(folder: Path) -> Path:
    """A built-in policy whose heads, key-value heads and tokens two ranks can share: one token is added."""
    make_policy(["lessons:Yes"], folder, size="small", seed=0, context=128)
    made: Any = AutoModelForCausalLM
    model = made.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + model.config.vocab_size % 2, mean_resizing=False)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"shard": 2}], ids=["tensor", "shard"])
def test_a_mesh_of_two_ranks_learns_what_one_process_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, int]
) -> None:
    """Up to rounding: sums over ranks have another order."""
    fast_versions(monkeypatch)
    short: dict[str, Any] = {
        "model": {"path": str(policy_of_even_vocabulary(tmp_path / "model"))},
        "stop": {"steps": 2},
        "evaluation": {"every": 2, "on_start": False},
    }
    here = run_with(tmp_path / "here", **short)
    there = run_with(
        tmp_path / "there",
        runtime="ray",
        ray={"num_gpus": 3},
        devices={"layout": "split", "actor_train": "gpu[0-1]", "actor_infer": "gpu[2]"},
        learner={"strategy": "mesh", "parallel": parallel},
        **short,
    )
    plan = json.loads((there / "plan.json").read_text())
    assert (plan["strategy"], plan["ranks"]) == ("mesh", 2)
    local, remote = (load_file(folder / "final" / "model.safetensors") for folder in (here, there))
    assert local.keys() == remote.keys()
    assert max(float(abs(local[name] - remote[name]).max()) for name in local) < 1e-4
    assert Story.of(there).episodes[0]["turns"] == Story.of(here).episodes[0]["turns"]


@pytest.mark.parametrize("route", ["auto", "disk"])
def test_deltas_to_an_engine_in_bfloat16_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    fast_versions(monkeypatch)
    here = Story.of(run_with(tmp_path / "here", engine={"dtype": "bfloat16"}))
    engine = {"dtype": "bfloat16", "weight_delta": True, "full_update_every": 3, "weight_route": route}
    there = run_with(tmp_path / "there", runtime="ray", ray={"num_gpus": 1}, engine=engine)
    assert Story.of(there).weights == here.weights
    assert json.loads((there / "plan.json").read_text())["weight_sync"] == {
        "route": "object_store" if route == "auto" else "disk",
        "dtype": "bfloat16",
        "delta": True,
        "full_update_every": 3,
    }
    metrics = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()]
    deltas = [one for one in metrics if "weight_sync_changed_frac" in one]
    full = [one for one in metrics if "weight_sync_changed_frac" not in one]
    assert deltas
    assert full
    assert all(0 <= one["weight_sync_changed_frac"] <= 1 for one in deltas)
    assert {one["weight_sync_bytes"] for one in full} == {full[0]["weight_sync_bytes"]}
    assert max(one["weight_sync_bytes"] for one in deltas) <= full[0]["weight_sync_bytes"]
    assert not (there / ".weights").exists()


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offloading_on_a_shared_device_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    fast_versions(monkeypatch)
    here = Story.of(run_with(tmp_path / "here"))
    seen: list[dict[str, float]] = []

    async def note(components: Components, run: TrainRun) -> None:
        while run.state.step < 3:
            await asyncio.sleep(0.01)
            seen.append(dict(components.colocation_metrics))

    devices = {"layout": "colocated", "offload": offload}
    there = run_with(tmp_path / "there", note, runtime="ray", ray={"num_gpus": 1}, devices=devices)
    assert Story.of(there).weights == here.weights
    assert max(one.get("colocation_offloaded_bytes", 0) for one in seen) > 0
    assert max(one.get("colocation_released_bytes", 0) for one in seen) > 0


def test_reference_and_critic_on_their_own_devices_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    more: dict[str, Any] = {
        "estimator": "gae",
        "learner": {"critic": "separate", "critic_rate": 0.001},
        "loss": {"name": "ppo", "kl_coef": 0.01},
        "stop": {"steps": 3},
    }
    here = Story.of(run_with(tmp_path / "here", **more))
    pins = {"actor_train": "gpu[0]", "actor_infer": "gpu[1]", "reference": "gpu[1]", "critic": "gpu[2]"}
    devices = {"layout": "split", **pins}
    there = run_with(tmp_path / "there", runtime="ray", ray={"num_gpus": 3}, devices=devices, **more)
    assert Story.of(there).weights == here.weights
    assert Story.of(there).evaluations == here.evaluations
    assert (there / "checkpoints" / "step-00000002" / "critic").is_dir()


WARM = {"agent": "lessons:Teacher", "episodes": 6, "epochs": 3, "batch": 3, "learning_rate": 0.005}


def test_with_lora_a_warm_start_is_kept_when_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds the small matrices alone: what was imitated must be in them."""
    fast_versions(monkeypatch)
    more: dict[str, Any] = {
        "learner": {"lora": {"rank": 4}},
        "loss": {"name": "grpo", "kl_coef": 0.05},
        "agent": {"temperature": 0.8},
        "warm_start": WARM,
    }
    here = Story.of(run_with(tmp_path / "here", stop={"steps": 3}, **more))
    pins = {"actor_train": "gpu[0]", "actor_infer": "gpu[1]"}
    there: dict[str, Any] = {
        "runtime": "ray",
        "ray": {"num_gpus": 2},
        "devices": {"layout": "split", **pins},
        **more,
    }
    run_with(tmp_path / "there", stop={"steps": 1}, **there)
    folder = run_with(tmp_path / "there", stop={"steps": 3}, resume=True, **there)
    assert Story.of(folder).weights == here.weights
    assert Story.of(folder).episodes == here.episodes


def test_a_separate_critic_starts_from_the_imitated_policy_on_any_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    more: dict[str, Any] = {
        "estimator": "gae",
        "learner": {"critic": "separate", "critic_rate": 0.001, "betas": [0.8, 0.9], "clip_norm": 0.3},
        "loss": {"name": "ppo", "kl_coef": 0.01},
        "agent": {"temperature": 0.8},
        "warm_start": WARM,
        "stop": {"steps": 2},
    }
    here = Story.of(run_with(tmp_path / "here", **more))
    apart = {"actor_train": "gpu[0]", "actor_infer": "gpu[1]", "reference": "gpu[1]", "critic": "gpu[2]"}
    together = {"actor_train": "gpu[0]", "actor_infer": "gpu[1]", "reference": "gpu[0]", "critic": "gpu[0]"}
    for name, pins in (("apart", apart), ("together", together)):
        devices = {"layout": "split", **pins}
        there = run_with(tmp_path / name, runtime="ray", ray={"num_gpus": 3}, devices=devices, **more)
        assert Story.of(there).weights == here.weights
        assert Story.of(there).metrics == here.metrics


def test_a_killed_learner_resumes_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    here = Story.of(run_with(tmp_path / "here", stop={"steps": 6}))

    async def kill(components: Components, run: TrainRun) -> None:
        while run.state.step < 3:
            await asyncio.sleep(0.01)
        remote: Any = components.learner
        ray.kill(remote.policy.workers.actors[0])

    there = run_with(tmp_path / "there", kill, runtime="ray", ray={"num_gpus": 1}, stop={"steps": 6})
    assert Story.of(there).weights == here.weights, "as if nothing had happened"


@pytest.mark.parametrize("part", ["learner", "engine", "environments"])
def test_a_run_continues_when_a_component_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], part: str
) -> None:
    """A stopped process is alive but does not respond."""
    fast_versions(monkeypatch)
    here = Story.of(run_with(tmp_path / "here", stop={"steps": 6}))

    async def stop(components: Components, run: TrainRun) -> None:
        while run.state.step < 3:
            await asyncio.sleep(0.01)
        remote: Any = components
        if part == "environments":
            (host,) = remote.pool._actors.values()
            actor = host.actor
        else:
            actor = (
                remote.learner.policy.workers.actors[0]
                if part == "learner"
                else remote.engine.engines[0]._client.actor
            )
        os.kill(await actor.__ray_call__.remote(lambda _: __import__("os").getpid()), signal.SIGSTOP)

    there = run_with(
        tmp_path / "there",
        stop,
        runtime="ray",
        ray={"num_gpus": 1, "heartbeat_timeout": 8},
        stop={"steps": 6},
    )
    assert Story.of(there).weights == here.weights, "as if nothing had happened"
    assert {line["episodes_missing"] for line in Story.of(there).metrics} == {0.0}
    assert "no heartbeat for 8 s, killed" in capfd.readouterr().err


@dataclass
class Held:
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    let: asyncio.Event = field(default_factory=asyncio.Event)


def hold_starts_elsewhere(patch: pytest.MonkeyPatch) -> Held:
    """Engines that start on a node that came begin, and are not done before they are let."""
    held, begin = Held(), RemoteEngine._start_engine

    async def slowly(engine: RemoteEngine, actor: Any) -> tuple[int, int]:
        if "node_id" in vars(engine._actor_options["scheduling_strategy"]):
            held.begun.set()
            await held.let.wait()
        return await begin(engine, actor)

    patch.setattr(RemoteEngine, "_start_engine", slowly)
    return held


def test_a_run_that_loses_a_node_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes_of: Callable[..., Any]
) -> None:
    """Three nodes; the one with an engine and environments goes, and another comes, which the engine takes.

    No episode is lost or trained on twice.
    """
    fast_versions(monkeypatch)
    nodes = nodes_of(3, num_cpus=4, num_gpus=1)
    back: list[int] = []
    monkeypatch.setattr(loop, "reason_to_stop", lambda *_: "enough" if back else None)

    async def lose(components: Components, run: TrainRun) -> None:
        engine: Any = components.engine
        while run.state.step < 3:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(nodes.lose)
        while not engine.lost:
            await asyncio.sleep(0.01)
        step = run.state.step
        while run.state.step < step + 2:
            await asyncio.sleep(0.01)
        held = hold_starts_elsewhere(monkeypatch)
        nodes.add()
        await held.begun.wait()
        step = run.state.step
        while run.state.step < step + 2:  # steps go on while the engine starts
            await asyncio.sleep(0.01)
        held.let.set()
        while engine.lost:
            await asyncio.sleep(0.01)
        back.append(run.state.step)

    folder = run_with(
        tmp_path / "there",
        lose,
        runtime="ray",
        ray={"address": nodes.address},
        rollout={"groups": 4, "group_size": 4, "workers": 0},
        devices={"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1-2]"},
        evaluation={"every": 0, "episodes": 4},
    )
    story = Story.of(folder)
    names = [one["spec"]["episode_id"] for one in story.episodes]
    steps = len(story.metrics)
    assert steps > back[0] - 1 >= 5
    assert len(names) == steps * 4 * 4
    assert len(set(names)) == len(names)
    groups = [one["spec"]["group_id"] for one in story.episodes]
    assert all(groups.count(name) == 4 for name in set(groups))
    assert [line["step"] for line in story.metrics] == list(range(1, steps + 1))


@pytest.mark.slow
def test_the_only_engine_moves_to_a_free_node_within_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes_of: Callable[..., Any]
) -> None:
    """Its node goes twice: it moves to a node that was free all the time, then to one that joins."""
    fast_versions(monkeypatch)
    nodes = nodes_of(3, num_cpus=4, num_gpus=1)
    homes: list[str] = []
    monkeypatch.setattr(loop, "reason_to_stop", lambda *_: "enough" if len(homes) == 3 else None)

    def home(components: Components) -> str:
        runtime: Any = components.runtime
        return str(runtime._placed.node_of(runtime._engines[0].actor_options))

    def lose(name: str) -> None:
        nodes.lose([str(node.node_id) for node in nodes.others].index(name))

    async def lose_twice(components: Components, run: TrainRun) -> None:
        engine: Any = components.engine
        for joins in (False, True):
            step = run.state.step
            while run.state.step < step + 2:
                await asyncio.sleep(0.01)
            homes.append(home(components))
            await asyncio.to_thread(lose, homes[-1])
            while not engine.lost:
                await asyncio.sleep(0.01)
            if joins:
                nodes.add()
            while engine.lost or home(components) == homes[-1]:
                await asyncio.sleep(0.01)
        homes.append(home(components))

    folder = run_with(
        tmp_path / "there",
        lose_twice,
        runtime="ray",
        ray={"address": nodes.address},
        rollout={"groups": 4, "group_size": 4, "workers": 0},
        devices={"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1]"},
        evaluation={"every": 0, "episodes": 4},
    )
    story = Story.of(folder)
    assert len(set(homes)) == 3
    assert len({one["spec"]["episode_id"] for one in story.episodes}) == len(story.metrics) * 4 * 4


def test_a_run_moves_to_the_remaining_nodes_and_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    nodes_of: Callable[..., Any],
) -> None:
    """The node with a rank of the learner goes: one rank goes on alone, and two once a node has come."""
    fast_versions(monkeypatch)
    nodes = nodes_of(2, num_cpus=4, num_gpus=1)
    worlds: list[int] = []
    monkeypatch.setattr(loop, "reason_to_stop", lambda *_: "enough" if len(worlds) == 3 else None)

    async def lose(components: Components, run: TrainRun) -> None:
        remote: Any = components.learner.policy.workers
        while run.state.step < 3:
            await asyncio.sleep(0.01)
        worlds.append(remote.world)
        await asyncio.to_thread(nodes.lose)
        while remote.world != 1 or run.state.step < 5:
            await asyncio.sleep(0.01)
        worlds.append(remote.world)
        nodes.add()
        while remote.world != 2:
            await asyncio.sleep(0.01)
        worlds.append(remote.world)

    folder = run_with(
        tmp_path / "there",
        lose,
        runtime="ray",
        ray={"address": nodes.address},
        rollout={"groups": 2, "group_size": 4, "workers": 0},
        devices={"layout": "colocated"},
        evaluation={"every": 0, "episodes": 4},
    )
    assert worlds == [2, 1, 2]
    plans = [line for line in capfd.readouterr().err.splitlines() if line.startswith("plan: ray, colocated")]
    assert ["on 2 ranks" in plan for plan in plans] == [True, False, True], "each plan is shown once"
    story = Story.of(folder)
    names = [one["spec"]["episode_id"] for one in story.episodes]
    assert len(set(names)) == len(names) == len(story.metrics) * 2 * 4
    assert [line["step"] for line in story.metrics] == list(range(1, len(story.metrics) + 1))
