"""Render conversations, and find the text to train on.

Training covers the `{% generation %}` blocks of the chat template. In a template without them, it
covers what follows the generation prompt, up to and including the stop token: the special token
that ends a turn. Some templates write that token at the start of the next turn, or after the last
one.

If a template drops reasoning, as Qwen3's does before the last user message, the conversation is
refused, or rendered as several samples, each of which ends with one such turn.
"""

import datetime
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from transformers import PreTrainedTokenizerBase

from ithaka.config import ConfigError, ReadingConfig, ReasoningConfig
from ithaka.data.documents.dialects import (
    REASONING_FIELDS,
    BadRecord,
    Message,
    Tools,
    split_reasoning,
)
from ithaka.data.documents.marks import CharRange, Turn
from ithaka.data.documents.turns import TEMPLATE_REFUSES, TurnFinder

TrainedRanges = Sequence[CharRange] | None  # None: train on all of the text

# For templates that print today's date, so that tokens do not depend on the day.
TODAY = datetime.date(2024, 7, 26)
DATE_CALL = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
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


class Sample(NamedTuple):
    """A rendered conversation. `turns`: where each message starts, and its role. `spans`: where
    each kind of text starts, see SPAN_KINDS. `notes` count what was left out."""

    text: str
    trained: TrainedRanges
    turns: Sequence[tuple[int, str]] = ()
    spans: Sequence[tuple[int, str]] = ()
    notes: Counter[str] = Counter()


class Rendered(NamedTuple):
    """A conversation, and what the template made of it."""

    messages: list[Message]
    tools: Tools
    text: str
    turns: list[list[Turn]]  # that each message became
    starts: list[tuple[int, str]]  # where each turn starts, and its role


class ChatTemplate(TurnFinder):
    """The chat template of a Hugging Face tokenizer, and what to train on in its text."""

    def __init__(self, hf: PreTrainedTokenizerBase):
        super().__init__(hf)
        self.has_fixed_date = False

    def render(
        self,
        messages: list[Message],
        tools: Tools,
        trainable: Sequence[bool],
        reading: ReadingConfig,
    ) -> list[Sample]:
        """Return the text, and the ranges to train on: those of the `trainable` messages that
        data.train_on selects.

        There are several samples if the template drops reasoning that data.reasoning keeps. Each
        turn is trained once.
        """
        if not self.hf.chat_template:
            raise ConfigError(
                "the data has messages, but the tokenizer has no chat template; set "
                "data.chat_template to chatml or another built-in one, or to a file, or "
                "data.tokenizer to the tokenizer of an instruct model"
            )
        policy = reading.reasoning
        all_roles = reading.train_on == "all"
        messages, num_dropped = self._select_reasoning(messages, tools, policy)
        pending = {
            i
            for i, message in enumerate(messages)
            if trainable[i] and (all_roles or message["role"] == "assistant")
        }
        samples: list[Sample] = []
        end = len(messages)
        while True:
            rendered = self._render(messages[:end], tools, all_roles and all(trainable))
            lost = self._find_lost(rendered, pending)
            if lost and (policy is None or end - 1 in lost):
                self._refuse_lost(min(lost) if policy is None else end - 1, tools, policy)
            if policy is not None and policy.turns == "last":
                num_dropped += len(lost)
                lost = set()
            if lost and all_roles:
                raise ConfigError(
                    "data.train_on=all cannot be combined with reasoning that needs unrolling; use "
                    "data.train_on=assistant, or data.reasoning.turns=last"
                )
            trained = sorted(pending - lost)
            if trained:
                for i in trained:
                    self._check_content(rendered, i)
                samples.append(self._make_sample(rendered, trained, reading, trainable))
            elif not samples and not lost:
                samples.append(Sample(rendered.text, [], rendered.starts))
            if not lost:
                break
            pending = lost
            end = max(lost) + 1
        notes = Counter[str]()
        notes["turns without their reasoning"] = num_dropped
        notes["samples of unrolled conversations"] = len(samples) if len(samples) > 1 else 0
        samples[0] = samples[0]._replace(notes=+notes)
        return samples

    # ---- reasoning

    def _select_reasoning(
        self, messages: list[Message], tools: Tools, policy: ReasoningConfig | None
    ) -> tuple[list[Message], int]:
        """Move the reasoning that `policy` keeps to the field that the template renders, and drop
        the rest. Return the messages, and the number of them whose reasoning was dropped."""
        name = next((field for field in REASONING_FIELDS if self.is_rendered(field, tools)), None)
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        last_question = max(questions, default=-1)
        selected = []
        num_dropped = 0
        for i, message in enumerate(messages):
            reasoning, rest = split_reasoning(message)
            is_earlier = policy is not None and policy.turns == "last" and i < last_question
            if reasoning is None:
                selected.append(message)
            elif is_earlier or (policy is not None and policy.drop):
                selected.append(rest)
                num_dropped += 1
            elif name is not None:
                selected.append({**rest, name: reasoning})
            else:
                selected.append(message)
        return selected, num_dropped

    def _find_lost(self, rendered: Rendered, indices: Iterable[int]) -> set[int]:
        """Return which of the messages have reasoning that is not rendered."""
        lost = set()
        for i in indices:
            if i < len(rendered.messages):
                reasoning, _ = split_reasoning(rendered.messages[i])
                is_shown = any(turn.reasoning for turn in rendered.turns[i])
                if reasoning is not None and not is_shown:
                    lost.add(i)
        return lost

    def _refuse_lost(self, index: int, tools: Tools, policy: ReasoningConfig | None) -> NoReturn:
        """Raise BadRecord for a message whose reasoning is not rendered."""
        choices = "data.reasoning to {drop: true} to train without it"
        # in the last turn
        is_ever_rendered = any(self.is_rendered(field, tools) for field in REASONING_FIELDS)
        if is_ever_rendered and policy is None:
            choices += (
                ", to {turns: last} to keep only that of the last turn or to {turns: all} to "
                "unroll the turns"
            )
        template = self.suggest_templates("chatml", "llama3")
        fix = f"set {choices}, or data.chat_template to {template} or another one that renders it"
        raise BadRecord(
            LOST_REASONING,
            f"message {index + 1} has reasoning, which the chat template does not render there; "
            f"{fix}",
        )

    # ---- what to train on

    def _make_sample(
        self,
        rendered: Rendered,
        trained: list[int],
        reading: ReadingConfig,
        trainable: Sequence[bool],
    ) -> Sample:
        """Train on the `trained` messages, without reasoning if data.reasoning.loss is false."""
        text = rendered.text
        ranges: list[CharRange] = []
        hidden: list[CharRange] = []
        answers: dict[int, str] = {}  # spans in the trained turns
        if reading.train_on == "all":
            untrained = [i for i, train in enumerate(trainable) if not train]
            turns = self.pick_turns(text, rendered.turns, untrained)
            ranges = [(0, len(text))]
            hidden = [(turn.start, turn.stop) for turn in turns]
        else:
            template = self.hf.get_chat_template(None, rendered.tools)
            has_generation = GENERATION_TAG.search(template) is not None
            turns = self.pick_turns(text, rendered.turns, trained)
            for i, turn in zip(trained, turns, strict=True):
                follows_tool = i > 0 and rendered.messages[i - 1]["role"] == "tool"
                content = None if has_generation else self.find_content(text, turn, follows_tool)
                own = self._trained_ranges(text, turn, content, reading.train_on_eos)
                answers |= self._split_answer(text, turn, own)
                ranges += own
        if reading.reasoning is not None and not reading.reasoning.loss:
            for turn in itertools.chain(*rendered.turns):
                if turn.reasoning is not None:
                    hidden.append((turn.start, self.find_reasoning_end(text, turn.reasoning)))
        spans = self._find_spans(rendered, trained, trainable) | answers
        everything = ranges == [(0, len(text))] and not hidden
        return Sample(
            text,
            None if everything else subtract_ranges(ranges, hidden),
            rendered.starts,
            sorted(spans.items()),
        )

    def _trained_ranges(
        self, text: str, turn: Turn, content: int | None, with_stop_token: bool
    ) -> list[CharRange]:
        """Return what to train on in a turn: all from `content` on, or (None) its
        `{% generation %}` blocks."""
        token, end = self.find_stop_token(text, turn)
        ranges = turn.generated
        if content is not None:
            ranges = [(content, end if token else turn.stop)]
        if not token or not ranges:
            return ranges
        content_end = end - len(token)
        if not with_stop_token:
            return [(low, min(high, content_end)) for low, high in ranges]
        *others, (low, high) = ranges
        if text[high:content_end].strip():
            return ranges
        return [*others, (low, max(high, end))]

    def _split_answer(self, text: str, turn: Turn, ranges: Sequence[CharRange]) -> dict[int, str]:
        """Return where the spans of a trained turn start; reasoning includes its delimiters."""
        edges = {turn.start: "template"}
        edges |= {high: "template" for _, high in ranges if high < turn.stop}
        edges |= {low: "assistant" for low, _ in ranges}
        if turn.reasoning is not None and ranges:
            edges[ranges[0][0]] = "reasoning"
            edges[self.find_reasoning_end(text, turn.reasoning)] = "assistant"
        return edges

    def _find_spans(
        self, rendered: Rendered, trained: list[int], trainable: Sequence[bool]
    ) -> dict[int, str]:
        """Return where each kind of text starts."""
        has_head = bool(rendered.tools) or rendered.messages[0]["role"] == "system"
        spans = {0: "system" if has_head else "template"}
        spans |= {turn.stop: "template" for turn in itertools.chain(*rendered.turns)}
        for i, (message, turns) in enumerate(zip(rendered.messages, rendered.turns, strict=True)):
            kind = message["role"] if trainable[i] else "excluded"
            if kind == "assistant" and i not in trained:
                kind = "elsewhere"
            spans |= {turn.start: kind for turn in turns}
        return spans

    # ---- rendering

    def _render(self, messages: list[Message], tools: Tools, optional: bool) -> Rendered:
        """Render messages, and check their tool calls. `optional`: turns may be unknown."""
        text = self.apply(messages, tools)
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        names = Counter(
            str(each.get("function", each).get("name") or "") for each in [*calls, *(tools or ())]
        )
        for name, count in names.items():
            if text.count(name) < count:
                self.refuse_tool(name)
        return Rendered(messages, tools, text, *self.locate_turns(messages, tools, text, optional))

    def _check_content(self, rendered: Rendered, index: int) -> None:
        """Raise BadRecord if the content of a trained message, after any reasoning, is missing from
        its turns. Templates may write a system or tool message into another turn: these are
        searched for in all of the text."""
        text = rendered.text
        message = rendered.messages[index]
        role = message["role"]
        content = (message.get("content") or "").strip()
        if role == "assistant":
            content = content.rpartition("</think>")[2].strip()
        ranges = [(0, len(text))]
        if rendered.turns[index] and role in ("user", "assistant"):
            ranges = [(turn.start, turn.stop) for turn in rendered.turns[index]]
        if any(text.find(content, low, high) >= 0 for low, high in ranges):
            return
        # with other whitespace, or as JSON
        plain = "".join(content.split())
        as_json = "".join(json.dumps(content, ensure_ascii=False)[1:-1].split())
        for low, high in ranges:
            written = "".join(text[low:high].split())
            if plain in written or as_json in written:
                return
        fix = f"set data.chat_template to {self.suggest_templates()}, or a file that renders it"
        if message.get("tool_calls"):
            fix += ", remove the content"
        if role != "assistant":
            fix += ", set data.train_on to assistant"
        raise BadRecord(
            TEMPLATE_REFUSES,
            f"message {index + 1} has the content {content[:40]!r}, which the chat template does "
            f"not render there; {fix}, or drop the record",
        )


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
