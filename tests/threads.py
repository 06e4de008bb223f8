"""Ranks as threads of one process: real exchanges and real FSDP2, also where there is only one GPU.

PyTorch's threaded process group runs a collective in the thread that comes last, on that thread's current stream. All
threads compute on the device's default stream, so collectives run in order with the computation.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg


def on_threads(num_ranks: int, work: Callable[[], Any], timeout_s: float = 120) -> list[Any]:
    """Calls work() on `num_ranks` threads, each a rank of its own; returns what each returned."""
    values: list[Any] = [None] * num_ranks
    errors: list[BaseException | None] = [None] * num_ranks
    store = dist.HashStore()

    def run(rank: int) -> None:
        # Autograd's own thread per device would run the backward of every rank, and wait in the first one's exchange.
        torch.autograd.set_multithreading_enabled(False)
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            values[rank] = work()
        except BaseException as error:
            errors[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg.ProcessLocalGroup.reset()
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    failed = [error for error in errors if error is not None]
    if failed:
        raise failed[0]
    if late:
        raise TimeoutError(f"ranks {late} of {num_ranks} did not end in {timeout_s} s")
    return values
