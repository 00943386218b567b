"""The keeper's decisions, without processes."""

from lazysnap.keeper.lifecycle import Event, Phase, next_phase


def test_a_trainers_death_leads_to_lingering_and_its_goodbye_to_draining():
    assert next_phase(Phase.ATTACHED, Event.TRAINER_DEAD) is Phase.LINGERING
    assert next_phase(Phase.ATTACHED, Event.GOODBYE) is Phase.DRAINING
    assert next_phase(Phase.DRAINING, Event.TRAINER_DEAD) is Phase.DRAINING
    assert next_phase(Phase.LINGERING, Event.HELLO) is Phase.ATTACHED


def test_from_every_phase_a_keeper_without_trainer_comes_to_an_end():
    for start in Phase:
        phase = next_phase(start, Event.TRAINER_DEAD)
        for event in (Event.TIME_UP, Event.TIME_UP, Event.TIME_UP):
            phase = next_phase(phase, event)
        assert phase is Phase.GONE


def test_gone_is_the_end_whatever_happens():
    assert {next_phase(Phase.GONE, event) for event in Event} == {Phase.GONE}


def test_time_alone_never_ends_a_keeper_with_a_trainer():
    assert next_phase(Phase.ATTACHED, Event.TIME_UP) is Phase.ATTACHED
