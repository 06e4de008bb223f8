"""Records with fields that contradict how they would be read are refused; fields that change
nothing are named."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ithaka.config import DataConfig
from ithaka.data.held_out import find_data
from ithaka.data.open import check_data, describe_data
from refusals import assert_refused
from test_data_errors import CHATML
from test_data_sources import BYTES, open_with_cache, write_parquet

ANSWER = [{"role": "assistant", "content": "b"}]
REFUSED = [
    (
        {"prompt": "a", "completion": "b", "label": False},
        {},
        "label=false: its completion is a bad answer",
        "drop",
    ),
    ({"prompt": "a", "completion": "b", "label": 0}, {}, "label=false", "chosen and rejected"),
    (
        {"prompt": [{"role": "user", "content": "a"}], "completion": ANSWER, "label": False},
        CHATML,
        "label",
        "drop",
    ),
    (
        {"question": "a?", "chosen": "b", "rejected": "c"},
        {},
        "has question, which chosen",
        "rename question to prompt",
    ),
    (
        {"question": "a?", "chosen": "b", "rejected": "c"},
        {"train_on": "pairs"},
        "question",
        "rename question",
    ),
    (
        {"input": "a?", "prompt": None, "chosen": ANSWER, "rejected": ANSWER},
        CHATML,
        "input",
        "rename input",
    ),
    (
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {},
        "has loss_mask, which is not read",
        "write labels",
    ),
    ({"input_ids": [1, 2], "completion_mask": [0, 1]}, {}, "has completion_mask", "write labels"),
    (
        {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
        {},
        "attention_mask is not a list of 1",
        "use labels",
    ),
    (
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1]},
        {},
        "attention_mask is not a list of 1",
        "use labels",
    ),
    ({"input_ids": [1, 2], "loss_mask": 1}, {}, "has loss_mask, which is not read", "write labels"),
    (
        {"input_ids": [1, 2, 3], "attention_mask": [[1], 1, 1]},
        {},
        "attention_mask is not a list of 1",
        "use labels",
    ),
    (
        {"input_ids": [1, 2, 3], "attention_mask": [1, 2, 0]},
        {},
        "attention_mask is not a list of 1",
        "use labels",
    ),
]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents_of(path, **settings):
    [source] = find_data(DataConfig(path=path, validation_fraction=0, **settings)).sources
    return [document for shard in source.train for document in shard.documents(BYTES)]


@pytest.mark.parametrize("record, settings, problem, fix", REFUSED)
def test_a_record_that_means_something_else_is_refused(tmp_path, record, settings, problem, fix):
    data = DataConfig(path=write(tmp_path / "a.jsonl", record), context=2, **settings)
    assert_refused(lambda: check_data(data, 264), "a.jsonl line 1", problem, fix=fix)


ACCEPTED = [
    ({"prompt": "a", "completion": "b", "label": True}, {}),
    ({"prompt": "a", "completion": "b", "label": None}, {}),
    ({"question": "a?", "chosen": "a? b", "rejected": "a? c"}, {}),
    ({"question": "a?", "prompt": "a?", "chosen": "b", "rejected": "c"}, {"train_on": "pairs"}),
    (
        {
            "question": "a",
            "chosen": [{"role": "user", "content": "a"}, *ANSWER],
            "rejected": ANSWER,
        },
        CHATML,
    ),
    ({"input_ids": [1, 2], "loss_mask": [1, 1]}, {}),
    ({"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [0, 1]}, {}),
    ({"text": "ab", "label": False}, {}),
]


@pytest.mark.parametrize("record, settings", ACCEPTED)
def test_a_record_that_means_what_is_read_is_accepted(tmp_path, record, settings):
    check_data(DataConfig(path=write(tmp_path / "a.jsonl", record), context=2, **settings), 264)


def test_columns_of_tables_are_checked_too(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": ["a?"], "chosen": ["b"], "rejected": ["c"]}), path)
    assert_refused(
        lambda: check_data(DataConfig(path=path, context=2), 264), "row 0", "question", fix="rename"
    )


def test_padding_is_left_out(tmp_path):
    ids = [7, 7, 1, 2, 3, 7]
    mask = [0, 0, 1, 1, 1, 0]
    stored = {"teacher_ids": [[i] for i in range(6)], "teacher_logprobs": [[-1.0]] * 6}
    records = [{"input_ids": ids, "attention_mask": mask, **stored}]
    records += [
        {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": [-100, -100, -100, 2, 3, -100],
            **stored,
        }
    ]
    records += [
        {"input_ids": ids, "attention_mask": [1] * 6, **stored},
        {"input_ids": ids, **stored},
    ]
    path = write(tmp_path / "a.jsonl", *records)
    expected = [[1, 2, 3], [~1, 2, 3], ids, ids]
    assert [document.ids.tolist() for document in documents_of(path)] == expected
    teachers = [
        document.teacher[:, 0, 0].tolist() for document in documents_of(path, train_on="teacher")
    ]
    assert teachers == [[2, 3, 4]] * 2 + [[0, 1, 2, 3, 4, 5]] * 2
    write(path, {"input_ids": ids, "attention_mask": [0] * 6}, {"input_ids": ids})
    data = open_with_cache(DataConfig(path=path, context=6, validation_fraction=0))
    assert describe_data(data, 1)["skipped"] == "1 document: 1 empty"


def test_fields_that_are_not_used_are_named(tmp_path):
    records = [{"prompt": "a", "completion": "b", "id": i, "label": True} for i in range(3)]
    path = write(tmp_path / "a.jsonl", *records, {"prompt": "a", "completion": "c"})
    data = open_with_cache(DataConfig(path=path, context=8, validation_fraction=0))
    assert describe_data(data, 1)["unused fields"] == "id in 3 records, label in 3 records"
    table = write_parquet(tmp_path / "a.parquet", ["text"])
    assert [document.notes for document in documents_of(table)] == [{"unused field id": 1}]
    write(path, {"text": "only text"}, {"text": "and more"})
    plain = open_with_cache(DataConfig(path=path, context=8, validation_fraction=0))
    assert "unused fields" not in describe_data(plain, 1)
