"""A client that missed rounds downloads the cheapest form, and then has bit-identical weights to the server's."""

import pytest
import torch
from cases import for_each

from fedcomp import Layout, codec, memory
from fedcomp.clients.replica import NeedDense, Replica
from fedcomp.messages import DENSE, FRAMES, OVERWRITE, UP_TO_DATE, Assignment, next_version
from fedcomp.server.broadcasts import Broadcasts

NUMEL = 2000
LAYOUT = Layout.from_shapes({"w": (40, 49), "b": (40,)})


def broadcasts(spec: str, cache_bytes: int = 4 * NUMEL) -> Broadcasts:
    downlink = codec(spec)
    return Broadcasts(
        torch.linspace(-1, 1, NUMEL),
        LAYOUT,
        downlink,
        memory("residual", downlink, NUMEL, LAYOUT),
        cache_bytes,
    )


def advance(b: Broadcasts, rounds: int, spread: int = NUMEL) -> list[torch.Tensor]:
    """Publish updates of the first `spread` coordinates. Return the weights after each update."""
    weights = []
    for round in range(rounds):
        update = torch.zeros(NUMEL)
        update[:spread] = torch.randn(spread, generator=torch.Generator().manual_seed(round))
        b.publish(b.prepare(round, update, 0))
        weights.append(b.weights.clone())
    return weights


def assignment(b: Broadcasts, version: str) -> Assignment:
    d = b.download(version)
    return Assignment(1, "train", 0, d.form, d.base, b.version, b.fingerprint, d.frames, "")


def replica(b: Broadcasts) -> Replica:
    return Replica(torch.linspace(-1, 1, NUMEL), LAYOUT, b.codec)


@for_each(
    "spec",
    ["stc:density=1%", "topk:density=2%,values=fp16@layer", "sbc:density=1%", "fp16", "identity"],
)
@for_each("missed", [1, 2, 7])
def test_weights_are_bit_identical_after_any_absence(spec, missed):
    b = broadcasts(spec, cache_bytes=10**6)
    away = replica(b)
    advance(b, missed)
    away.apply(assignment(b, b.first))
    assert torch.equal(away.weights.view(torch.int32), b.weights.view(torch.int32))
    assert (away.version, away.fingerprint) == (b.version, b.fingerprint)


def test_weights_that_decay_are_bit_identical_after_an_absence():
    """Decay changes every coordinate, also those that no broadcast contains."""
    b = broadcasts("topk:density=1%", cache_bytes=10**6)
    away = replica(b)
    for factor in (1.0, 0.5, *[1.0] * 8):
        b.publish(b.prepare(1, (torch.arange(NUMEL) < 20).float(), 0, factor))
    away.apply(assignment(b, b.first))
    assert torch.equal(away.weights, b.weights)


def test_a_few_missed_frames_are_sent_unchanged():
    b = broadcasts("stc:density=1%")
    advance(b, 3)
    download = b.download(b.first)
    assert download.form == FRAMES
    assert download.frames == [entry.frame for entry in b.cache]


def test_many_frames_with_the_same_coordinates_are_sent_as_one_overwrite():
    b = broadcasts("topk:density=1%")
    advance(b, 12, spread=20)
    download = b.download(b.first)
    assert download.form == OVERWRITE
    assert download.bytes < sum(len(entry.frame) for entry in b.cache)


def test_the_dense_model_is_sent_if_it_is_cheapest():
    b = broadcasts("identity", cache_bytes=10**6)
    advance(b, 2)
    assert b.download(b.first).form == DENSE


def test_the_cheapest_of_the_three_forms_is_chosen():
    for spec, spread, rounds in [
        ("topk:density=1%", 25, 6),
        ("stc:density=5%", NUMEL, 40),
        ("stc:density=1%", NUMEL, 4),
    ]:
        b = broadcasts(spec, cache_bytes=10**6)
        advance(b, rounds, spread)
        frames = sum(len(entry.frame) for entry in b.cache)
        assert b.download(b.first).bytes <= min(frames, b.dense().bytes)


def test_a_client_older_than_the_cache_gets_the_dense_model():
    b = broadcasts("stc:density=1%", cache_bytes=60)
    advance(b, 5)
    assert len(b.cache) < 5
    assert b.download(b.first).form == DENSE
    assert b.download("no such version").form == DENSE


@for_each(
    "spec, spread",
    [("topk:density=1%", 20), ("stc:density=5%", 150), ("stc:density=1%", NUMEL), ("fp16", 20)],
)
def test_downloads_do_not_depend_on_earlier_requests(spec, spread):
    asked = broadcasts(spec, cache_bytes=10**6)
    advance(asked, 9, spread)
    versions = [entry.base for entry in asked.cache]
    forms = set()
    for version in versions[3:] + versions[:3][::-1]:
        alone = broadcasts(spec, cache_bytes=10**6)
        advance(alone, 9, spread)
        assert asked.download(version) == alone.download(version)
        forms.add(asked.download(version).form)
    assert forms == {FRAMES, OVERWRITE} or spec != "topk:density=1%"


def test_a_broadcast_is_decoded_only_once_in_a_round(monkeypatch):
    b = broadcasts("topk:density=1%", cache_bytes=1000)
    advance(b, 12, spread=20)
    opened, open = [], type(b.codec).open
    monkeypatch.setattr(
        type(b.codec),
        "open",
        lambda codec, frame, *given: (opened.append(frame), open(codec, frame, *given))[1],
    )
    for entry in [*b.cache][::-1]:
        b.download(entry.base)
    assert sorted(opened) == sorted(entry.frame for entry in b.cache)


def test_a_client_that_is_up_to_date_downloads_nothing():
    b = broadcasts("stc")
    advance(b, 2)
    assert (b.download(b.version).form, b.download(b.version).bytes) == (UP_TO_DATE, 0)


def test_versions_are_a_chain_over_the_initial_weights_and_every_broadcast():
    b = broadcasts("stc")
    advance(b, 3)
    version = b.first
    for entry in b.cache:
        assert entry.base == version
        version = next_version(version, entry.frame)
    assert b.version == version


def test_the_downlink_memory_keeps_the_part_that_a_broadcast_omits():
    b = broadcasts("stc:density=1%")
    start, total = b.weights.clone(), torch.zeros(NUMEL)
    for round in range(5):
        update = torch.randn(NUMEL, generator=torch.Generator().manual_seed(round))
        total += update
        b.publish(b.prepare(round, update, 0))
    torch.testing.assert_close(b.weights - start + b.memory.residual, total, rtol=1e-4, atol=1e-4)


def test_a_download_from_an_older_version_is_correct():
    for spread in (20, NUMEL):
        b = broadcasts("topk:density=1%")
        copy = replica(b)
        advance(b, 6, spread)
        copy.apply(assignment(b, b.first))
        advance(b, 6, spread)
        copy.apply(assignment(b, b.first))
        assert torch.equal(copy.weights, b.weights)


def test_a_client_whose_version_is_not_in_the_download_asks_for_the_dense_model():
    b = broadcasts("stc:density=1%")
    advance(b, 1)
    later = b.version
    advance(b, 2)
    copy = replica(b)
    untouched = copy.weights.clone()
    with pytest.raises(NeedDense):
        copy.apply(assignment(b, later))
    assert torch.equal(copy.weights, untouched)
    dense = b.dense()
    copy.apply(
        Assignment(1, "train", 0, dense.form, "", b.version, b.fingerprint, dense.frames, "")
    )
    assert torch.equal(copy.weights, b.weights)


def test_a_wrong_fingerprint_is_detected_and_the_dense_model_repairs_the_weights():
    b = broadcasts("stc:density=1%")
    copy = replica(b)
    copy.weights[3] += 1  # an error of the client's memory
    advance(b, 1)
    with pytest.raises(NeedDense, match="hash of the client's weights"):
        copy.apply(assignment(b, b.first))
    dense = b.dense()
    copy.apply(
        Assignment(1, "train", 0, dense.form, "", b.version, b.fingerprint, dense.frames, "")
    )
    assert torch.equal(copy.weights, b.weights)
