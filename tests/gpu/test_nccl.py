"""Real NCCL between real processes, several ranks on one GPU: gradients, training, a dead rank and a hung one.

Needs an NCCL that takes several ranks per GPU (2.30 and later), for example one of your own before torch's:
`LD_PRELOAD=DIR/libnccl.so.2 pytest tests/gpu/test_nccl.py`.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

from ithaka.config import to_yaml
from ithaka.dist.mesh import default_device, make_mesh
from ithaka.layer import stages
from ithaka.model.build import parallelize
from ithaka.plan import rounds
from ithaka.train import heartbeat
from precision import (
    LARGE,
    SEEDS,
    SMALL,
    Batch,
    assert_as_good_as_autocast,
    autocast_gradients,
    bf16,
    exact_gradients,
    initial_model,
    random_batch,
)
from ranks import Ranks
from runs import copy_back_at, metrics, numbers, run, tiny_run, wait_for

LEAST_NCCL = (2, 30)
SEVERAL_ON_ONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "LOCAL_RANK": "0"}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("nccl")]


def nccl_ranks(size: int) -> Ranks:
    on_gpu = torch.cuda.is_available()
    return Ranks(size, "cpu:gloo,cuda:nccl" if on_gpu else "gloo", **SEVERAL_ON_ONE)


def loaded_nccl() -> tuple[int, int]:
    """`torch.cuda.nccl.version()` is the one that torch was built with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100


@pytest.fixture(scope="module")
def nccl():
    found = loaded_nccl()
    if found < LEAST_NCCL:
        pytest.skip(f"NCCL {found} takes one rank per GPU; {LEAST_NCCL} and later take several")
    group = nccl_ranks(4)
    yield group
    group.close()


@lru_cache(len(SEEDS))
def yardsticks(family: str, num_rows: int, seed: int):
    """Gradients of autocast and of fp64, over a batch of `num_rows` sequences."""
    device = default_device()
    size = LARGE if device.type == "cuda" else SMALL
    rows = [random_batch(size, row_seed(seed, row), device).ids for row in range(num_rows)]
    model, batch = initial_model(family, size, seed, device), Batch(torch.cat(rows))
    return autocast_gradients(model, batch), exact_gradients(model, batch)


def row_seed(seed: int, row: int) -> int:
    return 10 * seed + row


def as_good_as_autocast(family: str, cp: int, ring: int, options: dict) -> None:
    """Each data-parallel rank has a sequence of its own. Rank 0 compares, over several seeds: a kind of parameter has
    few tensors, and its median over one model varies by several percent. A ring has many rounds."""
    rounds.ROUND_TOKENS = 1
    device, mesh = default_device(), make_mesh(cp, ring=ring)
    size = LARGE if device.type == "cuda" else SMALL
    layout = replace(bf16(size.heads // 2, tile_tokens=size.tokens // 3, **options), cp=cp, ring=ring)
    layout, compared = replace(layout, kept=layout.kept * size.layers), []
    for seed in SEEDS:
        ours = parallelize(initial_model(family, size, seed, device), mesh=mesh, layout=layout)
        batch = random_batch(size, row_seed(seed, mesh.dp_rank), device)
        ours(input_ids=batch.ids, labels=batch.ids).loss.backward()
        grads = {name: param.grad.full_tensor() for name, param in ours.named_parameters()}
        if mesh.rank == 0:
            compared.append((grads, *yardsticks(family, mesh.dp_size, seed)))
    if mesh.rank == 0:
        assert_as_good_as_autocast(*map(list, zip(*compared, strict=True)))


TIERS = {
    "kept on device": {"keep_attention": "device"},
    "host": {"keep_input": "host", "keep_attention": "host"},
    "streamed": {"keep_input": "host", "overlap": False},
    "disk": {"keep_input": "disk", "keep_attention": "disk"},
    "everything": {"checkpoint": False},
}


@pytest.mark.parametrize("cp, ring", [(2, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_family_on_four_ranks(nccl, family, cp, ring):
    nccl.run(4, as_good_as_autocast, family, cp, ring, {}, timeout_s=300)


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_on_four_ranks(nccl, tier):
    nccl.run(4, as_good_as_autocast, "llama", 2, 1, TIERS[tier], timeout_s=300)


def configured(folder, **train):
    """Sums in a fixed order, so that a run repeats to the bit on as many ranks."""
    plan = {"steps": 6, "save_every": 2, "keep_last": 9, "deterministic": True, **train}
    sections = {"data": {"context": 512}, "memory": {"plan": "off"}, "parallel": {"cp": 2}, "train": plan}
    base = tiny_run(folder, model=SHAPE)
    return tiny_run(folder, model=SHAPE, **{**sections, "data": {**vars_of(base.data), "context": 512}})


def vars_of(data):
    return {"path": str(data.path), "tokenizer": data.tokenizer, "validation_fraction": data.validation_fraction}


def moved(config, run_dir):
    return replace(config, train=replace(config.train, run_dir=run_dir))


@pytest.fixture(scope="module")
def trained(nccl, tmp_path_factory):
    config = configured(tmp_path_factory.mktemp("nccl"))
    nccl.run(4, run, config, timeout_s=300)
    return config


def test_a_run_on_four_ranks_goes_on_with_the_same_bits(nccl, trained, tmp_path):
    again = moved(trained, copy_back_at(trained.train.run_dir, tmp_path / "again", 2))
    nccl.run(4, run, again, again.train.run_dir, timeout_s=300)
    assert numbers(again.train.run_dir) == numbers(trained.train.run_dir)


def test_it_goes_on_with_two_ranks(nccl, trained, tmp_path):
    """Of twice the micro-steps: the same sequences."""
    again = moved(trained, copy_back_at(trained.train.run_dir, tmp_path / "again", 2))
    again = replace(again, train=replace(again.train, accumulate=2))
    nccl.run(2, run, again, again.train.run_dir, timeout_s=300)
    assert losses(again) == pytest.approx(losses(trained), rel=1e-2)


def losses(config):
    return [line["loss"] for line in metrics(config.train.run_dir) if line.get("loss") is not None]


def falls_out(config, folder, how: str) -> None:
    """Rank 3 is killed, or sleeps, in the middle of its fifth step; what the others say as they leave goes to files."""
    calls, attend = [], stages.HeldHeads.attend

    def attend_or_not(*args):
        calls.append(args)
        in_step = len(calls) > 4 * 8 + 2 and (config.train.run_dir / "latest").exists()
        if dist.get_rank() == 3 and in_step:
            (folder / "fell").write_text(str(time.time()))
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return attend(*args)

    def leave(outcome):
        (folder / f"words-{dist.get_rank()}").write_text(f"{outcome.code} {outcome.text}")
        os._exit(outcome.code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.HeldHeads, "attend", attend_or_not)
        patch.setattr(heartbeat, "leave", leave)
        if how == "asleep":
            patch.setattr(heartbeat, "LEAST_S", 15.0)
        run(config)


@pytest.mark.parametrize("how", ["killed", "asleep"])
def test_a_rank_that_falls_out_ends_all_within_a_minute(nccl, trained, tmp_path, how):
    """Without a launcher, as between nodes: the ranks notice by themselves. Then two ranks go on."""
    config, victims = moved(trained, tmp_path / "run"), nccl_ranks(4)
    victims.start(4, tmp_path, falls_out, config, tmp_path, how)
    wait_for(lambda: (tmp_path / "fell").exists() and (tmp_path / "fell").read_text(), timeout_s=240)
    fell_at = time.monotonic()
    wait_for(lambda: any((tmp_path / f"words-{rank}").exists() for rank in range(4)), timeout_s=90)
    waited_s = time.monotonic() - fell_at
    time.sleep(3)
    told = "\n".join(path.read_text() for path in tmp_path.glob("words-*"))
    victims.close()
    assert waited_s < 60, f"{waited_s:.0f} s"
    words = "has not been heard of for 40 s" if how == "killed" else "did not arrive: no rank moved for 15 s"
    assert "4 rank 3 on " in told and words in told, told
    assert list((tmp_path / "run/hang").glob("stacks-*"))
    if torch.cuda.is_available():
        assert list((tmp_path / "run/hang").glob("nccl-*"))
    print(f"{how}: {waited_s:.0f} s\n{told}")
    on_two = replace(config, train=replace(config.train, accumulate=2))
    nccl.run(2, run, on_two, on_two.train.run_dir, timeout_s=300)
    assert losses(on_two) == pytest.approx(losses(trained), rel=1e-2)


MAIN = "import os, runpy, sys; os.environ['LOCAL_RANK'] = '0'; sys.argv[0] = 'ithaka'; "
MAIN += "runpy.run_module('ithaka', run_name='__main__')"


def test_the_same_command_under_torchrun_on_four_ranks_and_then_two(nccl, trained, tmp_path):
    for num_ranks, steps in ((4, 3), (2, 5)):
        config = replace(configured(tmp_path, steps=steps, save_every=0), parallel=replace(trained.parallel, cp=2))
        (tmp_path / "long.yaml").write_text(to_yaml(config))
        (tmp_path / "main.py").write_text(MAIN)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        command += [str(tmp_path / "main.py"), "train", str(tmp_path / "long.yaml"), "--resume", "auto"]
        ended = subprocess.run(
            command, env=os.environ | SEVERAL_ON_ONE, capture_output=True, text=True, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
    assert "resumed after step 3" in ended.stdout
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line][-1] == 5
