"""Files on disk after a run, and recovery when some are damaged."""

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import os
import pickle
import re
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typer.testing import CliRunner

import runs
from ithaka.checkpoint import checkpoints, save
from ithaka.checkpoint.export import export
from ithaka.checkpoint.safe_load import CompactIndex, SafeReader
from ithaka.cli import app
from ithaka.config import load_config, write_atomic
from ithaka.plan.shape import Correction
from ithaka.run.draft import AUTO, Request
from ithaka.run.road import model_shape, prepare_run
from ithaka.run.run_files import check_run_dir
from ithaka.train.prepare import prepare
from refusals import assert_refused
from runs import adopted, bitwise_metrics, metrics, run, saved_settings, tiny_run, validate


def run_and_record_syncs(config, resume):
    """Run and return, in order, the paths that this rank syncs ("sync", path) and renames files to
    ("name", path)."""
    events = []

    def record_rename(move, source, target):
        move(source, target)
        events.append(("name", str(target)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda file: events.append(("sync", os.readlink(f"/proc/self/fd/{file}")))
        )
        for name in ("rename", "replace"):
            patch.setattr(os, name, partial(record_rename, getattr(os, name)))
        run(config, resume)
    return events


@pytest.fixture(scope="module")
def trained_and_synced(ranks, tmp_path_factory):
    """A finished run of 6 steps on 2 ranks that kept the checkpoints of steps 4 and 6, and each
    rank's sync events."""
    folder = tmp_path_factory.mktemp("trained")
    constant = {"schedule": "constant", "lr": 1e-2, "warmup_steps": 2}
    config = tiny_run(folder, train={"steps": 6, "save_every": 2, "keep_last": 2}, optim=constant)
    (folder / "run/checkpoints/.tmp-step-00000001").mkdir(parents=True)  # left by a killed save
    (folder / "run/config.yaml").write_text(saved_settings(config))
    return config, ranks.run(2, run_and_record_syncs, config, AUTO)


@pytest.fixture(scope="module")
def trained(trained_and_synced):
    return trained_and_synced[0]


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    return shutil.copytree(trained.train.run_dir, tmp_path / "copy")


def test_only_the_last_checkpoints_stay_and_latest_names_the_newest(trained, run_dir):
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]
    assert (run_dir / "latest").read_text() == "step-00000006\n"
    assert checkpoints.find_checkpoint(run_dir).name == "step-00000006"
    assert load_config(run_dir / "config.yaml") == trained


def test_files_and_their_directories_are_synced_before_latest_names_the_checkpoint(
    trained_and_synced,
):
    """Otherwise `latest` could name a checkpoint that a machine crash left incomplete."""
    config, (events, events_of_rank_1) = trained_and_synced
    root = config.train.run_dir / "checkpoints"
    temporary = root / ".tmp-step-00000006"
    in_order = [
        *(
            ("sync", temporary / name)
            for name in ("__0_0.distcp", ".metadata.tmp", ".state.json.tmp")
        ),
        ("sync", temporary),
        ("name", root / "step-00000006"),
        ("sync", root),
        ("sync", config.train.run_dir / ".latest.tmp"),
        ("name", config.train.run_dir / "latest"),
        ("sync", config.train.run_dir),
    ]
    for kind, path in in_order:
        assert (kind, str(path)) in events, f"no {kind} of {path} in this order"
        events = events[events.index((kind, str(path))) + 1 :]
    assert ("sync", str(temporary / "__1_0.distcp")) in events_of_rank_1


def save_in_several_files(folder: Path, full: str) -> tuple[list[str], str | None]:
    """Save a model in four files, whose disk is full for the file `full`; load it into another one.
    Returns the names of the files and how they are damaged."""
    models = [torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6))) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    sum(param.sum() for param in models[0].parameters()).backward()
    optimizers[0].step()
    write = save._HashedFile.write

    def write_if_room(file, data):
        if Path(file.name).name == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "MIN_FILE_BYTES", 1)
        patch.setattr(save, "MAX_FILES", 4)
        patch.setattr(save._HashedFile, "write", write_if_room)
        patch.setattr(
            save,
            "checksum",
            lambda path: checkpoints.checksum(path) if path.name == ".metadata" else "read again",
        )
        saver = save.Saver(folder, keep_last=1, background=False)
        saver.save(models[0], optimizers[0], {"step": 1, "best": None})
        saver.finish()
    path = folder / "checkpoints/step-00000001"
    save.load_checkpoint(path, models[1], optimizers[1])
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)
    assert saver.num_bytes == sum(
        file.stat().st_size for file in path.iterdir() if file.name != checkpoints.STATE_FILE
    )
    return sorted(file.name for file in path.glob("__*")), checkpoints.find_corruption(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_large_state_is_written_in_several_files_and_an_error_of_any_fails_the_save(
    ranks, tmp_path
):
    """Checksums are computed while writing, not by reading the files again."""
    names = [f"__0_{i}.distcp" for i in range(4)]
    assert ranks.run(1, save_in_several_files, tmp_path / "complete", "") == [(names, None)]
    for name in (*names, ".metadata.tmp"):
        with pytest.raises(AssertionError, match="cannot be written: .*No space left on device"):
            ranks.run(1, save_in_several_files, tmp_path / name, name)
        assert list((tmp_path / name / "checkpoints").iterdir()) == []


def test_ranks_share_the_verification_of_all_files(run_dir):
    path = run_dir / "checkpoints/step-00000006"
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        data = (path / name).read_bytes()
        (path / name).write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
        for num_ranks in (1, 2, 3):
            reasons = [
                checkpoints.find_corruption(path, rank, num_ranks) for rank in range(num_ranks)
            ]
            assert list(filter(None, reasons)) == [f"{name} is corrupt"]
        (path / name).write_bytes(data)


def test_state_is_json_and_data_files_hold_tensors_only(run_dir):
    path = checkpoints.find_checkpoint(run_dir)
    state = json.loads((path / "state.json").read_text())
    assert (state["step"], state["world_size"]) == (6, 2)
    entries = SafeReader(path).read_metadata().state_dict_metadata
    assert all(isinstance(entry, TensorStorageMetadata) for entry in entries.values())
    assert {name.split(".")[0] for name in entries} == {"model", "moments", "rng"}
    assert {"rng.0.cpu", "rng.1.cpu"} <= entries.keys()


def resume_with_an_unused_parameter(folder):
    """Return the optimizer's states by parameter before a save and after it is loaded, and what a
    later step changes in both."""
    states = []
    changes = []
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    models[0].weight.sum().backward()
    optimizers[0].step()
    saver = save.Saver(folder, 1, background=False)
    saver.save(models[0], optimizers[0], {"step": 1, "best": None})
    saver.finish()
    save.load_checkpoint(folder / "checkpoints/step-00000001", models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        states.append({name: [*optimizer.state.get(p, ())] for name, p in model.named_parameters()})
        (model.weight.sum() + 2 * model.bias.sum()).backward()
        optimizer.step()
        changes.append([param.detach().tolist() for param in model.parameters()])
    return states, changes


def test_a_parameter_without_a_gradient_so_far_has_no_state_after_loading(ranks, tmp_path):
    """Such as an encoder of images, before the first image."""
    (((before, after), (expected, resumed)),) = ranks.run(
        1, resume_with_an_unused_parameter, tmp_path
    )
    assert before == after == {"weight": ["step", "exp_avg", "exp_avg_sq"], "bias": []}
    assert resumed == expected


def save_and_load_random_state(folder):
    """Return whether a checkpoint restores this rank's random state, and the numbers drawn from
    it."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    saver = save.Saver(folder, 1, background=False)
    saver.save(model, optimizer, {"step": 1, "best": None})
    saver.finish()
    expected = torch.rand(3).tolist()
    torch.manual_seed(9)
    save.load_checkpoint(folder / "checkpoints/step-00000001", model, optimizer)
    return torch.rand(3).tolist() == expected, expected


def save_without_publishing(folder):
    """Return the error of a save that rank 0 cannot publish."""

    def fail(*args):
        raise OSError("read-only")

    saver = save.Saver(folder, 1, background=False)
    model = torch.nn.Linear(2, 2)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(save.CheckpointError) as error:
        patch.setattr(save, "publish", fail)
        saver.save(model, torch.optim.SGD(model.parameters()), {"step": 1, "best": None})
        saver.finish()
    return str(error.value)


def test_all_ranks_report_a_checkpoint_that_cannot_be_published(ranks, tmp_path):
    path = tmp_path / "checkpoints/step-00000001"
    message = f"checkpoint {path} cannot be written: rank 0: OSError: read-only"
    assert ranks.run(2, save_without_publishing, tmp_path) == [message] * 2 and not path.exists()


def test_each_rank_resumes_with_its_own_random_state(ranks, tmp_path):
    (is_restored, first), (other_is_restored, second) = ranks.run(
        2, save_and_load_random_state, tmp_path
    )
    assert is_restored and other_is_restored and first != second


def damage(run_dir, kind):
    path = run_dir / "checkpoints/step-00000006"
    if kind == "truncated":
        data = path / "__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
    elif kind == "flipped":
        data = path / "__1_0.distcp"
        data.write_bytes(bytes([*data.read_bytes()[:-1], data.read_bytes()[-1] ^ 1]))
    elif kind == "another number":
        state = (path / "state.json").read_text()
        (path / "state.json").write_text(state.replace('"step": 6', '"step": 7'))
    elif kind == "same size, index unreadable":
        index = path / ".metadata"
        index.write_bytes(bytes(index.stat().st_size))
    elif kind == "gone":
        shutil.rmtree(path)
    else:
        (path / kind).unlink()


@pytest.mark.parametrize(
    "kind,reason",
    [
        ("truncated", r"__1_0.distcp is truncated: .*\d+ bytes"),
        ("__0_0.distcp", "No such file.*__0_0.distcp"),
        (".metadata", "No such file.*.metadata"),
        ("state.json", "No such file.*state.json"),
        ("another number", "state.json is corrupt"),
        ("same size, index unreadable", "cannot be used: UnpicklingError"),
        ("gone", "No such file"),
    ],
)
def test_damage_is_reported_and_the_previous_checkpoint_used(run_dir, kind, reason, capsys):
    damage(run_dir, kind)
    assert checkpoints.find_checkpoint(run_dir).name == "step-00000004"
    message = capsys.readouterr().err
    assert (
        re.search(reason, message)
        and "step-00000006 cannot be used: " in message
        and message.count("\n") == 1
    )


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def rewrite_index(path: Path, change) -> None:
    """Change the index of a checkpoint and update its sizes and checksums, as an attacker would."""
    index = path / ".metadata"
    found = pickle.loads(index.read_bytes())
    change(found)
    index.write_bytes(pickle.dumps(found))
    state = checkpoints.read_state(path)
    for file in path.glob("[._]*"):
        state["file_bytes"][file.name] = file.stat().st_size
        state["checksums"][file.name] = checkpoints.checksum(file)
    state["checksums"]["state.json"] = checkpoints._state_checksum(state)
    (path / "state.json").write_text(json.dumps(state))


RESUME = "train --resume RUN --set train.steps=8"


@pytest.mark.parametrize(
    "command", [RESUME, "export RUN OUT", "sample RUN --prompt x", "evaluate RUN --data no"]
)
def test_a_command_planted_in_the_index_is_refused(run_dir, tmp_path, command):
    for path in (run_dir / "checkpoints").iterdir():
        rewrite_index(path, lambda found: setattr(found, "planner_data", Planted(tmp_path / "ran")))
    words = [
        {"RUN": str(run_dir), "OUT": str(tmp_path / "out")}.get(word, word)
        for word in command.split()
    ]
    result = CliRunner().invoke(app, words)
    assert not (tmp_path / "ran").exists()
    assert result.exit_code and f" {os.system.__module__}.system" in result.stderr


def resume_planted(config, folder):
    """Replace a tensor by a value whose bytes run a command when unpickled, resume, and return the
    error."""

    def plant(found):
        name = next(name for name in found.state_dict_metadata if name.startswith("moments."))
        found.state_dict_metadata[name] = BytesStorageMetadata()
        info = next(info for index, info in found.storage_data.items() if index.fqn == name)
        path = folder / "checkpoints/step-00000006" / info.relative_path
        info.offset = path.stat().st_size
        with path.open("ab") as file:
            torch.save(Planted(folder / "ran"), file)
        info.length = path.stat().st_size - info.offset
        found.storage_data[MetadataIndex(name)] = info

    rewrite_index(folder / "checkpoints/step-00000006", plant)
    with pytest.raises(save.CheckpointError) as error:
        run(config, folder)
    return str(error.value)


def test_a_command_planted_in_a_value_is_refused(trained, run_dir, ranks):
    config = dataclasses.replace(
        trained, train=dataclasses.replace(trained.train, run_dir=run_dir, steps=7)
    )
    (message,) = ranks.run(1, resume_planted, config, run_dir)
    assert "cannot be read: UnpicklingError" in message and not (run_dir / "ran").exists()


def load_and_count_reads(config):
    """Resume as under torchrun, and return how often this rank reads the index, and whether the run
    resumed."""
    read_index = SafeReader.read_metadata
    reads = []

    def read_metadata(self, *args, **kwargs):
        reads.extend([self.path] * (self.part is None))
        return read_index(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafeReader, "read_metadata", read_metadata)
        folder = config.train.run_dir
        changes = "train.steps=8", f"parallel.ranks={dist.get_world_size()}"
        trainer = prepare(prepare_run(Request(None, changes, folder)))
    return len(reads), trainer.step


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_only_one_rank_reads_the_index(trained, run_dir, ranks, num_ranks):
    """For a thousand ranks it has 125 MB, which take 20 s to unpickle."""
    config = dataclasses.replace(trained, train=dataclasses.replace(trained.train, run_dir=run_dir))
    assert ranks.run(num_ranks, load_and_count_reads, config) == [
        (2, 6),
        *[(0, 6)] * (num_ranks - 1),
    ]


class Part:
    """A rank's part of a tensor, as DTensor describes it to torch.distributed.checkpoint."""

    def __init__(self, *chunks):
        self.chunks = [
            ChunkStorageMetadata(torch.Size(start), torch.Size(shape)) for start, shape in chunks
        ]

    def __create_chunk_list__(self):
        return self.chunks


def test_each_rank_gets_the_part_of_the_index_that_it_needs():
    """A tensor of 9 x 6, stored in blocks of 2 x 3 and smaller ones at the end, one that has no
    dims, and an empty chunk."""
    blocks = [((i, j), (min(2, 9 - i), 3)) for i in range(0, 9, 2) for j in (0, 3)] + [
        ((9, 0), (0, 6))
    ]
    chunks = Part(*blocks).chunks
    entries = {
        "model.w": TensorStorageMetadata(
            TensorProperties(torch.bfloat16), torch.Size((9, 6)), chunks
        ),
        "model.step": TensorStorageMetadata(
            TensorProperties(), torch.Size(()), Part(((), ())).chunks
        ),
        "rng.1.cpu": BytesStorageMetadata(),
    }
    places = {
        MetadataIndex("model.w", chunk.offsets, i): (f"__{i % 3}_0", 10 * i, i)
        for i, chunk in enumerate(chunks)
    }
    places |= {
        MetadataIndex("model.step", torch.Size(())): ("__1_0", 7, 8),
        MetadataIndex("rng.1.cpu"): ("__2_0", 5, 6),
    }
    index = Metadata(
        entries, storage_data={key: _StorageInfo(*place) for key, place in places.items()}
    )
    compact = pickle.loads(pickle.dumps(CompactIndex.from_index(index)))
    for rows, columns in itertools.product(
        itertools.combinations(range(10), 2), ((0, 6), (0, 3), (2, 4), (5, 6))
    ):
        start = (rows[0], columns[0])
        shape = (rows[1] - rows[0], columns[1] - columns[0])
        part = compact.part_for({"model": {"w": Part((start, shape)), "step": torch.tensor(0)}})
        assert part.state_dict_metadata.keys() == {"model.w", "model.step"}
        stored = part.state_dict_metadata["model.w"]
        assert (stored.size, stored.properties) == (
            torch.Size((9, 6)),
            entries["model.w"].properties,
        )
        needed = [
            chunk
            for chunk, (first, size) in zip(chunks, blocks, strict=True)
            if all(
                max(a, c) < min(a + b, c + d)
                for a, b, c, d in zip(start, shape, first, size, strict=True)
            )
        ]
        assert stored.chunks == needed
        keys = {MetadataIndex("model.w", chunk.offsets) for chunk in needed} | {
            MetadataIndex("model.step", ())
        }
        assert part.storage_data == {key: index.storage_data[key] for key in keys}
    two = compact.part_for({"model": {"w": Part(((0, 0), (1, 1)), ((8, 5), (1, 1)))}})
    assert two.state_dict_metadata["model.w"].chunks == [chunks[0], chunks[-2]]
    (value,) = compact.part_for({"rng": {"1.cpu": None}}).storage_data.values()
    assert (value.relative_path, value.offset, value.length) == ("__2_0", 5, 6)


def test_an_index_of_another_python_is_read(run_dir, monkeypatch):
    """Python 3.11.0 pickles enum members by name."""
    path = checkpoints.find_checkpoint(run_dir)
    before = SafeReader(path).read_metadata()
    by_name = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    rewrite_index(path, lambda found: None)
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert SafeReader(path).read_metadata().state_dict_metadata == before.state_dict_metadata


def resume_and_capture(config):
    """Resume the run and return what this rank prints to stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        run(config, config.train.run_dir)
    return stderr.getvalue()


def test_resume_skips_a_checkpoint_with_a_flipped_bit(trained, run_dir, ranks):
    damage(run_dir, "flipped")
    uninterrupted = bitwise_metrics(run_dir)
    lines = [{**line, "loss": -1.0} if line["step"] > 4 else line for line in metrics(run_dir)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = dataclasses.replace(
        trained, train=dataclasses.replace(trained.train, run_dir=run_dir, steps=7)
    )
    message = ranks.run(2, resume_and_capture, config)[0]
    assert "step-00000006 cannot be used: __1_0.distcp is corrupt" in message
    assert [line["loss"] for line in metrics(run_dir)][:7] == [
        record[1] for record in uninterrupted
    ]
    assert checkpoints.find_checkpoint(run_dir).name == "step-00000007"


def test_a_file_system_without_locks_warns_once(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(checkpoints.fcntl, "lockf", fail)
    with pytest.warns(
        UserWarning, match=r"cannot be locked \(No locks available\).* start only one at a time"
    ) as caught:
        assert checkpoints.lock_run_dir(tmp_path) is None
        checkpoints.check_not_locked(tmp_path)
    assert len(caught) == 1


def test_a_flipped_bit_in_a_finished_run_is_detected(run_dir, tmp_path, capsys):
    """Resuming falls back to the previous checkpoint; an export reports the damage."""
    damage(run_dir, "flipped")
    again = prepare_run(Request(run_dir / "config.yaml", (), AUTO, run_dir))
    assert (again.last_step, again.finished) == (4, False)
    six = tmp_path / "six"
    assert_refused(
        lambda: export(run_dir, six, step=6), "--step=6", "__1_0.distcp", fix="use another"
    )
    newest, four = (export(run_dir, tmp_path / str(step), step=step) for step in (None, 4))
    assert (newest / "model.safetensors").read_bytes() == (four / "model.safetensors").read_bytes()
    message = "step-00000006 cannot be used: __1_0.distcp is corrupt"
    assert capsys.readouterr().err.count(message) == 2


def resume_with_an_unreadable_disk_on_rank_1(config):
    def read_data(*args):
        raise OSError("the disk does not answer")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(dcp.FileSystemReader, "read_data", read_data)
        with pytest.raises(save.CheckpointError) as error:
            run(config, config.train.run_dir)
    return str(error.value)


def test_all_ranks_report_a_rank_that_cannot_read_the_checkpoint(run_dir, trained, ranks):
    train = dataclasses.replace(trained.train, steps=8, run_dir=run_dir)
    for message in ranks.run(
        2, resume_with_an_unreadable_disk_on_rank_1, dataclasses.replace(trained, train=train)
    ):
        path = run_dir / "checkpoints/step-00000006"
        assert (
            message
            == f"checkpoint {path} cannot be read: rank 1: OSError: the disk does not answer"
        )


def test_a_run_without_a_usable_checkpoint_is_refused(run_dir, tmp_path):
    for garbage in (b"garbage", b"", b"\xff\x00", b"../.."):
        (run_dir / "latest").write_bytes(garbage)
        assert checkpoints.find_checkpoint(run_dir).name == "step-00000006"
    (run_dir / "latest").unlink()
    assert checkpoints.find_checkpoint(run_dir).name == "step-00000006"
    shutil.rmtree(run_dir / "checkpoints")
    assert_refused(
        lambda: checkpoints.find_checkpoint(run_dir),
        str(run_dir),
        "checkpoint",
        fix="--resume auto",
    )
    missing = tmp_path / "nowhere"
    for other in (missing, run_dir.parent):
        assert_refused(
            lambda other=other: checkpoints.find_checkpoint(other), str(other), fix="an earlier run"
        )


class Killed(BaseException):
    """Ends a save as SIGKILL does: no handler for errors runs."""


def publish_copy(run_dir, copy, calls=99):
    """Publish a checkpoint of step 4 whose state says which copy it is, killed before the given
    call that changes names or deletes. Returns how many calls there were."""
    root = run_dir / "checkpoints"
    done = []
    temporary = root / ".tmp-step-00000004"
    temporary.mkdir(parents=True)
    (temporary / ".metadata").write_bytes(pickle.dumps(Metadata({})))

    def killed_before(call):
        def run_or_die(*args, **kwargs):
            done.append(call)
            if len(done) > calls:
                raise Killed
            return call(*args, **kwargs)

        return run_or_die

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(dist, "get_world_size", lambda: 1)
        for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree")):
            patch.setattr(module, name, killed_before(getattr(module, name)))
        checkpoints.restore_names(root)
        state = {"step": 4, "best": None, "stale": 0, "copy": copy}
        hashed = checkpoints.checksum(temporary / ".metadata")
        size = (temporary / ".metadata").stat().st_size
        checkpoints.publish(
            temporary, root / checkpoints.step_name(4), state, {".metadata": (size, hashed)}
        )
    shutil.rmtree(temporary, ignore_errors=True)
    return len(done)


def test_a_kill_while_a_step_is_saved_again_leaves_a_complete_checkpoint(tmp_path):
    """With keep_last=1 there is no other one. The next save gives it its name back."""
    num_calls = publish_copy(tmp_path / "complete", 1) + 2  # renamed first, and deleted last
    for first, second in itertools.product(range(num_calls + 1), repeat=2):
        run_dir = tmp_path / f"{first} {second}"
        publish_copy(run_dir, 1)
        copies = [1]
        for copy, calls in ((2, first), (3, second)):
            publish_copy(run_dir, copy, calls)
            found = checkpoints.find_checkpoint(run_dir)
            named = run_dir / "checkpoints/step-00000004"
            assert found == (named if named.exists() else named.with_name("step-00000004-replaced"))
            assert (
                checkpoints.find_checkpoint_of_step(run_dir, 4)
                == found
                == checkpoints.newest_checkpoint(run_dir)
            )
            assert checkpoints.find_corruption(found) is None
            copies.append(checkpoints.read_state(found)["copy"])
        assert copies == sorted(copies)
        publish_copy(run_dir, 4)
        assert checkpoints.read_state(checkpoints.find_checkpoint(run_dir))["copy"] == 4
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_save_deletes_the_older_copy_that_a_kill_left(ranks, tmp_path):
    for name in ("step-00000001", "step-00000001-replaced"):
        (tmp_path / "checkpoints" / name / "full").mkdir(parents=True)
    ranks.run(1, save_and_load_random_state, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_names_that_are_no_checkpoints_are_left_alone(tmp_path):
    for name in ("step-00000002", "step-00000004", "step-00000009.bak", "step-"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [
        checkpoints.step_of(path) for path in checkpoints.list_checkpoints(tmp_path / "checkpoints")
    ] == [
        4,
        2,
    ]
    assert_refused(
        lambda: checkpoints.find_checkpoint_of_step(tmp_path, 3), "--step=3", fix="use 2 or 4"
    )
    checkpoints.prune(tmp_path / "checkpoints", 9, keep_last=1)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-00000004", "step-00000009.bak", "step-"}


def test_pruning_leaves_later_checkpoints_alone(tmp_path):
    for step in (2, 4, 6, 8):
        (tmp_path / checkpoints.step_name(step)).mkdir()
    checkpoints.prune(tmp_path, 6, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


def test_pruning_keeps_the_previous_best_if_the_best_was_not_saved(tmp_path):
    for step, best in ((1, None), (2, [3.0, 2]), (3, [2.0, 3]), (4, [2.0, 3]), (6, [1.0, 5])):
        (tmp_path / checkpoints.step_name(step)).mkdir()
        (tmp_path / checkpoints.step_name(step) / "state.json").write_text(
            json.dumps({"step": step, "best": best})
        )
    (tmp_path / checkpoints.step_name(4) / "state.json").write_text("{")
    checkpoints.prune(tmp_path, 6, keep_last=1, best=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006"]


def test_the_newest_usable_checkpoint_decides_whether_the_decay_moves(run_dir, capsys):
    """With wsd, the decay begins at step 5, between the checkpoints. The run resumes from the
    second one if usable."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["optim"] |= {"schedule": "wsd", "cooldown_steps": 1, "decay_steps": 6}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    assert adopted(None, ["train.steps=12"], run_dir).config.optim.decay_steps == 6
    (run_dir / "checkpoints/step-00000006/state.json").write_text('{"step": 6, "tok')
    assert adopted(None, ["train.steps=12"], run_dir).config.optim.decay_steps == 12
    assert capsys.readouterr().err.count("cannot be used") == 1


def test_a_checkpoint_that_another_run_removes_counts_as_damaged(tmp_path):
    assert "FileNotFoundError" in checkpoints.find_corruption(tmp_path / "gone")
    (tmp_path / "state.json").write_text("{")
    assert "JSONDecodeError" in checkpoints.find_corruption(tmp_path)


def test_a_message_about_the_last_checkpoint_does_not_raise(tmp_path, monkeypatch):
    assert checkpoints.describe_last(tmp_path) == "There is no checkpoint yet."
    (tmp_path / "latest").touch()

    def fail(*_, **__):
        raise OSError("stale file handle")

    monkeypatch.setattr(Path, "read_text", fail)
    assert (
        checkpoints.describe_last(tmp_path)
        == f"{tmp_path}/latest cannot be read (stale file handle)."
    )


def test_a_run_resumes_whatever_its_plan_was_corrected_by(trained, run_dir, monkeypatch):
    """Traces of its plan do not change the model."""
    shape = dataclasses.replace(
        model_shape(trained), corrections={"a kind of plan": Correction(device=1.1)}
    )
    monkeypatch.setattr(runs, "model_shape", lambda config: shape)
    resumed = validate(trained, run_dir, trains=False)
    assert resumed.checkpoint == checkpoints.find_checkpoint(run_dir)


def test_replaced_files_do_not_follow_links(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    file = tmp_path / "file"
    victim.write_text("precious")
    (tmp_path / ".file.tmp").symlink_to(victim)
    file.symlink_to(victim)
    write_atomic(file, "new")
    assert victim.read_text() == "precious"
    assert file.read_text() == "new" and not file.is_symlink()
    (tmp_path / ".file.tmp").symlink_to(victim)
    # planted again right after it was removed
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: None)
    with pytest.raises(FileExistsError):
        write_atomic(file, "newer")
    (tmp_path / checkpoints.LOCK_FILE).symlink_to(victim)
    with pytest.warns(UserWarning, match="cannot be locked"):
        assert checkpoints.lock_run_dir(tmp_path) is None
    assert victim.read_text() == "precious"


def test_two_runs_in_one_directory_are_refused(trained, run_dir, ranks):
    """Both would write its checkpoints and metrics."""
    longer = dataclasses.replace(trained.train, steps=7, run_dir=run_dir)
    config = dataclasses.replace(trained, train=longer)
    before = (run_dir / "config.yaml").read_text()
    lock = checkpoints.lock_run_dir(run_dir)
    in_use = rf"in use by another run \(pid {os.getpid()} on {socket.gethostname()}\); wait"
    try:
        with pytest.raises(AssertionError, match=in_use):
            ranks.run(2, run, config, run_dir)
        (run_dir / "latest").rename(run_dir / "later")  # as before the first checkpoint
        # the other run may be about to end
        with pytest.raises(AssertionError, match=f"TransientError: .*{in_use}"):
            ranks.run(1, adopted, None, (), run_dir)
        (run_dir / "later").rename(run_dir / "latest")
        with pytest.raises(AssertionError, match=in_use):  # as if two nodes started at once
            ranks.run(1, checkpoints.lock_run_dir, run_dir)
        for auto in (False, True):  # `ithaka train` without --resume, and with --resume auto
            with pytest.raises(AssertionError, match=in_use):
                ranks.run(1, check_run_dir, run_dir, auto, False)
    finally:
        os.close(lock)
    assert (run_dir / "config.yaml").read_text() == before
    ranks.run(2, run, config, run_dir)
    assert checkpoints.find_checkpoint(run_dir).name == "step-00000007"
