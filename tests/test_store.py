"""The store returns tensors unchanged from every tier, stays within its budgets, and frees memory
safely."""

import errno
import gc
import os
import random
import signal
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaka.blocks.tiles import tile_slices
from ithaka.layer import slabs
from ithaka.layer import store as store_module
from ithaka.layer.slabs import Slab, StoreError
from ithaka.layer.store import Store
from programs import Program

TIERS = ("device", "host", "disk")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
SHAPES = ((7, 3), (1, 1), (5,), (0, 4), (3, 0, 2), (2, 9, 3, 4))


def numbers(shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 120, shape, generator=generator).to(dtype)


def wait_until(condition, timeout_s=60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def keep_and_overwrite(store: Store, tensor: torch.Tensor, tier: str):
    """Keep a tensor and then overwrite the source, as happens on a GPU when its memory is
    reused."""
    source = tensor.clone()
    handle = store.keep(source, tier)
    handle.release_source()
    if tier != "device":
        source.fill_(77)
    return handle


def assert_store_error(error: StoreError, tier: str, *named: str, fix: str) -> None:
    """Check that the error is of `tier` and that its message contains all of `named` before the
    fix."""
    problem, separator, offer = str(error).partition("; ")
    assert error.tier == tier and tier in problem and separator, error
    assert all(text in problem for text in named) and fix in offer, error


def is_empty(store: Store) -> bool:
    return (
        store.pool.busy_bytes == 0 and store.disk.busy_bytes == 0 and store.pool.num_expected == 0
    )


# Values


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_and_dtype_is_returned_exactly(tier, dtype):
    store = Store()
    handles = [
        keep_and_overwrite(store, numbers(shape, dtype, i), tier) for i, shape in enumerate(SHAPES)
    ]
    for i, (shape, handle) in enumerate(zip(SHAPES, handles, strict=True)):
        for _ in range(2):
            back = handle.fetch()
            assert back.dtype == dtype and torch.equal(back, numbers(shape, dtype, i))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("step", [1, 3, 100, None])
def test_tiles_of_rows_add_up_to_the_tensor(tier, hold, step):
    x = numbers((7, 5))
    slices = tile_slices(7, step)
    handle = keep_and_overwrite(Store(), x, tier)
    for _ in range(3):
        tiles = list(handle.tiles(slices, hold=hold))
        assert [len(tile) for tile in tiles] == [len(x[rows]) for rows in slices]
        assert torch.equal(torch.cat(tiles), x)
    assert torch.equal(handle.fetch(), x)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("step", [1, 4, None])
def test_tiles_along_the_second_dim_add_up_to_the_tensor(tier, step):
    x = numbers((2, 9, 3, 4))
    handle = keep_and_overwrite(Store(), x, tier)
    assert torch.equal(torch.cat(list(handle.tiles(tile_slices(9, step), dim=1)), 1), x)


@pytest.mark.parametrize("tier", TIERS)
def test_an_empty_tensor_has_no_tiles(tier):
    handle = keep_and_overwrite(Store(), numbers((0, 4)), tier)
    assert list(handle.tiles(tile_slices(0, None), hold=True)) == []


@pytest.mark.parametrize("tier", TIERS)
def test_views_are_kept_with_their_own_values(tier):
    x = numbers((6, 8))
    for view in (x.t(), x[1::2, 3:], x[2]):
        assert torch.equal(keep_and_overwrite(Store(), view, tier).fetch(), view)


@pytest.mark.parametrize("tier", TIERS)
def test_a_kept_tensor_is_copied_once(tier, monkeypatch):
    handle = keep_and_overwrite(Store(), numbers((8, 2)), tier)
    list(handle.tiles(tile_slices(8, 3), hold=True))
    if tier != "device":
        monkeypatch.setattr(type(handle), "_copy_in", None)
    assert torch.equal(torch.cat(list(handle.tiles(tile_slices(8, 2)))), numbers((8, 2)))


@pytest.mark.parametrize("tier", ("host", "disk"))
def test_tiles_may_be_abandoned(tier):
    store = Store()
    handle = keep_and_overwrite(store, numbers((8, 2)), tier)
    next(handle.tiles(tile_slices(8, 3), hold=True))
    assert torch.equal(handle.fetch(), numbers((8, 2)))
    del handle
    wait_until(lambda: is_empty(store))


# Handles


@pytest.mark.parametrize("tier", ("host", "disk"))
@pytest.mark.parametrize("use", ["nothing", "read_ahead", "prefetch", "fetch", "tiles"])
def test_deleting_a_handle_frees_everything(tier, use):
    store = Store()
    for _ in range(2):
        handle = store.keep(numbers((9, 3)), tier)
        if use != "nothing":
            handle.release_source()
            work = getattr(handle, use)
            list(work(tile_slices(9, 4))) if use == "tiles" else work()
            del work
        del handle
        wait_until(lambda: is_empty(store))
    one_to_write_and_one_to_read = 2
    assert store.pool.used_bytes <= one_to_write_and_one_to_read * numbers((9, 3)).nbytes


def test_fetch_after_prefetch_returns_the_tensor():
    handle = keep_and_overwrite(Store(), numbers((4, 4)), "host")
    handle.prefetch()
    handle.prefetch()
    assert torch.equal(handle.fetch(), numbers((4, 4))) and torch.equal(
        handle.fetch(), numbers((4, 4))
    )


def one_step(store: Store, tier: str, length: int) -> None:
    x = numbers((length, 4))
    handles = [keep_and_overwrite(store, x + i, tier) for i in range(6)]
    for i in reversed(range(6)):
        assert torch.equal(handles.pop().fetch(), x + i)
    wait_until(lambda: is_empty(store))


@pytest.mark.parametrize("tier", ("host", "disk"))
def test_slabs_and_disk_space_are_reused(tier):
    store = Store()
    one_step(store, tier, 50)
    used = store.disk.used_bytes
    slabs = {id(s) for slabs in store.pool._slabs.values() for s in slabs}
    for _ in range(4):
        one_step(store, tier, 50)
        if tier == "host":
            assert {id(s) for slabs in store.pool._slabs.values() for s in slabs} == slabs
    assert store.disk.used_bytes == used
    assert store.pool.used_bytes <= (6 + 1) * 50 * 4 * 4, "six being written and one being read"


@pytest.mark.parametrize("tier", ("host", "disk"))
def test_steps_of_changing_length_do_not_accumulate_memory(tier):
    store = Store()
    for length in range(60, 20, -1):
        one_step(store, tier, length)
    assert store.pool.peak_bytes <= 2 * 6 * 60 * 16 and store.disk.used_bytes <= 6 * 60 * 16


@pytest.fixture
def made(monkeypatch):
    """Record the sizes of new slabs."""
    sizes = []
    make = Slab.__init__
    monkeypatch.setattr(
        Slab, "__init__", lambda self, n, pin: sizes.append(n) or make(self, n, pin)
    )
    return sizes


def test_the_slabs_of_the_longest_sequence_serve_all_shorter_ones(made):
    """Four layers keep tensors of three sizes and, in backward, briefly one more."""
    store = Store()
    sizes = (32, 48, 3)
    lengths = (64, 80, 64, 80, 79, 7, 1, 41)
    num_made = []
    used_bytes = []
    for length in lengths:
        layers = [
            [keep_and_overwrite(store, numbers((length, size), seed=i), "host") for size in sizes]
            for i in range(4)
        ]
        for i in reversed(range(4)):
            extra = store.keep(numbers((length, 32)), "host")
            for size, handle in zip(sizes, layers.pop(), strict=True):
                assert torch.equal(handle.fetch(), numbers((length, size), seed=i))
            del extra, handle
        assert is_empty(store)
        num_made.append(len(made))
        used_bytes.append(store.pool.used_bytes)
    assert num_made == [13, *[26] * 7]
    assert used_bytes == [4 * 64 * (4 * 83 + 32), *[4 * 80 * (4 * 83 + 32)] * 7]


@pytest.mark.parametrize("num_short", [1, 2, 4, 5])
def test_several_short_sequences_at_once_fit_where_a_long_one_did(num_short, made):
    store = Store(host_bytes=6 * 1000 * 16)
    one_step(store, "host", 1000)
    made.clear()
    length = 1000 // num_short
    handles = [
        keep_and_overwrite(store, numbers((length, 4), seed=i), "host")
        for i in range(6 * num_short)
    ]
    for i in reversed(range(6 * num_short)):
        assert torch.equal(handles.pop().fetch(), numbers((length, 4), seed=i))
    one_step(store, "host", 1000)
    assert made == []


def test_a_pass_uses_memory_that_was_pinned_ahead_and_waits_for_it(made, monkeypatch):
    store = Store()
    may_make = threading.Event()
    make = Slab.__init__
    monkeypatch.setattr(
        Slab, "__init__", lambda self, n, pin: may_make.wait() and make(self, n, pin)
    )
    store.pin_ahead(16 * 50, 6)
    threading.Timer(0.05, may_make.set).start()
    one_step(store, "host", 50)
    assert made == [16 * 50] * 6 and store.pool.waited_for_slabs_s > 0
    one_step(store, "host", 20)
    assert made == [16 * 50] * 6
    one_step(store, "host", 60)  # longer: the slabs are replaced
    assert made[6:] == [16 * 60] * 6 and store.pool.used_bytes == 6 * 16 * 60


@pytest.mark.parametrize(("budget", "refused"), [(2 * 800, False), (6 * 800, True)])
def test_pinning_ahead_stops_at_the_budget_or_if_it_is_refused(budget, refused, made, monkeypatch):
    store = Store(host_bytes=budget)
    make = Slab.__init__

    def refuse(self, num_bytes, pin):
        if refused:
            raise StoreError("host", "cannot pin")
        make(self, num_bytes, pin)

    monkeypatch.setattr(Slab, "__init__", refuse)
    store.pin_ahead(800, 6)
    with pytest.raises(StoreError, match="cannot pin" if refused else "limit of 1600"):
        one_step(store, "host", 50)
    assert made == ([] if refused else [800] * 2)


def test_memory_that_is_being_pinned_counts_against_the_budget(monkeypatch):
    store = Store(host_bytes=1600)
    make = Slab.__init__
    is_making = threading.Event()
    may_make = threading.Event()

    def make_later(self, num_bytes, pin):
        if num_bytes == 800:
            is_making.set()
            may_make.wait()
        make(self, num_bytes, pin)

    monkeypatch.setattr(Slab, "__init__", make_later)
    store.pin_ahead(800, 2)
    assert is_making.wait(60)
    assert store.pool.try_acquire(900) is None and store.pool.try_acquire(700) is not None
    may_make.set()
    wait_until(lambda: store.pool.used_bytes == 800 + 700)


class Cudart:
    """cudaHostRegister and cudaHostUnregister without a GPU; `status` is what the first returns."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered = dict[int, int]()
        self.calls = list[str]()
        self.resident_bytes = 0  # resident memory of this process at the last pinning

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.registered |= {address: num_bytes} if self.status == 0 else {}
        self.resident_bytes = resident_bytes()
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        self.calls.append("unpin")
        return 0


@pytest.mark.parametrize("num_threads", [1, 8])
def test_pages_are_provided_before_they_are_pinned_and_unpinned_after_the_last_copy(
    num_threads, monkeypatch
):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(slabs, "MIN_THREADED_BYTES", 0 if num_threads > 1 else 2**26)
    num_bytes = 2**24 + 5
    before = resident_bytes()
    slab = Slab(num_bytes, pin=True)
    assert cudart.registered == {slab.bytes.data_ptr(): num_bytes}
    assert cudart.resident_bytes - before > 0.9 * num_bytes
    slab.last_copy = SimpleNamespace(synchronize=lambda: cudart.calls.append("wait for the copy"))
    del slab
    assert not cudart.registered and cudart.calls == ["wait for the copy", "unpin"]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_error_of_pinning_names_the_limit(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(status=2))
    with pytest.raises(StoreError) as caught:
        Slab(64, pin=True)
    assert_store_error(caught.value, "host", "64 bytes", "CUDA error 2", fix="RLIMIT_MEMLOCK")


def test_tensors_that_share_a_slab_are_aligned_for_every_dtype():
    slab = Slab(64, pin=False)
    assert [taken and taken.where for taken in map(slab.take, (3, 8, 33, 32))] == [
        slice(0, 3),
        slice(16, 24),
        None,
        slice(32, 64),
    ]


def test_registering_a_layer_returns_the_layer_below():
    class Saved:
        pass

    store = Store()
    saved = [Saved() for _ in range(2)]
    assert store.register_layer(saved[0])() is None
    below = store.register_layer(saved[1])
    assert below() is saved[0]
    del saved[0]
    assert below() is None, "the store must not keep saved activations alive"


# Budgets


def test_an_exceeded_host_budget_is_an_error_with_a_fix():
    store = Store(host_bytes=100)
    first = store.keep(numbers((20,)), "host")
    with pytest.raises(StoreError) as error:
        store.keep(numbers((6,)), "host")
    assert_store_error(error.value, "host", "24", "80", "100", fix="memory.offload=disk")
    second = store.keep(numbers((5,)), "host")
    del first, second
    # free slabs are dropped
    assert torch.equal(store.keep(numbers((25,)), "host").fetch(), numbers((25,)))


def test_a_full_disk_is_an_error_with_a_fix(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store(disk_path=tmp_path)
    first = keep_and_overwrite(store, numbers((5,)), "disk")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError) as error:
        store.keep(numbers((6,)), "disk")
    named = ("24", str(tmp_path), "20", "No space left on device")
    assert_store_error(error.value, "disk", *named, fix="memory.disk_path")
    del error
    assert torch.equal(first.fetch(), numbers((5,)))
    del first
    gc.collect()
    wait_until(lambda: is_empty(store))


def test_a_missing_directory_is_an_error_with_a_fix(tmp_path):
    with pytest.raises(StoreError) as error:
        Store(disk_path=tmp_path / "gone").keep(numbers((5,)), "disk")
    assert_store_error(
        error.value, "disk", "gone", "No such file or directory", fix="memory.disk_path"
    )


# The disk writer


@pytest.fixture
def slow_disk(monkeypatch):
    """Make writes slower than `keep`."""
    write = store_module.DiskFile.write

    def slowly(self, data, offset):
        time.sleep(0.003)
        write(self, data, offset)

    monkeypatch.setattr(store_module.DiskFile, "write", slowly)


@pytest.mark.parametrize("slabs", [1, 2, 3])
def test_keeping_waits_for_a_slow_disk(slow_disk, slabs):
    x = numbers((64, 4))
    store = Store(host_bytes=slabs * x.nbytes)
    handles = [keep_and_overwrite(store, x + i, "disk") for i in range(30)]
    assert store.pool.peak_bytes <= slabs * x.nbytes
    for i in reversed(range(30)):
        assert torch.equal(handles.pop().fetch(), x + i)
    wait_until(lambda: is_empty(store))


def test_other_sizes_wait_for_a_slow_disk_too(slow_disk):
    store = Store(host_bytes=100 * 4)
    sizes = [100, 90, 100, 3, 50, 50, 100, 1]
    handles = [keep_and_overwrite(store, numbers((n,), seed=n), "disk") for n in sizes]
    while handles:
        n = sizes.pop()
        assert torch.equal(handles.pop().fetch(), numbers((n,), seed=n))


def test_reading_ahead_uses_only_free_memory():
    x = numbers((10,))
    store = Store(host_bytes=2 * x.nbytes)
    handles = [keep_and_overwrite(store, x + i, "disk") for i in range(4)]
    wait_until(lambda: store.pool.num_expected == 0)
    for handle in reversed(handles):
        handle.read_ahead()
    assert [handle._reading is not None for handle in handles] == [False, False, True, True]
    for i in reversed(range(4)):
        assert torch.equal(handles.pop().fetch(), x + i)


@pytest.mark.parametrize("what", ["pwrite", "preadv"])
def test_a_disk_failure_is_raised_at_the_next_use(monkeypatch, what):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = Store()
    monkeypatch.setattr(os, what, broken)
    handle = keep_and_overwrite(store, numbers((5,)), "disk")
    verb = {"pwrite": "write", "preadv": "read"}[what]
    uses = [handle.fetch, lambda: store.keep(numbers((5,)), "disk")]
    for use in uses if what == "pwrite" else uses[:1]:
        with pytest.raises(StoreError) as error:
            use()
        assert_store_error(
            error.value, "disk", verb, "20 bytes", "Input/output error", fix="memory."
        )
    del handle, use, uses, error
    gc.collect()
    wait_until(lambda: is_empty(store))


def test_a_failing_writer_wakes_waiting_threads(monkeypatch):
    def broken(*_):
        time.sleep(0.01)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", broken)
    store = Store(host_bytes=2 * 40)
    handles = []
    with pytest.raises(StoreError, match="write 40 bytes.*No space left"):
        for i in range(20):
            handles.append(keep_and_overwrite(store, numbers((10,), seed=i), "disk"))


def test_disk_space_is_not_reused_while_it_is_written(monkeypatch):
    write = store_module.DiskFile.write
    delays_s = [0.1]

    def first_slowly(self, data, offset):
        time.sleep(delays_s.pop() if delays_s else 0)
        write(self, data, offset)

    monkeypatch.setattr(store_module.DiskFile, "write", first_slowly)
    store = Store()
    keep_and_overwrite(store, numbers((5,), seed=1), "disk")  # deleted at once
    second = keep_and_overwrite(store, numbers((5,), seed=2), "disk")
    wait_until(lambda: store.pool.num_expected == 0)
    assert torch.equal(second.fetch(), numbers((5,), seed=2))


def test_handles_may_be_deleted_anywhere(slow_disk):
    """Handles die on other threads, in reference cycles, and under the pool's lock while the writer
    needs it."""
    gc.freeze()  # otherwise every collection would traverse the objects of other tests
    x = numbers((40,))
    store = Store(host_bytes=3 * x.nbytes)
    failures = []

    def keep_and_lose(seed):
        choose = random.Random(seed)
        try:
            for i in range(15):
                loop = [
                    keep_and_overwrite(
                        store, x + i, choose.choice(("host", "disk")) if seed == 0 else "disk"
                    )
                ]
                if choose.random() < 0.3:
                    assert torch.equal(loop[0].fetch(), x + i)
                loop.append(loop)
                del loop
                if choose.random() < 0.5:
                    gc.collect()
        except StoreError:
            pass  # cycles that are not collected yet may use the full budget
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=keep_and_lose, args=(seed,), daemon=True) for seed in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    assert failures == []
    gc.collect()
    wait_until(lambda: is_empty(store))


def test_deleting_a_handle_under_the_lock_does_not_block(slow_disk):
    store = Store()
    handle = keep_and_overwrite(store, numbers((5,)), "disk")
    done = threading.Event()

    def lose():
        nonlocal handle
        with store.pool._changed:  # like garbage collection inside acquire()
            del handle
        done.set()

    threading.Thread(target=lose, daemon=True).start()
    assert done.wait(60), "deadlock: waits for a writer that waits for the lock"
    wait_until(lambda: is_empty(store))


# Files


def keep_on_disk(folder):
    store = Store(disk_path=folder)
    handles = [store.keep(torch.ones(10_000), "disk") for _ in range(5)]
    assert handles[0].fetch().sum() == 10_000
    print("kept", flush=True)
    time.sleep(600)


def test_no_file_is_left_after_kill(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    program = Program(tmp_path, keep_on_disk, folder)
    wait_until(lambda: program.stdout == "kept\n" or program.poll() is not None)
    assert program.poll() is None, program.stderr
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    assert list(folder.iterdir()) == []


def test_the_file_is_created_in_disk_path(tmp_path, monkeypatch):
    made = []
    temporary = tempfile.TemporaryFile
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda dir: made.append(dir) or temporary(dir=dir)
    )
    for store in (Store(disk_path=tmp_path), Store()):
        store.keep(numbers((3,)), "host")
        store.keep(numbers((3,)), "disk").fetch()
    assert [str(path) for path in made] == [str(tmp_path), tempfile.gettempdir()]


def test_written_and_read_pages_leave_the_page_cache(monkeypatch, tmp_path):
    """They leave it once they are on disk, because dirty pages cannot be dropped."""
    calls = []
    sync = os.fdatasync
    advise = os.posix_fadvise

    def record(file, call):
        if str(tmp_path) in os.readlink(f"/proc/self/fd/{file}"):  # not a file of another store
            calls.append(call)

    def advised(file, offset, num_bytes, advice):
        record(file, (offset, num_bytes, advice))
        advise(file, offset, num_bytes, advice)

    monkeypatch.setattr(os, "fdatasync", lambda file: record(file, "synced") or sync(file))
    monkeypatch.setattr(os, "posix_fadvise", advised)
    store = Store(disk_path=tmp_path)
    tensor = numbers((1000,))
    handle = store.keep(tensor, "disk")
    handle.release_source()
    assert torch.equal(handle.fetch(), tensor)
    dropped = (0, tensor.nbytes, os.POSIX_FADV_DONTNEED)
    assert calls == ["synced", dropped, dropped]


# Any sequence of operations

MOVES = ("keep", "fetch", "tiles", "hold", "read_ahead", "prefetch", "drop")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 30)), max_size=40), st.integers(3, 6)
)
def test_any_sequence_returns_what_was_kept(moves, slabs):
    """At most one tensor is kept on the host and two on disk, so that even the smallest pool has
    room."""
    store = Store(host_bytes=slabs * 9 * 4 * 4)
    alive = {}
    seed = 0
    for move, number in moves:
        tier = ("host", "disk")[number % 2]
        if move == "keep":
            x = numbers((1 + number % 9, 4), seed=seed)
            key = (tier, seed % 2 if tier == "disk" else 0)
            seed = seed + 1
            alive.pop(key, None)
            alive[key] = (x, keep_and_overwrite(store, x, tier))
        elif alive:
            key = list(alive)[number % len(alive)]
            x, handle = alive[key]
            if move == "drop":
                del alive[key]
            elif move in ("tiles", "hold"):
                tiles = handle.tiles(tile_slices(len(x), 1 + number % 4), hold=move == "hold")
                assert torch.equal(torch.cat(list(tiles)), x)
            elif move == "fetch":
                assert torch.equal(handle.fetch(), x)
            else:
                getattr(handle, move)()
            del handle
    for x, handle in alive.values():
        assert torch.equal(handle.fetch(), x)
    alive.clear()
    handle = None
    wait_until(lambda: is_empty(store))
