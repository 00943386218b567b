"""Snapshots over NFS 4.2: a real server that is killed, restarted, replaced; a real client kernel."""

import pathlib
import re
import shutil
import time

import pytest
from nfs_lab import GuestError
from support.catalogue import inventory_of
from support.names import directory_of
from support.snapshots import read_image

from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.store import open_storage
from lazysnap.shard.names import NodeName

TWO_BLOCKS = 17 << 20
CACHES_S = 60
"""A client may believe for so long what it has seen of another one's files."""
pytestmark = pytest.mark.xdist_group("nfs")  # one server and one client are enough for all
SHARD, MANIFEST = NodeName(0, 1).file, NodeName(0, 1).manifest


def restorable(path: pathlib.Path) -> list[int]:
    """Steps at the server of which every block was read and verified; nothing there is half."""
    storage = open_storage(str(path))
    found = inventory_of(storage)
    assert found.problems == ()
    for entry in found.entries:
        manifest = FilePlace.of(storage, entry).read_manifest()
        out = map_anonymous(manifest.size_bytes)
        read_image(storage, entry, out)
        assert out[-1] == entry.step
    return sorted(entry.step for entry in found.entries)


def files(path: pathlib.Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def wait_for_files(place, expected: list[str]) -> None:
    """The client removes ``.nfs*`` names a moment after the last descriptor was closed."""
    deadline = time.monotonic() + CACHES_S
    while files(place.host) != sorted(expected):
        assert time.monotonic() < deadline, files(place.host)


def of_step(step: int) -> list[str]:
    return [f"{directory_of(step)}/{MANIFEST}", f"{directory_of(step)}/{SHARD}"]


def test_what_one_client_writes_the_server_and_another_client_have(lab, place):
    for step, size in ((1, 50), (2, TWO_BLOCKS)):
        lab.guest.run("write", place.hard, step, size)

    assert lab.guest.run("restorable", place.other) == [[1, 2], []]
    assert restorable(place.host) == [1, 2]
    assert files(place.host) == of_step(1) + of_step(2)


def test_of_two_clients_that_write_one_name_each_has_its_turn_and_the_last_stands_whole(lab, place):
    calls = [
        lab.guest.start("contend", url, content * 100, 25) for url, content in ((place.hard, "a"), (place.other, "b"))
    ]
    for call in calls:
        call.stopped("begun")
    for call in calls:
        call.go()
    for call in calls:
        call.result()

    for number in range(25):
        assert (place.host / str(number) / "shard").read_text() in ("a" * 100, "b" * 100)
    wait_for_files(place, [f"{number}/shard" for number in range(25)])


def test_a_sweep_of_another_client_leaves_living_writers_alone_and_takes_what_dead_ones_left(lab, place):
    dead = lab.guest.start("die_with_a_file", place.hard, f"{directory_of(2)}/{SHARD}")
    dead.stopped("held")
    living = lab.guest.start("write_slowly", place.hard, 1, TWO_BLOCKS)
    living.stopped("middle")
    assert lab.guest.run("sweep", place.other) == []
    dead.go()
    dead.result()

    (gone,) = lab.guest.run("sweep", place.other)
    assert gone.startswith(f"{directory_of(2)}/.")
    living.go()
    living.result()
    assert restorable(place.host) == [1]
    assert files(place.host) == of_step(1)


def test_hard_mount_writes_and_reads_go_on_when_the_killed_server_is_back(lab, place):
    lab.guest.run("write", place.hard, 7, TWO_BLOCKS)
    size = (place.host / directory_of(7) / SHARD).stat().st_size
    writer = lab.guest.start("write_slowly", place.hard, 8, TWO_BLOCKS)
    reader = lab.guest.start("read_slowly", place.other, f"{directory_of(7)}/{SHARD}", size)
    for call in (writer, reader):
        call.stopped("middle")
    lab.server.kill()
    for call in (writer, reader):
        call.go()
    lab.server.start()

    assert reader.result() == 7
    writer.result()
    assert restorable(place.host) == [7, 8]
    assert files(place.host) == of_step(7) + of_step(8)


def test_hard_mount_a_server_that_stays_away_costs_a_deadline_and_nothing_half_is_left(lab, place):
    lab.guest.run("write", place.hard, 1)
    attempt = lab.guest.start("write_with_deadline", place.hard, 2, TWO_BLOCKS, 2)
    attempt.stopped("middle")
    lab.server.kill()
    attempt.go()
    attempt.stopped("LevelHangs")
    lab.server.start()
    attempt.go()

    assert attempt.result().startswith("CaptureAborted")
    assert files(place.host) == of_step(1)
    lab.guest.run("write", place.hard, 3)
    assert restorable(place.host) == [1, 3]


def forget(lab) -> None:
    """The server loses power and its memory of clients and their locks."""
    lab.server.kill()
    shutil.rmtree(lab.server.memory)
    lab.server.start()


def test_a_lock_that_the_server_forgot_is_taken_again_before_the_file_gets_its_name(lab, place):
    writer = lab.guest.start("publish_only", place.hard, f"{directory_of(1)}/{SHARD}", 4096)
    writer.stopped("written")
    forget(lab)
    writer.go()
    writer.stopped("published")
    assert lab.guest.run("sweep", place.other) == []
    writer.go()
    writer.result()

    # Without a writer it may be somebody's copy on its way, until it did not change for a day.
    assert lab.guest.run("sweep", place.other) == []


def test_bytes_that_were_cached_under_a_lock_that_the_server_forgot_are_not_published(lab, place):
    writer = lab.guest.start("publish_only", place.hard, f"{directory_of(1)}/{SHARD}", 100)
    writer.stopped("written")
    forget(lab)
    writer.go()
    with pytest.raises(GuestError, match=r"LevelError: .*publishing"):
        writer.stopped("published")

    wait_for_files(place, [])


def test_a_file_that_was_swept_because_the_server_forgot_its_lock_is_never_offered(lab, place):
    writer = lab.guest.start("write_slowly", place.hard, 1, TWO_BLOCKS)
    writer.stopped("middle")
    forget(lab)
    (gone,) = lab.guest.run("sweep", place.other)
    assert gone.startswith(f"{directory_of(1)}/.")
    writer.go()
    with pytest.raises(GuestError, match="LevelError"):
        writer.result()

    assert restorable(place.host) == []
    lab.guest.run("write", place.hard, 2)
    assert restorable(place.host) == [2]
    assert files(place.host) == of_step(2)


@pytest.mark.usefixtures("soft")
def test_soft_mount_writes_and_reads_fail_nothing_half_is_offered_and_the_next_ones_work(lab, place):
    lab.guest.run("write", place.soft, 7, TWO_BLOCKS)
    size = (place.host / directory_of(7) / SHARD).stat().st_size
    writer = lab.guest.start("write_slowly", place.soft, 8, TWO_BLOCKS)
    reader = lab.guest.start("read_slowly", place.soft, f"{directory_of(7)}/{SHARD}", size)
    for call in (writer, reader):
        call.stopped("middle")
    lab.server.kill()
    for call in (writer, reader):
        call.go()
    with pytest.raises(GuestError, match=r"LevelError: /mnt/soft/.*reading.*soft NFS mount is away"):
        reader.result()
    with pytest.raises(GuestError, match=r"LevelError: /mnt/soft/.*writing.*soft NFS mount is away"):
        writer.result()
    assert restorable(place.host) == [7]
    lab.server.start()

    lab.guest.run("write", place.soft, 9)
    assert lab.guest.run("restorable", place.soft) == [[7, 9], []]
    lab.guest.run("sweep", place.soft)
    assert restorable(place.host) == [7, 9]
    assert files(place.host) == of_step(7) + of_step(9)


def test_an_export_that_was_replaced_is_named_and_works_when_mounted_again(lab):
    export, url = lab.server.exports["replaced"], "/mnt/replaced/run"
    lab.guest.run("mount", "replaced", "replaced", "hard")
    try:
        lab.guest.run("write", url, 1)
        lab.server.kill()
        export.rename(export.with_name("old"))
        export.mkdir()
        shutil.rmtree(export.with_name("old"))
        lab.server.start()
        with pytest.raises(GuestError, match=r"LevelError: .*replaced at the server: unmount it"):
            lab.guest.run("write", url, 2)
        with pytest.raises(GuestError, match=r"LevelError: .*replaced at the server"):
            lab.guest.run("restorable", url)
    finally:
        lab.guest.run("sh", "umount -l /mnt/replaced")
    lab.guest.run("mount", "replaced", "replaced", "hard")
    lab.guest.run("write", url, 3)

    assert lab.guest.run("restorable", url) == [[3], []]
    assert restorable(export / "run") == [3]
    lab.guest.run("sh", "umount /mnt/replaced")


def test_a_directory_removed_at_the_server_costs_the_snapshot_being_written_only(lab, place):
    writer = lab.guest.start("write_slowly", place.hard, 1, TWO_BLOCKS)
    writer.stopped("middle")
    shutil.rmtree(place.host / directory_of(1))
    writer.go()
    with pytest.raises(GuestError, match="LevelError"):
        writer.result()
    lab.guest.run("write", place.hard, 2)

    assert restorable(place.host) == [2]


def test_a_manifest_seen_before_its_shard_is_complete_is_not_believed(lab, place):
    """One client sees the files of another one in whatever order its caches allow."""
    lab.guest.run("write", place.other, 5, 100_000)
    assert lab.guest.run("restorable", place.hard) == [[5], []]
    saved = shutil.copytree(place.host / directory_of(5), lab.server.root / f"saved-{place.host.name}")
    there = f"{place.other}/{directory_of(5)}"

    lab.guest.run("sh", f"rm {there}/{SHARD} {there}/{MANIFEST}; cp {saved}/{MANIFEST} {there}")
    wait_until_not_offered(lab, place)
    lab.guest.run("sh", f"head -c 50000 {saved}/{SHARD} > {there}/{SHARD}")
    entries, (problem,) = lab.guest.run("inventory", place.hard)
    assert entries == []
    assert directory_of(5) in problem
    # The size is right, the bytes are not there.
    lab.guest.run("sh", f"truncate -r {saved}/{SHARD} {there}/{SHARD}")
    assert offered(lab, place) == "FormatError"
    lab.guest.run("sh", f"cp {saved}/{SHARD} {there}/{SHARD}")
    deadline = time.monotonic() + CACHES_S
    while offered(lab, place) == "FormatError":
        assert time.monotonic() < deadline


def wait_until_not_offered(lab, place) -> None:
    deadline = time.monotonic() + CACHES_S
    while True:
        entries, problems = lab.guest.run("inventory", place.hard)
        if not entries:
            break
        assert time.monotonic() < deadline
    assert directory_of(5) in problems[0]


def offered(lab, place) -> str:
    """Ask until the client's caches have expired; then, whether what is offered is what it says."""
    deadline = time.monotonic() + CACHES_S
    while not lab.guest.run("inventory", place.hard)[0]:
        assert time.monotonic() < deadline
    try:
        lab.guest.run("restorable", place.hard)
    except GuestError as error:
        return error.kind
    return "whole"


def test_root_that_is_nobody_at_the_server_gets_a_clear_error_or_a_snapshot(lab):
    export = lab.server.exports["squashed"]
    export.chmod(0o755)
    lab.guest.run("mount", "squashed", "squashed", "hard")
    try:
        with pytest.raises(GuestError, match=r"LevelError: .*creating step-.*no_root_squash"):
            lab.guest.run("write", "/mnt/squashed/run", 1)
        assert files(export) == []
        export.chmod(0o777)
        lab.guest.run("write", "/mnt/squashed/run", 2)
        assert lab.guest.run("restorable", "/mnt/squashed/run") == [[2], []]
        assert lab.guest.run("sweep", "/mnt/squashed/run") == []
        assert restorable(export / "run") == [2]
    finally:
        lab.guest.run("sh", "umount -l /mnt/squashed")


def test_a_file_deleted_while_it_is_read_is_read_to_its_end_and_its_leftover_name_is_not_seen(lab, place):
    lab.guest.run("write", place.hard, 9, TWO_BLOCKS)
    size = (place.host / directory_of(9) / SHARD).stat().st_size
    reader = lab.guest.start("read_slowly", place.hard, f"{directory_of(9)}/{SHARD}", size)
    reader.stopped("middle")
    for name in (MANIFEST, SHARD):
        lab.guest.run("storage", place.hard, "delete", f"{directory_of(9)}/{name}")
    (left,) = files(place.host)
    assert re.fullmatch(directory_of(9) + r"/\.nfs\w+", left)
    assert lab.guest.run("storage", place.hard, "list", directory_of(9)) == []
    lab.guest.run("storage", place.hard, "delete_directory", directory_of(9))
    assert lab.guest.run("sweep", place.hard) == []
    reader.go()

    assert reader.result() == 9
    wait_for_files(place, [])
    lab.guest.run("storage", place.hard, "delete_directory", directory_of(9))
    assert list(place.host.iterdir()) == []
