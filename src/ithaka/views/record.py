"""Show records turn by turn: why each token is trained or not, and what is cut."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ithaka.config import Config, ConfigError, DataConfig
from ithaka.config.units import plural
from ithaka.data.cache import TokenizedPart, tokenize
from ithaka.data.documents.chat import SPAN_KINDS
from ithaka.data.documents.read import Shard, make_shards
from ithaka.data.documents.records import SIDES
from ithaka.data.held_out import find_sources, split_sources
from ithaka.data.pack import Documents, LongDocuments, cut_documents, encode_turn
from ithaka.data.stored_tokens import decode_ids, encode_tokens, is_trained
from ithaka.data.tokenizer import Tokenizer

# Tags that chat templates put around tool calls and results, and the start of a JSON call.
TOOL_PATTERN = re.compile(
    r'<[^<>\s]*tool[^<>\s]*>|\[/?\w*TOOL\w*\]|<\|(python_tag|call)\|>|{"name": "[^"]*", '
    r'"(argu|para)me\w+":'
)
NUM_RECORDS = 8  # shown
NUM_TURNS = 24  # shown of each record
NUM_TOKENS = 240  # shown of each turn
PROBED_RECORDS = 1000  # records per source to choose from
NO_PIECE = -1
UNTRAINED_PIECE = -2
CUT_REASONS = {
    "end": "cut: before the last turns that fit",
    "shorten_tools": "cut: the middle of a long tool output",
    "drop": "cut: the conversation is longer than data.context",
}


class TextPiece(NamedTuple):
    """Consecutive tokens, starting at `position`, that are complete characters or one image."""

    text: str
    ids: list[int]  # an image's id once; empty for a note
    position: int
    trained: bool
    tool: bool = False
    why: str = ""  # why these tokens are trained or not
    cut: bool = False  # whether no sequence has them


# a title, and the title and text of each part
Described = tuple[str, list[tuple[str, list[TextPiece]]]]


class ShownRecord(NamedTuple):
    title: str
    samples: list[TokenizedPart]  # several if reasoning is unrolled; two for a pair

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)


def find_record(
    config: Config, datasets: Sequence[DataConfig], tokenizer: Tokenizer, number: int
) -> list[ShownRecord]:
    """Return record `number`, counted from 1, of each source that has that many."""
    found = []
    counts = []
    for path, records in _read_sources(config, datasets, tokenizer, batch_chars=1):
        count = 0
        for record in records:
            count += 1
            if count == number:
                found.append(record)
                break
        counts.append(f"{count:,} in {path or 'the standard library of Python'}")
    if not found:
        raise ConfigError(
            f"--record={number} is beyond the last record ({', '.join(counts)}); give a smaller "
            "number"
        )
    return found


def choose_records(
    config: Config, datasets: Sequence[DataConfig], tokenizer: Tokenizer
) -> list[ShownRecord]:
    """Choose among the first records of each source: the longest, one of each kind, then others."""
    chosen = []
    sources = list(_read_sources(config, datasets, tokenizer))
    for _, records in sources:
        probed = list(itertools.islice(records, PROBED_RECORDS))
        if not probed:
            continue
        lengths = [record.num_tokens for record in probed]
        firsts: dict[str, int] = {}  # by kind
        for i, record in enumerate(probed):
            kind = "unrolled" if len(record.samples) > 1 else ""
            firsts.setdefault(record.samples[0].skip_reason or kind, i)
        order = dict.fromkeys([0, int(np.argmax(lengths)), *firsts.values(), *range(len(probed))])
        indices = sorted(list(order)[: max(2, NUM_RECORDS // len(sources))])
        chosen += [probed[i] for i in indices]
    return chosen


def _read_sources(
    config: Config,
    datasets: Sequence[DataConfig],
    tokenizer: Tokenizer,
    batch_chars: int | None = None,
) -> Iterator[tuple[Path | None, Iterator[ShownRecord]]]:
    found = find_sources(config.data)
    for source, (split, _) in zip(found, split_sources(found, config.data, datasets), strict=True):
        both = replace(split, held_out=None) if split is not None and source.fraction else None
        shards = make_shards(source.files.files, source.config, both)
        yield source.config.path, _read_records(source.config.path, shards, tokenizer, batch_chars)


def _read_records(
    path: Path | None, shards: Sequence[Shard], tokenizer: Tokenizer, batch_chars: int | None
) -> Iterator[ShownRecord]:
    """Yield all records. The title says which are held out, but not of texts."""
    numbers = itertools.count(1)
    for shard in shards:
        for samples in _group_samples(tokenize(shard, tokenizer, batch_chars, True)):
            held_out = ", held out for validation" * samples[0].is_held_out
            yield ShownRecord(f"record {next(numbers):,} of {path}{held_out}", samples)


def _group_samples(parts: Iterator[TokenizedPart]) -> Iterator[list[TokenizedPart]]:
    """Yield the samples of each record. The parts of a long text are joined."""
    samples: list[TokenizedPart] = []
    for part in parts:
        if part.is_record and samples:
            yield samples
            samples = []
        if part.is_start:
            samples.append(part)
        else:
            tokens = np.concatenate([samples[-1].tokens, part.tokens])
            samples[-1] = samples[-1]._replace(tokens=tokens)
    if samples:
        yield samples


def describe_record(
    record: ShownRecord, config: Config, tokenizer: Tokenizer
) -> tuple[list[Described], Counter[str]]:
    """Describe each sample of a record, turn by turn, and count its tokens by reason."""
    described: list[Described] = []
    reasons = Counter[str]()
    for n, sample in enumerate(record.samples, 1):
        title = record.title
        if len(record.samples) > 1:
            is_pair = config.data.train_on == "pairs"
            title += f", {SIDES[n - 1]}" if is_pair else f", sample {n} of {len(record.samples)}"
        if sample.skip_reason:
            described.append((f"{title}: skipped, {sample.skip_reason}", []))
            continue
        pieces, num_pieces = find_pieces(sample, config, tokenizer)
        whys = explain_tokens(sample, pieces, config)
        is_cut = pieces < 0
        trained = is_trained(sample.tokens) & ~is_cut
        title += f": {plural(len(whys), 'token')}, {trained.sum():,} trained"
        if num_pieces != 1 or is_cut.any():
            pieces_of = f"{plural(num_pieces, 'piece')} of at most {config.data.context:,}"
            title += f", {pieces_of}, {plural(int(is_cut.sum()), 'token')} cut"
        notes = "".join(f"; {name}: {count}" for name, count in sample.notes.items())
        turns = list(_describe_turns(sample, pieces, num_pieces, whys, tokenizer))
        described.append((title + notes, turns))
        reasons.update(whys)
    return described, reasons


def find_pieces(
    sample: TokenizedPart, config: Config, tokenizer: Tokenizer
) -> tuple[np.ndarray, int]:
    """Return for each token the first piece that has it (NO_PIECE: none; UNTRAINED_PIECE: one
    without a trained token, which is left out), and the number of pieces.

    Cuts a document whose ids are its positions, so that each piece shows where its tokens come
    from.
    """
    num = len(sample.tokens)
    data = config.data
    positions = np.arange(num, dtype=np.int32)
    turns = np.asarray([encode_turn(*turn) for turn in sample.turns], np.int64)
    tokens = encode_tokens(positions, is_trained(sample.tokens))
    document = Documents(tokens, np.asarray([num]), turns=turns)
    marker = tuple(range(num, num + len(tokenizer.encode_batch([data.tool_marker])[0])))
    long = LongDocuments(data.long_documents, data.tool_tokens, marker)
    cut = cut_documents(document, data.context, long)
    first_piece = np.full(num + len(marker), NO_PIECE)
    if data.long_documents != "drop" or num <= data.context:
        first_piece[decode_ids(cut.shards[-1].tokens)] = UNTRAINED_PIECE
    for i, (shard, _, low, length) in reversed(list(enumerate(cut.segments.tolist()))):
        first_piece[decode_ids(cut.shards[shard].tokens[low : low + length])] = i
    return first_piece[:num], len(cut.segments)


def explain_tokens(sample: TokenizedPart, pieces: np.ndarray, config: Config) -> list[str]:
    """Return why each token is trained, context only or cut."""
    starts = [start for start, _ in sample.spans]
    kinds = [SPAN_KINDS[kind] for _, kind in sample.spans]
    spans = np.searchsorted(starts, np.arange(len(pieces)), side="right") - 1
    labelled = is_trained(sample.tokens).tolist()
    default = "labels" if sample.turns or not all(labelled) else "text"
    whys = []
    for span, piece, trained in zip(spans.tolist(), pieces.tolist(), labelled, strict=True):
        why = kinds[span] if kinds and span >= 0 else default
        if piece == UNTRAINED_PIECE:
            why = "cut: no trained token in this piece"
        elif piece < 0:
            why = CUT_REASONS[config.data.long_documents]
        elif trained:
            why += ", trained"
        else:
            if why == SPAN_KINDS["reasoning"]:
                why += ", and data.reasoning.loss is false"
            why += ", context only"
        whys.append(why)
    return whys


def _describe_turns(
    sample: TokenizedPart,
    pieces: np.ndarray,
    num_pieces: int,
    whys: list[str],
    tokenizer: Tokenizer,
) -> Iterator[tuple[str, list[TextPiece]]]:
    """Yield the title and the text of each turn, at most NUM_TURNS of them."""
    ids = decode_ids(sample.tokens)
    trained = is_trained(sample.tokens) & (pieces >= 0)
    edges = [0, *(start for start, _ in sample.turns), len(ids)]
    names = ["before the first turn" if sample.turns else "text"]
    names += [f"turn {n}, {role}" for n, (_, role) in enumerate(sample.turns, 1)]
    turns = [turn for turn in zip(names, edges[:-1], edges[1:], strict=True) if turn[1] < turn[2]]
    hidden = range(NUM_TURNS // 2, len(turns) - NUM_TURNS // 2)
    for n, (name, low, high) in enumerate(turns):
        if n in hidden:
            if n == hidden[-1]:
                low = turns[hidden[0]][1]
                yield f"{plural(len(hidden), 'more turn')}: {_count_reasons(whys[low:high])}", []
            continue
        own = slice(low, high)
        text = split_document(
            tokenizer, ids[own].tolist(), trained[own], NUM_TOKENS, whys[own], bool(sample.images)
        )
        placed = []
        for each in text:
            position = low + each.position
            is_cut = bool(each.ids) and bool(pieces[position] < 0)
            placed.append(each._replace(position=position, cut=is_cut))
        title = f"{name}: {_count_reasons(whys[low:high])}"
        yield title, list(_mark_pieces(placed, pieces, num_pieces))


def _count_reasons(whys: list[str]) -> str:
    counts = Counter(whys)
    parts = list(counts)
    if len(counts) > 1:
        parts = [f"{count:,} {why}" for why, count in counts.items()]
    return f"{plural(len(whys), 'token')} ({'; '.join(parts)})"


def _mark_pieces(text: list[TextPiece], pieces: np.ndarray, num_pieces: int) -> Iterator[TextPiece]:
    """Insert a note where a piece of the document starts."""
    kept = np.flatnonzero(pieces >= 0)
    starts = kept[np.diff(pieces[kept], prepend=-1) != 0] if num_pieces > 1 else kept[:0]
    starts = starts[starts >= text[0].position]
    for each in text:
        passed = starts[starts <= each.position]
        starts = starts[starts > each.position]
        if len(passed):
            note = f"piece {pieces[passed[-1]] + 1:,} of {num_pieces:,}"
            yield TextPiece(note, [], each.position, False)
        yield each


def split_document(
    tokenizer: Tokenizer,
    ids: list[int],
    trained: np.ndarray,
    limit: int,
    whys: Sequence[str] = (),
    has_images: bool = False,
) -> list[TextPiece]:
    """Decode a document into pieces with one reason each. Beyond `limit` tokens, omit the middle.
    The tokens of an image, or of a time step of a video, count as one."""
    media = {i: kind for kind, i in tokenizer.images.ids.items()} if has_images else {}
    starts = [n for n, i in enumerate(ids) if i not in media or not n or ids[n - 1] != i]
    low = len(ids)
    high = len(ids)
    if len(starts) > limit:
        low = starts[limit // 3]
        high = starts[len(starts) - 2 * limit // 3]
    kinds = whys or [str(each) for each in trained.tolist()]
    first_part = _decode(tokenizer, ids, kinds, 0, low, media)
    last_part = _decode(tokenizer, ids, kinds, high, len(ids), media)
    pieces = []
    for each in itertools.chain(first_part, last_part):
        why = whys[each.position] if whys else ""
        pieces.append(each._replace(trained=bool(trained[each.position]), why=why))
    ends = np.cumsum([len(piece.text) for piece in pieces])
    for match in TOOL_PATTERN.finditer("".join(piece.text for piece in pieces)):
        first, last = np.searchsorted(ends, [match.start() + 1, match.end()])
        pieces[first : last + 1] = [piece._replace(tool=True) for piece in pieces[first : last + 1]]
    if low < high:
        note = f"... {plural(high - low, 'token')} omitted, {trained[low:high].sum():,} trained ..."
        num_before = sum(piece.position < low for piece in pieces)
        pieces.insert(num_before, TextPiece(note, [], low, False))
    return pieces


def _decode(
    tokenizer: Tokenizer,
    ids: list[int],
    kinds: Sequence[str],
    low: int,
    high: int,
    media: Mapping[int, str],
) -> Iterator[TextPiece]:
    """Decode ids[low:high] in context: the text of a token depends on the one before."""
    before = max(low - 1, 0)
    for end in range(low + 1, high + 1):
        is_last = end == high or kinds[end] != kinds[low]
        if ids[low] in media:
            if is_last or ids[end] != ids[low]:
                label = f"<{media[ids[low]]}: {plural(end - low, 'token')}>"
                yield TextPiece(label, ids[low : low + 1], low, False)
                before = end - 1
                low = end
            continue
        text = tokenizer.decode(ids[before:end])
        if not text.endswith("\ufffd") or is_last:
            text = text[len(tokenizer.decode(ids[before:low])) :]
            yield TextPiece("".join(map(_show_character, text)), ids[low:end], low, False)
            before = low
            low = end


def _show_character(char: str) -> str:
    if char == "\n":
        return "↵\n"
    return char if char.isprintable() else repr(char)[1:-1]
