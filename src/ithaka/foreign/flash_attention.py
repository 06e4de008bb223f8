"""Private parts of flash-attn-4. Imports nothing.

Read in flash-attn-4 4.0.0b36, the version that pyproject.toml asks for. Its public functions take
no logsumexp and no buffers for their results.
"""

from typing import Any

# Functions of flash_attn.cute.interface: (q, k, v, ...) -> (out, lse, ...), and its backward.
FORWARD = "_flash_attn_fwd"
BACKWARD = "_flash_attn_bwd"


def device_arch(interface: Any) -> int:
    """The GPU's compute capability as the compiler of flash-attn-4 sees it, 90 for a H100: it may
    be set in the environment."""
    return interface._get_device_arch()
