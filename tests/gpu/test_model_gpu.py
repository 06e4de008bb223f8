"""On a GPU, in bf16: every gradient within twice the error of plain bf16 PyTorch, against fp32; several ranks as
threads of one process, which gives real exchanges and real FSDP2 on one device."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from ithaka.dist.mesh import make_mesh
from ithaka.model.build import parallelize
from ithaka.model.layer import LayerOptions
from ithaka.model.settings import Settings
from models import plain_loss, tiny_config, tiny_model

pytestmark = pytest.mark.gpu

OPTIONS = [
    LayerOptions(tile_tokens=96, keep_input="host", keep_attention="host", overlap=True),
    LayerOptions(tile_tokens=96, keep_input="host", keep_attention=None, overlap=False),
    LayerOptions(tile_tokens=None, keep_input="disk", keep_attention="disk", overlap=True),
    LayerOptions(checkpoint=False),
]
CASES = [("llama", 8, 2, 2), ("qwen2", 7, 1, 2), ("qwen3", 8, 4, 4), ("mistral", 9, 3, 4)]


def make(family: str, heads: int, kv_heads: int, dtype: torch.dtype):
    sizes = {"hidden_size": 64 * heads, "head_dim": 64, "sliding_window": 300, "vocab_size": 512}
    return tiny_model(tiny_config(family, heads, kv_heads, **sizes), dtype)


def gradients(model, ids) -> dict[str, torch.Tensor]:
    plain_loss(model, ids, ids).backward()
    return {name: param.grad.double() for name, param in model.named_parameters()}


def on_threads(num_ranks: int, work) -> list:
    """Calls work() on `num_ranks` threads, each a rank of its own."""
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, results = dist.HashStore(), [SimpleNamespace(value=None, error=None) for _ in range(num_ranks)]

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            results[rank].value = work()
        except BaseException as error:
            results[rank].error = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.value for result in results]


@pytest.mark.parametrize("options", OPTIONS, ids=["held", "streamed", "disk", "everything"])
@pytest.mark.parametrize("family,heads,kv_heads,cp", CASES)
def test_gradients_are_as_good_as_plain_bf16(family, heads, kv_heads, cp, options):
    ids = torch.randint(512, (1, 1100), generator=torch.Generator().manual_seed(4)).cuda()
    exact = gradients(make(family, heads, kv_heads, torch.float32).double().cuda(), ids)
    plain = gradients(make(family, heads, kv_heads, torch.float32).bfloat16().cuda(), ids)

    def work() -> dict[str, torch.Tensor]:
        settings = Settings(dtype=torch.bfloat16, heads_per_stage=cp, layer=options)
        mesh = make_mesh(cp, "cuda")
        model = parallelize(make(family, heads, kv_heads, torch.float32), mesh=mesh, settings=settings)
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: param.grad.full_tensor().double() for name, param in model.named_parameters()}

    for ours in on_threads(cp, work):
        for name, wanted in exact.items():
            error, plain_error = ((g[name] - wanted).norm() / wanted.norm() for g in (ours, plain))
            assert error <= 2 * plain_error, f"{name}: {error:.2e} against {plain_error:.2e} of plain bf16"
