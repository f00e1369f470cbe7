"""The text output: one aligned line for each round, warnings on standard error, and the verdict."""

from fedcomp.run_display import LineDisplay, how_to_load


def test_a_run_has_one_line_for_each_round(fake_run, capsys):
    run = fake_run(7)
    plain = LineDisplay()
    with plain:
        run.to(plain)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    titles = next(i for i, line in enumerate(lines) if line.split()[:2] == ["round", "accuracy"])
    facts = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines[:titles]}
    assert (
        facts["task"] == "mnist-cnn, 431,080 parameters"
        and facts["clients"] == "500, 50 a round, dirichlet:0.1"
    )
    assert (
        facts["rounds"] == "1 to 7"
        and facts["folder"] == run.out
        and facts["downlink"] == "topk:density=1%,values=fp16@layer"
    )

    table = lines[titles : titles + 8]
    assert len({len(line) for line in table}) == 1, "columns must be aligned"
    assert [line.split()[0] for line in table[1:]] == [str(n) for n in range(1, 8)]
    assert (
        table[1].split()
        == "1 19.46 % 2.0581 2.2000 246 kB ×350 862 kB ×100 ×156 50/50 0.25 s".split()
    )
    assert table[2].split()[1:3] == ["–", "–"]

    verdict = lines[titles + 8 :]
    assert verdict[0] == "round 7: clients 7, 9 rejected at decode: the checksum differs"
    assert verdict[1].split() == ["accuracy", "97.31", "%"]
    assert "bytes up    1.72 MB, ×350 against 604 MB in float32" in verdict
    assert "both        7.76 MB, ×156 against 1.21 GB in float32" in verdict
    assert "rejected    2 updates" in verdict
    assert verdict[-1] == f"model       {run.out}/model.safetensors"


def test_the_printed_code_loads_the_weights(tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({"bias": torch.arange(3.0)}, tmp_path / "model.safetensors")
    names: dict = {}
    exec("\n".join(how_to_load(str(tmp_path))), names)
    assert names["weights"]["bias"].tolist() == [0, 1, 2]


def test_warnings_go_to_standard_error_as_one_line(capsys):
    LineDisplay().on_warning("odd\nthing")
    assert capsys.readouterr() == ("", "warning: odd thing\n")


def test_bytes_that_are_all_rejected_have_no_ratio(fake_run, capsys):
    from dataclasses import replace

    run = fake_run(1)
    plain = LineDisplay()
    plain.on_run_start(run.header)
    plain.on_round_end(replace(run.records[0], uplink_bytes=0, accuracy=None, train_loss=None))
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[4:7] == ["0", "B", "–"]
