"""GRPO on rollgym's FrozenLake by TRL's GRPOTrainer: `frozen_lake_trl.py` starts this with a job file.

    PYTHONPATH=REPOSITORY PYTHON_WITH_TRL benchmarks/peers/trl_frozen_lake.py JOB.json

TRL 1.16 has two interfaces for environments. ``environment_factory`` plays turns as tool calls; it refuses a
chat template without tool calls, such as SmolLM2's, and a reply of one token cannot be a tool call. So this
uses ``rollout_func``: a function that gets a step's prompts and returns one row (prompt, completion, mask)
for each of them. Prompts, parsing, tasks and turn limit are rollgym's own; sampling is ``generate`` with the
trainer's `GenerationConfig`, one call per turn for all running episodes.

A row is one forward pass with full attention, and their number is fixed by the config before anything is
played. That leaves two layouts of an episode:

``turns`` (history none)
    One row per turn: each reply sees its own prompt only, as in rollgym. The number of rows is
    ``turn_slots`` times the number of episodes; unused rows are filled with a masked token (TRL computes them
    nonetheless), and turns beyond the rows are left out at random. Both are counted. TRL compares rows, not
    episodes, so the rows carry the episode's group-relative advantage as their reward, TRL's own scaling is
    off, and one filled row balances the sum, which makes the mean that TRL subtracts 0. (Without a filled row
    that mean is subtracted.)
``conversation`` (history full)
    One row per episode: all turns in one conversation, observations masked by ``env_mask``. The reward is the
    episode's return, and TRL computes the advantage over the group.

On stdout: one JSON line when training starts and one after each step, before its checkpoint is written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

import rollgym
from rollgym.agents.parsing import read_action
from rollgym.agents.policy.agent import PolicyAgent
from rollgym.agents.policy.options import PolicyOptions
from rollgym.agents.prompting import listed_actions
from rollgym.chat import load_tokenizer

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL does."""
Job = dict[str, Any]
Row = dict[str, Any]


def no_engine() -> Any:
    """Stand in for the engine of rollgym's agent, which only builds prompts and parses replies here."""
    raise NotImplementedError("TRL samples the replies.")


class Episode:
    """A running episode: the environment, rollgym's prompts, and the tokens of its turns."""

    def __init__(self, agent: PolicyAgent, job: Job, task: dict[str, Any]) -> None:
        self._agent = agent
        self._env = rollgym.make(job["env"], **job["env_kwargs"])
        observation, self._info = self._env.reset(seed=task["env_seed"], options=task["options"])
        self._prompts = agent.prompt_builder(self._env.get_wrapper_attr("instructions"))
        self.turns: list[tuple[list[int], list[int]]] = []
        """Prompt and reply of each turn."""
        self.episode_return = 0.0
        self.success = False
        self.done = False
        self._prompts.observe(observation, self._info)

    @property
    def prompt(self) -> list[int]:
        """The token ids that the next reply is sampled from."""
        return list(self._prompts.conversation.prompt_ids)

    def step(self, reply: list[int]) -> None:
        """Play the action in a reply."""
        self.turns.append((self.prompt, reply))
        text = self._prompts.reply(reply)
        action, _ = read_action(self._agent.parser, text, listed_actions(self._info))
        observation, reward, terminated, truncated, self._info = self._env.step(action)
        self.episode_return += float(reward)
        self.success = bool(self._info["success"])
        self.done = terminated or truncated
        if not self.done:
            self._prompts.observe(observation, self._info)


class Rollout:
    """TRL's ``rollout_func``: plays the groups of a step and returns their rows."""

    def __init__(self, job: Job) -> None:
        self._job = job
        options = PolicyOptions(**job["agent"])
        self._agent = PolicyAgent(no_engine, load_tokenizer(Path(job["model"])), options)
        self._rng = np.random.default_rng(job["seed"])
        self._groups = iter(job["tasks"])
        self.counts: dict[str, float] = {}
        """What the last step played and how many rows it filled or left out."""

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Play a step. ``prompts`` are placeholders, one per row; tasks come from the job in order."""
        started = time.process_time()
        size = self._job["group_size"]
        tasks = [next(self._groups) for _ in range(self._job["groups"])]
        episodes = [Episode(self._agent, self._job, task) for task in tasks for _ in range(size)]
        while running := [episode for episode in episodes if not episode.done]:
            replies = self._sample(trainer, [episode.prompt for episode in running])
            for episode, reply in zip(running, replies, strict=True):
                episode.step(reply)
        turns = [turn for episode in episodes for turn in episode.turns]
        self.counts = {
            "success": float(np.mean([episode.success for episode in episodes])),
            "turns": len(turns),
            "prompt_tokens": sum(len(prompt) for prompt, _ in turns),
            "generated_tokens": sum(len(reply) for _, reply in turns),
            "rollout_cpu_seconds": time.process_time() - started,
        }
        if self._job["layout"] == "turns":
            rows = self._turn_rows(episodes, len(prompts), trainer.processing_class.pad_token_id)
        else:
            rows = [conversation_row(episode) for episode in episodes]
        if len(rows) != len(prompts):
            raise RuntimeError(f"TRL asked for {len(prompts)} rows, and the episodes gave {len(rows)}.")
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return {**columns, "logprobs": None}

    def _sample(self, trainer: GRPOTrainer, prompts: list[list[int]]) -> Iterator[list[int]]:
        """Sample one reply for each prompt."""
        size = self._job["generate_batch"]
        pad, stop = trainer.processing_class.pad_token_id, set(trainer.eos_token_ids)
        with (
            unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model,
            torch.no_grad(),
        ):
            for start in range(0, len(prompts), size):
                batch = prompts[start : start + size]
                width = max(map(len, batch))
                ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch])
                mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
                output = model.generate(
                    input_ids=ids, attention_mask=mask, generation_config=trainer.generation_config
                )
                for tokens in output[:, width:].tolist():
                    end = next((n for n, token in enumerate(tokens, 1) if token in stop), len(tokens))
                    yield tokens[:end]

    def _turn_rows(self, episodes: Sequence[Episode], slots: int, pad: int) -> list[Row]:
        """One row per turn, filled up with masked rows to the number that TRL expects."""
        rows: list[Row] = []
        for episode, advantage in zip(episodes, self._advantages(episodes), strict=True):
            rows += [
                {
                    "prompt_ids": prompt,
                    "completion_ids": reply,
                    "env_mask": [1] * len(reply),
                    "reward": advantage,
                }
                for prompt, reply in episode.turns
            ]
        played = len(rows)
        if played > slots:
            kept = self._rng.choice(played, slots, replace=False)
            rows = [rows[number] for number in sorted(kept)]
        fill = {"prompt_ids": [pad], "completion_ids": [pad], "env_mask": [0], "reward": 0.0}
        filled = [dict(fill) for _ in range(slots - len(rows))]
        if filled:
            filled[0]["reward"] = -sum(row["reward"] for row in rows)
        self.counts |= {"filled_rows": len(filled), "dropped_rows": max(0, played - slots)}
        return rows + filled

    def _advantages(self, episodes: Sequence[Episode]) -> list[float]:
        """Group-relative advantages of whole episodes."""
        returns = np.array([episode.episode_return for episode in episodes])
        groups = returns.reshape(-1, self._job["group_size"])
        std = groups.std(axis=1, ddof=1, keepdims=True)
        centered = groups - groups.mean(axis=1, keepdims=True)
        advantages: list[float] = (centered / (std + STD_EPSILON)).ravel().tolist()
        return advantages


def conversation_row(episode: Episode) -> Row:
    """All turns of an episode in one row; the mask leaves out observations."""
    prompt = episode.turns[0][0]
    ids, mask = list(prompt), [0] * len(prompt)
    for context, reply in episode.turns:
        if context[: len(ids)] != ids:
            raise RuntimeError("A prompt does not continue the conversation: use the layout 'turns'.")
        mask += [0] * (len(context) - len(ids)) + [1] * len(reply)
        ids = context + reply
    return {
        "prompt_ids": prompt,
        "completion_ids": ids[len(prompt) :],
        "env_mask": mask[len(prompt) :],
        "reward": episode.episode_return,
    }


def row_reward(reward: list[float], **columns: Any) -> list[float]:
    """TRL's reward function: the column that the rollout returned."""
    return reward


class Report(TrainerCallback):
    """Prints a line when training starts and one after each step."""

    def __init__(self, rollout: Rollout, output: Any) -> None:
        self._rollout, self._output = rollout, output

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report that model and data are loaded."""
        print(json.dumps({"step": 0}), file=self._output, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what the step played."""
        line = {"step": state.global_step, **self._rollout.counts}
        print(json.dumps(line), file=self._output, flush=True)


def trainer_config(job: Job) -> GRPOConfig:
    """The same settings as the learner of rollgym."""
    turns = job["layout"] == "turns"
    episodes = job["groups"] * job["group_size"]
    rows = episodes * job["turn_slots"] if turns else episodes
    return GRPOConfig(
        output_dir=job["out"],
        seed=job["seed"],
        per_device_train_batch_size=job["batch"],
        gradient_accumulation_steps=rows // job["batch"],
        num_generations=rows if turns else job["group_size"],
        scale_rewards="none" if turns else "group",
        max_completion_length=job["agent"]["max_tokens"],
        temperature=job["agent"]["temperature"],
        top_p=job["agent"]["top_p"],
        top_k=job["agent"]["top_k"],
        shuffle_dataset=False,
        max_steps=job["steps"],
        loss_type="dapo",  # every token counts the same
        beta=0.0,
        epsilon=0.2,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=job["dtype"] == "bfloat16",
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="steps",
        save_steps=job["every"],
        disable_tqdm=True,
    )


def main() -> None:
    """Train as the job says."""
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    output, sys.stdout = sys.stdout, sys.stderr
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(job["threads"])
    rollout = Rollout(job)
    config = trainer_config(job)
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=row_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["-"] * (rows // config.num_generations * job["steps"])}),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[Report(rollout, output)],
        rollout_func=rollout,
    )
    trainer.train()


if __name__ == "__main__":
    main()
