"""The kernels of float8 give the bits of the plain path, and a store on a GPU copies on its own
streams."""

import pytest
import torch

from ithaka.facts.dtypes import float8_bytes
from ithaka.layer.store import Store
from ithaka.ops import float8

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(1000, 4096), (77, 1), (300, 200), (5, 31), (1, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_and_values_are_those_of_the_plain_path(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x_tD = (
        torch.randn(shape, generator=generator)
        * torch.exp2(torch.arange(shape[0])[:, None] % 100 - 60)
    ).to(dtype)
    x_tD[0, 0] = 0.0
    host, device = (torch.zeros(float8_bytes(*shape), dtype=torch.uint8) for _ in range(2))
    float8.pack(x_tD, host)
    float8.pack(x_tD.cuda(), device)
    torch.cuda.synchronize()
    assert torch.equal(host, device)
    y_tD = torch.empty_like(x_tD)
    z_tD = torch.empty_like(x_tD, device="cuda")
    float8.unpack(host, shape[0], 0, y_tD)
    float8.unpack(host, shape[0], 0, z_tD)
    assert torch.equal(y_tD, z_tD.cpu())


def test_a_store_returns_rounded_tensors_while_the_gpu_is_busy():
    """Sources are overwritten as soon as the store has released them."""
    store = Store("cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    slices = [slice(0, 3000), slice(3000, 8192)]
    for seed in range(3):
        torch.manual_seed(seed)
        tensors = [torch.randn(8192, 4096).bfloat16(), torch.randn(4, 8192, 2, 128).bfloat16()]
        handles = []
        for tensor in tensors:
            source = tensor.cuda()
            for _ in range(5):
                busy = (busy @ busy).sign()
            handles.append(store.keep(source, "host", "float8"))
            handles[-1].release_source()
            source.fill_(float("nan"))
            del source
        for tensor, handle in zip(tensors, handles, strict=True):
            rows = tensor.view(8192, -1) if tensor.dim() == 2 else tensor.view(4 * 8192, -1)
            packed = torch.zeros(float8_bytes(*rows.shape), dtype=torch.uint8)
            float8.pack(rows, packed)
            expected = torch.empty_like(rows)
            float8.unpack(packed, len(rows), 0, expected)
            assert torch.equal(handle.fetch().cpu(), expected.view_as(tensor))
            dim = tensor.dim() // 2 - 1
            assert torch.equal(
                torch.cat([tile.cpu() for tile in handle.tiles(slices, dim)], dim),
                expected.view_as(tensor),
            )
