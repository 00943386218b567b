"""Without any logging configured, a run says in one line how it starts, and in few lines what it leaves at its end."""

import json
import pathlib
import re

import pytest
from support.damage import flip
from support.image import write_shard

from lazysnap.levels.source import MemorySource, map_anonymous
from lazysnap.levels.store import open_storage
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta

TRAINER = pathlib.Path(__file__).parent / "visible_trainer.py"


@pytest.fixture
def start(zygote, tmp_path):
    """Runs the training; its exit status, and the lines that lazysnap wrote."""

    def run(**settings):
        settings = {"url": str(tmp_path / "level"), **settings}
        output = tmp_path / "output"
        arguments = [str(TRAINER), json.dumps(settings)]
        status = zygote.run(arguments, {"LAZYSNAP_JOB_ID": str(tmp_path)}, output)
        text = output.read_text()
        assert status in (0, -9), text
        return status, [line for line in text.splitlines() if "lazysnap: " in line], text

    return run


def one(lines, pattern):
    """The one line that matches."""
    (found,) = [match for line in lines if (match := re.fullmatch(pattern, line))]
    return found


def test_it_says_that_it_starts_fresh_that_it_resumed_what_was_lost_and_what_is_stored(start, tmp_path):
    level = tmp_path / "level"
    status, lines, _ = start(every_n_steps=5, steps=20, die_at=9)  # captured: 1 and 5
    assert status == -9
    assert lines[0] == f"lazysnap: starting fresh: there is no snapshot in memory or at {level}"
    one(
        lines[1:],
        rf"lazysnap: state .+; uses .+ of memory \(\d copies\); .+ available; stored at {level} every 5 steps",
    )

    # Somebody only looks meanwhile: the end of the training is still that of the one that trained.
    start(fetch_only=True)
    status, lines, text = start(every_n_steps=5, steps=20)
    assert (status, "closed True" in text) == (0, True)
    assert len(lines) == 3, lines
    one(
        lines,
        r"lazysnap: resumed step 5 of run [0-9a-f]{4,16} from memory: captured [\d.]+ m?s before the end, "
        r"lost 4 steps and at most the one that was running; restored in [\d.]+ m?s",
    )
    done = one(
        lines,
        rf"lazysnap: captured 3 of 3 due steps \(.+ each\); stored (\d) at {level} \(newest: step 20\); "
        r"training waited [\d.]+ (ms|s) in all",
    )
    assert 1 <= int(done[1]) <= 3

    # Everybody is gone: only what the files say is told.
    _, lines, _ = start(steps=20)
    one(
        lines, rf"lazysnap: resumed step 20 of run \w+ from {level}: captured [\d.]+ (ms|s|min) ago; restored in .* m?s"
    )


def test_with_the_keeper_dead_too_nothing_is_invented(start, tmp_path):
    level = tmp_path / "level"
    start(steps=4)
    start(steps=9, die_at=9, with_keeper=True)
    _, lines, text = start(steps=9)
    assert "lost" not in text
    assert "before the end" not in text
    # Before it there may be a line about a file whose writer died.
    one(lines[:2], rf"lazysnap: resumed step \d of run \w+ from {level}: captured .* ago; restored in .* m?s")


def test_a_start_that_asked_for_no_restart_says_so(start):
    _, lines, _ = start(restore=False)
    assert lines[0] == (
        'lazysnap: starting fresh: no restart was asked for; engine.restore("latest") resumes the newest snapshot, '
        "if there is one"
    )


def test_a_program_that_configured_logging_decides_itself_what_it_sees(start, tmp_path):
    _, _, text = start(logging=True)
    lines = [line for line in text.splitlines() if "starting fresh" in line or "captured 8 of 8" in line]
    assert [line.split(":")[0] for line in lines] == ["LOG INFO lazysnap"] * 2


def test_half_a_snapshot_and_a_damaged_one_are_named_as_the_reason(start, tmp_path):
    level = tmp_path / "level"
    start(steps=2)
    (shard,) = sorted(level.glob("step-00000002-*/*.safetensors"))
    flip(shard)
    for old in level.glob("step-00000001-*/*.json"):
        old.unlink()
    _, lines, _ = start(steps=2, restore=True)
    assert lines[0].startswith("lazysnap: step 2 skipped: ")
    one(
        lines[1:2],
        rf"lazysnap: starting fresh: no snapshot in memory or at {level} could be read \(step 2\); .* say why",
    )


def test_directories_without_a_manifest_are_the_reason(start, tmp_path):
    level = tmp_path / "level"
    start(steps=2)
    for manifest in level.glob("step-*/*.json"):
        manifest.unlink()
    count = len([*level.glob("step-*")])
    _, lines, _ = start(steps=2)
    one(
        lines[:1],
        rf"lazysnap: starting fresh: there is no snapshot in memory or at {level}, but {count} director(y|ies) without "
        rf"a valid manifest, which is written last; `lazysnap ls {level}` lists the contents",
    )


def test_of_two_ranks_one_that_is_missing_makes_it_incomplete(start, tmp_path):
    """Written as by a training of two ranks, of which only the first one stored its part."""
    layout = Layout.plan([TensorSpec("weight", "U8", (8,))])
    room = map_anonymous(8192)
    room[: len(layout.header)] = layout.header
    meta = CaptureMeta("1" * 16, "a" * 16, 40, 0, 2, 3, state={})
    write_shard(open_storage(str(tmp_path / "level")), meta, MemorySource(room, layout.size_bytes))

    _, lines, _ = start(steps=2)
    one(
        lines[:1],
        r"lazysnap: starting fresh: there are only incomplete snapshots in memory or at .* \(step 40\); "
        r"`lazysnap ls .*` lists the contents",
    )


def test_what_is_not_durable_at_the_end_is_said_loudly(start, tmp_path):
    (tmp_path / "file").write_text("where a directory would have to be")
    _, lines, text = start(url=str(tmp_path / "file" / "level"), drain_timeout_s=1)
    assert "closed False" in text
    one(lines, r"lazysnap: captured 8 of 8 due steps .*; stored 0 at .*; training waited .*")
    one(
        lines,
        r"lazysnap: NOT DURABLE: step 8, the newest capture, is not at .*/file/level \(nothing can be stored "
        r"there now; a message above says why\); it stays "
        r'in memory for 30 s \(linger_s\), where a restart with "latest" finds it',
    )


def test_after_a_crash_it_says_where_the_newest_step_is_and_warns_of_nothing(start, tmp_path):
    (tmp_path / "file").write_text("where a directory would have to be")
    _, lines, text = start(url=str(tmp_path / "file" / "level"), abandon=True)
    assert "NOT DURABLE" not in text
    one(
        lines,
        r'lazysnap: step 8: it stays in memory for 30 s \(linger_s\), where a restart with "latest" finds it',
    )
