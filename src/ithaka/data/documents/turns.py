"""Render conversations with a tokenizer's chat template, and find their turns.

The template renders each conversation in one call, with marks around every iteration of its loop
over the messages and around its `{% generation %}` blocks. Without the marks, the text must equal
the plain rendering. Rendering message by message would not work: many templates (Qwen3's, for one)
render a message differently when others follow.

What a template writes around the messages is found with probes, short conversations.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Sequence
from os.path import commonprefix
from typing import NoReturn

from transformers import PreTrainedTokenizerBase

from ithaka.config import BUILTIN_TEMPLATES, ConfigError
from ithaka.data.documents.dialects import (
    REASONING_FIELDS,
    ROLES,
    BadRecord,
    Message,
    Tools,
    count_shared,
)
from ithaka.data.documents.marks import (
    CharRange,
    Turn,
    choose_delimiters,
    insert_marks,
    mark_messages,
    parse_marks,
)

TEMPLATE_REFUSES = "refused by the chat template"  # a reason of BadRecord
QUESTION: list[Message] = [{"role": "user", "content": "x"}]
ANSWER: Message = {"role": "assistant", "content": "x"}


class TurnFinder:
    """The chat template of a Hugging Face tokenizer, and where its turns start and end."""

    def __init__(self, hf: PreTrainedTokenizerBase):
        self.hf = hf
        added = [token.content for token in hf.added_tokens_decoder.values() if token.special]
        self.special_tokens = sorted({*added, *hf.all_special_tokens}, key=len, reverse=True)
        self._renders_field: dict[tuple[str, bool], bool] = {}
        self._takes_parts: dict[bool, bool] = {}  # by whether there are tools

    # ---- render

    def apply(
        self,
        messages: list[Message],
        tools: Tools = None,
        add_generation_prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Render messages whose content is text. `template`: instead of the tokenizer's."""
        if self._needs_parts(tools):
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message.get("content"), str)
                else message
                for message in messages
            ]
        try:
            return self.hf.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=template,
            )
        except Exception as error:  # templates run arbitrary code and raise arbitrary errors
            if type(error).__name__ == "TemplateSyntaxError":
                raise ConfigError(
                    f"the chat template is not valid Jinja ({error}); set data.chat_template to a "
                    "file that is"
                ) from error
            detail = (
                f"the chat template rejects it ({type(error).__name__}: {error}); change or drop "
                "the record, or set another data.chat_template"
            )
            raise BadRecord(TEMPLATE_REFUSES, detail) from error

    def _needs_parts(self, tools: Tools) -> bool:
        """Whether the template renders content only as a list of parts (SmolVLM, Idefics3)."""
        key = bool(tools)
        if key not in self._takes_parts:
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

    def is_rendered(self, field: str, tools: Tools) -> bool:
        """Whether the template renders this field of the last assistant message."""
        key = (field, bool(tools))
        value = "Probe0123"
        if key not in self._renders_field:
            text = ""
            with contextlib.suppress(BadRecord):
                text = self.apply([*QUESTION, {**ANSWER, field: value}], tools)
            self._renders_field[key] = value in text
        return self._renders_field[key]

    def _render_with_marks(
        self, messages: list[Message], tools: Tools = None, add_generation_prompt: bool = False
    ) -> tuple[str, list[list[Turn]]]:
        """Return the text and, for each loop over messages, its turns."""
        template = self.hf.get_chat_template(None, tools)
        written = json.dumps([messages, tools], ensure_ascii=False, default=str)
        delimiters = choose_delimiters(template + written)
        marked = mark_messages(messages, *delimiters)
        template = insert_marks(template, *delimiters)
        text = self.apply(marked, tools, add_generation_prompt, template)
        return parse_marks(text, *delimiters)

    def _render_probe(
        self, messages: list[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[Turn]]:
        """Return the text and the turns of the first loop that writes anything."""
        text, loops = self._render_with_marks(messages, None, add_generation_prompt)
        for turns in loops:
            if any(turn.stop > turn.start for turn in turns):
                return text, turns
        return text, []

    # ---- where turns are

    def locate_turns(
        self, messages: list[Message], tools: Tools, text: str, optional: bool
    ) -> tuple[list[list[Turn]], list[tuple[int, str]]]:
        """Return the turns of each message, and where all start. `optional`: there may be none."""
        marked_text, loops = self._render_with_marks(messages, tools)
        if marked_text != text or not loops:
            if optional:
                return [[] for _ in messages], []
            raise ConfigError(
                "the chat template does not show where an assistant's turn starts and ends; set "
                "data.chat_template to a file with a loop over the messages"
            )
        for turn, following in itertools.chain(*map(itertools.pairwise, loops)):
            end = self._deferred_end
            if end and text.startswith(end, following.start):
                following.start += len(end)
                turn.stop = following.start
        located: list[list[Turn]] = [[] for _ in messages]
        for loop, role in itertools.product(loops, ROLES):
            positions = [i for i, message in enumerate(messages) if message["role"] == role]
            turns = [turn for turn in loop if turn.role == role]
            if len(positions) != len(turns):
                continue
            for i, turn in zip(positions, turns, strict=True):
                if text[turn.start : turn.stop].strip():
                    located[i].append(turn)
        for message, turns in zip(messages, located, strict=True):
            calls = message.get("tool_calls") or []
            if len(turns) == 1 and turns[0].num_calls < len(calls):
                self.refuse_tool(str(calls[-1].get("function", calls[-1]).get("name")))
        main = max(loops, key=lambda loop: sum(turn.stop - turn.start for turn in loop))
        return located, [(turn.start, turn.role) for turn in main if turn.stop > turn.start]

    def pick_turns(
        self, text: str, located: list[list[Turn]], indices: Sequence[int]
    ) -> list[Turn]:
        """Return the turns of the messages at `indices`, which must be rendered exactly once."""
        for i in indices:
            if (count := len(located[i])) != 1:
                detail = (
                    f"the chat template renders message {i + 1} {count} times instead of once; "
                    "drop the record"
                )
                raise BadRecord(TEMPLATE_REFUSES, detail)
            if i == len(located) - 1:
                self._include_stop_token(text, located[i][0])
        return [located[i][0] for i in indices]

    def _include_stop_token(self, text: str, turn: Turn) -> Turn:
        """Extend the last turn by a stop token after it, unless that opens the next answer."""
        if self.find_stop_token(text, turn)[0] is not None:
            return turn
        rest = text[turn.stop :].lstrip()
        for token in (self._deferred_end.strip(), *self.special_tokens):
            if token and rest.startswith(token):
                if not any(header.lstrip().startswith(token) for header in self._headers):
                    turn.stop = text.index(token, turn.stop) + len(token)
                break
        return turn

    def find_stop_token(self, text: str, turn: Turn) -> tuple[str | None, int]:
        """Return the special token that ends a turn, and its end without whitespace."""
        end = turn.start + len(text[turn.start : turn.stop].rstrip())
        for token in self.special_tokens:
            if text.endswith(token, turn.start, end):
                return token, end
        return None, end

    @functools.cached_property
    def stop_token(self) -> str | None:
        """The special token that ends the last assistant turn, if there is one."""
        text, turns = self._render_probe([*QUESTION, ANSWER])
        if not turns:
            return None
        return self.find_stop_token(text, self._include_stop_token(text, turns[-1]))[0]

    # ---- where the model's own text starts in a turn

    def find_content(self, text: str, turn: Turn, follows_tool: bool) -> int:
        """Return where the model's own text starts in an assistant's turn: after the header."""
        opening, prompt, shared = self._headers
        after_tool = self._header_after_tool if follows_tool else None
        for header in filter(None, (after_tool, opening, prompt, shared)):
            if text.startswith(header, turn.start):
                return turn.start + len(header)
        if "" in (prompt, after_tool):  # there is no header
            return turn.start
        # after a system prompt at the start of the first turn
        start = text.find(prompt, turn.start, turn.stop)
        if start < 0:
            raise BadRecord(
                TEMPLATE_REFUSES,
                "the chat template starts an assistant's turn with "
                f"{text[turn.start : turn.start + 40]!r}, not with its generation prompt "
                f"{after_tool or prompt!r}; set data.chat_template to a file that marks the text "
                "to train on with {% generation %}, or drop the record",
            )
        return start + len(prompt)

    @functools.cached_property
    def _headers(self) -> tuple[str, str, str]:
        """The ways an assistant's turn can start, longest first: all that add_generation_prompt
        puts after the question; the part that it adds (the generation prompt); the part of either
        that also opens earlier turns (without <think>, for example)."""
        plain, before = self._render_probe(QUESTION)
        text, after = self._render_probe(QUESTION, add_generation_prompt=True)
        question = plain[before[-1].start :]
        turn = after[-1]
        opening = text[turn.stop :]
        prompt = opening
        # Without a generation prompt, a template may end the text differently, with eos for
        # example.
        if text.startswith(question, turn.start):
            prompt = text[turn.start + len(question) :]
        text, (_, answer, _) = self._render_probe([*QUESTION, ANSWER, *QUESTION])
        earlier = text[answer.start : answer.stop]
        num_shared = max(self._count_shared_chars(each, earlier) for each in (opening, prompt))
        shared = earlier[:num_shared]
        opening = opening if opening.strip() else ""
        end = self._deferred_end
        return opening.removeprefix(end), prompt.removeprefix(end), shared.removeprefix(end)

    @functools.cached_property
    def _header_after_tool(self) -> str | None:
        """What add_generation_prompt puts after a tool's result. None: there are no tools."""
        result = {"role": "tool", "name": "x", "content": "x", "tool_call_id": "call00001"}
        for content, arguments in itertools.product((None, ""), ({}, "{}")):
            calling = {"role": "assistant", "content": content, "tool_calls": [_call_x(arguments)]}
            with contextlib.suppress(BadRecord):
                text, turns = self._render_probe(
                    [*QUESTION, calling, result], add_generation_prompt=True
                )
                if turns and turns[-1].role == "tool" and turns[-1].stop > turns[-1].start:
                    return text[turns[-1].stop :].removeprefix(self._deferred_end)
        return None

    # ---- what closes reasoning and turns

    def find_reasoning_end(self, text: str, reasoning: CharRange) -> int:
        """Return the end of the text that closes reasoning."""
        closing = text[reasoning[1] : reasoning[1] + len(self._reasoning_end)]
        return reasoning[1] + len(commonprefix([self._reasoning_end, closing]))

    @functools.cached_property
    def _reasoning_end(self) -> str:
        """The text that closes reasoning: what the template writes after it before both an answer
        and a tool call."""
        name = next((field for field in REASONING_FIELDS if self.is_rendered(field, None)), None)
        endings = []
        for content, calls in (("Answer4567", []), ("", [_call_x({})])):
            answer = {**ANSWER, "content": content}
            if calls:
                answer["tool_calls"] = calls
            if name is None:
                answer["content"] = f"<think>\nProbe0123\n</think>\n\n{content}"
            else:
                answer[name] = "Probe0123"
            with contextlib.suppress(BadRecord):
                _, _, ending = self.apply([*QUESTION, answer]).partition("Probe0123")
                endings.append(ending.partition("Answer4567")[0])
        return commonprefix(endings) if endings else ""

    @functools.cached_property
    def _deferred_end(self) -> str:
        """What ends a turn but is rendered at the start of the next one, whatever its role; "" in
        most templates.

        It shows in a later question, compared with the first one.
        """
        with contextlib.suppress(BadRecord):
            text, turns = self._render_probe([*QUESTION, ANSWER, *QUESTION, ANSWER])
            if len(turns) != 4:
                return ""
            first, *later = (text[turn.start : turn.stop] for turn in turns)
            question = later[1]
            bos = self.hf.bos_token or ""
            if not question.startswith(bos):  # SmolLM2's opens every turn
                first = first.removeprefix(bos)
            num_same = len(first)
            if not question.endswith(first):
                num_same = self._count_shared_chars(first, question, at_end=True)
            end = question[: len(question) - num_same]
            if end.strip() and all(turn.startswith(end) for turn in later):
                return end
        return ""

    def _count_shared_chars(self, one: str, other: str, at_end: bool = False) -> int:
        """Return the number of characters in the tokens that both texts start (or end) with."""
        if not self.hf.is_fast:
            return 0
        encoded = [
            self.hf(text, add_special_tokens=False, return_offsets_mapping=True)
            for text in (one, other)
        ]
        step = -1 if at_end else 1
        count = count_shared(*(each["input_ids"][::step] for each in encoded))
        if not count:
            return 0
        offsets = encoded[0]["offset_mapping"]
        return len(one) - offsets[-count][0] if at_end else offsets[count - 1][1]

    # ---- messages

    def refuse_tool(self, name: str) -> NoReturn:
        raise BadRecord(
            TEMPLATE_REFUSES,
            f"the chat template does not render the tool {name} or a call to it; set "
            f"data.chat_template to {self.suggest_templates()}, or a file that renders tools, or "
            "drop it",
        )

    def suggest_templates(self, *without: str) -> str:
        """Name the built-in templates whose tokens the tokenizer has, or all."""
        names = [name for name in BUILTIN_TEMPLATES if name not in without]
        known = [name for name in names if BUILTIN_TEMPLATES[name] in self.special_tokens]
        return " or ".join(known or names)


def _call_x(arguments: object) -> Message:
    function = {"name": "x", "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}
