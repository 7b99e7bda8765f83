"""Plan the roles of a training run on a cluster that need not exist.

python examples/plan_devices.py [MODEL] [NODES]
"""

from __future__ import annotations

import sys

from rollgym.devices import Job, Workload, cluster_from_nodes, find_model, make_plan
from rollgym.devices.types import DeviceConfig


def main(model: str = "7b", nodes: int = 1) -> None:
    """Plan a GRPO run on nodes with eight H100 each, and print the devices of each role."""
    cluster = cluster_from_nodes([(f"node{n}", 8, 96, 2**40) for n in range(nodes)], model="H100")
    shape = find_model(model)
    workload = Workload(checkpointing=True)
    plan = make_plan(cluster, Job(actor=shape, reference=shape, workload=workload), DeviceConfig())
    print(f"{model} on {8 * nodes} H100: {plan.plan.layout}")
    for role, placement in plan.plan.placements.items():
        print(
            f"  {role:12} {len(placement.devices):4} devices, tensor parallel {placement.tensor_parallel}, "
            f"data parallel {placement.data_parallel}, sharded: {placement.sharding}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
