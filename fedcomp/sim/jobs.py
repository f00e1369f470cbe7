"""Conversion of jobs and results for other processes and devices."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tasks.data import Data, Examples, map_tensors
from ..training import nested_state
from ..training.engine import Job, JobResult
from ..training.traces import Traces

PACKED = "packed"  # the only key of a packed state


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


def packed_job(job: Job, pack_trace: Callable[[Tensor], Any] = PickledTensor) -> Job:
    """Return a job whose tensors are packed for another process; its state is packed into one value."""
    return job._replace(
        buffers=map_buffers(PickledTensor, job.buffers),
        traces=map_traces(pack_trace, job.traces),
        state=_packed_state(job.state),
    )


def unpacked_job(job: Job) -> Job:
    """Return a job from another process with its state unpacked."""
    return job._replace(state=_unpacked_state(job.state))


def packed_result(result: JobResult) -> JobResult:
    """Return a result that is packed for another process. Raises TaskError for a state that cannot be packed."""
    buffers = map_buffers(PickledTensor, result.buffers)
    return result._replace(buffers=buffers, state=_packed_state(result.state))


def packed_data(data: Examples, pack: Callable[[Tensor], Any] = PickledTensor) -> Data | None:
    """Return data in memory with packed tensors; None for LazyData, which the other process reads itself."""
    if not isinstance(data, Data):
        return None
    return Data(map_tensors(data.inputs, pack), pack(data.targets))


def unpacked_result(result: JobResult) -> JobResult:
    """Return an unpacked result from another process, with copies of its tensors."""
    buffers = map_buffers(torch.clone, result.buffers)
    return result._replace(buffers=buffers, state=_unpacked_state(result.state))


def _packed_state(state: dict[str, Any] | None) -> dict[str, Any] | None:
    return state and {PACKED: nested_state.pack(state)}


def _unpacked_state(state: dict[str, Any] | None) -> dict[str, Any] | None:
    return state and nested_state.unpack(state[PACKED])


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
    return Traces(mapped(traces.momentum), moments, mapped(traces.correction))


def copy_traces(source: Traces, target: Traces) -> None:
    """Copy momentum and moments, which training changes, into the tensors of `target`, also across devices."""
    for new, old in zip(
        (source.momentum, *(source.moments or ())),
        (target.momentum, *(target.moments or ())),
        strict=True,
    ):
        if new is not None and new is not old:
            old.copy_(new)
