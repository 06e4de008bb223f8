"""The kernel that unpacks four-bit weights gives the same bits as plain torch."""

import pytest
import torch

from ithaka.dist.mesh import default_device
from ithaka.layer.fourbit import NF4, ROW, SCALES_AT, Format, block_scales, dequantize, quantize_nf4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [NF4, Format("nf4", False), Format("fp4", False), Format("mxfp4")], ids=str)
def test_bits_are_those_of_plain_torch(layout, dtype):
    generator, count = torch.Generator().manual_seed(4), 3 * ROW - 640
    packed = torch.randint(256, (3, layout.row_bytes), dtype=torch.uint8, generator=generator)
    if layout == NF4:
        flat = torch.randn(count, generator=generator)
        packed = quantize_nf4(flat, scales := block_scales(flat), scales.mean())
    elif layout.codes == "mxfp4":
        packed[:, SCALES_AT:] %= 250
        packed[:, SCALES_AT:] += 1  # no denormal numbers
    else:
        packed.view(torch.float32)[:, SCALES_AT // 4 :] = torch.rand(3, ROW // 64, generator=generator)
    dequantize(packed, layout, expected := torch.empty(count, dtype=dtype))
    into = torch.empty(count, dtype=dtype, device=default_device())
    dequantize(packed.to(into.device), layout, into)
    torch.testing.assert_close(into.cpu(), expected, rtol=0, atol=0)
