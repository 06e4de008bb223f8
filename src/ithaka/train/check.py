"""Everything that can be refused before a process starts and before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

from ithaka.config import Config, ConfigError, check_effects, embedded_model
from ithaka.plan.shape import ModelShape, read_shape, shape_from_config
from ithaka.train import launch
from ithaka.train.budget import check_budgets
from ithaka.train.resume import check_changes, to_go_on_from


def check_run(config: Config, num_ranks: int, resume: Path | None) -> None:
    """Raises ConfigError unless a run with `num_ranks` ranks can start; cheap checks first."""
    if resume is None:
        check_run_dir(config.train.run_dir)
    shape = model_shape(config)
    cp = check_cp(config, num_ranks, shape)
    check_heads(config, shape, cp)
    check_disk(config)
    check_memory(config, shape)
    check_budgets(config, shape, cp, num_ranks, on_gpu=launch.num_gpus() > 0)
    check_weights(config.model.path)
    check_kernel(config)
    if resume is not None:
        to_go_on_from(resume, config)
        check_changes(resume, config, shape)
    # Late, because it imports transformers.
    from ithaka.data.open import check as check_data

    check_data(config.data, shape.vocab, config.model.path)


def model_shape(config: Config) -> ModelShape:
    if config.model.path is None:
        return shape_from_config(embedded_model(config.model.embedded), f"model.embedded={config.model.embedded}")
    return read_shape(config.model.path)


def check_cp(config: Config, num_ranks: int, shape: ModelShape) -> int:
    """The number of ranks that share a sequence."""
    asked = config.parallel.cp
    cp = config.parallel.cp_of(num_ranks)
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    if cp not in divisors:
        more = f"; or start {cp} ranks with --ranks {cp}" if cp > num_ranks else ""
        raise ConfigError(f"parallel.cp={asked} does not divide the {_ranks(num_ranks)}; use {_either(divisors)}{more}")
    if cp > shape.heads:
        fitting = [n for n in divisors if n <= shape.heads]
        named = asked if isinstance(asked, int) else f"{asked} ({_ranks(cp)})"
        raise ConfigError(
            f"parallel.cp={named} exceeds the {shape.heads} query heads of the model; use {_either(fitting)}"
        )
    return cp


def check_heads(config: Config, shape: ModelShape, cp: int) -> None:
    asked = config.parallel.heads_per_stage
    if asked != "all" and (asked % cp or asked > max(shape.heads, cp)):
        fitting = list(range(cp, shape.heads + 1, cp))
        raise ConfigError(
            f"parallel.heads_per_stage={asked} is not a multiple of parallel.cp={cp} "
            f"up to the {shape.heads} query heads; use {_either(fitting[:4])} or all"
        )


def check_memory(config: Config, shape: ModelShape) -> None:
    kept = config.memory.keep_attention
    if isinstance(kept, int) and kept > shape.num_layers:
        raise ConfigError(f"memory.keep_attention={kept} exceeds the {shape.num_layers} layers of the model; use all")
    check_effects({f"memory.{name}": value for name, value in vars(config.memory).items()})
    disk = config.memory.disk_path
    if disk is not None and "disk" not in (config.memory.offload, config.memory.attention_offload):
        raise ConfigError(
            f"memory.disk_path={disk} has no effect with memory.offload={config.memory.offload}; "
            "use memory.offload=disk, or leave it null"
        )


def check_disk(config: Config) -> None:
    """Before anyone asks how much room there is."""
    disk = config.memory.disk_path
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"memory.disk_path={disk} is not a directory; create it, or leave it null")
    if disk is not None and not os.access(disk, os.W_OK):
        raise ConfigError(f"memory.disk_path={disk} cannot be written; give another directory")


def check_kernel(config: Config) -> None:
    """The name only: whether the device can run the kernel is for the ranks to say, who own the devices."""
    from ithaka.ops.kernels import KERNELS

    block_q, block_kv = config.attention.block_q, config.attention.block_kv
    if (block_q is None) != (block_kv is None):
        raise ConfigError(
            f"attention.block_q={block_q} and attention.block_kv={block_kv} go together; set both or neither"
        )

    name = config.attention.kernel
    if name not in ("auto", *KERNELS):
        raise ConfigError(f"attention.kernel={name} is not a kernel; use auto, {', '.join(KERNELS)}")


def check_weights(path: Path | None) -> None:
    """Weights that are there but cannot be read must not end in a model trained from scratch."""
    if path is None or not path.is_dir() or any(path.glob("*.safetensors")):
        return
    pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt")) + sorted(path.glob("*.pth"))
    if pickled:
        raise ConfigError(
            f"model.path={path} has its weights in {pickled[0].name}, not in safetensors; convert them, "
            f"or give {path / 'config.json'} to train from scratch"
        )


def check_run_dir(run_dir: Path | None) -> None:
    """A new run needs a directory that holds no other."""
    if run_dir is None:
        return
    if (run_dir / "config.yaml").exists():
        raise ConfigError(
            f"train.run_dir={run_dir} already holds a run; give another with --run-dir, "
            f"or continue it with --resume {run_dir}"
        )
    existing = next(parent for parent in (run_dir, *run_dir.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"train.run_dir={run_dir} cannot be created: {existing} is a file; give a directory")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"train.run_dir={run_dir} cannot be written; give another with --run-dir")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _either(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
