"""Downloads that break off and go on, checksums, and checks of what is there."""

from __future__ import annotations

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from data_files import needs_real, write_mnist
from fedproto.callback import Callback
from fedproto.cli import main
from fedproto.data import base, data_root
from fedproto.data.fetch import check, fetch
from fedproto.data.mnist import MNIST
from fedproto.errors import DataError, StoreError
from helpers import Clock

CONTENT = bytes(range(256)) * 4000


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT in parts; the first `breaks` answers break off half way."""

    breaks = 0
    ranges: list[str | None]

    def do_GET(self):
        asked = self.headers.get("Range")
        type(self).ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        part = CONTENT[start:]
        if type(self).breaks > 0:
            type(self).breaks -= 1
            part = part[: len(part) // 2]
        self.wfile.write(part)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("Fresh", (Handler,), {"ranges": []})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield handler, f"http://127.0.0.1:{http.server_port}/file.bin"
        http.shutdown()
        thread.join()


def source_of(url, md5=None):
    md5 = hashlib.md5(CONTENT).hexdigest() if md5 is None else md5
    download = base.Download(url, "THING/raw/file.bin", md5)
    return type("Thing", (MNIST,), {"folder": "THING", "downloads": (download,)})


def test_a_download_is_whole_and_reported(server, tmp_path):
    _, url = server
    seen = []

    class Watching(Callback):
        def on_progress(self, *step) -> None:
            seen.append(step)

    written = fetch(source_of(url), tmp_path, Watching())
    assert [path.read_bytes() for path in written] == [CONTENT]
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert fetch(source_of(url), tmp_path) == []


def test_a_broken_download_goes_on_and_never_has_the_final_name(server, tmp_path):
    handler, url = server
    handler.breaks = 1
    final = tmp_path / "THING" / "raw" / "file.bin"
    with pytest.raises(
        DataError, match=r"cannot be downloaded .* download by hand:\s+http\S+\s+as .*file\.bin"
    ):
        fetch(source_of(url), tmp_path)
    assert not final.exists()
    assert 0 < final.with_name("file.bin.partial").stat().st_size < len(CONTENT)
    fetch(source_of(url), tmp_path)
    assert final.read_bytes() == CONTENT
    assert handler.ranges == [None, f"bytes={len(CONTENT) // 2}-"]
    assert [path.name for path in final.parent.iterdir()] == ["file.bin"]


def test_a_partial_file_that_is_whole_already_is_taken(server, tmp_path):
    _, url = server
    partial = tmp_path / "THING" / "raw" / "file.bin.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(CONTENT)
    fetch(source_of(url), tmp_path)
    assert partial.with_suffix("").read_bytes() == CONTENT


def test_of_two_downloads_at_once_one_is_refused(server, tmp_path, monkeypatch):
    handler, url = server
    source, refused = source_of(url), []
    monkeypatch.setattr("fedproto.disk.files.time", Clock())

    class Another(Callback):
        def on_progress(self, *_) -> None:
            with pytest.raises(StoreError, match="THING is in use by another process") as found:
                fetch(source, tmp_path)
            refused.append(found)

    (path,) = fetch(source, tmp_path, Another())
    assert refused
    assert path.read_bytes() == CONTENT
    assert handler.ranges == [None]


def test_a_wrong_checksum_keeps_nothing(server, tmp_path):
    _, url = server
    source = source_of(url, "0" * 32)
    with pytest.raises(DataError, match="wrong checksum"):
        fetch(source, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert not source.is_present(tmp_path)


@pytest.mark.parametrize("md5", [None, ""])
def test_a_damaged_file_is_fetched_again(server, tmp_path, md5):
    """As every error about one says; without a checksum its archive shows that it is damaged."""
    _, url = server
    source = source_of(url, md5)
    if md5 == "":
        source.downloads = (base.Download(url, "THING/raw/file.zip"),)
    (final,) = fetch(source, tmp_path)
    final.write_bytes(b"cut short")
    assert fetch(source, tmp_path) == [final]
    assert final.read_bytes() == CONTENT


def test_without_a_network_the_files_and_their_places_are_named(tmp_path):
    source = source_of("http://127.0.0.1:9/file.bin")
    with pytest.raises(DataError) as caught:
        fetch(source, tmp_path)
    address, place = str(caught.value).splitlines()[1:]
    assert address == "  http://127.0.0.1:9/file.bin"
    assert place == f"    as {tmp_path / 'THING' / 'raw' / 'file.bin'}"
    assert not source.is_present(tmp_path), "a failed download leaves nothing that looks like data"


@pytest.mark.parametrize("folders", ["", "MNIST/raw"])
def test_absent_files_are_called_absent_and_fetch_is_named(tmp_path, capsys, folders):
    (tmp_path / folders).mkdir(parents=True, exist_ok=True)
    assert main(["data", "check", "mnist", f"--data-root={tmp_path}"]) == 2
    assert "fedproto data fetch mnist" in capsys.readouterr().err
    assert MNIST.status(tmp_path).startswith("no files in ")
    assert not MNIST.is_present(tmp_path)
    out = tmp_path / "run"
    assert main(["sweep", "mnist", f"--data-root={tmp_path}", f"--out={out}"]) == 2
    assert "fedproto data fetch mnist" in capsys.readouterr().err
    assert not out.exists()


def test_check_tells_wrong_from_unknown_and_damaged(tmp_path):
    write_mnist(tmp_path, np.arange(50) % 10)
    raw = tmp_path / "MNIST" / "raw"
    (raw / "extra.gz").write_bytes(gzip.compress(b"fine"))
    (raw / "short.gz").write_bytes(gzip.compress(b"not fine")[:-6])
    states = {file.path.name: file for file in check(MNIST, tmp_path)}
    assert "wrong checksum" in states["train-images-idx3-ubyte.gz"].state
    assert not states["train-images-idx3-ubyte.gz"].good
    assert states["extra.gz"].good
    assert not states["short.gz"].good
    assert "damaged or incomplete" in states["short.gz"].state


def test_the_command_ends_with_two_for_a_damaged_file(tmp_path, capsys):
    write_mnist(tmp_path, np.arange(50) % 10)
    assert main(["data", "check", "mnist", "--data-root", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: mnist: ")
    assert "is damaged" in line


def test_real_mnist_has_the_published_checksums(capsys):
    needs_real("MNIST")
    assert main(["data", "check", "mnist", "--data-root", str(data_root())]) == 0
    assert capsys.readouterr().out.count("official (checksum)") == 4


@pytest.mark.parametrize("command", ["fetch", "check"])
def test_a_data_set_without_files_is_named(command, capsys):
    assert main(["data", command, "synthetic"]) == 2
    assert "data set 'synthetic' has no files" in capsys.readouterr().err
