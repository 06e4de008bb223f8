"""From documents to this rank's batches.

1. A `Source` (source.py) yields its documents epoch after epoch, each epoch in another order.
2. A round is the next documents of all sources, in proportion to their weights. It ends with the
   epoch of the main source, the one whose epoch takes longest; the other sources start new epochs
   within a round. Its documents are cut, shuffled and packed (pack.py) as a unit.
3. A `SequenceStream` goes through the packed sequences, round after round. It is global: every rank
   reads the same one.
4. `TrainData` deals the sequences out: sequence i of a batch belongs to data-parallel rank
   i % dp_size. The others are passed over without reading their tokens. Held-out documents are a
   stream of their own, without shuffling, which ends after one epoch.

A position (`StreamPosition`) is where the current round starts in each source, and how many of its
sequences are done. To restore it, the round is read and packed again, which gives the same
sequences. So a position is valid for any number of ranks, and the data of a step depends only on
the number of sequences per step.

S: tokens in a sequence (data.context).  B: sequences in a batch of this rank.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ithaka.config import ConfigError
from ithaka.data import pack
from ithaka.data.batch import Batch, collate, concatenate, split_forests
from ithaka.data.documents.read import Shard
from ithaka.data.held_out import FoundData
from ithaka.data.source import Source, SourcePosition

STATE_FORMAT = 7  # increase it if a position has another meaning
BY_POSITION = 6  # held out documents by their position in the files; equal without such a split
# Minimum size of a round.
ROUND_TOKENS = 1 << 24
ROUND_SEQUENCES = 64
ROUND_STEPS = 32
HELD_OUT_SEQUENCES = 16  # in a round of held-out data, of which a run may need only the first
KEPT_ROUNDS = 2  # streamed tokens are kept this long; ranks are less than a round apart
SPARE_SEQUENCES = 8  # in a limited round: shuffling may put the least filled sequence first


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream: where its round starts in each source, and how the round is packed.

    Resuming with another context packs the rest of a round again, which adds a packing.
    """

    sequences: int = 0  # since the start of training, over all ranks
    sources: tuple[SourcePosition, ...] = ()
    packings: tuple[pack.Packing, ...] = ()  # the last one's `done` counts sequences of the round

    @property
    def epoch(self) -> int:
        """Epoch of the main source."""
        return min((source.epoch for source in self.sources), default=0)

    def to_json(self) -> dict[str, Any]:
        packings = [
            {
                "context": packing.context,
                "group": packing.group,
                "lead": packing.num_leading,
                "done": packing.done,
                "most": packing.max_sequences,
            }
            for packing in self.packings
        ]
        cursors = [asdict(source) for source in self.sources]
        return {"sequences": self.sequences, "cursors": cursors, "packings": packings}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "StreamPosition":
        packings = [
            pack.Packing(each["context"], each["group"], each["lead"], each["done"], each["most"])
            for each in state["packings"]
        ]
        sources = [SourcePosition(**cursor) for cursor in state["cursors"]]
        return cls(state["sequences"], tuple(sources), tuple(packings))


def tokens_per_round(packing: pack.Packing, shuffled: bool = True) -> int:
    """Return the size of a round. It affects packing, so a limit applies only if it saves much."""
    num_sequences = HELD_OUT_SEQUENCES
    min_tokens = 0
    if shuffled:
        num_sequences = max(ROUND_SEQUENCES, ROUND_STEPS * packing.group)
        min_tokens = ROUND_TOKENS
    size = max(num_sequences * packing.context, min_tokens)
    if not packing.max_sequences:
        return size
    return min(size, max(packing.max_sequences * packing.context, ROUND_TOKENS))


class RoundDocuments(NamedTuple):
    """The documents of a round, from all sources, as segments of `shards`."""

    uncut: np.ndarray
    pieces: np.ndarray  # to pack: shuffled, with the sources mixed evenly
    shards: list[pack.Documents]
    origins: list[Shard]  # of each of `shards`
    source_tokens: list[int]  # in the pieces, by source
    pieces_left_out: int  # without a trained token
    removed_tokens: int  # in no piece
    end: tuple[SourcePosition, ...]  # where the next round starts in each source


class SequenceStream:
    """Packed sequences of `context` tokens from several sources.

    Loading a round sets `documents`; `num_long`, the documents longer than the context;
    `num_left_out`, the sequences without a label in this round and in empty rounds before it; and
    `read_tokens`, the tokens of all these sequences.
    """

    documents: RoundDocuments

    def __init__(
        self,
        sources: Sequence[Source],
        context: int,
        *,
        group: int = 1,
        pad_id: int = 0,
        long_documents: pack.LongDocuments | str = "split",
        documents_together: bool = False,
        needed: int | None = None,
    ):
        """`group`: sequences per step, over all ranks. `needed`: sequences that the run still
        needs; None: unknown.

        Either all sources have keys, or none: then the stream ends after one epoch.
        """
        if isinstance(long_documents, str):
            long_documents = pack.LongDocuments(long_documents)
        self.sources = sources
        self.context = context
        self.group = group
        self.pad_id = pad_id
        self.needed = needed
        self.documents_together = documents_together
        self.long = long_documents
        self.cut = functools.partial(pack.cut_documents, context=context, long=long_documents)
        # called with the share of a round that is read
        self.report: Callable[[float], None] = lambda share: None
        self.shuffled = sources[0].key is not None
        self.main = max(range(len(sources)), key=lambda i: sources[i].num_bytes / sources[i].weight)
        self._recent: list[set[Shard]] = []  # streamed shards of the last rounds
        self.seek(StreamPosition())

    # ---- positions

    def seek(self, position: StreamPosition) -> None:
        """Go to a position. Its round is loaded with the next sequence."""
        sources = position.sources or (SourcePosition(),) * len(self.sources)
        packings = position.packings
        if not packings:
            max_sequences = 0
            if self.needed is not None:
                max_sequences = max(self.group, self.needed) + SPARE_SEQUENCES * self.shuffled
            packings = (pack.Packing(self.context, self.group, max_sequences=max_sequences),)
        if packings[-1].context != self.context:
            packings = (*packings, pack.Packing(self.context, self.group))
        self.position = StreamPosition(position.sequences, sources, packings)
        # A step starts at this sequence of the round; another group applies from the next round on.
        is_same_group = packings[-1].group == self.group
        self._step_start = packings[-1].num_leading if is_same_group else packings[-1].done
        self._round: pack.PackedRound | None = None
        self.num_left_out = 0
        self.read_tokens = 0

    def next_sequence(self, materialize: bool = True) -> pack.PackedSequence | None:
        """Advance, and return the sequence, if `materialize`. None at the end of a stream."""
        num_sequences = len(self.current_round())  # may start the next round
        if not num_sequences:
            return None
        *earlier, packing = self.position.packings
        packings = (*earlier, replace(packing, done=packing.done + 1))
        sequences = self.position.sequences + 1
        self.position = replace(self.position, sequences=sequences, packings=packings)
        return self.get_sequence(packing.done) if materialize else None

    def current_round(self) -> pack.PackedRound:
        """Return the round of the next sequence; empty at the end of a stream without keys."""
        if self._round is None:
            self._round = self._load_round()
        start = self.position.epoch
        while self.position.packings[-1].done == len(self._round):
            if not self.shuffled and not len(self.documents.uncut):
                break
            if self.shuffled and self.position.epoch > start + 1:
                raise ConfigError(
                    f"no sequence of data.context={self.context} tokens has a token to train on; "
                    "run `ithaka data`, and check data.train_on, data.chat_template and the labels "
                    "in the data"
                )
            if len(self._round):
                self.num_left_out = 0
                self.read_tokens = 0
            self._step_start = (self._step_start - len(self._round)) % self.group
            max_sequences = self.position.packings[0].max_sequences
            packing = pack.Packing(
                self.context, self.group, self._step_start, max_sequences=max_sequences
            )
            sources = self.documents.end
            self.position = StreamPosition(self.position.sequences, sources, (packing,))
            self._round = self._load_round()
        return self._round

    # ---- rounds

    def _load_round(self) -> pack.PackedRound:
        """Read the documents of the round, and pack them as the position says."""
        self.documents = self._read_documents()
        first, *others = self.position.packings
        is_long = self._find_long(self.documents.uncut, first.context)
        self.num_long = int(is_long.sum())
        packed = self._pack(self.documents.pieces, first)
        self.documents = self.documents._replace(pieces=np.empty(0))  # the round has its own copy
        for packing in others:
            packed = self._pack_again(packed, packing)
        self.num_left_out += packed.num_left_out
        self.read_tokens += packed.read_tokens
        if self.shuffled:
            self._evict_earlier_rounds()
        return packed

    def _read_documents(self) -> RoundDocuments:
        """Take the next documents from all sources, in proportion to the weights."""
        positions = list(self.position.sources)
        packing = self.position.packings[0]
        num_tokens = tokens_per_round(packing, self.shuffled)
        needs_next_round = self.needed is None or self.needed * self.context > num_tokens
        weights = [source.weight for source in self.sources]
        main = self.main
        done = 0.0  # weight of the sources that are read

        uncut: list[np.ndarray] = []
        by_source: list[np.ndarray] = []
        shards: list[pack.Documents] = []
        origins: list[Shard] = []
        pieces_left_out = 0
        removed_tokens = 0
        for i in [main, *(i for i in range(len(weights)) if i != main)]:
            need = num_tokens * weights[main] / sum(weights)
            if i != main:  # follow the main source
                need = weights[i] / weights[main] * positions[main].tokens - positions[i].tokens
            selected, positions[i] = self.sources[i].next_documents(
                positions[i],
                need,
                functools.partial(self.cut, context=packing.context),
                wrap=i != main,
                prefetch=needs_next_round,
                report=functools.partial(self._report_share, done, weights[i]),
            )
            done += weights[i]
            for each in selected:
                for segments in (each.pieces, each.documents):
                    segments["shard"] += len(shards)
                    segments["source"] = i
                shards += each.tokens
                origins += [each.shard] * len(each.tokens)
                uncut.append(each.documents)
                pieces_left_out += each.pieces_left_out
                removed_tokens += each.removed_tokens
            by_source.append(_join_segments([each.pieces for each in selected]))
        ends = zip(positions, self.position.sources, strict=True)
        return RoundDocuments(
            _join_segments(uncut),
            _mix_sources(by_source, self._round_key()),
            shards,
            origins,
            [end.tokens - start.tokens for end, start in ends],
            pieces_left_out,
            removed_tokens,
            tuple(positions),
        )

    def _report_share(self, done: float, weight: float, share: float) -> None:
        self.report((done + weight * share) / sum(source.weight for source in self.sources))

    def _round_key(self) -> pack.Key | None:
        """Return what shuffles the round: the main source's key and position."""
        key = self.sources[self.main].key
        if key is None:
            return None
        start = self.position.sources[self.main]
        return key + (start.epoch, start.shard, start.document)

    def _find_long(self, segments: np.ndarray, context: int) -> np.ndarray:
        """Return which segments exceed the context. Raise ConfigError if none may."""
        is_long = segments["length"] > context
        if is_long.any() and self.long.mode == "refuse":
            raise ConfigError(self._describe_long_document(segments[is_long][0]))
        return is_long

    def _pack(self, segments: np.ndarray, packing: pack.Packing) -> pack.PackedRound:
        segments = pack.split_long(segments, packing.context)
        shards = self.documents.shards
        return pack.PackedRound(
            segments, packing, self._round_key(), shards, self.documents_together
        )

    def _pack_again(self, packed: pack.PackedRound, packing: pack.Packing) -> pack.PackedRound:
        """Pack the rest of a round again, because the run was resumed with another context."""
        segments = packed.segments(packed.packing.done, len(packed))
        is_long = self._find_long(segments, packing.context)
        self.num_long += int(is_long.sum())
        for shard in np.unique(segments["shard"][is_long]).tolist():
            if len(self.documents.shards[shard].nodes):
                raise ConfigError(
                    f"data.context={packing.context} cannot hold samples that were joined before "
                    f"the resume; resume with data.context={packed.packing.context} or more"
                )
        if self.long.mode == "drop":
            segments = segments[~is_long]
        return self._pack(segments, packing)

    def _describe_long_document(self, segment: np.void) -> str:
        origin = self.documents.origins[segment["shard"]]
        # Each part of a text shard is a document; which record of a file it was is no longer known.
        index = 0
        if len(origin.parts) > 1:
            ends = self.documents.shards[segment["shard"]].lengths.cumsum()
            index = int((ends <= segment["low"]).sum())
        return (
            f"{origin.parts[index].file.path} has a document of {segment['length']} tokens, more "
            f"than data.context={self.context}; increase data.context, or set data.long_documents "
            "to split or drop instead of refuse"
        )

    def _evict_earlier_rounds(self) -> None:
        """Delete the tokens of streamed shards that no rank reads any more."""
        self._recent.append({shard for shard in self.documents.origins if shard.is_streamed})
        if len(self._recent) > KEPT_ROUNDS:
            done = self._recent.pop(0).difference(*self._recent)
            if done:
                self.sources[0].cache.evict(done)

    # ---- sequences

    def get_sequence(self, index: int) -> pack.PackedSequence:
        """Return a sequence of the current round, without advancing."""
        assert self._round is not None
        segments = self._round.segments(index, index + 1)
        return self.build_sequence(segments, self.documents.shards)

    def build_sequence(
        self, segments: np.ndarray, shards: Sequence[pack.Documents]
    ) -> pack.PackedSequence:
        """Concatenate the tokens of `segments`, and pad."""
        has_images = any(shards[shard].images for shard in segments["shard"].tolist())
        image_ids = self.sources[0].cache.tokenizer.images.ids if has_images else {}
        sequence = concatenate(
            segments, shards, self.context, self.pad_id, image_ids, self.documents_together
        )
        if self.long.shares or self.long.pairs:
            return split_forests(sequence, segments, shards)
        return sequence


def _join_segments(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, pack.SEGMENT_DTYPE), *parts])


def _mix_sources(by_source: Sequence[np.ndarray], key: pack.Key | None) -> np.ndarray:
    """Shuffle the segments of each source by `key`, and interleave the sources evenly."""
    if key is not None:
        by_source = [segments[pack.permutation(len(segments), key)] for segments in by_source]
    progress = []
    for segments in by_source:
        lengths = segments["length"]
        progress.append(lengths.cumsum() / max(lengths.sum(), 1))
    return np.concatenate(by_source)[np.concatenate(progress).argsort(kind="stable")]


class TrainData:
    """This rank's batches of the global stream, and a fixed set of validation batches."""

    def __init__(
        self,
        stream: SequenceStream,
        validation: SequenceStream | None,
        found: FoundData,
        *,
        dp_rank: int,
        dp_size: int,
        batch: int,
        cp: tuple[int, int],
    ):
        self.stream = stream
        self.validation = validation
        self.summary = found.summary
        self.is_split = found.is_split
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.batch = batch
        self.cp = cp
        self.source_names = [source.name for source in stream.sources]
        self.cache = stream.sources[0].cache
        self.position = stream.position  # after the last returned batch; the stream is ahead of it
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch batch")
        self._prefetched: Future[tuple[Batch, StreamPosition]] | None = None
        self._held_out: tuple[int, list[pack.PackedSequence]] = (-1, [])

    # ---- batches

    def next_batch(self) -> Batch:
        """Return this rank's next batch [B, S], and prefetch another. Call it on all ranks."""
        future = self._prefetched or self._executor.submit(self._read)
        batch, self.position = future.result()
        self._prefetched = self._executor.submit(self._read)
        return batch

    def _read(self) -> tuple[Batch, StreamPosition]:
        own = []
        for i in range(self.batch * self.dp_size):
            is_mine = i % self.dp_size == self.dp_rank
            sequence = self.stream.next_sequence(materialize=is_mine)
            if sequence is not None:
                own.append(sequence)
        return self.collate(own, len(self.source_names) > 1), self.stream.position

    def collate(
        self, sequences: Sequence[pack.PackedSequence], with_sources: bool = False
    ) -> Batch:
        """Make a batch, and read its images."""
        batch = collate(sequences, with_sources)
        images = [image for sequence in sequences for image in sequence.images]
        if not images:
            return batch
        return batch._replace(images=self.cache.tokenizer.images.load(images, *self.cp))

    def validation_sequences(self, count: int) -> list[pack.PackedSequence]:
        """Return up to `count` held-out sequences, the same on every rank."""
        if self.validation is None:
            return []
        if self._held_out[0] != count:
            self.validation.seek(StreamPosition())
            sequences = iter(self.validation.next_sequence, None)
            self._held_out = (count, list(itertools.islice(sequences, count)))
        return self._held_out[1]

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """Yield this rank's share of the first `count` held-out sequences: batches [B, S], the same
        number on every rank. Rows without labels pad the last one."""
        sequences = self.validation_sequences(count)
        with_sources = self.validation is not None and len(self.validation.sources) > 1
        blank = self.stream.build_sequence(np.empty(0, pack.SEGMENT_DTYPE), [])
        global_batch = self.batch * self.dp_size
        for low in range(0, len(sequences), global_batch):
            rows = sequences[low : low + global_batch][self.dp_rank :: self.dp_size]
            yield self.collate(rows + [blank] * (self.batch - len(rows)), with_sources)

    def close(self, remove: bool = False) -> None:
        """Stop reading. `remove`: also remove the token cache, because the run is done."""
        self.cache.closed = True  # prefetching stops at its next shard
        self._executor.shutdown(cancel_futures=True)
        self.cache.close(remove)

    # ---- save and restore the position

    def state_dict(self) -> dict[str, Any]:
        """Return the global position as JSON-compatible values; the same on every rank."""
        return {"version": STATE_FORMAT, "data": self.fingerprint(), **self.position.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`, on any number of ranks. The data must be the same."""
        self.check_format(state)
        if state["data"] != self.fingerprint():
            raise ConfigError(
                "data.path, its files, data.sources, data.text_field, data.long_documents, "
                "data.validation_fraction, data.tokenizer or train.seed differ from the "
                "checkpoint's, or loss.type or, for unrolled conversations, parallel.ring; restore "
                "them, or export the run and start a new one from its weights"
            )
        assert self._prefetched is None, "load the state before the first batch"
        self.position = StreamPosition.from_json(state)
        self.stream.seek(self.position)

    def check_format(self, state: dict[str, Any]) -> None:
        """Refuse a position that another ithaka saved, unless it means the same here."""
        fix = (
            "resume with the ithaka that wrote it, or export the run and start a new one from "
            "its weights"
        )
        by_position = state["version"] == BY_POSITION
        if by_position and self.is_split and state["data"] != self.fingerprint():
            raise ConfigError(
                "the checkpoint's run held out documents by their position in the files, and this "
                "ithaka does so by their content (data.validation_fraction), so it would train on "
                f"those that it validated on; {fix}"
            )
        if state["version"] not in (STATE_FORMAT, BY_POSITION):
            rule = f"has format {state['version']}, and this ithaka reads {STATE_FORMAT}"
            raise ConfigError(f"the checkpoint's data position {rule}; {fix}")

    def fingerprint(self) -> str:
        """Hash everything but paths that determines the tokens and their order."""
        sources = []
        for source in self.stream.sources:
            identities = [shard.identity for shard in source.shards]
            sources.append((source.weight, identities))
        long = self.stream.long
        cutting: object = long.mode
        if long.mode == "shorten_tools":
            cutting = (long.mode, long.tool_tokens, long.marker)
        shards = itertools.chain.from_iterable(source.shards for source in self.stream.sources)
        unrolls = long.shares and any(shard.reading.unrolls for shard in shards)
        # Whether a record may have several samples, which are joined.
        joined = [long.shares, long.pairs] if long.pairs or unrolls else []
        key = self.stream.sources[0].key
        tokenizer = self.cache.tokenizer.fingerprint
        identity = repr((key, tokenizer, cutting, sources, *joined))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]
