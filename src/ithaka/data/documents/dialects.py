"""Convert the messages of OpenAI, Anthropic, ShareGPT and Alpaca to the form that chat templates
expect."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ithaka.config import format_value
from ithaka.config.units import plural

Message = dict[str, Any]
Tools = list[Any] | None
ROLES = ("system", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # our messages use the first
ANSWER_FIELDS = ("content", "reasoning_content", "tool_calls")
INLINE_REASONING = re.compile(r"\s*(?:<think>)?(.*?)</think>\n*(.*)", re.DOTALL)
TRAIN_FLAGS = ("train", "loss_mask", "weight", "loss")  # 0 or false: do not train on the message
ROLE_NAMES = {  # other names of ROLES
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MEDIA_PARTS = (
    "image",
    "image_url",
    "input_image",
    "audio",
    "input_audio",
    "video",
    "video_url",
    "file",
    "document",
)


class BadRecord(ValueError):
    """A record that cannot be trained on. Such records are counted by `reason`, a short phrase."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


# What to do with images: refuse, drop, or a function from a content part and a label to the
# placeholder text.
Images = Literal["refuse", "drop"] | Callable[[Mapping[str, Any], str], str]


def to_messages(raw: object, label: str, images: Images) -> Iterator[tuple[Message, bool, int]]:
    """Convert a message of any format. Yield messages, whether to train on each, and the number of
    images.

    Only Anthropic messages yield several: each `tool_result` becomes its own message.
    """
    fields: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
    role = fields.get("role", fields.get("from"))
    name = ROLE_NAMES.get(role, role) if isinstance(role, str) else role
    if name not in ROLES:
        if role is None and isinstance(raw, Mapping):
            role = f"null (its fields are {', '.join(raw)}; write role and content)"
        raise BadRecord(
            "with an unknown role", f"{label} has role {format_value(role)}; use {', '.join(ROLES)}"
        )
    flags = {flag: fields[flag] for flag in TRAIN_FLAGS if fields.get(flag) is not None}
    for flag, value in flags.items():
        if value not in (0, 1):
            raise BadRecord(
                "with a partial weight", f"{label} has {flag}={format_value(value)}; use 0 or 1"
            )
    renamed = (*TRAIN_FLAGS, "from", "value")
    message = {key: value for key, value in fields.items() if key not in renamed}
    message["role"] = name
    if "value" in fields:
        message["content"] = fields["value"]
    if role == "function_call":  # ShareGPT: the value is a tool call as JSON
        call = message["content"]
        message["content"] = None
        message["function_call"] = _parse_json(call, label) if isinstance(call, str) else call
    # OpenAI's older form of tool_calls
    if isinstance(call := message.pop("function_call", None), Mapping):
        message["tool_calls"] = [{"type": "function", "function": dict(call)}]
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # some templates only check whether the field exists
    for each, num_images in _split_content(message, label, images):
        yield _convert_calls(_name_reasoning(each), label), all(flags.values()), num_images


def _split_content(message: Message, label: str, images: Images) -> Iterator[tuple[Message, int]]:
    """Replace content parts with text, reasoning and tool calls; split off each tool result."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        if not any(message.get(name) for name in ("tool_calls", *REASONING_FIELDS)):
            detail = (
                f"{label} has neither content nor tool_calls nor reasoning; write content, or "
                "drop the record"
            )
            raise BadRecord("with content that is not text", detail)
        yield message, 0
    elif isinstance(content, str):
        yield message, 0
    elif isinstance(content, list):
        parts = [
            part if isinstance(part, Mapping) else {"type": "text", "text": part}
            for part in content
        ]
        yield from _split_parts(message, parts, label, images)
    else:
        raise BadRecord(
            "with content that is not text", f"{label} has content other than text; remove it"
        )


def _split_parts(
    message: Message, parts: list[Mapping[str, Any]], label: str, images: Images
) -> Iterator[tuple[Message, int]]:
    is_assistant = message["role"] == "assistant"
    num_images = sum(part.get("type") in MEDIA_PARTS for part in parts)
    if num_images and images == "refuse":
        fix = (
            "remove them, set data.images to read for a vision-language model, or set "
            "data.images to drop"
        )
        raise BadRecord(
            "with images",
            f"{label} has {plural(num_images, 'part')} with images, audio or files; {fix}",
        )
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for part in parts:
        kind = part.get("type", "text")
        if kind in MEDIA_PARTS:
            if not isinstance(images, str):
                texts.append(images(part, label))
        elif kind == "tool_result" and not is_assistant:
            if texts:
                yield {**message, "content": "".join(texts)}, 0
                texts = []
            result = {
                "role": "tool",
                "content": part.get("content") or "",
                "tool_call_id": part.get("tool_use_id"),
            }
            yield from _split_content(result, label, images)
        elif kind == "tool_use" and is_assistant:
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"type": "function", "id": part.get("id"), "function": function})
        else:
            text = _read_text(part, label)
            if calls or (texts and kind == "thinking"):
                before = "a tool call" if calls else "text"
                raise BadRecord(
                    "with parts out of order",
                    f"{label} has {kind} after {before}, which templates cannot render; make it a "
                    "separate message, or drop the record",
                )
            (thoughts if kind == "thinking" else texts).append(text)
    if texts or is_assistant or not any(part.get("type") == "tool_result" for part in parts):
        joined = {**message, "content": "".join(texts)}
        if calls:
            joined["tool_calls"] = [*(message.get("tool_calls") or ()), *calls]
        if thoughts:
            joined["reasoning_content"] = "\n\n".join(thoughts)
        yield joined, num_images


def _read_text(part: Mapping[str, Any], label: str) -> str:
    """Return the text of a part. Raise BadRecord if it is of another type, or has none."""
    kind = part.get("type", "text")
    if kind not in (*TEXT_PARTS, "thinking"):
        detail = f"{label} has content of type {format_value(kind)}, not text; remove it"
        raise BadRecord("with content that is not text", detail)
    text = part.get(kind if kind in ("thinking", "refusal") else "text")
    if not isinstance(text, str):
        detail = (
            f"{label} has a part of type {kind} without text; write its text, or remove the part"
        )
        raise BadRecord("with content that is not text", detail)
    return text


def _name_reasoning(message: Message) -> Message:
    """Put the reasoning, whatever its field, into reasoning_content."""
    fields = {
        name: message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str)
    }
    others = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    reasoning = next((value for value in fields.values() if value.strip()), None)
    return others if reasoning is None else {**others, "reasoning_content": reasoning}


def split_reasoning(message: Message) -> tuple[str | None, Message]:
    """Return an assistant's reasoning, from its field or before </think>, and the rest."""
    if message["role"] != "assistant":
        return None, message
    for name in REASONING_FIELDS:
        if str(message.get(name) or "").strip():
            return message[name], {key: value for key, value in message.items() if key != name}
    content = message.get("content") or ""
    if "</think>" in content:  # without it, \s* backtracks
        match = INLINE_REASONING.fullmatch(content)
        if match and match[1].strip():
            return match[1], {**message, "content": match[2]}
    return None, message


def _convert_calls(message: Message, label: str) -> Message:
    """Parse the arguments of tool calls: OpenAI's are a JSON string; most templates expect an
    object."""
    try:
        return convert_arguments(message, _parse_arguments)
    except (json.JSONDecodeError, RecursionError) as error:
        detail = (
            f"{label} calls a tool with arguments that are not JSON ({error}); fix them, or "
            "drop the record"
        )
        raise BadRecord("with tool arguments that are not JSON", detail) from error
    except (ValueError, TypeError, AttributeError) as error:
        rule = "that are not a list of {function: {name, arguments}} with an object as arguments"
        detail = f"{label} has tool_calls {rule}; fix them"
        raise BadRecord("with tool calls that are not objects", detail) from error


def _parse_arguments(value: object) -> Mapping[str, Any]:
    arguments = json.loads(value) if isinstance(value, str) else value
    if not isinstance(arguments, Mapping):
        raise TypeError("arguments are not an object")
    return arguments


def convert_arguments(message: Message, convert: Callable[[Any], object]) -> Message:
    """Return a copy with `convert` applied to the arguments of each tool call."""
    calls = [
        {**call, "function": dict(call["function"])} if "function" in call else dict(call)
        for call in message.get("tool_calls") or ()
    ]
    for call in calls:
        function = call.get("function", call)
        if function.get("arguments") is not None:
            function["arguments"] = convert(function["arguments"])
    return {**message, "tool_calls": calls} if calls else message


def _parse_json(text: str, label: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        detail = (
            f"{label} is a function_call that is not JSON ({error}); fix it, or drop the record"
        )
        raise BadRecord("with tool arguments that are not JSON", detail) from error


def parse_tools(tools: object) -> Tools:
    """Convert tools, a list or a JSON string of one, to OpenAI's format."""
    parsed = tools or None
    if isinstance(tools, str) and tools.strip():
        try:
            parsed = json.loads(tools)
        except ValueError:
            parsed = tools
    if parsed is None:
        return None
    if not isinstance(parsed, list) or not all(map(_is_schema, parsed)):
        raise BadRecord(
            "tools that are not JSON",
            "tools is not a list of JSON objects; write each tool's JSON schema",
        )
    return [_convert_tool(tool) for tool in parsed] or None


def _is_schema(tool: object) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function", tool), dict)


def _convert_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        return tool
    function = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def from_alpaca(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of an Alpaca record, after those of its `history`."""
    try:
        question = "\n".join(text for text in (record["instruction"], record.get("input")) if text)
        turns = [*(record.get("history") or ()), (question, record["output"])]
        names = ("user", "assistant")
        return [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(names, turn, strict=True)
        ]
    except (TypeError, ValueError) as error:
        detail = (
            "instruction or input is not text, or history is not a list of pairs of texts; "
            "fix them, or drop it"
        )
        raise BadRecord("with fields that are not text", detail) from error


def split_preference(prompt: object, chosen: object, rejected: object) -> tuple[object, object]:
    """Return the prompt and the chosen completion. A missing prompt is the common prefix of both
    answers."""
    if isinstance(chosen, list) and isinstance(prompt, list):
        has_prompt = chosen[: len(prompt)] == prompt
        return prompt, chosen[len(prompt) :] if has_prompt else chosen
    if prompt is not None and not isinstance(chosen, list) and not isinstance(prompt, list):
        return prompt, chosen
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        messages = (each for each in chosen if isinstance(each, Mapping))
        has_prompt = any(message.get("content") == prompt for message in messages)
        return ([] if has_prompt else [{"role": "user", "content": prompt}]), chosen
    if isinstance(chosen, str) and isinstance(rejected, str):
        shared = count_shared(chosen, rejected)
        if " " in chosen[:shared]:  # do not cut a word or the space before it
            shared = chosen.rfind(" ", 0, shared)
    elif isinstance(chosen, list) and isinstance(rejected, list):
        shared = count_shared(chosen, rejected)
    else:
        raise BadRecord(
            "without text",
            "chosen and rejected are not both text or both messages; drop the record",
        )
    shared = max(min(shared, len(chosen) - 1, len(rejected) - 1), 0)  # no completion is empty
    return chosen[:shared], chosen[shared:]


def is_blank(answer: object) -> bool:
    """Whether an answer, text or messages, has nothing that the assistant wrote."""
    if isinstance(answer, str):
        return not answer.strip()
    for raw in answer if isinstance(answer, list) else ():
        for message, *_ in to_messages(raw, "", "drop"):
            if message["role"] == "assistant":
                written = (message.get(name) for name in ANSWER_FIELDS)
                if any(str(value or "").strip() for value in written):
                    return False
    return True


def count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items both sequences start with."""
    numbered = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in numbered if a != b), min(len(one), len(other)))
