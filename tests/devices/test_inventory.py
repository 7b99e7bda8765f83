"""Clusters: of this machine, described by arguments or files, and reported by Ray."""

from pathlib import Path

import pytest

from rollgym.core.errors import UsageError
from rollgym.devices.inventory import (
    DEVICE_MODELS,
    cluster_from_nodes,
    device_model,
    find_cluster,
    known_model,
)


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_cluster_arguments() -> None:
    cluster = find_cluster("32x8xH100")
    assert (len(cluster.nodes), len(cluster.devices)) == (32, 256)
    assert cluster.nodes[0].memory == 81559 * 2**20
    assert len(find_cluster("2x4090").devices) == 2
    slots = find_cluster("cpu:3")
    assert [node.kind for node in slots.nodes] == ["cpu"]
    assert len(slots.devices) == 3
    assert slots.nodes[0].memory * 3 <= slots.nodes[0].host_memory


def test_a_file_describes_a_mixed_cluster(tmp_path: Path) -> None:
    cluster = find_cluster(
        write(
            tmp_path,
            "nodes:\n"
            "  - {name: env, count: 2, cpus: 64, host_memory: 256 GB}\n"
            "  - {count: 3, gpus: 8, model: A100-80, network: 25 GB/s, host_memory: 1 TB, cpus: 96}\n"
            "  - {name: odd, gpus: 4, memory: 32 GiB, tflops: 100}\n",
        )
    )
    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2", "odd", "env0", "env1"]
    first, odd = cluster.nodes[0], cluster.nodes[3]
    assert (first.memory, first.flops, first.network, first.cpus) == (81920 * 2**20, 312e12, 25e9, 96)
    assert (odd.memory, odd.flops, odd.bandwidth) == (32 * 2**30, 1e14, 0.0)
    assert odd.host_memory == 2 * 4 * odd.memory, "by default twice the memory of the devices"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes: []", "nodes"),
        ("nodes: [{gpus: 8}]", "needs model (H100, ...) or memory"),
        ("nodes: [{gpus: 8, model: H1000}]", "Did you mean H100"),
        ("nodes: [{gpus: 8, memory: 80}]", "memory"),
        ("nodes: [{gpus: 8, memory: 80 GB/s}]", "is not a size"),
        ("nodes: [{gpus: 8, memory: 0 GB}]", "greater than 0"),
        ("nodes: [{gpus: -1, model: H100}]", "gpus"),
        ("nodes: [{gpu: 8, model: H100}]", "gpus"),
        ("nodes: [{cpus: 8}]", "needs cpus and host_memory"),
        ("nodes: [{name: a, gpus: 1, model: H100}, {name: a, gpus: 1, model: H100}]", "two nodes called 'a'"),
    ],
)
def test_cluster_file_errors(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_cluster(write(tmp_path, text))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nowhere.yaml", "Cluster file nowhere.yaml not found"),
        ("8xH1000", "Did you mean H100"),
        ("cpu:0", "no slots"),
        ("0x8xH100", "at least 1 node"),
    ],
)
def test_invalid_cluster_arguments(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_cluster(words)
    assert sentence in str(caught.value)


def test_a_runtime_reports_its_nodes() -> None:
    logical = cluster_from_nodes([("head", 0, 2, 8e9), ("a", 2, 4, 16e9), ("b", 2.0, 4.0, 16e9)])
    assert [(node.name, node.kind, node.devices) for node in logical.nodes] == [
        ("a", "gpu", 2),
        ("b", "gpu", 2),
        ("head", "cpu", 1),
    ]
    assert logical.nodes[0].memory == 8e9, "a logical GPU is a share of its node"
    real = cluster_from_nodes([("a", 8, 128, 2e12)], model="H100")
    assert (real.nodes[0].memory, real.nodes[0].host_memory) == (device_model("H100").memory, 2e12)


def test_device_names_of_drivers_are_recognized() -> None:
    a100 = DEVICE_MODELS["A100-40"]
    assert known_model("NVIDIA A100-SXM4-40GB", 42_000_000_000) == a100
    assert known_model("NVIDIA GeForce RTX 4090", DEVICE_MODELS["RTX4090"].memory) == DEVICE_MODELS["RTX4090"]
    assert known_model("Something else", 10**10) is None


def test_every_known_device_has_its_rates_and_their_source() -> None:
    for model in DEVICE_MODELS.values():
        assert min(model.memory, model.flops, model.bandwidth, model.link) > 0
        assert model.source
