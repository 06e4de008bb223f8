"""The validation loss of a model or a run, without training it."""

import math

import torch

from ithaka.comm.agree import SharedError
from ithaka.comm.mesh import start_process_group
from ithaka.config.units import plural
from ithaka.run.validated import Run
from ithaka.train.bad_steps import check_loaded_weights
from ithaka.train.prepare import prepare


def validate_only(run: Run) -> None:
    """Print the validation loss of a model or a run. Leaves the run directory unchanged."""
    start_process_group()
    tokens = run.run_dir / "tokens"
    had_tokens = tokens.exists()
    trainer = prepare(run, trains=False)
    loss, sources = trainer.validate()
    trainer.data.close(remove=not had_tokens)
    if loss is not None and not math.isfinite(loss):
        check_loaded_weights(trainer.model, trainer.run)
    if loss is None:
        fix = "set data.validation_path, data.validation_fraction or train.validate_sequences"
        raise SharedError(f"--evaluate-only: nothing is held out for validation; {fix}")
    if trainer.mesh.rank != 0:
        return
    measured = f"validation {run.config.loss.validation_name}"
    figures = {measured: loss}
    if run.config.loss.type != "dpo":
        figures["perplexity"] = torch.tensor(loss, dtype=torch.float64).exp().item()
    for name, value in (figures | sources).items():
        print(f"{name:<{len(measured)}}  {value:.4f}", flush=True)
    model = str(run.config.model.path or "embedded model")
    if run.checkpoint:
        model = f"{run.run_dir}, step {trainer.step}"
    sequences = plural(run.config.train.validate_sequences, "sequence")
    print(f"for {model}, on up to {sequences} of {run.config.data.context} tokens", flush=True)
