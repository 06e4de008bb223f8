"""Private operators of torch.

Read in torch 2.13. The attention operators return the logsumexp, which
`torch.nn.functional.scaled_dot_product_attention` does not, and have a backward that takes any out
and logsumexp: a score block needs both.
"""

from typing import Any

import torch

aten: Any = torch.ops.aten

# (q, k, v, dropout, causal, ...) -> (out, lse, ...), and their backwards, by PyTorch's kernel.
cpu_attention = aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = aten._scaled_dot_product_flash_attention
flash_attention_backward = aten._scaled_dot_product_flash_attention_backward
# With packed documents: cumulative lengths of queries and keys, and the longest, after q, k and v.
packed_attention = aten._flash_attention_forward
packed_attention_backward = aten._flash_attention_backward
cudnn_attention = aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = aten._scaled_dot_product_cudnn_attention_backward
efficient_attention = aten._scaled_dot_product_efficient_attention
efficient_attention_backward = aten._scaled_dot_product_efficient_attention_backward

# What a dispatch mode sees of torch.nn.functional.grouped_mm, tensor.item() and tensor.to(...).
grouped_mm = aten._grouped_mm
item = aten._local_scalar_dense
to = aten._to_copy

# Reshapes without making a view, which autograd would not let a model change in place.
# `tensor.reshape` returns a view if it can.
reshape_as_new = aten._unsafe_view
