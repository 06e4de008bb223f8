"""Find the turns of a rendered conversation: make its chat template write marks, and parse them.

A mark is text between two delimiters, characters that occur neither in the template nor in the
messages. The template writes marks around every iteration of its loop over the messages and around
its `{% generation %}` blocks; messages have marks around their reasoning and before the names of
called tools.
"""

import functools
import itertools
import re
from dataclasses import dataclass, field

from ithaka.data.documents.dialects import REASONING_FIELDS, BadRecord, Message, split_reasoning

CharRange = tuple[int, int]
# Tags of loops and generation blocks. Comments match too, so that tags inside them are ignored.
TEMPLATE_TAG = re.compile(
    r"\{#.*?#\}"
    r"|\{%(?P<left>[-+]?)\s*(?P<tag>(?:end)?(?:for|generation))\b(?P<rest>.*?)(?P<right>[-+]?)%\}",
    re.DOTALL,
)
# Candidates to delimit marks: noncharacters and private-use characters, which text rarely contains.
DELIMITERS = (*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xF0000, 0xF1000)))


@dataclass
class Turn:
    """The part of the text that one message became; `generated`: its `{% generation %}` blocks."""

    role: str
    start: int
    stop: int
    generated: list[CharRange] = field(default_factory=list)
    reasoning: CharRange | None = None
    num_calls: int = 0


def mark_messages(messages: list[Message], left: str, right: str) -> list[Message]:
    """Put marks around reasoning, inside its whitespace, and before the names of called tools."""
    marked = []
    for message in messages:
        reasoning, _ = split_reasoning(message)
        if reasoning is not None:
            core = reasoning.strip()
            inside = reasoning.replace(core, f"{left}r{right}{core}{left}R{right}", 1)
            names = [name for name in REASONING_FIELDS if message.get(name) == reasoning]
            name = names[0] if names else "content"
            message = {**message, name: message[name].replace(reasoning, inside, 1)}
        if calls := message.get("tool_calls"):
            calls = [_mark_call(call, f"{left}c{right}") for call in calls]
            message = {**message, "tool_calls": calls}
        marked.append(message)
    return marked


def _mark_call(call: Message, mark: str) -> Message:
    function = call.get("function", call)
    named = {**function, "name": f"{mark}{function.get('name')}"}
    return {**call, "function": named} if "function" in call else named


def choose_delimiters(text: str) -> tuple[str, str]:
    """Return two characters that do not occur in `text`."""
    unused = list(itertools.islice((char for char in DELIMITERS if char not in text), 2))
    if len(unused) < 2:
        raise BadRecord(
            "with every private character",
            f"contains all but {len(unused)} private characters; drop it",
        )
    return unused[0], unused[1]


@functools.lru_cache
def insert_marks(template: str, left: str, right: str) -> str:
    """Make a template write marks in its outer loops over messages and around its generation
    blocks.

    A mark is text between the delimiters `left` and `right`. The new tags control whitespace as the
    original ones did.
    """
    loop_variables: list[str] = []  # of open loops; "" unless it is an outer one over one variable

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
            name = loop_variables[-1]
            if name:
                turn_start = mark(f"loop.index0 ~ ' ' ~ {name}.role")
                return (
                    f"{{%{trim_left} for{rest}%}}"
                    f"{{% if {name}.role is defined %}}{turn_start}{{% endif {trim_right}%}}"
                )
        if tag == "endfor" and loop_variables:
            name = loop_variables.pop()
            if name:
                return (
                    f"{{%{trim_left} if {name}.role is defined %}}{turn_end}{{% endif %}}"
                    f"{{% endfor {trim_right}%}}"
                )
        return match[0]

    return TEMPLATE_TAG.sub(replace_tag, template)


def parse_marks(rendered: str, left: str, right: str) -> tuple[str, list[list[Turn]]]:
    """Return the text without its marks and, for each loop over messages, its turns."""
    pieces = re.split(f"{left}(.*?){right}", rendered)
    loops: list[list[Turn]] = []
    offset = len(pieces[0])
    in_turn = False
    generation_start = 0
    reasoning_start = 0
    for mark, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if mark == "<":
            generation_start = offset
        elif mark in ("r", "R", "c"):
            turn = loops[-1][-1] if in_turn else Turn("", 0, 0)
            if mark == "r":
                reasoning_start = offset
            elif mark == "R":
                turn.reasoning = (reasoning_start, offset)
            else:
                turn.num_calls += 1
        elif mark == ">" and in_turn:
            loops[-1][-1].generated.append((generation_start, offset))
        else:
            if in_turn:
                loops[-1][-1].stop = offset
            in_turn = mark not in "/>"
            if in_turn:
                index, role = mark.split(" ", 1)
                if index == "0":
                    loops.append([])
                loops[-1].append(Turn(role, offset, offset))
        offset += len(text)
    if in_turn:
        loops[-1][-1].stop = offset
    return "".join(pieces[::2]), loops
