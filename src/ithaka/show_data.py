"""`ithaka data`: statistics of the training data, and sample sequences with trained tokens marked.

Reads the first round as a run would (all of a small dataset), with its cache in a temporary directory.
"""

import html
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ithaka import launch
from ithaka.config import Config, ConfigError
from ithaka.data.cache import TokenizedPart, tokenize
from ithaka.data.files import find_files
from ithaka.data.open import check_data, data_facts, epoch_steps, measure_balance, open_data
from ithaka.data.pack import Documents, LongDocuments, cut_documents, encode_turn
from ithaka.data.read import make_shards
from ithaka.data.stream import TrainData
from ithaka.data.tokenizer import Tokenizer, load_tokenizer
from ithaka.layer.loss import IGNORE_INDEX
from ithaka.preflight.run import model_shape
from ithaka.report.page import Markup, render_page, render_table

# Tags that chat templates put around tool calls and results, and the start of a JSON call.
TOOL_PATTERN = re.compile(
    r'<[^<>\s]*tool[^<>\s]*>|\[/?\w*TOOL\w*\]|<\|(python_tag|call)\|>|{"name": "[^"]*", "(argu|para)me\w+":'
)
TERMINAL_LIMITS, PAGE_LIMITS = (2, 4, 240), (4, 8, 800)  # sequences, documents per sequence, tokens per document


class TextPiece(NamedTuple):
    """Consecutive tokens that decode to complete characters, starting at `position`. No ids: tokens were omitted."""

    text: str
    ids: list[int]
    position: int
    trained: bool
    tool: bool = False


class DataView(NamedTuple):
    figures: dict[str, Any]  # the --json output
    facts: dict[str, str]  # text by topic
    sequences: list[tuple[str, list[tuple[str, list[TextPiece]]]]]  # (title, [(document title, pieces)])


def build_data_view(config: Config, limits: tuple[int, int, int]) -> DataView:
    """Read, pack and summarize the data. Raises the ConfigErrors of a run."""
    check_data(config.data, model_shape(config).vocab, config.model.path)
    train, ranks = config.train, config.parallel.ranks
    num_ranks = launch.decide_ranks(ranks, launch.num_gpus()) if ranks == "auto" else ranks  # only to divide the batch
    dp_size = max(1, num_ranks // config.parallel.cp_of(num_ranks))
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.chat_template)
    with tempfile.TemporaryDirectory(prefix="ithaka-") as cache_dir:
        data = open_data(
            config.data, tokenizer=tokenizer, seed=train.seed, dp_size=dp_size, batch=train.batch,
            accumulate=train.micro_steps(dp_size), steps=train.steps if train.epochs is None else None,
            cache_dir=Path(cache_dir),
        )  # fmt: skip
        try:
            global_batch = train.micro_steps(dp_size) * train.batch * dp_size
            steps = train.steps if train.epochs is None else epoch_steps(data, train.epochs, global_batch)
            facts = data_facts(data, steps * global_batch)
            figures = compute_figures(data)
            indices = np.linspace(0, figures["sequences"] - 1, limits[0]).round().astype(int)
            sequences = [describe_sequence(data, i, *limits[1:]) for i in np.unique(indices).tolist()]
        finally:
            data.close()
    share = f"{figures['tokens'] / max(figures['estimated_tokens'], 1):.1%} of the data"
    read = "all of the data" if figures["complete"] else f"the first {figures['sequences']:,} sequences, about {share}"
    _, _, stop = facts.pop("trained", "").partition(";")
    facts["trained"] = f"{figures['trained_share']:.1%} of these tokens" + f";{stop}" * bool(stop)
    del facts["first tokens"]
    lengths = "documents of {shortest:,} to {longest:,} tokens, median {median:,.0f}".format(**figures["lengths"])
    return DataView(figures, {"read": read, **facts, "lengths": lengths}, sequences)


def build_record_view(config: Config, number: int, num_tokens: int) -> DataView:
    """Show the documents of the `number`-th record, turn by turn: why tokens are trained or not, and what is cut."""
    data, count = config.data, 0
    tokenizer = load_tokenizer(data.tokenizer, config.model.path, data.chat_template)
    for source in data.all_sources():
        for shard in make_shards(find_files(source.path).files, source):
            for part in tokenize(shard, tokenizer, batch_chars=1):
                count += part.is_start
                if count == number:
                    return _describe_record(part, config, tokenizer, f"record {number:,} of {source.path}", num_tokens)
    raise ConfigError(f"--record={number} is beyond the last of {count:,} records; give a smaller number")


def _describe_record(
    part: TokenizedPart, config: Config, tokenizer: Tokenizer, title: str, num_tokens: int
) -> DataView:
    trained, ids = part.tokens >= 0, part.tokens ^ (part.tokens >> 31)
    facts = {"length": f"{len(trained):,} tokens, {trained.sum():,} trained"}
    facts |= {name: str(number) for name, number in part.notes.items()}
    if part.skip_reason:
        facts["skipped"] = part.skip_reason
    long = LongDocuments(config.data.long_documents, config.data.tool_tokens)
    turns = np.asarray([encode_turn(*turn) for turn in part.turns], np.int64)
    document = Documents(part.tokens, np.asarray([len(trained)]), turns=turns)
    if len(trained) > config.data.context and long.mode != "refuse":
        cut = cut_documents(document, config.data.context, long)
        facts["pieces"] = f"{len(cut.segments):,} of at most {config.data.context:,} tokens ({long.mode})"
        facts["left out"] = f"{cut.pieces_left_out[0]:,} pieces without a trained token; {cut.removed[0]:,} tokens cut"
    edges = [0, *(start for start, _ in part.turns), len(trained)]
    roles = ["before the first turn", *(role for _, role in part.turns)]
    documents = []
    for n, (role, (low, high)) in enumerate(zip(roles, itertools.pairwise(edges), strict=True)):
        num_trained = int(trained[low:high].sum())
        why = "trained" if num_trained else "excluded by the record" if role == "assistant" else "context only"
        pieces = split_document(tokenizer, ids[low:high].tolist(), trained[low:high], num_tokens)
        label = f"{f'turn {n}, ' * (n > 0)}{role}: {high - low:,} tokens, {num_trained:,} trained ({why})"
        documents += [(label, pieces)] if high > low else []
    figures = {"tokens": len(trained), "trained_tokens": int(trained.sum()), "facts": facts, "histogram": {}}
    return DataView(figures, facts, [(title, documents)])


def compute_figures(data: TrainData) -> dict[str, Any]:
    """Statistics of the first round. Skipped documents and the estimated total come from the shards it read."""
    stream = data.stream
    packed, documents = stream.current_round(), stream.documents
    dropped = stream.num_long if stream.long.mode == "drop" else 0
    packable = documents[documents["length"] <= stream.context] if dropped else documents
    trained = np.zeros(len(stream.sources), np.int64)
    for sequence in map(stream.get_sequence, range(len(packed))):
        trained += np.bincount(sequence.source_ids()[sequence.labels() != IGNORE_INDEX], minlength=len(trained))
    sources: list[dict[str, Any]] = []
    complete = True
    for i, source in enumerate(stream.sources):
        lengths = packable["length"][packable["source"] == i]
        _, estimated_tokens, is_complete = source.estimate_size(stream.cut)
        figures = {
            "files": len({part.file for shard in source.shards for part in shard.parts}),
            "documents": len(lengths),
            "tokens": int(lengths.sum()),
            "trained_tokens": int(trained[i]),
            "estimated_tokens": estimated_tokens,
        }
        sources.append(
            {"name": source.name, **figures, "skipped": source.count("skipped"), "notes": source.count("notes")}
        )
        complete &= is_complete and figures["tokens"] >= estimated_tokens
    sums = {key: sum(source[key] for source in sources) for key in figures}
    lengths = documents["length"]
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {
        "complete": complete,
        **sums,
        "trained_share": sums["trained_tokens"] / sums["tokens"],
        "context": stream.context,
        "sequences": len(packed),
        "sequences_left_out": stream.num_left_out,  # no trained tokens
        "pieces_left_out": stream.pieces_left_out,
        "tokens_cut": stream.removed_tokens,
        "packing_efficiency": packed.num_tokens / (len(packed) * stream.context),
        "skipped": sum((source["skipped"] for source in sources), Counter[str]()),
        "notes": sum((source["notes"] for source in sources), Counter[str]()),
        "split": stream.num_long - dropped,
        "dropped": dropped,
        "lengths": {"shortest": int(lengths.min()), "median": float(np.median(lengths)), "longest": int(lengths.max())},
        # Key 2^k counts documents with more than 2^(k-1) and at most 2^k tokens.
        "histogram": {2**power: int((powers == power).sum()) for power in range(powers.min(), powers.max() + 1)},
        "balance": measure_balance(data),
        "sources": sources,
    }


def describe_sequence(data: TrainData, index: int, num_documents: int, num_tokens: int) -> tuple[str, list[Any]]:
    sequence = data.stream.get_sequence(index)
    ids, trained = sequence.ids, sequence.labels() != IGNORE_INDEX
    edges = [*sequence.starts.tolist(), sequence.length]

    def describe(what: str, low: int, high: int) -> str:
        return f"{what}: {high - low:,} tokens, {trained[low:high].sum():,} trained"

    documents: list[tuple[str, list[TextPiece]]] = []
    for n, (low, high) in enumerate(itertools.islice(itertools.pairwise(edges), num_documents), 1):
        source = f" of {data.source_names[sequence.sources[n - 1]]}" if len(data.source_names) > 1 else ""
        pieces = split_document(data.cache.tokenizer, ids[low:high].tolist(), trained[low:high], num_tokens)
        documents.append((describe(f"document {n}{source}", low, high), pieces))
    if num_more := len(edges) - 1 - len(documents):
        documents.append((describe(f"{num_more:,} more documents", edges[len(documents)], edges[-1]), []))
    total = len(edges) - 1
    title = f"sequence {index + 1:,} of {len(data.stream.current_round()):,}, {total:,} document{'s' * (total > 1)}"
    return f"{describe(title, 0, edges[-1])}, {len(ids) - edges[-1]:,} padding", documents


def split_document(tokenizer: Tokenizer, ids: list[int], trained: np.ndarray, limit: int) -> list[TextPiece]:
    """Decode a document into pieces; omit the middle if it exceeds `limit` tokens."""
    low, high = (limit // 3, len(ids) - 2 * limit // 3) if len(ids) > limit else (len(ids), len(ids))
    pieces = [*_decode(tokenizer, ids, trained, 0, low), *_decode(tokenizer, ids, trained, high, len(ids))]
    ends = np.cumsum([len(piece.text) for piece in pieces])
    for match in TOOL_PATTERN.finditer("".join(piece.text for piece in pieces)):
        first, last = np.searchsorted(ends, [match.start() + 1, match.end()])
        pieces[first : last + 1] = [piece._replace(tool=True) for piece in pieces[first : last + 1]]
    if low < high:
        note = f"... {high - low:,} tokens omitted, {trained[low:high].sum():,} trained ..."
        pieces.insert(sum(piece.position < low for piece in pieces), TextPiece(note, [], low, False))
    return pieces


def _decode(tokenizer: Tokenizer, ids: list[int], trained: np.ndarray, low: int, high: int) -> Iterator[TextPiece]:
    """Decode ids[low:high] in context: a token's text depends on the one before, and a character may span tokens."""
    before = max(low - 1, 0)
    for end in range(low + 1, high + 1):
        text = tokenizer.decode(ids[before:end])
        if not text.endswith("\ufffd") or end == high or trained[end] != trained[low]:
            text = text[len(tokenizer.decode(ids[before:low])) :]
            text = "".join(c if c.isprintable() else "↵\n" if c == "\n" else repr(c)[1:-1] for c in text)
            yield TextPiece(text, ids[low:end], low, bool(trained[low]))
            before, low = low, end


def print_data(view: DataView, console: Console) -> None:
    """Print the view. Without colors, brackets mark trained tokens and tool calls."""
    uncolored = console.no_color or console.color_system is None
    facts, lengths = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for topic, fact in view.facts.items():
        facts.add_row(Text(topic), Text(fact, overflow="fold"))
    bins = view.figures["histogram"]
    for up_to, number in bins.items():
        bar = "█" * round(number / max(bins.values()) * min(24, console.width - 24)) or "▏" * (number > 0)
        cells = (Text(cell, justify="right") for cell in (f"up to {up_to:,}", f"{number:,}"))
        lengths.add_row(*cells, Text(bar, "cyan"))
    console.print(facts, Text(), lengths)
    legend = ("trained", [0], 0, True), (", context only, ", [0], 0, False), ("tools", [0], 0, False, True)
    console.print(Text("\n").append(_style_pieces([TextPiece(*piece) for piece in legend], uncolored)))
    for title, documents in view.sequences:
        console.print(Text(f"\n{title}", "bold"))
        for document_title, pieces in documents:
            console.print(Text(f"── {document_title}", "cyan"))
            if pieces:
                console.print(_style_pieces(pieces, uncolored))


def _style_pieces(pieces: list[TextPiece], uncolored: bool) -> Text:
    text = Text()
    for trained, run in itertools.groupby(pieces, lambda piece: piece.trained):
        text.append("«" * (uncolored and trained))
        for (tool, has_tokens), group in itertools.groupby(run, lambda piece: (piece.tool, bool(piece.ids))):
            content = "".join(piece.text for piece in group)
            style = ("bold green" if trained else "dim" if has_tokens else "italic cyan") + " underline" * tool
            content = content if has_tokens else "\n" * (not text.plain.endswith("\n")) + f"{content}\n"
            text.append(f"⟦{content}⟧" if uncolored and tool else content, style)
        text.append("»" * (uncolored and trained))
    text.rstrip()
    return text


def render_data_page(view: DataView, heading: str) -> str:
    """Render the view as a self-contained HTML page."""
    bins = view.figures["histogram"]
    parts = [render_table(list(view.facts.items()), css_class="facts"), "<h2>Lengths</h2>" if bins else ""]
    bars = []
    for up_to, number in bins.items():
        style = f"width:{number / max(bins.values()):.1%};min-width:{number > 0:d}px"
        bars.append((up_to, number, Markup(f'<div style="{style}"></div>')))
    parts.append(render_table(bars, ("tokens, up to", "documents", ""), "bars"))
    parts += ["<h2>Packed sequences</h2><p class=tokens><mark>trained</mark>, <span>context only</span>, "]
    parts += ["<span class=tool>tools</span>; hover over a token for its id and position in the document</p>"]
    for title, documents in view.sequences:
        parts.append(f"<h3>{html.escape(title)}</h3>")
        for document_title, pieces in documents:
            parts.append(f"<p class=border>{html.escape(document_title)}</p>")
            parts.append(f"<pre class=tokens>{''.join(map(_render_piece, pieces))}</pre>" if pieces else "")
    return render_page(heading, "".join(parts))


def _render_piece(piece: TextPiece) -> str:
    tag, kind = "mark" if piece.trained else "span", " class=tool" * piece.tool
    title = f"id {' '.join(map(str, piece.ids))}, position {piece.position}"
    element = f'{tag}{kind} title="{title}"' if piece.ids else "em class=gap"
    return f"<{element}>{html.escape(piece.text)}</{element.split()[0]}>"
