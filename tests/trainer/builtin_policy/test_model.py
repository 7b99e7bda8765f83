"""The built-in policy: its files, its tokenizer, its template, its weights."""

import hashlib
import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import rollgym
from rollgym.core.errors import MissingExtra, RollgymError, RunError, UsageError
from rollgym.core.extras import install_command
from rollgym.trainer.builtin_policy.corpus import Corpus, collect
from rollgym.trainer.builtin_policy.model import ABOUT, SIZES, PolicyInfo, make_model, make_policy
from rollgym.trainer.builtin_policy.tokenizer import SPECIAL, make_tokenizer, pattern
from rollgym.trainer.cli.model import new

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAKE, SOKOBAN = "rollgym/FrozenLake-v0", "rollgym/Sokoban-v0"
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
GAME_TEXT = st.lists(
    st.sampled_from([*" \n\t#_.:,!XPé√", "  ", "Up", "up", "UP", "left", "The", "lake", "12", *SPECIAL])
).map("".join)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyInfo:
    return make_policy([LAKE, SOKOBAN], tmp_path_factory.mktemp("policies") / "p", size="tiny")


@pytest.fixture(scope="module")
def tokenizer(policy: PolicyInfo) -> Any:
    return transformers.AutoTokenizer.from_pretrained(policy.path)


def tokenizer_for(*env_ids: str) -> Any:
    return make_tokenizer([collect(env_id, {}) for env_id in env_ids], 1024)


def cut(tokenizer: Any, text: str) -> list[str]:
    """The text of each token."""
    return [tokenizer.decode([number]) for number in tokenizer(text)["input_ids"]]


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


# The files.


def test_the_same_arguments_give_the_same_bytes_in_another_process(
    policy: PolicyInfo, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from rollgym.trainer.builtin_policy.model import make_policy;"
        f"make_policy({[LAKE, SOKOBAN]!r}, Path(sys.argv[1]), size='tiny')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "again")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert hashes(tmp_path / "again") == hashes(policy.path)


def test_a_seed_changes_the_weights_and_nothing_else_changes_them(policy: PolicyInfo, tmp_path: Path) -> None:
    torch.manual_seed(123)
    other = make_policy([LAKE, SOKOBAN], tmp_path / "other", size="tiny", seed=1, context=512)
    mine, theirs = hashes(policy.path), hashes(other.path)
    assert mine["tokenizer.json"] == theirs["tokenizer.json"]
    assert mine["model.safetensors"] != theirs["model.safetensors"]
    same = make_policy([LAKE, SOKOBAN], tmp_path / "same", size="tiny", context=512)
    assert hashes(same.path)["model.safetensors"] == mine["model.safetensors"]


def test_no_global_generator_notices(tokenizer: Any) -> None:
    def states() -> list[str]:
        return [repr(torch.get_rng_state().tolist()), repr(np.random.get_state()), repr(random.getstate())]

    before = states()
    make_model(tokenizer, SIZES["tiny"], 0)
    tokenizer_for(LAKE)
    assert states() == before


def test_the_folder_records_how_it_was_made(policy: PolicyInfo) -> None:
    about = json.loads((policy.path / ABOUT).read_text())
    assert about == json.loads(json.dumps(policy.to_json()))
    assert [env["id"] for env in about["envs"]] == [LAKE, SOKOBAN]
    assert (about["size"], about["seed"]) == ("tiny", 0)
    assert {"rollgym", "torch", "transformers", "tokenizers", "numpy"} <= set(about["versions"])
    # 6 x 6 cells and 5 newlines, one word, and the template's three tokens.
    assert about["envs"][1]["observation_tokens"] == 41
    assert about["envs"][1]["turn_tokens"] == 41 + 1 + 3
    assert str(policy.path.parent) not in (policy.path / ABOUT).read_text()


def test_an_existing_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match="mine already exists: choose another folder"):
        make_policy([LAKE], tmp_path / "mine", size="tiny")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="already exists"):
        make_policy([LAKE], tmp_path / "link", size="tiny")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mine"]


@pytest.mark.parametrize("broken", ["faulty:RaisesInStep", "rollgym/NoSuch-v0"])
def test_a_failure_leaves_nothing_behind(tmp_path: Path, broken: str) -> None:
    with pytest.raises(RollgymError):
        make_policy([LAKE, broken], tmp_path / "p", size="tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"Cannot write the policy to .*file/p: Not a directory"):
        make_policy([LAKE], tmp_path / "file" / "p", size="tiny")


# What can go wrong before.


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"size": "smal"}, "no size called 'smal'. Did you mean small"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"context": 8}, "context must be at least 32 tokens, got 8"),
        ({"env_ids": []}, "at least one environment"),
        ({"env_ids": ["rollgym/FrozenLak-v0"]}, "Did you mean rollgym/FrozenLake-v0"),
        ({"env_ids": [(LAKE, {"sice": 4})]}, "sice"),
        (
            {"env_ids": [(LAKE, {"size": object()})]},
            "kwargs['size'] is a object, which JSON cannot represent",
        ),
    ],
)
def test_wrong_arguments_are_sentences(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        make_policy(**{"env_ids": [LAKE], "out": tmp_path / "p", **arguments})


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=re.escape(install_command("train"))):
        make_policy([LAKE], tmp_path / "p")


def test_an_environment_that_cannot_be_played_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="faulty:RaisesInStep could not be played: .*one too many"):
        make_policy(["faulty:RaisesInStep"], tmp_path / "p", size="tiny")


def test_importing_the_module_imports_no_torch() -> None:
    code = (
        "import sys, rollgym.trainer.builtin_policy.model\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# The tokenizer.


@given(ANY_TEXT | GAME_TEXT)
@example("")
@example("  a  b ,  c. d\n\n\t\r\n e\u0301 \u00e9 \U0001f600 \x00 \ufffd")
@example("the, lake. The: lake")
def test_any_text_comes_back_exactly(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < len(tokenizer)


@given(GAME_TEXT)
def test_python_cuts_text_as_the_tokenizer_does(text: str) -> None:
    from tokenizers import Regex, pre_tokenizers

    rule = pattern(["lake", "left"])
    split = pre_tokenizers.Split(Regex(rule), "isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == re.findall(rule, text)


def test_a_grid_is_one_token_for_each_cell(tokenizer: Any) -> None:
    rows = "######\n#_P_X#\n#√SO##"
    assert cut(tokenizer, rows) == list(rows)
    # Capitals that spell a word are cells too.
    assert cut(tokenizer, "GOX\nUP") == list("GOX\nUP")


def test_a_grid_with_spaces_is_one_token_for_each_cell() -> None:
    tokenizer = tokenizer_for("rollgym/Minesweeper-v0", "rollgym/Wordle-v0")
    row = ["1", " ", " #", " 1", " .", " .", " 3", " #", "\n"]
    assert cut(tokenizer, "1  # 1 . . 3 #\n") == row
    assert cut(tokenizer, "reveal 4 1") == ["reveal", " 4", " 1"]
    # Letters of the alphabet that no game has shown are there as well.
    assert cut(tokenizer, "Q U I Z Z\n- Y - - G") == [
        *"Q",
        " U",
        " I",
        " Z",
        " Z",
        "\n",
        "-",
        " Y",
        *[" -"] * 2,
        " G",
    ]


def test_actions_are_one_token_wherever_they_stand(tokenizer: Any) -> None:
    for action in ("Up", "Down", "Left", "Right"):
        assert cut(tokenizer, action) == [action]
        assert cut(tokenizer, f"You {action}.") == ["You", " ", action, "."]
    bandit = tokenizer_for("rollgym/Bandit-v0")
    text = "Machines: Tulip, Iris. Maple paid 0. Turns left: 19."
    shown = [
        "Machines",
        ": ",
        "Tulip",
        ", ",
        "Iris",
        ". ",
        "Maple",
        " paid",
        " ",
        "0",
        ". ",
        "Turns",
        " left",
    ]
    assert cut(bandit, text) == [*shown, ": ", "1", "9", "."]


def test_numbers_go_by_digits_and_common_words_are_whole() -> None:
    tokenizer = tokenizer_for("rollgym/GuessTheNumber-v0")
    assert cut(tokenizer, "57") == ["5", "7"]
    assert cut(tokenizer, "The number is higher than 57.") == [
        *("The", " number", " is", " higher", " than", " ", "5", "7", "."),
    ]


def test_other_texts_are_read_as_well(tmp_path: Path) -> None:
    info = make_policy([LAKE], tmp_path / "p", size="tiny", texts=["Reply with Zebras."])
    tokenizer = transformers.AutoTokenizer.from_pretrained(info.path)
    assert cut(tokenizer, "Reply with Zebras.") == ["Reply", " with", " Zebras", "."]
    assert json.loads((info.path / ABOUT).read_text())["texts"] == ["Reply with Zebras."]


def test_what_is_rarely_said_is_spelt() -> None:
    tokenizer = tokenizer_for("rollgym/Wordle-v0")
    assert cut(tokenizer, "lobby") == list("lobby")
    assert cut(tokenizer, " Zebras") == [" ", *"Zebras"]


def test_what_is_said_to_nonsense_is_whole() -> None:
    tokenizer = tokenizer_for(SOKOBAN)
    env = rollgym.make(SOKOBAN)
    env.reset(seed=0)
    complaint = env.step("?")[0].splitlines()[-1]
    words = re.findall("[A-Z]?[a-z]+", complaint)
    assert len(words) > 3
    assert {token.strip() for token in cut(tokenizer, complaint)} >= set(words)


# Only our own: other tests register environments that misbehave.
SHIPPED = [
    card.env_id for card in rollgym.list_envs() if card.env_id.startswith("rollgym/") and not card.needs
]
_WORDY = ("Code", "PythonTool", "CodeSnippets", "Terminal", "ServiceDesk", "Questions")
WORDY = dict.fromkeys((f"rollgym/{name}-v0" for name in _WORDY), 1000)
"""Vocabularies that may be larger: problems, programs and records take more words than games."""


@pytest.mark.parametrize("env_id", SHIPPED)
def test_text_of_every_environment_is_short_and_comes_back(env_id: str) -> None:
    corpus = collect(env_id, {})
    tokenizer = make_tokenizer([corpus], 1024)
    assert len(tokenizer) < WORDY.get(env_id, 600)
    for text in {corpus.instructions, *(text for turn in corpus.turns for text in turn)}:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) <= len(text)
    assert len(tokenizer(corpus.instructions)["input_ids"]) < len(corpus.instructions) / 2.5


def test_environments_of_gymnasium_work_too() -> None:
    tokenizer = tokenizer_for("CartPole-v1")
    assert cut(tokenizer, "[0.1, -12]") == ["[", "0", ".", "1", ", ", "-", "1", "2", "]"]


def test_an_environment_is_played_with_its_arguments() -> None:
    def widths(corpus: Corpus) -> set[int]:
        return {len(turn[0].splitlines()[-1]) for turn in corpus.turns}

    assert widths(collect(LAKE, {})) == {4}
    assert widths(collect(LAKE, {"size": 6})) == {6}


# The chat template.

TALK = st.lists(st.tuples(ANY_TEXT | GAME_TEXT, ANY_TEXT | GAME_TEXT), min_size=1, max_size=3)


def messages_of(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in talk for role, text in zip(roles, turn, strict=True)]


def test_the_template_adds_three_tokens_to_an_exchange(tokenizer: Any) -> None:
    talk = [{"role": "system", "content": "Rules. "}, *messages_of([("P_\n_G", "Right"), (" \n", "Up")])]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    assert text == (
        "<|system|>Rules. <|user|>P_\n_G<|assistant|>Right<|end|><|user|> \n<|assistant|>Up<|end|>"
    )
    assert tokenizer.apply_chat_template(talk[:2], tokenize=False, add_generation_prompt=True) == (
        "<|system|>Rules. <|user|>P_\n_G<|assistant|>"
    )


@given(TALK)
def test_a_conversation_only_grows(tokenizer: Any, talk: list[tuple[str, str]]) -> None:
    messages = messages_of(talk)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    for count in range(1, len(messages)):
        part = tokenizer.apply_chat_template(messages[:count], tokenize=False)
        asked = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=messages[count]["role"] == "assistant"
        )
        assert whole.startswith(part)
        assert whole.startswith(asked)


@given(st.lists(ANY_TEXT | GAME_TEXT, max_size=4))
def test_messages_are_tokenised_apart(tokenizer: Any, texts: list[str]) -> None:
    joined = "<|end|>".join(texts)
    apart = [tokenizer(text)["input_ids"] for text in joined.split("<|end|>")]
    end = tokenizer.eos_token_id
    flat = [number for ids in apart for number in (*ids, end)][:-1]
    assert tokenizer(joined)["input_ids"] == flat


def test_an_unknown_role_is_refused(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="There is no role tool here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_special_tokens_are_known_to_the_model(policy: PolicyInfo, tokenizer: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2, 3, 4]
    assert tokenizer.decode(tokenizer("<|user|>Up<|end|>")["input_ids"], skip_special_tokens=True) == "Up"
    config = transformers.AutoConfig.from_pretrained(policy.path)
    assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, None)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_the_chat_module_can_use_the_template(tokenizer: Any) -> None:
    from recorded_conversation import RecordedConversation

    from rollgym.chat import ChatTemplate

    template = ChatTemplate(tokenizer)
    assert template.facts.end_of_turn == "<|end|>"
    assert template.facts.stop_ids == (tokenizer.eos_token_id,)
    assert template.facts.generation_prompt == "<|assistant|>"
    assert template.facts.system_role
    assert template.facts.rewrites == ()
    talk = RecordedConversation(template, system="Rules.")
    for observation in ("P_\n_G", "_P\n_G"):
        talk.observe(observation)
        talk.reply(tokenizer("Down<|end|>")["input_ids"])
    messages = [
        {"role": "system", "content": "Rules."},
        *messages_of([("P_\n_G", "Down"), ("_P\n_G", "Down")]),
    ]
    ids = tokenizer.apply_chat_template(messages)["input_ids"]
    (row,) = talk.rows
    assert row.ids == tuple(ids)
    assert sum(row.mask) == 4


# The model.


def test_the_folder_loads_as_what_was_made(policy: PolicyInfo, tokenizer: Any) -> None:
    made = tokenizer_for(LAKE, SOKOBAN)
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.backend_tokenizer.pre_tokenizer.__getstate__() == (
        made.backend_tokenizer.pre_tokenizer.__getstate__()
    )
    assert len(tokenizer) == policy.vocabulary
    model = transformers.AutoModelForCausalLM.from_pretrained(policy.path)
    again = make_model(made, SIZES["tiny"], 0)
    assert model.config.max_position_embeddings == policy.context == 2048
    assert model.num_parameters() == policy.parameters
    ours = dict(again.named_parameters())
    assert all(torch.equal(value, ours[name]) for name, value in model.named_parameters())
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = torch.tensor([tokenizer("P_\n_G<|assistant|>")["input_ids"]])
    assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize(
    ("size", "least", "most"), [("tiny", 8e4, 1.2e5), ("small", 4e5, 6e5), ("base", 2e6, 3e6)]
)
def test_sizes_are_what_they_say(tokenizer: Any, size: str, least: float, most: float) -> None:
    shape = SIZES[size]
    assert least < make_model(tokenizer, shape, 0).num_parameters() < most
    assert shape.hidden == 32 * shape.heads  # the head width that every engine has a kernel for


def test_first_replies_are_close_to_uniform(policy: PolicyInfo, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(policy.path)
    ids = torch.tensor([tokenizer("<|user|>P_\n_G<|assistant|>")["input_ids"]])
    chances = model(ids).logits[0, -1].softmax(-1)
    entropy = -(chances * chances.log()).sum().item()
    assert entropy > 0.95 * np.log(len(tokenizer))


def test_it_learns(tokenizer: Any) -> None:
    model = make_model(tokenizer, SIZES["tiny"], 0).train()
    grids = {"PG": "Right", "GP": "Left", "P\nG": "Down", "G\nP": "Up"}
    rows = [f"<|user|>{grid}<|assistant|>{move}<|end|>" for grid, move in grids.items()]
    batch = tokenizer(rows, return_tensors="pt", padding=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(
            model(**batch).logits[:, -3:-1].flatten(0, 1), batch["input_ids"][:, -2:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    prompts = tokenizer([f"<|user|>{grid}<|assistant|>" for grid in grids], return_tensors="pt", padding=True)
    replies = model.eval().generate(**prompts, max_new_tokens=4, do_sample=False)
    told = [tokenizer.decode(reply[prompts["input_ids"].shape[1] :]) for reply in replies]
    assert told == [f"{move}<|end|>" for move in grids.values()]


# The command.


def command(*words: object) -> Any:
    app = typer.Typer()
    app.command()(new)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_makes_a_policy(tmp_path: Path) -> None:
    ran = command(LAKE, "--out", tmp_path / "p", "--size", "tiny", "--env-arg", "size=3", "--json")
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    assert said["out"] == str(tmp_path / "p")
    assert said["envs"][0]["kwargs"] == {"size": 3}
    assert said["envs"][0]["observation_tokens"] < 16
    assert json.loads((tmp_path / "p" / ABOUT).read_text())["seed"] == 0


def test_the_command_prints_a_table_for_several_environments(tmp_path: Path) -> None:
    ran = command(
        LAKE, "faulty:Counting", "--out", tmp_path / "p", "--size", "tiny", "--env-module", "faulty"
    )
    assert ran.exit_code == 0, ran.output
    assert "parameters" in ran.stdout
    assert "faulty:Counting" in ran.stdout
    refused = command(LAKE, SOKOBAN, "--out", tmp_path / "q", "--env-arg", "size=3")
    assert isinstance(refused.exception, UsageError)
    assert "--env-arg needs exactly one environment" in str(refused.exception)


def test_instructions_longer_than_the_context_are_counted_without_a_warning(tmp_path: Path) -> None:
    """Instructions may be left out of prompts, and transformers warns only once in a process."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    logging.getLogger("transformers").addHandler(handler)
    try:
        made = make_policy([SOKOBAN], tmp_path / "short", size="tiny", context=64)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert json.loads((made.path / ABOUT).read_text())["envs"][0]["instruction_tokens"] > 64
    assert records == []
