"""Real torch.compile gives the same loss and gradients, with tiles of two lengths and FSDP2's
shards."""

import shutil

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from ithaka.layout import Layout
from models import tiny_config, tiny_model
from parity import gradient_errors, parallel, plain_sum, random_ids, relative

COMPILER = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def compiled_step():
    """Return errors of loss and gradients against Hugging Face, graphs compiled after each step,
    and graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    torch._inductor.config.cpp.vec_isa_ok = False  # probing the compiler for it takes seconds
    config = tiny_config("llama")
    model, _ = parallel(1, config, Layout(tile_tokens=8, compile=True))
    plain = tiny_model(config)
    ids = random_ids(1, 44)
    labels = ids.clone()
    loss = plain_sum(plain, ids, labels) / 43
    loss.backward()
    graphs = []
    for _ in range(2):
        model.zero_grad()
        ours = model(ids, labels=labels).loss
        ours.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    return (
        relative(ours.detach(), loss.detach()),
        gradient_errors(model, plain),
        graphs,
        dict(counters["graph_break"]),
    )


@pytest.mark.slow
@pytest.mark.skipif(
    COMPILER is None, reason="torch.compile needs a C++ compiler on a CPU, and there is none"
)
def test_a_compiled_mlp_gives_the_same_gradients(ranks):
    [(loss, errors, graphs, breaks)] = ranks.run(1, compiled_step)
    assert loss < 1e-12 and max(errors.values()) < 1e-10
    assert not breaks
    assert 0 < graphs[0] == graphs[1], f"compiled again in the second step: {graphs}"
