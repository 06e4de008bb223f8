"""Replacements in Python, PyTorch and ithaka that let the tests take minutes instead of an hour.

The suite starts thousands of ranks, meshes and tiny models. Most of its time would go into importing torch, propagating
shapes over yet another mesh and measuring the same model again, which is not what the tests check. Every replacement
returns what the original would, computed once, or leaves out what no test can observe. `pytest --plain` runs without
them, and `make test-all` runs a selection that way, which exposes a replacement that hides an error.

`cached_probes` is for the processes of `ranks.Ranks` and, as the fixture `probes_once`, for tests.

`--plain` also turns off `programs.forks` (processes are forks of one that has imported everything), `runs.may_fork`
(torchrun's ranks are too), and the fixtures `plans_once` and `probes_once`.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from programs import PLAIN


def install(folder: Path) -> None:
    """Install the replacements in this process and its forks, which share measurements of models in `folder`."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    os.fsync = lambda file: None  # tests kill processes; only a machine crash loses what was written
    importlib.metadata.version = functools.cache(
        importlib.metadata.version
    )  # every run calls it, and it parses package metadata
    # The first call compiles 800 regular expressions; without this one, every fork would make it.
    get_checkpoint_conversion_mapping("llama")
    # For its log, a rendezvous gets the source of every frame from `inspect`, which searches all imported modules.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    _cache_tensor_metas()
    _share_measurements(folder)


def _cache_tensor_metas() -> None:
    """Cache result shapes of DTensor operators, which are the same on every mesh.

    DTensor runs every operator on fake tensors once per mesh, and every test has a new mesh.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._sharding_prop import ShardingPropagator, _are_we_tracing
    from torch.utils._pytree import tree_map_only

    propagate, known = ShardingPropagator._propagate_tensor_meta_non_cached, {}

    def propagate_once(propagator, schema):
        if _are_we_tracing():
            return propagate(propagator, schema)
        arguments = schema.args_schema, schema.kwargs_schema
        is_spec = lambda value: isinstance(value, DTensorSpec)  # noqa: E731
        key = schema.op, repr(tree_map_only(DTensorSpec, lambda spec: spec.tensor_meta, arguments, is_leaf=is_spec))
        if key not in known:
            known[key] = propagate(propagator, schema)
        return known[key]

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate_once


def _share_measurements(folder: Path) -> None:
    """Measure the shape of a model once for all test processes; every rank of a run needs it.

    Tests of the measuring itself have imported the function before.
    """
    from ithaka.model import shape as module

    measure = module.measure_model
    folder.mkdir(exist_ok=True)

    def measure_once(values, source):
        name = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        with (folder / name).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks need it at the same time
            file.seek(0)
            if content := file.read():
                return pickle.loads(content)
            shape = measure(values, source)
            file.write(pickle.dumps(shape))
            return shape

    module.measure_model = measure_once


_findings: dict = {}
_probing = threading.Lock()


@contextlib.contextmanager
def cached_probes() -> Iterator[None]:
    """Cache the probe's findings per layer configuration in this process: every model of every case needs them.

    Not for code that changes a layer, or that tests the probe.
    """
    from unittest import mock

    from ithaka.roots import decoder, probe
    from ithaka.weights.adapters import find_decoder

    def probe_once(model, recorder, device):
        layers = tuple(map(probe.describe_layer, find_decoder(model).layers))
        key = type(model), model.config.to_json_string(), layers, device
        with _probing:
            if key not in _findings:
                _findings[key] = probe.probe_layers(model, recorder, device)
            return _findings[key]

    with contextlib.nullcontext() if PLAIN in os.environ else mock.patch.object(decoder, "probe_layers", probe_once):
        yield
