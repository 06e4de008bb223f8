"""A record -> its text, and which of it is trained. No files, no tokens.

The tokenizer's chat template renders a conversation as a whole, with marks where each turn of its loop over the
messages starts and ends, and where its `{% generation %}` blocks do. Without the marks the text must be the plain
rendering. Nothing is inferred from rendering the first messages alone: many templates (Qwen3's) render a message in
another way when others follow.

What the template puts into `{% generation %}` is trained; in a template without, what follows the generation prompt, up
to the stop token: the special token that ends the turn. Some templates write it at the start of the next turn, or after
the last one.
"""

import contextlib
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ithaka.config import ConfigError, ReadingConfig, format_value

CharRange = tuple[int, int]
Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
FLAGS = ("train", "loss_mask", "weight")  # of a message; 0 or false: read, but not trained
RENDERED = ("reasoning_content", "reasoning", "thinking", "function_call")  # refused where a template leaves them out
LEFT_OUT = "that the chat template leaves out"
# By format: its fields, those it can have besides, and what can be trained (the default first).
FIELDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "messages": (["messages"], ["tools"], ["assistant", "all"]),
    "prompt_completion": (["prompt", "completion"], ["tools"], ["completion", "all"]),
    "input_ids": (["input_ids"], ["labels"], ["all"]),
}
# A tag of a loop or of a generation block; comments are matched to be passed over.
TAG = re.compile(
    r"\{#.*?#\}|\{%(?P<left>[-+]?)\s*(?P<tag>(?:end)?(?:for|generation))\b(?P<rest>.*?)(?P<right>[-+]?)%\}", re.DOTALL
)
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
# What may delimit a mark: characters that texts hardly contain.
DELIMITERS = (*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xF0000, 0xF1000)))
PROBE: list[Message] = [{"role": "user", "content": "x"}]
ANSWER: Message = {"role": "assistant", "content": "x"}


class BadRecord(ValueError):
    """A record that cannot be trained on. `reason`: in a few words, for counting."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


class Document(NamedTuple):
    """One to be tokenised: `text`, of which the spans `trained` (None: all) are, or `ids`, marked as in Documents."""

    text: str = ""
    trained: Sequence[CharRange] | None = None
    ids: np.ndarray | None = None
    framed: bool = False  # stands between the tokenizer's bos and eos
    first: bool = True  # not first, or not last: a part of a long text
    last: bool = True
    skipped: str = ""  # why there is none


def fields_of(record: Any, reading: ReadingConfig) -> tuple[str, list[str]]:
    """The format of a record, and which of its fields are read."""
    if not isinstance(record, dict):
        raise BadRecord("not an object", f"a {type(record).__name__}, not a JSON object; data.path wants one a record")
    alias = "conversations" if "messages" not in record and "conversations" in record else "messages"
    fields = {**FIELDS, "messages": ([alias], *FIELDS["messages"][1:])}
    kind: str = reading.format
    if kind == "auto":
        fits = (kind for kind, (needed, *_) in fields.items() if set(needed) <= set(record))
        kind = "text" if reading.text_field != ReadingConfig.text_field else next(fits, "text")
    needed, besides, train_on = fields.get(kind, ([reading.text_field], [], ["all"]))
    if missing := [name for name in needed if name not in record]:
        label, way_out = f"{missing[0]}, which data.format={kind} wants", "set data.format to what it holds, or to auto"
        if kind == "text":
            label = f"data.text_field={missing[0]}"
            way_out = "name the field that holds the text, or write messages, or prompt and completion"
        has = f"has no field {label}; its fields are {', '.join(record) or 'none'}"
        raise BadRecord("without its field", f"{has}; {way_out}")
    check_train_on(reading, kind, train_on)
    return kind, [*needed, *(name for name in besides if name in record)]


def check_train_on(reading: ReadingConfig, kind: str, train_on: Sequence[str]) -> None:
    if reading.train_on not in ("auto", *train_on):
        way_out = f"use {' or '.join(train_on)}, or auto"
        raise ConfigError(f"data.train_on={reading.train_on} is not for data of format {kind}; {way_out}")


def document(record: Any, reading: ReadingConfig, chat: "ChatTemplate", vocab_size: int) -> Document:
    """BadRecord says what is wrong with the record."""
    kind, names = fields_of(record, reading)
    values = [record[name] for name in names]
    everything = reading.train_on == "all"
    if kind == "text":
        return Document(_string(values[0], f"data.text_field={reading.text_field}"), framed=True)
    if kind == "input_ids":
        return Document(ids=_marked_ids(values[0], values[1] if len(values) > 1 else None, vocab_size))
    if kind == "prompt_completion" and not (isinstance(values[0], list) and isinstance(values[1], list)):
        prompt, completion = (_string(value, name) for name, value in zip(names[:2], values, strict=False))
        text = prompt + completion
        return Document(text, None if everything else [(len(prompt), len(text))], framed=True)
    num_read, given = (len(values[0]), values[0] + values[1]) if kind == "prompt_completion" else (0, values[0])
    if not isinstance(given, list) or not given:
        raise BadRecord("without messages", "messages is no list of messages, or an empty one; drop it")
    pairs = [_message(message, f"message {n}") for n, message in enumerate(given, 1)]
    messages, wanted = [message for message, _ in pairs], [want for _, want in pairs]
    if not everything:
        wanted = [want and i >= num_read for i, want in enumerate(wanted)]
        if not any(message["role"] == "assistant" for message in messages[num_read:]):
            raise BadRecord("without an assistant's turn", "has no assistant's turn to train; drop it, or add one")
    tools = _tools(record.get("tools"))
    try:
        return Document(*chat.render(messages, tools, wanted, everything, reading.train_on_eos))
    except BadRecord:
        empty: dict[str, Message] = {"assistant": {"content": None}}
        as_text = [_with_arguments(empty.get(m["role"], {}) | m, json.dumps) for m in messages]
        if as_text == messages:
            raise
        return Document(*chat.render(as_text, tools, wanted, everything, reading.train_on_eos))  # as DeepSeek wants it


def _string(value: Any, label: str) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise BadRecord("without text", f"{label} is {kind}, not a string; drop such records, or name a field of text")
    return value


def _marked_ids(ids: Any, labels: Any, vocab_size: int) -> np.ndarray:
    def array(name: str, values: Any) -> np.ndarray:
        found = np.asarray(values)
        if found.ndim != 1 or not (found.dtype.kind in "iu" or not found.size):
            raise BadRecord("without token ids", f"{name} is no list of whole numbers")
        return found.astype(np.int64)

    found = array("input_ids", ids)
    if len(found) and not (found.min() >= 0 and found.max() < vocab_size):
        rule = f"input_ids has {found.min()} to {found.max()}, and the tokenizer 0 to {vocab_size - 1}"
        raise BadRecord("ids outside the vocabulary", f"{rule}; tokenise with the model's own tokenizer")
    targets = found if labels is None else array("labels", labels)
    if len(targets) != len(found) or ((targets != found) & (targets != -100)).any():
        rule = "labels must be those of input_ids, not shifted, or -100 where nothing is trained"
        raise BadRecord("labels that are not input_ids", rule)
    return np.where(targets == -100, ~found, found).astype(np.int32)


def _tools(tools: Any) -> list[Any] | None:
    try:
        found = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        found = 0
    each = found if isinstance(found, list) else [0]
    if found is not None and not all(isinstance(t, dict) and isinstance(t.get("function", t), dict) for t in each):
        raise BadRecord("tools that are no JSON", "tools is no list of JSON objects; write each tool's JSON schema")
    return found or None


def _message(given: Any, where: str) -> tuple[Message, bool]:
    """A message as chat templates take it, and whether it may be trained."""
    role = given.get("role") if isinstance(given, Mapping) else None
    if role not in ROLES:
        if role is None and isinstance(given, Mapping):
            role = f"null (its fields are {', '.join(given)}; write role and content)"
        raise BadRecord("with an unknown role", f"{where} has role {format_value(role)}; use {', '.join(ROLES)}")
    flags = {name: given[name] for name in FLAGS if given.get(name) is not None}
    for name, flag in flags.items():
        if flag not in (0, 1):
            raise BadRecord(
                "with a partial weight", f"{where} has {name}={format_value(flag)}; use 0 or 1: train it or not"
            )
    message = {name: value for name, value in given.items() if name not in FLAGS}
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        message["content"] = content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(content, str) and not (content is None and role == "assistant"):
        raise BadRecord("with content that is no text", f"{where} has content that is no text; leave it out")
    try:
        # OpenAI's are a string of JSON; most templates want an object.
        message = _with_arguments(message, lambda value: json.loads(value) if isinstance(value, str) else value)
    except json.JSONDecodeError as error:
        detail = f"{where} calls a tool with arguments that are no JSON ({error}); repair them, or drop the record"
        raise BadRecord("with tool arguments that are no JSON", detail) from error
    except (ValueError, TypeError, AttributeError) as error:
        detail = f"{where} has tool_calls that are no list of objects {{function: {{name, arguments}}}}; repair them"
        raise BadRecord("with tool calls that are no objects", detail) from error
    return message, all(flags.values())


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """With the arguments of its tool calls converted."""
    calls = [
        {**call, "function": dict(call["function"])} if "function" in call else dict(call)
        for call in message.get("tool_calls") or ()
    ]
    for call in calls:
        function = call.get("function", call)
        if function.get("arguments") is not None:
            function["arguments"] = convert(function["arguments"])
    return {**message, "tool_calls": calls} if calls else message


@dataclass
class Turn:
    """Of the text: what one message became."""

    role: str
    start: int
    stop: int
    generated: list[CharRange] = field(default_factory=list)


class ChatTemplate:
    """That of a tokenizer of Hugging Face."""

    def __init__(self, hf: Any):
        self.hf = hf
        added = [token.content for token in hf.added_tokens_decoder.values() if token.special]
        self.special = sorted({*added, *hf.all_special_tokens}, key=len, reverse=True)
        self._rendered: dict[tuple[str, bool], bool] = {}

    def render(
        self, messages: list[Message], tools: list[Any] | None, wanted: Sequence[bool], everything: bool, eos: bool
    ) -> tuple[str, list[CharRange] | None]:
        """The text, and what is trained of it: of the `wanted` messages, `everything` or the assistant's turns."""
        if not self.hf.chat_template:
            raise ConfigError(
                "the data has messages, and the tokenizer no chat template; give one with data.chat_template=FILE, or "
                "the tokenizer of an instruct model with data.tokenizer"
            )
        text = self._apply(messages, tools)
        called = [call for message in messages for call in message.get("tool_calls") or ()]
        names = Counter(str(each.get("function", each).get("name") or "") for each in [*called, *(tools or ())])
        for name in (name for name, count in names.items() if text.count(name) < count):
            detail = f"the chat template leaves out the tool {name}, or a call of it; give one that renders tools with"
            raise BadRecord("refused by the chat template", f"{detail} data.chat_template=FILE, or drop the record")
        self._check_fields(messages, tools)
        if everything and all(wanted):
            return text, None
        roles = [message["role"] for message in messages]
        picked = [i for i, want in enumerate(wanted) if want != everything and (everything or roles[i] == "assistant")]
        turns = self._turns(messages, tools, text, picked)
        if everything:  # but for the picked ones
            edges = [0, *sorted(edge for turn in turns for edge in (turn.start, turn.stop)), len(text)]
            return text, list(zip(edges[::2], edges[1::2], strict=True))
        generates = GENERATION.search(self.hf.get_chat_template(None, tools)) is not None
        follow_tools = [i > 0 and roles[i - 1] == "tool" for i in picked]
        pairs = zip(turns, follow_tools, strict=True)
        return text, [span for turn, tool in pairs for span in self._trained(text, turn, tool, generates, eos)]

    @functools.cached_property
    def stop(self) -> str | None:
        """The special token that ends an assistant's last turn."""
        text, turns = self._probe([*PROBE, ANSWER])
        return self._stop(text, self._with_end(text, turns[-1]))[0] if turns else None

    def _check_fields(self, messages: list[Message], tools: list[Any] | None) -> None:
        """Refuse a message with a field of RENDERED that the template leaves out."""
        for number, message in enumerate(messages, 1):
            fields = {name: message[name] for name in RENDERED if str(message.get(name) or "").strip()}
            rendered = [value for name, value in fields.items() if self._renders(name, tools)]
            for name in (name for name, value in fields.items() if value not in rendered):
                way = "give one that renders it with data.chat_template=FILE, or write it into content, or remove it"
                detail = f"message {number} has {name}, which the chat template leaves out; {way}"
                raise BadRecord(f"with {name} {LEFT_OUT}", detail)

    def _renders(self, field: str, tools: list[Any] | None) -> bool:
        """Whether the template renders this field of an assistant's last message."""
        key, mark = (field, bool(tools)), "Probe0123"
        if key not in self._rendered:
            value = {"name": mark, "arguments": mark} if field == "function_call" else mark
            with contextlib.suppress(BadRecord):
                self._rendered[key] = mark in self._apply([*PROBE, {**ANSWER, field: value}], tools)
        return self._rendered.setdefault(key, False)

    def _apply(self, messages: list[Message], tools: list[Any] | None = None, **options: Any) -> str:
        try:
            return self.hf.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        except Exception as error:  # a template runs any code, and has many ways to refuse
            if type(error).__name__ == "TemplateSyntaxError":
                raise ConfigError(f"the chat template is no Jinja ({error}); give a data.chat_template") from error
            detail = f"the chat template does not take it ({type(error).__name__}: {error}); change it or drop it, or"
            raise BadRecord("refused by the chat template", f"{detail} give another data.chat_template") from error

    def _marked(
        self, messages: list[Message], tools: list[Any] | None = None, **options: Any
    ) -> tuple[str, list[list[Turn]]]:
        template = self.hf.get_chat_template(None, tools)
        around = unused_pair(template + json.dumps([messages, tools], ensure_ascii=False, default=str))
        return parse_marks(
            self._apply(messages, tools, chat_template=with_marks(template, *around), **options), *around
        )

    def _turns(self, messages: list[Message], tools: list[Any] | None, text: str, picked: Sequence[int]) -> list[Turn]:
        """What the `picked` messages became. Refuses a template that does not render them one by one."""
        marked, loops = self._marked(messages, tools)
        found: list[list[Turn]] = [[] for _ in messages]
        for turn, following in itertools.chain(*map(itertools.pairwise, loops)):
            if self._lead and text.startswith(self._lead, following.start):
                turn.stop = following.start = following.start + len(self._lead)
        for turns, role in itertools.product(loops, ROLES):
            places = [i for i, message in enumerate(messages) if message["role"] == role]
            turns = [turn for turn in turns if turn.role == role]
            for i, turn in zip(places, turns, strict=True) if len(places) == len(turns) else ():
                found[i] += [turn] if text[turn.start : turn.stop].strip() else []
        if marked != text or not loops:
            way_out = "give one with a loop over the messages with data.chat_template=FILE"
            raise ConfigError(f"the chat template does not say where an assistant's turn starts and ends; {way_out}")
        for i in picked:
            if len(found[i]) != 1:
                detail = f"the chat template renders message {i + 1} {len(found[i])} times, and not by itself once"
                raise BadRecord("refused by the chat template", f"{detail}, so what to train is not known; drop it")
        last = len(messages) - 1
        return [self._with_end(text, found[i][0]) if i == last else found[i][0] for i in picked]

    def _with_end(self, text: str, turn: Turn) -> Turn:
        """The last turn, with the stop token that follows it, unless that opens the next answer already."""
        follows = text[turn.stop :].lstrip()
        ends = (token for token in (self._lead.strip(), *self.special) if token and follows.startswith(token))
        token = next(ends, None) if self._stop(text, turn)[0] is None else None
        if token is not None and not any(header.lstrip().startswith(token) for header in self._headers):
            turn.stop = text.index(token, turn.stop) + len(token)
        return turn

    def _trained(self, text: str, turn: Turn, follows_tool: bool, generates: bool, eos: bool) -> list[CharRange]:
        stop, end = self._stop(text, turn)
        start = end - len(stop) if stop else turn.stop
        spans = turn.generated if generates else [(self._after_header(text, turn, follows_tool), start)]
        if stop and not eos:
            return [(low, min(high, start)) for low, high in spans]
        if stop and spans and not text[spans[-1][1] : start].strip():
            return [*spans[:-1], (spans[-1][0], max(spans[-1][1], end))]
        return spans

    def _stop(self, text: str, turn: Turn) -> tuple[str | None, int]:
        """The special token that ends a turn, and where it ends; white space may follow it."""
        end = turn.start + len(text[turn.start : turn.stop].rstrip())
        return next((token for token in self.special if text.endswith(token, turn.start, end)), None), end

    def _after_header(self, text: str, turn: Turn, follows_tool: bool) -> int:
        """Where what is trained of a turn starts: behind what the template writes before the model answers."""
        opening, prompt, role = self._headers
        of_tools = self._opening_after_tools if follows_tool else None
        for header in filter(None, (of_tools, opening, prompt, role)):
            if text.startswith(header, turn.start):
                return turn.start + len(header)
        if "" in (prompt, of_tools):  # the model writes all of the turn
            return turn.start
        at = text.find(prompt, turn.start, turn.stop)  # behind a system prompt that opens the first turn
        if at < 0:
            raise BadRecord(
                "refused by the chat template",
                f"the chat template starts an assistant's turn with {text[turn.start : turn.start + 40]!r}, not with "
                f"its generation prompt {of_tools or prompt!r}; mark what is trained in it with {{% generation %}}, "
                "and give it with data.chat_template=FILE, or drop the record",
            )
        return at + len(prompt)

    @functools.cached_property
    def _headers(self) -> tuple[str, str, str]:
        """How an assistant's turn may open: with all that the template writes behind the question when the model shall
        answer; with what it writes only then, the generation prompt; and with as much of that as opens an earlier turn:
        no <think>, for one."""
        (plain, before), (text, after) = (self._probe(PROBE, add_generation_prompt=ask) for ask in (False, True))
        asked, turn = plain[before[-1].start :], after[-1]
        follows = text.startswith(asked, turn.start)  # else the template ends the text without one, with eos perhaps
        opening, prompt = text[turn.stop :], text[turn.start + len(asked) if follows else turn.stop :]
        text, (_, answer, _) = self._probe([*PROBE, ANSWER, *PROBE])
        earlier = text[answer.start : answer.stop]
        role = earlier[: max(self._shared(each, earlier) for each in (opening, prompt))]
        opening = opening if opening.strip() else ""
        return opening.removeprefix(self._lead), prompt.removeprefix(self._lead), role.removeprefix(self._lead)

    @functools.cached_property
    def _opening_after_tools(self) -> str | None:
        """All that the template writes behind a tool's result when the model shall answer. None: it takes no tools."""
        for content, arguments in itertools.product((None, ""), ({}, "{}")):
            call = {"id": "call00001", "type": "function", "function": {"name": "x", "arguments": arguments}}
            asks = {"role": "assistant", "content": content, "tool_calls": [call]}
            result = {"role": "tool", "name": "x", "content": "x", "tool_call_id": "call00001"}
            with contextlib.suppress(BadRecord):
                text, turns = self._probe([*PROBE, asks, result], add_generation_prompt=True)
                if turns and turns[-1].role == "tool" and turns[-1].stop > turns[-1].start:
                    return text[turns[-1].stop :].removeprefix(self._lead)
        return None

    @functools.cached_property
    def _lead(self) -> str:
        """What ends a turn, where the template writes it at the start of the next one, whoever's that is; else "".
        The first question is compared with one between answers."""
        with contextlib.suppress(BadRecord):
            text, turns = self._probe([*PROBE, ANSWER, *PROBE, ANSWER])
            if len(turns) == 4:
                first, *later = (text[turn.start : turn.stop] for turn in turns)
                first, again = first.removeprefix(self.hf.bos_token or ""), later[1]
                same = len(first) if again.endswith(first) else self._shared(first, again, at_end=True)
                lead = again[: len(again) - same]
                return lead if lead.strip() and all(each.startswith(lead) for each in later) else ""
        return ""

    def _shared(self, one: str, other: str, at_end: bool = False) -> int:
        """How many characters the tokens have that both texts start with, or end with."""
        if not self.hf.is_fast:
            return 0
        encoded = [self.hf(each, add_special_tokens=False, return_offsets_mapping=True) for each in (one, other)]
        a, b = (each["input_ids"][:: -1 if at_end else 1] for each in encoded)
        count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        offsets = encoded[0]["offset_mapping"]
        if not count:
            return 0
        return len(one) - offsets[-count][0] if at_end else offsets[count - 1][1]

    def _probe(self, messages: list[Message], **options: Any) -> tuple[str, list[Turn]]:
        text, loops = self._marked(messages, **options)
        return text, next((turns for turns in loops if any(turn.stop > turn.start for turn in turns)), [])


def unused_pair(text: str) -> tuple[str, str]:
    """Return two characters that do not occur in `text`."""
    unused = list(itertools.islice((each for each in DELIMITERS if each not in text), 2))
    if len(unused) < 2:
        raise BadRecord("with every private character", f"uses all but {len(unused)} private characters; drop it")
    return unused[0], unused[1]


@functools.lru_cache
def with_marks(template: str, left_of_mark: str, right_of_mark: str) -> str:
    """Put marks into a template's outer loops, where they run over messages, and around its generation blocks.

    A tag becomes tags that treat the white space around them as it did.
    """
    loops: list[str] = []

    def mark(expression: str) -> str:
        return f"{{{{ '{left_of_mark}' ~ {expression} ~ '{right_of_mark}' }}}}"

    opens, closes, ends = (mark(f"'{each}'") for each in "<>/")

    def marked(match: re.Match[str]) -> str:
        left, tag, rest, right = match.group("left", "tag", "rest", "right")
        if tag == "generation":
            return f"{{%{left} if true %}}{opens}{{% if true {right}%}}"
        if tag == "endgeneration":
            return f"{{%{left} endif %}}{closes}{{% endif {right}%}}"
        if tag == "for":
            variable = re.match(r"\s+(\w+)\s+in\b", rest)
            loops.append(variable[1] if variable and not loops else "")
        if tag is None or not (name := loops.pop() if tag == "endfor" and loops else loops[-1] if loops else ""):
            return match[0]
        if tag == "endfor":
            return f"{{%{left} if {name}.role is defined %}}{ends}{{% endif %}}{{% endfor {right}%}}"
        start = mark(f"loop.index0 ~ ' ' ~ {name}.role")
        return f"{{%{left} for{rest}%}}{{% if {name}.role is defined %}}{start}{{% endif {right}%}}"

    return TAG.sub(marked, template)


def parse_marks(rendered: str, left_of_mark: str, right_of_mark: str) -> tuple[str, list[list[Turn]]]:
    """Return the text without its marks, and the turns of each loop over messages."""
    pieces = re.split(f"{left_of_mark}(.*?){right_of_mark}", rendered)
    loops: list[list[Turn]] = []
    place, opened, generating = len(pieces[0]), False, 0
    for mark, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if mark == "<":
            generating = place
        elif mark == ">" and opened:
            loops[-1][-1].generated.append((generating, place))
        else:
            if opened:
                loops[-1][-1].stop = place
            opened = mark not in "/>"
            if opened:
                index, role = mark.split(" ", 1)
                loops += [[]] if index == "0" else []
                loops[-1].append(Turn(role, place, place))
        place += len(text)
    if opened:
        loops[-1][-1].stop = place
    return "".join(pieces[::2]), loops
