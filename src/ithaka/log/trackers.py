"""Experiment trackers and callbacks, on rank 0.

Trackers are configured by their own environment variables (WANDB_MODE=offline, TRACKIO_DIR,
MLFLOW_TRACKING_URI); RUN_DIR/track.json holds the ids with which a resumed run continues its
entries.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ithaka.config import Config, ConfigError, input_error, to_dict, write_atomic

PROJECT = "ithaka"
IDS_FILE = "track.json"
# Names from Hugging Face's Trainer. Other metrics are train/METRIC, and train/SOURCE_METRIC for one
# data source.
METRIC_NAMES = {
    "val_loss": "eval/loss",
    "lr": "train/learning_rate",
    "tokens": "train/num_input_tokens_seen",
}

FinalStatus = Literal["finished", "failed", "killed"]  # killed: by a signal
# As W&B's own.
WANDB_EXIT_CODES: dict[FinalStatus, int] = {"finished": 0, "failed": 1, "killed": 255}


CONTINUES = "the run continues without it"


class Tracker(NamedTuple):
    """An open tracker: the id with which a resumed run continues its entry, and callbacks."""

    id: str | None
    log: Callable[[dict[str, float], int], Any]
    close: Callable[[FinalStatus], Any]


# (run directory, configuration, first step to log, id of the entry to continue)
Opener = Callable[[Path, Config, int, str | None], Tracker]


def rename_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Rename a record's values as tracker users expect, without its step and None."""
    renamed = {}
    for key, value in values.items():
        metric, _, source = key.partition("/")
        if metric == "evaluate":
            renamed[key] = value
            continue
        if metric.removeprefix("val_") in ("rewards", "logps"):  # TRL's names
            group = "eval" if metric.startswith("val_") else "train"
            renamed[f"{group}/{key.removeprefix('val_')}"] = value
            continue
        group, _, metric = METRIC_NAMES.get(metric, f"train/{metric}").partition("/")
        if key != "step" and value is not None:
            renamed[f"{group}/{source}_{metric}" if source else f"{group}/{metric}"] = value
    return renamed


def _tensorboard(run_dir: Path, config: Config, first_step: int, known_id: str | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Tracker(None, log, lambda final_status: writer.close())


def _wandb(run_dir: Path, config: Config, first_step: int, known_id: str | None) -> Tracker:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", run_dir.name),
        config=to_dict(config),
        id=known_id,
        resume="allow" if known_id else None,
    )
    # Log the step as a metric: W&B drops values whose own step is not later than the last, as after
    # a resume.
    run.define_metric("*", step_metric="train/global_step")
    return Tracker(
        run.id,
        lambda values, step: run.log({**values, "train/global_step": step}),
        lambda final_status: run.finish(exit_code=WANDB_EXIT_CODES[final_status]),
    )


def _trackio(run_dir: Path, config: Config, first_step: int, known_id: str | None) -> Tracker:
    import trackio

    run = trackio.init(
        os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=known_id or run_dir.name,
        config=to_dict(config),
        resume="allow" if known_id else "never",
        embed=False,
    )
    return Tracker(
        run.name, lambda values, step: run.log(values, step=step), lambda final_status: run.finish()
    )


def _mlflow(run_dir: Path, config: Config, first_step: int, known_id: str | None) -> Tracker:
    import mlflow

    if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
        mlflow.set_experiment(PROJECT)
    run = mlflow.start_run(run_id=known_id, run_name=run_dir.name)
    if known_id is None:
        for name, settings in to_dict(config).items():
            if not isinstance(settings, dict):
                settings = {"entries": settings} if settings else {}
            mlflow.log_params({f"{name}.{key}": value for key, value in settings.items()})

    def log(values: dict[str, float], step: int) -> None:
        allowed = {re.sub(r"[^\w\-./ ]", "_", key): value for key, value in values.items()}
        # A slow server must not delay the step.
        mlflow.log_metrics(allowed, step=step, synchronous=False)

    def close(final_status: FinalStatus) -> None:
        try:
            mlflow.flush_async_logging()
        finally:
            mlflow.end_run(status=final_status.upper())

    return Tracker(run.info.run_id, log, close)


TRACKERS: dict[str, Opener] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}


class Trackers:
    """The open trackers of `train.track` and the instances of `train.callbacks`, on rank 0. Raises
    ConfigError or TransientError if one cannot start."""

    def __init__(self, run_dir: Path, config: Config, step: int) -> None:
        self._open = dict[str, Tracker]()
        self._failed = set[str]()
        self._callbacks = dict[str, Any]()
        file = run_dir / IDS_FILE
        ids = dict[str, str | None]()
        with suppress(OSError, ValueError):  # without ids, new entries are started
            ids = json.loads(file.read_text(encoding="utf-8")) if step else {}
        for name in config.train.track:
            try:
                self._open[name] = TRACKERS[name](run_dir, config, step + 1, ids.get(name))
                ids[name] = self._open[name].id
            except Exception as error:
                self.close("failed")
                problem = f"train.track={name} cannot start ({type(error).__name__}: {error})"
                fix = "fix its settings, use its offline mode, or leave it out"
                raise input_error(f"{problem}; {fix}", error) from error
        for kind, callback in config.train.import_callbacks().items():
            try:
                self._callbacks[kind] = callback(run_dir, config)
            except Exception as error:
                self.close("failed")
                reason = f"{type(error).__name__}: {error}"
                fix = "name a class as package.module:Class, or correct it"
                problem = f"train.callbacks={kind} cannot be created ({reason})"
                raise ConfigError(f"{problem}; {fix}") from error
        if ids:
            write_atomic(file, json.dumps(ids))

    def log(self, values: Mapping[str, Any], step: int) -> list[str]:
        """Log one step. Returns a message for each tracker or callback that fails now."""
        logs = {
            name: tracker.log for name, tracker in self._open.items() if name not in self._failed
        }
        messages = self._call(logs, (rename_metrics(values), step), "failed", CONTINUES)
        named = {key: value for key, value in values.items() if value is not None}
        messages += self.notify("on_step", step, named)
        evaluation = ("val_", "evaluate/")
        figures = {key: value for key, value in named.items() if key.startswith(evaluation)}
        if figures:
            messages += self.notify("on_evaluation", step, figures)
        return messages

    def notify(self, event: str, *args: object) -> list[str]:
        """Call a method of every callback that has it. Returns messages, as `log`."""
        working = {name: each for name, each in self._callbacks.items() if name not in self._failed}
        methods = {name: getattr(each, event, None) for name, each in working.items()}
        calls = {name: method for name, method in methods.items() if method is not None}
        return self._call(calls, args, f"failed in {event}", CONTINUES, "callbacks")

    def close(self, final_status: FinalStatus) -> list[str]:
        """Close every tracker. Returns a message for each that fails for the first time."""
        closes = {name: tracker.close for name, tracker in self._open.items()}
        self._open = {}
        messages = self.notify("on_end", final_status)
        self._callbacks = {}
        lacks = "it may lack the last steps"
        return messages + self._call(closes, (final_status,), "could not be closed", lacks)

    def _call(
        self,
        calls: Mapping[str, Callable[..., Any]],
        args: tuple[object, ...],
        what: str,
        consequence: str,
        setting: str = "track",
    ) -> list[str]:
        """Call each function. An error must neither end the run nor hide the run's own error."""
        messages = []
        for name, call in calls.items():
            try:
                call(*args)
            except Exception as error:
                if name not in self._failed:
                    reason = f"{type(error).__name__}: {error}"
                    messages.append(f"train.{setting}={name} {what} ({reason}); {consequence}")
                self._failed.add(name)
        return messages
