"""Time and memory of one GRPO update: rollgym's `Learner.update` against TRL's `GRPOTrainer`.

    python benchmarks/train_step.py [--quick] [--threads 1] [--rounds 5] [--no-peer] [--peer-venv FOLDER]
    python benchmarks/train_step.py --model smollm2 [--dtype bfloat16] [--lora] [--quick]

Both train the same built-in model (a Llama of 0.5 million parameters, 400 words) in float32 with the same
number of threads on the same 64 episodes (``--quick``: 32), in groups of 8 with the same prompt of 64 tokens:
1 to 15 turns of a short action, with observations between them. 13 % of the tokens are actions, and only
these are in the loss. ``even`` is the same with 8 turns in every episode, so that little padding is needed:
the difference is what ragged episodes cost. ``prompts`` is ``ragged`` with prompts of 256 tokens, which
rollgym computes once for a group.

In an update: forward and backward passes in micro-batches, clipping the gradient, AdamW, and the metrics that
either reports. Not in it: generation, rewards, a reference model, old log-probs (both are given the same).
TRL's inputs are padded beforehand, its loss is the one that weighs all tokens alike (``dapo``, its default),
and observations are masked as a tool's answers are. It runs its own training loop. Both compute in
``--dtype``: float32, or bfloat16, which is autocast over float32 weights in both. Unlike TRL's default
there is no gradient checkpointing (see ``--checkpointing``). ``--trl-batch`` is TRL's
``per_device_train_batch_size``. ``gradient_gap`` says how far the gradients of the first update are apart,
relative to their size.

Each contender is a separate process. They take turns. Seconds are the CPU time of the process, and a ratio
is the median of the rounds' ratios: above 1, rollgym is faster. Memory is the peak of the resident set, and
how much of it the updates added to what was there before the first (model, data and libraries). Then
rollgym's update alone with 1, 2 and 4 times the episodes: time should grow with the tokens, memory not.

``--model smollm2`` is one workload: SmolLM2-135M-Instruct, full training (or LoRA, of rollgym alone), 16
episodes of 1 to 15 turns in two groups with prompts of 350 tokens.

The first run makes a virtual environment for TRL with rollgym's versions of torch and transformers (some
minutes); without network, or with ``--no-peer``, rollgym is measured alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from rollgym.core.seeding import derive_rng
from rollgym.models.zoo import model_folder
from rollgym.trainer.builtin_policy.model import SIZES
from rollgym.trainer.data.batch import Batch, make_batch
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence
from rollgym.trainer.learner.config import LearnerConfig, LoraSettings
from rollgym.trainer.losses.settings import LossConfig

VOCABULARY, GROUP, RATE = 400, 8, 1e-4
SCALES = (1, 2, 4)
WORKLOADS = {
    "builtin": (("ragged", 64, ""), ("even", 64, "_even"), ("prompts", 256, "_prompts")),
    "smollm2": (("ragged", 350, ""),),
}
"""By model: name, prompt tokens, suffix of the keys."""
PEER = Path(__file__).parent / "peers" / "trl_step.py"
PEER_VENV = Path.home() / ".cache" / "rollgym" / "bench-trl"
TRL = "trl==1.16.0"
Workload = dict[str, Any]
Dtype = Literal["float32", "bfloat16"]


def make_episodes(count: int, prompt: int, even: bool, vocabulary: int = VOCABULARY) -> Workload:
    """Tokens of many episodes end to end, which of them are actions, and an advantage for each episode."""
    ids, own = [], []
    for number in range(count):
        rng = derive_rng("train step benchmark", number)
        asked = derive_rng("train step benchmark prompt", number // GROUP).integers(2, vocabulary, prompt)
        mask = [0] * prompt
        for turn in range(8 if even else int(rng.integers(1, 16))):
            mask += [0] * (int(rng.integers(16, 49)) if turn else 0) + [1] * int(rng.integers(2, 10))
        own.append(np.array(mask))
        ids.append(np.concatenate([asked, rng.integers(2, vocabulary, len(mask) - prompt)]))
    return {
        "prompt": prompt,
        "lengths": np.array(list(map(len, ids))),
        "ids": np.concatenate(ids),
        "own": np.concatenate(own),
        "advantages": derive_rng("train step benchmark advantages").normal(size=count),
    }


def read_batch(data: Any) -> Batch:
    """The episodes as the learner wants them."""
    cuts = np.cumsum(data["lengths"])[:-1]
    split = {name: np.split(data[name], cuts) for name in ("ids", "own", "old") if name in data}
    episodes, advantages = [], []
    for number, (ids, own) in enumerate(zip(split["ids"], split["own"], strict=True)):
        places = np.flatnonzero(own)
        old = split["old"][number][places] if "old" in split else np.zeros(len(places))
        row = TokenSequence(ids, places)
        episodes.append(TokenEpisode(str(number), (row,), old, np.array([len(places)])))
        advantages.append(np.full(len(places), data["advantages"][number]))
    batch = make_batch(episodes, advantages=advantages)
    return batch.with_arrays(old=batch.arrays["behavior"])


def make_learner(
    model: Path, max_tokens_per_microbatch: int, threads: int, dtype: Dtype, lora: bool = False
) -> Any:
    """The learner with the settings that TRL gets, too."""
    from rollgym.trainer.learner.learner import Learner

    chosen = LearnerConfig(
        learning_rate=RATE,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        threads=threads,
        device="cpu",
        dtype=dtype,
        lora=LoraSettings() if lora else None,
    )
    return Learner(model, chosen, LossConfig("grpo"))


def write_model(folder: Path) -> None:
    """A model of the built-in policy's kind, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    shape = SIZES["small"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )
    model: Any = LlamaForCausalLM
    model(config).save_pretrained(folder)


def write_workload(
    folder: Path, count: int, prompt: int = 64, even: bool = False, model: str = "builtin"
) -> Workload:
    """Model and episodes. Old log-probs are the model's own, a little off: some ratios are clipped."""
    folder.mkdir()
    if model == "builtin":
        write_model(folder / "model")
    else:
        (folder / "model").symlink_to(model_folder(model))
    vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    data = make_episodes(count, prompt, even, vocabulary)
    own = np.flatnonzero(data["own"])
    old = np.zeros(len(data["ids"]))
    room = 8192 if model == "builtin" else 2048
    old[own] = make_learner(folder / "model", room, 1, "float32").logprobs(read_batch(data))
    old[own] += derive_rng("train step benchmark noise").normal(0, 0.15, len(own))
    data["old"] = old
    np.savez(folder / "episodes.npz", **data)
    return data


def serve(folder: Path, max_tokens_per_microbatch: int, threads: int, dtype: Dtype, lora: bool) -> None:
    """One update for each line that is read: what a contender's process does."""
    with np.load(folder / "episodes.npz") as data:
        batch = read_batch(data)
    learner = make_learner(folder / "model", max_tokens_per_microbatch, threads, dtype, lora)
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        learner.update(batch)
        print(time.process_time() - started, flush=True)
        if learner.steps == 1:
            gradients = {
                name: p.grad.numpy() for name, p in learner.model.named_parameters() if p.requires_grad
            }
            np.savez(folder / "ours.npz", **gradients)
            del gradients  # the next update makes others
        print("ready", flush=True)


@dataclass(frozen=True)
class Figures:
    """What was measured of one contender."""

    seconds: list[float]
    peak: int
    """The largest resident set, in megabytes."""
    added: int
    """How much of that came with the updates."""

    @property
    def typical(self) -> float:
        """Seconds of an update."""
        return statistics.median(self.seconds)


class Contender:
    """A process that makes an update whenever it is asked to."""

    def __init__(self, command: list[str], threads: int, log: Path) -> None:
        self.seconds: list[float] = []
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            )
        self._read()
        self._before = self._memory("VmRSS")
        self.update()
        self.seconds.clear()  # it was to warm up

    def update(self) -> None:
        """Make one, and note how long it took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.seconds.append(float(self._read()))
        self._read()

    def figures(self) -> Figures:
        """What was measured so far."""
        peak = self._memory("VmHWM")
        return Figures(self.seconds, peak, peak - self._before)

    def close(self) -> None:
        """No more updates."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"A contender stopped:\n{self._log.read_text()[-2000:]}")
        return line

    def _memory(self, field: str) -> int:
        """As Linux has it; 0 elsewhere."""
        status = Path(f"/proc/{self._process.pid}/status")
        found = re.search(rf"{field}:\s+(\d+) kB", status.read_text() if status.exists() else "")
        return int(found[1]) // 1024 if found else 0


def peer_python(folder: Path) -> Path | None:
    """The interpreter of an environment with TRL, made where there is none yet; None where that fails."""
    wanted = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers")] + [TRL]
    python, done = folder / "bin" / "python", folder / "installed.json"
    if done.exists() and json.loads(done.read_text()) == wanted:
        return python
    print(f"Installing {', '.join(wanted)} in {folder} ...", flush=True)
    make, install = [sys.executable, "-m", "venv", str(folder)], [str(python), "-m", "pip", "install", "-q"]
    for command in (make, install + wanted):
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            print(f"That failed: {(found.stderr or found.stdout).strip()[-500:]}")
            return None
    done.write_text(json.dumps(wanted))
    return python


def contend(commands: dict[str, list[str]], folder: Path, args: argparse.Namespace) -> dict[str, Figures]:
    """Updates by all of them in turn."""
    with ExitStack() as stack:
        entrants = {}
        for name, command in commands.items():
            entrants[name] = Contender(command, args.threads, folder / f"{name}.log")
            stack.callback(entrants[name].close)
        for _ in range(args.rounds):
            for entrant in entrants.values():
                entrant.update()
        return {name: entrant.figures() for name, entrant in entrants.items()}


def ours(folder: Path, args: argparse.Namespace) -> list[str]:
    """This program as a contender."""
    options = [
        "--threads",
        str(args.threads),
        "--max-tokens-per-microbatch",
        str(args.max_tokens_per_microbatch),
        "--dtype",
        args.dtype,
    ]
    return [sys.executable, __file__, "--serve", str(folder), *options, *["--lora"] * args.lora]


def trl(python: Path, folder: Path, args: argparse.Namespace) -> list[str]:
    """TRL as a contender."""
    options = ["--threads", str(args.threads), "--batch", str(args.trl_batch), "--rate", str(RATE)]
    options += ["--dtype", args.dtype]
    return [str(python), str(PEER), str(folder), *options, *["--checkpointing"] * args.checkpointing]


def ratio(found: dict[str, Figures]) -> float:
    """TRL's seconds to ours, round by round: a machine busy now and then disturbs it less."""
    pairs = zip(found["trl"].seconds, found["ours"].seconds, strict=True)
    return round(statistics.median(theirs / own for theirs, own in pairs), 2)


def gradient_gap(folder: Path) -> float:
    """Relative difference of the gradients of the first update."""
    with np.load(folder / "ours.npz") as one, np.load(folder / "trl.npz") as other:
        names = sorted(one.files)
        a, b = (np.concatenate([arrays[name].ravel() for name in names]) for arrays in (one, other))
    return float(f"{np.linalg.norm(a - b) / np.linalg.norm(b):.1e}")


def compare(python: Path | None, root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run both workloads for all contenders; print a table and return the report."""
    report: dict[str, Any] = {}
    print(f"{'':8}{'':6}{'tokens':>9}{'padded':>9}{'seconds':>10}{'peak MB':>10}{'added MB':>10}{'ratio':>8}")
    for workload, prompt, suffix in WORKLOADS[args.model]:
        folder = root / workload
        lengths = write_workload(folder, args.episodes, prompt, workload == "even", args.model)["lengths"]
        tokens, padded = int(lengths.sum()), int(lengths.max()) * len(lengths)
        commands = {"ours": ours(folder, args)} | ({"trl": trl(python, folder, args)} if python else {})
        found = contend(commands, folder, args)
        report |= {f"tokens{suffix}": tokens, f"padded_tokens{suffix}": padded}
        for name, one in found.items():
            share = f"{ratio(found):8.2f}" if name == "trl" else ""
            sizes = f"{tokens:9,}{padded:9,}{one.typical:10.2f}{one.peak:10,}{one.added:10,}"
            print(f"{workload:8}{name:6}{sizes}{share}", flush=True)
            report |= {f"{name}_seconds{suffix}": round(one.typical, 3), f"{name}_peak_mb{suffix}": one.peak}
            report[f"{name}_added_mb{suffix}"] = one.added
        if python:
            report |= {f"ratio_update{suffix}": ratio(found), f"gradient_gap{suffix}": gradient_gap(folder)}
    return report


def scaling(root: Path, args: argparse.Namespace) -> list[tuple[int, float, int]]:
    """(tokens, seconds, peak megabytes) of our update with ever more episodes."""
    found = []
    print(f"\n{'episodes':>10}{'tokens':>10}{'seconds':>10}{'us/token':>10}{'peak MB':>10}")
    for scale in SCALES:
        folder = root / f"times {scale}"
        tokens = int(write_workload(folder, args.episodes * scale)["lengths"].sum())
        one = contend({"ours": ours(folder, args)}, folder, args)["ours"]
        each = one.typical / tokens * 1e6
        print(
            f"{args.episodes * scale:10}{tokens:10,}{one.typical:10.2f}{each:10.1f}{one.peak:10,}", flush=True
        )
        found.append((tokens, round(one.typical, 3), one.peak))
    return found


def main() -> None:
    """Measure everything and print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of each contender")
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="builtin")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16, without the peer")
    parser.add_argument(
        "--max-tokens-per-microbatch",
        type=int,
        help="rollgym's tokens in memory at once (default 8192; smollm2: 1024)",
    )
    parser.add_argument("--trl-batch", type=int, default=8, help="TRL's episodes in memory at once")
    parser.add_argument("--checkpointing", action="store_true", help="TRL's default: less memory, more time")
    parser.add_argument(
        "--episodes", type=int, help="a multiple of --trl-batch (default 64, quick 32; smollm2: 16)"
    )
    parser.add_argument("--rounds", type=int, help="default 5; quick 2")
    parser.add_argument("--quick", action="store_true", help="32 episodes, two rounds after the warm-up")
    parser.add_argument("--no-peer", action="store_true", help="rollgym alone")
    parser.add_argument(
        "--peer-venv", type=Path, default=PEER_VENV, help="virtual environment of TRL, created if missing"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    small = args.model == "builtin"
    args.max_tokens_per_microbatch = args.max_tokens_per_microbatch or (8192 if small else 1024)
    if args.serve:
        serve(args.serve, args.max_tokens_per_microbatch, args.threads, args.dtype, args.lora)
        return
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.episodes = args.episodes or (16 if not small else 32 if args.quick else 64)
    python = None if args.no_peer or args.lora else peer_python(args.peer_venv)
    if python is None:
        print("Without TRL: rollgym is measured alone.")
    with TemporaryDirectory() as root:
        report = compare(python, Path(root), args)
        if small:
            report["scaling"] = scaling(Path(root), args)
    keys = (
        "model",
        "dtype",
        "lora",
        "threads",
        "rounds",
        "episodes",
        "max_tokens_per_microbatch",
        "trl_batch",
        "checkpointing",
    )
    options = {key: getattr(args, key) for key in keys}
    print(json.dumps({"benchmark": "train_step", **options, "peer": TRL if python else None, **report}))


if __name__ == "__main__":
    main()
