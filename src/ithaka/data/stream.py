"""Mix the documents of several sources by weight, pack them round by round, and give each rank its batches.

A round takes tokens from every source in proportion to its weight. It ends with the epoch of the main source, the one
whose epoch takes longest; the other sources start new epochs within a round.

All ranks read the same global stream of packed sequences; sequence i of a batch belongs to data-parallel rank
i % dp_size. So a position is valid for any number of ranks, and the data of a step depends only on the number of
sequences per step.

S: tokens in a sequence (data.context).  B: sequences in a batch of this rank.
"""

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ithaka.config import ConfigError
from ithaka.data import pack
from ithaka.data.batch import Batch, collate
from ithaka.data.cache import TokenCache
from ithaka.data.documents.images import Medium
from ithaka.data.documents.read import Shard
from ithaka.data.find import FoundData

Cut = Callable[..., pack.CutDocuments]  # pack.cut_documents with `context` and `long` bound
STATE_FORMAT = 7  # increase it if a position has another meaning
BY_POSITION = 6  # held out documents by their position in the files; equal without such a split
PACKING_KEYS = ("context", "group", "lead", "done", "most")  # in a state, for the fields of Packing
# Minimum size of a round.
ROUND_TOKENS = 1 << 24
ROUND_SEQUENCES = 64
ROUND_STEPS = 32
HELD_OUT_SEQUENCES = 16  # in a round of held-out data, of which a run may need only the first sequences
KEPT_ROUNDS = 2  # streamed tokens are kept this long; ranks are less than a round apart
SPARE_SEQUENCES = 8  # in a limited round: shuffling may put the last and least filled sequence first


def tokens_per_round(packing: pack.Packing, shuffled: bool = True) -> int:
    """Return the size of a round. It affects packing, so it depends on what the run needs only if it is expensive."""
    num_sequences = max(ROUND_SEQUENCES, ROUND_STEPS * packing.group) if shuffled else HELD_OUT_SEQUENCES
    full = max(num_sequences * packing.context, ROUND_TOKENS * shuffled)
    return min(full, max(packing.max_sequences * packing.context, ROUND_TOKENS)) if packing.max_sequences else full


@dataclass(frozen=True)
class SourcePosition:
    """A position in a source: the next document, and the tokens read since the start of training."""

    epoch: int = 0
    shard: int = 0  # in the order of the epoch
    document: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream: where its round starts in each source, and how the round is packed.

    Resuming with another context packs the rest of a round again, which adds a packing.
    """

    sequences: int = 0  # since the start of training, over all ranks
    sources: tuple[SourcePosition, ...] = ()
    packings: tuple[pack.Packing, ...] = ()

    @property
    def epoch(self) -> int:
        """Epoch of the main source."""
        return min((source.epoch for source in self.sources), default=0)


class ShardCounts(NamedTuple):
    """The documents and tokens to train on in a shard; skipped and notes as in Documents."""

    documents: int
    tokens: int
    skipped: Mapping[str, int]
    notes: Mapping[str, int]


class SelectedDocuments(NamedTuple):
    """Documents of one shard, as segments. Only these are kept: a round may have millions of documents."""

    shard: Shard
    tokens: tuple[pack.Documents, ...]  # the shard's, and pieces that are not a range of their document
    documents: np.ndarray  # before any is cut
    pieces: np.ndarray
    pieces_left_out: int  # without a trained token
    removed_tokens: int  # in no piece


class Source:
    """The documents of one data source, epoch after epoch."""

    def __init__(self, name: str, weight: float, shards: Sequence[Shard], cache: TokenCache, key: pack.Key | None):
        """`key` shuffles each epoch, without end; None: one epoch, in the order of the files."""
        self.name, self.weight, self.shards, self.cache, self.key = name, weight, shards, cache, key
        self.num_bytes = sum(shard.num_bytes for shard in shards)
        self.shard_counts: dict[int, ShardCounts] = {}  # by shard, for those loaded so far

    def next_documents(
        self, position: SourcePosition, num_tokens: float, cut: Cut, wrap: bool, prefetch: bool = True,
        report: Callable[[float], None] = lambda share: None,
    ) -> tuple[list[SelectedDocuments], SourcePosition]:  # fmt: skip
        """Return the next documents by shard, of at least `num_tokens` tokens in all, and the position after them.

        Stop at the end of an epoch, unless `wrap`. `prefetch`: tokenize the following shards in the background.
        """
        selected: list[SelectedDocuments] = []
        until = position.tokens + num_tokens
        # Tokens at the start of the epoch, if it is within this call.
        epoch_start = position.tokens if position.shard == position.document == 0 else None
        order = self._shuffle(len(self.shards), position.epoch)
        while position.tokens < until and position.shard < len(order):
            index = order[position.shard]
            pieces = cut(self.cache.load(self.shards[index]))
            documents = pieces.shards[0]
            num = len(documents.lengths)
            sizes = np.bincount(pieces.owners, pieces.segments["length"], num).astype(np.int64)
            counts = ShardCounts(int((sizes > 0).sum()), int(sizes.sum()), documents.skipped, documents.notes)
            self.shard_counts[index] = counts
            indices = np.asarray(self._shuffle(num, position.epoch, position.shard)[position.document :], np.int64)
            ends = sizes[indices].cumsum()
            count = int(ends.searchsorted(until - position.tokens)) + 1
            read = 0 if wrap else (position.shard + 1) / len(order)
            report(min(max(read, 1 - (until - position.tokens) / max(num_tokens, 1)), 1))
            selected.append(self._select(self.shards[index], pieces, indices[:count]))
            tokens = position.tokens + int(ends[:count][-1:].sum())
            position = replace(position, document=position.document + count, tokens=tokens)
            if count >= len(indices):
                position = SourcePosition(position.epoch, position.shard + 1, 0, tokens)
            if self.key is not None and position.shard == len(order):
                if tokens == epoch_start:
                    raise ConfigError(f"data: {self.name} has no tokens to train on; use other data")
                position, epoch_start = SourcePosition(position.epoch + 1, tokens=tokens), tokens
                order = self._shuffle(len(self.shards), position.epoch)
                if not wrap:
                    break
        if self.key is not None and prefetch:  # the next round may need as many shards
            self.cache.prepare(self.shards[i] for i in order[position.shard :][: 1 + len(selected)])
        return selected, position

    def _select(self, shard: Shard, cut: pack.CutDocuments, indices: np.ndarray) -> SelectedDocuments:
        documents, records = pack.split_samples(cut.shards[0])
        documents = documents[np.isin(records, indices)]
        counts = (int(each[indices].sum()) for each in (cut.pieces_left_out, cut.removed))
        return SelectedDocuments(shard, cut.shards, documents, pack.select_pieces(cut, indices), *counts)

    def _shuffle(self, count: int, *key: int) -> list[int]:
        return list(range(count)) if self.key is None else pack.permutation(count, (*self.key, *key)).tolist()

    def estimate_size(self, cut: Cut) -> tuple[int, int, bool]:
        """Return the number of documents and tokens, and whether all of them were read. Reads a shard if none was."""
        if not self.shard_counts:
            self.next_documents(SourcePosition(), 1, cut, wrap=False)
        scale = self.num_bytes / sum(self.shards[i].num_bytes for i in self.shard_counts)
        documents, tokens, _, _ = zip(*self.shard_counts.values(), strict=True)
        return round(sum(documents) * scale), round(sum(tokens) * scale), len(documents) == len(self.shards)

    def digests(self) -> np.ndarray:
        """Return those of the documents in the shards read so far."""
        known = [self.cache.load(self.shards[i]).digests for i in sorted(self.shard_counts)]
        return np.concatenate([np.empty(0, np.int64), *known])

    def count(self, name: Literal["skipped", "notes"]) -> Counter[str]:
        """Sum the counts of skipped documents by reason, or those of notes, over the shards read so far."""
        return sum((Counter(getattr(counts, name)) for counts in self.shard_counts.values()), Counter[str]())


class SequenceStream:
    """Packed sequences of `context` tokens from several sources.

    Loading a round sets `documents`, the uncut documents as segments; `source_tokens`, the tokens in their pieces, by
    source; `num_long`, the documents longer than the context; `pieces_left_out`, their pieces without a trained token;
    `removed_tokens`, their tokens in no piece; `num_left_out`, the sequences without a label in this round and in empty
    rounds before it; and `read_tokens`, the tokens of all these sequences.
    """

    def __init__(
        self, sources: Sequence[Source], context: int, *, group: int = 1, pad_id: int = 0,
        long_documents: pack.LongDocuments | str = "split", documents_together: bool = False,
        needed: int | None = None,
    ):  # fmt: skip
        """`group`: sequences per step, over all ranks. `needed`: sequences that the run still needs; None: unknown.

        Either all sources have keys, or none: then the stream ends after one epoch.
        """
        self.sources, self.context, self.group, self.pad_id, self.needed = sources, context, group, pad_id, needed
        self.documents_together = documents_together
        self.long = pack.LongDocuments(long_documents) if isinstance(long_documents, str) else long_documents
        self.cut: Cut = functools.partial(pack.cut_documents, context=context, long=self.long)
        self.report: Callable[[float], None] = lambda share: None  # called with the share of a round that is read
        self.shuffled = sources[0].key is not None
        self._recent: list[set[Shard]] = []  # streamed shards of the last rounds
        self.main = max(range(len(sources)), key=lambda i: sources[i].num_bytes / sources[i].weight)
        self.seek(StreamPosition())

    def seek(self, position: StreamPosition) -> None:
        max_sequences = 0
        if self.needed is not None:
            max_sequences = max(self.group, self.needed) + SPARE_SEQUENCES * self.shuffled
        packings = position.packings or (pack.Packing(self.context, self.group, max_sequences=max_sequences),)
        if packings[-1].context != self.context:
            packings = (*packings, pack.Packing(self.context, self.group))
        sources = position.sources or (SourcePosition(),) * len(self.sources)
        self.position = StreamPosition(position.sequences, sources, packings)
        # A step starts at this sequence of the round. A change of group applies from the next round on.
        self._step_start = packings[-1].num_leading if packings[-1].group == self.group else packings[-1].done
        self._round: pack.PackedRound | None = None
        self.num_left_out = self.read_tokens = 0

    def next_sequence(self, materialize: bool = True) -> pack.PackedSequence | None:
        """Advance, and return the sequence: None at the end of a stream without keys, or if not `materialize`."""
        num_sequences = len(self.current_round())  # may start the next round
        *earlier, packing = self.position.packings
        if not num_sequences:
            return None
        packings = (*earlier, replace(packing, done=packing.done + 1))
        self.position = replace(self.position, sequences=self.position.sequences + 1, packings=packings)
        return self.get_sequence(packing.done) if materialize else None

    def get_sequence(self, index: int) -> pack.PackedSequence:
        """Return a sequence of the current round, without advancing."""
        assert self._round is not None
        return self.build_sequence(self._round.segments(index, index + 1))

    def build_sequence(self, segments: np.ndarray) -> pack.PackedSequence:
        """Concatenate the tokens of `segments` of the current round, and pad."""
        tokens_S = np.full(self.context, self.pad_id, dtype=np.int32)
        ends, images = segments["length"].cumsum(), list[Medium]()
        for (shard, _, low, length), end in zip(segments.tolist(), ends.tolist(), strict=True):
            documents, own = self._documents[shard], tokens_S[end - length : end]
            own[:] = documents.tokens[low : low + length]
            if documents.images:
                is_image = own <= ~pack.IMAGE_BASE
                numbers, inverse = np.unique(~own[is_image] - pack.IMAGE_BASE, return_inverse=True)
                found, ids = [documents.images[i] for i in numbers], self.sources[0].cache.tokenizer.images.ids
                own[is_image] = np.array([~ids[image.kind] for image in found], np.int32)[inverse]
                images += found
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        num_documents, length = max(len(segments), 1), int(starts[-1])
        sequence = pack.PackedSequence(
            tokens_S, starts[:num_documents], length, segments["source"], self.documents_together
        )
        sequence = replace(sequence, images=tuple(images)) if images else sequence
        if len(segments) and self._documents[segments["shard"][0]].teacher is not None:  # then all have one
            columns = [self._documents[shard].teacher[low : low + n] for shard, _, low, n in segments.tolist()]
            padding = np.empty((self.context - length, 2, 0), np.int32)
            sequence = replace(sequence, teacher=pack.join_teachers([*columns, padding]))
        return self._with_nodes(sequence, segments) if self.long.shares or self.long.pairs else sequence

    def _with_nodes(self, sequence: pack.PackedSequence, segments: np.ndarray) -> pack.PackedSequence:
        """Replace each forest, which is one segment, by its nodes."""
        nodes = [np.zeros(0, pack.NODE_DTYPE)]
        sources, num_nodes, num_samples = [], 0, 0
        for (shard, source, low, length), start in zip(segments.tolist(), sequence.starts.tolist(), strict=False):
            known = self._documents[shard].nodes
            own = known[slice(*np.searchsorted(known["start"], [low, low + length]))].copy()
            if not len(own):
                own = np.array([(low, -1, 0)], pack.NODE_DTYPE)
            own["start"] += start - low
            own["parent"] += np.where(own["parent"] >= 0, num_nodes, 0)
            own["sample"] += num_samples
            num_nodes, num_samples = num_nodes + len(own), int(own["sample"].max()) + 1
            sources += [source] * len(own)
            nodes.append(own)
        if len(nodes) == 1:
            return sequence
        starts, parents, samples = (np.concatenate(nodes)[name] for name in ("start", "parent", "sample"))
        return replace(sequence, starts=starts, sources=np.array(sources), parents=parents, samples=samples)

    def current_round(self) -> pack.PackedRound:
        """Return the round of the next sequence, loading it if necessary; empty at the end of a stream without keys."""
        if self._round is None:
            self._round = self._load_round()
        start = self.position.epoch
        while self.position.packings[-1].done == len(self._round) and (self.shuffled or len(self.documents)):
            if self.shuffled and self.position.epoch > start + 1:
                raise ConfigError(
                    f"no sequence of data.context={self.context} tokens has a token to train on; run `ithaka data`, "
                    "and check data.train_on, data.chat_template and the labels in the data"
                )
            if len(self._round):
                self.num_left_out = self.read_tokens = 0
            self._step_start = (self._step_start - len(self._round)) % self.group
            max_sequences = self.position.packings[0].max_sequences
            packing = pack.Packing(self.context, self.group, self._step_start, max_sequences=max_sequences)
            self.position = StreamPosition(self.position.sequences, self._round_end, (packing,))
            self._round = self._load_round()
        return self._round

    def _load_round(self) -> pack.PackedRound:
        main, key = self.position.sources[self.main], self.sources[self.main].key
        key = None if key is None else (*key, main.epoch, main.shard, main.document)
        segments = self._next_documents(key)
        self.num_long = 0
        for i, packing in enumerate(self.position.packings):
            documents = segments if i else self.documents
            is_long = documents["length"] > packing.context
            self.num_long += int(is_long.sum())
            if is_long.any() and self.long.mode == "refuse":
                raise ConfigError(self._describe_long_document(documents[is_long][0]))
            if i and any(len(self._documents[n].nodes) for n in np.unique(documents["shard"][is_long]).tolist()):
                raise ConfigError(
                    f"data.context={packing.context} cannot hold samples that were joined before the resume; resume "
                    f"with data.context={self.position.packings[i - 1].context} or more"
                )
            if self.long.mode == "drop" and i:
                segments = segments[~is_long]
            segments = pack.split_long(segments, packing.context)
            packed = pack.PackedRound(segments, packing, key, self._documents, self.documents_together)
            segments = packed.segments(packing.done, len(packed))
        self.num_left_out += packed.num_left_out
        self.read_tokens += packed.read_tokens
        if self.shuffled:
            self._evict_earlier_rounds()
        return packed

    def _evict_earlier_rounds(self) -> None:
        """Delete the tokens of streamed shards that no rank reads any more, or they would fill the disk."""
        self._recent.append({shard for shard, _ in self._shards if shard.is_streamed})
        if len(self._recent) > KEPT_ROUNDS:
            done = self._recent.pop(0).difference(*self._recent)
            if done:
                self.sources[0].cache.evict(done)

    def _next_documents(self, key: pack.Key | None) -> np.ndarray:
        """Return the pieces [n] of the next round, from all sources, shuffled by `key`."""
        positions, packing = list(self.position.sources), self.position.packings[0]
        num_tokens = tokens_per_round(packing, self.shuffled)
        prefetch = self.needed is None or self.needed * self.context > num_tokens  # the run needs another round
        cut = functools.partial(self.cut, context=packing.context)
        main, weights, done = self.main, [source.weight for source in self.sources], 0.0
        self._shards: list[tuple[Shard, pack.Documents]] = []
        self.pieces_left_out = self.removed_tokens = 0
        by_source: list[np.ndarray] = []
        all_documents = [np.empty(0, pack.SEGMENT_DTYPE)]
        for i in sorted(range(len(positions)), key=lambda i: i != main):  # the others follow the main source
            need = weights[i] / weights[main] * positions[main].tokens - positions[i].tokens
            need = num_tokens * weights[i] / sum(weights) if i == main else need
            shards, positions[i] = self.sources[i].next_documents(
                positions[i], need, cut, wrap=i != main, prefetch=prefetch,
                report=functools.partial(self._report_share, done, weights[i]),
            )  # fmt: skip
            done += weights[i]
            for each in shards:
                for segments in (each.pieces, each.documents):
                    segments["shard"] += len(self._shards)
                    segments["source"] = i
                self.pieces_left_out += each.pieces_left_out
                self.removed_tokens += each.removed_tokens
                self._shards += [(each.shard, documents) for documents in each.tokens]
                all_documents.append(each.documents)
            by_source.append(np.concatenate([np.empty(0, pack.SEGMENT_DTYPE), *(each.pieces for each in shards)]))
        self.documents = np.concatenate(all_documents)
        self._round_end = tuple(positions)
        starts = (position.tokens for position in self.position.sources)
        self.source_tokens = [end.tokens - start for end, start in zip(positions, starts, strict=True)]
        self._documents = [documents for _, documents in self._shards]
        if key is not None:
            by_source = [segments[pack.permutation(len(segments), key)] for segments in by_source]
        # Interleave the sources evenly.
        progress = [segments["length"].cumsum() / max(segments["length"].sum(), 1) for segments in by_source]
        return np.concatenate(by_source)[np.concatenate(progress).argsort(kind="stable")]

    def _report_share(self, done: float, weight: float, share: float) -> None:
        self.report((done + weight * share) / sum(source.weight for source in self.sources))

    def _describe_long_document(self, segment: np.void) -> str:
        shard, documents = self._shards[segment["shard"]]
        # Each part of a text shard is a document; which record of a file it was is no longer known.
        index = int((documents.lengths.cumsum() <= segment["low"]).sum()) if len(shard.parts) > 1 else 0
        return (
            f"{shard.parts[index].file.path} has a document of {segment['length']} tokens, more than data.context="
            f"{self.context}; increase data.context, or set data.long_documents to split or drop instead of refuse"
        )


class TrainData:
    """This rank's batches of the global stream, and a fixed set of validation batches."""

    def __init__(
        self, stream: SequenceStream, validation: SequenceStream | None, found: FoundData, *,
        dp_rank: int, dp_size: int, batch: int, cp: tuple[int, int],
    ):  # fmt: skip
        self.stream, self.validation, self.summary = stream, validation, found.summary
        self.is_split = found.is_split
        self.dp_rank, self.dp_size, self.batch, self.cp = dp_rank, dp_size, batch, cp
        self.source_names, self.cache = [source.name for source in stream.sources], stream.sources[0].cache
        self.position = stream.position  # after the last returned batch; the stream is ahead of it
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch batch")
        self._prefetched: Future[tuple[Batch, StreamPosition]] | None = None
        self._held_out: tuple[int, list[pack.PackedSequence]] = (-1, [])

    def next_batch(self) -> Batch:
        """Return this rank's next batch [B, S], and prefetch another. All ranks must make the same calls."""
        batch, self.position = (self._prefetched or self._executor.submit(self._read)).result()
        self._prefetched = self._executor.submit(self._read)
        return batch

    def _read(self) -> tuple[Batch, StreamPosition]:
        is_mine = [i % self.dp_size == self.dp_rank for i in range(self.batch * self.dp_size)]
        rows = [self.stream.next_sequence(materialize=mine) for mine in is_mine]
        own = [row for row in rows if row is not None]
        return self.collate(own, len(self.source_names) > 1), self.stream.position

    def collate(self, sequences: Sequence[pack.PackedSequence], with_sources: bool = False) -> Batch:
        """Make a batch, and read its images."""
        batch, images = collate(sequences, with_sources), [image for each in sequences for image in each.images]
        return batch._replace(images=self.cache.tokenizer.images.load(images, *self.cp)) if images else batch

    def validation_sequences(self, count: int) -> list[pack.PackedSequence]:
        """Return the first `count` held-out sequences, or all if there are fewer; the same on every rank."""
        if self.validation is None:
            return []
        if self._held_out[0] != count:
            self.validation.seek(StreamPosition())
            self._held_out = (count, list(itertools.islice(iter(self.validation.next_sequence, None), count)))
        return self._held_out[1]

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """Yield this rank's share of the first `count` held-out sequences: batches [B, S], the same number on every
        rank. Rows without labels pad the last one."""
        sequences = self.validation_sequences(count)
        with_sources = self.validation is not None and len(self.validation.sources) > 1
        blank = self.stream.build_sequence(np.empty(0, pack.SEGMENT_DTYPE))
        for low in range(0, len(sequences), self.batch * self.dp_size):
            rows = sequences[low : low + self.batch * self.dp_size][self.dp_rank :: self.dp_size]
            yield self.collate(rows + [blank] * (self.batch - len(rows)), with_sources)

    def state_dict(self) -> dict[str, Any]:
        """Return the global position as JSON-compatible values; the same on every rank."""
        return {
            "version": STATE_FORMAT,
            "data": self.fingerprint(),
            "sequences": self.position.sequences,
            "cursors": [asdict(source) for source in self.position.sources],
            "packings": [dict(zip(PACKING_KEYS, astuple(packing), strict=True)) for packing in self.position.packings],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`, on any number of ranks. The data must be the same."""
        self.check_format(state)
        if state["data"] != self.fingerprint():
            raise ConfigError(
                "data.path, its files, data.sources, data.text_field, data.long_documents, data.validation_fraction, "
                "data.tokenizer or train.seed differ from the checkpoint's, or loss.type or, for unrolled "
                "conversations, parallel.ring; restore them, or export the run and start a new one from its weights"
            )
        assert self._prefetched is None, "load the state before the first batch"
        sources = tuple(SourcePosition(**source) for source in state["cursors"])
        packings = tuple(pack.Packing(*(packing[key] for key in PACKING_KEYS)) for packing in state["packings"])
        self.position = StreamPosition(state["sequences"], sources, packings)
        self.stream.seek(self.position)

    def check_format(self, state: dict[str, Any]) -> None:
        """Refuse a position that another ithaka saved, unless it means the same here."""
        fix = "resume with the ithaka that wrote it, or export the run and start a new one from its weights"
        if state["version"] == BY_POSITION and self.is_split and state["data"] != self.fingerprint():
            rule = "held out documents by their position in the files, and this ithaka does so by their content"
            raise ConfigError(
                f"the checkpoint's run {rule} (data.validation_fraction), so it would train on those that it validated "
                f"on; {fix}"
            )
        if state["version"] not in (STATE_FORMAT, BY_POSITION):
            rule = f"has format {state['version']}, and this ithaka reads {STATE_FORMAT}"
            raise ConfigError(f"the checkpoint's data position {rule}; {fix}")

    def close(self, remove: bool = False) -> None:
        """Stop reading. `remove`: also remove the token cache, because the run is done."""
        self.cache.closed = True  # prefetching stops at its next shard
        self._executor.shutdown(cancel_futures=True)
        self.cache.close(remove)

    def fingerprint(self) -> str:
        """Hash of everything that determines the tokens and their order; moving the files does not change it."""
        sources = [(source.weight, [shard.identity for shard in source.shards]) for source in self.stream.sources]
        key, tokenizer = self.stream.sources[0].key, self.cache.tokenizer.fingerprint
        long = self.stream.long
        cutting = (long.mode, long.tool_tokens, long.marker) if long.mode == "shorten_tools" else long.mode
        joined = [long.shares, long.pairs] if self._joins_samples else []
        return hashlib.sha256(repr((key, tokenizer, cutting, sources, *joined)).encode()).hexdigest()[:16]

    @property
    def _joins_samples(self) -> bool:
        """Whether a record may have several samples, which are joined."""
        shards = (shard for source in self.stream.sources for shard in source.shards)
        return self.stream.long.pairs or (self.stream.long.shares and any(s.reading.unrolls for s in shards))
