"""Local SGD of many clients at once: their models are the rows of one matrix.

There are three methods for the gradients of a stack of clients; `choice.gradients_of` chooses by the model's layers. Softmax regression
has kernels on a CPU (regression.py). A model whose forward pass can be traced and whose layers have a batched form runs in that form
(traced.py). All other models are mapped by torch.func; the serial engine trains those that cannot be mapped.

Except for rounding, the update of a client is that of training.serial_engine.SerialEngine, whichever clients it is trained with.
"""

from .choice import NotBatchable, choose_engine, serial_reason, unbatched_engine
from .engine import BatchedEngine, BatchedJobs

__all__ = [
    "BatchedEngine",
    "BatchedJobs",
    "NotBatchable",
    "choose_engine",
    "serial_reason",
    "unbatched_engine",
]
