"""Extend a model's context on source code, and measure its loss by position before and after.

    python examples/extend.py MODEL OUT --context 256K --steps 24

Trains with YaRN on the installed Python packages: a quarter of the sequences are one document, the
others are packed with documents of about a sixth of the context, whose attention takes a sixth of
the time. The held-out documents are Python's standard library. Evaluates the model, the model with
YaRN but without training (--scaled), and the trained model, and writes before.json, scaled.json and
after.json to OUT. Run it again after a stop: it continues where it was.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ithaka.config import parse_count

CHARS_PER_TOKEN = 4.5  # of source code, at most
LONG_SHARE = 0.25  # of the sequences
# medium documents are shorter than long ones, and so many fill a sequence
SHORTER = 8
PER_SEQUENCE = 6


def find_sources(folder: Path) -> list[Path]:
    """Return the Python files, without tests and other packages."""
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    return sorted(
        file for file in folder.rglob("*.py") if not skipped & {*file.relative_to(folder).parts}
    )


def cut_documents(files: list[Path], num_chars: int) -> Iterator[str]:
    """Join files that follow each other, each under its path, into documents of `num_chars`."""
    parts = list[str]()
    size = 0
    for file in files:
        parts.append(
            f"# {'/'.join(file.parts[-3:])}\n{file.read_text(encoding='utf-8', errors='ignore')}\n"
        )
        size += len(parts[-1])
        while size >= num_chars:
            text = "".join(parts)
            yield text[:num_chars]
            parts = [text[num_chars:]]
            size = size - num_chars


def choose_documents(files: list[Path], num_chars: int, count: int) -> list[str]:
    """Return `count` documents, spread evenly over the files, or fewer."""
    documents = list(cut_documents(files, num_chars))
    if not documents:
        sys.exit(
            f"{files[0].parent} has fewer than {num_chars:,} characters; use a shorter --context"
        )
    return documents[:: max(1, len(documents) // max(1, count))][:count]


def write_documents(path: Path, documents: list[str]) -> None:
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8"
    )
    print(
        f"{path}: {len(documents)} documents, {sum(map(len, documents)):,} characters", flush=True
    )


def write_texts(out: Path, context: int, steps: int, num_held_out: int) -> None:
    specs = (importlib.util.find_spec(name) for name in ("torch", "transformers"))
    folders = {Path(spec.origin).parents[1] for spec in specs if spec and spec.origin}
    files = [file for folder in sorted(folders) for file in find_sources(folder)]
    num_chars = round(CHARS_PER_TOKEN * context)
    num_long = max(1, round(LONG_SHARE * steps))
    long = choose_documents(files, num_chars, num_long)
    medium = choose_documents(files, num_chars // SHORTER, PER_SEQUENCE * (steps - num_long))
    write_documents(out / "train.jsonl", long + medium)
    library = find_sources(Path(sysconfig.get_path("stdlib")))
    write_documents(out / "held-out.jsonl", choose_documents(library, num_chars, num_held_out))


def write_scaled(model: Path, rope: dict[str, Any], context: int, folder: Path) -> None:
    """Write a copy of the model that has YaRN and positions up to `context`."""
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    old = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    scaled = {"rope_type": "yarn", "factor": rope["factor"], "rope_theta": old["rope_theta"]}
    scaled["original_max_position_embeddings"] = config["max_position_embeddings"]
    changed = config | {"rope_parameters": scaled, "max_position_embeddings": context}
    for file in model.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            os.symlink(file.resolve(), folder / file.name)
    (folder / "config.json").write_text(json.dumps(changed))


def ithaka(*arguments: object, output: Path | None = None) -> None:
    """Run a command; write its output to a file if it succeeds."""
    command = [sys.executable, "-m", "ithaka", *map(str, arguments)]
    if output is None:
        subprocess.run(command, check=True)
    elif not output.exists():
        output.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("out", type=Path)
    parser.add_argument("--context", default="256K", help="new length, in tokens")
    parser.add_argument("--steps", type=int, default=24, help="of one sequence each")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--documents", type=int, default=4, help="held-out documents")
    parser.add_argument("--scaled", action="store_true", help="also evaluate YaRN without training")
    options = parser.parse_args(arguments)
    model = options.model
    out = options.out
    context = parse_count(options.context)
    if not (model / "config.json").is_file():
        parser.error(f"{model} has no config.json; give a Hugging Face directory")
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    if context <= positions:
        parser.error(
            f"--context {options.context} is within the model's {positions} positions; give a "
            "longer one"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_texts(out, context, options.steps, options.documents)
    rope = {"type": "yarn", "factor": context / positions}
    config = {
        "model": {"path": str(model), "rope": rope},
        "data": {"path": str(out / "train.jsonl"), "context": context, "validation_fraction": 0},
        "parallel": {"ranks": 1},
        "optim": {"lr": options.lr, "warmup_steps": max(1, options.steps // 10)},
        "train": {
            "steps": options.steps,
            "validate_every": 0,
            "validate_sequences": 0,
            "save_minutes": 5,
        },
    }
    (out / "extend.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    measure = [
        "--contexts",
        context,
        "--data",
        out / "held-out.jsonl",
        "--documents",
        options.documents,
    ]
    measure += ["--samples", 0, "--json"]
    ithaka("evaluate", model, *measure, output=out / "before.json")
    if options.scaled:
        write_scaled(model, rope, context, out / "scaled")
        ithaka("evaluate", out / "scaled", *measure, output=out / "scaled.json")
    ithaka("train", out / "extend.yaml", "--run-dir", out / "run", "--resume", "auto")
    ithaka("evaluate", out / "run", *measure, output=out / "after.json")
    if options.scaled:
        ithaka("evaluate", out / "before.json", out / "scaled.json")
    ithaka("evaluate", out / "before.json", out / "after.json")


if __name__ == "__main__":
    main()
