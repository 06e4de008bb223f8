"""Options, shared fixtures and skips. torch is imported late: the xdist controller does not need
it."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_CONFIG_HOME"] = os.devnull  # plans would use the rates that `ithaka selftest` saved
# TRL would import it, which takes a second
os.environ.setdefault("DISABLE_MLFLOW_INTEGRATION", "TRUE")

import pytest

import replacements
from programs import PLAIN, PRELOAD, fork_from_here

gc.disable()  # until collection ends: imports make millions of objects and no garbage


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="Also run the tests marked `slow`; takes half an hour."
    )
    parser.addoption(
        "--plain", action="store_true", help="Run without the replacements of replacements.py."
    )


def pytest_configure(config):
    if config.getoption("--plain"):
        os.environ[PLAIN] = "1"  # also for the processes that tests start


OPTIONAL = {
    "PIL",
    "accelerate",
    "bitsandbytes",
    "datasets",
    "diffusers",
    "hypothesis",
    "peft",
    "torchao",
    "trl",
}


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path)


class Module(pytest.Module):
    """A test module that is skipped if it, or a helper that it imports, needs a missing optional
    package."""

    def _getobj(self):
        try:
            return super()._getobj()
        except Exception as error:
            if missing := next(filter(None, map(_missing_package, _causes(error))), None):
                pytest.skip(
                    f"{missing} is not installed; pip install -e '.[dev]'", allow_module_level=True
                )
            raise


def _causes(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _missing_package(error):
    package = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0]
    return package if package in OPTIONAL else None


def pytest_collection_modifyitems(config, items):
    """Skip tests that cannot run here. Unmarked tests in tests/gpu also run on a CPU, with fewer
    and smaller cases."""
    import torch

    reasons = {}
    if not config.getoption("--slow"):
        reasons["slow"] = "slow; run with --slow"
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
        if not config.getoption("--slow"):
            reasons["slow_on_cpu"] = "slow on a CPU; run with --slow"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Exempt imported modules from garbage collection: each pass would traverse all of torch and
    transformers."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def processes(tmp_path_factory, pytestconfig):
    """Set up forking before any test starts threads."""
    import torch

    if pytestconfig.getoption("--plain"):
        return
    folder = tmp_path_factory.getbasetemp()
    replacements.install(
        (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "learned"
    )
    if torch.cuda.is_available():
        # With flash-attn-4 installed, importing transformers initializes CUDA, which forked
        # processes then cannot use.
        PRELOAD.clear()
    else:
        fork_from_here()


@pytest.fixture(scope="session")
def device():
    """The GPU, or the CPU if there is none."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def destroy_process_group():
    """Destroy the process group that a mesh or a failed run leaves behind."""
    from ithaka.comm.mesh import end_process_group

    yield
    end_process_group()


@pytest.fixture(autouse=True)
def restore_default_dtype():
    """Restore the default dtype: transformers changes it while it makes a model, and ranks may be
    threads here."""
    import torch

    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def empty_gpu_cache():
    """Free cached GPU memory: several test processes share the GPU."""
    import torch

    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def ranks():
    from ranks import Ranks

    group = Ranks(4)
    yield group
    group.close()


SEARCHES = (
    "choose",
    "longest_context",
    "smallest_machine",
    "smallest_capacity",
    "adapter_that_fits",
)


@pytest.fixture(scope="module")
def plans_once(pytestconfig):
    """Cache plans within a module: tests request the same ones repeatedly, and planning is
    deterministic."""
    from ithaka.plan.search import SearchSpace

    with pytest.MonkeyPatch.context() as patch:
        for name in () if pytestconfig.getoption("--plain") else SEARCHES:
            patch.setattr(SearchSpace, name, _call_once(name, getattr(SearchSpace, name)))
        yield


@pytest.fixture(autouse=True)
def estimates_plans(request, monkeypatch, tmp_path_factory):
    """Plans of most tests are not traced, which would take seconds; those with `traces_plans`
    are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    if "traces_plans" not in request.fixturenames:
        monkeypatch.setattr("ithaka.trace.shapes._trace", lambda config, plan: None)


@pytest.fixture
def traces_plans():
    """Trace the plans of this test."""


@pytest.fixture
def fresh_probes(monkeypatch):
    """Probe every model: the test changes the probe, or what it runs. See replacements.py."""
    from ithaka.roots import decoder, probe

    monkeypatch.setattr(decoder, "probe_layers", probe.probe_layers)


_results = {}


def _call_once(name, method):
    def call(space, *arguments):
        key = name, space.shape, space.hardware, repr(sorted(space.fixed.items())), arguments
        if key not in _results:
            _results[key] = method(space, *arguments)
        return _results[key]

    return call


@pytest.fixture
def fa4(monkeypatch):
    """Back the kernel fa4 by plain PyTorch on a CPU, and fill uninitialized memory with NaN."""
    from dataclasses import replace

    import torch

    import fake_fa4
    from ithaka.attention import kernels

    cpu, real = (kernels.KERNELS[name] for name in ("cpu", "fa4"))
    anywhere = replace(
        real, device="any", dtypes=cpu.dtypes, capabilities=(), check_installed=cpu.check_installed
    )
    monkeypatch.setitem(kernels.KERNELS, "fa4", anywhere)
    monkeypatch.setattr(kernels, "_import_fa4", lambda: fake_fa4)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def quiet_transformers():
    """Silence transformers, which warns about the rope parameters of tiny configurations."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)
