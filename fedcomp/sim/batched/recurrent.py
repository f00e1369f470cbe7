"""LSTM of a stack of clients, by batched products.

Hochreiter, Schmidhuber: Long short-term memory. Neural Computation 1997, in the form of torch.nn.LSTM:

    i, f, o = σ(·), g = tanh(·) of W x_t + b + U h_{t−1} + b';  c_t = f ∘ c_{t−1} + i ∘ g;  h_t = o ∘ tanh(c_t)

Products that do not depend on the previous step are computed for all steps at once: W x, and the gradients for W, U and x.
"""

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


def fits(layer: nn.LSTM) -> bool:
    """Return whether a layer has this form."""
    return not (layer.bidirectional or layer.proj_size or layer.dropout)


def lstm(
    layer: nn.LSTM, own: dict[str, Tensor], m: int, x: Tensor, state: State | None = None
) -> tuple[Tensor, State]:
    """Run nn.LSTM on x [m·b, t, i], or [t, m·b, i] unless batch_first, with weights [m, 4h, i]; states are [layers, m·b, h]."""
    x = (x.transpose(0, 1) if layer.batch_first else x).unflatten(1, (m, -1))  # [t, m, b, i]
    ends: list[State] = []
    for i in range(layer.num_layers):
        weight, recurrent = own[f"weight_ih_l{i}"], own[f"weight_hh_l{i}"]
        first = x.new_zeros(*x.shape[1:3], layer.hidden_size)
        bias = (
            own[f"bias_ih_l{i}"] + own[f"bias_hh_l{i}"]
            if layer.bias
            else weight.new_zeros(m, weight.shape[1])
        )
        hidden, cell = (
            (part[i].unflatten(0, (m, -1)) for part in state) if state else (first, first)
        )
        x, last = _layer(x, weight, recurrent, bias, hidden, cell)
        ends.append((x[-1].flatten(0, 1), last.flatten(0, 1)))
    out = x.flatten(1, 2)
    return out.transpose(0, 1) if layer.batch_first else out, tuple(
        torch.stack(parts) for parts in zip(*ends, strict=True)
    )


def _layer(
    x: Tensor, weight: Tensor, recurrent: Tensor, bias: Tensor, hidden: Tensor, cell: Tensor
) -> State:
    """x [t, m, b, i] → outputs [t, m, b, h], the last cell state [m, b, h]."""
    t, m, b, _ = x.shape
    rows = x.permute(1, 0, 2, 3).flatten(1, 2)  # [m, t·b, i]
    given = (
        torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
        .view(m, t, b, -1)
        .transpose(0, 1)
        .contiguous()
    )
    exact = torch.promote_types(given.dtype, torch.float32)
    return _Recurrence.apply(
        given, recurrent.to(given.dtype), hidden.to(given.dtype), cell.to(exact)
    )


class _Recurrence(torch.autograd.Function):
    """given [t, m, b, 4h] = W x + biases, U [m, 4h, h], first states [m, b, h] → outputs [t, m, b, h], the last cell state [m, b, h]."""

    @staticmethod
    def forward(ctx, given: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor) -> State:
        gates = torch.empty_like(given)
        outputs = given.new_empty(*given.shape[:3], hidden.shape[-1])
        cells, before, turned = [cell], hidden, recurrent.mT
        for step in range(len(given)):
            i, f, g, o = (given[step] + torch.bmm(before, turned)).chunk(4, -1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            torch.cat([i, f, g, o], -1, out=gates[step])
            cells.append(torch.addcmul(f * cells[-1], i, g))
            before = outputs[step].copy_(o * cells[-1].tanh())
        cells = torch.stack(cells)
        ctx.save_for_backward(gates, cells, outputs, recurrent, hidden)
        return outputs, cells[-1].clone()

    @staticmethod
    def backward(ctx, for_outputs: Tensor, for_last: Tensor):
        gates, cells, outputs, recurrent, hidden = ctx.saved_tensors
        for_given, for_cell = torch.empty_like(gates), for_last
        for_hidden = torch.zeros_like(hidden)
        for step in reversed(range(len(gates))):
            i, f, g, o = gates[step].chunk(4, -1)
            squashed, slope = cells[step + 1].tanh(), for_outputs[step] + for_hidden
            for_cell = for_cell + slope * o * (1 - squashed * squashed)
            for_i, for_f = for_cell * g * i * (1 - i), for_cell * cells[step] * f * (1 - f)
            for_g, for_o = for_cell * i * (1 - g * g), slope * squashed * o * (1 - o)
            for_given[step] = torch.cat([for_i, for_f, for_g, for_o], -1)
            for_hidden = torch.bmm(for_given[step], recurrent)
            for_cell = for_cell * f
        before = torch.cat([hidden.unsqueeze(0), outputs[:-1]])
        for_recurrent = torch.bmm(_by_client(for_given).mT, _by_client(before))
        return for_given, for_recurrent, for_hidden, for_cell


def _by_client(x: Tensor) -> Tensor:
    """[t, m, b, n] → [m, t·b, n]."""
    return x.transpose(0, 1).flatten(1, 2)
