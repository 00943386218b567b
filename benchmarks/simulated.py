"""What one rank of N does, with nothing but the pure functions: plan, restart, retention; for scale.py."""

import json
import time
from collections.abc import Callable
from typing import Any

import imagined
from imagined import ImaginedStorage, Small, Whole

from lazysnap.config import PersistentLevel
from lazysnap.engine.assembly import Assembly, OpenShard
from lazysnap.engine.holders import Holders, complete
from lazysnap.engine.survey import fields_of, inventory_of, merged, sites_of
from lazysnap.levels.belongings import Belongings, Told
from lazysnap.levels.retention import Share
from lazysnap.levels.shards import entry_of
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import Entry, Inventory, candidates
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import directory_name
from lazysnap.shard.stem import Stem
from lazysnap.state.codec import tensor_names
from lazysnap.topology import places

KEPT = 3
"""Snapshots on storage; and whole captures in each keeper's memory."""


class Clock:
    """Processor time of this process, without what was spent on making things up."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, work: Callable[[], Any], storage: ImaginedStorage | None = None) -> Any:
        """Do it and count it."""
        started = time.process_time()
        before = storage.made_up_s if storage else 0.0
        result = work()
        self.seconds += time.process_time() - started - ((storage.made_up_s - before) if storage else 0.0)
        return result


def parsed(texts: list[str]) -> list[Any]:
    """As ``World.exchange`` has it."""
    return [json.loads(text) for text in texts]


def plan(kind: str, ranks: int) -> dict[str, Any]:
    """One rank's planning: who sits where, its share, the layout, what is written beside it."""
    rank = 0
    texts = [json.dumps(["making the engine", name]) for name in imagined.nodes(ranks)]
    common = [json.dumps(["the first boundary", "0" * 32])] * ranks
    imagined.tensors()
    clock = Clock()

    def work() -> int:
        at = places([name for _, name in parsed(texts)])
        digests = parsed(common)
        assert len({digests[place.rank][1] for place in at if place.node == at[rank].node}) == 1
        layout, meta = imagined.capture(kind, rank, ranks, 1)
        return len(imagined.manifest_of(meta, len(layout.header), layout.size_bytes).encode())

    manifest_bytes = clock.run(work)
    held = sum(4 * imagined.volume(part) for _, _, part in imagined.pieces(kind, rank, ranks).values())
    told = sum(map(len, texts)) + sum(map(len, common))
    return {"cpu_s": clock.seconds, "manifest_bytes": manifest_bytes, "shard_bytes": held, "told_bytes": told}


def memory_answers(ranks: int) -> list[str]:
    """What every rank's keeper holds, as it is told to all."""
    node = imagined.nodes(ranks)
    return [
        json.dumps(["what is in memory", ["", [fields_of(held(rank, ranks, node[rank]))]]]) for rank in range(ranks)
    ]


def held(rank: int, ranks: int, node: str) -> Inventory:
    """One keeper's captures."""
    facts = (imagined.RUN, imagined.STARTED)
    entries = tuple(
        Entry("memory", 0, *facts, 10 + n, rank, ranks, f"{rank % 8}/{n}", node=node, generation=imagined.GENERATION)
        for n in range(KEPT)
    )
    return Inventory(f"memory of {rank}", entries)


def resolve(kind: str, taken: int, ranks: int, rank: int) -> dict[str, Any]:
    """One rank's restart from storage after the memory was lost (told of all the same), up to reading its tensors.

    The other ranks' answers have the size and form of its own.
    """
    storage = ImaginedStorage(taken, range(1, KEPT + 1), Whole(kind))
    store = SnapshotStore(storage)
    at = imagined.place_list(ranks)
    memory = memory_answers(ranks)
    clock = Clock()
    # Rank 0 lists for all.
    listing = clock.run(lambda: store.listing().to_fields(), storage)
    listed = dict(storage.asked)
    names = [json.dumps(["what is on storage", [["s3://imagined", listing]] if n == 0 else []]) for n in range(ranks)]

    def survey() -> tuple[list[Inventory], Inventory]:
        found = [inventory_of(item) for _, [_, inventories] in parsed(memory) for item in inventories]
        [site] = sites_of([answer for _, answer in parsed(names)], at)
        return found, store.inventory(site.listing, (site.members.index(rank), len(site.members)))

    storage.asked.clear()
    found, mine = clock.run(survey, storage)
    survey_reads = storage.asked["get"]
    text = json.dumps(["what of it is whole", [fields_of(mine)]])
    answers = [text.replace(f'"rank": {rank},', f'"rank": {other},') for other in range(ranks)]
    if taken > ranks:
        pairs = [(f'"rank": {rank + ranks},', f'"rank": {other + ranks},') for other in range(ranks)]
        answers = [answer.replace(*pair) for answer, pair in zip(answers, pairs, strict=True)]

    def agree() -> Any:
        inventories = found + merged([inventory_of(item) for _, [item] in parsed(answers)])
        return candidates(inventories)[-1]  # the oldest on storage: all were looked at

    chosen_plan = clock.run(agree)
    storage.asked.clear()
    opened = clock.run(lambda: open_part(kind, store, chosen_plan, rank, ranks), storage)
    return {
        "cpu_s": clock.seconds,
        "lists": sum(listed.values()),
        "survey_reads": survey_reads,
        "shards_opened": opened,
        "told_bytes": sum(map(len, memory)) + sum(map(len, names)) + sum(map(len, answers)),
    }


def open_part(kind: str, store: SnapshotStore, plan: Any, rank: int, ranks: int) -> int:
    """Open shards until nothing is missing, as ``engine.part`` does; how many."""
    taken = plan.world_size
    chosen = {number: offers[0] for number, offers in enumerate(plan.sources)}
    same = taken == ranks
    neighbours = range(rank // 8 * 8, rank // 8 * 8 + 8) if same else ()
    holders = Holders(chosen, rank if same else rank * taken // ranks, neighbours, lambda name: ())
    own = rank % taken
    assembly = Assembly(own, lambda name, shape: imagined.box(kind, shape, rank, ranks))
    opened = []

    def add(number: int) -> Any:
        manifest = store.read_manifest(chosen[number])
        layout, _ = imagined.capture(kind, number, taken, plan.step)
        parsed_layout = Layout.parse(layout.header, layout.size_bytes)
        assembly.add(OpenShard(number, parsed_layout, manifest.meta, lambda wanted: None, f"rank {number}"))
        opened.append(number)
        holders.take(number)
        return manifest.meta

    names = tensor_names(add(own).state)
    shapes = imagined.tensors()
    assembly.want(name for name in names if imagined.volume(imagined.box(kind, shapes[name], rank, ranks)[1]))
    for other in range(rank, taken, ranks):
        if other != own:
            add(other)
    complete(assembly, holders, add, "imagined")
    return len(opened)


def retention(ranks: int) -> dict[str, Any]:
    """What one rank asks of a level after each snapshot, once it runs evenly; manifests are tiny here."""
    rank = ranks // 2
    storage = ImaginedStorage(ranks, range(1, KEPT + 2), Small())
    store = SnapshotStore(storage)
    level = PersistentLevel("imagined", keep_last=KEPT)
    own = Belongings(store, level, Share.of_rank(rank, ranks))
    kept = tuple(range(2, KEPT + 2))
    gone = own.tidy(Told(imagined.RUN, imagined.GENERATION, kept), frozenset(), lambda: None)  # looks round, once
    assert gone == [1], gone
    last = KEPT + 2
    storage.steps = [*kept, last]  # the others deleted theirs, too
    manifest = storage.manifest(rank, last)
    meta = manifest.meta
    entry = entry_of(meta, store.url, store.speed, (directory_name(last), Stem.of_rank(rank, ranks)))
    told = Told(imagined.RUN, imagined.GENERATION, (*kept[1:], last))
    storage.asked.clear()
    clock = Clock()

    def work() -> list[int]:
        own.confirm(entry, manifest, lambda: None)
        own.surplus(told, frozenset(), 5)
        return own.tidy(told, frozenset(), lambda: None)

    gone = clock.run(work, storage)
    assert gone == [2], gone
    names = ("list", "get", "stamp", "size", "is_leased", "delete", "delete_directory")
    each = {name: storage.asked[name] for name in names}
    return {"cpu_s": clock.seconds, "operations": sum(storage.asked.values()), **each}
