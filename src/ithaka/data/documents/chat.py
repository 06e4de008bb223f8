"""Render conversations with a tokenizer's chat template, and find the text to train on.

The template renders each conversation in one call, with marks around every iteration of its loop over the messages and
around its `{% generation %}` blocks. Without the marks, the text must equal the plain rendering. Rendering message by
message would not work: many templates (Qwen3's, for one) render a message differently when others follow.

Training covers the `{% generation %}` blocks. In a template without them, it covers what follows the generation prompt,
up to and including the stop token: the special token that ends a turn. Some templates write that token at the start of
the next turn, or after the last one.

Reasoning is marked too, inside the messages. If a template drops it, as Qwen3's does before the last user message, the
conversation is refused, or rendered as several samples, each of which ends with one such turn.
"""

import contextlib
import datetime
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from ithaka.config import BUILTIN_TEMPLATES, ConfigError, ReadingConfig, ReasoningConfig
from ithaka.data.documents.formats import REASONING_FIELDS, ROLES, BadRecord, Message, split_reasoning
from ithaka.data.documents.marks import CharRange, Turn, choose_delimiters, insert_marks, mark_messages, parse_marks

TrainedRanges = Sequence[CharRange] | None  # None: train on all of the text
Tools = list[Any] | None

TODAY = datetime.date(2024, 7, 26)  # for templates that print today's date, so that tokens do not depend on the day
DATE_CALL = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
TEMPLATE_REFUSES = "refused by the chat template"  # a reason of BadRecord
LOST_REASONING = "with reasoning that the chat template leaves out"  # a reason of BadRecord
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
SPAN_KINDS = {  # of rendered text, and why it is trained or not
    "template": "added by the chat template",
    "system": "system prompt and tools",
    "user": "user's turn",
    "tool": "tool output",
    "reasoning": "reasoning",
    "assistant": "assistant's turn",
    "excluded": "excluded by the record, or part of its prompt",
    "elsewhere": "trained in another sample of this conversation",
}
QUESTION: list[Message] = [{"role": "user", "content": "x"}]
ANSWER: Message = {"role": "assistant", "content": "x"}


class Sample(NamedTuple):
    """A rendered conversation. `turns`: where each message starts, and its role. `spans`: where each kind of text
    starts, see SPAN_KINDS. `notes` count what was left out."""

    text: str
    trained: TrainedRanges
    turns: Sequence[tuple[int, str]] = ()
    spans: Sequence[tuple[int, str]] = ()
    notes: Counter[str] = Counter()


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer."""

    def __init__(self, hf: Any):
        self.hf, self.has_fixed_date = hf, False
        added = [token.content for token in hf.added_tokens_decoder.values() if token.special]
        self.special_tokens = sorted({*added, *hf.all_special_tokens}, key=len, reverse=True)
        self._renders_field: dict[tuple[str, bool], bool] = {}
        self._takes_parts: dict[bool, bool] = {}  # by whether there are tools

    def render(
        self, messages: list[Message], tools: Tools, trainable: Sequence[bool], reading: ReadingConfig
    ) -> list[Sample]:
        """Return the text, and the ranges to train on: those of the `trainable` messages that data.train_on selects.

        There are several samples if the template drops reasoning that data.reasoning keeps. Each turn is trained once.
        """
        if not self.hf.chat_template:
            raise ConfigError(
                "the data has messages, but the tokenizer has no chat template; set data.chat_template to chatml or "
                "another built-in one, or to a file, or data.tokenizer to the tokenizer of an instruct model"
            )
        policy, all_roles, notes = reading.reasoning, reading.train_on == "all", Counter[str]()
        messages, num_dropped = self._select_reasoning(messages, tools, policy)
        pending = {i for i, each in enumerate(messages) if trainable[i] and (all_roles or each["role"] == "assistant")}
        samples: list[Sample] = []
        end = len(messages)
        while True:
            part = messages[:end]
            text = self.apply(part, tools)
            self._check_rendered(text, part, tools)
            located, starts = self._locate_turns(part, tools, text, optional=all_roles and all(trainable))
            lost = {i for i in pending if i < end and self._is_lost(part[i], located[i])}
            if lost and (policy is None or end - 1 in lost):
                never = not any(self._is_rendered(field, tools) for field in REASONING_FIELDS)
                self._refuse_lost(min(lost) if policy is None else end - 1, never or policy is not None)
            if lost and policy is not None and policy.turns == "last":
                num_dropped, lost = num_dropped + len(lost), set()
            if lost and all_roles:
                fix = "use data.train_on=assistant, or data.reasoning.turns=last"
                raise ConfigError(f"data.train_on=all cannot be combined with reasoning that needs unrolling; {fix}")
            if trained := sorted(pending - lost):
                for i in trained:
                    self._check_content(text, part[i], located[i], i)
                ranges, spans = self._find_ranges(part, tools, text, located, trained, reading, trainable)
                samples.append(Sample(text, ranges, starts, spans))
            elif not samples and not lost:
                samples.append(Sample(text, [], starts))
            if not lost:
                break
            pending, end = lost, max(lost) + 1
        notes["turns without their reasoning"] = num_dropped
        notes["samples of unrolled conversations"] = len(samples) if len(samples) > 1 else 0
        samples[0] = samples[0]._replace(notes=+notes)
        return samples

    def _find_ranges(
        self, messages: list[Message], tools: Tools, text: str, located: list[list[Turn]], trained: list[int],
        reading: ReadingConfig, trainable: Sequence[bool],
    ) -> tuple[TrainedRanges, list[tuple[int, str]]]:  # fmt: skip
        """Return the ranges of the `trained` messages, without reasoning if data.reasoning.loss is false, and spans."""
        ranges: list[CharRange] = []
        answers: dict[int, str] = {}  # spans in the trained turns
        hidden: list[CharRange] = []
        if reading.train_on == "all":
            untrained = [i for i, train in enumerate(trainable) if not train]
            ranges, hidden = [(0, len(text))], [(t.start, t.stop) for t in self._pick_turns(text, located, untrained)]
        else:
            has_generation = GENERATION_TAG.search(self.hf.get_chat_template(None, tools)) is not None
            for i, turn in zip(trained, self._pick_turns(text, located, trained), strict=True):
                follows_tool = i > 0 and messages[i - 1]["role"] == "tool"
                content = None if has_generation else self._find_content(text, turn, follows_tool)
                trained_ranges = self._trained_ranges(text, turn, content, reading.train_on_eos)
                answers |= self._split_answer(text, turn, trained_ranges)
                ranges += trained_ranges
        if reading.reasoning is not None and not reading.reasoning.loss:
            for turn in itertools.chain(*located):
                if turn.reasoning is not None:
                    hidden.append((turn.start, self._find_reasoning_end(text, turn.reasoning)))
        has_head = bool(tools) or messages[0]["role"] == "system"
        spans = {0: "system" if has_head else "template"} | {
            turn.stop: "template" for turn in itertools.chain(*located)
        }
        for i, (message, turns) in enumerate(zip(messages, located, strict=True)):
            kind = "excluded" if not trainable[i] else message["role"]
            kind = "elsewhere" if kind == "assistant" and i not in trained else kind
            spans |= {turn.start: kind for turn in turns}
        everything = ranges == [(0, len(text))] and not hidden
        return None if everything else subtract_ranges(ranges, hidden), sorted((spans | answers).items())

    def _split_answer(self, text: str, turn: Turn, ranges: Sequence[CharRange]) -> dict[int, str]:
        """Return where template text, reasoning (with its delimiters) and the answer start in a trained turn."""
        edges = {turn.start: "template"} | {high: "template" for _, high in ranges if high < turn.stop}
        edges |= {low: "assistant" for low, _ in ranges}
        if turn.reasoning is not None and ranges:
            edges |= {ranges[0][0]: "reasoning", self._find_reasoning_end(text, turn.reasoning): "assistant"}
        return edges

    def _find_reasoning_end(self, text: str, reasoning: CharRange) -> int:
        """Return the end of the text that closes reasoning."""
        closing = text[reasoning[1] : reasoning[1] + len(self._reasoning_end)]
        return reasoning[1] + len(commonprefix([self._reasoning_end, closing]))

    def _select_reasoning(
        self, messages: list[Message], tools: Tools, policy: ReasoningConfig | None
    ) -> tuple[list[Message], int]:
        """Move the reasoning that `policy` keeps to the field that the template renders, and drop the rest. Return the
        messages, and the number of them whose reasoning was dropped."""
        name = next((field for field in REASONING_FIELDS if self._is_rendered(field, tools)), None)
        roles = [message["role"] for message in messages]
        last_question = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        selected, num_dropped = [], 0
        for i, message in enumerate(messages):
            reasoning, rest = split_reasoning(message)
            if reasoning is not None:
                if policy is not None and (policy.drop or (policy.turns == "last" and i < last_question)):
                    message, num_dropped = rest, num_dropped + 1
                elif name is not None:
                    message = {**rest, name: reasoning}
            selected.append(message)
        return selected, num_dropped

    def _is_lost(self, message: Message, turns: list[Turn]) -> bool:
        return split_reasoning(message)[0] is not None and not any(turn.reasoning for turn in turns)

    def _refuse_lost(self, index: int, always: bool) -> None:
        """Raise BadRecord for a message whose reasoning is not rendered; `always`: not even in the last turn."""
        choices, template = (
            "data.reasoning to {drop: true} to train without it",
            self._suggest_templates("chatml", "llama3"),
        )
        if not always:
            choices += ", to {turns: last} to keep only that of the last turn or to {turns: all} to unroll the turns"
        fix = f"set {choices}, or data.chat_template to {template} or another one that renders it"
        detail = f"message {index + 1} has reasoning, which the chat template does not render there; {fix}"
        raise BadRecord(LOST_REASONING, detail)

    @functools.cached_property
    def stop_token(self) -> str | None:
        """The special token that ends the last assistant turn, if there is one."""
        text, turns = self._render_probe([*QUESTION, ANSWER])
        return self._find_stop_token(text, self._include_stop_token(text, turns[-1]))[0] if turns else None

    def _check_rendered(self, text: str, messages: list[Message], tools: Tools) -> None:
        """Raise BadRecord if the text lacks a tool or a tool call."""
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        names = Counter(str(each.get("function", each).get("name") or "") for each in [*calls, *(tools or ())])
        for name, count in names.items():
            if text.count(name) < count:
                self._refuse_tool(name)

    def _check_content(self, text: str, message: Message, turns: list[Turn], index: int) -> None:
        """Raise BadRecord if the content of a trained message, after any reasoning, is missing from its turns.
        Templates may write a system or tool message into another turn: these are searched for in all of the text."""
        role, content = message["role"], (message.get("content") or "").strip()
        content = content.rpartition("</think>")[2].strip() if role == "assistant" else content
        ranges = [(turn.start, turn.stop) for turn in turns if role in ("user", "assistant")] or [(0, len(text))]
        if any(text.find(content, low, high) >= 0 for low, high in ranges):
            return
        forms = ["".join(form.split()) for form in (content, json.dumps(content, ensure_ascii=False)[1:-1])]
        if any(form in "".join(text[low:high].split()) for low, high in ranges for form in forms):
            return  # with other whitespace, or as JSON
        rule = f"message {index + 1} has the content {content[:40]!r}, which the chat template does not render there"
        fix = f"set data.chat_template to {self._suggest_templates()}, or a file that renders it"
        fix += ", remove the content" * bool(message.get("tool_calls"))
        fix += ", set data.train_on to assistant" * (role != "assistant")
        raise BadRecord(TEMPLATE_REFUSES, f"{rule}; {fix}, or drop the record")

    def _suggest_templates(self, *without: str) -> str:
        """Name the built-in templates whose tokens the tokenizer has; all if it has none of them."""
        names = [name for name in BUILTIN_TEMPLATES if name not in without]
        return " or ".join([name for name in names if BUILTIN_TEMPLATES[name] in self.special_tokens] or names)

    def _refuse_tool(self, name: str) -> None:
        detail = f"the chat template does not render the tool {name} or a call to it; set data.chat_template"
        raise BadRecord(
            TEMPLATE_REFUSES, f"{detail} to {self._suggest_templates()}, or a file that renders tools, or drop it"
        )

    def _is_rendered(self, field: str, tools: Tools) -> bool:
        """Whether the template renders this field of the last assistant message."""
        key, value = (field, bool(tools)), "Probe0123"
        if key not in self._renders_field:
            with contextlib.suppress(BadRecord):
                self._renders_field[key] = value in self.apply([*QUESTION, {**ANSWER, field: value}], tools)
        return self._renders_field.setdefault(key, False)

    def _needs_parts(self, tools: Tools) -> bool:
        """Whether the template renders content only as a list of parts, and a string as nothing (SmolVLM, Idefics3)."""
        if (key := bool(tools)) not in self._takes_parts:
            probes = ("Probe0123", "Probe4567")
            messages = [{**QUESTION[0], "content": probes[0]}, {**ANSWER, "content": probes[1]}]
            renders = {}
            for takes_parts in (False, True):
                self._takes_parts[key] = takes_parts
                with contextlib.suppress(BadRecord):
                    text = self.apply(messages, tools)
                    renders[takes_parts] = all(probe in text for probe in probes)
            self._takes_parts[key] = renders.get(True, False) and not renders.get(False, False)
        return self._takes_parts[key]

    def apply(self, messages: list[Message], tools: Tools = None, **options: Any) -> str:
        """Render messages whose content is text."""
        if self._needs_parts(tools):
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message.get("content"), str)
                else message
                for message in messages
            ]
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
        marked_template, marked = insert_marks(template, *delimiters), mark_messages(messages, *delimiters)
        return parse_marks(self.apply(marked, tools, chat_template=marked_template, **options), *delimiters)

    def _render_probe(self, messages: list[Message], **options: Any) -> tuple[str, list[Turn]]:
        """Return the text and the turns of the first loop that writes anything."""
        text, loops = self._render_with_marks(messages, **options)
        return text, next((turns for turns in loops if any(turn.stop > turn.start for turn in turns)), [])

    def _locate_turns(
        self, messages: list[Message], tools: Tools, text: str, optional: bool
    ) -> tuple[list[list[Turn]], list[tuple[int, str]]]:
        """Return the turns that each message became, and where all turns start. `optional`: both may be empty."""
        marked_text, loops = self._render_with_marks(messages, tools)
        if marked_text != text or not loops:
            if optional:
                return [[] for _ in messages], []
            raise ConfigError(
                "the chat template does not show where an assistant's turn starts and ends; set data.chat_template to "
                "a file with a loop over the messages"
            )
        for turn, following in itertools.chain(*map(itertools.pairwise, loops)):
            if self._deferred_end and text.startswith(self._deferred_end, following.start):
                turn.stop = following.start = following.start + len(self._deferred_end)
        located: list[list[Turn]] = [[] for _ in messages]
        for loop, role in itertools.product(loops, ROLES):
            positions = [i for i, message in enumerate(messages) if message["role"] == role]
            turns = [turn for turn in loop if turn.role == role]
            for i, turn in zip(positions, turns, strict=True) if len(positions) == len(turns) else ():
                located[i] += [turn] if text[turn.start : turn.stop].strip() else []
        for message, turns in zip(messages, located, strict=True):
            calls = message.get("tool_calls") or []
            if len(turns) == 1 and turns[0].num_calls < len(calls):
                self._refuse_tool(str(calls[-1].get("function", calls[-1]).get("name")))
        main = max(loops, key=lambda loop: sum(turn.stop - turn.start for turn in loop))
        return located, [(turn.start, turn.role) for turn in main if turn.stop > turn.start]

    def _pick_turns(self, text: str, located: list[list[Turn]], indices: Sequence[int]) -> list[Turn]:
        """Return the turns of the messages at `indices`. Each message must be rendered exactly once."""
        for i in indices:
            if (count := len(located[i])) != 1:
                detail = f"the chat template renders message {i + 1} {count} times instead of once; drop the record"
                raise BadRecord(TEMPLATE_REFUSES, detail)
            if i == len(located) - 1:
                self._include_stop_token(text, located[i][0])
        return [located[i][0] for i in indices]

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
    def _reasoning_end(self) -> str:
        """The text that closes reasoning: what the template writes after it before both an answer and a tool call."""
        name = next((field for field in REASONING_FIELDS if self._is_rendered(field, None)), None)
        call = {"id": "call00001", "type": "function", "function": {"name": "x", "arguments": {}}}
        endings = []
        for more in ({"content": "Answer4567"}, {"content": "", "tool_calls": [call]}):
            answer = {**ANSWER, **more, **({name: "Probe0123"} if name else {})}
            answer["content"] = answer["content"] if name else f"<think>\nProbe0123\n</think>\n\n{answer['content']}"
            with contextlib.suppress(BadRecord):
                endings.append(self.apply([*QUESTION, answer]).partition("Probe0123")[2].partition("Answer4567")[0])
        return commonprefix(endings) if endings else ""

    @functools.cached_property
    def _deferred_end(self) -> str:
        """What ends a turn but is rendered at the start of the next one, whatever its role; "" in most templates.

        It shows in a later question, compared with the first one.
        """
        with contextlib.suppress(BadRecord):
            text, turns = self._render_probe([*QUESTION, ANSWER, *QUESTION, ANSWER])
            if len(turns) == 4:
                first, *later = (text[turn.start : turn.stop] for turn in turns)
                question, bos = later[1], self.hf.bos_token or ""
                first = first if question.startswith(bos) else first.removeprefix(bos)  # SmolLM2's opens every turn
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
        aligned = zip(*(each["input_ids"][:: -1 if at_end else 1] for each in encoded), strict=False)
        count = sum(1 for _ in itertools.takewhile(lambda ids: ids[0] == ids[1], aligned))
        offsets = encoded[0]["offset_mapping"]
        if not count:
            return 0
        return len(one) - offsets[-count][0] if at_end else offsets[count - 1][1]


def subtract_ranges(ranges: Sequence[CharRange], hidden: Sequence[CharRange]) -> list[CharRange]:
    """Return the parts of `ranges` outside `hidden`."""
    left = list(ranges)
    for start, stop in hidden:
        parts = [((low, min(high, start)), (max(low, stop), high)) for low, high in left]
        left = [part for pair in parts for part in pair if part[0] < part[1]]
    return left


def read_builtin_template(name: str) -> str:
    file = Path(__file__).parent / "templates" / f"{name.replace('qwen3', 'chatml')}.jinja"
    return "{%- set thinks = true -%}\n" * (name == "qwen3") + file.read_text(encoding="utf-8")


def fix_date(template: str) -> str:
    """Replace calls for today's date with TODAY."""
    return DATE_CALL.sub(lambda match: f"{match[1]}{TODAY.strftime(match[2])}{match[1]}", template)
