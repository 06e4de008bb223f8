"""Count what lies between `ithaka train` and the start of the first rank.

    PYTHONPATH=src:tests python tests/count_road.py              figures
    PYTHONPATH=src:tests python tests/count_road.py --modules    also the functions by module

Trains FILE, in a process with a profiling hook that stops it where the ranks would start. Counts
ithaka's functions that are entered, the modules they are in, how often control comes back to a
module that it left before, and how often a YAML file is parsed.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import yaml
from typer.testing import CliRunner

import ithaka
from ithaka.cli import app
from ithaka.run import launch

PACKAGE = f"{Path(ithaka.__file__).parent}{os.sep}"
MODEL = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FILE = """
model: {path: FOLDER/config.json}
adapter: {rank: 4}
data: {path: FOLDER/texts.jsonl, tokenizer: bytes, context: 64, validation_fraction: 0}
parallel: {ranks: 2, cp: 2}
memory: {keep_attention: 20, tile_tokens: 32, offload: host}
optim: {lr: 1.0e-3, warmup_steps: 2}
train: {steps: 4, save_every: 2}
"""


class Arrived(Exception):
    """The ranks would start."""


@dataclass
class Road:
    """What was entered on the way."""

    functions: Counter[str] = field(default_factory=Counter)  # module:function -> calls
    modules: Counter[str] = field(default_factory=Counter)  # module -> calls
    returns: Counter[str] = field(default_factory=Counter)  # left -> entered again
    yaml_files: int = 0
    here: str = ""

    def enter(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        code = frame.f_code
        if code.co_name == "<module>" or code.co_name.startswith("<"):
            return  # an import, or a comprehension
        module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py")
        self.functions[f"{module}:{code.co_qualname}"] += 1
        if module != self.here:
            if module in self.modules:
                self.returns[f"{self.here} -> {module}"] += 1
            self.here = module
        self.modules[module] += 1


def walk(folder: Path) -> Road:
    """Start `ithaka train`, and stop it where the ranks would start."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "texts.jsonl").write_text(json.dumps({"text": "word " * 40}))
    (folder / "file.yaml").write_text(FILE.replace("FOLDER", str(folder)))
    road = Road()
    compose = yaml.load

    def load(stream: str, loader: type) -> object:
        road.yaml_files += "keep_attention: 20" in str(stream)
        return compose(stream, loader)

    def arrive(*_: object) -> int:
        sys.setprofile(None)
        raise Arrived

    runner = CliRunner()
    arguments = ["train", str(folder / "file.yaml"), "--run-dir", str(folder / "run")]
    original = launch.run_ranks
    launch.run_ranks = arrive
    yaml.load = load
    sys.setprofile(road.enter)
    try:
        result = runner.invoke(app, arguments)
    finally:
        sys.setprofile(None)
        launch.run_ranks = original
        yaml.load = compose
    assert isinstance(result.exception, Arrived), result.output
    return road


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        walk(Path(name))  # imports, and what is computed once per process
        road = walk(Path(name))
    print(
        f"{road.functions.total()} functions entered ({len(road.functions)} different), "
        f"{len(road.modules)} modules, {road.returns.total()} returns to a module, "
        f"the YAML file parsed {road.yaml_files} times"
    )
    if arguments.modules:
        for module, count in (road.modules + road.returns).most_common():
            print(f"{count:6}  {module}")


if __name__ == "__main__":
    main()
