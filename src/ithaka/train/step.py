"""One step, and what is done with a model beside training it: validation, a sample.  No files, no console.

B rows of S tokens per data-parallel rank and micro-step; V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ithaka.data.stream import Batch, num_valid
from ithaka.dist.mesh import Mesh
from ithaka.model.batch import num_pairs
from ithaka.phases import phase
from ithaka.train.optim import clip_gradients

SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class StepResult:
    """Global figures of one step, the same on every rank."""

    loss: float
    grad_norm: float
    label_tokens: int
    num_pairs: int  # query-key pairs of attention, summed over layers


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    lr: float,
    clip_norm: float | None,
    mesh: Mesh,
    windows: Sequence[int | None] = (),
) -> StepResult:
    """One update from this rank's micro-batches; `windows` are the layers'.

    The number of valid labels of the whole global batch is known before the first forward, so every
    micro-step is weighted by its tokens and gradients are divided once."""
    labels = sum(num_valid(batch.labels) for batch in batches)
    pairs = sum(num_pairs(batch.document_ids, windows) for batch in batches)
    # The ranks of a cp group hold the same batch: one of them counts it.
    counts = torch.tensor([labels, pairs] if mesh.cp_rank == 0 else [0, 0])
    dist.all_reduce(counts)
    label_tokens, all_pairs = counts.tolist()
    for group in optimizer.param_groups:
        group["lr"] = lr
    total_loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        loss = model(**batch._asdict(), num_items_in_batch=max(label_tokens, 1)).loss
        loss.backward()
        total_loss += loss.detach()
    with phase("optimizer"):
        norm = clip_gradients(model.parameters(), clip_norm, mesh.device)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(float(total_loss), float(norm), label_tokens, all_pairs)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)
    if isinstance(model, FSDPModule):
        model.reshard()  # a root keeps its gathered parameters after forward, expecting a backward


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Iterable[Batch], mesh: Mesh) -> float | None:
    """Mean over all valid labels of all ranks; every rank passes the same number of batches.  None without
    any."""
    total, num_labels = torch.zeros((), dtype=torch.float64, device=mesh.device), 0
    with _evaluating(model):
        for batch in batches:
            out = model(**batch._asdict())
            total += out.loss.double() * out.num_tokens
            num_labels += out.num_tokens
    return float(total) / num_labels if num_labels else None


@torch.no_grad()
def sample(
    model: nn.Module, prompt: Sequence[int], num_tokens: int, mesh: Mesh, *, seed: int, stop: int | None
) -> list[int]:
    """Up to `num_tokens` token ids continuing `prompt`; every rank takes part and gets the same.

    Each token costs a whole forward of one fixed length (no cache); what stands right of the last token
    cannot be seen by it."""
    length = len(prompt) + num_tokens
    ids_BS = torch.zeros(1, length, dtype=torch.long, device=mesh.device)
    ids_BS[0, : len(prompt)] = torch.tensor(list(prompt))
    generator = torch.Generator().manual_seed(seed)
    with _evaluating(model):
        for at in range(len(prompt), length):
            logits_V = model(input_ids=ids_BS).logits[0, at - 1].float().cpu()
            weights_V = torch.softmax(logits_V / SAMPLE_TEMPERATURE, -1)
            token = torch.multinomial(weights_V, 1, generator=generator)
            dist.broadcast(token, 0)
            if token.item() == stop:
                length = at
                break
            ids_BS[0, at] = token.item()
    return ids_BS[0, len(prompt) : length].tolist()
