"""Joining a cluster: its nodes, version checks and error messages."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollgym.cluster import connect as joining
from rollgym.cluster import join as address
from rollgym.cluster.connect import connect
from rollgym.cluster.errors import need_ray
from rollgym.cluster.join import check_address, check_code, check_versions
from rollgym.cluster.node_info import local_node_info
from rollgym.core.errors import MissingExtra, UsageError

ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def nodes(nodes_of: Callable[..., Any]) -> Any:
    return nodes_of(2, num_gpus=2)


def test_a_joined_cluster_is_listed_node_by_node(nodes: Any) -> None:
    with connect(nodes.address) as connection:
        assert [(node.kind, node.devices) for node in connection.cluster.nodes] == [("gpu", 2)] * 2
        assert sorted(connection.nodes) == sorted(node["NodeID"] for node in ray.nodes())
        assert not connection.shipped, "the workers have the very same files"
        assert connection.refresh().nodes == connection.nodes


@pytest.mark.slow
def test_the_source_tree_is_uploaded_if_the_workers_differ(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "local_node_info", lambda: replace(local_node_info(), digest="changed"))
    with connect(nodes.address) as connection:
        assert connection.shipped

        @ray.remote
        def sent() -> list[str]:
            """Folders of this worker's path that have a whole rollgym."""
            needed = ("rollgym/envs/bandit/env.py", "rollgym/trainer/loop.py", "rollgym/agents/parsing.py")
            return [one for one in sys.path if all(Path(one, name).is_file() for name in needed)]

        found = ray.get(sent.remote())
    assert any("runtime_resources" in folder for folder in found), found


@pytest.mark.slow
def test_a_local_ray_starts_beside_another_one(nodes: Any) -> None:
    with connect(gpus=1, cpus=1) as connection:
        assert connection.address != nodes.address
        assert [(node.devices, node.cpus) for node in connection.cluster.nodes] == [(1, 1)]


def test_other_versions_are_found_at_the_start_and_named(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = local_node_info()
    for name, other in (("python", "3.9.1"), ("ray", "1.2.3")):
        monkeypatch.setattr(address, "local_node_info", lambda: replace(here, **{name: other}))  # noqa: B023
        with pytest.raises(UsageError) as refused, connect(nodes.address):
            pass
        own = getattr(here, name)
        assert own in str(refused.value)
        assert other in str(refused.value)
        assert "install the same" in str(refused.value)
        assert not ray.is_initialized()


def test_workers_of_another_version_are_named() -> None:
    here = local_node_info()
    check_code([here, here])
    with pytest.raises(UsageError, match=r"node far runs Ray 1\.0, the driver Ray "):
        check_versions([here, replace(here, host="far", ray="1.0")])
    with pytest.raises(UsageError, match=r"node far runs rollgym 9\.9, the driver rollgym "):
        check_code([replace(here, host="far", rollgym="9.9", digest="other")])
    with pytest.raises(UsageError, match=r"node far has rollgym .* but with different source files"):
        check_code([replace(here, host="far", digest="other")])
    with pytest.raises(UsageError, match=r"rollgym cannot be imported .*No module.*install rollgym"):
        check_versions([replace(here, error="No module named rollgym")])


def test_a_dead_address_is_one_sentence() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        pytest.raises(
            UsageError, match=rf"No Ray cluster answers at 127\.0\.0\.1:{port} \(Connection refused"
        ),
        connect(f"127.0.0.1:{port}"),
    ):
        pass
    with pytest.raises(UsageError, match="No Ray cluster answers at ray://"):
        check_address(f"ray://127.0.0.1:{port}")


def test_another_service_at_the_address_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = rf"Cannot join Ray at .*:{port}, which .* within 4 s: check the port \(6379.*RAY_AUTH_TOKEN"
        with pytest.raises(UsageError, match=message):
            check_address(f"127.0.0.1:{port}", wait=4)


def test_the_time_to_load_ray_does_not_count_as_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "import sys, time; time.sleep(6); print(file=sys.stderr, flush=True); print('{}')"
    monkeypatch.setattr(address, "_ASK", busy)
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_address(f"127.0.0.1:{server.getsockname()[1]}", wait=5)


@pytest.mark.parametrize("words", ["somewhere", "host:", "host:port", ":6379", "host:99999"])
def test_invalid_addresses_are_rejected(words: str) -> None:
    with pytest.raises(UsageError, match="auto, host:port or ray://host:port"), connect(words):
        pass


def test_options_of_a_local_ray_are_rejected_for_a_cluster() -> None:
    with (
        pytest.raises(UsageError, match="can be set only if Ray is started here"),
        connect("127.0.0.1:1", gpus=2),
    ):
        pass
    with pytest.raises(UsageError, match="cpus must be at least 1, not 0"), connect(cpus=0):
        pass


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[distributed\]"):
        need_ray()


@pytest.mark.parametrize("version", ["2.51.1", "2.9.3", "1.13.0"])
def test_a_ray_without_token_authentication_is_rejected(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "__version__", version)
    with pytest.raises(UsageError, match=rf"Ray {version} has no token authentication.*Install ray>=2\.52"):
        need_ray()


@pytest.mark.parametrize("version", ["2.52.0", "2.60.0rc1", "3.0.0.dev0"])
def test_a_ray_with_token_authentication_is_used(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", version)
    assert need_ray() is ray


TWICE = """
import os
from rollgym.cluster.connect import _quiet, connect

seen = []
for _ in range(2):
    with {opened} as connection:
        import ray
        seen.append(os.environ["RAY_AUTH_TOKEN"])
        if connection is not None:
            print(ray.get(ray.remote(lambda: len(connection.nodes)).remote()))
assert len(set(seen)) == 1
"""


def in_a_process(opened: str) -> str:
    """Run the script above without the settings of these tests, as a user would."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", TWICE.format(opened=opened)], env=usual, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_ray_that_a_process_starts_has_the_same_token() -> None:
    in_a_process("_quiet(local=True)")


@pytest.mark.slow
def test_a_process_can_start_one_ray_after_another() -> None:
    assert in_a_process("connect(gpus=1, cpus=2)").split() == ["1", "1"]
