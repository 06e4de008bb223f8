"""`ithaka selftest`: machine, rates with all ranks at once, exactness, faults, and a plan against measurements."""

import faulthandler
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ithaka.checkpoint.files import step_name
from ithaka.checks import bench, doctor, rehearse, verify
from ithaka.checks.doctor import Finding, judge
from ithaka.comm.agree import gather_objects
from ithaka.comm.mesh import free_memory, start_process_group
from ithaka.comm.rank import is_local_rank_0
from ithaka.config import load_config
from ithaka.config.units import format_duration, format_rate, format_tokens
from ithaka.exits import ExitCode
from ithaka.log.metrics import read_metrics
from ithaka.plan.hardware import FIGURES, RATES, profile_path
from ithaka.plan.search import Plan
from ithaka.run import launch, request, resolve
from ithaka.train.heartbeat import BEAT_S, MAX_SILENCE_S

LIMIT_S, MIN_CONTEXT = 600.0, 256
SECTIONS = {"machine": 20.0, "rates": 40.0, "exactness": 100.0, "faults": 100.0, "plan": 120.0}  # estimated seconds
# By type of device: the model, seconds per measurement, MiB per collective, and the share of its planned value below
# which a rate is slow (other work shares the CPUs).
DEFAULTS = {"cuda": ("llama3-8b", 1.0, 256, 0.85), "cpu": ("smollm2-135m", 0.2, 16, 0.5)}
# Names of the first RATES, and the part of them, which are bursts, that an H200 sustains (LOG.md, 2026-11-15).
SUSTAINED = {"matmul": 0.83, "attention forward": 0.9, "attention backward": 0.84, "device memory": 0.87}
FIXES = {
    "pcie_bytes_s": "check `nvidia-smi -q -d PCIE`, and start with torchrun --numa-binding node",
    "link_bytes_s": "check `nvidia-smi topo -m` and `nvidia-smi nvlink -s`",
    "network_bytes_s": "check NCCL's devices with NCCL_DEBUG=INFO; set NCCL_IB_HCA or NCCL_SOCKET_IFNAME",
    "disk_bytes_s": "set memory.disk_path and train.run_dir to a faster disk",
}
OTHER_FIX = "check `nvidia-smi -q -d PERFORMANCE`, and other jobs on the device"


class Selftest:
    """All checks on this rank, for the options of the command. Collective; rank 0 prints the findings."""

    def __init__(self, model: str, *options: Any) -> None:
        self.context, self.disk, self.run_dir, self.rehearsed, self.out = options
        self.start_s, (self.device, self.dtype) = time.monotonic(), bench.device_and_dtype()
        default, self.seconds, self.mebibytes, self.slow = DEFAULTS[self.device.type]
        self.model, self.on_gpu, self.findings = model or default, self.device.type == "cuda", list[Finding]()
        start_process_group(self.device)
        self.rank, self.num_ranks, self.figures = dist.get_rank(), dist.get_world_size(), dict[str, Any]()
        self.ranks_per_gpu = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // launch.num_gpus()) if self.on_gpu else 1
        names = socket.gethostname(), Path.home().name, os.environ.get("USER", "")
        self.names = {name for own in gather_objects(names) for name in own if name}

    def run(self, save_profile: bool) -> int:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)  # if a check hangs
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # see `_settle_matmuls`
        for i, section in enumerate(SECTIONS):
            free_memory()  # ranks, also those of `ithaka train`, may share a GPU
            failure, left = "", format_duration(sum([*SECTIONS.values()][i:]))
            self._print(f"{section} ({i + 1} of {len(SECTIONS)}), {self.num_ranks} ranks, about {left} left")
            try:
                for finding in getattr(self, f"check_{section}")():
                    self._add(finding)
            except Exception as error:  # ranks that wait for this one meet the time limit
                failure = f"rank {self.rank}: {type(error).__name__}: {error}"
            for text in [*filter(None, gather_objects(failure))][:1]:
                self._add(Finding(section, "failed", text, "see docs/several-nodes.md"))
        if "rates" in self.figures:
            changed = self._with_rates(self.measured)
            planned, measured = (format_duration(plan.step_s) for plan in (self._with_rates(self.known), changed))
            what = f"{self.model} at {format_tokens(changed.work.context)}"
            self._print(f"{what}: {planned} per step planned, {measured} with the rates measured here")
            if save_profile and self.rank == 0 and self.ranks_per_gpu == 1:
                gpu, file = changed.hardware.gpu, profile_path(changed.hardware.gpu.name)
                values = {name: getattr(gpu, name) for name in (*FIGURES, "name", "kernel")}
                values["source"] = f"ithaka selftest, {self.num_ranks} ranks, {time.strftime('%Y-%m-%d')}"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
                self._print(f"wrote {file}: ithaka plan and ithaka train use its rates on this machine")
        statuses = [finding.status for finding in self.findings]
        text = ", ".join(f"{statuses.count(name)} {name}" for name in ("passed", "slower", "failed"))
        self._print(f"{text} in {format_duration(time.monotonic() - self.start_s)}")
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()
        return int("failed" in statuses)

    def _print(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def _add(self, finding: Finding) -> None:
        """Print it, and write all findings so far without names of hosts and users, and without paths."""
        self.findings.append(finding)
        seconds, words = time.monotonic() - self.start_s, "; ".join(filter(None, finding[2:]))
        self._print(f"{seconds:3.0f} s  {finding.status:<6}  {finding.check:<28}  {words}")
        if self.rank == 0 and self.out is not None:
            content = {"seconds": seconds, "findings": [each._asdict() for each in self.findings], **self.figures}
            text = json.dumps(content, indent=1).replace("\\n", " ")
            text = re.sub(rf"\b({'|'.join(map(re.escape, self.names))})\b", "NAME", text)
            self.out.write_text(re.sub(r"(?<![\w/])[~/][\w.+-]+(/[\w.+-]*)*", "PATH", text) + "\n", encoding="utf-8")

    def check_machine(self) -> Iterator[Finding]:
        own = doctor.examine_rank(self.device, self.ranks_per_gpu)
        own |= (
            doctor.examine(self.disk) | {"checkpoints": doctor.measure_disk(self.run_dir)} if is_local_rank_0() else {}
        )
        self.facts = self.figures["ranks"] = gather_objects(own)
        nodes = [fact for fact in self.facts if "gpus" in fact]
        gpus = [gpu["name"] for node in nodes for gpu in node["gpus"]]
        names = " and ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "CPUs"
        driver = f", driver {nodes[0]['driver']}, CUDA {nodes[0]['cuda']}" * self.on_gpu
        yield Finding("devices", "passed", f"{names} on {len(nodes)} node{'s' * (len(nodes) > 1)}{driver}")
        for row in nodes[0]["missing"]:
            if not row["feature"].endswith((" GPU", " speed")):  # CPUs are for testing; rates follow
                yield Finding(row["feature"], "failed" if "wrong" in row["why"] else "slower", row["why"], row["fix"])
        yield from doctor.judge_ranks(self.facts)

    def check_rates(self) -> Iterator[Finding]:
        devices, rows = gather_objects(bench.measure_device(self.device, self.dtype, self.seconds)), list[Any]()
        for check, name in zip((*SUSTAINED, "copies to and from host"), RATES, strict=False):
            rates = {rank: float(found[name]) / SUSTAINED.get(check, 1.0) for rank, found in enumerate(devices)}
            rows.append((check, name, rates))
        for check, key in {"disk for checkpoints": "checkpoints", "disk for offloading": "disk"}.items():
            disks = {rank: fact[key] for rank, fact in enumerate(self.facts) if key in fact}  # one per node
            rates = {r: min(disk.get("write_bytes_s", 1.0), disk.get("read_bytes_s", 1.0)) for r, disk in disks.items()}
            rows.append((check, "disk_bytes_s", rates))
        network = bench.measure_network(self.device, self.mebibytes)
        self.measured = {name: min(rates.values()) for _, name, rates in rows}
        self.measured |= {name: v for name, v in bench.network_figures(network, self.device).items() if name in RATES}
        for row in network:
            name = "link_bytes_s" if row["where"] == "inside a node" else "network_bytes_s"
            rows.append((f"{row['what']} {row['where']}", name, {row["slowest rank"]: row["GB/s"] * 1e9}))
        self._choose_plan()
        self.figures["rates"] = rows
        yield from (self._judge_rate(*row) for row in rows)

    def _choose_plan(self) -> None:
        """Plan at the longest context that fits, or of which two layers fit, and of which these take five steps in the
        time of their section. By measured rates if no others apply. On CPUs, all ranks share a sequence."""
        own = resolve.detect_machine(load_config(None, []), self.num_ranks, launch.detect_gpu())
        machine = resolve.weakest_machine(gather_objects(own))
        gpu, changes = machine.gpu, [] if self.on_gpu else [f"parallel.cp={self.num_ranks}"]
        self.known = {name: getattr(gpu, name) for name in RATES}  # from the table or a saved profile
        self.has_rates = (self.on_gpu or profile_path(gpu.name).is_file()) and self.ranks_per_gpu == 1
        if not self.has_rates:
            gpu = replace(gpu, memory_bytes=gpu.memory_bytes // self.ranks_per_gpu, **self.measured)
        plans = list[tuple[bool, bool, int, Plan, Any]]()
        for i in range(max(1, (self.context // MIN_CONTEXT).bit_length())):
            context = self.context >> i
            wanted = request.make_request(self.model, replace(machine, gpu=gpu), str(context), 1, changes)
            plan = wanted.plan()
            few = rehearse.truncate_plan(plan, 2, False, "auto", dict(wanted.hf_config))
            is_quick = 5 * few.step_s < SECTIONS["plan"]
            plans.append((is_quick and plan.fits, is_quick and few.fits, context, plan, few))
            if plans[-1][0]:
                break
        # The longest, or the shortest if none is quick.
        *_, self.plan, self.truncated = max(plans, key=lambda row: (*row[:2], row[2] if row[1] else -row[2]))

    def _with_rates(self, rates: dict[str, Any]) -> Plan:
        hardware = self.plan.hardware
        return replace(self.plan, hardware=replace(hardware, gpu=replace(hardware.gpu, **rates)))

    def _judge_rate(self, check: str, name: str, rates: dict[int, float]) -> Finding:
        """Compare the slowest rank, for which all others wait, with the plan."""
        rank = min(rates, key=lambda rank: rates[rank])
        rate, planned = rates[rank], getattr(self.plan.hardware.gpu, name)
        unit, scale = ("TFLOP/s", 1e12) if name.endswith("flops") else ("GB/s", 1e9)
        shown, expected = (format_rate(value / scale * SUSTAINED.get(check, 1.0)) for value in (rate, planned))
        text = f"{shown} {unit} on rank {rank}, the slowest" + f"; planned {expected}" * self.has_rates
        if not self.has_rates or rate >= self.slow * planned:
            return Finding(check, "passed", text)
        cost_s = self._with_rates({name: rate}).step_s - self.plan.step_s
        step = f"{format_duration(self.plan.step_s)} for {self.model} at {format_tokens(self.plan.work.context)}"
        text += f", x{rate / planned:.2f}: adds {format_duration(cost_s)} per step ({step})"
        return Finding(check, "slower", text, FIXES.get(name, OTHER_FIX))

    def check_exactness(self) -> Iterator[Finding]:
        yield from verify.verify_layouts(self.device, self.num_ranks, time.monotonic() + SECTIONS["exactness"])

    def check_faults(self) -> Iterator[Finding]:
        with tempfile.TemporaryDirectory(prefix=".selftest-", dir=self.run_dir, ignore_cleanup_errors=True) as own:
            yield from run_drill(Path(gather_objects(own)[0]) / "run")
            gather_objects(0)  # rank 0 has read it

    def check_plan(self) -> Iterator[Finding]:
        rows = self.figures["plan"] = rehearse.rehearse_plan(self.plan, self.truncated, self.model)[0]
        other = {row["what"]: row["measured"] for row in self.rehearsed.get("rows", ())}
        at = f"2 layers of {self.model} at {format_tokens(self.plan.work.context)}"
        for what, planned, measured, unit in (row.values() for row in rows):
            is_worse = self.on_gpu and planned and unit in ("s", "GiB") and measured > planned / self.slow
            text = f"{measured:.4g} {unit}".rstrip() + (f", planned {planned:.4g}" if planned is not None else "")
            text += (f", rehearsed {other[what]:.4g}" if what in other else "") + f" ({at})"
            yield judge(what, not is_worse, text, "compare the rates above", "slower")


def run_rank(save_profile: bool, *arguments: Any) -> int:
    return Selftest(*arguments).run(save_profile)


# ---- train a small model on all ranks, kill one, and resume on half of them

EXIT_S = MAX_SILENCE_S + 4 * BEAT_S  # for all ranks to exit after one died (docs/running-for-weeks.md)
START_S = 120.0  # for a run to start and take its steps
SAVE_EVERY, STEPS = 4, 6  # a resumed run repeats the steps after the first save
LOSS_TOLERANCE = 1e-4  # relative, in float32: fewer ranks sum in another order
SETTINGS = ["model.embedded=small", "model.dtype=float32", "memory.plan=off", "data.context=128", "train.steps=1000000"]
SETTINGS += [f"train.save_every={SAVE_EVERY}", "train.keep_last=1000000", "train.validate_every=0"]
SETTINGS += ["optim.schedule=constant", f"data.path={Path(__file__).parent}"]


def run_drill(run_dir: Path) -> Iterator[Finding]:
    """Each rank starts a rank of `ithaka train`, without a launcher. `run_dir`: to create, shared by all nodes."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    per_node, victim, is_ready = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), num_ranks - 1, False
    unit = 1 if num_ranks == per_node else per_node  # half of the nodes or, of one node, half of its ranks
    fewer = max(n for n in range(unit, max(unit, num_ranks // 2) + 1, unit) if num_ranks % n == 0)
    saved, cp = run_dir / "checkpoints" / step_name(SAVE_EVERY), math.gcd(4, fewer)  # the model has 4 heads
    settings = [*SETTINGS, f"parallel.cp={cp}", f"train.global_batch={num_ranks // cp}"]
    process, deadline_s = _start_rank(num_ranks, per_node, settings, "--run-dir", run_dir), time.monotonic() + START_S
    while rank == 0 and not is_ready and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
        is_ready = saved.is_dir() and len(_read_losses(run_dir)) >= STEPS
    runs = all(gather_objects(process.poll() is None and (rank > 0 or is_ready)))
    if rank == victim or not runs:
        process.kill()
    codes, seconds, logs = zip(*gather_objects(_finish(process, 2 * EXIT_S)), strict=True)
    if not runs:
        text = f"`ithaka train` takes no {STEPS} steps within {START_S:.0f} s: {' '.join(logs).strip()[-500:]}"
        yield Finding("train", "failed", text, "set --run-dir to a folder that all nodes share")
        return
    ok = all(code == ExitCode.HANG and f"rank {victim} on " in log for code, log in zip(codes[:-1], logs, strict=False))
    end = "name it" if ok else f"their codes are {codes[:-1]}: {logs[0][-300:]}"
    text = f"rank {victim} killed: the others exit after {max(seconds):.0f} s and {end}" if victim else "only one rank"
    fix = f"expected: code {ExitCode.HANG:d} within {EXIT_S:.0f} s; report it with --json"
    yield judge("kill a rank", ok and max(seconds) <= EXIT_S, text, fix, "slower" if ok else "failed")
    before = _read_losses(run_dir)
    (run_dir / "latest").write_text(saved.name)
    resumed = _start_rank(fewer, min(per_node, fewer), [f"train.steps={STEPS}"], "--resume", run_dir)
    ends = gather_objects(_finish(resumed, START_S) if resumed else (0, 0.0, ""))
    problems, after = [log.strip()[-500:] for code, _, log in ends if code], _read_losses(run_dir)
    error = max(abs(after.get(step, math.inf) / before.get(step, 1.0) - 1) for step in range(SAVE_EVERY + 1, STEPS + 1))
    text = f"saved on {num_ranks} ranks, resumed on {fewer}: losses differ by {error:.0e}, {LOSS_TOLERANCE:.0e} allowed"
    yield judge("save and resume", error <= LOSS_TOLERANCE and not problems, text, "".join(problems[:1]))


def _read_losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if row.get("loss") is not None}


def _start_rank(num_ranks: int, per_node: int, settings: list[str], *arguments: Any) -> Any:
    """Start this rank of `ithaka train` if it is one of `num_ranks`. Collective, for the port."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = gather_objects(free.getsockname()[1])[0]
    values = {"RANK": dist.get_rank(), "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": per_node, "MASTER_PORT": port}
    values |= {"TORCHELASTIC_USE_AGENT_STORE": False, "TORCHELASTIC_RUN_ID": "selftest"}  # it ends with this process
    variables = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"} | os.environ | {k: str(v) for k, v in values.items()}
    program = f"import sys; sys.path[:] = {sys.path!r}; from ithaka.cli import main; main()"
    options = [*map(str, arguments), *(word for setting in settings for word in ("--set", setting))]
    command, pipes = [sys.executable, "-c", program, "train", *options], (subprocess.DEVNULL, subprocess.PIPE)
    mine = dist.get_rank() < num_ranks
    return subprocess.Popen(command, env=variables, stdout=pipes[0], stderr=pipes[1], text=True) if mine else None


def _finish(process: subprocess.Popen, limit_s: float) -> tuple[int, float, str]:
    """Wait until the process ends, or kill it. Return its exit code, the seconds waited and its messages."""
    start, killer = time.monotonic(), threading.Timer(limit_s, process.kill)
    killer.start()
    log = process.communicate()[1]
    killer.cancel()
    return process.returncode, time.monotonic() - start, log
