"""Local SGD of many clients at once. Each row of one matrix, the stack, has the weights of one client's model.

There are three methods for the gradients of a stack of clients. Softmax regression has kernels on a CPU (regression.py). An nn.Sequential
of Linear, Embedding and layers without weights has a batched form (gradients.py). All other models are mapped over the clients by
torch.func.vmap. Another engine trains the models that cannot be mapped.

Except for rounding, a client's update equals that of training.engine.SerialEngine and does not depend on the other clients.
"""

from .engine import BatchedEngine, BatchedJobs, NotBatchable

__all__ = ["BatchedEngine", "BatchedJobs", "NotBatchable"]
