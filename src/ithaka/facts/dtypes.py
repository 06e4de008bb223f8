"""Dtypes by name: those that gradients can be computed in, their bytes, and float8, in which
activations can be stored."""

from ithaka.config.fields import ConfigError

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
FLOAT8_BLOCK = 32  # elements of a row with one scale, a byte (ops/float8.py)
# float8 codes in one of two buffers on the device, on their way to the host, or back
STAGED_BYTES = 2**24


def default_dtype(on_gpu: bool) -> str:
    """Compute dtype for model.dtype=auto."""
    return "bfloat16" if on_gpu else "float32"


def check_dtype(name: str, dtype: object) -> str:
    """Return the name of a dtype or torch.dtype. Raises ConfigError unless gradients can be
    computed in it."""
    dtype = str(dtype).removeprefix("torch.")
    if dtype == "float16":
        rule = (
            "underflows: the loss is divided by the tokens of a step, so gradients fall below "
            "its smallest number"
        )
        raise ConfigError(f"{name}=float16 {rule}; use bfloat16 or float32")
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"{name}={dtype} is not supported; use bfloat16, float32 or float64")
    return dtype


def float8_bytes(num_rows: int, width: int) -> int:
    """Bytes of rows in float8, with their scales."""
    return num_rows * (width + -(-width // FLOAT8_BLOCK))
