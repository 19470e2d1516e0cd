"""Chat rendering: the exact tokens of prompts, and exactly the target's own tokens under the loss mask."""

from __future__ import annotations

import pytest
from templates import CHATML, GEMMA, MISTRAL, NO_BOUNDARY, NO_END, THINKING, word_tokenizer, words

from carryover.data.chat import (
    HistoryRewritten,
    conversation,
    render_conversation,
    render_prompt,
    template_fingerprint,
)
from carryover.errors import InputError

SYSTEM = "<|im_start|> system / you are helper <|im_end|> /"
TALK = conversation(["hello", "how are you"], ["hi", "fine thanks"])


def shown(tokenizer, messages, options=None, **kwargs) -> str:
    """The conversation as words, supervised ones in brackets."""
    ids, mask = render_conversation(tokenizer, messages, options, **kwargs)
    assert len(ids) == len(mask)
    parts = [words(tokenizer, [i]) for i in ids]
    return " ".join(f"[{part}]" if m else part for part, m in zip(parts, mask, strict=True))


def test_conversation_interleaves_responses():
    assert conversation(["hello"], []) == [{"role": "user", "content": "hello"}]
    assert [m["content"] for m in TALK] == ["hello", "hi", "how are you", "fine thanks"]
    assert [m["content"] for m in conversation(["a", "b", "c"], ["x"])] == ["a", "x", "b"]  # only as far as answered


def test_prompt_has_default_system_and_generation_prompt():
    tokenizer = word_tokenizer(CHATML)
    expected = f"{SYSTEM} <|im_start|> user / hello <|im_end|> / <|im_start|> assistant /"
    assert words(tokenizer, render_prompt(tokenizer, ["hello"])) == expected
    assert render_prompt(tokenizer, conversation(["hello"], [])) == render_prompt(tokenizer, ["hello"])


def test_several_turns_as_text_are_refused():
    with pytest.raises(InputError, match="turn by turn"):
        render_prompt(word_tokenizer(CHATML), ["hello", "how are you"])


def test_chatml_multi_turn_mask():
    tokenizer = word_tokenizer(CHATML)
    assert shown(tokenizer, TALK) == (
        f"{SYSTEM} <|im_start|> user / hello <|im_end|> / <|im_start|> assistant / [hi] [<|im_end|>] / "
        "<|im_start|> user / how are you <|im_end|> / <|im_start|> assistant / [fine] [thanks] [<|im_end|>]"
    )
    assert shown(tokenizer, TALK, last_only=True).count("[") == 3


@pytest.mark.parametrize("template", [CHATML, GEMMA, MISTRAL, THINKING])
def test_mask_starts_where_the_prompt_ends(template):
    """What is trained on is what the target sees when it generates (train and serve render alike)."""
    tokenizer, options = word_tokenizer(template), {"enable_thinking": False}
    stops = tokenizer.convert_tokens_to_ids(["<end>", "<eos>"])
    ids, mask = render_conversation(tokenizer, TALK, options, stops, last_only=True)
    prompt = render_prompt(tokenizer, TALK[:3], options)
    assert ids[: mask.index(True)] == prompt
    assert all(mask[len(prompt) :]) and len(ids) - len(prompt) == 3


def test_trailing_user_turn_is_left_out():
    tokenizer = word_tokenizer(CHATML)
    assert render_conversation(tokenizer, TALK[:3]) == render_conversation(tokenizer, TALK[:2])


def test_template_supplied_think_block_is_not_supervised():
    tokenizer = word_tokenizer(THINKING)
    expected = (
        "<|im_start|> user / hello <|im_end|> / <|im_start|> assistant / <think> / / </think> / / [hi] [<|im_end|>]"
    )
    assert shown(tokenizer, TALK[:2], {"enable_thinking": False}) == expected  # the prompt holds it
    assert shown(tokenizer, TALK[:2]) == expected  # the template adds it behind the prompt


def test_own_thinking_is_supervised():
    tokenizer = word_tokenizer(THINKING)
    thinking = conversation(["hello"], ["<think> why </think> hi"])
    assert shown(tokenizer, thinking) == (
        "<|im_start|> user / hello <|im_end|> / <|im_start|> assistant / "
        "[<think>] [/] [why] [/] [</think>] [/] [/] [hi] [<|im_end|>]"
    )
    # With thinking off the prompt holds an empty block already, so this cannot have been generated.
    with pytest.raises(HistoryRewritten, match="generation prompt ends"):
        render_conversation(tokenizer, thinking, {"enable_thinking": False})


def test_rewritten_history_is_an_error_and_last_only_is_not():
    tokenizer = word_tokenizer(THINKING)
    with pytest.raises(HistoryRewritten, match="turn 1 differently"):
        render_conversation(tokenizer, TALK, {"enable_thinking": False})
    assert shown(tokenizer, TALK, {"enable_thinking": False}, last_only=True).endswith(
        "/ <|im_start|> assistant / hi <|im_end|> / <|im_start|> user / how are you <|im_end|> / "
        "<|im_start|> assistant / <think> / / </think> / / [fine] [thanks] [<|im_end|>]"
    )


def test_gemma_ends_a_turn_with_a_token_that_is_not_eos():
    tokenizer = word_tokenizer(GEMMA, eos="<eos>")
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert shown(tokenizer, TALK[:2], stop_ids=[end]) == "<bos> <turn> user / hello <end> / <turn> model / [hi] [<end>]"
    with pytest.raises(InputError, match=r"masks everything.*<eos>"):
        render_conversation(tokenizer, TALK[:2])
    with pytest.raises(InputError, match="System role not supported"):
        render_prompt(tokenizer, [{"role": "system", "content": "hi"}, *TALK[:1]])


def test_template_without_generation_prompt_but_with_a_boundary():
    tokenizer = word_tokenizer(MISTRAL, eos="<eos>")
    assert shown(tokenizer, TALK) == (
        "<bos> [INST] hello [/INST] [hi] [<eos>] [INST] how are you [/INST] [fine] [thanks] [<eos>]"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (NO_BOUNDARY, "no generation boundary"),
        (NO_END, "masks everything"),
        (None, "no chat template"),
        ("{{ oops( }}", "refuses"),
    ],
)
def test_unusable_templates_raise(template, message):
    with pytest.raises(InputError, match=message):
        render_conversation(word_tokenizer(template), TALK[:2])


@pytest.mark.parametrize(
    "options", [{"continue_final_message": True}, {"tools": "x"}, {"return_assistant_tokens_mask": True}]
)
def test_options_that_transformers_refuses_are_named(options):
    with pytest.raises(InputError, match=rf"refuses the messages with the options .*{next(iter(options))}"):
        render_prompt(word_tokenizer(CHATML), ["w1"], options)


def test_conversation_without_response_raises():
    with pytest.raises(InputError, match="all zero"):
        render_conversation(word_tokenizer(CHATML), TALK[:1])


def test_a_response_word_that_is_in_the_header_does_not_move_the_boundary():
    tokenizer = word_tokenizer(CHATML)
    assert shown(tokenizer, conversation(["hello"], ["assistant"])).endswith("assistant / [assistant] [<|im_end|>]")


def test_template_fingerprint_tells_templates_and_options_apart():
    a, b = word_tokenizer(CHATML), word_tokenizer(THINKING)
    prints = {template_fingerprint(a), template_fingerprint(b), template_fingerprint(b, {"enable_thinking": False})}
    assert len(prints) == 3 and template_fingerprint(b, {}) == template_fingerprint(b)


@pytest.mark.slow
def test_smollm2_template():
    from transformers import AutoTokenizer

    from carryover.embedded import EMBEDDED

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED["smollm2"]())
    ids, mask = render_conversation(tokenizer, conversation(["Hi!", "Who are you?"], ["Hello.", "A model."]))
    spans = [tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])]
    assert spans == ["Hello.<|im_end|>A model.<|im_end|>"]
    assert ids[: mask.index(True)] == render_prompt(tokenizer, ["Hi!"])
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
