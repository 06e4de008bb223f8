"""Check every call of a parallel model before its first layer, and agree on it with all ranks.

A rank that raises alone leaves the others waiting in a collective. So each rank checks the model and its inputs,
one small collective gathers the results, and if anything is wrong every rank raises the same error.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.dist.mesh import Mesh
from ithaka.model.batch import Share, check_integers, check_tokens, take_share
from ithaka.model.untouched import Counts, Untouched, check_around

TENSORS = ("input_ids", "labels", "position_ids", "attention_mask", "document_ids")
ARGUMENTS = (*TENSORS, "num_items_in_batch")

# Hugging Face's other arguments: the values that change nothing, and what to do instead of any other value.
NO_CACHE = "there is no cache; export the model and generate with Hugging Face's own"
OTHER_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": ((False,), NO_CACHE),
    "past_key_values": ((), NO_CACHE),
    "cache_position": ((), NO_CACHE),
    "inputs_embeds": ((), "pass input_ids; a forward hook on embed_tokens can change the embeddings"),
    "output_attentions": ((False,), "attention weights never exist as a whole"),
    "output_hidden_states": ((False,), "read them with a forward hook on the decoder layers"),
    "output_router_logits": ((False,), "the router's auxiliary loss is not computed"),
    "return_dict": ((True,), "the output is always a ModelOutput; take out.to_tuple()"),
    "logits_to_keep": ((0,), "slice out.logits"),
}
CONFIGURED = ("output_attentions", "output_hidden_states", "return_dict")  # Hugging Face reads them at each call

# torch 2.13's name, or the one before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Call:
    """A checked call."""

    share: Share
    shape: torch.Size  # of input_ids
    num_tokens: int  # valid labels of the global batch
    divisor: int  # of the summed loss


class CallCheck:
    """A pre-hook of the model that runs before FSDP2's and turns the user's arguments into a `Call`.

    There and not in forward: FSDP2 would move the whole batch to the device, and cannot be called again after an
    error in forward.
    """

    def __init__(self, model: PreTrainedModel, mesh: Mesh, storage: torch.device, users: list[Counts]) -> None:
        """`storage`: of the parameters. `users`: the hooks of each module before FSDP2 added its own."""
        self.mesh, self.group = mesh, mesh.fsdp.get_group()
        model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
        self.untouched = Untouched(model, storage, users)

    def __call__(self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[Call], dict]:
        error, report, share, items = None, Report(), None, None
        try:
            check_around(self.mesh.device)
            self.untouched.check()
            for name in CONFIGURED:
                _refuse_argument(name, getattr(model.config, name, None))
            tensors, items = _arguments(args, kwargs)
            report = Report.of(tensors, items)
            share = self._share(model, tensors)
            if items == 0 and share.num_valid:
                raise ValueError(
                    f"num_items_in_batch=0, but this batch has {share.num_valid} valid labels; pass their number over "
                    "all ranks and micro-batches, or leave it out"
                )
        except (TypeError, ValueError) as caught:
            error = caught
            report.error = (type(caught), str(caught))
        num_tokens = self._agree(report, share.num_valid if share is not None else 0, error)
        assert share is not None
        for layer in model.model.layers:
            layer.forward.hooked = self.untouched.hooked
        shape = tensors["input_ids"].shape
        return (Call(share.to(self.mesh.device), shape, num_tokens, max(items or num_tokens, 1)),), {}

    def _share(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> Share:
        share = take_share(
            *(tensors.get(name) for name in TENSORS),  # type: ignore[arg-type]
            cp_rank=self.mesh.cp_rank,
            cp_size=self.mesh.cp_size,
        )
        check_tokens(tensors["input_ids"], tensors.get("labels"), model.model.embed_tokens.num_embeddings)
        return share

    def _agree(self, report: "Report", num_valid: int, error: Exception | None) -> int:
        """Valid labels of the global batch, known without asking the device. Raises on all ranks or on none."""
        if self.group.size() == 1:
            if error is not None:
                raise error
            return num_valid
        mine = [int(report.error is not None), report.batch_digest(), report.mode_digest(), num_valid]
        rows = self._gather(mine)
        cp = self.mesh.cp_size
        groups = [rows[first : first + cp] for first in range(0, len(rows), cp)]
        failed, batches, modes, counts = zip(*rows, strict=True)
        same_batches = all(len({row[1] for row in group}) == 1 for group in groups)
        if any(failed) or not same_batches or len(set(modes)) > 1:
            reports: list[Report] = [report] * len(rows)
            dist.all_gather_object(reports, report, group=self.group)
            raise explain(reports, cp) from error
        return sum(counts[::cp])

    def _gather(self, mine: list[int]) -> list[list[int]]:
        """Every rank's row; on the CPU where the group has a backend for it, else on the device."""
        devices = self.group._device_types
        device = torch.device("cpu") if not devices or torch.device("cpu") in devices else self.mesh.device
        rows = torch.empty(self.group.size() * len(mine), dtype=torch.long, device=device)
        all_gather(rows, torch.tensor(mine, device=device), group=self.group)
        return rows.view(-1, len(mine)).tolist()


# ---- what one rank was given


@dataclass
class Report:
    """One rank's inputs, as far as others need to know them."""

    error: tuple[type[Exception], str] | None = None
    tensors: tuple[tuple[str, tuple[int, ...], bytes], ...] = ()  # name, shape, digest of the values
    with_labels: bool = False
    with_grad: bool = False
    num_items: int | None = None

    @classmethod
    def of(cls, tensors: dict[str, Tensor], num_items: int | None) -> "Report":
        described = tuple((name, tuple(t.shape), _digest(t)) for name, t in tensors.items())
        return cls(None, described, "labels" in tensors, torch.is_grad_enabled(), num_items)

    def batch_digest(self) -> int:
        """Must be equal inside a cp group."""
        return _as_int64(repr(self.tensors))

    def mode_digest(self) -> int:
        """Must be equal on all ranks: their collectives depend on it."""
        return _as_int64(repr((self.with_labels, self.with_grad, self.num_items)))


def _digest(tensor: Tensor) -> bytes:
    values: Any = tensor.contiguous().numpy()
    return hashlib.sha1(values, usedforsecurity=False).digest()


def _as_int64(text: str) -> int:
    return int.from_bytes(hashlib.sha1(text.encode(), usedforsecurity=False).digest()[:8], "little", signed=True)


def _arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], int | None]:
    """The tensors that were given, on the host (documents are read there anyway), and num_items_in_batch."""
    if len(args) > 1:
        raise TypeError(
            "a parallel model takes only input_ids by position; name the others: "
            "model(ids, attention_mask=mask, labels=labels)"
        )
    if args and "input_ids" in kwargs:
        raise TypeError("input_ids is given twice: by position and by name")
    given = {**({"input_ids": args[0]} if args else {}), **kwargs}
    for name in given.keys() - set(ARGUMENTS):
        _refuse_argument(name, given[name])
    if given.get("input_ids") is None:
        raise TypeError("input_ids is missing; pass the token ids, [batch, tokens]")
    tensors = {name: check_integers(name, given[name]) for name in TENSORS if given.get(name) is not None}
    items = given.get("num_items_in_batch")
    items = items.item() if isinstance(items, Tensor) else items
    if items is not None and (int(items) != items or items < 0):
        raise ValueError(f"num_items_in_batch={items} is not a count; pass the number of valid labels, or leave it out")
    return tensors, None if items is None else int(items)


def _refuse_argument(name: str, value: Any) -> None:
    """Accepts Hugging Face's other arguments where they change nothing."""
    if value is None:
        return
    if name not in OTHER_ARGUMENTS:
        raise TypeError(f"a parallel model takes no argument {name}; it takes {', '.join(ARGUMENTS)}")
    neutral, instead = OTHER_ARGUMENTS[name]
    if isinstance(value, Tensor) or value not in neutral:
        shown = type(value).__name__ if isinstance(value, Tensor) else repr(value)[:60]
        raise TypeError(f"{name}={shown} is not supported by a parallel model: {instead}")


# ---- one error for all ranks


def explain(reports: list[Report], cp: int) -> Exception:
    """The error that every rank raises, from what all of them were given."""
    texts: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.error is not None:
            texts.setdefault(report.error[1], []).append(rank)
    if texts:
        kind = next(report.error[0] for report in reports if report.error is not None)
        everywhere = len(texts) == 1 and len(*texts.values()) == len(reports)
        lines = [text if everywhere else f"{_ranks(ranks)}: {text}" for text, ranks in texts.items()]
        return kind("\n".join(lines))
    for first in range(0, len(reports), cp):
        group = reports[first : first + cp]
        other = next((i for i, report in enumerate(group) if report.tensors != group[0].tensors), None)
        if other is not None:
            return ConfigError(_different_batches(group[0], group[other], first, first + other, cp, len(reports)))
    return ConfigError(_different_modes(reports))


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _different_batches(a: Report, b: Report, rank_a: int, rank_b: int, cp: int, world_size: int) -> str:
    mine, theirs = ({name: (shape, digest) for name, shape, digest in report.tensors} for report in (a, b))
    differences = []
    for name in TENSORS:
        if (name in mine) != (name in theirs):
            given, missing = (rank_a, rank_b) if name in mine else (rank_b, rank_a)
            differences.append(f"{name} is given on rank {given} and not on rank {missing}")
        elif name in mine and mine[name][0] != theirs[name][0]:
            differences.append(f"{name} has shape {mine[name][0]} on rank {rank_a}, {theirs[name][0]} on rank {rank_b}")
        elif mine.get(name) != theirs.get(name):
            differences.append(f"{name} has the same shape and other values")
    return (
        f"ranks {rank_a} and {rank_b} share a sequence (cp={cp}) but got different batches: {'; '.join(differences)}. "
        "Every rank of a cp group must get the same batch: choose data by the data-parallel rank, not by the global "
        f"one, e.g. DistributedSampler(dataset, num_replicas={world_size // cp}, "
        f"rank=torch.distributed.get_rank() // {cp})"
    )


def _different_modes(reports: list[Report]) -> str:
    first, rules = reports[0], []
    for field, what, rule in (
        ("with_labels", "labels given", "pass labels on every rank or on none"),
        ("with_grad", "gradients enabled", "use torch.no_grad() on every rank or on none"),
        ("num_items", "num_items_in_batch", "pass the number of valid labels summed over all data-parallel ranks"),
    ):
        rank = next((r for r, report in enumerate(reports) if getattr(report, field) != getattr(first, field)), None)
        if rank is not None:
            values = getattr(first, field), getattr(reports[rank], field)
            rules.append(f"{what}: {values[0]} on rank 0, {values[1]} on rank {rank}; {rule}")
    return f"the ranks call the model in different ways: {'. '.join(rules)}"
