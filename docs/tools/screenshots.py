"""Pictures of the report page, of real runs: `make screenshots`.

    python docs/tools/screenshots.py docs/images             # those of the docs
    python docs/tools/screenshots.py --all build/screenshots # whole pages, for looking at

The archives of results/runs are unpacked, and six small runs on handwritten digits are trained
once. Whole pages are taken at 1440 and 390 pixels, light, dark and printed.
"""

from __future__ import annotations

import argparse
import base64
import io
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from browser import open_browser, set_size  # noqa: E402 - the tests' folder has it

WIDTH = 1200
# Of which runs, which section, under which view.
SECTIONS = {
    "report": ("synthetic", "", "#?base=FedAvg"),
    "report-curves": ("synthetic", "curves", "#?x=round"),
    "report-clients": ("digits", "clients", ""),
}


def make_runs(folder: Path) -> dict[str, Path]:
    """Pages about real runs, by name."""
    pages = {}
    for name in ("synthetic", "everything"):
        for archive in sorted((ROOT / "results" / "runs").glob("*.tar.*")):
            inside = folder / name / archive.name.partition(".")[0]
            if name in ("everything", inside.name) and not inside.exists():
                with tarfile.open(archive) as file:
                    file.extractall(inside, filter="data")
        pages[name] = _page(folder / name)
    digits = folder / "digits"
    asked = ["--set=measure.every=10", '--set=measure.what=["clients"]']
    _fedproto("sweep", "digits", f"--out={digits}", "--reuse", "--quiet", *asked)
    if not (digits / "fedavg" / "analysis").exists():
        _fedproto("analyse", str(digits), "--what=embedding", "--samples=400")
    pages["digits"] = _page(digits)
    return pages


def take(session: Any, page: Path, view: str, section: str) -> bytes:
    """A picture of a section, or of the top of the page."""
    set_size(session, WIDTH, 900)
    session.get("about:blank")
    session.get(page.as_uri() + view)
    time.sleep(0.5)  # what opens by itself is drawn after the page
    box = session.execute_script(
        "const box = document.getElementById(arguments[0] || 'answer').getBoundingClientRect();"
        "return [arguments[0] ? box.top + scrollY : 0, box.bottom + scrollY]",
        section,
    )
    return _captured(session, WIDTH, *box)


def whole(session: Any, page: Path, view: str, width: int) -> bytes:
    """A picture of a whole page."""
    set_size(session, width, 900, phone=width < 500)
    session.get("about:blank")
    session.get(page.as_uri() + view)
    height = session.execute_script("return document.documentElement.scrollHeight")
    return _captured(session, width, 0, min(16_000, height))


def printed(session: Any, page: Path) -> bytes:
    """The page on paper, as PDF."""
    set_size(session, 1440, 900)
    session.get(page.as_uri())
    options = {"printBackground": False, "preferCSSPageSize": True}
    return base64.b64decode(session.execute_cdp_cmd("Page.printToPDF", options)["data"])


def main() -> None:
    """Takes the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--all", action="store_true", help="whole pages in all sizes and colours")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "screenshots")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pages = make_runs(given.runs)
    with tempfile.TemporaryDirectory() as profile, open_browser(Path(profile)) as session:
        if not given.all:
            for name, (runs, section, view) in SECTIONS.items():
                picture = take(session, pages[runs], view, section)
                (given.out / f"{name}.png").write_bytes(_packed(picture))
            return
        for name, page in pages.items():
            for width in (1440, 390):
                for theme in ("light", "dark"):
                    file = given.out / f"{name}-{width}-{theme}.png"
                    file.write_bytes(whole(session, page, f"#?theme={theme}", width))
            (given.out / f"{name}-printed.pdf").write_bytes(printed(session, page))


def _page(folder: Path) -> Path:
    _fedproto("report", str(folder), f"--title={folder.name}")
    return folder / "report.html"


def _fedproto(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "fedproto", *arguments], check=True)  # noqa: S603 - ours


def _captured(session: Any, width: int, top: float, bottom: float) -> bytes:
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
    options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    return base64.b64decode(session.execute_cdp_cmd("Page.captureScreenshot", options)["data"])


def _packed(picture: bytes) -> bytes:
    """The same picture in fewer bytes, and not too tall."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.crop((0, 0, image.width, min(4000, image.height)))
    packed = io.BytesIO()
    image.save(packed, "PNG", optimize=True)
    return packed.getvalue()


if __name__ == "__main__":
    main()
