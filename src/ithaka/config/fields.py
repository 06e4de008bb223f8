"""Typed configuration fields: conversion, limits, and errors that name the field, its value, the
rule and a fix."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

from ithaka.exits import ExitCode, TransientError, is_transient


class ConfigError(ValueError):
    """Bad input that the user can fix. The message names the field, its value, the rule and a
    fix."""

    exit_code = ExitCode.WRONG_INPUT


class Origin(StrEnum):
    """Who set a value."""

    DEFAULT = "the default"
    DEMO = "the demonstration"  # `ithaka train` without a model
    FILE = "the file"
    COMMAND = "the command line"
    RUN = "the resumed run"
    MODEL = "the model"
    PLAN = "the plan"
    CALL = "the call"  # of ithaka.parallelize

    @property
    def is_user(self) -> bool:
        """Whether the user set it for this command."""
        return self in (Origin.FILE, Origin.COMMAND, Origin.CALL)


# the first bytes of a file that `git lfs` did not download
LFS_POINTER = b"version https://git-lfs"


def input_error(message: str, error: BaseException) -> ConfigError | TransientError:
    """The exception to raise when `error` prevented reading an input: TransientError if a retry may
    succeed."""
    return TransientError(message) if is_transient(error) else ConfigError(message)


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Rename settings in errors, for callers that know them by other names: {"parallel.": ""} turns
    parallel.cp into cp."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        for setting, name in names.items():
            message = re.sub(rf"(?<![\w./-]){re.escape(setting)}\b", name, message)
        error.args = (message,)
        raise


def setting(default: Any, **limits: float) -> Any:
    """A dataclass field with limits (ge=1, lt=2) on its numbers; None and strings have no
    limits."""
    return dataclasses.field(default=default, metadata=limits)


class Section:
    """Converts and checks every field on construction. `name`: the section's path; `example`: a
    YAML value for it."""

    section_name: ClassVar[str] = ""
    section_example: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = "", example: str = "") -> None:
        cls.section_name = name
        cls.section_example = example

    def __post_init__(self) -> None:
        hints = _type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            is_checked = value is field.default or isinstance(value, Section)
            if is_checked or not field.compare:
                continue
            hint = hints[field.name]
            name = f"{self.section_name}.{field.name}".removeprefix(".")
            try:
                value = _convert(value, hint)
            except _TypeMismatch:
                units = " (64K is 65536)" if hint is int else ""
                raise ConfigError(
                    f"{name}={format_value(value)} is not valid; use {_describe(hint)}{units}"
                ) from None
            for number in value if isinstance(value, tuple) else (value,):
                _check_limits(name, number, field.metadata)
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> typing.Self:
        check_keys(values, cls, cls.section_name)
        return cls(**values)


# What other trainers (transformers, TRL, PEFT, axolotl) call a setting, where the closest name is
# another one.
USUAL_NAMES = {
    "attn_implementation": "attention.kernel",
    "early_stopping_patience": "train.patience",
    "eval_every": "train.validate_every",
    "eval_steps": "train.validate_every",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_checkpointing": "memory.checkpoint",
    "learning_rate": "optim.lr",
    "load_best_model_at_end": "train.keep_best",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_r": "adapter.rank",
    "lora_target_modules": "adapter.targets",
    "lr_scheduler_type": "optim.schedule",
    "max_grad_norm": "optim.clip_norm",
    "max_length": "data.context",
    "max_seq_length": "data.context",
    "max_steps": "train.steps",
    "micro_batch_size": "train.batch",
    "model_name_or_path": "model.path",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "output_dir": "train.run_dir",
    "per_device_train_batch_size": "train.batch",
    "report_to": "train.track",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_last",
    "sequence_len": "data.context",
    "target_modules": "adapter.targets",
}
UNSUPPORTED = dict.fromkeys(
    ("dora", "use_dora"), "DoRA is not supported; leave it out to train with LoRA"
)
_LIMITS = {"ge": "at least", "le": "at most", "gt": "more than", "lt": "less than"}
_type_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


class _TypeMismatch(Exception): ...


def _check_limits(name: str, value: object, limits: Mapping[str, float]) -> None:
    if isinstance(value, int | float):
        for limit, bound in limits.items():
            if not getattr(operator, limit)(value, bound):
                raise ConfigError(f"{name}={value} is out of range; use {_LIMITS[limit]} {bound}")


def _convert(value: Any, hint: Any) -> Any:
    """Convert `value` to the type `hint`, or raise _TypeMismatch."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for part in parts:
            with contextlib.suppress(_TypeMismatch):
                return _convert(value, part)
    elif origin is tuple and isinstance(value, list | tuple):
        if Ellipsis in parts:
            parts = (parts[0],) * len(value)
        if len(value) == len(parts):
            return tuple(map(_convert, value, parts))
    elif origin is Literal:
        # YAML 1.1 reads off and on as booleans
        word = ("off", "on")[value] if isinstance(value, bool) else value
        if word in parts:
            return word
    elif origin is None and isinstance(value, bool) == (hint is bool):
        return _convert_plain(value, hint)
    raise _TypeMismatch


def _convert_plain(value: Any, hint: Any) -> Any:
    if issubclass(hint, Section) and isinstance(value, Mapping):
        return hint.from_mapping(value)
    if hint is int and isinstance(value, str):
        value = parse_count(value)
    elif hint is float and isinstance(value, str | int):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 3e-4 as a string: it requires 3.0e-4
    elif hint is Path and isinstance(value, str | Path) and value != "":
        try:
            value = Path(value).expanduser()
        except RuntimeError:  # ~name without such a user
            raise _TypeMismatch from None
    if isinstance(value, hint) and (hint is not float or math.isfinite(value)):
        return value
    raise _TypeMismatch


def _describe(hint: Any) -> str:
    """The values that `hint` accepts, for error messages."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin is tuple and Ellipsis not in parts:
        return f"a list of {len(parts)} numbers"
    if origin is tuple:
        item = parts[0]
        if typing.get_origin(item) is Literal:
            return f"a list such as [{typing.get_args(item)[0]}], of {_describe(item)}"
        if issubclass(item, Section):
            return f"a list of mappings such as [{item.section_example}]"
        return f"a list of {'names' if item is str else 'numbers'}"
    if isinstance(hint, type) and issubclass(hint, Section):
        return f"a mapping such as {hint.section_example}"
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
    }
    names |= {type(None): "null", dict: "a mapping"}
    return names.get(hint) or " or ".join(
        part if isinstance(part, str) else _describe(part) for part in parts
    )


def check_keys(values: Mapping[str, Any], section: type[Section], name: str) -> None:
    """Refuse keys that `section` does not have; `name` is its path in the configuration."""
    known = [field.name for field in dataclasses.fields(section)]  # type: ignore[arg-type]
    for key in values.keys() - set(known):
        if values[key] is None and ":" in str(key):
            rule = "has no space after the colon, so YAML reads a name"
            raise ConfigError(f"{name}={{{key}}} {rule}; write {{{key.replace(':', ': ', 1)}}}")
        if key in UNSUPPORTED:
            raise ConfigError(f"{name}.{key}={format_value(values[key])}: {UNSUPPORTED[key]}")
        suggestion = suggest_usual_name(key, known, name) or did_you_mean(key, known, f"{name}.")
        raise ConfigError(
            f"{name}.{key}={format_value(values[key])} is not a setting; {suggestion}"
        )


def import_named(setting: str, name: str, kind: str, arguments: tuple[str, ...]) -> Any:
    """Import `package.module:name`, from an installed package or the working directory. It must
    accept `arguments`. `kind`, a class or a function, is named in errors."""
    fix = f"name a {kind.lower()} as package.module:{kind}, or correct it"
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module, _, attribute = name.partition(":")
        named = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"{setting}={name} cannot be imported ({type(error).__name__}: {error}); {fix}"
        ) from error
    try:
        with contextlib.suppress(ValueError):  # some built-in functions have no signature
            inspect.signature(named).bind(*arguments)
    except TypeError as error:
        rule = f"cannot be called as {name.rpartition(':')[2]}({', '.join(arguments)})"
        raise ConfigError(f"{setting}={name} {rule} ({error}); {fix}") from None
    return named


def suggest_usual_name(key: object, known: Collection[str] = (), section: str = "") -> str | None:
    """The setting for another trainer's name, of `section` if it has one (`known`); None for any
    other name."""
    if (usual := USUAL_NAMES.get(str(key))) is None:
        return None
    field = usual.partition(".")[2]
    return f"did you mean {f'{section}.{field}' if field in known else usual}?"


def did_you_mean(name: object, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return (
        f"did you mean {prefix}{close[0]}?"
        if close
        else "use one of " + ", ".join(prefix + each for each in known)
    )


def format_value(value: object) -> str:
    """Format a value as YAML has it."""
    if isinstance(value, Mapping):
        parts = [f"{key}: {format_value(each)}" for key, each in value.items() if each is not None]
        return "{" + ", ".join(parts) + "}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_count(text: str) -> int | None:
    """Parse a count such as 128K (128 * 2^10), 1M (2^20), 6.734M (rounded down) or 1_000_000; None
    if it is not one."""
    match = re.fullmatch(r"(\d+(?:_\d+)*)(?:(\.\d+)?([KM]))?", text.strip(), re.IGNORECASE)
    if not match:
        return None
    integer, fraction, unit = match.groups(default="")
    return int(
        Fraction(integer.replace("_", "") + fraction)
        * {"": 1, "K": 2**10, "M": 2**20}[unit.upper()]
    )
