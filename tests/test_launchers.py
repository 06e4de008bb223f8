"""The commands of docs/running-for-weeks.md under torchrun and Slurm, with ranks and agents
killed."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ithaka.config import to_yaml
from ithaka.log.metrics import read_metrics
from runs import run, tiny_run, wait_for

DOCS = Path(__file__).parents[1] / "docs/running-for-weeks.md"


pytestmark = pytest.mark.slow  # each takes a minute


def block(name: str) -> str:
    return re.search(rf"```{name}\n(.*?)```", DOCS.read_text(), re.DOTALL).group(1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with long.yaml and stand-ins for a cluster's commands. A step takes a tenth of a
    second."""
    config = tiny_run(
        tmp_path, parallel={"cp": 1}, train={"steps": 60, "save_every": 5, "validate_every": 0}
    )
    (tmp_path / "long.yaml").write_text(to_yaml(config))
    (tmp_path / "bin").mkdir()
    slow = "import time; from ithaka.train import trainer; step = trainer.train_step\n"
    slow += "trainer.train_step = lambda *args, **how: time.sleep(0.1) or step(*args, **how)\n"
    (tmp_path / "slow.py").write_text(slow + "from ithaka.cli import main; main()\n")
    commands = {
        "ithaka": f'exec {shlex.join([sys.executable, str(tmp_path / "slow.py")])} "$@"',
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
        "scontrol": (
            '[ "$1" = show ] && echo localhost || echo "$@" >> '
            f"{shlex.quote(str(tmp_path / 'requeued'))}"
        ),
        # Two nodes of one task, on one machine. Signals go to the tasks, and the highest code is
        # returned, as by Slurm.
        "srun": '[ "$1 $2" = "--kill-on-bad-exit=0 --wait=120" ] || exit 9; shift 2; for i in 0 '
        "1; do SLURM_PROCID=$i "
        'SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 "$@" & pids="$pids $!"; done; '
        "code=0; "
        "for p in $pids; do wait $p || { c=$?; [ $c -gt $code ] && code=$c; }; done; exit $code",
        "sleep": "",
    }
    for name, line in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def num_done(folder) -> int:
    metrics = folder / "run/metrics.jsonl"
    return len(read_metrics(metrics)) if metrics.exists() else 0


def ranks_of(processes) -> list[psutil.Process]:
    """Return the processes that run ithaka, without torchrun agents, whose command lines name it
    too."""
    below = [
        child
        for process in processes
        for child in psutil.Process(process.pid).children(recursive=True)
    ]
    return [
        child
        for child in below
        if "slow.py" in " ".join(child.cmdline()) and "torch.distributed.run" not in child.cmdline()
    ]


def start(command: str, folder: Path, name: str) -> subprocess.Popen:
    output = (folder / name).open("a")
    return subprocess.Popen(
        ["bash", "-c", command], stdout=output, stderr=output, start_new_session=True
    )


def undisturbed(ranks, folder) -> list[float]:
    config = tiny_run(
        folder / "undisturbed",
        parallel={"cp": 1},
        train={"steps": 60, "save_every": 0, "validate_every": 0},
    )
    ranks.run(2, run, config)
    return [record["loss"] for record in read_metrics(config.train.run_dir / "metrics.jsonl")]


def losses(folder) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "run/metrics.jsonl")]


def kill_rank_at(folder, agents, step: int) -> None:
    """Kill a rank once `step` steps are done and there is a checkpoint."""
    wait_for(lambda: num_done(folder) >= step and (folder / "run/latest").exists(), timeout_s=600)
    ranks_of(agents)[-1].send_signal(signal.SIGKILL)


def test_torchrun_with_two_agents_and_kills_finishes_one_run(ranks, folder):
    """The same command starts three times. Each time a rank is killed; twice the agents are killed
    too, and their ranks exit."""
    line = block("torchrun").strip().replace("--nproc-per-node 8", "--nproc-per-node 1")
    line = line.replace("-m ithaka", str(folder / "slow.py"))
    for attempt, step in enumerate((8, 22, 36)):
        here = line.replace("node0:29500", f"localhost:{port()}")
        agents = [start(here, folder, f"agent-{n}.txt") for n in range(2)]
        kill_rank_at(folder, agents, step)
        if attempt < 2:
            wait_for(lambda: num_done(folder) >= step + 8, timeout_s=600)  # noqa: B023  # torchrun restarted the rank
            orphans = ranks_of(agents)
            for agent in agents:
                agent.kill()
            assert len(psutil.wait_procs(orphans, timeout=60)[0]) == 2
    assert [agent.wait(600) for agent in agents] == [0, 0], (folder / "agent-0.txt").read_text()[
        -3000:
    ]
    assert losses(folder) == undisturbed(ranks, folder)


def test_the_slurm_script_restarts_requeues_and_finishes(ranks, folder):
    script = (
        block("slurm")
        .replace("MASTER_PORT=29500", f"MASTER_PORT={port()}")
        .replace("runs/long/", "run/")
    )
    environment = "SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node"
    (folder / "job.sh").write_text(script)
    job = start(f"{environment} bash job.sh", folder, "job.txt")
    kill_rank_at(folder, [job], 8)
    wait_for(lambda: num_done(folder) >= 22 and len(ranks_of([job])) == 2, timeout_s=600)
    for rank in ranks_of([job]):
        rank.send_signal(signal.SIGUSR1)
    assert job.wait(600) == 0, (folder / "job.txt").read_text()[-3000:]
    assert (folder / "requeued").read_text() == "requeue 7\n"
    assert "Stopped after step" in (folder / "job.txt").read_text()
    assert start(f"{environment} bash job.sh", folder, "job.txt").wait(600) == 0
    assert losses(folder) == undisturbed(ranks, folder)
    assert start(f"{environment} bash job.sh", folder, "job.txt").wait(600) == 0
    assert "run is finished after 60 steps" in (folder / "job.txt").read_text()
