import pathlib
import shutil
import sys
import tempfile
from dataclasses import dataclass

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "servers"))

import nfs_lab


@dataclass(frozen=True)
class Lab:
    server: nfs_lab.Server
    guest: nfs_lab.Guest


@dataclass(frozen=True)
class Place:
    """One directory, as the server has it and as the guest sees it through each of its mounts."""

    host: pathlib.Path

    @property
    def hard(self) -> str:
        return f"/mnt/hard/{self.host.name}"

    @property
    def other(self) -> str:
        """A mount that shares nothing with the first one, as another host has it."""
        return f"/mnt/other/{self.host.name}"

    @property
    def soft(self) -> str:
        return f"/mnt/soft/{self.host.name}"


@pytest.fixture(scope="session")
def _lab():
    reason = nfs_lab.missing()
    if reason:
        pytest.skip(f"NFS: {reason}")
    root = pathlib.Path(tempfile.mkdtemp(prefix="lazysnap-nfs-"))
    root.chmod(0o755)  # a squashed root gets through
    try:
        with nfs_lab.lab(root) as (server, guest):
            guest.run("mount", "hard", "open", "hard")
            guest.run("mount", "other", "open", "hard,nosharecache")
            yield Lab(server, guest)
    except nfs_lab.NoLab as error:
        pytest.skip(f"NFS: {error}")
    finally:
        shutil.rmtree(root)


@pytest.fixture
def lab(_lab):
    yield _lab
    _lab.server.ensure()
    # An open that creates is answered when the client has recovered, so that no test meets the recovery of the last.
    for mount in ("hard", "other"):
        _lab.guest.run("sh", f"touch /mnt/{mount}/settled; rm -f /mnt/{mount}/settled")


@pytest.fixture
def place(lab):
    """A new directory in the export."""
    return Place(pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=lab.server.exports["open"])))


@pytest.fixture
def soft(lab):
    """A soft mount: it gives up after some seconds without an answer."""
    lab.guest.run("mount", "soft", "open", "soft,timeo=25,retrans=0,nosharecache")
    yield
    lab.server.ensure()
    lab.guest.run("sh", "umount -l /mnt/soft")
