"""Rules that are left out, one at a time, and the test of the quick tier that notices: ``left_out.py DIRECTORY``.

A rule is a condition in a function. A condition that is left out is never true, a part of ``and`` always true. A test
that hangs does not count as one that notices. All tests are collected once; each rule is left out in a fork of that
process.
"""

import ast
import contextlib
import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType

import pytest
from support import mutants


@dataclass(frozen=True)
class Rule:
    """A condition in a function of a file."""

    file: str
    function: str
    text: str


RULES: dict[str, list[tuple[str, str, str]]] = {
    "core/test_core.py::test_a_capture_that_is_being_written_is_held_and_then_stored": [
        ("core/core.py", "Core._shows_nothing_new", "self.ranks.all[number].slots != slots"),
    ],
    "core/test_core.py::TestLevelsByTime::test_the_first_capture_is_stored_at_once_and_the_next_one_a_minute_later": [
        ("core/coordinator.py", "Coordinator._grant_level", "not level.is_open"),
        ("core/coordinator.py", "Coordinator._grant_due", "not is_due and (not ahead)"),
        ("core/job.py", "JobCore._with_newest", "not (wants.is_preempted or self.node.order.is_preempted)"),
    ],
    "core/test_core.py::TestLevelsByTime::"
    "test_what_a_level_failed_to_store_stays_held_for_the_level_that_stores_it_instead": [
        ("core/job.py", "JobCore._hold_slots", "key_of(slot) not in keys"),
    ],
    "core/test_core.py::TestMemory::test_a_refusal_is_reported_and_tried_again": [
        ("core/core.py", "Core._update_trainers", "state != rank.last_sent"),
    ],
    "core/test_core.py::TestMemory::test_a_returned_slot_goes_unless_it_is_held": [
        ("core/coordinator.py", "Coordinator._grant_level", "ranks and self._is_training_on_all()"),
    ],
    "core/test_core.py::TestNames::test_a_name_is_not_given_before_the_fastest_level_that_has_the_step_gave_it": [
        ("core/job.py", "JobCore.given_names", "not any((self._is_to_name(faster, named) for faster in range(index)))"),
        ("core/job.py", "JobCore._is_to_name", "level.progress is GrantProgress.LISTING"),
        ("core/job.py", "JobCore._is_to_name", "named.key in level.stored"),
    ],
    "core/test_core.py::TestNames::test_a_name_is_given_once_the_level_has_the_step": [
        ("core/tasks.py", "LevelTasks._names_to_set", "named.key in level.stored"),
    ],
    "core/test_core.py::TestOtherNodes::test_a_report_on_an_earlier_grant_of_the_same_step_does_not_count": [
        ("core/coordinator.py", "Coordinator._count_grant", "report.version != level.version"),
    ],
    "core/test_core.py::TestOtherNodes::test_trainers_hear_that_a_node_is_not_reached_and_that_it_is_back": [
        ("core/coordinator.py", "Coordinator.receive", "report.coordinator != self.number"),
        ("core/job.py", "JobCore.alerts", "silent and (not self._is_alone)"),
        ("core/job.py", "_others", "settings.node == COORDINATOR_NODE"),
        ("core/job.py", "_unreached", "COORDINATOR_NODE in silent"),
    ],
    "core/test_core.py::TestRequiredSteps::test_one_that_a_slow_level_copies_takes_no_grant_from_a_faster_one": [
        ("core/coordinator.py", "Coordinator._grant_next", "self._copies_from_faster(index)"),
        ("core/coordinator.py", "Coordinator._overtake_grants", "self._may_be_overtaken(index)"),
    ],
    "core/test_core.py::TestRequiredSteps::test_what_is_protected_stays_while_a_trainer_with_fewer_slots_restores": [
        ("core/node.py", "Node.keys_to_hold", "self.last_protected is not None"),
    ],
    "core/test_core.py::TestRequiredSteps::test_one_that_is_to_be_protected_takes_the_place_of_a_grant_ahead": [
        (
            "core/coordinator.py",
            "Coordinator._grant_required",
            "not self._copies_from_faster(index) and self._may_read_slots(key)",
        ),
        ("core/coordinator.py", "Coordinator._required_at", "self.levels[index].is_redundancy"),
        ("core/tasks.py", "LevelTasks._write", "len(slots) < len(ranks)"),
    ],
    "core/test_core.py::TestSeveralLevels::test_a_level_of_one_node_is_not_copied_from_a_shared_one": [
        ("core/coordinator.py", "Coordinator._grant_copy", "level.passes_a_multiple(newest)"),
        ("core/coordinator.py", "Coordinator._faster", "self._may_copy(faster, index)"),
        ("core/coordinator.py", "Coordinator._may_copy", "self.levels[index].settings.is_shared"),
    ],
    "core/test_core.py::TestSeveralLevels::test_a_level_that_still_reads_an_older_step_crowds_out_the_next_one": [
        ("core/coordinator.py", "Coordinator._count_level", "level.is_listing"),
        ("core/coordinator.py", "Coordinator._count_grant", "progress.intersection(_GIVEN_UP)"),
        ("core/job.py", "JobCore._hold_slots", "not slot_of_key.is_held"),
    ],
    "core/test_core.py::TestSeveralLevels::test_a_required_step_that_no_level_can_take_does_not_stop_redundancy": [
        ("core/coordinator.py", "Coordinator._follows_reading", "self._is_due_along(level, reading, now)"),
        ("core/coordinator.py", "Coordinator._is_due_along", "level.is_redundancy"),
        ("core/coordinator.py", "Coordinator._key_to_read_first", "not level.is_ready"),
        ("core/coordinator.py", "Coordinator._faster", "self.levels[index].is_redundancy"),
        ("core/coordinator.py", "Coordinator._key_that_is_read", "level.reads_slots"),
    ],
    "core/test_core.py::TestStarts::test_a_start_that_is_older_does_not_change_the_job": [
        ("core/core.py", "Core._begin_job", "start < self.job_start"),
    ],
    "core/test_core.py::TestStarts::"
    "test_a_start_with_other_settings_begins_another_job_and_its_jobs_have_new_numbers": [
        ("core/core.py", "Core._begin_job", "self.job.settings == settings"),
    ],
    "core/test_core.py::TestStarts::test_ranks_of_a_node_with_different_settings_do_not_replace_each_others_job": [
        ("core/core.py", "Core._begin_job", "start == self.job_start"),
    ],
    "core/test_core.py::TestStarts::test_nothing_is_deleted_while_a_trainer_restores": [
        ("core/coordinator.py", "Coordinator.decide", "len(self.reports) == self.num_nodes"),
    ],
    "core/test_core.py::TestTheEnd::test_a_new_keeper_gives_nothing_up_before_it_knows_slots_and_files": [
        ("core/coordinator.py", "Coordinator._gather", "len(captures_left) == len(self.reports)"),
        ("core/coordinator.py", "Coordinator._grant_level", "not level.is_redundancy"),
    ],
    "core/test_core.py::TestTheEnd::test_a_preempted_training_has_its_newest_capture_stored": [
        (
            "core/job.py",
            "JobCore._with_newest",
            "self._rescued is None or not self.node.unanswered(Wants(required=frozenset({self._rescued})))",
        ),
    ],
    "core/test_core.py::TestTheEnd::test_a_required_step_that_only_a_faster_level_has_is_copied_before_the_end": [
        ("core/coordinator.py", "Coordinator._grant_what_is_left", "not missing"),
        ("core/coordinator.py", "Coordinator._grant_what_is_left", "not self._may_read_slots(key)"),
        ("core/coordinator.py", "Coordinator._keys_to_drain", "self._source_of(key, index) is not None"),
    ],
    "core/test_core.py::TestTheEnd::test_a_step_that_a_faster_level_may_have_is_not_given_up_before_it_is_listed": [
        ("core/coordinator.py", "Coordinator._give_up_what_nobody_has", "not self._is_storage_open()"),
    ],
    "core/test_core.py::TestRequiredSteps::test_one_that_a_level_may_have_is_not_lost_before_that_one_is_listed": [
        ("core/coordinator.py", "Coordinator._count_lost", "not self._is_storage_open()"),
        ("core/coordinator.py", "Coordinator._may_be_copied", "not level.is_open"),
    ],
    "core/test_core.py::TestTrainers": [
        (
            "core/coordinator.py",
            "Coordinator._is_level_drained",
            "all((level.is_done_with(key) for key in self._keys_to_drain(index)))",
        ),
    ],
    "core/test_core.py::TestWhatIsStoredFirst::test_a_failure_beside_a_grant_that_waits_lets_other_levels_go_on": [
        ("core/coordinator.py", "Coordinator._grant_level", "not level.is_ready"),
    ],
    "core/test_core.py::TestWhatIsStoredFirst::test_a_name_takes_the_place_of_a_write_that_nobody_requires": [
        (
            "core/coordinator.py",
            "Coordinator._key_to_read_first",
            "key <= begun and self._source_of(key, index) is None and (not is_missed(key, ranks))",
        ),
        ("core/coordinator.py", "Coordinator._required_at", "index == 0"),
        ("core/job.py", "JobCore._hold_slots", "rank.is_capturing"),
        ("core/tasks.py", "LevelTasks._watch", "not self._is_wanted(task, ranks)"),
        (
            "core/tasks.py",
            "LevelTasks._is_wanted",
            "self.level.grant != task.key or self.level.progress is not GrantProgress.WRITING",
        ),
    ],
    "core/test_core.py::test_a_capture_is_never_held_once_its_slot_may_be_chosen": [
        (
            "core/coordinator.py",
            "Coordinator._takes_newest_begun",
            "level.settings.every_n_steps is not None or level.is_redundancy or level.margin_steps > 0",
        ),
    ],
    "core/test_core_by_model.py::test_a_step_whose_write_was_overtaken_is_stored_later": [
        ("core/coordinator.py", "Coordinator._count_level", "not level.is_open"),
        ("core/coordinator.py", "Coordinator._grant_required", "key > begun"),
        ("core/core.py", "Core._shows_nothing_new", "number >= len(self.ranks.all)"),
        ("core/job.py", "JobCore._hold_slots", "slot.is_held"),
    ],
    "core/test_core_by_model.py::test_a_thread_that_hangs_works_alone_on_its_step_also_after_a_change_of_settings": [
        ("core/tasks.py", "LevelTasks.deadlines", "len(self.abandoned) < MAX_HANGING"),
        ("core/tasks.py", "LevelTasks._next_task", "not self.level.is_ready"),
        ("core/tasks.py", "LevelTasks._write", "key in self._keys_of_hanging_threads()"),
        ("core/tasks.py", "LevelTasks._watch", "now >= self._moved_at + self.level.settings.timeout_s"),
    ],
    "core/test_core_by_model.py::test_anything_may_happen_in_a_few_examples": [
        (
            "core/coordinator.py",
            "Coordinator._count_lost",
            "not any((key in level.complete for level in self._storage))",
        ),
        ("core/job.py", "JobCore._send_state", "self.coordinator is None and self._sent_report is not None"),
        ("core/retention.py", "is_expired", "num_newer >= level.keep_last"),
    ],
    "core/test_core_by_model.py::test_storage_is_not_starved_by_slow_redundancy": [
        ("core/coordinator.py", "Coordinator.deadlines", "level.due_at > now"),
        ("core/coordinator.py", "Coordinator._count_level", "level.grant is not None and level.is_under_way"),
        ("core/coordinator.py", "Coordinator._count_grant", "progress == {GrantProgress.STORED}"),
        ("core/coordinator.py", "Coordinator._source_of", "key in level.complete"),
        ("core/core.py", "Core._advance_life", "self.phase is Phase.OVER and (not was_over)"),
        ("core/job.py", "JobCore.__init__", "settings.node == COORDINATOR_NODE"),
        ("core/job.py", "JobCore.receive", "self.coordinator is None and message != self.node.order"),
        ("core/job.py", "JobCore.deadlines", "self._protected_at + UNPROTECTED_S > now"),
        ("core/job.py", "JobCore._is_alone", "self.coordinator.is_alone"),
        ("core/job.py", "JobCore._exchange", "report != self._sent_report"),
        ("core/tasks.py", "LevelTasks.deadlines", "not self.level.is_ready"),
        ("core/tasks.py", "LevelTasks.ended", "self.task.number != event.number"),
        ("core/tasks.py", "LevelTasks._next_task", "self.level.progress is GrantProgress.LISTING"),
    ],
    "memory/test_slot_choice.py::test_a_held_a_busy_and_the_newest_whole_slots_are_never_chosen": [
        ("memory/slot_choice.py", "_replaceable", "not view.is_held"),
        ("memory/slot_choice.py", "_replaceable", "view not in untouched"),
    ],
    "memory/test_slot_choice.py::test_slots_are_freed_that_could_be_chosen_and_are_not_needed": [
        ("memory/slot_choice.py", "_replaceable", "view.slot_id not in busy"),
    ],
    "memory/test_slot_choice.py::test_one_capture_that_all_ranks_have_stays": [
        ("memory/slot_choice.py", "kept_whole", "runs_ahead"),
    ],
    "memory/test_slot_memory.py::test_a_discarded_capture_is_gone_and_its_number_is_not": [
        ("memory/slots.py", "Slot._phase", "begin == 0"),
        ("memory/slots.py", "Slot._phase", "self.load(SlotWord.END) == begin"),
    ],
    "memory/test_slot_memory.py::test_a_slot_may_be_a_file_without_a_name_that_has_all_its_space": [
        ("memory/slots.py", "Slot.view", "self.load(SlotWord.SEQUENCE) == sequence"),
    ],
    "memory/test_slot_memory.py::test_a_trainer_that_dies_between_two_stores_leaves_nothing_that_seems_whole": [
        ("memory/slots.py", "Slot._phase", "self.load(SlotWord.VOID) == sequence"),
    ],
    "memory/test_slot_memory.py::test_other_memory_is_no_slot_and_no_node_page": [
        ("memory/words.py", "NodePage.attach", "not is_page or os.pread(descriptor, 8, 0) != word_bytes(_NODE_MAGIC)"),
    ],
    "peers/test_listener.py::test_a_guess_is_no_proof": [
        ("peers/reader.py", "PeerReader._read", "not answer.is_not_yet"),
        ("peers/server.py", "Peers.begin", "own.port"),
    ],
    "peers/test_listener.py::test_every_interface_is_refused": [
        ("peers/listener.py", "listener_at", "address.is_unspecified"),
        ("peers/listener.py", "ReservedPort.__init__", "host in ('0.0.0.0', '::')"),
    ],
    "peers/test_listener.py::test_many_connections_of_strangers_are_bounded": [
        ("peers/listener.py", "ConnectionLimit.enter", "self._num_unknown >= MAX_UNKNOWN"),
    ],
    "peers/test_listener.py::test_a_proof_by_another_secret_is_none": [
        ("peers/secret.py", "handshake", "not hmac.compare_digest(proof, expected_proof)"),
    ],
    "peers/test_listener.py::test_the_same_settings_again_end_no_connection": [
        ("peers/server.py", "Peers.begin", "settings == self._settings"),
    ],
    "peers/test_listener.py::test_the_secret_of_another_start_is_refused": [
        ("peers/server.py", "Peers._accept", "self._limit.enter()"),
    ],
    "peers/test_listener.py::test_what_strangers_send_takes_no_memory": [
        (
            "peers/listener.py",
            "ConnectionLimit.refuse",
            "host not in self._named_hosts and len(self._named_hosts) < _MAX_NAMED",
        ),
    ],
    "shard/test_attacks.py::test_a_layout_that_cannot_be_is_refused": [
        ("shard/layout.py", "Layout.plan", "spec.name in entries"),
        ("shard/layout.py", "Layout.plan", "spec.name == '__metadata__'"),
    ],
    "shard/test_attacks.py::test_a_manifest_with_a_right_digest_and_wrong_content_is_refused": [
        ("shard/manifest.py", "CaptureMeta.from_fields", "meta.rank >= meta.world_size"),
        ("shard/manifest.py", "Manifest.decode", "not isinstance(shards, list)"),
        ("shard/manifest.py", "_shard", "not isinstance(fields, dict)"),
        ("shard/manifest.py", "_shard", "not 8 <= place.header_bytes <= min(place.size_bytes, 8 + MAX_HEADER_BYTES)"),
        ("shard/manifest.py", "_check_places", "end != manifest.size_bytes"),
        ("shard/manifest.py", "_checksums", "checksums.whole != fields.whole"),
    ],
    "shard/test_attacks.py::test_a_misleading_header_is_refused": [
        (
            "shard/layout.py",
            "Layout.parse",
            "length > MAX_HEADER_BYTES or 8 + length > size_bytes or 8 + length > len(head)",
        ),
        ("shard/layout.py", "Layout.parse", "not isinstance(entries, dict)"),
        ("shard/layout.py", "Layout.parse", "start != position"),
        ("shard/layout.py", "Layout.parse", "end - start != spec.nbytes"),
        ("shard/layout.py", "Layout.parse", "len(header) + position != size_bytes"),
        ("shard/layout.py", "_no_duplicates", "len(result) != len(pairs)"),
        ("shard/layout.py", "_checked_metadata", "not isinstance(metadata, dict)"),
        ("shard/layout.py", "_checked_metadata", "not all((isinstance(value, str) for value in metadata.values()))"),
        ("shard/layout.py", "_is_size", "type(value) is int"),
        ("shard/layout.py", "_checked_entry", "not isinstance(entry, dict)"),
        ("shard/layout.py", "_checked_entry", "set(entry) != {'dtype', 'shape', 'data_offsets'}"),
        ("shard/layout.py", "_checked_entry", "not isinstance(dtype, str)"),
        ("shard/layout.py", "_checked_entry", "dtype not in ITEM_BITS"),
        ("shard/layout.py", "_checked_entry", "not all(map(_is_size, shape))"),
    ],
    "shard/test_attacks.py::test_another_version_says_what_to_do": [
        ("shard/manifest.py", "Manifest.decode", "version != FORMAT_VERSION"),
    ],
    "shard/test_golden.py::test_a_flipped_bit_in_any_byte_of_the_manifest_is_found": [
        ("shard/manifest.py", "Manifest.decode", "data != _HEAD + got + _MIDDLE + body + _TAIL"),
    ],
    "shard/test_golden.py::test_an_order_that_is_no_permutation_of_the_dimensions_is_refused_before_anything_is_read": [
        ("shard/limits.py", "load_json", "not next_level"),
        ("shard/manifest.py", "Manifest.of", "shard.meta.rank == rank"),
        ("shard/manifest.py", "Manifest.decode", "fields.pop('format', None) != FORMAT"),
        ("shard/manifest.py", "_is_facts", "len(value) > MAX_NAME"),
        ("shard/manifest.py", "_is_facts", "len(value) > MAX_DIMS"),
    ],
}
"""File, function and text of the rules that a test notices. The text is what ``ast.unparse`` makes of it."""


class _LeaveOut(ast.NodeTransformer):
    """Replaces the nodes whose text is the rule's, in one function."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._names: list[str] = []
        self.num_replaced = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            self._names.append(node.name)
            self.generic_visit(node)
            self._names.pop()
            return node
        if ".".join(self._names) == self._rule.function and self._is_rule(node):
            self.num_replaced += 1
            return ast.copy_location(ast.Constant(value=False), node)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            return self._visit_and(node)
        return self.generic_visit(node)

    def _is_rule(self, node: ast.AST) -> bool:
        return isinstance(node, ast.expr) and ast.unparse(node) == self._rule.text

    def _visit_and(self, node: ast.BoolOp) -> ast.AST:
        """A part that is left out must not decide."""
        num_replaced = self.num_replaced
        values = []
        for value in node.values:
            new = self.visit(value)
            if self.num_replaced == num_replaced or not _is_false(new):
                values.append(new)
            num_replaced = self.num_replaced
        if len(values) == 1:
            return values[0]
        node.values = values
        return node


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def leave_out(rule: Rule) -> None:
    """Change the package, in this process. Raises: AssertionError, if the function does not have the rule once."""
    path = mutants.PACKAGE / rule.file
    changer = _LeaveOut(rule)
    tree = ast.fix_missing_locations(changer.visit(ast.parse(path.read_text())))
    assert changer.num_replaced == 1, f"{rule} is there {changer.num_replaced} times, not once"
    code = compile(tree, path, "exec")
    for name in rule.function.split("."):
        [code] = [part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name]
    _function_of(rule).__code__ = code


def _function_of(rule: Rule) -> FunctionType:
    module = importlib.import_module("lazysnap." + rule.file.removesuffix(".py").replace("/", "."))
    *classes, name = rule.function.split(".")
    owner = module
    for class_name in classes:
        owner = getattr(owner, class_name)
    function = inspect.getattr_static(owner, name)
    for wrapped in ("fget", "__func__"):  # of a property; of a method of the class
        function = getattr(function, wrapped, function)
    return function


def changes() -> list[mutants.Change]:
    rules = [(test, Rule(*place)) for test, places in RULES.items() for place in places]
    return [
        mutants.Change(f"{rule.file}: {rule.function}: {rule.text}", partial(leave_out, rule), (f"tests/{test}",))
        for test, rule in rules
    ]


class RulesOneByOne:
    """Leaves out each rule, once pytest has collected the tests that notice."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        mutants.main(changes(), partial(_run_collected, session))
        return True


def _run_collected(session: pytest.Session, tests: Sequence[str]) -> int:
    """Run some of the tests that were collected, as ``pytest.main`` would; the exit status."""
    [test] = tests
    session.items = [item for item in session.items if f"{item.nodeid}::".startswith((f"{test}::", f"{test}["))]
    assert session.items, test
    with contextlib.suppress(session.Failed):
        session.config.pluginmanager.getplugin("main").pytest_runtestloop(session)
    status = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
    session.config.hook.pytest_sessionfinish(session=session, exitstatus=status)
    return status


if __name__ == "__main__":
    options = ["-x", "-q", "-s", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:randomly"]
    options += ["--tier", "quick", "--timeout", "0"]
    sys.exit(pytest.main([*options, *(f"tests/{test}" for test in RULES)], plugins=[RulesOneByOne()]))
