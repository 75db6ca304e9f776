"""The real supervisor with stand-in children: ``python supervisor_rig.py DIR ENGINE-SCRIPT DRAIN [demo] [standby]``. Says go to
stdout.

The stand-ins die with their parent like the real ones; the engine's writes how it was started to ``DIR/starts``. With
``standby`` the api's is ready at once, and another engine's waits.
"""

import sys
from pathlib import Path

from chaos.place import free_ports
from service.children import Child
from service.listening import ApiPort
from service.processes import child_environment
from service.settings import Settings
from service.supervisor import Supervisor

STEADY = """
import signal, sys, time
from pathlib import Path
from service.processes import die_with_parent
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
die_with_parent(int(sys.argv[sys.argv.index("--death-pipe") + 1]))
name, directory = sys.argv[1], Path(sys.argv[2])
told = sys.argv[sys.argv.index("--last-exit") + 1] if "--last-exit" in sys.argv else ""
if "--turn-fd" in sys.argv:
    told = "after waiting " + open(int(sys.argv[sys.argv.index("--turn-fd") + 1])).readline().strip()
with open(directory / "starts", "a") as starts:
    starts.write(f"{name} {told}\\n")
while True:
    time.sleep(1)
"""

#: An api that is ready.
READY = (
    """
import socket, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Ready, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[3]))
server.socket.listen()
threading.Thread(target=server.serve_forever, daemon=True).start()
"""
    + STEADY
)

#: Refuses as `midsentence engine` does: exit 78, with its message left for the supervisor.
REFUSING = """
import sys
from pathlib import Path
from service.children import refusal_file
refusal_file(Path(sys.argv[2]) / "run", "engine").write_text("pool is of another model (use another --data-dir)")
sys.exit(78)
"""

CRASHING = "import os; os.abort()"
DEAF = STEADY.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


def main() -> int:
    directory = Path(sys.argv[1])
    script = {"steady": STEADY, "refusing": REFUSING, "crashing": CRASHING, "deaf": DEAF}[sys.argv[2]]
    settings = Settings(data_dir=directory, port=free_ports(1)[0], engine_port=0, drain_timeout_seconds=float(sys.argv[3]))

    standby = "standby" in sys.argv

    def children(told: Settings, port: ApiPort) -> list[Child]:
        environment = child_environment(told.environment())

        def command(name: str, code: str) -> list[str]:
            return [sys.executable, "-c", code, name, str(directory), str(port.fd)]

        engine, api = command("engine", script), command("api", READY if standby else STEADY)
        return [
            Child("engine", engine, environment, settings.run_dir, tell_last_exit=True, has_standby=standby),
            Child("api", api, environment, settings.run_dir, inherits=port.inherited if standby else ()),
        ]

    def say(text: str) -> None:
        print(text, flush=True)

    return Supervisor(settings, children=children, say=say, demo_controls="demo" in sys.argv).run()


if __name__ == "__main__":
    sys.exit(main())
