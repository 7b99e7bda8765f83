"""Joins a Ray cluster, or starts one on this machine, and lists its devices."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollgym.cluster.errors import need_ray
from rollgym.cluster.join import check_address, check_code, check_versions, find_address
from rollgym.cluster.kept_engines import NAMESPACE
from rollgym.cluster.node_info import NodeInfo, fetch_node_info, local_node_info
from rollgym.core.errors import RunError, UsageError, boundary, one_line
from rollgym.devices.inventory import cluster_from_nodes, known_model
from rollgym.devices.types import Cluster, Node

PACKAGE = Path(__file__).parents[1]
"""The folder of rollgym's source."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to a Ray cluster."""

    address: str
    cluster: Cluster
    """Its nodes; those with GPUs come first. Logical GPUs are shares of their node."""
    nodes: tuple[str, ...]
    """Ray ids of the nodes, in the order of ``cluster.nodes``."""
    info: tuple[NodeInfo, ...] = field(default=(), repr=False)
    shipped: bool = False
    """Whether this machine's rollgym source was uploaded to the workers."""

    def refresh(self) -> Connection:
        """Return the connection with the nodes that are alive now."""
        return _look(self.address, self.shipped)


@contextmanager
def connect(
    address: str | None = None,
    *,
    gpus: int | None = None,
    cpus: int | None = None,
    wait: float = 20.0,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Connection]:
    """Join a Ray cluster, or start one on this machine, for the duration of the block.

    Args:
        address: None starts a cluster on this machine; ``auto`` finds the one this machine belongs to;
            ``host:port`` or ``ray://host:port`` is the address of one.
        gpus: Number of GPUs of a cluster that is started here; may exceed the physical ones.
        cpus: Number of CPUs of a cluster that is started here.
        wait: Seconds to wait for the address to answer.
        variables: Environment variables of all workers.
    """
    if address is not None and (gpus is not None or cpus is not None):
        raise UsageError("gpus and cpus can be set only if Ray is started here: leave out address.")
    with _quiet(local=address is None):
        ray = need_ray()
        if ray.is_initialized():
            raise UsageError("This process is already connected to Ray: call ray.shutdown() first.")
        try:
            with _without_reports(ray):
                yield _start(gpus, cpus, variables) if address is None else _join(address, wait, variables)
        finally:
            ray.shutdown()


def _start(gpus: int | None, cpus: int | None, variables: Mapping[str, str] | None) -> Connection:
    for name, value, least in (("gpus", gpus, 0), ("cpus", cpus, 1)):
        if value is not None and value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}.")
    with boundary(RunError, "Ray could not be started on this machine"):
        context = need_ray().init(
            address="local",  # do not join a cluster that another process has started here
            num_gpus=gpus,
            num_cpus=cpus,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            **_options(variables),
        )
    return _look(context.address_info["address"], shipped=False)


def _join(address: str, wait: float, variables: Mapping[str, str] | None) -> Connection:
    address = find_address(address)
    check_address(address, wait)
    ray = need_ray()
    _init(address, variables, ship=False)
    others = list(_ask_nodes().values())
    ship = any(info.digest != local_node_info().digest for info in others)
    if ship and (PACKAGE.parent / "pyproject.toml").is_file():
        # A source tree that the workers do not have: upload it.
        ray.shutdown()
        _init(address, variables, ship=True)
        return _look(address, shipped=True)
    check_code(others)
    return _look(address, shipped=False)


def _init(address: str, variables: Mapping[str, str] | None, *, ship: bool) -> None:
    options = _options(variables)
    if ship:
        options["runtime_env"] = {**options["runtime_env"], "py_modules": [str(PACKAGE)]}
        options["runtime_env"]["excludes"] = ["**/__pycache__"]
    with boundary(RunError, f"Cannot join Ray at {address}"):
        need_ray().init(address=address, **options)


def _options(variables: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": dict(variables or {})},
    }


def _look(address: str, shipped: bool) -> Connection:
    infos = _ask_nodes()
    check_versions(list(infos.values()))
    alive = {node["NodeID"]: node for node in need_ray().nodes() if node["Alive"] and node["NodeID"] in infos}
    # GPUs first, then the head, then by name: device numbers do not depend on the order of startup.
    order = sorted(alive, key=lambda name: (_rank(alive[name]["Resources"]), alive[name]["NodeName"], name))
    nodes = tuple(_node(alive[name], infos[name]) for name in order)
    return Connection(address, Cluster(nodes), tuple(order), tuple(infos[name] for name in order), shipped)


def _rank(resources: Mapping[str, float]) -> tuple[bool, bool]:
    return not resources.get("GPU"), "node:__internal_head__" not in resources


def _node(node: Mapping[str, Any], info: NodeInfo) -> Node:
    resources = node["Resources"]
    gpus, cpus = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    model = known_model(info.gpu_model, info.gpu_memory) if gpus and info.gpu_memory else None
    named = [(node["NodeName"], gpus, cpus, info.host_memory)]
    (described,) = cluster_from_nodes(named, model=model.name if model else "").nodes
    if gpus and info.gpu_memory:
        return replace(described, memory=info.gpu_memory, model=info.gpu_model)
    return described


def _ask_nodes() -> dict[str, NodeInfo]:
    """Query the info of each node; nodes that die meanwhile are left out."""
    ray = need_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(fetch_node_info)
    refs = {
        node["NodeID"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    infos = {}
    for name, ref in refs.items():
        try:
            infos[name] = ray.get(ref, timeout=120)
        except ray.exceptions.RayTaskError as error:
            infos[name] = NodeInfo(error=one_line(error.cause or error))
        except ray.exceptions.GetTimeoutError:
            raise RunError(
                "A node of the cluster has not answered within 120 s; it may be overloaded."
            ) from None
        except ray.exceptions.RayError:
            continue
    return infos


@contextmanager
def _quiet(*, local: bool) -> Iterator[None]:
    """Disable Ray's notices; a cluster that is started here gets a random token.

    Its processes listen on every interface, whatever address it is given: the token keeps others out.
    """
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # Ray reads the token once, when it is imported: later clusters of this process need the same one.
    if local and ("ray" not in sys.modules or _token.cache_info().currsize):
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}
    before = {name: os.environ.get(name) for name in settings}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                os.environ.pop(name, None)


@contextmanager
def _without_reports(ray: Any) -> Iterator[None]:
    """Keep Ray from printing long reports about dead actors to stdout: a run reports them in one sentence.

    Ray has no setting for this; releases that print them another way are not affected.
    """
    module = getattr(ray._private, "worker", None)
    printer = getattr(module, "print_to_stdstream", None)
    if module is None or printer is None:
        yield
        return
    module.print_to_stdstream = lambda *args, **kwargs: None
    try:
        yield
    finally:
        module.print_to_stdstream = printer


@functools.cache
def _token() -> str:
    """Return the token of this process: Ray reads it only once."""
    return secrets.token_hex(32)
