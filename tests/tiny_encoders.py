"""Tiny random encoders of each family as Hugging Face folders, tokenizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers, processors

__all__ = ["ENCODERS", "VOCAB_SIZE", "build_tiny_encoder", "save_encoder", "tiny_wordpiece"]

VOCAB_SIZE = 200
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
# name -> (transformers prefix, what differs from the base)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert-gelu-new": ("Bert", {"hidden_act": "gelu_new", "hidden_size": 40, "intermediate_size": 300}),
    "roberta": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "modernbert": ("ModernBert", {"local_attention": 12, "global_attn_every_n_layers": 2, "cls_token_id": 2}),
    "modernbert-biases": ("ModernBert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
}


def build_tiny_encoder(family: str, kind: str = "Model", **changes: Any) -> Any:
    """A float32 transformers model with random weights, norms and biases included; the same one every time."""
    import transformers

    prefix, own = ENCODERS[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_BASE, **own, **changes})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        model = getattr(transformers, f"{prefix}{kind}")(config).eval().float()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def tiny_wordpiece() -> tokenizers.Tokenizer:
    """Lower-case letters and a few words, with [CLS] and [SEP] and token types, as BERT's."""
    words = ["the", "cat", "sat", "on", "mat", "hello", "world", "query", "passage", ":"]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocab = {token: index for index, token in enumerate([*_SPECIAL, *words, *letters, *("##" + c for c in letters)])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def save_encoder(model: Any, folder: Path) -> Path:
    """`model` in `folder` as transformers saves it, with a tokenizer.json."""
    model.save_pretrained(folder)
    tiny_wordpiece().save(str(folder / "tokenizer.json"))
    return folder
