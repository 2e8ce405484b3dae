"""What the script that measures pipelines makes of its trials, and what it takes for a model's memory."""

from __future__ import annotations

import importlib
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.schedule import make_schedule
from p2pdrl.pipeline.timeline import MicrobatchCosts, predict

SCRIPTS = str(Path(__file__).parents[3] / "scripts")
OURS = {"bench_pipeline", "pipeline_bench", "support"}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module
    for name in [one for one in sys.modules if one.partition(".")[0] in OURS]:
        sys.modules.pop(name)


@pytest.fixture
def figures(script):
    return script("pipeline_bench.figures")


def outcome(figures, wall_s, **more):
    return figures.Outcome(
        **{"wall_s": wall_s, "cpu_s": 2 * wall_s, "collect_s": 0.0, "bubble": None, "norm": 1.0, **more}
    )


@pytest.fixture
def measured(figures):
    """Three rounds; in the second one the machine does something else, too, and all take longer."""
    slow = (1.0, 5.0, 1.0)
    stream = figures.Case("", 2, "1f1b", 4, "stream")

    def samples(wall_s, **more):
        return figures.CaseSamples([outcome(figures, wall_s * one, **more) for one in slow])

    by_case = {
        stream.whole(): samples(1.0),
        stream.accumulated(): samples(1.2),
        stream: samples(0.8, bubble=0.25, collect_s=0.05),
        stream.plain(): samples(0.9),
    }
    by_case[stream].memory = outcome(figures, 9.0, peak_bytes=(3 << 20, 2 << 20), kept_bytes=(1 << 19, 0))
    return stream, by_case


def test_the_ideal_is_that_of_the_papers_and_of_timelines(figures):
    assert figures.ideal_speedup(2, 4) == pytest.approx(8 / 5)
    for name, ranks, chunks in (("1f1b", 2, 1), ("gpipe", 3, 1), ("interleaved", 2, 2)):
        stages = ranks * chunks
        schedule = make_schedule(name, stages, 6, ranks=ranks)
        ideal = predict(schedule, MicrobatchCosts((1.0,) * stages, (2.0,) * stages)).ideal_speedup
        assert figures.ideal_speedup(ranks, 6, chunks) == pytest.approx(ideal)


def test_ratios_are_of_the_same_round(figures, measured):
    stream, by_case = measured
    found = figures.Figures(by_case)
    assert found.ratio(stream, stream.plain()) == pytest.approx(0.8 / 0.9)
    assert found.speedup(stream) == pytest.approx(1.0 / 0.8)
    assert found.gain(stream) == pytest.approx(1.2 / 0.8)
    assert found.efficiency(stream) == pytest.approx(1.2 / 0.8 / 1.6)


def test_the_table_of_the_readme(figures, script, measured):
    stream, by_case = measured
    by_case[stream.accumulated()].memory = outcome(figures, 9.0, peak_bytes=(5 << 20,), kept_bytes=(0,))
    table = script("pipeline_bench.markdown").markdown(figures.Figures(by_case).rows())
    heads, rule, line = table.splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == heads.strip("|").count("|") + 1 == rule.count("---")
    # 1.2 s / 1.6 is the ideal; 1.0 / 0.8 the speed-up; (1.2 / 0.8) / 1.6 the part of the ideal
    assert cells[:5] == ["2", "4", "1,200 ms", "750 ms", "800 ms"]
    assert cells[5:] == ["–", "900 ms", "1.25", "0.94", "3, 2; unsplit 5"]


def test_what_was_not_measured_has_no_ratio(figures, measured):
    stream, by_case = measured
    del by_case[stream.plain()], by_case[stream.accumulated()]
    row = figures.Figures(by_case).row(stream)
    assert row["x_plain"] is None
    assert row["efficiency"] is None
    assert row["speedup"] == pytest.approx(1.25)


def test_rows_say_all_there_is(figures, measured):
    stream, by_case = measured
    row = figures.Figures(by_case).row(stream)
    assert (row["contender"], row["stages"], row["schedule"], row["microbatches"]) == ("stream", 2, "1f1b", 4)
    assert (row["wall_s"], row["cpu_s"], row["bubble"], row["collect_s"]) == (0.8, 1.6, 0.25, 0.05)
    assert row["peak_bytes"] == (3 << 20, 2 << 20)
    alone = figures.Figures(by_case).row(stream.whole())
    assert alone["speedup"] == 1.0
    assert all(alone[name] is None for name in ("x_plain", "ideal", "efficiency", "bubble", "collect_s"))


def test_tables_are_those_of_the_rows(figures, measured, capsys):
    _, by_case = measured
    rows = figures.Figures(by_case).rows()
    figures.show(rows)
    figures.show_memory(rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["stream", "4", "800.0", "1600.0", "0.89", "1.25", "1.60", "0.94", "0.25", "50.0"] in lines
    assert ["one", "process", "1", "1000.0", "2000.0", "-", "1.00", "-", "-", "-", "-"] in lines
    assert ["stream", "4", "3.0,", "2.0", "0.5,", "0.0"] in lines


def test_pictures_have_all_contenders(figures, measured, tmp_path):
    pytest.importorskip("matplotlib")
    _, by_case = measured
    figures.draw(figures.Figures(by_case).rows(), tmp_path / "steps.png", "a policy")
    assert (tmp_path / "steps.png").stat().st_size > 10_000


def test_gradients_must_be_the_same(script, figures, measured):
    bench = script("bench_pipeline")
    stream, by_case = measured
    outcomes = {case: samples.rounds[0] for case, samples in by_case.items()}
    bench.check(outcomes, 1e-2)
    for other in (1.02, float("nan")):
        outcomes[stream] = outcome(figures, 1.0, norm=other)
        with pytest.raises(SystemExit, match="a gradient of norm"):
            bench.check(outcomes, 1e-2)


def test_free_low_ports_are_smaller_for_gloo_than_any_of_the_systems(script):
    ports = script("pipeline_bench.ports")
    assert ports.gloo_order(0x1234) == 0x3412
    first = ports.low_port()
    with socket.create_server(("127.0.0.1", first)):
        second = ports.low_port()
    assert first != second
    assert max(map(ports.gloo_order, (first, second))) < min(map(ports.gloo_order, range(0x8000, 0x10000)))


@pytest.mark.parametrize("kind", ["mlp", "transformer", "impala_resnet"])
def test_models_have_about_the_parameters_that_were_asked_for(script, kind):
    model = script("pipeline_bench.model")
    made = model.make_model(kind, 200_000, 8, torch.device("cpu"), "float32")
    assert made.flat.layout.size == pytest.approx(200_000, rel=0.15)
    again = model.make_model(kind, 200_000, 8, torch.device("cpu"), "float32")
    assert torch.equal(made.flat.parameters_D, again.flat.parameters_D)
    assert torch.equal(made.batch.inputs, again.batch.inputs)
    made.parts.check(made.batch)


def test_the_default_policy_has_33_million_parameters(script):
    model = script("pipeline_bench.model")
    _, network = model.network_of("mlp", model.SIZES["mlp"][0])
    assert network.hidden == (2048,) * 5


def test_chains_are_cut_where_ranks_have_equal_work(script):
    model = script("pipeline_bench.model")
    layers = [Layer(str(i), 1.0, 2.0, 0.0, 0.0) for i in range(8)]
    assert model.cuts_of(layers, 2) == (4,)
    assert model.cuts_of(layers, 4) == (2, 4, 6)
    assert model.plan_of(8, (2, 4, 6), "interleaved", 4).ranks == 2
    assert model.plan_of(8, (2, 4, 6), "1f1b", 4).ranks == 4
    with pytest.raises(ConfigError):
        model.cuts_of(layers, 9)


def test_what_autograd_keeps_is_counted_once_and_let_go(script):
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.ones(16, 4)
    with script("pipeline_bench.memory").Kept(layers.parameters()) as kept:
        for _ in range(2):
            layers(x).sum().backward()
    # the input, and tanh's output, which both tanh and the second layer keep; float32
    assert kept.peak_bytes == 16 * 4 * 4 + 16 * 8 * 4


def test_memory_is_what_was_taken_since_it_was_made(script):
    memory = script("pipeline_bench.memory").Memory(torch.device("cpu"))
    taken = torch.ones(8 << 20)
    memory.begin()
    assert 32 << 20 <= memory.peak_bytes() < 48 << 20
    del taken
