"""Episodes out and in: what export writes, import reads back, with the same tokens and rewards."""

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollgym
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.evaluation.trajectory_export import episode_messages, export_run, preference_rows
from rollgym.evaluation.trajectory_import import import_conversations, recorded_manifest
from rollgym.io.run_dir import RunFolder
from rollgym.trainer.sft.records import Chat, DataFile, read_records

pytest.importorskip("pyarrow")
Command = Callable[..., Any]
SUFFIX = {"messages": "rows.jsonl", "parquet": "rows.parquet", "datasets": "rows"}

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
ids = st.lists(st.integers(0, 2**31), min_size=1, max_size=4).map(tuple)
finite = st.floats(-1e9, 1e9, allow_nan=False)


@st.composite
def episodes(draw: Callable[..., Any], number: int = 0) -> Episode:
    turns = []
    has_logprobs = draw(st.booleans())
    for position in range(draw(st.integers(1, 4))):
        action_ids = draw(ids)
        turns.append(
            Turn(
                observation=draw(text),
                action=draw(text),
                response=draw(text),
                reward=draw(finite),
                prompt_ids=draw(ids),
                action_ids=action_ids,
                logprobs=tuple(draw(st.floats(-50, 0)) for _ in action_ids) if has_logprobs else (),
                new_row=position > 0 and draw(st.booleans()),
            )
        )
    outcome = draw(st.sampled_from([Outcome.TERMINATED, Outcome.TRUNCATED, Outcome.TURN_LIMIT]))
    last = turns[-1]
    turns[-1] = Turn(
        **{name: getattr(last, name) for name in Turn.__slots__}
        | {"terminated": outcome is Outcome.TERMINATED, "truncated": outcome is Outcome.TRUNCATED}
    )
    return Episode(
        spec=EpisodeSpec(
            episode_id=f"episode-{number}",
            env_id="rollgym/Bandit-v0",
            env_kwargs=draw(st.dictionaries(text, st.integers(0, 9) | text, max_size=2)),
            env_version="v0",
            task=draw(st.none() | st.integers(0, 99)),
            split="test",
            env_seed=draw(st.integers(0, 2**31)),
            group_id="group",
            member=number,
        ),
        outcome=outcome,
        turns=tuple(turns),
        instructions=draw(text),
        final_observation=draw(text),
        success=draw(st.none() | st.booleans()),
    )


runs = st.integers(1, 3).flatmap(lambda count: st.tuples(*(episodes(number) for number in range(count))))


def write_run(folder: Path, recorded: tuple[Episode, ...] | list[Episode]) -> Path:
    run = RunFolder.create(folder, recorded_manifest(folder, "rollgym/Bandit-v0", len(recorded)))
    for episode in recorded:
        run.append(episode)
    run.close()
    return folder


def recorded_values(episode: Episode, tokens: bool) -> dict[str, Any]:
    """Everything that a round trip must keep."""
    spec = episode.spec
    names = ("reward", "terminated", "truncated", "action")
    names += ("observation", "response", "prompt_ids", "action_ids", "logprobs", "new_row") if tokens else ()
    return {
        "spec": (
            spec.episode_id,
            spec.env_id,
            spec.env_kwargs,
            spec.split,
            spec.task,
            spec.env_seed,
            spec.member,
        ),
        "turns": [[getattr(turn, name) for name in names] for turn in episode.turns],
        "end": (episode.outcome, episode.success, episode.total_reward, episode.final_observation),
        "messages": episode_messages(episode),
    }


@pytest.mark.parametrize("format", SUFFIX)
@pytest.mark.parametrize("form", ["tokens", "sft"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(recorded=runs)
def test_export_and_import_give_the_same_tokens_and_rewards(
    format: str, form: str, recorded: tuple[Episode, ...]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder / "run", recorded)
        done = export_run(folder / "run", folder / SUFFIX[format], format=format, form=form)
        assert done.episodes == len(recorded)
        imported = import_conversations(folder / SUFFIX[format], folder / "again")
        assert imported.episodes == len(recorded)
        again = list(rollgym.load_run(folder / "again").episodes)
        tokens = form == "tokens"
        assert [recorded_values(e, tokens) for e in again] == [recorded_values(e, tokens) for e in recorded]


def evaluate(folder: Path, env: str = "rollgym/Countdown-v0", **options: Any) -> Path:
    rollgym.evaluate(env, "random", episodes=6, per_task=2, out=folder, **options)
    return folder


def test_exported_conversations_are_read_by_sft(tmp_path: Path) -> None:
    run = evaluate(tmp_path / "run")
    for format in ("messages", "parquet"):
        path = tmp_path / SUFFIX[format]
        export_run(run, path, format=format)
        chats = [record.content for record in read_records(DataFile(path))]
        assert len(chats) == 6
        for chat, episode in zip(chats, rollgym.load_run(run).episodes, strict=True):
            assert isinstance(chat, Chat)
            assert chat.system == episode.instructions
            assert [e.reply for e in chat.exchanges] == [turn.action for turn in episode.turns]


def test_imported_episodes_are_demonstrations_of_a_warm_start(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from rollgym.trainer.config import EnvConfig, WarmStartConfig
    from rollgym.trainer.imitation.warm_start import demonstrations

    run = tmp_path / "run"
    rollgym.evaluate("rollgym/FrozenLake-v0", "expert", episodes=4, split="train", out=run)
    export_run(run, tmp_path / "rows.jsonl")
    import_conversations(tmp_path / "rows.jsonl", tmp_path / "again")
    components: Any = SimpleNamespace(config=SimpleNamespace(envs=[EnvConfig(id="rollgym/FrozenLake-v0")]))

    def actions(folder: Path) -> list[list[str]]:
        demos = asyncio.run(demonstrations(components, WarmStartConfig(run=str(folder))))
        return [[turn.action for turn in demo.episode.turns] for demo in demos]

    assert actions(tmp_path / "again") == actions(run) != []


def test_tools_and_their_results_are_exported_and_read_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rollgym.evaluate("rollgym/ServiceDesk-v0", "expert", episodes=3, out=run)
    recorded = list(rollgym.load_run(run).episodes)
    for format, name in SUFFIX.items():
        export_run(run, tmp_path / name, format=format)
        import_conversations(tmp_path / name, tmp_path / f"{format}-again")
        again = list(rollgym.load_run(tmp_path / f"{format}-again").episodes)
        assert [e.tools for e in again] == [e.tools for e in recorded]
        assert [episode_messages(e) for e in again] == [episode_messages(e) for e in recorded]
        assert [e.total_reward for e in again] == [e.total_reward for e in recorded]


def played(number: int, task: int, reward: float, *actions: str) -> Episode:
    turns = [Turn(observation="?", action=action) for action in actions]
    turns[-1] = Turn(observation="?", action=actions[-1], reward=reward, terminated=True)
    spec = EpisodeSpec(
        episode_id=f"e{number}", env_id="rollgym/Bandit-v0", task=task, split="test", member=number
    )
    return Episode(spec=spec, outcome=Outcome.TERMINATED, turns=tuple(turns), instructions="Play.")


def test_preference_pairs_share_the_prompt_up_to_the_first_difference() -> None:
    group = [played(0, 1, 0.2, "a", "b"), played(1, 1, 1.0, "a", "c"), played(2, 1, 0.5, "d")]
    same = [played(3, 2, 1.0, "x"), played(4, 2, 1.0, "y")]
    rows = list(preference_rows([*group, *same]))
    assert len(rows) == 1
    row = rows[0]
    assert (row["chosen_id"], row["rejected_id"]) == ("e1", "e0")
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.2)
    assert [m["content"] for m in row["prompt"]] == ["Play.", "?", "a", "?"]
    assert [m["content"] for m in row["chosen"]] == ["c"]
    assert [m["content"] for m in row["rejected"]] == ["b"]


def test_preference_pairs_in_every_format(tmp_path: Path) -> None:
    group = [played(0, 1, 0.0, "a"), played(1, 1, 1.0, "b")]
    run = write_run(tmp_path / "run", group)
    for format, name in SUFFIX.items():
        done = export_run(run, tmp_path / name, format=format, form="preference")
        assert (done.rows, done.episodes) == (1, 2)


def test_other_recorded_conversations_become_episodes(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    rows = [{"conversation": chat, "reward": 0.5}, {"conversation": [*chat, chat[0]], "reward": None}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = {"messages": "conversation", "reward": "reward"}
    assert import_conversations(path, tmp_path / "run", columns=columns).episodes == 2
    first, second = rollgym.load_run(tmp_path / "run").episodes
    assert (first.total_reward, second.total_reward) == (0.5, 0.0)
    assert (first.turns[0].observation, first.turns[0].action) == ("2+2?", "4")
    assert second.final_observation == "2+2?"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "hi"}, "expected a column messages or input_ids; the columns are text"),
        ({"messages": []}, "messages have no assistant message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "needs a user or tool message before it"),
        ({"messages": "hello"}, "messages are text that is not JSON"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role must be one of"),
        ({"input_ids": [1]}, "there is no column"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "rewards": [1, 2]}, "rewards must be a list of 1"),  # noqa: E501
    ],
)  # fmt: skip
def test_rows_that_are_not_conversations_leave_no_folder(tmp_path: Path, row: Any, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n")
    with pytest.raises(UsageError, match=reason) as caught:
        import_conversations(path, tmp_path / "run")
    assert f"{path}:1: " in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_commands(tmp_path: Path, rollgym_command: Command) -> None:
    run = evaluate(tmp_path / "run")
    ran = rollgym_command("export", "messages", run, "--out", "a.jsonl")
    assert (ran.code, ran.out) == (0, "a.jsonl: 6 rows of 6 episodes\n")
    ran = rollgym_command("export", "messages", run, "--out", "a.jsonl")
    assert ran.code == 2
    assert "exists already" in ran.err
    ran = rollgym_command("export", "parquet", run, "--out", "t.parquet", "--form", "tokens")
    assert "6 without recorded tokens" in ran.err
    assert not (tmp_path / "t.parquet").exists()
    assert rollgym_command("export", "datasets", run, "--out", "d", "--form", "other").code == 2
    assert rollgym_command("import", "a.jsonl", "--out", "again").code == 0
    assert rollgym_command("view", "again").code == 0
    assert rollgym_command("export", "harbor", "--help").code == 0


def test_the_real_package_reads_an_exported_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    run = evaluate(tmp_path / "run")
    export_run(run, tmp_path / "rows", format="datasets")
    loaded = datasets.load_from_disk(str(tmp_path / "rows"))
    assert len(loaded) == 6
    assert loaded[0]["messages"][0]["role"] == "system"
