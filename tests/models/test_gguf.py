"""A GGUF file becomes a folder that transformers reads, with the same numbers and the same tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rollgym.chat import ChatTemplate, Conversation, load_tokenizer  # noqa: E402
from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.engines.embedded.model import read_module  # noqa: E402
from rollgym.models.gguf import write_folder  # noqa: E402

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 32, 4, 2, 64, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def vocabulary() -> tuple[list[str], list[str]]:
    """Control tokens, all bytes, and two merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*CONTROLS, *sorted(ByteLevel.alphabet()), "Up", "12"], ["U p", "1 2"]


def write_gguf(path: Path, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A tiny Llama with random weights; returns them by their names in the file."""
    tokens, merges = vocabulary()
    facts = {"arch": "llama", "pre": "smollm", "extra": None, **changes}
    writer = gguf.GGUFWriter(path, facts["arch"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(facts["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROLS else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(seed)
    width = KV_HEADS * HIDDEN // HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (width, HIDDEN),
            "attn_v": (width, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    if facts["extra"]:
        shapes[facts["extra"]] = (HIDDEN,)
    made = {name: (rng.normal(size=shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}
    for name, array in made.items():
        if array.ndim == 2 and name != "token_embd":
            kind = gguf.GGMLQuantizationType.Q4_1
            packed = gguf.quantize(array, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            made[name] = gguf.dequantize(packed, kind)
        else:
            writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    made = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "tiny.gguf", tmp_path / "out")
    return tmp_path / "out", made


def test_quantized_weights_are_converted_exactly(converted: tuple[Path, dict[str, Any]]) -> None:
    folder, made = converted
    model: Any = read_module(folder)
    own = dict(model.named_parameters())
    assert np.array_equal(own["model.layers.1.mlp.down_proj.weight"].detach(), made["blk.1.ffn_down"])
    assert np.array_equal(own["model.embed_tokens.weight"].detach(), made["token_embd"])
    assert model.config.rope_parameters["rope_theta"] == 100_000.0
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_model_computes_what_transformers_reads_from_the_file_itself(
    converted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Rotary pairs lie otherwise in such a file: a model with them unsorted talks nonsense."""
    folder, _ = converted
    ours: Any = read_module(folder)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        gap = (ours(ids).logits - theirs(ids).logits).abs().max()
    assert float(gap) < 1e-5


def test_the_tokenizer_merges_cuts_digits_and_holds_conversations(
    converted: tuple[Path, dict[str, Any]],
) -> None:
    tokenizer = load_tokenizer(converted[0])
    tokens, _ = vocabulary()
    encode = tokenizer.encode("Up 12", add_special_tokens=False)
    assert [tokens[number] for number in encode] == ["Up", "Ġ", "1", "2"]
    text = "é…\n  a12 <b>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
    talk = Conversation(ChatTemplate(tokenizer), system="Walk.")
    talk.observe("hi <|im_end|>")
    assert talk.stop_ids == (2,)
    assert sum(number == 2 for number in talk.prompt_ids) == 2


def test_files_of_other_models_are_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for changes, sentence in (
        ({"arch": "gemma"}, "architecture 'gemma'"),
        ({"pre": "qwen2"}, "tokenizer 'qwen2'; rollgym reads 'llama'"),
        ({"extra": "blk.0.post_norm"}, r"weights that are not part of a Llama model: blk.0.post_norm.weight"),
    ):
        write_gguf(tmp_path / "x.gguf", **changes)
        with pytest.raises(UsageError, match=sentence):
            write_folder(tmp_path / "x.gguf", tmp_path / "out")
    (tmp_path / "x.gguf").write_bytes(b"no such file\n" * 9)
    with pytest.raises(UsageError, match="is not a readable GGUF file"):
        write_folder(tmp_path / "x.gguf", tmp_path / "out")
