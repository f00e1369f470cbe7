"""Local SGD of many clients at once: their models are the rows of one matrix.

There are three methods for the gradients of a stack of clients. Softmax regression has kernels on a CPU (regression.py). nn.Sequential of
layers that have a batched form runs in that form (gradients.py). All other models are mapped by torch.func; the serial engine trains those
that cannot be mapped.

Except for rounding, the update of a client is that of training.engine.SerialEngine, whichever clients it is trained with.
"""

from .engine import BatchedEngine, BatchedJobs, NotBatchable

__all__ = ["BatchedEngine", "BatchedJobs", "NotBatchable"]
