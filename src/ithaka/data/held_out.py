"""Find the data of a configuration, and split it into documents to train on and to validate on."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ithaka.config import ConfigError, DataConfig, SourceConfig
from ithaka.config.units import plural
from ithaka.data.documents.files import COMMIT, HUB_DATASET, DataFiles, find_files, is_streamed
from ithaka.data.documents.read import Shard, make_shards, read_content
from ithaka.data.documents.split import SourceContent, Split, make_split


class SourceShards(NamedTuple):
    label: str  # setting and path, for messages
    name: str  # in the log: the shortest unique one
    weight: float
    train: list[Shard]


class FoundData(NamedTuple):
    """The same on every rank: one of them finds it."""

    sources: list[SourceShards]
    held_out: list[list[Shard]]  # by source (none of one document), or of data.validation_path
    summary: dict[str, str]  # what the data is, by topic
    is_split: bool  # whether documents are held out by their content


class FoundSource(NamedTuple):
    config: SourceConfig
    label: str  # setting and path
    files: DataFiles
    fraction: float  # to hold out; 0: none, or the data has its own validation split


def find_data(data: DataConfig, datasets: Sequence[DataConfig] = ()) -> FoundData:
    """Find the shards of each source and those held out. `datasets`: all data of the run, such as
    those of the entries of a curriculum. What one of them holds out, none of them trains on."""
    found = find_sources(data)
    splits = split_sources(found, data, datasets)
    sources: list[SourceShards] = []
    held_out: list[list[Shard]] = []
    summary: dict[str, str] = {}
    names = _name_paths([source.config.path for source in found])
    validation = f"data.validation_path={data.validation_path}"
    if data.validation_path is None and not data.validation_fraction:
        validation = "none, data.validation_fraction=0"
    shares: list[tuple[float, int]] = []
    for source, name, (split, content) in zip(found, names, splits, strict=True):
        files = source.files.files
        config = source.config
        origin = source.label if config.path else "Python's standard library"
        if source.files.validation and data.validation_path is None and data.validation_fraction:
            held_out.append(make_shards(source.files.validation, config))
            validation = f"the split {source.files.validation[0].split} of {source.label}"
        elif source.fraction and content is not None:
            own = None if split is None else replace(split, fraction=source.fraction, held_out=True)
            share = 0.0 if own is None else own.share(content)
            shares.append((share, sum(content.sizes.values())))
            held_out.append(make_shards(files, config, own) if share else [])
            of = "each source" if data.sources else origin
            validation = f"data.validation_fraction={source.fraction} of {of}"
        train = make_shards(files, config, split)
        sources.append(SourceShards(source.label, name, config.weight, train))
        summary |= _describe_source(source, name, origin, train)
    if data.validation_path is not None:
        files = find_files(data.validation_path, "data.validation_path").files
        held_out = [make_shards(files, data)]
    elif held_out and not any(held_out):
        validation = f"none, {found[-1].label} has one record"
    elif shares and any(held_out):
        share = sum(each * size for each, size in shares) / max(sum(size for _, size in shares), 1)
        if share > 2 * data.validation_fraction:
            validation += f", {share:.0%} of the bytes"
    left_out = max((split.fraction for split, _ in splits if split is not None), default=0.0)
    if left_out > (0 if data.validation_path else data.validation_fraction):
        validation += (
            f"; another entry of the curriculum holds out {left_out:.0%}, which is not "
            "trained on either"
        )
    summary["validation"] = validation
    return FoundData(sources, held_out, summary, any(split for split, _ in splits))


def check_paths(data: DataConfig) -> None:
    """Refuse files that do not exist, without listing those that do."""
    for setting, config in _name_sources(data):
        path = config.path
        if path is not None and not HUB_DATASET.fullmatch(str(path)) and not os.path.exists(path):
            find_files(path, setting)  # a glob may match


def find_sources(data: DataConfig) -> list[FoundSource]:
    configs = data.all_sources
    found = []
    for i, config in enumerate(configs):
        if config.path in [other.path for other in configs[:i]]:
            raise ConfigError(
                f"data.sources has path={config.path} twice; list it once, with a larger weight"
            )
    for setting, config in _name_sources(data):
        files = find_files(config.path, setting)
        has_own = data.validation_path is not None or files.validation
        fraction = 0.0 if has_own else data.validation_fraction
        found.append(FoundSource(config, f"{setting}={config.path}", files, fraction))
    return found


def _name_sources(data: DataConfig) -> list[tuple[str, SourceConfig]]:
    """Each source and the setting of its path."""
    if not data.sources:
        return [("data.path", data.all_sources[0])]
    return [(f"data.sources[{i}].path", source) for i, source in enumerate(data.sources)]


def split_sources(
    found: Sequence[FoundSource], data: DataConfig, datasets: Sequence[DataConfig] = ()
) -> list[tuple[Split | None, SourceContent | None]]:
    """Return for each source the training side of the split of all `datasets`, and what its content
    is. None: nothing is held out."""
    known = [_split_settings(data)]
    everything = [*found]
    for each in datasets:
        if _split_settings(each) not in known:
            known.append(_split_settings(each))
            everything += find_sources(each)
    if not any(source.fraction for source in everything):
        return [(None, None) for _ in found]
    contents = [
        read_content(source.files.files, source.config, source.fraction) for source in everything
    ]
    split = make_split(contents)
    own = contents[: len(found)]
    splits = (split.of_source(content) if split.may_hold_out(content) else None for content in own)
    return list(zip(splits, own, strict=True))


def _split_settings(data: DataConfig) -> tuple[object, ...]:
    return data.all_sources, data.validation_path, data.validation_fraction


def _describe_source(
    source: FoundSource, name: str, origin: str, train: Sequence[Shard]
) -> dict[str, str]:
    files = source.files.files
    ignored = source.files.ignored
    kinds = ", ".join(sorted({file.kind for file in files}))
    megabytes = sum(shard.num_bytes for shard in train) / 1e6
    text = "" if source.config.path else f"{origin}, "
    text += f"{plural(len(files), 'file')} ({kinds}), {megabytes:,.1f} MB"
    if is_streamed(files[0].path):
        text += f", streamed from {'/'.join(files[0].path.parts[2:4])}"
    if not ignored:
        return {name: text}
    examples = ", ".join(ignored[:3])
    if len(ignored) > 3:
        examples += ", ..."
    topic = f"left out of {name}" if source.label.startswith("data.sources") else "left out"
    return {name: text, topic: f"{plural(len(ignored), 'file')}: {examples}"}


def _name_paths(given: Sequence[Path | None]) -> list[str]:
    """Return the stems of the paths, or enough of their last parts to tell them apart; without
    commits of the hub."""
    labels = (str(path or "Python's standard library") for path in given)
    paths = [Path(re.sub(f"@{COMMIT.pattern}", "", label)) for label in labels]
    names = [path.stem for path in paths]
    absolute = [path.absolute() for path in paths]
    depth = 0
    while len(set(names)) < len(set(absolute)):
        depth += 1  # counted from the end, so that relative and absolute paths get the same name
        names = ["/".join(path.parts[-depth:]) for path in absolute]
    return names
