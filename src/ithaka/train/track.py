"""Experiment trackers by name: each step's figures also go to TensorBoard, Weights & Biases, Trackio or MLflow.

Each is set up as its users do, by its own environment variables (WANDB_MODE=offline, TRACKIO_DIR, MLFLOW_TRACKING_URI).
What a resumed run needs to find its own entry again is in RUN_DIR/track.json.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ithaka.config import Config, input_error, to_dict

PROJECT = "ithaka"
IDS = "track.json"
# As Hugging Face's Trainer names them; other figures are train/FIGURE, and those of one source train/SOURCE_FIGURE.
NAMES = {"val_loss": "eval/loss", "lr": "train/learning_rate", "tokens": "train/num_input_tokens_seen"}

Ending = Literal["finished", "failed", "killed"]  # how this part of a run ended; killed: by a signal
WANDB_EXIT_CODES: dict[Ending, int] = {"finished": 0, "failed": 1, "killed": 255}  # as wandb itself has them


class Tracker(NamedTuple):
    """An open tracker: the id that a resumed run finds its entry by, and what to call at each step and at the end."""

    id: str | None
    log: Callable[[dict[str, float], int], Any]
    close: Callable[[Ending], Any]


# run directory, configuration, first step to log, id of an earlier part
Opener = Callable[[Path, Config, int, str | None], Tracker]


def tracked(values: Mapping[str, Any]) -> dict[str, float]:
    """A record under the names that trackers' users expect, without its step and what was not measured."""
    named = {}
    for key, value in values.items():
        figure, _, source = key.partition("/")
        if figure == "evaluate":
            named[key] = value
            continue
        kind, _, figure = NAMES.get(figure, f"train/{figure}").partition("/")
        if key != "step" and value is not None:
            named[f"{kind}/{source}_{figure}" if source else f"{kind}/{figure}"] = value
    return named


def _tensorboard(run_dir: Path, config: Config, first: int, known: str | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first)

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Tracker(None, log, lambda ending: writer.close())


def _wandb(run_dir: Path, config: Config, first: int, known: str | None) -> Tracker:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", run_dir.name),
        config=to_dict(config),
        id=known,
        resume="allow" if known else None,
    )
    # Steps as values: W&B ignores a step of its own that is not later than the last, as after a resume.
    run.define_metric("*", step_metric="train/global_step")
    return Tracker(
        run.id,
        lambda values, step: run.log({**values, "train/global_step": step}),
        lambda ending: run.finish(exit_code=WANDB_EXIT_CODES[ending]),
    )


def _trackio(run_dir: Path, config: Config, first: int, known: str | None) -> Tracker:
    import trackio

    project, goes_on = os.environ.get("TRACKIO_PROJECT", PROJECT), "allow" if known else "never"
    run = trackio.init(project, name=known or run_dir.name, config=to_dict(config), resume=goes_on, embed=False)
    return Tracker(run.name, lambda values, step: run.log(values, step=step), lambda ending: run.finish())


def _mlflow(run_dir: Path, config: Config, first: int, known: str | None) -> Tracker:
    import mlflow

    if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
        mlflow.set_experiment(PROJECT)
    run = mlflow.start_run(run_id=known, run_name=run_dir.name)
    if known is None:
        for name, settings in to_dict(config).items():
            values = settings if isinstance(settings, dict) else {"entries": settings} if settings else {}
            mlflow.log_params({f"{name}.{key}": value for key, value in values.items()})

    def log(values: dict[str, float], step: int) -> None:
        allowed = {re.sub(r"[^\w\-./ ]", "_", key): value for key, value in values.items()}
        mlflow.log_metrics(allowed, step=step, synchronous=False)  # a slow server does not hold up the step

    def close(ending: Ending) -> None:
        try:
            mlflow.flush_async_logging()
        finally:
            mlflow.end_run(status=ending.upper())

    return Tracker(run.info.run_id, log, close)


TRACKERS: dict[str, Opener] = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}


class Trackers:
    """The open trackers of `train.track`, used by rank 0. ConfigError, or TransientError, if one cannot start."""

    def __init__(self, run_dir: Path, config: Config, step: int) -> None:
        self._open, self._failed = dict[str, Tracker](), set[str]()
        file = run_dir / IDS
        ids = json.loads(file.read_text(encoding="utf-8")) if step and file.is_file() else {}
        for name in config.train.track:
            try:
                self._open[name] = TRACKERS[name](run_dir, config, step + 1, ids.get(name))
                ids[name] = self._open[name].id
            except Exception as error:
                self.close("failed")
                why = f"{type(error).__name__}: {error}"
                way = "put it right, choose its offline mode, or leave it out"
                raise input_error(f"train.track={name} cannot start ({why}); {way}", error) from error
        if ids:
            file.write_text(json.dumps(ids), encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int) -> list[str]:
        """Log one step. Returns a message for each tracker that fails; the run continues without it."""
        logs = {name: tracker.log for name, tracker in self._open.items() if name not in self._failed}
        return self._failures(logs, (tracked(values), step), "failed", "the run continues without it")

    def close(self, ending: Ending) -> list[str]:
        """Close every tracker, also one that failed before. Returns a message for each that fails only now."""
        closes = {name: tracker.close for name, tracker in self._open.items()}
        self._open = {}
        return self._failures(closes, (ending,), "could not be closed", "its last steps may be missing there")

    def _failures(
        self, calls: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], what: str, so: str
    ) -> list[str]:
        """Call each of `calls`, by tracker; one that raises must neither end the run nor hide the run's own error."""
        words = []
        for name, call in calls.items():
            try:
                call(*args)
            except Exception as error:
                if name not in self._failed:
                    words.append(f"train.track={name} {what} ({type(error).__name__}: {error}); {so}")
                self._failed.add(name)
        return words
