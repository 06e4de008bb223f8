"""Find out whether a small model of a causal type goes through what `ithaka train` does with a
directory.

python tests/survey_files.py TYPE...    print what fails, or that nothing does
"""

import io
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM

from ithaka.checkpoint.export import export
from ithaka.comm.mesh import end_process_group, make_mesh
from ithaka.config import ConfigError
from ithaka.layout import Layout
from ithaka.model.build import build_model
from ithaka.plan.hardware import find_hardware
from ithaka.run.check_request import make_request
from ithaka.run.draft import Request
from ithaka.run.road import prepare_run
from ithaka.train import loop
from parity import random_ids
from runs import copy_run_at_step, metrics, saves_in_time
from survey import TOKENS, Small, shorten, small_variants

WORDS = 3000
TOLERANCE = 1e-4  # error of fp32 logits, relative to the largest


def why_not_from_files(variant: Small) -> str:
    """Save a model as transformers does, then plan, build, train, resume and export it. Return what
    fails, or ''."""
    with tempfile.TemporaryDirectory() as name:
        for what, run in STEPS.items():
            try:
                run(variant, Path(name))
            except (AssertionError, ConfigError) as refused:
                return f"{what}: {shorten(str(refused).replace(name, ''))}"
            except Exception as failed:
                return f"{what}: {type(failed).__name__}: {shorten(str(failed).replace(name, ''))}"
            finally:
                end_process_group()
    return ""


def _save(variant: Small, folder: Path) -> None:
    variant.build().save_pretrained(folder / "model")


def _plan(variant: Small, folder: Path) -> None:
    assert (
        make_request(str(folder / "model"), find_hardware("8xH100-80GB"), "16K", 1, []).plan().fits
    )


@torch.no_grad()
def _build(variant: Small, folder: Path) -> None:
    """The weights are those of transformers, by the logits."""
    plain = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    model = build_model(folder / "model", make_mesh(1), Layout(kernel="reference"), trains=False)
    ids = random_ids(1, TOKENS)
    expected, logits = (each(input_ids=ids).logits for each in (plain.eval(), model))
    error = float((logits - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCE, f"logits differ by {error:.0e}"


def _train(variant: Small, folder: Path) -> None:
    (folder / "text.txt").write_text(" ".join(map(str, range(WORDS))))
    settings = {
        "model": {"path": str(folder / "model")},
        "data": {
            "path": str(folder / "text.txt"),
            "tokenizer": "bytes",
            "context": 61,
            "validation_fraction": 0.0,
        },
        "train": {"run_dir": str(folder / "run"), "steps": 2, "save_every": 1, "validate_every": 0},
    }
    settings["train"]["validate_sequences"] = 0
    settings["parallel"] = {"ranks": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    _run_to_end(prepare_run(Request(folder / "run.yaml")))


def _resume(variant: Small, folder: Path) -> None:
    """The second step, after the first was resumed, has the loss that it had."""
    again = copy_run_at_step(folder / "run", folder / "again", 1)

    _run_to_end(prepare_run(Request(resume=again)))
    losses = [
        [line["loss"] for line in metrics(run) if "loss" in line] for run in (folder / "run", again)
    ]
    assert losses[0] == losses[1], f"losses are {losses[1]} after resuming, not {losses[0]}"


def _export(variant: Small, folder: Path) -> None:
    out = folder / "out"
    export(folder / "run", out)
    stored = (
        AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (out, folder / "model")
    )
    keys, expected = (list(each) for each in stored)
    assert keys == expected, "exported tensors have other names"


def _run_to_end(run) -> None:
    with saves_in_time(), redirect_stdout(io.StringIO()):
        assert loop.train(run) == 0, "the run fails"


STEPS = {
    "cannot be saved": _save,
    "cannot be planned": _plan,
    "cannot be built": _build,
    "cannot be trained": _train,
    "cannot be resumed": _resume,
    "cannot be exported": _export,
}

if __name__ == "__main__":
    import time

    for name in sys.argv[1:]:
        for variant in small_variants(name)[:1]:
            start = time.monotonic()
            print(
                name,
                why_not_from_files(variant) or "passes",
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
