"""Every term of the time model equals a hand count, with all rates but one unlimited.

llama3-8b: 32 query heads and 8 kv heads of 128, hidden 4096, MLP 14336, vocabulary 128256, 32
layers.
"""

from dataclasses import replace

import pytest

from ithaka.config import AdapterConfig
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan import seconds
from ithaka.plan.hardware import FIGURES, Gpu, Hardware
from ithaka.plan.models import find_config
from ithaka.plan.seconds import layer_seconds, step_seconds
from ithaka.plan.shape import StepShape
from ithaka.trace.shapes import find_shape, shape_from_config

LLAMA = find_shape("llama3-8b")
D = 4096
F = 14336
V = 128256
K = 128
LAYERS = 32
HEAD = K * 2  # bytes of a token in one head
LAYER = D * (32 + 8 + 8 + 32) * K + 3 * D * F + 2 * D  # parameters
S = 2**20
NEVER = 1e40  # a rate that takes no time
WORK = 1.0  # takes longer than everything else


@pytest.fixture(autouse=True)
def shares(monkeypatch):
    """Run matmuls and copies at the full rate, so that seconds count FLOPs and bytes."""
    for name in ("LAYER_SHARE", "PLAIN_SHARE", "LOSS_SHARE", "COPY_SHARE"):
        monkeypatch.setattr(seconds, name, 1.0)
    for name in ("STAGE_SECONDS", "LAUNCH_SECONDS"):
        monkeypatch.setattr(seconds, name, 0.0)


def machine(nodes=1, gpus=8, **rates):
    return Hardware(
        Gpu("", **dict.fromkeys(FIGURES, NEVER) | {"memory_bytes": 2**40} | rates), gpus, nodes
    )


def layout_of(cp=8, **words):
    defaults = {"heads_per_stage": 32, "tile_tokens": 8192, "overlap": False}
    return Layout(cp, **defaults | words)


def layer(hardware, layout, keeps, shape=LLAMA, work=None):
    return layer_seconds(shape, layout, hardware, work or StepShape(S), shape.mixers[0], keeps)


KEPT = ActivationPolicy("device", "device")
PROJECTED = ActivationPolicy("device", "device", projections=True)
EVERYTHING = ActivationPolicy("device", "device", projections=True, mlp=True)
AGAIN = ActivationPolicy("device")


@pytest.mark.parametrize(
    "cp, ring, model, heads",
    [
        (1, 1, "llama3-8b", 32),
        (8, 1, "llama3-8b", 4),
        (16, 2, "llama3-8b", 4),
        (8, 1, "qwen2.5-7b", 4),
        (8, 2, "qwen2.5-7b", 7),
    ],
)
def test_attention_takes_two_products_forward_and_five_backward(cp, ring, model, heads):
    """The members of a ring share the pairs."""
    hardware = machine(gpus=cp, attention_forward_flops=2e12, attention_backward_flops=1e12)
    layout = layout_of(cp, ring=ring, heads_per_stage=None)
    forward, backward = layer(hardware, layout, KEPT, find_shape(model))
    product = 2 * K * heads * S * S / 2 / ring
    assert (forward.attention, backward.attention) == pytest.approx(
        (2 * product / 2e12, 5 * product / 1e12)
    )
    again = layer(hardware, layout, AGAIN, find_shape(model))[1]
    assert again.attention == pytest.approx(forward.attention + backward.attention)


@pytest.mark.parametrize("kernel", ["cudnn", "fa4"])
def test_narrow_heads_attend_more_slowly(kernel):
    """The slowdown grows as documents shorten, down to 128K."""
    rates = {"attention_forward_flops": 1e12, "attention_backward_flops": 1e12, "kernel": kernel}
    hardware = machine(**rates)
    shape = find_shape("llama3.2-1b")
    (share, share_back) = seconds.NARROW_HEAD_SHARE
    start = seconds.NARROW_HEAD_START
    share_back = seconds.NARROW_FA4_SHARE if kernel == "fa4" else share_back
    for length, counted in ((2**20, 2**20), (2**17, 2**17), (2**14, 2**17)):
        forward, backward = layer(
            hardware, layout_of(), KEPT, shape, StepShape(S, document_tokens=length)
        )
        flops = 4 * 64 * 4 * S * length / 2
        assert forward.attention == pytest.approx(flops / 1e12 / share * (1 + start / counted))
        assert backward.attention == pytest.approx(2.5 * flops / 1e12 / share_back)


# Products with a layer's weights in backward: recomputed ones, then the gradients of inputs and
# weights.
@pytest.mark.parametrize(
    "keeps, adapter, qkv, out, mlp",
    [
        (KEPT, False, 3, 3, 2 + 2 / 3),  # the MLP's last product is not recomputed
        (PROJECTED, False, 2, 3, 2 + 2 / 3),
        (EVERYTHING, False, 2, 2, 2),
        (KEPT, True, 2, 2, 1 + 2 / 3),
        (EVERYTHING, True, 1, 1, 1),
    ],
)
def test_seconds_of_matmuls(keeps, adapter, qkv, out, mlp):
    shape = LLAMA.with_adapter(AdapterConfig(rank=8)) if adapter else LLAMA
    forward, backward = layer(machine(matmul_flops=1e12), layout_of(), keeps, shape)
    projections, output, middle = (
        2 * S / 8 * D * width for width in ((32 + 8 + 8) * K, 32 * K, 3 * F)
    )
    assert forward.linear == pytest.approx((projections + output + middle) / 1e12)
    assert backward.linear == pytest.approx(
        (qkv * projections + out * output + mlp * middle) / 1e12
    )
    if keeps is KEPT:
        again = layer(machine(matmul_flops=1e12), layout_of(), AGAIN, shape)[1].linear
        assert again == pytest.approx(backward.linear + projections / 1e12)


def test_kv_heads_repeated_on_ranks_are_projected_as_often():
    # measured quickly
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024}
    shape = shape_from_config(
        {**find_config("llama3-8b"), **sizes, "head_dim": K, "num_key_value_heads": 2}
    )
    few, many = (
        layer(machine(matmul_flops=1e12), layout_of(cp), KEPT, shape, StepShape(S * cp))[0]
        for cp in (1, 8)
    )
    assert many.linear - few.linear == pytest.approx(2 * S * 512 * 2 * (8 - 2) * K / 1e12)


@pytest.mark.parametrize("stages", [1, 4])
def test_kernels_that_only_move_bytes(stages):
    s = S // 8
    tiles = S // 8 // 8192
    measured = LLAMA.measured
    moves = seconds.BLOCK_MOVES * S / 8
    forward, backward = layer(
        machine(memory_bytes_s=1e12), layout_of(heads_per_stage=32 // stages), KEPT
    )
    heads = s * (32 + 8 + 8) * HEAD
    project = moves * measured.project_moved
    assert forward.linear == pytest.approx(
        (8 * heads + project + moves * measured.finish_moved) / 1e12
    )
    sums = (tiles - 1) * 2 * 4 * LAYER  # fp32, read and written
    moved = project + moves * (measured.project_backward_moved + measured.finish_backward_moved)
    assert backward.linear == pytest.approx((24 * heads + moved + sums) / 1e12)
    # no weight gradients to sum
    frozen = LLAMA.with_adapter(AdapterConfig(rank=8, targets=("lm_head",)))
    again = layer(
        machine(memory_bytes_s=1e12), layout_of(heads_per_stage=32 // stages), KEPT, frozen
    )[1]
    assert backward.linear - again.linear == pytest.approx(sums / 1e12)
    kept = layer(machine(memory_bytes_s=1e12), layout_of(heads_per_stage=32 // stages), PROJECTED)[
        1
    ]
    assert backward.linear - kept.linear == pytest.approx(project / 1e12)


def test_adapter_kernels_move_the_bytes_of_their_matrices():
    shape = LLAMA.with_adapter(AdapterConfig(rank=8, targets=("q_proj", "down_proj")))
    frozen = LLAMA.with_adapter(AdapterConfig(rank=8, targets=("lm_head",)))
    with_adapters, without = (
        layer(machine(memory_bytes_s=1e12), layout_of(), KEPT, each) for each in (shape, frozen)
    )
    s = S // 8
    forward, backward = (a.linear - b.linear for a, b in zip(with_adapters, without, strict=True))
    assert forward == pytest.approx(s * 2 * ((D + 2 * D) + (F + 2 * D)) / 1e12)
    assert backward == pytest.approx(s * 2 * 4 * (D + D + F + D) / 1e12)


def test_every_stage_but_the_first_has_a_fixed_overhead(monkeypatch):
    monkeypatch.setattr(seconds, "STAGE_SECONDS", 1.0)
    assert [
        part.linear for part in layer(machine(), layout_of(heads_per_stage=8), KEPT)
    ] == pytest.approx([3, 3])


# ---- exchanges


def exchanged(hardware, layout, keeps=KEPT, **more):
    """Return exchange seconds with enough compute to hide the weights' all-gather."""
    slow = replace(hardware, gpu=replace(hardware.gpu, matmul_flops=WORK))
    return [part.exchange for part in layer(slow, layout, keeps, **more)]


@pytest.mark.parametrize("keeps, backward", [(KEPT, 130 + 2 * 50), (PROJECTED, 130)])
def test_small_tiles_wait_for_the_cpu(monkeypatch, keeps, backward):
    """Two stages of 127 tiles after the first; the CPU launches 1000 kernels of each stage while
    its attention runs."""
    monkeypatch.setattr(seconds, "LAUNCH_SECONDS", 1.0)
    work = StepShape(2**18)
    layout = layout_of(1, heads_per_stage=16, tile_tokens=2048)
    slow_attention = machine(gpus=1, attention_forward_flops=WORK, attention_backward_flops=WORK)
    for hardware, ahead in ((slow_attention, 2000), (machine(gpus=1), 0)):
        for adapter, ratio in ((None, 1.0), (AdapterConfig(rank=16), 1.3)):
            planned = layer(hardware, layout, keeps, LLAMA.with_adapter(adapter), work)
            launched = [part.linear for part in planned]
            assert launched == pytest.approx(
                [ratio * 127 * (20 + 2 * 50) - ahead, ratio * 127 * backward - ahead]
            )
    monkeypatch.setattr(seconds, "LAUNCH_SECONDS", 1e-6)
    busy = machine(gpus=1, matmul_flops=1e12)
    small, large = (
        layer(busy, layout_of(1, tile_tokens=tile), keeps, work=work)[0].linear
        for tile in (2048, 16384)
    )
    assert small == large  # launched while matmuls run


def test_exchange_inside_a_node():
    """Forward sends q, k, v and returns out; backward sends them again with out and dout and
    returns dq, dk, dv."""
    token = S // 8 * HEAD * 7 / 8
    rate = 1e11
    q = 32 * token / rate
    kv = 16 * token / rate
    link = machine(link_bytes_s=rate)
    assert exchanged(link, layout_of()) == pytest.approx([2 * q + kv, 4 * q + 2 * kv])
    assert exchanged(link, layout_of(), PROJECTED) == pytest.approx([2 * q + kv, 3 * q + kv])
    assert exchanged(link, layout_of(), AGAIN) == pytest.approx([2 * q + kv, 6 * q + 3 * kv])
    assert exchanged(link, layout_of(heads_per_stage=8)) == pytest.approx(
        [2 * q + kv, 4 * q + 2 * kv]
    )
    # Later stages receive while the first attends; the first receives all k and v and a quarter of
    # q.
    early = layout_of(heads_per_stage=8, overlap=True)
    assert exchanged(link, early) == pytest.approx([q / 4 + kv + q, 3 * q / 4 + kv + q + kv])
    assert exchanged(link, layout_of(1)) == [0, 0]


@pytest.mark.parametrize(
    "gpus, cp, inside, outside, heads",
    [
        # 32 of q, as many of the output, and 8 of k and v, repeated on 16 ranks
        (8, 16, 7, 8, 96),
        (4, 16, 3, 12, 96),
        # groups that straddle nodes: in some node the fewest are 2 of 6, 1 of 3
        (8, 6, 1, 4, 96),
        (8, 3, 0, 2, 90),
    ],
)
def test_exchange_between_nodes(gpus, cp, inside, outside, heads):
    """It uses the link and the network at once. Empty head slots are sent too."""
    layout = layout_of(cp, heads_per_stage=None)
    sent = -(-S // cp) * HEAD * heads / cp / 1e11
    for rates, others in (({"link_bytes_s": 1e11}, inside), ({"network_bytes_s": 1e11}, outside)):
        assert exchanged(machine(48 // gpus, gpus, **rates), layout) == pytest.approx(
            [sent * others, 2 * sent * others]
        )
    both = exchanged(machine(48 // gpus, gpus, link_bytes_s=1e11, network_bytes_s=1e11), layout)
    assert both == pytest.approx([sent * max(inside, outside), 2 * sent * max(inside, outside)])


@pytest.mark.parametrize(
    "nodes, gpus, cp, ring, model, near, far",
    [
        (2, 8, 16, 2, "llama3-8b", 0, 1),  # a member per node
        (1, 8, 8, 2, "qwen2.5-7b", 1, 0),  # both in one node
        (3, 8, 24, 6, "llama3-8b", 1, 4),  # two per node
        (5, 8, 5, 5, "llama3-8b", 0, 4),  # straddles nodes: some member is alone in its node
    ],
)
def test_ring_exchange(nodes, gpus, cp, ring, model, near, far):
    """A member receives k and v of all others and returns dk and dv in fp32; nothing hides the last
    round's."""
    shape = find_shape(model)
    layout = layout_of(cp, ring=ring, heads_per_stage=None)
    ulysses = cp // ring
    kv_heads = -(-shape.kv_heads // ulysses)
    tokens = -(-S // cp) * ulysses
    member = tokens * 2 * kv_heads * HEAD  # k and v of one member
    part = max(1 / 8, 32768 / tokens)  # share of the tokens in a round
    for rates, others in (({"link_bytes_s": 1e11}, near), ({"network_bytes_s": 1e11}, far)):
        hardware = machine(nodes, gpus, **rates)
        sent = exchanged(hardware, layout, shape=shape)
        slow = replace(
            hardware,
            gpu=replace(hardware.gpu, attention_forward_flops=WORK, attention_backward_flops=WORK),
        )
        hidden = exchanged(slow, layout, shape=shape)
        last = part * member * 2 * (bool(far) == ("network_bytes_s" in rates)) / 1e11
        assert sent[0] - hidden[0] == pytest.approx(others * member / 1e11, rel=1e-3)
        assert sent[1] - hidden[1] == pytest.approx(others * 3 * member / 1e11, rel=1e-3)
        inside = ulysses - 1 if "link_bytes_s" in rates else 0
        heads = -(-shape.heads // ulysses) * ulysses * 2 + 2 * kv_heads * ulysses
        there = S / cp * HEAD * heads * inside / ulysses / 1e11
        assert hidden[0] == pytest.approx(there, rel=1e-3)
        assert hidden[1] == pytest.approx(2 * there + last, rel=1e-3)


# ---- weights


def test_unoverlapped_all_gathers_and_reductions_are_counted():
    """16-bit weights move in both directions, fp32 gradients once."""
    for nodes, rates, rate in (
        (1, {"link_bytes_s": 1e11}, 1e11),
        (2, {"network_bytes_s": 1e10}, 8e10),  # each GPU of a node sends a different part
        (2, {"link_bytes_s": 1e9}, 1e9),
    ):
        hardware = machine(nodes, **rates)
        ranks = 8 * nodes
        parts = layer(hardware, layout_of(1), KEPT)
        once = LAYER * (ranks - 1) / ranks / rate
        assert [part.exchange for part in parts] == pytest.approx([2 * once, (2 + 4) * once])
        slow = replace(hardware, gpu=replace(hardware.gpu, matmul_flops=WORK))
        assert [part.exchange for part in layer(slow, layout_of(1), KEPT)] == [0, 0]


def test_frozen_weights_are_gathered_and_have_no_gradients():
    frozen = LLAMA.with_adapter(AdapterConfig(rank=8, targets=("lm_head",)))
    parts = layer(machine(link_bytes_s=1e11), layout_of(1), KEPT, frozen)
    assert [part.exchange for part in parts] == pytest.approx([2 * LAYER * 7 / 8 / 1e11] * 2)


def test_replicas_gather_inside_a_node_and_add_up_between_nodes():
    layout = layout_of(1, replicas=2)
    near = layer(machine(2, link_bytes_s=1e11), layout, KEPT)
    assert [part.exchange for part in near] == pytest.approx(
        [x * LAYER * 7 / 8 / 1e11 for x in (2, 6)]
    )
    # an all-reduce of a shard: there and back
    far = layer(machine(2, network_bytes_s=1e10), layout, KEPT)
    assert [part.exchange for part in far] == pytest.approx([0, 4 * LAYER / 8 * 2 / 2 / 1e10])


def test_shards_of_an_offloaded_optimizer_are_copied():
    """fp32 weights are copied in for forward and backward, gradients out; frozen 16-bit weights are
    copied in too."""
    layout = layout_of(1, offload_optimizer=True)
    copied_s = [part.exchange for part in layer(machine(pcie_bytes_s=1e10), layout, KEPT)]
    assert copied_s == pytest.approx([4 * LAYER / 8 / 1e10, 2 * 4 * LAYER / 8 / 1e10])
    frozen = LLAMA.with_adapter(AdapterConfig(rank=8, targets=("q_proj",)))
    copied_s = [part.exchange for part in layer(machine(pcie_bytes_s=1e10), layout, KEPT, frozen)]
    shard = 2 * LAYER / 8 / 1e10
    adapters = 4 * 8 * (D + D) / 8 / 1e10
    assert copied_s == pytest.approx([shard + adapters, shard + 2 * adapters])


# ---- copies


def copied(hardware, layout, keeps):
    return [part.copies for part in layer(hardware, layout, keeps)]


def test_copies_to_the_host_and_back():
    """Inputs are copied out and back: once for the MLP and, without overlap, once per pass over the
    tokens. So are attention outputs."""
    x = S // 8 * D * 2 / 1e10
    rate = 1e10
    out = S // 8 * 32 * (HEAD + 4) / rate
    pcie = machine(pcie_bytes_s=rate)
    stages = layout_of(heads_per_stage=8)
    assert copied(pcie, stages, ActivationPolicy("host")) == pytest.approx([x, x + 5 * x])
    assert copied(pcie, stages, ActivationPolicy("host", "host")) == pytest.approx(
        [x + out, x + out + 5 * x]
    )
    assert copied(pcie, stages, ActivationPolicy("device", "host")) == pytest.approx([out, out])
    assert copied(
        pcie, replace(stages, overlap=True), ActivationPolicy("host", "host")
    ) == pytest.approx([x + out, x + out])
    assert copied(pcie, stages, KEPT) == [0, 0]
    # With long compute, only the first of 16 tiles is exposed.
    slow = machine(pcie_bytes_s=rate, matmul_flops=WORK)
    assert copied(slow, stages, ActivationPolicy("host", "host")) == pytest.approx(
        [0, (x + out + 5 * x) / 16]
    )


def test_gpus_of_a_node_share_the_disk_bandwidth():
    """The disk moves so many bytes in each direction."""
    x = S // 8 * D * 2
    out = S // 8 * 32 * (HEAD + 4)
    for keeps, num_bytes in (
        (ActivationPolicy("disk", "disk"), x + out),
        (ActivationPolicy("disk", "host"), x),
    ):
        assert copied(machine(disk_bytes_s=2e9), layout_of(), keeps) == pytest.approx(
            [8 * num_bytes / 2e9] * 2
        )
    slow = machine(attention_forward_flops=WORK, disk_bytes_s=4e9)
    assert copied(slow, layout_of(), ActivationPolicy("disk"))[0] == 0


# ---- the rest of a step


def test_seconds_of_the_loss():
    """Counts three products with the head, three passes over the logits, two gathers of the head
    and one reduction."""
    s = S // 8
    layout = layout_of()
    alone = LLAMA.keep_layers(range(1))

    def loss(hardware, work=None, shape=alone):
        work = work or StepShape(S)
        step = step_seconds(shape, layout, hardware, work)
        parts = layer(hardware, layout, AGAIN, shape, work)
        return step.linear - sum(
            part.linear for part in parts[: 1 + work.trains]
        ), step.exchange - sum(part.exchange for part in parts[: 1 + work.trains])

    forward = StepShape(S, trains=False)
    assert loss(machine(matmul_flops=1e12))[0] == pytest.approx(3 * 2 * s * D * V / 1e12)
    assert loss(machine(matmul_flops=1e12), forward)[0] == pytest.approx(2 * s * D * V / 1e12)
    frozen = alone.with_adapter(AdapterConfig(rank=8, targets=("q_proj",)))
    assert loss(machine(matmul_flops=1e12), shape=frozen)[0] == pytest.approx(
        2 * 2 * s * D * V / 1e12
    )
    # a quarter of a layer's tile
    logits = s * V * 2
    tiles = s / 2048
    assert loss(machine(memory_bytes_s=1e12))[0] == pytest.approx(
        (3 * logits + tiles * 2 * D * V * 4) / 1e12
    )
    assert loss(machine(memory_bytes_s=1e12), forward)[0] == pytest.approx(logits / 1e12)
    once = D * V * 7 / 8 / 1e11
    assert loss(machine(link_bytes_s=1e11))[1] == pytest.approx((2 * 2 + 4) * once)
    assert loss(machine(link_bytes_s=1e11), forward)[1] == pytest.approx(2 * once)
    assert loss(machine(link_bytes_s=1e11), shape=frozen)[1] == pytest.approx(2 * 2 * once)


def test_seconds_of_the_update():
    """AdamW reads p, g, m and v and writes p, m and v. GPUs update their own shard, a node's CPUs
    all of its shards."""
    for replicas in (1, 2):
        hardware = machine(2, memory_bytes_s=1e12)
        layout = layout_of(replicas=replicas)
        shard = 7 * 4 * LLAMA.num_parameters * replicas / 16
        assert step_seconds(LLAMA, layout, hardware, StepShape(S)).update == pytest.approx(
            shard / 1e12
        )
        layout = replace(layout, offload_optimizer=True)
        assert step_seconds(LLAMA, layout, hardware, StepShape(S)).update == pytest.approx(
            8 * shard / 200e9
        )
    assert step_seconds(LLAMA, layout, hardware, StepShape(S, trains=False)).update == 0


def test_a_step_is_the_sum_of_its_layers_the_loss_and_one_update():
    hardware = machine(matmul_flops=1e12, memory_bytes_s=1e12, pcie_bytes_s=1e10, link_bytes_s=1e11)
    layout = layout_of(input_tier="host")
    one, four = (step_seconds(LLAMA, layout, hardware, StepShape(S, accumulate=n)) for n in (1, 4))
    assert four.total - one.total == pytest.approx(3 * (one.total - one.update))
    half = LLAMA.keep_layers(range(16))
    less = step_seconds(half, layout, hardware, StepShape(S))
    parts = sum(part.total for part in layer(hardware, layout, ActivationPolicy("host")))
    assert one.total - one.update - (less.total - less.update) == pytest.approx(16 * parts)
    forward = step_seconds(LLAMA, layout, hardware, StepShape(S, trains=False))
    assert forward.copies == pytest.approx(
        32 * layer(hardware, layout, ActivationPolicy("host"))[0].copies
    )
