"""A Python with torch already imported: programs that tests start begin in milliseconds instead of seconds.

    subprocess.run([warm_python(), "script.py", ...])      # also -c CODE and -m MODULE, and torchrun's workers

The command is a small client. One server for the whole test session has torch and this package imported and no threads.
It forks for every program, which takes over the client's arguments, variables, folder and output, and runs as the main
module to the end of the interpreter. The client ends as the program ends. Signals to the client go to the program,
which dies soon after the client does. A test of imports, of handlers at the end, or with a preloaded library needs
`sys.executable`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import types
from pathlib import Path

FOLDER = "UNBOUNDED_TESTS_WARM"
"""The variable that tells processes of the test session where the client and the server's socket are."""

IMPORTED = [
    *("torch", "torch._dynamo", "torch.distributed.run", "torch.utils.data", "unbounded.cli", "unbounded.planning"),
    *("unbounded.sharding.placing", "unbounded.checkpoint.saving", "unbounded.checkpoint.loading"),
    "unbounded.train.training",
]
CLIENT = """#!{python} -IS
import array, fcntl, json, os, signal, socket, subprocess, sys, time
def connect():
    link = socket.socket(socket.AF_UNIX)
    link.connect({address!r})
    return link
try:
    link = connect()
except OSError:
    with open({address!r} + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            link = connect()
        except OSError:
            ready, server = os.pipe()
            environment = dict(os.environ, PYTHONPATH={path!r})
            subprocess.Popen([{python!r}, "-m", "tests.warm", str(server), "{owner}"], cwd={root!r}, env=environment,
                             pass_fds=[server], stdin=subprocess.DEVNULL, stdout=open({address!r} + ".log", "w"),
                             stderr=subprocess.STDOUT, start_new_session=True)
            os.close(server)
            if not os.read(ready, 1):
                sys.exit("the server of warm Pythons did not start: " + open({address!r} + ".log").read())
            link = connect()
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
outputs = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
link.sendmsg([len(request).to_bytes(4, "little")], [outputs])
link.sendall(request)
def pass_on(number, _):
    try:
        link.send(bytes([number]))
    except OSError:
        pass  # the program has just ended
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
status = link.recv(4)
if not status:
    sys.exit("the server of warm Pythons is gone")
code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def prepare() -> None:
    """Makes the folder with the client, once for a test session; the server starts with the first program."""
    folder = tempfile.mkdtemp(prefix="warm-")
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *(entry for entry in sys.path if entry)])
    client = Path(folder) / "python"
    values = {"python": sys.executable, "address": f"{folder}/socket", "root": str(root), "path": path}
    client.write_text(CLIENT.format(owner=os.getpid(), **values))
    client.chmod(0o700)
    os.environ.update({FOLDER: folder, "PYTHON_EXEC": str(client)})  # the second is what torchrun's workers start with


def finish() -> None:
    """Ends the server, which goes with its folder. It also goes with the process that called `prepare`."""
    if folder := os.environ.pop(FOLDER, ""):
        shutil.rmtree(folder, ignore_errors=True)


def warm_python() -> str:
    """The command to use in place of `sys.executable`."""
    return f"{os.environ[FOLDER]}/python"


class Server:
    """Forks a program for every client; `serve` returns in the fork, with the program's arguments."""

    def __init__(self, folder: str, owner: str) -> None:
        self.needed = (folder, f"/proc/{owner}")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{folder}/socket")
        self.listener.listen(64)
        self.links: dict[int, socket.socket] = {}  # by the program's descriptor
        self.programs: dict[int, int] = {}  # process ids by descriptor

    def serve(self) -> list[str]:
        while all(map(os.path.exists, self.needed)):
            waiting = [self.listener, *self.links.values(), *self.programs]
            for ready in select.select(waiting, [], [], 1.0)[0]:
                if ready is self.listener:
                    if (arguments := self._start(self.listener.accept()[0])) is not None:
                        return arguments
                elif isinstance(ready, int) and ready in self.programs:
                    self._end(ready)
                elif ready in self.links.values():
                    self._pass_on(ready)
        for program in self.programs.values():
            os.kill(program, signal.SIGKILL)
        os._exit(0)

    def _start(self, link: socket.socket) -> list[str] | None:
        size, ancillary, _, _ = link.recvmsg(4, socket.CMSG_SPACE(12))
        if not size:
            return None
        outputs = array.array("i")
        outputs.frombytes(ancillary[0][2])
        request = link.recv(num_bytes := int.from_bytes(size, "little"), socket.MSG_WAITALL)
        if len(request) < num_bytes:  # the client was killed as it began
            for output in outputs:
                os.close(output)
            return None
        arguments, variables, folder = json.loads(request)
        if program := os.fork():
            descriptor = os.pidfd_open(program)
            self.programs[descriptor], self.links[descriptor] = program, link
            for output in outputs:
                os.close(output)
            return None
        for number, output in enumerate(outputs):
            os.dup2(output, number)
        for one in (self.listener, link, *self.links.values()):
            one.detach()  # otherwise their end would close whatever the program has under their numbers by then
        os.closerange(3, 4096)  # the server's own, and those of other programs
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        return arguments

    def _end(self, descriptor: int) -> None:
        _, status = os.waitpid(self.programs.pop(descriptor), 0)
        os.close(descriptor)
        with self.links.pop(descriptor) as link, contextlib.suppress(OSError):
            link.send(status.to_bytes(4, "little"))

    def _pass_on(self, link: socket.socket) -> None:
        """Passes on a signal, or the end of the client, which also ends the program."""
        descriptor = next(key for key, value in self.links.items() if value is link)
        numbers = link.recv(16)
        for number in numbers or [signal.SIGKILL]:
            os.kill(self.programs[descriptor], number)
        if not numbers:
            self._end(descriptor)


def run_program(arguments: list[str]) -> None:
    """Runs a program as the main module, as the interpreter would have."""
    while arguments[0] == "-u":
        arguments = arguments[1:]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    if arguments[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), arguments[1:]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(arguments[0])), arguments
        main.__file__ = arguments[0]
        exec(compile(Path(arguments[0]).read_text(), arguments[0], "exec"), main.__dict__)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # programs hear of it even if the tests were started with nohup
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind, which triton is built with, prints what is left at a program's end
    server = Server(os.environ[FOLDER], sys.argv[2])
    os.write(int(sys.argv[1]), b"1")
    os.close(int(sys.argv[1]))
    own = sys.modules["__main__"]  # alive to the end, also where the program is the main module
    run_program(server.serve())
