"""What the quick tier takes."""

import pathlib

import pytest
from support.sampling import Sample

CASES = [f"{family}.{number}" for family in ("a", "b", "c") for number in range(25)] + ["d.0"]

CONFTEST = pathlib.Path(__file__).with_name("conftest.py")

pytest_plugins = ["pytester"]


def family(case):
    return case.split(".")[0]


def test_of_each_family_a_tenth_and_at_least_one_is_taken_whatever_the_order():
    taken = Sample("1", is_whole=False).of(CASES, family)

    assert [[family(case) for case in taken].count(name) for name in "abcd"] == [3, 3, 3, 1]
    assert sorted(Sample("1", is_whole=False).of(reversed(CASES), family)) == sorted(taken)


def test_the_seed_decides_and_in_time_everything_is_taken():
    taken = [Sample(str(seed), is_whole=False).of(CASES, family) for seed in range(200)]

    assert taken[0] != taken[1]
    assert {case for cases in taken for case in cases} == set(CASES)


@pytest.mark.parametrize(("tier", "count"), [("quick", 4), ("full", 23)])
def test_marks_decide_what_a_tier_runs(pytester, tier, count):
    pytester.makeconftest(CONFTEST.read_text())
    folder = CONFTEST.parent
    pytester.makeini(f"[pytest]\npythonpath = {folder} {folder}/servers\nmarkers =\n slow\n sampled\n always")
    pytester.makepyfile(
        """
        import pytest

        def test_plain(): pass

        @pytest.mark.slow
        def test_slow(): pass

        @pytest.mark.sampled
        @pytest.mark.parametrize("number", range(11))
        def test_sampled(number): pass

        @pytest.mark.sampled("one family")
        @pytest.mark.parametrize("number", range(5))
        def test_one(number): pass

        @pytest.mark.sampled("one family")
        @pytest.mark.parametrize("number", range(5))
        def test_other(number): pass
        """
    )
    result = pytester.runpytest_subprocess("--tier", tier, "--strict-markers")
    result.assert_outcomes(passed=count, deselected=23 - count)
    result.stdout.fnmatch_lines([f"tier: {tier}, LAZYSNAP_TEST_SEED=*"])


def test_tests_that_are_named_all_run_in_any_tier(pytester):
    pytester.makeconftest(CONFTEST.read_text())
    folder = CONFTEST.parent
    pytester.makeini(f"[pytest]\npythonpath = {folder} {folder}/servers\nmarkers =\n slow\n sampled\n always")
    module = pytester.makepyfile("import pytest\n\n@pytest.mark.slow\ndef test_slow(): pass\n")

    for named in ([f"{module}::test_slow"], ["-k", "slow"]):
        pytester.runpytest_subprocess("--tier", "quick", *named).assert_outcomes(passed=1)


def test_each_test_module_has_a_name_of_its_own():
    """pytest cannot collect two of one name from folders that are no packages."""
    names = [path.name for path in CONFTEST.parent.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
