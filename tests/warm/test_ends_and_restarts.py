"""When a program is started again, what ends it, and that nothing of it stays."""

import fcntl
import json
import os
import pty
import resource
import signal
import socket
import struct
import sys

import pytest
from support.waiting import until
from warm_place import LAZYSNAP

from lazysnap.warm import directories

HANDLES = """
import json, os, signal, sys
received = []
woken, wakes = os.pipe()
os.set_blocking(wakes, False)
signal.set_wakeup_fd(wakes)
def note(number, frame):
    received.append(number)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGRTMAX):
    signal.signal(number, note)
def write(name, value):
    with open(name + ".new", "w") as file: json.dump(value, file)
    os.replace(name + ".new", name)
write("ready.json", [os.getpid(), os.getppid(), os.getpgrp()])
while signal.SIGRTMAX not in received:
    os.read(woken, 1)
write("received.json", received)
sys.exit(9)
"""
END = signal.SIGRTMAX
"""Ends the program. The kernel hands over all others before this one."""
COUNTS = """
import json, os, sys
from lazysnap.warm.steps import Steps
try: starts = json.load(open("starts.json"))
except OSError: starts = []
starts.append([os.getpid(), os.getppid(), "wave" in sys.modules, open(f"/proc/{os.getppid()}/comm").read()])
json.dump(starts, open("starts.json", "w"))
import wave
steps = Steps()
"""


WHOLE = {"environ": {}, "handles": [], "group": None}
"""The request of a client."""
RESIZED = """
import os, signal, socket, struct, sys, threading, time
from lazysnap.warm.client import _Program
waited = {signal.SIGWINCH, signal.SIGIO}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
os.kill(os.getpid(), signal.SIGWINCH)
client, parent = socket.socketpair()
def fork():
    while signal.SIGWINCH in signal.sigpending(): time.sleep(0.01)
    parent.send(struct.pack("i", os.getpid()))
    parent.send(struct.pack("i", 7))
threading.Thread(target=fork).start()
sys.exit(_Program(client, False).wait(waited))
"""
"""A client whose terminal is resized before its program is forked."""
INTERRUPTED = """
import os, pty, signal, socket, struct, subprocess, sys, threading
from lazysnap.warm.client import _Program
class Connection(socket.socket):
    is_empty = True
    def recv(self, size):
        if not self.is_empty: return super().recv(size)
        self.is_empty = False
        raise BlockingIOError
pid, terminal = pty.fork()
if pid:
    os.read(terminal, 1)
    os.write(terminal, b"\\x03")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
program = subprocess.Popen(["sleep", "10"], start_new_session=True)
waited = {signal.SIGINT, signal.SIGIO}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
client, parent = socket.socketpair()
parent.send(struct.pack("i", program.pid))
threading.Thread(target=lambda: parent.send(struct.pack("i", abs(program.wait())))).start()
os.write(1, b"!")
sys.exit(_Program(Connection(fileno=client.detach()), False).wait(waited))
"""
"""A client that a Ctrl-C reaches right before its program is forked: the terminal does not send it to the program."""


def ready(place, name="ready.json"):
    return until(lambda: place.read(name), lambda: str([one.poll() for one in place.started]))


@pytest.fixture
def handles(place):
    path = place.write("handles.py", HANDLES)
    process = place.start(LAZYSNAP, "run", "--", sys.executable, path, start_new_session=True)
    return process, *ready(place)


def test_a_signal_to_the_runner_reaches_the_program_once(place, handles):
    process, _, _, group = handles
    assert group == process.pid
    for number in (signal.SIGUSR1, signal.SIGTERM, END):
        process.send_signal(number)
    assert process.wait(60) == 9
    assert sorted(place.read("received.json")) == [signal.SIGUSR1, signal.SIGTERM, END]
    place.wait_until_gone()


def test_a_signal_to_the_group_reaches_the_program_once(place, handles):
    process, *_ = handles
    os.killpg(process.pid, signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(END)
    assert process.wait(60) == 9
    assert sorted(place.read("received.json")) == [signal.SIGUSR1, signal.SIGTERM, END]
    place.wait_until_gone()


def test_the_process_between_runner_and_program_forwards_as_well(place, handles):
    process, *_ = handles
    [client] = [one.pid for one in place.processes() if one.ppid() == process.pid and one.name() != "lazysnap-warm"]
    os.kill(client, END)
    process.send_signal(signal.SIGTERM)  # ends the runner's restarts
    assert process.wait(60) == 9
    assert END in place.read("received.json")
    place.wait_until_gone()


def test_ctrl_c_reaches_the_program_once_and_nothing_is_started_again(place):
    path = place.write("handles.py", HANDLES)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(place.directory)
        os.execve(LAZYSNAP, [LAZYSNAP, "run", "--", sys.executable, path], place.environ)
    ready(place)
    os.write(terminal, b"\x03")
    os.kill(pid, END)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    os.close(terminal)
    assert place.read("received.json") == [signal.SIGINT, END]
    place.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_a_program_without_handlers_ends_by_the_signal_and_so_does_the_runner(place, number):
    path = place.write("waits.py", "open('ready.json', 'w').write('[1]')\nimport signal\nsignal.pause()")
    process = place.start(LAZYSNAP, "run", "--", sys.executable, path)
    ready(place)
    process.send_signal(number)
    assert process.wait(60) == -number
    place.wait_until_gone()
    assert [path.name for path in place.directory.glob("lazysnap-warm/*") if path.is_dir()] == []


def test_a_signal_as_soon_as_the_program_handles_it_reaches_its_handler(place):
    """The program sends it to the process that was started for it, with its first instruction behind the handler."""
    path = place.write(
        "early.py",
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "os.kill(int(os.environ['RUNNER']), signal.SIGTERM)\n"
        "signal.pause()\n",
    )
    shell = f'export RUNNER=$$; exec {LAZYSNAP} run --max-restarts 0 -- "$0" "$1"'
    for _ in range(5):
        assert place.run("/bin/sh", "-c", shell, sys.executable, path)[0] == 7
    place.wait_until_gone()


@pytest.mark.parametrize(("client", "code"), [(RESIZED, 7), (INTERRUPTED, signal.SIGINT)], ids=["resized", "ctrl-c"])
def test_a_signal_before_the_program_exists_reaches_it_and_ends_nothing_that_ignores_it(place, client, code):
    assert place.run(sys.executable, "-c", client)[0] == code


def test_a_runner_that_was_started_with_sigchld_ignored_ends_with_its_program(place):
    path = place.write(
        "ends.py", "import signal, sys\nsys.exit(3 + (signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN))"
    )
    code, *_ = place.warm(sys.executable, path, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert code == 4
    place.wait_until_gone()


def test_a_signal_that_is_ignored_ends_no_restarts(place):
    path = place.write(
        "hangup.py",
        "import os, signal, sys\n"
        "with open('starts', 'a') as file: file.write('x')\n"
        "os.kill(int(os.environ['RUNNER']), signal.SIGHUP)\n"
        "sys.exit(len(open('starts').read()))\n",
    )
    shell = f'trap "" HUP; export RUNNER=$$; exec {LAZYSNAP} run --max-restarts 1 -- "$0" "$1"'
    assert place.run("/bin/sh", "-c", shell, sys.executable, path)[0] == 2
    assert (place.directory / "starts").read_text() == "xx"


def test_a_descriptor_above_the_limit_is_there_all_the_same(place):
    read, write = os.pipe()
    high = fcntl.fcntl(write, fcntl.F_DUPFD, 250)

    def lower():
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))

    path = place.write("writes.py", f"import os\nos.write({high}, b'there')")
    assert place.warm(sys.executable, path, pass_fds=(high,), preexec_fn=lower)[0] == 0
    assert os.read(read, 9) == b"there"
    for number in (read, write, high):
        os.close(number)


def test_a_number_below_zero_is_refused_in_one_line(place):
    code, _, said = place.run(LAZYSNAP, "run", "--max-restarts", "-1", "--", sys.executable, "-c", "")
    assert code == 2
    assert "--max-restarts must be 0 or more" in said


@pytest.mark.quick
def test_when_the_runner_is_killed_nothing_stays(place, handles):
    process, *_ = handles
    process.kill()
    process.wait(60)
    place.wait_until_gone()
    assert [path.name for path in place.directory.glob("lazysnap-warm/*") if path.is_dir()] == []


def test_when_the_parent_is_killed_the_program_is_started_again(place, handles):
    process, program, parent, _ = handles
    os.remove(place.directory / "ready.json")
    os.kill(parent, signal.SIGKILL)
    again, *_ = ready(place)
    assert again != program
    process.send_signal(signal.SIGTERM)  # no more restarts
    process.send_signal(END)
    assert process.wait(60) == 9
    place.wait_until_gone()


def test_a_killed_program_is_started_again_warm(place):
    """The first start imports, later ones find it imported, and what the user's own files hold is read anew."""
    place.write("own.py", "VALUE = 1")
    path = place.write(
        "train.py",
        COUNTS + "import own, signal\n"
        "open('own.py', 'w').write('VALUE = ' + '1' * (len(starts) + 1))\n"
        "assert own.VALUE == int('1' * len(starts))\n"
        "steps.reached(len(starts))\n"
        "if len(starts) < 4:\n"
        "    if len(starts) == 1:\n"
        "        import time\n"
        "        while not any(open(f'/proc/{p}/stat').read().split()[3] == str(os.getppid()) and 'lazysnap-warm' in\n"
        "                      open(f'/proc/{p}/comm').read() for p in os.listdir('/proc') if p.isdigit()): pass\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    code, _, err = place.warm(sys.executable, path, options=())
    starts = place.read("starts.json")
    assert (code, len(starts)) == (0, 4), err
    assert [is_warm for _, _, is_warm, _ in starts] == [False, True, True, True]
    assert {name for *_, name in starts} == {"lazysnap-warm\n"}
    assert len({parent for _, parent, _, _ in starts[1:]}) == 1
    assert "was ended by signal 9 (Killed) after step 3: restart 3 of at most 10" in err
    place.wait_until_gone()


def test_a_crash_that_repeats_without_a_new_step_ends_with_its_traceback_and_code(place):
    path = place.write("train.py", COUNTS + "steps.reached(min(len(starts), 3))\n1 / 0")
    code, _, err = place.warm(sys.executable, path, options=())
    assert (code, len(place.read("starts.json"))) == (1, 4)
    assert err.count("ZeroDivisionError") == 4
    assert err.endswith("twice within 30 s without a new step: no restart\n")


def test_other_exits_are_no_repetition_and_are_limited(place):
    path = place.write("train.py", COUNTS + "sys.exit(len(starts) % 2 + 1)")
    code, _, err = place.warm(sys.executable, path, options=("--max-restarts", "3"))
    assert (code, len(place.read("starts.json"))) == (1, 4)
    assert "as often as --max-restarts allows" in err


@pytest.mark.parametrize("end", ["sys.exit(143)", "import signal; os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_program_that_was_asked_to_end_is_not_started_again(place, end):
    path = place.write("train.py", COUNTS + end)
    assert place.warm(sys.executable, path, options=())[0] in (143, -signal.SIGTERM)
    assert len(place.read("starts.json")) == 1


def test_changed_packages_start_another_parent(place):
    path = place.write(
        "train.py",
        COUNTS + "import added_first\n"
        "os.makedirs(f'site-packages/new{len(starts)}', exist_ok=True)\n"
        "steps.reached(len(starts))\n"
        "sys.exit(len(starts) < 3)\n",
    )
    (place.packages / "added_first.py").write_text("")
    code, _, err = place.warm(sys.executable, path, options=())
    assert code == 0, err
    assert len({parent for _, parent, *_ in place.read("starts.json")}) == 3
    place.wait_until_gone()


BAD = {
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()",
    "exits": "import os\nif 'lazysnap-warm' in open('/proc/self/comm').read(): os._exit(0)",
    "crashes": "import os\nif 'lazysnap-warm' in open('/proc/self/comm').read(): os.kill(os.getpid(), 11)",
    # The alarm that would end the import after minutes is there; this module moves it forward.
    "hangs": (
        "import os, signal\n"
        "if 'lazysnap-warm' in open('/proc/self/comm').read():\n"
        "    assert signal.alarm(1) > 0\n"
        "    while True: signal.pause()"
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_module_that_cannot_stand_it_is_left_out(place, bad):
    (place.packages / "bad.py").write_text(BAD[bad])
    path = place.write("train.py", COUNTS + "import bad; print('bad' in sys.modules)")
    # Known from the first run: the second one imports before its first start.
    for number in (1, 2, 3):
        code, out, err = place.warm(sys.executable, path)
        assert (code, out) == (0, "True\n"), err
        assert place.read("starts.json")[-1][2] == (number > 1)
    [left_out] = place.directory.glob("lazysnap-warm/*.left-out")
    assert left_out.read_text() == "bad\n"


def test_a_module_that_raises_in_the_parent_only_is_imported_by_the_program(place):
    (place.packages / "bad.py").write_text("if 'lazysnap-warm' in open('/proc/self/comm').read(): raise SystemExit(5)")
    path = place.write("train.py", COUNTS + "import bad; print('whole')")
    for _ in range(2):
        assert place.warm(sys.executable, path)[:2] == (0, "whole\n")


def test_nobody_else_reaches_the_parent(place, handles):
    [directory] = [path for path in place.directory.glob("lazysnap-warm/*") if path.is_dir()]
    [address] = [path for path in directory.iterdir() if path.is_socket()]
    assert [oct(path.stat().st_mode & 0o777) for path in (directory, directory.parent)] == ["0o700", "0o700"]
    if os.getuid():
        pytest.skip("only root becomes another user")
    # Let others find it: the parent itself refuses them.
    for path, mode in ((directory, 0o711), (address, 0o777)):
        path.chmod(mode)
    answers = []
    for user in (0, 65534):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.chdir(directory)
            os.setuid(user)
            os.write(write, ask(address.name))
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        answers.append(len(os.read(read, 9)))
        os.close(read)
    assert answers == [4, 0]


@pytest.mark.parametrize("request_", [[], {"handles": 1}, {"handles": []}, {**WHOLE, "handles": [1]}], ids=str)
def test_a_bad_request_is_refused_and_ends_nothing(place, handles, monkeypatch, request_):
    process, *_ = handles
    [address] = [path for path in place.directory.glob("lazysnap-warm/*/*") if path.is_socket()]
    monkeypatch.chdir(address.parent)
    assert ask(address.name, request_) == b""
    assert len(ask(address.name)) == 4
    process.send_signal(signal.SIGTERM)  # ends the runner's restarts
    process.send_signal(END)
    assert process.wait(60) == 9


def ask(address, request=WHOLE):
    """What a parent answers to the request of a client."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        data = json.dumps(request).encode()
        socket.send_fds(connection, [struct.pack("I", len(data))], [os.pidfd_open(os.getpid())])
        try:
            connection.sendall(data)
            return connection.recv(4)
        except (BrokenPipeError, ConnectionResetError):
            return b""


def test_a_directory_that_others_can_write_to_is_refused(place):
    (place.directory / "lazysnap-warm").mkdir()
    (place.directory / "lazysnap-warm").chmod(0o777)
    code, _, err = place.warm(sys.executable, "-c", "")
    assert code == 2
    assert "lazysnap-warm cannot be the runtime directory" in err
    assert "its mode is 0777, expected 0700" in err


def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(tmp_path):
    """A client that was stopped while it started a parent would stop all other starts."""
    with (
        directories.locked(str(tmp_path), 0.1),
        pytest.raises(TimeoutError, match="lock"),
        directories.locked(str(tmp_path), 0.1),
    ):
        pass


def test_a_logout_ends_no_parent(place):
    """In the default directory. A mount namespace puts one of this test there: that of the machine stays as it is."""
    default = f"/tmp/lazysnap-{os.getuid()}"
    own = place.directory / "lazysnap-warm"
    own.mkdir(mode=0o700)
    mount = f'mkdir -p -m 700 {default} && mount --bind "$1" {default} && shift && exec "$@"'
    with_own = ["unshare", "--mount", "sh", "-c", mount, "sh", str(own)]
    if place.run(*with_own, "true")[0] != 0:
        pytest.skip("needs the right to make a mount namespace")
    del place.environ["LAZYSNAP_RUNTIME_DIR"]
    session = place.directory / "session"
    session.mkdir()
    place.environ["XDG_RUNTIME_DIR"] = str(session)
    path = place.write(
        "train.py",
        COUNTS + "import shutil\n"
        "steps.reached(len(starts))\n"
        "shutil.rmtree(os.environ['XDG_RUNTIME_DIR'], ignore_errors=True)\n"
        "sys.exit(len(starts) < 4)\n",
    )

    code, _, err = place.run(*with_own, LAZYSNAP, "run", "--", sys.executable, path)

    starts = place.read("starts.json")
    assert (code, len(starts)) == (0, 4), err
    assert len({parent for _, parent, *_ in starts[1:]}) == 1
    assert [is_warm for _, _, is_warm, _ in starts[1:]] == [True, True, True]
    assert not session.exists()
    assert list(own.glob("*.imports"))
