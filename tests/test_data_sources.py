"""Every file format yields its documents, read at once or in shards; the split uses each document
once."""

import json
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ithaka.config import DataConfig, ReadingConfig
from ithaka.data.cache import TokenCache
from ithaka.data.documents import read
from ithaka.data.documents.files import find_files
from ithaka.data.documents.read import make_shards, read_content
from ithaka.data.documents.split import make_split
from ithaka.data.open import check_data, open_data
from ithaka.data.tokenizer import ByteTokenizer, Tokenizer
from test_data_tokenizer import word_tokenizer

BYTES = ByteTokenizer()
EOS = 257
TEXTS = [f"document {i} " + "é" * i for i in range(200)]


def documents_of(path, split=None, tokenizer=BYTES, field="text"):
    """The documents of a path, each without its eos."""
    shards = make_shards(find_files(path).files, ReadingConfig(field), split)
    documents = []
    with tempfile.TemporaryDirectory() as folder:
        for loaded in map(TokenCache(Path(folder), tokenizer).load, shards):
            assert loaded.lengths.sum() == len(loaded.tokens)
            documents += [
                part.tolist()
                for part in np.split(loaded.tokens, np.cumsum(loaded.lengths)[:-1])
                if len(part)
            ]
    return [
        bytes(d[:-1]) if d[-1] == EOS and max(d[:-1], default=0) < 256 else tuple(d)
        for d in documents
    ]


def open_with_cache(data, seed=0, **settings):
    """Open data with a token cache that is deleted together with the stream."""
    folder = tempfile.TemporaryDirectory()
    stream = open_data(data, tokenizer=BYTES, seed=seed, cache_dir=Path(folder.name), **settings)
    stream.folder = folder
    return stream


def write_jsonl(path: Path, texts, field="text") -> Path:
    path.write_text(
        "".join(
            json.dumps({"id": i, field: t}, ensure_ascii=i % 2 == 0) + "\n"
            for i, t in enumerate(texts)
        )
    )
    return path


def write_parquet(path: Path, texts, field="text", kind=None, **settings) -> Path:
    kind = kind or pa.string()
    table = pa.table({"id": list(range(len(texts))), field: pa.array(texts).cast(kind)})
    pq.write_table(table, path, **settings)
    return path


def encode_texts(texts):
    return [text.encode() for text in texts]


def test_standard_library_is_the_default():
    files = find_files(None).files
    folder = sysconfig.get_path("stdlib")
    names = [file.path.relative_to(folder).as_posix() for file in files]
    assert len(files) > 100 and names == sorted(names) and "json/decoder.py" in names
    assert not {part for name in names for part in name.split("/")} & {
        "site-packages",
        "__pycache__",
        "test",
    }
    check_data(DataConfig(), 264)
    batch = open_with_cache(DataConfig(context=256)).next_batch()
    assert batch.input_ids.shape == (1, 256)


@pytest.mark.parametrize("piece_bytes", [7, 64, 1 << 20])
def test_a_text_file_is_one_document_for_any_piece_size(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(read, "TEXT_CHUNK_BYTES", piece_bytes)
    text = "one line\r\nand another é\n\n" * 5 + "日本語🎉" * 20 + "\nlast"
    path = tmp_path / "book.txt"
    path.write_bytes(text.encode())
    assert documents_of(path) == [text.encode()]


@settings(max_examples=20, deadline=None)
@given(text=st.text(min_size=2), size=st.integers(5, 20))
def test_cuts_fall_between_characters(tmp_path_factory, text, size):
    raw = text.encode()
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(raw)
    kept = read._find_cut(path, 0, min(size, len(raw)))
    assert 0 < kept <= size
    raw[:kept].decode()


def test_a_directory_yields_its_text_files_sorted_and_ignores_others(tmp_path):
    for name, content in {
        "b.py": b"b",
        "a/z.md": b"z",
        "a.txt": "é".encode(),
        "empty.txt": b"",
        ".hidden": b"h",
        ".git/x": b"x",
        "image.png": b"\x89PNG\0\0",
        "latin.txt": "é".encode("latin-1"),
        "late.txt": b"a" * 9000 + b"\xff",
        "weights.bin": b"ab",
        "__pycache__/c.py": b"c",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert documents_of(tmp_path) == [b"z", "é".encode(), b"b"]


@pytest.mark.parametrize("shard_bytes", [1, 10, 37, 500, 1 << 21])
def test_jsonl_gives_each_line_once_for_any_shard_size(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(read, "SHARD_BYTES", shard_bytes)
    texts = [*TEXTS[:9], "x" * 700, "", "multi\nline"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    path.write_bytes(
        path.read_bytes().rstrip(b"\n") if shard_bytes == 37 else path.read_bytes() + b"\n  \n"
    )
    assert documents_of(path) == encode_texts(text for text in texts if text)


def test_jsonl_lines_far_longer_than_a_block_are_read(tmp_path):
    texts = ["short", "long " * 1_000_000, "short again"]
    assert documents_of(write_jsonl(tmp_path / "a.ndjson", texts)) == encode_texts(texts)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_gives_each_row_once(tmp_path, kind):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, "content", kind, row_group_size=150)
    assert documents_of(path, field="content") == encode_texts(TEXTS)


def test_globs_are_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert documents_of(tmp_path / "*.txt") == [b"a.txt", b"b.txt"]


def test_a_model_tokenizer_gives_bos_and_eos_to_each_document(tmp_path):
    tokenizer = Tokenizer(word_tokenizer(adds_bos=True))
    path = write_jsonl(tmp_path / "a.jsonl", ["a b", "c"])
    assert documents_of(path, tokenizer=tokenizer) == [(1, 3, 4, 2), (1, 5, 2)]
    (tmp_path / "a.txt").write_text("a\nb c")
    assert documents_of(tmp_path / "a.txt", tokenizer=tokenizer) == [(1, 3, 4, 5, 2)]


def split(path, fraction, **how):
    train = make_split([read_content(find_files(path).files, ReadingConfig(), fraction)])
    return [
        documents_of(path, split=side, **how) for side in (train, replace(train, held_out=True))
    ]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_rows_are_on_one_side_of_the_split(tmp_path, write):
    path = write(tmp_path / f"a.{'jsonl' if write is write_jsonl else 'parquet'}", TEXTS)
    train, held_out = split(path, 0.2)
    assert sorted(train + held_out) == sorted(encode_texts(TEXTS))
    assert 20 <= len(held_out) <= 60
    few = write(path, TEXTS[:3])
    assert [len(side) for side in split(few, 0.001)] == [2, 1]


@pytest.mark.parametrize(
    ("count", "fraction", "low", "high"), [(2, 0.01, 1, 1), (50, 0.2, 5, 15), (3, 0.99, 2, 2)]
)
def test_text_files_are_on_one_side_of_the_split(tmp_path, count, fraction, low, high):
    """By content, so the number is random."""
    for i in range(count):
        (tmp_path / f"{i:03}.txt").write_text(TEXTS[i])
    train, held_out = split(tmp_path, fraction)
    assert (
        sorted(train + held_out) == sorted(encode_texts(TEXTS[:count]))
        and low <= len(held_out) <= high
    )


@settings(max_examples=100, deadline=None)
@example(text="00\n", fraction=0.25)  # the newline is at the cut
@given(
    text=st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=3),
    fraction=st.floats(0.01, 0.9),
)
def test_the_end_of_a_single_text_file_is_held_out(tmp_path_factory, text, fraction):
    path = tmp_path_factory.mktemp("split") / "a.txt"
    path.write_bytes(text.encode())
    train, held_out = split(path, fraction)
    assert b"".join(train + held_out) == text.encode()
    assert held_out


def test_a_large_text_is_cut_after_newlines_and_only_its_end_has_eos(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "PART_BYTES", 200)
    monkeypatch.setattr(read, "TEXT_CHUNK_BYTES", 64)
    texts = {
        "a.txt": "small a",
        "b.txt": "".join(f"line {i}\n" for i in range(100)),
        "c.txt": "small c",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    first, *parts, end, last = documents_of(tmp_path)
    assert (first, last) == (b"small a", b"small c")
    assert b"".join(map(bytes, [*parts, end])) == texts["b.txt"].encode() and len(parts) == 3
    # without eos
    assert all(isinstance(part, tuple) and part[-1] == 10 and len(part) <= 200 for part in parts)
    for seed in range(4):
        data = open_with_cache(DataConfig(path=tmp_path, context=1024, validation_fraction=0), seed)
        batch = data.next_batch()
        documents = [
            tuple(batch.input_ids[batch.document_ids == i].tolist()) for i in range(len(parts) + 3)
        ]
        assert sorted(documents) == sorted([*parts, *((*text, EOS) for text in (first, end, last))])
