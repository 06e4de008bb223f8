"""Agent traces in every format give the same tokens; data.reasoning trains, keeps or drops the
reasoning."""

import json

import pytest

import templates
from ithaka.config import ConfigError
from ithaka.data.tokenizer import Tokenizer
from templates import chat_tokenizer
from test_data_conversations import TOOLS, plain_ids, reference, tokens_of, write_records

HF = chat_tokenizer(None)


def tokenizer_with(template):
    HF.chat_template = template
    return Tokenizer(HF)


def call(**arguments):
    return {
        "type": "function",
        "id": "c1",
        "function": {"name": "add", "arguments": json.dumps(arguments)},
    }


OPENAI = {
    "messages": [
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}],
        },
        {
            "role": "assistant",
            "content": "I call",
            "reasoning_content": "the tool",
            "tool_calls": [call(a=2, b=2)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "it is 4", "reasoning_content": "so"},
    ],
    "tools": TOOLS,
}
ANTHROPIC = {
    "system": "be kind",
    "messages": [
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "the tool", "signature": "x"},
                {"type": "text", "text": "I call"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2, "b": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "4"}],
                }
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so"},
                {"type": "text", "text": "it is 4"},
            ],
        },
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "2 + 2?"},
        {"from": "gpt", "value": "I call", "thinking": "the tool", "tool_calls": [call(a=2, b=2)]},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "<think>\nso\n</think>\n\nit is 4"},
    ],
    "tools": json.dumps(TOOLS),
}
# OpenAI's older form, and Qwen's.
FUNCTIONS = {
    "messages": [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": "I call",
            "reasoning": "the tool",
            "function_call": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
        },
        {"role": "function", "name": "add", "content": "4"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so"},
                {"type": "text", "text": "it is 4"},
            ],
        },
    ],
    "functions": TOOLS,
}
SAME = {"messages": OPENAI, "anthropic": ANTHROPIC, "sharegpt": SHAREGPT, "functions": FUNCTIONS}
MARKED = (
    '<|im_start|>system\nbe kind\n\n# Tools\n<tools>\n{"type": "function", "function": {"name": '
    '"add", "parameters": '
    '{"type": "object"}}}\n</tools><|im_end|>\n<|im_start|>user\n2 + '
    "2?<|im_end|>\n<|im_start|>assistant\n«<think>\n"
    'the tool\n</think>\n\nI call\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": '
    "2}}\n</tool_call><|im_end|>»"
    "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n«<think>\nso\n</think>\n\nit is 4<|im_end|>»\n"
)


@pytest.mark.parametrize("name", SAME)
def test_the_same_trace_in_any_format_has_the_same_tokens(tmp_path, name):
    path = write_records(tmp_path / "a.jsonl", SAME[name])
    tokenizer = tokenizer_with(templates.QWEN3)
    named = {} if name == "functions" else {"format": name}
    for settings in ({}, named):
        documents, skipped = tokens_of(path, tokenizer, **settings)
        assert documents == [reference(HF, MARKED)] and not skipped, settings


def test_shapes_without_turns_become_conversations(tmp_path):
    tokenizer = tokenizer_with(templates.CHATML)
    first = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    question = {"role": "user", "content": "hello"}
    answer = {"role": "assistant", "content": "a"}
    bad = {"role": "assistant", "content": "b"}
    expected = f"{first}«a<|im_end|>»\n"
    alpaca = {"instruction": "hello", "input": "", "output": "a"}
    for record, marked in (
        (alpaca, expected),
        ({**alpaca, "instruction": "he", "input": "llo"}, expected.replace("hello", "he\nllo")),
        (
            {**alpaca, "system": "be", "history": []},
            f"<|im_start|>system\nbe<|im_end|>\n{expected}",
        ),
        ({**alpaca, "history": [["hello", "b"]]}, f"{first}«b<|im_end|>»\n{expected}"),
        ({"prompt": [question], "completion": [answer]}, expected),
        ({"prompt": [question], "chosen": [answer], "rejected": [bad]}, expected),
        ({"prompt": "hello", "chosen": [question, answer], "rejected": [question, bad]}, expected),
        ({"prompt": "hello", "chosen": [answer], "rejected": [bad]}, expected),
        ({"chosen": [question, answer], "rejected": [question, bad]}, expected),
        (  # the answers are the parts that differ
            {
                "chosen": [question, bad, question, answer],
                "rejected": [question, bad, question, bad],
            },
            f"{first}b<|im_end|>\n{expected}",
        ),
    ):
        documents, _ = tokens_of(write_records(tmp_path / "a.jsonl", record), tokenizer)
        assert documents == [reference(HF, marked)], record
    for record in (
        {"prompt": "the user", "chosen": " answers", "rejected": " asks"},
        {"chosen": "the user answers", "rejected": "the user asks"},
    ):
        documents, _ = tokens_of(write_records(tmp_path / "a.jsonl", record), tokenizer)
        assert documents == [[*reference(HF, "the user« answers»"), tokenizer.eos_id]]


def test_images_are_refused_with_their_count_or_dropped_and_counted(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    talk = [{"role": "user", "content": [image, {"type": "text", "text": "hello"}, image]}]
    talk.append({"role": "assistant", "content": "there"})
    plain = {"messages": [{"role": "user", "content": "hello"}, talk[1]]}
    path = write_records(
        tmp_path / "a.jsonl",
        plain,
        {"messages": talk},
        {"messages": talk},
        {**plain, "images": ["x.png"]},
    )
    tokenizer = tokenizer_with(templates.CHATML)
    with pytest.raises(
        ConfigError,
        match=(
            r"line 2: message 1 has 2 parts with images.*data.images to drop \(3 of the 4 "
            r"records"
        ),
    ):
        tokens_of(path, tokenizer)
    assert tokens_of(path, tokenizer, bad_records="skip")[1] == {"with images": 3}
    documents, skipped = tokens_of(path, tokenizer, images="drop")
    assert (
        len(documents) == 4
        and all(document == documents[0] for document in documents)
        and not skipped
    )


# ---- reasoning

TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "one", "reasoning_content": "the 1"},
    {"role": "user", "content": "the user"},
    {"role": "assistant", "content": "", "reasoning_content": "the 2", "tool_calls": [call(a=1)]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "three", "reasoning_content": "the 3"},
]
LATER = (
    "<|im_start|>user\nthe user<|im_end|>\n<|im_start|>assistant\n«<think>\nthe "
    '2\n</think>\n\n<tool_call>\n{"name": '
    '"add", "arguments": {"a": '
    "1}}\n</tool_call><|im_end|>»\n<|im_start|>user\n<tool_response>\n4\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n«<think>\nthe 3\n</think>\n\nthree<|im_end|>»\n"
)
FIRST = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_reasoning_that_the_template_drops_is_refused_by_default(tmp_path):
    path = write_records(
        tmp_path / "a.jsonl", {"messages": [{**message, "tool_calls": None} for message in TURNS]}
    )
    with pytest.raises(
        ConfigError,
        match=r"has reasoning, .*{drop: true} to train without it, or .*to qwen3 or harm",
    ):
        tokens_of(path, tokenizer_with(templates.CHATML))  # the template never renders reasoning
    path = write_records(tmp_path / "a.jsonl", {"messages": TURNS})
    tokenizer = tokenizer_with(templates.QWEN3)
    with pytest.raises(
        ConfigError, match=r"line 1: message 2 has reasoning, .*{drop: true}.*last}.*all} to unroll"
    ):
        tokens_of(path, tokenizer)
    for reasoning, expected in (
        # Unrolled: the last turn after the others without their reasoning, then the turn that lost
        # its reasoning.
        (
            {"turns": "all"},
            [
                f"{FIRST}one<|im_end|>\n{LATER}",
                f"{FIRST}«<think>\nthe 1\n</think>\n\none<|im_end|>»\n",
            ],
        ),
        ({"turns": "last"}, [f"{FIRST}«one<|im_end|>»\n{LATER}"]),
    ):
        documents, _ = tokens_of(path, tokenizer, reasoning=reasoning)
        assert documents == [reference(HF, marked) for marked in expected], reasoning
    documents, _ = tokens_of(path, tokenizer, reasoning={"drop": True})
    text = tokenizer.decode(plain_ids(documents[0]))
    assert "the 1" not in text and "the 2" not in text and "the 3" not in text and "three" in text


@pytest.mark.parametrize("template", [templates.QWEN3, "inline"])
def test_reasoning_without_loss_is_context_with_its_delimiters(tmp_path, template):
    turns = TURNS[2:]
    if template == "inline":  # a template without a field for reasoning renders <think> as text
        template = templates.CHATML
        turns = [
            TURNS[0],
            {"role": "assistant", "content": "<think>\nthe 3\n</think>\n\nthree"},
        ]
        expected = f"{FIRST}<think>\nthe 3\n</think>\n\n«three<|im_end|>»\n"
    else:
        expected = LATER.replace("«<think>\nthe 2\n</think>\n\n", "<think>\nthe 2\n</think>\n\n«")
        expected = expected.replace(
            "«<think>\nthe 3\n</think>\n\n", "<think>\nthe 3\n</think>\n\n«"
        )
    path = write_records(tmp_path / "a.jsonl", {"messages": turns})
    tokenizer = tokenizer_with(template)
    assert tokens_of(path, tokenizer, reasoning={"loss": False})[0] == [reference(HF, expected)]
    everything = reference(HF, f"«{expected.replace('«', '').replace('»', '')}»")
    (tokens,), _ = tokens_of(path, tokenizer, reasoning={"loss": False}, train_on="all")
    assert plain_ids(tokens) == everything and sum(token < 0 for token in tokens) > 0


def test_each_turn_of_an_unrolled_conversation_is_trained_once(tmp_path):
    turns = [
        {
            "role": role,
            "content": f"{role} {n}",
            **({"thinking": f"think {n}"} if role == "assistant" and n != 2 else {}),
        }
        for n in range(5)
        for role in ("user", "assistant")
    ]
    path = write_records(tmp_path / "a.jsonl", {"messages": turns})
    tokenizer = tokenizer_with(templates.QWEN3)
    documents, _ = tokens_of(path, tokenizer, reasoning={"turns": "all"})
    trained = ["".join(tokenizer.decode([t]) for t in document if t >= 0) for document in documents]
    assert len(documents) == 4, "the turn without reasoning needs no sample of its own"
    for n in range(5):
        assert sum(f"assistant {n}" in text for text in trained) == 1, n
        assert sum(f"think {n}" in text for text in trained) == (n != 2), n


def test_calls_that_the_template_leaves_out_are_refused(tmp_path):
    """This template renders only the first call and names the tool again with its result, as
    gpt-oss's does."""
    template = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}\
{% if m.tool_calls %}{{ m.tool_calls[0].function.name + 'add' }}{% endif %}\
{{ '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
    talk = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [call(a=1)] * 2},
    ]
    with pytest.raises(
        ConfigError,
        match="line 1: .*does not render the tool add.*chatml or llama3 or qwen3 or harmony or",
    ):
        tokens_of(write_records(tmp_path / "a.jsonl", {"messages": talk}), tokenizer_with(template))
    tokenizer = tokenizer_with(template)
    # only templates with these tokens are suggested
    tokenizer.chat.special_tokens = ["<|im_start|>", "<|im_end|>"]
    with pytest.raises(ConfigError, match="set data.chat_template to chatml or qwen3, or a file"):
        tokens_of(write_records(tmp_path / "a.jsonl", {"messages": talk}), tokenizer)
