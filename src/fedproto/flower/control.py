"""Speaking to a server that runs: registering nodes, submitting runs, following them to the end."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedproto.errors import FedprotoError
from fedproto.flower import commands
from fedproto.flower.keys import fingerprint, public_keys
from fedproto.rounds import Watcher
from fedproto.store import RunStore

ERROR_FILE = "flower-error.txt"
"""Where the server's app says, in the run directory, why it gave up."""

ANSWER_WITHIN = 60.0
LOOK_EVERY = 0.5
ASK_EVERY = 10.0
ATTEMPTS = 5
UNAVAILABLE = "Connection to the SuperLink is unavailable"
SILENT_AT_MOST = 6
"""Questions in a row that a server may leave without an answer before it is given up."""


class DeploymentError(FedprotoError):
    """A process of Flower's that did not do what it should."""


class Control:
    """A connection to a server through the command ``flwr``."""

    def __init__(self, folder: Path, address: str, server: Path | None) -> None:
        """Keeps its own files in a folder; `server` has the certificate and the clients' keys."""
        self._folder = folder.resolve()
        self._address = address
        self._server = server
        self._home = self._folder / "home"
        self._home.mkdir(parents=True, exist_ok=True)
        trust = (
            "insecure = true"
            if server is None
            else f"root-certificates = {json.dumps(str((server / 'ca.crt').resolve()))}"
        )
        (self._home / "config.toml").write_text(
            '[superlink]\ndefault = "fedproto"\n\n'
            f"[superlink.fedproto]\naddress = {json.dumps(address)}\n{trust}\n",
            encoding="utf-8",
        )

    def register(self, public_key: Path, name: str) -> None:
        """Makes a node's key known to the server under a name."""
        self._flwr("supernode", "register", str(public_key.resolve()), "--name", name)

    def submit(self, out: Path) -> str:
        """Starts the run of a directory, or goes on with it; the number that Flower gives it."""
        (out / ERROR_FILE).unlink(missing_ok=True)
        app = self._folder / "app"
        known = {} if self._server is None else public_keys(self._server)
        commands.write_app(app, out, {client: fingerprint(path) for client, path in known.items()})
        return str(self._flwr("run", str(app), "fedproto")["run-id"])

    def status(self, run: str) -> str:
        """What Flower says of a run, such as ``running`` or ``finished:completed``."""
        found = self._flwr("list", "--run-id", run)["runs"]
        return str(found[0]["status"]) if found else "unknown"

    def stop(self, run: str) -> None:
        """Stops a run; what it has done is safe in its directory."""
        with contextlib.suppress(DeploymentError):
            self._flwr("stop", run)

    def follow(
        self,
        run: str,
        out: Path,
        stores: Sequence[RunStore],
        watcher: Watcher,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Tells a watcher of rounds as they are done, until all runs are over.

        `check` is called now and then, and raises if there is no use in waiting.
        """
        seen = [len(store.records()) for store in stores]
        asked, silent = time.monotonic(), 0
        while True:
            _report(stores, seen, watcher)
            over = all(store.finished for store in stores)
            error = out / ERROR_FILE
            if error.exists():
                raise DeploymentError(error.read_text(encoding="utf-8").strip())
            if check is not None and not over:
                check()
            if over or time.monotonic() - asked > ASK_EVERY:
                asked = time.monotonic()
                try:
                    status = self.status(run)
                    silent = 0
                except DeploymentError:
                    # A server under load fails now and then; the records tell how far the run is.
                    silent += 1
                    if silent > SILENT_AT_MOST:
                        raise
                    time.sleep(ASK_EVERY)
                    continue
                if over and status.startswith("finished"):
                    return
                # The last round may be done between our look at it and Flower's answer.
                late = all(store.finished for store in stores)
                if status.startswith("finished") and not late:
                    raise DeploymentError(
                        f"Flower ended the run ({status}) before it was done; see the log of the"
                        " SuperLink"
                    )
            time.sleep(LOOK_EVERY)

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """What Flower's command answers; a server that has just started is asked again."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self._ask(*arguments)
            except DeploymentError as error:
                if UNAVAILABLE not in str(error):
                    raise
                time.sleep(ASK_EVERY)
        return self._ask(*arguments)

    def _ask(self, *arguments: str) -> dict[str, Any]:
        if not answers(self._address):
            # Flower's command would try for a minute.
            raise DeploymentError(f"no server answers at {self._address}; start it first")
        command = [commands.program("flwr"), *arguments, "--format", "json"]
        try:
            done = subprocess.run(  # noqa: S603 - our own commands
                command,
                cwd=self._folder,
                env=commands.environment(self._home),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ANSWER_WITHIN,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeploymentError(
                f"the server at {self._address} did not answer within {ANSWER_WITHIN:g} s"
            ) from None
        with contextlib.suppress(ValueError):
            answer = json.loads(done.stdout)
            if done.returncode == 0 and isinstance(answer, dict) and answer.get("success", True):
                return answer
        text = " ".join((done.stdout + done.stderr).split())[-500:]
        raise DeploymentError(f"flwr {' '.join(arguments[:2])} failed: {text}")


def answers(address: str) -> bool:
    """Whether somebody listens at a host and port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=3):
            return True
    except (OSError, ValueError):
        return False


def _report(stores: Sequence[RunStore], seen: list[int], watcher: Watcher) -> None:
    for index, store in enumerate(stores):
        records = store.records()
        for done in range(seen[index], len(records)):
            watcher.round_done(store.config, records[: done + 1])
        seen[index] = max(seen[index], len(records))
