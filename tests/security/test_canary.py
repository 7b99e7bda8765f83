"""Reading a stranger's files runs none of their code, whichever command reads them."""

from __future__ import annotations

import ast
import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from strangers import (
    CODE_ACTION,
    ENV,
    Canary,
    bomb,
    config_text,
    make_canary,
    make_model,
    make_run,
    plant,
    rewrite_episodes,
    shadow,
)

from rollgym.bench.run import SuiteRun
from rollgym.bench.suite import AgentSpec, read_suite
from rollgym.evaluation.runner import Request, evaluate

Command = Callable[..., Any]
SPECS = tuple(Canary(Path("c"), "m").specs())
SUITE = f"""\
schema = 1
name = "strange"
version = 1
summary = "a stranger's suite"

[[entries]]
name = "one"
env = "{ENV}"
tasks = 2
"""


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    """Dead at the end: nothing has written it, and its module is not imported."""
    found = make_canary(tmp_path)
    yield found
    assert not found.path.exists(), found.path.read_text()
    assert found.module not in sys.modules


@pytest.fixture
def run(tmp_path: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch, rollgym_command: Command) -> Path:
    """A stranger's run, which is also the current folder."""
    folder = make_run(tmp_path / "run", canary)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def results(
    tmp_path: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch, rollgym_command: Command
) -> Path:
    """A stranger's results of a suite, which is also the current folder."""
    suite = tmp_path / "strange.toml"
    suite.write_text(SUITE)
    out = tmp_path / "results"
    SuiteRun(read_suite(suite), AgentSpec(agent="random", options={}), out).run()
    plant(out, canary)
    monkeypatch.chdir(out)
    return out


READERS = {
    "view": ("view", "."),
    "view-export": ("view", ".", "--export", "../page.html"),
    "config-show": ("config", "show", "config.yaml"),
    "config-show-json": ("config", "show", "config.yaml", "--json"),
    "plan": ("plan", "config.yaml", "--model", "1b", "--cluster", "4x8xH100", "--tokens", "512"),
    "replay": ("replay", "."),
    "compare": ("compare", ".", "."),
    "trace": ("trace", ".", "--out", "../trace.json"),
    "eval-resume": ("eval", ENV, "--agent", "random", "--episodes", "2", "--out", ".", "--resume"),
    "train-resume": ("train", "--resume", "--out", "."),
    "bench-show": ("bench", "show", "."),
    "bench-verify": ("bench", "verify", "."),
    "bench-compare": ("bench", "compare", ".", "."),
}


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_no_command_imports_what_a_run_names(
    run: Path, canary: Canary, rollgym_command: Command, words: tuple[str, ...]
) -> None:
    rewrite_episodes(run / "episodes.jsonl", f"{canary.module}:Env", {})
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["env"]["id"] = f"{canary.module}:Env"
    manifest["agent"] = {"name": f"{canary.module}:agent", "options": {"model": "."}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    rollgym_command(*words)
    assert os.getcwd() not in sys.path


def test_a_config_is_shown_whole_without_its_modules(
    run: Path, canary: Canary, rollgym_command: Command
) -> None:
    shown = json.loads(rollgym_command("config", "show", "config.yaml", "--json").out)
    assert shown["imports"] == [canary.module]
    assert (shown["estimator"], shown["loss"]["name"]) == ("evil_estimator", "evil_loss")


def test_a_name_that_no_module_could_register_is_still_a_mistake(
    run: Path, canary: Canary, rollgym_command: Command
) -> None:
    (run / "config.yaml").write_text(json.dumps({"envs": [{"id": ENV}], "estimator": "grpoo"}))
    assert "no estimator called 'grpoo'" in rollgym_command("config", "show", "config.yaml").err


def test_a_resumed_run_says_what_its_config_names_and_how_to_trust_it(
    run: Path, canary: Canary, rollgym_command: Command
) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "kind": "train"}))
    ran = rollgym_command("train", "--resume", "--out", ".")
    assert ran.code == 2
    assert f"imports {canary.module}" in ran.err
    assert "evil-python" in ran.err
    assert "backend='none'" in ran.err
    assert "--trust-code" in ran.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("program", "{program}"),
        ("warm_start", {"agent": "{module}:agent"}),
        ("warm_start", {"mistakes": 0.5, "mistakes_agent": "{module}:agent"}),
        ("rewards", [{"kind": "function", "target": "{module}:score"}]),
        ("rewards", [{"kind": "http", "url": "http://127.0.0.1:9/", "header_env": {"K": "HOME"}}]),
        ("engine", {"kind": "sglang", "python": "{program}"}),
        ("runtime", "ray"),
        ("imports", ["{module}"]),
        ("envs", [{"id": "{module}:Env"}]),
        ("envs", [{"id": "rollgym/Code-v0", "kwargs": {"sandbox": {"preload": ["{module}"]}}}]),
    ],
)
def test_each_way_to_name_code_needs_trust_to_resume(
    run: Path, canary: Canary, rollgym_command: Command, key: str, value: Any
) -> None:
    program = str(run.parent / "evil-python")
    text = json.dumps(value).replace("{module}", canary.module).replace("{program}", program)
    values = {"envs": [{"id": ENV}], key: json.loads(text)}
    if key == "runtime":
        values["ray"] = {"address": "127.0.0.1:9"}
    (run / "config.yaml").write_text(json.dumps(values))
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "kind": "train"}))
    ran = rollgym_command("train", "--resume", "--out", ".")
    assert ran.code == 2, ran.err
    assert "--trust-code" in ran.err, ran.err


def test_code_of_a_run_folder_is_not_imported_even_with_trust(
    run: Path, canary: Canary, rollgym_command: Command
) -> None:
    (run / "config.yaml").write_text(json.dumps({"envs": [{"id": ENV}], "imports": [canary.module]}))
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "kind": "train"}))
    ran = rollgym_command("train", "--resume", "--out", ".", "--trust-code")
    assert ran.code == 2, ran.err
    assert "run folders are not searched" in ran.err, ran.err


@pytest.mark.parametrize("name", ["{module}", "run.{module}", "run.inner.{module}"])
def test_a_module_in_a_run_folder_is_refused_by_any_name(
    run: Path, canary: Canary, rollgym_command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (run / "inner").mkdir()
    shutil.copy(run / f"{canary.module}.py", run / "inner")
    if name == "{module}":
        monkeypatch.syspath_prepend(run)
    else:
        monkeypatch.chdir(run.parent)
    ran = rollgym_command("envs", "--env-module", name.format(module=canary.module))
    assert ran.code == 2, ran.err
    assert "is inside the run folder" in ran.err, ran.err
    sys.modules.pop("run.inner", None)
    sys.modules.pop("run", None)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_planted_spec_is_not_played(
    run: Path, canary: Canary, rollgym_command: Command, kind: str, workers: int
) -> None:
    env_id, kwargs = canary.specs()[kind]
    action = CODE_ACTION.format(path=str(canary.path))
    rewrite_episodes(run / "episodes.jsonl", env_id, kwargs, action)
    ran = rollgym_command("replay", ".", "--workers", workers)
    assert ran.code == 2, ran
    assert "--env-module" in ran.err or "--allow-weak-sandbox" in ran.err


@pytest.mark.parametrize("kind", SPECS)
def test_a_forged_episode_fails_verification_and_is_not_played(
    results: Path, canary: Canary, rollgym_command: Command, kind: str
) -> None:
    env_id, kwargs = canary.specs()[kind]
    rewrite_episodes(results / "entries/one/episodes.jsonl", env_id, kwargs)
    ran = rollgym_command("bench", "verify", ".", "--json")
    verdict = json.loads(ran.out)
    assert ran.code == 1
    assert not verdict["holds"]
    assert verdict["replayed"] == 0, "no forged episode is played"


@pytest.mark.parametrize("kind", SPECS)
def test_a_forged_suite_fails_verification_and_is_not_played(
    results: Path, canary: Canary, rollgym_command: Command, kind: str
) -> None:
    env_id, kwargs = canary.specs()[kind]
    rewrite_episodes(results / "entries/one/episodes.jsonl", env_id, kwargs)
    manifest = json.loads((results / "manifest.json").read_text())
    manifest["suite"]["entries"][0] |= {"env": env_id, "kwargs": kwargs, "data": "sandbox"}
    manifest["data"] = {"one": {"backend": "none", "allow_unsafe": True}}
    (results / "manifest.json").write_text(json.dumps(manifest))
    for words in (("verify", "."), ("show", "."), ("compare", ".", ".")):
        ran = rollgym_command("bench", *words)
        assert words[0] != "verify" or ran.code == 1, ran


@pytest.mark.parametrize("kind", SPECS)
def test_a_suite_of_others_names_registered_environments_only(
    results: Path, canary: Canary, rollgym_command: Command, kind: str
) -> None:
    env_id, kwargs = canary.specs()[kind]
    suite = results / "evil.toml"
    lines = SUITE.replace(f'"{ENV}"', json.dumps(env_id)).rstrip()
    suite.write_text(f"{lines}\nkwargs = {toml(kwargs)}\n")
    assert rollgym_command("bench", "show", "evil.toml").code == 0
    for agent in ("random", "expert"):
        ran = rollgym_command("bench", "run", "evil.toml", "--agent", agent, "--out", "../played")
        assert ran.code == 2, ran
        assert "--env-module" in ran.err or "--allow-weak-sandbox" in ran.err
    assert not (results.parent / "played").exists()


def toml(value: Any) -> str:
    """Plain values as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that works, made for a small environment."""
    pytest.importorskip("torch")
    from rollgym.trainer.builtin_policy.model import make_policy

    out = tmp_path_factory.mktemp("model") / "policy"
    make_policy([ENV], out, size="tiny", context=256)
    return out


def test_a_model_of_others_runs_no_code(
    tmp_path: Path, canary: Canary, policy: Path, rollgym_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", canary, policy)
    monkeypatch.chdir(model)
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("a question is not a refusal"))
    play = ("eval", ENV, "--agent", "lm", "--model", ".", "--episodes", "1", "--out", "../played")
    assert rollgym_command(*play).code != 0, "its chat template cannot be used"
    assert rollgym_command("check", "tokens", "--model", ".").code != 0
    rollgym_command("plan", "sokoban-grpo", "--model", ".", "--cluster", "cpu:2")


def test_weights_of_others_are_read_as_numbers_only(tmp_path: Path, canary: Canary, policy: Path) -> None:
    from rollgym.core.errors import UsageError
    from rollgym.engines.embedded.model import read_module

    model = tmp_path / "model"
    shutil.copytree(policy, model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(bomb(canary))
    with pytest.raises((UsageError, pickle.UnpicklingError)):
        read_module(model)


def test_a_kernel_from_a_hub_is_refused(tmp_path: Path, canary: Canary, policy: Path) -> None:
    from rollgym.core.errors import UsageError
    from rollgym.engines.embedded.model import read_module

    model = tmp_path / "model"
    shutil.copytree(policy, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attn_implementation": "evil/kernel"}))
    with pytest.raises(UsageError, match="names the kernel 'evil/kernel' on a hub"):
        read_module(model)


def test_a_checkpoint_of_others_is_read_as_numbers_only(tmp_path: Path, canary: Canary, policy: Path) -> None:
    pytest.importorskip("torch")
    from rollgym.trainer.learner.config import LearnerConfig
    from rollgym.trainer.learner.learner import Learner
    from rollgym.trainer.learner.sharded_checkpoint import WHOLE_OPTIMIZER
    from rollgym.trainer.losses.settings import LossConfig

    learner = Learner(policy, LearnerConfig(), LossConfig("grpo"))
    place = tmp_path / "checkpoint"
    place.mkdir()
    learner.save(place)
    (place / WHOLE_OPTIMIZER).write_bytes(bomb(canary))
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        learner.load(place)


SHADOWS = {name: READERS[name] for name in ("view", "config-show")} | {
    "replay-workers": ("replay", ".", "--workers", "1"),
}


@pytest.mark.parametrize("words", SHADOWS.values(), ids=SHADOWS)
@pytest.mark.parametrize(
    "start", [("rollgym",), (sys.executable, "-m", "rollgym")], ids=["command", "module"]
)
def test_files_in_the_current_folder_stand_in_for_no_package(
    tmp_path: Path, canary: Canary, start: tuple[str, ...], words: tuple[str, ...]
) -> None:
    folder = make_run(tmp_path / "run", canary)
    if start == ("rollgym",):
        shadow(folder, canary)
        program = Path(sys.executable).with_name("rollgym")
        if not program.exists():
            pytest.skip("the command is not installed")
        start = (str(program),)
    # `python -m` looks into the current folder before any line of rollgym runs: what it has not
    # imported by then must not come from there.
    else:
        for name in ("pydantic", "yaml", "tokenizers", "wandb"):
            (folder / f"{name}.py").write_text(canary.source)
    ran = subprocess.run([*start, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stderr


def test_a_client_of_an_endpoint_cannot_plant_code_in_a_record() -> None:
    from rollgym.serve.requests import ApiError, OpenBody
    from rollgym.serve.sessions import Sessions

    class Desk:
        options = type("O", (), {"env_id": "mine:Env", "max_sessions": 9, "seed": 0, "split": "train"})

    sessions = Sessions(Desk(), lambda session, episode: None)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="'subprocess:Popen' is not an id"):
        sessions.begin_from_request(OpenBody(env_id="subprocess:Popen", env_kwargs={"args": ["true"]}))


def test_the_users_own_module_is_imported_when_it_is_named(
    tmp_path: Path, rollgym_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused from a file works from the command line, for a module in the current folder."""
    name = "mine_" + make_canary(tmp_path).module
    (tmp_path / f"{name}.py").write_text(
        "from rollgym import StepResult, TextEnv\n"
        "import subprocess\n"
        "class Mine(TextEnv):\n"
        "    instructions = 'Say anything.'\n"
        "    def begin(self, task): return 'begin'\n"
        "    def respond(self, action): return StepResult('end', 1.0, terminated=True, success=True)\n"
    )
    request = Request(env_id=f"{name}:Mine", agent="random", episodes=2)
    try:
        evaluate(request, tmp_path / "r")
        refused = rollgym_command("replay", "r")
        assert refused.code == 2
        assert f"--env-module {name}" in refused.err
        assert rollgym_command("replay", "r", "--env-module", name).code == 0
        assert rollgym_command("replay", "r", "--env-module", name, "--workers", "1").code == 0
        rewrite_episodes(tmp_path / "r" / "episodes.jsonl", f"{name}:subprocess.Popen", {"args": ["true"]})
        again = rollgym_command("replay", "r", "--env-module", name)
        assert again.code == 2
        assert "defines no class or function" in again.err
    finally:
        sys.modules.pop(name, None)
        sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def test_a_config_that_is_trained_with_lists_its_code_first(
    tmp_path: Path, canary: Canary, rollgym_command: Command
) -> None:
    (tmp_path / "mine.yaml").write_text(config_text(canary, imports=["no_such_module"]))
    ran = rollgym_command("train", "mine.yaml")
    assert ran.code == 2
    assert "imports no_such_module" in ran.err
    listed = ran.err.splitlines()[0]
    assert listed.startswith("rollgym: code that the config names: "), ran.err
    assert f"envs.0.id {canary.module}:Env" in listed
    assert f"warm_start.agent {canary.module}:agent" in listed


Call = tuple[str, str, frozenset[str]]


@functools.cache
def calls() -> tuple[Call, ...]:
    """Every call in the source: its place, what is called, and the keywords with their values."""
    root, found = Path(__file__).parents[2], []
    for room in ("rollgym", "envs", "agents", "trainer"):
        for path in (root / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "load" not in text and "from_pretrained" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    given = frozenset(f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords)
                    place = f"{path.relative_to(root)}:{node.lineno}"
                    found.append((place, ast.unparse(node.func), given))
    return tuple(found)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        (".from_pretrained", {"trust_remote_code=False", "local_files_only=True"}),
        ("torch.load", {"weights_only=True"}),
    ],
)
def test_every_load_of_a_model_says_that_it_runs_no_code(name: str, needed: set[str]) -> None:
    found = [(place, given) for place, called, given in calls() if called.endswith(name)]
    assert found, "there are such calls"
    assert [place for place, given in found if not needed <= given] == []


@pytest.mark.parametrize(
    "name", ["pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "marshal.loads"]
)
def test_nothing_is_read_in_a_format_that_runs_code(name: str) -> None:
    assert [place for place, called, _ in calls() if called == name] == []
