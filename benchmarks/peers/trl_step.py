"""One GRPO update after another by TRL's GRPOTrainer, on request: `train_step.py` starts this by itself.

    PYTHON_WITH_TRL benchmarks/peers/trl_step.py FOLDER --threads 2 --batch 8 --rate 1e-4 [--checkpointing]

It says ``ready`` before each update, waits for a line, and then says how many seconds the update took. It is
TRL's own `train`, with all that an optimizer step does there; only what would generate and score completions
hands out the given tokens instead, padded beforehand as TRL pads them. Needs no rollgym.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP = 8


def padded(rows: list[np.ndarray]) -> torch.Tensor:
    """Rows side by side, with zeros after them."""
    return torch.nn.utils.rnn.pad_sequence(list(map(torch.from_numpy, rows)), batch_first=True)


def prepare(folder: Path) -> dict[str, torch.Tensor]:
    """The episodes as the loss wants them: `tool_mask` leaves out the observations in a completion."""
    with np.load(folder / "episodes.npz") as data:
        prompt = int(data["prompt"])
        cuts = np.cumsum(data["lengths"])[:-1]
        ids, own = np.split(data["ids"], cuts), np.split(data["own"].astype(np.int64), cuts)
        old, advantages = np.split(data["old"].astype(np.float32), cuts), data["advantages"]
    completions = [row[prompt:] for row in ids]
    prompts = torch.from_numpy(np.stack([row[:prompt] for row in ids]))
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": padded(completions),
        "completion_mask": padded([np.ones_like(row) for row in completions]),
        "tool_mask": padded([row[prompt:] for row in own]),
        "old_per_token_logps": padded([row[prompt:] for row in old]),
        "advantages": torch.from_numpy(advantages.astype(np.float32)),
        "num_items_in_batch": torch.tensor(float(sum(map(np.sum, own)))),
    }


class GivenTokens(GRPOTrainer):
    """The trainer without generation and rewards."""

    given: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.given)


class OnRequest(TrainerCallback):
    """Waits before each optimizer step until a line arrives; CPU time counts from then on."""

    def __init__(self, folder: Path, answers: Any) -> None:
        self._folder, self._answers = folder, answers
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait; without another line, stop."""
        print("ready", file=self._answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._started = time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        """Keep the gradient of the first update (to warm up, not measured)."""
        if state.global_step == 0:
            gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
            np.savez(self._folder / "trl.npz", **gradients)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how long it took."""
        print(time.process_time() - self._started, file=self._answers, flush=True)


def settings(folder: Path, episodes: int, args: argparse.Namespace) -> GRPOConfig:
    """What the learner on the other side uses, too."""
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=episodes // args.batch,
        num_generations=GROUP,
        max_steps=10_000,
        loss_type="dapo",  # every token counts the same
        beta=0.0,
        epsilon=0.2,
        learning_rate=args.rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=args.checkpointing,
        bf16=args.dtype == "bfloat16",
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    """Train until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(args.threads)
    given = prepare(args.folder)
    episodes = len(given["advantages"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    trainer = GivenTokens(
        model=AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=settings(args.folder, episodes, args),
        train_dataset=Dataset.from_dict({"prompt": ["-"] * (episodes // GROUP)}),
        processing_class=tokenizer,
        callbacks=[OnRequest(args.folder, answers)],
    )
    trainer.given = given
    trainer.train()


if __name__ == "__main__":
    main()
