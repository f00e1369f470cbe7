"""LSTM of a stack of clients, by batched products.

Hochreiter, Schmidhuber: Long short-term memory. Neural Computation 1997, in the form of torch.nn.LSTM:

    i, f, o = σ(·), g = tanh(·) of W x_t + b + U h_{t−1} + b';  c_t = f ∘ c_{t−1} + i ∘ g;  h_t = o ∘ tanh(c_t)

Products that do not depend on the previous step are computed for all steps at once: W x, and the gradients for W, U and x.
"""

from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # hidden, cell


def supports(layer: nn.LSTM) -> bool:
    """Return whether a layer has a batched form."""
    return not (layer.bidirectional or layer.proj_size or layer.dropout)


def lstm(
    layer: nn.LSTM, own: dict[str, Tensor], m: int, x: Tensor, state: State | None = None
) -> tuple[Tensor, State]:
    """Run nn.LSTM on x [m·b, t, i], or [t, m·b, i] unless batch_first, with weights [m, 4h, i]; states are [layers, m·b, h]."""
    x = (x.transpose(0, 1) if layer.batch_first else x).unflatten(1, (m, -1))  # [t, m, b, i]
    ends: list[State] = []
    for i in range(layer.num_layers):
        weight, recurrent = own[f"weight_ih_l{i}"], own[f"weight_hh_l{i}"]
        zeros = x.new_zeros(*x.shape[1:3], layer.hidden_size)
        bias = (
            own[f"bias_ih_l{i}"] + own[f"bias_hh_l{i}"]
            if layer.bias
            else weight.new_zeros(m, weight.shape[1])
        )
        hidden, cell = (
            (part[i].unflatten(0, (m, -1)) for part in state) if state else (zeros, zeros)
        )
        x, last = _layer(x, weight, recurrent, bias, hidden, cell)
        ends.append((x[-1].flatten(0, 1), last.flatten(0, 1)))
    out = x.flatten(1, 2)
    hidden, cell = (torch.stack(parts) for parts in zip(*ends, strict=True))
    return out.transpose(0, 1) if layer.batch_first else out, (hidden, cell)


def _layer(
    x: Tensor, weight: Tensor, recurrent: Tensor, bias: Tensor, hidden: Tensor, cell: Tensor
) -> State:
    """Run a layer on x [t, m, b, i]. Return the outputs [t, m, b, h] and the last cell state [m, b, h]."""
    t, m, b, _ = x.shape
    rows = x.permute(1, 0, 2, 3).flatten(1, 2)  # [m, t·b, i]
    projected = (
        torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
        .view(m, t, b, -1)
        .transpose(0, 1)
        .contiguous()
    )
    dtype, cell_dtype = projected.dtype, torch.promote_types(projected.dtype, torch.float32)
    return _Recurrence.apply(  # type: ignore[no-untyped-call]
        projected, recurrent.to(dtype), hidden.to(dtype), cell.to(cell_dtype)
    )


class _Recurrence(torch.autograd.Function):
    """W x + biases [t, m, b, 4h], U [m, 4h, h], first states [m, b, h] → outputs [t, m, b, h], the last cell state [m, b, h]."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor
    ) -> State:
        gates = torch.empty_like(projected)
        outputs = projected.new_empty(*projected.shape[:3], hidden.shape[-1])
        steps, before, transposed = [cell], hidden, recurrent.mT
        for step in range(len(projected)):
            i, f, g, o = (projected[step] + torch.bmm(before, transposed)).chunk(4, -1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            torch.cat([i, f, g, o], -1, out=gates[step])
            steps.append(torch.addcmul(f * steps[-1], i, g))
            before = outputs[step].copy_(o * steps[-1].tanh())
        cells = torch.stack(steps)
        ctx.save_for_backward(gates, cells, outputs, recurrent, hidden)
        return outputs, cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor, grad_last: Tensor) -> tuple[Tensor, ...]:
        gates, cells, outputs, recurrent, hidden = ctx.saved_tensors
        grad_projected, grad_cell = torch.empty_like(gates), grad_last
        grad_hidden = torch.zeros_like(hidden)
        for step in reversed(range(len(gates))):
            i, f, g, o = gates[step].chunk(4, -1)
            tanh_cell, grad_out = cells[step + 1].tanh(), grad_outputs[step] + grad_hidden
            grad_cell = grad_cell + grad_out * o * (1 - tanh_cell * tanh_cell)
            grad_i, grad_f = grad_cell * g * i * (1 - i), grad_cell * cells[step] * f * (1 - f)
            grad_g, grad_o = grad_cell * i * (1 - g * g), grad_out * tanh_cell * o * (1 - o)
            grad_projected[step] = torch.cat([grad_i, grad_f, grad_g, grad_o], -1)
            grad_hidden = torch.bmm(grad_projected[step], recurrent)
            grad_cell = grad_cell * f
        before = torch.cat([hidden.unsqueeze(0), outputs[:-1]])
        grad_recurrent = torch.bmm(_by_client(grad_projected).mT, _by_client(before))
        return grad_projected, grad_recurrent, grad_hidden, grad_cell


def _by_client(x: Tensor) -> Tensor:
    """[t, m, b, n] → [m, t·b, n]."""
    return x.transpose(0, 1).flatten(1, 2)
