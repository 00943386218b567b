"""The published suites over every place that runs here."""

import os
import pathlib
import subprocess
import sys

import pytest
from places import Disk, Memory, Tmpfs

from lazysnap.levels.local import LocalStorage
from lazysnap.testing import FaultPlan, FaultyStorage, StorageContract, StoreContract


class TestDisk(Disk, StorageContract, StoreContract):
    pass


class TestTmpfs(Tmpfs, StorageContract, StoreContract):
    pass


class TestMemory(Memory, StorageContract, StoreContract):
    pass


class TestFaultyWithoutFaults(Tmpfs, StorageContract, StoreContract):
    """A plan without faults changes nothing."""

    @pytest.fixture
    def make_storage(self, root):
        return lambda name="run": FaultyStorage(LocalStorage(os.path.join(root, name)), FaultPlan())

    def limit_small(self, storage, monkeypatch):
        return super().limit_small(storage.storage, monkeypatch)


def run_any_url(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "--pyargs", "lazysnap.testing.any_url"]
    return subprocess.run(
        [*command, *arguments],
        env={**{key: value for key, value in os.environ.items() if "LAZYSNAP_TEST" not in key}, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=pathlib.Path(__file__).parents[2],
    )


def test_the_suites_run_over_any_url_and_leave_nothing(tmp_path):
    result = run_any_url("-k", "deleting_is or aborted or killed", LAZYSNAP_TEST_URL=str(tmp_path / "place"))

    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout
    assert list(tmp_path.rglob("*")) == [tmp_path / "place"]


def test_without_a_url_nothing_is_run():
    result = run_any_url()

    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "set LAZYSNAP_TEST_URL" in run_any_url("-rs").stdout


@pytest.mark.parametrize("name", ["lazysnap", "lazysnap.levels", "lazysnap.cli", "lazysnap.keeper.process"])
def test_lazysnap_itself_does_not_need_pytest(name):
    code = f"import sys; sys.modules['pytest'] = None; import {name}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_pytest_the_suites_say_what_to_install():
    code = "import sys; sys.modules['pytest'] = None; import lazysnap.testing"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert "ImportError: lazysnap.testing needs pytest: pip install pytest" in result.stderr
