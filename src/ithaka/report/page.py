"""A run directory, or several, as one HTML page that needs no network. Imports no torch."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import yaml

from ithaka.config import ConfigError, check_writable
from ithaka.report.html import read_asset, render_page
from ithaka.train.console import read_metrics

CHARTS = "echarts.common.min.js"  # Apache ECharts 6.1.0, as published; see NOTICE.echarts
PEAKS = ("device_peak_bytes", "host_peak_bytes")  # each part of a resumed run has its own
SHOWN = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "mfu", *PEAKS)


def write_report(run_dirs: Sequence[Path], out: Path | None = None, live: bool = False) -> Path:
    """Writes the page for these runs; by default report.html in the first one's directory. A `live` one loads itself
    again twice a minute."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    for i, run in enumerate(runs):  # names that tell them apart
        if run["name"] in [other["name"] for other in runs[:i] + runs[i + 1 :]]:
            run["name"] = f"{run_dirs[i].resolve().parent.name}/{run['name']} ({i + 1})"
    others = "".join(f"-{run_dir.resolve().name}" for run_dir in run_dirs) if len(runs) > 1 else ""
    path = out or run_dirs[0] / f"report{others}.html"
    check_writable("--out", path)
    # A "<" of a run's own text could end the script element, or open a comment in it.
    data = json.dumps(runs, separators=(",", ":")).replace("<", "\\u003c")
    body = "<noscript>This page draws its charts with JavaScript, all of it inside this file.</noscript>"
    scripts = f'<script id="data" type="application/json">{data}</script>\n<script>{read_asset(CHARTS)}</script>'
    text = render_page(", ".join(run["name"] for run in runs), body, scripts, read_asset("report.js"), live)
    temporary = path.with_name(f".{path.name}.tmp")  # a page that is half written is not loaded
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


@contextmanager
def live_report(run_dir: Path, every_s: float = 30.0) -> Iterator[None]:
    """Keep report.html up to date while the code inside runs, with at most a hundredth of a core."""
    done = Event()

    def write() -> None:
        wait_s = every_s
        while not done.wait(wait_s):
            start = time.monotonic()
            with suppress(Exception):  # before its first files there is nothing to show
                write_report([run_dir], live=True)
            wait_s = max(every_s, 100 * (time.monotonic() - start))

    writer = Thread(target=write, daemon=True, name="report")
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def read_run(run_dir: Path) -> dict[str, Any]:
    """Everything the page needs; what a run has not written is None or empty."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"RUN_DIR={run_dir} holds no config.yaml; give the directory of a run")
    records = read_metrics(run_dir / "metrics.jsonl")
    evaluated = sorted({key for record in records for key in record if key.startswith("evaluate/")})
    profile = _newest({int(file.parent.name[5:]): file for file in run_dir.glob("profile/step-*/profile.json")})
    evaluation = _newest({int(file.stem[5:]): file for file in run_dir.glob("evaluations/step-*.json")})
    return {
        "name": run_dir.resolve().name,
        "metrics": {key: [record.get(key) for record in records] for key in (*SHOWN, *evaluated)},
        **{key: max((record.get(key) or 0 for record in records), default=0) or None for key in PEAKS},
        "config": yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8")),
        "machine": json.loads(_text(run_dir / "machine.json") or "null"),
        "data": json.loads(_text(run_dir / "data.json") or "null"),
        "plan": json.loads(_text(run_dir / "plan.json") or "null"),
        "profile": profile,
        "evaluation": evaluation,
    }


def _newest(of_step: dict[int, Path]) -> Any:
    return json.loads(of_step[max(of_step)].read_text(encoding="utf-8")) if of_step else None


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
