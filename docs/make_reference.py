"""Write settings.md and api.md from the code: comments of settings, signatures and docstrings."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

from ithaka import config

SETTINGS_HEAD = """# Settings

Every setting of `ithaka train`, with its default. In YAML a section is a mapping, \
`train: {steps: 500}`; on the command
line, `--set train.steps=500` changes one setting. Unknown settings and values that cannot work \
are rejected before
anything starts.
This page is generated from the code by `python docs/make_reference.py`.
"""


def describe_fields(section: type) -> list[tuple[str, str, str]]:
    """Return (name, default, comment) of each field; a comment applies up to the next one."""
    rows = []
    comment = ""
    classes = [base for base in reversed(section.__mro__) if dataclasses.is_dataclass(base)]
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    for line in (line.strip() for base in classes for line in inspect.getsource(base).splitlines()):
        if line.startswith("#"):
            is_new = rows and comment is rows[-1][2]
            comment = line.lstrip("# ") if is_new else f"{comment} {line.lstrip('# ')}".strip()
        elif (match := re.match(r"(\w+): [^=]+? = (.+)$", line)) and match[1] in defaults:
            rows.append((match[1], _format_default(defaults[match[1]]), comment))
    return rows


def _format_default(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return config.format_value(value).replace("\n", "\\n")


API_HEAD = """# Python API

What `import ithaka` offers for your own loop; \
[Hugging Face trainers and custom training loops](hugging-face.md)
shows it in use.
This page is generated from the code by `python docs/make_reference.py`.
"""
API = {
    "ithaka.parallelize": "ithaka.parallel",
    "ithaka.hf.long_context": "ithaka.hf.trainers",
    "ithaka.token_logprobs": "ithaka.model.logprobs",
    "ithaka.label_share": "ithaka.model.logprobs",
    "ithaka.distill": "ithaka.model.distillation",
    "ithaka.pack_prefixes": "ithaka.model.prefixes",
    "ithaka.iterate_weights": "ithaka.weights.save_pretrained",
    "ithaka.Layout": "ithaka.layout",
    "ithaka.layer.sharded.sharded_attention": "ithaka.layer.sharded",
}


def make_api() -> str:
    parts = [API_HEAD]
    for name, module in API.items():
        public = getattr(importlib.import_module(module), name.rpartition(".")[2])
        signature = inspect.signature(public)
        params = [param.replace(annotation=param.empty) for param in signature.parameters.values()]
        signature = signature.replace(parameters=params, return_annotation=signature.empty)
        code = f"```python\n{public.__name__}{signature}\n```"
        parts.append(f"\n## `{name}`\n\n{code}\n\n{inspect.getdoc(public)}\n")
    return "".join(parts)


def make_settings() -> str:
    parts = [SETTINGS_HEAD]
    nested = {
        "model.rope": config.RopeConfig,
        "data.reasoning": config.ReasoningConfig,
        "data.sources": config.SourceConfig,
        "curriculum": config.EntryConfig,
    }
    for name, section in {**config.SECTIONS, **nested}.items():
        parts.append(f"\n## {name}\n\n")
        # @dataclass generates one
        if section.__doc__ and not section.__doc__.startswith(section.__name__):
            parts.append(" ".join(section.__doc__.split()) + "\n\n")
        parts.append("| setting | default | |\n|---|---|---|\n")
        for key, default, comment in describe_fields(section):
            parts.append(f"| `{name}.{key}` | `{default}` | {comment.replace('<', '&lt;')} |\n")
    return "".join(parts)


if __name__ == "__main__":
    for name, text in {"settings.md": make_settings(), "api.md": make_api()}.items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
