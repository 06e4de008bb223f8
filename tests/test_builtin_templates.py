"""The built-in chat templates match TRL's in every token and in which tokens are trained."""

import datetime
import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken

from ithaka.config import ConfigError, ReadingConfig, ReasoningConfig
from ithaka.data.documents.chat import TODAY, fix_date
from ithaka.data.documents.dialects import BadRecord
from ithaka.data.documents.records import parse_record
from ithaka.data.tokenizer import Tokenizer, load_tokenizer
from templates import chat_tokenizer
from test_data_conversations import tokens_of

trl = pytest.importorskip("trl")
THEIRS = {
    "chatml": "qwen3_instruct_2507_training",
    "qwen3": "qwen3_training",
    "llama3": "llama3_1",
    "glm4": "glm4moe_training",
    "harmony": "gptoss_training",
}
SPECIAL = [
    "<|begin_of_text|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|observation|>",
    "<|call|>",
    "<think>",
    "</think>",
]
LETTERS = [
    "hello",
    " there",
    "\n",
    "\n\n",
    "🎉",
    "é",
    "\t",
    "2 + 2",
    "<b>",
    '"quoted"',
    "\\n",
    "\x07",
    "日本",
    "</x>",
    " ",
]


def load_builtin(name):
    """Return a tokenizer with our built-in template, and TRL's template."""
    hf = chat_tokenizer(None)
    hf.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    path = Path(trl.__file__).parent / "chat_templates" / f"{THEIRS[name]}.jinja"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaka.data.tokenizer._load_pretrained", lambda *_: Tokenizer(hf))
        return load_tokenizer("a", None, Path(name)), fix_date(path.read_text())


def words(rng, low=1):
    # TRL's masks miss leading spaces
    return "x" + "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, 6)))


def schema(rng, depth=0):
    kind = rng.choice(
        [
            "string",
            "integer",
            "number",
            "boolean",
            "array",
            "object",
            "enum",
            "union",
            "oneOf",
            "none",
        ]
    )
    description = {"description": words(rng)} if rng.random() < 0.5 else {}
    if kind == "enum":
        return {
            "type": "string",
            "enum": ["a", "b"],
            **description,
            **({"default": "a"} if rng.random() < 0.5 else {}),
        }
    if kind == "array":
        nullable = {"nullable": True} if rng.random() < 0.3 else {}
        items = {"items": schema(rng, depth + 1)} if rng.random() < 0.7 and depth < 2 else {}
        return {"type": "array", **items, **nullable, **description}
    if kind == "object" and depth < 2:
        names = [f"p{i}" for i in range(rng.randint(0, 3))]
        return {
            "type": "object",
            "properties": {n: schema(rng, depth + 1) for n in names},
            "required": names[:1],
        }
    if kind == "union":
        return {"type": ["string", "null"][: rng.randint(1, 2)], **description}
    if kind == "oneOf":
        return {
            "oneOf": [{"type": "string", **description}, {"type": "number"}][: rng.randint(1, 2)]
        }
    extra = {"nullable": True} if rng.random() < 0.3 else {}
    extra |= {"default": 3} if rng.random() < 0.3 and kind != "none" else {}
    return {**({"type": kind} if kind not in ("none", "object") else {}), **extra, **description}


def conversation(rng, name):
    """Return messages in an order that the template accepts; if it allows a single call, without
    text next to it."""
    single = name in ("llama3", "harmony")
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "description": words(rng),
                "parameters": {
                    "type": "object",
                    "properties": {f"a{j}": schema(rng) for j in range(rng.randint(0, 3))},
                },
            },
        }
        for i in range(rng.randint(0, 3))
    ]
    messages = [{"role": "system", "content": words(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": words(rng)})
        thinking = (
            {"reasoning_content": words(rng)}
            if rng.random() < 0.5 and name not in ("chatml", "llama3")
            else {}
        )
        while tools and rng.random() < 0.5:
            calls = [
                {
                    "type": "function",
                    "function": {"name": tools[0]["function"]["name"], "arguments": arguments},
                }
                for arguments in [{"a0": words(rng), "n": [1, None, True]}, {}][
                    : 1 if single else rng.randint(1, 2)
                ]
            ]
            content = "" if single else rng.choice(["", words(rng)])
            messages.append(
                {"role": "assistant", "content": content, "tool_calls": calls, **thinking}
            )
            messages += [{"role": "tool", "content": words(rng)} for _ in calls]
        messages.append({"role": "assistant", "content": words(rng), **thinking})
    return messages, tools or None


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", THEIRS)
def test_builtin_templates_match_trl_token_for_token(name, count):
    tokenizer, theirs = load_builtin(name)
    rng = random.Random(name)
    num_same = 0
    for _ in range(count):
        messages, tools = conversation(rng, name)
        inputs = [dict(message) for message in messages]
        if name == "harmony":  # TRL's name for the field
            inputs = [
                {"thinking" if k == "reasoning_content" else k: v for k, v in m.items()}
                for m in messages
            ]
        has_mask = "{%- generation" in theirs or "{% generation" in theirs
        rendered = tokenizer.hf.apply_chat_template(
            inputs,
            tools=tools,
            chat_template=theirs,
            return_dict=True,
            return_assistant_tokens_mask=has_mask,
        )
        for prompt in (False, True):
            text, other = (
                tokenizer.hf.apply_chat_template(
                    inputs,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    chat_template=template,
                )
                for template in (theirs, tokenizer.hf.chat_template)
            )
            assert text == other
        try:
            (document,) = parse_record(
                {"messages": messages, "tools": tools},
                ReadingConfig(),
                tokenizer.chat,
                tokenizer.vocab_size,
            )
        except BadRecord as error:  # glm4 and harmony drop earlier reasoning
            assert error.reason == "with reasoning that the chat template leaves out" and name in (
                "glm4",
                "harmony",
            )
            continue
        (ids,) = tokenizer.encode_batch([document.text], [document.trained])
        assert [token if token >= 0 else ~token for token in ids] == rendered["input_ids"]
        if has_mask:
            assert [int(token >= 0) for token in ids] == rendered["assistant_masks"]
        num_same += 1
    assert num_same > count // 4


def test_todays_date_is_fixed_and_the_run_says_so():
    tokenizer, theirs = load_builtin("harmony")
    assert (
        tokenizer.chat.has_fixed_date
        and f"Current date: ' + '{TODAY}'" in tokenizer.hf.chat_template
    )
    assert "strftime_now" not in theirs and str(datetime.date.today()) not in theirs
    assert not load_builtin("chatml")[0].chat.has_fixed_date


def test_several_calls_are_refused_if_the_format_allows_one():
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
    ]
    for name in ("llama3", "harmony"):
        with pytest.raises(BadRecord):
            parse_record({"messages": messages}, ReadingConfig(), load_builtin(name)[0].chat, 999)


def test_a_misspelled_template_is_refused():
    with pytest.raises(
        ConfigError, match="data.chat_template=chatm cannot be read .*built-in template"
    ):
        load_tokenizer("bytes", None, Path("chatm"))


def odd_message(rng):
    """Return a message that a file may contain: any role or none, odd content, calls, results and
    reasoning."""
    content = rng.choice(
        [
            None,
            "",
            " \n",
            "🎉é",
            "\x00\x07\x1b",
            "\ud800",
            "<think>a</think>b",
            "</think>",
            "x" * 2000,
            7,
            {"a": 1},
            [],
            ["a"],
            [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}],
            [{"type": "image"}],
            [None],
            [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}],
            [{"type": "tool_result", "content": "r"}],
            "<|im_end|>",
            "\ufdd0",
        ]
    )
    message = {"content": content}
    role = rng.choice(
        ["system", "user", "assistant", "assistant", "tool", "developer", "human", "judge", None, 3]
    )
    message |= {} if role is None else {rng.choice(["role", "role", "from"]): role}
    if rng.random() < 0.3:
        arguments = rng.choice(['{"a": 1}', {"a": 1}, "{", None, 5, "[]"])
        call = {"function": {"name": rng.choice(["f", "", None]), "arguments": arguments}}
        message["tool_calls"] = rng.choice([[call], [call, call], [], None, "f", [1]])
    if rng.random() < 0.3:
        message[rng.choice(["reasoning_content", "thinking"])] = rng.choice(
            ["why", "", 3, None, "\n", {"a": 1}]
        )
    return rng.choice([message] * 20 + [None, "text", 3, []])


@pytest.mark.parametrize("name", THEIRS)
def test_odd_conversations_are_read_or_refused_in_one_sentence(name):
    tokenizer, _ = load_builtin(name)
    rng = random.Random(7)
    num_read = 0
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    policies = [None, ReasoningConfig(), ReasoningConfig(turns="last"), ReasoningConfig(loss=False)]
    for _ in range(300):
        odd = [odd_message(rng) for _ in range(rng.randint(0, 2))]
        messages = rng.choice([[*good, *odd], [*odd, *good], [*good, *odd, *good], odd])
        record = {rng.choice(["messages", "conversations"]): messages}
        record |= {
            "tools": rng.choice(
                [[], "[]", [{"name": "f"}], "x", 3, [3], [{"function": {"name": "f"}}]]
            )
        }
        reading = ReadingConfig(
            reasoning=rng.choice(policies), images=rng.choice(["refuse", "drop"])
        )
        try:
            documents = parse_record(record, reading, tokenizer.chat, tokenizer.vocab_size)
        except BadRecord as error:
            assert error.reason and "\n" not in str(error)[:60]
            continue
        num_read += 1
        for document in documents:
            (ids,) = tokenizer.encode_batch([document.text], [document.trained])
            assert len(ids) and all(
                0 <= low <= high <= len(document.text) for low, high in document.trained or ()
            )
    assert num_read > 20


# For each template, a pattern for the text that the model writes, independent of the template's own
# marks.
ANSWERS = {
    "chatml": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)",
    "qwen3": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)",
    "llama3": r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    # The next role ends an answer; harmony's header, which names the channel and the tool, is
    # trained, as in TRL.
    "glm4": r"<\|assistant\|>(.*?(?:<\|(?:user|observation)\|>|(?=<\|(?:system|assistant)\|>)|$))",
    "harmony": r"(<\|start\|>assistant.*?<\|(?:end|return|call)\|>)",
}


@pytest.mark.parametrize("name", THEIRS)
def test_trained_text_matches_an_independent_parse(name):
    tokenizer, _ = load_builtin(name)
    rng = random.Random(11)
    num_read = 0
    for _ in range(60):
        messages, tools = conversation(rng, name)
        messages = [
            {k: v for k, v in message.items() if k != "reasoning_content"} for message in messages
        ]
        (document,) = parse_record(
            {"messages": messages, "tools": tools}, ReadingConfig(), tokenizer.chat, 999
        )
        trained = [document.text[low:high] for low, high in document.trained]
        assert "".join(trained) == "".join(re.findall(ANSWERS[name], document.text, re.DOTALL)), (
            messages
        )
        num_read += len(trained) > 1
    assert num_read > 15


ODD = {
    "missing role": [{"content": "hi"}],
    "two system turns": [
        {"role": "system", "content": "be"},
        {"role": "system", "content": "kind"},
    ],
    "result without call": [{"role": "user", "content": "hi"}, {"role": "tool", "content": "4"}],
    "empty turn": [{"role": "user", "content": ""}],
    "empty answer": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}],
    "answer first": [{"role": "assistant", "content": "hi"}],
    "emoji": [{"role": "user", "content": "🎉👩‍👩‍👧"}],
    "control characters": [{"role": "user", "content": "\x00\x07\x1b[0m\u2028"}],
}
REFUSED = {
    "missing role": THEIRS,
    "two system turns": ["harmony"],
    "result without call": ["harmony"],
}


@pytest.mark.parametrize("name", THEIRS)
def test_odd_turns_are_rendered_exactly_or_refused_with_file_and_line(tmp_path, name):
    tokenizer, _ = load_builtin(name)
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo 🎉\x07"}]
    for label, odd in ODD.items():
        file = tmp_path / "a.jsonl"
        file.write_text(
            "".join(json.dumps({"messages": each}) + "\n" for each in (good, [*odd, *good], good))
        )
        if name in REFUSED.get(label, ()):
            with pytest.raises(ConfigError, match=rf"^{file} line 2: [^\n]*$"):
                tokens_of(file, tokenizer)
            documents, skipped = tokens_of(file, tokenizer, bad_records="skip")
            assert len(documents) == 2 and sum(skipped.values()) == 1, label
            continue
        documents, skipped = tokens_of(file, tokenizer)
        assert len(documents) == 3 and not skipped and documents[0] == documents[2], label
        text = tokenizer.hf.apply_chat_template([*odd, *good], tokenize=False)
        trained = "".join(re.findall(ANSWERS[name], text, re.DOTALL))
        assert tokenizer.decode([token for token in documents[1] if token >= 0]) == trained, label
        assert trained.count("yo 🎉") == 1


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("size", [1 << 18, pytest.param(10 << 20, marks=pytest.mark.slow)])
def test_long_turns_are_read(name, size):
    tokenizer, _ = load_builtin(name)
    for text in (" ", "\n", "x", "🎉", "<think>", "\x00", "{{"):
        long = text * (size // len(text.encode()))
        question = {"role": "user", "content": long}
        answer = {"role": "assistant", "content": f"x{long}x"}
        (document,) = parse_record(
            {"messages": [question, answer]}, ReadingConfig(), tokenizer.chat, 999
        )
        (span,) = document.trained
        assert (
            len(document.text) >= 2 * len(long.strip())
            and f"x{long}x" in document.text[slice(*span)]
        )
        blank = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": long}]
        assert len(parse_record({"messages": blank}, ReadingConfig(), tokenizer.chat, 999)) == 1


@pytest.mark.parametrize("name", ["glm4", "harmony"])
def test_turns_of_templates_that_drop_reasoning_are_unrolled(name):
    tokenizer, _ = load_builtin(name)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "think 0"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "answer 1", "reasoning_content": "think 1"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "answer 2", "reasoning_content": "think 2"},
    ]
    reading = ReadingConfig(reasoning=ReasoningConfig())
    documents = parse_record({"messages": messages}, reading, tokenizer.chat, tokenizer.vocab_size)
    trained = ["".join(each.text[low:high] for low, high in each.trained) for each in documents]
    assert len(documents) == {"glm4": 2, "harmony": 3}[name]
    for text in ("think 0", "think 1", "think 2", "answer 1", "answer 2"):
        assert sum(text in each for each in trained) == 1, text
    reading = ReadingConfig(reasoning=ReasoningConfig(loss=False))
    for each in parse_record({"messages": messages}, reading, tokenizer.chat, tokenizer.vocab_size):
        text = "".join(each.text[low:high] for low, high in each.trained)
        assert "think" not in text and "analysis" not in text
