"""The report: one self-contained page with the numbers of every run."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import pytest
from cases import for_each
from command_line import fedcomp

from fedcomp import RunConfig
from fedcomp.cli.report import svg
from fedcomp.cli.report.charts import BYTES
from fedcomp.cli.report.page import html
from fedcomp.runs import groups, load
from fedcomp.sim import simulate

TASK = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
ATTACK = {"strategy": "vote", "uplink": "sign", "memory": "none", "downlink": "efsign"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the folder of a run with suspected clients and rejected updates."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    simulate(
        RunConfig(
            task=TASK,
            clients=6,
            rounds=3,
            participation=1.0,
            lr=0.1,
            attack="inverted:1+malformed:1",
            out=str(folder),
            **ATTACK,
        )
    )
    return folder


@pytest.fixture(scope="module")
def run(base):
    """Return the same run without the attack, the rejections and the suspicions."""
    run = load(base)
    records = [replace(r, rejections=(), warnings=(), suspicion={}) for r in run.records]
    summary = replace(run.summary, rejections=(), warnings=())
    options = run.options | {"attack": None}
    return replace(run, records=tuple(records), summary=summary, options=options)


def like(run, accuracy, total, *, rounds=4, loss=0.5, over=True, hours=False, **options):
    """Return a run with other options that reached an accuracy with `total` bytes up, in equal steps."""
    records = [
        replace(
            run.records[0],
            round=r,
            accuracy=None if accuracy is None else accuracy * r / rounds,
            loss=loss / r,
            uplink_bytes=total // rounds,
            downlink_bytes=0,
            dense_uplink_bytes=10**6 // rounds,
            dense_downlink_bytes=0,
            **({"simulated_hours": r / 2} if hours else {}),
        )
        for r in range(1, rounds + 1)
    ]
    return replace(
        run,
        folder=Path("runs", "_".join(map(str, options.values())) or "only"),
        options=run.options | {"uplink": "sign"} | options,
        records=tuple(records),
        summary=replace(run.summary, accuracy=accuracy, loss=loss / rounds) if over else None,
    )


def page(*runs, target=None, failed=None):
    return html(groups(runs), target, failed)


def charts(text):
    """Return title → chart of a page, as XML elements."""
    found = [
        ElementTree.fromstring(svg) for svg in re.findall(r'<svg class="chart".*?</svg>', text)
    ]
    return {f"{chart.find('title').text} #{i}": chart for i, chart in enumerate(found)}


def legend(text):
    found = re.search(r'<ul class="legend.*?</ul>', text)
    return re.findall(r"<span>(.*?)</span>", found[0].replace("<wbr>", "")) if found else []


def verdict(text):
    output = re.search(r'<div class="verdict">(.*?)</div>', text)[1]
    return (
        unescape(re.sub("<[^>]*>", "", output.replace("</p>", "\n"))).replace("\xa0", " ").strip()
    )


def copies(base, root):
    """Return six finished run folders: two codecs with three seeds each."""
    for i, (uplink, seed) in enumerate((u, s) for u in ("sign", "identity") for s in range(3)):
        folder = root / f"{uplink}-{seed}"
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns("checkpoint"))
        config = (folder / "config.toml").read_text()
        config = config.replace('uplink = "sign"', f'uplink = "{uplink}"')
        (folder / "config.toml").write_text(config.replace("seed = 0", f"seed = {seed}"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines[-1] |= {"accuracy": 0.5 + i / 20, "uplink_bytes": 1000 * (i + 1)}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {
            "accuracy": lines[-1]["accuracy"],
            "uplink_bytes": sum(line["uplink_bytes"] for line in lines),
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        yield folder


def test_final_points_have_the_values_of_the_summaries(base, tmp_path):
    folders = list(copies(base, tmp_path))
    done = fedcomp("report", *folders, "--out", tmp_path / "new" / "place")
    written = tmp_path / "new" / "place" / "report.html"
    assert (done.exit_code, done.stdout) == (0, f"{written}\n")
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]
    text = written.read_text(encoding="utf-8")
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    expected = [
        (
            mean(s["uplink_bytes"] + s["downlink_bytes"] for s in seeds),
            mean(s["accuracy"] for s in seeds),
        )
        for seeds in (summaries[:3], summaries[3:])
    ]
    chart = charts(text)["Accuracy against bytes #0"]
    points = [g for g in chart.iter("g") if "data-bytes" in g.attrib]
    values = [(float(g.get("data-bytes")), float(g.get("data-accuracy"))) for g in points]
    assert values == [(pytest.approx(sent), pytest.approx(accuracy)) for sent, accuracy in expected]
    # The positions of the points, converted to values by the labels of the axis.
    ticks = [
        (float(t.text.removesuffix(" %")) / 100, float(t.get("y")) - 4)
        for t in chart.iter("text")
        if t.get("text-anchor") == "end" and (t.text or "").endswith(" %")
    ]
    (a, at_a), (b, at_b) = ticks[0], ticks[-1]
    for point, (_, accuracy) in zip(points, expected, strict=True):
        at = float(point.find("circle").get("cy"))
        assert at == pytest.approx(at_a + (accuracy - a) / (b - a) * (at_b - at_a), abs=0.2)
    assert len(chart.findall(".//*[@class='whisker']")) == 2, (
        "the chart must show the spread over seeds"
    )
    assert all(str(folder) in text for folder in folders)


def test_the_page_fetches_nothing_and_has_all_parts_in_order(base):
    text = page(load(base), replace(load(base), options=load(base).options | {"lr": 0.2}))
    assert "<script" not in text and "@import" not in text and "url(" not in text
    assert "http" not in text
    assert all(link.startswith("#m") for link in re.findall(r'(?:href|src)="(.*?)"', text))
    parts = ['class="verdict"', "Accuracy against bytes", 'class="legend"', "Accuracy over rounds"]
    parts += ["Test loss over rounds", "<h2>Results", "<h2>Settings", "<h2>Rejected updates"]
    parts += ["<h2>Suspected clients", "<h2>Folders"]
    assert sorted(parts, key=text.index) == parts and "inverted:1" in text
    assert "prefers-color-scheme: dark" in text and "font-size: 12px" in text
    assert svg.WIDTH <= 366, "a unit of the chart must be a pixel on a screen of 390 pixels"


def test_each_partition_has_a_front_and_all_charts_share_a_legend(run):
    values = {
        ("iid", "sign"): (0.6, 4000),
        ("iid", "identity"): (0.9, 400_000),
        ("classes:2", "sign"): (0.5, 5000),
        ("classes:2", "identity"): (0.4, 500_000),
    }
    runs = [
        like(run, accuracy + seed / 100, sent, partition=partition, uplink=uplink, seed=seed)
        for (partition, uplink), (accuracy, sent) in values.items()
        for seed in (0, 1, 2)
    ]
    text = page(*runs)
    assert legend(text) == ["sign", "identity", "Pareto front"]
    drawn = charts(text)
    iid = drawn["Accuracy against bytes, partition iid #0"]
    skewed = drawn["Accuracy against bytes, partition classes:2 #1"]
    assert [len(chart.findall(".//*[@class='ring']")) for chart in (iid, skewed)] == [2, 1]
    assert [len(chart.findall("*[@class='front']")) for chart in (iid, skewed)] == [1, 1]
    assert len(drawn) == 2 + 2 * 4, "each partition must have four charts of curves"
    assert verdict(text).splitlines() == [
        "partition iid: sign reaches 61.0 ± 1.0 % with 4.00 kB, 250 times less than in float32; identity is the most "
        "accurate at 91.0 ± 1.0 % with 400 kB.",
        "partition classes:2: sign is the most accurate at 51.0 ± 1.0 % with 5.00 kB, 200 times less than in float32, "
        "the fewest bytes of all.",
    ]


def test_runs_with_different_partitions_are_drawn_together_without_a_front(run):
    text = page(like(run, 0.9, 4000), like(run, 0.5, 4000, partition="classes:2"))
    assert legend(text) == ["iid", "classes:2"] and len(charts(text)) == 5
    assert not any(c.findall(".//*[@class='front']") for c in charts(text).values())
    assert verdict(text).startswith("The runs learn different problems: iid reaches 90.0 %")


def test_a_single_run_has_a_verdict_and_curves(run):
    text = page(like(run, 0.8, 4000), target=0.4)
    assert verdict(text) == (
        "The run reaches 80.0 % in 4 rounds with 4.00 kB, 250 times less than in float32. "
        "It reaches 40 % in 2 rounds with 2.00 kB."
    )
    assert legend(text) == [] and len(charts(text)) == 4
    assert len(charts(page(like(run, 0.8, 4000, hours=True)))) == 6
    seeds = page(like(run, 0.8, 4000), like(run, 0.7, 4000, seed=1), target=0.9)
    assert verdict(seeds).startswith("The mean of 2 seeds reaches 75.0 ± 5.0 % in 4 rounds")
    assert verdict(seeds).endswith("It does not reach 90 %.") and 'class="band"' in seeds


def test_the_verdict_prefers_the_cheapest_line_close_to_the_best(run):
    runs = [
        like(run, 0.881, 900_000, uplink="stc"),
        like(run, 0.911, 5_000_000, uplink="topk"),
        like(run, 0.6, 1000, uplink="sign"),
        like(run, 0.99, 1000, uplink="identity"),
    ]
    failed = {str(runs[-1].folder): "no memory left"}
    assert verdict(page(*runs, failed=failed)) == (
        "stc reaches 88.1 % with 900 kB, 1.11 times less than in float32; topk is the most accurate at 91.1 % with "
        "5.00 MB. identity: failed."
    )
    assert verdict(page(*runs[:3], target=0.65)) == (
        "stc reaches 65 % with the fewest bytes, 675 kB in 3 rounds, and 1 of 3 configurations never reached it; topk is the most "
        "accurate at 91.1 % with 5.00 MB, 5.00 times more than in float32."
    )
    assert verdict(page(*runs[:2], target=0.95)).startswith(
        "No configuration reaches 95 %; topk is the"
    )


def test_the_verdict_prefers_fewer_bytes_at_equal_accuracy(run):
    output = verdict(page(like(run, 0.9, 8000, uplink="stc"), like(run, 0.9, 4000, uplink="topk")))
    assert output.startswith("topk is the most accurate at 90.0 % with 4.00 kB")


def test_the_byte_axis_has_the_sum_of_bytes_up_and_down_until_each_round(run):
    records = [replace(r, uplink_bytes=100, downlink_bytes=10) for r in run.records]
    assert BYTES.of(replace(run, records=tuple(records))).tolist() == [110, 220, 330]


def test_the_verdict_compares_with_the_dense_line(run):
    dense = {"uplink": "identity", "downlink": "identity", "memory": "none"}
    dense |= {"downlink_memory": "none", "strategy": "average"}
    text = page(
        like(run, 0.88, 100_000, strategy="average", downlink_memory="none"),
        like(run, 0.91, 2_000_000, **dense),
    )
    assert verdict(text) == (
        "sign, downlink efsign reaches 88.0 % with 100 kB, 20.0 times less than the uncompressed run; dense is the most accurate "
        "at 91.0 % with 2.00 MB."
    )


def test_a_task_without_accuracy_is_judged_by_its_loss(run):
    text = page(*(like(run, None, sent, loss=sent, uplink=f"u{sent}") for sent in (40, 4000)))
    points = re.findall(r'data-bytes="(.*?)" data-loss="(.*?)"', text)
    assert [tuple(map(float, point)) for point in points] == [(40, 10), (4000, 1000)]
    assert verdict(text).startswith("u40 is the best at a loss of 10.0000 with 40 B, 25000 times")
    assert not any("ccuracy" in title for title in charts(text))


def test_unfinished_failed_and_diverged_runs_are_reported(run):
    unfinished = like(run, 0.8, 4000, over=False)
    assert verdict(page(unfinished)).endswith("than in float32. Not finished.")
    nothing = page(replace(unfinished, records=()))
    assert verdict(nothing) == "No round is done yet. Not finished." and not charts(nothing)
    diverged = like(run, 0.1, 4000, loss=1e307, lr=2.0)
    diverged = replace(diverged, summary=replace(diverged.summary, loss=None))
    text = page(diverged, like(run, 0.8, 8000))
    assert "lr 2.0: diverged." in verdict(text) and 's0 c0 faint"' in text
    assert verdict(page(diverged, like(run, 0.8, 0, over=False))).startswith("No run succeeded.")


@for_each("name", ["<script>alert(1)</script>&", "a$x^2$ 日本", "long-" * 30])
def test_names_are_escaped_and_shown_unchanged(run, name):
    one = replace(like(run, 0.8, 4000, task=f"{name}.py:task"), folder=Path("runs", name))
    text = page(one, replace(one, options=one.options | {"uplink": name}))
    assert "<script" not in text and unescape(text).count(name) > 5
    assert charts(text)


def test_the_page_of_a_long_comparison_is_small(run):
    """Twenty alternatives of 1,000 rounds have different styles of lines."""
    one = like(run, 0.9, 10**6, rounds=1000)
    runs = [replace(one, options=one.options | {"lr": float(i)}) for i in range(20)]
    text = page(*runs)
    assert len(text) < 2_000_000
    swatches = re.findall(
        r'<li class="s s\d+ c(\d)">.*?(?:dasharray="(.*?)".*?)?href="#m(\d)"', text
    )
    assert len(swatches) == 20
    assert len({(dashes, marker) for _, dashes, marker in swatches}) == 20, (
        "lines must differ without colours"
    )


@for_each(
    "low, high, log, labels",
    [
        (0.0, 1.0, False, [0.0, 0.5, 1.0]),
        (900, 9_000_000, True, [1e3, 1e4, 1e5, 1e6, 1e7]),
        (3e4, 4e5, True, [5e4, 1e5, 2e5]),
        (5.0, 5.0, False, [4.8, 4.9, 5.0, 5.1, 5.2]),
        (1e-9, 1e30, True, None),
    ],
)
def test_scales_have_round_ticks_and_room_for_all_values(low, high, log, labels):
    axis = svg.Axis.around("bytes", [low, high], str, across=True, log=log)
    left, right = svg.LEFT, svg.WIDTH - svg.RIGHT
    assert left < axis(low) <= axis(high) < right
    ticks = axis.ticks(5)
    assert 2 <= len(ticks) <= 12
    assert all(left - 1e-6 <= axis(tick) <= right + 1e-6 for tick in ticks)
    assert labels is None or ticks == pytest.approx(labels)


def test_an_invalid_target_accuracy_is_refused(base, tmp_path):
    done = fedcomp("report", base, "--out", tmp_path / "out", "--target-accuracy", "101%")
    assert done.exit_code == 2 and "--target-accuracy" in done.stderr
    assert done.stderr.count("\n") == 1 and not any(tmp_path.iterdir())


def test_repeated_runs_and_an_invalid_out_are_refused_in_one_sentence(base, tmp_path):
    done = fedcomp("report", base, base / ".." / base.name, "--out", tmp_path)
    assert done.exit_code == 2 and "is given twice" in done.stderr
    (tmp_path / "file").write_text("")
    done = fedcomp("report", base, "--out", tmp_path / "file")
    assert done.exit_code == 2 and "give another --out" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_table_has_columns_for_the_metrics_of_a_task(run):
    one = like(run, 0.8, 4000)
    records = [replace(r, metrics={"worst_error": 0.25}) for r in one.records]
    assert re.search(r"worst_error</th>.*>0\.2500</td>", page(replace(one, records=tuple(records))))


def test_a_deployment_also_has_the_ratio_at_the_port(run):
    one = like(run, 0.8, 4000)
    assert "at the port" not in page(one)
    records = [replace(r, wire_bytes_in=9_000, wire_bytes_out=1_000) for r in one.records]
    shown = page(replace(one, records=tuple(records)))
    assert re.search(r"ratio at the port</th>.*>×250<.*>×25\.0</td>", shown)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_fits_a_phone_without_horizontal_scrolling(run, tmp_path):
    """In a frame of 390 pixels, the page is not wider than the frame, and texts of charts have at least 11 pixels."""
    runs = [like(run, 0.1 * i, 4000 * i, lr=1.0 * i, uplink="x" * 58) for i in range(1, 6)]
    measure = """<script>document.querySelector("iframe").onload = (event) => {
        const page = event.target.contentDocument;
        const heights = [...page.querySelectorAll(".chart text")].map(text => text.getScreenCTM().a * 12);
        document.title = [page.documentElement.scrollWidth, Math.floor(Math.min(...heights)), heights.length];
    }</script>"""
    text = page(*runs, failed={str(runs[0].folder): "its process was killed " * 10})
    frame = text.replace("&", "&amp;").replace('"', "&quot;")
    file = tmp_path / "frame.html"
    file.write_text(
        f'<iframe style="width:390px;height:800px;border:0" srcdoc="{frame}"></iframe>{measure}',
        encoding="utf-8",
    )
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, file.as_uri()], capture_output=True, text=True, timeout=100, check=True
    )
    width, letters, texts = map(
        int, re.search(r"<title>([\d,]+)</title>", done.stdout)[1].split(",")
    )
    assert width <= 390 and letters >= 11 and texts > 50
