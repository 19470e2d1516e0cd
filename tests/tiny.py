"""Tiny random targets of every supported family, and a word tokenizer with a chat template to go with them.

The configurations switch on what makes each family awkward: grouped heads, sliding windows shorter than the test
sequences, tied and scaled embeddings, soft-capped logits, per-layer inputs, shared keys and values, head sizes that
differ by layer type. Every weight is random, norms included, so that a forgotten norm or scale shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    SiglipVisionConfig,
)

from carryover.target import Target

WINDOW = 6
TEXT_FAMILIES = ("llama", "qwen3", "gemma3_text", "gemma4_text", "gemma4_unified_text")
WRAPPED_FAMILIES = ("gemma3", "gemma4", "gemma4_unified")  # the multimodal checkpoints; only their language model runs
SLIDING_FAMILIES = ("gemma3_text", "gemma4_text", "gemma4_unified_text")


def tiny_config(family: str, vocab: int = 96, layers: int = 6, **overrides: Any) -> PreTrainedConfig:
    """A configuration of `family` with `layers` layers of width 32; `overrides` replace single (text) fields."""
    full = {layers - 1, *range(2, layers, 3)}
    sliding = ["full_attention" if i in full else "sliding_attention" for i in range(layers)]
    base: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    gemma = {"sliding_window": WINDOW, "layer_types": sliding, "final_logit_softcapping": 3.0}
    gemma4 = {**gemma, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    shared = {"num_kv_shared_layers": 3 if layers >= 6 else 0}  # the last three read rows of the layers before them
    ple = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": vocab}
    if family == "llama":
        return LlamaConfig(**{**base, "tie_word_embeddings": True, **overrides})
    if family == "qwen3":
        return Qwen3Config(**{**base, "tie_word_embeddings": False, **overrides})
    if family == "gemma3_text":
        return Gemma3TextConfig(**{**base, **gemma, "query_pre_attn_scalar": 8, **overrides})
    if family == "gemma4_text":
        return Gemma4TextConfig(**{**base, **gemma4, **shared, **ple, **overrides})
    if family == "gemma4_unified_text":
        return Gemma4UnifiedTextConfig(**{**base, **gemma4, **overrides})
    if family == "gemma3":
        # the multimodal Gemma 3 applies no soft-capping, whatever its text config says
        text = tiny_config("gemma3_text", vocab, layers, **{"final_logit_softcapping": None, **overrides})
        vision = SiglipVisionConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
        )
        return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    if family == "gemma4":
        return Gemma4Config(text_config=tiny_config("gemma4_text", vocab, layers, **overrides))
    if family == "gemma4_unified":
        return Gemma4UnifiedConfig(text_config=tiny_config("gemma4_unified_text", vocab, layers, **overrides))
    raise ValueError(f"no tiny configuration for the family {family!r}.")


def tiny_target(family: str = "llama", vocab: int = 96, layers: int = 6, seed: int = 0, **overrides: Any) -> Target:
    """A random fp32 target, the same for the same arguments, with `tiny_tokenizer(vocab)`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, vocab, layers, **overrides), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                if family.startswith("gemma4") and name.endswith("q_norm.weight"):
                    parameter.mul_(len(parameter) ** -0.5)  # this family leaves the scale of attention to the norm
    return Target(model, tiny_tokenizer(vocab), name=f"tiny-{family}-{seed}")


def tiny_tokenizer(vocab: int = 96) -> PreTrainedTokenizerFast:
    """Words `w5`, `w6`, ... between blanks, and a chat template; 2 `<end>` ends a turn, 3 `<user>`, 4 `<assistant>`."""
    names = ["<pad>", "<start>", "<end>", "<user>", "<assistant>"]
    words = {word: i for i, word in enumerate(names + [f"w{i}" for i in range(len(names), vocab)])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<start>",
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    fast.chat_template = (
        "{{ '<start> ' }}{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
    )
    return fast


def save_target(target: Target, folder: Path) -> Path:
    """Writes the target as an ordinary Hugging Face folder (weights, configuration, tokenizer) and returns it."""
    target.model.save_pretrained(folder)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder)
    return folder
