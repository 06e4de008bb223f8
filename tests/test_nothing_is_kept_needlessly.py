"""Forwards under no_grad, forwards whose graph is dropped, and two forwards before one backward."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from grids import diagonal
from ithaka.comm.mesh import make_mesh
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import check, gradient_errors, parallel, plain_sum, random_ids, relative

TIERS = ("device", "host", "disk")


def offloaded(tier: str) -> Layout:
    return Layout(tile_tokens=4, input_tier=tier, keep_attention=2, attention_tier=tier)


def store_of(model):
    return model.model.layers[0].forward.store


def without_grad(tier):
    model, _ = parallel(2, layout=offloaded(tier))
    ids = random_ids(2, 9)
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids)
        logits = model(input_ids=ids).logits
    assert out.loss.grad_fn is None and logits.grad_fn is None
    store = store_of(model)
    kept = (store.pool.peak_bytes, store.disk.used_bytes)
    return float(out.loss), float(model(input_ids=ids, labels=ids).loss.detach()), kept


@pytest.mark.parametrize(
    "tier", ["host", *(pytest.param(tier, marks=pytest.mark.slow) for tier in ("device", "disk"))]
)
def test_without_grad_nothing_is_kept_and_the_loss_is_the_same(ranks, tier):
    for loss, with_graph, kept in ranks.run(2, without_grad, tier):
        assert loss == with_graph
        assert kept == (0, 0)


def drop_graphs(tier):
    model, _ = parallel(2, layout=offloaded(tier))
    ids = random_ids(1, 9)
    store = None
    used = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        del loss
        gc.collect()
        store = store_of(model)
        store.threads.shutdown(wait=True)
        store.threads = ThreadPoolExecutor(2)
        deadline = time.monotonic() + 60
        while store.pool.busy_bytes and time.monotonic() < deadline:
            # gloo's thread releases the summed loss, and its graph, a moment after the sum
            time.sleep(0.01)
        used.append((store.pool.used_bytes, store.disk.used_bytes))
        assert not store.pool.busy_bytes, "a slab is still owned"
    model(input_ids=ids, labels=ids).loss.backward()
    return used


@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.slow), "disk"])
def test_a_dropped_graph_leaks_nothing(ranks, tier):
    for used in ranks.run(2, drop_graphs, tier):
        # The number of slabs on their way to disk depends on its speed.
        first, second, third = (on_host if tier == "host" else on_disk for on_host, on_disk in used)
        assert first == second == third > 0


def two_forwards(cp, layout):
    config = tiny_config("qwen2")
    first = random_ids(1, 11)
    second = random_ids(2, 6).flip(1)
    plain = tiny_model(config)
    (model, _) = parallel(cp, config, layout)
    expected = plain_sum(plain, first, first) / 10 + 3 * plain_sum(plain, second, second) / 10
    expected.backward()
    losses = [model(input_ids=ids, labels=ids).loss for ids in (first, second)]
    total = losses[0] + 3 * losses[1]
    total.backward()
    return {"loss": relative(total.detach(), expected.detach()), **gradient_errors(model, plain)}


@pytest.mark.parametrize("cp, tier", diagonal([2, 1], TIERS))
def test_two_forwards_before_one_backward_are_exact(ranks, cp, tier):
    check(ranks.run(cp, two_forwards, cp, offloaded(tier)))


def backward_twice():
    config = tiny_config("llama")
    model = parallelize_model(tiny_model(config), mesh=make_mesh(1))
    ids = torch.arange(12)[None] % config.vocab_size
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)


def test_a_second_backward_is_refused_with_a_fix(ranks):
    assert "call the model again" in ranks.run(1, backward_twice)[0]
