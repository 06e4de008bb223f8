"""Conversations longer than data.context, in every mode of data.long_documents."""

import json

import numpy as np
import pytest

import templates
from grids import diagonal
from ithaka.config import DataConfig
from ithaka.data import stream as data_stream
from ithaka.data.open import describe_data, open_data
from ithaka.data.stored_tokens import encode_tokens
from ithaka.data.tokenizer import Tokenizer
from templates import chat_tokenizer

CONTEXT = 48
MARKER = "[...]"
MODES = ("split", "drop", "end", "turns", "shorten_tools")
TOKENIZER = Tokenizer(chat_tokenizer(templates.CHATML))


def trace(seed, turns=6, output=40):
    """A system prompt, then questions, calls, tool outputs of `output` words and answers."""
    rng = np.random.default_rng(seed)

    def words(count):
        return " ".join(map(str, rng.integers(0, 10, count)))

    messages = [{"role": "system", "content": "be kind"}]
    for _ in range(turns):
        messages += [
            {"role": "user", "content": words(4)},
            {"role": "assistant", "content": words(5)},
        ]
        messages += [
            {"role": "tool", "content": words(output)},
            {"role": "assistant", "content": words(3)},
        ]
    return messages


def encode(message):
    """The tokens of one message, as in Documents. Special tokens separate messages, so each is
    tokenized alone."""
    header = TOKENIZER.encode_batch([f"<|im_start|>{message['role']}\n"])[0].tolist()
    content, end = (
        TOKENIZER.encode_batch([text])[0].tolist()
        for text in (f"{message['content']}<|im_end|>", "\n")
    )
    trains = message["role"] == "assistant"
    return (
        [~token for token in header]
        + [token if trains else ~token for token in content]
        + [~t for t in end]
    )


def expected_pieces(messages, mode):
    """Cut a conversation as the documentation says."""
    head, *parts = map(encode, messages)
    room = CONTEXT - len(head)
    if mode == "shorten_tools":
        marker = [~token for token in TOKENIZER.encode_batch([MARKER])[0].tolist()]
        for i, part in enumerate(parts):
            if messages[i + 1]["role"] == "tool" and len(part) > 20 + len(marker):
                parts[i] = part[:10] + marker + part[-10:]
    flat = head + sum(parts, [])
    if mode in ("split", "shorten_tools"):
        pieces = [flat[low : low + CONTEXT] for low in range(0, len(flat), CONTEXT)]
    elif mode == "end":
        kept = []
        while parts and len(kept) + len(parts[-1]) <= room:
            kept = parts.pop() + kept
        pieces = [head + (kept or flat[-room:])]
    else:
        pieces = [[]]
        for part in parts:
            if len(pieces[-1]) + len(part) > room and pieces[-1]:
                pieces.append([])
            for token in part:
                if len(pieces[-1]) == room:
                    pieces.append([])
                pieces[-1].append(token)
        pieces = [head + piece for piece in pieces]
    return [piece for piece in pieces if max(piece) >= 0]


def write_conversations(path, conversations):
    path.write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    )
    return path


def open_stream(tmp_path, mode, context=CONTEXT, tokenizer=TOKENIZER, **settings):
    data = DataConfig(
        **settings,
        context=context,
        long_documents=mode,
        tool_tokens=20,
        tool_marker=MARKER,
        validation_fraction=0,
    )
    return open_data(data, tokenizer=tokenizer, seed=3, cache_dir=tmp_path / "tokens")


def documents_of(sequence):
    edges = [*sequence.starts.tolist(), sequence.length]
    return [
        tuple(encode_tokens(sequence.ids, sequence.targets >= 0)[low:high].tolist())
        for low, high in zip(edges, edges[1:], strict=False)
    ]


@pytest.mark.parametrize("mode", ["split", "end", "turns", "shorten_tools"])
@pytest.mark.parametrize("output", [8, 60])
def test_long_conversations_are_cut_as_documented(tmp_path, mode, output):
    conversations = [trace(seed, output=output) for seed in range(5)]
    data = open_stream(
        tmp_path, mode, path=write_conversations(tmp_path / "a.jsonl", conversations)
    )
    packed = data.stream.current_round()
    pieces = [
        piece for i in range(len(packed)) for piece in documents_of(data.stream.get_sequence(i))
    ]
    expected = [
        tuple(piece) for messages in conversations for piece in expected_pieces(messages, mode)
    ]
    summary = describe_data(data, 1)
    data.close()
    assert sorted(pieces) == sorted(expected) and packed.num_left_out == 0
    lost = sum(len(encode(m)) for messages in conversations for m in messages) - sum(
        map(len, expected)
    )
    if mode == "turns":  # every piece repeats the head
        lost += sum(
            (len(expected_pieces(messages, mode)) - 1) * len(encode(messages[0]))
            for messages in conversations
        )
    assert (f"{data.stream.documents.removed_tokens:,} tokens" in summary.get("cut", "")) == (
        data.stream.documents.removed_tokens > 0
    )
    assert data.stream.documents.removed_tokens == lost
    if mode == "split" and output == 60:
        assert "pieces of long documents: no token to train on" in summary["unlabelled"]


def test_tool_outputs_are_not_shortened_where_they_are_trained(tmp_path):
    conversations = [trace(seed, turns=1, output=60) for seed in range(2)]
    data = open_stream(
        tmp_path,
        "shorten_tools",
        path=write_conversations(tmp_path / "a.jsonl", conversations),
        train_on="all",
    )
    data.stream.current_round()
    data.close()
    assert data.stream.documents.removed_tokens == 0 and data.stream.num_long == 2


def test_a_checkpoint_depends_on_shared_prefixes_only_with_several_samples_per_record(tmp_path):
    data = open_stream(
        tmp_path, "shorten_tools", path=write_conversations(tmp_path / "a.jsonl", [trace(0)])
    )
    before = data.fingerprint()
    data.stream.long = data.stream.long._replace(shares=not data.stream.long.shares)
    data.close()
    assert data.fingerprint() == before


def test_a_conversation_whose_system_prompt_fills_the_context_is_split(tmp_path):
    messages = [{"role": "system", "content": "the " * 60}, *trace(0, turns=1)[1:]]
    data = open_stream(
        tmp_path, "turns", path=write_conversations(tmp_path / "a.jsonl", [messages, messages])
    )
    packed = data.stream.current_round()
    packed_pieces = {
        piece for i in range(len(packed)) for piece in documents_of(data.stream.get_sequence(i))
    }
    data.close()
    flat = sum(map(encode, messages), [])
    pieces = [tuple(flat[low : low + CONTEXT]) for low in range(0, len(flat), CONTEXT)]
    assert packed_pieces == {piece for piece in pieces if max(piece) >= 0} and len(
        packed_pieces
    ) < len(pieces)
    (tmp_path / "a.txt").write_text("the " * 100)
    for mode in ("end", "turns", "shorten_tools"):
        data = open_stream(tmp_path, mode, path=tmp_path / "a.txt")
        data.stream.current_round()
        data.close()
        assert data.stream.num_long == 1 and data.stream.documents.removed_tokens == 0


REASONING = [{"turns": "all"}, {"turns": "last"}, {"loss": False}, {"drop": True}]


# Reasoning is rendered before documents are cut, so two modes are enough.
@pytest.mark.parametrize(
    "mode, reasoning", [*((mode, None) for mode in MODES), *diagonal(("split", "turns"), REASONING)]
)
def test_resume_is_bitwise_in_every_mode(tmp_path, mode, reasoning, monkeypatch):
    monkeypatch.setattr(data_stream, "ROUND_TOKENS", 0)
    monkeypatch.setattr(data_stream, "ROUND_SEQUENCES", 4)
    monkeypatch.setattr(data_stream, "ROUND_STEPS", 1)
    conversations = [trace(seed, turns=1 + seed % 4, output=3 + seed % 30) for seed in range(12)]
    if reasoning is not None:
        conversations = [
            [{**m, "thinking": "the 1"} if m["role"] == "assistant" else m for m in c]
            for c in conversations
        ]
    path = write_conversations(
        tmp_path / "a.jsonl", conversations + [messages[1:3] for messages in conversations]
    )
    settings = {"path": path, **({} if reasoning is None else {"reasoning": reasoning})}
    tokenizer = TOKENIZER if reasoning is None else Tokenizer(chat_tokenizer(templates.QWEN3))
    data = open_stream(tmp_path, mode, tokenizer=tokenizer, **settings)
    if reasoning == {"turns": "all"}:
        notes = (data.stream.current_round(), data.stream.sources[0].count("notes"))[1]
        assert notes["samples of unrolled conversations"] > 0
    batches = []
    states = [data.state_dict()]
    for _ in range(24):
        batches.append(data.next_batch())
        states.append(data.state_dict())
    data.close()
    for step in (0, 1, 5, 11, 17):
        resumed = open_stream(tmp_path, mode, tokenizer=tokenizer, **settings)
        resumed.load_state_dict(json.loads(json.dumps(states[step])))
        for batch in batches[step : step + 6]:
            again = resumed.next_batch()
            assert all(
                np.array_equal(one, other) for one, other in zip(batch[:3], again[:3], strict=True)
            ), step
        resumed.close()
    # With another context, the rest of the round is packed again.
    if mode == "turns" and reasoning is None:
        resumed = open_stream(tmp_path, mode, context=32, tokenizer=tokenizer, **settings)
        resumed.load_state_dict(states[5])
        assert resumed.next_batch().input_ids.shape == (1, 32)
        resumed.close()


def test_mixtures_keep_their_proportions_after_pieces_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(data_stream, "ROUND_TOKENS", 1 << 12)
    long = write_conversations(
        tmp_path / "long.jsonl", [trace(seed, turns=3, output=120) for seed in range(40)]
    )
    short = write_conversations(
        tmp_path / "short.jsonl", [trace(seed, turns=1, output=5) for seed in range(400)]
    )
    sources = [{"path": long, "weight": 3}, {"path": short, "weight": 1}]
    data = open_stream(tmp_path, "split", sources=sources)
    packed = data.stream.current_round()
    assert data.stream.documents.pieces_left_out > 50
    tokens = np.zeros(2)
    for i in range(len(packed)):
        sequence = data.stream.get_sequence(i)
        tokens += np.bincount(sequence.source_ids()[: sequence.length], minlength=2)
    data.close()
    assert abs(tokens[0] / tokens.sum() - 0.75) < 0.02
