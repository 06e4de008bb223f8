"""Private parts of other libraries are used in ithaka.foreign only, and are what it says."""

import ast
import importlib
import inspect
import pickle
import re
import sys
import textwrap
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import ithaka
from ithaka.comm.loopback import LoopbackGroup
from ithaka.comm.mesh import start_process_group
from ithaka.foreign import (
    flash_attention,
    hugging_face,
    torch_checkpoint,
    torch_core,
    torch_distributed,
    torch_fsdp,
    torch_operators,
)
from models import tiny_config, tiny_model

SOURCES = Path(ithaka.__file__).parent
LIBRARIES = ("torch", "torchao", "transformers", "trl", "accelerate", "peft", "diffusers")

# Names with an underscore that any file may use.
EXCEPTIONS = {
    "_parameters": "of nn.Module, as the two below: as old as torch, and pickled with every module",
    "_buffers": "of nn.Module",
    "_modules": "of nn.Module",
    "_asdict": "of named tuples, and public, as the two below",
    "_fields": "of named tuples",
    "_replace": "of named tuples",
    "_value_": "of enums, and public",
    "_current_frames": "of sys, and documented",
    "_getframe": "of sys, and documented",
    "_exit": "of os, and documented",
    "_class_name": "a key in the config.json of diffusers",
}
# Methods of strings whose arguments are parts of names.
SUFFIXES = ("endswith", "removesuffix", "rpartition", "partition")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


@cache
def trees() -> dict[Path, ast.Module]:
    files = (path for path in SOURCES.rglob("*.py") if "foreign" not in path.parts)
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def defined_names(tree: ast.Module) -> set[str]:
    """Private names that a file defines: functions, classes, variables and attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            names |= {node.id if isinstance(node, ast.Name) else node.attr} if is_own else set()
    return {name for name in names if is_private(name)}


def is_text(node: ast.AST) -> bool:
    """Whether the strings in it are parts of texts (of an f-string, or arguments of SUFFIXES) or
    keys of self.__dict__."""
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) == "self.__dict__"
    method = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.JoinedStr) or method in SUFFIXES


def private_uses(tree: ast.Module, own: set[str], inherited: set[str]) -> list[tuple[int, str]]:
    """Line and name of each private name that is neither in `own`, nor in `inherited` and read
    from self."""
    parts = {id(part) for node in ast.walk(tree) if is_text(node) for part in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ithaka"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            receiver = ast.unparse(node.value)
            is_self = receiver in ("self", "cls", "super()")
            names = [] if is_self and node.attr in inherited else [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = re.fullmatch(r"_[A-Za-z]\w*", node.value) and id(node) not in parts
            names = [node.value] if is_name else []
        found += [
            (node.lineno, name)
            for name in names
            if is_private(name) and name not in own and name not in EXCEPTIONS
        ]
    return found


# Strings that look like private names.
WORDS = {
    "exits.py": {"_STATUS_ALLOC_FAILED"},  # part of CUDA's messages
    "roots/layer_kinds.py": {"_token_id", "_multipliers"},  # ends of settings
    "plan/shape.py": {"_bytes", "_graph", "_moved", "_macs"},  # ends of fields
}


def test_private_names_are_used_in_foreign_only():
    inherited = set().union(*map(defined_names, trees().values()))
    inherited |= {name for names in hugging_face.INHERITED.values() for name in names}
    found = []
    for path, tree in trees().items():
        file = str(path.relative_to(SOURCES))
        own = defined_names(tree) | WORDS.get(file, set())
        uses = private_uses(tree, own, inherited)
        found += [f"{file}:{line}: {name}; move it to ithaka.foreign" for line, name in uses]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses import FakeTensor",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "x = tensor._version",
        "getattr(module, '_orig_mod')",
        "patch.object(Group, '_check', None)",
        "self.model._tp_size",
    ],
)
def test_private_names_are_found(line):
    assert private_uses(ast.parse(line), {"_own"}, {"_version", "_tp_size"})
    assert not private_uses(
        ast.parse("self._version; other._own; x.endswith('_id')"), {"_own"}, {"_version"}
    )


# ---- classes that inherit from other libraries'


def private_names(cls: type) -> set[str]:
    """Private methods that a class defines, and private attributes of self in its source."""
    names = {name for name in vars(cls) if is_private(name)}
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        source = ""
    return names | set(re.findall(r"\b(?:self|super\(\))\.(_[a-zA-Z]\w*)", source))


def shared_names(cls: type) -> set[str]:
    """Private names that ithaka's and other libraries' parts of a class both use."""
    parts = {True: set(), False: set()}
    for base in cls.__mro__:
        library = base.__module__.partition(".")[0]
        if library in (*LIBRARIES, "ithaka"):
            parts[library == "ithaka"] |= private_names(base)
    return parts[True] & parts[False] - EXCEPTIONS.keys()


def find(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", hugging_face.INHERITED)
def test_inherited_private_names_are_listed(path):
    """A trainer also has the names that are listed for transformers' own."""
    pytest.importorskip(path.partition(".")[0])
    if path.startswith("torchao"):
        from ithaka.model.optimizers import adamw8bit_class

        cls = adamw8bit_class()
        listed = set()
    else:
        from ithaka.hf import long_context

        cls = long_context(find(path))
        listed = {*hugging_face.INHERITED["transformers.Trainer"]}
    assert shared_names(cls) == listed | {*hugging_face.INHERITED[path]}


# (class, method): the arguments that ithaka passes on, or overrides with.
SIGNATURES = {
    ("transformers.Trainer", "_move_model_to_device"): "model, device",
    ("transformers.Trainer", "_init_training_state"): (
        "max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial"
    ),
    ("transformers.Trainer", "_get_num_items_in_batch"): "batch_samples, device",
    ("transformers.Trainer", "_clip_grad_norm"): "model",
    ("transformers.Trainer", "_get_grad_norm"): "model, grad_norm",
    ("transformers.Trainer", "_save"): "output_dir, state_dict",
    ("transformers.Trainer", "_save_optimizer_and_scheduler"): "output_dir",
    ("transformers.Trainer", "_load_from_checkpoint"): "resume_from_checkpoint, model",
    ("transformers.Trainer", "_load_best_model"): "",
    ("transformers.Trainer", "_load_optimizer_and_scheduler"): "checkpoint",
    ("trl.DPOTrainer", "_compute_loss"): "model, inputs, return_outputs",
    ("trl.GRPOTrainer", "_generate_and_score_completions"): "inputs",
    ("trl.DistillationTrainer", "_compute_loss"): "unwrapped_student, inputs, num_items_in_batch",
    ("torchao.optim.AdamW8bit", "_new_buffer"): "p, signed",
    ("torchao.optim.AdamW8bit", "_subclass_zeros"): "p, signed, block_size",
}


@pytest.mark.parametrize("path, method", SIGNATURES)
def test_signatures_of_inherited_methods(path, method):
    pytest.importorskip(path.partition(".")[0])
    names = [*inspect.signature(getattr(find(path), method)).parameters]
    assert ", ".join(name for name in names if name != "self") == SIGNATURES[path, method]


def test_epochs_get_what_long_context_reads():
    from transformers import Trainer

    names = {*inspect.signature(Trainer._run_epoch).parameters}
    assert {"epoch", "epochs_trained", "steps_trained_in_current_epoch"} <= names


def test_loopback_defines_names_that_torch_calls():
    """torch 2.13 has new names for the last two."""
    source = inspect.getsource(dist.distributed_c10d)
    new = {"_allgather_base": "all_gather_single", "_reduce_scatter_base": "reduce_scatter_single"}
    for name in torch_distributed.OVERRIDDEN:
        assert hasattr(dist.ProcessGroup, name) and name in vars(LoopbackGroup), name
        assert f".{name}(" in source or f".{new[name]}(" in source, f"torch does not call {name}"


# ---- torch


def test_fake_tensors_have_no_memory():
    with torch_core.FakeTensorMode():
        x = torch.empty(1 << 50)
    assert isinstance(x, torch_core.FakeTensor) and isinstance(x, torch.Tensor)


def test_trees_keep_their_structure():
    x = torch.ones(2)
    tree = ((x, [1]), {"a": None})
    leaves, spec = torch_core.pytree.tree_flatten(tree)
    assert leaves == [x, 1, None] and torch_core.pytree.tree_leaves(tree) == leaves
    assert torch_core.pytree.tree_unflatten([1, 2, 3], spec) == ((1, [2]), {"a": 3})
    doubled = torch_core.pytree.tree_map_only(int, lambda n: 2 * n, tree)
    assert doubled[0][1] == [2] and doubled[0][0] is x
    assert torch_core.pytree.tree_map(type, (1, "")) == (int, str)


class _Seen(torch_core.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        self.mutates = torch_core.mutates_inputs(function)
        return function(*args, **(kwargs or {}))


def test_modes_see_operators_unless_suspended():
    x = torch.ones(2, requires_grad=True)
    with _Seen() as seen:
        x.exp().sum().backward()
        with torch_core.without_modes():
            torch.ones(2).sin()
        assert not seen.mutates
        torch.zeros(2).add_(1)
    assert {"exp", "mul"} < {*seen.names} and "sin" not in seen.names and seen.mutates


def test_versions_count_changes_but_those_in_keep_version():
    x = torch.zeros(2)
    before = torch_core.version_of(x)
    with torch_core.keep_version(x):
        x.add_(1)
    assert torch_core.version_of(x) == before and x.sum() == 2
    x.add_(1)
    assert torch_core.version_of(x) == before + 1


def test_hooks_are_found():
    x = torch.zeros(2, requires_grad=True)
    assert not torch_core.has_gradient_hooks(x)
    x.register_hook(print)
    assert torch_core.has_gradient_hooks(x)

    module = nn.Linear(1, 1)
    adds = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    for add, name in zip(adds, torch_core.HOOK_DICTS, strict=True):
        assert not getattr(module, name)
        getattr(module, f"register_{add}")(print)
        assert [*getattr(module, name).values()] == [print]
    assert [*torch_core.forward_pre_hooks(module).values()] == [print]


def test_storages_have_one_key():
    x = torch.zeros(4)
    assert torch_core.storage_key(x[1:].untyped_storage()) == torch_core.storage_key(
        x.untyped_storage()
    )
    empty = [torch.empty(4, device="meta") for _ in range(2)]
    first, second = (torch_core.storage_key(t.untyped_storage()) for t in empty)
    assert first != second


def test_references_in_cpp_are_counted():
    x = torch.zeros(4, requires_grad=True) * 2
    alone = torch_core.count_cpp_references(x)
    view = x.detach()
    assert torch_core.count_cpp_references(x) == alone + 1  # of the memory
    del view
    squared = x * x  # autograd saves x twice
    assert torch_core.count_cpp_references(x) >= alone + 1
    del squared
    assert torch_core.count_cpp_references(x) == alone


def test_many_tensors_are_scaled_and_measured():
    tensors = [torch.full((3,), 2.0), torch.ones(4)]
    torch_core.scale_in_place(tensors, torch.tensor(3.0))
    assert tensors[0].tolist() == [6.0] * 3
    norms = torch_core.norms(tensors, 2.0, dtype=torch.float64)
    assert norms[1].item() == 6.0 and norms[1].dtype == torch.float64


def test_compiled_modules_are_recognized():
    module = nn.Linear(1, 1)
    assert not torch_core.is_compiled(module)
    module.compile(backend="eager")
    assert torch_core.is_compiled(module)
    wrapped = torch.compile(nn.Linear(1, 1), backend="eager")
    assert torch_core.COMPILED_MODULE in wrapped._modules

    with torch._dynamo.config.patch(recompile_limit=8):
        torch_core.allow_compiled_variants(64)
        torch_core.allow_compiled_variants(16)
        assert torch._dynamo.config.recompile_limit == 64


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_compiled_code_is_recognized_while_it_runs():
    seen = []

    def look(x):
        seen.append((torch.compiler.is_compiling(), callable(torch_core.get_compile_callback())))
        return x + 1

    look(torch.ones(1))
    torch.compile(look, backend="eager")(torch.ones(1))
    assert seen[0] == (False, False) and seen[-1][1]


def test_buffers_outside_the_state_dict_are_known():
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("computed", torch.ones(1), persistent=False)
    assert torch_core.non_persistent_buffers(module) == {"computed"}


def test_ddp_reads_the_ignored_names_first():
    class Names:
        def __iter__(self):
            raise KeyError("read")

    start_process_group(torch.device("cpu"))
    module = nn.Linear(1, 1)
    torch_core.set_ddp_ignored(module, Names())
    with pytest.raises(KeyError, match="read"):
        nn.parallel.DistributedDataParallel(module)


def test_fused_optimizers_ask_for_their_devices(monkeypatch):
    module, name = torch_core.find_fused_devices()
    assert "cpu" in getattr(module, name)()
    monkeypatch.setattr(module, name, list)
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match="fused"):
        torch.optim.AdamW([param], fused=True).step()


def test_the_allocator_is_configured_by_either_name(monkeypatch):
    settings = []
    name = "_accelerator_setAllocatorSettings"
    monkeypatch.setattr(torch._C, name, settings.append, raising=False)
    torch_core.configure_allocator("a:b")
    monkeypatch.delattr(torch._C, name)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    torch_core.configure_allocator("c:d")
    assert settings == ["a:b", "c:d"]


def test_the_allocators_recorder_takes_what_is_passed():
    """Without a GPU, by signature; tests/gpu runs it."""
    memory = torch.cuda.memory
    inspect.signature(memory._snapshot).bind("cuda")
    inspect.signature(memory._set_memory_metadata).bind("text")
    record = inspect.signature(memory._record_memory_history)
    record.bind(None, device="cuda")
    record.bind("all", context="alloc", stacks="python", max_entries=1, device="cuda")


# ---- torch's operators


def attention_case():
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    scores = (q @ k.mT * 0.5).masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf)
    return (q, k, v), scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_attention_on_a_cpu_returns_the_logsumexp():
    inputs, out, lse = attention_case()
    found = torch_operators.cpu_attention(*inputs, 0.0, True, scale=0.5)
    torch.testing.assert_close(found, (out, lse))
    grads = torch_operators.cpu_attention_backward(
        torch.ones_like(out), *inputs, out, lse.contiguous(), 0.0, True, scale=0.5
    )
    leaves = [t.clone().requires_grad_() for t in inputs]
    F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.5).sum().backward()
    torch.testing.assert_close([*grads], [t.grad for t in leaves])


# The names of the arguments of operators that need a GPU, in order.
GPU_OPERATORS = {
    "flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
        "is_causal philox_seed philox_offset scale"
    ),
    "cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    ),
    "cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q "
        "cum_seq_k max_q max_k dropout_p is_causal scale"
    ),
    "efficient_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal scale"
    ),
    "efficient_attention_backward": (
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p "
        "grad_input_mask is_causal scale"
    ),
}


@pytest.mark.parametrize("name", GPU_OPERATORS)
def test_operators_of_gpus_take_what_is_passed(name):
    schema = getattr(torch_operators, name).default._schema
    assert " ".join(argument.name for argument in schema.arguments) == GPU_OPERATORS[name]


@pytest.mark.parametrize("name", ["packed_attention", "packed_attention_backward"])
def test_packed_operators_take_what_is_passed(name):
    names = [each.name for each in getattr(torch_operators, name).default._schema.arguments]
    assert {"max_q", "max_k", "dropout_p", "is_causal", "scale"} < {*names}
    assert {"window_size_left", "window_size_right"} < {*names}


def test_public_functions_call_these_operators():
    with _Seen() as seen:
        x = torch.ones(2)
        x.sum().item()
        x.to(torch.float64)
        y = torch_operators.reshape_as_new(x, (2, 1))
    assert {torch_operators.item.__name__, torch_operators.to.__name__} < {*seen.names}
    assert not y._is_view() and y.shape == (2, 1)
    offsets = torch.tensor([1, 2], dtype=torch.int32, device="meta")
    a = torch.ones(2, 8, device="meta")
    b = torch.ones(2, 8, 8, device="meta")
    out = torch_operators.grouped_mm(a.bfloat16(), b.bfloat16(), offsets)
    assert out.shape == (2, 8)


# ---- torch.distributed, FSDP2 and DTensor


def test_groups_and_their_store():
    start_process_group(torch.device("cpu"))
    torch_distributed.default_store().set("key", "value")
    assert torch_distributed.default_store().get("key") == b"value"
    group = dist.new_group([0])
    assert torch_distributed.all_groups() == [dist.group.WORLD, group]
    torch_distributed.set_group_timeout(group, timedelta(seconds=7))
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=7)


def test_a_finished_collective_can_be_made():
    future = torch.futures.Future()
    future.set_result([torch.ones(2)])
    work = torch_distributed.make_work(future)
    assert isinstance(work, dist.Work) and work.wait()


def test_the_flight_recorder_is_where_nccl_is():
    found = torch_distributed.find_flight_recorder()
    assert callable(found) or not dist.is_nccl_available()


def sharded_linear(**options):
    start_process_group(torch.device("cpu"))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for module in (*model, model):
        fully_shard(module, **options)
    return model


def test_parameters_of_fsdp():
    model = sharded_linear()
    group = torch_fsdp.param_group(model[0])
    weight, bias = group.fsdp_params
    assert isinstance(weight, torch_fsdp.FSDPParam) and torch_fsdp.param_group(model) is None
    assert weight.sharded_state == torch_fsdp.ShardedState.SHARDED
    assert torch_fsdp.gathered_param(weight) is None
    assert torch_fsdp.flat_shard(weight).shape == (12,)
    assert torch_fsdp.fsdp_local_shard(bias).shape == (3,)
    assert weight.sharded_param is model[0].weight
    model(torch.ones(1, 4))
    assert torch_fsdp.gathered_param(weight).shape == (3, 4)
    buffers = inspect.signature(weight.init_all_gather_outputs)
    buffers.bind([12], [torch.float32], 1, torch.device("cpu"))
    assert isinstance(torch_fsdp.FSDPParam.all_gather_inputs, property)


def test_memory_is_allocated_again():
    t = torch.ones(4)
    t.untyped_storage().resize_(0)
    torch_fsdp.alloc_storage(t)
    assert t.untyped_storage().nbytes() == 16


def test_a_custom_reduce_scatter_is_used():
    called = []

    class Reduce(torch_fsdp.ReduceScatter):
        def allocate(self, size, *, dtype, device):
            called.append(dtype)
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, *args, **kwargs):
            raise AssertionError("one rank reduces nothing")

    model = sharded_linear()
    model[0].set_custom_reduce_scatter(Reduce())
    model(torch.ones(1, 4)).sum().backward()
    assert called and model[0].weight.grad is not None


def test_a_backward_that_failed_is_known():
    model = sharded_linear()

    def fail(grad):
        raise ZeroDivisionError

    y = model(torch.ones(1, 4))
    assert not torch_fsdp.has_unfinished_backward(model)
    model[0].weight.register_hook(fail)
    x = model[0](torch.ones(1, 4, requires_grad=True))
    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        (model[1](x).sum() + y.sum()).backward()
    assert torch_fsdp.has_unfinished_backward(model)


def test_dtypes_of_gradients_are_read_again():
    """torch 2.15 reads them itself."""
    model = sharded_linear().requires_grad_(False)
    model(torch.ones(1, 4))
    model.requires_grad_(True)
    torch_fsdp.read_gradient_dtypes(model)
    group = torch_fsdp.param_group(model[0])
    assert getattr(group, "_orig_dtype", torch.float32) == torch.float32


def test_meta_parameters_are_refused_in_one_place():
    owner, name = torch_fsdp.META_CHECK
    assert f"self.{name}()" in inspect.getsource(owner)


def test_parts_of_dtensors():
    start_process_group(torch.device("cpu"))
    mesh = dist.init_device_mesh("cpu", (1,))
    local = torch.arange(6.0).view(2, 3)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    assert torch_fsdp.shape_and_offset(tensor) == ((2, 3), (0, 0))
    inner = torch_fsdp.shard_of(tensor)
    assert inner.data_ptr() == local.data_ptr() and torch_fsdp.shard_of(tensor) is inner
    other = torch_fsdp.with_local(tensor, local + 1)
    assert other.shape == tensor.shape and other.placements == tensor.placements
    assert other.to_local()[0, 0] == 1


# ---- checkpoints


def test_parts_of_a_checkpoints_index(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = {"a": {"b": torch.ones(2, 3)}}
    flat, paths = torch_checkpoint.flatten_state_dict(state)
    assert [*flat] == ["a.b"] and paths == {"a.b": ("a", "b")}
    torch_checkpoint.set_element(state, ("a", "c"), 5)
    assert state["a"]["c"] == 5
    (chunk,) = torch_checkpoint.chunks_of(flat["a.b"])
    assert chunk.offsets == (0, 0) and chunk.sizes == (2, 3)

    dcp.save({"b": torch.ones(2, 3)}, checkpoint_id=tmp_path, no_dist=True)
    reader = dcp.FileSystemReader(tmp_path)
    path = torch_checkpoint.metadata_path(reader, None)
    assert Path(path) == tmp_path / ".metadata"
    (place,) = pickle.loads(Path(path).read_bytes()).storage_data.values()
    assert isinstance(place, torch_checkpoint.StoragePlace)
    assert [place.relative_path, place.offset] == ["__0_0.distcp", 0] and place.length > 0


def test_private_classes_in_an_index_are_pickled_under_these_names():
    for (module, name), value in torch_checkpoint.PICKLED.items():
        assert getattr(sys.modules[module], name) is value
    dumped = pickle.dumps([torch_checkpoint.MEMORY_FORMATS.TORCH_CONTIGUOUS_FORMAT, torch.strided])
    assert b"_MEM_FORMAT_ENCODING" in dumped and b"_get_layout" in dumped


# ---- flash-attn-4


def test_names_of_flash_attn_4():
    interface = pytest.importorskip("flash_attn.cute.interface")
    forward = inspect.signature(getattr(interface, flash_attention.FORWARD)).parameters
    backward = inspect.signature(getattr(interface, flash_attention.BACKWARD)).parameters
    assert {"softmax_scale", "causal", "return_lse", "out", "lse"} <= {*forward}
    assert {"softmax_scale", "causal", "deterministic", "dq", "dk", "dv"} <= {*backward}
    assert callable(interface._get_device_arch)


# ---- Hugging Face


def test_a_models_attention_is_read_when_it_runs():
    model = tiny_model(tiny_config("llama"))
    assert hugging_face.attention_of(model.config) == "sdpa"
    hugging_face.set_attention(model.config, "eager")
    assert hugging_face.attention_of(model.config) == "eager"
    ids = torch.arange(3)[None]
    assert model(ids, output_attentions=True).attentions[0] is not None  # sdpa returns none


def test_modules_are_initialized_unless_marked():
    model = tiny_model(tiny_config("llama"), torch.float32)
    linear = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        linear.weight.fill_(7)
    hugging_face.mark_as_initialized(linear.weight)
    hugging_face.init_module(model, linear)
    assert linear.weight.eq(7).all()
    del linear.weight._is_hf_initialized
    hugging_face.init_module(model, linear)
    assert 0 < linear.weight.std() < 1


def test_saving_reverts_the_conversions():
    from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

    model = tiny_model(tiny_config("llama"))
    hugging_face.set_weight_conversions(model, [WeightRenaming("stored", "model")])
    assert [*revert_weight_conversion(model, {"model.a": torch.ones(1)})] == ["stored.a"]
    hugging_face.set_weight_conversions(model, [])
    assert [*revert_weight_conversion(model, {"model.a": torch.ones(1)})] == ["model.a"]


def test_what_models_say_of_themselves():
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import OutputRecorder

    model = tiny_model(tiny_config("qwen3_moe"))
    assert isinstance(hugging_face.recorded_outputs(model.model)["router_logits"], OutputRecorder)
    assert "_can_record_outputs" in inspect.getsource(PreTrainedModel)
    assert hugging_face.unexpected_keys_to_ignore(model) == ()
    model._keys_to_ignore_on_load_unexpected = {"mtp"}
    assert hugging_face.unexpected_keys_to_ignore(model) == {"mtp"}
    assert "_keys_to_ignore_on_load_unexpected" in inspect.getsource(PreTrainedModel)


def test_experts_are_recognized_by_their_gate():
    experts = tiny_model(tiny_config("qwen3_moe")).model.layers[0].mlp.experts
    assert hugging_face.has_gate_function(type(experts)) and hugging_face.has_default_gate(experts)
    assert not hugging_face.has_gate_function(nn.Linear)
    x = torch.randn(3, 8)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(hugging_face.gate_function(experts)(x), F.silu(gate) * up)


def test_deepstack_is_a_method_of_the_language_model():
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

    names = [*inspect.signature(Qwen3VLTextModel._deepstack_process).parameters]
    assert names == ["self", "hidden_states", "visual_pos_masks", "visual_embeds"]
    plain = nn.Module()
    model = nn.Module()
    model._deepstack_process = None
    for each in (plain, model):
        hugging_face.replace_deepstack(each, F.relu)
    assert model._deepstack_process is F.relu and not hasattr(plain, "_deepstack_process")


def test_adapters_are_disabled_without_changing_requires_grad():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(tiny_config("llama")), config)
    ids = torch.arange(5)[None]
    adapters = hugging_face.enabled_adapters(model)
    assert len(adapters) == 2
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    with model.disable_adapter():
        expected = model(ids).logits
    for adapter in adapters:
        hugging_face.disable_adapter(adapter, True)
    assert not hugging_face.enabled_adapters(model) and torch.equal(model(ids).logits, expected)
    assert trained == {name for name, param in model.named_parameters() if param.requires_grad}
    for adapter in adapters:
        hugging_face.disable_adapter(adapter, False)
    assert not torch.equal(model(ids).logits, expected)


def test_accelerate_leaves_prepared_models_alone():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    hugging_face.mark_as_prepared(model)
    source = inspect.getsource(type(accelerator).prepare_model)
    assert accelerator.prepare(model) is model and "_is_accelerate_prepared" in source


def test_trl_sends_the_weights_that_it_iterates_over():
    generation = textwrap.dedent(
        inspect.getsource(pytest.importorskip("trl.generation.vllm_generation").VLLMGeneration)
    )
    assert re.search(r"for name, \w+ in self\._iter_named_params\(\)", generation)
    target = nn.Module()
    hugging_face.set_vllm_weights(target, list)
    assert target._iter_named_params is list


def test_torchao_warns_through_these_loggers():
    import logging

    torchao = pytest.importorskip("torchao")
    assert torchao.__name__ in hugging_face.TORCHAO_LOGGERS
    assert torch_core.pytree.__name__ in hugging_face.TORCHAO_LOGGERS
    assert isinstance(torch_core.pytree.log, logging.Logger)
