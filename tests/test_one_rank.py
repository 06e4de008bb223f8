"""On one rank, FSDP2 gathers weights and reduces gradients in one pass each, with equal results."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ithaka.comm.mesh import make_mesh
from ithaka.layout import Layout
from ithaka.model import build
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import random_ids


class CountPasses(TorchDispatchMode):
    """Counts copies and casts of tensors of `sizes`."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.num_passes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        is_cast = function is torch.ops.aten._to_copy.default
        is_copy = function is torch.ops.aten.copy_.default and args[0] is not args[1]
        self.num_passes += (is_cast or is_copy) and args[0].numel() in self.sizes
        return result


def train_once():
    model = tiny_model(tiny_config("llama", 4, 2), torch.float32)
    model = parallelize_model(model, mesh=make_mesh(1), layout=Layout(dtype="bfloat16"))
    weights = [param for layer in model.model.layers for param in layer.mlp.parameters()]
    sizes = {param.numel() for param in weights}
    ids = random_ids(1, 24)
    with CountPasses(sizes) as passes:
        loss = model(input_ids=ids).logits.float().logsumexp(-1).sum()
    gathered = passes.num_passes
    passes.num_passes = 0
    passes.sizes = {sum(param.numel() for param in model.model.layers[0].parameters())}
    with passes:
        loss.backward()
    return (
        gathered,
        passes.num_passes,
        len(weights),
        [param.grad.full_tensor() for param in model.parameters()],
    )


def test_weights_and_gradients_are_cast_in_one_pass(monkeypatch):
    gathered, reduced, num_weights, grads = train_once()
    monkeypatch.setattr(build, "_cast_in_one_pass", lambda model: None)
    gathered_before, reduced_before, _, expected = train_once()
    assert gathered_before == gathered + num_weights
    assert (reduced, reduced_before) == (0, 2), "a copy of each layer's gradients"
    assert all(torch.equal(ours, plain) for ours, plain in zip(grads, expected, strict=True))
