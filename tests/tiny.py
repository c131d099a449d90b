"""Tiny random models with a real tokenizer, saved as ordinary Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(60)]


def tiny_tokenizer() -> Any:
    """A word-level tokenizer of 64 tokens with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}w2"
    return fast


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """A two-layer config of a family: llama, qwen2, qwen3, mistral, gemma."""
    from transformers import AutoConfig

    settings: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    return AutoConfig.for_model(family, **(settings | overrides))


def save_tiny_model(directory: Path, family: str = "llama", seed: int = 0, scale: float = 6.0, **overrides: Any) -> str:
    """Write a random model whose next-token distributions are peaked enough to be interesting.

    Args:
        scale: factor on the initial weights; larger gives lower entropy.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(scale)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)
