"""The lab target's tokenizer: one token per word of the lab language, and its chat template.

Text of the lab language separates every word and sign by one space, so decoding gives back the text exactly.
"""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from . import language

PAD, UNKNOWN, USER, ASSISTANT, END, MASK = "<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"
SPECIAL = (PAD, UNKNOWN, USER, ASSISTANT, END, MASK)

# The grammar knows users and assistants only; a system message would be words the target never saw.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ raise_exception('the lab target knows the roles user and assistant only') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Special tokens first, then `language.vocabulary()`; ids depend on nothing else."""
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *language.vocabulary()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )
