"""Compare a decoder of any type with plain transformers: loss, logits and every gradient."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ithaka.checks.verify import InFloat64
from ithaka.comm.mesh import make_mesh
from ithaka.layer.loss import GraphHead, LinearHead
from ithaka.layer.passes import LayerPasses
from ithaka.layer.store import Store
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import CONSTRUCTING
from parity import Errors, plain_sum, random_ids, relative
from threads import run_on_threads


@contextmanager
def fp64_tiles() -> Iterator[None]:
    """Run the tiles of fp64 layers under `InFloat64`, also in backward: autograd does not enter the
    caller's modes."""
    with pytest.MonkeyPatch.context() as patch:
        runs = (
            (LayerPasses, "capture"),
            (LayerPasses, "resume"),
            (GraphHead, "run"),
            (LinearHead, "run"),
        )
        for owner, name in runs:
            patch.setattr(owner, name, _widen(getattr(owner, name)))
        yield


def _widen(run: Callable) -> Callable:
    def run_wide(self, x: Tensor, *args):
        with InFloat64() if x.dtype == torch.float64 else nullcontext():
            return run(self, x, *args)

    return run_wide


def layer_name(param_name: str) -> str:
    """Return the decoder layer of a parameter or, outside of the layers, its module."""
    head, separator, tail = param_name.partition("layers.")
    return head + separator + tail.split(".")[0] if separator else param_name.rpartition(".")[0]


def gradient_errors(model: nn.Module, plain: nn.Module) -> Errors:
    """Return the largest error in this rank's shard of each gradient, relative to the layer's
    largest gradient."""
    wanted = {name: param.grad for name, param in plain.named_parameters() if param.requires_grad}
    largest: dict[str, float] = {}
    for name, grad in wanted.items():
        size = 0.0 if grad is None else float(grad.abs().max())
        largest[layer_name(name)] = max(largest.get(layer_name(name), 0.0), size)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    errors = {}
    assert set(params) == set(wanted)
    for name, expected in wanted.items():
        grad = params[name].grad
        assert (grad is None) == (expected is None), f"{name}: gradient {grad}, not {expected}"
        if expected is None:
            continue
        rank = grad.device_mesh.get_local_rank(grad.device_mesh.ndim - 1)
        mesh = grad.device_mesh
        shards = expected.chunk(mesh.size(-1))
        difference = grad.to_local() - (shards[rank] if rank < len(shards) else expected[:0])
        error = float(difference.abs().max()) if difference.numel() else 0.0
        errors[name] = error / (largest[layer_name(name)] or 1.0)
    return errors


def add_lora(model: nn.Module, **settings) -> nn.Module:
    """Return a PeftModel with random A and B; with PEFT's initial B of zero, A would get no
    gradient."""
    with CONSTRUCTING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 5, **settings}))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(
                    0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
                )
    return model


def mean_loss(plain: nn.Module, ids: Tensor, labels: Tensor, **inputs) -> Tensor:
    return plain_sum(plain, ids, labels, **inputs) / (labels[:, 1:] != -100).sum()


def compare(
    plain: nn.Module,
    layout: Layout | None = None,
    plain_loss: Callable[[nn.Module], Tensor] | None = None,
    *,
    dp: int = 1,
    rows: int = 1,
    tokens: int = 24,
    wide: bool = True,
    logits: bool = False,
    **inputs: Tensor,
) -> list[Errors]:
    """Return the errors of every rank of a parallel copy of `plain`. Inputs have the rows of all
    data-parallel ranks.

    Loss and gradients are compared with those of `plain_loss`, by default the mean loss of the same
    inputs; with `logits`, also the logits of a call without labels.
    """
    layout = layout or Layout()
    mode = InFloat64 if wide else nullcontext
    ids = inputs.pop("input_ids") if "input_ids" in inputs else random_ids(rows * dp, tokens)
    labels = inputs.pop("labels") if "labels" in inputs else ids
    models = [copy.deepcopy(plain) for _ in range(layout.cp * dp)]
    with mode():
        loss = mean_loss(plain, ids, labels, **inputs) if plain_loss is None else plain_loss(plain)
        if logits:
            with torch.no_grad():
                wanted_logits = plain(input_ids=ids, use_cache=False, **inputs).logits
    loss.backward()

    def work() -> Errors:
        mesh = make_mesh(layout.cp, ring=layout.ring)
        model = parallelize_model(
            models[mesh.rank], mesh=mesh, layout=layout, store=Store(mesh.device)
        )
        mine = slice(mesh.dp_rank * len(ids) // dp, (mesh.dp_rank + 1) * len(ids) // dp)
        own_inputs = {name: value[mine] for name, value in inputs.items()}
        errors = {}
        with mode():
            if logits:
                with torch.no_grad():
                    own_logits = model(input_ids=ids[mine], **own_inputs).logits
                errors["logits"] = relative(own_logits, wanted_logits[mine])
            own_loss = model(input_ids=ids[mine], labels=labels[mine], **own_inputs).loss
        own_loss.backward()
        errors["loss"] = relative(own_loss.detach(), loss.detach())
        return {**errors, **gradient_errors(model, plain)}

    with fp64_tiles() if wide else nullcontext():
        return run_on_threads(layout.cp * dp, work)


def worst_error(errors_of_ranks: list[Errors]) -> tuple[float, str]:
    return max((error, name) for errors in errors_of_ranks for name, error in errors.items())


def assert_equal(errors_of_ranks: list[Errors], tolerance: float = 1e-10) -> None:
    for errors in errors_of_ranks:
        assert errors
        wrong = {name: error for name, error in errors.items() if not error < tolerance}
        assert not wrong
