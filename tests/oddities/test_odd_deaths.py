"""Killed for real, resumed from memory and from storage: it ends as if not, whatever the state is made of."""

STEPS = 7


def test_killed_twice_it_ends_as_if_never_killed(trainings):
    whole = trainings.run("All", STEPS, engine=False)

    trainings.run("All", STEPS, death="trainer:3")
    assert "resumed 3 memory" in trainings.run("All", STEPS, death="both:5", restarted=3)
    resumed = trainings.run("All", STEPS, restarted=5)

    assert resumed["resumed"] == [5, str(trainings.root / "snapshots")]
    assert resumed["facts"] == whole["facts"]
    assert resumed["text"] == whole["text"]
    assert resumed["is_right"]
    assert resumed["problems"][:2] == [0, 0]


def test_a_run_goes_on_with_and_without_torch_compile(trainings):
    whole = trainings.run("Uncompiled", STEPS, engine=False)

    trainings.run("Compiled", STEPS, death="trainer:3")
    assert "resumed 3 memory" in trainings.run("Uncompiled", STEPS, death="trainer:5", restarted=3)
    resumed = trainings.run("Compiled", STEPS, restarted=5)

    assert resumed["resumed"] == [5, "memory"]
    assert resumed["facts"] == whole["facts"]
