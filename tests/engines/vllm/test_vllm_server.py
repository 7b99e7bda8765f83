"""Starting vLLM servers and connecting to them: command line, key, versions, error messages."""

import ast
import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import model_folder
from scripted_vllm import ScriptedVllm, scripted_vllm

from rollgym.core.errors import EngineLost, UsageError
from rollgym.engines.servers import process_reaper
from rollgym.engines.servers.server_process import DELTA_PLUGIN
from rollgym.engines.sglang.server import PLUGIN as SGLANG_PLUGIN
from rollgym.engines.vllm import Server, ServerOptions, VllmEngine, launch, open_vllm
from rollgym.engines.vllm.compat import compat_of
from rollgym.engines.vllm.server import PLUGIN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def server() -> Iterator[ScriptedVllm]:
    with scripted_vllm() as script:
        yield script


@pytest.fixture(autouse=True)
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setattr(process_reaper, "_folder", lambda: notes)


def program(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_the_command_line_has_all_options(folder: Path) -> None:
    options = ServerOptions(python="py", device="cpu", tp=2, context_length=99, extra=("--seed", "1"))
    words = options.command(folder, 7, 3)
    assert words[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(zip(words[3:], words[4:], strict=False))
    assert pairs["--model"] == str(folder)
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--port"] == "7"
    assert pairs["--tensor-parallel-size"] == "2"
    assert pairs["--max-model-len"] == "99"
    assert pairs["--dtype"] == "float32"
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--middleware"] == "rollgym_vllm_auth.RequireKey"
    assert words[-2:] == ["--seed", "1"]
    on_gpu = ServerOptions(python="py", device="cuda", memory_saver=True).command(folder, 7, 3)
    assert "--enable-sleep-mode" in on_gpu
    assert "--enforce-eager" not in on_gpu


def test_the_server_sees_the_plugin_and_no_path_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert ServerOptions().environment()["PYTHONPATH"] == str(PLUGIN)
    assert ServerOptions(env={"PYTHONPATH": "/its"}).environment()["PYTHONPATH"] == f"{PLUGIN}:/its"
    assert {file.name for file in PLUGIN.glob("*.py")} == {
        "__init__.py",
        "rollgym_vllm.py",
        "rollgym_vllm_auth.py",
    }


@pytest.mark.parametrize(
    "extra", [("--api-key=abc",), ("--logprobs-mode", "raw_logprobs"), ("--middleware", "x")]
)
def test_settings_that_the_engine_depends_on_cannot_be_passed_in_extra(extra: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"extra must not contain {extra[0].partition('=')[0]}"):
        ServerOptions(extra=extra)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "v0.32.1.post1", "0.32.0+cpu"])
def test_tested_versions(version: str) -> None:
    assert compat_of(version, "it").version[:2] == (0, 32)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0"])
def test_a_version_outside_the_tested_range_is_one_sentence(version: str) -> None:
    with pytest.raises(UsageError) as caught:
        compat_of(version, "python3")
    assert str(caught.value) == (
        f"python3 has vLLM {version}, but rollgym was tested with 0.32.0 up to, not including, 0.33.0: "
        'install it with pip install "vllm>=0.32.0,<0.33.0".'
    )


@pytest.mark.parametrize("version", ["", "0.32", None, 5])
def test_invalid_versions(version: Any) -> None:
    with pytest.raises(UsageError, match="reports an invalid vLLM version"):
        compat_of(version, "it")


def test_an_interpreter_with_another_version_is_rejected_before_it_starts(
    folder: Path, tmp_path: Path
) -> None:
    other = program(tmp_path / "py", '#!/bin/sh\n[ "$1" = -c ] && echo 0.31.0\n')
    with pytest.raises(UsageError, match=r"has vLLM 0\.31\.0, but rollgym was tested with 0\.32\.0"):
        launch(folder, ServerOptions(python=other))


def test_a_python_without_vllm_is_reported(folder: Path, tmp_path: Path) -> None:
    text = '#!/bin/sh\n[ "$1" = -c ] && echo none && exit\necho "No module named vllm"; exit 1\n'
    with pytest.raises(EngineLost, match=r"has no vLLM: install it there \(pip install vllm\)"):
        launch(folder, ServerOptions(python=program(tmp_path / "py", text)))
    with pytest.raises(UsageError, match="Cannot start vLLM with /no/python"):
        launch(folder, ServerOptions(python="/no/python"))
    with pytest.raises(UsageError, match="VllmEngine needs model_folder, and either url or server"):
        VllmEngine()
    with pytest.raises(UsageError, match="cannot share a port"):
        open_vllm(folder, replicas=2, options=ServerOptions(port=30000))


def test_the_key_is_in_a_private_file_only(folder: Path) -> None:
    server = Server(folder, ServerOptions())
    try:
        arguments, variables = server.pass_key()
        file = Path(variables["ROLLGYM_SERVER_KEY_FILE"])
        assert not arguments
        assert file.read_text(encoding="utf-8") == server.api_key
        assert file.parent.stat().st_mode & 0o077 == 0
        assert server.api_key not in str(variables)
    finally:
        server.close()
    assert not file.exists()


def auth_module() -> Any:
    spec = importlib.util.spec_from_file_location("rollgym_vllm_auth", PLUGIN / "rollgym_vllm_auth.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", b"", 200),
        ("/collective_rpc", b"", 401),
        ("/collective_rpc", b"Bearer wrong", 401),
        ("/collective_rpc", b"Bearer the-key", 200),
        ("/health/x", b"", 401),
        ("//health", b"", 401),
    ],
)
def test_the_middleware_asks_for_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, header: bytes, status: int
) -> None:
    (tmp_path / "key").write_text("the-key", encoding="utf-8")
    module = auth_module()
    monkeypatch.setenv(module.KEY_FILE, str(tmp_path / "key"))
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append(200)

    async def send(message: Any) -> None:
        sent.extend([message["status"]] if "status" in message else [])

    scope = {"type": "http", "path": path, "headers": [(b"authorization", header)] if header else []}
    asyncio.run(module.RequireKey(app)(scope, None, send))
    assert sent == [status]


def test_a_server_that_would_give_wrong_numbers_is_rejected(server: ScriptedVllm, folder: Path) -> None:
    server.facts["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(UsageError, match="--logprobs-mode processed_logprobs"):
        VllmEngine(server.url, folder)
    server.facts |= {"logprobs_mode": "processed_logprobs", "packed": True}
    with pytest.raises(UsageError, match="packs its weights"):
        VllmEngine(server.url, folder)
    server.scripts["/collective_rpc"] = lambda _: (404, b"{}")
    with pytest.raises(UsageError, match="lacks rollgym's worker extension"):
        VllmEngine(server.url, folder)
    server.software = "0.33.1"
    with pytest.raises(UsageError, match=r"has vLLM 0\.33\.1, but rollgym was tested with"):
        VllmEngine(server.url, folder)


def test_without_the_transfer_backend_weights_go_through_the_disk(server: ScriptedVllm, folder: Path) -> None:
    assert VllmEngine(server.url, folder).route == "group"
    server.facts["transfer"] = None
    assert VllmEngine(server.url, folder).route == "disk"
    with pytest.raises(UsageError, match="route='group' needs a vLLM server with --weight-transfer-config"):
        VllmEngine(server.url, folder, route="group")
    with pytest.raises(UsageError, match="interrupt must be one of keep, resend, not 'retract'"):
        VllmEngine(server.url, folder, interrupt="retract")


def test_the_plugin_imports_nothing_of_rollgym() -> None:
    """The server's environment has no rollgym; test_real.py runs the plugin in a real server."""
    folders = (PLUGIN, SGLANG_PLUGIN, DELTA_PLUGIN)
    for file in (file for folder in folders for file in folder.glob("rollgym_*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        modules = [one.module or "" for one in nodes if isinstance(one, ast.ImportFrom)]
        modules += [name.name for one in nodes if isinstance(one, ast.Import) for name in one.names]
        assert modules
        assert not [name for name in modules if name.partition(".")[0] == "rollgym"]
