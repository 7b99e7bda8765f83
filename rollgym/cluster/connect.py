"""Joining a Ray cluster, or starting one on this machine, and seeing what it has."""

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

from rollgym.cluster.address import check_address, check_code, check_versions, find_address
from rollgym.cluster.errors import need_ray
from rollgym.cluster.probe import Facts, ask_facts, facts_here
from rollgym.devices.inventory import cluster_from_nodes, known_model
from rollgym.devices.types import Cluster, Node
from rollgym.errors import RunError, UsageError, boundary, one_line

PACKAGE = Path(__file__).parents[1]
"""Where rollgym itself is."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A cluster that was joined."""

    address: str
    cluster: Cluster
    """What it has; nodes with GPUs come first. Logical GPUs are shares of their node."""
    nodes: tuple[str, ...]
    """Ray's ids of the nodes, in the order of ``cluster.nodes``."""
    facts: tuple[Facts, ...] = field(default=(), repr=False)
    shipped: bool = False
    """Whether this machine's rollgym was sent to the workers."""

    def again(self) -> Connection:
        """What is there now: nodes come and go."""
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
    """Join a cluster, or start a Ray on this machine, for as long as the block lasts.

    Args:
        address: ``None`` starts one here; ``auto`` finds the one this machine is part of; ``host:port`` or
            ``ray://host:port`` is that of one.
        gpus: Of a Ray that is started here: how many, which may be more than there are.
        cpus: The same.
        wait: Seconds for the address to answer.
        variables: Environment variables that all workers get.
    """
    if address is not None and (gpus is not None or cpus is not None):
        raise UsageError("gpus and cpus are of a Ray that is started here; a cluster has its own.")
    with _quiet(local=address is None):
        ray = need_ray()
        if ray.is_initialized():
            raise UsageError("This process is part of a Ray cluster already: leave it first.")
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
            address="local",  # and not one that somebody else has started here
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
    ship = any(facts.digest != facts_here().digest for facts in others)
    if ship and (PACKAGE.parent / "pyproject.toml").is_file():
        # A working tree, which the workers do not have: it goes along.
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
    with boundary(RunError, f"The Ray cluster at {address} could not be joined"):
        need_ray().init(address=address, **options)


def _options(variables: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": dict(variables or {})},
    }


def _look(address: str, shipped: bool) -> Connection:
    found = _ask_nodes()
    check_versions(list(found.values()))
    alive = {node["NodeID"]: node for node in need_ray().nodes() if node["Alive"] and node["NodeID"] in found}
    # GPUs first, then the head, then by name: numbers of devices do not depend on who came up first.
    order = sorted(alive, key=lambda name: (_rank(alive[name]["Resources"]), alive[name]["NodeName"], name))
    nodes = tuple(_node(alive[name], found[name]) for name in order)
    return Connection(address, Cluster(nodes), tuple(order), tuple(found[name] for name in order), shipped)


def _rank(resources: Mapping[str, float]) -> tuple[bool, bool]:
    return not resources.get("GPU"), "node:__internal_head__" not in resources


def _node(node: Mapping[str, Any], facts: Facts) -> Node:
    resources = node["Resources"]
    gpus, cpus = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    model = known_model(facts.gpu_model, facts.gpu_memory) if gpus and facts.gpu_memory else None
    named = [(node["NodeName"], gpus, cpus, facts.host_memory)]
    (found,) = cluster_from_nodes(named, model=model.name if model else "").nodes
    if gpus and facts.gpu_memory:
        return replace(found, memory=facts.gpu_memory, model=facts.gpu_model)
    return found


def _ask_nodes() -> dict[str, Facts]:
    """What each node says of itself; one that goes meanwhile says nothing."""
    ray = need_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(ask_facts)
    refs = {
        node["NodeID"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
    found = {}
    for name, ref in refs.items():
        try:
            found[name] = ray.get(ref, timeout=120)
        except ray.exceptions.RayTaskError as error:
            found[name] = Facts(trouble=one_line(error.cause or error))
        except ray.exceptions.GetTimeoutError:
            raise RunError("A node of the cluster has not answered for 120 s: is it overloaded?") from None
        except ray.exceptions.RayError:
            continue
    return found


@contextmanager
def _quiet(*, local: bool) -> Iterator[None]:
    """Ray without its notices; one that is started here with a token that nobody else knows.

    Its processes listen on every interface, whatever address it is given: the token is what keeps others out.
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
    """Keep Ray from printing paragraphs and logs about every death to stdout: a run says it in one sentence.

    Ray has no setting for this; where a release prints them in another way, they are back.
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
    """The same for the whole process: Ray reads it once."""
    return secrets.token_hex(32)
