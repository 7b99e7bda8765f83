"""Plans: valid on any cluster, and infeasible ones are explained with numbers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import UsageError
from rollgym.devices.cost_model import OFFLOADS
from rollgym.devices.inventory import cpu_cluster, gpu_cluster
from rollgym.devices.models import PRESETS
from rollgym.devices.planner import fits, make_plan
from rollgym.devices.ranges import parse_range
from rollgym.devices.report import PlanReport
from rollgym.devices.sharded import sharded_units
from rollgym.devices.types import Cluster, DeviceConfig, MeshRequest, Node, TrainMesh
from rollgym.devices.workload import Job, Workload

LONG = Workload(
    episodes=1024,
    in_flight=1024,
    prompt_tokens=4096,
    reply_tokens=4096,
    context=8192,
    max_tokens_per_microbatch=8192,
    checkpointing=True,
)
GB = 10**9
words = st.sampled_from(sorted(PRESETS))
workloads = st.builds(
    Workload,
    episodes=st.integers(1, 20_000),
    in_flight=st.integers(1, 20_000),
    prompt_tokens=st.integers(1, 200_000),
    reply_tokens=st.integers(1, 200_000),
    context=st.integers(1, 131_072),
    max_tokens_per_microbatch=st.integers(1, 65_536),
    checkpointing=st.booleans(),
    passes=st.integers(1, 4),
    optimizer_steps=st.integers(1, 8),
    rescore=st.booleans(),
    staleness=st.integers(0, 4),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    actor = PRESETS[draw(words)]
    return Job(
        actor=actor,
        critic=draw(st.sampled_from([None, actor])),
        reference=draw(st.sampled_from([None, actor])),
        reward=draw(st.sampled_from([None, PRESETS["1.5b"]])),
        lora_rank=draw(st.sampled_from([None, 1, 16, 256])),
        precision=draw(st.sampled_from(["mixed", "float32"])),
        workload=draw(workloads),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Nodes of different sizes, with and without devices, of both kinds."""
    nodes = [
        Node(
            name=f"n{at}",
            kind=draw(st.sampled_from(["gpu", "gpu", "gpu", "cpu"])),
            devices=draw(st.integers(0 if at else 1, 9)),
            memory=draw(st.integers(1, 200)) * GB,
            host_memory=draw(st.integers(0, 4000)) * GB,
            flops=draw(st.sampled_from([0.0, 1e12, 1e15])),
            bandwidth=draw(st.sampled_from([0.0, 2e10, 3e12])),
            link=draw(st.sampled_from([0.0, 1e10, 9e11])),
            network=draw(st.sampled_from([0.0, 1e9, 5e10])),
            cpus=draw(st.integers(0, 256)),
        )
        for at in range(draw(st.integers(1, 6)))
    ]
    return Cluster(tuple(nodes))


def plan_or_none(cluster: Cluster, job: Job, requested: DeviceConfig | None = None) -> PlanReport | None:
    requested = requested or DeviceConfig()
    try:
        return make_plan(cluster, job, requested) if fits(cluster, job, requested) else None
    except UsageError:
        return None


@settings(max_examples=12, deadline=None)
@given(
    clusters(),
    jobs(),
    st.sampled_from(["auto", "colocated", "split", "overlapping"]),
    st.sampled_from(["auto", "none", "optimizer", "all"]),
)
def test_a_plan_keeps_to_the_cluster(cluster: Cluster, job: Job, layout: Any, offload: Any) -> None:
    found = plan_or_none(cluster, job, DeviceConfig(layout=layout, offload=offload))
    if found is None:
        return
    every = set(cluster.devices)
    assert set(found.plan.placements) == set(job.models())
    for one in found.plan.placements.values():
        assert set(one.devices) <= every
        assert len(set(one.devices)) == len(one.devices) == one.tensor_parallel * one.data_parallel
    for use in found.memory:
        for device in use.devices:
            assert use.used <= use.limit < cluster.nodes[device.node].memory
    assert layout in ("auto", found.plan.layout)
    allowed = {"none": ["none"], "optimizer": ["none", "optimizer"], "all": ["none", "all", "host"]}
    assert found.offload in allowed.get(offload, OFFLOADS)
    if found.offload in ("optimizer", "all"):
        leaves = {one.offload for one in found.plan.placements.values()}
        assert leaves != {()}, "something leaves"
    assert found.seconds > 0
    assert all(span.start <= span.end <= found.seconds * (1 + 1e-9) for span in found.timeline)
    assert found.kv_tokens >= job.workload.context
    assert bool(found.plan.sharing()) == (found.plan.layout != "split")


@settings(max_examples=8, deadline=None)
@given(clusters(), jobs(), st.data())
def test_pinned_roles_stay_where_they_were_pinned(cluster: Cluster, job: Job, data: st.DataObject) -> None:
    last = len(cluster.devices) - 1
    pins = {}
    for role in data.draw(st.sets(st.sampled_from(sorted(job.models())))):
        first = data.draw(st.integers(0, last))
        kind = cluster.nodes[cluster.devices[first].node].kind
        pins[role] = f"{kind}[{first}-{data.draw(st.integers(first, last))}]"
    found = plan_or_none(cluster, job, DeviceConfig(**pins))
    if found is not None:
        for role, text in pins.items():
            assert found.plan.placements[role].devices == parse_range(text, cluster)


@settings(max_examples=8, deadline=None)
@given(clusters(), jobs(), st.integers(1, 2), st.integers(0, 1))
def test_what_fits_fits_on_a_bigger_cluster_too(cluster: Cluster, job: Job, more: int, which: int) -> None:
    node = cluster.nodes[which % len(cluster.nodes)]
    extra = tuple(replace(node, name=f"more{at}") for at in range(more))
    if fits(cluster, job, DeviceConfig()):
        assert fits(Cluster((*cluster.nodes, *extra)), job, DeviceConfig())


def test_two_slots_of_a_laptop() -> None:
    small = replace(PRESETS["0.5b"], layers=2, hidden=128, vocab=512, inner=256, heads=2, head_dim=64)
    found = make_plan(cpu_cluster(2), Job(actor=small, precision="float32"))
    assert (found.plan.layout, found.offload) == ("colocated", "none"), "a slot's memory is the host's"
    assert found.plan.placements["actor_train"].data_parallel == 2


def test_requested_offloading_is_applied() -> None:
    job = Job(actor=PRESETS["7b"], critic=PRESETS["7b"], reference=PRESETS["7b"], workload=LONG)
    cluster = gpu_cluster(gpus=8, model="H100")
    some = make_plan(cluster, job, DeviceConfig(layout="colocated", offload="optimizer")).plan.placements
    every = make_plan(cluster, job, DeviceConfig(layout="colocated", offload="all")).plan.placements
    assert {role: one.offload for role, one in some.items()} == {
        "actor_train": ("optimizer",),
        "actor_infer": ("kv_cache",),
        "critic": ("optimizer",),
        "reference": (),
    }
    assert every["actor_infer"].offload == ("weights", "kv_cache")
    assert every["reference"].offload == ("weights",)
    assert set(every["actor_train"].offload) >= {"weights", "optimizer"}
    alone = make_plan(cluster, job, DeviceConfig(layout="split", offload="optimizer"))
    assert alone.plan.placements["actor_infer"].offload == (), "its devices are not shared"
    small = replace(PRESETS["0.5b"], layers=2, hidden=128, vocab=512, inner=256, heads=2, head_dim=64)
    slots = make_plan(cpu_cluster(1), Job(actor=small, precision="float32"), DeviceConfig(offload="all"))
    assert slots.offload == "all", "also where a slot's memory is the host's, if it is asked for"


def test_eight_h100_with_a_7b_actor_and_critic() -> None:
    actor = PRESETS["7b"]
    job = Job(actor=actor, critic=actor, reference=actor, workload=LONG)
    found = make_plan(gpu_cluster(gpus=8, model="H100"), job)
    assert found.plan.layout == "colocated"
    state = {
        part: sum(size for role, name, size in use.parts if (role, name) == ("actor_train", part))
        for use in found.memory
        if use.phase == "update actor"
        for part in ("optimizer",)
    }
    assert state["optimizer"] == pytest.approx(8 * actor.parameters / 8, abs=1), "two moments, by 8 ranks"


def test_32_nodes_with_a_72b_shard_the_weights_and_keep_an_engine_in_a_node() -> None:
    job = Job(actor=PRESETS["72b"], reference=PRESETS["72b"], workload=LONG)
    found = make_plan(gpu_cluster(nodes=32, gpus=8, model="H100"), job)
    infer = found.plan.placements["actor_infer"]
    assert found.plan.placements["actor_train"].sharding == "weights"
    assert infer.tensor_parallel in (4, 8)
    for first in range(0, len(infer.devices), infer.tensor_parallel):
        assert len({device.node for device in infer.devices[first : first + infer.tensor_parallel]}) == 1


def test_a_200b_moe_on_2000_gpus_tries_few_enough_candidates_to_answer_at_once() -> None:
    job = Job(actor=PRESETS["200b-moe"], reference=PRESETS["200b-moe"], workload=LONG)
    found = make_plan(gpu_cluster(nodes=250, gpus=8, model="H100"), job)
    assert len(found.plan.cluster.devices) == 2000
    assert found.tried < 10_000
    about = {(one.about, one.choice) for one in found.alternatives}
    layouts = {("layout", layout) for layout in ("colocated", "split", "overlapping")}
    assert layouts - about == {("layout", found.plan.layout)}
    assert ("tensor_parallel", "1") in about


def test_rollouts_that_need_not_wait_overlap_with_training() -> None:
    job = Job(actor=PRESETS["7b"], workload=replace(LONG, staleness=1))
    found = make_plan(gpu_cluster(gpus=8, model="H100"), job, DeviceConfig(layout="split"))
    spans = {span.name: span for span in found.timeline}
    assert spans["update actor"].start < spans["generate"].end
    late = make_plan(
        gpu_cluster(gpus=8, model="H100"),
        Job(actor=PRESETS["7b"], workload=LONG),
        DeviceConfig(layout="split"),
    )
    spans = {span.name: span for span in late.timeline}
    assert spans["update actor"].start >= spans["generate"].end


def test_infeasible_plans_are_rejected_with_numbers_and_fixes() -> None:
    job = Job(actor=PRESETS["72b"], reference=PRESETS["72b"], workload=LONG)
    with pytest.raises(UsageError) as caught:
        make_plan(gpu_cluster(gpus=8, model="H100"), job)
    said = str(caught.value)
    assert "Qwen2.5-72B (72.7B parameters) does not fit on 8 H100 (79.6 GiB)" in said
    assert "missing" in said
    assert "2 such nodes instead of 1" in said
    assert fits(gpu_cluster(nodes=2, gpus=8, model="H100"), job, DeviceConfig())


def test_meshes_are_planned_where_sharding_alone_does_not_fit() -> None:
    """128 experts are padded to 512 ranks; layers of the 405B and long rows are too large."""
    work = replace(LONG, episodes=512, in_flight=512)
    large = gpu_cluster(nodes=64, gpus=8, model="H100")
    found = make_plan(large, Job(actor=PRESETS["235b-moe"], workload=work))
    assert found.plan.placements["actor_train"].mesh == TrainMesh(replicate=4, shard=128)
    said = {one.choice: one.why for one in found.alternatives if one.about == "mesh"}
    assert "missing" in said["shard 512"]
    dense = make_plan(gpu_cluster(nodes=128, gpus=8, model="H100"), Job(actor=PRESETS["405b"], workload=work))
    mesh = dense.plan.placements["actor_train"].mesh
    assert mesh is not None
    assert mesh.tensor > 1
    rows = replace(
        work, context=2**17, prompt_tokens=10**5, reply_tokens=2**14, max_tokens_per_microbatch=2**17
    )
    small = gpu_cluster(gpus=8, model="H100")
    long = make_plan(small, Job(actor=PRESETS["8b"], workload=rows)).plan.placements["actor_train"]
    assert long.mesh is not None
    assert long.mesh.tensor > 1
    with pytest.raises(UsageError, match="does not fit"):
        make_plan(small, Job(actor=PRESETS["8b"], workload=rows, choose_mesh=False))


def test_rows_that_do_not_fit_a_rank_are_shared_by_context_parallel_ranks() -> None:
    rows = replace(LONG, context=2**17, prompt_tokens=10**5, reply_tokens=2**14)
    cluster = gpu_cluster(gpus=8, model="H100")
    job = Job(actor=PRESETS["8b"], reference=PRESETS["8b"], workload=rows)
    found = make_plan(cluster, job)
    assert found.plan.placements["actor_train"].mesh == TrainMesh(shard=4, context=2)
    (why,) = [one.why for one in found.reasons if one.about == "mesh"]
    assert "2 ranks share the tokens of a row" in why
    assert "Ranks that only shard do not suffice" in why
    # A rank gets as many tokens of rows that are no longer than its micro-batch.
    short = replace(job, workload=replace(rows, max_tokens_per_microbatch=2**17))
    for other in (replace(job, choose_context=False), short):
        mesh = make_plan(cluster, other).plan.placements["actor_train"].mesh
        assert mesh is not None
        assert (mesh.context, mesh.tensor > 1) == (1, True)


def test_experts_are_distributed_where_gathering_them_takes_longer() -> None:
    short = replace(LONG, context=2048, prompt_tokens=1024, reply_tokens=1024, max_tokens_per_microbatch=2048)
    cluster = gpu_cluster(nodes=2, gpus=8, model="H100")
    job = Job(actor=PRESETS["30b-moe"], workload=replace(short, episodes=512, in_flight=512))
    found = make_plan(cluster, job)
    assert found.plan.placements["actor_train"].mesh == TrainMesh(expert=8)
    (why,) = [one.why for one in found.reasons if one.about == "mesh"]
    assert why.startswith("8 ranks share the experts. Ranks that only shard would be ")
    adapted = make_plan(cluster, replace(job, lora_rank=16)).plan.placements["actor_train"].mesh
    assert adapted is None or adapted.expert == 1, "experts with LoRA cannot be distributed"


def test_expert_parallel_ranks_hold_and_gather_their_experts_alone() -> None:
    shape = PRESETS["30b-moe"]
    whole, apart = (sharded_units(shape, mesh) for mesh in (TrainMesh(shard=8), TrainMesh(expert=8)))
    assert apart.share == pytest.approx(whole.share, rel=1e-3)
    experts = shape.expert_parameters / shape.layers
    assert whole.layer.gathered - apart.layer.gathered == pytest.approx(7 / 8 * experts, rel=1e-3)
    both = sharded_units(PRESETS["8b"], TrainMesh(shard=4, context=2))
    assert both == sharded_units(PRESETS["8b"], TrainMesh(shard=8)), "context parallel ranks shard, too"


def test_a_requested_mesh_is_honored_and_checked() -> None:
    cluster = gpu_cluster(gpus=8, model="H100")
    job = Job(actor=PRESETS["7b"], workload=LONG, mesh=MeshRequest(tensor=4))
    found = make_plan(cluster, job)
    assert found.plan.placements["actor_train"].mesh == TrainMesh(shard=2, tensor=4)
    assert found.to_json()["placements"]["actor_train"]["mesh"]["tensor"] == 4
    wrong = [
        ("7b", MeshRequest(tensor=8), "learner.parallel.tensor is 8, but it does not divide the 28 heads"),
        ("8b", MeshRequest(tensor=16), "does not divide the 8 key-value heads"),
        ("30b-moe", MeshRequest(tensor=2), "has experts, for which there is no tensor parallel plan"),
        ("7b", MeshRequest(expert=2), "has no experts"),
        ("30b-moe", MeshRequest(expert=3), "does not divide the 128 experts"),
        ("7b", MeshRequest(context=8), "context is 8, which does not divide the 28 heads"),
        ("7b", MeshRequest(replicate=16), "fits no number of training devices of this cluster"),
    ]
    for name, mesh, words in wrong:
        with pytest.raises(UsageError, match=words):
            make_plan(cluster, Job(actor=PRESETS[name], workload=LONG, mesh=mesh))


def test_an_engine_without_tensor_parallelism_gets_one_device() -> None:
    job = Job(actor=PRESETS["7b"], workload=LONG, tensor_parallel_engine=False)
    cluster = gpu_cluster(gpus=8, model="H100")
    assert make_plan(cluster, job).plan.placements["actor_infer"].tensor_parallel == 1
    with pytest.raises(UsageError, match="the embedded engine uses one device: set engine.kind=sglang"):
        make_plan(cluster, job, DeviceConfig(tensor_parallel=2))


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        (DeviceConfig(tensor_parallel=3), "does not divide the 28 heads"),
        (DeviceConfig(tensor_parallel=4, actor_infer="gpu[0-5]"), "does not divide the 6 devices"),
        (DeviceConfig(critic="gpu[0]"), "has no critic model"),
        (DeviceConfig(layout="split", actor_train="gpu[0-3]", actor_infer="gpu[0-3]"), "are colocated"),
        (DeviceConfig(layout="split", actor_train="gpu[0-7]"), "No split plan"),
        (DeviceConfig(tensor_parallel=14), "14, but there are 8"),
    ],
)
def test_contradictory_requests_are_rejected(requested: DeviceConfig, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(gpu_cluster(gpus=8, model="H100"), Job(actor=PRESETS["7b"], workload=LONG), requested)
    assert words in str(caught.value)
