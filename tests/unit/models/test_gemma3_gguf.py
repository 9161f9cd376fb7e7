"""Gemma 3 from a GGUF file: a tiny one as llama.cpp's converter writes it, and Gemma 3 270M against transformers with
the weights that the `gguf` package decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from procengine import LLM, SamplingParams
from procengine.gguf_config import GGUFConfig
from procengine.gguf_file import GGUFFile
from procengine.models.loader import load_model
from procengine.tokenizer import Tokenizer
from tests.e2e.oracle import one_thread
from tests.model_files import add_key
from tests.tiny_tokenizers import WORDS, byte_level_metadata
from tests.unit.models.paged_forward import forward_whole
from tests.unit.models.tiny_families import save_family

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Of a tensor of transformers' Gemma 3."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_NAMES[part]}.{kind}"


def write_tiny(path: Path, oracle: Any) -> None:
    facts = oracle.config
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in {
        "block_count": facts.num_hidden_layers,
        "context_length": facts.max_position_embeddings,
        "embedding_length": facts.hidden_size,
        "feed_forward_length": facts.intermediate_size,
        "attention.head_count": facts.num_attention_heads,
        "attention.head_count_kv": facts.num_key_value_heads,
        "attention.key_length": facts.head_dim,
        "attention.value_length": facts.head_dim,
        "attention.layer_norm_rms_epsilon": facts.rms_norm_eps,
        "attention.sliding_window": facts.sliding_window,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base": 1e6,
    }.items():
        add_key(writer, f"gemma3.{key}", value)
    for key, value in byte_level_metadata(WORDS, pre="smollm").items():
        add_key(writer, key, value)
    for name, parameter in oracle.named_parameters():
        offset = 1.0 if name.endswith("norm.weight") else 0.0
        writer.add_tensor(gguf_name(name), (parameter.detach() + offset).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_tiny_file_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    oracle, _ = save_family("gemma3", tmp_path, query_pre_attn_scalar=16)  # the head size: files say no other
    write_tiny(tmp_path / "tiny.gguf", oracle)
    config = GGUFConfig(GGUFFile(tmp_path / "tiny.gguf")).resolve()
    token_ids = [(7 * i * i + 3 * i) % 97 for i in range(30)]
    found = forward_whole(load_model(config, torch.float32, "cpu", progress=False), token_ids)
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


_TEXTS = ["The capital of France is", "def fibonacci(n):\n    ", "日本語の文章を書くとき、"]
_NUM_TOKENS = 16
_MIN_GAP = 1e-3


def decoded(path: Path) -> dict[str, Tensor]:
    """All tensors, float32, by the `gguf` package alone."""
    reader = gguf.GGUFReader(path)
    found = {}
    for tensor in reader.tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        found[tensor.name] = torch.from_numpy(values).view(*reversed(tensor.shape.tolist()))
    return found


def make_oracle(path: Path) -> Any:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        sliding_window=512,
    )
    model = transformers.Gemma3ForCausalLM(config).float().eval()
    tensors = decoded(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[gguf_name(name)] - (1.0 if name.endswith("norm.weight") else 0.0))
    return model


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_text_of_gemma3_270m_is_that_of_transformers(procengine_home: Path) -> None:
    from procengine.hub import pull

    path = next(pull("gemma3-270m", procengine_home).glob("*.gguf"))
    license_text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    prompts = [*_TEXTS, license_text[:3500]]  # the last is longer than the window of 512 tokens
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8}
    # Six groups of layers, each with blocks of its own.
    with LLM(str(path), **options, max_num_batched_tokens=256, num_blocks=6 * 128) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokenizer = Tokenizer.load(llm.config.model.tokenizer_path)
    oracle = make_oracle(path)
    for prompt, output in zip(prompts, outputs, strict=True):
        prompt_ids, token_ids = output.prompt_token_ids, output.outputs[0].token_ids
        assert prompt_ids[0] == 2 and tokenizer.decode(prompt_ids[1:]) == prompt
        with one_thread(), torch.inference_mode():
            logits = oracle(torch.tensor([[*prompt_ids, *token_ids[:-1]]]), logits_to_keep=_NUM_TOKENS).logits[0]
        best = logits.topk(2)
        is_close = (best.values[:, 0] - best.values[:, 1] < _MIN_GAP).tolist()
        right = [a == b or near for a, b, near in zip(token_ids, best.indices[:, 0].tolist(), is_close, strict=True)]
        assert all(right), (token_ids, best.indices[:, 0].tolist())
        assert sum(is_close) <= 1
    assert "Paris" in outputs[0].outputs[0].text or "France" in outputs[0].outputs[0].text
