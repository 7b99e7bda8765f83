"""A policy is trained behind a program that knows nothing but its address, and learns."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from training import Story, fast_versions, lines

import rollgym
from rollgym.chat import load_tokenizer
from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.sandbox.interpreter import find_python
from rollgym.sandbox.namespaces import find_bwrap
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.config_files import find_config
from rollgym.trainer.main import run_training
from rollgym.trainer.trusted import code_of

PROGRAM = Path(__file__).parents[2] / "examples" / "blackbox_bandit.py"
PYTHON = find_python().path
"""A Python that a sandbox can run."""
COMMAND = shlex.join([PYTHON, "-I", "-S", str(PROGRAM)])
pytestmark = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is not installed")


def taught(folder: Path, *settings: str) -> Path:
    """A policy that knows the form of an answer, and nothing more."""
    settings = (*settings, "evaluation.episodes=4", "tracking.tensorboard=false")
    run_training("bandit-grpo", settings, folder / "taught", imitate_only=True, plain=True)
    return folder / "taught" / "final"


def train_behind(folder: Path, model: Path, *settings: str) -> Path:
    """A run in which a program plays every episode."""
    chosen = [f"program={COMMAND}", f"model.path={model}", "warm_start=null", "tracking.tensorboard=false"]
    run_training("bandit-grpo", [*chosen, *settings], folder / "run", plain=True)
    return folder / "run"


def test_two_steps_are_trained_on_what_a_program_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    model = taught(tmp_path, "warm_start.episodes=100")
    folder = train_behind(
        tmp_path, model, "rollout.groups=2", "rollout.group_size=4", "stop.steps=2",
        "evaluation.every=0", "evaluation.episodes=3",
    )  # fmt: skip
    story = Story.of(folder)
    assert [line["step"] for line in story.metrics] == [1, 2]
    assert len(story.episodes) == 16
    assert {turn["policy_version"] for one in story.episodes for turn in one["turns"]} == {0, 1}
    for one in story.episodes:
        (turn,) = one["turns"]
        assert turn["observation"].startswith("Machines: ")
        assert len(turn["action_ids"]) == len(turn["logprobs"]) > 0
        assert one["outcome"] == "terminated"
        assert one["success"] == (turn["action"].strip() == "Comet")
        assert turn["reward"] in (0.0, 0.4, 1.0)
    before = (model / "model.safetensors").read_bytes()
    assert (folder / "final" / "model.safetensors").read_bytes() != before


GREEDY = """
import http.client, json, runpy, sys
usual = http.client.HTTPConnection.request

def asking(self, method, url, body, headers):
    narrow = {"temperature": 0.0, "top_p": 0.05, "top_k": 1, "min_p": 0.9, "seed": 5}
    return usual(self, method, url, json.dumps(json.loads(body) | narrow), headers)

http.client.HTTPConnection.request = asking
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_program_does_not_choose_what_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the likeliest token with one seed; the run samples as if it had not."""
    fast_versions(monkeypatch)
    model = taught(tmp_path, "warm_start.episodes=100")
    settings = (
        "rollout.groups=2", "rollout.group_size=4", "stop.steps=1", "agent.temperature=0.9",
        "evaluation.every=0", "evaluation.episodes=1",
    )  # fmt: skip
    plain = Story.of(train_behind(tmp_path, model, *settings))
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    words = shlex.join([PYTHON, "-I", "-S", str(script), str(PROGRAM)])
    greedy = tmp_path / "greedy"
    greedy.mkdir()
    story = Story.of(train_behind(greedy, model, f"program={words}", *settings))
    assert story.weights == plain.weights
    assert len({one["turns"][0]["action"] for one in story.episodes}) > 1, "all members said the same"
    assert story.metrics[0]["train_rollout_logprob_diff_max"] < 1e-4


CALLER = """
import http.client, json, os, sys
from urllib.parse import urlsplit

task, url = json.load(sys.stdin), urlsplit(os.environ["OPENAI_BASE_URL"])
body = {"model": task["model"], "messages": [{"role": "user", "content": "Pull."}], "tools": [
    {"type": "function", "function": {"name": "pull", "parameters": {"type": "object", "properties": {}}}}]}
connection = http.client.HTTPConnection(url.netloc)
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection.request("POST", url.path + "/chat/completions", json.dumps(body), headers)
reply = json.load(connection.getresponse())["choices"][0]["message"]["content"]
print(json.dumps({"reward": len(reply) % 2}))
"""


def test_the_endpoint_uses_the_template_options_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that was taught one form of calls is not asked for another one by its program."""
    fast_versions(monkeypatch)
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    settings = (
        f"program={shlex.join([PYTHON, '-I', '-S', str(script)])}", "warm_start=null", "model.context=1024",
        "agent.tool_format=llama", "rollout.groups=1", "rollout.group_size=2", "stop.steps=1",
        "evaluation.every=0", "evaluation.episodes=1", "tracking.tensorboard=false",
    )  # fmt: skip
    run_training("bandit-grpo", settings, tmp_path / "run", plain=True)
    tokenizer = load_tokenizer(tmp_path / "run" / "model")
    prompts = [tokenizer.decode(one["turns"][0]["prompt_ids"]) for one in Story.of(tmp_path / "run").episodes]
    assert len(prompts) == 2
    for prompt in prompts:
        assert '{"name": "NAME", "parameters": {"ARGUMENT": "VALUE"}}' in prompt, prompt
        assert "<tool_call>" not in prompt


PULLER = """
import http.client, json, os, sys
from urllib.parse import urlsplit

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc)
    connection.request("POST", address.path, json.dumps(body), headers)
    answer = json.load(connection.getresponse())
    connection.close()
    return answer

def play(episode):
    def ask(text):
        body = {"model": episode.model, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
        return post(episode.base_url + "/chat/completions", body)["choices"][0]["message"]["content"]
    ask("Write a title for: " + episode.task["observation"])
    reply = ask(episode.task["observation"])
    answer = post(episode.session_url + "/env/step", {"action": reply})
    assert set(answer) <= {"observation", "over", "error"}, answer
"""


def train_function(folder: Path, model: Path, **changes: Any) -> Story:
    """A run whose environment is played by a Python function in a sandbox."""
    folder.mkdir()
    script = folder / "puller.py"
    script.write_text(PULLER)
    program = {
        "function": f"{script}:play",
        "python": PYTHON,
        "reward": "environment",
        "auxiliary": "a title",
    }
    values: dict[str, Any] = {
        "program": {**program, "auxiliary": "a title"},
        "model.path": str(model),
        "warm_start": None,
        "tracking.tensorboard": False,
        "rollout.groups": 2,
        "rollout.group_size": 4,
        "stop.steps": 2,
        "evaluation.every": 0,
        "evaluation.episodes": 2,
    }
    settings = [f"{name}={json.dumps(value)}" for name, value in (values | changes).items()]
    run_training("bandit-grpo", settings, folder / "run", plain=True)
    return Story.of(folder / "run")


def check_pulls(story: Story, steps: int) -> None:
    """The environment rewarded what the model replied; the program's other request is in no episode."""
    assert [line["step"] for line in story.metrics] == list(range(1, steps + 1))
    assert len(story.episodes) >= steps * 8
    for one in story.episodes:
        assert one["outcome"] == "terminated", one.get("error")
        (turn,) = one["turns"]
        assert "title" not in turn["observation"]
        assert len(turn["action_ids"]) == len(turn["logprobs"]) > 0
        env = rollgym.make(one["spec"]["env_id"], **one["spec"].get("env_kwargs", {}))
        options = {"task": one["spec"]["task"], "split": one["spec"]["split"]}
        observation, _ = env.reset(seed=one["spec"]["env_seed"], options=options)
        _, reward, terminated, _, info = env.step(turn["action"])
        assert terminated
        assert (turn["observation"], turn["reward"]) == (observation, reward)
        assert one["success"] == info["success"]


def test_the_environment_s_reward_is_trained_on_and_auxiliary_calls_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    check_pulls(train_function(tmp_path / "here", taught(tmp_path, "warm_start.episodes=100")), 2)


@pytest.mark.slow
def test_episodes_of_a_program_continue_while_the_learner_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With max_staleness, and environments in worker processes."""
    fast_versions(monkeypatch)
    model = taught(tmp_path, "warm_start.episodes=100")
    changes = {"rollout.max_staleness": 1, "rollout.workers": 1, "stop.steps": 4}
    story = train_function(tmp_path / "stale", model, **changes)
    check_pulls(story, 4)
    assert max(line["staleness_max"] for line in story.metrics) <= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_program_plays_against_an_engine_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    fast_versions(monkeypatch)
    model = taught(tmp_path, "warm_start.episodes=100")
    check_pulls(train_function(tmp_path / "ray", model, **{"runtime": "ray", "ray.num_gpus": 1}), 2)


def test_a_program_that_cannot_run_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    for program, said in (
        ("no-such-program", "program: Program 'no-such-program' not found"),
        ("no_such_file.py:play", "program: .*(no_such_file.py|unprivileged user)"),
    ):
        with pytest.raises(UsageError, match=said):
            run_training(
                "bandit-grpo", [f"program={program}", "warm_start=null"], tmp_path / "run", plain=True
            )
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["program.command=sleep", "program.reward=luck"], "reward must be one of output, http, file"),
        (["program.reward=file"], "either command or function"),
        (["program=sleep", "program.reward=file"], "single value"),
        (["program.command=sleep", "program.sandbx=none"], "sandbox"),
    ],
)
def test_settings_of_a_program_are_checked(settings: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(TrainConfig, find_config("bandit-grpo"), ["warm_start=null", *settings])


def test_a_text_is_a_command_or_a_function() -> None:
    config = load(
        TrainConfig, find_config("bandit-grpo"), ["warm_start=null", "program=python3 a.py --b c:d"]
    )
    assert config.program is not None
    assert (config.program.command, config.program.sandbox) == ("python3 a.py --b c:d", "namespaces")
    config = load(TrainConfig, find_config("bandit-grpo"), ["warm_start=null", "program=my.agent:play"])
    assert config.program is not None
    assert config.program.function == "my.agent:play"


def test_the_code_of_a_program_is_named_before_it_runs() -> None:
    settings = ["program.command=a b", "program.sandbox=none", "program.reward=m:f", "warm_start=null"]
    named = code_of(load(TrainConfig, find_config("bandit-grpo"), settings))
    assert named == ["program.command a b", "program.reward_function m:f", "program.sandbox none"]


def test_a_program_is_not_imitated() -> None:
    with pytest.raises(UsageError, match="set warm_start to null"):
        load(TrainConfig, find_config("bandit-grpo"), [f"program={COMMAND}"])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_policy_behind_a_program_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast_versions(monkeypatch)
    model = taught(tmp_path)
    folder = train_behind(
        tmp_path, model, "rollout.groups=8", "rollout.max_in_flight=16", "stop.steps=25",
        "evaluation.every=0",
    )  # fmt: skip
    before, *_, after = lines(folder / "evaluations.jsonl")
    print(f"success {before['success_rate']:.3f} before, {after['success_rate']:.3f} after")
    assert after["success_rate"] > before["success_rate"] + 0.2
    assert after["success_rate"] > 0.75
