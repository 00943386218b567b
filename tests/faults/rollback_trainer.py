"""A small deterministic training that rolls back; the fault tests run it as a process and kill it.

usage: rollback_trainer.py DIRECTORY MODE JOURNAL RESULT

``watch``: batch 7 makes the loss NaN. ``never``: that batch is not there. ``by hand``: step 7 spoils the weights and
is captured; then the loop goes back to step 6. DIRECTORY ``-``: memory alone.
"""

import sys

import torch
from support.bits import digest
from support.waiting import TIMEOUT_S
from support.watching import Watch
from trainer import Journal

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

BAD = 7
LAST = 10


class Position:
    """Where the loop stands in the data."""

    is_data_position = True

    def __init__(self, batches: list[int]) -> None:
        self.batches = batches
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == len(self.batches):
            raise StopIteration
        number = self.batches[self.at]
        self.at += 1
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(number))
        return batch * float("nan") if number == BAD and len(self.batches) == LAST else batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def main() -> None:
    directory, mode, journal_path, result_path = sys.argv[1:]
    journal = Journal(journal_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 96), torch.nn.Dropout(0.2), torch.nn.Linear(96, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    count = LAST + 4 * (mode == "by hand")
    data = Position([number for number in range(count) if mode == "watch" or number != BAD])
    past = {"rolled back": False}
    levels = () if directory == "-" else (PersistentLevel(directory, every_n_steps=1, keep_last=2),)
    config = SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=30.0))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer, "data": data})
    snapshot = engine.restore("latest")
    is_good = all(bool((parameter < 50).all()) for parameter in model.parameters())
    step = snapshot.step if snapshot else 0
    journal.write("resumed", step, "good" if is_good else "bad")
    engine._wait_ready(timeout_s=TIMEOUT_S)
    watch = Watch(engine)
    for batch in data:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch.see(loss):
            step = watch.last.step
            journal.write("back", step)
            continue
        step += 1
        if mode == "by hand" and step > 6 and not past["rolled back"] and not (snapshot and is_good):
            with torch.no_grad():
                model[0].weight += 100
        engine.boundary(step)
        engine.gate()
        if mode == "by hand" and step == 7 and not past["rolled back"] and not (snapshot and is_good):
            if levels:
                engine.wait(step, timeout_s=TIMEOUT_S)
            step = engine.rollback(steps=2).step
            past["rolled back"] = True
            journal.write("back", step)
    journal.write("closed", engine.close())
    with open(result_path, "w") as result:
        result.write(digest([model.state_dict(), optimizer.state_dict()["state"]]))


if __name__ == "__main__":
    main()
