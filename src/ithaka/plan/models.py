"""Find models by name (built-in, local directories, Hugging Face hub ids), and their shapes by formula or as stored."""

from __future__ import annotations

import difflib
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ithaka.config import LAYER_LINEARS, ConfigError
from ithaka.hub import HUB_ID, split_revision
from ithaka.plan.mixers import Attention, mixers_from_json, mixers_to_json
from ithaka.plan.read_config import FAMILIES, PLANNED_FAMILIES, Family, read_json
from ithaka.plan.shape import AttentionKind, Encoder, MeasuredLayer, ModelShape

HUB_TIMEOUT_S = 5.0
SAME_SIZE = 1.3  # ratio of sizes up to which a name may be a mistake for another: llama3-7b

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
CORRECT = "correct the model's config.json"
DEFAULT_WINDOW = 4096  # for every family that has windows
# Bytes per token of a Llama-like layer, as multiples of D, H * K, G * K and F; then the same with norms on q and k.
LAYER_BYTES: dict[str, list[tuple[int, ...]]] = {
    "project_bytes": [(2, 4, 6, 0)],
    "project_backward_bytes": [(6, 4, 4, 0)],
    "project_graph": [(2, 0, 0, 0), (2, 2, 2, 0)],
    "finish_bytes": [(6, 0, 0, 4)],
    "finish_backward_bytes": [(10, 0, 0, 4)],
    "finish_graph": [(6, 0, 0, 4)],
    "project_moved": [(2, 2, 6, 0), (2, 4, 8, 0)],
    "project_backward_moved": [(25, 10, 28, 0), (19, 16, 30, 0)],
    "finish_moved": [(18, 0, 0, 0), (18, 2, 2, 0)],
    "finish_backward_moved": [(41, 0, 0, 6), (41, 2, 2, 6)],
}

# From the public config.json: family, layers, hidden size, query heads, kv heads, MLP size, vocabulary, positions,
# RoPE theta; then optionally tied embeddings, an explicit head dim (K64), Llama 3.1's RoPE with its factor (x8).
_TABLE = """
llama3-8b     meta-llama/Meta-Llama-3-8B         llama    32 4096 32  8 14336 128256   8K 5e5
llama3-70b    meta-llama/Meta-Llama-3-70B        llama    80 8192 64  8 28672 128256   8K 5e5
llama3.1-8b   meta-llama/Llama-3.1-8B            llama    32 4096 32  8 14336 128256 128K 5e5 x8
llama3.1-70b  meta-llama/Llama-3.1-70B           llama    80 8192 64  8 28672 128256 128K 5e5 x8
llama3.1-405b meta-llama/Llama-3.1-405B          llama   126 16384 128 8 53248 128256 128K 5e5 x8
llama3.2-1b   meta-llama/Llama-3.2-1B            llama    16 2048 32  8  8192 128256 128K 5e5 tied K64 x32
llama3.2-3b   meta-llama/Llama-3.2-3B            llama    28 3072 24  8  8192 128256 128K 5e5 tied K128 x32
llama3.3-70b  meta-llama/Llama-3.3-70B-Instruct  llama    80 8192 64  8 28672 128256 128K 5e5 x8
mistral-7b    mistralai/Mistral-7B-v0.3          mistral  32 4096 32  8 14336  32768  32K 1e6
mistral-small-24b mistralai/Mistral-Small-24B-Base-2501 mistral 40 5120 32 8 32768 131072 32K 1e8 K128
qwen2.5-0.5b  Qwen/Qwen2.5-0.5B                  qwen2    24  896 14  2  4864 151936  32K 1e6 tied
qwen2.5-1.5b  Qwen/Qwen2.5-1.5B                  qwen2    28 1536 12  2  8960 151936 128K 1e6 tied
qwen2.5-3b    Qwen/Qwen2.5-3B                    qwen2    36 2048 16  2 11008 151936  32K 1e6 tied
qwen2.5-7b    Qwen/Qwen2.5-7B                    qwen2    28 3584 28  4 18944 152064 128K 1e6
qwen2.5-14b   Qwen/Qwen2.5-14B                   qwen2    48 5120 40  8 13824 152064 128K 1e6
qwen2.5-32b   Qwen/Qwen2.5-32B                   qwen2    64 5120 40  8 27648 152064 128K 1e6
qwen2.5-72b   Qwen/Qwen2.5-72B                   qwen2    80 8192 64  8 29568 152064 128K 1e6
qwen3-0.6b    Qwen/Qwen3-0.6B                    qwen3    28 1024 16  8  3072 151936  40K 1e6 tied K128
qwen3-1.7b    Qwen/Qwen3-1.7B                    qwen3    28 2048 16  8  6144 151936  40K 1e6 tied K128
qwen3-4b      Qwen/Qwen3-4B                      qwen3    36 2560 32  8  9728 151936  40K 1e6 tied K128
qwen3-8b      Qwen/Qwen3-8B                      qwen3    36 4096 32  8 12288 151936  40K 1e6 K128
qwen3-14b     Qwen/Qwen3-14B                     qwen3    40 5120 40  8 17408 151936  40K 1e6 K128
qwen3-32b     Qwen/Qwen3-32B                     qwen3    64 5120 64  8 25600 151936  40K 1e6 K128
smollm2-135m  HuggingFaceTB/SmolLM2-135M         llama    30  576  9  3  1536  49152   8K 1e5 tied
smollm2-360m  HuggingFaceTB/SmolLM2-360M         llama    32  960 15  5  2560  49152   8K 1e5 tied
smollm2-1.7b  HuggingFaceTB/SmolLM2-1.7B         llama    24 2048 32 32  8192  49152   8K 1.3e5 tied
"""
_COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
           "vocab_size")  # fmt: skip
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _config(family: str, *columns: str) -> dict[str, Any]:
    counts, positions, theta, more = columns[:6], columns[6], float(columns[7]), columns[8:]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    config = {"model_type": family, **{key: int(count) for key, count in zip(_COUNTS, counts, strict=True)}}
    config |= {"tie_word_embeddings": "tied" in more, "rope_parameters": rope}
    config["max_position_embeddings"] = 1024 * int(positions.removesuffix("K"))
    if FAMILIES[family].window == "all":
        config["sliding_window"] = None
    for option in more:
        if option[0] == "K":
            config["head_dim"] = int(option[1:])
        elif option[0] == "x":
            rope |= {"rope_type": "llama3", "factor": float(option[1:]), **_LLAMA3_ROPE}
    return config


@lru_cache
def built_in_decoders() -> dict[str, Any]:
    """Built-in models of families without a formula: hub id, config.json, and the measured shape of each. Written by
    benchmarks/measure_decoders.py."""
    return json.loads(Path(__file__).with_name("decoders.json").read_text(encoding="utf-8"))


_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
_DECODERS = built_in_decoders()
_HUB_IDS: dict[str, str] = {row[0]: row[1] for row in _ROWS} | {name: m["hub"] for name, m in _DECODERS.items()}
MODELS: dict[str, dict[str, Any]] = {row[0]: _config(*row[2:]) for row in _ROWS}
MODELS |= {name: model["config"] for name, model in _DECODERS.items()}


def find_config(model: str) -> dict[str, Any]:
    """The config.json of a built-in model, a Hugging Face directory, a file, or a hub id."""
    if not model.strip():
        raise ConfigError(f"MODEL={model!r} is empty; {_suggestion('')}")
    if model not in MODELS and (path := Path(model).expanduser()).exists():
        return read_json(path / "config.json" if path.is_dir() else path)
    if (name := built_in(model)) is not None:
        return dict(MODELS[name])
    if re.fullmatch(HUB_ID, split_revision(model)[0]):
        return _fetch_config(model)
    raise ConfigError(f"model={model} is neither a path nor a known name; {_suggestion(model)}")


def built_in(model: str) -> str | None:
    """The built-in name of `model`: Llama-3.1-8B, meta-llama/Llama-3.1-8B-Instruct and llama3.1_8b are the same."""
    spellings = [(s, name) for name, id in _HUB_IDS.items() for s in (name, id, id.partition("/")[2])]
    return {_plain(spelling): name for spelling, name in spellings}.get(_plain(model))


def hub_id(model: str) -> str | None:
    """The hub id of a built-in name or of a hub id; None for other names."""
    name = built_in(model)
    return _HUB_IDS[name] if name else model if re.fullmatch(HUB_ID, model) else None


def _plain(name: str) -> str:
    """Normalize case and separators, and drop words that do not change the shape."""
    text = re.sub(r"[-_ ]?\b(instruct|base|chat|hf)\b", "", name.lower().replace("_", "-"))
    return re.sub(r"[- ]|^meta(?=-?llama-?3)", "", text.replace("/meta-llama", "/llama"))


def _suggestion(model: str) -> str:
    """Names of the same family and nearly the same size; of other models, the nearest name is only an example."""
    family, size = _split_size(model)
    families = {name: _split_size(name) for name in MODELS}
    # Another number is another family: Qwen3.5 is not a typo of Qwen3.
    names = {other for other, _ in families.values() if re.sub(r"\D", "", other) == re.sub(r"\D", "", family)}
    closest = difflib.get_close_matches(family, names, n=1, cutoff=0.7)
    ratios = {
        name: max(size, billions) / min(size, billions) if size and billions else 1.0
        for name, (other, billions) in families.items()
        if other in closest
    }
    nearest = sorted(ratios, key=lambda name: ratios[name])
    if alike := [name for name in nearest if ratios[name] <= SAME_SIZE][:2]:
        return f"did you mean {' or '.join(alike)}?"
    example = f"a name such as {nearest[0] if nearest else 'llama3.1-8b'}"
    return f"use a directory with its config.json, its Hugging Face hub id (ORG/NAME), or {example}"


def _split_size(model: str) -> tuple[str, float]:
    """(family, billions of parameters or 0): Qwen/Qwen3.5-27B is qwen3.5 with 27."""
    name = re.sub("[_ ]", "-", model.lower()).rpartition("/")[2]
    match = re.search(r"-(\d+(?:\.\d+)?)([bm])\b", name) or re.search(r"(?<=\d)-(\d+)()$", name)
    if match is None:
        return _plain(name), 0.0
    return _plain(name[: match.start()]), float(match[1]) * (0.001 if match[2] == "m" else 1.0)


def _fetch_config(model: str) -> dict[str, Any]:
    """Read config.json from the local hub cache, or fetch it in one attempt: huggingface_hub would retry for 25 s."""
    from urllib.request import HTTPRedirectHandler, Request, build_opener  # imported late: it is slow

    from huggingface_hub import constants, get_token, hf_hub_url, try_to_load_from_cache

    repo, revision = split_revision(model)
    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    if isinstance(cached, str):
        return read_json(Path(cached))

    class Redirects(HTTPRedirectHandler):
        def redirect_request(self, req: Request, *answer: Any) -> Request | None:
            """Follow a redirect, but send the token to no other host."""
            redirected = super().redirect_request(req, *answer)
            if redirected is not None and (redirected.type, redirected.host) != (req.type, req.host):
                redirected.remove_header("Authorization")
            return redirected

    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    request = Request(hf_hub_url(repo, "config.json", revision=revision), headers=headers)
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        with build_opener(Redirects).open(request, timeout=HUB_TIMEOUT_S) as answer:
            return dict(json.load(answer))
    except (OSError, ValueError) as error:
        code, fix = getattr(error, "code", None), _suggestion(model)
        problem = f"the hub cannot be reached ({getattr(error, 'reason', error)})"
        if code == 404:
            problem = "is not on the hub"
        if code in (401, 403):
            problem = f"the hub denies access (HTTP {code})"
            fix = "accept its license there and log in with `hf auth login`, or use a local directory"
        raise ConfigError(f"model={model} is not a local path, and {problem}; {fix}") from None


# ---- shapes


def find_known_shape(values: Mapping[str, Any], source: str) -> ModelShape | None:
    """Return the shape that a `config.json` describes: by formula, or the stored one of a built-in model. None: it must
    be measured. `source`: its name in errors."""
    if (name := values.get("model_type")) not in PLANNED_FAMILIES:
        plain = json.loads(json.dumps(dict(values)))  # with lists, not tuples
        stored = (model for model, decoder in built_in_decoders().items() if decoder["config"] == plain)
        return next(map(_stored_shape, stored), None)
    family = FAMILIES[name]
    hidden, num_layers, heads, mlp, vocab = (_count(values, key, source) for key in SIZES)
    kv_heads = _count(values, "num_key_value_heads", source, family.kv_heads or heads, null=heads)
    if heads % kv_heads:
        rule = f"does not divide num_attention_heads={heads}"
        raise ConfigError(f"num_key_value_heads={kv_heads} of {source} {rule}; {CORRECT}")
    head_dim = _count(values, "head_dim", source, family.head_dim or hidden // heads, null=hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} of {source} is odd, but RoPE rotates pairs; {CORRECT}")
    kinds = (AttentionKind(head_dim, heads // kv_heads, w) for w in _read_windows(values, family, num_layers, source))
    mixers, tied = tuple(map(Attention, kinds)), bool(values.get("tie_word_embeddings", False))
    rules = (family.qkv_bias, family.out_bias, family.mlp_bias)
    biases = [bool(values.get(rule) if isinstance(rule, str) else rule) for rule in rules]
    layer = _plain_layer(hidden, heads * head_dim, kv_heads * head_dim, mlp, head_dim, biases, family.qk_norm)
    layer = replace(layer, total_parameters=num_layers * layer.parameters + hidden)
    return ModelShape(name, num_layers, hidden, heads, kv_heads, head_dim, mlp, vocab, tied, mixers, layer)


def _plain_layer(
    hidden: int, q: int, kv: int, mlp: int, head_dim: int, biases: Sequence[bool], qk_norm: bool
) -> MeasuredLayer:
    """The layer of a family with a formula: what model/shape.py would measure. `biases`: of q, k and v; of the output
    projection; of the MLP."""
    sizes = ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, mlp), (hidden, mlp), (mlp, hidden))
    linears = [(f"{'mlp' if i > 3 else 'self_attn'}.{LAYER_LINEARS[i]}", *sizes[i], False) for i in range(len(sizes))]
    macs = [inputs * outputs for inputs, outputs in sizes]
    has_bias = (biases[0],) * 3 + (biases[1],) + (biases[2],) * 3
    num_biases = sum(outputs * has for (_, outputs), has in zip(sizes, has_bias, strict=True))
    parameters = sum(macs) + num_biases + 2 * hidden + 2 * head_dim * qk_norm
    per_token: dict[str, Any] = {
        name: sum(map(operator.mul, row, (hidden, q, kv, mlp)))
        for name, rows in LAYER_BYTES.items()
        for row in [rows[qk_norm and len(rows) > 1]]
    }
    macs_by_pass: dict[str, Any] = {"projection_macs": sum(macs[:3]), "other_macs": sum(macs[3:]), "expert_macs": 0}
    others: dict[str, Any] = dict.fromkeys(("slices_heads", "slices_output", "skips_mlp"), True)
    others["arguments"] = 8 * head_dim + 8
    return MeasuredLayer(parameters, parameters, tuple(linears), **others, **per_token, **macs_by_pass)


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    stored = asdict(shape) | {"mixers": mixers_to_json(shape.mixers)}
    return {name: value for name, value in stored.items() if name not in ("teacher", "corrections")}


@lru_cache
def _stored_shape(model: str) -> ModelShape:
    return shape_from_json(built_in_decoders()[model]["shape"])


def shape_from_json(values: Mapping[str, Any]) -> ModelShape:
    measured = {key: tuple(map(tuple, values["measured"][key])) for key in ("linears", "stacked")}
    types = {
        "measured": MeasuredLayer(**values["measured"] | measured),
        "mixers": mixers_from_json(values["mixers"]),
        "encoders": tuple(Encoder(**encoder) for encoder in values["encoders"]),
    }
    return ModelShape(**{**values, **types})


def _count(
    values: Mapping[str, Any], key: str, source: str, default: int | None = None, null: int | None = None
) -> int:
    """Read a positive integer. `default`: if the key is absent. `null`: if its value is null."""
    value = values.get(key, default)
    if value is None and key in values:
        value = null
    if value is None:
        raise ConfigError(f"{key} of {source} is missing; add it to the model's config.json")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}={value} of {source} is not a positive integer; {CORRECT}")
    return value


def _read_windows(values: Mapping[str, Any], family: Family, num_layers: int, source: str) -> tuple[int | None, ...]:
    """Return each layer's window, by transformers' rules."""
    window = values.get("sliding_window", DEFAULT_WINDOW)
    is_off = family.window == "switched" and not values.get("use_sliding_window", False)
    if family.window == "none" or window is None or is_off:
        return (None,) * num_layers
    if family.window == "all":
        return (_count({"sliding_window": window}, "sliding_window", source),) * num_layers
    first = values.get("max_window_layers", 28)
    kinds = values.get("layer_types") or ["sliding_attention" if i >= first else "" for i in range(num_layers)]
    if len(kinds) != num_layers:
        counts = f"{len(kinds)} entries for num_hidden_layers={num_layers}"
        raise ConfigError(f"layer_types of {source} has {counts}; {CORRECT}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
