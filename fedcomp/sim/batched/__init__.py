"""Local SGD of many clients together. There are three methods to compute the gradients of the clients:

- on a CPU, compiled kernels for softmax regression (regression.py);
- batched layers for an nn.Sequential of Linear, Embedding and layers without weights (gradients.py);
- torch.func.vmap for all other models. If vmap does not support a model, `NotBatchable` is raised, and --engine auto chooses another
  engine.

Except for rounding, a client's update equals the update that training.engine.SerialEngine computes. It does not depend on which other
clients are trained.
"""

from .engine import BatchedEngine, NotBatchable

__all__ = ["BatchedEngine", "NotBatchable"]
