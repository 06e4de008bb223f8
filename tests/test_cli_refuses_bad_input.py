"""Bad input exits with code 2 and one line that says what to do; no process starts and nothing is
written."""

import errno
import json
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ithaka.cli import app
from ithaka.config import (
    CPU_DEFAULT,
    GPU_DEFAULT,
    check_output,
    check_writable,
    embedded_model,
    load_config,
)
from ithaka.data.documents import files
from ithaka.exits import FINAL_EXIT_CODES, ExitCode
from ithaka.report.page import render_page
from ithaka.run import launch, rules
from refusals import assert_command_refused, assert_refused
from runs import saved_settings

TEXT = "the quick brown fox jumps over the lazy dog\n" * 50


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, on a machine without GPUs and not under torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)
    monkeypatch.setattr(launch, "num_cores", lambda: 4)
    monkeypatch.setattr(rules, "find_spec", lambda name: None)  # trackers may be installed
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch):
    """Record the runs that would start, instead of starting them."""
    calls = []

    def run_ranks(function, args, num_ranks, apart):
        run, only_profile = args
        assert not only_profile and run.num_ranks == num_ranks
        calls.append(run)
        return 0

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    return calls


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def write_model(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(embedded_model("small") | changes))
    return folder


@pytest.fixture
def inputs(folder):
    """Files and folders that commands refuse."""
    (folder / "file").touch()
    (folder / "empty").mkdir()
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").touch()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "mine.txt").write_text("mine")
    for name, file in FOREIGN_FILES.items():
        (folder / name / file).parent.mkdir(parents=True)
        (folder / name / file).write_text("train: {steps: 50}")
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(saved_settings(load_config(base=CPU_DEFAULT)))
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    (folder / "list").mkdir()
    (folder / "list" / "config.yaml").write_text("- 1")
    (folder / "hooks.py").write_text("class Counter:\n    pass\n\n\nbroken = 1\n")
    write_model(folder / "t5", model_type="t5")
    write_model(folder / "mamba2", model_type="mamba2", num_heads=3, head_dim=7)
    write_model(folder / "words", rms_norm_eps="x")
    write_model(folder / "banana", hidden_act="banana")
    write_model(folder / "below-zero", rms_norm_eps=-1e-6)
    write_model(folder / "gpt2", model_type="gpt2")
    write_model(folder / "no-heads", num_attention_heads=None)
    write_model(
        folder / "few-tokens", vocab_size=200, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    write_model(folder / "no-weights")
    (write_model(folder / "pickled") / "pytorch_model.bin").touch()
    return folder


# Files that show that a directory may not be a run's.
FOREIGN_FILES = {
    "has-report": "report.html",
    "has-metrics": "metrics.jsonl",
    "has-tokens": "tokens/mine.txt",
    "has-git": ".git/HEAD",
    "has-config": "config.yaml",
}
NOT_A_RUN = [
    (f"--run-dir {name}", f"train.run_dir={name}", file.partition("/")[0], "--force")
    for name, file in FOREIGN_FILES.items()
]
UNUSABLE_PATHS = [
    ("loop", "Too many levels of symbolic links"),
    ("loop/run", "Too many levels of symbolic links"),
    ("dangling", "No such file or directory"),
    ("dangling/run", "No such file or directory"),
    ("file", "Not a directory"),
    ("file/run", "Not a directory"),
    ("x" * 300, "File name too long"),
]
UNUSABLE_RUN_DIRS = [
    (f"--run-dir {path}", f"train.run_dir={path}", reason, "another")
    for path, reason in UNUSABLE_PATHS
]

# One table per command. Each row has the arguments; the settings, values and files that the message
# names; the fix.
TRAIN = [
    ("missing.yaml", "config=missing.yaml", "No such file", "YAML file"),
    ("--set train.stepz=5", "train.stepz=5", "did you mean train.steps?"),
    (
        "--set train.accumulate=2 --set train.global_batch=4",
        "train.accumulate=2",
        "train.global_batch=4",
        "leave one",
    ),
    (
        "--ranks 2 --set parallel.cp=1 --set train.global_batch=3",
        "train.global_batch=3",
        "train.batch=1",
        "2 or 4",
    ),
    ("--set data.context=0", "data.context=0", "at least 2"),
    (
        "--set parallel.cp=6 --ranks 8",
        "parallel.cp=6",
        "8 ranks",
        "1, 2, 4 or 8, or change the number of ranks",
    ),
    ("--set parallel.cp=4", "parallel.cp=4", "2 ranks", "1 or 2"),
    ("--set parallel.cp=3 --ranks 1", "parallel.cp=3", "1 rank", "use 1,"),
    (
        "--set parallel.ring=2 --ranks 16",
        "parallel.cp=16",
        "4 query heads x parallel.ring=2",
        "parallel.ring=4, 8 or 16, or parallel.cp=2, 4 or 8",
    ),
    ("--set parallel.replicas=3", "parallel.replicas=3", "2 ranks", "1 or 2"),
    ("--ranks 0", "parallel.ranks=0", "at least 1"),
    ("--ranks 64", "parallel.ranks=64", "4 cores", "at most 16, or start the ranks with torchrun"),
    (
        "--set parallel.heads_per_stage=3",
        "parallel.heads_per_stage=3",
        "parallel.cp=2",
        "2, 4 or all",
    ),
    ("--set parallel.heads_per_stage=10", "parallel.heads_per_stage=10", "4 query heads", "all"),
    (
        "--set memory.checkpoint=full --set memory.keep_attention=5",
        "memory.keep_attention=5",
        "2 layers",
        "all",
    ),
    ("--set optim.decay_steps=6", "optim.decay_steps=6", "optim.warmup_steps=6", "more, or null"),
    (
        "--set optim.cooldown_steps=6",
        "optim.cooldown_steps=6",
        "optim.schedule=cosine",
        "optim.schedule=wsd",
    ),
    (
        "--set optim.schedule=wsd --set optim.cooldown_steps=9 --set optim.decay_steps=10",
        "optim.cooldown_steps=9",
        "optim.warmup_steps=6",
        "at most 4",
    ),
    ("--set train.track=[wandb]", "train.track=wandb", "pip install wandb"),
    ("--set train.track=wandb", "train.track=wandb", "a list such as [tensorboard]"),
    ("--set attention.kernel=magic", "attention.kernel=magic", "auto, "),
    ("--set attention.kernel=fa4", "attention.kernel=fa4", "GPU", "auto"),
    ("--set evaluate.data=nowhere", "evaluate.data=nowhere", "evaluate.every=0", "leave it out"),
    (
        "--set train.callbacks=[nomod:C]",
        "train.callbacks=nomod:C",
        "No module named 'nomod'",
        "package.module:Class",
    ),
    (
        "--set train.callbacks=[hooks:Missing]",
        "train.callbacks=hooks:Missing",
        "no attribute",
        "package.module:Class",
    ),
    (
        "--set train.callbacks=[hooks:Counter]",
        "train.callbacks=hooks:Counter",
        "Counter(run_dir, config)",
        "a class",
    ),
    ("--set train.callbacks=[hooks]", "train.callbacks=hooks", "package.module:Class"),
    (
        "--set loss=nomod:f",
        "loss.type=nomod:f",
        "No module named 'nomod'",
        "package.module:function",
    ),
    (
        "--set loss=os:getcwd",
        "loss.type=os:getcwd",
        "getcwd(tokens, labels)",
        "package.module:function",
    ),
    (
        "--set loss=hooks:broken",
        "loss.type=hooks:broken",
        "not a callable",
        "package.module:function",
    ),
    (
        "--set train.keep_best=true --set data.validation_fraction=0",
        "train.keep_best=true",
        "data.validation_path",
    ),
    ("--set memory.disk_path=nowhere", "memory.disk_path=nowhere", "create it"),
    ("--set model.path=nowhere", "model.path=nowhere", "No such file", "config.json"),
    ("--set model.path=run", "model.path=run/config.json", "`ithaka export RUN_DIR OUT_DIR`"),
    ("--set model.path=adapter", "model.path=adapter/config.json", "its base model"),
    ("--set model.path=gpt2", "model_type=gpt2", "llama"),
    ("--set model.path=t5", "model_type=t5", "not a decoder", "gemma3_text"),
    ("--set model.path=mamba2", "model_type=mamba2", "(ValueError: Inconsistent", "fix the value"),
    ("--set model.path=words/config.json", "rms_norm_eps", "expected float", "fix the value"),
    ("--set model.path=banana/config.json", "hidden_act=banana", "banana/config.json", "silu"),
    (
        "--set model.path=below-zero/config.json",
        "rms_norm_eps=-1e-06",
        "below-zero/config.json",
        "1.0e-6",
    ),
    ("--set model.path=no-heads", "num_attention_heads", "no-heads", "config.json"),
    ("--set model.path=no-weights", "model.path=no-weights", "no-weights/config.json"),
    (
        "--set model.path=no-weights --evaluate-only",
        "model.path=no-weights",
        "no-weights/config.json",
    ),
    ("--set model.path=pickled", "model.path=pickled", "pytorch_model.bin", "pickled/config.json"),
    (
        "--set model.path=pickled --evaluate-only",
        "model.path=pickled",
        "pytorch_model.bin",
        "pickled/config.json",
    ),
    (
        "--set model.path=few-tokens/config.json --set data.tokenizer=bytes",
        "259",
        "vocab_size=200",
        "data.tokenizer",
    ),
    (
        "--set train.batch=1000000000",
        "data.context=4096 with train.batch=1000000000",
        "a smaller train.batch",
    ),
    ("--set adapter.rank=100000", "adapter.rank=100000", "hidden size 256", "16"),
    ("--set 'optim.lr_factors={banana: 0.5}'", "optim.lr_factors=banana", "embed_tokens"),
    (
        "--set 'optim.lr_factors={embed:0.5}'",
        "optim.lr_factors={embed:0.5} has embed:0.5",
        "a space after the colon",
    ),
    ("--set adapter.base=mxfp4", "adapter.base=mxfp4", "nf4"),
    (
        "--set adapter.unquantized=[none,up_proj,1.mlp.up_proj]",
        "adapter.unquantized=none",
        "o_proj",
    ),
    ("--set data.path=nowhere.txt", "data.path=nowhere.txt", "data.path=hf://org/name"),
    ("--set data.path=s3://bucket/a.jsonl", "data.path=s3://bucket/a.jsonl", "remote", "download"),
    (
        "--set data.path=https://a.org/b.jsonl",
        "data.path=https://a.org/b.jsonl",
        "remote",
        "download",
    ),
    ("--set data.path=gpt2", "data.path=gpt2", "model's directory", "text or records"),
    ("--set data.path=file", "data.path=file", "JSONL"),
    ("--set data.path=empty", "data.path=empty", "JSONL"),
    (
        "--set data.validation_path=nowhere.txt",
        "data.validation_path=nowhere.txt",
        "data.validation_path=hf://org/name",
    ),
    ("--set data.tokenizer=nowhere", "data.tokenizer=nowhere", "bytes"),
    ("--run-dir ''", "--run-dir=''", "the current directory"),
    (
        "--run-dir run",
        "train.run_dir=run",
        "another --run-dir, or continue it: ithaka train --resume run",
    ),
    ("--set train.run_dir=run", "train.run_dir=run", "--resume run"),
    *NOT_A_RUN,
    *UNUSABLE_RUN_DIRS,
    ("--resume run", "run directory run", "checkpoint", "new run"),
    ("--resume nowhere", "--resume nowhere", "config.yaml", "the directory of an earlier run"),
    ("--resume nowhere run.yaml", "config=run.yaml", "--resume nowhere", "--set"),
    ("--resume nowhere --run-dir other", "--run-dir other", "--resume nowhere", "leave it out"),
    *((f"--resume {path}", f"--resume {path}", "directory") for path, _ in UNUSABLE_PATHS),
    ("--resume auto", "--resume auto", "train.run_dir", "--run-dir DIR"),
    *((f"--resume auto {options}", *rest) for options, *rest in (*NOT_A_RUN, *UNUSABLE_RUN_DIRS)),
]
PROFILE = [
    ("--run-dir=", "--run-dir=''", "the current directory"),
    ("--run-dir run", "train.run_dir=run", "another --run-dir"),
    *NOT_A_RUN,
    ("--set train.steps=abc", "--set train.steps", "--steps"),
    ("--set train.steps=7", "--set train.steps", "--steps"),
    ("--set train.epochs=1", "--set train.epochs", "--steps"),
    ("--set train.validate_every=1", "--set train.validate_every", "--steps"),
]
EXPORT = [
    ("nowhere out", "nowhere", "the directory of an earlier run"),
    ("empty out", "empty has no config.yaml", "the directory of an earlier run"),
    ("empty out --push org/name", "empty has no config.yaml", "the directory of an earlier run"),
    ("run ''", "OUT_DIR=''", "the current directory"),
    ("run has-report", "OUT_DIR=has-report", "report.html", "--force"),
    ("run file/x", "OUT_DIR=file/x", "Not a directory", "another path"),
    ("run /proc/none", "OUT_DIR=/proc/none", "another path"),
    ("run /proc/none/deeper", "OUT_DIR=/proc/none/deeper", "another path"),
]
OUT = [
    *(
        (f"--out {path}", f"--out={path}", "another path")
        for path in ("none/x", "/proc/none", "file/x", "empty")
    ),
    ("--out mine.txt", "--out=mine.txt", "--force"),
]
HTML = [("--html mine.txt", "--html=mine.txt", "--force")]
DATA = [
    *HTML,
    (
        "--set 'data.sources=[{path: file}, {path: file}]'",
        "data.sources",
        "path=file twice",
        "larger weight",
    ),
    (
        "--set 'data.sources=[{path:file}]'",
        "data.sources=[{path:file}] has path:file",
        "a space after the colon",
    ),
    ("--set data.chat_template=qwen5", "data.chat_template=qwen5", "chatml, llama3"),
    ("--set data.path=loop", "data.path=loop", "symbolic links", "another path"),
    ("--set data.path=dangling", "data.path=dangling", "not a regular file", "a file"),
]
REFUSALS = {
    "train": TRAIN,
    "profile": PROFILE,
    "export": EXPORT,
    "report run": OUT,
    "plan llama3-8b --gpus 8xH100-80GB": OUT,
    "bench device": OUT,
    "data": DATA,
    "bench attention --tokens 64": [
        ("--documents 65", "--documents=65", "--tokens=64", "one per token"),
        ("--heads 3 --kv-heads 2", "--heads=3", "--kv-heads=2", "use 2"),
        ("--kernels magic", "--kernels=magic", "auto"),
    ],
    "verify": [
        ("''", "MODEL=''", "llama3.1-8b"),
        ("mine.txt", "MODEL=mine.txt", "a model directory"),
    ],
    "report": [("list", "RUN_DIR=list", "no sections", "restore")],
    "evaluate model": [*HTML, ("--contexts 1,4K", "--contexts=1,4K", "one token", "at least 2")],
}


def assert_refused_at_start(folder, started, arguments, *named, fix):
    before = contents(folder)
    assert_command_refused(arguments, *named, fix=fix)
    assert started == [] and contents(folder) == before


@pytest.mark.parametrize(
    "arguments, named, fix",
    [
        (f"{command} {arguments}", named, fix)
        for command, rows in REFUSALS.items()
        for arguments, *named, fix in rows
    ],
)
def test_bad_input_is_refused_before_anything_starts(inputs, started, arguments, named, fix):
    assert_refused_at_start(inputs, started, shlex.split(arguments), *named, fix=fix)


def test_unknown_settings_are_refused_without_importing_torch(tmp_path):
    (tmp_path / "run.yaml").write_text("train: {stepz: 3}\n")
    commands = [[name, "--set", "train.stepz=3"] for name in ("train", "profile", "data")]
    commands += [["train", "run.yaml"], ["train", "--evaluate-only", "run.yaml"]]
    code = (
        "import sys; from typer.testing import CliRunner; from ithaka.cli import app\n"
        f"for command in {commands}:\n"
        "    assert 'did you mean train.steps?' in CliRunner().invoke(app, command).stderr, "
        "command\n"
        "    assert not {'torch', 'transformers', 'numpy'} & {*sys.modules}, command"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_more_ranks_than_gpus_are_refused(folder, started, monkeypatch):
    monkeypatch.setattr(launch, "num_gpus", lambda: 2)
    assert_refused_at_start(
        folder, started, ["train", "--ranks", "4"], "parallel.ranks=4", fix="at most 2"
    )


def test_restarts_under_torchrun_are_refused(folder, started, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused_at_start(
        folder, started, ["train", "--max-restarts", "3"], "--max-restarts=3", fix="torchrun"
    )


# ---- valid input starts


def test_forced_and_crashed_run_directories_are_reused(folder, started):
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("mine")
    (folder / "crashed" / "tokens").mkdir(parents=True)
    (folder / "crashed" / "tokens" / "abc.tokens").write_text("")
    (folder / "crashed" / "hang").mkdir()
    (folder / "crashed" / "slurm-1.out").write_text("")
    (folder / "empty").mkdir()
    (folder / "no-step").mkdir()
    (folder / "no-step" / "config.yaml").write_text(saved_settings(load_config(base=CPU_DEFAULT)))
    (folder / "no-step" / "metrics.jsonl").write_text(
        '{"step": 0, "loss": null, "val_loss": 5.5}\n'
    )
    for arguments in (
        ["mine", "--force"],
        ["crashed"],
        ["crashed", "--resume", "auto"],
        ["empty"],
        ["no-step"],
    ):
        result = CliRunner().invoke(app, ["train", "--run-dir", *arguments])
        assert result.exit_code == 0, result.output
    assert len(started) == 5 and (folder / "mine" / "notes.txt").read_text() == "mine"


def test_defaults_start_two_ranks_that_share_a_sequence(folder, started):
    result = CliRunner().invoke(app, ["train", "--set", "train.steps=7"])
    assert result.exit_code == 0, result.output
    [run] = started
    config = run.config
    resume = run.checkpoint
    num_ranks = run.num_ranks
    assert (num_ranks, resume, config.parallel.cp, config.train.steps) == (2, None, "all", 7)
    assert config.data.context == CPU_DEFAULT["data"]["context"] >= 4096
    assert config.train.run_dir.parent.name == "runs" and contents(folder) == {}


def test_gpus_get_a_larger_model_and_128k(folder, started, monkeypatch):
    monkeypatch.setattr(launch, "num_gpus", lambda: 4)
    assert CliRunner().invoke(app, ["train"]).exit_code == 0
    [run] = started
    config = run.config
    num_ranks = run.num_ranks
    assert (num_ranks, config.model.embedded, config.data.context) == (4, "base", 128 * 1024)
    assert config.optim.lr == GPU_DEFAULT["optim"]["lr"]


def test_a_users_model_starts_from_plain_defaults(folder, started):
    write_model(folder / "model")
    (folder / "text.txt").write_text(TEXT * 3)
    arguments = [
        "train",
        "--set",
        "model.path=model/config.json",
        "--set",
        "data.path=text.txt",
        "--set",
        "data.tokenizer=bytes",
    ]
    result = CliRunner().invoke(app, [*arguments, "--ranks", "1", "--run-dir", "here"])
    assert result.exit_code == 0, result.output
    [run] = started
    config = run.config
    num_ranks = run.num_ranks
    assert (num_ranks, str(config.train.run_dir), config.optim.lr) == (1, "here", 3e-4)


@pytest.fixture
def run_dir(folder, monkeypatch):
    """A run of the default model with a checkpoint after step 5."""
    monkeypatch.setattr(
        "ithaka.checkpoint.checkpoints.find_checkpoint", lambda run_dir, **_: run_dir
    )
    state = {"step": 5, "stale": 0, "epochs": None, "checksums": {}}
    monkeypatch.setattr("ithaka.checkpoint.checkpoints.read_state", lambda path: state)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(
        saved_settings(load_config(overrides=["train.seed=5"], base=CPU_DEFAULT))
    )
    write_model(folder / "run" / "model")
    return folder / "run"


def test_resume_uses_the_saved_settings(run_dir, started):
    result = CliRunner().invoke(
        app, ["train", "--resume", "run", "--set", "train.steps=99", "--ranks", "1"]
    )
    assert result.exit_code == 0, result.output
    [run] = started
    config = run.config
    resume = run.checkpoint
    num_ranks = run.num_ranks
    assert (config.train.seed, config.train.steps, num_ranks) == (5, 99, 1)
    assert str(config.train.run_dir) == "run" and resume.is_relative_to("run")


def test_a_longer_run_moves_a_decay_that_has_not_begun(run_dir, started, monkeypatch):
    """With wsd and a checkpoint of step 10, the decay begins at step 8 or 12."""
    state = {"step": 10, "stale": 0, "epochs": None, "checksums": {}}
    monkeypatch.setattr("ithaka.checkpoint.checkpoints.read_state", lambda path: state)
    monkeypatch.setattr("ithaka.checkpoint.checkpoints.newest_checkpoint", lambda run_dir: run_dir)
    for cooldown, expected in ((12, 20), (8, 99)):
        saved = saved_settings(load_config(overrides=["train.steps=20"], base=CPU_DEFAULT))
        config = yaml.safe_load(saved)
        config["optim"] |= {"schedule": "wsd", "cooldown_steps": cooldown, "decay_steps": 20}
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
        result = CliRunner().invoke(
            app, ["train", "--resume", "run", "--set", "train.steps=99", "--ranks", "1"]
        )
        assert result.exit_code == 0, result.output
        assert started[-1].config.optim.decay_steps == expected


@pytest.mark.parametrize(
    "saved, changes, expected",
    [
        (24, ["train.steps=99"], 24),
        (None, ["train.steps=99"], 48),
        ("no field", ["train.steps=99"], 48),
        (24, ["train.steps=99", "optim.decay_steps=80"], 80),
        pytest.param(24, ["train.steps=99", "optim.decay_steps=null"], 99, marks=pytest.mark.slow),
        pytest.param(24, [], 24, marks=pytest.mark.slow),
        pytest.param(7, ["train.steps=99"], 7, marks=pytest.mark.slow),
        (6, ["train.steps=99"], 99),  # the warm-up takes six steps, so the cosine has not begun
    ],
)
def test_a_longer_run_keeps_its_learning_rate_schedule(run_dir, started, saved, changes, expected):
    config = yaml.safe_load(
        saved_settings(load_config(overrides=["train.steps=48"], base=CPU_DEFAULT))
    )
    config["optim"]["decay_steps"] = saved
    if saved == "no field":
        del config["optim"]["decay_steps"]
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    sets = [argument for change in changes for argument in ("--set", change)]
    result = CliRunner().invoke(app, ["train", "--resume", "run", *sets, "--ranks", "1"])
    assert result.exit_code == 0, result.output
    assert started[0].config.optim.decay_steps == expected


@pytest.mark.parametrize("sets, expected", [([], 7), (["--set", "optim.decay_steps=9"], 9)])
def test_a_new_run_saves_the_length_of_its_schedule(folder, started, sets, expected):
    result = CliRunner().invoke(app, ["train", "--set", "train.steps=7", *sets, "--ranks", "1"])
    assert result.exit_code == 0, result.output
    assert started[0].config.optim.decay_steps == expected


RESUME = [
    ("train.seed=6", "train.seed=6", "5", "leave it out"),
    ("train.run_dir=other", "train.run_dir", "--resume run", "leave it out"),
    ("train.steps=3", "train.steps=3", "--set train.steps=10"),
    ("model.embedded=base", "model.embedded=base", "new run"),
]


@pytest.mark.parametrize(
    "change, named, fix", [(change, named, fix) for change, *named, fix in RESUME]
)
def test_changes_that_a_checkpoint_does_not_allow_are_refused(run_dir, started, change, named, fix):
    arguments = ["train", "--resume", "run", "--set", change]
    assert_refused_at_start(run_dir.parent, started, arguments, *named, fix=fix)


def test_max_positions_may_grow_on_resume(run_dir, started):
    write_model(run_dir.parent / "longer", max_position_embeddings=1 << 20)
    arguments = [
        "--set",
        "model.path=longer",
        "--set",
        "data.tokenizer=bytes",
        "--set",
        "data.context=8192",
    ]
    result = CliRunner().invoke(app, ["train", "--resume", "run", *arguments])
    assert result.exit_code == 0, result.output
    assert started[0].config.data.context == 8192


def test_the_command_exits_with_the_code_of_the_ranks(folder, monkeypatch):
    monkeypatch.setattr(
        launch, "run_ranks", lambda function, args, num_ranks, apart: ExitCode.DIVERGED
    )
    assert CliRunner().invoke(app, ["train"]).exit_code == ExitCode.DIVERGED


def test_resume_auto_starts_resumes_and_ends(run_dir, started):
    shutil.rmtree(run_dir / "model")
    command = [
        "train",
        "--resume",
        "auto",
        "--run-dir",
        "run",
        "--ranks",
        "1",
        "--set",
        "train.seed=5",
    ]
    assert CliRunner().invoke(app, command).exit_code == 0  # killed before its first checkpoint
    (run_dir / "checkpoints/step-00000005").mkdir(parents=True)
    assert CliRunner().invoke(app, [*command, "--set", "train.steps=99"]).exit_code == 0
    assert [(str(run.run_dir), run.checkpoint) for run in started] == [
        ("run", None),
        ("run", Path("run")),
    ]
    assert (started[1].config.optim.decay_steps, started[1].config.train.steps) == (72, 99)
    result = CliRunner().invoke(app, [*command, "--set", "train.steps=5"])
    assert (result.exit_code, result.stdout, len(started)) == (
        0,
        result.stdout,
        2,
    ) and "5 steps" in result.stdout


@pytest.mark.parametrize(
    "codes, saves",
    [
        ([ExitCode.HANG, ExitCode.DONE], []),
        ([ExitCode.FAILED, ExitCode.FAILED], []),
        ([ExitCode.TRANSIENT, ExitCode.DONE], []),
        # a checkpoint resets the count
        ([ExitCode.HANG, ExitCode.HANG, ExitCode.TRANSIENT, ExitCode.FAILED], [2, 3]),
        *(
            pytest.param([code], [], marks=[pytest.mark.slow] * (i > 0))
            for i, code in enumerate(sorted(FINAL_EXIT_CODES))
        ),
        ([ExitCode.SIGNALED + signal.SIGTERM], []),
    ],
)
def test_failed_ranks_restart_unless_the_exit_code_is_final(folder, monkeypatch, codes, saves):
    runs = []

    def run_ranks(function, args, num_ranks, apart):
        assert apart
        runs.append(args[0].run_dir)
        (args[0].run_dir).mkdir(parents=True, exist_ok=True)
        (args[0].run_dir / "config.yaml").write_text(args[0].saved_settings)
        if len(runs) in saves:
            (args[0].run_dir / "latest").write_text(f"step-{len(runs)}")
        return codes[len(runs) - 1]

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    monkeypatch.setattr(launch, "RETRY_S", 0.0)
    result = CliRunner().invoke(app, ["train", "--max-restarts", "1"])
    assert (result.exit_code, len(runs), len(set(runs))) == (codes[-1], len(codes), 1)
    assert result.stderr.count("Restart 1 of 1") == len(codes) - 1


@pytest.mark.parametrize("times, exit_code", [(1, ExitCode.DONE), (2, ExitCode.TRANSIENT)])
def test_a_transient_fault_before_the_ranks_start_is_restarted(
    folder, started, monkeypatch, times, exit_code
):
    """The fault is a raw OSError. Once no restarts are left, one line reports it and nothing is
    written."""
    faults = [OSError(errno.ESTALE, "Stale file handle", "text.txt")] * times
    head = files._read_head
    (folder / "text.txt").write_text(TEXT * 100)
    monkeypatch.setattr(files, "_read_head", lambda path: raise_first(faults) or head(path))
    monkeypatch.setattr(launch, "RETRY_S", 0.0)
    result = CliRunner().invoke(
        app, ["train", "--set", "data.path=text.txt", "--max-restarts", "1"]
    )
    assert (result.exit_code, len(started)) == (exit_code, times % 2), result.output
    assert (
        result.stderr.count("TransientError: OSError: [Errno 116] Stale file handle: 'text.txt'\n")
        == times
    )
    assert result.stderr.count("Restart 1 of 1") == 1


def raise_first(errors):
    if errors:
        raise errors.pop()


def test_a_planned_file_is_overwritten_unless_it_was_edited(folder):
    plan = ["plan", "llama3.2-1b", "--gpus", "H200", "--context", "8K", "--out", "long.yaml"]
    for _ in range(2):
        assert CliRunner().invoke(app, plan).exit_code == 0
    planned = (folder / "long.yaml").read_text()
    (folder / "long.yaml").write_text(planned + "# mine\n")
    assert_command_refused(plan, "--out=long.yaml", fix="--force")
    assert (folder / "long.yaml").read_text() == planned + "# mine\n"
    assert CliRunner().invoke(app, [*plan, "--force"]).exit_code == 0
    assert (folder / "long.yaml").read_text() == planned


def test_our_own_pages_and_empty_files_are_replaced(tmp_path):
    (tmp_path / "page.html").write_text(render_page("Title", "body"))
    (tmp_path / "empty").write_text("")
    (tmp_path / "other.html").write_text("<html><title>mine</title></html>")
    check_output("--html", tmp_path / "page.html", force=False)
    check_output("--html", tmp_path / "empty", force=False)
    replace_other = partial(check_output, "--html", tmp_path / "other.html", force=False)
    assert_refused(replace_other, "other.html", fix="--force")
    check_output("--html", tmp_path / "other.html", force=True)


def test_checking_writable_files_changes_nothing(tmp_path):
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        check_writable("--out", tmp_path / name)
    check_writable("OUT_DIR", tmp_path / "a" / "b", folder=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (
        tmp_path / "old"
    ).read_text() == "old"


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # imports raise ModuleNotFoundError, as if it were not installed
from typer.testing import CliRunner
from ithaka.cli import app
for command in sys.argv[1:]:
    result = CliRunner().invoke(app, command.split())
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
"""


def test_without_torch_plans_work_and_other_commands_say_what_is_missing(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(embedded_model("small") | {"num_hidden_layers": 3})
    )
    measured = "plan config.json --gpus 8xH100 --context 4K"
    commands = [
        "plan llama3-8b --gpus 8xH100 --context 128K",
        "--version",
        "train",
        "doctor",
        measured,
    ]
    command = [sys.executable, "-c", WITHOUT_TORCH, *commands]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (planned, plan, _), (code, *_), *refused = map(json.loads, done.stdout.splitlines())
    assert planned == code == ExitCode.DONE and "fits" in plan
    for command, (code, _, stderr) in zip(commands[2:], refused, strict=True):
        assert code == ExitCode.WRONG_INPUT and stderr.count("\n") == 1, stderr
        name = f"`ithaka {command.split()[0]}` needs torch"
        assert_refused(stderr.removeprefix("ConfigError: "), name, fix="pip install torch")
