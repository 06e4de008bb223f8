"""Only assistant turns are trained: every token matches texts that are marked by hand."""

import itertools
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import templates
from ithaka.config import ConfigError, DataConfig, ReadingConfig
from ithaka.data.cache import TokenCache
from ithaka.data.documents.files import find_files
from ithaka.data.documents.read import make_shards
from ithaka.data.open import check_data, describe_data, open_data
from ithaka.data.pack import split_samples
from ithaka.data.tokenizer import ByteTokenizer, Tokenizer
from templates import chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ROOT = Path(__file__).parent.parent


def says(role, content=None, **more):
    return {"role": role, "content": content, **more}


def calls(*arguments, **more):
    """An assistant message with tool calls. As in OpenAI's format, arguments are a JSON string."""
    tool_calls = [
        {
            "type": "function",
            "id": "call00001",
            "function": {"name": "add", "arguments": json.dumps(values)},
        }
        for values in arguments
    ]
    return {"role": "assistant", "tool_calls": tool_calls, **more}


def write_records(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def tokens_of(path, tokenizer, **settings):
    """Return the tokens of each sample, untrained ones inverted, and the number of skipped records
    by reason."""
    documents = []
    skipped = {}
    cache = TokenCache(path.parent / "tokens", tokenizer)
    for shard in map(cache.load, make_shards(find_files(path).files, ReadingConfig(**settings))):
        starts = split_samples(shard)[0]["low"]
        documents += np.split(np.asarray(shard.tokens), starts[1:]) if len(starts) else []
        skipped |= shard.skipped
    cache.close()
    return [document.tolist() for document in documents], skipped


def plain_ids(tokens):
    return [token if token >= 0 else ~token for token in tokens]


def reference(hf, marked):
    """Tokenize a text with «...» around its trained parts. Counts bytes, independently of the
    tokenizer's offsets."""
    text = ""
    trained = []
    for i, piece in enumerate(re.split("[«»]", marked)):
        text += piece
        trained += [i % 2 == 1] * len(piece.encode())
    tokens = []
    offset = 0
    for token in hf(text, add_special_tokens=False)["input_ids"]:
        tokens.append(token if trained[offset] else ~token)
        name = hf.convert_ids_to_tokens(token)
        # elsewhere, one letter is a byte
        offset += len(name.encode()) if name in templates.SPECIAL else len(name)
    assert offset == len(text.encode())
    return tokens


TALK = [
    says("system", "be kind"),
    says("user", "hello"),
    says("assistant", "hello there, 🎉 user"),
    says("user", " the 2 "),
    says("assistant", " 2 + 2 is 4.\n"),
]
TOOL_TALK = [
    says("user", "2 + 2?"),
    calls({"a": 2, "b": 2}, reasoning_content="the tool"),
    says("tool", "4", tool_call_id="call00001"),
    says("assistant", "it is 4", reasoning_content="the answer"),
    says("user", "hello"),
    calls({"a": 1}, {"b": None}, reasoning_content="twice", content="I call"),
    says("tool", "1", tool_call_id="call00001"),
    says("tool", "2", tool_call_id="call00001"),
    says("assistant", "<think>\nso\n</think>\n\nthere"),
]
PLAIN_TALK = [
    {k: v for k, v in message.items() if k != "reasoning_content"} for message in TOOL_TALK
]
CASES = {
    "chatml": (
        templates.CHATML,
        TALK,
        None,
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "«hello there, 🎉 user<|im_end|>»\n<|im_start|>user\n the 2 "
        "<|im_end|>\n<|im_start|>assistant\n"
        "« 2 + 2 is 4.\n<|im_end|>»\n",
    ),
    "smollm2": (
        templates.SMOLLM2,
        TALK[1:],
        None,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«hello there, 🎉 "
        "user<|im_end|>»\n"
        "<|im_start|>user\n the 2 <|im_end|>\n<|im_start|>assistant\n« 2 + 2 is 4.\n<|im_end|>»\n",
    ),
    "smollm2, the assistant first": (
        templates.SMOLLM2,
        TALK[2:4],
        None,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>assistant\n«hello there, 🎉 user<|im_end|>»\n<|im_start|>user\n the 2 "
        "<|im_end|>\n",
    ),
    "llama 3": (
        templates.LLAMA3,
        TALK,
        None,
        "<s><|start_header_id|>system<|end_header_id|>\n\nbe "
        "kind<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nhello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«hello there, 🎉 "
        "user<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nthe "
        "2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "«2 + 2 is 4.<|eot_id|>»",
    ),
    "gemma": (
        templates.GEMMA,
        TALK[1:],
        None,
        "<s><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n«hello there, 🎉 "
        "user<end_of_turn>»\n"
        "<start_of_turn>user\nthe 2<end_of_turn>\n<start_of_turn>model\n«2 + 2 is "
        "4.<end_of_turn>»\n",
    ),
    "mistral": (
        templates.MISTRAL,
        TALK,
        None,
        "<s>[INST] hello[/INST]« hello there, 🎉 user</s>»[INST]  the 2 [/INST]« 2 + 2 is 4.</s>»",
    ),
    # The first and the last question are equal, so this template takes both for the last.
    "mistral with tools": (
        templates.MISTRAL,
        [says("user", "hello"), says("assistant", "yes"), says("user", "hello"), *PLAIN_TALK[1:4]],
        TOOLS,
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "add", "parameters": '
        '{"type": "object"}}}]'
        '[/AVAILABLE_TOOLS][INST] hello[/INST]« yes</s>»[AVAILABLE_TOOLS] [{"type": "function", '
        '"function": {"name": '
        '"add", "parameters": {"type": "object"}}}][/AVAILABLE_TOOLS][INST] '
        'hello[/INST]«[TOOL_CALLS] [{"name": '
        '"add", "arguments": {"a": 2, "b": 2}, "id": "call00001"}]</s>»[TOOL_RESULTS] '
        '{"content": 4, '
        '"call_id": "call00001"}[/TOOL_RESULTS]« it is 4</s>»',
    ),
    # The template drops thinking before the last question, but keeps it when it renders a prefix of
    # the conversation.
    "qwen3 with tools and thinking": (
        templates.QWEN3,
        [says("system", "be kind"), *TOOL_TALK],
        TOOLS,
        '<|im_start|>system\nbe kind\n\n# Tools\n<tools>\n{"type": "function", "function": '
        '{"name": "add", '
        '"parameters": {"type": "object"}}}\n</tools><|im_end|>\n<|im_start|>user\n2 + '
        "2?<|im_end|>\n"
        '<|im_start|>assistant\n«<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": '
        "2}}\n</tool_call><|im_end|>»\n"
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "«it is 4<|im_end|>»\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        '«<think>\ntwice\n</think>\n\nI call\n<tool_call>\n{"name": "add", "arguments": {"a": '
        "1}}\n</tool_call>\n"
        '<tool_call>\n{"name": "add", "arguments": {"b": null}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«<think>\nso\n</think>\n\nthere<|im_end|>»\n",
    ),
    "the example for models without tools": (
        (ROOT / "examples" / "chatml_tools.jinja").read_text(),
        [says("system", "be kind"), *PLAIN_TALK[:4]],
        TOOLS,
        '<|im_start|>system\nbe kind\n\nFunctions:\n{"type": "function", "function": {"name": '
        '"add", "parameters": '
        '{"type": "object"}}}\nTo call one, write <tool_call>{"name": NAME, "arguments": '
        "OBJECT}</tool_call>."
        "<|im_end|>\n<|im_start|>user\n2 + "
        '2?<|im_end|>\n<|im_start|>assistant\n«<tool_call>{"name": "add", '
        '"arguments": {"a": 2, "b": '
        "2}}</tool_call><|im_end|>»\n<|im_start|>user\n<tool_response>4</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n«it is 4<|im_end|>»\n",
    ),
    "qwen3, no thinking": (
        templates.QWEN3,
        TALK[1:3],
        None,
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nhello there, 🎉 user<|im_end|>»\n",
    ),
    "zephyr": (
        templates.ZEPHYR,
        TALK[1:],
        None,
        "<|user|>\nhello</s>\n<|assistant|>\n«hello there, 🎉 user</s>»\n<|user|>\n the 2 "
        "</s>\n<|assistant|>\n"
        "« 2 + 2 is 4.\n</s>»\n",
    ),
    "phi 3": (
        templates.PHI3,
        TALK[1:3],
        None,
        "<|user|>\nhello<|end|>\n<|assistant|>\n«hello there, 🎉 user<|end|>»\n<|endoftext|>",
    ),
    "an end longer than the prompt": (
        templates.PHI3.replace("'<|endoftext|>'", "'<|endoftext|><|endoftext|>'"),
        TALK[1:3],
        None,
        (
            "<|user|>\nhello<|end|>\n<|assistant|>\n«hello there, 🎉 "
            "user<|end|>»\n<|endoftext|><|endoftext|>"
        ),
    ),
    "a prompt that opens the thinking": (
        templates.THINKING,
        [
            says("user", "hello"),
            says("assistant", "<think>\nso\n</think>\n\n<there"),
            says("user", "hello"),
            says("assistant", "<think>\nso\n</think>\n\nthere"),
        ],
        None,
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«<there<|im_end|>»\n"
        "<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n«so\n</think>\n\nthere<|im_end|>»\n",
    ),
    "gpt-oss": (
        templates.GPT_OSS,
        [*TALK[1:4], says("assistant", "4", thinking="2 + 2")],
        None,
        "<|start|>user<|message|>hello<|end|><|start|>assistant«<|channel|>final<|message|>hello "
        "there, 🎉 user"
        "<|end|>»<|start|>user<|message|> the 2 "
        "<|end|><|start|>assistant«<|channel|>analysis<|message|>2 + 2<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|return|>»",
    ),
    # The template concatenates arguments to text, which fails for objects.
    "deepseek": (
        templates.DEEPSEEK,
        PLAIN_TALK[:2],
        None,
        '<|user|>2 + 2?<|assistant|>«add {"a": 2, "b": 2}</s>»',
    ),
    "deepseek v3, the results of two tools": (
        templates.DEEPSEEK_V3,
        [
            says("user", "2 + 2?"),
            calls({"a": 2}, {"a": 3}, content=None),
            says("tool", "4"),
            says("tool", "5"),
            says("assistant", "it is 4"),
            says("user", "hello"),
            says("assistant", "there"),
        ],
        None,
        '<s><|user|>2 + 2?<|assistant|>«add {"a": 2}\nadd {"a": '
        "3}</s>»<|outputs|><|output|>4<|output|>5<|end_outputs|>"
        "«it is 4</s>»<|user|>hello<|assistant|>«there</s>»",
    ),
    "the stop token opens the next turn": (
        templates.NEXT_TURN,
        TALK,
        None,
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "«hello there, 🎉 user<|im_end|>»\n<|im_start|>user\n the 2 "
        "<|im_end|>\n<|im_start|>assistant\n"
        "« 2 + 2 is 4.\n»",
    ),
    "the stop token opens the next turn, and eos ends the last": (
        templates.NEXT_TURN + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        TALK[1:3],
        None,
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«hello there, 🎉 user</s>»",
    ),
    "the stop token opens the next turn and follows the last": (
        templates.NEXT_TURN_AND_LAST,
        TALK[1:],
        None,
        "<s><|user|>hello<|end|><|assistant|>«hello there, 🎉 user<|end|>»<|user|> the 2 "
        "<|end|><|assistant|>"
        "« 2 + 2 is 4.\n<|end|>»",
    ),
    "the same, and a prompt that opens the thinking": (
        templates.NEXT_TURN_AND_LAST.replace(
            "{{- '<|assistant|>' -}}", "{{- '<|assistant|><think>' -}}"
        ),
        [*TALK[1:4], says("assistant", "<think>so</think>there")],
        None,
        "<s><|user|>hello<|end|><|assistant|>«hello there, 🎉 user<|end|>»<|user|> the 2 "
        "<|end|><|assistant|><think>"
        "«so</think>there<|end|>»",
    ),
    "the same, with a tool": (
        templates.NEXT_TURN_AND_LAST,
        [
            says("user", "2 + 2?"),
            says("assistant", "call"),
            says("tool", "4"),
            says("assistant", "4"),
        ],
        None,
        "<s><|user|>2 + 2?<|end|><|assistant|>«call<|end|>»<|tool|>4<|end|><|assistant|>«4<|end|>»",
    ),
    "generation marks": (
        templates.GENERATION,
        TALK[:3],
        None,
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "«hello there, 🎉 user<|im_end|>»\n",
    ),
    "generation marks in the last turn": (
        templates.GENERATION.replace("'assistant' %}", "'assistant' and loop.last %}"),
        TALK[1:],
        None,
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello there, 🎉 "
        "user<|im_end|>\n<|im_start|>user\n"
        " the 2 <|im_end|>\n<|im_start|>assistant\n« 2 + 2 is 4.\n<|im_end|>»\n",
    ),
    "generation marks that leave the stop token out": (
        templates.GENERATION.replace("+ '<|im_end|>' }}", "}}").replace(
            "{{- '\\n' }}", "{{- '<|im_end|>\\n' }}", 1
        ),
        TALK[:3],
        None,
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "«hello there, 🎉 user<|im_end|>»\n",
    ),
}


@pytest.fixture(scope="module")
def tokenizer_with():
    hf = chat_tokenizer(None)

    def with_template(template):
        hf.chat_template = template
        return Tokenizer(hf)

    return with_template


def with_objects(messages):
    """Parse the arguments of tool calls: most templates expect objects."""
    messages = json.loads(json.dumps(messages))
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("case", CASES)
def test_only_assistant_turns_are_trained(tmp_path, tokenizer_with, case):
    template, messages, tools, marked = CASES[case]
    tokenizer = tokenizer_with(template)
    path = write_records(tmp_path / "a.jsonl", {"messages": messages, "tools": tools})
    reasoning = {"turns": "last"} if template in (templates.QWEN3, templates.THINKING) else None
    ((tokens,), skipped) = tokens_of(path, tokenizer, reasoning=reasoning)
    rendered = (
        messages
        if template in (templates.DEEPSEEK, templates.DEEPSEEK_V3)
        else with_objects(messages)
    )
    expected_ids = tokenizer.hf.apply_chat_template(rendered, tools=tools, tokenize=True)[
        "input_ids"
    ]
    assert plain_ids(tokens) == expected_ids and not skipped
    assert tokens == reference(tokenizer.hf, marked)
    stop = [token for token in templates.SPECIAL if marked.endswith((f"{token}»", f"{token}»\n"))]
    ((without,), _) = tokens_of(path, tokenizer, train_on_eos=False, reasoning=reasoning)
    if stop:
        unmarked = marked.replace(f"{stop[0]}»", f"»{stop[0]}").replace("<|end|>»", "»<|end|>")
        assert without == reference(tokenizer.hf, unmarked)
    if template == templates.MISTRAL and messages[0]["role"] == "system":
        match = (
            "message 1 has the content 'be kind', which .*, set data.train_on to assistant, "
            "or drop the record"
        )
        with pytest.raises(ConfigError, match=match):
            tokens_of(path, tokenizer, train_on="all")
        return
    ((everything,), _) = tokens_of(path, tokenizer, train_on="all", reasoning=reasoning)
    assert everything == expected_ids


@pytest.mark.parametrize("case", ["chatml", "the example for models without tools"])
def test_a_bos_token_that_opens_every_turn_is_not_a_stop_token(tmp_path, case):
    """SmolLM2's tokenizer has such a token."""
    template, messages, tools, marked = CASES[case]
    tokenizer = Tokenizer(chat_tokenizer(template))
    tokenizer.hf.bos_token = "<|im_start|>"
    tokenizer.hf.eos_token = "<|im_end|>"
    ((tokens,), _) = tokens_of(
        write_records(tmp_path / "a.jsonl", {"messages": messages, "tools": tools}), tokenizer
    )
    assert tokens == reference(tokenizer.hf, marked)


def test_a_message_left_untrained_keeps_its_own_stop_token(tmp_path, tokenizer_with):
    """The template writes the stop token where the next turn starts."""
    template, messages, _, marked = CASES["the stop token opens the next turn and follows the last"]
    messages = [dict(message, train=i != 1) for i, message in enumerate(messages)]
    path = write_records(tmp_path / "a.jsonl", {"messages": messages})
    tokenizer = tokenizer_with(template)
    ((tokens,), _) = tokens_of(path, tokenizer)
    first = "«hello there, 🎉 user<|end|>»"
    assert tokens == reference(tokenizer.hf, marked.replace(first, first[1:-1]))
    ((tokens,), _) = tokens_of(path, tokenizer, train_on="all")
    head, tail = (
        marked.replace(first, first[1:-1])
        .replace("«", "")
        .replace("»", "")
        .split(f"<|assistant|>{first[1:-1]}")
    )
    assert tokens == reference(tokenizer.hf, f"«{head}»<|assistant|>{first[1:-1]}«{tail}»")


def test_headers_are_not_trained_without_special_tokens(tmp_path):
    """The byte tokenizer has no special tokens in the text, and every turn of this template starts
    with <|."""
    tokenizer = ByteTokenizer()
    tokenizer.hf.chat_template, messages, _, marked = CASES[
        "the stop token opens the next turn and follows the last"
    ]
    ((tokens,), _) = tokens_of(
        write_records(tmp_path / "a.jsonl", {"messages": messages}), tokenizer
    )
    trained = re.findall("«(.*?)»", marked.replace("<s>", "<|bos|>"), re.DOTALL)
    runs = [
        list(run)
        for is_trained, run in itertools.groupby(tokens, lambda token: token >= 0)
        if is_trained
    ]
    assert [bytes(run).decode() for run in runs] == trained


def test_records_that_a_template_breaks_are_skipped_and_counted(tmp_path, tokenizer_with):
    """This template writes no header before a second call."""
    call = calls({"a": 2})
    result = says("tool", "4")
    good = [says("user", "hello"), call, result, says("assistant", "4")]
    bad = [says("user", "hello"), call, result, call, result, says("assistant", "4")]
    path = write_records(
        tmp_path / "a.jsonl", *({"messages": each} for each in (good, bad, good, bad))
    )
    tokenizer = tokenizer_with(templates.DEEPSEEK_V3)
    documents, skipped = tokens_of(path, tokenizer, bad_records="skip")
    assert len(documents) == 2 and skipped == {"refused by the chat template": 2}
    text = (
        '<s><|user|>hello<|assistant|>«add {"a": '
        "2}</s>»<|outputs|><|output|>4<|end_outputs|>«4</s>»"
    )
    assert documents[0] == documents[1] == reference(tokenizer.hf, text)
    match = r"line 2: .*<\|end_outputs\|>'; set data.chat_template .*{% generation %}.*\(2 of the 4"
    with pytest.raises(ConfigError, match=match):
        tokens_of(path, tokenizer)


def test_null_content_is_empty(tmp_path, tokenizer_with):
    """With tool_calls, OpenAI's content is null or missing. Some templates concatenate it, others
    print it."""
    call = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    concatenates = templates.CHATML.replace(
        "message['content'] + ", f"message['content']}}}}{call}{{{{"
    )
    prints = concatenates.replace("+ message['content']", "}}{{ message.content }}{{ ''")
    for template in (concatenates, prints):
        tokenizer = tokenizer_with(template)
        texts = []
        for content in ({"content": ""}, {"content": None}, {}):
            talk = [
                says("user", "2"),
                calls({"a": 2}, **content),
                says("tool", "4"),
                says("assistant", "4"),
            ]
            ((tokens,), _) = tokens_of(
                write_records(tmp_path / "a.jsonl", {"messages": talk}), tokenizer
            )
            texts.append(tokens)
        assert texts[0] == texts[1] == texts[2] and "assistant\nadd<|im_end|>" in tokenizer.decode(
            plain_ids(tokens)
        )
    path = write_records(tmp_path / "a.jsonl", {"messages": [says("user", "2"), says("assistant")]})
    with pytest.raises(
        ConfigError,
        match=r"a.jsonl line 1: message 2 has neither content nor tool_calls nor reasoning; ",
    ):
        tokens_of(path, tokenizer)
    talk = [says("user", "2"), calls({"a": 2}), says("assistant", "4")]
    with pytest.raises(
        ConfigError,
        match=r"a.jsonl line 1: the chat template does not render the tool add or a call",
    ):
        tokens_of(
            write_records(tmp_path / "a.jsonl", {"messages": talk}),
            tokenizer_with(templates.CHATML),
        )


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_fields_that_the_template_ignores_are_refused_and_counted(tmp_path, tokenizer_with, field):
    def talk(value):
        return {"messages": [says("user", "hello"), says("assistant", "there", **{field: value})]}

    value = "so"
    path = write_records(tmp_path / "a.jsonl", talk(None), talk(value), talk(""), talk(value))
    with pytest.raises(ConfigError) as error:
        tokens_of(path, tokenizer_with(templates.CHATML))
    assert "a.jsonl line 2: message 2 has reasoning, which" in str(error.value)
    assert "{drop: true}" in str(error.value) and "data.chat_template" in str(error.value)
    assert "(2 of the 4 records read here" in str(error.value)
    documents, skipped = tokens_of(path, tokenizer_with(templates.CHATML), bad_records="skip")
    assert len(documents) == 2 and skipped == {
        "with reasoning that the chat template leaves out": 2
    }
    rendering = templates.CHATML.replace(
        "message['content']", f"(message.{field} or '')|string + message['content']"
    )
    ((*_, tokens), skipped) = tokens_of(path, tokenizer_with(rendering))
    expected = f"{value}there<|im_end|>"
    assert not skipped and expected in tokenizer_with(rendering).decode(plain_ids(tokens))


def test_reasoning_that_is_written_twice_is_rendered_once(tmp_path, tokenizer_with):
    """Some servers return both fields; Qwen's template reads reasoning_content."""
    talk = [
        says("user", "hello"),
        says("assistant", "there", reasoning="so", reasoning_content="so"),
    ]
    ((tokens,), _) = tokens_of(
        write_records(tmp_path / "a.jsonl", {"messages": talk}), tokenizer_with(templates.QWEN3)
    )
    assert "<think>\nso\n</think>" in tokenizer_with(templates.QWEN3).decode(plain_ids(tokens))


@pytest.mark.parametrize(
    "flag", [{"train": False}, {"loss_mask": 0}, {"weight": 0}, {"weight": 0.0, "train": True}]
)
def test_a_message_can_be_left_untrained(tmp_path, tokenizer_with, flag):
    template, messages, _, marked = CASES["chatml"]
    messages = [
        dict(message, **(flag if i == 2 else {"train": True})) for i, message in enumerate(messages)
    ]
    path = write_records(tmp_path / "a.jsonl", {"messages": messages})
    tokenizer = tokenizer_with(template)
    first = "«hello there, 🎉 user<|im_end|>»"
    ((tokens,), _) = tokens_of(path, tokenizer)
    assert tokens == reference(tokenizer.hf, marked.replace(first, first[1:-1]))
    ((tokens,), _) = tokens_of(path, tokenizer, train_on="all")
    turn = f"<|im_start|>assistant\n{first}\n"
    head, tail = (part.replace("«", "").replace("»", "") for part in marked.split(turn))
    assert tokens == reference(tokenizer.hf, f"«{head}»{turn.replace(first, first[1:-1])}«{tail}»")
    for message in messages:
        message["train"] = False
    ((), skipped) = tokens_of(
        write_records(tmp_path / "b.jsonl", {"messages": messages}), tokenizer
    )
    assert skipped == {"with nothing to train": 1}


@pytest.mark.parametrize(
    "letters", ["\ufdd0\ufdd1", "\ufdd1", "".join(map(chr, range(0xFDD0, 0xFDF0)))]
)
@pytest.mark.parametrize("case", ["chatml", "generation marks"])
def test_any_character_may_occur_in_a_text(tmp_path, tokenizer_with, case, letters):
    template, messages, _, marked = CASES[case]
    messages = [
        {**message, "content": message["content"].replace("hello", letters)} for message in messages
    ]
    path = write_records(tmp_path / "a.jsonl", {"messages": messages})
    tokenizer = tokenizer_with(template)
    ((tokens,), skipped) = tokens_of(path, tokenizer, bad_records="skip")
    assert tokens == reference(tokenizer.hf, marked.replace("hello", letters)) and not skipped


def test_generation_marks_match_transformers(tmp_path, tokenizer_with):
    # theirs misses turns that start with " "
    tokenizer = tokenizer_with(templates.GENERATION)
    talk = TALK[:3]
    mask = tokenizer.hf.apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    ((tokens,), _) = tokens_of(write_records(tmp_path / "a.jsonl", {"messages": talk}), tokenizer)
    assert [int(token >= 0) for token in tokens] == mask and 0 < sum(mask) < len(mask)


def test_a_split_conversation_keeps_its_marks(tmp_path, tokenizer_with):
    template, messages, _, marked = CASES["llama 3"]
    tokenizer = tokenizer_with(template)
    path = write_records(tmp_path / "a.jsonl", {"messages": messages})
    context = 12
    tokens = reference(tokenizer.hf, marked)
    pieces = [tokens[low : low + context] for low in range(0, len(tokens), context)]
    # pieces without a trained token are left out
    pieces = [piece for piece in pieces if max(piece[1:]) >= 0]
    expected = {
        (*plain_ids(piece), -100, *(max(token, -1) for token in piece[1:])) for piece in pieces
    }
    data = DataConfig(path=path, context=context, validation_fraction=0)
    stream = open_data(data, tokenizer=tokenizer, seed=0, cache_dir=tmp_path / "tokens")
    batches = [stream.next_batch() for _ in pieces]
    samples = set()
    assert re.fullmatch(
        r"[\d.]+% of the first .*; an assistant's turn ends with <\|eot_id\|>",
        describe_data(stream, 9)["trained"],
    )
    stream.close()
    for batch in batches:
        length = int((batch.document_ids[0] == 0).sum())
        ids, labels = (field[0, :length].tolist() for field in (batch.input_ids, batch.labels))
        samples.add((*ids, labels[0], *(label if label != -100 else -1 for label in labels[1:])))
        assert (batch.labels[0, length:] == -100).all()
    assert samples == expected


def test_a_token_is_trained_if_its_first_character_is(tokenizer_with):
    tokenizer = tokenizer_with(None)
    (ids,) = tokenizer.encode_batch(["the assistant"])
    assert tokenizer.hf.convert_ids_to_tokens(ids) == ["the", "Ġassistant"]

    def trained(low, high, text="the assistant"):
        return [int(token >= 0) for token in tokenizer.encode_batch([text], [[(low, high)]])[0]]

    assert trained(0, 2) == [1, 0]  # a token is trained if the range ends inside it
    assert trained(1, 13) == [0, 1]  # but not if the range starts inside it
    assert trained(4, 13) == [0, 1]  # a byte-level tokenizer does not count the space before a word
    assert trained(0, 4) == [1, 0]
    assert trained(0, 0) == [0, 0]
    assert trained(2, 3, "a \n🎉") == [0, 0, 1, 0, 0, 0, 0][: len(trained(2, 3, "a \n🎉"))]
    bytes_of = ByteTokenizer().encode_batch(["é🎉b"], [[(1, 2)]])[0]
    assert [int(token >= 0) for token in bytes_of] == [0, 0, 1, 1, 1, 1, 0]


def test_prompts_are_read_and_completions_trained(tmp_path, tokenizer_with):
    tokenizer = tokenizer_with(templates.CHATML)
    hf = tokenizer.hf
    eos = tokenizer.eos_id
    path = write_records(tmp_path / "a.jsonl", {"prompt": "the user", "completion": " answers"})
    assert tokens_of(path, tokenizer)[0] == [reference(hf, "the user« answers»") + [eos]]
    assert tokens_of(path, tokenizer, train_on_eos=False)[0] == [
        reference(hf, "the user« answers»") + [~eos]
    ]
    assert tokens_of(path, tokenizer, train_on="all")[0] == [
        reference(hf, "«the user answers»") + [eos]
    ]
    talk = {"prompt": TALK[:4], "completion": TALK[4:]}
    first = "«hello there, 🎉 user<|im_end|>»"
    expected = reference(hf, CASES["chatml"][3].replace(first, first[1:-1]))
    assert tokens_of(write_records(tmp_path / "b.jsonl", talk), tokenizer)[0] == [expected]


def test_input_ids_are_trained_where_labels_say(tmp_path, tokenizer_with):
    tokenizer = tokenizer_with(None)
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
        {"input_ids": [8, 9]},
        {"input_ids": []},
    ]
    assert tokens_of(write_records(tmp_path / "a.jsonl", *rows), tokenizer) == (
        [[~5, 6, ~7], [8, 9]],
        {"empty": 1},
    )
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "a.parquet")
    assert tokens_of(tmp_path / "a.parquet", tokenizer) == ([[~5, 6, ~7]], {})
    for row, match in (
        ({"input_ids": [5, 6], "labels": [6, -100]}, "labels .*input_ids .*-100"),
        ({"input_ids": [5, 6], "labels": [5]}, "labels .*input_ids"),
        ({"input_ids": [5, 1 << 20]}, r"input_ids .*5 to 1048576.* 0 to \d+; .*own tokenizer"),
        ({"input_ids": "five"}, "input_ids .*list of integers"),
    ):
        with pytest.raises(ConfigError, match=rf"b.jsonl line 1: {match}"):
            tokens_of(write_records(tmp_path / "b.jsonl", row), tokenizer)


def test_every_kind_of_file_gives_the_same_conversation(tmp_path, tokenizer_with):
    """Arrow fills missing fields with nulls."""
    template, messages, tools, marked = CASES["qwen3 with tools and thinking"]
    messages = with_objects(messages)
    expected = reference(tokenizer_with(template).hf, marked.replace('{"b": null}', "{}"))
    messages[6]["tool_calls"][1]["function"]["arguments"] = {}
    rows = [
        {"id": 1, "messages": messages, "tools": tools},
        {"id": 2, "messages": messages, "tools": tools},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_records(tmp_path / "a.jsonl", *rows)
    for_paths = [tmp_path / "a.json", tmp_path / "a.parquet", tmp_path / "a.jsonl"]
    datasets = pytest.importorskip("datasets")
    last = {"turns": "last"}
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    for path in [*for_paths, tmp_path / "folder"]:
        assert tokens_of(path, tokenizer_with(template), reasoning=last)[0] == [expected] * 2, (
            path.name
        )
    # The same conversation with other field names and content in parts.
    parts = [
        dict(m, content=[{"type": "text", "text": m["content"]}] if m.get("content") else None)
        for m in messages
    ]
    path = write_records(tmp_path / "b.jsonl", {"conversations": parts, "tools": json.dumps(tools)})
    assert tokens_of(path, tokenizer_with(template), reasoning=last)[0] == [expected]


BAD = {
    "not JSON": ("{", r"not JSON \("),
    "not an object": ("[1]", "a list.*JSON object"),
    "without its field": ({"body": "x"}, "has no field data.text_field=text; its fields are body"),
    "with an unknown role": (
        {"messages": [says("robot", "x")]},
        "message 1 has role robot; use system, user, assist",
    ),
    "without an assistant's turn": ({"messages": TALK[:2]}, "has no assistant turn"),
    "with tool arguments that are not JSON": (
        {
            "messages": [
                says("assistant", tool_calls=[{"function": {"name": "add", "arguments": "{a: 1"}}])
            ]
        },
        r"message 1 .*arguments .*JSON",
    ),
    "with tool calls that are not objects": (
        {"messages": [says("assistant", "x", tool_calls=[{"function": "add"}])]},
        r"message 1 has tool_calls .*{function: {name, arguments}}",
    ),
    "with content that is not text": (
        {"messages": [says("user", [{"type": "x"}])]},
        "message 1 has content .*text",
    ),
    "with images": (
        {"messages": [says("user", [{"type": "image"}])]},
        "message 1 has 1 part .*data.images to drop",
    ),
    "with parts out of order": (
        {"messages": [says("assistant", [{"type": "tool_use"}, {"type": "text", "text": "x"}])]},
        "message 1 has text after a tool call",
    ),
    "with invalid Unicode": (
        {"messages": [says("user", "x"), says("assistant", "\ud800")]},
        "has half of a surrogate",
    ),
    "with a partial weight": (
        {"messages": [says("user", "x", weight=0.5)]},
        "message 1 has weight=0.5; use 0 or 1",
    ),
    "without messages": (
        {"messages": json.dumps(TALK)},
        "messages is .*list.*write a JSON list, not its text",
    ),
    "tools that are not JSON": ({"messages": TALK, "tools": "{x"}, "tools is .*JSON schema"),
    "without text": ({"prompt": "x", "completion": 3}, "completion is int, not a string"),
    "refused by the chat template": (
        {"messages": TALK},
        r".*\(TemplateError: System role not supported\).*data.chat_template",
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_records_are_named_or_skipped_and_counted(tmp_path, tokenizer_with, reason):
    record, match = BAD[reason]
    good = {"messages": TALK[1:]}
    lines = [
        json.dumps(good),
        "",
        record if isinstance(record, str) else json.dumps(record),
        json.dumps(good),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    tokenizer = tokenizer_with(templates.GEMMA)
    with pytest.raises(ConfigError, match=rf"a.jsonl line 3: {match}"):
        tokens_of(tmp_path / "a.jsonl", tokenizer)
    documents, skipped = tokens_of(tmp_path / "a.jsonl", tokenizer, bad_records="skip")
    assert len(documents) == 2 and skipped == {reason: 1}


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_with_an_answer_that_trains_nothing_is_bad(tmp_path, tokenizer_with, side):
    pair = {
        "prompt": [says("user", "2 + 2?")],
        "chosen": [says("assistant", "4")],
        "rejected": [calls({"a": 2})],
    }
    text = {"prompt": "2 + 2? ", "chosen": "4", "rejected": "5"}
    empty = [*pair["prompt"], says("assistant", "\n")]
    full = {"chosen": empty[:1] + pair["chosen"], "rejected": [*empty[:1], says("assistant", "5")]}
    for good, answer, problem in (
        (pair, [says("assistant", "x", weight=0)], "has nothing to train"),
        (pair, [says("assistant", "")], "is empty"),
        (full, empty, "is empty"),
        (text, "", "is empty"),
    ):
        path = write_records(tmp_path / "a.jsonl", good, good | {side: answer}, good)
        read = partial(tokens_of, path, tokenizer_with(templates.QWEN3), train_on="pairs")
        with pytest.raises(
            ConfigError, match=f"a.jsonl line 2: {side} {problem}; .*drop the record"
        ):
            read()
        documents, skipped = read(bad_records="skip")
        reason = "with an empty answer" if "empty" in problem else "with nothing to train"
        assert len(documents) == 4 and skipped == {reason: 1}


def test_templates_that_take_only_parts_get_parts(tmp_path, tokenizer_with):
    """These templates render content that is a string as nothing."""
    marked = (
        "<|im_start|>System: be kind<end_of_utterance>\nUser: "
        "hello<end_of_utterance>\nAssistant:« hello there, 🎉 user"
        "<end_of_utterance>»\nUser:  the 2 <end_of_utterance>\nAssistant:«  2 + 2 is "
        "4.\n<end_of_utterance>»\n"
    )
    tokenizer = tokenizer_with(templates.SMOLVLM)
    ((tokens,), _) = tokens_of(write_records(tmp_path / "a.jsonl", {"messages": TALK}), tokenizer)
    assert tokens == reference(tokenizer.hf, marked)
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in TALK
    ]
    assert plain_ids(tokens) == tokenizer.hf.apply_chat_template(parts, tokenize=True)["input_ids"]
    assert tokenizer.chat.stop_token == "<end_of_utterance>"


def test_answers_that_the_template_leaves_out_are_refused(tmp_path, tokenizer_with):
    """With data.train_on=all, so are other messages that it leaves out."""

    def template_with(*roles):
        content = f"(message['content'] if message['role'] in {roles} else '')"
        return templates.CHATML.replace("message['content']", content)

    drops = template_with("user")
    path = write_records(tmp_path / "a.jsonl", {"messages": TALK[1:3]}, {"messages": TALK[1:3]})
    match = (
        r"a.jsonl line 1: message 2 has the content 'hello there, 🎉 user', which .*; set "
        r"data.chat_template to chatml"
    )
    with pytest.raises(ConfigError, match=rf"{match}.* or drop the record \(2 of the 2"):
        tokens_of(path, tokenizer_with(drops))
    untrained = [*TALK[1:4], {**TALK[4], "content": ""}]
    untrained[1] = {**untrained[1], "train": False}
    (_, skipped) = tokens_of(
        write_records(tmp_path / "b.jsonl", {"messages": untrained}), tokenizer_with(drops)
    )
    assert not skipped
    with_call = [says("user", "2 + 2?"), calls({"a": 2}, content="I call")]
    with pytest.raises(
        ConfigError, match="the content 'I call', which .*, remove the content, or drop the record"
    ):
        tokens_of(
            write_records(tmp_path / "c.jsonl", {"messages": with_call}),
            tokenizer_with(templates.MISTRAL),
        )
    talk = [says("system", "answer 4"), says("user", "2 + 2"), says("assistant", "4")]
    path = write_records(tmp_path / "e.jsonl", {"messages": talk})
    # two empty turns for the answer, which another message quotes
    twice = template_with("system", "user") * 2
    for template, number, content in (
        (drops, 1, "answer 4"),
        (template_with("system"), 2, "2 . 2"),
        (twice, 3, "4"),
    ):
        with pytest.raises(ConfigError, match=f"message {number} has the content '{content}'"):
            tokens_of(path, tokenizer_with(template), train_on="all")
    for change in ("tojson", "replace('\n', ' ')"):  # the text is kept in another form
        changes = templates.CHATML.replace("message['content']", f"(message['content'] | {change})")
        talk = [says("user", "2"), says("assistant", '"2"\n\n+ 2')]
        (_, skipped) = tokens_of(
            write_records(tmp_path / "d.jsonl", {"messages": talk}), tokenizer_with(changes)
        )
        assert not skipped


@pytest.mark.parametrize("answers", [2, 3])
def test_tools_that_the_template_ignores_are_refused(tmp_path, tokenizer_with, answers):
    """Otherwise, a call without content would train an empty answer."""
    talk = [says("user", "2 + 2?"), calls({"a": 2}, content=""), calls({"a": 3}, content="")][
        :answers
    ]
    # a message with the tool's name does not hide that the tool is missing
    named = TALK[1].copy() | {"content": "add"}
    for template, record in (
        (templates.CHATML, {"messages": talk}),
        (templates.CHATML, {"messages": [named, TALK[2]], "tools": TOOLS * 2}),
        ("{{ tools | tojson }}" + templates.CHATML, {"messages": talk, "tools": TOOLS}),
    ):
        path = write_records(tmp_path / "a.jsonl", record)
        with pytest.raises(ConfigError, match=r"line 1: .*tool add.*data.chat_template"):
            tokens_of(path, tokenizer_with(template))


def test_templates_that_cannot_be_right_are_refused(tmp_path, tokenizer_with):
    path = write_records(tmp_path / "a.jsonl", {"messages": TALK[1:3]})
    for template, match in (
        (
            "{% for m in messages %}{{ m.content }",
            r"^the chat template .*Jinja \(.*; set data.chat_template",
        ),
        (None, r"no chat template; set data.chat_template"),
        ("{{ messages | tojson }}", "starts and ends; set data.chat_template .*loop"),
        (
            (
                "{% set a %}{% for m in messages %} {{ m.content }} {% endfor %}{% endset %}{{ a | "
                "trim }}"
            ),
            "starts and",
        ),
        (
            (
                "{% for m in messages %}{{ 'A: ' + m.content }}{% endfor %}{% if "
                "add_generation_prompt %}Q: {% endif %}"
            ),
            (
                "starts an assistant's turn with 'A: hello there, 🎉 user', "
                "not with its generation prompt 'Q: '"
            ),
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            tokens_of(path, tokenizer_with(template))


def test_settings_that_do_not_fit_the_data_are_refused(tmp_path):
    path = write_records(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": TALK})
    sharegpt = write_records(tmp_path / "b.jsonl", *[{"conversations": [{"text": "hi"}]}] * 2)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "chat.jinja").write_text(templates.CHATML)
    for data, match in (
        (
            DataConfig(path=path, train_on="completion"),
            "data.train_on=completion .*format messages; use assistant",
        ),
        (
            DataConfig(path=tmp_path / "a.txt", train_on="assistant"),
            "train_on=assistant .*format text; use all",
        ),
        (
            DataConfig(path=tmp_path / "a.txt", format="messages"),
            "a.txt is .*data.format=messages; use auto",
        ),
        (
            DataConfig(path=path, format="text"),
            "line 1: has no field data.text_field=text; its fields are messages",
        ),
        (
            DataConfig(path=path, format="input_ids"),
            "input_ids, .*data.format=input_ids; .*or to auto",
        ),
        (
            DataConfig(path=sharegpt),
            r"message 1 has role null \(its fields are text; write role and content",
        ),
        (
            DataConfig(path=sharegpt, bad_records="skip"),
            r"no text .* \(skipped: 2 with an unknown role\)",
        ),
        (DataConfig(path=path), "no chat template; set"),
        (
            DataConfig(path=path, chat_template=tmp_path / "none"),
            r"data.chat_template=.*none cannot be read",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            check_data(data, 264)
    check_data(
        DataConfig(
            path=path, chat_template=tmp_path / "chat.jinja", context=64, validation_fraction=0
        ),
        264,
    )


def test_shards_and_tokens_depend_on_settings_and_template(tmp_path, tokenizer_with):
    path = write_records(tmp_path / "a.jsonl", {"messages": TALK})
    changes = [
        {},
        {"format": "messages"},
        {"train_on": "all"},
        {"train_on_eos": False},
        {"bad_records": "skip"},
    ]
    identities = {
        make_shards(find_files(path).files, ReadingConfig(**each))[0].identity for each in changes
    }
    assert len(identities) == len(changes)
    assert (
        len(
            {tokenizer_with(each).fingerprint for each in (None, templates.CHATML, templates.QWEN3)}
        )
        == 3
    )


def test_the_stop_token_is_found_in_the_template(tokenizer_with):
    assert tokenizer_with(templates.LLAMA3).chat.stop_token == "<|eot_id|>"
    assert tokenizer_with(templates.NEXT_TURN_AND_LAST).chat.stop_token == "<|end|>"
    assert tokenizer_with(templates.NEXT_TURN).chat.stop_token is None, "the last turn does not end"
    always = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|assistant|>"
    )
    assert tokenizer_with(always).chat.stop_token is None, "it opens the next answer"
    assert (
        tokenizer_with(
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        ).chat.stop_token
        is None
    )
