"""What PyTorch's CPU allocator gave out and took back, as its profiler saw it."""

from dataclasses import dataclass

from torch._C._profiler import _EventType
from torch.profiler import profile


@dataclass(frozen=True)
class Allocation:
    address: int
    num_bytes: int
    start_ns: int
    stop_ns: int  # END where it was still out when the profiler stopped


END = 2**62


def cpu_allocations(profiler: profile) -> list[Allocation]:
    """Every allocation made while `profiler` (with profile_memory) ran."""
    out: dict[int, tuple[int, int]] = {}  # address: (bytes, start)
    done: list[Allocation] = []
    for at_ns, address, num_bytes in _events(profiler):
        if num_bytes > 0:
            out[address] = (num_bytes, at_ns)
        elif address in out:
            done.append(Allocation(address, *out.pop(address), at_ns))
    done += [Allocation(address, *entry, END) for address, entry in out.items()]
    return sorted(done, key=lambda one: one.start_ns)


def _events(profiler: profile) -> list[tuple[int, int, int]]:
    assert profiler.profiler is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    found, todo = [], list(roots)
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found, key=lambda entry: entry[0])
