"""The virtual network: the links of clients, the duration of exchanges, absences, and profiles in files."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import spec
from fedcomp.errors import ConfigError, SpecError
from fedcomp.messages import Assignment
from fedcomp.sim.network import (
    COLUMNS,
    LIMITS,
    NETWORKS,
    AbsenceModel,
    Network,
    Profiles,
    Uniform,
    draw_profiles,
    is_file,
    parse_network,
    read_profiles,
)
from fedcomp.sim.timing import VirtualClock, step_counter
from fedcomp.strategies.base import ClientAlgorithm, DataPartition
from fedcomp.training.local_sgd import LocalSGD, plan_batches

NEUTRAL_OPTIONS = {
    "up": 1000.0,
    "down": 4000.0,
    "latency": 0.5,
    "step": 0.25,
    "absent": 0.0,
    "stretch": 600.0,
    "stall": 0.0,
    "factor": 4.0,
    "swing": 0.0,
}


def profiles(clients: int = 4, **changes) -> Profiles:
    return Profiles(
        **{
            name: np.broadcast_to(np.asarray(value, float), clients).copy()
            for name, value in (NEUTRAL_OPTIONS | changes).items()
        }
    )


# Specs.


@for_each(
    "text, seconds",
    [
        ("50ms", 0.05),
        ("20s", 20.0),
        ("1.5min", 90.0),
        ("2 h", 7200.0),
        ("1d", 86400.0),
        ("0.5", 0.5),
        ("0", 0.0),
        ("1/4s", 0.25),
    ],
)
def test_valid_times_are_parsed(text, seconds):
    assert spec.parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@for_each("text", ["", "s", "-1s", "1x", "ms", "1e400", "1_0s", "nan"])
def test_invalid_times_are_refused(text):
    with pytest.raises(ValueError):
        spec.parse_duration(text)


def test_a_spec_sets_the_options_of_a_network():
    kind = parse_network(
        "uniform:up=100kB,down=1MB,latency=50ms,step=20ms,absent=5%,stretch=10min,slow=1/10"
    )
    assert kind == Uniform(100e3, 1e6, 0.05, 0.02, 0.0, 0.05, 600.0, 0.1)
    assert all(parse_network(name) == cls() for name, cls in NETWORKS.items()) and {
        f.name for f in dataclasses.fields(Uniform)
    } == set(LIMITS)


@for_each(
    "text, message",
    [
        ("mobil", "unknown network 'mobil'; did you mean 'mobile'"),
        ("mobile:upp=3", "network 'mobile' has no option 'upp'; did you mean 'up'"),
        (
            "uniform:up=1MB/s",
            "up cannot be '1MB/s'; give bytes per second, such as 100kB or 1MB, without /s",
        ),
        ("uniform:up=fast", "up cannot be 'fast'; give bytes per second, such as 100kB"),
        ("uniform:latency=5kB", "latency cannot be '5kB'; give a time, such as 50ms or 10min"),
        ("uniform:absent=95%", "absent is 0.95; give 0 to 0.9"),
        ("uniform:stretch=1s", "stretch is 1; give 5 to 1e"),
        ("uniform:factor=0.5", "factor is 0.5; give 1 to"),
        ("mobile+fixed", r"no second part \(\+…\); leave out '@' and '\+', and name one network"),
        ("mobile@layer", "a network has no scope"),
    ],
)
def test_invalid_specs_raise_an_error(text, message):
    with pytest.raises(SpecError, match=message):
        parse_network(text)


def test_drawn_profiles_depend_only_on_seed_and_network():
    kind = parse_network("lognormal:slow=20%")
    assert (
        draw_profiles(kind, 50, 1).fingerprint
        == draw_profiles(kind, 50, 1).fingerprint
        != draw_profiles(kind, 50, 2).fingerprint
    )
    assert (
        draw_profiles(kind, 50, 1).fingerprint
        != draw_profiles(parse_network("lognormal"), 50, 1).fingerprint
    )


def test_values_of_a_spec_are_medians_and_spread_is_the_log_deviation():
    found = draw_profiles(
        parse_network("lognormal:up=250kB,down=2MB,latency=40ms,step=10ms,spread=0.5"), 40_000, 3
    )
    for name, median in (("up", 250e3), ("down", 2e6), ("latency", 0.04), ("step", 0.01)):
        values = getattr(found, name)
        assert statistics.median(values) == pytest.approx(median, rel=0.03)
        assert np.log(values).std() == pytest.approx(0.5, rel=0.03)
    assert np.allclose(found.down / found.up, 8)  # one factor for both directions
    alike = draw_profiles(parse_network("uniform"), 10, 3)
    assert all(len(set(getattr(alike, name))) == 1 for name in COLUMNS)


def test_a_fraction_of_the_clients_is_always_slow():
    found = draw_profiles(parse_network("uniform:step=1s,slow=25%,factor=6"), 4000, 0)
    assert set(found.step) == {1.0, 6.0} and np.mean(found.step == 6.0) == pytest.approx(
        0.25, abs=0.03
    )


# Durations.


def test_the_duration_of_an_exchange_follows_the_formula():
    network = Network(profiles(), seed=0)
    assert network.exchange_s(1, 7, 6000, 3, 500) == 0.5 + 6000 / 4000 + 3 * 0.25 + 500 / 1000 + 0.5
    assert network.exchange_s(1, 7, 0, 0, 0) == 1.0


def test_step_times_swing_and_stall_from_round_to_round():
    network = Network(profiles(swing=0.5, stall=0.25, factor=10.0, step=1.0), seed=0)
    took = np.array(
        [network.compute_s(client, round, 2) for round in range(200) for client in range(4)]
    )
    assert took.min() >= 1.0 and ((took <= 3.0) | (took >= 10.0)).all()
    assert np.mean(took >= 10.0) == pytest.approx(0.25, abs=0.06)
    assert network.compute_s(2, 5, 2) == Network(
        profiles(swing=0.5, stall=0.25, factor=10.0, step=1.0), seed=0
    ).compute_s(2, 5, 2)
    assert network.compute_s(2, 5, 0) == 0.0


@for_each(
    "sgd",
    [
        LocalSGD(steps=7, batch_size=3),
        LocalSGD(epochs=2, batch_size=3),
        LocalSGD(epochs=3, batch_size=50),
    ],
)
def test_the_counted_steps_equal_the_planned_batches(sgd):
    shards = [np.arange(n) for n in (5, 12, 1)]
    steps = step_counter(ClientAlgorithm(), sgd, shards)
    for client, shard in enumerate(shards):
        asked = Assignment(1, "train", client, "up-to-date", "", "", "", [], "")
        assert steps(asked) == len(plan_batches(sgd, shard, 0, 1, client))
        assert steps(dataclasses.replace(asked, phase="tally")) == 0


def test_a_client_with_several_partitions_takes_the_steps_of_all():
    class Parts(ClientAlgorithm):
        def partitions(self, assignment):
            return DataPartition(0, (0, 1)), DataPartition(1, (2,))

    shards, asked = (
        [np.arange(n) for n in (5, 12, 4)],
        Assignment(1, "train", 0, "up-to-date", "", "", "", [], ""),
    )
    assert step_counter(Parts(), LocalSGD(epochs=1, batch_size=4), shards)(asked) == 5 + 1
    assert step_counter(Parts(), LocalSGD(steps=3), shards)(asked) == 6


# The clock.


def test_exchange_times_start_at_zero_and_round_times_accumulate():
    clock = VirtualClock()
    clock.begin(0.3)
    clock.go_to(0.1)
    clock.go_to(0.05)
    assert clock.now() == 0.1 and clock.limit_s == 0.3
    clock.begin(None)
    assert clock.now() == 0.0 and clock.limit_s is None and clock.time_s == 0.1
    clock.go_to(0.7)
    assert clock.take() == 0.1 + 0.7 and clock.take() == 0.0
    clock.wait(2.0)
    clock.move_to(5.0)
    assert clock.take() == 5.0 - (0.1 + 0.7) and clock.time_s == 5.0


# AbsenceModel.


def test_clients_are_absent_for_their_fraction_of_the_time_in_whole_periods():
    absences = AbsenceModel(np.array([0.3, 0.0, 0.1]), np.array([20.0, 20.0, 50.0]), seed=4)
    moments = np.arange(0, 25_000, 5.0) + 0.01
    absent = np.array([absences.absent_at(t) for t in moments])
    assert absent.mean(0) == pytest.approx([0.3, 0.0, 0.1], abs=0.04)
    for client, stretch in ((0, 20), (2, 50)):
        edges = np.flatnonzero(np.diff(absent[:, client].astype(int))) + 1
        lengths = np.diff(edges) * 5
        assert len(lengths) > 50 and all(
            abs(n / stretch - round(n / stretch)) * stretch <= 5 for n in lengths
        )
    assert [absences.is_absent(client, 123.4) for client in range(3)] == list(
        absences.absent_at(123.4)
    )


@settings(max_examples=40)
@given(
    client=st.integers(0, 2),
    since=st.floats(0, 5000),
    length=st.floats(0, 300),
    grace=st.floats(5, 40),
)
def test_first_absence_agrees_with_sampled_times(client, since, length, grace):
    absences = AbsenceModel(np.array([0.4, 0.0, 0.8]), np.array([20.0, 5.0, 7.0]), seed=1)
    left = absences.first_absence_s(client, since, since + length)
    seen = [t for t in np.linspace(since, since + length, 80) if absences.is_absent(client, t)]
    assert (left is not None) or not seen
    if left is not None:
        assert since <= left <= since + length and absences.is_absent(client, left + 1e-6)
        assert not any(t < left - 1e-6 for t in seen)
    lost_s = absences.lost_at_s(client, since, since + length, grace)
    assert lost_s is None or (absences.is_absent(client, lost_s) and lost_s >= left + grace)


@settings(max_examples=30)
@given(st.floats(0, 1e6))
def test_no_client_leaves_or_returns_before_the_next_change(time_s):
    absences = AbsenceModel(np.array([0.5, 0.5, 0.0]), np.array([30.0, 11.0, 600.0]), seed=2)
    until = absences.next_change_s(time_s)
    assert time_s < until <= time_s + 11.0 + 1e-6
    for t in np.linspace(time_s, until, 7)[:-1]:
        assert (absences.absent_at(t) == absences.absent_at(time_s)).all()


def test_without_absences_there_is_no_next_change():
    absences = AbsenceModel(np.zeros(3), np.full(3, 600.0), seed=0)
    assert absences.next_change_s(5.0) == math.inf and absences.first_absence_s(1, 0.0, 1e9) is None


# Files.


def written(tmp_path, text: str) -> str:
    path = tmp_path / "clients.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_has_the_values_of_each_client(tmp_path):
    lines = (
        "down,client, up,step,absent,stretch",
        "1MB,1,30kB,20ms,5%,1min",
        "",
        "500,0,1/2kB,0.5,0,5",
        "9,7,9,9,0,9",
    )
    found = read_profiles(written(tmp_path, "\n".join(lines)), 2)
    assert (
        found.up.tolist() == [500.0, 30e3]
        and found.down.tolist() == [500.0, 1e6]
        and found.step.tolist() == [0.5, 0.02]
    )
    assert (
        found.latency.tolist() == [0.0, 0.0]
        and found.absent.tolist() == [0.0, 0.05]
        and found.stretch.tolist() == [5.0, 60.0]
    )
    assert found.factor.tolist() == [4.0, 4.0] and found.swing.tolist() == found.stall.tolist() == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'client'; add it, as in client,up,down"),
        ("\ufeff\n , \n", "has no column 'client'"),
        ("\nclient,up\n", "line 2 has no column 'down'"),
        ("client;up;down\n0;1;1\n", "line 1: unknown column 'client;up;down'"),
        ("client,up\n", "line 1 has no column 'down'"),
        ("client,up,down,latenzy\n", "line 1: unknown column 'latenzy'; did you mean 'latency'"),
        ("client,up,down,up\n", "line 1 has 2 columns 'up'; keep one"),
        ("client,up,down\n0,1\n", "line 2 has 2 cells; give 3, one for each of client, up, down"),
        (
            "client,up,down\n0,1,1\none,1,1\n",
            "line 3, column client: cannot be 'one'; give a whole number",
        ),
        (
            "client,up,down\n-1,1,1\n",
            "line 2, column client: the id is -1; give a whole number of at least 0",
        ),
        (
            "client,up,down\n0,1,1\n0,1,1\n",
            "line 3, column client: client 0 is in line 2 already; remove one of the lines",
        ),
        (
            "client,up,down\n0,1,1\n1,fast,1\n",
            "line 3, column up: cannot be 'fast'; give bytes per second, such as 100kB",
        ),
        (
            "client,up,down,latency\n0,1,1,soon\n",
            "line 2, column latency: cannot be 'soon'; give a time",
        ),
        (
            "client,up,down,absent\n0,1,1,95%\n",
            "line 2, column absent: the value is 0.95; give 0 to 0.9",
        ),
        (
            "client,up,down\n0,1,1\n2,1,1\n",
            "no line for client 1, but the clients are 0 to 1; add the line, or give fewer --clients",
        ),
        ('client,up,down\n0,"1,1\n', "is not a CSV file in UTF-8"),
    ],
)
def test_errors_in_a_file_name_line_and_column(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_profiles(written(tmp_path, text), 2)


def test_a_file_that_cannot_be_read_raises_a_config_error(tmp_path):
    with pytest.raises(
        ConfigError, match="cannot be read .No such file or directory.; give a readable CSV file"
    ):
        read_profiles(str(tmp_path / "none.csv"), 2)
    (tmp_path / "bytes.csv").write_bytes(b"client,up,down\n\xff")
    with pytest.raises(ConfigError, match="is not a CSV file in UTF-8"):
        read_profiles(str(tmp_path / "bytes.csv"), 2)
    assert (
        is_file("clients.csv")
        and is_file("nets/clients")
        and not is_file("mobile")
        and not is_file("uniform:up=1kB")
    )
    assert (
        not is_file("uniform:up=1MB/s")
        and not is_file("lognormal:spread=1/2")
        and is_file("uniform/clients")
        and is_file("c:/net.csv")
    )


def test_a_byte_order_mark_is_ignored(tmp_path):
    lines = "client,up,down\r\n0,1kB,2kB\r\n"
    assert (
        read_profiles(written(tmp_path, "\ufeff" + lines), 1).fingerprint
        == read_profiles(written(tmp_path, lines), 1).fingerprint
    )


def test_rates_and_latencies_of_the_named_networks():
    """Bits per second up and down, and seconds one way, as in the sources that the module names."""
    expected = {
        "fixed": (45.74e6, 85.73e6, 0.0105),
        "mobile": (11.22e6, 35.96e6, 0.02),
        "lte-m": (1e6, 1e6, 0.05),
        "lora": (5470, 5470, 1.0),
    }
    for name, (up, down, latency) in expected.items():
        network = NETWORKS[name]()
        assert (8 * network.up, 8 * network.down, network.latency) == (up, down, latency), name
