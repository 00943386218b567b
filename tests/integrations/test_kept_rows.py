"""A CSV file keeps its rows while its logger, which deletes the file, begins; rows beyond the resumed step are cut."""

import pytest

from lazysnap.integrations.logged_run import kept_rows

HEADER, ROWS = "loss,step\r\n", [f"0.{step},{step}\r\n" for step in range(6)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes("".join([HEADER, *ROWS]).encode() + b"0.7")  # the dead process was writing
    return path


def test_rows_before_the_step_stay(path):
    with kept_rows(path, 4) as columns:
        assert not path.exists()
    assert columns == ["loss", "step"]
    assert path.read_bytes().decode() == "".join([HEADER, *ROWS[:4]])
    assert [*path.parent.iterdir()] == [path]


def test_a_logger_that_raises_costs_no_row(path):
    with pytest.raises(OSError, match="full"), kept_rows(path, 6):
        raise OSError("full")
    assert path.read_bytes().decode() == "".join([HEADER, *ROWS])


def test_a_death_meanwhile_costs_no_row(path):
    with kept_rows(path, 5):
        (aside,) = path.parent.iterdir()
        left = aside.read_bytes()
    path.unlink()
    aside.write_bytes(left)  # as a process that died there leaves it
    with kept_rows(path, 6):
        pass
    assert path.read_bytes().decode() == "".join([HEADER, *ROWS])
    assert [*path.parent.iterdir()] == [path]
