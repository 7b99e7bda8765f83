"""Run with TRL's Python: GRPOTrainer trains one step on Sokoban through rollgym's environment factory.

The model is tiny and untrained, so a scripted reply of the tokenizer's chat template is not expected: what is
tested is that TRL takes the environments, calls reset and the rewards, and makes an optimizer step.
"""

import json
import sys
from pathlib import Path

import torch
import trl as trl_package
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from rollgym.integrations import trl

ENV, OUT = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(0)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {token: number for number, token in enumerate([*SPECIAL, *byte_level])}
core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
core.add_special_tokens(SPECIAL[:3])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
)
templates = Path(trl_package.__file__).parent / "chat_templates"
tokenizer.chat_template = (templates / "qwen3.jinja").read_text(encoding="utf-8")

config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8192,
    eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
)  # fmt: skip
model = LlamaForCausalLM(config)
before = {name: value.detach().clone() for name, value in model.named_parameters()}

resets, returns = [], []
factory = trl.environment_factory(ENV)


class Watched(factory):
    """The factory's class, with a note of every reset."""

    def reset(self, **row):
        text = super().reset(**row)
        resets.append([row["task"], row["seed"], text])
        # An untrained model calls no tool: one action is played for it, different in each member.
        self._play(("Up", "Down", "Left", "Right")[len(resets) % 4])
        return text


def watched(environments, **columns):
    """Different rewards for the members of a group, so that the step has a gradient."""
    values = trl.reward_funcs()[0](environments=environments)
    returns.extend(values)
    return [value + 0.1 * number for number, value in enumerate(values)]


trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig(
        output_dir=str(OUT),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=16,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        beta=0.0,
    ),  # fmt: skip
    train_dataset=trl.dataset(ENV, size=8),
    processing_class=tokenizer,
    environment_factory=Watched,
    reward_funcs=watched,
)
tools = [get_json_schema(tool)["function"] for tool in trainer.tools]
result = trainer.train()
changed = sum(not torch.equal(before[name], value) for name, value in model.named_parameters())
print(
    json.dumps(
        {
            "steps": result.global_step,
            "changed": changed,
            "tools": tools,
            "resets": resets,
            "returns": returns,
        }
    )
)
