"""AutoDeviceMapping: places the roles of a training run on devices and explains the plan."""

from __future__ import annotations

from rollgym.devices.inventory import cluster_from_nodes, find_cluster
from rollgym.devices.models import ModelShape, find_model
from rollgym.devices.planner import make_plan
from rollgym.devices.report import PlanReport
from rollgym.devices.types import (
    MODEL_ROLES,
    ROLES,
    Cluster,
    Device,
    DeviceConfig,
    Node,
    Placement,
    Plan,
    Role,
)
from rollgym.devices.workload import Job, Workload

__all__ = [
    "MODEL_ROLES", "ROLES", "Cluster", "PlanReport", "Device", "DeviceConfig", "Job", "ModelShape", "Node",
    "Placement", "Plan", "Role", "Workload", "cluster_from_nodes", "find_cluster", "find_model",
    "make_plan",
]  # fmt: skip
