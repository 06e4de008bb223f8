"""Find models by name: built-in, with stored shapes, local directories, Hugging Face hub ids."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from ithaka.config import ConfigError
from ithaka.facts.model_files import HUB_ID, parse_json, read_json, split_revision
from ithaka.plan.mixers import mixers_from_json, mixers_to_json
from ithaka.plan.shape import Encoder, MeasuredLayer, ModelShape

HUB_TIMEOUT_S = 5.0
SAME_SIZE = 1.3  # ratio of sizes up to which a name may be a mistake for another: llama3-7b


@lru_cache
def built_in_decoders() -> dict[str, Any]:
    """Hub id, config.json and measured shape, written by benchmarks/measure_decoders.py."""
    return json.loads(Path(__file__).with_name("decoders.json").read_text(encoding="utf-8"))


_HUB_IDS: dict[str, str] = {name: model["hub"] for name, model in built_in_decoders().items()}
MODELS: dict[str, dict[str, Any]] = {
    name: model["config"] for name, model in built_in_decoders().items()
}


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
    """The built-in name of `model`: Llama-3.1-8B and meta-llama/Llama-3.1-8B-Instruct are equal."""
    names = {}
    for name, id in _HUB_IDS.items():
        for spelling in (name, id, id.partition("/")[2]):
            names[_plain(spelling)] = name
    return names.get(_plain(model))


def hub_id(model: str) -> str | None:
    """The hub id of a built-in name or of a hub id; None for other names."""
    if name := built_in(model):
        return _HUB_IDS[name]
    return model if re.fullmatch(HUB_ID, model) else None


def _plain(name: str) -> str:
    """Normalize case and separators, and drop words that do not change the shape."""
    text = re.sub(r"[-_ ]?\b(instruct|base|chat|hf)\b", "", name.lower().replace("_", "-"))
    return re.sub(r"[- ]|^meta(?=-?llama-?3)", "", text.replace("/meta-llama", "/llama"))


def _suggestion(model: str) -> str:
    """Names that begin with `model`, or of the same family and nearly the same size."""
    family, size = _split_size(model)
    families = {name: _split_size(name) for name in MODELS}
    # Another number is another family: Qwen3.5 is not a typo of Qwen3.
    number = re.sub(r"\D", "", family)
    names = {other for other, _ in families.values() if re.sub(r"\D", "", other) == number}
    closest = difflib.get_close_matches(family, names, n=1, cutoff=0.7)
    ratios = {}
    for name, (other, billions) in families.items():
        if other in closest:
            known = size and billions
            ratios[name] = max(size, billions) / min(size, billions) if known else 1.0
    nearest = sorted(ratios, key=lambda name: ratios[name])
    alike = [name for name in MODELS if model and name.startswith(model.lower())]
    alike = alike or [name for name in nearest if ratios[name] <= SAME_SIZE]
    if alike:
        return f"did you mean {' or '.join(alike[:2])}?"
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
    """Read config.json from the hub's cache, or fetch it once: huggingface_hub retries for 25 s."""
    # Slow to import.
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    from huggingface_hub import constants, get_token, hf_hub_url, try_to_load_from_cache

    repo, revision = split_revision(model)
    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    if isinstance(cached, str):
        return read_json(Path(cached))

    class Redirects(HTTPRedirectHandler):
        def redirect_request(self, req: Request, *answer: Any) -> Request | None:
            """Follow a redirect, but send the token to no other host."""
            redirected = super().redirect_request(req, *answer)
            host = (req.type, req.host)
            if redirected is not None and (redirected.type, redirected.host) != host:
                redirected.remove_header("Authorization")
            return redirected

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = Request(hf_hub_url(repo, "config.json", revision=revision), headers=headers)
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        with build_opener(Redirects).open(request, timeout=HUB_TIMEOUT_S) as answer:
            return dict(parse_json(answer.read()))
    except (OSError, ValueError) as error:
        code = getattr(error, "code", None)
        fix = _suggestion(model)
        problem = f"the hub cannot be reached ({getattr(error, 'reason', error)})"
        if code == 404:
            problem = "is not on the hub"
        if code in (401, 403):
            problem = f"the hub denies access (HTTP {code})"
            login = "accept its license there and log in with `hf auth login`"
            fix = f"{login}, or use a local directory"
        raise ConfigError(f"model={model} is not a local path, and {problem}; {fix}") from None


# ---- shapes


def find_known_shape(values: Mapping[str, Any]) -> ModelShape | None:
    """Return the stored shape of the built-in model with this `config.json`, if there is one."""
    plain = json.loads(json.dumps(dict(values)))  # with lists, not tuples
    return next((_stored_shape(name) for name, config in MODELS.items() if config == plain), None)


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    sizes = [sizes for _, sizes in shape.measured_by_mixer]
    stored = asdict(shape) | {"mixers": mixers_to_json(shape.mixers), "measured_by_mixer": sizes}
    return {name: value for name, value in stored.items() if name not in ("teacher", "corrections")}


@lru_cache
def _stored_shape(model: str) -> ModelShape:
    return shape_from_json(built_in_decoders()[model]["shape"])


def shape_from_json(values: Mapping[str, Any]) -> ModelShape:
    measured = {key: tuple(map(tuple, values["measured"][key])) for key in ("linears", "stacked")}
    mixers = mixers_from_json(values["mixers"])
    sizes = values["measured_by_mixer"]
    kinds = dict.fromkeys(mixers) if sizes else ()
    types = {
        "measured": MeasuredLayer(**values["measured"] | measured),
        "measured_by_mixer": tuple(zip(kinds, map(tuple, sizes), strict=True)),
        "mixers": mixers,
        "encoders": tuple(Encoder(**encoder) for encoder in values["encoders"]),
    }
    return ModelShape(**{**values, **types})
