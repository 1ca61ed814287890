"""The report in a real browser: a screenshot, and what it shows. Without a browser these tests are skipped."""

from __future__ import annotations

import shutil
import struct
import subprocess
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.observe.runs import make_run
from tests.ranks import HANG_SECONDS
from unbounded.observe.report.page import Report, read_report
from unbounded.observe.report.serving import open_server

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
WIDTH, HEIGHT = 1280, 1300
FORWARD, STRIPE, LINE = (0x2F, 0x6F, 0x4F), (0xE3, 0xA8, 0x57), (0x1F, 0x5F, 0xA8)

pytestmark = pytest.mark.skipif(not BROWSER, reason="without a browser")


def browse(address: str, folder: Path, *flags: str) -> str:
    """What the browser prints; it may reach nothing but `address`."""
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb"),
        *(f"--window-size={WIDTH},{HEIGHT}", f"--user-data-dir={folder / 'profile'}"),
        *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", *flags, address),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_png(path: Path) -> NDArray[np.uint8]:
    """(rows, columns, 3) of a screenshot: 8 bits per channel, not interlaced."""
    content, at, data = path.read_bytes(), 8, b""
    width = height = channels = 0
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, _, colour = struct.unpack(">IIBB", body[:10])
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            data += body
        at += 12 + length
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    rows = np.zeros((height, width * channels), np.uint8)
    before = np.zeros(width * channels, np.uint8)
    for index, line in enumerate(lines):
        before = rows[index] = _unfilter(int(line[0]), line[1:], before, channels)
    return rows.reshape(height, width, channels)[:, :, :3]


def _unfilter(kind: int, line: NDArray[np.uint8], above: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line.reshape(-1, channels), axis=0, dtype=np.uint8).reshape(-1)
    if kind == 2:
        return line + above
    row, up = line.tolist(), above.tolist()  # plain numbers: many times faster to walk than an array
    for i in range(len(row)):
        left, corner = (row[i - channels], up[i - channels]) if i >= channels else (0, 0)
        row[i] = (row[i] + _predict(kind, left, up[i], corner)) & 255
    return np.array(row, np.uint8)


def _predict(kind: int, left: int, up: int, corner: int) -> int:
    if kind == 3:
        return (left + up) // 2
    guess = left + up - corner
    return min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]


def columns_of(picture: NDArray[np.uint8], colour: tuple[int, int, int], *, top: int = 0) -> NDArray[Any]:
    """The columns in which a colour occurs, in the rows from `top` on."""
    near = np.abs(picture[top:].astype(int) - np.array(colour)).max(axis=2) < 12
    return np.flatnonzero(near.any(axis=0))


def test_a_screenshot_shows_charts_bars_and_lanes_where_they_belong(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "report.html").write_text(read_report(run).page())
    shot = tmp_path / "shot.png"
    browse((run / "report.html").as_uri(), tmp_path, f"--screenshot={shot}")
    picture = read_png(shot)
    assert picture.shape == (HEIGHT, WIDTH, 3)
    lines = columns_of(picture, LINE)
    assert np.ptp(lines) > WIDTH // 2  # charts side by side, over the width of the page
    rows = np.flatnonzero((np.abs(picture.astype(int) - np.array(FORWARD)).max(axis=2) < 12).any(axis=1))
    assert 15 <= np.ptp(rows) <= 40  # one lane computes, and nothing else looks like it
    forward, backward = (columns_of(picture, colour, top=rows[0] - 2) for colour in (FORWARD, STRIPE))
    assert forward[0] < backward[0]
    gaps = np.flatnonzero(np.diff(forward) > 60)
    assert len(gaps) == 1  # two forward passes, a backward between them
    left, right = forward[gaps[0]], forward[gaps[0] + 1]
    assert np.sum((backward > left) & (backward < right)) > 0.5 * (right - left)
    assert backward[-1] > forward[-1]
    assert backward[-1] < WIDTH - 100  # the busy shares are on the right


def test_a_live_page_takes_up_what_happens_meanwhile(tmp_path: Path) -> None:
    asked: list[int] = []

    def read() -> Report:
        asked.append(1)
        return Report("live", steps=[{"step": len(asked), "loss": 1.0}])

    with open_server(read) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        shown = browse(address, tmp_path, "--virtual-time-budget=9000", "--dump-dom")
        server.shutdown()
    assert len(asked) > 2
    step = int(shown.partition("<span>step</span><b>")[2].partition("</b>")[0])
    assert step > 1  # no longer what the page came with
