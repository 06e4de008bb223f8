"""User mistakes in data raise ConfigError with field, value and way out, in `check_data` where possible."""

import json
from contextlib import nullcontext

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ithaka.config import ConfigError, DataConfig
from ithaka.data import read
from ithaka.data.open import check_data
from test_data_sources import opened_at


def refuse(match, path, vocab_size=264, **settings):
    with pytest.raises(ConfigError, match=match):
        check_data(DataConfig(path=path, context=2, **settings), vocab_size)


def test_missing_paths(tmp_path):
    refuse(r"data.path=.*nowhere.txt does not exist; .*a file", tmp_path / "nowhere.txt")
    refuse(r"data.path=.*\*\.jsonl does not exist", tmp_path / "*.jsonl")
    (tmp_path / "a.txt").write_text("some text\nin lines\n")
    refuse("nowhere does not exist", tmp_path / "a.txt", validation_path=tmp_path / "nowhere")


def test_empty_data(tmp_path):
    refuse("data.path=.*contains no files; .*UTF-8 text, JSONL", tmp_path)
    (tmp_path / "a.txt").write_text("")
    refuse(r"data.path=.*a.txt cannot be read \(empty\)", tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n')
    refuse(r"data.path=.*no text to train on", tmp_path / "a.jsonl", validation_fraction=0)
    (tmp_path / "b.jsonl").write_text('{"text": "one row only"}\n')
    refuse(
        "data.path=.*no text to train on; .*data.validation_fraction=0",
        tmp_path / "b.jsonl",
    )
    refuse("data.validation_path=.*a.txt cannot be read", tmp_path / "b.jsonl", validation_path=tmp_path / "a.txt")
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n{"text": "b"}\n')
    refuse("data.validation_fraction=0.02 of .*no text to validate on; .*set it to 0", tmp_path / "c.jsonl")


def test_wrong_text_field_names_file_line_and_fields(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n\n{"body": "y", "id": 1}\n')
    refuse(r"a.jsonl line 3: has no field data.text_field=text; its fields are body, id", path)
    refuse(
        r"a.jsonl line 1: has no field data.text_field=content; its fields are text",
        path,
        text_field="content",
    )
    path.write_text('{"text": "x"}\n{"text": 3}\n')
    refuse(r"a.jsonl line 2: data.text_field=text is int, not a string", path)
    path.write_text('{"text": "x"}\n{"text": null}\n')
    refuse(r"a.jsonl line 2: data.text_field=text is null", path)
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    refuse(r"a.parquet has no field data.text_field=text; its fields are body, n", tmp_path / "a.parquet")
    settings = {"text_field": "n", "validation_fraction": 0}
    refuse(r"row group 0 row 0: data.text_field=n is int, not a string", tmp_path / "a.parquet", **settings)


def test_broken_rows_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": \n')
    refuse(r"a.jsonl line 2: not JSON", path)
    path.write_text('["text"]\n')
    refuse(r"a.jsonl line 1: a list.*JSON object", path)
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "a.parquet")
    refuse(r"row group 0 row 1: data.text_field=text is null", tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    refuse(r"b.parquet .*Parquet.*write it again", tmp_path / "b.parquet")


def test_a_bad_line_far_into_a_file_is_named_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "SHARD_BYTES", 100)
    lines = [json.dumps({"text": f"line {i}"}) for i in range(1, 101)]
    lines[76] = '{"txt": "?"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = DataConfig(path=tmp_path / "a.jsonl", context=8, validation_fraction=0)
    check_data(data, 264)
    stream = opened_at(data)
    with pytest.raises(ConfigError, match=r"line 77: has no field data.text_field=text; its fields are txt"):
        while stream.position.epoch == 0:
            stream.next_batch()


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nso far \xff")
    refuse(r"data.path=.*a.txt cannot be read \(not UTF-8 text\); .*UTF-8 text, JSONL,", tmp_path / "a.txt")
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    refuse(r"a.jsonl.gz cannot be read \(not UTF-8 text\)", tmp_path / "a.jsonl.gz")
    (tmp_path / "a.npy").write_bytes(b"tokens")
    refuse(r"a.npy cannot be read \(.npy .*\); .*JSONL", tmp_path / "a.npy")


def test_nul_bytes_are_named_with_their_place(tmp_path):
    (tmp_path / "a.txt").write_text("ab", encoding="utf-16-le")
    refuse(r"data.path=.*a.txt cannot be read \(NUL at byte 1, .*UTF-16\); .*UTF-8 text, JSONL,", tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "a\0b"}\n')
    refuse(r"a.jsonl line 2: NUL at its byte 11; write UTF-8", tmp_path / "a.jsonl")


def test_less_than_a_sequence_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("123456789")
    match = r"a.txt .*10 tokens.*data.context=11; add data, or .*data.context"
    for context in (11, 10):
        with pytest.raises(ConfigError, match=match) if context == 11 else nullcontext():
            check_data(DataConfig(path=tmp_path / "a.txt", context=context, validation_fraction=0), 264)
