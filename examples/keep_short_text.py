"""Extend a small model's context on long text while self-distillation preserves its loss on short
text.

A model is trained on short English text (docstrings of Python's standard library, up to 64 bytes),
then extended to 256 bytes on source code, once with the cross-entropy alone and once with the
original model as the teacher on short text. Prints both losses during both runs. Takes a few
minutes on two CPU cores:

    python examples/keep_short_text.py OUT
"""

import ast
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import yaml

MODEL = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
# tokens
SHORT = 64
LONG = 256


def write_texts(out: Path) -> None:
    """Write the docstrings and the source files of the standard library, and hold out every
    tenth."""
    short = list[str]()
    long = list[str]()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="ignore")
        long += [source] if len(source) > 4 * LONG else []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                text := ast.get_docstring(node)
            ):
                short += [text[: SHORT - 2]] if len(text) >= SHORT else []
    for name, texts in (("short", short), ("long", long)):
        for part, chosen in (
            ("heldout", texts[::10]),
            ("train", [t for i, t in enumerate(texts) if i % 10]),
        ):
            lines = (json.dumps({"text": text}) + "\n" for text in chosen)
            (out / f"{name}-{part}.jsonl").write_text("".join(lines))


def train(out: Path, name: str, steps: int, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `ithaka train`, and return its metrics."""
    validation = {
        "validate_every": max(1, steps // 6),
        "validate_sequences": 16,
        "keep_last": 1,
        "save_minutes": 0,
    }
    shared = {
        "optim": {"lr": 2e-3, "warmup_steps": 10},
        "train": {"steps": steps, "batch": 4, **validation},
    }
    config = {**sections, "optim": shared["optim"] | sections.get("optim", {})}
    config["train"] = shared["train"] | {"run_dir": str(out / name)}
    config["parallel"] = {"ranks": 1}
    (out / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    subprocess.run([sys.executable, "-m", "ithaka", "train", str(out / f"{name}.yaml")], check=True)
    return [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]


def main(
    out: Path, base_steps: int = 400, steps: int = 90
) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, loss on short text, loss on long text) of both runs."""
    out.mkdir(parents=True, exist_ok=True)
    write_texts(out)
    (out / "config.json").write_text(json.dumps(MODEL))
    files = {
        name: str(out / f"{name}.jsonl")
        for name in ("short-train", "short-heldout", "long-train", "long-heldout")
    }
    tokens = {"tokenizer": "bytes"}
    data = {
        "path": files["short-train"],
        "validation_path": files["short-heldout"],
        "context": SHORT,
        **tokens,
    }
    train(out, "base", base_steps, model={"path": str(out / "config.json")}, data=data)
    command = [
        sys.executable,
        "-m",
        "ithaka",
        "export",
        str(out / "base"),
        str(out / "model"),
        "--force",
    ]
    subprocess.run(command, check=True)
    model = {"path": str(out / "model"), "rope": {"theta": 1.0e5}}
    data = {"validation_path": files["long-heldout"], "context": LONG, **tokens}
    short = {
        "every": max(1, steps // 6),
        "contexts": [SHORT - 4],
        "data": files["short-heldout"],
        "documents": 32,
    }
    shared: Any = {"model": model, "evaluate": short | {"samples": 0}, "optim": {"lr": 1e-3}}
    curves = {}
    for name, loss, sources in (
        ("cross-entropy", "cross_entropy", [{"path": files["long-train"]}]),
        (
            "self-distillation",
            {"type": "distill", "teacher": str(out / "model")},
            [
                {"path": files["long-train"], "weight": 3},
                {"path": files["short-train"], "weight": 1},
            ],
        ),
    ):
        records = train(out, name, steps, data=data | {"sources": sources}, loss=loss, **shared)
        rows = [
            (each["step"], each.get("evaluate/loss"), each.get("val_loss"))
            for each in records
            if "step" in each
        ]
        curves[name] = [
            (step, short, long)
            for step, short, long in rows
            if short is not None and long is not None
        ]
    return curves


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    print(f"{'step':>5} {'short text':^37} {'long text':^37}")
    print(
        f"{'':>5} {'cross-entropy':>18} {'self-distillation':>18} {'cross-entropy':>18} "
        f"{'self-distillation':>18}"
    )
    for (step, *plain), (_, *taught) in zip(*found.values(), strict=True):
        print(
            f"{step:>5} {plain[0]:>18.3f} {taught[0]:>18.3f} {plain[1]:>18.3f} {taught[1]:>18.3f}"
        )
