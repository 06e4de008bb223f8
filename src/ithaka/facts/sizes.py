"""Numbers that the engine obeys and the planner counts with: rows of kernel calls, tiles of the
loss and of the encoder, segments of recurrences, and blocks of moments in 8 bits."""

import math
from collections.abc import Sequence

RESERVE_BYTES = 2**31  # GPU memory left to the CUDA context, kernels and NCCL

# ---- attention

# Rows of a query block in attention/blocks.py, forward and backward, at head dim 128; other head
# dims: as many bytes.
BLOCK_TOKENS = {"attend": 128 * 1024, "attend backward": 264 * 1024}
# Rows per kernel call, over all its heads, where the kernel writes to our buffers and documents or
# windows are at most WHOLE_TOKENS long. A call of fa4 costs about 0.5 ms of host time, in which a
# GPU attends to 200 documents of 2K tokens; up to 128K, full documents run 1 to 4 % faster.
CALL_TOKENS = 512 * 1024
WHOLE_TOKENS = 256 * 1024
ROUNDS = 8  # rounds of a ring to send a member's tokens
ROUND_TOKENS = 32768  # minimum tokens per round: kernels are slow on few keys


def ring_round_tokens(member_tokens: int) -> int:
    return max(ROUND_TOKENS, -(-member_tokens // ROUNDS))


# ---- recurrences

# The gated delta rule (ops/delta_rule.py): tokens per chunk and rows (tokens x heads) per segment.
CHUNK_TOKENS = 64
SEGMENT_ROWS = 2**18
SSD_SEGMENT = 2  # rows of a segment of Mamba2 (ops/ssd.py), in SEGMENT_ROWS

# ---- around the layers

IGNORE_INDEX = -100  # the label of a token without one
# tokens whose gradients PyTorch's embedding backward sums into one row of its buffer
EMBEDDING_RUN = 10
LOGITS_TILE_BYTES = (2**29, 2**32)  # minimum and maximum bytes of logits in a tile of the loss
LOGITS_TILES_PER_TILE = 4  # tiles of the loss in a tile of the layers
MATMUL_ROWS = 128  # matmuls are faster with a multiple of this many rows
PATCHES_PER_TILE = 8192  # in one tile of the encoder, which has at least one frame
FRAME_PATCHES = 1024  # assumed in plans: frames of 512 x 512 pixels


def logits_tile_tokens(tile_tokens: int | None, s: int, row_bytes: int) -> int:
    """Return the tokens in a tile of the loss. `row_bytes`: bytes of one token's logits. Every tile
    reads and writes the gradient of lm_head, so large tiles are faster. They grow with the layers'
    tiles, which the planner sizes."""
    least, most = (num_bytes // row_bytes for num_bytes in LOGITS_TILE_BYTES)
    tokens = min(max(min(tile_tokens or s, s) // LOGITS_TILES_PER_TILE, least), most)
    return min(s, tokens // MATMUL_ROWS * MATMUL_ROWS or max(tokens, 1))


# ---- the optimizer

MOMENT_BLOCK = 64  # consecutive elements of a row that share the scale of a moment in 8 bits


def has_moment_blocks(shape: Sequence[int]) -> bool:
    """Whether optim.name=adamw8bit stores the moments of a parameter in 8 bits."""
    return len(shape) > 1 and math.prod(shape[1:]) % MOMENT_BLOCK == 0
