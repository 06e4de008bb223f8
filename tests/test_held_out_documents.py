"""No copy of a held-out document is trained on: in no file, format, source or entry of a
curriculum."""

import json
import shutil
from dataclasses import replace

import pytest

from ithaka.config import DataConfig, parse_config
from ithaka.data import stream as data_stream
from ithaka.data.documents import read
from ithaka.data.documents.split import SourceContent, Split, hash_content, make_split
from ithaka.data.held_out import find_data
from ithaka.data.open import check_data, describe_data
from ithaka.run.draft import Request
from ithaka.run.road import prepare_run
from refusals import assert_refused
from runs import MODEL
from test_data_sources import BYTES, TEXTS, open_with_cache, write_jsonl, write_parquet


def texts_of(shards):
    """The texts of all documents; chunks of a text are joined."""
    texts = []
    for document in (document for shard in shards for document in shard.documents(BYTES)):
        texts += [""] if document.is_start else []
        texts[-1] += document.text
    return texts


def split(data, datasets=()):
    """The documents of all sources to train on, and those to validate on."""
    found = find_data(data, datasets)
    train = [shard for source in found.sources for shard in source.train]
    return texts_of(train), texts_of([shard for shards in found.held_out for shard in shards])


def write_pair(folder):
    for name in ("a", "b"):
        write_jsonl(folder / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS])
    return folder / "*.jsonl"


def test_overlapping_sources_train_on_nothing_that_is_held_out(tmp_path):
    both = write_pair(tmp_path)
    sources = [{"path": both}, {"path": tmp_path / "b.jsonl"}]
    train, held_out = split(DataConfig(sources=sources, validation_fraction=0.1))
    assert not {*train} & {*held_out} and len(train) + len(held_out) == 3 * len(TEXTS)
    assert 40 <= len(held_out) <= 80 and {text[0] for text in held_out} == {"a", "b"}


def test_added_and_renamed_files_move_no_document_to_the_other_side(tmp_path):
    both = write_pair(tmp_path)
    before = split(DataConfig(path=both, validation_fraction=0.1))
    write_jsonl(tmp_path / "0.jsonl", ["new", "newer"])
    (tmp_path / "a.jsonl").rename(tmp_path / "z.jsonl")
    train, held_out = split(DataConfig(path=both, validation_fraction=0.1))
    assert {*before[0]} <= {*train} and {*before[1]} <= {*held_out}


def test_copies_in_another_format_or_with_other_fields_are_on_the_same_side(tmp_path):
    texts = TEXTS[:60]
    write_jsonl(tmp_path / "a.jsonl", texts)
    write_parquet(tmp_path / "b.parquet", texts, field="body")
    (tmp_path / "c.json").write_text(json.dumps([{"text": text, "url": "x"} for text in texts]))
    sources = [{"path": tmp_path / "a.jsonl"}, {"path": tmp_path / "c.json"}]
    sources += [{"path": tmp_path / "b.parquet", "text_field": "body"}]
    train, held_out = split(DataConfig(sources=sources, validation_fraction=0.1))
    assert len(held_out) == 3 * len({*held_out}) and not {*train} & {*held_out}


def test_null_fields_and_labels_do_not_distinguish_copies(tmp_path):
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
        for text in TEXTS[:40]
    ]
    with_nulls = [[message | {"tool_calls": None} for message in talk] for talk in talks]
    for name, records in (("a", talks), ("b", with_nulls)):
        tools = {"tools": None} if name == "b" else {}
        lines = [json.dumps({"messages": messages} | tools) for messages in records]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    keys = {}
    for name in ("a", "b"):
        [source] = find_data(
            DataConfig(path=tmp_path / f"{name}.jsonl", validation_fraction=0)
        ).sources
        [shard] = source.train
        keys[name] = [key for key, _ in shard.contents()]
    lines = [
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "labels": [-100, 2]},
        {"input_ids": [1, 3]},
    ]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, lines)))
    [source] = find_data(DataConfig(path=tmp_path / "ids.jsonl", validation_fraction=0)).sources
    first, again, other = (key for key, _ in source.train[0].contents())
    assert len({*keys["a"]}) == 40 and keys["a"] == keys["b"] and first == again != other


@pytest.mark.parametrize("later", [{}, {"validation_fraction": 0.3}, {"validation_fraction": 0}])
def test_entries_of_a_curriculum_train_on_nothing_that_one_of_them_holds_out(tmp_path, later):
    both = write_pair(tmp_path)
    entries = [{"context": 64, "steps": 2}, {"context": 128, "steps": 2}]
    entries[1]["data"] = {"path": str(tmp_path / "b.jsonl"), **later}
    tree = {"data": {"path": str(both), "validation_fraction": 0.1}, "curriculum": entries}
    config = parse_config(tree)
    assert [data.path for data in config.datasets] == [both, tmp_path / "b.jsonl"]
    sides = [split(config.at(step).data, config.datasets) for step in (0, 2)]
    assert not {*sides[0][0], *sides[1][0]} & {*sides[0][1], *sides[1][1]}
    assert all(held_out for _, held_out in sides) == (later.get("validation_fraction") != 0)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    tree |= {
        "model": {"path": str(tmp_path / "config.json")},
        "train": {"run_dir": str(tmp_path / "run")},
    }
    tree["data"]["tokenizer"] = "bytes"
    (tmp_path / "file.yaml").write_text(json.dumps(tree))
    run = prepare_run(Request(tmp_path / "file.yaml", ("parallel.ranks=1",)))
    assert [data.validation_fraction for data in run.datasets] == [
        0.1,
        later.get("validation_fraction", 0.1),
    ]


def test_what_other_entries_hold_out_is_said(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    data = DataConfig(path=path, validation_fraction=0)
    summary = find_data(data, [data, replace(data, validation_fraction=0.25)]).summary
    assert summary["validation"].endswith(
        "another entry of the curriculum holds out 25%, which is not trained on either"
    )


@pytest.mark.parametrize("is_one_text", [False, True])
def test_another_source_does_not_change_the_identity_of_a_large_one(is_one_text):
    """A run whose curriculum gets another entry resumes: its tokens and its positions keep their
    names."""
    large = SourceContent({key << 50: 10 for key in range(1, 1000)}, False, False, 0.1, 10**6)
    small = SourceContent({2**64 - 1: 5, 2**64 - 2: 5}, True, is_one_text, 0.1, 10)
    both = make_split([large, small])
    assert both.of_source(large) == make_split([large]).of_source(large)
    assert both.of_source(small) != both.of_source(large)


def test_a_document_of_most_of_a_large_source_is_trained_on():
    """The other documents were not read, but their bytes are known."""
    most = SourceContent({1: 90, 2: 1}, False, False, 0.1, num_bytes=100)
    assert not make_split([most]).holds_out(1)
    few = SourceContent({1: 90, 2: 1}, False, False, 0.1, num_bytes=1000)
    assert make_split([few]).holds_out(1)


def test_text_files_keep_their_side_and_a_text_alone_its_end(tmp_path):
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i:03}.txt").write_text(text)
    data = DataConfig(path=tmp_path / "texts", validation_fraction=0.1)
    before = split(data)
    shutil.copytree(tmp_path / "texts", tmp_path / "more")
    (tmp_path / "more" / "0.txt").write_text("another text")
    train, held_out = split(DataConfig(sources=[{"path": data.path}, {"path": tmp_path / "more"}]))
    assert not {*train} & {*held_out}
    assert {*before[1]} <= {*split(replace(data, path=tmp_path / "more"))[1]}
    alone = {"path": tmp_path / "texts" / "150.txt"}  # a longer one
    train, held_out = split(
        DataConfig(sources=[{"path": data.path}, alone], validation_fraction=0.1)
    )
    assert held_out.count(TEXTS[150][-len(held_out[-1]) :]) == 2 and train.count(TEXTS[150]) == 0
    assert held_out[-1] + train[-1] not in train and train[-1] + held_out[-1] == TEXTS[150]


def test_a_document_of_most_of_the_data_is_trained_on(tmp_path):
    """Whatever its hash: at 0.5, half of all keys are held out."""
    for i in range(8):
        texts = [f"{i} " * 5000, "short", "shorter"]
        data = DataConfig(path=write_jsonl(tmp_path / "a.jsonl", texts), validation_fraction=0.5)
        train, held_out = split(data)
        assert texts[0] in train and held_out
        for n, text in enumerate(texts):
            (tmp_path / f"{n}.txt").write_text(text)
        train, held_out = split(replace(data, path=tmp_path / "*.txt"))
        assert texts[0] in train and held_out


def test_a_large_share_of_held_out_text_is_said(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one text", "two text"])
    summary = find_data(DataConfig(path=path)).summary
    assert (
        summary["validation"]
        == f"data.validation_fraction=0.02 of data.path={path}, 50% of the bytes"
    )


def test_copies_of_one_document_are_not_held_out_from_themselves(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the same"}\n' * 5)
    check_data(DataConfig(path=path, context=2), 264)
    assert split(DataConfig(path=path, validation_fraction=0.99)) == (["the same"] * 5, [])
    found = find_data(DataConfig(path=path))
    assert (
        not found.is_split
        and found.summary["validation"] == f"none, data.path={path} has one record"
    )


def test_large_data_is_scanned_until_some_of_it_is_on_each_side(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "PART_BYTES", 100)
    monkeypatch.setattr(read, "SHARD_BYTES", 100)
    reads = []
    contents = read.Shard.contents
    monkeypatch.setattr(
        read.Shard, "contents", lambda shard: reads.append(shard) or contents(shard)
    )
    data = DataConfig(path=write_jsonl(tmp_path / "a.jsonl", TEXTS), validation_fraction=0.1)
    train, held_out = split(data)
    assert sorted(train + held_out) == sorted(TEXTS) and len(held_out) > 5 and len(reads) < 40
    monkeypatch.setattr(read, "SCANNED_RECORDS", 7)
    train, held_out = split(replace(data, validation_fraction=1e-9))
    assert len(held_out) == 1 and held_out[0] in TEXTS[:7]


def test_copies_are_counted(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:9], *TEXTS[3:6], TEXTS[0]])
    other = write_jsonl(tmp_path / "b.jsonl", [TEXTS[1], "other"])
    sources = [{"path": path}, {"path": other}]
    data = open_with_cache(DataConfig(sources=sources, context=64, validation_fraction=0))
    assert describe_data(data, 9)["duplicates"] == "5 documents repeat others"
    data = open_with_cache(DataConfig(path=other, context=4, validation_fraction=0))
    assert "duplicates" not in describe_data(data, 9)


def test_a_split_holds_out_the_fraction():
    keys = [hash_content(text.encode()) for text in TEXTS]
    split = Split(0.25, False, extra=(keys[0],), never=(keys[1],))
    assert 25 <= sum(map(split.holds_out, keys)) <= 75
    assert split.holds_out(keys[0]) and split.keeps(keys[1]) and not split.keeps(keys[0])
    assert [replace(split, held_out=None).keeps(key) for key in keys[:2]] == [True, True]


def test_a_run_that_held_out_documents_by_position_is_refused_or_resumes_identically(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:40])
    data = DataConfig(path=path, context=64, validation_fraction=0.1)
    old = open_with_cache(data).state_dict() | {
        "version": data_stream.BY_POSITION,
        "data": "of another split",
    }
    refused = open_with_cache(data)
    for check in (refused.load_state_dict, refused.check_format):
        named = "held out documents by their position", "data.validation_fraction"
        assert_refused(
            lambda check=check: check(old), *named, fix="export the run and start a new one"
        )
    unsplit = replace(data, validation_fraction=0)
    reference = open_with_cache(unsplit)
    resumed = open_with_cache(unsplit)
    for _ in range(3):
        reference.next_batch()
    resumed.load_state_dict(reference.state_dict() | {"version": data_stream.BY_POSITION})
    assert resumed.next_batch().input_ids.tolist() == reference.next_batch().input_ids.tolist()
    newer = reference.state_dict() | {"version": data_stream.STATE_FORMAT + 1}
    assert_refused(
        lambda: resumed.check_format(newer), "format 8", fix="resume with the ithaka that wrote it"
    )
