"""Keep the first screen of pages of the site, on a phone and a desktop, and say which are wider than the window.

    PYTHONPATH=tests/instruments python -m programs.shots site/VERSION FOLDER

By hand, after `make docs`, to look at what a reader sees first.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from programs.chromium import Chromium

WIDTHS: Final = (1280, 400)
PAGES: Final = (
    "index",
    "explanation/proof",
    "explanation/protocol",
    "reference/fault-matrix",
    "how-to/operate",
)


def main() -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*", default=PAGES)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    wide = []
    with tempfile.TemporaryDirectory() as profile, Chromium(shutil.which("chromium") or "", Path(profile)) as browser:
        for page in chosen.pages:
            for width in WIDTHS:
                browser.open((chosen.site / f"{page}.html").absolute(), width, "light")
                browser.screenshot(chosen.folder / f"{page.replace('/', '-')}-{width}.png")
                if (found := browser.run("document.documentElement.scrollWidth")) > width:
                    wide.append(f"{page} is {found} px wide in a window of {width} px")
    sys.stdout.write("".join(f"{line}\n" for line in wide))
    return bool(wide)


if __name__ == "__main__":
    sys.exit(main())
