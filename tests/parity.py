"""Compare a parallel model with plain Hugging Face on the same inputs: loss, logits and every
gradient."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.comm.mesh import Mesh, make_mesh
from ithaka.layer.store import Store
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model

TOLERANCE = 1e-10
Errors = dict[str, float]


def parallel(
    cp: int, config=None, layout: Layout | None = None, host_bytes: int | None = None
) -> tuple[nn.Module, Mesh]:
    """Return a tiny parallel model and its mesh. `layout` may have any cp; `host_bytes` limits the
    store."""
    mesh = make_mesh(cp)
    layout = replace(layout or Layout(), cp=cp)
    store = Store(mesh.device, host_bytes=host_bytes)
    return parallelize_model(
        tiny_model(config or tiny_config("llama")), mesh=mesh, layout=layout, store=store
    ), mesh


def random_ids(*shape: int, vocab: int = 61) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(11))


def plain_sum(model: nn.Module, ids: Tensor, labels: Tensor, **inputs) -> Tensor:
    """Return the summed losses of Hugging Face's logits in the model's precision; its own loss
    rounds to fp32.

    With a cache, Hugging Face would not look for documents in position_ids.
    """
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference relative to b's norm, or the absolute norm if b is zero."""
    size = float(b.norm())
    return float((a - b).norm()) / (size or 1.0)


def gradient_errors(model: nn.Module, plain: nn.Module) -> Errors:
    """Return errors of this rank's gradient shards. The same parameters must have no gradient in
    both models."""
    return shard_errors(model, {name: param.grad for name, param in plain.named_parameters()})


def shard_errors(model: nn.Module, wanted: dict[str, Tensor | None]) -> Errors:
    """Return errors of this rank's shards relative to the norms of full gradients. Together, ranks
    check everything."""
    params = dict(model.named_parameters())
    assert set(params) == set(wanted)
    errors: Errors = {}
    for name, param in params.items():
        expected = wanted[name]
        assert (param.grad is None) == (expected is None), (
            f"{name}: gradient {param.grad}, not {expected}"
        )
        if expected is not None:
            mesh = param.grad.device_mesh
            shards = expected.chunk(mesh.size(-1))
            rank = mesh.get_local_rank(mesh.ndim - 1)
            shard = shards[rank] if rank < len(shards) else expected[:0]
            errors[name] = float((param.grad.to_local() - shard).norm()) / (
                float(expected.norm()) or 1.0
            )
    return errors


def check(errors_of_ranks: list[Errors] | list[list[Errors]]) -> None:
    for errors in errors_of_ranks:
        assert errors
        if isinstance(errors, list):
            check(errors)
            continue
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong


_compared: dict[tuple, tuple[nn.Module, nn.Module, Mesh]] = {}  # the latest models


def for_each_case(compare: Callable[..., Errors], cases: list[tuple]) -> list[Errors]:
    """Return one rank's errors of several cases, which share their models."""
    return [compare(*case) for case in cases]


def compare_with(
    plain_loss: Callable[[nn.Module], Tensor],
    cp: int,
    config=None,
    layout: Layout | None = None,
    freeze: Callable[[str], bool] | None = None,
    host_bytes: int | None = None,
    **inputs,
) -> Errors:
    """Return one rank's errors: the parallel model's loss of `inputs` must equal `plain_loss` of
    the plain model.

    Tensors in `inputs` have the rows of all data-parallel ranks; each rank takes its own.
    """
    key = dist.group.WORLD, cp, config and config.to_json_string(), layout, host_bytes, freeze
    if key not in _compared:
        _compared.clear()
        _compared[key] = (
            tiny_model(config or tiny_config("llama")),
            *parallel(cp, config, layout, host_bytes),
        )
    plain, model, mesh = _compared[key]
    for each in (plain, model):
        each.zero_grad()
        for name, param in each.named_parameters():
            param.requires_grad_(freeze is None or not freeze(name))
    expected = plain_loss(plain)
    expected.backward()
    out = model(**{name: _rows(value, mesh) for name, value in inputs.items()})
    out.loss.backward()
    return {"loss": relative(out.loss.detach(), expected.detach()), **gradient_errors(model, plain)}


def _rows(value, mesh: Mesh):
    if not isinstance(value, Tensor) or not value.dim():
        return value
    rows = len(value) // mesh.dp_size
    return value[mesh.dp_rank * rows : (mesh.dp_rank + 1) * rows]
