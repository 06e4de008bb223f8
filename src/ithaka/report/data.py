"""What a report shows of a run, read from the files in its directory. Imports no torch."""

import json
from pathlib import Path
from typing import Any

import yaml

from ithaka.config import ConfigError

SHOWN = ("step", "loss", "val_loss", "tokens_per_s", "step_s", "mfu")
MAX_RECORDS = 5000


def read_run(run_dir: Path) -> dict[str, Any]:
    """Everything the page needs; what a run has not written is None or empty."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"RUN_DIR={run_dir} holds no config.yaml; give the directory of a run")
    records = _metrics(run_dir / "metrics.jsonl")
    profile_file = _latest_profile(run_dir)
    return {
        "name": run_dir.resolve().name,
        "metrics": {key: [record.get(key) for record in _thinned(records)] for key in SHOWN},
        "device_peak_bytes": _most(records, "device_peak_bytes"),
        "host_peak_bytes": _most(records, "host_peak_bytes"),
        "config": yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8")),
        "machine": _json(run_dir / "machine.json"),
        "plan": _json(run_dir / "plan.json"),
        "sample": _text(run_dir / "sample.txt"),
        "profile": _json(profile_file) if profile_file else None,
    }


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Whole steps only; a line cut off by a kill, and progress within a step, are left out."""
    lines = (_text(path) or "").split("\n")[:-1]
    return [record for record in map(json.loads, filter(None, lines)) if "progress" not in record]


def _most(records: list[dict[str, Any]], key: str) -> int | None:
    """Each part of a resumed run has a peak of its own."""
    return max((record[key] for record in records if record.get(key) is not None), default=None)


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about MAX_RECORDS, evenly; those with a validation loss all stay."""
    every = -(-len(records) // MAX_RECORDS) if records else 1
    return [r for i, r in enumerate(records) if i % every == 0 or r.get("val_loss") is not None]


def _latest_profile(run_dir: Path) -> Path | None:
    found = run_dir.glob("profile/step-*/profile.json")
    return max(found, key=lambda file: int(file.parent.name.removeprefix("step-")), default=None)


def _json(path: Path) -> Any:
    text = _text(path)
    return None if text is None else json.loads(text)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
