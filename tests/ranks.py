"""Rank processes that serve many tests: they start once, with a fresh process group per test."""

import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from programs import forks


class Ranks:
    """`run(n, f, *args)` calls f(*args) on n ranks at once and returns the results by rank."""

    def __init__(self, size: int, backend: str = "gloo", **environment: str) -> None:
        self._size = size
        self._backend = backend
        self._environment = environment
        self._fork()

    def _fork(self) -> None:
        context = forks()
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            args = theirs, self._backend, self._environment
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, num_ranks: int, function: Callable, *args: Any, timeout_s: float = 300
    ) -> list[Any]:
        with tempfile.TemporaryDirectory() as directory:
            self.start(num_ranks, Path(directory), function, *args)
            results = [self._receive(rank, timeout_s) for rank in range(num_ranks)]
        failures = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error]
        assert not failures, "\n".join(failures)
        return [value for value, _ in results]

    def _receive(self, rank: int, timeout_s: float) -> Any:
        try:
            if self._pipes[rank].poll(timeout_s):
                return self._pipes[rank].recv()
            problem = f"did not answer in {timeout_s} s"
        except EOFError:
            self._processes[rank].join()
            problem = f"exited with code {self._processes[rank].exitcode}"
        self.close()
        self._fork()  # for the tests that follow
        raise RuntimeError(f"rank {rank} {problem}")

    def start(self, num_ranks: int, directory: Path, function: Callable, *args: Any) -> None:
        """Like `run`, without waiting for the results; the ranks rendezvous in `directory`."""
        for rank in range(num_ranks):
            self._pipes[rank].send((function, args, rank, num_ranks, directory / "store"))

    def dead(self) -> list[int]:
        return [
            rank for rank, process in enumerate(self._processes) if process.exitcode is not None
        ]

    def close(self) -> None:
        """Kill all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, backend: str, environment: dict[str, str]) -> None:
    os.environ |= environment
    # collecting would traverse all imported modules and copy the pages shared with other processes
    gc.freeze()
    torch.set_num_threads(1)
    while True:
        function, args, rank, num_ranks, store = pipe.recv()
        try:
            dist.init_process_group(
                backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks
            )
            dist.barrier()  # a rank that returns early would disconnect from those still connecting
            answer = (function(*args), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            pipe.send(answer)
        except Exception:  # the result cannot be pickled
            pipe.send((None, traceback.format_exc()))
