"""Turn a record into a document: its text or token ids, and which of them to train on."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ithaka.config import ConfigError, ReadingConfig, format_value
from ithaka.data.chat import ROLES, BadRecord, ChatTemplate, Message, TrainedRanges
from ithaka.layer.loss import IGNORE_INDEX

TRAIN_FLAGS = ("train", "loss_mask", "weight")  # of a message; 0 or false: do not train on it


class RecordFormat(NamedTuple):
    required: list[str]
    optional: list[str]
    train_on: list[str]  # supported values of data.train_on; the first is the default


FORMATS = {
    "messages": RecordFormat(["messages"], ["tools"], ["assistant", "all"]),
    "prompt_completion": RecordFormat(["prompt", "completion"], ["tools"], ["completion", "all"]),
    "input_ids": RecordFormat(["input_ids"], ["labels"], ["all"]),
}


class Document(NamedTuple):
    """A document to tokenize: `text`, or `ids` (see Documents.tokens). A long text comes in several parts."""

    text: str = ""
    trained: TrainedRanges = None
    ids: np.ndarray | None = None
    add_bos_eos: bool = False
    is_start: bool = True
    is_end: bool = True
    skip_reason: str = ""  # not empty: a bad record, which is only counted


def detect_format(record: Any, reading: ReadingConfig) -> tuple[str, list[str]]:
    """Return the format of a record and the fields to read. Raise BadRecord if a field is missing."""
    if not isinstance(record, dict):
        raise BadRecord("not an object", f"a {type(record).__name__}; write each record as a JSON object")
    formats = dict(FORMATS)
    if "messages" not in record and "conversations" in record:
        formats["messages"] = FORMATS["messages"]._replace(required=["conversations"])
    name: str = reading.format
    if name == "auto":
        matches = (name for name, each in formats.items() if set(each.required) <= set(record))
        name = "text" if reading.text_field != ReadingConfig.text_field else next(matches, "text")
    record_format = formats.get(name, RecordFormat([reading.text_field], [], ["all"]))
    if missing := [field for field in record_format.required if field not in record]:
        label, fix = f"{missing[0]}, required by data.format={name}", "set data.format to match the data, or to auto"
        if name == "text":
            label = f"data.text_field={missing[0]}"
            fix = "set data.text_field to the field that holds the text, or write messages, or prompt and completion"
        fields = ", ".join(record) or "none"
        raise BadRecord("without its field", f"has no field {label}; its fields are {fields}; {fix}")
    check_train_on(reading, name, record_format.train_on)
    return name, [*record_format.required, *(field for field in record_format.optional if field in record)]


def check_train_on(reading: ReadingConfig, format_name: str, train_on: Sequence[str]) -> None:
    if reading.train_on not in ("auto", *train_on):
        fix = f"use {' or '.join(train_on)}, or auto"
        raise ConfigError(f"data.train_on={reading.train_on} does not apply to data of format {format_name}; {fix}")


def parse_record(record: Any, reading: ReadingConfig, chat: ChatTemplate, vocab_size: int) -> Document:
    """Return the document of a record. Raise BadRecord with what is wrong if there is none."""
    format_name, fields = detect_format(record, reading)
    values = [record[field] for field in fields]
    if format_name == "text":
        return Document(_check_string(values[0], f"data.text_field={reading.text_field}"), add_bos_eos=True)
    if format_name == "input_ids":
        return Document(ids=_parse_ids(values[0], values[1] if len(values) > 1 else None, vocab_size))
    if format_name == "prompt_completion" and not (isinstance(values[0], list) and isinstance(values[1], list)):
        prompt, completion = (_check_string(value, field) for field, value in zip(fields[:2], values, strict=False))
        text = prompt + completion
        return Document(text, None if reading.train_on == "all" else [(len(prompt), len(text))], add_bos_eos=True)
    prompt_messages, messages = (values[0], values[1]) if format_name == "prompt_completion" else ([], values[0])
    return _parse_conversation(prompt_messages, messages, record.get("tools"), reading, chat)


def _parse_conversation(
    prompt: list[Any], completion: Any, tools: Any, reading: ReadingConfig, chat: ChatTemplate
) -> Document:
    """Render messages. Those of the `prompt` are not trained on unless data.train_on=all."""
    if not isinstance(completion, list) or not (prompt or completion):
        raise BadRecord("without messages", "messages is not a list, or an empty one; drop the record")
    parsed = [_parse_message(message, f"message {n}") for n, message in enumerate([*prompt, *completion], 1)]
    messages, trainable = [message for message, _ in parsed], [trains for _, trains in parsed]
    if reading.train_on != "all":
        trainable = [trains and i >= len(prompt) for i, trains in enumerate(trainable)]
        if not any(message["role"] == "assistant" for message in messages[len(prompt) :]):
            raise BadRecord("without an assistant's turn", "has no assistant turn to train on; add one, or drop it")
    schemas = _parse_tools(tools)
    try:
        return Document(*chat.render(messages, schemas, trainable, reading))
    except BadRecord:
        # DeepSeek's templates take arguments as a string, and need content to be defined.
        defaults: dict[str, Message] = {"assistant": {"content": None}}
        as_strings = [_convert_arguments(defaults.get(m["role"], {}) | m, json.dumps) for m in messages]
        if as_strings == messages:
            raise
        return Document(*chat.render(as_strings, schemas, trainable, reading))


def _check_string(value: Any, label: str) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise BadRecord("without text", f"{label} is {kind}, not a string; drop the record, or use a field of text")
    return value


def _parse_ids(ids: Any, labels: Any, vocab_size: int) -> np.ndarray:
    """Return ids as in Documents.tokens: ~id where the label is IGNORE_INDEX."""

    def to_array(name: str, values: Any) -> np.ndarray:
        array = np.asarray(values)
        if array.ndim != 1 or not (array.dtype.kind in "iu" or not array.size):
            raise BadRecord("without token ids", f"{name} is not a list of integers; write integers, or drop it")
        return array.astype(np.int64)

    tokens = to_array("input_ids", ids)
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        detail = f"input_ids has ids from {tokens.min()} to {tokens.max()}; the tokenizer's are 0 to {vocab_size - 1}"
        raise BadRecord("ids outside the vocabulary", f"{detail}; tokenize with the model's own tokenizer")
    targets = tokens if labels is None else to_array("labels", labels)
    if len(targets) != len(tokens) or ((targets != tokens) & (targets != IGNORE_INDEX)).any():
        detail = f"labels must equal input_ids (unshifted), or be {IGNORE_INDEX} where a token is not trained on"
        raise BadRecord("labels that are not input_ids", detail)
    return np.where(targets == IGNORE_INDEX, ~tokens, tokens).astype(np.int32)


def _parse_tools(tools: Any) -> list[Any] | None:
    """Return the tools, given as a list or as its JSON."""
    try:
        parsed = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        parsed = [0]
    schemas = parsed if isinstance(parsed, list) else [] if parsed is None else [0]
    if not all(isinstance(t, dict) and isinstance(t.get("function", t), dict) for t in schemas):
        raise BadRecord("tools that are no JSON", "tools is not a list of JSON objects; write each tool's JSON schema")
    return parsed or None


def _parse_message(raw: Any, label: str) -> tuple[Message, bool]:
    """Return a message in the form chat templates expect, and whether to train on it."""
    role = raw.get("role") if isinstance(raw, Mapping) else None
    if role not in ROLES:
        if role is None and isinstance(raw, Mapping):
            role = f"null (its fields are {', '.join(raw)}; write role and content)"
        raise BadRecord("with an unknown role", f"{label} has role {format_value(role)}; use {', '.join(ROLES)}")
    flags = {name: raw[name] for name in TRAIN_FLAGS if raw.get(name) is not None}
    for name, flag in flags.items():
        if flag not in (0, 1):
            raise BadRecord("with a partial weight", f"{label} has {name}={format_value(flag)}; use 0 or 1")
    message = {name: value for name, value in raw.items() if name not in TRAIN_FLAGS}
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        message["content"] = content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(content, str) and not (content is None and role == "assistant"):
        raise BadRecord("with content that is no text", f"{label} has content other than text; remove it")
    try:
        # OpenAI's arguments are a JSON string; most templates expect an object.
        message = _convert_arguments(message, lambda value: json.loads(value) if isinstance(value, str) else value)
    except json.JSONDecodeError as error:
        detail = f"{label} calls a tool with arguments that are not JSON ({error}); fix them, or drop the record"
        raise BadRecord("with tool arguments that are no JSON", detail) from error
    except (ValueError, TypeError, AttributeError) as error:
        detail = f"{label} has tool_calls that are not a list of objects {{function: {{name, arguments}}}}; fix them"
        raise BadRecord("with tool calls that are no objects", detail) from error
    return message, all(flags.values())


def _convert_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
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
