import numpy as np
import pytest
import torch
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import spec as specs
from fedcomp.errors import ConfigError, SpecError
from fedcomp.tasks import Data
from fedcomp.tasks.data import data_from
from fedcomp.tasks.partition import PARTITIONERS, parse_partitioner, partition, partition_advice


def labelled(labels, groups=None) -> Data:
    targets = torch.as_tensor(np.asarray(labels))
    return Data(torch.zeros(len(targets), 1), targets, groups)


def unequal(n: int, classes: int = 10, seed: int = 0) -> np.ndarray:
    """Return `n` labels in random order, with classes of different sizes, about as in MNIST."""
    rng = np.random.default_rng(seed)
    share = 1 + 0.2 * np.sin(np.arange(classes))
    return rng.permutation(
        np.repeat(
            np.arange(classes),
            np.diff(np.round(np.cumsum([0, *share]) * n / share.sum()).astype(int)),
        )
    )


LABELS = unequal(1437)
DATA = labelled(LABELS, groups=np.array([f"role {i % 37}" for i in range(1437)]))


def classes_of(parts, labels=LABELS) -> np.ndarray:
    return np.array([len(np.unique(labels[part])) for part in parts])


def sizes_of(parts) -> np.ndarray:
    return np.array([len(part) for part in parts])


def entropy_of(parts, labels=LABELS) -> float:
    """Return the entropy of a client's labels in nats, averaged over the clients."""
    shares = [np.bincount(labels[part]) / len(part) for part in parts]
    return float(np.mean([-(s[s > 0] * np.log(s[s > 0])).sum() for s in shares]))


def assert_cover(parts, clients: int, n: int) -> None:
    assert len(parts) == clients and all(part.dtype == np.int64 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    assert min(len(part) for part in parts) >= 1


EVERY = [
    "iid",
    "classes:1",
    "classes:2",
    "classes:10",
    "shards:1",
    "shards:2",
    "shards:7",
    "dirichlet:0.001",
    "dirichlet:1e-300",
    "dirichlet:0.1",
    "dirichlet:1",
    "dirichlet:100",
    "dirichlet:1e300",
    "natural",
]


@for_each("clients", [10, 37, 200])
@for_each("spec", EVERY)
def test_every_example_has_one_client_and_every_client_has_an_example(spec, clients):
    if spec == "natural" and clients > 37:
        return
    parts = partition(spec, DATA, clients, seed=3)
    assert_cover(parts, clients, 1437)
    assert all((np.diff(part) > 0).all() for part in parts)


@for_each("spec", ["iid", "classes:1", "classes:10", "shards:1", "dirichlet:0.001", "dirichlet:1"])
def test_each_client_has_one_example_if_there_are_as_many_clients_as_examples(spec):
    assert (sizes_of(partition(spec, DATA, 1437, seed=0)) == 1).all()


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(-3, 4), min_size=1, max_size=40),
    clients=st.integers(1, 12),
    seed=st.integers(0, 5),
    spec=st.sampled_from(
        [
            "iid",
            "classes:1",
            "classes:2",
            "classes:3",
            "shards:1",
            "shards:3",
            "dirichlet:0.01",
            "dirichlet:5",
            "natural",
        ]
    ),
)
def test_small_data_sets_are_partitioned_or_refused_with_advice(labels, clients, seed, spec):
    data = labelled(labels, groups=np.array(labels))
    try:
        parts = partition(spec, data, clients, seed)
    except (ConfigError, SpecError) as error:
        assert "give" in str(error)
    else:
        assert_cover(parts, clients, len(labels))


@for_each("spec", ["iid", "classes:2", "shards:2", "dirichlet:0.1"])
def test_a_partition_depends_only_on_the_seed(spec):
    first, again, other = (partition(spec, DATA, 20, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_sizes_of_iid_clients_differ_by_at_most_one():
    sizes = sizes_of(partition("iid", DATA, 200, seed=0))
    assert sizes.max() - sizes.min() <= 1


@for_each("number", [1, 2, 5, 10])
@for_each("clients", [10, 45, 100])
def test_clients_have_exactly_the_given_number_of_classes_and_similar_sizes(number, clients):
    parts = partition(f"classes:{number}", DATA, clients, seed=1)
    assert (classes_of(parts) == number).all()
    sizes = sizes_of(parts)
    assert (
        sizes.max() <= 1.35 * 1437 / clients + number
        and sizes.min() >= 0.65 * 1437 / clients - number
    )


def test_the_number_of_clients_of_a_class_is_proportional_to_its_size():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    parts = partition("classes:1", labelled(labels), 100, seed=0)
    assert np.bincount([labels[part[0]] for part in parts]).tolist() == [60, 30, 10]
    assert (sizes_of(parts) == 10).all()
    labels = np.repeat([0, 1, 2], [700, 170, 130])
    parts = partition("classes:1", labelled(labels), 10, seed=0)
    assert np.bincount([labels[part[0]] for part in parts]).tolist() == [7, 2, 1]


def test_the_classes_of_a_client_are_random():
    parts = partition("classes:2", DATA, 200, seed=0)
    assert len({tuple(np.unique(LABELS[part])) for part in parts}) > 30


def test_clients_with_too_few_examples_have_one_class_per_example():
    parts = partition("classes:10", DATA, 200, seed=0)
    assert (classes_of(parts) == sizes_of(parts)).all() and sizes_of(parts).min() == 7


def test_shards_are_slices_of_the_examples_sorted_by_label():
    parts = partition("shards:2", DATA, 100, seed=0)
    sizes = sizes_of(parts)
    assert sizes.max() - sizes.min() <= 2
    assert classes_of(parts).max() <= 4 and 1.5 < classes_of(parts).mean() < 3


def test_a_smaller_alpha_makes_clients_more_heterogeneous():
    entropies = [
        entropy_of(partition(f"dirichlet:{alpha}", DATA, 10, seed=0))
        for alpha in (0.01, 0.1, 1, 100)
    ]
    assert entropies == sorted(entropies) and entropies[0] < 0.4 and entropies[-1] > 2.2


def test_dirichlet_rounding_favours_no_client():
    sizes = np.mean(
        [sizes_of(partition("dirichlet:1e300", DATA, 200, seed)) for seed in range(40)], axis=0
    )
    assert abs(sizes - 1437 / 200).max() < 2


def test_natural_partition_does_not_split_groups():
    groups = DATA.groups
    one_each = partition("natural", DATA, 37, seed=0)
    assert [set(groups[part]) for part in one_each] == [{name} for name in sorted(set(groups))]
    some_each = [set(groups[part]) for part in partition("natural", DATA, 10, seed=0)]
    assert sum(len(names) for names in some_each) == 37 and {len(names) for names in some_each} == {
        3,
        4,
    }


@pytest.mark.parametrize("make", [list, lambda sets: dict(zip("abc", sets, strict=True))])
@pytest.mark.parametrize(
    ("spec", "clients", "advice"),
    [
        ("natural", 3, ""),
        ("natural", 2, "data of 3 clients is divided among 2 clients"),
        ("iid", 3, "data of 3 clients is pooled and divided by --partition iid"),
    ],
)
def test_there_is_advice_if_the_data_of_clients_is_not_divided_by_client(
    make, spec, clients, advice
):
    sets = make([Data(torch.ones(n, 2), torch.zeros(n, dtype=torch.int64)) for n in (1, 2, 3)])
    warning = partition_advice(spec, data_from(sets), clients)
    assert advice in warning and bool(warning) == bool(advice)
    assert not warning or "give --partition natural --clients 3" in warning
    assert partition_advice(spec, Data(torch.ones(6, 2), torch.zeros(6)), clients) == ""


@for_each("spec", PARTITIONERS)
def test_parsing_inverts_formatting_of_a_partitioner(spec):
    made = parse_partitioner(spec if spec in ("iid", "natural") else f"{spec}:2")
    assert parse_partitioner(specs.format_spec(spec, made)) == made


FLOATS = Data(torch.zeros(30, 1), torch.zeros(30))
SEQUENCES = Data(torch.zeros(30, 1), torch.zeros(30, 5, dtype=torch.int64))


@for_each(
    "spec, data, clients, kind, says",
    [
        ("class:2", DATA, 10, SpecError, "unknown partition 'class'; did you mean 'classes'"),
        ("dirichlet=0.1", DATA, 10, SpecError, "options follow a colon; write dirichlet:0.1$"),
        ("classes", DATA, 10, SpecError, "needs per_client; write classes:per_client=2"),
        ("dirichlet", DATA, 10, SpecError, "needs alpha; write dirichlet:alpha=0.1"),
        ("classes:two", DATA, 10, SpecError, "give a whole number"),
        ("iid:3", DATA, 10, SpecError, "has no option"),
        (
            "iid+natural",
            DATA,
            10,
            SpecError,
            r"a partition has no scope \(@…\) and no second part \(\+…\); leave out '@' and '\+', and name one partition",
        ),
        (
            "classes:2@layer",
            DATA,
            10,
            SpecError,
            r"a partition has no scope \(@…\) and no second part \(\+…\); leave out '@' and '\+', and name one partition",
        ),
        (
            "classes:0",
            DATA,
            10,
            SpecError,
            "^--partition classes:0: per_client is 0; give at least 1",
        ),
        ("shards:-1", DATA, 10, SpecError, "per_client is -1; give at least 1"),
        ("dirichlet:0", DATA, 10, SpecError, "give a number above 0"),
        (
            "iid",
            DATA,
            2000,
            ConfigError,
            "^--clients 2000 exceeds the 1437 examples of digits; give at most 1437$",
        ),
        ("dirichlet:0.1", DATA, 1438, ConfigError, "give at most 1437"),
        (
            "classes:11",
            DATA,
            10,
            SpecError,
            "classes:11: the data has only 10 classes; give at most classes:10",
        ),
        (
            "classes:2",
            DATA,
            4,
            SpecError,
            "^--partition classes:2: --clients 4 would leave out some of the 10 classes; give at least classes:3 or --clients 5",
        ),
        (
            "shards:700",
            DATA,
            10,
            SpecError,
            "requires 7000 shards, but the data has 1437 examples; give at most shards:143",
        ),
        (
            "natural",
            labelled(LABELS),
            10,
            SpecError,
            "^--partition natural: the task's data has no groups; name a column",
        ),
        (
            "natural",
            labelled(LABELS, np.zeros(3)),
            10,
            SpecError,
            "has 1437 examples, but 3 groups; give one group per example",
        ),
        ("natural", DATA, 38, SpecError, "--clients 38 exceeds the 37 groups .* give at most 37"),
        (
            "classes:2",
            FLOATS,
            10,
            SpecError,
            r"the targets are float32 \[30\], but .* one integer per example as its class; give iid",
        ),
        ("dirichlet:0.1", FLOATS, 10, SpecError, r"--partition dirichlet:0.1: .* float32"),
        ("shards:2", SEQUENCES, 10, SpecError, r"--partition shards:2: .* int64 \[30, 5\]"),
    ],
)
def test_an_unsuitable_partition_is_refused_with_the_fix(spec, data, clients, kind, says):
    with pytest.raises(kind, match=says):
        partition(spec, data, clients, seed=0, name="digits")


def test_iid_partitions_data_with_targets_of_any_shape():
    assert_cover(partition("iid", SEQUENCES, 7, seed=0), 7, 30)
    assert_cover(partition("iid", FLOATS, 7, seed=0), 7, 30)


@pytest.fixture(scope="module")
def flower_parts():
    """Return a function that partitions DATA with flwr-datasets: (name of the partitioner, its options) → indices of each client."""
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"label": LABELS, "group": DATA.groups, "row": np.arange(len(LABELS))}
    )

    def parts(name: str, **options):
        made = getattr(partitioners, name)(**options)
        made.dataset = table
        return [
            np.asarray(made.load_partition(i)["row"], np.int64) for i in range(made.num_partitions)
        ]

    return parts


@pytest.mark.slow
def test_iid_is_similar_to_flowers_partitioner(flower_parts):
    theirs = flower_parts("IidPartitioner", num_partitions=20)
    ours = partition("iid", DATA, 20, seed=0)
    assert sorted(sizes_of(ours)) == sorted(sizes_of(theirs))
    assert abs(entropy_of(ours) - entropy_of(theirs)) < 0.05


@pytest.mark.slow
def test_natural_is_identical_to_flowers_partitioner(flower_parts):
    theirs = flower_parts("NaturalIdPartitioner", partition_by="group")
    assert all(
        np.array_equal(a, np.sort(b))
        for a, b in zip(partition("natural", DATA, 37, seed=0), theirs, strict=True)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Specifying null_placement:FutureWarning"
)  # datasets 4.8 under pyarrow 25 and later
def test_shards_are_similar_to_flowers_partitioner(flower_parts):
    theirs = flower_parts(
        "ShardPartitioner", num_partitions=20, partition_by="label", num_shards_per_partition=2
    )
    ours = partition("shards:2", DATA, 20, seed=0)
    assert abs(sizes_of(ours).mean() - sizes_of(theirs).mean()) < 3
    assert abs(classes_of(ours).mean() - classes_of(theirs).mean()) < 0.6
    assert abs(entropy_of(ours) - entropy_of(theirs)) < 0.2


@pytest.mark.slow
def test_classes_are_similar_to_flowers_partitioner(flower_parts):
    theirs = flower_parts(
        "PathologicalPartitioner",
        num_partitions=20,
        partition_by="label",
        num_classes_per_partition=2,
        class_assignment_mode="deterministic",
    )
    ours = partition("classes:2", DATA, 20, seed=0)
    assert (classes_of(ours) == 2).all() and (classes_of(theirs) == 2).all()
    assert (
        sizes_of(ours).sum() == sizes_of(theirs).sum()
        and sizes_of(ours).std() <= sizes_of(theirs).std()
    )
    assert abs(entropy_of(ours) - entropy_of(theirs)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_is_similar_to_flowers_partitioner(flower_parts, alpha):
    theirs = [
        flower_parts(
            "DirichletPartitioner",
            num_partitions=20,
            partition_by="label",
            alpha=alpha,
            min_partition_size=0,
            seed=seed,
        )
        for seed in range(4)
    ]
    ours = [partition(f"dirichlet:{alpha}", DATA, 20, seed) for seed in range(4)]
    for measure, tolerance in (
        (lambda p: sizes_of(p).std(), 0.25),
        (lambda p: classes_of(p).mean(), 0.1),
    ):
        a, b = (np.mean([measure(parts) for parts in many]) for many in (ours, theirs))
        assert abs(a - b) < tolerance * b
    filled = [[part for part in parts if len(part)] for parts in theirs]
    assert (
        abs(np.mean([entropy_of(p) for p in ours]) - np.mean([entropy_of(p) for p in filled]))
        < 0.12
    )
