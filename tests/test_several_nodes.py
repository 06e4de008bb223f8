"""Several nodes: two torchrun agents on one machine, the network bench, and a rehearsal of rank 0
of two nodes."""

import json
import multiprocessing
import socket

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from typer.testing import CliRunner

from ithaka.checks.bench import measure_network, network_figures
from ithaka.cli import app
from ithaka.config import to_yaml
from ithaka.plan.hardware import find_hardware
from models import tiny_config
from programs import Program
from refusals import assert_command_refused
from runs import metrics, tiny_run


def rank(arguments):
    try:
        app(arguments)
    except SystemExit as end:  # an agent waits for a result
        assert end.code == 0


def agent(port, arguments):
    """Run a torchrun agent whose rank is a fork, which saves the imports."""
    # otherwise it may not start processes
    multiprocessing.current_process()._config["daemon"] = False
    meeting = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"localhost:{port}",
        "run_id": "two",
        "max_restarts": 0,
    }
    elastic_launch(LaunchConfig(2, 2, 1, start_method="fork", **meeting), rank)(arguments)
    return 0


@pytest.mark.slow
def test_two_agents_train_one_model(tmp_path):
    """The agents start as in docs/several-nodes.md, and every rank plans for two nodes."""
    config = tiny_run(
        tmp_path,
        parallel={"cp": 2, "ring": 2, "replicas": 2},
        train={"steps": 1, "validate_every": 0},
    )
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [
        Program(tmp_path, agent, port, ["train", str(tmp_path / "run.yaml")]) for _ in range(2)
    ]
    codes = [agent.wait() for agent in agents]
    assert codes == [0, 0], "\n".join(agent.stderr for agent in agents)
    assert (
        sum("1 data x 2 context parallel (1 Ulysses x 2 ring)" in agent.stdout for agent in agents)
        == 1
    )
    run_dir = config.train.run_dir
    assert json.loads((run_dir / "plan.json").read_text())["gpus"] == "2x1xCPU"
    assert metrics(run_dir)[-1]["ring_bytes"] > 0


def measured_here():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        rows = measure_network(torch.device("cpu"), 1)
    return rows, network_figures(rows, torch.device("cpu"))


def test_bench_network_writes_what_plan_reads(ranks, tmp_path):
    (rows, figures), *others = ranks.run(4, measured_here)
    assert all(rows == other_rows for other_rows, _ in others), "all report the slowest rank"
    whats = ("all-to-all", "all-gather", "reduce-scatter", "send/recv")
    places = ("inside a node", "between nodes")
    assert {(row["what"], row["where"], row["ranks"]) for row in rows} == {
        (w, p, 2) for w in whats for p in places
    }
    assert all(row["GB/s"] > 0 for row in rows)
    (tmp_path / "network.json").write_text(json.dumps(figures))
    gpu = find_hardware("2x2", tmp_path / "network.json").gpu
    exchanges = [row for row in rows if row["what"] in ("all-to-all", "send/recv")]
    far = [row["GB/s"] * 1e9 for row in exchanges if row["where"] == "between nodes"]
    assert gpu.network_bytes_s == min(far) and gpu.link_bytes_s == figures["link_bytes_s"]
    assert_command_refused(["bench", "network"], "bench network", "ranks", fix="torchrun")


def test_rank_0_of_two_nodes_is_rehearsed(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(tiny_config("llama", attention_bias=False, tie_word_embeddings=False).to_dict())
    )
    arguments = ["rehearse", str(file), "--gpus", "2x2xH100-80GB", "--context", "2048", "--json"]
    arguments += ["--set", "parallel.cp=4", "--set", "parallel.ring=2"]
    answer = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert answer["settings"]["parallel.ring"] == 2
    peak = next(row for row in answer["rows"] if row["what"] == "peak without reserve")
    # mostly weights and a CPU's tiles
    assert peak["measured"] == pytest.approx(peak["planned"], rel=0.5)
