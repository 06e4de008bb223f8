"""Backward prefetches the next layer's activations from disk; a small pool only slows it."""

import gc
import time
from dataclasses import replace

import pytest

from grids import diagonal
from ithaka.layer import store as store_module
from ithaka.layer.schedule import LayerSchedule
from ithaka.layout import Layout
from models import tiny_config
from parity import check, compare_with, parallel, plain_sum, random_ids

LAYERS = 4
X_BYTES = 24 * 32 * 8
LAYER_BYTES = 2 * X_BYTES + 24 * 4 * 8  # x, attention's output, 4 heads' lse
LAYOUT = Layout(tile_tokens=5, input_tier="disk", keep_attention=LAYERS, attention_tier="disk")


def config():
    return tiny_config("llama", num_hidden_layers=LAYERS)


def reads_at_start_of_backward(host_bytes):
    """Return, per layer (last first), how many of its own 3 tensors and of the next layer's are
    already being read."""
    model, _ = parallel(1, config(), LAYOUT, host_bytes)
    ids = random_ids(1, 24)
    counts = []
    backward = LayerSchedule.backward

    def watched(self, saved, *args):
        below = saved.below()
        layers = [saved] + ([below] if below is not None else [])
        counts.append([sum(kept._reading is not None for kept in one._handles()) for one in layers])
        return backward(self, saved, *args)

    LayerSchedule.backward = watched
    try:
        loss = model(input_ids=ids, labels=ids).loss
        store = model.model.layers[0].forward.store
        while store.pool.num_expected:
            time.sleep(0.001)
        loss.backward()
    finally:
        LayerSchedule.backward = backward
    return counts


@pytest.mark.parametrize("host_bytes", [None, 3 * LAYER_BYTES])
def test_backward_reads_one_layer_ahead(ranks, host_bytes):
    (counts,) = ranks.run(1, reads_at_start_of_backward, host_bytes)
    assert counts == [[3, 3]] * (LAYERS - 1) + [[3]]


def test_a_layer_reads_its_own_tensors_first(ranks):
    (counts,) = ranks.run(1, reads_at_start_of_backward, LAYER_BYTES)
    assert [own for own, *_ in counts] == [3] * LAYERS
    assert all(sum(others) == 0 for _, *others in counts)


POOLS = [
    *diagonal([1, 2], [(1.0, 1), (3.0, 2)]),
    *(
        pytest.param(cp, sizes, marks=pytest.mark.slow)
        for cp in (1, 2)
        for sizes in [(1.6, 1), (3.0, 1)]
    ),
]


@pytest.mark.parametrize("cp, sizes", POOLS, ids=str)
def test_small_pools_are_exact(ranks, cp, sizes):
    """With several stages and no overlap, the pool also holds dq. Plans give it three layers."""
    ids = random_ids(1, 24)
    layout = LAYOUT
    (num_layers, stages) = sizes
    if stages > 1:
        layout = replace(LAYOUT, heads_per_stage=4 // stages, overlap=False)
    host_bytes = int(num_layers * LAYER_BYTES / cp)
    check(ranks.run(cp, small_pool, cp, ids, host_bytes, layout))


def small_pool(cp, ids, host_bytes, layout):
    write = store_module.DiskFile.write

    def slowly(self, data, offset):
        time.sleep(0.002)
        write(self, data, offset)

    store_module.DiskFile.write = slowly
    try:
        expected = lambda model: plain_sum(model, ids, ids) / 23  # noqa: E731
        return compare_with(
            expected, cp, config(), layout, host_bytes=host_bytes, input_ids=ids, labels=ids
        )
    finally:
        store_module.DiskFile.write = write


def used_over_steps(tier):
    model, _ = parallel(2, config(), replace(LAYOUT, input_tier=tier, attention_tier=tier))
    store = model.model.layers[0].forward.store
    used = []
    for _ in range(4):
        ids = random_ids(1, 24)
        model(input_ids=ids, labels=ids).loss.backward()
        gc.collect()
        while store.pool.busy_bytes or store.disk.busy_bytes:
            time.sleep(0.001)
        used.append((store.pool.used_bytes, store.disk.used_bytes))
    return used


@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.slow), "disk"])
def test_steps_reuse_memory(ranks, tier):
    for used in ranks.run(2, used_over_steps, tier):
        kept = LAYERS * LAYER_BYTES // 2
        if tier == "host":
            assert used == [(kept, 0)] * 4
        else:
            assert {disk for _, disk in used} == {kept}
            assert max(host for host, _ in used) <= kept + 2 * LAYER_BYTES // 2
