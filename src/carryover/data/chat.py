"""Chat templates: from messages to token ids, and which of the ids are the target's own response.

The response of an assistant turn starts where the template's generation prompt ends and includes the end-of-turn token:
what the target generates, nothing more. The boundary is found by rendering the conversation up to the turn with the
generation prompt and comparing token ids, so it needs neither `{% generation %}` tags nor patterns in text.

Letters: `S` tokens. Source: SPEC 2.4 and 9.9; what goes wrong elsewhere: an all-zero or all-one mask, a supervised
empty think block, a missing end of turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..errors import InputError

Message = Mapping[str, Any]  # role, content and whatever else the template reads
Options = Mapping[str, Any]  # arguments of the template, such as enable_thinking or tools


class HistoryRewritten(InputError):
    """The template shows an earlier response differently from how it was generated (Qwen3 drops its thinking)."""


def conversation(turns: Sequence[str], responses: Sequence[str]) -> list[Message]:
    """User turns with the responses in between: `[user, assistant, user, ...]`, one more turn than there are
    responses."""
    messages: list[Message] = []
    for i, turn in enumerate(turns[: len(responses) + 1]):
        messages.append({"role": "user", "content": turn})
        if i < len(responses):
            messages.append({"role": "assistant", "content": responses[i]})
    return messages


def render_prompt(
    tokenizer: Tokenizer, turns: Sequence[str] | Sequence[Message], options: Options | None = None
) -> list[int]:
    """Token ids `[S]` of a prompt up to and including the generation prompt.

    turns: messages, or one user turn as `[text]`; a prompt of several turns needs the responses in between (see
    `conversation`). Raises InputError when there is no chat template or it refuses the messages.
    """
    if any(isinstance(turn, str) for turn in turns):
        if len(turns) != 1:
            raise InputError(
                "a prompt of several turns is answered turn by turn; render it with the responses between them."
            )
        turns = conversation([str(turns[0])], [])
    return _ids(tokenizer, _text(tokenizer, turns, options, prompt=True))  # type: ignore[arg-type]


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    options: Options | None = None,
    stop_ids: Collection[int] = (),
    last_only: bool = False,
) -> tuple[list[int], list[bool]]:
    """Token ids `[S]` of a conversation and which of them the target generates, end-of-turn tokens included.

    The ids end with the last assistant turn. stop_ids: tokens that end a turn besides the tokenizer's eos. last_only:
    supervise that last turn only. Raises HistoryRewritten where earlier turns cannot be supervised in one sequence,
    InputError where the template has no generation boundary or nothing would be supervised.
    """
    ends = [i + 1 for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not ends:
        raise InputError("the conversation has no assistant turn, so its loss mask would be all zero.")
    messages = messages[: ends[-1]]
    stops = _end_tokens(tokenizer, stop_ids)
    ids = _ids(tokenizer, _text(tokenizer, messages, options))
    mask = [False] * len(ids)
    for end in ends[-1:] if last_only else ends:
        start, stop = _response_span(tokenizer, messages[:end], options, ids, stops)
        mask[start:stop] = [True] * (stop - start)
    length = len(mask) - mask[::-1].index(True)  # the line break behind the last end-of-turn token is not generated
    return ids[:length], mask[:length]


def template_fingerprint(tokenizer: Tokenizer, options: Options | None = None) -> str:
    """Identifies a chat template together with its options, for the manifest of a recording."""
    text = json.dumps([tokenizer.chat_template, dict(options or {})], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _response_span(
    tokenizer: Tokenizer, messages: Sequence[Message], options: Options | None, ids: list[int], stops: frozenset[int]
) -> tuple[int, int]:
    """Where in `ids` the response of the last of `messages` starts, and where it stops (behind its end token)."""
    before = messages[:-1]
    prompt_text = _text(tokenizer, before, options, prompt=True)
    through_text = _text(tokenizer, messages, options)
    prompt, through = _ids(tokenizer, prompt_text), _ids(tokenizer, through_text)
    turn = sum(m.get("role") == "assistant" for m in messages)
    if ids[: len(through)] != through:
        raise HistoryRewritten(
            f"the chat template shows assistant turn {turn} differently once the conversation goes on (thinking "
            "removed?); make each response a conversation of its own that ends there."
        )
    if through[: len(prompt)] != prompt:
        raise HistoryRewritten(
            f"assistant turn {turn} does not start where the chat template's generation prompt ends; set the "
            "template's options (enable_thinking) as they were at generation, and strip white space from the start of "
            "the content."
        )
    start = len(prompt)
    if added := _added_by_template(tokenizer, before, options, prompt_text, through_text):
        if prompt_text == _text(tokenizer, before, options):
            raise InputError(
                f"the chat template has no generation boundary: it ignores add_generation_prompt, yet puts {added!r} "
                "before a response; use a template that writes this for add_generation_prompt."
            )
        start = len(_ids(tokenizer, prompt_text + added))  # an empty think block of the template is no response
    stop = max((i + 1 for i in range(start, len(through)) if through[i] in stops), default=start)
    if stop == start:
        raise InputError(
            f"the chat template masks everything: no end-of-turn token ({_names(tokenizer, stops)}) follows the "
            f"content of assistant turn {turn}, so nothing would be supervised; use the template that the target was "
            "tuned with."
        )
    return start, stop


def _added_by_template(
    tokenizer: Tokenizer, before: Sequence[Message], options: Options | None, prompt_text: str, through_text: str
) -> str:
    """What the template writes between the generation prompt and any response, found by rendering another one."""
    probe = "probe"
    text = _text(tokenizer, [*before, {"role": "assistant", "content": probe}], options)
    added = text[len(prompt_text) : text.find(probe, len(prompt_text))].rstrip(" ")
    return added if through_text.startswith(prompt_text + added) else ""


def _end_tokens(tokenizer: Tokenizer, stop_ids: Collection[int]) -> frozenset[int]:
    eos = tokenizer.eos_token_id
    return frozenset(stop_ids) | (frozenset() if eos is None else {eos})


def _names(tokenizer: Tokenizer, ids: Collection[int]) -> str:
    return ", ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(ids)))) or "none known"


def _text(tokenizer: Tokenizer, messages: Sequence[Message], options: Options | None, prompt: bool = False) -> str:
    if not tokenizer.chat_template:
        raise InputError(
            "the target's tokenizer has no chat template; use the instruction-tuned model, or set its chat_template."
        )
    try:
        return tokenizer.apply_chat_template(  # type: ignore[return-value]
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=prompt, **(options or {})
        )
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        with_options = f" with the options {json.dumps(dict(options), default=str)}" if options else ""
        raise InputError(f"the chat template refuses the messages{with_options}: {error}.") from error


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
