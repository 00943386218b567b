"""Ranks roll back together: a loss that is bad on one of them is bad on all, and all get the same step."""

import json
import pathlib
import types
import uuid

from rank_keepers import end_nodes

HERE = pathlib.Path(__file__).parent


class Ranks:
    """Starts both ranks in a directory; what they wrote down."""

    def __init__(self, zygote, place):
        self.zygote, self.place, self.lines = zygote, place, []
        self.place.mkdir()

    def run(self, **settings):
        journal = self.place / uuid.uuid4().hex
        common = {"world": 2, "meeting": f"{journal}-meeting", "root": str(self.place), "journal": str(journal)}
        common |= {"kind": "ddp", "batches": 8, "never": [], "bad": {}, **settings}
        started = [
            self.zygote.start(
                [str(HERE / "rollback_rank.py"), json.dumps({**common, "rank": rank})],
                {"LAZYSNAP_JOB_ID": str(self.place)},
                self.place / f"output.{rank}",
            )
            for rank in range(2)
        ]
        codes = {child.get() for child in started}
        self.lines = [line.split() for line in journal.read_text().splitlines()]
        return codes

    def output(self):
        return "".join((self.place / f"output.{rank}").read_text()[-3000:] for rank in range(2))

    def all(self, word):
        """What every rank wrote after ``word``."""
        return [line[2:] for line in sorted(self.lines) if line[1] == word]


def test_a_loss_that_is_bad_on_one_rank_takes_all_back_and_leaves_no_trace(zygote, tmp_path):
    never, seen = Ranks(zygote, tmp_path / "never"), Ranks(zygote, tmp_path / "seen")
    assert never.run(kind="ddp", never=[3, 6]) == {0}, never.output()
    assert seen.run(kind="ddp", bad={"3": 1, "6": 0}) == {0}, seen.output()

    assert seen.all("back") == [["3", "memory"], ["5", "memory"]] * 2
    assert seen.all("ended") == never.all("ended")
    assert seen.output().count("rolled back from step 4 to step 3 (the loss is not finite)") == 1
    assert [line[0] for line in seen.all("closed")] == ["True", "True"]


def test_after_going_back_over_captured_steps_latest_is_the_same_on_all_ranks(zygote, tmp_path):
    """Also where storage has a later step. Memory alone: below, and with one rank."""
    ranks = Ranks(zygote, tmp_path / "job")
    assert ranks.run(batches=6, back=2, storage=True) == {9}, ranks.output()
    wanted = [line[1] for line in ranks.all("trained") if line[0] == "5"]
    assert ranks.all("back") == [["5", digest] for digest in wanted]

    assert ranks.run(look=True, storage=True) == {0}, ranks.output()
    assert ranks.all("resumed") == [["5", digest] for digest in wanted]
    assert ranks.run(storage=True) == {0}, ranks.output()
    assert [line[0] for line in ranks.all("ended")] == ["8", "8"]


def test_the_step_that_was_gone_back_to_comes_back_from_another_node(zygote, tmp_path):
    """Not the newer one, which was protected before."""
    ranks = Ranks(zygote, tmp_path / "job")
    nodes = ["node-a", "node-b"]
    assert ranks.run(kind="fsdp", batches=6, back=2, nodes=nodes) == {9}, ranks.output()
    assert ranks.all("protected") == [["5", "True"], ["6", "True"]] * 2, ranks.output()
    wanted = ranks.all("back")
    end_nodes(types.SimpleNamespace(root=ranks.place), nodes[1])

    assert ranks.run(kind="fsdp", look=True, nodes=nodes) == {0}, ranks.output()
    assert ranks.all("resumed") == wanted
