"""Does the run fit in GPU memory, host memory and disk?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ithaka.config import ConfigError
from ithaka.layout import format_choices
from ithaka.plan.bytes import CHECKPOINT_COPY, Holders, Ledger
from ithaka.plan.search import ADAPTER_RANK, SearchSpace
from ithaka.plan.show import format_bytes
from ithaka.preflight.machine import uses_planner
from ithaka.preflight.run import Run

# The ledger's names.
STORE_HOLDERS = ("layer inputs", "kept attention", "on the way to disk")
OPTIMIZER_HOLDER = "parameters, gradients, optimizer"


def drop_reserve(holders: Holders, times: int = 1) -> Holders:
    """Leave out the reserve, which nothing allocates."""
    return {name: times * num_bytes for name, num_bytes in holders.items() if num_bytes and name != "reserve"}


def certain_needs(run: Run, ledger: Ledger | None = None) -> tuple[Holders, Holders]:
    """Bytes per holder that all ranks of a node certainly need in (host memory, disk). Without a GPU, the host also
    holds the device's planned peak."""
    ledger = ledger or run.ledger
    on_device = drop_reserve(ledger.gpu, run.hardware.gpus_per_node) if run.hardware.gpu.name == "CPU" else {}
    return on_device | drop_reserve({**ledger.host, CHECKPOINT_COPY: 0}), drop_reserve(ledger.disk)


def check_fits(run: Run) -> None:
    """Refuse a step or an evaluation that does not fit by the planner's ledger, reserves included. Without the planner,
    refuse only what certainly exceeds host memory or disk."""
    planned = uses_planner(run.config, run.hardware)
    anyway = {"memory.plan=off to try anyway": planned}
    memory, layout = run.config.memory, run.layout
    for tier, holders, available in _exceeded_tiers(run, run.ledger):
        fixes: dict[str, object] = {
            "memory.checkpoint=full": layout.keep_everything,
            "memory.keep_projections=none": layout.keep_projections > layout.keep_everything,
            "memory.offload=host": memory.offload == "none" and tier == "GPU memory",
            "memory.offload=disk": memory.offload == "host" and tier == "host memory",
            "memory.keep_attention=none": layout.keep_attention > layout.keep_projections,
            "memory.offload_optimizer=false": holders.get(OPTIMIZER_HOLDER),
            "a memory.disk_path with more space": tier == "disk",
            "more ranks": not planned and tier == "GPU memory",
            "a shorter data.context": not planned,
        }
        fixes |= _planned_fixes(run) if planned else {}
        raise _does_not_fit(run, f"data.context={run.work.context}", tier, holders, available, fixes | anyway)
    for tier, holders, available in _exceeded_tiers(run, run.evaluation_ledger) if run.longest_evaluation else ():
        fixes = {
            "shorter evaluate.contexts": True,
            f"parallel.cp={run.num_ranks}": layout.cp < run.num_ranks,
            "a smaller parallel.heads_per_stage": layout.heads_per_stage != layout.ulysses,
            "memory.offload_optimizer=true": tier == "GPU memory" and not layout.offload_optimizer,
            "evaluate.every=0 and `ithaka evaluate` after the run": True,
        }
        raise _does_not_fit(
            run, f"evaluate.contexts={run.longest_evaluation}", tier, holders, available, fixes | anyway
        )


def _exceeded_tiers(run: Run, ledger: Ledger) -> Iterator[tuple[str, Holders, int]]:
    """Name, needed bytes by holder, and available bytes of each tier that is too small."""
    planned = uses_planner(run.config, run.hardware)
    host, disk = (ledger.host, ledger.disk) if planned else certain_needs(run, ledger)
    tiers = {
        "GPU memory": (ledger.gpu if planned else {}, ledger.gpu_bytes),
        "host memory": (host, ledger.host_bytes),
        "disk": (disk, ledger.disk_bytes),
    }
    for tier, (holders, available) in tiers.items():
        if sum(holders.values()) > available:
            yield tier, holders, available


def _does_not_fit(
    run: Run, field: str, tier: str, holders: Holders, available: int, fixes: Mapping[str, object]
) -> ConfigError:
    parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in holders.items() if num_bytes)
    per = "GPU" if tier == "GPU memory" else f"node of {run.hardware.gpus_per_node} ranks"
    needed = f"{format_bytes(sum(holders.values()))} of {tier} per {per} ({parts})"
    choices = format_choices(fix for fix, helps in fixes.items() if helps)
    return ConfigError(f"{field} needs {needed}; {format_bytes(available)} available; use {choices}")


def _planned_fixes(run: Run) -> dict[str, bool]:
    """Search with every memory and parallelism setting left to the planner."""
    space = SearchSpace(run.shape, run.hardware)
    if space.fits(run.work):
        return {"the planner's memory and parallel settings (leave them out)": True, "a shorter data.context": True}
    ways = space.ways_to_fit(run.work)
    gpus = f"{ways.hardware.num_gpus} GPUs ({ways.hardware.name})" if ways.hardware else ""
    return {
        f"data.context={ways.context}": ways.context > 0,
        f"an adapter (adapter.rank={ADAPTER_RANK})": ways.adapter,
        gpus: bool(gpus),
    }


def store_host_bytes(run: Run) -> int | None:
    """Host memory that one rank's store may use: its share of what is free. With the disk tier, only what is in flight
    to disk, so that a slow disk slows the run down instead of filling the memory."""
    stored, ranks = sum(run.ledger.host.get(name, 0) for name in STORE_HOLDERS), run.hardware.gpus_per_node
    to_disk = bool(drop_reserve(run.ledger.disk))
    if not stored and not to_disk:
        return None
    share = run.hardware.host_bytes // ranks
    return min(share, stored // ranks) if to_disk else share


def can_save_in_background(run: Run) -> bool:
    """Whether host memory has room for a copy of the saved state on top of everything planned."""
    planned = uses_planner(run.config, run.hardware)
    needed = run.ledger.host_needed if planned else sum(certain_needs(run)[0].values())
    return needed + run.saved_bytes <= run.hardware.host_bytes
