"""Local SGD of many clients at once: their models are the rows of one matrix.

There are three ways to the gradients of a stack of clients; `choice.gradients_of` chooses, by what the model is made of. Softmax regression
has loops of its own on a CPU (regression.py). Models whose forward pass can be traced, and that are made of layers with a batched form, run
in that form (traced.py, layers.py, convolutions.py, recurrent.py). All others are mapped by torch.func (mapped.py). Models that cannot be
mapped are for the serial engine.

The update of a client is that of training.local_sgd.SerialEngine to rounding, whoever it is trained with.
"""

from .choice import NotMapped, choose_engine, unbatched
from .engine import BatchedEngine

__all__ = ["BatchedEngine", "NotMapped", "choose_engine", "unbatched"]
