"""Which characters of a rendered conversation are trained on.

A chat template is a program that turns a list of messages into one text and does not say which part of it came from where. Three ways
to find out, in this order:

1. The template marks assistant text itself (`{% generation %}`): its marks are taken.
2. The text up to turn i, rendered alone, is how the whole text begins, for each trained turn i. What turn i added to the text before it
   (with the generation prompt, which at inference is given, not generated) is that turn's part.
3. The template renders a turn differently once others follow (reasoning templates drop old thoughts; some move the system message to
   the last user turn). Then every trained turn becomes a sample of its own, in which it is last: rendered exactly as at inference.

Where none applies, the conversation is refused. Nothing is trained on by guess.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Span = tuple[int, int]
Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""(messages, with generation prompt) -> text."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
_OURS = ("train", "weight", "from", "value")


class ChatError(ValueError):
    """A conversation that cannot be trained on; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, and which of them are trained on."""

    messages: list[dict[str, Any]]
    trained: list[bool]


def parse(value: Any) -> Conversation:
    """A conversation from a row's `messages` (role, content) or ShareGPT's `conversations` (from, value).

    Assistant turns are trained on, unless a turn's own `train` (true or false) or `weight` (1 or 0) says otherwise; `train: true` on
    a turn of another role trains on that one too.

    Raises:
        ChatError: it is not a list of such turns, or no turn is trained on.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ChatError("a list of turns is needed, not text") from None
    if not isinstance(value, (list, tuple)) or not value:
        raise ChatError(f"a list of turns is needed, not {'an empty one' if value == [] else type(value).__name__}")
    messages, trained = [], []
    for number, turn in enumerate(value, 1):
        message = _message(turn, number)
        messages.append(message)
        trained.append(_is_trained(turn, message["role"], number))
    return Conversation(messages, trained)


def _message(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ChatError(f"turn {number} is a {type(turn).__name__}, not an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not role:
        raise ChatError(f"turn {number} has no role, only {', '.join(sorted(map(str, turn)))}")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ChatError(f"turn {number} has content that is not text")
        content = "".join(part["text"] for part in content)
    if content is None:
        if not turn.get("tool_calls"):
            raise ChatError(f"turn {number} ({role}) has no content")
        content = ""
    if not isinstance(content, str):
        raise ChatError(f"turn {number} has a {type(content).__name__} as content, not text")
    rest = {key: item for key, item in turn.items() if key not in _OURS and item is not None}  # tables fill absent keys with None
    return {**rest, "role": _ROLES.get(role.lower(), role), "content": content}


def _is_trained(turn: dict[str, Any], role: str, number: int) -> bool:
    train, weight = turn.get("train"), turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise ChatError(f"turn {number} has weight {weight}: only 0 and 1 are known")
    if train is not None and not isinstance(train, bool):
        raise ChatError(f"turn {number} has train {train!r}: only true and false are known")
    if train is not None and weight is not None and train != bool(weight):
        raise ChatError(f"turn {number} has train {train} and weight {weight}")
    if train is not None:
        return train
    return role == "assistant" if weight is None else bool(weight) and role == "assistant"


def check_tool_calls(conversation: Conversation, text: str) -> None:
    """Refuses a text in which a tool call is missing: what would be trained on is to end the turn instead of calling.

    Raises:
        ChatError: the template leaves one out.
    """
    for number, message in enumerate(conversation.messages, 1):
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str):
                raise ChatError(f"turn {number} has a tool call without a function's name")
            if name not in text:
                raise ChatError(f"the chat template leaves out the call of {name} in turn {number}: use a template that knows tools")


def syntax_problem(template: str) -> str | None:
    """Why a text cannot be a template at all, or None."""
    import jinja2

    try:
        # transformers' own marks of assistant text are no part of jinja2. Only parsed: it is run in transformers' sandbox.
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)  # noqa: S701 - no HTML
    except jinja2.TemplateSyntaxError as error:
        return f"{error.message} (line {error.lineno})"
    return None


def marks_generation(template: str) -> bool:
    """Whether a template marks assistant text itself."""
    return _GENERATION.search(template) is not None


def runs(mask: Sequence[int]) -> list[Span]:
    """[begin, end) of each run of ones."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and bool(mask[i])) != (i > 0 and bool(mask[i - 1]))]
    return list(zip(edges[::2], edges[1::2], strict=True))


def select_runs(mask: Sequence[int], conversation: Conversation) -> list[int] | None:
    """A template's own mask without the turns that are not to be trained on; None where its runs are not the assistant turns."""
    assistant = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if all(conversation.trained[i] == (message["role"] == "assistant") for i, message in enumerate(conversation.messages)):
        return [int(bool(value)) for value in mask] if any(mask) else None
    found = runs(mask)
    others = any(conversation.trained[i] for i in range(len(conversation.messages)) if i not in assistant)
    if others or len(found) != len(assistant):
        return None
    result = [0] * len(mask)
    for (begin, end), turn in zip(found, assistant, strict=True):
        if conversation.trained[turn]:
            result[begin:end] = [1] * (end - begin)
    return result


def spans(conversation: Conversation, render: Render, special: Sequence[str]) -> list[tuple[str, list[Span]]]:
    """Texts of a conversation, each with its trained character spans: one text, or one per trained turn (ways 2 and 3).

    Args:
        conversation: with at least one trained turn.
        render: the template.
        special: special tokens, one of which usually ends a turn.

    Raises:
        ChatError: the template cannot be taken apart.
    """
    messages = conversation.messages
    wanted = [i for i, trained in enumerate(conversation.trained) if trained]
    text = render(messages, False)
    found = [_span(text, messages, i, render, special) for i in wanted]
    if all(span is not None for span in found):
        return [(text, [span for span in found if span is not None])]
    result = []
    for i in wanted:
        text = render(messages[: i + 1], False)
        span = _span(text, messages[: i + 1], i, render, special)
        if span is None:
            raise ChatError(f"the chat template does not show where turn {i + 1} begins: use one with {{% generation %}} marks")
        result.append((text, [span]))
    return result


def _span(text: str, messages: Sequence[dict[str, Any]], turn: int, render: Render, special: Sequence[str]) -> Span | None:
    """The characters of `text` that a turn added; None where the text before or up to the turn is not how `text` begins."""
    is_assistant = messages[turn]["role"] == "assistant"
    begin_text = render(messages[:turn], is_assistant) if turn else ""  # templates are not made for no messages at all
    end_text = render(messages[: turn + 1], False)
    if not text.startswith(begin_text) or not end_text.startswith(begin_text):
        return None
    begin = len(begin_text)
    if not turn or not is_assistant or begin_text == render(messages[:turn], False):
        begin += _header_length(messages, turn, begin_text, render)
    if text.startswith(end_text):
        return begin, _without_blanks_after_end(text, begin, len(end_text), special)
    # The conversation's own end (an eos after the last turn) is no part of a turn that others follow.
    common = _common_length(text, end_text)
    ends = [match.end() for token in special for match in re.finditer(re.escape(token), end_text[begin:common])]
    if not ends:
        return None
    end = begin + max(ends)
    rest = end_text[end:]
    for token in special:
        rest = rest.replace(token, "")
    return None if rest.strip() else (begin, end)


def _header_length(messages: Sequence[dict[str, Any]], turn: int, begin_text: str, render: Render) -> int:
    """Length of what precedes the content in a turn for which the template has no generation prompt: equal for any content."""
    added = []
    for content in ("Quite so", "Never mind"):
        changed = [*messages[:turn], {**messages[turn], "content": content}]
        added.append(render(changed, False)[len(begin_text) :])
    length = _common_length(*added)
    return length if added[0][:length].strip() else 0


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _without_blanks_after_end(text: str, begin: int, end: int, special: Sequence[str]) -> int:
    """Blanks between a turn's end token and the next turn are the template's; at inference generation has stopped before them."""
    stripped = text[begin:end].rstrip()
    return begin + len(stripped) if any(stripped.endswith(token) for token in special) else end


def token_mask(text: str, offsets: Sequence[Span], trained: Sequence[Span]) -> list[int]:
    """1 for every token that lies in a trained span.

    Blanks at a token's edges do not count: tokenizers glue a blank to the word after it, and some end tokens swallow the newline
    behind them. A token that has other characters outside of the span is not trained on.

    Args:
        text: the whole text.
        offsets: characters of each token.
        trained: character spans, in order.
    """
    mask = [0] * len(offsets)
    number = 0
    for i, (begin, end) in enumerate(offsets):
        piece = text[begin:end]
        if piece.strip():
            begin, end = begin + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())
        while number < len(trained) and trained[number][1] <= begin:
            number += 1
        if number == len(trained):
            break
        mask[i] = int(trained[number][0] <= begin and end <= trained[number][1])
    return mask
