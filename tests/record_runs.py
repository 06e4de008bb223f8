"""Record what small runs of the command line compute: losses, gradient norms and final weights.

    export PYTHONPATH=src:tests
    python tests/record_runs.py --out runs.json                         # before a change
    python tests/record_runs.py --out after.json --against runs.json    # after it
    ... --begun-with OTHER/src      # each run begins with other sources, and resumes with these

Each case trains eight steps, and again from its checkpoint of step 4, which must give the same.
Results are bitwise; compare recordings from one machine and one version of torch.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from ithaka.log.metrics import read_metrics

STEPS = 8
RESUMED_AT = 4
METRICS = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens", "label_tokens")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
Settings = dict[str, Any]  # sections of a YAML file
CURRICULUM = [
    {"context": 61, "steps": 3},
    {"context": 122, "steps": 3, "rope": {"theta": 5e4}, "data": {"documents": "together"}},
    {"context": 61, "steps": 2, "optim": {"lr": 5e-4, "warmup_steps": 1}},
]
ADAPTER = {"rank": 4, "dropout": 0.2}
# Ranks, and what differs from `common_settings`. TEACHER and PAIRS are replaced by paths.
CASES: dict[str, tuple[int, Settings]] = {
    "one rank, accumulation": (1, {"train": {"accumulate": 2}}),
    "cp 2, accumulation": (2, {"parallel": {"cp": 2}, "train": {"accumulate": 2}}),
    "two data ranks, Muon": (2, {"parallel": {"cp": 1}, "optim": {"name": "muon"}}),
    "curriculum, cp 2": (2, {"parallel": {"cp": 2}, "curriculum": CURRICULUM}),
    "DPO, cp 2": (2, {"parallel": {"cp": 2}, "loss": {"type": "dpo"}, "data": {"path": "PAIRS"}}),
    "distillation": (1, {"loss": {"type": "distill", "teacher": "TEACHER", "cross_entropy": 0.3}}),
    "adapter with dropout, cp 2": (2, {"parallel": {"cp": 2}, "adapter": ADAPTER}),
}


def write_inputs(folder: Path) -> None:
    """Write a model, a teacher, text files and pairs of answers."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "texts").mkdir()
    for number in range(40):
        words = [f"Document {number}:", *map(str, range(number, 3 * number))]
        (folder / "texts" / f"{number:02d}.txt").write_text(" ".join(words))
    pairs = [
        {"prompt": f"{n} times {'?' * (n % 5)}", "chosen": f" It is {n * n}.", "rejected": f" {n}"}
        for n in range(1, 80)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def common_settings(folder: Path) -> Settings:
    return {
        "model": {"path": str(folder / "config.json")},
        "data": {
            "path": str(folder / "texts"),
            "tokenizer": "bytes",
            "context": 61,
            "validation_fraction": 0.2,
        },
        "optim": {"lr": 1e-2, "warmup_steps": 2, "clip_norm": 0.5},
        "train": {
            "steps": STEPS,
            "save_every": RESUMED_AT,
            "keep_last": 9,
            "validate_every": 3,
            "validate_sequences": 2,
            "deterministic": True,
        },
    }


def settings_of(case: str, folder: Path) -> Settings:
    _, changes = CASES[case]
    tree = common_settings(folder)
    for name, values in changes.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    if "curriculum" in tree:
        del tree["train"]["steps"], tree["data"]["context"]
    if tree["data"]["path"] == "PAIRS":
        tree["data"]["path"] = str(folder / "pairs.jsonl")
    if tree.get("loss", {}).get("teacher"):
        tree["loss"]["teacher"] = str(folder / "teacher")
    return tree


def ithaka(source: Path, *arguments: object) -> None:
    """Run a command with these sources. Raises its output if it fails."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ithaka", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def hash_run(run_dir: Path, source: Path) -> dict[str, str]:
    """Return the hashes of each step's metrics and of each file of weights."""
    hashes = {}
    for record in read_metrics(run_dir / "metrics.jsonl"):
        values = [record[name] for name in METRICS]
        hashes[f"step {record['step']}"] = hash_bytes(json.dumps(values).encode())
    exported = run_dir.with_name(run_dir.name + "-exported")
    ithaka(source, "export", run_dir, exported)
    for file in sorted(exported.glob("*.safetensors")):
        hashes[file.name] = hash_bytes(file.read_bytes())
    return hashes


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def record_case(case: str, folder: Path, source: Path, begun_with: Path) -> dict[str, str]:
    """Return the run's hashes; a run that fails is an entry, too."""
    try:
        return train_and_resume(case, folder, source, begun_with)
    except RuntimeError as error:
        print(f"{case} failed: {error}", flush=True)
        return {"differs after resuming": "failed"}


def train_and_resume(case: str, folder: Path, source: Path, begun_with: Path) -> dict[str, str]:
    """Return the run's hashes, and which of the resumed run's differ from them."""
    num_ranks, _ = CASES[case]
    name = case.replace(" ", "-").replace(",", "")
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings_of(case, folder)))
    run_dir = folder / name
    resumed = folder / f"{name}-resumed"
    ithaka(begun_with, "train", file, "--run-dir", run_dir, "--ranks", num_ranks)
    shutil.copytree(run_dir, resumed)
    (resumed / "latest").write_text(f"step-{RESUMED_AT:08d}\n")
    ithaka(source, "train", "--resume", resumed, "--ranks", num_ranks)
    hashes = hash_run(run_dir, begun_with)
    again = hash_run(resumed, source)
    changed = [entry for entry in hashes if again.get(entry) != hashes[entry]]
    return {**hashes, "differs after resuming": ", ".join(changed)}


def record_runs(source: Path, begun_with: Path) -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        teacher = common_settings(folder) | {"model": {"path": str(folder / "config.json")}}
        teacher["train"] |= {"steps": 2, "save_every": 2}
        (folder / "teacher.yaml").write_text(yaml.safe_dump(teacher))
        ithaka(
            begun_with,
            "train",
            folder / "teacher.yaml",
            "--run-dir",
            folder / "taught",
            "--ranks",
            1,
        )
        ithaka(begun_with, "export", folder / "taught", folder / "teacher")
        with ThreadPoolExecutor(2) as pool:
            hashes = pool.map(
                lambda case: train_and_resume(case, folder, source, begun_with), CASES
            )
            return dict(zip(CASES, hashes, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what small runs compute, and compare it.")
    parser.add_argument("--out", type=Path, required=True, help="Write the JSON file here.")
    parser.add_argument("--against", type=Path, help="An earlier file to compare with.")
    parser.add_argument("--begun-with", type=Path, help="The sources with which each run begins.")
    args = parser.parse_args()
    source = Path(__file__).parents[1] / "src"
    recorded = record_runs(source, args.begun_with or source)
    args.out.write_text(json.dumps(recorded, indent=1) + "\n")
    wrong = [
        f"{case}: {hashes['differs after resuming']} differ after resuming"
        for case, hashes in recorded.items()
        if hashes["differs after resuming"]
    ]
    if args.against:
        before = json.loads(args.against.read_text())
        for case in sorted(before.keys() | recorded.keys()):
            old = before.get(case, {})
            new = recorded.get(case, {})
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            if keys:
                wrong.append(f"{case}: {', '.join(keys)} differ from {args.against}")
    print("\n".join([*wrong, f"{len(recorded)} runs, {len(wrong)} differences"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
