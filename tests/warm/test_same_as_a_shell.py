"""A program that is started warm sees what a shell would have shown it."""

import json
import os
import pty
import resource
import signal
import subprocess
import sys

import pytest
from warm_place import HERE, LAZYSNAP

PROBE = (HERE / "probe.py").read_text()
OURS = {"LAZYSNAP_WARM", "PYTHON_EXEC"}
RANDOM = ("hash", "authkey")
FORMS = {
    "file": [sys.executable, "probe.py"],
    "relative": [os.path.relpath(sys.executable, "/"), "../{name}/probe.py"],
    "module": [sys.executable, "-m", "probe"],
    "package": [sys.executable, "-m", "inside.probe"],
    "options": [sys.executable, "-uOB", "-W", "error", "-Xdev", "probe.py"],
    "console script": ["{directory}/script"],
    "long console script": ["{directory}/long"],
    "in PATH": ["script"],
    "code": [sys.executable, "-c", "import json, sys, probe; json.dump(probe.probe(), open(sys.argv[1], 'w'))"],
    "link": [sys.executable, "link.py"],
    "directory": [sys.executable, "folder"],
}


@pytest.fixture
def both(place):
    """Starts a form of the probe by a shell and warm."""
    place.write("probe.py", PROBE.replace("main.__file__", "getattr(main, '__file__', None)"))
    text = (place.directory / "probe.py").read_text()
    for name in ("inside", "folder"):
        (place.directory / name).mkdir()
    place.write("inside/__init__.py", "")
    place.write("inside/probe.py", text)
    place.write("folder/__main__.py", text)
    os.symlink(place.write("folder/linked.py", text), place.directory / "link.py")
    for name, head in {
        "script": f"#!{sys.executable} -B\n",
        "long": f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n",
    }.items():
        os.chmod(place.write(name, head + text), 0o755)
    place.environ["PATH"] = f"{place.directory}{os.pathsep}{place.environ['PATH']}"

    def start(words, *arguments, **how):
        """Return what the probe sees that a shell starts, and what two see that are started warm.

        The parent of the first of these has imported nothing, that of the second what the first one imported.
        """
        words = [word.format(directory=place.directory, name=place.directory.name) for word in words]

        def seen_by_probe(*runner):
            path = place.directory / "seen.json"
            path.unlink(missing_ok=True)
            code, _, said = place.run(*runner, *words, str(path), *arguments, **how)
            assert code == 0, said
            return json.loads(path.read_text())

        runner = (LAZYSNAP, "run", "--max-restarts", "0", "--")
        return [seen_by_probe(), seen_by_probe(*runner), seen_by_probe(*runner)]

    return start


def compare(cold, warm):
    """All that a warm start saw is what the start by a shell saw, but for random values and further modules."""
    warm["environ"] = {name: value for name, value in warm["environ"].items() if name not in OURS}
    for seen in (cold, warm):
        seen["environ_of_children"] = sorted(
            one for one in seen["environ_of_children"] if one.split("=")[0] not in OURS
        )
    assert set(cold.pop("modules")) <= set(warm.pop("modules"))
    assert warm == {**cold, **{name: warm[name] for name in RANDOM}}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_program(both, form, place):
    words = FORMS[form]
    how = {"cwd": "/"} if form == "relative" else {}
    if form == "relative":
        words = [words[0], str(place.directory / "probe.py")]
    cold, *warm = both(words, "--flag", "", "a b", **how)
    for seen in warm:
        if form == "long console script":  # its shell sets some
            for name in ("environ", "environ_of_children"):
                seen[name] = cold[name]
        compare(dict(cold), seen)


def test_spawned_processes_find_the_main_module(both):
    cold, *warm = both(FORMS["file"], "--spawn")
    assert cold["spawned"][0] == "__mp_main__"
    for seen in warm:
        compare(dict(cold), seen)


def test_descriptors_umask_limits_directory_and_ignored_signals(both, place):
    read, write = os.pipe()

    def prepare():
        os.umask(0o027)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.nice(3)
        os.close(0)

    (place.directory / "below").mkdir()
    words = [sys.executable, "../probe.py"]
    out = os.open(place.directory / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    cold, *warm = both(words, preexec_fn=prepare, pass_fds=(write,), cwd=place.directory / "below", stdout=out)
    for number in (read, write, out):
        os.close(number)
    assert cold["umask"] == [["Umask:", "0027"]]
    assert str(write) in cold["handles"]
    assert cold["streams"][0] is None
    for seen in warm:
        compare(dict(cold), seen)


def test_a_terminal(both):
    ours, theirs = pty.openpty()
    how = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)

    def prepare():
        # A session whose leader stays another process, as in a shell.
        os.setsid()
        import fcntl
        import termios

        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        if pid := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    cold, *warm = both(FORMS["file"], preexec_fn=prepare, **how)
    os.close(ours)
    os.close(theirs)
    assert cold["terminal"] == [True, True]
    for seen in warm:
        for name in ("session", "group"):
            assert seen.pop(name) != cold[name]
        compare({name: value for name, value in cold.items() if name not in ("session", "group")}, seen)


def test_the_hash_seed_is_the_one_that_was_asked_for(both, place):
    place.environ["PYTHONHASHSEED"] = "1603"
    cold, *warm = both(FORMS["file"])
    assert {seen["hash"] for seen in warm} == {cold["hash"]}


def test_random_numbers_differ_from_start_to_start(place):
    place.write(
        "draw.py",
        "import numpy, random, multiprocessing as m\n"
        "print(numpy.random.rand(), random.random(), m.current_process().authkey.hex())\n",
    )
    drawn = [place.warm(sys.executable, "draw.py")[1].split() for _ in range(3)]
    assert all(len(set(values)) == 3 for values in zip(*drawn, strict=True)), drawn


ENDS = {
    "nothing": "",
    "code": "raise SystemExit(3)",
    "text": "import sys; sys.exit('over')",
    "error": "def f(): 1 / 0\nf()",
    "chain": "try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('x') from e",
    "syntax": "def",
    "interrupt": "raise KeyboardInterrupt",
    "at once": "import os; os._exit(200)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "at exit": "import atexit; atexit.register(print, 'at exit'); print('first')",
    "thread": "import threading; threading.Thread(target=lambda: print('thread')).start()",
    "hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0]); 1 / 0",
    "output": "print('x' * 100000, end='')",
    "stack": "import traceback; traceback.print_stack()",
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_it_would_have(shared_place, end):
    path = shared_place.write("ends.py", ENDS[end])
    cold = shared_place.run(sys.executable, path)
    code, out, err = shared_place.warm(sys.executable, path)
    err = "".join(line for line in err.splitlines(True) if not line.startswith("lazysnap: "))
    assert (code, out, err) == cold
    shared_place.wait_until_gone()


def test_what_cannot_be_found_is_said_as_a_shell_says_it(place):
    assert place.warm(sys.executable, "missing.py")[0] == 2
    assert place.warm("no-such-program")[0] == 127
    assert place.warm("sh", "-c", "exit 5")[0] == 5
    assert place.warm(sys.executable, "-I", "-c", "raise SystemExit(4)")[0] == 4
    assert place.warm(sys.executable, "-V")[0] == 0


def test_standard_input_is_that_of_the_runner(place):
    path = place.write("reads.py", "import sys; print(sys.stdin.read().upper())")
    process = place.start(LAZYSNAP, "run", "--", sys.executable, path, stdin=subprocess.PIPE)
    assert process.communicate("words\n", timeout=60)[0] == "WORDS\n\n"
