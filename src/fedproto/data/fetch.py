"""Official files: downloads that resume after an interruption, and checks."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, DataSource, Download
from fedproto.data.files import ARCHIVES, FileTree, open_tree
from fedproto.disk.files import PARTIAL, Folder, explained, open_plain, open_regular
from fedproto.errors import DataError

_CHUNK = 1 << 20
_TIMEOUT = 30


def fetch(source: type[DataSource], root: Path, callback: Callback | None = None) -> list[Path]:
    """Downloads the official files of a data set that are missing or damaged.

    An interrupted download is kept under a name ending in ``.partial`` and continues from
    there the next time. The final name appears only when the checksum is right.
    """
    if not source.downloads:
        raise DataError(f"data set '{DATASETS.name_of(source)}' has no files to download")
    found = check(source, root) if source.is_present(root) else ()
    bad = {file.path for file in found if not file.good}
    paths = {root / each.path: each for each in source.downloads}
    if not bad and all(path.exists() for path in paths):
        return []
    with Folder(root / source.folder).made():  # of two processes one waits, or is refused
        missing = [each for path, each in paths.items() if path in bad or not path.exists()]
        for download in missing:
            try:
                _download(download, root / download.path, callback or Callback())
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                left = missing[missing.index(download) :]
                files = "".join(f"\n  {each.url}\n    as {root / each.path}" for each in left)
                reason = getattr(error, "reason", error)
                raise DataError(
                    f"{download.url} cannot be downloaded ({reason}); try again, or download by"
                    f" hand:{files}"
                ) from None
    return [root / download.path for download in missing]


def _download(download: Download, path: Path, callback: Callback) -> None:
    partial = path.with_name(path.name + PARTIAL)
    done = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(download.url)  # noqa: S310 - addresses are ours
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310
            if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                done = 0
            length = answer.headers.get("Content-Length")
            total = done + int(length) if length else None
            path.parent.mkdir(parents=True, exist_ok=True)
            how = os.O_APPEND if done else os.O_TRUNC
            with open_plain(partial, os.O_WRONLY | os.O_CREAT | how) as file:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    callback.on_progress(path.name, done, total)
            if total is not None and done < total:
                raise urllib.error.URLError(
                    f"the connection ended after {done:,} of {total:,} bytes"
                )
    except urllib.error.HTTPError as error:
        # Nothing is left to send: the partial file is all of it, or not of this file at all.
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
    if download.md5 and (found := md5_of(partial)) != download.md5:
        partial.unlink()
        raise DataError(
            f"{download.url} has the wrong checksum ({found} instead of {download.md5});"
            f" nothing was kept"
        )
    partial.replace(path)


class FileState(NamedTuple):
    """The result of checking a file."""

    path: Path
    state: str
    good: bool


def check(source: type[DataSource], root: Path) -> Iterator[FileState]:
    """Checks every file of a data set: against its published checksum, or by reading all of it."""
    if not source.folder:
        raise DataError(f"data set '{DATASETS.name_of(source)}' has no files to check")
    if not source.is_present(root):
        raise DataError(f"there are no files in {root / source.folder}{source.how_to_get()}")
    published = {Path(each.path).name: each.md5 for each in source.downloads if each.md5}
    for path in open_tree(root / source.folder).sources.values():
        if path.name in published:
            found, right = md5_of(path), published[path.name]
            wrong = f"wrong checksum: {found} instead of {right}; fetch it again"
            state = "official (checksum)" if found == right else wrong
            yield FileState(path, state, good=found == right)
        elif path.name.endswith((*ARCHIVES, ".gz")):
            tree = FileTree(path.parent, {path.name: path})
            try:
                number = sum(1 for _ in tree.read_all(tree.locations))
            except DataError as error:
                yield FileState(path, str(error), good=False)
            else:
                state = f"readable (files: {number:,}); no published checksum for it"
                yield FileState(path, state, good=True)


def md5_of(path: Path) -> str:
    """A file's MD5 digest, the kind that the data sets' authors publish."""
    with explained(path, " cannot be read", "", DataError), open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
