"""Compare training steps of Hugging Face + Liger and ithaka, in a table and a plot.

    pip install liger-kernel==0.8.5 flash-attn-4==4.0.0b36 matplotlib
    python benchmarks/against_liger.py --out DIR                       # seven minutes on an H200
    python benchmarks/against_liger.py --out DIR --only 'ithaka 64K'   # rerun some cases
    python benchmarks/against_liger.py --out DIR --only nothing        # table and plot again
    python benchmarks/against_liger.py --out DIR --tiny                # smoke test, also on a CPU

Both sides have the same model, tokens and GPU.
Each side runs in its own process, and the cases alternate, so that a GPU that throttles slows both.
The model is Llama 3.2 3B truncated to six layers; from 128K on, to four.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from ithaka.config import parse_count
from ithaka.config.units import format_tokens

Row = dict[str, Any]
ATTENTION = ("sdpa", "flash_attention_4")
PRECISION = ("autocast", "fsdp2")
# checkpointing -> memory.checkpoint of ithaka's unplanned case
FIXED = {"off": "none", "on": "full"}
HEADINGS = {"off": "Nothing recomputed", "on": "Checkpointing"}
PACKED = {"sdpa": " on rows of a batch", "flash_attention_4": " on packed rows"}
SERIES = (
    ("Hugging Face + Liger, autocast", "autocast", 1, "#c9a06f"),
    ("Hugging Face + Liger, FSDP2", "fsdp2", 1, "#b0651d"),
    ("ithaka", "fsdp2", 2, "#1d5fb0"),
)
USUAL = {"lengths": "8K,16K,32K,64K,128K", "packed": "128K/4K", "layers": 6}
TINY = {"lengths": "256,512", "packed": "512/64", "layers": 2}
COLUMNS = (
    "tokens",
    "Hugging Face + Liger",
    "with",
    "ithaka, {}",
    "ithaka, planned within their memory",
    "tokens/s, theirs = 1",
    "GiB, theirs = 1",
    "losses differ by",
)


class Benchmark:
    """Runs the cases. `rows`: this model's latest result of each case in DIR/results.jsonl, by case
    name."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file = options.out / "results.jsonl"
        self.begin = time.monotonic()
        self.sides: dict[str, subprocess.Popen] = {}
        earlier = self.file.read_text().splitlines() if self.file.exists() else []
        self.rows: dict[str, Row] = {}
        for row in map(json.loads, earlier):
            if row | self.model_at(row["tokens"]) == row:
                self.rows[case_name(row)] = row
        self.ran = 0

    def model_at(self, tokens: int) -> Row:
        layers = min(self.options.layers, 4) if tokens >= 128 * 1024 else self.options.layers
        return {"model": "tiny" if self.options.tiny else "3b", "layers": layers}

    def measure(self, case: Row) -> Row:
        """Run the case if it is selected. Return its row, new or from DIR; empty if there is
        none."""
        name = case_name(case)
        side = case["side"]
        after_s = time.monotonic() - self.begin
        if re.search(self.options.only, name) and not 0 < self.options.seconds < after_s:
            self.ran += 1
            if (
                side == "hf"
                and not self.options.tiny
                and importlib.util.find_spec("liger_kernel") is None
            ):
                sys.exit("Liger is not installed; see --help, or use --tiny")
            if side not in self.sides:
                command = [sys.executable, Path(__file__).with_name("one_case.py"), side]
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                pipes |= {
                    "env": os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
                }
                log = (self.options.out / f"{side}.log").open("a")
                self.sides[side] = subprocess.Popen(command, **pipes, stderr=log)
            print(json.dumps(case), file=self.sides[side].stdin, flush=True)
            answer = json.loads(self.sides[side].stdout.readline() or "{}")
            row = self.rows[name] = answer or case | {
                "failed": f"its process ended; see {side}.log"
            }
            if "failed" in row:  # a failed process may fail again: start a new one
                self.sides.pop(side).kill()
            with self.file.open("a") as file:
                print(json.dumps(row), file=file)
            print(f"{after_s:5.0f} s  {name}: {cell(row)}", flush=True)
        return self.rows.get(name, {})

    def run(self) -> None:
        """For each length, run theirs and ours in turn, then ours planned within the memory of each
        precision."""
        everything = [
            (attention, precision)
            for attention in self.options.attention
            for precision in PRECISION
        ]
        kept = dict.fromkeys(FIXED, everything)
        for tokens, documents in self.options.cases:
            for checkpointing, how in FIXED.items():
                case = {"tokens": tokens, "documents": documents, "checkpointing": checkpointing}
                case |= self.model_at(tokens)
                theirs = []
                ours = {**case, "side": "ithaka", "how": how}
                for attention, precision in everything if documents else kept[checkpointing]:
                    theirs.append(
                        self.measure(
                            {**case, "side": "hf", "attention": attention, "precision": precision}
                        )
                    )
                    if len(theirs) == 1:
                        self.measure(ours)
                both = [
                    fastest([row for row in theirs if row.get("precision") == name])
                    for name in PRECISION
                ]
                # later, run only the faster attention of each
                if any(both) and tokens >= 16 * 1024 and not documents:
                    kept[checkpointing] = [
                        (row["attention"], row["precision"]) for row in both if row
                    ]
                for within, best in zip(PRECISION, both, strict=True):
                    limit = {"within": within, "within_GiB": best.get("peak_GiB")}
                    self.measure({**ours, "how": "planned", **limit})
            write_table(self.rows, self.options.out / "table.md")
        if not self.ran and self.options.only != "nothing":
            print(f"no case has a name that matches --only {self.options.only!r}", file=sys.stderr)
        try:
            draw(self.rows, self.options.out / "plot.png")
        except ImportError as error:
            print(
                f"no plot: {error}; install matplotlib and run again with --only nothing",
                file=sys.stderr,
            )


def format_context(row: Row) -> str:
    documents = f" of {format_tokens(row['documents'])} documents" if row["documents"] else ""
    return format_tokens(row["tokens"]) + documents


def case_name(row: Row) -> str:
    how = f"{row['attention']} {row['precision']}" if row["side"] == "hf" else row["how"]
    within = f" within {row['within']}" if "within" in row else ""
    return f"{row['side']} {format_context(row)} checkpointing={row['checkpointing']} {how}{within}"


def fastest(rows: list[Row]) -> Row:
    return min((row for row in rows if "step_s" in row), key=lambda row: row["step_s"], default={})


def compare_rows(
    rows: dict[str, Row], checkpointing: str, precision: str
) -> list[tuple[str, Row, Row, dict[str, Row]]]:
    """Return, for each context: its name, their fastest row of a precision, our row to compare it
    with, and all of ours. The row to compare is our fastest that needs no more memory than theirs
    or, if none does, our fastest."""
    comparisons = []
    of_kind = [row for row in rows.values() if row["checkpointing"] == checkpointing]
    of_kind.sort(key=lambda row: (row["documents"], row["tokens"]))
    for context, group in groupby(of_kind, key=format_context):
        same = list(group)
        theirs = fastest([row for row in same if row.get("precision") == precision])
        ours = [row for row in same if row["side"] == "ithaka"]
        fair = [
            row for row in ours if (row.get("peak_GiB") or 0) <= (theirs.get("peak_GiB") or 1e9)
        ]
        by_how = {row["how"]: row for row in ours if row.get("within", precision) == precision}
        comparisons.append((context, theirs, fastest(fair) or fastest(ours), by_how))
    return comparisons


def cell(row: Row) -> str:
    if "step_s" not in row:
        return (
            "out of memory"
            if "out_of_memory" in row
            else row.get("failed", "not run").replace("|", "/")[:80]
        )
    return f"{row['step_s']:.3f} s" + (f", {row['peak_GiB']:.1f} GiB" if row["peak_GiB"] else "")


def write_table(rows: dict[str, Row], file: Path) -> None:
    """Write the table: the median step time, and the peak memory that PyTorch allocated."""
    lines = sorted({row["about"] for row in rows.values() if "about" in row})
    for checkpointing, heading in HEADINGS.items():
        columns = " | ".join(COLUMNS).format(f"checkpoint: {FIXED[checkpointing]}")
        lines += ["", f"**{heading}**", "", f"| {columns} |", "|---" * len(COLUMNS) + "|"]
        compared = [
            each for precision in PRECISION for each in compare_rows(rows, checkpointing, precision)
        ]
        for what, theirs, best, ours in compared:
            cells = [what, cell(theirs), ""] + [
                cell(ours.get(way, {})) for way in (FIXED[checkpointing], "planned")
            ]
            if theirs and best:
                packed = PACKED[theirs["attention"]] * bool(theirs["documents"])
                cells[2] = f"{theirs['attention']}{packed}, {theirs['precision']}"
                memory = f"{best['peak_GiB'] / theirs['peak_GiB']:.2f}" if best["peak_GiB"] else ""
                apart = max(
                    abs(a - b) for a, b in zip(theirs["losses"], best["losses"], strict=False)
                )
                cells += [
                    f"{best['tokens_per_s'] / theirs['tokens_per_s']:.2f}",
                    memory,
                    f"{apart:.4f}",
                ]
            lines.append(f"| {' | '.join(cells)} |")
    file.write_text("\n".join(lines) + "\n")


def draw(rows: dict[str, Row], file: Path) -> None:
    from matplotlib.figure import Figure

    device = next((row["about"].split(",")[0] for row in rows.values() if "about" in row), "")
    figure = Figure(figsize=(9, 6), layout="constrained")
    layers = " and ".join(map(str, sorted({row["layers"] for row in rows.values()}, reverse=True)))
    model = (
        "A tiny Llama" if any(row["model"] == "tiny" for row in rows.values()) else "Llama 3.2 3B"
    )
    figure.suptitle(f"{model}, {layers} layers, {device}")
    for row, axes in zip(
        (("tokens_per_s", "tokens/s"), ("peak_GiB", "peak, GiB")),
        figure.subplots(2, 2),
        strict=True,
    ):
        for ax, (checkpointing, heading) in zip(axes, HEADINGS.items(), strict=True):
            for side, precision, place, color in SERIES:
                compared = [
                    each
                    for each in compare_rows(rows, checkpointing, precision)
                    if " of " not in each[0]
                ]
                heights = [each[place].get(row[0]) or float("nan") for each in compared]
                ax.plot([each[0] for each in compared], heights, "o-", color=color, label=side)
            ax.set(title=heading, xlabel="tokens", ylabel=row[1], ylim=(0, None))
            ax.grid(alpha=0.3)
            ax.legend(frameon=False)
    figure.savefig(file, dpi=150)


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--lengths", metavar="TOKENS,...", help=f"by default {USUAL['lengths']}; '' for none"
    )
    parser.add_argument(
        "--packed", metavar="TOKENS/DOCUMENT", help=f"by default {USUAL['packed']}; '' for none"
    )
    parser.add_argument(
        "--layers", type=int, help=f"by default {USUAL['layers']}; from 128K on, at most 4"
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="run the cases whose printed names match"
    )
    parser.add_argument(
        "--seconds", type=float, default=0, help="start no case after this long; 0: no limit"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(words)
    for name, value in (TINY if options.tiny else USUAL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.attention = ATTENTION if importlib.util.find_spec("flash_attn") else ATTENTION[:1]
    options.cases = [(parse_count(text), 0) for text in options.lengths.split(",") if text]
    if not all(tokens for tokens, _ in options.cases):
        parser.error(f"--lengths {options.lengths}: give numbers of tokens, as in 8K,64K")
    if options.packed:
        tokens, *of_document = map(parse_count, options.packed.split("/"))
        if not (
            tokens and len(of_document) == 1 and of_document[0] and tokens % of_document[0] == 0
        ):
            parser.error(
                f"--packed {options.packed}: give TOKENS/DOCUMENT, a multiple, as in 128K/4K"
            )
        options.cases.append((tokens, of_document[0]))
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only}: not a regular expression: {error}")
    return options


def main() -> None:
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    Benchmark(options).run()
    print((options.out / "table.md").read_text())


if __name__ == "__main__":
    main()
