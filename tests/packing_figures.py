"""Print packing and balance on 8 data-parallel ranks at 128K, means of 5 seeds: python tests/packing_figures.py

Balance is the largest over the mean attention area of the ranks in a step: with documents cut where a sequence ends,
with best-fit packing, and with best-fit packing and sequences grouped into steps.
"""

import time

import numpy as np

from ithaka.data.pack import SEGMENT_DTYPE, PackedRound, Packing, imbalance, permutation, split_long

CONTEXT, RANKS, STEPS = 1 << 17, 8, 32


def stream_cut(lengths):
    """Return the attention areas of sequences that cut documents where they are full."""
    edges = np.union1d(np.concatenate([[0], lengths.cumsum()]), np.arange(0, lengths.sum(), CONTEXT))
    parts = np.diff(edges).astype(float)
    return np.bincount(edges[:-1] // CONTEXT, parts * (parts + 1) / 2)


def pack(lengths, context, key):
    pieces = np.zeros(len(lengths), SEGMENT_DTYPE)
    pieces["length"] = lengths
    return PackedRound(split_long(pieces, context), Packing(context, RANKS), key)


def log_normal(median, sigma, count, seed):
    return np.maximum(np.random.default_rng(seed).lognormal(np.log(median), sigma, count).astype(np.int64), 1)


def main():
    print("median sigma | documents sequences filled | cut best-fit grouped")
    for median, sigma in [(8192, 0.5), (8192, 1.0), (8192, 1.5), (200_000, 1.0), (1 << 20, 1.0)]:
        rows = []
        for seed in range(5):
            lengths = log_normal(median, sigma, 10_000, seed)
            lengths = lengths[: lengths.cumsum().searchsorted(STEPS * RANKS * CONTEXT)]
            packed = pack(lengths, CONTEXT, (seed,))
            orders = stream_cut(lengths), packed.areas[permutation(len(packed), (1,))], packed.areas
            balance = [imbalance(areas, RANKS, 1) for areas in orders]
            rows.append([len(lengths), len(packed), packed.num_tokens / len(packed) / CONTEXT, *balance])
        figures = "{:.0f} {:.0f} {:.4f} | {:.3f} {:.3f} {:.3f}".format(*np.mean(rows, axis=0))
        print(f"{median} {sigma} | {figures}")
    for median, context in [(8192, CONTEXT), (400, CONTEXT), (400, 2048)]:
        lengths, start = log_normal(median, 1.0, 100_000, 0), time.process_time()
        packed = pack(lengths, context, (0,))
        seconds = time.process_time() - start
        print(f"100,000 documents around {median} at {context}: {len(packed)} sequences in {seconds:.2f} s of CPU")


if __name__ == "__main__":
    main()
