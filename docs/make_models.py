"""Write the tables of models.md and the count in the README: `make models`, about 20 minutes.

Examines every causal model type of the installed transformers (tests/survey.py), each in a process
of its own, and takes those that are exact through the files of a run (tests/survey_files.py). Exits
with 1 if ithaka accepts a type and computes something else than transformers. `make models
ARGS="bamba moshi"` only prints the results of these types.
"""

import multiprocessing
import os
import re
import resource
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from survey import Finding, examine, small_variants
from survey_files import why_not_from_files

ROOT = Path(__file__).parent.parent
MEMORY_BYTES = 8 * 2**30
TIMEOUT_S = 600
TABLE_HEAD = "| type | attention | experts | error |\n|---|---|---|---|"


# ---- findings


def examine_all(model_types: Iterable[str]) -> list[Finding]:
    findings = []
    for model_type in model_types:
        findings.append(finding := examine_in_child(model_type))
        print(
            f"{model_type:28} {finding.path:8} {_show_error(finding)} {finding.why}{finding.files}",
            flush=True,
        )
    return findings


def examine_in_child(model_type: str) -> Finding:
    """Some types need much memory or time, or end their process."""
    context = multiprocessing.get_context("fork")  # shares the imports
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_examine_and_send, args=(model_type, sender))
    child.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            return Finding(model_type, "unknown", f"takes more than {TIMEOUT_S} s")
        return receiver.recv()
    except EOFError:
        return Finding(model_type, "unknown", "ends its process")
    finally:
        child.kill()
        child.join()


def _examine_and_send(model_type: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    transformers.logging.set_verbosity(60)
    warnings.simplefilter("ignore")
    finding = examine(model_type)
    if finding.is_exact:
        finding = replace(finding, files=why_not_from_files(small_variants(model_type)[0]))
    sender.send(finding)


# ---- tables


def make_tables(findings: list[Finding]) -> str:
    exact = [finding for finding in findings if finding.is_exact]
    from_files = [finding for finding in exact if not finding.files]
    parts = [
        f"transformers {transformers.__version__} has {len(findings)} causal model types; "
        f"{len(exact)} are exact, "
        f"{len(from_files)} of them also from files:",
        "\n".join([TABLE_HEAD, *map(_make_row, exact)]),
    ]
    if len(from_files) < len(exact):
        rows = [
            f"| {finding.model_type} | {finding.files.replace('|', ' ')} |"
            for finding in exact
            if finding.files
        ]
        parts += [
            "Exact in Python, but not from files:",
            "\n".join(["| type | what fails |\n|---|---|", *rows]),
        ]
    if wrong := find_wrong(findings):
        parts += ["Accepted, but not exact:", "\n".join([TABLE_HEAD, *map(_make_row, wrong)])]
    titles = {
        "refused": "Refused:",
        "unknown": "Unknown, because transformers could not build or run a small model:",
    }
    for path, title in titles.items():
        types = defaultdict(list)
        for finding in findings:
            if finding.path == path:
                types[re.sub(r"(a layer )?model\.layers\.\d+", "a layer", finding.why)].append(
                    finding.model_type
                )
        rows = sorted(types.items(), key=lambda item: (-len(item[1]), item[1]))
        table = [f"| {', '.join(names)} | {why.replace('|', ' ')} |" for why, names in rows]
        parts += [title, "\n".join(["| types | reason |\n|---|---|", *table])]
    return "\n\n".join(parts)


def find_wrong(findings: list[Finding]) -> list[Finding]:
    return [
        finding
        for finding in findings
        if finding.path not in ("refused", "unknown") and not finding.is_exact
    ]


def _make_row(finding: Finding) -> str:
    experts = "yes" if finding.experts else ""
    return f"| {finding.model_type} | {describe(finding)} | {experts} | {_show_error(finding)} |"


def _show_error(finding: Finding) -> str:
    return "" if finding.error is None else f"{finding.error:.0e}"


def describe(finding: Finding) -> str:
    """The kinds of attention in words."""
    layers = [each for each in finding.layers if not each.get("name")]
    recurrences = sorted(
        {each["name"].split(" ", 1)[-1] for each in finding.layers if each.get("name")}
    )
    reach = {
        "window" if each["window"] else "chunk" if each.get("chunk") else "full" for each in layers
    }
    words = (
        [" and ".join(sorted(reach, key=["full", "window", "chunk"].index))]
        if reach
        else [finding.why]
    )
    if sinks := [bool(each.get("has_sinks")) for each in layers if each.get("has_sinks")]:
        words.append("sinks" if len(sinks) == len(layers) else "sinks in some layers")
    words += recurrences
    if any(each.get("softcap") for each in layers):
        words.append("softcap")
    if any(each["head_dim"] != each["v_head_dim"] for each in layers):
        words.append("other head dim for v")
    if len({each["head_dim"] for each in layers}) > 1:
        words.append("head dim by layer")
    return ", ".join(words)


def make_readme_line(findings: list[Finding]) -> str:
    exact = sum(finding.is_exact for finding in findings)
    types = f"[{exact} of the {len(findings)} causal types](docs/models.md#every-causal-type)"
    return f"- **Exact in fp64**: {types} of transformers {transformers.__version__}"


def replace_between_markers(text: str, new: str) -> str:
    begin = "<!-- make models: begin -->"
    end = "<!-- make models: end -->"
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise SystemExit(f"a page has no lines {begin} and {end}")
    return f"{before}{begin}\n{new}\n{end}{after}"


def main(model_types: list[str]) -> int:
    findings = examine_all(model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    if model_types:
        return 0
    pages = {
        ROOT / "docs" / "models.md": make_tables(findings),
        ROOT / "README.md": make_readme_line(findings),
    }
    for page, table in pages.items():
        page.write_text(
            replace_between_markers(page.read_text(encoding="utf-8"), table), encoding="utf-8"
        )
    wrong = find_wrong(findings)
    print(
        f"{sum(f.is_exact for f in findings)} exact, {len(wrong)} wrong",
        *(f.model_type for f in wrong),
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
