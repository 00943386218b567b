"""Lightning with several ranks: killed, started again, and equal bit for bit to a fit that was never killed."""

import json
import re

import pytest
import torch
from jobs import HERE
from support.ports import free_port

import lazysnap

STRATEGIES = (("ddp", 2), ("fsdp2+tp", 4))
BATCH, SAMPLES = 3, 48
TIMEOUT_S = 240
"""Of one start."""


class Fit:
    """One training in a directory of its own; each ``run`` is a start of all its ranks."""

    def __init__(self, zygote, root, *, levels):
        self.zygote, self.root, self.runs = zygote, root, 0
        self.levels = [str(root / "level")] if levels else []
        self.nodes = ()

    @property
    def place(self):
        return self.root / f"run{self.runs}"

    def run(self, strategy, world, *, launching_python=None, **settings):
        """``launching_python``: runs a program that starts the other ranks itself, with this Python."""
        self.runs += 1
        self.place.mkdir(parents=True)
        port = free_port()
        common = {"strategy": strategy, "world": world, "place": str(self.place), "levels": self.levels}
        common |= {"directory": str(self.root), "port": port, **settings}
        is_launcher = strategy == "ddp_fork" or launching_python is not None
        own = [{}] if is_launcher else [{"rank": rank} for rank in range(world)]
        environment = {"LAZYSNAP_JOB_ID": str(self.root)}
        if launching_python is not None:
            environment["LAZYSNAP_TEST_PYTHON"] = launching_python
        waiting = [
            self.zygote.start(
                [str(HERE / "lightning_rank.py"), json.dumps(common | each)],
                environment,
                self.place / f"output.{number}",
            )
            for number, each in enumerate(own)
        ]
        return [answer.get(timeout=TIMEOUT_S) for answer in waiting]

    def events(self, word):
        """Ranks of Lightning write no journal."""
        return []

    def output(self):
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.place.glob("output.*")))

    def logs(self):
        return [path.read_text() for path in sorted(self.place.glob("log.*"))]

    def results(self):
        return [path.read_text() for path in sorted(self.place.glob("result.*"))]

    def trace(self, rank):
        """Step, samples, loss of every batch."""
        return [json.loads(line) for line in (self.place / f"trace.{rank}").read_text().splitlines()]


@pytest.fixture
def make_fit(zygote, tmp_path):
    def make(name, *, levels=False):
        return Fit(zygote, tmp_path / name, levels=levels)

    return make


@pytest.fixture(scope="module")
def whole_results(zygote, tmp_path_factory):
    """What each rank ends with that nothing happens to, by strategy and world."""
    known = {}

    def ask(strategy, world):
        if (strategy, world) not in known:
            fit = Fit(zygote, tmp_path_factory.mktemp("whole"), levels=False)
            assert fit.run(strategy, world) == [0] * world, fit.output()
            known[strategy, world] = fit.results(), [fit.trace(rank) for rank in range(world)]
        return known[strategy, world]

    return ask


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "world"), STRATEGIES)
def test_killed_it_goes_on_from_memory_and_without_memory_from_storage(
    make_fit, end_keepers, whole_results, strategy, world
):
    wanted, traces = whole_results(strategy, world)
    cut = make_fit("cut", levels=True)
    # An epoch has 8 steps where two ranks, or pairs of ranks, share the data, and 16 where all have the same.
    assert 0 not in cut.run(strategy, world, die_at=dict.fromkeys(map(str, range(world)), 5)), cut.output()
    assert 0 not in cut.run(strategy, world, die_at={"1": 11}), cut.output()

    assert ["from memory" in log for log in cut.logs()] == [True] * world, cut.logs()
    end_keepers(cut)
    assert cut.run(strategy, world) == [0] * world, cut.output()

    assert [f"from {cut.levels[0]}" in log for log in cut.logs()] == [True] * world, cut.logs()
    assert cut.results() == wanted
    for rank in range(world):
        again = cut.trace(rank)
        assert again == traces[rank][-len(again) :]


@pytest.mark.timeout(900)
def test_with_fewer_ranks_it_passes_over_the_samples_that_were_trained(make_fit, end_keepers):
    """The sampler of Lightning gives each rank every n-th sample of one order."""
    fit = make_fit("fit", levels=True)
    assert 0 not in fit.run("ddp", 4, die_at=dict.fromkeys("0123", 3)), fit.output()
    before = [fit.trace(rank) for rank in range(4)]

    assert fit.run("ddp", 2, epochs=1) == [0, 0], fit.output()

    found = {int(*re.findall(r"resumed step (\d) of run .* from memory", log)) for log in fit.logs()}
    assert ["captured by 4 ranks and is resumed by 2:" in log for log in fit.logs()] == [True, False]
    assert found <= {2, 3}, fit.logs()
    [resumed] = found
    trained = [number for trace in before for step, numbers, _ in trace if step < resumed for number in numbers]
    assert len(trained) == resumed * 4 * BATCH
    trained += [number for rank in range(2) for _, numbers, _ in fit.trace(rank) for number in numbers]
    assert sorted(trained) == list(range(SAMPLES))
    # A quarter of an epoch per step before, an eighth now.
    assert [step for step, _, _ in fit.trace(0)] == [*range(resumed, resumed + 8 - 2 * resumed)]


@pytest.mark.timeout(900)
def test_lightnings_own_launcher_starts_the_ranks(make_fit, whole_results):
    wanted, _ = whole_results("ddp", 2)
    cut = make_fit("cut")
    assert cut.run("ddp_fork", 2, die_at={"0": 9, "1": 9}) != [0], cut.output()
    assert cut.run("ddp_fork", 2) == [0], cut.output()
    assert ["from memory" in log for log in cut.logs()] == [True, True], cut.logs()
    assert cut.results() == wanted


@pytest.mark.timeout(400)
def test_a_program_whose_ranks_lightning_starts_goes_on_as_well(make_fit, whole_results, forking_python):
    wanted, _ = whole_results("ddp", 2)
    cut = make_fit("cut")
    assert 0 not in cut.run("ddp", 2, die_at={"0": 9, "1": 9}), cut.output()
    assert cut.run("ddp", 2, launching_python=forking_python) == [0], cut.output()
    assert ["from memory" in log for log in cut.logs()] == [True, True], cut.logs()
    assert cut.results() == wanted


@pytest.mark.timeout(120)
def test_an_optimizer_that_shards_its_state_itself_is_refused_before_anything_is_trained(make_fit):
    fit = make_fit("fit")
    assert 0 not in fit.run("zero", 2), fit.output()
    assert "ConfigError: rank 0 (and 1 more ranks): LazySnapshotCallback: " in fit.output()
    assert not list(fit.place.glob("trace.*"))


@pytest.mark.timeout(120)
def test_a_metric_that_nothing_logs_ends_every_rank_with_its_name(make_fit):
    fit = make_fit("fit", levels=True)
    assert 0 not in fit.run("ddp", 2, keep_best="absent"), fit.output()
    for rank in range(2):
        assert "nothing logs 'absent'; logged are" in (fit.place / f"output.{rank}").read_text()


def test_an_exported_checkpoint_holds_what_lightning_saves_itself(make_fit, tmp_path):
    fit = make_fit("fit", levels=True)
    assert fit.run("fsdp2", 2, save=True) == [0, 0], fit.output()
    stock = torch.load(fit.place / "stock.ckpt", weights_only=True)

    exported = lazysnap.export(fit.levels[0], tmp_path / "exported.ckpt")

    found = torch.load(tmp_path / "exported.ckpt", weights_only=True)
    assert exported.step == found["global_step"] == stock["global_step"]
    assert set(found) == set(stock)
    for name in ("epoch", "state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(found[name], stock[name], rtol=0, atol=0, msg=name)
