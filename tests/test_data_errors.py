"""User mistakes in data raise ConfigError with field, value and fix, in `check_data` where possible."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ithaka.config import DataConfig
from ithaka.data import read
from ithaka.data.open import check_data
from refusals import assert_refused
from test_data_sources import open_with_cache


def refuse(path, *named, fix, vocab_size=264, **settings):
    data = DataConfig(path=path, context=2, **settings)
    assert_refused(lambda: check_data(data, vocab_size), *named, fix=fix)


def test_missing_paths_are_refused(tmp_path):
    missing, pattern, text = tmp_path / "nowhere.txt", tmp_path / "*.jsonl", tmp_path / "a.txt"
    refuse(missing, f"data.path={missing}", fix="a file")
    refuse(pattern, f"data.path={pattern}", fix="a file")
    text.write_text("some text\nin lines\n")
    refuse(text, f"data.validation_path={missing}", fix="a file", validation_path=missing)


def test_empty_data_is_refused(tmp_path):
    refuse(tmp_path, f"data.path={tmp_path}", "no files", fix="UTF-8 text, JSONL")
    empty, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    empty.write_text("")
    refuse(empty, f"data.path={empty}", "empty", fix="UTF-8 text, JSONL")
    rows.write_text('{"text": ""}\n\n')
    refuse(rows, f"data.path={rows}", "train", fix="add documents", validation_fraction=0)
    rows.write_text('{"text": "one row only"}\n')
    refuse(rows, f"data.path={rows}", "train", fix="data.validation_fraction=0")
    refuse(rows, f"data.validation_path={empty}", "empty", fix="UTF-8 text, JSONL", validation_path=empty)
    rows.write_text('{"text": ""}\n{"text": "b"}\n')
    refuse(rows, "data.validation_fraction=0.02", "validate", fix="set it to 0")


def test_a_wrong_text_field_is_refused_with_file_line_and_fields(tmp_path):
    path, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
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
    refuse(table, "row group 0 row 0", "data.text_field=n", "int", fix="a field of text", **settings)


def test_duplicate_keys_are_refused(tmp_path):
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text('{"text": "x"}\n{"text": "y", "text": "z"}\n')
    refuse(lines, "a.jsonl line 2", '"text" occurs twice', fix="keep one")
    array.write_text('[{"text": "x"}, {"text": "y", "meta": {"id": 1, "id": 2}}]')
    refuse(array, "a.json", '"id" occurs twice', fix="keep one")


def test_equal_answers_of_a_pair_are_refused(tmp_path):
    pairs = tmp_path / "a.jsonl"
    good = {"prompt": "Why?", "chosen": " Because.", "rejected": " No."}
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in (good, good | {"rejected": " Because."})))
    refuse(pairs, "a.jsonl line 2", "chosen equals rejected", fix="drop the record", train_on="pairs")


def test_broken_rows_are_refused_by_line(tmp_path, monkeypatch):
    path, table, broken = tmp_path / "a.jsonl", tmp_path / "a.parquet", tmp_path / "b.parquet"
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
    assert_refused(lambda: read.make_shards([streamed], DataConfig()), "c.parquet", "Parquet", fix="write it again")


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
    refuse(tmp_path / "a.txt", f"data.path={tmp_path / 'a.txt'}", "not UTF-8", fix="UTF-8 text, JSONL,")
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
