"""Formats of frozen base weights, for planning and for reading config.json. weights/formats.py
implements them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ithaka.config.fields import ConfigError

ROW = 16384  # weights that are packed together (ops/fourbit.py)
NF4_MERGED = (
    "The adapter was trained on an nf4 base; merged into bf16 weights it gives different "
    "outputs. Evaluate the result."
)


@dataclass(frozen=True)
class BaseFormat:
    """A value of `adapter.base`: which weights of a layer are packed, and their size."""

    row_bytes: int = 0  # bytes that ROW packed weights take
    packs_linears: bool = False
    packs_experts: bool = False
    families: tuple[str, ...] = ()  # model types that can have it; empty: all
    note: str = ""  # next to its size in a plan
    # printed if an adapter is merged into weights in full precision
    merge_notes: tuple[str, ...] = ()

    def num_bytes(self, num_weights: int) -> int:
        return -(-num_weights // ROW) * self.row_bytes

    def check_family(self, family: str | None) -> None:
        if self.families and family not in self.families:
            raise ConfigError(
                "adapter.base=mxfp4 needs a model whose files are in MXFP4 (gpt-oss); use nf4"
            )


BASE_FORMATS = {
    "bf16": BaseFormat(),
    "nf4": BaseFormat(
        8464, packs_linears=True, packs_experts=True, note=" (nf4)", merge_notes=(NF4_MERGED,)
    ),
    "mxfp4": BaseFormat(8704, packs_experts=True, families=("gpt_oss",), note=" (mxfp4)"),
}


def quant_method(config: Mapping[str, Any]) -> str | None:
    """Return how the weights of a config.json are quantized; None if they are not."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    return method if method is None else str(getattr(method, "value", method))


def required_base(config: Mapping[str, Any], default: Any = None) -> Any:
    """Return the only `adapter.base` that files with this config.json can have, or `default` if
    there is a choice."""
    return "nf4" if quant_method(config) == "bitsandbytes" else default


def check_quantization(quantization: Any, source: str) -> None:
    """Reject quantized weights, except bitsandbytes' 4 bits, and MXFP4 (gpt-oss), which is
    dequantized on load."""
    settings = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    method = settings.get("quant_method")
    if (
        quantization
        and method != "mxfp4"
        and not (method == "bitsandbytes" and settings.get("load_in_4bit"))
    ):
        fix = "use weights in bfloat16 or float32, in MXFP4 or in bitsandbytes' 4 bits"
        raise ConfigError(f"model.path={source} is quantized ({method}); {fix}")
