"""What a user can get wrong is a ConfigError with field, value and way out, seen by `check` if it can be."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ithaka.config import ConfigError, DataConfig
from ithaka.data import read
from ithaka.data.open import check, load_tokenizer, open_data
from ithaka.data.tokenizer import ByteTokenizer


def refuse(match, path, vocab_size=264, **settings):
    with pytest.raises(ConfigError, match=match):
        check(DataConfig(path=path, **settings), vocab_size)


def test_missing_paths(tmp_path):
    refuse(r"data.path=.*nowhere.txt does not exist; give", tmp_path / "nowhere.txt")
    refuse(r"data.path=.*\*\.jsonl does not exist", tmp_path / "*.jsonl")
    (tmp_path / "a.txt").write_text("some text\nin lines\n")
    refuse("nowhere does not exist", tmp_path / "a.txt", validation_path=tmp_path / "nowhere")


def test_empty_data(tmp_path):
    refuse("holds no text, JSONL", tmp_path)
    (tmp_path / "a.txt").write_text("")
    refuse(r"data.path=.*a.txt holds no text to train on", tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n')
    refuse("holds no text to train on", tmp_path / "a.jsonl", validation_fraction=0)
    (tmp_path / "b.jsonl").write_text('{"text": "one row only"}\n')
    refuse("holds no text to train on; give a path with more documents", tmp_path / "b.jsonl")
    refuse("data.validation_path=.*a.txt holds no text", tmp_path / "b.jsonl", validation_path=tmp_path / "a.txt")
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n{"text": "b"}\n')
    refuse("data.validation_fraction=0.02 of .* holds no text to validate on; raise it", tmp_path / "c.jsonl")
    np.save(tmp_path / "a.npy", np.zeros(0, np.uint16))
    refuse("holds no text to train on", tmp_path / "a.npy")


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
    refuse(r"data.text_field=n is int64, not a string", tmp_path / "a.parquet", text_field="n")


def test_broken_rows_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": \n')
    refuse(r"a.jsonl line 2: not JSON", path)
    path.write_text('["text"]\n')
    refuse(r"a.jsonl line 1: a list, not a JSON object", path)
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "a.parquet")
    refuse(r"row group 0 row 1: data.text_field=text is null", tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    refuse(r"b.parquet cannot be read as Parquet", tmp_path / "b.parquet")


def test_a_bad_line_far_into_a_file_is_named_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "SHARD_BYTES", 100)
    lines = [json.dumps({"text": f"line {i}"}) for i in range(1, 101)]
    lines[76] = '{"txt": "?"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = DataConfig(path=tmp_path / "a.jsonl", context=8, validation_fraction=0)
    check(data, 264)
    stream = open_data(data, tokenizer=ByteTokenizer(), seed=0)
    with pytest.raises(ConfigError, match=r"line 77: has no field data.text_field=text; its fields are txt"):
        while stream.position.epoch == 0:
            stream.next_batch()


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nso far \xff")
    refuse(r"a.txt is not UTF-8 text at byte 12; convert it", tmp_path / "a.txt", validation_fraction=0)
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    refuse(r"a.jsonl.gz cannot be read: .gz; decompress it", tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("bad", [264, 65535, -1])
def test_token_ids_outside_the_vocabulary_are_named_with_their_position(tmp_path, bad):
    tokens = np.full(3_000_000, 7, dtype=np.int32)
    tokens[2_500_000] = bad
    np.save(tmp_path / "a.npy", tokens)
    refuse(rf"a.npy: token {bad} at position 2500000 is outside the model's vocab_size=264", tmp_path / "a.npy")


def test_arrays_that_are_not_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(5))
    refuse(r"a.npy holds float64 \[5\]; token arrays are 1-D integers", tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.zeros((2, 3), int))
    refuse(r"a.npy holds int64 \[2x3\]", tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    refuse(r"a.npy cannot be read as a NumPy array", tmp_path / "a.npy")
    (tmp_path / "a.bin").write_bytes(b"abc")
    refuse(r"a.bin is not a whole number of uint16 tokens", tmp_path / "a.bin")
    (tmp_path / "a.npz").write_bytes(b"")
    refuse(r"a.npz cannot be read: .npz; save its array with numpy.save", tmp_path / "a.npz")


def test_token_arrays_need_no_tokenizer(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 0, 4, 5, 6, 7]))
    (tmp_path / "config.json").write_text("{}")
    data = DataConfig(path=tmp_path / "a.npy", context=4, validation_fraction=0)
    assert load_tokenizer(data, tmp_path) is None
    assert check(data, 10, tmp_path) is None
    stream = open_data(data, tokenizer=None, seed=0, vocab_size=10, eos_id=0)
    batches = [stream.next_batch() for _ in range(2)]
    assert [batch.document_ids.tolist() for batch in batches] == [[[0] * 4], [[0] * 4]]
    assert sorted(batch.input_ids[0].tolist() for batch in batches) == [[1, 2, 3, 0], [4, 5, 6, 7]]
