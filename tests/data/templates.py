"""Word tokenizers with the chat templates that the field uses, small enough to write the expected tokens down."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<turn>", "<end>"]
ROLES = ["system", "user", "assistant", "model", "helper", "tool"]
WORDS = [
    *ROLES,
    *["hello", "hi", "how", "are", "you", "fine", "thanks", "bye", "why", "because", "[INST]", "[/INST]"],
    *["<think>", "</think>", "probe", "\n"],
]

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nyou are helper<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: the last response shows a think block, earlier ones never; enable_thinking=False puts it in the prompt.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}"
    "<think>\n{{ parts[0].replace('<think>', '').strip() if parts | length > 1 else '' }}\n</think>\n\n"
    "{% endif %}{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
MISTRAL = (  # needs no generation prompt: a response simply follows [/INST]
    "<bos>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)
NO_BOUNDARY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NO_END = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def word_tokenizer(template: str | None, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Words and line breaks are tokens, blanks are not."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[^\s]+"), "removed", invert=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos, additional_special_tokens=SPECIAL[1:]
    )
    fast.chat_template = template
    return fast


def words(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(ids)).replace("\n", "/")
