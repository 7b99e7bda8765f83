"""Fine-tuning runs of the built-in policy: what they learn, write, report and refuse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import digest, lines
from tuning import SMALL_SFT, write_chats, write_config

import rollgym
from rollgym.chat import ChatTemplate, load_tokenizer
from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.trainer.config import LearnerConfig
from rollgym.trainer.imitation.examples import Exchange, message_turns, supervised_batch, token_example
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.sft.config import SFTConfig
from rollgym.trainer.sft.config_files import find_config, known_configs
from rollgym.trainer.sft.loop import mean_loss, validations_since_best
from rollgym.view.overview import overview
from rollgym.view.reader import RunView

Tune = Callable[..., Path]
Command = Callable[..., Any]
LEARN: dict[str, Any] = {"epochs": 12, "data": {"episodes": 24}, "evaluation": {"every": 0, "episodes": 20}}


def data_report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "data.json").read_text())
    return report


def phases(folder: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["phase"]) for line in lines(folder / "evaluations.jsonl")]


def test_a_policy_learns_from_demonstrations(tune: Tune) -> None:
    folder = tune(**LEARN, validation={"fraction": 0.2})
    before, after = (line["success_rate"] for line in lines(folder / "evaluations.jsonl"))
    assert before < 0.2
    assert after > 0.9
    metrics = lines(folder / "metrics.jsonl")
    assert metrics[0]["step"] == 0
    assert metrics[-1]["validation_loss"] < 0.5 * metrics[0]["validation_loss"]
    assert metrics[-1]["loss"] < 0.5 * metrics[1]["loss"]


def test_a_policy_learns_from_conversations(tune: Tune, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 24)
    folder = tune(**{**LEARN, "data": {"agent": None, "files": [str(chats)]}})
    assert lines(folder / "evaluations.jsonl")[-1]["success_rate"] > 0.9
    assert data_report(folder)["data"]["counts"] == {"read": 24, "examples": 24}


def test_the_run_folder_holds_everything(tune: Tune) -> None:
    folder = tune(validation={"fraction": 0.2, "every": 2}, stop={"steps": 5})
    assert phases(folder) == [(0, "before"), (2, "training"), (4, "training"), (5, "after")]
    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in metrics if "validation_loss" in line] == [0, 2, 4, 5]
    assert {"loss", "grad_norm", "learning_rate", "epoch", "learned_tokens"} <= set(metrics[1])
    assert "approx_kl" not in metrics[1]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["kind"], manifest["name"]) == ("sft", "small")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["kind"], summary["steps"], summary["ended"]) == ("sft", 5, "all 5 steps are done")
    config = load(SFTConfig, folder / "config.yaml")
    assert config.data.agent == "lessons:Teacher"
    report = data_report(folder)
    assert (report["train"], report["validation"]) == (9, 3)
    assert len(lines(folder / "demonstrations.jsonl")) == 12
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "best",
        "step-00000004",
        "step-00000005",
    ]
    run = rollgym.load_run(folder)
    assert (run.kind, len(run.evaluations)) == ("sft", 4)


def test_the_result_can_be_evaluated_and_loaded_by_transformers(
    tune: Tune, rollgym_command: Command, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    folder = tune(**LEARN)
    words = ("--agent", "lm", "--model", folder / "final", "--split", "dev", "--episodes", 20)
    assert rollgym_command("eval", "lessons:Yes", *words, "--out", tmp_path / "e").code == 0
    after = lines(folder / "evaluations.jsonl")[-1]["success_rate"]
    assert json.loads((tmp_path / "e" / "summary.json").read_text())["success_rate"] == after
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "final")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "task 3"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt["input_ids"] if hasattr(prompt, "keys") else prompt
    made = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip() == "yes"


def test_the_loss_is_the_likelihood_of_the_replies_whatever_the_sampling(tune: Tune, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 3, turns=2)
    settings: dict[str, Any] = {
        "data": {"agent": None, "files": [str(chats)]},
        "agent": {"temperature": 0.0},
        "evaluation": {"every": 0},
        "stop": {"steps": 1},
        "epochs": 1,
    }
    folder = tune(**settings)
    (line,) = lines(folder / "metrics.jsonl")
    template = ChatTemplate(load_tokenizer(folder / "model"))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    losses: list[float] = []
    for number in range(3):
        exchanges = [Exchange(f"task {number}", "yes"), Exchange("turn 1", "yes")]
        (row,) = token_example("c", message_turns(template, "", exchanges)).sequences
        with torch.no_grad():
            logits = model(torch.from_numpy(row.ids)[None]).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)
        losses += [-float(logprobs[at - 1, row.ids[at]]) for at in row.action_positions]
    assert line["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert line["learned_tokens"] == len(losses)


def test_micro_batches_do_not_change_the_result(tune: Tune, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 8, turns=2)
    same: dict[str, Any] = {"data": {"agent": None, "files": [str(chats)]}, "evaluation": {"every": 0}}
    whole = lines(tune("whole", **same) / "metrics.jsonl")
    parts = lines(tune("parts", "learner.max_tokens_per_microbatch=24", **same) / "metrics.jsonl")
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], abs=1e-4)


def test_only_successful_episodes_are_kept(tune: Tune) -> None:
    with pytest.raises(UsageError, match=r"nothing to train on: of 12 records 12 not successful.*data\.keep"):
        tune(data={"agent": "lessons:Wrong", "keep": "successful"})
    folder = tune(data={"agent": "random", "episodes": 24, "per_task": 8, "keep": "best"}, stop={"steps": 1})
    report = data_report(folder)
    counts = report["data"]["counts"]
    assert counts["read"] == 24
    assert 1 <= report["train"] <= 3
    assert counts["unsuccessful"] + counts.get("not_best", 0) + report["train"] == 24


def test_the_policy_itself_can_play_the_demonstrations(tune: Tune) -> None:
    settings = {"agent": "policy", "episodes": 4}
    folder = tune(data=settings, stop={"steps": 1}, evaluation={"every": 0})
    report = data_report(folder)
    assert report["recorded_token_ids"] + report["retokenized"] == 4
    recorded = [turn for line in lines(folder / "demonstrations.jsonl") for turn in line["turns"]]
    assert all(turn["action_ids"] for turn in recorded)
    assert report["recorded_token_ids"] > 0


def test_episodes_of_a_run_are_trained_on_except_held_out_ones(
    tune: Tune, rollgym_command: Command, tmp_path: Path
) -> None:
    for split in ("train", "dev"):
        words = ("--agent", "lessons:Teacher", "--split", split, "--episodes", 6, "--out", tmp_path / split)
        assert rollgym_command("eval", "lessons:Yes", *words).code == 0
    files = [str(tmp_path / "train"), str(tmp_path / "dev" / "episodes.jsonl")]
    folder = tune(data={"agent": None, "files": files}, stop={"steps": 1})
    assert data_report(folder)["data"]["counts"] == {"read": 12, "examples": 6, "held_out": 6}
    with pytest.raises(UsageError, match=r"6 on a task of the evaluation split\. Record episodes of another"):
        tune("other", data={"agent": None, "files": files[1:]})


def test_a_validation_file_is_not_trained_on(tune: Tune, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 8)
    other = write_chats(tmp_path / "other.jsonl", 4, reply="no")
    folder = tune(
        data={"agent": None, "files": [str(chats)]},
        validation={"files": [str(other)], "every": 2},
        evaluation={"every": 0, "episodes": 1},
        epochs=6,
    )
    report = data_report(folder)
    assert (report["train"], report["validation"]) == (8, 4)
    last = lines(folder / "metrics.jsonl")[-1]
    assert last["validation_loss"] > 3 * last["loss"], "it has learned to say the opposite"


def test_training_stops_when_the_validation_loss_no_longer_falls(tune: Tune, tmp_path: Path) -> None:
    chats, other = write_chats(tmp_path / "a.jsonl", 8), write_chats(tmp_path / "b.jsonl", 4, reply="no")
    settings: dict[str, Any] = {
        "data": {"agent": None, "files": [str(chats)]},
        "validation": {"files": [str(other)], "every": 1},
        "evaluation": {"every": 0, "episodes": 1},
        "epochs": 40,
        "stop": {"patience": 3},
    }
    folder = tune(**settings)
    summary = json.loads((folder / "summary.json").read_text())
    assert "the validation loss has not improved for 3 validations" in summary["ended"]
    assert 3 <= summary["steps"] < 80
    # The stop condition is found again in the log of a resumed run.
    resumed = tune(resume=True, **settings)
    assert json.loads((resumed / "summary.json").read_text())["steps"] == summary["steps"]


def test_validations_since_the_best() -> None:
    assert validations_since_best([]) == 0
    assert validations_since_best([(0, 3.0), (1, 2.0), (2, 2.0), (3, 5.0)]) == 2
    assert validations_since_best([(0, 3.0), (1, 1.0)]) == 0


def test_without_environments_the_lowest_validation_loss_is_kept(tune: Tune, tmp_path: Path) -> None:
    made = tune("made", stop={"steps": 0}, evaluation={"every": 0, "episodes": 1})
    chats = write_chats(tmp_path / "chats.jsonl", 12)
    folder = tune(
        envs=[],
        data={"agent": None, "files": [str(chats)]},
        model={"path": str(made / "model")},
        validation={"fraction": 0.25, "every": 2},
    )
    assert lines(folder / "evaluations.jsonl") == []
    losses = {
        line["step"]: line["validation_loss"]
        for line in lines(folder / "metrics.jsonl")
        if "validation_loss" in line
    }
    best = json.loads((folder / "checkpoints" / "best" / "state.json").read_text())["step"]
    assert losses[best] == min(losses.values())
    assert (folder / "final" / "model.safetensors").is_file()


def test_the_report_page_shows_the_losses_and_evaluations(
    tune: Tune, rollgym_command: Command, tmp_path: Path
) -> None:
    folder = tune(validation={"fraction": 0.2, "every": 2})
    run = RunView(folder)
    run.follow(final=True)
    page = overview(run)
    curves = {curve["name"]: len(curve["points"]) for curve in page["curves"]}
    assert (curves["loss"], curves["validation_loss"], curves["grad_norm"]) == (6, 4, 6)
    (headline,) = page["headline"]["trained"]
    assert (headline["first"]["phase"], headline["last"]["phase"]) == ("before", "after")
    assert set(page["split"]["parts"]) == {"train", "validate"}
    ran = rollgym_command("view", folder, "--export", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_lora_trains_and_exports_merged_weights(tune: Tune) -> None:
    pytest.importorskip("peft")
    folder = tune(learner={"lora": {"rank": 4}}, stop={"steps": 2}, evaluation={"every": 0})
    assert digest(folder / "final" / "model.safetensors") != digest(folder / "model" / "model.safetensors")


def test_a_model_without_chat_template_is_refused(tune: Tune, tmp_path: Path) -> None:
    made = tune("made", stop={"steps": 0}, evaluation={"every": 0, "episodes": 1})
    model = tmp_path / "bare"
    shutil.copytree(made / "model", model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="no chat template"):
        tune(model={"path": str(model)})
    assert not (tmp_path / "run").exists()


def test_a_context_that_is_too_short_is_named(tune: Tune, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 2, turns=1, reply="yes " * 200)
    with pytest.raises(UsageError, match=r"2 too long\. The shortest .* has \d+ tokens, and at most 128 fit"):
        tune(data={"agent": None, "files": [str(chats)]})
    with pytest.raises(UsageError, match=r"data\.max_tokens=500 exceeds the model's context of 128"):
        tune("other", data={"agent": None, "files": [str(chats)], "max_tokens": 500})


def test_broken_lines_are_reported_with_file_and_line(
    tune: Tune, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 4)
    with chats.open("a") as file:
        file.write('{"messages": [{"role": "usr", "content": "hi"}]}\n{"messages"')
    folder = tune(data={"agent": None, "files": [str(chats)]}, stop={"steps": 1})
    shown = capfd.readouterr().err
    assert "chats.jsonl:5: messages[0]: the role 'usr' is not supported" in shown
    assert "2 unusable" in shown
    report = data_report(folder)
    assert [one["place"].rpartition(":")[2] for one in report["data"]["dropped"]] == ["5", "6"]
    with pytest.raises(UsageError, match=r"chats\.jsonl:5: .*role 'usr'"):
        tune("strict", "data.strict=true", data={"agent": None, "files": [str(chats)]})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": {"agent": None}}, "No data given"),
    ({"envs": []}, r"data\.agent requires envs"),
    ({"envs": [], "data": {"agent": None, "files": ["a"]}}, "No model given"),
    ({"evaluation": {"split": "train"}}, "also an environment's training split"),
    ({"learner": {"epochs": 2}}, "set epochs and batch_size instead"),
    ({"learner": {"critic": "shared"}}, "has no critic"),
    ({"stop": {"patience": 2}}, r"stop\.patience requires validation"),
    ({"validation": {"fraction": 0.1, "files": ["a"]}}, "cannot be combined"),
    ({"data": {"keep": "good"}}, "all"),
    ({"data": {"imitate_mistakes": True}}, r"requires data\.mistakes"),
    ({"data": {"mistakes_agent": "expert"}}, r"data\.mistakes_agent requires data\.mistakes"),
    ({"learner": {"strategy": "ddp"}}, "require runtime=ray"),
    ({"imports": ["a b"]}, "not a valid module name"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_wrong_settings_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load(SFTConfig, write_config(tmp_path, **changes))


@pytest.mark.parametrize("name", known_configs())
def test_every_shipped_config_loads(name: str) -> None:
    assert find_config(name).read_text().startswith("# ")
    assert load(SFTConfig, find_config(name)).data.agent == "expert"


def test_a_config_of_training_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"sokoban-grpo.*one of `rollgym train`.*smollm-sft"):
        find_config("sokoban-grpo")


def test_a_missing_file_is_named_before_anything_is_written(tune: Tune, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Data file not found: nothing\.jsonl"):
        tune(data={"agent": None, "files": ["nothing.jsonl"]})
    assert not (tmp_path / "run").exists()


def test_the_command_and_the_python_api_train_the_same(
    rollgym_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 8)
    small = {**SMALL_SFT, "data": {}, "evaluation": {"every": 0, "episodes": 2}}
    result = rollgym.sft(small, data=chats, out=tmp_path / "python", plain=True, **{"stop.steps": 2})
    assert (result.steps, result.examples) == (2, 8)
    assert result.loss is not None
    path = write_config(tmp_path, data={"agent": None}, evaluation={"every": 0, "episodes": 2})
    words = (path, "stop.steps=2", "--data", chats, "--keep", "successful", "--out", tmp_path / "command")
    ran = rollgym_command("sft", *words, "--json", "--plain")
    assert ran.code == 0, ran.err
    printed = json.loads(ran.out)
    assert (printed["kind"], printed["loss"], printed["steps"]) == ("sft", result.loss, 2)
    assert digest(tmp_path / "python" / "final" / "model.safetensors") == digest(
        tmp_path / "command" / "final" / "model.safetensors"
    )
    ran = rollgym_command("sft", "--resume", "--trust-code", "--out", tmp_path / "command", "--plain")
    assert ran.code == 0, ran.err
    assert "8 examples" in ran.out
    assert "rollgym eval lessons:Yes --agent lm" in ran.out


def test_a_coroutine_trains_the_same(tmp_path: Path) -> None:
    import asyncio

    chats = write_chats(tmp_path / "chats.jsonl", 4)
    small = {**SMALL_SFT, "data": {}, "evaluation": {"every": 0, "episodes": 1}, "stop": {"steps": 1}}

    async def work() -> Any:
        return await rollgym.asft(small, data=[chats], out=tmp_path / "run", plain=True)

    assert asyncio.run(work()).steps == 1


def test_settings_of_a_run_without_trust_run_no_code(tune: Tune, rollgym_command: Command) -> None:
    folder = tune(stop={"steps": 1}, evaluation={"every": 0, "episodes": 1})
    ran = rollgym_command("sft", "--resume", "--out", folder)
    assert ran.code == 2
    assert "data.agent lessons:Teacher" in ran.err


def test_the_validation_loss_is_a_mean_over_tokens(tune: Tune) -> None:
    folder = tune(stop={"steps": 0}, evaluation={"every": 0, "episodes": 1})
    template = ChatTemplate(load_tokenizer(folder / "model"))
    examples = [
        token_example("a", message_turns(template, "", [Exchange("task 1", "yes")])),
        token_example(
            "b", message_turns(template, "", [Exchange("task 2", "no"), Exchange("turn 1", "yes")])
        ),
    ]
    learner = Learner(folder / "model", LearnerConfig(threads=1), LossConfig("reinforce", tis_cap=None))
    loss = mean_loss(learner, examples)
    assert loss == pytest.approx(-np.mean(learner.logprobs(supervised_batch(examples))))


def test_the_settings_are_listed_shown_and_explained(rollgym_command: Command, tmp_path: Path) -> None:
    assert "smollm-sft" in rollgym_command("config", "list").out.splitlines()
    ran = rollgym_command("config", "show", "smollm-sft", "epochs=7")
    assert (ran.code, ran.err) == (0, "")
    assert "epochs: 7" in ran.out.splitlines()
    (tmp_path / "own.yaml").write_text("extends: smollm-sft\nbatch_size: 3\n")
    assert "batch_size: 3" in rollgym_command("config", "show", "own.yaml").out.splitlines()
    (tmp_path / "all.yaml").write_text(ran.out)
    assert rollgym_command("config", "show", "all.yaml").out == ran.out
    rows = json.loads(rollgym_command("config", "explain", "data", "--sft", "--json").out)
    assert "data.keep" in {row["key"] for row in rows}
    assert "data" in json.loads(rollgym_command("config", "schema", "--sft").out)["properties"]
