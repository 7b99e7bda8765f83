"""The benchmarks run in their quick form and end with one line of JSON. What they measure is in docs/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KEYS = {
    "rollout": {"ratio_to_bound", "slow_one_shift"},
    "controller": {"ms_per_turn", "flat_ratio", "calls_ratio"},
    "engine": {"ratio_1", "ratio_16", "ratio_64", "ratio_multiturn"},
    "pool_steps": set(),
    "env_steps": set(),
    "train_step": {"ours_seconds", "scaling"},
    "shop_steps": {"ratio_to_html", "kb_per_env"},
    "shop_start": set(),
    "shop_search": set(),
    "shop_browser": {"text_to_browser"},
    "sandbox": {"ratio_to_process", "ratio_to_bare_process"},
    "async_training": {"ratio", "policies"},
    "cluster_scaling": {"efficiency", "overhead_ms"},
    "weight_sync": {"strategies"},
    "plan_memory": {"worst_error"},
    "plan_speed": {"training", "generation"},
    "mesh_conformance": {"strategies", "single_mb"},
    "smollm_step": {"ratio", "peak_gb"},
    "data_rows": {"memory_mb", "formats"},
    "endpoint_load": {"requests_per_second", "p99_ms", "rss_peak_mb"},
}
FLAGS = {"train_step": ["--no-peer"]}
"""The peer would be installed first."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_a_benchmark_ends_with_one_line_of_json(name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", "--quick", *FLAGS.get(name, [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == name
    assert KEYS[name] <= result.keys()


def test_the_controller_does_no_more_for_a_turn_when_more_episodes_play() -> None:
    code = (
        "import argparse, sys; sys.path.insert(0, 'benchmarks'); import controller as c;"
        "args = argparse.Namespace(group_size=8);"
        "print(c.calls_per_turn(1024, args) / c.calls_per_turn(64, args))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.15


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_benchmark_says_what_it_measures(name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
