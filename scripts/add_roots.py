"""Put the import roots of this repository on the path of the environment that runs this.

    python scripts/add_roots.py proto indexstore worker server client

An editable install alone is found last of all. In the directory that holds a clone by the name of
`openbook`, Python would take the clone itself for the package, and `openbook/client` for a part.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

NAME = "openbook-roots.pth"


def main() -> None:
    """Write the .pth file, one absolute path a line."""
    roots = [str(Path(root).resolve(strict=True)) for root in sys.argv[1:]]
    (Path(sysconfig.get_path("purelib")) / NAME).write_text("".join(f"{r}\n" for r in roots))


if __name__ == "__main__":
    main()
