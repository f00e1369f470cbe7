"""Local SGD of many clients together. There are three methods to compute the gradients of the clients:

- on a CPU, compiled kernels for softmax regression (regression.py);
- batched layers for an nn.Sequential of Linear, Embedding and layers without weights (gradients.py);
- torch.func.vmap for all other models. Models that vmap does not support are trained by another engine.

Except for rounding, a client's update equals the update that training.engine.SerialEngine computes, and does not depend on other clients.
"""

from .engine import BatchedEngine, NotBatchable

__all__ = ["BatchedEngine", "NotBatchable"]
