"""What a run would train on, shown before it does: figures, and some packed sequences with the trained tokens marked.

Reads the first round of the data as a run does, of small data everything, into a temporary directory.
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
from ithaka.config import Config
from ithaka.data.open import check_data, data_facts, epoch_steps, measure_balance, open_data
from ithaka.data.stream import TrainData
from ithaka.data.tokenizer import Tokenizer, load_tokenizer
from ithaka.layer.loss import IGNORE_INDEX
from ithaka.preflight.machine import model_shape
from ithaka.report.html import Markup, render_page, render_table

# What chat templates put around tool calls and tool results, and how a call starts.
TOOLS = re.compile(
    r'<[^<>\s]*tool[^<>\s]*>|\[/?\w*TOOL\w*\]|<\|(python_tag|call)\|>|{"name": "[^"]*", "(argu|para)me\w+":'
)
TERMINAL, PAGE = (2, 4, 240), (4, 8, 800)  # shown: sequences, documents of each, tokens of each document


class TextPiece(NamedTuple):
    """Tokens of a document that make whole characters; `position`: of the first. No ids: what is left out, in words."""

    text: str
    ids: list[int]
    position: int
    trained: bool
    tool: bool = False


class DataView(NamedTuple):
    figures: dict[str, Any]  # for programs
    facts: dict[str, str]  # in words, by topic
    sequences: list[
        tuple[str, list[tuple[str, list[TextPiece]]]]
    ]  # some of them and their documents, each in words first


def read_data(config: Config, limits: tuple[int, int, int]) -> DataView:
    """ConfigError as for a run with this data."""
    check_data(config.data, model_shape(config).vocab, config.model.path)
    train, ranks = config.train, config.parallel.ranks
    num_ranks = launch.decide_ranks(ranks, launch.num_gpus()) if ranks == "auto" else ranks  # none is started here
    dp_size = max(1, num_ranks // config.parallel.cp_of(num_ranks))
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.path, config.data.chat_template)
    with tempfile.TemporaryDirectory(prefix="ithaka-") as folder:
        data = open_data(
            config.data, tokenizer=tokenizer, seed=train.seed, dp_size=dp_size, batch=train.batch,
            accumulate=train.micro_steps(dp_size), steps=train.steps if train.epochs is None else None,
            cache_dir=Path(folder),
        )  # fmt: skip
        try:
            global_batch = train.micro_steps(dp_size) * train.batch * dp_size
            steps = train.steps if train.epochs is None else epoch_steps(data, train.epochs, global_batch)
            facts = data_facts(data, steps * global_batch)
            figures = count(data)
            chosen = np.linspace(0, figures["sequences"] - 1, limits[0]).round().astype(int)
            sequences = [show_sequence(data, i, *limits[1:]) for i in np.unique(chosen).tolist()]
        finally:
            data.close()
    share = f"{figures['tokens'] / max(figures['estimated_tokens'], 1):.1%} of the data; the rest was not read"
    read = "all of the data" if figures["complete"] else f"the first {figures['sequences']:,} sequences: about {share}"
    _, _, stop = facts.pop("trained", "").partition(";")
    facts["trained"] = f"{figures['trained_share']:.1%} of these tokens" + f";{stop}" * bool(stop)
    del facts["first tokens"]
    facts["lengths"] = "of documents: median {median:,.0f} tokens, {shortest:,} to {longest:,}".format(
        **figures["lengths"]
    )
    return DataView(figures, {"read": read, **facts}, sequences)


def count(data: TrainData) -> dict[str, Any]:
    """Figures of the first round; what is skipped, and from it the size of all the data, are those of its shards."""
    stream = data.stream
    packed, taken = stream.current_round(), stream.documents
    dropped = stream.num_long if stream.long_documents == "drop" else 0
    kept = taken[taken["length"] <= stream.context] if dropped else taken
    trained = np.zeros(len(stream.sources), np.int64)
    for sequence in map(stream.get_sequence, range(len(packed))):
        trained += np.bincount(sequence.source_ids()[sequence.labels() != IGNORE_INDEX], minlength=len(trained))
    sources: list[dict[str, Any]] = []
    complete = True
    for i, source in enumerate(stream.sources):
        lengths, seen = kept["length"][kept["source"] == i], list(source.shard_counts.values())
        read_tokens = sum(tokens for _, tokens, _ in seen)
        read_bytes = sum(source.shards[index].num_bytes for index in source.shard_counts)
        own = {"files": len({part.file for shard in source.shards for part in shard.parts}), "documents": len(lengths)}
        own |= {"tokens": int(lengths.sum()), "trained_tokens": int(trained[i])}
        own |= {"estimated_tokens": round(read_tokens * source.num_bytes / max(read_bytes, 1))}
        skipped = sum((Counter(reasons) for *_, reasons in seen), Counter[str]())
        sources.append({"name": source.name, **own, "skipped": skipped})
        complete &= len(seen) == len(source.shards) and own["tokens"] >= read_tokens
    sums = {key: sum(source[key] for source in sources) for key in own}
    lengths = taken["length"]
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {
        "complete": complete,
        **sums,
        "trained_share": sums["trained_tokens"] / sums["tokens"],
        "context": stream.context,
        "sequences": len(packed),
        "sequences_left_out": stream.num_left_out,  # without a token to train
        "packing_efficiency": packed.num_tokens / (len(packed) * stream.context),
        "skipped": sum((source["skipped"] for source in sources), Counter[str]()),
        "split": stream.num_long - dropped,
        "dropped": dropped,
        "lengths": {"shortest": int(lengths.min()), "median": float(np.median(lengths)), "longest": int(lengths.max())},
        # By powers of two: documents of up to so many tokens, and more than half as many.
        "histogram": {2**power: int((powers == power).sum()) for power in range(powers.min(), powers.max() + 1)},
        "balance": measure_balance(data),
        "sources": sources,
    }


def show_sequence(data: TrainData, index: int, num_documents: int, num_tokens: int) -> tuple[str, list[Any]]:
    sequence = data.stream.get_sequence(index)
    ids, trained = sequence.ids, sequence.labels() != IGNORE_INDEX
    edges = [*sequence.starts.tolist(), sequence.length]

    def words(what: str, low: int, high: int) -> str:
        return f"{what}: {high - low:,} tokens, {trained[low:high].sum():,} trained"

    shown: list[tuple[str, list[TextPiece]]] = []
    for n, (low, high) in enumerate(itertools.islice(itertools.pairwise(edges), num_documents), 1):
        source = f" of {data.source_names[sequence.sources[n - 1]]}" if len(data.source_names) > 1 else ""
        pieces = show_document(data.cache.tokenizer, ids[low:high].tolist(), trained[low:high], num_tokens)
        shown.append((words(f"document {n}{source}", low, high), pieces))
    if left := len(edges) - 1 - len(shown):
        shown.append((words(f"{left:,} more documents", edges[len(shown)], edges[-1]), []))
    count = len(edges) - 1
    title = f"sequence {index + 1:,} of {len(data.stream.current_round()):,}, {count:,} document{'s' * (count > 1)}"
    return f"{words(title, 0, edges[-1])}, {len(ids) - edges[-1]:,} of padding", shown


def show_document(tokenizer: Tokenizer, ids: list[int], trained: np.ndarray, most: int) -> list[TextPiece]:
    """Its pieces, without the middle if it has more than `most` tokens."""
    low, high = (most // 3, len(ids) - 2 * most // 3) if len(ids) > most else (len(ids), len(ids))
    found = [*_pieces(tokenizer, ids, trained, 0, low), *_pieces(tokenizer, ids, trained, high, len(ids))]
    ends = np.cumsum([len(piece.text) for piece in found])
    for match in TOOLS.finditer("".join(piece.text for piece in found)):
        first, last = np.searchsorted(ends, [match.start() + 1, match.end()])
        found[first : last + 1] = [piece._replace(tool=True) for piece in found[first : last + 1]]
    if low < high:
        left_out = f"... {high - low:,} tokens left out here, {trained[low:high].sum():,} trained ..."
        found.insert(sum(piece.position < low for piece in found), TextPiece(left_out, [], low, False))
    return found


def _pieces(tokenizer: Tokenizer, ids: list[int], trained: np.ndarray, low: int, high: int) -> Iterator[TextPiece]:
    """Of ids[low:high]. The text of a token depends on what is before it, and a character may have several tokens."""
    before = max(low - 1, 0)
    for end in range(low + 1, high + 1):
        text = tokenizer.decode(ids[before:end])
        if not text.endswith("\ufffd") or end == high or trained[end] != trained[low]:
            text = text[len(tokenizer.decode(ids[before:low])) :]
            text = "".join(c if c.isprintable() else "↵\n" if c == "\n" else repr(c)[1:-1] for c in text)
            yield TextPiece(text, ids[low:end], low, bool(trained[low]))
            before, low = low, end


def print_data(view: DataView, console: Console) -> None:
    """Without colours, brackets mark what is trained and what belongs to tools."""
    plain = console.no_color or console.color_system is None
    facts, lengths = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for topic, words in view.facts.items():
        facts.add_row(Text(topic), Text(words, overflow="fold"))
    bins = view.figures["histogram"]
    for up_to, number in bins.items():
        bar = "█" * round(number / max(bins.values()) * min(24, console.width - 24)) or "▏" * (number > 0)
        lengths.add_row(
            *(Text(each, justify="right") for each in (f"up to {up_to:,}", f"{number:,}")), Text(bar, "cyan")
        )
    console.print(facts, Text(), lengths)
    legend = ("trained", [0], 0, True), (", only read, ", [0], 0, False), ("tools", [0], 0, False, True)
    console.print(Text("\n").append(_styled([TextPiece(*each) for each in legend], plain)))
    for title, shown in view.sequences:
        console.print(Text(f"\n{title}", "bold"))
        for words, pieces in shown:
            console.print(Text(f"── {words}", "cyan"), *[_styled(pieces, plain)] * bool(pieces), sep="\n")


def _styled(pieces: list[TextPiece], plain: bool) -> Text:
    text = Text()
    for trained, run in itertools.groupby(pieces, lambda piece: piece.trained):
        text.append("«" * (plain and trained))
        for (tool, ours), same in itertools.groupby(run, lambda piece: (piece.tool, bool(piece.ids))):
            words = "".join(piece.text for piece in same)
            style = ("bold green" if trained else "dim" if ours else "italic cyan") + " underline" * tool
            words = words if ours else "\n" * (not text.plain.endswith("\n")) + f"{words}\n"
            text.append(f"⟦{words}⟧" if plain and tool else words, style)
        text.append("»" * (plain and trained))
    text.rstrip()
    return text


def data_page(view: DataView, heading: str) -> str:
    """The same as an HTML page, of one file."""
    parts = [render_table(list(view.facts.items()), css_class="facts"), "<h2>Lengths</h2>"]
    bins = view.figures["histogram"]
    bars = []
    for up_to, number in bins.items():
        style = f"width:{number / max(bins.values()):.1%};min-width:{number > 0:d}px"
        bars.append((up_to, number, Markup(f'<div style="{style}"></div>')))
    parts.append(render_table(bars, ("tokens, up to", "documents", ""), "bars"))
    parts += ["<h2>Packed sequences</h2><p class=tokens><mark>trained</mark>, <span>only read</span>, "]
    parts += ["<span class=tool>tools</span>; point at a token for its id and its position in the document</p>"]
    for title, shown in view.sequences:
        parts.append(f"<h3>{html.escape(title)}</h3>")
        for words, pieces in shown:
            parts.append(f"<p class=border>{html.escape(words)}</p>")
            parts.append(f"<pre class=tokens>{''.join(map(_span, pieces))}</pre>" if pieces else "")
    return render_page(heading, "".join(parts))


def _span(piece: TextPiece) -> str:
    tag, kind = "mark" if piece.trained else "span", " class=tool" * piece.tool
    about = f"id {' '.join(map(str, piece.ids))}, position {piece.position}"
    about = f'{tag}{kind} title="{about}"' if piece.ids else "em class=gap"
    return f"<{about}>{html.escape(piece.text)}</{about.split()[0]}>"
