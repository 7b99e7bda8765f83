"""AutoDeviceMapping: which role of a training run works on which devices, and why."""

from __future__ import annotations

from rollgym.devices.detail import DetailedPlan
from rollgym.devices.inventory import cluster_from_nodes, find_cluster
from rollgym.devices.job import Job, Workload
from rollgym.devices.models import ModelShape, find_model
from rollgym.devices.planner import make_plan
from rollgym.devices.types import (
    MODEL_ROLES,
    ROLES,
    Cluster,
    Device,
    DeviceWishes,
    Node,
    Placement,
    Plan,
    Role,
)

__all__ = [
    "MODEL_ROLES",
    "ROLES",
    "Cluster",
    "DetailedPlan",
    "Device",
    "DeviceWishes",
    "Job",
    "ModelShape",
    "Node",
    "Placement",
    "Plan",
    "Role",
    "Workload",
    "cluster_from_nodes",
    "find_cluster",
    "find_model",
    "make_plan",
]
