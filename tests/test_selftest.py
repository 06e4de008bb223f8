"""`ithaka selftest` passes on healthy ranks, and finds and names planted faults."""

import contextlib
import dataclasses
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ithaka
from ithaka.checks import doctor, rehearse, selftest, verify
from ithaka.layer import slabs
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.hardware import FIGURES, GPUS, Hardware, find_hardware, profile_path, with_profile
from ithaka.run import launch, resolve
from models import tiny_config


def fail_to_pin(*args, **options):
    raise slabs.StoreError("host", f"cannot pin 7 bytes in {Path.home()}/x on {socket.gethostname()}; raise the limit")


def run_sections(folder: Path, sections: tuple[str, ...], plant) -> tuple[int, dict[str, list[str]], str]:
    """Run sections of the selftest as one rank, with faults. Return the exit code, the findings and what it prints."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": dist.get_world_size()}.items():
            patch.setenv(name, str(value))
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        patch.setattr(doctor, "DISK_TEST_BYTES", doctor.CHUNK_BYTES)
        patch.setattr(selftest, "SECTIONS", {name: selftest.SECTIONS[name] for name in sections} | {"plan": 1e9})
        patch.setattr(selftest, "DEFAULTS", {"cpu": ("smollm2-135m", 0.0, 1, 0.5)})
        patch.setattr(selftest.Selftest, "check_plan", lambda self: ())
        plant(patch, rank)
        test = selftest.Selftest("", 1024, folder, folder, {}, folder / "result.json")
        code = test.run(save_profile=True)
    return code, {finding.check: list(finding[1:]) for finding in test.findings}, out.getvalue()


def plant_faults(patch, rank: int) -> None:
    """Rank 1 has another version and cannot pin; all-to-alls and the disk are slow."""
    exchange, sync = dist.all_to_all_single, os.fsync
    patch.setattr(dist, "all_to_all_single", lambda *args, **options: time.sleep(0.1) or exchange(*args, **options))
    patch.setattr(doctor.os, "fsync", lambda file: time.sleep(0.5) or sync(file))
    if rank == 1:
        patch.setattr(slabs, "Slab", fail_to_pin)
        patch.setattr(ithaka, "__version__", "0.1.9")


def test_faults_of_the_machine_are_named_and_cost_seconds(ranks, tmp_path):
    """Planned: 16 MiB to disk in 0.17 s, and half a MiB to the other rank in 10 ms."""
    rates = {"disk_bytes_s": 1e8, "link_bytes_s": 5e7, "memory_bytes": 2**34}
    file = tmp_path / "ithaka" / "CPU.json"
    file.parent.mkdir()
    file.write_text(json.dumps({name: rates.get(name, 1.0) for name in FIGURES}))
    (code, found, text), (_, _, silence) = ranks.run(2, run_sections, tmp_path, ("machine", "rates"), plant_faults)
    assert text.startswith("machine (1 of 3), 2 ranks, about ") and silence == ""
    assert re.search(r"smollm2-135m at .*: .* per step planned, .* with the rates measured here", text), text
    assert code == 1 and re.search(r" \d+ slower, 2 failed in", text), text
    assert found["versions"][:2] == ["failed", f"rank 1: ithaka 0.1.9 ({ithaka.__version__} elsewhere)"]
    assert found["host memory"][0] == "failed" and found["host memory"][1].startswith("rank 1: cannot pin")
    assert "ulimit -l" in found["host memory"][2]
    for check, fix in (("all-to-all inside a node", "nvlink"), ("disk for checkpoints", "faster disk")):
        status, words, advice = found[check]
        assert status == "slower" and fix in advice, found[check]
        assert re.search(r"on rank \d, the slowest; planned .*, x0\.\d+: adds .* per step \(.* for smollm2-135m", words)
    assert found["send/recv inside a node"][0] == found["matmul"][0] == found["devices"][0] == "passed"
    saved = json.loads(file.read_text())
    assert 1e5 < saved["link_bytes_s"] < 2.5e7 and 1e5 < saved["disk_bytes_s"] < 5e7
    assert saved["matmul_flops"] > 1e6 and "2 ranks" in saved["source"]
    shared = (tmp_path / "result.json").read_text()
    assert json.loads(shared)["findings"] and "cannot pin 7 bytes in PATH on NAME" in shared
    assert str(tmp_path) not in shared and socket.gethostname() not in shared.replace("NAME", "")


def other_weights_on_rank_1(patch, rank: int) -> None:
    build = verify.parallelize_model

    def damage(*args, **options):
        model = build(*args, **options)
        if dist.get_rank() == 1:
            model.model.layers[0].self_attn.q_proj.weight.data.to_local().mul_(1.5)
        return model

    patch.setattr(verify, "KINDS", {"dense": verify.KINDS["dense"]})
    patch.setattr(verify, "TOLERANCES", {"float32": verify.TOLERANCES["float32"]})
    patch.setattr(verify, "parallelize_model", damage)


def test_a_rank_with_wrong_weights_is_named(ranks, tmp_path):
    (code, found, _), _ = ranks.run(2, run_sections, tmp_path, ("exactness",), other_weights_on_rank_1)
    status, text, fix = found["dense, float32"]
    assert (code, status) == (1, "failed") and text.startswith("3 of 3 layouts; largest error ")
    assert text.endswith("the weights of rank 1 are wrong") and "dcgmi" in fix


def raise_on_rank_1(patch, rank: int) -> None:
    def fail(*args):
        if rank == 1:
            raise OSError("no route to host")
        return ()

    patch.setattr(verify, "verify_layouts", fail)


def test_an_error_of_one_rank_is_a_finding(ranks, tmp_path):
    (code, found, _), _ = ranks.run(2, run_sections, tmp_path, ("exactness",), raise_on_rank_1)
    assert code == 1 and found["exactness"][:2] == ["failed", "rank 1: OSError: no route to host"]


class FakeGpu:
    """A GPU of a node of two, as torch, nvidia-smi and the kernel describe it."""

    def __init__(self, patch, nccl=(2, 99, 0), peers=True, clocks="1980, 700.00, 700.00") -> None:
        properties = SimpleNamespace(uuid="x", pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
        patch.setattr(doctor.ctypes, "CDLL", lambda name: SimpleNamespace(ncclGetVersion=self.set_version))
        patch.setattr(torch, "ones", lambda *shape, **options: torch.zeros(1, 1))
        patch.setattr(doctor.subprocess, "run", lambda *command, **options: SimpleNamespace(stdout=clocks))
        patch.setattr(slabs, "Slab", lambda *args, **options: None)
        self.nccl = nccl

    def set_version(self, reference) -> None:
        major, minor, patch = self.nccl
        reference._obj.value = 10000 * major + 100 * minor + patch

    def examine(self, ranks_per_gpu=1) -> dict:
        return doctor.examine_rank(SimpleNamespace(type="cuda", index=0), ranks_per_gpu)


def judge(*facts: dict) -> dict[str, doctor.Finding]:
    return {finding.check: finding for finding in doctor.judge_ranks(facts)}


def test_faults_of_a_gpu_are_named(monkeypatch):
    healthy = FakeGpu(monkeypatch).examine()
    assert {finding.status for finding in judge(healthy).values()} == {"passed"} and len(judge(healthy)) == 8
    limited = FakeGpu(monkeypatch, clocks="1200, 500.00, 700.00").examine()
    found = judge(*(FakeGpu(monkeypatch).examine() for _ in range(3)), limited)
    clock, power = found["clock"], found["power limit"]
    assert clock.status == power.status == "slower" and "nvidia-smi -rgc" in clock.fix
    assert clock.text == "rank 3: 1200 MHz under load, the median is 1980: steps may take x1.65"
    assert power.text == "rank 3: 500 of 700 W"
    old = judge(FakeGpu(monkeypatch, nccl=(2, 18, 1)).examine())["NCCL"]
    assert old.status == "failed" and old.text == "rank 0: 2.18.1, at least 2.28.9 needed" and "LD_PRELOAD" in old.fix
    assert judge(FakeGpu(monkeypatch, nccl=(2, 29, 0)).examine(ranks_per_gpu=4))["NCCL"].status == "failed"
    apart = judge(FakeGpu(monkeypatch, peers=False).examine())["peer access"]
    assert (apart.status, apart.text) == ("slower", "rank 0: to 0 of 1 other GPUs of the node")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert judge(FakeGpu(monkeypatch).examine())["allocator"].status == "slower"
    assert judge(FakeGpu(monkeypatch, clocks="").examine())["power limit"].text == "0 of 0 W"


def test_ranks_that_share_a_gpu_measure_layers_of_a_model_that_does_not_fit(monkeypatch):
    """Four shares of an H200 do not hold Llama-3-8B, but two of its layers."""
    gpu = GPUS["H200-141GB"]
    monkeypatch.setattr(resolve, "detect_machine", lambda *args: Hardware(gpu, 4, host_bytes=110 * 10**9))
    monkeypatch.setattr(launch, "detect_gpu", lambda: None)
    monkeypatch.setattr(selftest, "MIN_CONTEXT", 2**17)
    test = selftest.Selftest.__new__(selftest.Selftest)
    vars(test).update(num_ranks=4, ranks_per_gpu=4, on_gpu=True, context=2**18, model="llama3-8b")
    test.measured = {"matmul_flops": gpu.matmul_flops / 4}
    test._choose_plan()
    assert test.plan.hardware.gpu.memory_bytes == gpu.memory_bytes // 4 and not test.plan.fits
    assert test.truncated.fits and test.truncated.work.context == 2**18


def test_plans_use_the_rates_saved_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known = GPUS["H200-141GB"]
    assert find_hardware("8xH200").gpu is known
    measured = dataclasses.replace(known, link_bytes_s=1e11, disk_bytes_s=1e9, memory_bytes=1, source="selftest")
    values = {k: v for k, v in dataclasses.asdict(measured).items() if k not in ("kernels", "desktop")}
    profile_path(known.name).parent.mkdir()
    profile_path(known.name).write_text(json.dumps(values))
    gpu = find_hardware("8xH200").gpu
    assert gpu == with_profile(known) == dataclasses.replace(measured, memory_bytes=known.memory_bytes)
    assert find_hardware("8xH100").gpu is GPUS["H100-80GB"]


def rehearse_on_real_ranks(config: dict) -> tuple[rehearse.RehearsalResult, int]:
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        exchange = dist.all_to_all_single
        patch.setattr(dist, "all_to_all_single", lambda *args, **how: sent.append(how) or exchange(*args, **how))
        layout = Layout(2, kept=(ActivationPolicy(),) * 2, dtype="float32")
        return rehearse.rehearse(config, layout, 2, 64), len(sent)


@pytest.mark.slow
def test_a_rehearsal_uses_the_ranks_at_hand(ranks):
    """Every rank sends, and reports the slowest rank's figures."""
    (first, num_sent), (second, also_sent) = ranks.run(2, rehearse_on_real_ranks, tiny_config("qwen3").to_dict())
    assert first == second and num_sent == also_sent > 0
    assert first.exchange_s[0] > 0 and first.exchange_s[1] == 0  # a CPU hides nothing
    assert first.step_s > sum(map(sum, first.layer_s)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_everything_passes_on_a_healthy_machine(tmp_path, num_ranks):
    """Also kills a rank and resumes on half of the ranks, which takes a minute."""
    paths = {"PYTHONPATH": str(Path(ithaka.__file__).parents[1]), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "ithaka", "selftest", "--json", "result.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | paths, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ passed, 0 slower, 0 failed in .*", lines[-1]), done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    texts = {finding["check"]: finding["text"] for finding in result["findings"]}
    assert re.fullmatch(rf"rank {num_ranks - 1} killed: the others exit after \d+ s and name it", texts["kill a rank"])
    assert f"saved on {num_ranks} ranks, resumed on {num_ranks // 2}: losses differ by" in texts["save and resume"]
    assert {"layer forward", "layer backward", "exchange per layer", "peak without reserve"} <= texts.keys()
    assert sorted(os.listdir(tmp_path)) == ["result.json"], "temporary files are removed"
