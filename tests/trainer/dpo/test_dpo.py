"""Runs on preference pairs: what the built-in policy learns, and what is written, reported and refused."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preferences import SMALL_DPO, write_config, write_pairs
from training import digest, lines
from tuning import write_config as write_sft

import rollgym
from rollgym.chat import ChatTemplate, load_tokenizer
from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.trainer.dpo.config import DPOConfig
from rollgym.trainer.dpo.config_files import find_config, is_dpo, known_configs
from rollgym.trainer.imitation.examples import Exchange, message_turns, token_example
from rollgym.trainer.sft.config_files import is_sft
from rollgym.view.overview import overview
from rollgym.view.reader import RunView

Prefer = Callable[..., Path]
Command = Callable[..., Any]
LEARN: dict[str, Any] = {
    "epochs": 8,
    "data": {"agent": "policy", "episodes": 96, "pairs": "return"},
    "evaluation": {"every": 0, "episodes": 40},
    "loss": {"beta": 0.5},
}


def from_file(path: Path) -> dict[str, Any]:
    return {"data": {"agent": None, "files": [str(path)]}}


def test_a_policy_learns_from_its_own_attempts(prefer: Prefer, tmp_path: Path) -> None:
    """It starts as a copy of the random agent, which says `yes` half of the time."""
    copy = write_sft(
        tmp_path, data={"agent": "random", "episodes": 64}, epochs=6, evaluation={"every": 0, "episodes": 2}
    )
    made = rollgym.sft(copy, out=tmp_path / "copy", plain=True)
    folder = prefer(**LEARN, model={"path": str(made.policy)}, validation={"fraction": 0.2})
    before, after = (line["success_rate"] for line in lines(folder / "evaluations.jsonl"))
    assert 0.2 < before < 0.8
    assert after > 0.9
    metrics = lines(folder / "metrics.jsonl")
    assert metrics[0]["validation_loss"] == pytest.approx(np.log(2), abs=1e-3)
    assert metrics[-1]["validation_preference_accuracy"] > 0.9
    assert metrics[-1]["validation_ranking_accuracy"] > 0.9
    assert metrics[-1]["validation_loss"] < 0.5
    assert metrics[-1]["reward_margin"] > 1.0
    assert metrics[-1]["reward_chosen"] > metrics[-1]["reward_rejected"]


def test_the_run_folder_holds_everything(prefer: Prefer) -> None:
    folder = prefer(validation={"fraction": 0.2, "every": 2}, stop={"steps": 3})
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert {
        "loss",
        "dpo_loss",
        "preference_accuracy",
        "reward_margin",
        "reward_chosen",
        "reward_rejected",
    } <= (set(metrics[1]))
    assert {"logprob_chosen", "logprob_rejected", "grad_norm", "learning_rate", "entropy"} <= set(metrics[1])
    assert "approx_kl" not in metrics[1]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["kind"], manifest["name"]) == ("dpo", "small")
    assert json.loads((folder / "summary.json").read_text())["kind"] == "dpo"
    assert load(DPOConfig, folder / "config.yaml").data.agent == "random"
    report = json.loads((folder / "data.json").read_text())
    counts = report["data"]["counts"]
    assert counts["read"] == 48 == counts["paired"] + counts["unpaired"]
    assert report["train"] + report["validation"] == counts["examples"] == counts["paired"] / 2
    run = rollgym.load_run(folder)
    assert (run.kind, len(run.evaluations)) == ("dpo", 3)
    view = RunView(folder)
    view.follow(final=True)
    curves = {curve["name"] for curve in overview(view)["curves"]}
    assert {"loss", "validation_loss", "preference_accuracy", "reward_margin"} <= curves


def test_the_first_loss_and_the_stored_reference_are_those_of_transformers(
    prefer: Prefer, tmp_path: Path
) -> None:
    file = write_pairs(tmp_path / "pairs.jsonl", 3)
    folder = prefer(**from_file(file), evaluation={"every": 0}, stop={"steps": 1}, epochs=1)
    (line,) = lines(folder / "metrics.jsonl")
    template = ChatTemplate(load_tokenizer(folder / "model"))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    expected: list[float] = []
    for number in range(3):
        for reply in ("yes", "no"):
            turns = message_turns(template, "", [Exchange(f"task {number}", reply)])
            (row,) = token_example("c", turns).sequences
            with torch.no_grad():
                logits = model(torch.from_numpy(row.ids)[None]).logits[0].double()
            logprobs = torch.log_softmax(logits, -1)
            expected += [float(logprobs[at - 1, row.ids[at]]) for at in row.action_positions]
    stored = np.load(folder / "reference_logprobs.npy", allow_pickle=False)
    assert stored.tolist() == pytest.approx(expected, abs=1e-4)
    assert line["loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert line["learned_tokens"] == len(expected)


def test_the_sft_term_is_added(prefer: Prefer, tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pairs.jsonl", 4)
    folder = prefer(**from_file(file), evaluation={"every": 0}, stop={"steps": 1}, loss={"sft_weight": 0.5})
    (line,) = lines(folder / "metrics.jsonl")
    assert line["sft_loss"] > 0.1
    assert line["loss"] == pytest.approx(line["dpo_loss"] + line["sft_loss"])


def test_lora_trains_and_exports_merged_weights(prefer: Prefer) -> None:
    pytest.importorskip("peft")
    folder = prefer(learner={"lora": {"rank": 4}}, stop={"steps": 2}, evaluation={"every": 0})
    assert digest(folder / "final" / "model.safetensors") != digest(folder / "model" / "model.safetensors")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": {"agent": None}}, "No data given"),
    ({"data": {"per_task": 1}}, r"data\.per_task must be at least 2"),
    ({"loss": {"beta": 0}}, "needs beta > 0"),
    ({"loss": {"gamma": 1}}, "gamma"),
    ({"data": {"keep": "best"}}, "keep"),
    ({"learner": {"critic": "shared"}}, "direct preference optimization has no critic"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_wrong_settings_are_refused(
    prefer: Prefer, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        prefer(**changes)
    assert not (tmp_path / "run").exists()


BAD: list[tuple[str, str]] = [
    ("", r"nothing to train on: .*pairs\.jsonl has no records"),
    ('{"prompt": "hi", "chosen": "yes"}\n', "rejected missing"),
    ('{"prompt": "hi", "chosen": "yes", "rejected": "yes"}\n', "chosen and rejected are equal"),
    (
        json.dumps({"prompt": "hi", "chosen": "yes " * 200, "rejected": "no"}) + "\n",
        "1 too long. The shortest .* tokens, and at most 128 fit",
    ),
]


@pytest.mark.parametrize(("content", "sentence"), BAD, ids=["empty", "missing", "equal", "long"])
def test_data_without_a_pair_are_refused_in_one_sentence(
    rollgym_command: Command, tmp_path: Path, content: str, sentence: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text(content)
    config = write_config(tmp_path, **from_file(tmp_path / "pairs.jsonl"))
    ran = rollgym_command("dpo", config, "--out", tmp_path / "run")
    assert ran.code == 2
    assert "Traceback" not in ran.err
    assert re.search(sentence, " ".join(ran.err.split())), ran.err
    assert not (tmp_path / "run").exists()


def test_the_api_and_the_command_give_the_same_result(rollgym_command: Command, tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pairs.jsonl", 8)
    settings = {**SMALL_DPO, "data": {}, "evaluation": {"every": 0, "episodes": 2}}
    result = rollgym.dpo(settings, data=file, out=tmp_path / "a", plain=True, stop={"steps": 2})
    assert result.to_json()["kind"] == "dpo"
    assert result.preference_accuracy is not None
    assert (result.steps, result.examples, result.validation_loss) == (2, 8, None)
    other = asyncio.run(rollgym.adpo(settings, data=file, out=tmp_path / "b", plain=True, stop={"steps": 2}))
    assert digest(other.policy / "model.safetensors") == digest(result.policy / "model.safetensors")
    config = write_config(tmp_path, data={"agent": None}, evaluation={"every": 0, "episodes": 2})
    words = ("dpo", config, "--data", file, "--out", tmp_path / "c", "stop.steps=2")
    ran = rollgym_command(*words, "--json")
    assert ran.code == 0, ran.err
    printed = json.loads(ran.out)
    assert (printed["loss"], printed["reward_margin"]) == (result.loss, result.reward_margin)
    assert digest(tmp_path / "c" / "final" / "model.safetensors") == digest(
        result.policy / "model.safetensors"
    )


def test_shipped_configs_load_and_are_told_apart(rollgym_command: Command, tmp_path: Path) -> None:
    for name, path in known_configs().items():
        assert load(DPOConfig, path).name == ""
        assert is_dpo(name)
        assert not is_sft(name)
        shown = rollgym_command("config", "show", name)
        assert shown.code == 0
        assert "beta: 0.1" in shown.out
    own = tmp_path / "own.yaml"
    own.write_text("data: {files: [a.jsonl]}\nloss: {beta: 0.2}\nmodel: {path: smollm2}\n")
    assert is_dpo(str(own))
    with pytest.raises(UsageError, match="It is one of `rollgym sft`"):
        find_config("smollm-sft")
    with pytest.raises(UsageError, match="It is one of `rollgym train`"):
        find_config("frozen-lake-grpo")


def test_settings_are_explained(rollgym_command: Command) -> None:
    ran = rollgym_command("config", "explain", "loss", "--dpo", "--json")
    assert ran.code == 0, ran.err
    keys = {row["key"] for row in json.loads(ran.out)}
    assert {"loss.beta", "loss.label_smoothing", "loss.sft_weight"} <= keys
    both = rollgym_command("config", "explain", "--dpo", "--sft")
    assert (both.code, "cannot be combined" in both.err) == (2, True)
