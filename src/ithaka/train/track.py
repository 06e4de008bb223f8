"""Experiment trackers by name: each step's figures also go to TensorBoard, Weights & Biases, Trackio or MLflow.

Each is set up as its users do, by its own environment variables (WANDB_MODE=offline, TRACKIO_DIR, MLFLOW_TRACKING_URI).
What a resumed run needs to find its own entry again is in RUN_DIR/track.json.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ithaka.config import Config, ConfigError, to_dict

PROJECT = "ithaka"
IDS = "track.json"
# As Hugging Face's Trainer names them; other figures are train/FIGURE, and those of one source train/SOURCE_FIGURE.
NAMES = {"val_loss": "eval/loss", "lr": "train/learning_rate", "tokens": "train/num_input_tokens_seen"}

Log = Callable[[dict[str, float], int], Any]
# run directory, configuration, first step to log, id of an earlier part -> this run's id, and how to log
Opener = Callable[[Path, Config, int, str | None], AbstractContextManager[tuple[str | None, Log]]]


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


@contextmanager
def _tensorboard(run_dir: Path, config: Config, first: int, known: str | None) -> Iterator[tuple[None, Log]]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run_dir / "tensorboard"), purge_step=first) as writer:
        yield None, lambda values, step: [writer.add_scalar(key, value, step) for key, value in values.items()]


@contextmanager
def _wandb(run_dir: Path, config: Config, first: int, known: str | None) -> Iterator[tuple[str, Log]]:
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
    yield run.id, lambda values, step: run.log({**values, "train/global_step": step})
    run.finish()


@contextmanager
def _trackio(run_dir: Path, config: Config, first: int, known: str | None) -> Iterator[tuple[str, Log]]:
    import trackio

    project, goes_on = os.environ.get("TRACKIO_PROJECT", PROJECT), "allow" if known else "never"
    run = trackio.init(project, name=known or run_dir.name, config=to_dict(config), resume=goes_on, embed=False)
    yield run.name, lambda values, step: run.log(values, step=step)
    run.finish()


@contextmanager
def _mlflow(run_dir: Path, config: Config, first: int, known: str | None) -> Iterator[tuple[str, Log]]:
    import mlflow

    if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
        mlflow.set_experiment(PROJECT)
    with mlflow.start_run(run_id=known, run_name=run_dir.name) as run:
        if known is None:
            for name, settings in to_dict(config).items():
                values = settings if isinstance(settings, dict) else {"entries": settings} if settings else {}
                mlflow.log_params({f"{name}.{key}": value for key, value in values.items()})

        def log(values: dict[str, float], step: int) -> None:
            allowed = {re.sub(r"[^\w\-./ ]", "_", key): value for key, value in values.items()}
            mlflow.log_metrics(allowed, step=step, synchronous=False)  # a slow server does not hold up the step

        yield run.info.run_id, log
        mlflow.flush_async_logging()


TRACKERS: dict[str, Opener] = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}


class Trackers:
    """Those of `train.track`, opened; used by rank 0. ConfigError if one cannot start."""

    def __init__(self, run_dir: Path, config: Config, step: int) -> None:
        self._open, self._logs = ExitStack(), dict[str, Log]()
        self.close = self._open.close
        file = run_dir / IDS
        ids = json.loads(file.read_text(encoding="utf-8")) if step and file.is_file() else {}
        for name in config.train.track:
            try:
                opened = TRACKERS[name](run_dir, config, step + 1, ids.get(name))
                ids[name], self._logs[name] = self._open.enter_context(opened)
            except Exception as error:
                self.close()
                why = f"{type(error).__name__}: {error}"
                way = "put it right, choose its offline mode, or leave it out"
                raise ConfigError(f"train.track={name} cannot start ({why}); {way}") from error
        if ids:
            file.write_text(json.dumps(ids), encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int) -> list[str]:
        """What went wrong, in words. Training goes on without a tracker that fails."""
        wrong = []
        for name, log in list(self._logs.items()):
            try:
                log(tracked(values), step)
            except Exception as error:
                del self._logs[name]
                wrong.append(f"train.track={name} failed ({type(error).__name__}: {error}); the run goes on without it")
        return wrong
