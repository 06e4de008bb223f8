"""How token files store whether a token is trained: as its id, or ~id if it is context only.

What is read from them has ids and labels instead, with IGNORE_INDEX for context.
"""

import numpy as np

from ithaka.facts.sizes import IGNORE_INDEX


def encode_tokens(ids: np.ndarray, is_trained: np.ndarray | bool) -> np.ndarray:
    return np.where(is_trained, ids, ~ids)


def decode_ids(tokens: np.ndarray) -> np.ndarray:
    return np.maximum(tokens, ~tokens)


def decode_labels(tokens: np.ndarray) -> np.ndarray:
    return np.where(is_trained(tokens), tokens, IGNORE_INDEX)


def is_trained(tokens: np.ndarray) -> np.ndarray:
    return tokens >= 0
