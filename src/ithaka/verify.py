"""Is it right on my model? Two of its layers, with its weights, on cp ranks, against plain transformers.

In float64, so that what is left is the rounding of transformers' own norms and angles, which are in float32. The
vocabulary is cut, and a window is shortened to be felt by few tokens; all else is the model's own.
"""

import gc
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ithaka.config import AdapterConfig, Config, ConfigError
from ithaka.dist.mesh import Mesh, end_process_group, make_mesh
from ithaka.launch import check_cpu_ranks, max_cpu_ranks, num_gpus, run_ranks
from ithaka.layer.loss import IGNORE_INDEX
from ithaka.layout import ActivationPolicy, Layout, layout_from_config
from ithaka.model.adapters import add_adapter, read_stored_settings
from ithaka.model.build import has_weights, parallelize_model, read_hf_config
from ithaka.model.logprobs import token_logprobs
from ithaka.model.weights import EMBEDDINGS, open_tensor_files
from ithaka.plan.shape import read_shape, shape_from_config
from ithaka.preflight.checks import check_weights

ALLOWED = 1e-4  # relative; a wrong index, factor or mask gives 1e-2 and more
VOCAB, WINDOW, TILE = 1024, 11, 16
RESULT = "checks.json"
WRONG = 1e9  # of a gradient that is missing or not finite: JSON has no infinity
Checks = Iterator[dict[str, Any]]
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def check(part: str, where: str, error: float, allowed: float | None = ALLOWED) -> dict[str, Any]:
    """One comparison: `error` is relative, of `where`, the worst of what was compared. `allowed` None: information."""
    return {"part": part, "where": where, "error": error, "allowed": allowed, "ok": allowed is None or error <= allowed}


def verify(source: Path | dict, config: Config | None = None, cp: int | None = None) -> dict[str, Any]:
    """Cuts the model, starts the ranks and returns the checks, and what was checked. `config`: of the layout."""
    logging.disable_progress_bar()
    shape = read_shape(source) if isinstance(source, Path) else shape_from_config(source)
    check_weights(source if isinstance(source, Path) else None)
    heads, asked = shape.heads, config.parallel.cp if config is not None else 4
    cp = cp or min(asked if isinstance(asked, int) else 4, heads, max(num_gpus(), max_cpu_ranks()))
    if cp > heads:
        raise ConfigError(f"--cp={cp} exceeds the {heads} query heads; use at most {heads}")
    if cp > num_gpus():
        check_cpu_ranks(cp, "--cp")
    layout, device = layout_for(config, cp, heads), "cuda" if num_gpus() >= cp else "cpu"
    adapter = config.adapter if config is not None else AdapterConfig(rank=4) if find_spec("peft") else None
    adapter = adapter and replace(read_stored_settings(adapter, set()), path=None)
    with tempfile.TemporaryDirectory(prefix="ithaka-verify-") as name:
        weights = cut(source, Path(name), config)
        if code := run_ranks(_rank, (Path(name), layout, adapter, device), cp):
            raise SystemExit(code)
        checks = json.loads((Path(name) / RESULT).read_text())
    facts = {"model_type": shape.family, "weights": weights, "cp": cp, "device": device}
    return {"ok": all(each["ok"] for each in checks), **facts, "checks": checks}


def layout_for(config: Config | None, cp: int, heads: int) -> Layout:
    """The configuration's layout, for two layers, few tokens and float64; without one, with every technique on."""
    if config is None:
        kept = (ActivationPolicy("host", "host"), ActivationPolicy())
        return Layout(cp, cp if cp < heads else None, TILE, kept, dtype="float64")
    layout = layout_from_config(config, 2, cp, on_gpu=False)
    stage = layout.heads_per_stage and max(1, layout.heads_per_stage // config.parallel.cp_of(cp)) * cp
    stage, tile = stage if stage and stage < heads else None, min(layout.tile_tokens or TILE, TILE)
    layout = replace(layout, cp=cp, heads_per_stage=stage, tile_tokens=tile, dtype="float64", offload_optimizer=False)
    return replace(layout, ring=math.gcd(cp, layout.ring), kernel="auto", blocks=None)


# ---- the model, cut


def cut(source: Path | dict, out: Path, settings: Config | None = None) -> str:
    """Writes a Hugging Face directory with two layers, of two kinds if the model has them, and the first tokens.
    Returns whose weights it has."""
    config = read_hf_config(source, settings.model.rope if settings is not None else None)
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    layers = [0, next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 1)][: len(kinds)]
    config.num_hidden_layers, config.vocab_size = len(layers), min(VOCAB, config.vocab_size)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None  # they may lie beyond it
    if kinds[0] is not None:
        config.layer_types = [kinds[i] for i in layers]
    if getattr(config, "sliding_window", None):
        config.sliding_window = min(WINDOW, config.sliding_window)
    if not has_weights(source):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(out)
        return "random"
    config.save_pretrained(out)
    tensors = {}
    for name, file in open_tensor_files(source).items():
        layer = re.match(r"model\.layers\.(\d+)", name)
        if layer is None or int(layer[1]) in layers:
            new = f"model.layers.{layers.index(int(layer[1]))}{name[layer.end() :]}" if layer else name
            rows = config.vocab_size if name in EMBEDDINGS else None
            tensors[new] = file.get_slice(name)[:rows].contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return "its own"


def load_models(directory: Path, adapter: AdapterConfig | None) -> PreTrainedModel:
    """The cut model in float64; adapters are random, since with B zero, as it starts, A has no gradient."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa")
    if adapter is not None:
        if not isinstance(adapter.targets, str):  # without the numbers of layers
            adapter = replace(adapter, targets=tuple({name.rpartition(".")[2]: 0 for name in adapter.targets}))
        add_adapter(model, adapter, None)
        generator = torch.Generator().manual_seed(1)
        for param in (param for param in model.parameters() if param.requires_grad):
            param.data.normal_(0, 0.02, generator=generator)
    return model.train()


# ---- on every rank


def _rank(directory: Path, layout: Layout, adapter: AdapterConfig | None, device: str) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    mesh = make_mesh(layout.cp, device if device == "cpu" else None, ring=layout.ring)
    checks = list(run_checks(directory, mesh, layout, adapter))
    if mesh.rank == 0:
        (directory / RESULT).write_text(json.dumps(checks))
    end_process_group()


class ModelPair:
    """The parallel model, and on rank 0 the plain one. Every rank calls every method; rank 0 has the answers."""

    def __init__(self, directory: Path, mesh: Mesh, layout: Layout, adapter: AdapterConfig | None = None) -> None:
        self.turned: dict[str, float] = {}  # how far gradients of heads pointed elsewhere, by name
        self.plain = load_models(directory, adapter).to(mesh.device) if mesh.rank == 0 else None
        model = load_models(directory, adapter)
        layout = replace(layout, kept=layout.kept[-model.config.num_hidden_layers :])
        self.head_dim = model.model.layers[0].self_attn.head_dim
        self.model = parallelize_model(model, mesh=mesh, layout=layout)

    def losses(self, ids: Tensor, labels: Tensor, right: Callable | None = None, **inputs: Tensor) -> dict[str, float]:
        """Errors of the loss and of every gradient, by name; sets `turned`. `right`: the plain model's summed loss."""
        count, plain = (labels[:, 1:] != IGNORE_INDEX).sum(), self.plain
        loss = self.model(input_ids=ids, labels=labels, **inputs).loss
        loss.backward()
        errors, wanted, self.turned = {}, {}, {}
        if plain is not None:
            expected = (right(plain) if right else _plain_sum(plain, ids, labels, **inputs)) / count
            expected.backward()
            errors["loss"] = _relative(loss.detach(), expected.detach())
            wanted = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        # Some gradients are zero but for rounding: those of q and k if no token sees another.
        least = 1e-6 * sum(float(grad.norm()) ** 2 for grad in wanted.values()) ** 0.5
        for name, param in self.model.named_parameters():
            grad = None if param.grad is None else param.grad.full_tensor()
            if name in wanted:
                errors[name] = WRONG if grad is None else _relative(grad, wanted[name], least)
                if grad is not None and name.endswith(QKV):
                    self.turned[f"heads of {name}"] = _turned(grad, wanted[name], self.head_dim, least)
        self.model.zero_grad()
        if plain is not None:
            plain.zero_grad()
        return errors

    @torch.no_grad()
    def logits(self, ids: Tensor, plain_inputs: dict[str, Tensor], **inputs: Tensor) -> float:
        logits = self.model(input_ids=ids, **inputs).logits
        return 0.0 if self.plain is None else _relative(logits, _plain_logits(self.plain, ids, **plain_inputs))


def run_checks(directory: Path, mesh: Mesh, layout: Layout, adapter: AdapterConfig | None) -> Checks:
    pair, cp = ModelPair(directory, mesh, layout), layout.cp
    vocab, full_length = pair.model.config.vocab_size, pair.model.config.max_position_embeddings

    def ids_of(*shape: int) -> Tensor:
        return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(2))

    ids = ids_of(2, 8 * cp + 3)
    yield check("logits", "all", pair.logits(ids, {}))
    errors = pair.losses(ids, ids.masked_fill(ids_of(2, 8 * cp + 3) % 4 == 0, IGNORE_INDEX))
    yield check("loss", "loss", errors.pop("loss", 0.0))
    yield _worst("gradients", errors)
    yield _worst("head pairing", pair.turned)  # direction alone: a wrong partner, not a wrong factor
    if cp > 1:
        ids, at = ids_of(1, 4 * cp), torch.arange(4 * cp)
        yield _worst(
            "labels at shard borders", pair.losses(ids, ids.masked_fill((at % 4 != 0) | (at == 0), IGNORE_INDEX))
        )
    ids = ids_of(1, cp + 1)  # on four ranks 2, 2, 1 and none
    yield _worst("uneven lengths", pair.losses(ids, ids))
    ids, at = ids_of(2, 2 * cp + 5), torch.arange(2 * cp + 5)
    mask = torch.stack([at < cp + 2, at >= cp + 2])  # the first row is padded on the right, the other on the left
    labels = ids.masked_fill(~(mask & F.pad(mask[:, :-1], (1, 0))), IGNORE_INDEX)
    yield _worst("padding", pair.losses(ids, labels, attention_mask=mask.long()))
    yield from _documents(pair, ids_of, (5, 1, cp + 4, 7))
    few = min(10, getattr(pair.model.config, "sliding_window", None) or 10)
    ids, mask = ids_of(1, few), torch.ones(few, few, dtype=torch.bool).tril()[None, None]
    for part, last, allowed in (("rope", 300, ALLOWED), ("exact positions", full_length, None)):
        positions = torch.arange(0, last, (last - 1) // (few - 1))[None, :few]
        ours = {"position_ids": positions, "document_ids": torch.zeros_like(ids)}  # documents only: not by positions
        error = pair.logits(ids, {"position_ids": positions, "attention_mask": mask}, **ours)
        yield check(part, f"logits, {few} tokens over {last} positions", error, allowed)
    if adapter is not None:
        del pair
        gc.collect()  # two models of 8B, cut, fill a laptop; FSDP2 has cycles
        ids = ids_of(1, 8 * cp + 3)
        yield _worst("adapter", ModelPair(directory, mesh, layout, adapter).losses(ids, ids))


def _documents(pair: ModelPair, ids_of: Callable[..., Tensor], lengths: tuple[int, ...]) -> Checks:
    """Packed, as if each were alone; and every other one changed, which the rest must not notice."""
    ids = ids_of(1, sum(lengths))
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    labels = ids.index_fill(1, torch.tensor([0, *accumulate(lengths)][:-1]), IGNORE_INDEX)

    def alone(plain: nn.Module) -> Tensor:
        return torch.stack([_plain_sum(plain, part, part) for part in ids.split(lengths, dim=1)]).sum()

    yield _worst("documents", pair.losses(ids, labels, alone, document_ids=documents))
    error = 0.0
    with torch.no_grad():
        before = token_logprobs(pair.model, ids, labels, document_ids=documents).logprobs.cpu()
        for changing in (documents % 2 == 0, documents % 2 == 1):
            changed = torch.where(changing, (ids + 1) % pair.model.config.vocab_size, ids)
            after = token_logprobs(pair.model, changed, labels, document_ids=documents).logprobs.cpu()
            error = max(error, float((before - after)[~changing].abs().max()))
    yield check("documents apart, bit for bit", "labels when neighbours change", error, 0.0)


def _plain_logits(model: nn.Module, ids: Tensor, **inputs: Tensor) -> Tensor:
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in inputs.items()}
    return model(input_ids=ids.to(device), use_cache=False, **inputs).logits


def _plain_sum(model: nn.Module, ids: Tensor, labels: Tensor, **inputs: Tensor) -> Tensor:
    """Of the losses in the model's own precision; its own loss rounds to float32."""
    logits = _plain_logits(model, ids, **inputs)[:, :-1].flatten(0, 1)
    return F.cross_entropy(
        logits, labels[:, 1:].flatten().to(logits.device), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def _relative(ours: Tensor, right: Tensor, least: float = 0.0) -> float:
    error = float((ours - right).norm()) / (max(float(right.norm()), least) or 1.0)
    return error if math.isfinite(error) else WRONG


def _turned(ours: Tensor, right: Tensor, head_dim: int, least: float) -> float:
    """How far the gradients of heads that have one point elsewhere: 1 - cosine, summed."""
    a, b = (grad.view(-1, head_dim * grad.shape[1]) for grad in (ours, right))
    return float((1 - F.cosine_similarity(a, b))[b.norm(dim=1) > least].clamp_min(0).sum())


def _worst(part: str, errors: dict[str, float]) -> dict[str, Any]:
    where = max(errors, key=lambda name: errors[name], default="")
    return check(part, where.replace("model.", "", 1), errors.get(where, 0.0))
