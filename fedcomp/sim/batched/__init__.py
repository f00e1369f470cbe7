"""Local SGD of many clients at once: their models are the rows of one matrix.

There are three ways to the gradients of a stack of clients; `choice.gradients_of` chooses by the model's layers. Softmax regression has
kernels on a CPU (regression.py). Models whose forward pass can be traced and whose layers have a batched form run in that form (traced.py,
layers.py, convolutions.py, recurrent.py). All others are mapped by torch.func. The serial engine trains models that cannot be mapped.

Except for rounding, the update of a client is that of training.local_sgd.SerialEngine, whichever clients it is trained with.
"""

from .choice import NotMapped, choose_engine, unbatched
from .engine import BatchedEngine, BatchedJobs

__all__ = ["BatchedEngine", "NotMapped", "BatchedJobs", "choose_engine", "unbatched"]
