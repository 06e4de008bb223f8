"""Whether a run fits in GPU memory, host memory and disk, and what would make it fit."""

from collections.abc import Callable

from ithaka.config import ConfigError
from ithaka.config.units import format_bytes, plural
from ithaka.layout import format_choices
from ithaka.plan.bytes import Ledger
from ithaka.plan.search import SearchSpace
from ithaka.run.detect import uses_planner
from ithaka.run.validated import Run, certain_needs


def check_fits(run: Run) -> None:
    """Refuse a step or an evaluation that does not fit by the planner's ledger, reserves included.
    Without the planner, refuse only what certainly exceeds host memory or disk."""
    batch = f" with train.batch={run.work.batch}" if run.work.batch > 1 else ""
    _check_tiers(run, run.ledger, f"data.context={run.work.context}{batch}", _step_fixes)
    if run.longest_evaluation:
        _check_tiers(
            run,
            run.evaluation_ledger,
            f"evaluate.contexts={run.longest_evaluation}",
            _evaluation_fixes,
        )


def _check_tiers(
    run: Run, ledger: Ledger, setting: str, find_fixes: Callable[[Run, str], dict[str, bool]]
) -> None:
    planned = uses_planner(run.config, run.hardware)
    host, disk = (ledger.host, ledger.disk) if planned else certain_needs(run, ledger)
    num_ranks = run.hardware.gpus_per_node
    per_node = f"per node of {plural(num_ranks, 'rank')}"
    tiers = {
        "GPU memory": (ledger.gpu if planned else {}, ledger.gpu_bytes, "per GPU"),
        "host memory": (host, ledger.host_bytes, per_node),
        "disk": (disk, ledger.disk_bytes, per_node),
    }
    for tier, (sizes, available, unit) in tiers.items():
        if (needed := sum(sizes.values())) > available:
            parts = ", ".join(
                f"{name} {format_bytes(num_bytes)}"
                for name, num_bytes in sizes.items()
                if num_bytes
            )
            has_limit = run.config.memory.gpu_gib is not None  # only plans keep to it
            fixes = find_fixes(run, tier) | {
                "a larger memory.gpu_gib": has_limit and tier == "GPU memory",
                "memory.plan=off to try anyway": planned and not has_limit,
            }
            choices = format_choices(fix for fix, helps in fixes.items() if helps)
            problem = f"{setting} needs {format_bytes(needed)} of {tier} {unit} ({parts})"
            raise ConfigError(f"{problem}; {format_bytes(available)} available; use {choices}")


def _step_fixes(run: Run, tier: str) -> dict[str, bool]:
    """Settings, and whether each makes room for a step in `tier`."""
    memory = run.config.memory
    layout = run.layout
    planned = uses_planner(run.config, run.hardware)
    fixes = {
        "a smaller train.batch": run.work.batch > 1,
        "memory.checkpoint=full": layout.keep_everything > 0,
        "memory.keep_projections=none": layout.keep_projections > layout.keep_everything,
        "memory.offload=host": memory.offload == "none" and tier == "GPU memory",
        "memory.offload=disk": memory.offload == "host" and tier == "host memory",
        "memory.keep_attention=none": layout.keep_attention > layout.keep_projections,
        "memory.offload_optimizer=false": tier == "host memory" and layout.offload_optimizer,
        "a memory.disk_path with more space": tier == "disk",
        "a shorter data.context": not planned,
    }
    if not planned:
        return fixes
    # Search with every memory and parallelism setting left to the planner.
    space = SearchSpace(run.shape, run.hardware)
    if space.fits(run.work):
        plain = "the planner's memory and parallel settings (leave them out)"
        return fixes | {plain: True, "a shorter data.context": True}
    context = space.longest_context(run.work.batch)
    machine = space.smallest_machine(run.work)
    fixes |= {f"data.context={context}": context > 0}
    if adapter := space.adapter_that_fits(run.work):
        settings = ", ".join(f"adapter.{name}={value}" for name, value in adapter.items())
        fixes[
            f"an adapter ({settings})" if "rank" in adapter else f"a four-bit base ({settings})"
        ] = True
    if not layout.stored_dtype and space.with_float8 and space.with_float8.fits(run.work):
        fixes["memory.stored_dtype=float8"] = True
    if machine:
        fixes[f"{machine.num_gpus} GPUs ({machine.name})"] = True
    return fixes


def _evaluation_fixes(run: Run, tier: str) -> dict[str, bool]:
    layout = run.layout
    return {
        "shorter evaluate.contexts": True,
        f"parallel.cp={run.num_ranks}": layout.cp < run.num_ranks,
        "a smaller parallel.heads_per_stage": layout.heads_per_stage != layout.ulysses,
        "memory.offload_optimizer=true": tier == "GPU memory" and not layout.offload_optimizer,
        "evaluate.every=0 and `ithaka evaluate` after the run": True,
    }
