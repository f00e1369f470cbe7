"""Residuals of a run's first clients are followed."""

from types import SimpleNamespace

import torch
from cases import for_each

from fedcomp.messages import TRAIN, UP_TO_DATE, Assignment
from fedcomp.sim.update_watch import WATCHED, UpdateWatch


@for_each("client, seen", [(0, True), (WATCHED - 1, True), (WATCHED, False)])
def test_the_first_clients_are_watched(client, seen):
    said, update = [], torch.ones(3 * WATCHED, 4)
    watch = UpdateWatch(lambda sentence, kind: said.append(sentence))
    asked = [Assignment(1, TRAIN, i, UP_TO_DATE, "", "", "", [], "") for i in range(len(update))]
    memories = [SimpleNamespace(residual=torch.zeros(4), gain=1.0, codec="a codec") for _ in update]
    for _ in range(3):
        watch(asked, memories, update)
    assert not said and sorted(watch.put_in) == [*range(WATCHED)]
    memories[client].residual = torch.full((4,), 100.0)
    watch(asked, memories, update)
    assert [
        f"the residual of client {client} grows without bound" in sentence for sentence in said
    ] == [True] * seen
