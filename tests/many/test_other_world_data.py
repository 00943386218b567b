"""A plain loop that goes on with another number of ranks neither skips nor repeats samples of the epoch."""

import json
from collections import Counter

import pytest
from jobs import HERE

SAMPLES = 24


@pytest.fixture
def train(zygote, tmp_path):
    """Start as many ranks as there are, until a step; the samples of the first epoch that each trained, and output."""
    starts = []

    def start(world, batch, stop):
        starts.append(tmp_path / f"start{len(starts)}")
        starts[-1].mkdir()
        common = {"world": world, "batch": batch, "stop": stop, "samples": SAMPLES, "meeting": str(starts[-1] / "meet")}
        common["directory"] = str(tmp_path / "level")
        settings = [common | {"rank": rank, "trace": str(starts[-1] / f"trace.{rank}")} for rank in range(world)]
        outputs = [starts[-1] / f"output.{rank}" for rank in range(world)]
        waiting = [
            zygote.start([str(HERE / "loader_rank.py"), json.dumps(each)], {}, output)
            for each, output in zip(settings, outputs, strict=True)
        ]
        statuses = [answer.get(timeout=60) for answer in waiting]
        text = "\n".join(output.read_text() for output in outputs)
        assert statuses == [0] * world, text
        traces = [json.loads((starts[-1] / f"trace.{rank}").read_text()) for rank in range(world)]
        return [number for trace in traces for number in trace.get("0", [])], text

    return start


@pytest.mark.parametrize(
    ("then", "now", "stop", "twice"),
    [
        ((2, 1), (1, 1), 5, 0),
        ((1, 4), (2, 2), 3, 0),
        ((1, 1), (2, 1), 9, 1),  # whole batches of all ranks: what one of them trained before is trained again
        ((1, 5), (2, 3), 5, 0),  # the end of the epoch, whose last batch is short
    ],
    ids=["fewer ranks", "more ranks, another batch size", "an odd sample", "at the end of the epoch"],
)
def test_every_sample_of_the_epoch_is_trained_once(train, then, now, stop, twice):
    """``then``, ``now``: ranks and the batch size of each."""
    before, first = train(*then, stop)
    after, text = train(*now, stop + SAMPLES)

    counts = Counter(before + after)
    assert set(counts) == set(range(SAMPLES)), text
    assert [count for count in counts.values() if count > 1] == [2] * twice, first + text
    assert text.count(f"captured by {then[0]} rank") == 1
