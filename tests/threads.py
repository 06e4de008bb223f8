"""Ranks as threads of one process: real exchanges and real FSDP2, even with a single GPU.

PyTorch's threaded process group runs a collective in rank 0's thread, on its current stream,
without synchronizing with the streams of other ranks and FSDP2. `Ordered` makes it wait for them,
and them for it, as NCCL would.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg


class Ordered(multi_threaded_pg.Collective):
    """A collective that runs after all work queued on each rank's current stream, and before all
    work queued later."""

    def __init__(self, world_size: int, collective: Any, pg: Any) -> None:
        super().__init__(world_size, collective, pg)
        self._queued: list[Any] = [None] * world_size
        self._over: Any = None
        self._collective = self
        self._inner = collective

    def join(self, rank: int, data: Any) -> Any:
        if not torch.cuda.is_available():
            self._collective = self._inner
            return super().join(rank, data)
        self._queued[rank] = torch.cuda.current_stream().record_event()
        joined = super().join(rank, data)
        torch.cuda.current_stream().wait_event(self._over)
        return joined

    def work(self, data: Any) -> None:
        """Only rank 0 calls this."""
        for event in self._queued:
            torch.cuda.current_stream().wait_event(event)
        self._inner.work(data)
        self._over = torch.cuda.current_stream().record_event()


def run_on_threads(num_ranks: int, work: Callable[[], Any], timeout_s: float = 300) -> list[Any]:
    """Call work() on `num_ranks` threads, each its own rank, and return the results by rank."""
    values: list[Any] = [None] * num_ranks
    errors: list[BaseException | None] = [None] * num_ranks
    store = dist.HashStore()

    def run(rank: int) -> None:
        # Autograd's thread per device would run the backward of every rank, and block in the first
        # rank's exchange.
        torch.autograd.set_multithreading_enabled(False)
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            values[rank] = work()
        except BaseException as error:
            errors[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    plain = multi_threaded_pg.Collective
    multi_threaded_pg.Collective = Ordered
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
        multi_threaded_pg.Collective = plain
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    failed = [error for error in errors if error is not None]
    if failed:  # once one rank fails, the others end with SystemExit
        raise next((error for error in failed if not isinstance(error, SystemExit)), failed[0])
    if late:
        raise TimeoutError(f"ranks {late} of {num_ranks} did not end in {timeout_s} s")
    return values
