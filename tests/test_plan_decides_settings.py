"""On a known GPU the planner decides the settings that nobody gave."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from grids import diagonal
from ithaka.attention.kernels import KERNELS
from ithaka.cli import app
from ithaka.comm.agree import gather_objects, raise_on_all_ranks
from ithaka.config import ConfigError, OptimConfig, load_config, to_yaml
from ithaka.layout import Layout, layout_from_config
from ithaka.plan.hardware import KERNEL_NAMES, gpu_named, parse_gpus, peak_flops
from ithaka.plan.mixers import AttentionCost
from ithaka.plan.search import Plan
from ithaka.plan.shape import AttentionKind, StepShape
from ithaka.plan.summary import collect_facts
from ithaka.run import road
from ithaka.run.detect import detect_machine, weakest_machine
from ithaka.run.fits import check_fits
from ithaka.run.road import check_ranks_agree, model_shape, plan_settings
from ithaka.run.rules import RunFacts, check_run, check_settings, check_sizes
from ithaka.run.validated import Run, certain_needs, store_host_bytes
from ithaka.trace.shapes import find_shape
from ithaka.train import journal
from refusals import assert_command_refused, assert_refused

pytestmark = pytest.mark.usefixtures("plans_once")

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"


def node(name=H200, host=2 * 10**12, disk=0, gpu=2**62, ranks=8, nodes=1):
    """Return the hardware that a rank detects on one of `nodes` equal nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        set_memory(patch, host, host, disk)
        settings = load_config(None, ["memory.offload=disk"] if disk else [])
        return detect_machine(settings, ranks * nodes, None if name is None else (name, gpu))


def set_memory(patch, total, free, disk_free=10**13):
    """Set this machine's total and free bytes of host memory, and its free disk."""
    memory = SimpleNamespace(total=total, available=free)
    patch.setattr("psutil.virtual_memory", lambda: memory)
    patch.setattr("ithaka.facts.machine.cgroup_rooms", list)
    patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**13, free=disk_free))


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    set_memory(monkeypatch, 2 * 10**12, 2 * 10**12)


def llama(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, '
        '"num_attention_heads": 32,'
        '"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, '
        '"tie_word_embeddings": false}'
    )
    overrides = [
        f"model.path={path}",
        *(f"{name.replace('__', '.')}={value}" for name, value in changes.items()),
    ]
    return load_config(None, overrides)


def on_gpus(config, num_ranks, hardware=None):
    """Return a run of this configuration that is not validated yet."""
    shape = model_shape(config)
    hardware = hardware or detect_machine(config, num_ranks, (H100, 2**62))
    return Run(
        config,
        num_ranks,
        shape,
        layout_from_config(config, shape.num_layers, num_ranks, on_gpu=True),
        hardware,
    )


def test_long_contexts_are_offloaded_and_given_settings_win(tmp_path):
    config = llama(tmp_path, data__context="4M", memory__tile_tokens=4096)
    planned = plan_settings(config, node())
    resolved = planned.config
    assert planned.plan is not None and planned.plan.fits
    assert resolved.memory.offload == "host" and resolved.memory.keep_attention != "none"
    assert resolved.memory.tile_tokens == 4096
    assert resolved.parallel.cp == planned.plan.layout.cp


SETTINGS = [{}, {"parallel__cp": "auto"}, {"parallel__cp": 8}, {"parallel__cp": "all"}]
SETTINGS.append({"memory__overlap": "false", "train__batch": 2})


@pytest.mark.parametrize(
    "context,changes",
    [
        ("128K", SETTINGS[0]),
        *(("1M", changes) for changes in (SETTINGS[0], *SETTINGS[1::2])),
        *(pytest.param("128K", changes, marks=pytest.mark.slow) for changes in SETTINGS[1:]),
        *(pytest.param("1M", changes, marks=pytest.mark.slow) for changes in SETTINGS[2::2]),
    ],
)
def test_train_and_plan_choose_the_same_settings(tmp_path, context, changes):
    """Compares every setting and the sequences per step, for the same model and machine."""
    config = llama(tmp_path, data__context=context, **changes)
    planned = plan_settings(config, node(H100))
    resolved = planned.config
    plan = planned.plan
    overrides = [
        f"{name.replace('__', '.')}={value}"
        for name, value in changes.items()
        if name != "train__batch"
    ]
    options = [option for setting in overrides for option in ("--set", setting)]
    machine = ["--gpus", "8xH100", "--host-memory", "2TB", "--batch", str(config.train.batch)]
    args = ["plan", str(config.model.path), *machine, "--context", context, *options, "--json"]
    answer = json.loads(CliRunner().invoke(app, args).stdout)
    assert answer["settings"] == plan.settings
    for name, value in answer["settings"].items():
        assert resolved.get(name) == value or name in config.given
    layout = layout_from_config(resolved, 32, 8, on_gpu=True)
    layout = dataclasses.replace(layout, dtype=None, heads_per_stage=layout.heads_per_stage or 32)
    assert layout == plan.layout, "what the layers get is what was planned"
    cp = resolved.parallel.cp_of(8)
    assert cp == answer["settings"]["parallel.cp"]
    assert cp == 8 or changes.get("parallel__cp") not in (8, "all")
    assert answer["tokens_per_step"] == 8 // cp * config.train.batch * config.data.context


@pytest.mark.parametrize("context", ["128K", "1M", "4M"])
def test_training_accepts_a_planned_yaml_file(tmp_path, context):
    model = llama(tmp_path).model.path
    kernel = ["--set", "attention.kernel=cudnn"]
    args = [
        "plan",
        str(model),
        "--gpus",
        "8xH100",
        "--host-memory",
        "2TB",
        "--context",
        context,
        *kernel,
    ]
    answer = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    file = tmp_path / "long.yaml"
    assert CliRunner().invoke(app, [*args, "--yaml", "--out", str(file)]).exit_code == 0
    config = load_config(file)
    planned = plan_settings(config, node(H100))
    plan = planned.plan
    assert planned.config == config and plan.settings == answer["settings"]
    assert plan.step_s == answer["step_s"] and plan.tokens_per_step == answer["tokens_per_step"]


@pytest.mark.parametrize(
    "setting, installed, kernel",
    [
        ("auto", True, "fa4"),
        ("auto", False, "cudnn"),
        pytest.param("cudnn", True, "cudnn", marks=pytest.mark.slow),
        pytest.param("flash", True, "flash", marks=pytest.mark.slow),
    ],
)
def test_plans_assume_the_kernel_that_training_uses(
    tmp_path, monkeypatch, setting, installed, kernel
):
    """They assume FlashAttention 4 only if it is installed and the GPU supports it, and name the
    kernel."""
    fa4 = dataclasses.replace(
        KERNELS["fa4"], check_installed=lambda: None if installed else "needs flash-attn-4"
    )
    monkeypatch.setitem(KERNELS, "fa4", fa4)
    config = llama(tmp_path, data__context="128K", attention__kernel=setting)
    machine = detect_machine(config, 1, (H100, 2**62))
    plan = plan_settings(config, machine).plan
    assert machine.gpu.kernel == plan.hardware.gpu.kernel == kernel
    forward, backward = {"fa4": (664, 628), "cudnn": (594, 534), "flash": (310, 325)}[kernel]
    assert machine.gpu.attention_forward_flops == pytest.approx(forward * 1e12)
    assert machine.gpu.attention_backward_flops == pytest.approx(backward * 1e12)
    facts = collect_facts(plan, "llama")
    assert facts["assumed"]["attention"].startswith(KERNEL_NAMES[kernel])
    on_a100 = detect_machine(config, 1, ("NVIDIA A100-SXM4-80GB", 2**62)).gpu
    assert on_a100.kernel == ("flash" if setting == "flash" else "cudnn")


def test_a_run_reports_a_kernel_that_differs_from_the_plan():
    """A kernel may fail its test on the GPU."""
    plan = Plan(
        find_shape("llama3-8b"), Layout(), node(H100), StepShape(4096)
    )  # with cuDNN: flash-attn-4 is not installed
    descriptions = [
        journal._describe_planned_kernel(
            SimpleNamespace(kernel=kernel, run=SimpleNamespace(plan=planned))
        )
        for kernel in ("cudnn", "flash")
        for planned in (plan, None)
    ]
    assert descriptions == ["", "", ", planned with cudnn", ""]


@pytest.mark.parametrize(
    "gpu, kind, kernels, description",
    [
        ("H200", AttentionKind(256, 2), "fa4", ""),
        (
            "H200",
            AttentionKind(512, 2),
            "fa4 and efficient",
            "FlashAttention 4; PyTorch's memory-efficient kernel for head dim 512, ",
        ),
        ("H200", AttentionKind(256, 2, softcap=50.0), "fa4", ""),
        (
            "A100-80GB",
            AttentionKind(256, 2, softcap=50.0),
            "cudnn and eager",
            "matmuls in TF32 for head dim 256 and softcap 50, ",
        ),
    ],
)
def test_attention_is_planned_with_the_kernel_that_computes_it(gpu, kind, kernels, description):
    """Layers with a window run in the GPU's kernel, the others in `kernels`."""
    usual = Plan(find_shape("gemma-3-4b"), Layout(), parse_gpus(gpu), StepShape(2**17))
    mixers = tuple(
        mixer if mixer.kind.window else AttentionCost(kind) for mixer in usual.shape.mixers
    )
    plan = dataclasses.replace(usual, shape=dataclasses.replace(usual.shape, mixers=mixers))
    facts = collect_facts(plan, "gemma")
    assert facts["kernel"] == kernels and description in facts["assumed"]["attention"]
    assert (plan.seconds.attention > 2 * usual.seconds.attention) == bool(description)
    warning = "".join(facts["warnings"])
    assert warning.startswith("Slow attention: ") == bool(description)
    kinds = (description.partition(" for ")[2] or description).rstrip(", ")
    layers = rf"5 of 34 layers \({kinds}\) run [^,]+, which takes (\d+)% of the step"
    # All layers with these attend for longer than the layers with windows take in addition.
    least = plan.seconds.attention - usual.seconds.attention
    most = plan.seconds.attention
    assert (
        not description or least <= int(re.search(layers, warning)[1]) / 100 * plan.step_s <= most
    )


def test_ranks_plan_with_the_slowest_kernel():
    fast = node(H100)
    slow = fast.with_kernel("flash")
    assert (
        weakest_machine([fast, slow]).gpu.kernel
        == weakest_machine([slow, fast]).gpu.kernel
        == "flash"
    )


def test_cp_is_planned_for_the_sequences_of_a_step(tmp_path):
    """At 64K a sequence with its activations fits on half of the GPUs; at 4M it does not fit on
    four."""
    chosen = [
        plan_settings(llama(tmp_path, data__context=c), node(H100)).config.parallel.cp
        for c in ("64K", "4M")
    ]
    assert chosen[0] < 8 == chosen[1]


def evaluated(config, every, *contexts):
    evaluation = dataclasses.replace(config.evaluate, every=every, contexts=contexts)
    return dataclasses.replace(config, evaluate=evaluation)


def test_an_evaluation_longer_than_the_context_is_planned(tmp_path):
    """Without activations for backward, longer contexts fit than in training; weights and optimizer
    stay."""
    config = llama(tmp_path, data__context="128K", parallel__cp=8)
    resolved = plan_settings(config, node(H100)).config
    for every, contexts in ((100, (2**13, 2**19)), (0, (2**24,)), (100, ())):
        check_fits(on_gpus(evaluated(resolved, every, *contexts), 8))
    refused = on_gpus(evaluated(resolved, 100, 2**13, 2**24), 8)
    with pytest.raises(
        ConfigError,
        match=r"^evaluate.contexts=16777216 .*79.1 GiB.*shorter evaluate.*memory.plan=off",
    ):
        check_fits(refused)
    ledger = refused.evaluation_ledger
    assert (ledger.gpu["optimizer"], ledger.gpu["parameters"], ledger.gpu["kept activations"]) == (
        8 * refused.shape.num_parameters // 8,
        4 * refused.shape.num_parameters // 8,
        0,
    )


def test_a_plan_that_cannot_fit_is_refused(tmp_path):
    config = llama(
        tmp_path, data__context="1M", memory__offload="none", memory__keep_attention="all"
    )
    machine = node(ranks=1)
    planned = plan_settings(config, machine)
    assert not planned.plan.fits
    with pytest.raises(
        ConfigError,
        match=r"data.context=1048576 .*GPU.*; use memory.offload=host, .*memory.plan=off",
    ):
        check_fits(on_gpus(planned.config, 1, machine))


@pytest.mark.parametrize(
    "changes, ways",
    [
        ({"data__context": "1M", "memory__offload": "none"}, "planner"),
        (
            {"data__context": "1M"},
            (
                r"data.context=(\d+), an adapter \(adapter.rank=16\), memory.stored_dtype=float8, "
                r"(\d+) GPUs \((.*?)\)"
            ),
        ),
        pytest.param(
            {"data__context": "8M", "adapter__rank": 8},
            r"data.context=(\d+), (\d+) GPUs \((.*?)\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_settings_that_would_fit_are_found_by_search(tmp_path, changes, ways):
    machine = node(H100, ranks=1, host=2 * 10**12 if "memory__offload" in changes else 380 * 10**9)
    config = llama(tmp_path, **changes)
    resolved = plan_settings(config, machine).config
    with pytest.raises(ConfigError, match=ways) as refused:
        check_fits(on_gpus(resolved, 1, machine))
    if suggested := re.search(ways, str(refused.value)).groups():
        context = int(suggested[0])
        count = int(suggested[1])
        name = suggested[2]
        shorter = llama(tmp_path, **changes | {"data__context": context})
        assert plan_settings(shorter, machine).plan.fits
        larger = parse_gpus(name)
        assert larger.num_gpus == count > 1
        more = dataclasses.replace(
            machine, gpus_per_node=larger.gpus_per_node, num_nodes=larger.num_nodes
        )
        assert plan_settings(config, more).plan.fits
    if "stored_dtype" in ways:
        rounded = llama(tmp_path, **changes, memory__stored_dtype="float8")
        assert plan_settings(rounded, machine).plan.fits


def test_off_or_an_unknown_gpu_leaves_the_defaults(tmp_path):
    config = llama(tmp_path, data__context="2M")
    for name, mode in ((None, "auto"), ("Some Other 9000", "auto"), (H200, "off")):
        changed = dataclasses.replace(config, memory=dataclasses.replace(config.memory, plan=mode))
        planned = plan_settings(changed, node(name))
        assert (planned.config, planned.plan) == (changed, None)


@pytest.mark.parametrize(
    "name,key",
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("NVIDIA H100 PCIe", "H100-80GB on PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB on PCIe"),
    ],
)
def test_gpus_are_found_by_the_name_in_the_driver(name, key):
    gpu = gpu_named(name)
    assert gpu is not None and gpu.name == key
    assert gpu.matmul_flops < peak_flops(name) <= peak_flops(key)


def test_a_card_has_its_own_peak_and_no_nvlink():
    card = gpu_named("NVIDIA H100 PCIe")
    module = gpu_named("NVIDIA H100 80GB HBM3")
    assert card.attention_forward_flops / module.attention_forward_flops == pytest.approx(
        756 / 989.4
    )
    assert card.link_bytes_s < card.pcie_bytes_s < module.link_bytes_s
    assert (
        gpu_named("NVIDIA GeForce RTX 5090 Laptop GPU") is None
        and peak_flops("Some Other 9000") is None
    )


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA RTX 4090D"],
)
def test_a_gpu_with_a_similar_name_is_not_matched(name):
    assert gpu_named(name) is None and peak_flops(name) is None


@pytest.mark.parametrize(
    "context, disk",
    [
        ("128K", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("128K", True), ("6M", False), ("6M", True), ("2M", False), ("2M", True))
        ),
    ],
)
def test_the_checks_accept_the_planners_choice(tmp_path, context, disk):
    config = llama(
        tmp_path, data__context=context, **({"memory__disk_path": tmp_path} if disk else {})
    )
    machine = node(disk=10**13 if disk else 0)
    planned = plan_settings(config, machine)
    assert planned.plan is not None
    check_settings(planned.config)
    check_sizes(planned.config, planned.shape, 8)
    check_run(RunFacts(planned.config, planned.shape, machine))


def test_the_store_has_room_for_both_tiers(tmp_path):
    pairs = [(a, b) for a in ("none", "host", "disk") for b in ("none", "host", "disk")]
    for inputs, outputs in pairs:
        config = llama(
            tmp_path,
            memory__offload=inputs,
            memory__attention_offload=outputs,
            memory__keep_attention="all",
        )
        run = on_gpus(config, 8)
        host, disk = certain_needs(run)
        budget = store_host_bytes(run)
        assert (budget is None) == (inputs == outputs == "none")
        if budget is not None and disk:
            assert (
                budget >= sum(host.get(name, 0) for name in ("layer inputs", "kept attention")) // 8
            )


def test_ranks_plan_with_the_smallest_capacities():
    large = node("NVIDIA H200", host=2 * 10**12, disk=10**12, nodes=2)
    small = node("NVIDIA A100-SXM4-80GB", host=10**12, disk=2 * 10**12, gpu=70 * 2**30, nodes=2)
    for machines in ([large, small], [small, large]):
        hardware = weakest_machine(machines)
        assert (hardware.gpus_per_node, hardware.num_nodes) == (8, 2)
        assert (hardware.host_bytes, hardware.disk_bytes) == (10**12, 10**12)
        assert hardware.gpu.memory_bytes == 70 * 2**30
        assert hardware.gpu.matmul_flops == gpu_named("NVIDIA A100-SXM4-80GB").matmul_flops
    other = node("Some Other 9000", gpu=30 * 2**30)
    assert (other.gpu.name, other.gpu.memory_bytes) == ("Some Other 9000", 30 * 2**30)


def test_nodes_with_different_numbers_of_ranks_are_refused():
    with pytest.raises(ConfigError, match="4 and 8 ranks.*same number"):
        weakest_machine([node(ranks=8), node(ranks=4, nodes=3)])


@pytest.mark.parametrize("free, disk", diagonal([250 * 10**9, 10**12], [False, True]))
def test_plans_use_only_free_memory_and_pass_the_check(tmp_path, monkeypatch, free, disk):
    set_memory(monkeypatch, 10**12, free, disk_free=100 * 10**9)
    to_disk = {"memory__disk_path": tmp_path, "memory__attention_offload": "disk"}
    config = llama(tmp_path, data__context="1M", **(to_disk if disk else {}))
    planned = plan_settings(config, detect_machine(config, 8, (H100, 2**62)))
    plan = planned.plan
    assert plan.ledger.host_bytes == free and plan.ledger.disk_bytes == (100 * 10**9 if disk else 0)
    check_fits(on_gpus(planned.config, 8))
    assert planned.config.memory.keep_attention != "none"


def test_a_plan_that_exceeds_free_memory_is_refused(tmp_path, monkeypatch):
    set_memory(monkeypatch, 10**12, 60 * 10**9)
    config = llama(tmp_path, data__context="1M", memory__offload="host", memory__keep_inputs="none")
    resolved = plan_settings(config, detect_machine(config, 8, (H100, 2**62))).config
    with pytest.raises(ConfigError, match=r"host memory.*55\.88 GiB.*; use"):
        check_fits(on_gpus(resolved, 8))


def test_train_and_plan_use_at_most_gpu_gib(tmp_path):
    """Both choose the same settings within it, and the planned file trains."""
    config = llama(tmp_path, data__context="1M", memory__gpu_gib=40)
    machine = detect_machine(config, 8, (H100, 2**62))
    planned = plan_settings(config, machine)
    ledger = planned.plan.ledger
    assert ledger.gpu_bytes == 40 * 2**30 and 30 * 2**30 < ledger.gpu_peak <= 40 * 2**30
    check_fits(on_gpus(planned.config, 8, machine))
    everything = plan_settings(llama(tmp_path, data__context="1M"), node(H100)).plan
    assert everything.ledger.gpu_peak > 70 * 2**30
    where = ["--gpus", "8xH100", "--host-memory", "2TB", "--context", "1M"]
    args = ["plan", str(config.model.path), *where, "--set", "memory.gpu_gib=40"]
    answer = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert answer["settings"] == planned.plan.settings
    file = tmp_path / "long.yaml"
    assert CliRunner().invoke(app, [*args, "--yaml", "--out", str(file)]).exit_code == 0
    assert load_config(file).memory == planned.config.memory


def test_a_step_that_exceeds_gpu_gib_is_refused(tmp_path):
    config = llama(tmp_path, data__context="1M", memory__gpu_gib=8)
    machine = detect_machine(config, 8, (H100, 2**62))
    resolved = plan_settings(config, machine).config
    message = assert_refused(
        lambda: check_fits(on_gpus(resolved, 8, machine)), "data.context=1048576", fix="use"
    )
    assert "GPU memory" in message and "; 8 GiB available" in message


def test_gpu_gib_above_the_gpus_memory_is_refused(tmp_path):
    where = ["--gpus", "8xH100", "--context", "8K", "--set", "memory.gpu_gib=80"]
    fix = "use less, or null"
    assert_command_refused(
        ["plan", "llama3.2-1b", *where], "memory.gpu_gib=80", "79.1 GiB of H100", fix=fix
    )
    config = llama(tmp_path, memory__gpu_gib=75)
    smaller = (H100, 70 * 2**30)
    assert_refused(
        lambda: detect_machine(config, 8, smaller), "memory.gpu_gib=75", "70 GiB", fix=fix
    )


@pytest.mark.parametrize(
    "gpu, changes, named",
    [
        (None, {}, "CPU"),
        (("Some Other 9000", 2**36), {}, "Some Other 9000"),
        ((H100, 2**62), {"memory__plan": "off"}, "memory.plan=off"),
        ((H100, 2**62), {"model__dtype": "float32"}, "model.dtype=float32"),
    ],
)
def test_gpu_gib_without_a_plan_is_refused(tmp_path, gpu, changes, named):
    config = llama(tmp_path, memory__gpu_gib=4, **changes)
    assert_refused(
        lambda: detect_machine(config, 1, gpu), "memory.gpu_gib=4", named, fix="use null"
    )


def test_a_missing_disk_path_is_refused_before_planning(tmp_path):
    config = llama(tmp_path, memory__disk_path=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"^memory.disk_path=\S+nowhere .*create it"):
        detect_machine(config, 8, (H200, 2**62))


def plan_on(folder, host_bytes_by_rank, context_by_rank):
    """Run as one of two nodes under torchrun, each with one GPU and this rank's host memory."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}.items():
            patch.setenv(name, str(value))
        set_memory(patch, host_bytes_by_rank[rank], host_bytes_by_rank[rank])
        config = llama(folder, data__context=context_by_rank[rank], parallel__cp=2)
        machines = gather_objects(raise_on_all_ranks(detect_machine, config, 2, (H200, 2**62)))
        try:
            raise_on_all_ranks(check_ranks_agree, gather_objects(config))
        except ConfigError as error:
            return str(error)
        resolved = plan_settings(config, weakest_machine(machines)).config
        raise_on_all_ranks(check_ranks_agree, gather_objects(resolved))
        alone = plan_settings(config, machines[rank]).config
    return resolved, alone


def test_ranks_on_unequal_nodes_agree_on_a_plan_for_the_smaller_node(ranks, tmp_path):
    """The attention outputs of more layers fit into 600 GB than into 200 GB."""
    (one, rich), (other, poor) = ranks.run(
        2, plan_on, tmp_path, [600 * 10**9, 200 * 10**9], ["1M", "1M"]
    )
    assert one == other == poor
    assert rich.memory != poor.memory


def test_ranks_with_different_settings_are_refused(ranks, tmp_path):
    for message in ranks.run(2, plan_on, tmp_path, [600 * 10**9] * 2, ["1M", "512K"]):
        assert all(
            part in message
            for part in ("context: 1048576", "rank 1", "context: 524288", "every node")
        )


@pytest.mark.parametrize(
    "before, after, ranks",
    [
        (dict(data__context="128K"), ["data.context=2M"], 8),
        (
            dict(data__context="512K", parallel__cp=8, memory__keep_attention="none"),
            ["memory.keep_attention=all", "memory.offload=none", "data.context=1M"],
            8,
        ),
        (dict(data__context="1M", parallel__cp="all"), [], 4),
    ],
    ids=["context", "attention on the device", "fewer ranks"],
)
def test_a_resumed_run_that_does_not_fit_is_refused(before, after, ranks, tmp_path):
    then, now = (node(H100, host=10**13, ranks=n) for n in (8, ranks))
    run = plan_settings(llama(tmp_path, **before), then).config
    check_fits(on_gpus(run, 8, then))
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(run))
    with pytest.raises(ConfigError, match=r"data.context=\d+ .*GPU.*memory.plan=off"):
        check_fits(on_gpus(load_config(file, after), ranks, now))
    check_fits(on_gpus(load_config(file, [*after, "memory.plan=off"]), ranks, now))


def test_a_setting_on_only_one_rank_is_a_disagreement(tmp_path):
    config = llama(tmp_path)
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=tmp_path))
    for both in ([config, other], [other, config]):
        with pytest.raises(ConfigError, match="rank 0 .*rank 1 .*same settings"):
            check_ranks_agree(both)
    check_ranks_agree([config, config])


def test_settings_are_compared_without_writing_those_of_every_rank(tmp_path, monkeypatch):
    """Writing YAML takes milliseconds, and each of a thousand ranks compares all of them. Order
    counts, too: of optim.lr_factors, the first match is used."""
    written = []
    monkeypatch.setattr(road, "to_yaml", lambda config: written.append(config) or to_yaml(config))
    config = llama(tmp_path)
    factors = {"norm": 0.5, "embed": 0.1}
    orders = [dict(items) for items in (factors.items(), reversed(factors.items()))]
    first, other = (
        dataclasses.replace(config, optim=OptimConfig(lr_factors=order)) for order in orders
    )
    same = [dataclasses.replace(first) for _ in range(1000)]
    check_ranks_agree(same)
    assert len(written) <= 1
    with pytest.raises(ConfigError, match="rank 0 has `norm: 0.5` and rank 1000 `embed: 0.1`"):
        check_ranks_agree([*same, other])
    assert len(written) <= 3
