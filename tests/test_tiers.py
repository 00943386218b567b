"""What the quick tier takes."""

import pathlib

import pytest

CONFTEST = pathlib.Path(__file__).with_name("conftest.py")

pytest_plugins = ["pytester"]


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "count"), [("quick", 3), ("full", 8)])
def test_marks_and_folders_decide_what_a_tier_runs(pytester, tier, count):
    pytester.makeconftest(CONFTEST.read_text())
    folder = CONFTEST.parent
    pytester.makeini(f"[pytest]\npythonpath = {folder} {folder}/servers\nmarkers =\n slow\n quick")
    pytester.makepyfile(
        """
        import pytest

        def test_plain(): pass

        @pytest.mark.slow
        @pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.quick), 3])
        def test_slow_but_one(number): pass

        @pytest.mark.skip
        def test_on_a_server(s3_server): pass
        """
    )
    trainings = pytester.mkdir("many") / "test_trainings.py"
    trainings.write_text(
        """
import pytest

def test_training(): pass

@pytest.mark.slow
def test_long_training(): pass

@pytest.mark.quick
def test_short_training(): pass
"""
    )
    result = pytester.runpytest_subprocess("--tier", tier, "--strict-markers")
    skipped = 1 if tier == "full" else 0
    result.assert_outcomes(passed=count - skipped, skipped=skipped, deselected=8 - count)
    result.stdout.fnmatch_lines([f"tier: {tier}"])


def test_each_test_module_has_a_name_of_its_own():
    """pytest cannot collect two of one name from folders that are no packages."""
    names = [path.name for path in CONFTEST.parent.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
