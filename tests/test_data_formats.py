"""Common data formats are read as intended; others are refused by name, with a fix."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ithaka.config import ConfigError, DataConfig, parse_config
from ithaka.data import stream as data_stream
from ithaka.data.documents import files
from ithaka.data.open import check_data, describe_data, epoch_steps
from runs import MODEL
from test_data_sources import (
    TEXTS,
    documents_of,
    encode_texts,
    open_with_cache,
    write_jsonl,
    write_parquet,
)

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def assert_refused(path, match, **settings):
    with pytest.raises(ConfigError, match=match):
        check_data(DataConfig(path=path, context=2, **settings), 264)


def dataset_of(texts, **columns):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"text": list(texts), **columns})


def save_dataset(path, splits=None, texts=TEXTS[:30]):
    datasets = pytest.importorskip("datasets")
    data = dataset_of(texts, id=list(range(len(texts))))
    (
        datasets.DatasetDict({name: data.select(rows) for name, rows in splits.items()})
        if splits
        else data
    ).save_to_disk(str(path))
    return path


def write(folder, **contents):
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_folder_saved_by_datasets_gives_its_records_but_not_its_metadata(tmp_path):
    path = save_dataset(tmp_path / "data")
    # Files that `map` leaves in the folder are not part of the dataset.
    (path / "cache-1234.arrow").write_bytes((path / "data-00000-of-00001.arrow").read_bytes())
    assert documents_of(path) == encode_texts(TEXTS[:30])
    assert_refused(
        path / "data-00000-of-00001.arrow",
        r"cannot be read \(.arrow .*\); .* datasets.save_to_disk",
    )
    assert_refused(tmp_path, r"/data/.*\.arrow; .*folder datasets.save_to_disk wrote")
    assert_refused(
        path,
        r"data has no field data.text_field=body; its fields are text, id; set data.text_field",
        text_field="body",
    )
    assert_refused(
        path, r"data record \d: data.text_field=id is int, not a string", text_field="id"
    )


def test_a_folder_of_splits_trains_on_train_and_validates_on_validation(tmp_path):
    path = save_dataset(
        tmp_path / "dict", {"train": range(20), "validation": range(20, 23), "test": range(23, 30)}
    )
    data = open_with_cache(DataConfig(path=path, context=8192))
    text = bytes(int(i) for i in data.next_batch().input_ids[0] if i < 256)
    assert all(t in text for t in encode_texts(TEXTS[:20])) and b"document 20" not in text
    (held_out,) = data.validation_sequences(9)
    assert bytes(int(i) for i in held_out.ids if i < 256) == b"".join(encode_texts(TEXTS[20:23]))
    assert describe_data(data, 1)["validation"] == f"the split validation of data.path={path}"
    other = save_dataset(tmp_path / "other", {"eval": range(3)})
    assert_refused(other, r"other .*split train, only eval; save")


def test_null_rows_in_arrow_files_are_refused_by_number(tmp_path):
    dataset_of(["a", None, "c"]).save_to_disk(str(tmp_path / "data"))
    assert_refused(
        tmp_path / "data",
        r"data record 2: data.text_field=text is null, not a string",
        validation_fraction=0,
    )


@pytest.mark.parametrize("layout", [{"indent": 2}, {}], ids=["pretty", "one line"])
def test_json_lists_of_records_are_read(tmp_path, layout):
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS[:20]], **layout))
    assert documents_of(tmp_path / "a.json") == documents_of(tmp_path) == encode_texts(TEXTS[:20])
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x"}, {"text": 3}], **layout))
    assert_refused(
        tmp_path / "a.json", "a.json record 2: data.text_field=text is int, not a string"
    )
    (tmp_path / "a.json").write_text('[{"text": "x"}, ')
    assert_refused(tmp_path / "a.json", "a.json is not JSON .*; repair it, or write it as JSONL")


def test_json_with_one_record_per_line_is_read(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:20]).rename(tmp_path / "a.json")
    assert documents_of(tmp_path / "a.json") == encode_texts(TEXTS[:20])


def test_one_json_object_is_refused_as_a_path_and_read_as_a_source(tmp_path):
    write(
        tmp_path,
        package_dot_json='{\n  "name": "x"\n}\n',
        main_dot_py="print()\n",
        rows_dot_json='[{"a": 1}]',
    )
    assert_refused(
        tmp_path / "package.json", "package.json line 1: not JSON .*one JSON object per line"
    )
    assert len(documents_of(tmp_path)) == 3
    (tmp_path / "a.jsonl").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
    )
    assert_refused(tmp_path / "a.jsonl", "a.jsonl line 1: .*Git LFS pointer; run `git lfs pull`")


def test_other_files_in_a_folder_of_conversations_are_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"id": 1, "messages": MESSAGES}], indent=1))
    (tmp_path / "notes.txt").write_text("some text\n")
    assert_refused(tmp_path, r"\(a.json\) and notes.txt.*glob")


def test_small_files_of_a_directory_are_mixed(tmp_path):
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(50)])
    data = open_with_cache(DataConfig(path=tmp_path, context=600, validation_fraction=0))
    names = [chr(i) for i in data.next_batch().input_ids[0].tolist() if i in (97, 98)]
    changes = sum(one != two for one, two in zip(names, names[1:], strict=False))
    assert sorted(names) == ["a"] * 50 + ["b"] * 50 and changes > 30


def test_a_folder_of_records_is_read_completely_or_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:5])
    write(
        tmp_path,
        README_dot_md="about",
        dataset_info_dot_json="{}",
        b_dot_jsonl="",
        x_dot_lock="1",
        **{".cache__t": "h"},
    )
    found = files.find_files(tmp_path)
    assert [file.path.name for file in found.files] == ["a.jsonl"]
    assert sorted(found.ignored) == [
        "README.md (not records)",
        "b.jsonl (empty)",
        "dataset_info.json (not records)",
        "x.lock (.lock is not supported)",
    ]
    for name, content in {
        "c.csv": b"a,b",
        "c.gz": b"\x1f\x8b",
        "c.txt": b"text",
        "c.png": b"\x89PNG\0",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert_refused(tmp_path, rf"\(a.jsonl\) and {name}.*glob, such as .*/\*\*/\*\.jsonl")
        (tmp_path / name).unlink()
    assert len(documents_of(tmp_path)) == 5


def test_a_folder_of_sources_reports_skipped_files(tmp_path):
    write(tmp_path, a_dot_py="a", b_dot_csv="1,2", c_dot_png=b"\x89\0", d_dot_txt="")
    data = DataConfig(path=tmp_path, context=8, validation_fraction=0)
    opened = open_with_cache(data)
    left_out = describe_data(opened, 10)["left out"]
    assert (
        left_out == "3 files: b.csv (.csv is not supported), c.png (not UTF-8 text), d.txt (empty)"
    )
    (tmp_path / "a.py").unlink()
    assert_refused(tmp_path, r"contains b.csv .*, c.png .*, d.txt \(empty\); .*UTF-8 text, JSONL")
    assert_refused(tmp_path / "b.csv", r"b.csv cannot be read \(.csv .*\); .*UTF-8 text")


def test_text_that_is_broken_far_into_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "late.txt").write_bytes(b"a\n" * (1 << 19) + b"\xff")
    assert_refused(
        tmp_path,
        r"late.txt is not UTF-8 text at byte 1048576; convert it, or leave it out",
        validation_fraction=0,
    )


def test_small_data_is_counted_and_one_sequence_printed(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["tab\there", "", "esc\x1b[31m"])
    data = DataConfig(path=tmp_path, context=4, validation_fraction=0)
    opened = open_with_cache(data)
    even = dataclasses.replace(data, context=9)
    lines = describe_data(opened, 10)
    assert lines["data"] == "1 file (jsonl), 0.0 MB, 2 documents, 18 tokens, 4 sequences"
    # the one with the last two tokens
    assert lines["unlabelled"] == "left out 1 of 5 sequences: no token to train on"
    assert lines["packing"].startswith("100.0% of each")
    assert "unlabelled" not in describe_data(open_with_cache(even), 10)
    assert (
        lines["epochs"] == "2.5 (10 sequences in total)"
        and lines["skipped"] == "1 document: 1 empty"
    )
    assert lines["validation"] == "none, data.validation_fraction=0"
    assert epoch_steps(opened, 1, 1) == 4 and epoch_steps(open_with_cache(even), 1, 1) == 2
    longer = open_with_cache(dataclasses.replace(data, context=64))
    first_tokens = describe_data(longer, 10)["first tokens"]
    expected = ["tab\\there<|eos|>", "esc\\x1b[31m<|eos|>"]
    assert first_tokens in ("".join(expected), "".join(reversed(expected)))
    opened.next_batch()
    # a resumed run shows its position
    assert describe_data(opened, 10)["first tokens"] != lines["first tokens"]


def test_only_the_first_part_of_large_data_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(data_stream, "ROUND_TOKENS", 0)
    path = write_parquet(tmp_path / "a.parquet", ["1234567"] * 200, row_group_size=50)
    opened = open_with_cache(DataConfig(path=path, context=8, validation_fraction=0))
    lines = describe_data(opened, 100)
    assert lines["data"].endswith("MB, about 200 documents, 1,600 tokens, about 200 sequences")
    assert lines["epochs"] == "about 0.5 (100 sequences in total)" and lines[
        "first tokens"
    ].startswith("1234567<|eos|>")


def test_hub_names_without_a_network_are_refused_at_once(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(self, *args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    assert_refused(
        "hf://nobody/nothing",
        r"data.path=hf://nobody/nothing cannot be loaded .* \(OSError: no network\)",
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert_refused(
        "data/nothing", r"data.path=data/nothing does not exist; .* data.path=hf://org/name"
    )


def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "open_dataset", lambda path: pytest.fail(f"{path} was opened"))
    monkeypatch.chdir(tmp_path)
    assert_refused(
        "trace/agents",
        r"data.path=trace/agents does not exist; .* or data.path=hf://trace/agents for a",
    )
    assert_refused(
        "nobody/nothing", r"data.path=nobody/nothing does not exist", validation_path="x/y"
    )


def test_hub_names_are_read_with_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda *args, **kwargs: None)
    rows = {"train": TEXTS[:9], "dev": TEXTS[9:10]}
    requests = []

    class Builder:
        # not in the repository
        config = SimpleNamespace(data_files={"train": ["https://elsewhere.org/texts.parquet"]})
        cache_dir = Path(__file__).parent

        def __init__(self, *names, **revision):
            requests.append((*names, *revision.values()))

        def download_and_prepare(self):
            pass

        def as_dataset(self):
            return {split: dataset_of(rows[split]) for split in rows}

    monkeypatch.setattr(datasets, "load_dataset_builder", Builder)
    for path, texts, validation in (
        ("hf://someone/texts", TEXTS[:9], 1),
        ("hf://someone/texts@v2:en/dev", TEXTS[9:10], 0),  # nothing is left to validate on
    ):
        config = {"path": path, "context": 4096, "validation_fraction": 0.02 * validation}
        data = open_with_cache(parse_config({"data": config}).data)
        text = bytes(int(i) for i in data.next_batch().input_ids[0] if i < 256)
        assert (
            all(t in text for t in encode_texts(texts))
            and len(data.validation_sequences(5)) == validation
        )
    assert {*requests} == {("someone/texts", None, None), ("someone/texts", "en", "v2")}
    assert_refused(
        "hf://someone/texts:en/tset",
        r"hf://someone/texts:en has no split tset, .*; use hf://someone/texts:en/train",
    )


@pytest.mark.slow
def test_a_run_does_not_need_datasets(tmp_path):
    """A run on Parquet files succeeds although no process can import the package."""
    (tmp_path / "sitecustomize.py").write_text('import sys\nsys.modules["datasets"] = None\n')
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    write_parquet(tmp_path / "a.parquet", TEXTS)
    sets = {
        "model.path": "config.json",
        "data.path": "a.parquet",
        "data.tokenizer": "bytes",
        "data.context": 32,
    }
    sets |= {"train.steps": 1, "train.validate_every": 0, "parallel.ranks": 1}
    changes = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "ithaka", "train", *changes, "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 file (parquet), " in done.stdout
    assert (tmp_path / "run" / "latest").exists() and not (tmp_path / "run" / "tokens").exists()


def test_a_folder_that_needs_datasets_is_refused(tmp_path, monkeypatch):
    save_dataset(tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_refused(
        tmp_path / "folder",
        r"folder cannot be loaded with the package datasets \(.*Error: .*datasets",
    )
    assert_refused("hf://nobody/nothing", "nothing cannot be loaded with the package datasets")


def test_datasets_is_imported_in_one_place_and_only_when_needed():
    package = Path(files.__file__).parents[1]
    lines = [
        (path, line) for path in package.rglob("*.py") for line in path.read_text().splitlines()
    ]
    imports = [
        (path.name, line) for path, line in lines if re.match(r"\s*(import|from) datasets\b", line)
    ]
    assert imports == [("files.py", "    import datasets")]
