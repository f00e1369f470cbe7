"""Local SGD of many clients at once. The weights of their models are the rows of one matrix, the stack.

There are three methods for the gradients of a stack of clients. Softmax regression has kernels on a CPU (regression.py). nn.Sequential of
Linear, Embedding and layers without weights has a batched form (gradients.py). torch.func.vmap maps all other models over the clients.
Models that cannot be mapped are trained by another engine.

Except for rounding, a client's update equals that of training.engine.SerialEngine and does not depend on the other clients.
"""

from .engine import BatchedEngine, BatchedJobs, NotBatchable

__all__ = ["BatchedEngine", "BatchedJobs", "NotBatchable"]
