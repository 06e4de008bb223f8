"""FlashAttention 4 kernels are compiled by one process and cached in a folder that only this user
can write to."""

import os
import signal
import subprocess
import sys
import time
import types

import pytest

from ithaka.attention import compiled, kernels
from ithaka.plan.hardware import find_hardware
from ithaka.run import launch, run_files
from runs import adopted, validate

FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_only_this_user_may_write_to_the_cache(root, monkeypatch):
    assert compiled.cache_root() == root and root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o770)
    with pytest.warns(UserWarning, match=f"{root} is writable by others; set {FOLDER}"):
        assert compiled.cache_root() is None
    root.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: root.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert compiled.cache_root() is None


def test_a_folder_that_cannot_be_created_only_warns(root):
    root.write_text("a file")
    with pytest.warns(UserWarning, match="compiled in every process: .* cannot be written"):
        assert compiled.cache_root() is None


def test_helpers_compile_what_is_missing_and_ranks_wait_for_them(root):
    """One of three helpers fails: it is tried again, and no rank waits for it forever."""
    go = root / "go"
    program = (
        f"import os, time; go = lambda: os.path.exists({str(go)!r}) or time.sleep(0.02); "
        f"work = lambda n: (any(go() for _ in range(3000)), open({str(root)!r} + f'/made-{{n}}', "
        "'w'), 1 // n); work"
    )
    helpers = compiled.start_helpers("H200", program, [(0,), (1,), (2,)])
    assert len(helpers) == 3 and not list(root.glob("made-*"))
    go.touch()
    compiled.wait_for_helpers(root)
    assert len(list(root.glob("made-*"))) == 3 and len(list(root.glob("*.done"))) == 2
    assert [helper.wait() for helper in helpers] == [1, 0, 0]
    again, other_gpu = (
        compiled.start_helpers(gpu, program, [(0,), (1,)]) for gpu in ("H200", "B200")
    )
    assert (len(again), len(other_gpu)) == (1, 2)
    for helper in (*again, *other_gpu):
        helper.wait()


def test_helpers_do_not_wait_for_each_other(root):
    program = (
        "import ithaka.attention.compiled as c; wait = lambda: "
        "c.wait_for_helpers(c.cache_root()); wait"
    )
    start = time.monotonic()
    (helper,) = compiled.start_helpers("H200", program, [()])
    assert helper.wait() == 0 and time.monotonic() - start < 60


def test_a_run_continues_without_helpers(root, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(compiled.subprocess, "Popen", refuse)
    with pytest.warns(UserWarning, match="1 of 1 could not start .*; ranks compile"):
        assert compiled.start_helpers("H200", "print", [(0,)]) == []
    monkeypatch.setattr(
        compiled.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available"))
    )
    with pytest.warns(UserWarning, match="cannot be written .No locks"):
        assert compiled.start_helpers("H200", "print", [(0,)]) == []


def test_ranks_and_helpers_stop_at_the_time_limit(root, monkeypatch):
    """If a helper hangs, ranks stop waiting for it, and it is killed."""
    (helper,) = compiled.start_helpers("H200", "__import__('time').sleep", [(30,)])
    monkeypatch.setattr(compiled, "WAIT_S", 0.2)
    start = time.monotonic()
    compiled.wait_for_helpers(root)
    assert 0.1 < time.monotonic() - start < 10
    helper.kill()
    monkeypatch.setattr(compiled, "WAIT_S", 1)
    (helper,) = compiled.start_helpers("B200", "__import__('time').sleep", [(30,)])
    assert helper.wait() == -signal.SIGALRM


def test_caches_are_on_disk_even_if_another_library_imported_the_package(root, monkeypatch):
    """The package reads its environment variables on import, which may have happened before
    ours."""

    class Cache(dict):
        def __init__(self, folder=None):
            self.folder = folder

    def forward():
        return

    forward.compile_cache = Cache()
    interface = types.SimpleNamespace(_flash_attn_fwd=forward, other=1, _get_device_arch=lambda: 90)
    utils = types.SimpleNamespace(JITCache=Cache, JITPersistentCache=Cache)
    package = types.ModuleType("flash_attn.cute")
    package.interface = interface
    package.cache_utils = utils
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    folders = []
    for version in ("1", "2"):
        monkeypatch.setattr(compiled, "versions", lambda version=version: version)
        assert compiled.import_fa4.__wrapped__() is interface
        folders.append(forward.compile_cache.folder)
    assert all(
        folder.name == "_flash_attn_fwd" and folder.parent.name.startswith("sm90-")
        for folder in folders
    )
    assert folders[0] != folders[1]


@pytest.mark.slow
def test_helpers_start_before_slow_imports_and_checks(tmp_path, monkeypatch):
    """Importing transformers takes seconds, during which the helpers compile."""
    script = "import sys, ithaka.run.road; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    events = []
    monkeypatch.setattr(launch, "num_gpus", lambda: 1)
    monkeypatch.setattr(kernels, "compile_ahead", lambda *kernel: events.append(kernel))
    monkeypatch.setattr(run_files, "check_inputs", lambda run: events.append("inputs") or 0)
    validate(adopted(run_dir=tmp_path / "run").config, hardware=find_hardware("H200"))
    assert [event[0] if event != "inputs" else event for event in events] == [
        "H200-141GB",
        "inputs",
    ]
