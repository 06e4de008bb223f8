"""Training steps of Hugging Face + Liger and of ithaka on the same model, tokens and GPU: a table and a plot.

    pip install -r benchmarks/requirements.txt
    python benchmarks/against_liger.py --out DIR                        # about five minutes on an H200
    python benchmarks/against_liger.py --out DIR --only 'ithaka 64K'    # some of it again; DIR has the rest
    python benchmarks/against_liger.py --out DIR --only nothing         # the table and the plot of what DIR has
    python benchmarks/against_liger.py --out DIR --tiny                 # does it run? A tiny model, also on a CPU

Each side has a process of its own, and their cases alternate, so that a GPU that slows down slows both. The model is a
Llama 3.2 3B cut to six layers, from 128K up to four.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KEPT_WITHIN = 1.10  # their variants slower than this times their fastest are left out of longer contexts
ATTENTION, PRECISION = ("sdpa", "flash_attention_4"), ("autocast", "fsdp2")
FIXED = {"off": "none", "on": "full"}  # ithaka's counterpart, besides what it plans
HEADINGS = {"off": "Nothing recomputed", "on": "Checkpointing"}
PACKED = {"sdpa": " on rows of a batch", "flash_attention_4": " on packed rows"}
COLUMNS = ("tokens", "Hugging Face + Liger", "with", "ithaka, {}", "ithaka, planned within their memory",
           "tokens/s, theirs = 1", "GiB, theirs = 1", "losses differ by")  # fmt: skip


def start(side: str, log: Path) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).with_name("one_case.py")), side]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("a"), text=True)


def text_of(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def count_of(text: str) -> int:
    return int(text[:-1]) * 1024 if text.upper().endswith("K") else int(text)


def name_of(row: Row) -> str:
    how = f"{row['attention']} {row['precision']}" if row["side"] == "hf" else row["how"]
    packed = " packed" * bool(row["documents"])
    return f"{row['side']} {text_of(row['tokens'])}{packed} checkpointing={row['checkpointing']} {how}"


class Benchmark:
    """`rows`: the latest of each case in DIR/results.jsonl, by its name."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.file, self.begin = options, options.out / "results.jsonl", time.monotonic()
        self.sides: dict[str, subprocess.Popen] = {}
        self.rows: dict[str, Row] = {}
        self.about: dict[str, str] = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            self.take(line)

    def take(self, line: str, new: bool = False) -> None:
        row = json.loads(line)
        if new:
            with self.file.open("a") as file:
                print(line.strip(), file=file)
        if "about" in row:
            self.about |= row["about"]
        else:
            self.rows[name_of(row)] = row

    def measure(self, case: Row) -> Row:
        """The case's row: new, or from DIR where it is not to be run; empty if there is none."""
        name, side = name_of(case), case["side"]
        late = 0 < self.options.seconds < time.monotonic() - self.begin
        if not late and re.search(self.options.only, name):
            log = f"{side}.log"
            if side not in self.sides:
                self.sides[side] = start(side, self.options.out / log)
                self.take(self.sides[side].stdout.readline() or sys.exit(f"{side} does not start; see {log}"), new=True)
            print(json.dumps(case), file=self.sides[side].stdin, flush=True)
            line = self.sides[side].stdout.readline()
            if not line:
                del self.sides[side]
            self.take(line or json.dumps(case | {"failed": f"the process ended; see {log}"}), new=True)
            print(f"{time.monotonic() - self.begin:5.0f} s  {name}: {cell(self.rows[name])}", flush=True)
        return self.rows.get(name, {})

    def run(self) -> None:
        """By length; of each, theirs and ours in turn, and then ours as planned within what their fastest took."""
        everything = [(attention, precision) for attention in self.options.attention for precision in PRECISION]
        kept = dict.fromkeys(FIXED, everything)
        for tokens, documents in self.options.cases:
            for checkpointing, how in FIXED.items():
                layers = min(self.options.layers, 4) if tokens >= 128 * 1024 else self.options.layers
                case = {"model": self.options.model, "tokens": tokens, "documents": documents, "layers": layers}
                case |= {"checkpointing": checkpointing}
                theirs, ours = [], {**case, "side": "ithaka", "how": how}
                for attention, precision in everything if documents else kept[checkpointing]:
                    theirs.append(self.measure({**case, "side": "hf", "attention": attention, "precision": precision}))
                    if len(theirs) == 1:
                        self.measure(ours)
                best = fastest(theirs)
                near = [row for row in theirs if best and row.get("step_s", 1e9) <= KEPT_WITHIN * best["step_s"]]
                if near and not documents:
                    kept[checkpointing] = [(row["attention"], row["precision"]) for row in near]
                self.measure({**ours, "how": "planned", "within_GiB": best.get("peak_GiB")})
            write(self.rows, self.about, self.options.out)


def fastest(rows: list[Row]) -> Row:
    """Empty if none ran."""
    return min((row for row in rows if "step_s" in row), key=lambda row: row["step_s"], default={})


def pairs(rows: dict[str, Row], checkpointing: str) -> list[tuple[str, Row, Row, dict[str, Row]]]:
    """By context: what it is, their fastest, the one of ours to compare it with, and all of ours.

    That is our fastest of those that need no more memory than theirs or, where none does, our fastest.
    """
    found = []
    for key in sorted({(row["documents"], row["tokens"]) for row in rows.values()}):
        same = [
            row
            for row in rows.values()
            if (row["documents"], row["tokens"], row["checkpointing"]) == (*key, checkpointing)
        ]
        theirs = fastest([row for row in same if row["side"] == "hf"])
        ours = [row for row in same if row["side"] == "ithaka"]
        fair = [row for row in ours if (row.get("peak_GiB") or 0) <= (theirs.get("peak_GiB") or 1e9)]
        what = text_of(key[1]) + (f" of {text_of(key[0])} documents" if key[0] else "")
        found.append((what, theirs, fastest(fair) or fastest(ours), {row["how"]: row for row in ours}))
    return found


def cell(row: Row) -> str:
    if "step_s" not in row:
        return "out of memory" if "out_of_memory" in row else row.get("failed", "not run").replace("|", "/")[:80]
    return f"{row['step_s']:.3f} s" + (f", {row['peak_GiB']:.1f} GiB" if row["peak_GiB"] else "")


def ratio(ours: Row, theirs: Row, figure: str) -> str:
    return f"{ours[figure] / theirs[figure]:.2f}" if ours.get(figure) and theirs.get(figure) else ""


def write(rows: dict[str, Row], about: dict[str, str], out: Path) -> None:
    """table.md and plot.png. Seconds are the median step's, GiB the most that PyTorch had allocated in one."""
    lines = [", ".join(f"{name} {value}" for name, value in about.items())]
    for checkpointing, heading in HEADINGS.items():
        columns = " | ".join(COLUMNS).format(f"checkpoint: {FIXED[checkpointing]}")
        lines += ["", f"**{heading}**", "", f"| {columns} |", "|---" * len(COLUMNS) + "|"]
        for what, theirs, best, ours in pairs(rows, checkpointing):
            how = PACKED[theirs["attention"]] * bool(theirs["documents"]) if theirs else ""
            cells = [what, cell(theirs), f"{theirs['attention']}{how}, {theirs['precision']}" if theirs else ""]
            cells += [cell(ours.get(way, {})) for way in (FIXED[checkpointing], "planned")]
            cells += [ratio(best, theirs, "tokens_per_s"), ratio(best, theirs, "peak_GiB")]
            apart = [abs(a - b) for a, b in zip(theirs.get("losses", ()), best.get("losses", ()), strict=False)]
            lines.append(f"| {' | '.join(cells)} | {f'{max(apart):.4f}' if apart else ''} |")
    (out / "table.md").write_text("\n".join(lines) + "\n")
    try:
        draw(rows, about, out / "plot.png")
    except ImportError as error:
        print(f"no plot: {error}; install matplotlib and run again with --only nothing", flush=True)


def draw(rows: dict[str, Row], about: dict[str, str], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    for column, (checkpointing, heading) in enumerate(HEADINGS.items()):
        compared = [pair for pair in pairs(rows, checkpointing) if " of " not in pair[0]]
        for ax, name, label in zip(
            axes[:, column], ("tokens_per_s", "peak_GiB"), ("tokens/s", "peak, GiB"), strict=True
        ):
            for side, place, colour in (("Hugging Face + Liger", 1, "#b0651d"), ("ithaka", 2, "#1d5fb0")):
                heights = [pair[place].get(name) or float("nan") for pair in compared]
                ax.plot([pair[0] for pair in compared], heights, "o-", color=colour, label=side)
            ax.set_ylim(bottom=0)
            ax.set_ylabel(label)
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(heading)
        axes[1, column].set_xlabel("tokens")
    axes[0, 0].legend(frameon=False)
    figure.suptitle(f"Llama 3.2 3B, cut to six layers (four at 128K), {about.get('device', '')}")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--lengths", default="8K,16K,32K,64K,128K")
    parser.add_argument("--packed", default="128K/4K", metavar="TOKENS/DOCUMENT", help="packed documents; '' for none")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", default="", metavar="REGEX", help="the cases to run, by the names that a run prints")
    parser.add_argument("--seconds", type=float, default=0, help="start no case after this long; 0: no limit")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.lengths, options.packed, options.layers = "256,512", "512/64", 2
    options.model, options.attention = ("tiny", ATTENTION[:1]) if options.tiny else ("3b", ATTENTION)
    options.cases = [(count_of(text), 0) for text in options.lengths.split(",") if text]
    options.cases += [tuple(map(count_of, options.packed.split("/")))] if options.packed else []
    options.out.mkdir(parents=True, exist_ok=True)
    Benchmark(options).run()
    print((options.out / "table.md").read_text())


if __name__ == "__main__":
    main()
