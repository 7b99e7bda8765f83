"""Converts a GGUF file into a model folder in Hugging Face format.

Supports the Llama architecture with a byte-level BPE tokenizer. Quantized weights are converted to float32
exactly; nothing is downloaded and no code of the file is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollgym.core.errors import MissingExtra, UsageError, one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

_TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_CONTROL = 3
"""The token type of control tokens."""
_CUTS = ("gpt-2", "smollm")
"""Supported pre-tokenizers, as named in the file: GPT-2's, or GPT-2's with single digits."""


class GgufFile:
    """A GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise MissingExtra("Reading a GGUF file", "smollm") from None
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise UsageError(f"{path} is not a readable GGUF file: {one_line(error)}.") from None
        self._path = path
        kind, cut = self.value("general.architecture"), self.value("tokenizer.ggml.pre")
        if kind != "llama" or self.value("tokenizer.ggml.model") != "gpt2" or cut not in _CUTS:
            raise UsageError(
                f"{path} holds a model of the architecture {kind!r} with the tokenizer {cut!r}; rollgym "
                f"reads 'llama' with {' or '.join(map(repr, _CUTS))}."
            )

    def value(self, name: str, default: Any = None) -> Any:
        """Return a metadata value by its key."""
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def need(self, name: str) -> Any:
        """Return a metadata value that is required."""
        value = self.value(name)
        if value is None:
            raise UsageError(f"{self._path} is not a readable model: it has no {name}.")
        return value

    def config(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        names = {tensor.name for tensor in self._reader.tensors}
        heads = int(self.need("llama.attention.head_count"))
        hidden = int(self.need("llama.embedding_length"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": int(self.need("llama.feed_forward_length")),
            "num_hidden_layers": int(self.need("llama.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.value("llama.attention.head_count_kv", heads)),
            "head_dim": int(self.value("llama.rope.dimension_count", hidden // heads)),
            "max_position_embeddings": int(self.need("llama.context_length")),
            "rms_norm_eps": float(self.need("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self.value("llama.rope.freq_base", 10_000.0)),
            "tie_word_embeddings": "output.weight" not in names,
            "vocab_size": len(self.need("tokenizer.ggml.tokens")),
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id"),
        }

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield the weights by their Hugging Face names."""
        from gguf import dequantize

        heads = int(self.need("llama.attention.head_count"))
        kv_heads = int(self.value("llama.attention.head_count_kv", heads))
        for tensor in self._reader.tensors:
            weights: Array = dequantize(tensor.data, tensor.tensor_type)
            *layer, part, kind = tensor.name.split(".")
            if part not in _TENSORS or kind != "weight":
                raise UsageError(
                    f"{self._path} has weights that are not part of a Llama model: {tensor.name}."
                )
            if part in ("attn_q", "attn_k"):
                weights = _halves(weights, heads if part == "attn_q" else kv_heads)
            prefix = f"model.layers.{layer[1]}." if layer else ""
            yield f"{prefix}{_TENSORS[part]}.weight", weights

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer with its chat template."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokens: list[str] = self.need("tokenizer.ggml.tokens")
        kinds: list[int] = self.need("tokenizer.ggml.token_type")
        merges = [(a, b) for a, _, b in (pair.partition(" ") for pair in self.need("tokenizer.ggml.merges"))]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        cuts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if self.value("tokenizer.ggml.pre") == "smollm":
            cuts.insert(0, pre_tokenizers.Digits(individual_digits=True))
        made.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        made.decoder = decoders.ByteLevel()
        controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
        made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
        ends = {
            f"{name}_token": tokens[number]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (number := self.value(f"tokenizer.ggml.{key}_token_id")) is not None
        }
        wrapped: Any = cast(Any, PreTrainedTokenizerFast)(
            tokenizer_object=made,
            chat_template=self.value("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            model_max_length=self.need("llama.context_length"),
            **ends,
        )
        wrapped.save_pretrained(folder)


def _halves(weights: Array, heads: int) -> Array:
    """Reorder the rows of each head as in transformers: first halves of the rotary pairs, then second."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_folder(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an empty folder."""
    import numpy as np
    from safetensors.numpy import save_file

    file = GgufFile(path)
    weights = {name: np.ascontiguousarray(array, np.float32) for name, array in file.tensors()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in file.config().items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    file.save_tokenizer(folder)
