"""Replacements in Python, PyTorch and ithaka that let the tests take minutes instead of an hour.

The suite starts thousands of ranks, meshes and tiny models. Most of its time would go into
importing torch, propagating shapes over yet another mesh and measuring the same model again, which
is not what the tests check. Every replacement returns what the original would, computed once, or
leaves out what no test can observe. `pytest --plain` runs without them, and `make test-all` runs a
selection that way, which exposes a replacement that hides an error.

`--plain` also turns off `programs.forks` (processes are forks of one that has imported everything),
`runs.may_fork` (torchrun's ranks are too), and the fixture `plans_once`.
"""

import fcntl
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import pickle
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock


def install(folder: Path) -> None:
    """Install the replacements in this process and its forks, which share what they learn about
    models in `folder`."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # tests kill processes; only a machine crash loses what was written
    os.fsync = lambda file: None
    importlib.metadata.version = functools.cache(
        importlib.metadata.version
    )  # every run calls it, and it parses package metadata
    # The first call compiles 800 regular expressions; without this one, every fork would make it.
    get_checkpoint_conversion_mapping("llama")
    # For its log, a rendezvous gets the source of every frame from `inspect`, which searches all
    # imported modules.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    _cache_tensor_metas()
    _share_measurements(folder / "shapes")
    _share_findings(folder / "findings")


def _cache_tensor_metas() -> None:
    """Cache result shapes of DTensor operators, which are the same on every mesh.

    DTensor runs every operator on fake tensors once per mesh, and every test has a new mesh.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._sharding_prop import ShardingPropagator, _are_we_tracing
    from torch.utils._pytree import tree_map_only

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    known = {}

    def propagate_once(propagator, schema):
        if _are_we_tracing():
            return propagate(propagator, schema)
        arguments = schema.args_schema, schema.kwargs_schema
        is_spec = lambda value: isinstance(value, DTensorSpec)  # noqa: E731
        key = (
            schema.op,
            repr(
                tree_map_only(
                    DTensorSpec, lambda spec: spec.tensor_meta, arguments, is_leaf=is_spec
                )
            ),
        )
        if key not in known:
            known[key] = propagate(propagator, schema)
        return known[key]

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate_once


def _share_measurements(folder: Path) -> None:
    """Measure the shape of a model once for all test processes; every rank of a run needs it.

    Tests of the measuring itself have imported the function before.
    """
    from ithaka.trace import measure as module

    measure = module.measure_model
    folder.mkdir(parents=True, exist_ok=True)

    def measure_once(values, source):
        name = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return _read_or_write(folder / name, lambda: measure(values, source))

    module.measure_model = measure_once


# Attributes of configurations and modules.
IGNORED_BY_PROBES = (
    "vocab_size",
    "padding_idx",
    "(bos|eos|pad)_token_id",
    "dtype",
    "tie_word_embeddings",
    "training",
)
IGNORED_BY_PROBES += (
    "architectures",
    "transformers_version",
    "_is_hf_initialized",
    "_attn_implementation_internal",
)
LIBRARIES = ("ithaka", "torch", "transformers", "peft", "models")  # and tests/models.py
_findings: dict[str, Any] = {}
_probing = threading.Lock()


def _share_findings(folder: Path) -> None:
    """Probe equal models once for all test processes: every rank of every case builds one, and a
    probe takes 0.5 s.

    The last third of a probe only checks the findings, with two layers at once: it runs once for
    models with the same modules, whatever their sizes. Refusals are not shared, nor findings about
    modules that a test defines or changes. A test that changes the probe or what it runs uses the
    fixture `fresh_probes`.
    """
    from ithaka.comm.rank import is_rank_0
    from ithaka.roots import decoder, probe

    folder.mkdir(parents=True, exist_ok=True)

    def probe_once(model, recorder, device):
        key = _describe_model(model, device)
        with _probing:
            if key is None:
                return probe.probe_layers(model, recorder, device)
            if key not in _findings:
                _findings[key] = _read_or_write(
                    folder / key, lambda: _probe(model, recorder, device)
                )
            specs, messages = _findings[key]
        for message in messages if is_rank_0() else ():
            warnings.warn(message, stacklevel=2)
        return list(specs)

    def _probe(model, recorder, device):
        messages: list[str] = []
        warner = types.SimpleNamespace(warn=lambda message, stacklevel: messages.append(message))
        modules = sorted(
            {f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()}
        )
        checked = folder / hashlib.sha256(repr(modules).encode()).hexdigest()
        check = (lambda *arguments: None) if checked.exists() else probe._probe_together
        with mock.patch.multiple(
            probe, warnings=warner, is_rank_0=lambda: True, _probe_together=check
        ):
            findings = probe.probe_layers(model, recorder, device), messages
        checked.touch()
        return findings

    decoder.probe_layers = probe_once


def _describe_model(model: Any, device: Any) -> str | None:
    """Return a name for everything that the probe depends on; None if a test defines or changes a
    module."""
    from torch import nn

    from ithaka.roots.layer_kinds import describe_layer
    from ithaka.roots.recorder import SMALL_VOCABULARY

    forwards = []
    for module in model.modules():
        forward = inspect.unwrap(vars(module).get("forward", type(module).forward))
        code = getattr(forward, "__func__", forward)
        if not {type(module).__module__.partition(".")[0], code.__module__.partition(".")[0]} <= {
            *LIBRARIES
        }:
            return None
        forwards.append(f"{code.__module__}.{code.__qualname__}")
    configs = {
        id(config): config
        for module in model.modules()
        if (config := getattr(module, "config", None))
    }
    head = model.get_output_embeddings()
    is_outer = lambda module: module is head or type(module) is nn.Embedding  # noqa: E731 - the probe has small ones
    modules = [
        entry for entry in describe_layer(model) if not is_outer(model.get_submodule(entry[0].name))
    ]
    rows = [
        min(len(module.weight), SMALL_VOCABULARY)
        for module in model.modules()
        if type(module) is nn.Embedding
    ]
    buffers = [(name, buffer.dtype, buffer.shape) for name, buffer in model.named_buffers()]
    packed = [
        name for name, parameter in model.named_parameters() if not parameter.is_floating_point()
    ]
    text = repr(([*map(vars, configs.values())], modules, rows, buffers, packed, forwards, device))
    text = re.sub(f"'({'|'.join(IGNORED_BY_PROBES)})': [^,}}]*", "", text)
    return hashlib.sha256(
        text.replace(model.config.name_or_path or "no path", "").encode()
    ).hexdigest()


def _read_or_write(path: Path, compute: Callable[[], Any]) -> Any:
    """Return the value in a file. If it is empty, compute the value, while other processes wait for
    it."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if content := file.read():
            return pickle.loads(content)
        value = compute()
        file.write(pickle.dumps(value))
        return value
