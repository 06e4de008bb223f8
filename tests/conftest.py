"""torch is imported late: the process that hands tests out to others has no use for it."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from programs import PRELOAD, fork_from_here

os.fsync = lambda file: None  # tests end processes, and only the end of a machine loses what was written

# Left out unless `--slow` is given (`make test ARGS=--slow`), so that `make test` stays below six minutes: whole runs
# of which others see most, and the largest cases of a grid.
SLOW = (
    "test_a_late_disk",
    "test_a_run_does_without_datasets",
    "test_bench_prints_a_table_or_json",
    "test_ladder_measures_every_rung",
    "test_any_ulysses_and_ring[1-8]",
    "test_a_layer_is_as_high_as_its_ledger[9-3 cp6",
    "test_a_layer_is_as_high_as_its_ledger[8-4 cp4 4 t110 ring4",
    "test_bits_do_not_depend_on_tier_or_overlap[2-2-",
    "test_stages_tiles_and_kept_attention[llama-28",
    "test_memory_is_that_of_a_batch_of_texts_and_a_sequence_not_of_the_file",
    "test_more_memory_never_hurts",
    "test_a_compiled_mlp_gives_the_same_gradients",
    "test_a_failing_rank_ends_the_others_and_gives_its_exit_code[0-",
    "test_an_adapter_is_exported_with_the_positions_it_was_trained_at",
    "test_charts_are_drawn_without_complaints[2",
    "test_every_built_in_model_has_a_plan[q",
    "test_frozen_weights_are_planned",
    "test_only_the_residual_stream_is_rounded_more_often_than_by_autocast[qwen",
    "test_only_the_residual_stream_is_rounded_more_often_than_by_autocast[mistral",
    "test_no_call_beyond_the_index_range_at_16m",
    "test_constants_are_those_fitted",
)


def pytest_addoption(parser):
    parser.addoption("--launchers", action="store_true", help="Run what torchrun and Slurm start too; minutes.")
    parser.addoption("--slow", action="store_true", help="Run the slow tests too; minutes.")


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` need a CUDA device. Others in tests/gpu run on either: on a CPU fewer cases, and small."""
    if not config.getoption("--slow"):
        slow = pytest.mark.skip(reason="slow: --slow")
        for item in items:
            if item.name.startswith(SLOW):
                item.add_marker(slow)
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish():
    """What is imported now stays: a garbage collection would walk through all of torch and transformers each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def processes():
    """Before any test has started threads."""
    import torch

    if torch.cuda.is_available():
        # Where flash-attn-4 is installed, importing transformers asks CUDA for devices, and no fork can use them then.
        PRELOAD.clear()
    else:
        fork_from_here()


@pytest.fixture(scope="session")
def device():
    """The GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A mesh, or a run that failed, leaves its process group behind, and any test may come next."""
    from ithaka.dist.mesh import end_process_group

    yield
    end_process_group()


@pytest.fixture(autouse=True)
def no_device_memory_is_left():
    """Several processes share a GPU, and each would keep what its largest test took."""
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


@pytest.fixture(scope="module")
def plans_once():
    """Tests ask the planner the same again and again, and an answer depends on nothing but the question."""
    from ithaka.plan.search import SearchSpace

    with pytest.MonkeyPatch.context() as patch:
        for name in ("choose", "longest_context"):
            patch.setattr(SearchSpace, name, _remembering(name, getattr(SearchSpace, name)))
        yield


_answers = {}


def _remembering(name, method):
    def ask(space, question):
        key = name, space.shape, space.hardware, repr(sorted(space.fixed.items())), question
        if key not in _answers:
            _answers[key] = method(space, question)
        return _answers[key]

    return ask


@pytest.fixture
def fa4(monkeypatch):
    """The kernel fa4 with plain PyTorch behind it, on a CPU. What nobody writes is NaN."""
    from dataclasses import replace

    import torch

    import fake_fa4
    from ithaka.attention import kernels

    cpu, real = (kernels.KERNELS[name] for name in ("cpu", "fa4"))
    anywhere = replace(real, device="any", dtypes=cpu.dtypes, capabilities=(), check_installed=cpu.check_installed)
    monkeypatch.setitem(kernels.KERNELS, "fa4", anywhere)
    monkeypatch.setattr(kernels, "_import_fa4", lambda: fake_fa4)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
