"""Training on Ray: workload, planning, roles and runtime."""
