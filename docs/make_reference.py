"""Writes settings.md and api.md from the code: from the comments above settings, from signatures and docstrings."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

from ithaka import config

HEAD = """# Settings

Every setting of `ithaka train`, with its default. In YAML a section is a mapping, `train: {steps: 500}`; on the command
line `--set train.steps=500` changes one setting. A setting that does not exist, or cannot work, is refused before
anything starts.
This page is made from the code by `python docs/make_reference.py`.
"""


def fields_of(section: type) -> list[tuple[str, str, str]]:
    """Name, default and comment of each field; a comment stands for all fields until the next one."""
    rows, words = [], ""
    classes = [base for base in reversed(section.__mro__) if dataclasses.is_dataclass(base)]
    for line in (line.strip() for base in classes for line in inspect.getsource(base).splitlines()):
        if line.startswith("#"):
            words = f"{words} {line.lstrip('# ')}" if not rows or words is not rows[-1][2] else line.lstrip("# ")
        elif match := re.match(r"(\w+): [^=]+? = (.+)$", line):
            name = match[1]
            entry = next((each for each in dataclasses.fields(section) if each.name == name), None)
            if entry is not None:
                words = words.strip()
                rows.append((name, _default(entry.default), words))
    return rows


def _default(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return config.format_value(value)


API_HEAD = """# Python API

What `import ithaka` gives for loops of your own; [Hugging Face's trainers, and a loop of your own](hugging-face.md)
shows it at work.
This page is made from the code by `python docs/make_reference.py`.
"""
API = {
    "ithaka.parallelize": "ithaka.hf",
    "ithaka.hf.long_context": "ithaka.hf",
    "ithaka.token_logprobs": "ithaka.model.logprobs",
    "ithaka.label_share": "ithaka.model.logprobs",
    "ithaka.Layout": "ithaka.layout",
    "ithaka.layer.sharded.sharded_attention": "ithaka.layer.sharded",
}


def api() -> str:
    parts = [API_HEAD]
    for name, module in API.items():
        thing = getattr(importlib.import_module(module), name.rpartition(".")[2])
        signature = inspect.signature(thing)
        params = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        shown = str(signature.replace(parameters=params, return_annotation=signature.empty))
        parts.append(f"\n## `{name}`\n\n```python\n{name.rpartition('.')[2]}{shown}\n```\n\n{inspect.getdoc(thing)}\n")
    return "".join(parts)


def settings() -> str:
    parts = [HEAD]
    inner = {"model.rope": config.RopeConfig, "data.sources": config.SourceConfig, "curriculum": config.EntryConfig}
    for name, section in {**config.SECTIONS, **inner}.items():
        parts.append(f"\n## {name}\n\n")
        if section.__doc__ and not section.__doc__.startswith(section.__name__):  # which dataclasses make up
            parts.append(" ".join(section.__doc__.split()) + "\n\n")
        parts.append("| setting | default | |\n|---|---|---|\n")
        for key, default, words in fields_of(section):
            parts.append(f"| `{name}.{key}` | `{default}` | {words.replace('<', '&lt;')} |\n")
    return "".join(parts)


if __name__ == "__main__":
    for name, text in {"settings.md": settings(), "api.md": api()}.items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
