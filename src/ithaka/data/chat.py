"""Render conversations with a tokenizer's chat template, and find the text to train on.

The template renders each conversation in one call, with marks around every iteration of its loop over the messages and
around its `{% generation %}` blocks. Without the marks, the text must equal the plain rendering. Rendering message by
message would not work: many templates (Qwen3's, for one) render a message differently when others follow.

Training covers the `{% generation %}` blocks. In a template without them, it covers what follows the generation prompt,
up to and including the stop token: the special token that ends a turn. Some templates write that token at the start of
the next turn, or after the last one.
"""

import contextlib
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ithaka.config import ConfigError, ReadingConfig

CharRange = tuple[int, int]
TrainedRanges = Sequence[CharRange] | None  # None: train on all of the text
Message = dict[str, Any]
Tools = list[Any] | None

ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_REFUSES = "refused by the chat template"  # a reason of BadRecord
# Message fields that must not get lost: a template that does not render them is refused.
MUST_RENDER = ("reasoning_content", "reasoning", "thinking", "function_call")
# Tags of loops and generation blocks. Comments match too, so that tags inside them are ignored.
TEMPLATE_TAG = re.compile(
    r"\{#.*?#\}|\{%(?P<left>[-+]?)\s*(?P<tag>(?:end)?(?:for|generation))\b(?P<rest>.*?)(?P<right>[-+]?)%\}", re.DOTALL
)
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
# Candidates to delimit marks: noncharacters and private-use characters, which text rarely contains.
DELIMITERS = (*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xF0000, 0xF1000)))
QUESTION: list[Message] = [{"role": "user", "content": "x"}]
ANSWER: Message = {"role": "assistant", "content": "x"}


class BadRecord(ValueError):
    """A record that cannot be trained on. `reason` is a short phrase by which such records are counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass
class Turn:
    """The part of the rendered text that one message became; `generated` are its `{% generation %}` blocks."""

    role: str
    start: int
    stop: int
    generated: list[CharRange] = field(default_factory=list)


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer."""

    def __init__(self, hf: Any):
        self.hf = hf
        added = [token.content for token in hf.added_tokens_decoder.values() if token.special]
        self.special_tokens = sorted({*added, *hf.all_special_tokens}, key=len, reverse=True)
        self._renders_field: dict[tuple[str, bool], bool] = {}

    def render(
        self, messages: list[Message], tools: Tools, trainable: Sequence[bool], reading: ReadingConfig
    ) -> tuple[str, TrainedRanges]:
        """Return the text and the ranges to train on: those of the `trainable` messages that data.train_on selects."""
        if not self.hf.chat_template:
            raise ConfigError(
                "the data has messages, but the tokenizer has no chat template; set data.chat_template to a file, or "
                "data.tokenizer to the tokenizer of an instruct model"
            )
        text = self._apply(messages, tools)
        self._check_rendered(text, messages, tools)
        all_roles = reading.train_on == "all"
        if all_roles and all(trainable):
            return text, None
        if all_roles:
            untrained = self._find_turns(messages, tools, text, [i for i, train in enumerate(trainable) if not train])
            edges = [0, *sorted(edge for turn in untrained for edge in (turn.start, turn.stop)), len(text)]
            return text, list(zip(edges[::2], edges[1::2], strict=True))
        roles = [message["role"] for message in messages]
        indices = [i for i, train in enumerate(trainable) if train and roles[i] == "assistant"]
        has_generation = GENERATION_TAG.search(self.hf.get_chat_template(None, tools)) is not None
        ranges: list[CharRange] = []
        for i, turn in zip(indices, self._find_turns(messages, tools, text, indices), strict=True):
            follows_tool = i > 0 and roles[i - 1] == "tool"
            content = None if has_generation else self._find_content(text, turn, follows_tool)
            ranges += self._trained_ranges(text, turn, content, reading.train_on_eos)
        return text, ranges

    @functools.cached_property
    def stop_token(self) -> str | None:
        """The special token that ends the last assistant turn, if there is one."""
        text, turns = self._render_probe([*QUESTION, ANSWER])
        return self._find_stop_token(text, self._include_stop_token(text, turns[-1]))[0] if turns else None

    def _check_rendered(self, text: str, messages: list[Message], tools: Tools) -> None:
        """Raise BadRecord if the text lacks a tool, a tool call or a MUST_RENDER field of a message."""
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        names = Counter(str(each.get("function", each).get("name") or "") for each in [*calls, *(tools or ())])
        for name, count in names.items():
            if text.count(name) < count:
                detail = f"the chat template does not render the tool {name} or a call to it; set data.chat_template"
                raise BadRecord(TEMPLATE_REFUSES, f"{detail} to a file that renders tools, or drop the record")
        for number, message in enumerate(messages, 1):
            fields = {name: message[name] for name in MUST_RENDER if str(message.get(name) or "").strip()}
            rendered = [value for name, value in fields.items() if self._is_rendered(name, tools)]
            for name in (name for name, value in fields.items() if value not in rendered):
                fix = "set data.chat_template to a file that renders it, move it into content, or remove it"
                detail = f"message {number} has {name}, which the chat template does not render; {fix}"
                raise BadRecord(f"with {name} that the chat template leaves out", detail)

    def _is_rendered(self, field: str, tools: Tools) -> bool:
        """Whether the template renders this field of the last assistant message."""
        key, value = (field, bool(tools)), "Probe0123"
        if key not in self._renders_field:
            content = {"name": value, "arguments": value} if field == "function_call" else value
            with contextlib.suppress(BadRecord):
                self._renders_field[key] = value in self._apply([*QUESTION, {**ANSWER, field: content}], tools)
        return self._renders_field.setdefault(key, False)

    def _apply(self, messages: list[Message], tools: Tools = None, **options: Any) -> str:
        try:
            return self.hf.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        except Exception as error:  # templates run arbitrary code and raise arbitrary errors
            if type(error).__name__ == "TemplateSyntaxError":
                raise ConfigError(
                    f"the chat template is not valid Jinja ({error}); set data.chat_template to a file that is"
                ) from error
            detail = f"the chat template rejects it ({type(error).__name__}: {error}); change or drop the record, or"
            raise BadRecord(TEMPLATE_REFUSES, f"{detail} set another data.chat_template") from error

    def _render_with_marks(
        self, messages: list[Message], tools: Tools = None, **options: Any
    ) -> tuple[str, list[list[Turn]]]:
        """Return the text and, for each loop over messages, its turns."""
        template = self.hf.get_chat_template(None, tools)
        delimiters = choose_delimiters(template + json.dumps([messages, tools], ensure_ascii=False, default=str))
        marked_template = insert_marks(template, *delimiters)
        return parse_marks(self._apply(messages, tools, chat_template=marked_template, **options), *delimiters)

    def _render_probe(self, messages: list[Message], **options: Any) -> tuple[str, list[Turn]]:
        """Return the text and the turns of the first loop that writes anything."""
        text, loops = self._render_with_marks(messages, **options)
        return text, next((turns for turns in loops if any(turn.stop > turn.start for turn in turns)), [])

    def _find_turns(self, messages: list[Message], tools: Tools, text: str, indices: Sequence[int]) -> list[Turn]:
        """Return the turns of the messages at `indices`. Each message must be rendered exactly once."""
        marked_text, loops = self._render_with_marks(messages, tools)
        if marked_text != text or not loops:
            raise ConfigError(
                "the chat template does not show where an assistant's turn starts and ends; set data.chat_template to "
                "a file with a loop over the messages"
            )
        for turn, following in itertools.chain(*map(itertools.pairwise, loops)):
            if self._deferred_end and text.startswith(self._deferred_end, following.start):
                turn.stop = following.start = following.start + len(self._deferred_end)
        turns_by_message: list[list[Turn]] = [[] for _ in messages]
        for loop, role in itertools.product(loops, ROLES):
            positions = [i for i, message in enumerate(messages) if message["role"] == role]
            turns = [turn for turn in loop if turn.role == role]
            for i, turn in zip(positions, turns, strict=True) if len(positions) == len(turns) else ():
                turns_by_message[i] += [turn] if text[turn.start : turn.stop].strip() else []
        for i in indices:
            if (count := len(turns_by_message[i])) != 1:
                detail = f"the chat template renders message {i + 1} {count} times instead of once; drop the record"
                raise BadRecord(TEMPLATE_REFUSES, detail)
            if i == len(messages) - 1:
                self._include_stop_token(text, turns_by_message[i][0])
        return [turns_by_message[i][0] for i in indices]

    def _include_stop_token(self, text: str, turn: Turn) -> Turn:
        """Extend the last turn by a stop token right after it, unless that token opens the next answer."""
        if self._find_stop_token(text, turn)[0] is not None:
            return turn
        rest = text[turn.stop :].lstrip()
        candidates = (self._deferred_end.strip(), *self.special_tokens)
        token = next((token for token in candidates if token and rest.startswith(token)), None)
        if token is not None and not any(header.lstrip().startswith(token) for header in self._headers):
            turn.stop = text.index(token, turn.stop) + len(token)
        return turn

    def _trained_ranges(self, text: str, turn: Turn, content: int | None, with_stop_token: bool) -> list[CharRange]:
        """Return what to train on in a turn: all from `content` on, or (None) its `{% generation %}` blocks."""
        token, end = self._find_stop_token(text, turn)
        ranges = turn.generated if content is None else [(content, end if token else turn.stop)]
        if not token or not ranges:
            return ranges
        content_end = end - len(token)
        if not with_stop_token:
            return [(low, min(high, content_end)) for low, high in ranges]
        *others, (low, high) = ranges
        return ranges if text[high:content_end].strip() else [*others, (low, max(high, end))]

    def _find_stop_token(self, text: str, turn: Turn) -> tuple[str | None, int]:
        """Return the special token that ends a turn, and the end of the turn without trailing whitespace."""
        end = turn.start + len(text[turn.start : turn.stop].rstrip())
        return next((token for token in self.special_tokens if text.endswith(token, turn.start, end)), None), end

    def _find_content(self, text: str, turn: Turn, follows_tool: bool) -> int:
        """Return where the model's own text starts in an assistant's turn: after the header."""
        opening, prompt, shared = self._headers
        after_tool = self._header_after_tool if follows_tool else None
        for header in filter(None, (after_tool, opening, prompt, shared)):
            if text.startswith(header, turn.start):
                return turn.start + len(header)
        if "" in (prompt, after_tool):  # there is no header
            return turn.start
        start = text.find(prompt, turn.start, turn.stop)  # after a system prompt at the start of the first turn
        if start < 0:
            raise BadRecord(
                TEMPLATE_REFUSES,
                f"the chat template starts an assistant's turn with {text[turn.start : turn.start + 40]!r}, not with "
                f"its generation prompt {after_tool or prompt!r}; set data.chat_template to a file that marks the text "
                "to train on with {% generation %}, or drop the record",
            )
        return start + len(prompt)

    @functools.cached_property
    def _headers(self) -> tuple[str, str, str]:
        """The ways an assistant's turn can start, longest first: all that add_generation_prompt puts after the
        question; the part that it adds (the generation prompt); the part of either that also opens earlier turns
        (without <think>, for example)."""
        plain, before = self._render_probe(QUESTION, add_generation_prompt=False)
        text, after = self._render_probe(QUESTION, add_generation_prompt=True)
        question, turn = plain[before[-1].start :], after[-1]
        # Without a generation prompt, a template may end the text differently, with eos for example.
        is_prefix = text.startswith(question, turn.start)
        opening, prompt = text[turn.stop :], text[turn.start + len(question) if is_prefix else turn.stop :]
        text, (_, answer, _) = self._render_probe([*QUESTION, ANSWER, *QUESTION])
        earlier = text[answer.start : answer.stop]
        shared = earlier[: max(self._count_shared_chars(each, earlier) for each in (opening, prompt))]
        opening = opening if opening.strip() else ""
        end = self._deferred_end
        return opening.removeprefix(end), prompt.removeprefix(end), shared.removeprefix(end)

    @functools.cached_property
    def _header_after_tool(self) -> str | None:
        """All that add_generation_prompt puts after a tool's result. None: the template takes no tool results."""
        for content, arguments in itertools.product((None, ""), ({}, "{}")):
            call = {"id": "call00001", "type": "function", "function": {"name": "x", "arguments": arguments}}
            calling = {"role": "assistant", "content": content, "tool_calls": [call]}
            result = {"role": "tool", "name": "x", "content": "x", "tool_call_id": "call00001"}
            with contextlib.suppress(BadRecord):
                text, turns = self._render_probe([*QUESTION, calling, result], add_generation_prompt=True)
                if turns and turns[-1].role == "tool" and turns[-1].stop > turns[-1].start:
                    return text[turns[-1].stop :].removeprefix(self._deferred_end)
        return None

    @functools.cached_property
    def _deferred_end(self) -> str:
        """What ends a turn but is rendered at the start of the next one, whatever its role; "" in most templates.

        It shows in a later question, compared with the first one.
        """
        with contextlib.suppress(BadRecord):
            text, turns = self._render_probe([*QUESTION, ANSWER, *QUESTION, ANSWER])
            if len(turns) == 4:
                first, *later = (text[turn.start : turn.stop] for turn in turns)
                first, question = first.removeprefix(self.hf.bos_token or ""), later[1]
                is_suffix = question.endswith(first)
                num_same = len(first) if is_suffix else self._count_shared_chars(first, question, at_end=True)
                end = question[: len(question) - num_same]
                return end if end.strip() and all(turn.startswith(end) for turn in later) else ""
        return ""

    def _count_shared_chars(self, one: str, other: str, at_end: bool = False) -> int:
        """Return the number of characters in the tokens that both texts start (or end) with."""
        if not self.hf.is_fast:
            return 0
        encoded = [self.hf(text, add_special_tokens=False, return_offsets_mapping=True) for text in (one, other)]
        pairs = zip(*(each["input_ids"][:: -1 if at_end else 1] for each in encoded), strict=False)
        count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        offsets = encoded[0]["offset_mapping"]
        if not count:
            return 0
        return len(one) - offsets[-count][0] if at_end else offsets[count - 1][1]


def choose_delimiters(text: str) -> tuple[str, str]:
    """Return two characters that do not occur in `text`."""
    unused = list(itertools.islice((char for char in DELIMITERS if char not in text), 2))
    if len(unused) < 2:
        raise BadRecord("with every private character", f"contains all but {len(unused)} private characters; drop it")
    return unused[0], unused[1]


@functools.lru_cache
def insert_marks(template: str, left: str, right: str) -> str:
    """Make a template write marks in its outer loops over messages and around its generation blocks.

    A mark is text between the delimiters `left` and `right`. The new tags control whitespace as the original ones did.
    """
    loop_variables: list[str] = []  # one per open loop; "" unless it is an outer loop over one variable

    def mark(expression: str) -> str:
        return f"{{{{ '{left}' ~ {expression} ~ '{right}' }}}}"

    generation_start, generation_end, turn_end = (mark(f"'{char}'") for char in "<>/")

    def replace_tag(match: re.Match[str]) -> str:
        trim_left, tag, rest, trim_right = match.group("left", "tag", "rest", "right")
        if tag == "generation":
            return f"{{%{trim_left} if true %}}{generation_start}{{% if true {trim_right}%}}"
        if tag == "endgeneration":
            return f"{{%{trim_left} endif %}}{generation_end}{{% endif {trim_right}%}}"
        if tag == "for":
            variable = re.match(r"\s+(\w+)\s+in\b", rest)
            loop_variables.append(variable[1] if variable and not loop_variables else "")
            if not (name := loop_variables[-1]):
                return match[0]
            turn_start = mark(f"loop.index0 ~ ' ' ~ {name}.role")
            return f"{{%{trim_left} for{rest}%}}{{% if {name}.role is defined %}}{turn_start}{{% endif {trim_right}%}}"
        if tag == "endfor" and (name := loop_variables.pop() if loop_variables else ""):
            return f"{{%{trim_left} if {name}.role is defined %}}{turn_end}{{% endif %}}{{% endfor {trim_right}%}}"
        return match[0]

    return TEMPLATE_TAG.sub(replace_tag, template)


def parse_marks(rendered: str, left: str, right: str) -> tuple[str, list[list[Turn]]]:
    """Return the text without its marks and, for each loop over messages, its turns."""
    pieces = re.split(f"{left}(.*?){right}", rendered)
    loops: list[list[Turn]] = []
    offset, in_turn, generation_start = len(pieces[0]), False, 0
    for mark, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if mark == "<":
            generation_start = offset
        elif mark == ">" and in_turn:
            loops[-1][-1].generated.append((generation_start, offset))
        else:
            if in_turn:
                loops[-1][-1].stop = offset
            in_turn = mark not in "/>"
            if in_turn:
                index, role = mark.split(" ", 1)
                loops += [[]] if index == "0" else []
                loops[-1].append(Turn(role, offset, offset))
        offset += len(text)
    if in_turn:
        loops[-1][-1].stop = offset
    return "".join(pieces[::2]), loops
