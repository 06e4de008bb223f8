"""`ithaka data`: statistics, sample sequences with trained tokens marked, and records.

Reads the first round as a run would (all of a small dataset), with its cache in a temporary
directory.
"""

import html
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ithaka.config import Config
from ithaka.config.units import plural
from ithaka.data.documents.records import SIDES
from ithaka.data.held_out import find_data
from ithaka.data.open import (
    check_data,
    count_copies,
    describe_data,
    epoch_steps,
    measure_balance,
    open_data,
)
from ithaka.data.stream import SequenceStream, TrainData
from ithaka.data.tokenizer import load_tokenizer
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.report.page import Markup, render_page, render_table
from ithaka.run import launch
from ithaka.run.road import model_shape
from ithaka.views.record import (
    Described,
    TextPiece,
    choose_records,
    describe_record,
    find_record,
    split_document,
)

# Sequences, documents per sequence, tokens per document.
TERMINAL_LIMITS = (2, 4, 240)
PAGE_LIMITS = (4, 8, 800)
SUMMED_FIGURES = ("files", "documents", "tokens", "trained_tokens", "estimated_tokens")


class DataView(NamedTuple):
    figures: dict[str, Any]  # the --json output
    summary: dict[str, str]  # text by topic
    sequences: Sequence[Described] = ()  # document by document
    records: Sequence[Described] = ()  # turn by turn


def build_data_view(
    curriculum: Config,
    limits: tuple[int, int, int],
    with_records: bool,
    report: Callable[[float], None],
) -> DataView:
    """Read, pack and summarize the data of the first entry. `report` gets the fraction read. Raises
    ConfigError as a run would."""
    config = curriculum.of_entry(0)
    datasets = curriculum.datasets
    check_data(config.data, model_shape(config).vocab, config.model.path, datasets)
    train = config.train
    num_ranks = config.parallel.ranks  # only to divide the batch
    if num_ranks == "auto":
        num_ranks = launch.decide_ranks(num_ranks, launch.num_gpus())
    dp_size = max(1, num_ranks // config.parallel.cp_of(num_ranks))
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.chat_template)
    with tempfile.TemporaryDirectory(prefix="ithaka-") as cache_dir:
        data = open_data(
            config.data,
            tokenizer=tokenizer,
            seed=train.seed,
            dp_size=dp_size,
            batch=train.batch,
            accumulate=train.micro_steps(dp_size),
            steps=train.steps if train.epochs is None else None,
            cache_dir=Path(cache_dir),
            found=find_data(config.data, datasets),
        )
        data.stream.report = report
        try:
            global_batch = train.micro_steps(dp_size) * train.batch * dp_size
            steps = train.steps
            if train.epochs is not None:
                steps = epoch_steps(data, train.epochs, global_batch)
            summary = describe_data(data, steps * global_batch)
            figures = compute_figures(data)
            indices = np.linspace(0, figures["sequences"] - 1, limits[0]).round().astype(int)
            sequences = [
                describe_sequence(data, i, *limits[1:]) for i in np.unique(indices).tolist()
            ]
        finally:
            data.close()
    share = f"{figures['tokens'] / max(figures['estimated_tokens'], 1):.1%} of the data"
    read = "all of the data"
    if not figures["complete"]:
        read = f"the first {plural(figures['sequences'], 'sequence')}, about {share}"
    _, semicolon, stop = summary.pop("trained", "").partition(";")
    summary["trained"] = f"{figures['trained_share']:.1%} of these tokens{semicolon}{stop}"
    del summary["first tokens"]
    lengths = "documents of {shortest:,} to {longest:,} tokens, median {median:,.0f}".format(
        **figures["lengths"]
    )
    records: list[Described] = []
    if with_records:
        for record in choose_records(config, datasets, tokenizer):
            records += describe_record(record, config, tokenizer)[0]
    return DataView(figures, {"read": read, **summary, "lengths": lengths}, sequences, records)


def build_record_view(curriculum: Config, number: int) -> DataView:
    """Show record `number` of each source: why tokens are trained or not, and what is cut."""
    config = curriculum.of_entry(0)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.chat_template)
    records: list[Described] = []
    reasons = Counter[str]()
    for record in find_record(config, curriculum.datasets, tokenizer, number):
        described, counts = describe_record(record, config, tokenizer)
        records += described
        reasons += counts
    figures = {
        "tokens": reasons.total(),
        "reasons": reasons,
        "samples": [title for title, _ in records],
    }
    summary = {why: plural(count, "token") for why, count in reasons.items()}
    return DataView(figures, summary, records=records)


def compute_figures(data: TrainData) -> dict[str, Any]:
    """Statistics of the first round, and estimates of the total by the shards it read."""
    stream = data.stream
    packed = stream.current_round()
    documents = stream.documents.uncut
    dropped = stream.num_long if stream.long.mode == "drop" else 0
    packable = documents[documents["length"] <= stream.context] if dropped else documents
    sources = _compute_source_figures(stream, packable)
    is_complete = [source.pop("complete") for source in sources]
    sums = {}
    for key in SUMMED_FIGURES:
        sums[key] = sum(source[key] for source in sources)
    lengths = documents["length"]
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {
        "complete": all(is_complete),
        **sums,
        "trained_share": sums["trained_tokens"] / sums["tokens"],
        "context": stream.context,
        "sequences": len(packed),
        "sequences_left_out": stream.num_left_out,  # no trained tokens
        "pieces_left_out": stream.documents.pieces_left_out,
        "tokens_cut": stream.documents.removed_tokens,
        "packing_efficiency": packed.num_tokens / (len(packed) * stream.context),
        "skipped": sum((source["skipped"] for source in sources), Counter[str]()),
        "notes": sum((source["notes"] for source in sources), Counter[str]()),
        "split": stream.num_long - dropped,
        "dropped": dropped,
        "duplicates": count_copies(stream.sources),
        "lengths": {
            "shortest": int(lengths.min()),
            "median": float(np.median(lengths)),
            "longest": int(lengths.max()),
        },
        # Key 2^k counts documents with more than 2^(k-1) and at most 2^k tokens.
        "histogram": {
            2**power: int((powers == power).sum())
            for power in range(powers.min(), powers.max() + 1)
        },
        "balance": measure_balance(data),
        "sources": sources,
    }


def _compute_source_figures(stream: SequenceStream, packable: np.ndarray) -> list[dict[str, Any]]:
    """Statistics of each source, and whether all of it was read."""
    trained = np.zeros(len(stream.sources), np.int64)
    for sequence in map(stream.get_sequence, range(len(stream.current_round()))):
        owners = sequence.source_ids()[sequence.labels() != IGNORE_INDEX]
        trained += np.bincount(owners, minlength=len(trained))
    sources: list[dict[str, Any]] = []
    for i, source in enumerate(stream.sources):
        num_tokens = stream.documents.source_tokens[i]  # of long documents, those of their pieces
        size = source.estimate_size(stream.cut)
        figures = {
            "name": source.name,
            "files": len({part.file for shard in source.shards for part in shard.parts}),
            "documents": int((packable["source"] == i).sum()),
            "tokens": num_tokens,
            "trained_tokens": int(trained[i]),
            "estimated_tokens": size.tokens,
            "skipped": source.count("skipped"),
            "notes": source.count("notes"),
            "complete": size.is_complete and num_tokens >= size.tokens,
        }
        sources.append(figures)
    return sources


def describe_sequence(
    data: TrainData, index: int, num_documents: int, num_tokens: int
) -> tuple[str, list[Any]]:
    sequence = data.stream.get_sequence(index)
    ids = sequence.ids
    trained = sequence.labels() != IGNORE_INDEX
    edges = [*sequence.starts.tolist(), sequence.length]
    labels = [""] * len(sequence.starts)
    if data.stream.long.pairs and sequence.samples is not None and sequence.parents is not None:
        labels = [f", {SIDES[sample % 2]}" for sample in sequence.samples.tolist()]
        for parent in {*sequence.parents.tolist()} - {-1}:
            labels[parent] = ", prompt of both answers"

    def describe(what: str, low: int, high: int) -> str:
        return f"{what}: {plural(high - low, 'token')}, {trained[low:high].sum():,} trained"

    documents: list[tuple[str, list[TextPiece]]] = []
    total = len(edges) - 1
    for i in range(min(num_documents, total)):
        low = edges[i]
        high = edges[i + 1]
        name = f"document {i + 1}"
        if len(data.source_names) > 1:
            name += f" of {data.source_names[sequence.sources[i]]}"
        pieces = split_document(
            data.cache.tokenizer,
            ids[low:high].tolist(),
            trained[low:high],
            num_tokens,
            has_images=bool(sequence.images),
        )
        documents.append((describe(name + labels[i], low, high), pieces))
    if num_more := total - len(documents):
        start = edges[len(documents)]
        documents.append((describe(plural(num_more, "more document"), start, edges[-1]), []))
    num_sequences = len(data.stream.current_round())
    title = f"sequence {index + 1:,} of {num_sequences:,}, {plural(total, 'document')}"
    return f"{describe(title, 0, edges[-1])}, {len(ids) - edges[-1]:,} padding", documents


def print_data(view: DataView, console: Console) -> None:
    """Print the view. Without colors, brackets mark trained tokens and tool calls."""
    uncolored = console.no_color or console.color_system is None
    summary = Table.grid(padding=(0, 2))
    lengths = Table.grid(padding=(0, 2))
    for topic, text in view.summary.items():
        summary.add_row(Text(topic), Text(text, overflow="fold"))
    bins = {size: number for size, number in view.figures.get("histogram", {}).items() if number}
    for up_to, number in bins.items():
        bar = "█" * round(number / max(bins.values()) * min(24, console.width - 24)) or "▏"
        upper = Text(f"up to {up_to:,}", justify="right")
        lengths.add_row(upper, Text(f"{number:,}", justify="right"), Text(bar, "cyan"))
    console.print(summary, Text(), *([lengths, Text()] if bins else []))
    legend = [TextPiece("trained", [0], 0, True), TextPiece(", context only, ", [0], 0, False)]
    if view.records:
        legend.append(TextPiece("cut", [0], 0, False, cut=True))
        legend.append(TextPiece(", ", [0], 0, False))
    console.print(_style_pieces([*legend, TextPiece("tools", [0], 0, False, True)], uncolored))
    for title, documents in (*view.records, *view.sequences):
        console.print(Text(f"\n{title}", "bold"))
        for document_title, pieces in documents:
            console.print(Text(f"── {document_title}", "cyan"))
            if pieces:
                console.print(_style_pieces(pieces, uncolored))


def _style_pieces(pieces: list[TextPiece], uncolored: bool) -> Text:
    text = Text()
    for (trained, cut), run in itertools.groupby(pieces, lambda piece: (piece.trained, piece.cut)):
        opening, closing = _choose_brackets(trained, cut)
        if uncolored:
            text.append(opening)
        for (tool, has_tokens), group in itertools.groupby(
            run, lambda piece: (piece.tool, bool(piece.ids))
        ):
            content = "".join(piece.text for piece in group)
            style = _choose_style(trained, cut, has_tokens)
            if not has_tokens:  # a note has its own line
                content += "\n"
                if not text.plain.endswith("\n"):
                    content = "\n" + content
            if tool:
                style += " underline"
            text.append(f"⟦{content}⟧" if uncolored and tool else content, style)
        if uncolored:
            text.append(closing)
    text.rstrip()
    return text


def _choose_brackets(trained: bool, cut: bool) -> tuple[str, str]:
    if trained:
        return "«", "»"
    return ("✂", "✂") if cut else ("", "")


def _choose_style(trained: bool, cut: bool, has_tokens: bool) -> str:
    if trained:
        return "bold green"
    if cut:
        return "red strike"
    return "dim" if has_tokens else "italic cyan"


def render_data_page(view: DataView, heading: str) -> str:
    """Render the view as a self-contained HTML page."""
    bins = {size: number for size, number in view.figures.get("histogram", {}).items() if number}
    parts = [render_table(list(view.summary.items()), css_class="facts")]
    if bins:
        bars = []
        for up_to, number in bins.items():
            style = f"width:{number / max(bins.values()):.1%};min-width:1px"
            bars.append((up_to, number, Markup(f'<div style="{style}"></div>')))
        parts += [
            "<h2>Lengths</h2>",
            render_table(bars, ("tokens, up to", "documents", ""), "bars"),
        ]
    legend = (
        "<p class=tokens><mark>trained</mark>, <span>context only</span>, {}"
        "<span class=tool>tools</span>"
    )
    hover = "; hover over a token for its id and position</p>"
    if view.records:
        parts.append(
            f"<h2>Records</h2>{legend.format('<s>cut</s>, ')}, <small>reason</small>{hover}"
        )
    for n, (title, turns) in enumerate(view.records):
        body = "".join(itertools.starmap(_render_document, turns))
        state = " open" if n == 0 else ""
        parts.append(f"<details{state}><summary>{html.escape(title)}</summary>{body}</details>")
    if view.sequences:
        parts.append(f"<h2>Packed sequences</h2>{legend.format('')}{hover}")
    for title, documents in view.sequences:
        parts += [f"<h3>{html.escape(title)}</h3>", *itertools.starmap(_render_document, documents)]
    return render_page(heading, "".join(parts))


def _render_document(title: str, pieces: list[TextPiece]) -> str:
    """Render the text, with a label where the reason changes."""
    text = ""
    for why, run in itertools.groupby(pieces, lambda piece: piece.why):
        label = why if why.startswith("cut") else why.rpartition(", ")[0]
        if why:
            text += f"<small>{html.escape(label)}</small>"
        text += "".join(map(_render_piece, run))
    heading = f"<p class=border>{html.escape(title)}</p>"
    return heading + f"<pre class=tokens>{text}</pre>" if pieces else heading


def _render_piece(piece: TextPiece) -> str:
    if not piece.ids:
        return f"<em class=gap>{html.escape(piece.text)}</em>"
    tag = "s" if piece.cut else "span"
    if piece.trained:
        tag = "mark"
    kind = " class=tool" if piece.tool else ""
    title = f"id {' '.join(map(str, piece.ids))}, position {piece.position}"
    if piece.why:
        title += f": {piece.why}"
    return f'<{tag}{kind} title="{html.escape(title)}">{html.escape(piece.text)}</{tag}>'
