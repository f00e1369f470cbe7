"""The residuals of a run's first clients are monitored."""

from types import SimpleNamespace

import torch
from cases import for_each

from fedcomp.messages import TRAIN, UP_TO_DATE, Assignment
from fedcomp.sim import clients
from fedcomp.sim.clients import MAX_CLIENTS, MIN_CLIENTS, ResidualMonitor


@for_each("client, monitored", [(0, True), (MAX_CLIENTS - 1, True), (MAX_CLIENTS, False)])
def test_the_first_clients_are_monitored(client, monitored):
    warnings, update = [], torch.ones(3 * MAX_CLIENTS, 4)
    monitor = ResidualMonitor(lambda warning, kind: warnings.append(warning))
    assignments = [
        Assignment(1, TRAIN, i, UP_TO_DATE, "", "", "", [], "") for i in range(len(update))
    ]
    memories = [SimpleNamespace(residual=torch.zeros(4), gain=1.0, codec="a codec") for _ in update]
    for _ in range(3):
        monitor(assignments, memories, update)
    assert not warnings and sorted(monitor.norm_sums) == [*range(MAX_CLIENTS)]
    memories[client].residual = torch.full((4,), 100.0)
    monitor(assignments, memories, update)
    assert [
        f"the residual of client {client} grows without bound" in warning for warning in warnings
    ] == [True] * monitored


@for_each("coordinates, monitored", [(22, 6), (1, MIN_CLIENTS)])
def test_fewer_clients_of_a_large_model_are_monitored(coordinates, monitored, monkeypatch):
    monkeypatch.setattr(clients, "MAX_COORDINATES", coordinates)
    update = torch.ones(8, 4)
    monitor = ResidualMonitor(lambda warning, kind: None)
    assignments = [Assignment(1, TRAIN, i, UP_TO_DATE, "", "", "", [], "") for i in range(8)]
    memories = [SimpleNamespace(residual=torch.zeros(4), gain=1.0, codec="a codec") for _ in update]
    monitor(assignments, memories, update)
    assert sorted(monitor.norm_sums) == [*range(monitored)]
