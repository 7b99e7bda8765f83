"""The built-in policy: a small transformer and a tokenizer, made for given environments.

It needs no download, trains on a CPU, and is a regular folder in Hugging Face format: any tool that loads
Llama models loads it. The same arguments give the same files, byte for byte.
(It is not a Qwen2 model, because for those `AutoTokenizer` replaces any tokenizer by Qwen's own.)
"""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollgym.core.errors import UnknownName, UsageError, boundary, os_reason
from rollgym.core.extras import require
from rollgym.core.seeding import derive_rng
from rollgym.core.serialization import jsonable
from rollgym.io.run_dir import read_json, write_json
from rollgym.trainer.builtin_policy.corpus import collect
from rollgym.trainer.builtin_policy.tokenizer import EnvTokens, count_tokens, make_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ABOUT = "rollgym_model.json"
"""The file beside the weights that records how they were made."""
LEAST_CONTEXT = 32
_PACKAGES = ("rollgym", "numpy", "safetensors", "tokenizers", "torch", "transformers")
EnvName = str | tuple[str, Mapping[str, Any]]
"""An environment's id, or its id and arguments."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a transformer. Heads are 32 wide, which every engine supports."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


SIZES: Mapping[str, Shape] = {
    "tiny": Shape(hidden=64, inner=128, layers=2, heads=2, kv_heads=1),
    "small": Shape(hidden=128, inner=256, layers=3, heads=4, kv_heads=2),
    "base": Shape(hidden=256, inner=512, layers=4, heads=8, kv_heads=4),
}
"""About 0.1, 0.5 and 2.5 million parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """A policy that was made, and its folder."""

    path: Path
    size: str
    seed: int
    context: int
    parameters: int
    vocabulary: int
    texts: tuple[str, ...]
    """Further texts whose words are tokens."""
    envs: tuple[EnvTokens, ...]
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, without the path: the folder may be moved."""
        values = asdict(self)
        del values["path"]
        return {"kind": "policy", **jsonable(values)}


def make_policy(
    env_ids: Sequence[EnvName],
    out: Path,
    *,
    size: str = "small",
    seed: int = 0,
    context: int = 2048,
    texts: Sequence[str] = (),
) -> PolicyInfo:
    """Make a policy with random weights for these environments and write it to a new folder.

    Args:
        env_ids: Ids, or pairs of an id and the environment's arguments.
        out: The folder to create.
        size: ``tiny``, ``small`` or ``base``.
        seed: Seed of the weights. The tokenizer depends on the environments alone.
        context: Context length, in tokens.
        texts: Further texts that it will read, such as a custom prompt: their words become tokens, too.
    """
    require("The built-in policy", "train")
    if size not in SIZES:
        raise UnknownName("size", size, SIZES, f"Sizes: {', '.join(SIZES)}.")
    if seed < 0:
        raise UsageError(f"The seed must be at least 0, got {seed}.")
    if context < LEAST_CONTEXT:
        raise UsageError(f"The context must be at least {LEAST_CONTEXT} tokens, got {context}.")
    with _new_folder(out) as folder:
        corpora = [collect(*_named(env)) for env in _listed(env_ids)]
        tokenizer = make_tokenizer(corpora, context, texts)
        model = make_model(tokenizer, SIZES[size], seed, context)
        info = PolicyInfo(
            path=out,
            size=size,
            seed=seed,
            context=context,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            vocabulary=len(tokenizer),
            texts=tuple(texts),
            envs=tuple(count_tokens(tokenizer, corpus) for corpus in corpora),
            versions={"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        )
        _save_tokenizer(tokenizer, folder)
        _save_model(model, folder)
        write_json(folder / ABOUT, info.to_json())
    return info


def make_model(
    tokenizer: PreTrainedTokenizerFast, shape: Shape, seed: int, context: int = 2048
) -> LlamaForCausalLM:
    """A transformer for the tokenizer's vocabulary, with weights that depend on the seed alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    # Its constructor draws weights from torch's global generator, whose state must not change.
    with torch.random.fork_rng(devices=[]):
        model: LlamaForCausalLM = cast(Any, LlamaForCausalLM)(config)
    _draw_weights(model, shape, seed)
    model.train(False)
    return model


def _draw_weights(model: LlamaForCausalLM, shape: Shape, seed: int) -> None:
    """Draw normal weights from one numpy generator per name: the same for every version of torch."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            numbers = derive_rng("policy weights", seed, name).standard_normal(tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(numbers * _spread(name, parameter.shape[1], shape.layers)))


def _spread(name: str, inputs: int, layers: int) -> float:
    """Standard deviation of a matrix: keeps the scale of its input, also summed over layers."""
    if "embed" in name:
        return 0.02
    last = name.endswith(("o_proj.weight", "down_proj.weight"))
    return 1 / math.sqrt(inputs * (2 * layers if last else 1))


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    # A class name that transformers 4 (used by older servers) and 5 both support.
    settings = read_json(folder / "tokenizer_config.json")
    settings.pop("backend", None)
    write_json(folder / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the files of ``model.save_pretrained``, without a progress bar."""
    from rollgym.trainer.learner.weight_export import write_weights

    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    cast(Any, model.generation_config).save_pretrained(folder)
    write_weights({name: value.detach() for name, value in model.named_parameters()}, folder)


def _listed(envs: Sequence[EnvName]) -> Sequence[EnvName]:
    if not envs:
        raise UsageError("A policy needs at least one environment for its vocabulary.")
    return [envs] if isinstance(envs, str) else envs


def _named(env: EnvName) -> tuple[str, dict[str, Any]]:
    env_id, kwargs = (env, {}) if isinstance(env, str) else env
    with boundary(UsageError, f"The arguments of {env_id}"):
        return env_id, jsonable(dict(kwargs), "kwargs")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to ``out`` once complete, and removed on failure."""
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} already exists: choose another folder for the policy.")
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(out)
    except OSError as error:
        raise UsageError(f"Cannot write the policy to {out}: {os_reason(error)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
