"""Worlds of stock Accelerate, started as a launcher starts them."""

import json
import pathlib
import sys

import pytest
from support.ports import free_port
from support.zygote import ended

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 250


class Ranks:
    """Runs ``stock_rank.py`` with one rank or several."""

    def __init__(self, zygote, root: pathlib.Path, python: str) -> None:
        """``python``: what makes checkpoints in the background."""
        self._zygote, self._python = zygote, python
        self.root = root

    def start(self, mode: str, world: int = 1, *, env: dict | None = None, **settings) -> list:
        text = json.dumps({"mode": mode, "result": str(self.root / mode), **settings})
        common = {"GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true", **(env or {})}
        common["LAZYSNAP_TEST_PYTHON"] = self._python
        if world > 1:
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        return [
            self._zygote.start(
                [str(HERE / "stock_rank.py"), text],
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else common,
                self.root / f"{mode}.{rank}.output",
            )
            for rank in range(world)
        ]

    def run(self, mode: str, world: int = 1, **settings) -> list[dict]:
        """By rank what it returned."""
        statuses = ended(self.start(mode, world, **settings), TIMEOUT_S)
        told = [(self.root / f"{mode}.{rank}.output").read_text()[-4000:] for rank in range(world)]
        assert set(statuses) == {0}, "\n".join(told)
        return [json.loads((self.root / f"{mode}.{rank}").read_text()) for rank in range(world)]


@pytest.fixture
def ranks(zygote, tmp_path, forking_python):
    return Ranks(zygote, tmp_path, forking_python)


@pytest.fixture
def quick_exports(forking_python, monkeypatch):
    """Each process that makes a checkpoint in the background is forked from one that has imported torch.

    And training waits for the keeper of a busy machine before it lets Accelerate write a checkpoint.
    """
    monkeypatch.setattr(sys, "executable", forking_python)
    monkeypatch.setattr("lazysnap.integrations.accelerate.directories._KEPT_WITHIN_S", 60.0)
