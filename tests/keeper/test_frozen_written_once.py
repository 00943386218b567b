"""Frozen tensors that several nodes hold are written by one of them where all nodes see the level."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest
from support.catalogue import inventory_of
from support.listing import files_below
from support.node_rig import check, entries_at, frozen_slot
from support.ports import free_port
from support.waiting import TIMEOUT_S, until

from lazysnap.config import PersistentLevel
from lazysnap.levels import open_store
from lazysnap.links.secret import draw_secret


def being_written(url):
    """Files of frozen tensors that have their temporary name."""
    return {path for path in files_below(url, ".*.safetensors.tmp-*") if path.parent.name.startswith("frozen-")}


def shared_level(path, **settings):
    return PersistentLevel(path / "shared", every_n_steps=1, shared=True, **settings)


@pytest.mark.parametrize("source", ["memory", "disks of the nodes"])
def test_frozen_tensors_of_two_nodes_are_written_once_at_a_level_that_both_see(rig, tmp_path, passing, source):
    level, disk = shared_level(tmp_path), PersistentLevel(tmp_path / "disk", every_n_steps=1)
    levels = (level,) if source == "memory" else (disk, level)
    slot, reference = frozen_slot()
    trainer = rig(*levels, nodes=2, frozen={reference.digest: slot}, start=None)
    trainer.levels_of = lambda node: tuple(
        PersistentLevel(tmp_path / f"disk {node}", every_n_steps=1) if one is disk else one for one in levels
    )
    trainer.begin()
    written, goes_on = set(), threading.Event()

    def passed(name):
        if name == "level.local.created" and (found := being_written(level.url)):
            written.update(found)
            if len(written) > 1:
                goes_on.set()
            assert goes_on.wait(TIMEOUT_S)
        if name == "keeper.frozen.wait":  # the other node
            goes_on.set()

    passing(passed)
    step = trainer.store(frozen=reference)

    assert len(written) == 1
    assert len(entries_at(level)) == 2
    check(level, step)
    open_store(level.url).verify_frozen(reference.digest)
    slot.close()


def test_nodes_that_hold_different_frozen_tensors_write_them_at_the_same_time(rig, tmp_path, passing):
    level = shared_level(tmp_path)
    held = [frozen_slot(size) for size in (400_000, 500_000)]
    trainer = rig(level, nodes=2, frozen={reference.digest: slot for slot, reference in held})
    together = threading.Barrier(2, timeout=TIMEOUT_S)

    def passed(name):
        if name == "level.local.created" and threading.current_thread() not in met and being_written(level.url):
            met.add(threading.current_thread())
            together.wait()

    met = set()
    passing(passed)
    step = until(lambda: trainer.granted)
    trainer.step = step
    for rank, (_, reference) in zip(trainer.ranks, held, strict=True):
        rank.finish(rank.begin(step, trainer.run_id, frozen=reference))
    trainer.look()
    trainer.wait(level, step)

    assert not together.broken
    assert len(met) == 2
    for slot, reference in held:
        open_store(level.url).verify_frozen(reference.digest)
        slot.close()


@pytest.mark.slow
def test_a_node_that_hangs_while_it_writes_frozen_tensors_costs_a_snapshot_and_not_the_next(rig, tmp_path, passing):
    level = shared_level(tmp_path, timeout_s=1.0)
    slot, reference = frozen_slot()
    trainer = rig(level, nodes=2, frozen={reference.digest: slot})
    hanging, comes_back = [], threading.Event()

    def passed(name):
        if name == "level.local.created" and not hanging and being_written(level.url):
            hanging.append(name)
            assert comes_back.wait(TIMEOUT_S)

    passing(passed)
    trainer.train_until(lambda: trainer.complete(level), frozen=reference)

    assert hanging
    assert trainer.failed(level, 0) or trainer.failed(level, 1)
    open_store(level.url).verify_frozen(reference.digest)
    comes_back.set()
    slot.close()


@pytest.mark.slow
def test_a_node_that_waited_until_its_deadline_writes_frozen_tensors_itself(rig, tmp_path, passing):
    level = shared_level(tmp_path)
    slot, reference = frozen_slot()
    trainer = rig(level, nodes=2, frozen={reference.digest: slot}, start=None)
    trainer.levels_of = lambda node: (level if node == 0 else shared_level(tmp_path, timeout_s=2.0),)
    trainer.begin()
    written, first, second = set(), threading.Event(), threading.Event()

    def passed(name):
        if name == "level.local.created" and (found := being_written(level.url)):
            written.update(found)
            (second if len(written) > 1 else first).set()
            assert second.wait(TIMEOUT_S)

    passing(passed)
    trainer.step = until(lambda: trainer.granted)
    for rank in trainer.ranks:
        rank.finish(rank.begin(trainer.step, trainer.run_id, frozen=reference))
        trainer.look()
        assert first.wait(TIMEOUT_S)
    trainer.wait(level, trainer.step)

    assert second.is_set()
    open_store(level.url).verify_frozen(reference.digest)
    slot.close()


class NodeProcess:
    """See ``base_node``."""

    def __init__(self, node, port, url, secret, **faults):
        script = str(pathlib.Path(__file__).parent / "base_node.py")
        arguments = [sys.executable, script, str(node), str(port), url]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        env = {**os.environ, "PYTHONPATH": path, **faults}
        self.popen = subprocess.Popen(arguments, stdin=subprocess.PIPE, env=env, text=True)
        self.tell(secret.hex)

    def tell(self, line):
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def kill(self):
        self.popen.kill()
        self.popen.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_if_the_node_that_writes_frozen_tensors_is_killed_the_other_one_writes_them(tmp_path, killed):
    """Also node 0, whose keeper says who writes."""
    url, port, secret, log = str(tmp_path / "shared"), free_port(), draw_secret(), tmp_path / "points"
    log.touch()
    faults = {killed: {"LAZYSNAP_FAULT": "level.local.created:1:hang"}, 1 - killed: {"LAZYSNAP_FAULT_LOG": str(log)}}
    nodes = [NodeProcess(node, port, url, secret, **faults[node]) for node in (0, 1)]
    try:
        nodes[killed].tell("capture")
        until(lambda: being_written(url))
        nodes[1 - killed].tell("capture")
        until(lambda: "keeper.frozen.wait" in log.read_text())
        store = open_store(url)
        assert inventory_of(store).frozen == ()

        nodes[killed].kill()

        (frozen,) = until(lambda: inventory_of(store).frozen)
        store.verify_frozen(frozen.digest)
    finally:
        for node in nodes:
            node.kill()
