"""Conversion of jobs and results for other processes and devices."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..clients import nested_state
from ..tasks.data import Data, Examples, mapped
from ..training.engine import Job, JobResult
from ..training.local_sgd import Traces


@dataclass(frozen=True, eq=False)
class PickledTensor:
    """Pickles a tensor as a NumPy array. Unpickled, it is a tensor on the CPU.

    Ray keeps arrays in its object store, which the processes of a machine share. A tensor from the store must not be written to.
    """

    tensor: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.tensor.detach().cpu().contiguous()
        array = tensor.reshape(-1).view(torch.uint8).numpy()
        return _from_array, (array, tensor.dtype, tensor.shape)


def _from_array(array: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array may be read-only
        return torch.from_numpy(array).view(dtype).reshape(shape)


def packed(job: Job, pack_trace: Callable[[Tensor], Any] = PickledTensor) -> Job:
    """Return a job whose tensors are packed for another process; its state becomes bytes."""
    return job._replace(
        buffers=map_buffers(PickledTensor, job.buffers),
        traces=map_traces(pack_trace, job.traces),
        state=job.state and nested_state.pack(job.state),
    )


def packed_data(data: Examples, pack: Callable[[Tensor], Any] = PickledTensor) -> Data | None:
    """Return data in memory with packed tensors; None for LazyData, which the other process reads itself."""
    if not isinstance(data, Data):
        return None
    return Data(mapped(data.inputs, pack), pack(data.targets))


def unpacked(result: JobResult) -> JobResult:
    """Return an unpacked result from another process, with copies of its tensors."""
    state = result.state and nested_state.unpack(result.state)
    return result._replace(buffers=map_buffers(torch.clone, result.buffers), state=state)


def map_buffers(
    function: Callable[[Tensor], Any], buffers: dict[str, Tensor] | None
) -> dict[str, Any] | None:
    """Return buffers with `function` applied to each tensor."""
    return buffers and {name: function(buffer) for name, buffer in buffers.items()}


def map_traces(function: Callable[[Any], Any], traces: Traces) -> Traces:
    """Return traces with `function` applied to each tensor."""

    def mapped(trace: Tensor | None) -> Any:
        return None if trace is None else function(trace)

    moments = traces.moments and (function(traces.moments[0]), function(traces.moments[1]))
    return Traces(mapped(traces.momentum), moments, mapped(traces.pull))


def copy_traces(source: Traces, target: Traces) -> None:
    """Copy momentum and moments, which training changes, into the tensors of `target`, also across devices."""
    for new, old in zip(
        (source.momentum, *(source.moments or ())),
        (target.momentum, *(target.moments or ())),
        strict=True,
    ):
        if new is not None and new is not old:
            old.copy_(new)
