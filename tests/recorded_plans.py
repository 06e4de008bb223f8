"""Record 200 plans of built-in models, and compare two records.

`python tests/recorded_plans.py record FILE` writes one JSON object per plan;
`... compare BEFORE AFTER` lists the plans that differ by more than 3 % in GPU peak, speed or
longest context; `... trace AFTER NUMBER...` compares the peaks of some of them with traces. To
record another version of the planner: PYTHONPATH=ITS_SRC.
"""

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ithaka.config.units import format_tokens
from ithaka.plan.hardware import GIB, find_hardware
from ithaka.plan.search import Plan
from ithaka.run.check_request import make_request

LIMIT = 0.03
MODELS = (
    *(
        "llama3-8b",
        "llama3.1-70b",
        "llama3.2-1b",
        "mistral-7b",
        "qwen2.5-7b",
        "qwen3-32b",
        "smollm2-1.7b",
    ),
    *(
        "gpt-oss-20b",
        "gemma-3-4b",
        "olmo-3-7b",
        "phi-4",
        "qwen3-30b-a3b",
        "qwen3.5-9b",
        "falcon-h1-7b",
    ),
    *("granite-4-h-small", "lfm2-8b-a1b", "qwen3-vl-4b"),
)
# GPUs, context (None: the longest), host memory, disk, adapter, settings
MACHINES: tuple[
    tuple[str, str | None, str | None, str | None, int | None, tuple[str, ...]], ...
] = (
    ("8xH100-80GB", "1M", "2TB", None, None, ()),
    ("8xH100-80GB", "128K", "2TB", None, None, ()),
    ("8xH200", "4M", "2TB", "30TB", 16, ()),
    ("1xH200", "64K", "200GB", None, None, ("optim.name=adamw8bit",)),
    ("1xH200", "256K", "200GB", None, 16, ("adapter.base=nf4",)),
    ("1xH200", "32K", None, None, 16, ("loss.type=dpo",)),
    ("2x8xH100-80GB", "2M", "2TB", None, None, ()),
    (
        "8xA100-80GB",
        "256K",
        "1TB",
        None,
        None,
        ("memory.overlap=false", "memory.stored_dtype=null"),
    ),
    ("8xH100-80GB", "512K", "1TB", "8TB", None, ("memory.offload=disk",)),
    ("4xH100-80GB", "128K", "1TB", None, None, ("parallel.heads_per_stage=8",)),
    ("8xH100-80GB", None, "2TB", None, None, ()),
    ("1xH200", None, "200GB", None, 16, ()),
)
CASES = list(product(MODELS, MACHINES))[:200]


def make_plan(case: tuple[str, Any]) -> tuple[Plan, int]:
    """The plan of a case, and the longest context if it asks for it."""
    model, (gpus, context, host, disk, adapter, settings) = case
    hardware = find_hardware(gpus, None, host, disk)
    request = make_request(model, hardware, context or "128K", 1, list(settings), adapter)
    request = replace(request, trace=None)
    return (request.plan(), 0) if context else request.longest_plan()[:2]


def record(file: Path) -> None:
    with file.open("w", encoding="utf-8") as out:
        for number, case in enumerate(CASES):
            try:
                plan, longest = make_plan(case)
            except Exception as error:
                values: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
            else:
                ledger = plan.ledger
                values = {
                    "fits": plan.fits,
                    "longest": longest,
                    "tokens/s": plan.tokens_per_s_per_gpu,
                }
                values |= {
                    "GPU": ledger.gpu_peak - ledger.gpu["reserve"],
                    "host": ledger.host_needed,
                }
                values |= {"phase": ledger.phase, "settings": plan.settings}
            print(json.dumps({"number": number, "case": case, **values}), file=out, flush=True)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def compare(before: Path, after: Path) -> None:
    rows = 0
    settings = 0
    for old, new in zip(read(before), read(after), strict=True):
        if "error" in old or "error" in new:
            if old.get("error") != new.get("error"):
                print(describe(old), old.get("error"), "->", new.get("error"))
            continue
        changes = {
            name: new[name] / old[name] - 1 for name in ("GPU", "tokens/s", "longest") if old[name]
        }
        different = {
            name: (old["settings"].get(name), value) for name, value in new["settings"].items()
        }
        different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
        settings += bool(different)
        if old["fits"] != new["fits"] or any(abs(change) > LIMIT for change in changes.values()):
            rows += 1
            shown = ", ".join(f"{name} {change:+.1%}" for name, change in changes.items())
            fits = f"fits: {old['fits']} -> {new['fits']}, " if old["fits"] != new["fits"] else ""
            print(f"{describe(old)}: {fits}{shown}; {different}")
    print(
        f"{rows} of {len(read(after))} plans differ by more than {LIMIT:.0%}; {settings} have "
        "other settings"
    )


def describe(row: dict[str, Any]) -> str:
    model, (gpus, context, *more) = row["case"]
    return f"{row['number']} {model} {gpus} {context or format_tokens(row['longest'])} {more}"


def trace(numbers: list[int]) -> None:
    from ithaka.plan.models import find_config
    from ithaka.trace.trace_plan import trace_peaks

    for number in numbers:
        plan, _ = make_plan(CASES[number])
        peaks = trace_peaks(find_config(CASES[number][0]), plan)
        planned = plan.ledger.gpu_peak - plan.ledger.gpu["reserve"]
        if peaks is not None:
            print(
                f"{number} {CASES[number]}: planned {planned / GIB:.2f}, traced "
                f"{peaks.device / GIB:.2f} GiB, "
                f"{planned / peaks.device - 1:+.1%}",
                flush=True,
            )


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "record":
        record(Path(arguments[0]))
    elif command == "compare":
        compare(*map(Path, arguments))
    else:
        trace(list(map(int, arguments)))
