"""Write a run's checkpoint as a Hugging Face directory."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging

from ithaka.checkpoint.checkpoints import (
    find_checkpoint,
    find_checkpoint_of_step,
    find_intact_checkpoint,
    read_state,
)
from ithaka.checkpoint.safe_load import load_into, read_index
from ithaka.config import AdapterConfig, ConfigError, check_output, load_config, writing_to
from ithaka.facts.model_files import HUB_ID, read_json
from ithaka.hub import SNAPSHOT
from ithaka.log.metrics import read_metrics
from ithaka.weights.adapters import adapter_tensor_name, auto_class
from ithaka.weights.formats import base_metadata
from ithaka.weights.pretrained import merge_adapter


def export(
    run_dir: Path,
    out_dir: Path,
    merge: bool = False,
    step: int | None = None,
    force: bool = False,
    as_trained: bool = False,
) -> Path:
    """Export a checkpoint, by default the latest, as `export_files` does; return `out_dir`."""
    export_files(run_dir, out_dir, merge, step, force, as_trained)
    return out_dir.absolute()


def export_files(
    run_dir: Path,
    out_dir: Path,
    merge: bool = False,
    step: int | None = None,
    force: bool = False,
    as_trained: bool = False,
) -> list[str]:
    """Export a checkpoint, and return the names of the files written to `out_dir`, which may hold
    others.

    Runs in one process, without a process group; the full model passes through host memory. Weights
    keep the precision of the master weights (usually float32), so logits equal the trained model's.
    A run with an adapter exports the adapter in PEFT's format or, with `merge`, the base model with
    the adapter merged in float32 and rounded to the base's precision. With `as_trained`, the base
    is first rounded as in training."""
    logging.disable_progress_bar()
    checkpoint = check_export(run_dir, out_dir, merge, step, force)
    model_dir = run_dir / "model"
    index = read_index(checkpoint)
    weights = {}
    for name, tensor in index.tensors.items():
        if name.startswith("model."):
            dtype = tensor.metadata.properties.dtype
            weights[name.removeprefix("model.")] = torch.empty(tensor.metadata.size, dtype=dtype)
    load_into({"model": weights}, checkpoint, index)
    with tempfile.TemporaryDirectory(prefix="ithaka-export-") as folder:
        model_dir = Path(shutil.copytree(model_dir, Path(folder) / "model"))
        with _unfinished(out_dir.absolute()) as unfinished:
            _write(run_dir, checkpoint, model_dir, unfinished, weights, merge, as_trained)
            return list_files(unfinished)


@contextmanager
def _unfinished(out_dir: Path) -> Iterator[Path]:
    """A folder in `out_dir`, whose files move there at the end. After an error, it is removed, and
    so are the folders created for it."""
    created = [folder for folder in (out_dir, *out_dir.parents) if not folder.exists()]
    try:
        with writing_to("OUT_DIR", out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out_dir) as name:
                yield Path(name)
                for file in list_files(Path(name)):
                    target = out_dir / file
                    target.parent.mkdir(exist_ok=True)
                    (Path(name) / file).replace(target)
    except BaseException:
        for folder in created:
            with suppress(OSError):
                folder.rmdir()
        raise


def list_files(folder: Path) -> list[str]:
    """Names of the files in a folder and its subfolders, relative to it."""
    return sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )


def check_export(run_dir: Path, out_dir: Path, merge: bool, step: int | None, force: bool) -> Path:
    """Return the checkpoint to export. ConfigError if there is none, or `out_dir` is unusable."""
    check_output("OUT_DIR", out_dir, force, folder=True)
    run = run_dir.resolve()
    out = out_dir.resolve()
    if out == run or any(out.is_relative_to(run / name) for name in ("model", "checkpoints")):
        raise ConfigError(f"OUT_DIR={out_dir} holds the run's own files; give another path")
    for link in filter(Path.is_symlink, (run_dir / "model").rglob("*")):  # ithaka writes none
        rule = "is a symbolic link, and an export would copy what it leads to"
        raise ConfigError(
            f"RUN_DIR={run_dir}: model/{link.name} {rule}; replace it by the file, or remove it"
        )
    if step is None:
        checkpoint = find_intact_checkpoint(find_checkpoint(run_dir))
    else:
        checkpoint = find_checkpoint_of_step(run_dir, step)
    is_adapter = (run_dir / "model" / "adapter_config.json").is_file()
    for name in ("config.json", "adapter_config.json")[: 1 + is_adapter]:
        read_json(run_dir / "model" / name, "RUN_DIR: ", "copy it from another run of this model")
    if merge and not is_adapter:
        raise ConfigError(f"--merge: {run_dir} did not train an adapter; leave it out")
    return checkpoint


def _write(
    run_dir: Path,
    checkpoint: Path,
    model_dir: Path,
    out_dir: Path,
    weights: dict[str, Tensor],
    merge: bool,
    as_trained: bool,
) -> None:
    """`model_dir` is a copy of RUN_DIR/model; its RoPE settings may be those of a later step."""
    state = read_state(checkpoint)
    config_file = model_dir / "config.json"
    values = json.loads(config_file.read_text())
    values.get("text_config", values).update(state["positions"])
    config_file.write_text(json.dumps(values))
    not_exported = ["config.json"]
    if not (model_dir / "adapter_config.json").is_file():
        with torch.device("meta"):
            hf_config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
            model = auto_class(hf_config.model_type).from_config(hf_config, trust_remote_code=False)
        try:
            model.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            reason = str(error).partition("\n\t")[2].partition("\n")[0]
            config_file = run_dir / "model" / "config.json"
            raise ConfigError(
                f"{config_file} does not match the checkpoint ({reason}); restore the file"
            ) from None
        model.tie_weights()
        # Writes the dtype to config.json, and a generation config, which is replaced below.
        model.save_pretrained(out_dir)
    else:
        config = load_config(run_dir / "config.yaml").at(state["step"] - 1)
        settings = config.model
        adapter = config.adapter or AdapterConfig()
        tensors = {adapter_tensor_name(name): tensor for name, tensor in weights.items()}
        base = settings.path
        if merge:
            if base is None or not base.is_dir():
                raise ConfigError(
                    f"--merge needs the base model, but the run's model.path={base} is not a "
                    "directory; put it there, or leave out --merge and merge with PEFT"
                )
            rounded = adapter if as_trained else None
            merge_adapter(base, model_dir, tensors, out_dir, rounded=rounded)
            not_exported = ["config.json", "adapter_config.json"]
        else:
            stored = read_json(base / "config.json") if base is not None and base.is_dir() else {}
            metadata = {"format": "pt", **base_metadata(adapter, stored)}
            save_file(tensors, out_dir / "adapter_model.safetensors", metadata=metadata)
            # With model.rope, the adapter's base needs the run's config.json as well.
            not_exported = ["generation_config.json"]
            if settings.rope is None:
                not_exported.append("config.json")
    shutil.copytree(
        model_dir, out_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*not_exported)
    )


def write_card(run_dir: Path, out_dir: Path, name: str, step: int | None = None) -> None:
    """Write README.md: base, data, context, plan and losses of the run, up to `step`."""
    config = load_config(run_dir / "config.yaml")
    metrics = [
        line
        for line in read_metrics(run_dir / "metrics.jsonl")
        if step is None or line["step"] <= step
    ]
    plan_file = run_dir / "plan.json"
    is_adapter = (out_dir / "adapter_config.json").is_file()
    path = config.model.path
    base = _public_name(path) if path is not None and path.suffix != ".json" else None
    losses = [line["val_loss"] for line in metrics if line.get("val_loss")]
    settings = config.at(metrics[-1]["step"] - 1) if metrics else config
    sources = [
        _public_name(source.path) or "Python's standard library"
        for source in config.data.all_sources
    ]
    gpus = "one machine"
    if plan_file.is_file():
        gpus = json.loads(plan_file.read_text())["gpus"]
    adapter = "none"
    if config.adapter:
        adapter = f"rank {config.adapter.rank}, alpha {config.adapter.alpha:g}"
    table = {
        "base model": base or "none: trained from scratch",
        "data": ", ".join(sources),
        "context": f"{settings.data.context} tokens",
        "steps": f"{metrics[-1]['step']}, {metrics[-1]['tokens']} tokens" if metrics else "0",
        "validation loss": f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "not measured",
        "trained on": gpus,
        "learning rate": f"{settings.optim.lr:g}, {settings.optim.schedule}",
        "adapter": adapter,
    }
    head = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}", "tags: [ithaka]"]
    if base and re.fullmatch(HUB_ID, base):
        head.append(f"base_model: {base}")
    rows = [f"| {name} | {value} |" for name, value in table.items()]
    lines = [
        *head,
        "---",
        "",
        f"# {name}",
        "",
        "Trained with ithaka.",
        "",
        "| | |",
        "|---|---|",
        *rows,
        "",
    ]
    (out_dir / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _public_name(path: Path | None) -> str | None:
    """A hub name, or the last part of a path: this machine's folders do not belong in a card."""
    if path is None:
        return None
    if str(path).startswith("hf:"):
        return str(path)
    snapshot = SNAPSHOT.fullmatch(str(path))
    return f"{snapshot[1]}/{snapshot[2]}" if snapshot else path.name
