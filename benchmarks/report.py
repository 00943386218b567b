"""Tables, targets and picture of the stall benchmark, from its JSON lines.

python benchmarks/report.py runs/stall/stall.jsonl      shows them again
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Results = Mapping[str, dict[str, Any]]
ASYNCHRONOUS = ("lightning-async", "dcp-thread", "dcp-thread-cached", "dcp-process", "dcp-process-cached")
MEMORY, DISK, SYNCHRONOUS = "lazysnap-memory", "lazysnap-disk", "torch-save"


def measured(results: Results) -> list[dict[str, Any]]:
    """The methods that gave a result, in order."""
    return [r for name, r in results.items() if name not in ("machine", "limits") and "error" not in r]


def ms(seconds: float | None) -> str:
    """Milliseconds for a table."""
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def tables(results: Results) -> list[Table]:
    """Cost per snapshot, and cost of the run."""
    limits = results.get("limits", {})
    stall = Table(title="per snapshot, in ms: first / mean of the later ones", title_justify="left")
    for column in ("method", "snapshots", "boundary", "gate", "blocked", "waited for the one before", "lost"):
        stall.add_column(column, justify="left" if column == "method" else "right")
    whole = Table(title="per run", title_justify="left")
    columns = ("method", "base step ms", "mean step ms", "end to end s", "drain s", "written MB", "peak MB")
    for column in (*columns, "durable s: first / later"):
        whole.add_column(column, justify="left" if column == "method" else "right")
    for r in measured(results):
        pairs = [
            f"{ms(r['first'].get(key))} / {ms(r['later'].get(key))}"
            for key in ("boundary_s", "gate_s", "blocked_s", "waited_s", "lost_s")
        ]
        taken = str(r["snapshots"]) + (f" (+{r['snapshots_not_taken']} not)" * bool(r["snapshots_not_taken"]))
        stall.add_row(r["method"], *([taken, *pairs] if r["snapshots"] else ["-"] * 6))
        durable = r.get("durable_s") or []
        later = f"{statistics.fmean(durable[1:]):.2f}" if durable[1:] else "-"
        whole.add_row(
            r["method"],
            ms(r["base_step_s"]),
            ms(r["mean_step_s"]),
            f"{r['end_to_end_s']:.2f}",
            f"{r['drain_s']:.2f}",
            f"{r.get('bytes_written', 0) / 1e6:,.0f}",
            f"{r['peak_bytes'] / 1e6:,.0f}",
            f"{durable[0]:.2f} / {later}" if durable else "-",
        )
    if "memcpy_1_thread" in limits:
        direct = limits["o_direct"]
        whole.caption = (
            f"warm memcpy {limits['memcpy_1_thread'] / 1e9:.1f} GB/s with one thread, "
            f"{limits['memcpy_all_threads'] / 1e9:.1f} with all; "
            + (f"O_DIRECT write {direct / 1e9:.2f} GB/s" if direct else "no O_DIRECT here")
        )
    return [stall, whole]


class Targets:
    """The targets of the benchmark, each met, not met or not measured."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.table = Table(title="targets", title_justify="left")
        for column in ("target", "reached", "asked", ""):
            self.table.add_column(column)

    def check(self, text: str, compare: Callable[[Results], tuple[str, str, bool]]) -> None:
        """One line; a method that is missing or failed makes it 'not measured'."""
        try:
            reached, asked, met = compare(self.results)
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
            self.table.add_row(text, "", "", "[yellow]not measured")
            return
        self.table.add_row(text, reached, asked, "[green]met" if met else "[red]not met")


def floor_s(results: Results) -> float:
    """The least a copy of the state can take: bytes over the faster of the two warm memcpy rates."""
    rate = max(results["limits"]["memcpy_1_thread"], results["limits"]["memcpy_all_threads"])
    return float(results[MEMORY]["state_bytes"] / rate)


def _times_less(results: Results, method: str, other_s: float, factor: int) -> tuple[str, str, bool]:
    own = results[method]["later"]["blocked_s"]
    return (
        f"{ms(own)} ms, {other_s / own:,.0f}x less than {ms(other_s)} ms",
        f"{factor}x",
        other_s >= factor * own,
    )


def _boundary(results: Results, method: str) -> tuple[str, str, bool]:
    mean, longest = (results[method]["later"][key] for key in ("boundary_s", "longest_boundary_s"))
    return f"mean {ms(mean)} ms, longest {ms(longest)} ms", "< 5 ms", longest < 5e-3


def _first(results: Results, method: str) -> tuple[str, str, bool]:
    own, base = results[method]["first"]["blocked_s"], results[method]["base_step_s"]
    allowed = max(0.1 * base, 5e-3)
    return f"{ms(own)} ms", f"<= {ms(allowed)} ms (10 % of a step, or 5 ms)", own <= allowed


def _lost(results: Results) -> tuple[str, str, bool]:
    own, base = results[MEMORY]["later"]["lost_s"], results[MEMORY]["base_step_s"]
    allowed = max(2 * floor_s(results), 0.1 * base)
    return f"{ms(own)} ms", f"<= {ms(allowed)} ms (floor {ms(floor_s(results))} ms)", own <= allowed


def _memory(results: Results, method: str, slots: int) -> tuple[str, str, bool]:
    extra = results[method]["peak_bytes"] - results["none"]["peak_bytes"]
    allowed = slots * results[method]["state_bytes"] + 200e6
    return f"{extra / 1e6:,.0f} MB more", f"<= {allowed / 1e6:,.0f} MB ({slots} slots)", extra <= allowed


def _durable(results: Results, seconds: float) -> tuple[str, str, bool]:
    rate, raw = results[DISK]["state_bytes"] / seconds, results["limits"]["o_direct"]
    return f"{seconds:.2f} s, {rate / 1e9:.2f} GB/s, {rate / raw:.0%} of raw", ">= 85 %", rate >= 0.85 * raw


def judge(results: Results) -> Table:
    """Every target, met or not."""
    targets = Targets(results)

    def best_peer(r: Results) -> float:
        return min(float(r[m]["later"]["blocked_s"]) for m in ASYNCHRONOUS if "later" in r.get(m, {}))

    for method in (MEMORY, DISK):
        targets.check(
            f"{method}: blocked, against torch.save + fsync",
            lambda r, m=method: _times_less(r, m, r[SYNCHRONOUS]["later"]["blocked_s"], 100),
        )
        targets.check(
            f"{method}: blocked, against the best asynchronous peer",
            lambda r, m=method: _times_less(r, m, best_peer(r), 20),
        )
        targets.check(f"{method}: boundary", lambda r, m=method: _boundary(r, m))
        targets.check(f"{method}: the first snapshot does not stall", lambda r, m=method: _first(r, m))
    targets.check(f"{MEMORY}: training time lost per snapshot", _lost)
    targets.check(f"{MEMORY}: memory beyond training's", lambda r: _memory(r, MEMORY, 2))
    targets.check(f"{DISK}: memory beyond training's", lambda r: _memory(r, DISK, 3))
    targets.check(
        f"{DISK}: time until durable, beside training",
        lambda r: _durable(r, statistics.median(r[DISK]["durable_s"][1:])),
    )
    targets.check(f"{DISK}: time until durable, idle", lambda r: _durable(r, r[DISK]["durable_when_idle_s"]))
    return targets.table


def picture(results: Results, path: Path) -> None:
    """Blocked and lost time per later snapshot, and memory, one bar per method."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in measured(results) if r["snapshots"]][::-1]
    names = [r["method"] for r in rows]
    colors = ["#d1495b" if name.startswith("lazysnap") else "#5b7b9a" for name in names]
    base = results.get("none", {}).get("peak_bytes", 0)
    panels = [
        ("blocked per snapshot (ms)", [max(r["later"]["blocked_s"] * 1e3, 1e-3) for r in rows], True),
        ("training time lost per snapshot (ms)", [max(r["later"]["lost_s"] * 1e3, 1e-3) for r in rows], True),
        ("memory beyond training's (MB)", [max((r["peak_bytes"] - base) / 1e6, 0) for r in rows], False),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(15, 0.5 * len(rows) + 1.8), sharey=True, layout="constrained")
    for axis, (title, values, logarithmic) in zip(axes, panels, strict=True):
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, [f"{value:,.4g}" for value in values], padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if logarithmic:
            axis.set_xscale("log")
        axis.margins(x=0.2)
    about = results.get("machine", {})
    figure.suptitle(
        f"{about.get('params')} parameters on {about.get('device')}, {about.get('threads')} threads of "
        f"{about.get('cores')} cores; later snapshots, less is better",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    path = Path(sys.argv[1])
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    results = {line["method"]: line for line in lines}
    console = Console(width=150)
    for table in tables(results):
        console.print(table)
    console.print(judge(results))
    picture(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
