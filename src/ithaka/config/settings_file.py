"""Load a configuration from YAML and dotted overrides, and write it back."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ithaka.config.fields import (
    ConfigError,
    Origin,
    did_you_mean,
    format_value,
    input_error,
    suggest_usual_name,
)
from ithaka.config.sections import SECTIONS, Config

CONFIG_FORMAT = 2  # stored as `format` in a run's config.yaml
RUN_KEYS = ("format", "origins")  # only a run's config.yaml has them
Tree = Mapping[str, Any]  # sections, as read from YAML


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), base: Tree | None = None
) -> Config:
    """Resolve the configuration: the defaults, then `base`, the YAML file and the
    `section.key=value` overrides."""
    tree = read_yaml(path) if path is not None else {}
    return parse_config(tree, overrides, base, source=str(path))


def parse_config(
    tree: Tree,
    overrides: Sequence[str] = (),
    base: Tree | None = None,
    origin: Origin = Origin.FILE,
    source: str = "the configuration",
) -> Config:
    """Make a Config from nested mappings, such as a file that has been read. `origin` set their
    values; `source` names them in errors."""
    merged = _Merged()
    merged.add(base or {}, Origin.DEMO, "the defaults")
    sections = {name: values for name, values in tree.items() if name not in RUN_KEYS}
    merged.add(sections, origin, source)
    for section, key, value in map(_parse_override, overrides):
        merged.add({section: {key: value}}, Origin.COMMAND, "--set")
    config = Config(**merged.sections, origins=merged.origins)
    return _resolve_curriculum(config) if config.curriculum else config


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Nested dicts of plain YAML values, the inverse of `parse_config`."""

    def plain(values: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(values)
        for key, value in values:
            if isinstance(value, Path):
                tree[key] = str(value)
            elif isinstance(value, tuple):
                tree[key] = list(value)
        return tree

    tree = dataclasses.asdict(config, dict_factory=plain)
    del tree["origins"]
    return tree


def to_yaml(config: Config) -> str:
    """Every setting as YAML that `load_config` reads."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


class _WrongKey(yaml.YAMLError): ...


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which SafeLoader keeps the last, and {a:b}, which is a key without
    a value."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Check before merge keys (<<) are expanded, so that a key may override a merged one."""
        node = super().compose_mapping_node(anchor)
        lines = dict[tuple[str, str], int]()
        for key, value in node.value:
            name = (key.tag, str(key.value))
            line = key.start_mark.line + 1
            if name in lines:
                raise _WrongKey(
                    f"has {key.value} twice, in line {lines[name]} and line {line}; write it once"
                )
            lines[name] = line
            if isinstance(key.value, str) and ":" in key.value and value.value == "":
                fix = f"write {{{key.value.replace(':', ': ', 1)}}}, with a space after the colon"
                raise _WrongKey(f"has {key.value} without a value, in line {line}; {fix}")
        return node


def _construct_number(loader: _Loader, node: Any) -> Any:
    """YAML 1.1 reads 1:30 as 90 and 010 as 8. Leave both as text, which an integer field refuses or
    reads as 10."""
    if ":" in node.value or re.fullmatch(r"[-+]?0[\d_]+", node.value):
        return node.value
    return (
        loader.construct_yaml_float(node)
        if node.tag.endswith("float")
        else loader.construct_yaml_int(node)
    )


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct_number)


def read_yaml(path: Path) -> Tree:
    """Read a YAML file once; `parse_config` may be called several times."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except _WrongKey as error:
        raise ConfigError(f"config={path} {error}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = f"config={path} cannot be read ({' '.join(str(error).split())}); give a YAML file"
        raise input_error(message, error) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config={path} is not a mapping; write sections such as `train:` with keys below them"
        )
    version = tree.get("format", CONFIG_FORMAT)
    if version != CONFIG_FORMAT:
        rule = f"has format {version}, and this version of ithaka reads {CONFIG_FORMAT}"
        raise ConfigError(f"config={path} {rule}; use the version that wrote it")
    return tree


class _Nested(dict):
    """One key of a setting that is a mapping: data.reasoning.drop=true. Its other keys stay as they
    are."""


def _parse_override(override: str) -> tuple[str, str, Any]:
    name, equals, text = override.partition("=")
    if name.strip() == "loss":  # as in a file
        name = "loss.type"
    section, _, key = name.strip().partition(".")
    if not (equals and section and key and all(key.split("."))):
        raise ConfigError(
            f"--set {override} is not section.key=value; write for example --set train.steps=100"
        )
    if name.count(".") == 2:
        outer, _, inner = name.strip().rpartition(".")
        section, key, value = _parse_override(f"{outer}={text or ' '}")
        return section, key, _Nested({inner: value})
    if not text.strip():
        raise ConfigError(f"{section}.{key}= has no value; give one, or null for none")
    try:
        return section, key, yaml.load(text, _Loader)
    except _WrongKey as error:
        raise ConfigError(f"{section}.{key}={text} {error}") from None
    except yaml.YAMLError:
        raise ConfigError(
            f"{section}.{key}={text} is not valid YAML; quote it: {section}.{key}='\"...\"'"
        ) from None


class _Merged:
    """Sections of several trees, later ones over earlier ones, and who set each value."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}

    def add(self, tree: Tree, origin: Origin, source: str) -> None:
        """Add a tree from `source`. Refuses sections that do not exist."""
        for section, values in tree.items():
            if section == "curriculum":
                self.sections[section] = values or ()
                continue
            if section not in SECTIONS:
                raise ConfigError(
                    f"{section} in {source} is not a section; {_suggest_section(section)}"
                )
            if section == "loss" and isinstance(values, str):
                values = {"type": values}
            if not isinstance(values, Mapping | None):
                raise ConfigError(
                    f"{section}={values!r} in {source} is not a mapping; write keys below "
                    f"`{section}:`"
                )
            for key, value in (values or {}).items():
                self._set(section, key, value)
                self.origins[f"{section}.{key}"] = origin
            if values is not None:
                self.sections.setdefault(section, {})

    def _set(self, section: str, key: str, value: object) -> None:
        before = self.sections.setdefault(section, {})
        if isinstance(value, _Nested) and isinstance(before.get(key), Mapping):
            value = {**before[key], **value}
        before[key] = value


def _suggest_section(name: object) -> str:
    """For an unknown section: the settings that it names or begins, or the closest section."""
    if usual := suggest_usual_name(name):
        return usual
    settings = [
        f"{section}.{field.name}"
        for section, cls in SECTIONS.items()
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name == name or field.name.startswith(f"{name}_")
    ]
    return (
        f"did you mean {' or '.join(settings)}?"
        if settings
        else did_you_mean(name, [*SECTIONS, "curriculum"])
    )


def _resolve_curriculum(config: Config) -> Config:
    """Set train.steps to the total and data.context to the first entry's, and check every entry."""
    # losses at different lengths are not comparable
    for name in ("epochs", "patience", "keep_best"):
        if value := getattr(config.train, name):
            raise ConfigError(
                f"train.{name}={format_value(value)} cannot be combined with curriculum; leave "
                "it out"
            )
    total = sum(entry.steps or 0 for entry in config.curriculum)
    values = {"train.steps": total, "data.context": config.curriculum[0].context}
    # A run's own file has these values.
    others = [
        f"{name}={config.get(name)}"
        for name, value in values.items()
        if config.origin(name).is_user and config.get(name) != value
    ]
    if others:
        raise ConfigError(
            f"{' and '.join(others)} cannot be combined with curriculum; set it per entry"
        )
    if config.origin("model.rope").is_user and config.model.rope and config.curriculum[0].rope:
        raise ConfigError(
            "model.rope has no effect: the first curriculum entry overrides it; leave one out"
        )
    config = config.with_values(values, Origin.FILE)
    for index in range(len(config.curriculum)):
        try:
            config.of_entry(index)
        except ConfigError as error:
            raise ConfigError(f"curriculum[{index}]: {error}") from None
    return config
