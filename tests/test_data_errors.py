"""User mistakes in data raise ConfigError with field, value and fix, in `check_data` where
possible."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ithaka.config import DataConfig
from ithaka.data.documents import read
from ithaka.data.open import check_data
from refusals import assert_refused
from test_data_sources import open_with_cache


def refuse(path, *named, fix, vocab_size=264, **settings):
    data = DataConfig(path=path, context=2, **settings)
    assert_refused(lambda: check_data(data, vocab_size), *named, fix=fix)


def test_missing_paths_are_refused(tmp_path):
    missing = tmp_path / "nowhere.txt"
    pattern = tmp_path / "*.jsonl"
    text = tmp_path / "a.txt"
    refuse(missing, f"data.path={missing}", fix="a file")
    refuse(pattern, f"data.path={pattern}", fix="a file")
    text.write_text("some text\nin lines\n")
    refuse(text, f"data.validation_path={missing}", fix="a file", validation_path=missing)


def test_empty_data_is_refused(tmp_path):
    refuse(tmp_path, f"data.path={tmp_path}", "no files", fix="UTF-8 text, JSONL")
    empty = tmp_path / "a.txt"
    rows = tmp_path / "b.jsonl"
    empty.write_text("")
    refuse(empty, f"data.path={empty}", "empty", fix="UTF-8 text, JSONL")
    rows.write_text('{"text": ""}\n\n')
    refuse(rows, f"data.path={rows}", "train", fix="add documents", validation_fraction=0)
    rows.write_text('{"text": "one row only"}\n')
    refuse(
        rows,
        f"data.validation_path={empty}",
        "empty",
        fix="UTF-8 text, JSONL",
        validation_path=empty,
    )
    rows.write_text('{"text": ""}\n{"text": "b"}\n')
    refuse(rows, "data.validation_fraction=0.02", "validate", fix="set it to 0")


CHATML = {"chat_template": Path("chatml")}
# a valid record, what makes it bad, the settings to read it, and what the message names
ONLY_RECORDS = [
    (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"messages": [{"role": "robot", "content": "Hi"}]},
        CHATML,
        "message 1 has role robot",
        "use system, user",
    ),
    (
        {"messages": [{"role": "assistant", "content": "Ho"}]},
        {"messages": [{"role": "assistant", "content": 5}]},
        CHATML,
        "message 1 has content other than text",
        "remove it",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                }
            ]
        },
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
            ]
        },
        CHATML,
        "message 1 calls a tool with arguments that are not JSON",
        "fix them",
    ),
    ({"text": "some text"}, {"text": 3}, {}, "data.text_field=text is int", "a field of text"),
    (
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"rejected": " "},
        {"train_on": "pairs"},
        "rejected is empty",
        "write an answer",
    ),
]


@pytest.mark.parametrize("record, change, settings, problem, fix", ONLY_RECORDS)
def test_the_only_record_is_trained_on_or_refused_for_what_is_wrong(
    tmp_path, record, change, settings, problem, fix
):
    """It is not held out for validation."""
    folder = tmp_path / "folder"
    array = tmp_path / "a.json"
    folder.mkdir()
    lines = folder / "a.jsonl"
    lines.write_text(json.dumps(record))
    array.write_text(json.dumps([record]))
    for path in (lines, folder, array):
        data = DataConfig(path=path, context=2, **settings)
        check_data(data, 264)
        assert open_with_cache(data).validation is None
    lines.write_text("\n" + json.dumps(record | change))
    array.write_text(json.dumps([record | change]))
    for path, location in (
        (lines, "a.jsonl line 2"),
        (folder, "a.jsonl line 2"),
        (array, "a.json record 1"),
    ):
        refuse(path, location, problem, fix=fix, **settings)


def test_the_only_record_of_a_source_is_trained_on(tmp_path):
    for name, count in (("one", 1), ("three", 3)):
        lines = [json.dumps({"text": f"some text {i}"}) + "\n" for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    data = DataConfig(
        sources=[{"path": tmp_path / f"{name}.jsonl"} for name in ("one", "three")], context=5
    )
    check_data(data, 264)
    opened = open_with_cache(data)
    assert {
        source for each in opened.validation_sequences(9) for source in each.sources.tolist()
    } == {1}
    assert {
        source for _ in range(9) for source in opened.stream.next_sequence().sources.tolist()
    } == {0, 1}


def test_a_text_alone_is_trained_on(tmp_path):
    """Its end is held out, but not all that follows its only newline."""
    (tmp_path / "a.txt").write_text("A title\n" + "and one line " * 100)
    for path in (tmp_path, tmp_path / "a.txt"):
        data = DataConfig(path=path, context=1000)
        check_data(data, 264)
        assert open_with_cache(data).validation is not None


def test_a_wrong_text_field_is_refused_with_file_line_and_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    table = tmp_path / "a.parquet"
    path.write_text('{"text": "x"}\n\n{"body": "y", "id": 1}\n')
    refuse(path, "a.jsonl line 3", "data.text_field=text", fix="body, id")
    refuse(path, "a.jsonl line 1", "data.text_field=content", fix="text", text_field="content")
    path.write_text('{"text": "x"}\n{"text": 3}\n')
    refuse(path, "a.jsonl line 2", "data.text_field=text", "int", fix="a field of text")
    path.write_text('{"text": "x"}\n{"text": null}\n')
    refuse(path, "a.jsonl line 2", "data.text_field=text", "null", fix="a field of text")
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), table)
    refuse(table, "a.parquet", "data.text_field=text", fix="body, n")
    settings = {"text_field": "n", "validation_fraction": 0}
    refuse(
        table, "row group 0 row 0", "data.text_field=n", "int", fix="a field of text", **settings
    )


def test_duplicate_keys_are_refused(tmp_path):
    lines = tmp_path / "a.jsonl"
    array = tmp_path / "a.json"
    lines.write_text('{"text": "x"}\n{"text": "y", "text": "z"}\n')
    refuse(lines, "a.jsonl line 2", '"text" occurs twice', fix="keep one")
    array.write_text('[{"text": "x"}, {"text": "y", "meta": {"id": 1, "id": 2}}]')
    refuse(array, "a.json", '"id" occurs twice', fix="keep one")


def test_equal_answers_of_a_pair_are_refused(tmp_path):
    pairs = tmp_path / "a.jsonl"
    good = {"prompt": "Why?", "chosen": " Because.", "rejected": " No."}
    pairs.write_text(
        "".join(json.dumps(pair) + "\n" for pair in (good, good | {"rejected": " Because."}))
    )
    refuse(
        pairs, "a.jsonl line 2", "chosen equals rejected", fix="drop the record", train_on="pairs"
    )


def test_broken_rows_are_refused_by_line(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    table = tmp_path / "a.parquet"
    broken = tmp_path / "b.parquet"
    path.write_text('{"text": "x"}\n{"text": \n')
    refuse(path, "a.jsonl line 2", "JSON", fix="one JSON object per line")
    path.write_text('["text"]\n')
    refuse(path, "a.jsonl line 1", "list", fix="JSON object")
    pq.write_table(pa.table({"text": ["x", None]}), table)
    refuse(table, "row group 0 row 1", "data.text_field=text", "null", fix="a field of text")
    broken.write_bytes(b"not parquet at all")
    refuse(broken, "b.parquet", "Parquet", fix="write it again")
    monkeypatch.setattr(read, "open_file", lambda path: io.BytesIO(b"not parquet at all"))
    streamed = read.File(Path("hf:/datasets/org/name@commit/c.parquet"), "parquet")
    assert_refused(
        lambda: read.make_shards([streamed], DataConfig()),
        "c.parquet",
        "Parquet",
        fix="write it again",
    )


BAD_RECORDS = [  # after a valid record: the settings to read it, and what the message names
    ({"text": ["x"]}, {}, "data.text_field=text is list", "a field of text"),
    ({"input_ids": [[1], [2, 3]]}, {}, "input_ids is not a list of integers", "write integers"),
    (
        {"instruction": ["Say"], "output": "x"},
        CHATML,
        "instruction or input is not text",
        "fix them",
    ),
    (
        {"instruction": "Say", "output": "x", "history": [["one"]]},
        CHATML,
        "history is not a list of pairs",
        "fix them",
    ),
    (
        {"instruction": "Say", "output": "x", "history": 7},
        CHATML,
        "history is not a list of pairs",
        "fix them",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "text"}]}]},
        CHATML,
        "message 1 has a part of type text without text",
        "remove the part",
    ),
    *(
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
                    }
                ]
            },
            CHATML,
            "message 1 has tool_calls that are not a list of",
            "fix them",
        )
        for arguments in ("5", '"{}"', [1])
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}],
                }
            ]
        },
        CHATML,
        "message 1 calls a tool with arguments that are not JSON",
        "fix them",
    ),
]


@pytest.mark.parametrize("record, settings, problem, fix", BAD_RECORDS)
def test_a_bad_record_is_refused_by_line(tmp_path, record, settings, problem, fix):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{json.dumps(record)}\n')
    refuse(tmp_path / "a.jsonl", "a.jsonl line 2", problem, fix=fix, **settings)


def test_json_nested_too_deeply_is_refused(tmp_path):
    nested = f'{{"text": {"[" * 10**5}{"]" * 10**5}}}'
    lines = tmp_path / "a.jsonl"
    array = tmp_path / "a.json"
    lines.write_text(f'{{"text": "x"}}\n{nested}\n')
    refuse(lines, "a.jsonl line 2", "recursion", fix="one JSON object per line")
    array.write_text(f"[{nested}]")
    refuse(array, "a.json", "recursion", fix="repair it")


def test_what_is_not_a_file_is_named(tmp_path):
    pipe = tmp_path / "pipe"
    link = tmp_path / "link.txt"
    os.mkfifo(pipe)
    link.symlink_to("gone")
    for path in (pipe, link, Path("/dev/zero")):
        refuse(path, f"data.path={path} is not a regular file", fix="a file")
    refuse(tmp_path, "link.txt (not a regular file), pipe (not a regular file)", fix="UTF-8 text")
    (tmp_path / "gone.json").symlink_to("gone")
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 2)
    check_data(DataConfig(path=tmp_path, context=2), 264)
    for name in ("a.jsonl", "gone.json"):
        (tmp_path / name).unlink()
    (tmp_path / "loop").symlink_to("loop")
    refuse(tmp_path / "loop", "data.path=", "Too many levels of symbolic links", fix="another path")
    refuse(Path("a\0b"), "data.path=", "null byte", fix="another path")
    refuse(Path("x" * 300), "data.path=", "File name too long", fix="another path")


def test_a_damaged_row_group_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{'word ' * 2000}{i}" for i in range(50)]}), path)
    path.write_bytes(path.read_bytes()[:4] + b"\xff" * 600 + path.read_bytes()[604:])
    refuse(path, "a.parquet row group 0 cannot be read", fix="copy the file again")


def test_an_empty_chat_template_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}')
    (tmp_path / "chat.jinja").write_text("\n")
    template = tmp_path / "chat.jinja"
    refuse(
        tmp_path / "a.jsonl",
        f"data.chat_template={template}",
        "empty",
        fix="built-in",
        chat_template=template,
    )


def test_a_bad_line_far_into_a_file_is_named_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "SHARD_BYTES", 100)
    lines = [json.dumps({"text": f"line {i}"}) for i in range(1, 101)]
    lines[76] = '{"txt": "?"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = DataConfig(path=tmp_path / "a.jsonl", context=8, validation_fraction=0)
    check_data(data, 264)
    stream = open_with_cache(data)

    def read_epoch():
        while stream.position.epoch == 0:
            stream.next_batch()

    assert_refused(read_epoch, "line 77", "data.text_field=text", fix="txt")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nso far \xff")
    refuse(
        tmp_path / "a.txt", f"data.path={tmp_path / 'a.txt'}", "not UTF-8", fix="UTF-8 text, JSONL,"
    )
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    refuse(tmp_path / "a.jsonl.gz", "a.jsonl.gz", "not UTF-8", fix="JSONL")
    (tmp_path / "a.npy").write_bytes(b"tokens")
    refuse(tmp_path / "a.npy", "a.npy", "(.npy", fix="JSONL")


def test_nul_bytes_are_refused_with_their_position(tmp_path):
    (tmp_path / "a.txt").write_text("ab", encoding="utf-16-le")
    refuse(tmp_path / "a.txt", "data.path=", "a.txt", "byte 1", "UTF-16", fix="UTF-8 text, JSONL,")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "a\0b"}\n')
    refuse(tmp_path / "a.jsonl", "a.jsonl line 2", "byte 11", fix="UTF-8")


def test_less_than_a_sequence_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("123456789")
    data = DataConfig(path=tmp_path / "a.txt", context=10, validation_fraction=0)
    check_data(data, 264)
    longer = replace(data, context=11)
    named = "a.txt", "10 tokens", "data.context=11"
    assert_refused(lambda: check_data(longer, 264), *named, fix="add data, or")
