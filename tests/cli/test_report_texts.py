"""``lazysnap report`` over files of events: text, JSON and page."""

import pathlib
import re
import shutil
import subprocess

import pytest
from cli_level import run, run_json
from run_history import BEGAN, LEVEL, RUN, History, Life

from lazysnap.events import Alert, Complete, LevelFailed, Preempted, Progress, TrainerEnded, TrainerStarted, encode
from lazysnap.shard.names import events_file_name

LIVES = [Life(20, wait_s=0.5, back=5), Life(10, how="left", back=2), Life(10, how="goodbye", partial_s=2)]
HOSTILE = "<script>alert('x')</script>\x1b[31m"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write(url, events, *, run_id=RUN, node=0):
    pathlib.Path(url).mkdir(exist_ok=True)
    text = b"".join(encode(one) for one in events)
    (pathlib.Path(url) / events_file_name(run_id, node)).write_bytes(text)


@pytest.fixture
def history(url):
    history = History(LIVES)
    history.events += [
        LevelFailed(t=BEGAN + 9.5, level=LEVEL, step=7, text=HOSTILE),
        Alert(t=BEGAN + 9.6, about=LEVEL, text="nothing is stored"),
        Preempted(t=BEGAN + 9.7),
    ]
    history.events.sort(key=lambda event: event.t)
    write(url, history.events)
    return history


def test_the_text_says_what_happened(url, history, capsys):
    assert run("report", url) == 0
    out = capsys.readouterr().out
    assert "3 starts" in out
    assert re.search(r"goodput 49\.3 %", out), out
    assert re.search(r"died +20 +15 +5 steps +12 s", out), out
    assert re.search(r"left +25 +23 +2 steps ", out), out
    assert "the training ended well" in out
    assert "nothing is stored" in out
    assert "\x1b" not in out


def test_json_has_the_same_and_the_classes_sum_up_to_the_wall_time(url, history, capsys):
    code, found = run_json(capsys, "report", url)
    assert code == 0
    assert sum(found["classes_s"].values()) == pytest.approx(found["wall_s"], abs=1e-5)
    assert found["goodput"] == pytest.approx(history.seconds["productive"] / (history.now - BEGAN), abs=0.001)
    assert [(one["how"], one["step"], one["resumed_step"]) for one in found["interruptions"]] == [
        ("died", 20, 15),
        ("left", 25, 23),
    ]
    assert found["over_time"][-1]["behind"][LEVEL] == 0
    assert (found["how"], found["step"], found["nodes"]) == ("goodbye", 33, [0])


def test_an_older_step_that_is_completed_last_is_not_the_newest(url, history, capsys):
    newest = run_json(capsys, "report", url)[1]["over_time"][-1]["behind"][LEVEL]
    late = Complete(t=history.events[-1].t - 0.01, level=LEVEL, steps=[1])
    write(url, sorted([*history.events, late], key=lambda event: event.t))

    assert run_json(capsys, "report", url)[1]["over_time"][-1]["behind"][LEVEL] == newest
    assert run("report", url) == 0
    assert re.search(rf"{re.escape(LEVEL)} +33 +0 ", capsys.readouterr().out)


def test_runs_are_chosen_and_nodes_are_put_together(url, tmp_path, capsys):
    older = History([Life(3)]).events
    other = str(tmp_path / "other")
    write(url, History(LIVES).events)
    write(url, older, run_id="00" * 8)
    write(other, [TrainerEnded(t=BEGAN, rank=1, start="x", step=1, how="died")], node=1)
    write(other, older, node=0)  # an older copy of the same file
    assert run_json(capsys, "report", other, url)[1]["nodes"] == [0, 1]
    assert run_json(capsys, "report", url, other)[1]["step"] == 33
    assert run_json(capsys, "report", url, "--run", "0000")[1]["step"] == 3
    assert run("report", url, "--run", "5") == 2
    assert RUN in capsys.readouterr().err


def test_of_a_run_whose_beginning_was_rotated_away_the_report_covers_what_is_there(url, capsys):
    """A file that begins within a start says who trains, as if that had begun then."""
    of = {"rank": 0, "start": "0123456789abcdef"}
    began = TrainerStarted(t=BEGAN, **of, step=500, world_size=1, every_n_steps=1, began=BEGAN)
    lines = [
        Progress(t=BEGAN + n, **of, step=500 + n, waited_s=900.0, captured=500 + n, taken=BEGAN + n, copy_s=0.1)
        for n in range(10, 100)
    ]
    ended = TrainerEnded(t=BEGAN + 99.5, **of, step=599, how="goodbye")
    write(url, [began, *lines, ended])

    _, told = run_json(capsys, "report", url)

    assert (told["step"], told["how"], told["wall_s"]) == (599, "goodbye", pytest.approx(99.5))
    assert told["classes_s"]["productive"] == pytest.approx(90, abs=0.1)
    assert told["classes_s"]["setup"] == pytest.approx(9, abs=0.1)


def test_a_last_line_that_a_killed_keeper_did_not_end_is_passed_over(url, history, capsys):
    _, whole = run_json(capsys, "report", url)
    path = pathlib.Path(url) / events_file_name(RUN, 0)
    path.write_bytes(path.read_bytes() + encode(Preempted(t=BEGAN + 1000))[:-9])

    assert run_json(capsys, "report", url)[1] == whole


def test_without_events_the_message_says_where_they_are(url, tmp_path, capsys):
    assert run("report", url) == 2
    assert "does not exist" in capsys.readouterr().err
    pathlib.Path(url).mkdir()
    assert run("report", url) == 2
    assert "first level" in capsys.readouterr().err


def test_a_foreign_file_is_not_replaced_and_an_own_one_is(url, history, tmp_path):
    mine = tmp_path / "notes"
    mine.write_text("notes")
    assert run("report", url, "--html", mine) == 2
    assert mine.read_text() == "notes"
    own = tmp_path / "own"
    assert run("report", url, "--html", own) == 0
    assert run("report", url, "--html", own) == 0


def test_the_page_is_one_file_whose_texts_are_text(url, history, tmp_path):
    assert run("report", url, "--html", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"https?://|src=|@import|url\(", page)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page: apt-get install chromium")
def test_a_browser_draws_the_page(url, history, tmp_path):
    assert run("report", url, "--html", tmp_path / "page.html") == 0
    words = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,1500"]
    target = f"file://{tmp_path / 'page.html'}"
    picture = tmp_path / "page.png"
    shown = subprocess.run([*words, f"--screenshot={picture}", target], capture_output=True, timeout=120, check=False)
    assert picture.exists(), shown.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    drawn = subprocess.run([*words, "--dump-dom", target], capture_output=True, timeout=120, check=True).stdout.decode()
    assert drawn.count("<svg") == 4
    assert drawn.count("<polyline") >= 6
    assert "goodput 49.3 %" in drawn
