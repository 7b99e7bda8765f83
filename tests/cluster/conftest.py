"""Real Ray clusters on this machine, one for each file that needs one."""

import asyncio
import os
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
MEGABYTES = 2**20
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Prestarted and low-priority workers make tests time out on a busy machine.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
}
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)


class Nodes:
    """Several nodes on one machine; this process is part of the cluster."""

    def __init__(self, count: int, **resources: Any) -> None:
        from ray.cluster_utils import Cluster

        self.size = {"num_cpus": 2, "object_store_memory": 200 * MEGABYTES, **resources}
        head = {**self.size, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.cluster.add_node(**self.size) for _ in range(count - 1)]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def lose(self, number: int = -1) -> str:
        """A node dies at once; its id."""
        node = self.others.pop(number)
        self.cluster.remove_node(node, allow_graceful=False)
        return str(node.node_id)

    def add(self) -> None:
        """Another node comes; Ray allows this in the main thread only."""
        self.others.append(self.cluster.add_node(**self.size))

    def stop(self) -> None:
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes_of() -> Iterator[Callable[..., Nodes]]:
    """Make a cluster; all are stopped at the end of the file."""
    made: list[Nodes] = []

    def make(count: int, **resources: Any) -> Nodes:
        made.append(Nodes(count, **resources))
        return made[-1]

    yield make
    for nodes in made:
        nodes.stop()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ray leaves closing its processes and log files to the garbage collector."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ResourceWarning)
        yield


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine to its end."""

    async def main() -> T:
        return await work()

    return asyncio.run(main())


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder."""
    from torch_models import make_model

    folder = tmp_path_factory.mktemp("model")
    make_model("qwen2").save_pretrained(folder)
    return folder
