"""Time of rounds of pfl's simulator (https://github.com/apple/pfl-research), for rivals.py and cifar10_pfl.py.

    python benchmarks/rival_pfl.py WORKLOAD.npz --model mnist-cnn --rounds 10 --cohort 20
    torchrun --nproc-per-node 2 benchmarks/rival_pfl.py ...

The program prints one line of JSON, and needs pfl (`rivals.py --install`) but not fedcomp. Like pfl's own benchmarks, it uses
SimulatedBackend with FederatedAveraging and PyTorchModel, keeps users' tensors in memory, and averages users with equal weights. torchrun
starts several processes.
"""

import argparse
import json
import logging
import os
import time
import types

import numpy as np
import torch
from rival_models import MODELS
from torch.nn import functional as F


class Stopwatch:
    """A pfl callback that records the duration of each round in seconds, including the evaluation after every `evaluate_every` rounds."""

    def __init__(self, test: tuple[torch.Tensor, torch.Tensor], evaluate_every: int):
        self.test, self.evaluate_every, self.seconds = test, evaluate_every, []

    def on_train_begin(self, *, model):
        self.began = time.perf_counter()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if self.evaluate_every and (central_iteration + 1) % self.evaluate_every == 0:
            accuracy(model.pytorch_model, *self.test)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = time.perf_counter()
        return False, Metrics()

    def on_train_end(self, *, model):
        pass


def accuracy(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        correct = sum(
            int((model(x).argmax(-1) == y).sum())
            for x, y in zip(inputs.split(1000), targets.split(1000), strict=True)
        )
    return correct / len(targets)


def loss(self, inputs, targets, eval=False):
    self.train(not eval)
    return F.cross_entropy(self(inputs), targets)


def metrics(self, inputs, targets, eval=True):
    with torch.no_grad():
        return {
            "loss": Weighted(float(self.loss(inputs, targets, eval)) * len(inputs), len(inputs))
        }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "workload",
        help=".npz file with inputs, targets, shards, test_inputs, test_targets and the initial weights",
    )
    options.add_argument("--model", choices=MODELS, required=True)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--cohort", type=int, default=20)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--batch-size", type=int, default=20)
    options.add_argument("--lr", type=float, default=0.05)
    options.add_argument("--threads", type=int, default=0)
    options.add_argument("--evaluate-every", type=int, default=0)
    options.add_argument("--bf16", action="store_true", help="train in bfloat16 (pfl's amp_dtype)")
    args = options.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    np.random.seed(0)

    stored, device = np.load(args.workload), get_default_device()
    inputs, targets, test_inputs, test_targets = (
        torch.from_numpy(stored[name]).to(device)
        for name in ("inputs", "targets", "test_inputs", "test_targets")
    )
    users = {
        i: (inputs[torch.from_numpy(shard)], targets[torch.from_numpy(shard)])
        for i, shard in enumerate(stored["shards"])
    }
    data = FederatedDataset.from_slices(users, get_user_sampler("random", range(len(users))))

    network = MODELS[args.model]()
    network.load_state_dict(
        {name: torch.from_numpy(stored["weights." + name]) for name in network.state_dict()}
    )
    network.loss, network.metrics = (
        types.MethodType(loss, network),
        types.MethodType(metrics, network),
    )
    model = PyTorchModel(
        network,
        torch.optim.SGD,
        torch.optim.SGD(network.parameters(), 1.0),
        amp_dtype=torch.bfloat16 if args.bf16 else None,
    )
    watch = Stopwatch((test_inputs, test_targets), args.evaluate_every)
    model = FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=1 << 30,
            train_cohort_size=args.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None,
            local_learning_rate=args.lr,
            local_batch_size=args.batch_size,
            local_num_steps=args.steps,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[watch],
        send_metrics_to_platform=False,
    )
    if int(os.environ.get("RANK", 0)) == 0:
        final_accuracy = accuracy(model.pytorch_model, test_inputs, test_targets)
        print(
            json.dumps(
                {
                    "seconds": watch.seconds,
                    "accuracy": final_accuracy,
                    "device": str(device),
                    "torch": torch.__version__,
                }
            )
        )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import get_default_device
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    main()
