"""`ithaka selftest` passes on healthy ranks, and finds and names planted faults."""

import contextlib
import dataclasses
import io
import json
import math
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
from ithaka.checks import bench, doctor, failures, rehearse, selftest, verify
from ithaka.layer import slabs
from ithaka.layout import Layout
from ithaka.plan.hardware import (
    FIGURES,
    GPUS,
    Hardware,
    find_hardware,
    parse_gpus,
    profile_path,
    with_profile,
)
from ithaka.plan.search import forward_plan
from ithaka.plan.shape import StepShape
from ithaka.run import launch
from ithaka.trace.shapes import find_shape
from models import tiny_config


def fail_to_pin(*args, **options):
    raise slabs.StoreError(
        "host", f"cannot pin 7 bytes in {Path.home()}/x on {socket.gethostname()}; raise the limit"
    )


def run_sections(
    folder: Path, sections: tuple[str, ...], plant
) -> tuple[int, dict[str, list[str]], str]:
    """Run sections of the selftest as one rank, with faults. Return the exit code, the findings and
    what it prints."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        for name, value in {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": dist.get_world_size(),
        }.items():
            patch.setenv(name, str(value))
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        patch.setattr(doctor, "DISK_TEST_BYTES", doctor.CHUNK_BYTES)
        patch.setattr(
            selftest,
            "SECTIONS",
            {name: selftest.SECTIONS[name] for name in sections} | {"plan": 1e9},
        )
        patch.setattr(selftest, "DEFAULTS", {"cpu": ("smollm2-135m", 0.0, 1, 0.5)})
        patch.setattr(selftest.Selftest, "check_plan", lambda self: ())
        plant(patch, rank)
        test = selftest.Selftest("", 1024, folder, folder, {}, folder / "result.json")
        code = test.run(save_profile=True)
    return code, {finding.check: list(finding[1:4]) for finding in test.findings}, out.getvalue()


def plant_faults(patch, rank: int) -> None:
    """Rank 1 has another version and cannot pin; all-to-alls and the disk are slow."""
    exchange = dist.all_to_all_single
    sync = os.fsync
    patch.setattr(
        dist,
        "all_to_all_single",
        lambda *args, **options: time.sleep(0.1) or exchange(*args, **options),
    )
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
    (code, found, text), (_, _, silence) = ranks.run(
        2, run_sections, tmp_path, ("machine", "rates"), plant_faults
    )
    assert text.startswith("machine (1 of 3), 2 ranks, about ") and silence == ""
    assert re.search(
        r"smollm2-135m at .*: .* per step with the rates measured here, .* planned", text
    ), text
    assert code == 1 and re.search(r" 0 measured, \d+ slower, 2 failed in", text), text
    assert found["versions"][:2] == [
        "failed",
        f"rank 1: ithaka 0.1.9 ({ithaka.__version__} elsewhere)",
    ]
    assert found["host memory"][0] == "failed" and found["host memory"][1].startswith(
        "rank 1: cannot pin"
    )
    assert "ulimit -l" in found["host memory"][2]
    for check, fix in (
        ("all-to-all inside a node", "nvlink"),
        ("disk for checkpoints", "faster disk"),
    ):
        status, words, advice = found[check]
        assert status == "slower" and fix in advice, found[check]
        assert re.search(
            r"on rank \d, the slowest; planned .*, x0\.\d+: adds .* per step \(.* for smollm2-135m",
            words,
        )
    assert (
        found["send/recv inside a node"][0] == found["matmul"][0] == found["devices"][0] == "passed"
    )
    saved = json.loads(file.read_text())
    assert 1e5 < saved["link_bytes_s"] < 2.5e7 and 1e5 < saved["disk_bytes_s"] < 5e7
    assert saved["matmul_flops"] > 1e6 and "2 ranks" in saved["source"]
    shared = (tmp_path / "result.json").read_text()
    assert (
        "cannot pin" not in shared
        and str(tmp_path) not in shared
        and socket.gethostname() not in shared
    )
    result = json.loads(shared)
    host_memory = next(
        finding for finding in result["findings"] if finding["check"] == "host memory"
    )
    assert host_memory == {"check": "host memory", "status": "failed", "figures": {"ranks": [1]}}
    assert [rank["passed"]["host memory"] for rank in result["ranks"]] == [True, False]
    assert result["ranks"][1]["versions"]["ithaka"] == "0.1.9" and result["model"] == "smollm2-135m"
    assert result["ranks"][0]["checkpoints"].keys() == {
        "free_bytes",
        "write_bytes_s",
        "read_bytes_s",
    }
    matmul = next(row for row in result["rates"] if row["check"] == "matmul")
    assert matmul["rate"] == "matmul_flops" and min(matmul["by rank"][rank] for rank in "01") > 1e6


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
    (code, found, _), _ = ranks.run(
        2, run_sections, tmp_path, ("exactness",), other_weights_on_rank_1
    )
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


def break_device_of_rank_1(patch, rank: int) -> None:
    def fail(*args):
        raise RuntimeError("CUDA error: an illegal memory access")

    if rank == 1:
        patch.setattr(bench, "measure_device", fail)
    patch.setattr(selftest, "END_S", 5.0)
    patch.setattr(verify, "verify_layouts", lambda *args: [doctor.Finding("dense", "passed", "")])


def test_an_error_while_others_measure_is_a_finding_and_the_next_section_runs(ranks, tmp_path):
    """The others wait in a collective for the figures of the rank that failed."""
    results = ranks.run(2, run_sections, tmp_path, ("rates", "exactness"), break_device_of_rank_1)
    for code, found, _ in results:
        status, text = found["rates"][:2]
        assert (code, status) == (1, "failed")
        assert text == "rank 1: RuntimeError: CUDA error: an illegal memory access"
        assert found["dense"][0] == "passed"
    [failed, _] = json.loads((tmp_path / "result.json").read_text())["findings"]
    assert failed["figures"]["rank"] == 1 and failed["figures"]["error"] == "RuntimeError"
    assert re.fullmatch(r"ithaka/checks/failures\.py:\d+", failed["figures"]["where"])


def leave_rank_0_in_a_collective(patch, rank: int) -> None:
    def fail(*args):
        if rank == 1:
            raise OSError("no route to host")
        dist.barrier()
        return ()

    patch.setattr(verify, "verify_layouts", fail)
    patch.setattr(selftest, "END_S", 0.5)


def run_until_it_ends(folder: Path) -> tuple[str, str]:
    """Return the error that ends the test, and the file. Rank 0 hangs until the launcher, here rank
    1's end, stops it."""
    try:
        run_sections(folder, ("exactness", "machine"), leave_rank_0_in_a_collective)
    except RuntimeError as error:
        return f"{error} from {error.__cause__!r}", (folder / "result.json").read_text()
    return "", ""


def test_an_error_inside_collectives_ends_the_test_with_its_name(ranks, tmp_path):
    """The collectives of the ranks would no longer match."""
    _, (text, shared) = ranks.run(2, run_until_it_ends, tmp_path)
    words = "the self-test ended in section exactness: rank 1: OSError: no route to host"
    assert text == f"{words}; rank 0 did not end this section from OSError('no route to host')"
    [finding] = json.loads(shared)["findings"]
    assert finding["status"] == "failed" and finding["figures"]["ranks"] == [0]


def meet_late() -> float:
    """Rank 0 arrives last, and rank 1 looks again after a second. Return the seconds that rank 0
    stays."""
    sleep = time.sleep
    if dist.get_rank() == 0:
        sleep(0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures.time, "sleep", lambda seconds: sleep(1.5))
        start = time.monotonic()
        assert failures.meet("the end", None, 60.0) == (None, [])
    return time.monotonic() - start


def test_no_rank_leaves_while_another_reads_the_store(ranks):
    """The store may be rank 0's, and end with it."""
    seconds, _ = ranks.run(2, meet_late)
    assert seconds > 0.5


def test_what_any_node_lacks_is_found():
    def node(*features: str, why: str = "is missing") -> dict:
        return {
            "missing": [{"feature": name, "why": why, "fix": "install it"} for name in features]
        }

    gpu = doctor.GPU_TRAINING
    facts = [
        node("several GPUs"),
        {},
        node("several GPUs", "attention kernel fa4", gpu, why="is wrong here"),
        {},
    ]
    found = {finding.check: finding for finding in doctor.judge_nodes(facts)}
    assert found.keys() == {"several GPUs", "attention kernel fa4", gpu}
    assert found["several GPUs"].text == "is missing" and found["several GPUs"].status == "failed"
    kernel = found["attention kernel fa4"]
    assert (kernel.text, kernel.fix) == ("the node of rank 2: is wrong here", "install it")
    assert kernel.status == "failed" and kernel.figures == {"ranks": [2]}
    assert [finding.status for finding in doctor.judge_nodes([node("several GPUs")])] == ["slower"]
    assert list(doctor.judge_nodes([node(gpu), {}, node(gpu)])) == [], "CPUs are for testing"


def test_a_started_rank_may_write_more_than_a_pipe_holds(tmp_path):
    """Also with hang detection's words at the start."""
    file = tmp_path / "steps"
    program = (
        "import sys; sys.stderr.write('rank 1 on x\\n' + 'x' * 200_000 + ' end'); "
        f"open({str(file)!r}, 'w')"
    )
    process = selftest.StartedRank()
    try:
        process.start([sys.executable, "-S", "-c", program + "; import time; time.sleep(100)"], {})
        assert process.wait_for(file.exists, 60.0)
        end = process.finish(0.1, "rank 1 on ")
    finally:
        process.close()
    assert (
        end.code == -9 and end.names_victim and end.log.endswith("xxx end") and len(end.log) == 500
    )
    assert selftest.StartedRank().finish(0.0).code == 0, "a rank that does not take part"
    process = selftest.StartedRank()
    process.start([sys.executable, "-S", "-c", ""], {})
    assert not process.wait_for(lambda: False, 60.0), "it ended before it was done"
    assert process.finish(60.0).code == 0
    process.close()


SECRET = "gpu17.acme.com"


def test_only_listed_fields_and_values_are_shared(monkeypatch, tmp_path):
    """Texts stay on the machine, and numbers are not searched for names."""
    monkeypatch.setenv("USER", "1000")
    test = selftest.Selftest.__new__(selftest.Selftest)
    rows = [
        {
            "check": "matmul",
            "rate": "matmul_flops",
            "by rank": {0: 1000.5, 1: math.inf},
            "host": SECRET,
        }
    ]
    rank = {
        "versions": {"torch": "2.11.0+cu130", "transformers": f"5.17.0+{SECRET}"},
        "system": SECRET,
        "python": "3.12.3",
        "gpus": [{"name": "NVIDIA H200", "memory_bytes": 2**37, "uuid": SECRET}],
        "kernels": {"fa4": "works", "cudnn": f"is missing in /home/{SECRET}"},
        "disk": {"folder": f"/data/{SECRET}", "problem": SECRET, "free_bytes": 1000},
        "passed": {"host memory": True},
        "checks": {"host memory": (False, SECRET)},
        "nccl": SECRET,
        "missing": [{"feature": SECRET}],
    }
    values = dict(
        start_s=0.0, rank=0, findings=[], figures={"rates": rows, "ranks": [rank], "new": SECRET}
    )
    vars(test).update(values, model=f"s3://{SECRET}/model", out=tmp_path / "result.json")
    figures = {
        "error": "OSError",
        "where": f"/home/{SECRET}.py:1",
        "codes": [1, SECRET],
        "rank": 1000,
    }
    test._add(doctor.Finding("faults", "failed", f"connect to {SECRET}", f"see {SECRET}", figures))
    text = test.out.read_text()
    assert SECRET not in text
    shared = json.loads(text)
    assert shared["model"] is None and shared.keys() == {
        "seconds",
        "model",
        "findings",
        "ranks",
        "rates",
    }
    assert shared["findings"] == [
        {
            "check": "faults",
            "status": "failed",
            "figures": {"error": "OSError", "where": None, "codes": [1, None], "rank": 1000},
        }
    ]
    assert shared["rates"] == [
        {"check": "matmul", "rate": "matmul_flops", "by rank": {"0": 1000.5, "1": None}}
    ]
    assert shared["ranks"] == [
        {
            "versions": {"torch": "2.11.0+cu130", "transformers": None},
            "python": "3.12.3",
            "gpus": [{"name": "NVIDIA H200", "memory_bytes": 2**37}],
            "kernels": {"fa4": "works", "cudnn": None},
            "disk": {"free_bytes": 1000},
            "passed": {"host memory": True},
            "nccl": None,
        }
    ]


def planned_test(has_rates=True, on_gpu=True) -> selftest.Selftest:
    """A selftest of Llama 3.1 8B on 8 H200, as far as its plan."""
    test = selftest.Selftest.__new__(selftest.Selftest)
    plan = forward_plan(find_shape("llama3.1-8b"), parse_gpus("8xH200"), StepShape(2**18))
    values = dict(
        plan=plan, model="llama3.1-8b", has_rates=has_rates, slow=0.85, on_gpu=on_gpu, rehearsed={}
    )
    vars(test).update(values)
    return test


def test_the_slowest_rank_is_judged():
    """All others wait for it, so one fast rank does not help. A rate of 85 % of the plan passes."""
    planned = GPUS["H200-141GB"].matmul_flops
    found = planned_test()._judge_rate(
        "matmul", "matmul_flops", {0: planned, 1: 0.5 * planned, 2: planned}
    )
    assert found.status == "slower" and "on rank 1, the slowest; planned" in found.text
    assert ", x0.50: adds" in found.text
    assert (
        found.figures == {"rank": 1, "rate": 0.5 * planned, "planned": planned}
        and found.fix == selftest.OTHER_FIX
    )
    found = planned_test()._judge_rate("matmul", "matmul_flops", {0: planned, 1: 0.86 * planned})
    assert (found.status, found.fix) == ("passed", "") and "adds" not in found.text


def test_what_is_not_compared_is_measured_and_names_no_plan():
    """A plan for a GPU says nothing about a CPU."""
    found = planned_test(has_rates=False)._judge_rate("matmul", "matmul_flops", {0: 1e9})
    assert found.status == "measured" and "planned" not in found.text
    for has_rates in (True, False):
        test = planned_test(has_rates)
        test.measured = {"matmul_flops": 1e12}
        test.known = {"matmul_flops": 1e15}
        text = test._describe_step()
        assert re.match(r"llama3.1-8b at 256K: .* min per step with the rates measured here", text)
        assert text.endswith(" planned") == has_rates
    row = {"what": "exchange per layer", "planned": 0.0044, "measured": 0.0328, "unit": "s"}
    on_cpu, on_gpu = (planned_test(on_gpu=on_gpu)._judge_row(row) for on_gpu in (False, True))
    assert (
        on_cpu.status == "measured" and on_cpu.text == "0.0328 s (2 layers of llama3.1-8b at 256K)"
    )
    assert on_gpu.status == "slower" and on_gpu.text.startswith("0.0328 s, planned 0.0044 (")
    share = {"what": "exchange hidden by compute", "planned": None, "measured": 80.0, "unit": "%"}
    tokens = {"what": "tokens/s per GPU", "planned": 900, "measured": 800, "unit": ""}
    assert planned_test()._judge_row(share).text == "80 % (2 layers of llama3.1-8b at 256K)"
    assert {planned_test()._judge_row(each).status for each in (share, tokens)} == {"measured"}
    for measured, status in ((1.17, "passed"), (1.18, "slower")):
        found = planned_test()._judge_row(
            {"what": "layer forward", "planned": 1.0, "measured": measured, "unit": "s"}
        )
        assert found.status == status
    test = planned_test()
    test.rehearsed = {"rows": [{"what": "layer forward", "measured": 1.25}]}
    found = test._judge_row({"what": "layer forward", "planned": 1.0, "measured": 1.0, "unit": "s"})
    assert found.text.startswith("1 s, planned 1, rehearsed 1.25 (2 layers")


def test_the_worst_layout_is_reported_and_wrong_weights_fail(monkeypatch):
    """Also if the wrong weights change the results little."""
    monkeypatch.setattr(verify, "KINDS", {"hybrid": {}, "dense": {}})
    monkeypatch.setattr(verify, "TOLERANCES", {"float32": 1e-3})
    monkeypatch.setattr(verify, "write_truncated_model", lambda *args: None)
    layouts = []
    wrong = list[int]()

    def check(folder, device, cp, ring, dtype):
        layouts.append((cp, ring))
        return cp * 1e-4 / ring, wrong

    monkeypatch.setattr(verify, "_verify_layout", check)
    hybrid, dense = verify.verify_layouts(torch.device("cpu"), 4, math.inf)
    assert layouts == [(1, 1), (2, 1), (4, 1), (1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
    assert hybrid.status == "passed" and hybrid.text.startswith(
        "3 of 3 layouts; largest error 4e-04, 1e-03 allowed"
    )
    assert dense.figures == {
        "layouts": 6,
        "largest error": 4e-4,
        "allowed": 1e-3,
        "cp": 4,
        "ring": 1,
        "ranks": [],
    }
    wrong.append(3)
    for finding in verify.verify_layouts(torch.device("cpu"), 4, 0.0):
        assert (
            finding.status == "failed"
            and finding.figures["ranks"] == [3]
            and "dcgmi" in finding.fix
        )
        assert finding.figures["layouts"] == 1, "after the deadline, one layout"


class FakeGpu:
    """A GPU of a node of two, as torch, nvidia-smi and the kernel describe it."""

    def __init__(self, patch, nccl=(2, 99, 0), peers=True, clocks="1980, 700.00, 700.00") -> None:
        properties = SimpleNamespace(uuid="x", pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
        patch.setattr(
            doctor.ctypes, "CDLL", lambda name: SimpleNamespace(ncclGetVersion=self.set_version)
        )
        patch.setattr(torch, "ones", lambda *shape, **options: torch.zeros(1, 1))
        patch.setattr(
            doctor.subprocess, "run", lambda *command, **options: SimpleNamespace(stdout=clocks)
        )
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
    assert {finding.status for finding in judge(healthy).values()} == {"passed"} and len(
        judge(healthy)
    ) == 8
    limited = FakeGpu(monkeypatch, clocks="1200, 500.00, 700.00").examine()
    found = judge(*(FakeGpu(monkeypatch).examine() for _ in range(3)), limited)
    clock = found["clock"]
    power = found["power limit"]
    assert clock.status == power.status == "slower" and "nvidia-smi -rgc" in clock.fix
    assert clock.text == "rank 3: 1200 MHz under load, the median is 1980: steps may take x1.65"
    assert power.text == "rank 3: 500 of 700 W"
    old = judge(FakeGpu(monkeypatch, nccl=(2, 18, 1)).examine())["NCCL"]
    assert (
        old.status == "failed"
        and old.text == "rank 0: 2.18.1, at least 2.28.9 needed"
        and "LD_PRELOAD" in old.fix
    )
    assert (
        judge(FakeGpu(monkeypatch, nccl=(2, 29, 0)).examine(ranks_per_gpu=4))["NCCL"].status
        == "failed"
    )
    apart = judge(FakeGpu(monkeypatch, peers=False).examine())["peer access"]
    assert (apart.status, apart.text) == ("slower", "rank 0: to 0 of 1 other GPUs of the node")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert judge(FakeGpu(monkeypatch).examine())["allocator"].status == "slower"
    assert judge(FakeGpu(monkeypatch, clocks="").examine())["power limit"].text == "0 of 0 W"


def test_ranks_that_share_a_gpu_measure_layers_of_a_model_that_does_not_fit(monkeypatch):
    """Four shares of an H200 do not hold Llama-3-8B, but two of its layers."""
    gpu = GPUS["H200-141GB"]
    monkeypatch.setattr(
        selftest, "detect_machine", lambda *args: Hardware(gpu, 4, host_bytes=110 * 10**9)
    )
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
    measured = dataclasses.replace(
        known, link_bytes_s=1e11, disk_bytes_s=1e9, memory_bytes=1, source="selftest"
    )
    values = {
        k: v for k, v in dataclasses.asdict(measured).items() if k not in ("kernels", "desktop")
    }
    profile_path(known.name).parent.mkdir()
    profile_path(known.name).write_text(json.dumps(values))
    gpu = find_hardware("8xH200").gpu
    assert (
        gpu == with_profile(known) == dataclasses.replace(measured, memory_bytes=known.memory_bytes)
    )
    assert find_hardware("8xH100").gpu is GPUS["H100-80GB"]


def rehearse_on_real_ranks(config: dict) -> tuple[rehearse.RehearsalResult, int]:
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        exchange = dist.all_to_all_single
        patch.setattr(
            dist,
            "all_to_all_single",
            lambda *args, **how: sent.append(how) or exchange(*args, **how),
        )
        layout = Layout(2, dtype="float32")
        return rehearse.rehearse(config, layout, 2, 64), len(sent)


@pytest.mark.slow
def test_a_rehearsal_uses_the_ranks_at_hand(ranks):
    """Every rank sends, and reports the slowest rank's figures."""
    (first, num_sent), (second, also_sent) = ranks.run(
        2, rehearse_on_real_ranks, tiny_config("qwen3").to_dict()
    )
    assert first == second and num_sent == also_sent > 0
    assert first.exchange_s[0] > 0 and first.exchange_s[1] == 0  # a CPU hides nothing
    assert first.step_s > sum(map(sum, first.layer_s)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_everything_passes_on_a_healthy_machine(tmp_path, num_ranks):
    """Also kills a rank and resumes on half of the ranks, which takes a minute."""
    paths = {"PYTHONPATH": str(Path(ithaka.__file__).parents[1]), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    command += ["-m", "ithaka", "selftest", "--json", "result.json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | paths, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ passed, \d+ measured, 0 slower, 0 failed in .*", lines[-1]), (
        done.stdout
    )
    assert re.search(
        rf"rank {num_ranks - 1} killed: the others exit after \d+ s and name it\n", done.stdout
    )
    assert (
        f"saved on {num_ranks} ranks, resumed on {num_ranks // 2}: losses differ by" in done.stdout
    )
    assert "planned" not in done.stdout, "there are no rates of a CPU to plan with"
    result = json.loads((tmp_path / "result.json").read_text())
    found = {finding["check"]: finding["figures"] for finding in result["findings"]}
    assert found["kill a rank"]["codes"] == [4] * (num_ranks - 1) + [-9]
    assert found["save and resume"]["codes"] == [0] * num_ranks
    measured = {row["what"]: row["measured"] for row in result["plan"]}
    assert (
        min(
            measured["layer forward"],
            measured["exchange per layer"],
            measured["peak without reserve"],
        )
        > 0
    )
    assert sorted(os.listdir(tmp_path)) == ["result.json"], "temporary files are removed"
