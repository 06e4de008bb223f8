"""Real NCCL between processes, several ranks on one GPU: gradients, training, a dead rank and a
hung one.

Needs an NCCL that allows several ranks per GPU (2.30 and later), for example your own, loaded
before torch's: `LD_PRELOAD=DIR/libnccl.so.2 pytest tests/gpu/test_nccl.py`.
"""

import contextlib
import copy
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.comm.mesh import default_device, free_memory, make_mesh
from ithaka.config import to_yaml
from ithaka.facts import sizes as facts_sizes
from ithaka.layer import stages
from ithaka.model.build import parallelize_model
from ithaka.train import heartbeat
from ithaka.train import trainer as trainer_module
from precision import (
    LARGE,
    SEEDS,
    SMALL,
    Batch,
    Gradients,
    assert_as_good_as_autocast,
    autocast_gradients,
    bf16_layout,
    exact_gradients,
    initial_model,
    random_batch,
)
from ranks import Ranks
from runs import bitwise_metrics, copy_run_at_step, metrics, run, tiny_run, wait_for

MIN_NCCL = (2, 30)
SEVERAL_ON_ONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "LOCAL_RANK": "0"}
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

Case = tuple[int, int, dict[str, Any]]  # cp, ring, and arguments of `bf16`

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("large")]


def nccl_ranks(size: int) -> Ranks:
    on_gpu = torch.cuda.is_available()
    return Ranks(size, "cpu:gloo,cuda:nccl" if on_gpu else "gloo", **SEVERAL_ON_ONE)


def loaded_nccl() -> tuple[int, int]:
    """Return the version in use; `torch.cuda.nccl.version()` is the one that torch was built
    with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100


@pytest.fixture(scope="module")
def nccl():
    version = loaded_nccl()
    if version < MIN_NCCL:
        pytest.skip(f"NCCL {version} allows one rank per GPU; {MIN_NCCL} and later allow several")
    group = nccl_ranks(4)
    yield group
    group.close()


def yardsticks(
    model: PreTrainedModel, rows: list[Tensor]
) -> dict[int, tuple[Gradients, Gradients]]:
    """Return {number of rows: gradients of autocast and of fp64 over a batch of that many rows}."""
    batches = {number: Batch(torch.cat(rows[:number])) for number in (1, len(rows))}
    return {
        n: (autocast_gradients(model, batch), exact_gradients(model, batch))
        for n, batch in batches.items()
    }


def compare_with_autocast(family: str, cases: dict[str, Case]) -> dict[str, str]:
    """Return, on rank 0, which gradients of which cases are worse than autocast's; cases share
    models and meshes.

    Each data-parallel rank has its own sequence. Errors are pooled over several seeds: a kind of
    parameter has few tensors, and its median over one model varies by several percent. A ring has
    many rounds.
    """
    facts_sizes.ROUND_TOKENS = 1
    device = default_device()
    size = LARGE if device.type == "cuda" else SMALL
    models = [initial_model(family, size, seed, device) for seed in SEEDS]
    rows = [[random_batch(size, 10 * seed + row, device).ids for row in range(2)] for seed in SEEDS]
    references = (
        [yardsticks(*each) for each in zip(models, rows, strict=True)]
        if dist.get_rank() == 0
        else []
    )
    free_memory()
    meshes = {(cp, ring): make_mesh(cp, ring=ring) for cp, ring, _ in cases.values()}
    wrong = {}
    for name, (cp, ring, options) in cases.items():
        mesh = meshes[cp, ring]
        heads = max(size.heads // 2, cp // ring)
        layout = replace(
            bf16_layout(heads, tile_tokens=size.tokens // 3, **options), cp=cp, ring=ring
        )
        ours = []
        for model, of_seed in zip(models, rows, strict=True):
            parallel = parallelize_model(copy.deepcopy(model), mesh=mesh, layout=layout)
            ids = of_seed[mesh.dp_rank]
            parallel(input_ids=ids, labels=ids).loss.backward()
            ours.append(
                {name: param.grad.full_tensor() for name, param in parallel.named_parameters()}
            )
        if mesh.rank == 0:
            try:
                assert_as_good_as_autocast(
                    ours, *map(list, zip(*(each[mesh.dp_size] for each in references), strict=True))
                )
            except AssertionError as failure:
                wrong[name] = str(failure)
    free_memory()
    return wrong


GROUPS = {f"cp {cp}, ring {ring}": (cp, ring, {}) for cp, ring in ((2, 1), (4, 1), (4, 2), (4, 4))}
TIERS = {
    "kept on device": {"keep_attention": "device"},
    "host": {"keep_input": "host", "keep_attention": "host"},
    "streamed": {"keep_input": "host", "overlap": False},
    "disk": {"keep_input": "disk", "keep_attention": "disk"},
    "everything": {"checkpoint": False},
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_family_is_as_good_as_autocast_on_four_ranks(nccl, family):
    assert nccl.run(4, compare_with_autocast, family, GROUPS)[0] == {}


def test_every_tier_is_as_good_as_autocast_on_four_ranks(nccl):
    tiers = {name: (2, 1, options) for name, options in TIERS.items()}
    assert nccl.run(4, compare_with_autocast, "llama", tiers)[0] == {}


def configured(folder, **train):
    """Return a deterministic configuration, so that a run on as many ranks repeats bit for bit."""
    plan = {"steps": 6, "save_every": 2, "keep_last": 9, "deterministic": True, **train}
    sections = {
        "data": {"context": 512},
        "memory": {"plan": "off"},
        "parallel": {"cp": 2},
        "train": plan,
    }
    base = tiny_run(folder, model=SHAPE)
    return tiny_run(
        folder, model=SHAPE, **{**sections, "data": {**vars_of(base.data), "context": 512}}
    )


def vars_of(data):
    return {
        "path": str(data.path),
        "tokenizer": data.tokenizer,
        "validation_fraction": data.validation_fraction,
    }


def moved(config, run_dir):
    return replace(config, train=replace(config.train, run_dir=run_dir))


@pytest.fixture(scope="module")
def trained(nccl, tmp_path_factory):
    config = configured(tmp_path_factory.mktemp("nccl"))
    nccl.run(4, run, config)
    return config


def test_a_run_on_four_ranks_resumes_bitwise(nccl, trained, tmp_path):
    again = moved(trained, copy_run_at_step(trained.train.run_dir, tmp_path / "again", 2))
    nccl.run(4, run, again, again.train.run_dir)
    assert bitwise_metrics(again.train.run_dir) == bitwise_metrics(trained.train.run_dir)


def test_a_run_on_four_ranks_resumes_on_two(nccl, trained, tmp_path):
    """Twice the micro-steps process the same sequences."""
    again = moved(trained, copy_run_at_step(trained.train.run_dir, tmp_path / "again", 2))
    again = replace(again, train=replace(again.train, accumulate=2))
    nccl.run(2, run, again, again.train.run_dir)
    assert losses(again) == pytest.approx(losses(trained), rel=1e-2)


def losses(config):
    return [line["loss"] for line in metrics(config.train.run_dir) if line.get("loss") is not None]


def run_with_fault(config, folder, how: str) -> None:
    """Run, and kill or suspend rank 3 in its fifth step; the other ranks write their exit messages
    to files."""
    started = []
    advance = trainer_module.Trainer.advance
    attend = stages.StagedAttention.attend

    def count_and_advance(*args):
        started.append(args)
        return advance(*args)

    def attend_or_fail(*args):
        if dist.get_rank() == 3 and len(started) == 5:
            (folder / "failed-at").write_text(str(time.time()))
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return attend(*args)

    def leave(outcome):
        (folder / f"message-{dist.get_rank()}").write_text(f"{outcome.code} {outcome.text}")
        os._exit(outcome.code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "advance", count_and_advance)
        patch.setattr(stages.StagedAttention, "attend", attend_or_fail)
        patch.setattr(heartbeat, "exit_rank", leave)
        if how == "asleep":
            patch.setattr(heartbeat, "MIN_STEP_LIMIT_S", 15.0)
        run(config)


FAULTS = {
    "killed": r"4 rank 3 on .* has sent no heartbeat for 40 s",
    "asleep": r"4 rank 3 on .* did not arrive: no rank made progress for \d+ s",
}


@pytest.fixture(scope="module")
def failed_runs(nccl, trained, tmp_path_factory):
    """{fault: folder of the ended run}; both run at the same time, without a launcher, as between
    nodes."""
    folders = {how: tmp_path_factory.mktemp(how) for how in FAULTS}
    victims = {how: nccl_ranks(4) for how in FAULTS}
    for how, folder in folders.items():
        victims[how].start(4, folder, run_with_fault, moved(trained, folder / "run"), folder, how)
    for folder in folders.values():
        wait_for(lambda folder=folder: list(folder.glob("message-*")), timeout_s=330)
    time.sleep(3)  # until the last ranks have written their messages
    for group in victims.values():
        group.close()
    return folders


@pytest.mark.parametrize("how", FAULTS)
def test_a_rank_that_fails_ends_all_within_a_minute(nccl, trained, failed_runs, how):
    """The ranks notice it without a launcher. Then two ranks resume the run."""
    folder = failed_runs[how]
    files = list(folder.glob("message-*"))
    waited_s = min(path.stat().st_mtime for path in files) - float(
        (folder / "failed-at").read_text()
    )
    messages = "\n".join(path.read_text() for path in files)
    print(f"{how}: {waited_s:.0f} s\n{messages}")
    assert waited_s < 60
    assert re.search(FAULTS[how], messages), messages
    assert list((folder / "run/hang").glob("stacks-*"))
    if torch.cuda.is_available():
        assert list((folder / "run/hang").glob("nccl-*"))
    config = moved(trained, folder / "run")
    on_two = replace(config, train=replace(config.train, accumulate=2))
    nccl.run(2, run, on_two, on_two.train.run_dir)
    assert losses(on_two) == pytest.approx(losses(trained), rel=1e-2)


MAIN = "import os, runpy, sys; os.environ['LOCAL_RANK'] = '0'; sys.argv[0] = 'ithaka'; "
MAIN += "runpy.run_module('ithaka', run_name='__main__')"


@pytest.fixture(scope="module", autouse=True)
def under_torchrun(nccl, tmp_path_factory):
    """(process, folder) of a run on four ranks and then two, started before the other tests of this
    module."""
    folder = tmp_path_factory.mktemp("torchrun")
    commands = []
    (folder / "main.py").write_text(MAIN)
    for num_ranks, steps in ((4, 3), (2, 5)):
        file = folder / f"{num_ranks}.yaml"
        file.write_text(to_yaml(configured(folder, steps=steps, save_every=0)))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(num_ranks),
        ]
        commands.append(
            shlex.join([*command, str(folder / "main.py"), "train", str(file), "--resume", "auto"])
        )
    with (folder / "output").open("w") as output:
        started = subprocess.Popen(
            ["sh", "-c", " && ".join(commands)],
            env=os.environ | SEVERAL_ON_ONE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    yield started, folder
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)


def test_the_same_command_under_torchrun_resumes_a_run_of_four_ranks_on_two(under_torchrun):
    started, folder = under_torchrun
    code = started.wait(300)
    output = (folder / "output").read_text()
    assert code == 0, output[-4000:]
    assert "resumed after step 3" in output
    assert [line["step"] for line in metrics(folder / "run") if "loss" in line][-1] == 5
