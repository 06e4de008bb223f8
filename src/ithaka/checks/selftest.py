"""`ithaka selftest`: machine, rates of all ranks at once, exactness, faults, a plan's figures."""

import faulthandler
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ithaka.checkpoint.checkpoints import step_name
from ithaka.checks import bench, doctor, rehearse, verify
from ithaka.checks.doctor import Finding, judge
from ithaka.checks.failures import describe_failure, meet, run_on_all_ranks
from ithaka.checks.share import filter_values
from ithaka.comm.agree import gather_objects
from ithaka.comm.mesh import free_memory, start_process_group
from ithaka.comm.rank import is_local_rank_0
from ithaka.config import Config
from ithaka.config.units import format_duration, format_rate, format_tokens, plural
from ithaka.exits import ExitCode
from ithaka.log.metrics import read_metrics
from ithaka.plan.hardware import FIGURES, RATES, profile_path
from ithaka.plan.models import built_in
from ithaka.plan.search import Plan
from ithaka.run import check_request, launch
from ithaka.run.detect import detect_machine, weakest_machine
from ithaka.train.heartbeat import BEAT_S, MAX_SILENCE_S

LIMIT_S = 600.0
MIN_CONTEXT = 256
END_S = 120.0  # for all ranks to end a section after the first
MARGIN_S = 10.0
STATUSES = ("passed", "measured", "slower", "failed")
# estimated seconds
SECTIONS = {"machine": 20.0, "rates": 40.0, "exactness": 100.0, "faults": 100.0, "plan": 120.0}
# By type of device: the model, seconds per measurement, MiB per collective, and the share of its
# planned value below which a rate is slow (other work shares the CPUs).
DEFAULTS = {"cuda": ("llama3-8b", 1.0, 256, 0.85), "cpu": ("smollm2-135m", 0.2, 16, 0.5)}
# Names of the first RATES, and the part of them, which are bursts, that an H200 sustains (LOG.md,
# 2026-11-15).
SUSTAINED = {
    "matmul": 0.83,
    "attention forward": 0.9,
    "attention backward": 0.84,
    "device memory": 0.87,
}
FIXES = {
    "pcie_bytes_s": "check `nvidia-smi -q -d PCIE`, and start with torchrun --numa-binding node",
    "link_bytes_s": "check `nvidia-smi topo -m` and `nvidia-smi nvlink -s`",
    "network_bytes_s": (
        "check NCCL's devices with NCCL_DEBUG=INFO; set NCCL_IB_HCA or NCCL_SOCKET_IFNAME"
    ),
    "disk_bytes_s": "set memory.disk_path and train.run_dir to a faster disk",
}
OTHER_FIX = "check `nvidia-smi -q -d PERFORMANCE`, and other jobs on the device"


class Selftest:
    """All checks on this rank, for the options of the command. Collective; rank 0 prints the
    findings."""

    def __init__(
        self,
        model: str,
        context: int,
        disk: Path | None,
        run_dir: Path,
        rehearsed: dict[str, Any],
        out: Path | None,
    ) -> None:
        self.context = context
        self.disk = disk
        self.run_dir = run_dir
        self.rehearsed = rehearsed
        self.out = out
        self.start_s = time.monotonic()
        self.device, self.dtype = bench.device_and_dtype()
        default, self.seconds, self.mebibytes, self.slow = DEFAULTS[self.device.type]
        self.model = model or default
        self.on_gpu = self.device.type == "cuda"
        self.findings: list[Finding] = []
        start_process_group(self.device)
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.figures: dict[str, Any] = {}
        self.ranks_per_gpu = 1
        if self.on_gpu:
            local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self.ranks_per_gpu = -(-local_ranks // launch.num_gpus())
        self.facts: list[dict[str, Any]] = []

    def run(self, save_profile: bool) -> int:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)  # if a check hangs
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # see `_settle_matmuls`
        for i, section in enumerate(SECTIONS):
            problem = None
            left = format_duration(sum([*SECTIONS.values()][i:]))
            free_memory()  # ranks, also those of `ithaka train`, may share a GPU
            self._print(
                f"{section} ({i + 1} of {len(SECTIONS)}), {plural(self.num_ranks, 'rank')}, about "
                f"{left} left"
            )
            try:
                for finding in getattr(self, f"check_{section}")():
                    self._add(finding)
            except Exception as error:
                problem = error
            self._end_section(section, problem)
        if "rates" in self.figures:
            self._print(self._describe_step())
            if save_profile and self.rank == 0 and self.ranks_per_gpu == 1:
                gpu = self._with_rates(self.measured).hardware.gpu
                file = profile_path(gpu.name)
                values = {name: getattr(gpu, name) for name in (*FIGURES, "name", "kernel")}
                date = time.strftime("%Y-%m-%d")
                values["source"] = f"ithaka selftest, {plural(self.num_ranks, 'rank')}, {date}"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
                self._print(
                    f"wrote {file}: ithaka plan and ithaka train use its rates on this machine"
                )
        statuses = [finding.status for finding in self.findings]
        text = ", ".join(f"{statuses.count(name)} {name}" for name in STATUSES)
        self._print(f"{text} in {format_duration(time.monotonic() - self.start_s)}")
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()
        return int("failed" in statuses)

    def _describe_step(self) -> str:
        """Seconds by the rates measured here and, if they apply, by those of the plan."""
        measured = format_duration(self._with_rates(self.measured).step_s)
        planned = format_duration(self._with_rates(self.known).step_s)
        text = f"{self.model} at {format_tokens(self.plan.work.context)}: {measured} per step"
        return f"{text} with the rates measured here" + f", {planned} planned" * self.has_rates

    def _end_section(self, section: str, error: Exception | None) -> None:
        """Add a failure of any rank. If others wait for that rank, end the test: their collectives
        no longer match."""
        left_s = LIMIT_S - MARGIN_S - (time.monotonic() - self.start_s)
        failure = describe_failure(error) if error is not None else None
        first, missing = meet(section, failure, min(END_S, max(MARGIN_S, left_s)))
        if first is None and not missing:
            return
        text = str(first or "no rank failed")
        figures: dict[str, Any] = {"ranks": missing}
        if first is not None:
            figures |= {"rank": first.rank, "error": first.error, "where": first.where}
        if missing:
            text += f"; rank {', '.join(map(str, missing[:8]))} did not end this section"
        finding = Finding(section, "failed", text, "see docs/several-nodes.md", figures)
        present = (rank for rank in range(self.num_ranks) if rank not in missing)
        self._add(finding, writer=next(present))
        if missing:
            raise RuntimeError(f"the self-test ended in section {section}: {text}") from error

    def _print(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def _add(self, finding: Finding, writer: int = 0) -> None:
        """On rank `writer`, print it and write what may be shared of all findings so far."""
        self.findings.append(finding)
        seconds = time.monotonic() - self.start_s
        if self.rank != writer:
            return
        words = "; ".join(filter(None, (finding.text, finding.fix)))
        print(f"{seconds:3.0f} s  {finding.status:<8}  {finding.check:<28}  {words}", flush=True)
        if self.out is not None:
            content: dict[str, Any] = {"seconds": seconds, "model": built_in(self.model)}
            content["findings"] = [each._asdict() for each in self.findings]
            content |= self.figures
            text = json.dumps(filter_values(content), indent=1, allow_nan=False)
            self.out.write_text(text + "\n", encoding="utf-8")

    def _examine(self) -> dict[str, Any]:
        own = doctor.examine_rank(self.device, self.ranks_per_gpu)
        if is_local_rank_0():
            own |= doctor.examine(self.disk)
            own["checkpoints"] = doctor.measure_disk(self.run_dir)
        return own

    def check_machine(self) -> Iterator[Finding]:
        self.facts = gather_objects(run_on_all_ranks(self._examine))
        findings = [*doctor.judge_nodes(self.facts), *doctor.judge_ranks(self.facts)]
        for fact in self.facts:
            fact["passed"] = {check: passed for check, (passed, _) in fact["checks"].items()}
        self.figures["ranks"] = self.facts
        nodes = [fact for fact in self.facts if "gpus" in fact]
        gpus = [gpu["name"] for node in nodes for gpu in node["gpus"]]
        names = " and ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        text = f"{names or 'CPUs'} on {plural(len(nodes), 'node')}"
        if self.on_gpu:
            software = [f"driver {node['driver']}, CUDA {node['cuda']}" for node in nodes]
            text += f", {' and '.join(dict.fromkeys(software))}"
        yield Finding("devices", "passed", text)
        yield from findings

    def check_rates(self) -> Iterator[Finding]:
        own = run_on_all_ranks(bench.measure_device, self.device, self.dtype, self.seconds)
        rows: list[tuple[str, str, dict[int, float]]] = []  # check, name in RATES, by rank
        # Again, with all ranks at once: those of a node share its memory.
        own["pcie_bytes_s"] = run_on_all_ranks(bench.measure_host_copies, self.device, self.seconds)
        devices = gather_objects(own)
        for check, name in zip((*SUSTAINED, "copies to and from host"), RATES, strict=False):
            part = SUSTAINED.get(check, 1.0)
            rows.append((check, name, {r: float(d[name]) / part for r, d in enumerate(devices)}))
        for check, key in (
            ("disk for checkpoints", "checkpoints"),
            ("disk for offloading", "disk"),
        ):
            rates = {}
            for rank, fact in enumerate(self.facts):
                if key in fact:  # one per node
                    disk = fact[key]
                    rates[rank] = min(disk.get(f"{way}_bytes_s", 1.0) for way in ("write", "read"))
            if rates:  # the machine was examined
                rows.append((check, "disk_bytes_s", rates))
        network = bench.measure_network(self.device, self.mebibytes)
        self.measured: dict[str, Any] = {name: min(rates.values()) for _, name, rates in rows}
        found = bench.network_figures(network, self.device)
        self.measured |= {name: value for name, value in found.items() if name in RATES}
        for row in network:
            name = "link_bytes_s" if row["where"] == "inside a node" else "network_bytes_s"
            rates = {row["slowest rank"]: row["GB/s"] * 1e9}
            rows.append((f"{row['what']} {row['where']}", name, rates))
        self._choose_plan()
        self.figures["rates"] = [
            {"check": check, "rate": name, "by rank": rates} for check, name, rates in rows
        ]
        for check, name, rates in rows:
            yield self._judge_rate(check, name, rates)

    def _choose_plan(self) -> None:
        """Plan at the longest context that fits, or of which two layers fit, and of which these
        take five steps in the time of their section. By measured rates if no others apply. On CPUs,
        all ranks share a sequence."""
        detect = partial(detect_machine, Config(), self.num_ranks)
        machines = gather_objects(run_on_all_ranks(lambda: detect(launch.detect_gpu())))
        machine = weakest_machine(machines)
        gpu = machine.gpu
        changes = [] if self.on_gpu else [f"parallel.cp={self.num_ranks}"]
        # from the table or a saved profile
        self.known = {name: getattr(gpu, name) for name in RATES}
        applies = self.on_gpu or profile_path(gpu.name).is_file()
        self.has_rates = applies and self.ranks_per_gpu == 1
        if not self.has_rates:
            gpu = replace(gpu, memory_bytes=gpu.memory_bytes // self.ranks_per_gpu, **self.measured)
        machine = replace(machine, gpu=gpu)
        best: tuple[bool, bool, int] | None = None
        for i in range(max(1, (self.context // MIN_CONTEXT).bit_length())):
            context = self.context >> i
            wanted = check_request.make_request(self.model, machine, str(context), 1, changes)
            plan = wanted.plan()
            few = rehearse.truncate_plan(plan, dict(wanted.hf_config), 2, False)
            is_quick = 5 * few.step_s < SECTIONS["plan"]
            fits = is_quick and plan.fits
            few_fit = is_quick and few.fits
            # the longest, or the shortest if none is quick
            preference = (fits, few_fit, context if few_fit else -context)
            if best is None or preference > best:
                best = preference
                self.plan = plan
                self.truncated = few
            if fits:
                break

    def _with_rates(self, rates: dict[str, Any]) -> Plan:
        hardware = self.plan.hardware
        return replace(self.plan, hardware=replace(hardware, gpu=replace(hardware.gpu, **rates)))

    def _judge_rate(self, check: str, name: str, rates: dict[int, float]) -> Finding:
        """Compare the slowest rank, for which all others wait, with the plan."""
        rank = min(rates, key=lambda rank: rates[rank])
        rate = rates[rank]
        planned = getattr(self.plan.hardware.gpu, name)
        unit, scale = ("TFLOP/s", 1e12) if name.endswith("flops") else ("GB/s", 1e9)
        part = SUSTAINED.get(check, 1.0)
        text = f"{format_rate(rate / scale * part)} {unit} on rank {rank}, the slowest"
        if not self.has_rates:
            return Finding(check, "measured", text)
        text += f"; planned {format_rate(planned / scale * part)}"
        if rate < self.slow * planned:
            cost_s = self._with_rates({name: rate}).step_s - self.plan.step_s
            step = f"{format_duration(self.plan.step_s)} for {self.model}"
            step += f" at {format_tokens(self.plan.work.context)}"
            text += f", x{rate / planned:.2f}: adds {format_duration(cost_s)} per step ({step})"
        fix = FIXES.get(name, OTHER_FIX)
        is_fast = rate >= self.slow * planned
        return judge(check, is_fast, text, fix, "slower", rank=rank, rate=rate, planned=planned)

    def check_exactness(self) -> Iterator[Finding]:
        deadline_s = time.monotonic() + SECTIONS["exactness"]
        yield from verify.verify_layouts(self.device, self.num_ranks, deadline_s)

    def check_faults(self) -> Iterator[Finding]:
        make = partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
        with run_on_all_ranks(make, prefix=".selftest-", dir=self.run_dir) as own:
            yield from run_drill(Path(gather_objects(own)[0]) / "run")
            gather_objects(0)  # rank 0 has read it

    def check_plan(self) -> Iterator[Finding]:
        if "rates" not in self.figures:
            return  # they failed, so there is no plan
        rows, _ = rehearse.rehearse_plan(self.plan, self.truncated, self.model)
        self.figures["plan"] = rows
        yield from map(self._judge_row, rows)

    def _judge_row(self, row: dict[str, Any]) -> Finding:
        """Compare a measurement with the plan, which is for a GPU."""
        what, planned, measured, unit = row.values()
        text = f"{measured:.4g} {unit}".rstrip()
        if self.on_gpu and planned is not None:
            text += f", planned {planned:.4g}"
        for other in self.rehearsed.get("rows", ()):
            if other["what"] == what:
                text += f", rehearsed {other['measured']:.4g}"
        text += f" (2 layers of {self.model} at {format_tokens(self.plan.work.context)})"
        if not self.on_gpu or not planned or unit not in ("s", "GiB"):
            return Finding(what, "measured", text)
        is_fast = measured <= planned / self.slow
        return judge(what, is_fast, text, "compare the rates above", "slower")


def run_rank(save_profile: bool, *arguments: Any) -> int:
    """`arguments`: those of `Selftest`."""
    return Selftest(*arguments).run(save_profile)


# ---- train a small model on all ranks, kill one, and resume on half of them

# for all ranks to exit after one died (docs/running-for-weeks.md)
EXIT_S = MAX_SILENCE_S + 4 * BEAT_S
START_S = 120.0  # for a run to start and take its steps
SAVE_EVERY = 4
STEPS = 6  # a resumed run repeats those after the first save
LOSS_TOLERANCE = 1e-4  # relative, in float32: fewer ranks sum in another order
SETTINGS = [
    "model.embedded=small",
    "model.dtype=float32",
    "memory.plan=off",
    "data.context=128",
    "train.steps=1000000",
    f"train.save_every={SAVE_EVERY}",
    "train.keep_last=1000000",
    "train.validate_every=0",
    "optim.schedule=constant",
    f"data.path={Path(__file__).parent}",
]


def run_drill(run_dir: Path) -> Iterator[Finding]:
    """Each rank starts a rank of `ithaka train`, without a launcher. `run_dir`: to create, shared
    by all nodes."""
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    victim = num_ranks - 1
    # half of the nodes or, of one node, half of its ranks
    unit = 1 if num_ranks == per_node else per_node
    fewer = max(n for n in range(unit, max(unit, num_ranks // 2) + 1, unit) if num_ranks % n == 0)
    saved = run_dir / "checkpoints" / step_name(SAVE_EVERY)
    cp = math.gcd(4, fewer)  # the model has 4 heads
    settings = [*SETTINGS, f"parallel.cp={cp}", f"train.global_batch={num_ranks // cp}"]

    def has_trained() -> bool:
        return saved.is_dir() and len(_read_losses(run_dir)) >= STEPS

    with _started_rank(num_ranks, per_node, settings, "--run-dir", run_dir) as process:
        done = has_trained if rank == 0 else lambda: True
        runs = all(gather_objects(run_on_all_ranks(process.wait_for, done, START_S)))
        if rank == victim or not runs:
            process.kill()
        ends = gather_objects(run_on_all_ranks(process.finish, 2 * EXIT_S, f"rank {victim} on "))
    codes = [end.code for end in ends]
    seconds = max(end.seconds for end in ends)
    if not runs:
        logs = " ".join(end.log for end in ends).strip()[-500:]
        text = f"`ithaka train` takes no {STEPS} steps within {START_S:.0f} s: {logs}"
        fix = "set --run-dir to a folder that all nodes share"
        yield Finding("train", "failed", text, fix, {"codes": codes})
        return
    ok = all(end.code == ExitCode.HANG and end.names_victim for end in ends[:-1])
    text = "only one rank"
    if victim:
        how = "name it" if ok else f"their codes are {tuple(codes[:-1])}: {ends[0].log[-300:]}"
        text = f"rank {victim} killed: the others exit after {seconds:.0f} s and {how}"
    fix = f"expected: code {ExitCode.HANG:d} within {EXIT_S:.0f} s; report it with --json"
    otherwise = "slower" if ok else "failed"
    is_prompt = seconds <= EXIT_S
    yield judge("kill a rank", ok and is_prompt, text, fix, otherwise, codes=codes, seconds=seconds)
    before = run_on_all_ranks(_rewind, run_dir, saved)
    settings = [f"train.steps={STEPS}"]
    with _started_rank(fewer, min(per_node, fewer), settings, "--resume", run_dir) as process:
        ends = gather_objects(run_on_all_ranks(process.finish, START_S))
    after = run_on_all_ranks(_read_losses, run_dir)
    problems = [end.log[-500:] for end in ends if end.code]
    codes = [end.code for end in ends]
    repeated = range(SAVE_EVERY + 1, STEPS + 1)
    error = max(abs(after.get(i, math.inf) / before.get(i, 1.0) - 1) for i in repeated)
    text = f"saved on {plural(num_ranks, 'rank')}, resumed on {fewer}: "
    text += f"losses differ by {error:.0e}, {LOSS_TOLERANCE:.0e} allowed"
    ok = error <= LOSS_TOLERANCE and not problems
    figures: dict[str, Any] = {
        "codes": codes,
        "largest error": error,
        "allowed": LOSS_TOLERANCE,
        "resumed on": fewer,
    }
    fix = "".join(problems[:1])
    yield judge("save and resume", ok, text, fix, **figures)


def _read_losses(run_dir: Path) -> dict[int, float]:
    return {
        row["step"]: row["loss"]
        for row in read_metrics(run_dir / "metrics.jsonl")
        if row.get("loss") is not None
    }


def _rewind(run_dir: Path, saved: Path) -> dict[int, float]:
    """Let the run resume from `saved`. Return the losses of its steps so far."""
    losses = _read_losses(run_dir)
    (run_dir / "latest").write_text(saved.name)
    return losses


class RankEnd(NamedTuple):
    """How a started rank ended."""

    code: int
    seconds: float  # waited for it
    log: str  # the end of its stderr
    names_victim: bool


class StartedRank:
    """A process, or none. Its stderr is a file: a pipe that nobody reads blocks after 64 KiB."""

    _process: subprocess.Popen | None = None

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        options: dict[str, Any] = {
            "env": environment,
            "stdout": subprocess.DEVNULL,
            "stderr": self._stderr,
        }
        self._process = subprocess.Popen(command, **options)

    def wait_for(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `done()`. Return whether the process still runs then."""
        deadline_s = time.monotonic() + limit_s
        is_done = False
        while not is_done and self._runs() and time.monotonic() < deadline_s:
            time.sleep(0.1)
            is_done = done()
        return is_done and self._runs()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def finish(self, limit_s: float, victim: str = "") -> RankEnd:
        """Wait until the process ends, or kill it. `victim`: words that its stderr should
        contain."""
        if self._process is None:
            return RankEnd(0, 0.0, "", False)
        start_s = time.monotonic()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.seek(0)
        log = self._stderr.read()
        seconds = time.monotonic() - start_s
        return RankEnd(self._process.returncode, seconds, log.strip()[-500:], victim in log)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._stderr.close()


@contextmanager
def _started_rank(
    num_ranks: int, per_node: int, settings: list[str], *arguments: str | Path
) -> Iterator[StartedRank]:
    """Run this rank of `ithaka train` within the block, if it is one of `num_ranks`. Collective."""
    port = gather_objects(run_on_all_ranks(_find_free_port))[0]
    variables = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"} | os.environ
    variables |= {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # it ends with this process
        "TORCHELASTIC_RUN_ID": "selftest",
    }
    program = f"import sys; sys.path[:] = {sys.path!r}; from ithaka.cli import main; main()"
    command = [sys.executable, "-c", program, "train", *map(str, arguments)]
    for setting in settings:
        command += ["--set", setting]
    process = StartedRank()
    try:
        starts = partial(process.start, command, variables)
        run_on_all_ranks(starts if dist.get_rank() < num_ranks else lambda: None)
        yield process
    finally:
        process.close()


def _find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
