"""The tasks of rivals.py that fedcomp does not have: a built-in data set with another model."""

import dataclasses

from rival_models import mnist_small_cnn

from fedcomp import config, tasks

small_cnn = dataclasses.replace(
    tasks.load("mnist-cnn", config.data_folder(None)), name="mnist-small-cnn", model=mnist_small_cnn
)
