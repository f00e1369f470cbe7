"""What follows the residuals of a run's clients."""

from types import SimpleNamespace

import torch
from cases import for_each

from fedcomp.sim.growth import WATCHED, Growth


@for_each("client, seen", [(0, True), (WATCHED - 1, True), (WATCHED, False)])
def test_the_first_clients_are_watched(client, seen):
    said, update = [], torch.ones(3 * WATCHED, 4)
    growth = Growth(lambda sentence, kind: said.append(sentence))
    memories = [SimpleNamespace(residual=torch.zeros(4), gain=1.0, codec="a codec") for _ in update]
    for _ in range(3):
        growth.look(range(len(update)), memories, update)
    assert not said and sorted(growth.put_in) == [*range(WATCHED)]
    memories[client].residual = torch.full((4,), 100.0)
    growth.look(range(len(update)), memories, update)
    assert [
        f"the residual of client {client} grows without bound" in sentence for sentence in said
    ] == [True] * seen
