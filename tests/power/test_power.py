"""The power goes while a snapshot is written: a kernel in user mode with an ext4 disk is killed with its page cache."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from support.names import directory_of

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "servers"))

import nfs_lab

TWO_BLOCKS = 17 << 20
pytestmark = pytest.mark.slow
RUN = "/mnt/disk/run"
SHARD = "node-00000-of-00001.safetensors"


@pytest.fixture
def disk(tmp_path):
    """A disk image in a directory whose path a kernel's command line can hold."""
    reason = nfs_lab.missing_packages("linux.uml")
    if reason is None and not shutil.which("mkfs.ext4"):
        reason = "no mkfs.ext4"
    if reason:
        pytest.skip(f"power cut: {reason}")
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    return image


@contextlib.contextmanager
def machine(image: pathlib.Path, name: str):
    """A machine with that disk; its power goes at the end."""
    place = image.with_name(name)
    place.mkdir()
    guest = nfs_lab.Guest(nfs_lab.Host(), place, f"ubda={image}")
    try:
        guest.wait_until_up()
        guest.run("sh", "mkdir -p /mnt/disk && mount -t ext4 /dev/ubda /mnt/disk")
        yield guest
    finally:
        guest.close()


@pytest.mark.parametrize("when", ["while blocks are written", "between shard and manifest", "after the commit"])
def test_what_was_committed_survives_a_power_cut_and_nothing_half_is_offered(disk, when):
    with machine(disk, "first") as guest:
        guest.run("write", RUN, 1)
        guest.run("write", RUN, 2, TWO_BLOCKS)
        if when == "while blocks are written":
            guest.start("write_slowly", RUN, 3, TWO_BLOCKS).stopped("middle")
        elif when == "between shard and manifest":
            writer = guest.start("publish_only", RUN, f"{directory_of(3)}/{SHARD}", 5000)
            writer.stopped("written")
            writer.go()
            writer.stopped("published")
        else:
            guest.run("write", RUN, 3, TWO_BLOCKS)
        # Nobody asked to make this durable: that it is gone afterwards shows that the cut was one.
        guest.run("sh", "echo cached > /mnt/disk/cached; cat /mnt/disk/cached")

    with machine(disk, "second") as guest:
        expected = [1, 2, 3] if when == "after the commit" else [1, 2]
        assert guest.run("restorable", RUN) == [expected, []]
        assert guest.run("sh", "cat /mnt/disk/cached 2>/dev/null || true") == ""
        left = guest.run("sweep", RUN)
        # A shard without a manifest may be somebody's copy on its way, for a day.
        assert [name for name in left if ".tmp-" not in name] == []
        guest.run("write", RUN, 4)
        assert guest.run("restorable", RUN) == [[*expected, 4], []]
        assert ".tmp-" not in guest.run("sh", f"find {RUN}")


def machines():
    """Processes of this one that belong to a guest; one of another test may be there all the time."""
    found = set()
    for child in pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        name = pathlib.Path(f"/proc/{child}/comm").read_text().strip()
        if name in ("linux.uml", "unshare", "setpriv"):
            found.add(child)
    return found


def test_nothing_is_left_of_a_machine(disk):
    before = machines()
    with machine(disk, "machine") as guest:
        assert guest.run("sh", "echo 1") == "1\n"

    assert machines() <= before
