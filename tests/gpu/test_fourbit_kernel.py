"""The kernel that unpacks four-bit weights gives the same bits as plain torch."""

import pytest
import torch

from ithaka.comm.mesh import default_device
from ithaka.ops.fourbit import (
    MXFP4,
    NF4,
    NF4_SINGLE,
    ROW,
    SCALES_AT,
    block_scales,
    dequantize,
    quantize_nf4,
)


@pytest.mark.parametrize("shape", [(64, 758), (2, 64, 758)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "layout", [NF4, NF4_SINGLE, NF4_SINGLE._replace(codes="fp4"), MXFP4], ids=str
)
def test_unpacked_weights_equal_those_of_plain_torch(layout, dtype, shape):
    """The last packed row of each matrix is not full."""
    generator = torch.Generator().manual_seed(4)
    num_matrices = shape[0] if len(shape) == 3 else 1
    packed = torch.randint(
        256, (3 * num_matrices, layout.row_bytes), dtype=torch.uint8, generator=generator
    )
    if layout == NF4:
        rows = []
        for flat in torch.randn(num_matrices, 64 * 758, generator=generator):
            scales = block_scales(flat)
            rows.append(quantize_nf4(flat, scales, scales.mean()))
        packed = torch.cat(rows)
    elif layout.codes == "mxfp4":
        packed[:, SCALES_AT:] %= 250
        packed[:, SCALES_AT:] += 1  # no denormal numbers
    else:
        packed.view(torch.float32)[:, SCALES_AT // 4 :] = torch.rand(
            len(packed), ROW // 64, generator=generator
        )
    dequantize(packed, layout, expected := torch.empty(shape, dtype=dtype))
    into = torch.empty(shape, dtype=dtype, device=default_device())
    dequantize(packed.to(into.device), layout, into)
    torch.testing.assert_close(into.cpu(), expected, rtol=0, atol=0)
