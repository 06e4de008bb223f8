"""`ithaka selftest`: the machine, its rates with all ranks at once, exactness, faults, and a plan against measurements."""

import json
import os
import re
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ithaka.checks import rehearse
from ithaka.checks.bench import device_and_dtype, measure_device, measure_network, network_figures
from ithaka.checks.drill import run_drill
from ithaka.checks.machine import Finding, examine_rank, judge_machine
from ithaka.checks.verify import verify_layouts
from ithaka.comm.agree import gather_objects
from ithaka.comm.mesh import end_process_group, start_process_group
from ithaka.config import ConfigError, load_config
from ithaka.config.units import format_duration, format_tokens
from ithaka.exits import ExitCode
from ithaka.log.console import status
from ithaka.plan.hardware import RATES, Hardware, profile_path
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan
from ithaka.run.launch import Outcome, detect_gpu, exit_rank
from ithaka.run.request import make_request
from ithaka.run.resolve import detect_machine, weakest_machine

LIMIT_S = 600.0
ESTIMATES_S = {"machine": 20.0, "rates": 40.0, "exactness": 100.0, "faults": 100.0, "plan": 120.0}
# By type of device: seconds per measurement, MiB per call on the network, and the share of its planned value below which
# a rate is slow (a CPU is shared with other work).
SECONDS, MEBIBYTES, SLOW = {"cuda": 1.0, "cpu": 0.2}, {"cuda": 256, "cpu": 16}, {"cuda": 0.85, "cpu": 0.5}
MODELS, LAYERS, MIN_CONTEXT = {"cuda": "llama3-8b", "cpu": "smollm2-135m"}, 2, 1024
# The planned rates are bursts. `ithaka bench device` sustains these shares of them on an H200 (LOG.md, 2026-11-15).
SUSTAINED = {
    "matmul_flops": 0.83,
    "attention_forward_flops": 0.9,
    "attention_backward_flops": 0.84,
    "memory_bytes_s": 0.87,
}
NAMES = ("matmul", "attention forward", "attention backward", "device memory", "copies to and from host")  # of RATES
FIXES = {
    "pcie_bytes_s": "check `nvidia-smi -q -d PCIE`, and start with torchrun --numa-binding node",
    "link_bytes_s": "check `nvidia-smi topo -m` and `nvidia-smi nvlink -s`",
    "network_bytes_s": "check NCCL's devices with NCCL_DEBUG=INFO; set NCCL_IB_HCA or NCCL_SOCKET_IFNAME",
    "disk_bytes_s": "set memory.disk_path and train.run_dir to a faster disk",
}
OTHER_FIX = "check `nvidia-smi -q -d PERFORMANCE`, and other jobs on the device"


@dataclass
class Selftest:
    """All checks, on this rank. Collective; findings are valid on rank 0, which prints them."""

    model: str
    context: int
    disk: Path
    run_dir: Path
    rehearsed: dict[str, Any]  # of `ithaka rehearse --json`
    json_file: Path | None
    save_profile: bool

    def run(self) -> int:
        self.start_s, self.section, (self.device, self.dtype) = time.monotonic(), "machine", device_and_dtype()
        self.content: dict[str, Any] = {"findings": []}  # for --json
        threading.Thread(target=self._give_up, daemon=True).start()
        start_process_group(self.device)
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # see `_settle_matmuls`
        self.rank, self.num_ranks, self.kind = dist.get_rank(), dist.get_world_size(), self.device.type
        self.model = self.model or MODELS[self.kind]
        self.names = gather_objects((socket.gethostname(), os.environ.get("USER", ""), Path.home().name))
        self._print(f"{self.num_ranks} ranks; about {format_duration(sum(ESTIMATES_S.values()))}, at most ten minutes")
        for i, self.section in enumerate(ESTIMATES_S):
            left, failure = format_duration(sum(list(ESTIMATES_S.values())[i:])), ""
            with status(f"{self.section}, {i + 1} of {len(ESTIMATES_S)}; about {left} left"):
                try:
                    for finding in getattr(self, f"check_{self.section}")():
                        self._add(finding)
                except Exception as error:  # ranks that wait for this one meet the time limit
                    failure = f"{type(error).__name__}: {error}"
                failures = [f"rank {rank}: {text}" for rank, text in enumerate(gather_objects(failure)) if text]
            for text in failures[:1]:
                self._add(Finding(self.section, "failed", text, "see docs/several-nodes.md"))
        return self._finish()

    def check_machine(self) -> Iterator[Finding]:
        self.facts = self.content["facts"] = gather_objects(examine_rank(self.device, self.disk, self.run_dir))
        num_gpus = len(self.facts[0]["gpus"])
        self.ranks_per_gpu = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // num_gpus) if num_gpus else 1
        yield from judge_machine(self.facts, self.ranks_per_gpu)

    def check_rates(self) -> Iterator[Finding]:
        devices = gather_objects(measure_device(self.device, self.dtype, SECONDS[self.kind]))
        network, rows = measure_network(self.device, MEBIBYTES[self.kind]), list[tuple[str, str, list[float], int]]()
        for check, name in zip(NAMES, RATES, strict=False):
            rows.append((check, name, [float(found[name]) / SUSTAINED.get(name, 1.0) for found in devices], 0))
        for check, key in {"disk for offloading": "disk", "disk for checkpoints": "checkpoints"}.items():
            disks = [fact[key] for fact in self.facts if key in fact]  # one per node
            rates = [min(disk.get("write_bytes_s", 1.0), disk.get("read_bytes_s", 1.0)) for disk in disks]
            rows.append((check, "disk_bytes_s", rates, 0))
        self.measured = {name: min(rates) for check, name, rates, _ in rows if check != "disk for checkpoints"}
        self.measured |= {name: v for name, v in network_figures(network, self.device).items() if name in RATES}
        for row in network:
            name = "link_bytes_s" if row["where"] == "inside a node" else "network_bytes_s"
            rows.append((f"{row['what']} {row['where']}", name, [row["GB/s"] * 1e9], row["slowest rank"]))
        self.plan = self._choose_plan()
        self.content["rates"] = self.measured
        yield from (self._judge_rate(*row) for row in rows)
        if self.kind == "cuda":
            rate = min(fact.get("pin_bytes_s", 0.0) for fact in self.facts)
            yield Finding("pinning host memory", "passed", f"{rate / 1e9:.3g} GB/s per rank, all at once")

    def _choose_plan(self) -> Plan:
        """The plan for this machine at the longest context that fits, up to `context`; by the measured rates if no others
        are known, and if several ranks share a GPU."""
        machine = weakest_machine(gather_objects(detect_machine(load_config(None, []), self.num_ranks, detect_gpu())))
        gpu, context = machine.gpu, self.context
        self.has_rates = (gpu.name != "CPU" or profile_path("CPU").is_file()) and self.ranks_per_gpu == 1
        if not self.has_rates:
            gpu = replace(gpu, memory_bytes=gpu.memory_bytes // self.ranks_per_gpu, **self.measured)
        while not (plan := self._plan(replace(machine, gpu=gpu), context)).fits and context > MIN_CONTEXT:
            context //= 2
        return plan

    def _plan(self, machine: Hardware, context: int) -> Plan:
        return make_request(self.model, machine, str(context), 1, []).plan()

    def _judge_rate(self, check: str, name: str, rates: list[float], first_rank: int) -> Finding:
        """`rates`: by rank, from `first_rank`. The slowest counts: every rank waits for it."""
        rate, rank, planned = min(rates), first_rank + rates.index(min(rates)), getattr(self.plan.hardware.gpu, name)
        unit, scale = ("TFLOP/s", 1e12) if name.endswith("flops") else ("GB/s", 1e9)
        scale /= SUSTAINED.get(name, 1.0)  # shows what was measured
        text, figures = f"{rate / scale:.3g} {unit}, slowest on rank {rank}", {"rates": rates, "planned": planned}
        if not self.has_rates:
            return Finding(check, "passed", text, figures=figures)
        text += f", planned {planned / scale:.3g}"
        if rate >= SLOW[self.kind] * planned:
            return Finding(check, "passed", text, figures=figures)
        cost_s = self._with_rates({name: rate}).step_s - self.plan.step_s
        step = f"{format_duration(self.plan.step_s)} of {self.model} at {format_tokens(self.plan.work.context)}"
        text += f" (x{rate / planned:.2f}): adds {format_duration(cost_s)} to a step, {step}"
        return Finding(check, "slower", text, FIXES.get(name, OTHER_FIX), figures | {"cost_s": cost_s})

    def _with_rates(self, rates: dict[str, float]) -> Plan:
        hardware = self.plan.hardware
        return replace(self.plan, hardware=replace(hardware, gpu=replace(hardware.gpu, **rates)))

    def check_exactness(self) -> Iterator[Finding]:
        deadline_s = time.monotonic() + 1.5 * ESTIMATES_S["exactness"]
        for row in verify_layouts(self.device, self.num_ranks, deadline_s):
            text = "{layouts} of {of} layouts; largest error {error:.0e} at {where}, {allowed:.0e} allowed".format(
                **row
            )
            text += f"; wrong weights on rank {', '.join(map(str, row['ranks']))}" * bool(row["ranks"])
            ok = row["ok"] and not row["ranks"]
            fix = (
                ""
                if ok
                else "test the node's GPU and memory: dcgmi diag -r 3"
                if row["ranks"]
                else "report it with --json"
            )
            yield Finding(row["part"], "passed" if ok else "failed", text, fix, row)

    def check_faults(self) -> Iterator[Finding]:
        with tempfile.TemporaryDirectory(prefix=".selftest-", dir=self.run_dir, ignore_cleanup_errors=True) as own:
            yield from run_drill(Path(gather_objects(own)[0]))
            gather_objects(0)  # rank 0 has read its folder

    def check_plan(self) -> Iterator[Finding]:
        """Run two layers, at the longest context that leaves time for five steps."""
        kernel = rehearse.find_kernel("auto", self.plan.shape.attention_kinds)
        machine, config, context = (
            self.plan.hardware.with_kernel(kernel),
            find_config(self.model),
            self.plan.work.context,
        )
        budget_s, fits = min(ESTIMATES_S["plan"], self.start_s + LIMIT_S - 60 - time.monotonic()), False
        while not fits:
            truncated = rehearse.truncate_plan(plan := self._plan(machine, context), LAYERS, False, "auto", config)
            with suppress(ConfigError):  # it exceeds a CPU's memory
                rehearse.check_cpu_memory(truncated)
                fits = 5 * truncated.step_s < budget_s or context <= MIN_CONTEXT
            fits = all(gather_objects(fits))
            context = context if fits else context // 2
        rehearsed = {row["what"]: row["measured"] for row in self.rehearsed.get("rows", ())}
        yield Finding(
            "plan", "passed", f"{LAYERS} layers of {self.model} at {format_tokens(context)}, measured / planned:"
        )
        for row in rehearse.rehearse_plan(plan, truncated, self.model)[0]:
            what, planned, measured, unit = row.values()
            text = f"{measured:.4g} {unit}" + (f" / {planned:.4g}" if planned is not None else "")
            text += f", rehearsed {rehearsed[what]:.4g}" if what in rehearsed else ""
            is_worse = unit in ("s", "GiB") and planned and measured > planned / SLOW[self.kind] and self.kind == "cuda"
            fix = "see the rates above, or report it with --json" if is_worse else ""
            yield Finding(what, "slower" if is_worse else "passed", text, fix, row)

    # ---- output

    def _print(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def _add(self, finding: Finding) -> None:
        self.content["findings"].append(asdict(finding))
        self._print(f"{time.monotonic() - self.start_s:3.0f} s  {finding}")

    def _finish(self) -> int:
        statuses = [finding["status"] for finding in self.content["findings"]]
        if self.rank == 0 and hasattr(self, "plan"):
            plan, changed = self.plan, self._with_rates(self.measured)
            step = (
                f"{self.model} at {format_tokens(plan.work.context)}: {format_duration(plan.step_s)} per step planned"
            )
            self._print(f"{step}, {format_duration(changed.step_s)} with the rates measured here")
            if self.save_profile and "failed" not in statuses and self.ranks_per_gpu == 1:
                file = profile_path(plan.hardware.gpu.name)
                source = f"ithaka selftest, {self.num_ranks} ranks, {time.strftime('%Y-%m-%d')}"
                values = {k: v for k, v in asdict(changed.hardware.gpu).items() if k not in ("kernels", "desktop")}
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(values | {"source": source}, indent=1) + "\n")
                self._print(f"wrote {file}, whose rates ithaka plan and ithaka train use on this machine")
        counts = ", ".join(f"{statuses.count(name)} {name}" for name in ("passed", "slower", "failed"))
        self._print(f"{counts} in {format_duration(time.monotonic() - self.start_s)}")
        self._write_json()
        end_process_group()
        return ExitCode.FAILED if "failed" in statuses else ExitCode.DONE

    def _give_up(self) -> None:
        time.sleep(LIMIT_S)
        self.content["findings"].append(asdict(Finding(self.section, "failed", f"not finished after {LIMIT_S:.0f} s")))
        self._write_json()
        text = (
            f"selftest: {self.section} is not finished after {LIMIT_S:.0f} s on rank {self.rank}; check NCCL_DEBUG=INFO"
        )
        exit_rank(Outcome(ExitCode.HANG, text))

    def _write_json(self) -> None:
        if self.rank == 0 and self.json_file is not None:
            content = {"ranks": self.num_ranks, "seconds": time.monotonic() - self.start_s, **self.content}
            names = {name for names in self.names for name in names if name}
            self.json_file.write_text(json.dumps(anonymize(content, names), indent=1) + "\n", encoding="utf-8")


def anonymize(value: Any, names: set[str]) -> Any:
    """Replace names (of hosts and users) and paths in all texts."""
    if isinstance(value, dict):
        return {key: anonymize(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [anonymize(each, names) for each in value]
    if not isinstance(value, str):
        return value
    text = re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", "NAME", value) if names else value
    return re.sub(r"(?<![\w/])[~/][\w.+-]+(/[\w.+-]*)*", "PATH", text)


def run_rank(*arguments: Any) -> int:
    return Selftest(*arguments).run()
