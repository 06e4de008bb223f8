"""Convert the messages of OpenAI, Anthropic, ShareGPT and Alpaca to the form that chat templates expect."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ithaka.config import format_value
from ithaka.config.units import plural

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names in templates; our messages use the first
ANSWER_FIELDS = ("content", "reasoning_content", "tool_calls")
INLINE_REASONING = re.compile(r"\s*(?:<think>)?(.*?)</think>\n*(.*)", re.DOTALL)
TRAIN_FLAGS = ("train", "loss_mask", "weight", "loss")  # of a message; 0 or false: do not train on it
ROLE_NAMES = {  # other names of ROLES
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "developer": "system",
    "function": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MEDIA_PARTS = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file", "document")


class BadRecord(ValueError):
    """A record that cannot be trained on. `reason` is a short phrase by which such records are counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


# What to do with images: refuse, drop, or a function from a content part and a label to the placeholder text.
Images = Literal["refuse", "drop"] | Callable[[Mapping[str, Any], str], str]


def to_messages(raw: Any, label: str, images: Images) -> Iterator[tuple[Message, bool, int]]:
    """Convert a message of any format. Yield messages, whether to train on each, and the number of images.

    Only Anthropic messages yield several: each `tool_result` becomes its own message.
    """
    role = raw.get("role", raw.get("from")) if isinstance(raw, Mapping) else None
    name = ROLE_NAMES.get(role, role) if isinstance(role, str) else role
    if name not in ROLES:
        if role is None and isinstance(raw, Mapping):
            role = f"null (its fields are {', '.join(raw)}; write role and content)"
        raise BadRecord("with an unknown role", f"{label} has role {format_value(role)}; use {', '.join(ROLES)}")
    flags = {flag: raw[flag] for flag in TRAIN_FLAGS if raw.get(flag) is not None}
    for flag, value in flags.items():
        if value not in (0, 1):
            raise BadRecord("with a partial weight", f"{label} has {flag}={format_value(value)}; use 0 or 1")
    message = {key: value for key, value in raw.items() if key not in (*TRAIN_FLAGS, "from", "value")}
    message |= {"role": name, **({"content": raw["value"]} if "value" in raw else {})}
    if role == "function_call":  # ShareGPT: the value is a tool call as JSON
        call = message["content"]
        message |= {"content": None, "function_call": _parse_json(call, label) if isinstance(call, str) else call}
    if isinstance(call := message.pop("function_call", None), Mapping):  # OpenAI's older form of tool_calls
        message["tool_calls"] = [{"type": "function", "function": dict(call)}]
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # some templates only check whether the field exists
    for each, num_images in _split_parts(message, label, images):
        yield _convert_calls(_name_reasoning(each), label), all(flags.values()), num_images


def _split_parts(message: Message, label: str, images: Images) -> Iterator[tuple[Message, int]]:
    """Replace content parts with text, reasoning and tool calls. Each tool result becomes a separate message."""
    content, is_assistant = message.get("content"), message["role"] == "assistant"
    if isinstance(content, str) or (content is None and is_assistant):
        if content is None and not any(message.get(name) for name in ("tool_calls", *REASONING_FIELDS)):
            detail = f"{label} has neither content nor tool_calls nor reasoning; write content, or drop the record"
            raise BadRecord("with content that is not text", detail)
        yield message, 0
        return
    if not isinstance(content, list):
        raise BadRecord("with content that is not text", f"{label} has content other than text; remove it")
    parts = [part if isinstance(part, Mapping) else {"type": "text", "text": part} for part in content]
    num_images = sum(part.get("type") in MEDIA_PARTS for part in parts)
    if num_images and images == "refuse":
        fix = "remove them, set data.images to read for a vision-language model, or set data.images to drop"
        raise BadRecord("with images", f"{label} has {plural(num_images, 'part')} with images, audio or files; {fix}")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for part in parts:
        kind = part.get("type", "text")
        text = part.get("thinking" if kind == "thinking" else "refusal" if kind == "refusal" else "text")
        if kind in MEDIA_PARTS:
            texts += [] if isinstance(images, str) else [images(part, label)]
            continue
        if kind == "tool_result" and not is_assistant:
            if texts:
                yield {**message, "content": "".join(texts)}, 0
                texts = []
            result = {"role": "tool", "content": part.get("content") or "", "tool_call_id": part.get("tool_use_id")}
            yield from _split_parts(result, label, images)
        elif kind == "tool_use" and is_assistant:
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"type": "function", "id": part.get("id"), "function": function})
        elif not isinstance(text, str) or kind not in (*TEXT_PARTS, "thinking"):
            detail = f"{label} has content of type {format_value(kind)}, not text; remove it"
            if kind in (*TEXT_PARTS, "thinking"):
                detail = f"{label} has a part of type {kind} without text; write its text, or remove the part"
            raise BadRecord("with content that is not text", detail)
        elif calls or (texts and kind == "thinking"):
            detail = f"{label} has {kind} after {'a tool call' if calls else 'text'}, which templates cannot render"
            raise BadRecord("with parts out of order", f"{detail}; make it a separate message, or drop the record")
        else:
            (thoughts if kind == "thinking" else texts).append(text)
    if texts or is_assistant or not any(part.get("type") == "tool_result" for part in parts):
        extra: Message = {"tool_calls": [*(message.get("tool_calls") or ()), *calls]} if calls else {}
        extra |= {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
        yield {**message, "content": "".join(texts), **extra}, num_images


def _name_reasoning(message: Message) -> Message:
    """Put the reasoning, whatever its field, into reasoning_content."""
    fields = {name: message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str)}
    others = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    reasoning = next((value for value in fields.values() if value.strip()), None)
    return others if reasoning is None else {**others, "reasoning_content": reasoning}


def split_reasoning(message: Message) -> tuple[str | None, Message]:
    """Return the reasoning of an assistant's message, from its field or before </think>, and the message without it."""
    for name in REASONING_FIELDS if message["role"] == "assistant" else ():
        if str(message.get(name) or "").strip():
            return message[name], {key: value for key, value in message.items() if key != name}
    content = message.get("content")
    has_end = message["role"] == "assistant" and "</think>" in (content or "")  # without it, \s* backtracks
    match = INLINE_REASONING.fullmatch(content or "") if has_end else None
    return (match[1], {**message, "content": match[2]}) if match and match[1].strip() else (None, message)


def _convert_calls(message: Message, label: str) -> Message:
    """Parse the arguments of tool calls: OpenAI's are a JSON string; most templates expect an object."""
    try:
        return convert_arguments(message, _parse_arguments)
    except (json.JSONDecodeError, RecursionError) as error:
        detail = f"{label} calls a tool with arguments that are not JSON ({error}); fix them, or drop the record"
        raise BadRecord("with tool arguments that are not JSON", detail) from error
    except (ValueError, TypeError, AttributeError) as error:
        rule = "that are not a list of {function: {name, arguments}} with an object as arguments"
        detail = f"{label} has tool_calls {rule}; fix them"
        raise BadRecord("with tool calls that are not objects", detail) from error


def _parse_arguments(value: Any) -> Any:
    arguments = json.loads(value) if isinstance(value, str) else value
    if not isinstance(arguments, Mapping):
        raise TypeError("arguments are not an object")
    return arguments


def convert_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
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


def _parse_json(text: str, label: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        detail = f"{label} is a function_call that is not JSON ({error}); fix it, or drop the record"
        raise BadRecord("with tool arguments that are not JSON", detail) from error


def parse_tools(tools: Any) -> list[Any] | None:
    """Convert tools, a list or a JSON string of one, to OpenAI's format."""
    try:
        parsed = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or None
    except ValueError:
        parsed = [0]
    schemas: list[Any] = parsed if isinstance(parsed, list) else [] if parsed is None else [0]
    if not all(isinstance(t, dict) and isinstance(t.get("function", t), dict) for t in schemas):
        raise BadRecord("tools that are not JSON", "tools is not a list of JSON objects; write each tool's JSON schema")
    return [_convert_tool(tool) for tool in schemas] or None


def _convert_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        return tool
    function = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def from_alpaca(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of an `instruction`, an optional `input` and `output`, after an optional `history`."""
    try:
        question = "\n".join(text for text in (record["instruction"], record.get("input")) if text)
        turns = [*(record.get("history") or ()), (question, record["output"])]
        names = ("user", "assistant")
        return [{"role": role, "content": text} for turn in turns for role, text in zip(names, turn, strict=True)]
    except (TypeError, ValueError) as error:
        detail = "instruction or input is not text, or history is not a list of pairs of texts; fix them, or drop it"
        raise BadRecord("with fields that are not text", detail) from error


def split_preference(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any]:
    """Return the prompt and the chosen completion. A missing prompt is the common prefix of both answers."""
    if prompt is not None and isinstance(prompt, list) == isinstance(chosen, list):
        has_prompt = isinstance(prompt, list) and chosen[: len(prompt)] == prompt
        return prompt, chosen[len(prompt) :] if has_prompt else chosen
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        has_prompt = any(isinstance(each, Mapping) and each.get("content") == prompt for each in chosen)
        return ([] if has_prompt else [{"role": "user", "content": prompt}]), chosen
    if not (isinstance(chosen, str | list) and type(chosen) is type(rejected)):
        raise BadRecord("without text", "chosen and rejected are not both text or both messages; drop the record")
    shared = count_shared(chosen, rejected)
    if isinstance(chosen, str):  # do not cut a word or the space before it
        shared = chosen.rfind(" ", 0, shared) if " " in chosen[:shared] else shared
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)  # no completion is empty
    return chosen[: max(shared, 0)], chosen[max(shared, 0) :]


def is_blank(answer: Any) -> bool:
    """Whether an answer, text or messages, has no text, reasoning or tool call of the assistant's."""
    if isinstance(answer, str):
        return not answer.strip()
    messages = (message for raw in answer for message, *_ in to_messages(raw, "", "drop"))
    written = (message.get(name) for message in messages if message["role"] == "assistant" for name in ANSWER_FIELDS)
    return not any(str(value or "").strip() for value in written)


def count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items both sequences start with."""
    numbered = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in numbered if a != b), min(len(one), len(other)))
