"""Worlds of processes with gloo."""

import json
import tempfile
from pathlib import Path

from support.zygote import Zygote, ended

HERE = Path(__file__).parent
DEADLINE_S = 120.0


class Worlds:
    """Runs functions of ``ranks`` in worlds of any size."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote

    def run(self, size: int, job: str, **arguments) -> list:
        """What ``ranks.job(**arguments)`` returned on each rank. Raises: AssertionError, with what a rank said."""
        with tempfile.TemporaryDirectory() as folder:
            common = {"size": size, "job": job, "arguments": arguments, "folder": folder}
            children = [
                self._zygote.start(
                    [str(HERE / "ranks.py"), json.dumps({**common, "rank": rank})],
                    {"GLOO_SOCKET_IFNAME": "lo", "OPENBLAS_NUM_THREADS": "1"},
                    Path(folder, f"{rank}.output"),
                )
                for rank in range(size)
            ]
            statuses = ended(children, DEADLINE_S)
            told = [f"rank {rank}: {Path(folder, f'{rank}.output').read_text()[-4000:]}" for rank in range(size)]
            assert set(statuses) == {0}, "\n".join([f"the ranks ended with {statuses}", *told])
            return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
