"""Compare one layer of each kind of a model, on cp ranks, with plain transformers.

Both sides run in float64; only norms and RoPE angles round to float32, as in transformers. The
reference for loss and gradients rounds nothing: transformers' gated delta rule in float32 leaves
mostly noise in the gradients of its decays. The vocabulary is truncated, and a sliding window is
shortened so that short sequences exceed it; the rest of the model is unchanged.
"""

import gc
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ithaka.checks.doctor import Finding, judge
from ithaka.checks.failures import run_on_all_ranks
from ithaka.comm.agree import gather_objects, shared_temporary_path
from ithaka.comm.mesh import Mesh, destroy_subgroups, end_process_group, free_memory, make_mesh
from ithaka.comm.rank import is_local_rank_0
from ithaka.config import AdapterConfig, Config, ConfigError
from ithaka.facts.families import MEDIA
from ithaka.facts.model_files import read_json
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.foreign.hugging_face import attention_of
from ithaka.layout import Layout, layout_from_config
from ithaka.model.build import has_weights, parallelize_model, read_hf_config
from ithaka.model.logprobs import token_logprobs
from ithaka.model.truncate import find_representative_layers, group_layers, truncate_config
from ithaka.roots.find import find_root
from ithaka.roots.layer_kinds import LayerKind
from ithaka.roots.rotary import InFloat64
from ithaka.roots.vision import count_values
from ithaka.run.adopt import adopt_adapter
from ithaka.run.launch import check_cpu_ranks, max_cpu_ranks, num_gpus, run_ranks
from ithaka.run.run_files import check_weights
from ithaka.trace.shapes import read_shape, shape_from_config
from ithaka.weights.adapters import add_adapter, auto_class
from ithaka.weights.formats import round_weights
from ithaka.weights.load import describe_nonfinite, end_parameters, is_finite, open_tensor_files
from ithaka.weights.pretrained import load_dequantized

TOLERANCE = 1e-4  # relative; a wrong index, factor or mask gives at least 1e-2
MIN_LAYERS = 2
MAX_VOCAB = 1024
MAX_WINDOW = 11
MAX_TILE = 16
ON_HOST: dict[str, Any] = {"input_tier": "host", "attention_tier": "host"}
CHECKS_FILE = "checks.json"
INVALID_ERROR = 1e9  # for missing gradients and non-finite errors: JSON has no infinity
Checks = Iterator[dict[str, Any]]
Errors = dict[str, float]  # relative, by tensor


def make_check(
    part: str, where: str, error: float, allowed: float | None = TOLERANCE
) -> dict[str, Any]:
    """Describe a comparison. `where` names the tensor with the largest relative error.
    allowed=None: only report it."""
    ok = allowed is None or error <= allowed
    return {"part": part, "where": where, "error": error, "allowed": allowed, "ok": ok}


def verify(
    source: Path | dict, config: Config | None = None, cp: int | None = None
) -> dict[str, Any]:
    """Truncate the model, run the checks on cp ranks and return the results. `config` sets the
    layout."""
    logging.disable_progress_bar()
    path = source if isinstance(source, Path) else None
    shape = read_shape(source) if isinstance(source, Path) else shape_from_config(source)
    name = "MODEL" if config is None else "model.path"
    check_weights(path, name, "compare with plain transformers at")
    heads = shape.heads
    if not cp:
        configured = 4 if config is None else config.parallel.cp
        usual = configured if isinstance(configured, int) else 4
        cp = min(usual, heads, max(num_gpus(), max_cpu_ranks()))
    if cp > heads:
        raise ConfigError(f"--cp={cp} exceeds the {heads} query heads; use at most {heads}")
    if cp > num_gpus():
        check_cpu_ranks(cp, "--cp")
    device = "cuda" if num_gpus() >= cp else "cpu"
    adapter = AdapterConfig(rank=4) if find_spec("peft") else None
    if config is not None:
        adapter = adopt_adapter(config).adapter
    adapter = adapter and replace(adapter, path=None)
    threads = torch.get_num_threads()
    fork = cp > 1 and device == "cpu" and sys.platform == "linux"
    if fork:
        torch.set_num_threads(1)  # OpenMP's threads would not exist in the forks
        if adapter is not None:
            import_module("peft")  # takes seconds in each rank otherwise
    with tempfile.TemporaryDirectory(prefix="ithaka-verify-") as directory:
        weights, kinds, layers = write_truncated_model(source, Path(directory), config)
        layout = layout_to_verify(config, cp, heads, len(layers))
        arguments = Path(directory), layout, adapter, device, max(1, threads // cp)
        if code := run_ranks(_verify_rank, arguments, cp, fork=fork):
            raise SystemExit(code)
        checks = json.loads((Path(directory) / CHECKS_FILE).read_text())
    described = []
    for kind, chosen, same in group_layers(kinds, layers, [shape.mixers[i].name for i in layers]):
        compared = [layers[i] for i in chosen]
        described.append({"kind": kind, "compared": compared, "layers_of_model": len(same)})
    return {
        "ok": all(check["ok"] for check in checks),
        "model_type": shape.family,
        "weights": weights,
        "cp": cp,
        "device": device,
        "layers": layers,
        "layers_of_model": len(kinds),
        "kinds": described,
        "checks": [
            check | {"where": _with_model_layers(check["where"], layers)} for check in checks
        ],
    }


def _with_model_layers(name: str, layers: Sequence[int]) -> str:
    """Replace a layer's index in the truncated model by the one in the model."""
    decoder_layer = r"(?<![\w.])((?:language_model\.)?layers\.)(\d+)"
    return re.sub(decoder_layer, lambda match: f"{match[1]}{layers[int(match[2])]}", name)


def layout_to_verify(
    config: Config | None, cp: int, heads: int, num_layers: int = MIN_LAYERS
) -> Layout:
    """Adapt the configured layout to a few layers and tokens and float64; by default, enable every
    technique."""
    if config is None:
        stage = cp if cp < heads else None
        counts: dict[str, Any] = {"keep_inputs": 1, "keep_attention": num_layers // 2}
        return Layout(cp, stage, MAX_TILE, **ON_HOST, **counts, dtype="float64")
    layout = layout_from_config(config, num_layers, cp, on_gpu=False)
    stage = layout.heads_per_stage
    if stage:
        stage = max(1, stage // config.parallel.cp_of(cp)) * cp
    return replace(
        layout,
        cp=cp,
        ring=math.gcd(cp, layout.ring),
        replicas=1,
        heads_per_stage=stage if stage and stage < heads else None,
        tile_tokens=min(layout.tile_tokens or MAX_TILE, MAX_TILE),
        kernel="auto",
        blocks=None,
        dtype="float64",
        offload_optimizer=False,
    )


def write_truncated_model(
    source: Path | dict, out: Path, settings: Config | None = None
) -> tuple[str, list[LayerKind], list[int]]:
    """Write a Hugging Face directory with two layers, or one of each kind if more, and a small
    vocabulary. Return the origin of its weights, the kinds of all layers, and the layers kept."""
    config = read_hf_config(source, settings.model.rope if settings is not None else None)
    kinds, layers = find_representative_layers(config, MIN_LAYERS)
    config = truncate_config(config, layers)
    text = config.get_text_config()
    text.vocab_size = min(MAX_VOCAB, text.vocab_size)
    # may exceed the truncated vocabulary
    text.bos_token_id = text.eos_token_id = text.pad_token_id = None
    if getattr(text, "sliding_window", None):
        text.sliding_window = min(MAX_WINDOW, text.sliding_window)
    if text is not config:
        _truncate_encoder(config, text.vocab_size)
    model_class = auto_class(config.model_type)
    if not has_weights(source):
        torch.manual_seed(0)
        model_class.from_config(config, trust_remote_code=False).save_pretrained(out)
        return "random", kinds, list(layers)
    with torch.device("meta"):
        model = model_class.from_config(config, trust_remote_code=False)
    # Older files of vision-language models have other prefixes.
    known = set(map(_without_prefix, model.state_dict()))
    ends = {_without_prefix(name): len(param) for name, param in end_parameters(model).items()}
    assert isinstance(source, Path)
    config.quantization_config = read_json(source / "config.json").get("quantization_config")
    config.save_pretrained(out)
    tensors = {}
    for name, file in open_tensor_files(source).items():
        layer = re.match(r"((?:model|backbone)\.(?:language_model\.)?layers\.)(\d+)", name)
        if layer is None and text is not config and _without_prefix(name) not in known:
            continue  # an encoder block that was truncated
        if layer is not None and int(layer[2]) not in layers:
            continue
        new_name = name
        if layer is not None:
            new_name = f"{layer[1]}{layers.index(int(layer[2]))}{name[layer.end() :]}"
        rows = ends.get(_without_prefix(name))
        tensors[new_name] = file.get_slice(name)[:rows].contiguous()
        if not is_finite(tensors[new_name]):  # every check would fail, without naming it
            raise ConfigError(describe_nonfinite(f"MODEL={source}", name, source))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return "its own", kinds, list(layers)


def _without_prefix(name: str) -> str:
    return re.sub(r"^(model\.|backbone\.|language_model\.)*", "", name)


def _truncate_encoder(config: PreTrainedConfig, vocab_size: int) -> None:
    """Keep two blocks of an image encoder, one windowed if any is, and one layer's DeepStack
    features."""
    vision = config.vision_config
    kept = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
    vision.depth = min(2, vision.depth)
    for name in kept.keys() & vars(vision).keys():
        setattr(vision, name, kept[name])
    for i, name in enumerate(("image", "video", "vision_start", "vision_end"), 1):
        setattr(config, f"{name}_token_id", vocab_size - i)


def load_truncated_model(directory: Path, adapter: AdapterConfig | None) -> PreTrainedModel:
    """Load the truncated model in float64. Adapters are random: with B at its initial zero, A has
    no gradient."""
    model = load_dequantized(directory, dtype=torch.float64, experts_implementation="eager")
    for param in model.parameters():  # quantized ones are bfloat16
        param.data = param.data.double()
    if adapter is not None:
        round_weights(model, adapter)
        if not isinstance(adapter.targets, str):
            # without layer indices, which may exceed the truncated model
            targets = dict.fromkeys(name.rpartition(".")[2] for name in adapter.targets)
            adapter = replace(adapter, targets=tuple(targets))
        add_adapter(model, adapter, None)
        generator = torch.Generator().manual_seed(1)
        for param in (param for param in model.parameters() if param.requires_grad):
            param.data.normal_(0, 0.02, generator=generator)
    return model.train()


def _verify_rank(
    directory: Path, layout: Layout, adapter: AdapterConfig | None, device: str, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    mesh = make_mesh(layout.cp, device if device == "cpu" else None, ring=layout.ring)
    checks = list(run_checks(directory, mesh, layout, adapter))
    if mesh.rank == 0:
        (directory / CHECKS_FILE).write_text(json.dumps(checks))
    end_process_group()


class ModelPair:
    """The parallel model and, on rank 0, the plain one. Methods are collective; their results are
    valid on rank 0."""

    def __init__(
        self, directory: Path, mesh: Mesh, layout: Layout, adapter: AdapterConfig | None = None
    ) -> None:
        self.direction_errors: Errors = {}  # per-head gradient direction errors, by name
        self.plain: PreTrainedModel | None = None
        if mesh.rank == 0:
            self.plain = load_truncated_model(directory, adapter).to(mesh.device)
        model = load_truncated_model(directory, adapter)
        if layout.dtype != "float64":
            model = model.float()
        layers = find_root(model).layers
        attention = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
        self.head_dim = getattr(attention[0], "head_dim", None) if attention else None
        self.model = parallelize_model(model, mesh=mesh, layout=layout)

    def compare_losses(
        self, ids: Tensor, labels: Tensor, loss_sum: Callable | None = None, **inputs: Tensor
    ) -> Errors:
        """Return relative errors of the loss and each gradient; set `direction_errors`. `loss_sum`:
        the reference."""
        num_labels = (labels[:, 1:] != IGNORE_INDEX).sum()
        plain = self.plain
        loss = self.model(input_ids=ids, labels=labels, **inputs).loss
        loss.backward()
        errors = {}
        expected_grads = {}
        self.direction_errors = {}
        if plain is not None:
            total = loss_sum(plain) if loss_sum else _plain_loss_sum(plain, ids, labels, **inputs)
            expected = total / num_labels
            expected.backward()
            errors["loss"] = _relative_error(loss.detach(), expected.detach())
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    expected_grads[name] = param.grad
        # Some gradients are zero up to rounding: q and k, if each token attends only to itself.
        min_norm = 1e-6 * sum(float(grad.norm()) ** 2 for grad in expected_grads.values()) ** 0.5
        for name, param in self.model.named_parameters():
            grad = None if param.grad is None else param.grad.full_tensor()
            if name not in expected_grads:
                continue
            errors[name] = INVALID_ERROR
            if grad is None:
                continue
            exact = expected_grads[name]
            errors[name] = _relative_error(grad, exact, min_norm)
            is_qkv = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            if is_qkv and self.head_dim is not None:
                error = _direction_error(grad, exact, self.head_dim, min_norm)
                self.direction_errors[f"heads of {name}"] = error
        self.model.zero_grad()
        if plain is not None:
            plain.zero_grad()
        return errors

    @torch.no_grad()
    def compare_logits(
        self, ids: Tensor, plain_inputs: dict[str, Tensor], **inputs: Tensor
    ) -> float:
        logits = self.model(input_ids=ids, **inputs).logits
        if self.plain is None:
            return 0.0
        return _relative_error(logits, _plain_logits(self.plain, ids, **plain_inputs))


def run_checks(
    directory: Path, mesh: Mesh, layout: Layout, adapter: AdapterConfig | None
) -> Checks:
    cp = layout.cp
    stored_dtype = layout.stored_dtype
    layout = replace(layout, stored_dtype=None)
    pair = ModelPair(directory, mesh, layout)
    num_layers = len(pair.model.ithaka_root.layers)
    has_encoder = bool(pair.model.ithaka_root.encoders)
    vocab = pair.model.config.get_text_config().vocab_size - 4 * has_encoder

    def random_ids(*shape: int) -> Tensor:
        return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(2))

    yield from _check_batches(pair, random_ids, cp)
    yield from _check_documents(pair, random_ids, (5, 1, cp + 4, 7))
    yield from _check_positions(pair, random_ids)
    if has_encoder:
        ids = random_ids(1, 2 * cp + 20)
        media = _add_media(pair.model, ids)
        yield _worst_check("images and video", pair.compare_losses(ids, ids, None, **media))
    del pair
    gc.collect()  # FSDP2 has reference cycles, and two truncated 8B models fill a laptop
    ids = random_ids(1, 8 * cp + 3)
    if adapter is not None:
        errors = ModelPair(directory, mesh, layout, adapter).compare_losses(ids, ids)
        yield _worst_check("adapter", errors)
    if stored_dtype is not None:
        for dtype in (None, stored_dtype):
            plain = replace(layout.without_backward(), dtype="bfloat16", stored_dtype=dtype)
            changed = replace(plain, **ON_HOST, keep_attention=num_layers)
            part = f"bf16, stored in {dtype or 'bf16'}"
            yield _median_check(part, ModelPair(directory, mesh, changed, adapter), ids)
            gc.collect()


def _check_batches(pair: ModelPair, random_ids: Callable[..., Tensor], cp: int) -> Checks:
    """Compare whole batches, few labels, uneven lengths and padding."""
    ids = random_ids(2, 8 * cp + 3)
    yield make_check("logits", "all", pair.compare_logits(ids, {}))
    labels = ids.masked_fill(random_ids(2, 8 * cp + 3) % 4 == 0, IGNORE_INDEX)
    errors = pair.compare_losses(ids, labels)
    yield make_check("loss", "loss", errors.pop("loss", 0.0))
    yield _worst_check("gradients", errors)
    # cosine only: detects swapped heads, not wrong scale
    yield _worst_check("head pairing", pair.direction_errors)
    if cp > 1:
        ids = random_ids(1, 4 * cp)
        positions = torch.arange(4 * cp)
        labels = ids.masked_fill((positions % 4 != 0) | (positions == 0), IGNORE_INDEX)
        yield _worst_check("labels at shard boundaries", pair.compare_losses(ids, labels))
    ids = random_ids(1, cp + 1)  # with cp=4, the ranks get 2, 2, 1 and 0 tokens
    yield _worst_check("uneven lengths", pair.compare_losses(ids, ids))
    ids = random_ids(2, 2 * cp + 5)
    positions = torch.arange(2 * cp + 5)
    # right padding, then left padding
    mask = torch.stack([positions < cp + 2, positions >= cp + 2])
    if attention_of(pair.model.config) == "eager":
        # gives NaN for tokens that attend to none, as in windows
        mask[:] = positions < len(positions) - 2
    labels = ids.masked_fill(~(mask & F.pad(mask[:, :-1], (1, 0))), IGNORE_INDEX)
    yield _worst_check("padding", pair.compare_losses(ids, labels, attention_mask=mask.long()))


def _check_positions(pair: ModelPair, random_ids: Callable[..., Tensor]) -> Checks:
    """Compare logits at positions with gaps."""
    text = pair.model.config.get_text_config()
    num_tokens = min(10, getattr(text, "sliding_window", None) or 10)
    ids = random_ids(1, num_tokens)
    mask = torch.full((1, 1, num_tokens, num_tokens), -math.inf).double().triu(1)
    full_length = text.max_position_embeddings
    for part, last, allowed in (("rope", 300, TOLERANCE), ("exact positions", full_length, None)):
        positions = torch.arange(0, last, (last - 1) // (num_tokens - 1))[None, :num_tokens]
        plain = {"position_ids": positions, "attention_mask": mask}
        # document_ids: gaps in the positions must not start documents
        inputs = {"position_ids": positions, "document_ids": torch.zeros_like(ids)}
        error = pair.compare_logits(ids, plain, **inputs)
        yield make_check(part, f"logits, {num_tokens} tokens over {last} positions", error, allowed)


def _add_media(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return arguments for two images and a video, whose tokens replace some of `ids` in place."""
    config = model.config
    vision = model.model.visual.config
    side = model.config.vision_config.spatial_merge_size
    grids = {"image": [[1, 2 * side, 3 * side], [1, side, 2 * side]], "video": [[2, side, side]]}
    inputs: dict[str, Tensor] = {}
    first = 3
    generator = torch.Generator().manual_seed(3)
    for kind, (pixels, name) in MEDIA.items():
        inputs[name] = torch.tensor(grids[kind])
        num_patches = int(inputs[name].prod(1).sum())
        values = torch.randn(num_patches, count_values(vision), generator=generator)
        inputs[pixels] = values.double()
        ids[:, first : first + num_patches // side**2] = getattr(config, f"{kind}_token_id")
        first += num_patches // side**2 + 2
    positions = torch.arange(ids.shape[1]) * torch.tensor([1, 2, 3])[:, None, None]
    return inputs | {"position_ids": positions}


def _check_documents(
    pair: ModelPair, random_ids: Callable[..., Tensor], lengths: tuple[int, ...]
) -> Checks:
    """Packed documents match separate ones; changing every other document leaves the rest bitwise
    unchanged."""
    ids = random_ids(1, sum(lengths))
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    labels = ids.index_fill(1, torch.tensor([0, *accumulate(lengths)][:-1]), IGNORE_INDEX)

    def separate_loss_sum(plain: nn.Module) -> Tensor:
        parts = ids.split(lengths, dim=1)
        return torch.stack([_plain_loss_sum(plain, part, part) for part in parts]).sum()

    def logprobs(ids: Tensor) -> Tensor:
        return token_logprobs(pair.model, ids, labels, document_ids=documents).logprobs.cpu()

    errors = pair.compare_losses(ids, labels, separate_loss_sum, document_ids=documents)
    yield _worst_check("documents", errors)
    error = 0.0
    with torch.no_grad():
        before = logprobs(ids)
        for changing in (documents % 2 == 0, documents % 2 == 1):
            after = logprobs(torch.where(changing, (ids + 1) % ids.max(), ids))
            error = max(error, _finite((before - after)[~changing].abs().max()))
    where = "logprobs when neighbors change"
    yield make_check("document isolation, bitwise", where, error, 0.0)


def _plain_logits(model: nn.Module, ids: Tensor, **inputs: Tensor) -> Tensor:
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in inputs.items()}
    return model(input_ids=ids.to(device), use_cache=False, **inputs).logits


def _plain_loss_sum(model: nn.Module, ids: Tensor, labels: Tensor, **inputs: Tensor) -> Tensor:
    """Sum the token losses in the model's dtype; the loss of transformers rounds to float32."""
    with InFloat64():
        logits = _plain_logits(model, ids, **inputs)[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten().to(logits.device)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def _relative_error(actual: Tensor, expected: Tensor, min_norm: float = 0.0) -> float:
    norm = max(float(expected.norm()), min_norm)
    return _finite(float((actual - expected).norm()) / (norm or 1.0))


def _finite(error: float | Tensor) -> float:
    return float(error) if math.isfinite(error) else INVALID_ERROR


def _direction_error(actual: Tensor, expected: Tensor, head_dim: int, min_norm: float) -> float:
    """Sum 1 - cosine similarity over the heads whose gradient exceeds `min_norm`."""
    a, b = (grad.view(-1, head_dim * grad.shape[1]) for grad in (actual, expected))
    return _finite((1 - F.cosine_similarity(a, b))[b.norm(dim=1) > min_norm].clamp_min(0).sum())


def _median_check(part: str, pair: ModelPair, ids: Tensor) -> dict[str, Any]:
    """Report the error of gradients in 16 bits, which has no limit: it depends on the model."""
    errors = [error for name, error in pair.compare_losses(ids, ids).items() if name != "loss"]
    return make_check(part, f"median of {len(errors)} gradients", median(errors or [0.0]), None)


def _worst_check(part: str, errors: Errors) -> dict[str, Any]:
    where = max(errors, key=lambda name: errors[name], default="")
    return make_check(part, where.replace("model.", "", 1), errors.get(where, 0.0))


# ---- small models on all layouts of the ranks at hand

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "hybrid": {"model_type": "qwen3_5_text", **DELTA},
}
# A wrong index or a missing part of a sum gives about 1. In float32 the decays of the gated delta
# rule lose digits; in bfloat16 a token may choose another expert.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5}


def verify_layouts(device: torch.device, num_ranks: int, deadline_s: float) -> Iterator[Finding]:
    """Compare each kind of model, dtype, cp and ring with plain transformers in fp64 on rank 0;
    after the deadline, one cp. Name the ranks with wrong weights. Collective."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sizes = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    heads = SIZES["num_attention_heads"]
    pairs = [(cp, ring) for cp in sizes for ring in sizes if cp % ring == 0 and cp // ring <= heads]
    for kind, config in KINDS.items():
        layouts = [(cp, ring) for cp, ring in pairs if ring == 1 or kind != "hybrid"]
        with shared_temporary_path("ithaka-selftest-") as folder:
            write = partial(write_truncated_model, SIZES | config, folder)
            run_on_all_ranks(write if is_local_rank_0() else lambda: None)
            for dtype, allowed in TOLERANCES.items():
                results: list[tuple[float, list[int], int, int]] = []
                for cp, ring in layouts:
                    if gather_objects(time.monotonic() < deadline_s or not results)[0]:
                        results.append((*_verify_layout(folder, device, cp, ring, dtype), cp, ring))
                error, wrong, cp, ring = max(results)
                text = (
                    f"{len(results)} of {len(layouts)} layouts; largest error {error:.0e}, "
                    f"{allowed:.0e} allowed, at cp={cp}, ring={ring}"
                )
                fix = "report it with --json"
                if wrong:
                    text += f"; the weights of rank {', '.join(map(str, wrong))} are wrong"
                    fix = "test the GPU and memory of that node (dcgmi diag -r 3)"
                figures: dict[str, Any] = {
                    "layouts": len(results),
                    "largest error": error,
                    "allowed": allowed,
                    "cp": cp,
                    "ring": ring,
                    "ranks": wrong,
                }
                ok = error <= allowed and not wrong
                yield judge(f"{kind}, {dtype}", ok, text, fix, **figures)


def _verify_layout(
    folder: Path, device: torch.device, cp: int, ring: int, dtype: str
) -> tuple[float, list[int]]:
    """Return the largest error of loss and gradients, and ranks with wrong weights, on rank 0."""
    layout = layout_to_verify(None, cp // ring, SIZES["num_attention_heads"])
    layout = replace(layout, cp=cp, ring=ring, dtype=dtype)
    pair = ModelPair(folder, make_mesh(cp, device, ring=ring), layout)
    wrong: set[int] = set()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(SIZES["vocab_size"], (1, 8 * cp + 3), generator=generator)
    errors = pair.compare_losses(ids, ids)
    for name, param in pair.model.named_parameters():
        full = param.full_tensor()
        if pair.plain is not None:
            num_shards = param.device_mesh.size()
            found = full.float().chunk(num_shards)
            exact = pair.plain.get_parameter(name).float().chunk(num_shards)
            for rank, (a, b) in enumerate(zip(found, exact, strict=True)):
                if not torch.equal(a, b):
                    wrong.add(rank)
    gather_objects(full.detach().sum().item())  # every rank has received everything
    destroy_subgroups()
    del pair
    free_memory()
    return max(errors.values(), default=0.0), sorted(wrong)
