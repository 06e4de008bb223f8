"""A command imports slow packages only if it uses them."""

import json
import subprocess
import sys

import pytest

MODEL_PACKAGES = (
    *(
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "transformers.modeling_utils",
    ),
    *("torchao", "peft", "datasets", "bitsandbytes"),
)
REFUSED = "data.path=missing.jsonl does not exist"
SETTINGS = """
model: {embedded: small}
data: {path: records.jsonl, context: 1024}
parallel: {ranks: 1}
"""
SCRIPT = """
import sys
from ithaka.cli import main
try:
    main()
finally:
    print("imported", *sys.modules)
"""


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps({"text": f"record {number}. " * 40}) for number in range(30)]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    (tmp_path / "run.yaml").write_text(SETTINGS)
    return tmp_path


def run_command(folder, *arguments):
    """What the command prints, and the modules that it has imported at its end."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    output, _, modules = done.stdout.rpartition("imported ")
    return output + done.stderr, set(modules.split())


@pytest.mark.parametrize(
    ("arguments", "text", "unused"),
    [
        (["--help"], "Train Hugging Face models", ("torch", "transformers", "numpy")),
        (["data", "run.yaml"], "1 file (jsonl)", ("torch", *MODEL_PACKAGES)),
        (["train", "run.yaml", "--set", "data.path=missing.jsonl"], REFUSED, MODEL_PACKAGES),
        (["export", "missing", "out"], "missing does not exist", ("datasets", "peft")),
    ],
)
def test_commands_import_what_they_use(folder, arguments, text, unused):
    if "run.yaml" in arguments:
        # The model's shape is measured once per machine, with all of transformers.
        run_command(folder, "data", "run.yaml")
    output, imported = run_command(folder, *arguments)
    assert text in output
    assert not imported & set(unused)
