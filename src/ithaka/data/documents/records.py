"""Turn a record into a document: its text or token ids, and which of them to train on."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ithaka.config import ConfigError, ReadingConfig
from ithaka.config.units import plural
from ithaka.data.documents import dialects
from ithaka.data.documents.chat import ChatTemplate, Sample, TrainedRanges
from ithaka.data.documents.dialects import BadRecord, Message
from ithaka.data.documents.images import Medium, RecordImages
from ithaka.data.documents.split import to_content
from ithaka.data.documents.turns import TEMPLATE_REFUSES
from ithaka.data.stored_tokens import encode_tokens
from ithaka.facts.families import MEDIA
from ithaka.facts.sizes import IGNORE_INDEX


class RecordFormat(NamedTuple):
    required: list[str]
    optional: list[str]
    train_on: list[str]  # supported values of data.train_on; the first is the default
    checked: Sequence[str] = ()  # not used, but may show that the record means something else


LISTS = [f"{kind}s" for kind in MEDIA]  # columns that list images and videos outside the messages
SIDES = ("chosen", "rejected")  # the samples of a pair
# For each token: lists of ids that may be at its place, and how likely.
TEACHER = ("teacher_ids", "teacher_logprobs")
NOT_CONTENT = ("labels", "attention_mask", "label", *TEACHER)  # copies of a record may differ here
QUESTIONS = ("question", "instruction", "query", "problem", "input")  # other names of a prompt
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks")  # other forms of labels
UNUSED = "unused field "  # starts the names of notes
FORMATS = {
    "messages": RecordFormat(
        ["messages"], ["tools", "functions", "system", *LISTS], ["assistant", "all"]
    ),
    "sharegpt": RecordFormat(["conversations"], ["tools", "system", *LISTS], ["assistant", "all"]),
    "preference": RecordFormat(
        [*SIDES], ["prompt", "tools", *LISTS], ["completion", "all", "pairs"], QUESTIONS
    ),
    "prompt_completion": RecordFormat(
        ["prompt", "completion"], ["tools", *LISTS], ["completion", "all"], ["label"]
    ),
    "alpaca": RecordFormat(
        ["instruction", "output"], ["input", "system", "history", *LISTS], ["assistant", "all"]
    ),
    "input_ids": RecordFormat(
        ["input_ids"], ["labels", "attention_mask", *TEACHER], ["all", "teacher"], LOSS_MASKS
    ),
}
FORMATS["anthropic"] = FORMATS["messages"]  # content blocks are recognized in each message


class Document(NamedTuple):
    """A document to tokenize, or a part of a long text: `text`, or `ids` (see Documents.tokens)."""

    text: str = ""
    trained: TrainedRanges = None
    ids: np.ndarray | None = None
    add_bos_eos: bool = False
    is_start: bool = True
    is_end: bool = True
    skip_reason: str = ""  # not empty: a bad record, which is only counted
    turns: Sequence[tuple[int, str]] = ()  # where each message starts, and its role
    spans: Sequence[tuple[int, str]] = ()  # where each kind of text starts, see chat.SPAN_KINDS
    is_record: bool = True  # False: another sample of the same record
    notes: Mapping[str, int] = {}  # counts of what was changed or left out
    images: Sequence[Medium] = ()
    teacher: np.ndarray | None = None  # as in Documents
    is_held_out: bool = False


def detect_format(record: object, reading: ReadingConfig) -> tuple[str, list[str]]:
    """Return the format of a record and the fields to read. BadRecord if one is missing."""
    record = _as_object(record)
    name: str = reading.format
    if name == "auto":
        matches = (name for name, each in FORMATS.items() if set(each.required) <= set(record))
        name = "text" if reading.text_field != ReadingConfig.text_field else next(matches, "text")
    record_format = FORMATS.get(name, RecordFormat([reading.text_field], [], ["all"]))
    if name in ("messages", "sharegpt") and not set(record_format.required) & set(record):
        # the same messages under the other name
        other = FORMATS[{"messages": "sharegpt", "sharegpt": "messages"}[name]]
        if set(other.required) <= set(record):
            record_format = other
    missing = [field for field in record_format.required if field not in record]
    if missing:
        _refuse_missing(missing[0], record, name, reading)
    check_train_on(reading, name, record_format.train_on)
    others = (*record_format.optional, *record_format.checked)
    return name, [*record_format.required, *(field for field in others if field in record)]


def _as_object(record: object) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise BadRecord(
            "not an object", f"a {type(record).__name__}; write each record as a JSON object"
        )
    return record


def _refuse_missing(
    field: str, record: Mapping[str, Any], format_name: str, reading: ReadingConfig
) -> NoReturn:
    label = f"{field}, required by data.format={format_name}"
    fix = "set data.format to match the data, or to auto"
    if format_name == "text":
        label = f"data.text_field={field}"
        fix = (
            "set data.text_field to the field that holds the text, or write messages, or prompt "
            "and completion"
        )
    if format_name == "text" and reading.train_on == "pairs":
        label = "chosen or no field rejected, and loss.type=dpo needs both"
        fix = "add it"
    fields = ", ".join(record) or "none"
    raise BadRecord("without its field", f"has no field {label}; its fields are {fields}; {fix}")


def find_unused(record: object, reading: ReadingConfig) -> list[str]:
    """Return the fields that change nothing."""
    name, _ = detect_format(record, reading)
    each = FORMATS.get(name, RecordFormat([reading.text_field], [], []))
    read = (*each.required, *each.optional)
    return [field for field in _as_object(record) if field not in read]


def _refuse_other_meaning(record: Mapping[str, Any], format_name: str) -> None:
    """Raise BadRecord if a field says that the record is not what its format makes of it."""
    if format_name == "prompt_completion" and record.get("label", True) == 0:
        detail = "has label=false: its completion is a bad answer, which cross-entropy would teach"
        raise BadRecord(
            "with a bad answer", f"{detail}; drop the record, or write prompt, chosen and rejected"
        )
    if format_name == "preference" and record.get("prompt") is None:
        for name in QUESTIONS:
            question = record.get(name)
            if not isinstance(question, str) or not question.strip():
                continue
            if not _contains(record["chosen"], question.strip()):
                raise BadRecord(
                    "without its prompt",
                    f"has {name}, which chosen does not contain, and no prompt, so the question "
                    f"would be lost; rename {name} to prompt",
                )
    if format_name == "input_ids" and record.get("labels") is None:
        for name in LOSS_MASKS:
            mask = record.get(name)
            if mask is not None and not (isinstance(mask, list) and all(mask)):
                raise BadRecord(
                    "with a mask that is not read",
                    f"has {name}, which is not read, so all tokens would be trained on; write "
                    f"labels, -100 where {name} is 0",
                )


def _contains(answer: object, text: str) -> bool:
    """Whether an answer, text or messages, contains `text`."""
    if isinstance(answer, str):
        return text in answer
    messages = answer if isinstance(answer, list) else []
    return any(
        isinstance(each, Mapping) and text in str(each.get("content", each.get("value")))
        for each in messages
    )


def content_of(record: object, reading: ReadingConfig) -> bytes:
    """Return what decides the side of the split: the fields to read, whatever their order."""
    try:
        _, fields = detect_format(record, reading)
        values = _as_object(record)
    except BadRecord:
        return to_content(record)
    read = drop_null_fields({field: values[field] for field in fields if field not in NOT_CONTENT})
    return to_content([value for value in read.values() if value is not None])


def drop_null_fields(record: dict[str, Any]) -> dict[str, Any]:
    """Drop nulls inside values, with which Arrow fills up the objects of a column."""
    return {name: _drop_nulls(value) for name, value in record.items()}


def _drop_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _drop_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [*map(_drop_nulls, value)]
    return value


def check_train_on(reading: ReadingConfig, format_name: str, train_on: Sequence[str]) -> None:
    if reading.train_on not in ("auto", *train_on):
        if reading.train_on == "pairs":
            fix = "use such records, or loss.type=cross_entropy"
            raise ConfigError(
                f"loss.type=dpo needs chosen and rejected, not data of format {format_name}; {fix}"
            )
        if reading.train_on == "teacher":
            raise ConfigError(
                f"loss.teacher=data needs input_ids, {' and '.join(TEACHER)}, not data of format "
                f"{format_name}; use such records, or a model as the teacher"
            )
        fix = f"use {' or '.join(train_on)}, or auto"
        raise ConfigError(
            f"data.train_on={reading.train_on} does not apply to data of format "
            f"{format_name}; {fix}"
        )


def parse_record(
    record: object,
    reading: ReadingConfig,
    chat: ChatTemplate,
    vocab_size: int,
    read_images: Callable[[Mapping[str, Any]], RecordImages] | None = None,
) -> list[Document]:
    """Return the documents of a record: one, or several for a pair or unrolled reasoning. Raise
    BadRecord if it cannot be trained on. `read_images` gets the images and videos that the record
    lists outside its messages."""
    format_name, fields = detect_format(record, reading)
    record = _as_object(record)
    _refuse_other_meaning(record, format_name)
    if reading.train_on == "pairs":
        return _parse_pair(record, reading, chat, vocab_size)
    first = record[fields[0]]
    if format_name == "text":
        text = _check_string(first, f"data.text_field={reading.text_field}")
        return [Document(text, add_bos_eos=True)]
    if format_name == "input_ids":
        return [_parse_tokens(record, reading, vocab_size)]
    prompt: list[Any] = []
    completion: object = first
    if format_name == "alpaca":
        completion = dialects.from_alpaca(record)
    elif format_name in ("prompt_completion", "preference"):
        question, completion = _split_prompt(record, format_name)
        if not (isinstance(question, list) and isinstance(completion, list)):
            name = "completion" if format_name == "prompt_completion" else "chosen"
            text = _check_string(question, "prompt")
            return [_join_texts(text, _check_string(completion, name), reading)]
        prompt = question
    if record.get("system"):
        prompt = [{"role": "system", "content": record["system"]}, *prompt]
    media = {kind: record.get(name) for kind, name in zip(MEDIA, LISTS, strict=True)}
    for kind, listed in media.items():
        if listed and reading.images == "refuse":
            count = len(listed) if isinstance(listed, list) else 1
            fix = "remove them, or set data.images to drop"
            raise BadRecord(f"with {kind}s", f"has {plural(count, kind)}; {fix}")
    reader = read_images(media) if read_images else None
    tools = record.get("tools") or record.get("functions")
    return _parse_conversation(prompt, completion, tools, reading, chat, reader)


def _parse_pair(
    record: dict[str, Any], reading: ReadingConfig, chat: ChatTemplate, vocab_size: int
) -> list[Document]:
    """Return the chosen and the rejected sample of a preference."""
    reading = dataclasses.replace(reading, train_on="auto")
    if record["chosen"] == record["rejected"]:
        raise BadRecord(
            "with equal answers",
            "chosen equals rejected, so there is no preference; drop the record",
        )
    swapped = record | {"chosen": record["rejected"], "rejected": record["chosen"]}
    records = (record, swapped)
    answers = [parse_record(each, reading, chat, vocab_size) for each in records]
    for side, samples in zip(SIDES, answers, strict=True):
        if len(samples) > 1:
            raise BadRecord(
                "with reasoning in several turns",
                f"{side} has reasoning that needs several samples; set data.reasoning to "
                "{turns: last}",
            )
    (chosen,), (rejected,) = answers
    for side, each, sample in zip(SIDES, records, (chosen, rejected), strict=True):
        _, answer = _split_prompt(each, "preference")
        if dialects.is_blank(answer):
            raise BadRecord(
                "with an empty answer", f"{side} is empty; write an answer, or drop the record"
            )
        if sample.trained is not None and not any(low < high for low, high in sample.trained):
            raise BadRecord(
                "with nothing to train",
                f"{side} has nothing to train; end it with an assistant's message, or drop the "
                "record",
            )
    return [chosen, rejected._replace(is_record=False, notes={})]


def _split_prompt(record: dict[str, Any], format_name: str) -> tuple[object, object]:
    """Return the prompt and the completion: both are texts, or lists of messages."""
    if format_name == "prompt_completion":
        return record["prompt"], record["completion"]
    return dialects.split_preference(record.get("prompt"), record["chosen"], record["rejected"])


def _join_texts(prompt: str, completion: str, reading: ReadingConfig) -> Document:
    text = prompt + completion
    return Document(
        text,
        None if reading.train_on == "all" else [(len(prompt), len(text))],
        add_bos_eos=True,
        spans=[(0, "excluded"), (len(prompt), "assistant")],
    )


def _parse_conversation(
    prompt: list[Any],
    completion: object,
    tools: object,
    reading: ReadingConfig,
    chat: ChatTemplate,
    reader: RecordImages | None,
) -> list[Document]:
    """Render messages. Those of the `prompt` are not trained on unless data.train_on=all."""
    if not isinstance(completion, list) or not completion:
        fix = "drop the record"
        if isinstance(completion, str):
            fix = "write a JSON list, not its text"
        raise BadRecord("without messages", f"messages is not a list, or an empty one; {fix}")
    messages: list[Message] = []
    trainable: list[bool] = []
    notes = Counter[str]()
    images: dialects.Images = "refuse" if reader is None else reader.render
    if reading.images == "drop":
        images = "drop"
    for n, raw in enumerate([*prompt, *completion], 1):
        for message, trains, num_images in dialects.to_messages(raw, f"message {n}", images):
            messages.append(message)
            trainable.append(trains and (n > len(prompt) or reading.train_on == "all"))
            notes["dropped images"] += num_images if reader is None else 0
    notes.update(f"{medium.kind}s" for medium in (reader.found if reader else ()))
    if reading.train_on != "all" and not any(
        message["role"] == "assistant" and (trains or n >= len(prompt))
        for n, (message, trains) in enumerate(zip(messages, trainable, strict=True))
    ):
        raise BadRecord(
            "without an assistant's turn", "has no assistant turn to train on; add one, or drop it"
        )
    schemas = dialects.parse_tools(tools)
    samples = _render_variants(
        messages, lambda variant: chat.render(variant, schemas, trainable, reading)
    )
    samples[0] = samples[0]._replace(notes=samples[0].notes + notes)
    return [
        Document(
            _check_unicode(sample.text),
            sample.trained,
            turns=sample.turns,
            spans=sample.spans,
            notes=sample.notes,
            is_record=i == 0,
            images=() if reader is None else reader.select(sample.text),
        )
        for i, sample in enumerate(samples)
    ]


def _render_variants(
    messages: list[Message], render: Callable[[list[Message]], list[Sample]]
) -> list[Sample]:
    """Render with null content as an empty string, which is what null means in OpenAI's format. If
    the template fails, render the messages unchanged, then as DeepSeek's templates need them: null
    content, and arguments as strings."""
    nulls = [
        {"content": None} | message if message["role"] == "assistant" else message
        for message in messages
    ]
    empty = [
        {**message, "content": ""} if message.get("content", 0) is None else message
        for message in nulls
    ]
    as_strings = [
        dialects.convert_arguments({**each, "content": each["content"] or None}, json.dumps)
        if "tool_calls" in each
        else each
        for each in nulls
    ]
    others = [variant for variant in (messages, as_strings) if variant != empty]
    refused: BadRecord | None = None
    for variant in (empty, *others):
        try:
            return render(variant)
        except BadRecord as error:
            if error.reason != TEMPLATE_REFUSES:
                raise
            if refused is None or error.__cause__ is None:  # a template's own message, no crash
                refused = error
    assert refused is not None
    raise refused


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        detail = (
            f"has half of a surrogate pair ({error.object[error.start]!r}); write valid "
            "Unicode, or drop the record"
        )
        raise BadRecord("with invalid Unicode", detail) from error
    return text


def _check_string(value: object, label: str) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise BadRecord(
            "without text",
            f"{label} is {kind}, not a string; drop the record, or use a field of text",
        )
    return _check_unicode(value)


def _parse_tokens(record: dict[str, Any], reading: ReadingConfig, vocab_size: int) -> Document:
    ids = _parse_ids(record["input_ids"], record.get("labels"), vocab_size)
    teacher = None
    if reading.train_on == "teacher":
        columns = [record.get(name) for name in TEACHER]
        teacher = _parse_teacher(columns, len(ids), vocab_size)
    kept = _unpadded_range(record.get("attention_mask"), len(ids))
    return Document(ids=ids[kept], teacher=None if teacher is None else teacher[kept])


def _parse_ids(ids: object, labels: object, vocab_size: int) -> np.ndarray:
    """Return tokens as in Documents; those with the label IGNORE_INDEX are context only."""
    tokens = _to_array("input_ids", ids)
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        detail = (
            f"input_ids has ids from {tokens.min()} to {tokens.max()}; the tokenizer's are 0 "
            f"to {vocab_size - 1}"
        )
        raise BadRecord(
            "ids outside the vocabulary", f"{detail}; tokenize with the model's own tokenizer"
        )
    targets = tokens if labels is None else _to_array("labels", labels)
    if len(targets) != len(tokens) or ((targets != tokens) & (targets != IGNORE_INDEX)).any():
        detail = (
            f"labels must equal input_ids (unshifted), or be {IGNORE_INDEX} where a token is "
            "not trained on"
        )
        raise BadRecord("labels that are not input_ids", detail)
    return encode_tokens(tokens, targets != IGNORE_INDEX).astype(np.int32)


def _to_array(name: str, values: object) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of unequal lengths
        array = np.asarray(None)
    if array.ndim != 1 or not (array.dtype.kind in "iu" or not array.size):
        raise BadRecord(
            "without token ids", f"{name} is not a list of integers; write integers, or drop it"
        )
    return array.astype(np.int64)


def _unpadded_range(mask: object, num_tokens: int) -> slice:
    """Return the range of tokens that are not padding."""
    if mask is None:
        return slice(None)
    is_flat = isinstance(mask, list) and all(isinstance(each, int | float) for each in mask)
    values = np.asarray(mask) if is_flat else np.empty(0)
    ones = np.flatnonzero(values == 1)
    kept = slice(int(ones[0]), int(ones[-1]) + 1) if len(ones) else slice(0, 0)
    has_others = ((values != 0) & (values != 1)).any()
    if values.shape != (num_tokens,) or len(ones) != kept.stop - kept.start or has_others:
        raise BadRecord(
            "with an attention_mask inside",
            "attention_mask is not a list of 1 for each of the input_ids and 0 for padding at the "
            "ends; use labels to leave out other tokens",
        )
    return kept


def _parse_teacher(lists: Sequence[Any], num_tokens: int, vocab_size: int) -> np.ndarray:
    """Return Documents.teacher. Shorter lists, and null at a token without any, are padded."""
    try:
        stored = _pad_rows(lists[0], -1, np.int32)
        values = _pad_rows(lists[1], -np.inf, np.float32)
        is_stored = stored >= 0
        ordered = np.sort(stored, 1)
        is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        masses = np.where(is_stored, np.exp(values), 0).sum(1)
        is_valid = (
            len(stored) == num_tokens
            and np.isfinite(values[is_stored]).all()
            and ordered.max(initial=-1) < vocab_size
            and masses.max(initial=0) <= 1.01  # they are rounded
        )
        if not is_valid or is_twice.any():
            raise ValueError
    except (TypeError, ValueError, OverflowError, IndexError):
        raise BadRecord(
            "with unusable teacher columns",
            f"{' and '.join(TEACHER)} need, for each of the {num_tokens} tokens, a list of "
            f"different ids below {vocab_size} and one of their log-probabilities, whose "
            "exponentials add up to at most 1; write them again, or drop the record",
        ) from None
    return np.stack([stored, values.view(np.int32)], 1)


def _pad_rows(rows: Sequence[Any], fill: float, dtype: type[np.generic]) -> np.ndarray:
    """Return rows, of which some may be null, as an array [rows, longest]."""
    lists = [list(row or ()) for row in rows]
    longest = max(map(len, lists))
    return np.array([row + [fill] * (longest - len(row)) for row in lists], dtype)
