"""Local SGD of many clients at once. The models of the clients form one matrix, the stack; each row has the weights of one client.

There are three methods to compute the gradients of all clients. Softmax regression has compiled kernels on a CPU (regression.py). For an
nn.Sequential of Linear, Embedding and layers without weights, batched layers compute the gradients of all clients (gradients.py).
torch.func.vmap computes the gradients of all other models. Models that vmap does not support are trained by another engine.

Except for rounding, a client's update equals the update that training.engine.SerialEngine computes, and does not depend on other clients.
"""

from .engine import BatchedEngine, NotBatchable

__all__ = ["BatchedEngine", "NotBatchable"]
